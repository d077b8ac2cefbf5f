"""Drawn programs that read and change Python's objects, beside eager PyTorch; `make thorough` draws others."""

from __future__ import annotations

import pytest

from tests.fuzz import states

SEEDS = range(1, 31)


def test_drawn_programs() -> None:
    differing: list[str] = []
    for seed in SEEDS:
        found = states.judge(text := states.Drawn(seed).text(), "jit")
        if found.is_difference:
            differing.append(f"seed {seed}, call {found.call}: {found.kind}: {found.why}\n{states.shown(text)}")
    assert not differing, "\n".join(differing)


def test_a_lost_write_is_seen_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: a program appends to a list in its first call alone."""
    text = next(text for seed in SEEDS if ".append(" in (text := states.Drawn(seed).text()).split("def m0")[0])
    monkeypatch.setitem(states.WAYS, "jit", _once)
    found = states.judge(text, "jit")
    assert found.kind == "state" and found.call > 0
    smaller = states.shown(states.shrink(text, "jit"))
    assert smaller.count("\n") < states.shown(text).count("\n")


def _once(f: object) -> object:
    """Run a function in its first call, and give the same result again in later ones."""
    results: list[object] = []

    def call(x: object, a: object) -> object:
        if not results:
            assert callable(f)
            results.append(f(x, a))
        return results[0]

    return call
