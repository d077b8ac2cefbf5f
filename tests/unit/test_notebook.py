"""Values as the last line of a notebook's cell."""

from __future__ import annotations

import html
import io
import re
import sys
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.inspect import command
from thunder_fn.ir.notebook import as_html, highlighted
from thunder_fn.parameters import simulated

HOSTILE = "v1 = \"</pre><script>alert(1)</script>\" # <img src=x onerror=alert(1)> & f32[<b>]\n'\"#<'(\\'"


def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).sum()


ARGS = (torch.ones(3, 4), torch.ones(2, 3))


def jitted_once(f: Any) -> Any:
    jitted = tfn.jit(f)
    jitted(*ARGS)
    return jitted


def misses(jitted: Any) -> Any:
    jitted(*ARGS)
    jitted(ARGS[0].double(), ARGS[1].double())
    return tfn.explain_misses(jitted)


SHOWN = {
    "trace": lambda: tfn.trace(tfn.grad(f), *ARGS),
    "program": lambda: tfn.last_traces(jitted_once(f))[-1],
    "claims": lambda: tfn.explain_claims(tfn.jit(f), *ARGS),
    "cost": lambda: tfn.inspect.cost(f, *ARGS),
    "memory": lambda: tfn.inspect.memory(f, *ARGS),
    "diff": lambda: tfn.inspect.diff(tfn.trace(f, *ARGS), tfn.trace(tfn.grad(f), *ARGS)),
    "rule": lambda: tfn.inspect.explain_rule(torch.ops.aten.tanh.default, torch.ones(2)),
    "residuals": lambda: tfn.inspect.residuals(f, *ARGS),
    "saved": lambda: tfn.saved_residuals(f, *ARGS),
    "misses": lambda: misses(tfn.jit(f)),
    "chain": lambda: tfn.inspect.chain(f, *ARGS),
    "plan": lambda: tfn.plan(f, ARGS, world=1),
    "schedule": lambda: tfn.pipeline(f, simulated(2)[0], stages=2, micro=3).schedule,
}


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page))


@pytest.mark.parametrize("kind", SHOWN)
def test_a_notebook_shows_the_text(kind: str) -> None:
    value = SHOWN[kind]()
    assert text_of(value._repr_html_()) == str(value)


def test_a_trace_folds_by_module_and_has_types_and_lines() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
    page = tfn.trace(lambda x: model(x), torch.ones(2, 3))._repr_html_()
    assert page.count("<details open><summary") == 4  # Sequential, Linear, linear, Tanh
    assert page.count('<span title="f32[2, 4]">v3</span>') > 1
    assert f'<a href="vscode://file/{__file__}:' in page and "test_notebook.py" in page
    long = tfn.trace(lambda x: torch.nn.Sequential(*[model[1]] * 70)(x), torch.ones(3))._repr_html_()
    assert "<details><summary" in long and "<details open>" not in long


def test_names_of_users_stay_text() -> None:
    tags = set(re.findall(r"<(\w+)", highlighted(HOSTILE)))
    assert tags == {"span"} and text_of(highlighted(HOSTILE)) == HOSTILE


def test_a_long_text_is_folded_under_its_first_line() -> None:
    page = as_html("<b>\n" * 100)
    assert page.startswith("<details><summary><code>&lt;b&gt;</code></summary><pre")


COLOURS = """() => [...document.querySelectorAll("pre, pre [style*=color]")].map(one => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.fillStyle = getComputedStyle(one).color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
})"""


def luminance(colour: list[int]) -> float:
    linear = [part / 3294.6 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("text", "ground"), [("#1f1f1f", "#fff"), ("#e0e0e0", "#111"), ("#ccc", "#1e1e1e")])
def test_pieces_have_contrast_on_light_and_dark_pages(text: str, ground: str, chromium: Any) -> None:
    """That of WCAG AA, in the colours of JupyterLab and VS Code. Columns stand under each other there."""
    shown = "".join(SHOWN[kind]()._repr_html_() for kind in ("trace", "diff"))
    style = f"pre {{ font-family: serif; white-space: pre-wrap }} body {{ color: {text}; background: {ground} }}"
    tab = chromium.new_page()
    try:
        tab.set_content(f"<style>{style}</style>{shown}")
        below = luminance([int(ground.removeprefix("#").ljust(6, ground[1])[at : at + 2], 16) for at in (0, 2, 4)])
        colours = tab.evaluate(COLOURS)
        assert len({tuple(colour) for colour in colours}) > 5
        for colour in colours:
            low, high = sorted((below, luminance(colour)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, colour
        assert "monospace" in tab.evaluate("getComputedStyle(document.querySelector('pre')).fontFamily")
        assert tab.evaluate("getComputedStyle(document.querySelector('pre')).whiteSpace") == "pre"
    finally:
        tab.close()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_colour", [False, True])
def test_a_terminal_has_colours_unless_it_wants_none(no_colour: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_colour:
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    command._print(SHOWN["diff"]())
    assert bool(re.search(r"\x1b\[(\d;)*[34]\d", terminal.getvalue())) != no_colour


@pytest.mark.parametrize("kind", [kind for kind in SHOWN if kind not in ("saved", "misses")])  # those are lists
def test_repr_is_a_short_line(kind: str) -> None:
    assert re.fullmatch(r"<.{1,140}>", repr(SHOWN[kind]()))


def test_a_repr_has_the_first_line_and_no_equations() -> None:
    assert repr(tfn.inspect.cost(f, *ARGS)) == "<CostReport: cost of f: 64 FLOP, 204 B moved ...>"
    assert repr(tfn.trace(torch.sin, torch.ones(2))) == "<Trace sin: 1 input, 1 equation, 1 output>"
    both = tfn.trace(lambda x, y: ((x + y).sin(), x), torch.ones(2), torch.ones(2))
    assert repr(both) == "<Trace program: 2 inputs, 2 equations, 2 outputs>"
