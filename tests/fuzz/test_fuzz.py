"""Drawn programs beside eager PyTorch, the same in each run; and all that were found before."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import thunder_fn as tfn
from tests.fuzz import differential
from tests.fuzz.__main__ import is_still, normalised
from tests.fuzz.differential import judge
from tests.fuzz.explained import OPEN, is_open, reason
from tests.fuzz.generate import generate
from tests.fuzz.shrink import shrink

SEEDS = range(1, 151)
CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.py"))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_what_was_found_before(path: Path) -> None:
    """`EXPECTED` says what a program should come to; without it thunder_fn agrees with eager PyTorch."""
    text = path.read_text()
    found = judge(text)
    match = re.search(r"EXPECTED = .(\w+)", text)
    expected = match[1] if match else "same"
    assert found.kind == expected, f"{found.kind}: {found.why}\n{found.where}"


def test_drawn_programs() -> None:
    """The programs of these seeds agree, as they did; `make thorough` draws others, each in a process that may crash."""
    differing = []
    for seed in SEEDS:
        text = generate(seed)
        if text is None or is_open(text):
            continue
        outcome = judge(text)
        if outcome.is_difference and not reason(text, outcome):
            differing.append(f"python -m tests.fuzz --seed {seed} --programs 1: {outcome.kind}: {outcome.why}\n{text}")
    assert not differing, "\n".join(differing)


def test_a_wrong_program_is_seen_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: sine is cosine in traces."""
    import torch

    text = PLANTED
    assert judge(text).kind == "same"
    true = differential.ours

    def wrong(plan: dict[str, object]) -> object:
        T, wrap = true(plan)
        return T, lambda f: wrap(lambda *args: [value + 1e-3 for value in f(*args)])

    monkeypatch.setattr(differential, "ours", wrong)
    found = judge(text)
    assert found.kind == "value of result", found
    name = normalised(found)
    smaller = shrink(text, lambda one: is_still(one, name), budget=100)
    assert "cos" not in smaller and len(smaller) < len(text)
    assert torch.is_grad_enabled()


def test_an_error_of_our_own_trace_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that builds a wrong equation is a defect, and branches that disagree are the program's."""
    from thunder_fn.ir import check

    branches = "        v2 = T.cond(a0.sum() > 0, lambda x: x, lambda x: x.float(), (a0,))\n"
    assert judge(PLANTED.replace("        v2 = a0.sin()\n", branches)).kind == "refused"
    monkeypatch.setattr(check, "_difference", lambda *_: "a planted difference")
    monkeypatch.setattr(
        differential, "ours", lambda plan: (None, lambda f: lambda *args: check.check(tfn.trace(f, *args)))
    )
    assert judge(PLANTED).kind == "error"


def test_open_classes_have_a_name() -> None:
    assert all(one.what and one.text for one in OPEN)


PLANTED = """\
import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}

def inputs(n):
    a0 = torch.randn(n, dtype=torch.float64)
    return (a0,)

def program(T):
    def f(a0):
        v1 = a0.cos()
        v2 = a0.sin()
        return [v1, v2]
    return f, []
"""
