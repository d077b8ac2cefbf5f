"""Pages of the inspector in Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from thunder_fn.inspect import Page


@pytest.fixture(scope="module")
def tabs(chromium: Any) -> Iterator[dict[str, list[Any]]]:
    """Tabs that no test shows anything in, by their options: a new one takes as long as three pages."""
    free: dict[str, list[Any]] = {}
    yield free
    for tab in chain.from_iterable(free.values()):
        tab.context.close()


@pytest.fixture
def opened(chromium: Any, tmp_path: Path, tabs: dict[str, list[Any]]) -> Iterator[Callable[..., Any]]:
    """`opened(page)` shows a page; at the end nothing may have gone wrong in it, and nothing was asked of a network."""
    shown: list[tuple[str, Any]] = []
    wrong: list[str] = []
    listeners: dict[str, Callable[[Any], None]] = {
        "pageerror": lambda error: wrong.append(str(error)),
        "console": lambda message: wrong.append(message.text) if message.type == "error" else None,
        "request": lambda request: None if request.url.startswith("file:") else wrong.append(request.url),
    }

    def show(page: Page | str, fragment: str = "", **options: Any) -> Any:
        path = tmp_path / "page.html"
        path.write_text(page if isinstance(page, str) else page.html)
        # Playwright waits by `eval`, which the page's policy forbids.
        options = {"viewport": {"width": 1440, "height": 900}, "bypass_csp": True, **options}
        free = tabs.setdefault(repr(options), [])
        tab = free.pop() if free else chromium.new_context(**options).new_page()
        shown.append((repr(options), tab))
        tab.set_default_timeout(15_000)
        for event, heard in listeners.items():
            tab.on(event, heard)
        tab.goto(path.as_uri() + fragment)
        tab.wait_for_selector(".row")
        return tab

    yield show
    for options, tab in shown:
        for event, heard in listeners.items():
            tab.remove_listener(event, heard)
        _empty(tab)
        tabs[options].append(tab)
    assert not wrong


def _empty(tab: Any) -> None:
    """Leave a tab as a new one, whatever a test did to it."""
    for other in tab.context.pages:
        if other is not tab:
            other.close()
    tab.evaluate("localStorage.clear()")
    tab.context.unroute_all()
    tab.emulate_media(media="null")
    tab.goto("about:blank")
