"""The inductor executor agrees with evaluate on random traces, all of which are compiled together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from thunder_fn.executors import Program, inductor, lower
from thunder_fn.executors.torchinductor import compiling
from thunder_fn.executors.torchinductor.loop_plan import is_loop
from thunder_fn.executors.torchinductor.programs import Staged, jobs_of
from thunder_fn.ir.memory import find_aliases
from thunder_fn.ir.trace import Trace, Var
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


def unusual(x: torch.Tensor, number: int) -> torch.Tensor:
    """The tensor, or one with some equal elements, in a layout that compilers seldom meet."""
    match number % 6:
        case 0 if x.dim() > 1:  # as its transpose lies, behind something else
            return torch.cat([x.new_ones(3), x.transpose(0, -1).reshape(-1)])[3:].view(*_swapped(x)).transpose(0, -1)
        case 1 if x.dim():  # every other element of something larger
            return torch.stack([x, x], -1)[..., 1]
        case 2 if x.dim():  # all along the first dim are one
            return x[:1].clone().expand(x.shape) if x.shape[0] else x
        case 3 if x.dim() == 1 and x.numel() > 1:  # a dim of stride zero and size one, taken out again
            return x.as_strided((1, *x.shape), (0, *x.stride()))[0]
        case 4 if x.dim() == 4:
            return x.contiguous(memory_format=torch.channels_last)
        case 5 if x.dim() == 2 and min(x.shape) > 1:  # rows that overlap
            return torch.cat([x[:, 0], x[-1, 1:]]).as_strided(x.shape, (1, 1))
        case _:
            return x.clone()


def _swapped(x: torch.Tensor) -> list[int]:
    return [x.shape[-1], *x.shape[1:-1], x.shape[0]]


def memory(values: Sequence[Any]) -> list[list[bool]]:
    """The tensors that share memory."""
    storages = [
        value.untyped_storage() if isinstance(value, torch.Tensor) and value.numel() else None for value in values
    ]
    return [[a is not None and b is not None and a.data_ptr() == b.data_ptr() for a in storages] for b in storages]


def test_arguments_in_unusual_layouts() -> None:
    """Law: values, strides, and who shares memory with whom are as in `evaluate`."""
    strategy = cases(families=("unary", "binary", "view", "reduction", "matmul"), max_steps=8, dtypes=(torch.float32,))
    programs = list[tuple[Case, list[torch.Tensor], Program]]()
    for number, case in enumerate(drawn(strategy, 24)):
        given = [
            unusual(x, number + place) if isinstance(x, torch.Tensor) else x for place, x in enumerate(case.inputs)
        ]
        try:
            run(case.trace, given)
        except RuntimeError:  # a view that this layout does not have
            continue
        programs.append((case, given, lower(case.trace, executors=[inductor()], below_autograd=True)))
    jobs = [job for _, given, program in programs if (found := staged(program.run)) for job in jobs_of(found, given)]
    results = compiling.compile_jobs(jobs)
    assert len(results) > 8 and [one for one in results.values() if isinstance(one, compiling.Failed)] == []
    for case, given, program in programs:
        expected = run(case.trace, given)
        for _ in range(2):
            outputs = seeded(lambda: program(*given))
            torch.testing.assert_close(outputs, expected, rtol=2e-3, atol=1e-3, equal_nan=True)
            assert memory([*given, *outputs]) == memory([*given, *expected]), program
            for output, right in zip(outputs, expected, strict=True):
                if isinstance(right, torch.Tensor) and right.numel() > 1:
                    assert output.stride() == right.stride(), program


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
