"""The inductor executor agrees with evaluate on random traces, all of which are compiled together."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from thunder_fn.executors import inductor, lower
from thunder_fn.executors.compiled import compiling
from thunder_fn.executors.compiled.loop_plan import is_loop
from thunder_fn.executors.compiled.programs import Staged, jobs_of
from thunder_fn.testing.laws.comparing import run, seeded
from thunder_fn.testing.strategies import Case, cases

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


def test_random_traces() -> None:
    traces = [case for strategy, count in KINDS for case in drawn(strategy, count)]
    programs = [(case, lower(case.trace, executors=[inductor()], below_autograd=True)) for case in traces]
    jobs = [job for case, program in programs if (found := staged(program.run)) for job in jobs_of(found, case.inputs)]
    results = compiling.compile_jobs(jobs)
    loops = [job for job in results if is_loop(job.region)]
    assert len(results) > 16 and len(loops) > 4
    assert [result for result in results.values() if isinstance(result, compiling.Failed)] == []
    for case, program in programs:
        expected = run(case.trace, case.inputs)
        outputs = seeded(lambda: program(*(x.clone() for x in case.inputs)))
        for output, right in zip(outputs, expected, strict=True):
            torch.testing.assert_close(
                output, right, rtol=2e-3, atol=1e-3, equal_nan=True, msg=lambda text: f"{text}\n{program}"
            )
            if isinstance(right, torch.Tensor) and right.numel() > 1:
                assert output.stride() == right.stride(), program
