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


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error a terminal that nobody waits for, in the test itself: pytest puts its own back before."""
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


def test_a_bar_says_what_is_done_and_how_much(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = terminal(monkeypatch)
    with progress("generating", 2) as found:
        wait_for(screen, "0/2")
        with progress("inside", 3):  # not shown
            pass
        found.advance("building")
        for text in ("generating", "1/2", "building"):
            wait_for(screen, text)
        print("a result")
    assert "inside" not in screen.getvalue() and capsys.readouterr().out == "a result\n"


def test_items_are_yielded_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    assert list(tracked(range(3), "counting")) == [0, 1, 2]
    assert list(tracked(iter("ab"), "reading")) == ["a", "b"]


def test_without_rich_a_terminal_gets_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    monkeypatch.setattr(shown.importlib.util, "find_spec", lambda name: None)
    with progress("compiling", 2):
        wait_for(screen, "thunder_fn: compiling ...\n")


def test_nothing_is_shown_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    found = shown.Progress("compiling", 2)
    assert shown._started(found) is None and pipe.getvalue() == ""
