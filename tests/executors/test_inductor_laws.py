"""The inductor executor agrees with evaluate on random traces, all of which are compiled together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from thunder_fn.executors import Program, inductor, lower
from thunder_fn.executors.compiled import compiling
from thunder_fn.executors.compiled.loop_plan import is_loop
from thunder_fn.executors.compiled.programs import Staged, jobs_of
from thunder_fn.executors.reuse import find_aliases
from thunder_fn.testing.laws.comparing import run, seeded
from thunder_fn.testing.strategies import Case, cases
from thunder_fn.trace import Trace, Var

KINDS = (
    *(
        (cases(), 8),
        (cases(families=("unary", "binary", "view", "reduction"), max_steps=8, dtypes=(torch.float32,)), 6),
    ),
    (cases(families=("unary", "binary", "loop"), max_steps=6, max_inputs=2, depth=1, dtypes=(torch.float32,)), 32),
)
"""Strategies, and how many traces of each."""


def drawn(strategy: SearchStrategy[Case], count: int) -> list[Case]:
    """Traces, the same in every run: what takes long is the compiler, so nothing is shrunk."""
    found: list[Case] = []

    @seed(0)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def staged(run: Any) -> Staged | None:
    """The staged program behind a function that switches autocast off."""
    while not isinstance(run, Staged) and getattr(run, "__closure__", None):
        (run,) = (cell.cell_contents for cell in run.__closure__ if callable(cell.cell_contents))
    return run if isinstance(run, Staged) else None


def is_memory_as_said(trace: Trace, program: Program, inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    """Two outputs share memory, or one and an input that was not given away, only if the trace's equations say so."""
    buffers = find_aliases(trace).buffers
    given = {var.index for var in program.reuse.targets(program.trace)}
    places = [(var.index, value) for var, value in zip(trace.inputs, inputs, strict=True) if var.index not in given]
    found = [(atom.index, value) for atom, value in zip(trace.outputs, outputs, strict=True) if isinstance(atom, Var)]
    storages = [
        (buffers[index], value.untyped_storage().data_ptr())
        for index, value in (*places, *found)
        if isinstance(value, torch.Tensor) and value.numel()
    ]
    return all(mine & its or storage != other for mine, storage in storages for its, other in storages)


def test_random_traces() -> None:
    traces = [case for strategy, count in KINDS for case in drawn(strategy, count)]
    programs = [  # every other one may write over its inputs
        (case, lower(case.trace, range(number % 2 * len(case.inputs)), executors=[inductor()], below_autograd=True))
        for number, case in enumerate(traces)
    ]
    jobs = [job for case, program in programs if (found := staged(program.run)) for job in jobs_of(found, case.inputs)]
    results = compiling.compile_jobs(jobs)
    loops = [job for job in results if is_loop(job.region)]
    assert len(results) > 16 and len(loops) > 4 and sum(bool(job.donated) for job in results) > 4
    assert [result for result in results.values() if isinstance(result, compiling.Failed)] == []
    for case, program in programs:
        expected = run(case.trace, case.inputs)
        given = [x.clone() for x in case.inputs]
        outputs = seeded(lambda: program(*given))
        assert is_memory_as_said(case.trace, program, given, outputs), program
        for output, right in zip(outputs, expected, strict=True):
            torch.testing.assert_close(
                output, right, rtol=2e-3, atol=1e-3, equal_nan=True, msg=lambda text: f"{text}\n{program}"
            )
            if isinstance(right, torch.Tensor) and right.numel() > 1:
                assert output.stride() == right.stride(), program
