"""Memory that programs give to regions: whatever a region does with it, nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import thunder_fn as tfn
from tests.executors.test_inductor_laws import drawn
from tests.unit.small_traces import f32, same_bits
from tests.unit.test_torch_executor import SEEDS, random_trace
from thunder_fn.errors import VerificationError
from thunder_fn.executors import FusionExecutor, lower, reuse
from thunder_fn.executors.base import RunFunction
from thunder_fn.executors.torchinductor.parts import join
from thunder_fn.executors.torchinductor.region_calls import Region
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir import memory, ops
from thunder_fn.ir.trace import Equation, Trace
from thunder_fn.testing.laws.comparing import run, seeded
from thunder_fn.testing.strategies import cases


class Greedy:
    """A region that uses all that it is given: results lie there where they fit, and what is left is spoiled."""

    def __init__(self, region: Trace, places: tuple[int, ...], used: list[int]) -> None:
        self.region, self.places, self.used = region, places, used

    def donating(self, places: tuple[int, ...]) -> Greedy:
        return Greedy(self.region, places, self.used)

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        results = list(evaluate(self.region, inputs))
        left = [inputs[place] for place in self.places]
        self.used.append(len(left))
        storages = [one.untyped_storage().data_ptr() for one in (*inputs, *results) if isinstance(one, torch.Tensor)]
        for number, result in enumerate(results):
            if not isinstance(result, torch.Tensor) or storages.count(result.untyped_storage().data_ptr()) > 1:
                continue
            layout = result.shape, result.stride(), result.dtype
            home = next((one for one in left if (one.shape, one.stride(), one.dtype) == layout), None)
            if home is not None:
                left = [one for one in left if one is not home]
                results[number] = home.detach().copy_(result)
        for one in left:
            one.detach().fill_(float("nan") if one.is_floating_point() else 1)
        return tuple(results)


class GreedyExecutor(FusionExecutor):
    """Takes every op that computes on tensors, those with some names aside, so that there are several regions."""

    def __init__(self, *refused: str) -> None:
        super().__init__("greedy", numerics="bitwise", min_size=1, allocates=True)
        self.refused, self.used = refused, list[int]()

    def supports(self, equation: Equation) -> str | None:
        is_fine = equation.op.name.startswith("aten.") and not ops.is_random(equation.op)
        return None if is_fine and equation.op.name.split(".")[1] not in self.refused else "not here"

    def fuse(self, region: Trace) -> RunFunction:
        return Greedy(region, (), self.used)


def executors() -> list[GreedyExecutor]:
    """Executors that leave out ops of one kind each, so that regions end in other places."""
    return [GreedyExecutor("exp", "t", "sub"), GreedyExecutor("sin", "select", "add"), GreedyExecutor("mul", "reshape")]


def wrong_seeds(*, donated: bool = False, writes: bool = False) -> list[int]:
    """The seeds of random programs whose results are not those of `evaluate`, or that change what is not theirs."""
    wrong = list[int]()
    chosen = executors()
    for seed in SEEDS:
        trace, inputs = random_trace(seed)
        if writes and trace.output_types[-1] != f32(3, 3):
            continue
        expected = evaluate(trace, [x.clone() for x in inputs])
        constants = [constant.tensor for constant in trace.constants]
        before = [tensor.clone() for tensor in (*inputs[writes:], *constants)]
        program = lower(
            trace,
            range(writes, len(inputs)) if donated else (),
            (0,) if writes else (),
            executors=[chosen[seed % len(chosen)]],
            below_autograd=True,
        )
        first, *others = inputs
        given = [first.clone() if donated or writes else first, *(x.clone() if donated else x for x in others)]
        try:
            found = program(*given)
        except (RuntimeError, VerificationError):  # the latter with THUNDER_FN_CHECK=1
            wrong.append(seed)
            continue
        if writes and found[-1] is not given[0]:
            given[0].copy_(found[-1])
        after = (*inputs[writes:], *constants)
        if not all(map(same_bits, expected, found)) or not all(map(same_bits, before, after)):
            wrong.append(seed)
    assert wrong or all(sum(map(bool, executor.used)) > 10 for executor in chosen)
    return wrong


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("writes", [False, True])
def test_random_programs_agree_whatever_regions_do_with_what_they_are_given(donated: bool, writes: bool) -> None:
    assert not wrong_seeds(donated=donated, writes=writes)


def test_loops_agree_too() -> None:
    """Each step gives its regions the carries that only the loop sees."""
    greedy = GreedyExecutor("sin", "exp", "select")
    strategy = cases(families=("unary", "binary", "view", "loop"), max_steps=6, depth=1, dtypes=(torch.float32,))
    for case in drawn(strategy, 60):
        program = lower(case.trace, executors=[greedy], below_autograd=True)
        found = seeded(lambda: program(*(x.clone() for x in case.inputs)))
        assert all(map(same_bits, run(case.trace, case.inputs), found)), program
    assert sum(map(bool, greedy.used)) > 8


def blind(find: Callable[..., memory.Aliases]) -> Callable[..., memory.Aliases]:
    """Views share no memory."""

    def found(*args: Any) -> memory.Aliases:
        aliases = find(*args)
        return replace(aliases, buffers=tuple(frozenset((index,)) for index in range(len(aliases.buffers))))

    return found


def forgetful(find: Callable[[Trace], list[int]]) -> Callable[[Trace], list[int]]:
    """Outputs are no uses."""
    return lambda trace: [-1 if last == len(trace.equations) else last for last in find(trace)]


def trusting(find: Callable[..., list[frozenset[int]]]) -> Callable[..., list[frozenset[int]]]:
    """No result of a region lies in an input."""

    def found(equation: Equation, *args: Any) -> list[frozenset[int]]:
        return [frozenset((var.index,)) for var in equation.outputs]

    return found


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [(reuse, "find_aliases", blind), (reuse, "last_uses", forgetful), (memory, "_buffers_of_results", trusting)],
)
def test_planted_bugs_are_caught(where: Any, name: str, bug: Callable[[Any], Any]) -> None:
    with mock.patch.object(where, name, bug(getattr(where, name))):
        assert wrong_seeds()


def test_parts_of_a_region_are_given_what_no_later_part_reads() -> None:
    """A gradient that all updates read is given to the last one, their own parameters to each."""

    def updates(gradient: torch.Tensor, *params: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(((param * 2).sin() + gradient).exp() - param for param in params)

    args = [torch.randn(4) for _ in range(6)]
    region = Region(tfn.trace(updates, *args)).donating(tuple(range(6)))
    jobs = region.jobs(region.layout_of(args))
    greedy = {part: Greedy(part.trace, job.donated, []) for part, job in jobs.items()}
    assert sorted(len(job.donated) for job in jobs.values()) == [1, 1, 1, 1, 2]
    found = join(region.closed, region.parts, greedy)(*(x.clone() for x in args))
    assert all(map(same_bits, evaluate(region.trace, args), found))


def test_nobody_writes_over_what_travels() -> None:
    """A gather reads its operand until it is waited for. The bug: its result shares no memory with the operand."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sent = x.exp()
        whole = torch.ops._c10d_functional.all_gather_into_tensor(sent, 2, "simulated")
        return sent.sin(), torch.ops._c10d_functional.wait_tensor(whole)

    trace = tfn.trace(f, torch.ones(4))
    assert "'s memory" not in str(lower(trace))
    with mock.patch.object(memory, "may_alias", memory.is_alias):
        assert "'s memory" in str(lower(trace))
