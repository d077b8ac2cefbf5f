"""Unwritten memory decides no result, whatever is made of a program that writes what it allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thunder_fn.executors import lower
from thunder_fn.ir.trace import Trace
from thunder_fn.ir.walking import rewritten
from thunder_fn.testing import Case
from thunder_fn.testing.growing import ALLOCATED
from thunder_fn.testing.laws.comparing import run, same_bits
from thunder_fn.testing.laws.memory import allocates, filled, is_deterministic, stays_deterministic
from thunder_fn.testing.laws.pairs import TRANSFORMS
from thunder_fn.testing.mutations import counterexample_in

CASES = [Case(program) for program in ALLOCATED]


def test_the_programs_allocate_and_write() -> None:
    assert all(allocates(case.trace) and is_deterministic(case.trace, case.inputs) for case in CASES)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_read_written_memory_alone(name: str) -> None:
    law = stays_deterministic(TRANSFORMS[name])
    for case in CASES:
        law(case.trace, case.inputs)


def test_a_program_reads_written_memory_alone() -> None:
    for case in CASES:
        want = run(filled(case.trace, 3), case.inputs)
        with torch.random.fork_rng(devices=[]):
            assert all(map(same_bits, lower(filled(case.trace, -5))(*case.inputs), want))


def without_writes(trace: Trace) -> Trace:
    """Wrong: a fill is dropped, where its operand is a variable."""
    from thunder_fn.ir import put

    def step(builder: Any, equation: Any, operands: Any) -> Any:
        return operands if equation.op.name == "aten.fill.Scalar" else put(builder, equation, operands)

    return rewritten(trace, step)


def test_a_dropped_write_is_found() -> None:
    law = stays_deterministic(without_writes)
    assert "memory that nobody has written is read" in str(counterexample_in(law, CASES[0]))
