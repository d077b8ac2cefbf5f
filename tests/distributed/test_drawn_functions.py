"""The law that N ranks equal one, of functions that Hypothesis draws: any ops, parameters of any type. No processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings, strategies as st

import thunder_fn as tfn
from thunder_fn.distributed.ranks import evaluate_ranks
from thunder_fn.ir.trace import TensorType
from thunder_fn.parameters import simulated
from thunder_fn.testing.drawn_programs import FAMILIES, random_tensor
from thunder_fn.testing.laws.comparing import is_inexact, is_tame, largest
from thunder_fn.testing.strategies import Case, cases

DTYPES = (torch.float64, torch.complex128, torch.float32, torch.int64, torch.bool)
WAYS: tuple[Callable[[Any, Any], Any], ...] = (
    tfn.fsdp,
    lambda f, group: tfn.fsdp(f, group, zero=2, bucket=None),
    lambda f, group: tfn.fsdp(f, group, bucket=40, prefetch=1),
    lambda f, group: tfn.fsdp(f, group, prefetch=1),
    lambda f, group: tfn.ddp(f, group, bucket=40),
)


@given(
    case=cases(max_steps=8, depth=1, families=[*(name for name in FAMILIES if name != "random")], dtypes=DTYPES),
    way=st.sampled_from(WAYS),
    size=st.integers(1, 4),
    count=st.integers(1, 3),
)
@settings(max_examples=8, deadline=None)
def test_n_ranks_equal_one(case: Case, way: Callable[[Any, Any], Any], size: int, count: int) -> None:
    """The first inputs are parameters; of the others each rank has its own."""
    trace, drawn = case.trace, torch.Generator().manual_seed(1)
    params = {f"p{at}": value for at, value in enumerate(case.inputs[:count])}
    types = [var.type for var in trace.inputs[count:] if isinstance(var.type, TensorType)]
    batches = [[random_tensor(type, drawn) for type in types] for _ in range(size)]
    trained = sorted(name for name, value in params.items() if is_inexact(value))

    def loss(params: Any, *batch: torch.Tensor) -> torch.Tensor:
        results = tfn.evaluate(trace, [*(params[name] for name in sorted(params)), *batch])
        tensors = [value for value in results if isinstance(value, torch.Tensor)]
        return sum(
            (x.abs().square().sum().double() for x in tensors if is_inexact(x)), torch.zeros((), dtype=torch.double)
        )

    def gradient(f: Any) -> Callable[..., Any]:
        def run(params: Any, *batch: torch.Tensor) -> Any:
            own, put = {name: params[name] for name in trained}, getattr(params, "replaced", None)
            return tfn.grad_and_value(lambda own: f(put(own) if put else {**params, **own}, *batch))(own)

        return run

    each = [gradient(loss)(params, *batch) for batch in batches]
    if not params or not is_tame([x for own, _ in each for x in own.values()]):
        return
    functions = [way(loss, group) for group in simulated(size)]
    shards = [f.prepare(params) for f in functions]
    program = tfn.trace(gradient(functions[0]), shards[0], *batches[0])
    tfn.check(program)
    found = evaluate_ranks(program, [[*own.values(), *xs] for own, xs in zip(shards, batches, strict=True)])
    mean = {name: torch.stack([own[name] for own, _ in each]).mean(0) for name in trained}
    for f, (*own, value), (_, expected) in zip(functions, found, each, strict=True):
        torch.testing.assert_close(value, expected)
        shares = f.prepare({**params, **mean})
        for name, one in zip(trained, own, strict=True):
            torch.testing.assert_close(one, shares[name], rtol=1e-5, atol=1e-5 * max(1.0, largest(shares[name])))
