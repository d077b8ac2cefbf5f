"""Regions for a GPU: equal updates of several parameters are one region, and so are small steps of a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import thunder_fn as tfn
from thunder_fn.capture import pytree
from thunder_fn.errors import RegionWarning
from thunder_fn.executors import claim, inductor
from thunder_fn.executors.idle import warn_of_idle
from thunder_fn.executors.in_front import in_front
from thunder_fn.executors.lists import with_lists
from thunder_fn.executors.torch_executor import lower
from thunder_fn.extend import FusionExecutor
from thunder_fn.ir.trace import Equation, TensorType, Trace, Var
from thunder_fn.torch_internals import inductor as inductor_internals


class Launching(FusionExecutor):
    """Has regions side by side as one, as on a GPU."""

    def joins(self, region: Trace) -> bool:
        return True

    def unrolls(self, leaves: Sequence[Equation]) -> int:
        return 12 // len(leaves)


def executor() -> Launching:
    made = Launching("launching", fuse=lambda region: lambda *xs: tfn.evaluate(region, xs), min_shared=2)
    for op in (torch.mul, torch.add, torch.sin, torch.cos, torch.neg):
        made.register_supported(op)
    return made


@tfn.composite
def update(p: Tensor, g: Tensor) -> Tensor:
    return p + (g * 0.1).sin()


def updated(params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    return [update(p, g) for p, g in zip(params, grads, strict=True)]


def chained(params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Each update reads what another one gave; the sums between them are in no region."""
    once = updated(params, grads)
    return updated(once, [one.cumsum(0) for one in once])


def crossed(params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """The second three depend on the first three, in another order."""
    first = updated(params, grads)
    return updated([*reversed(first)], [one.cumsum(0) for one in first]) + first


SHAPES = ((2,), (2,), (3, 2), (3, 2), (4,), (4,))


@pytest.mark.parametrize(("f", "count"), [(updated, 1), (chained, 2), (crossed, 2)])
def test_updates_of_all_shapes_are_one_region(f: Any, count: int) -> None:
    torch.manual_seed(0)
    params, grads = [torch.randn(s) for s in SHAPES], [torch.randn(s) for s in SHAPES]
    if f is crossed:
        params, grads = params[:2] * 3, grads[:2] * 3
    claimed = claim(tfn.trace(f, params, grads), [executor()])
    tfn.check(claimed.trace)
    found = [one for one in claimed.trace.equations if one.op.name.startswith("launching::")]
    assert len(found) == count
    assert sum(len(one.body.equations) for one in found) == 3 * len(params) * count
    results = tfn.evaluate(claimed.trace, [*params, *grads])
    assert all(map(torch.equal, results, f(params, grads)))
    assert all(map(torch.equal, tfn.jit(f, executors=[executor()])(params, grads), f(params, grads)))


def test_two_updates_stay_two_regions() -> None:
    xs = [torch.ones(2), torch.ones(2)]
    claimed = claim(tfn.trace(updated, xs, xs), [executor()])
    assert sum(one.op.name.startswith("launching::") for one in claimed.trace.equations) == 2


def test_an_executor_that_does_not_ask_for_it_has_them_apart() -> None:
    xs = [torch.ones(2)] * 4
    own = executor()
    own.joins = lambda region: False  # type: ignore[method-assign]
    claimed = claim(tfn.trace(updated, xs, xs), [own])
    assert sum(one.op.name.startswith("launching::") for one in claimed.trace.equations) == 4


@tfn.composite
def moved(c: Tensor, x: Tensor) -> Tensor:
    return c * 0.5 + x.sin()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("length", "left"), [(1, [1]), (4, []), (8, [2]), (11, [2])])
def test_small_steps_are_regions_of_several(length: int, left: list[int], reverse: bool) -> None:
    """A step has three ops, so four steps are a block; three that are left over are a region behind the loop."""
    f = lambda c, xs: tfn.scan(lambda c, x: ((new := moved(c, x)), new), c, xs, reverse=reverse)
    c, xs = torch.randn(2), torch.randn(length, 2)
    claimed = claim(tfn.trace(f, c, xs), [executor()])
    tfn.check(claimed.trace)
    assert [one.literals["length"] for one in claimed.trace.equations if one.op.name == "scan"] == left
    for found in (tfn.jit(f, executors=[executor()])(c, xs), tfn.evaluate(claimed.trace, [c, xs])):
        assert all(map(torch.equal, found, f(c, xs)))


def test_steps_that_an_executor_does_not_take_stay_steps() -> None:
    f = lambda c, xs: tfn.scan(lambda c, x: ((new := moved(c, x).cumsum(0)), new), c, xs)
    claimed = claim(tfn.trace(f, torch.ones(2), torch.ones(8, 2)), [executor()])
    assert [one.literals["length"] for one in claimed.trace.equations if one.op.name == "scan"] == [8]


# ---- ops over lists ----


def on_device(value: Any, device: str, least: int = 1) -> Any:
    """A trace, or a part of one, with all tensors of one dim or more on another device."""
    go = partial(on_device, device=device, least=least)
    match value:
        case Trace():
            parts = ("inputs", "equations", "outputs")
            return replace(value, **{name: tuple(map(go, getattr(value, name))) for name in parts})
        case Equation():
            kwargs = tuple((key, go(arg)) for key, arg in value.kwargs)
            parts = {name: go(getattr(value, name)) for name in ("args", "outputs", "bodies")}
            return replace(value, kwargs=kwargs, **parts)
        case Var(type=TensorType(shape=shape)):
            is_moved = len(shape) >= least
            return replace(value, type=replace(value.type, device=torch.device(device))) if is_moved else value
        case tuple():
            return tuple(map(go, value))
        case _:
            return value


def over_lists(trace: Trace) -> Trace:
    """The trace as on a GPU, for the CPU."""
    return on_device(with_lists(on_device(trace, "cuda:0"), lambda equation: True), "cpu")


def stepped(name: str, sizes: Any = ((3,), (3, 2), (2, 2), (4,), ())) -> tuple[Any, Any]:
    """A step of an optimizer, and its arguments: parameters of two dtypes and one of no dim."""
    torch.manual_seed(0)
    params = [torch.randn(size, dtype=dtype) for size in sizes for dtype in (torch.float32, torch.bfloat16)]
    adam = tfn.functional_optimizer(getattr(torch.optim, name), lr=0.1)
    grads, state = list(map(torch.randn_like, params)), adam.init(params)
    return adam.update, (params, grads, state)


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax"])
def test_updates_run_over_lists(name: str, donated: bool) -> None:
    update, args = stepped(name)
    plain = tfn.trace(update, *args)
    listed = over_lists(plain)
    tfn.check(listed)
    xs = [leaf for leaf in pytree.flatten(args)[0] if isinstance(leaf, Tensor)]
    wanted, before = tfn.evaluate(plain, xs), [x.clone() for x in xs]
    assert all(map(torch.equal, tfn.evaluate(listed, xs), wanted))
    program = lower(listed, tuple(range(len(xs))) if donated else (), below_autograd=True)
    found = program(*xs)
    assert all(map(torch.equal, found, wanted))
    assert donated or all(map(torch.equal, xs, before))
    ops = [one.op.name for one in program.trace.equations if one.outputs[0].type.shape]
    lists = sum(name.startswith("aten._foreach_") for name in ops)
    alone = sum(not name.startswith(("aten._foreach_", "aten.detach")) for name in ops)
    assert lists > 0 and alone == 0, ops
    if donated:
        memory = {x.data_ptr() for x in xs}
        assert sum(value.data_ptr() in memory for value in found) >= len(args[0])


def test_lists_do_not_reorder() -> None:
    """Updates that read each other's results, and numbers that differ, stay apart."""
    params = [torch.randn(3, 2) for _ in range(4)]
    f = lambda ps: [update(ps[0], ps[1]), *map(update, ps[1:3], ps[2:])]
    in_a_row = lambda ps: [ps := [update(ps[0], ps[1]), *ps[1:]] for _ in range(4)][-1]
    for g, count in ((f, 1), (in_a_row, 0)):
        listed = over_lists(tfn.trace(g, params))
        tfn.check(listed)
        assert sum("of" in one.op.name for one in listed.equations) == count
        assert all(map(torch.equal, tfn.evaluate(listed, params), g(params)))


def test_a_list_whose_tensors_are_read_elsewhere_is_not_overwritten() -> None:
    """The first of one pair is the second of another."""
    xs = [torch.randn(3, 2) for _ in range(3)]
    swapped = tfn.composite(lambda p, q: p * q)
    f = lambda xs: [swapped(xs[0], xs[1]), swapped(xs[1], xs[2]), swapped(xs[2], xs[0])]
    listed = over_lists(tfn.trace(f, xs))
    wanted = f(xs)
    assert all(map(torch.equal, lower(listed, (0, 1, 2), below_autograd=True)(*xs), wanted))


# ---- numbers in front ----


@pytest.mark.parametrize("name", ["AdamW", "Adamax", "NAdam", "RMSprop"])
def test_numbers_of_the_cpu_are_computed_in_front(name: str) -> None:
    """A step count, which a recording would repeat, and all that follows from it alone."""
    update, args = stepped(name, sizes=((3,), (3, 2), (4,)))
    plain = tfn.trace(update, *args)
    xs = [leaf for leaf in pytree.flatten(args)[0] if isinstance(leaf, Tensor)]
    parts = in_front(on_device(plain, "cuda:0"))
    assert parts is not None
    tfn.check(parts.first)
    tfn.check(parts.rest)
    assert all(var.type.device.type == "cuda" for var in parts.rest.inputs)
    rest = on_device(parts.rest, "cpu", least=0)
    run = replace(parts, device=torch.device("cpu")).run(
        lambda *ys: tfn.evaluate(parts.first, ys), lambda *ys: tfn.evaluate(rest, ys)
    )
    for found, value in zip(run(*xs), tfn.evaluate(plain, xs), strict=True):
        rtol = 1e-2 if value.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(found, value, rtol=rtol, atol=1e-7)


def test_what_the_rest_computes_on_the_cpu_stays() -> None:
    count, x = torch.ones(()), torch.ones(3)
    f, g = (lambda count, x: x * (count + 1)), (lambda count, x: (x * (count + 1), torch.zeros(2)))
    assert in_front(on_device(tfn.trace(f, count, x), "cuda:0")) is not None
    assert in_front(on_device(tfn.trace(g, count, x), "cuda:0")) is None
    assert in_front(tfn.trace(f, count, x)) is None


def test_a_device_without_a_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_internals, "compiles_for", lambda device: device == "cpu")
    trace = on_device(tfn.trace(lambda x: (x * 2).sin(), torch.ones(3)), "cuda:0")
    executor = inductor()
    claimed = claim(trace, [executor])
    assert not any("::" in one.op.name for one in claimed.trace.equations)
    with pytest.warns(RegionWarning, match=r"^inductor: takes nothing of .*\n.*no compiler here \(`pip install triton"):
        warn_of_idle([executor], claimed, None)
