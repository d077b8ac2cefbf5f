"""The mode for tests in which memory is spoiled: what it shows, and that nothing else changes."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import thunder_fn as tfn
from tests.unit.small_traces import same_bits
from tests.unit.test_torch_executor import SEEDS, random_trace
from thunder_fn.errors import VerificationError
from thunder_fn.executors import lower, reuse, spoiling
from thunder_fn.interpreters.evaluate import evaluate

ALLOCATING = "buf = empty_strided_cpu((2, 3), (3, 1), torch.float32)"


@pytest.fixture(autouse=True)
def _mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(spoiling.SWITCH, "1")


def region(*lines: str, places: tuple[int, ...] = (), results: Any = ()) -> Callable[..., Any]:
    """A compiled function of these lines, guarded."""
    context: dict[str, Any] = {"torch": torch, "empty_strided_cpu": None}
    exec("def region(x):\n    " + "\n    ".join(lines), context)
    run = context["region"]
    assert isinstance(run, types.FunctionType)
    return spoiling.guarded(run, places, ((3, 1),), results)


def test_what_compiled_code_does_to_memory() -> None:
    x = torch.ones(2, 3)
    (found,) = region(ALLOCATING, "return (buf,)")(x)
    assert found.isnan().all() and found.stride() == (3, 1)
    (found,) = region("buf = torch.empty((2, 3), dtype=torch.int64, device='cpu')", "return (buf,)")(x)
    assert (found == spoiling.MAGIC).all()
    with pytest.raises(VerificationError, match=r"wrote outside of a buffer of torch.float32"):
        region(ALLOCATING, "buf.as_strided((7,), (1,)).fill_(0)", "return (buf,)")(x)
    with pytest.raises(VerificationError, match=r"is given a tensor with strides \(1, 2\) at place 0, where \(3, 1\)"):
        region("return (x,)")(torch.ones(3, 2).t())
    with pytest.raises(VerificationError, match=r"gives a tensor with strides \(1, 2\)"):
        region("return (x.t().contiguous().t(),)", results=((3, 1),))(x)
    assert region("return (x + 1,)", places=(0,))(x)[0].eq(2).all() and x.isnan().all()


def test_programs_repeat() -> None:
    trace = tfn.trace(lambda x: x.sin() + 1, torch.ones(3))
    program, count = lower(trace), iter(range(9))
    assert torch.equal(program(torch.ones(3))[0], torch.ones(3).sin() + 1)
    changing = spoiling.repeated(lambda x: (x + next(count),), trace, ())
    with pytest.raises(VerificationError, match=r"output 0 of the program .* changes from run to run"):
        changing(torch.ones(3))
    x = torch.ones(3)
    assert lower(tfn.trace(torch.sum, x), (0,))(x)[0] == 3 and x.isnan().all()


def test_random_programs_are_as_ever_and_a_planted_bug_is_caught() -> None:
    """The bug: views share no memory, so what a view still shows is overwritten."""

    def wrong() -> int:
        count = 0
        for seed in SEEDS[:60]:
            trace, inputs = random_trace(seed)
            expected = evaluate(trace, [x.clone() for x in inputs])
            try:
                found = lower(trace, range(len(inputs)), below_autograd=True)(*(x.clone() for x in inputs))
            except (VerificationError, RuntimeError):
                count += 1
                continue
            count += not all(map(same_bits, expected, found))
        return count

    assert wrong() == 0
    original = reuse.find_aliases
    with mock.patch.object(reuse, "find_aliases", lambda *args: _blind(original(*args))):
        assert wrong()


def _blind(aliases: Any) -> Any:
    return replace(aliases, buffers=tuple(frozenset((index,)) for index in range(len(aliases.buffers))))
