"""Pages of the inspector in Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from thunder_fn.inspect import Page


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`opened(page)` shows a page; at the end nothing may have gone wrong in it, and nothing was asked of a network."""
    contexts: list[Any] = []
    wrong: list[str] = []

    def show(page: Page | str, fragment: str = "", **options: Any) -> Any:
        path = tmp_path / "page.html"
        path.write_text(page if isinstance(page, str) else page.html)
        # Playwright waits by `eval`, which the page's policy forbids.
        options = {"viewport": {"width": 1440, "height": 900}, "bypass_csp": True, **options}
        contexts.append(chromium.new_context(**options))
        tab = contexts[-1].new_page()
        tab.set_default_timeout(15_000)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        tab.on("request", lambda request: None if request.url.startswith("file:") else wrong.append(request.url))
        tab.goto(path.as_uri() + fragment)
        tab.wait_for_selector(".row")
        return tab

    yield show
    for context in contexts:
        context.close()
    assert not wrong
