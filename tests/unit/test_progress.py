"""Progress of long work: a bar where somebody looks, and nothing elsewhere."""

from __future__ import annotations

import io
import sys
import time

import pytest

from thunder_fn import progress as shown
from thunder_fn.progress import progress, tracked


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    """Standard error is a terminal, and nobody is patient."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(shown, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    return screen


def wait_for(screen: Terminal, text: str) -> None:
    for _ in range(10_000):
        if text in screen.getvalue():
            return
        time.sleep(0.001)
    raise AssertionError(screen.getvalue())


def test_a_bar_says_what_is_done_and_how_much(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("generating", 2) as found:
        wait_for(terminal, "0/2")
        with progress("inside", 3):  # not shown
            pass
        found.advance("building")
        assert (
            "generating" in terminal.getvalue() and "1/2" in terminal.getvalue() and "building" in terminal.getvalue()
        )
        print("a result")
    assert "inside" not in terminal.getvalue() and capsys.readouterr().out == "a result\n"


def test_items_are_yielded_as_they_are(terminal: Terminal) -> None:
    assert list(tracked(range(3), "counting")) == [0, 1, 2]
    assert list(tracked(iter("ab"), "reading")) == ["a", "b"]


def test_without_rich_a_terminal_gets_a_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown.importlib.util, "find_spec", lambda name: None)
    with progress("compiling", 2):
        wait_for(terminal, "thunder_fn: compiling ...\n")


def test_nothing_is_shown_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    found = shown.Progress("compiling", 2)
    assert shown._started(found) is None and pipe.getvalue() == ""
