"""The pair matrix: what must hold of two transforms, one after the other, in either order.

Some transforms keep values. Each of them commutes with every transform, to a tolerance. The other
three change what a trace takes and gives, so their laws are equations of calculus. Second
derivatives are symmetric; a batch of gradients is the gradient of a batch, summed where an input is
not batched.

Laws of pairs say nothing of random numbers, and, autocast's apart, nothing of float32. Autocast,
which otherwise rounds, is to float64 there: it changes every type that it changes and no number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch

from thunder_fn.interpreters import clean, jvp as forward, simplify, vmap as batching
from thunder_fn.interpreters.fold import fold_constants
from thunder_fn.interpreters.noops import drop_noops
from thunder_fn.ir.check import check
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.trace import TensorType, Trace
from thunder_fn.testing.drawn_programs import example_inputs
from thunder_fn.testing.laws.comparing import (
    Inputs,
    Law,
    LawBroken,
    Transform,
    Values,
    chosen,
    close,
    draws,
    is_inexact,
    is_tame,
    law_of,
    random_like,
    run,
    tolerance,
    wanted_inputs,
    wanted_outputs,
)
from thunder_fn.testing.laws.forward import directions, examples, stack
from thunder_fn.testing.laws.interpreters import (
    SIZE,
    InDims,
    batch,
    batchings,
    pull,
    push,
    whole_checkpoint,
    widened,
)
from thunder_fn.testing.laws.reverse import law_second_order_is_symmetric
from thunder_fn.testing.laws.unfolding import unfolded

KEEPERS: dict[str, Transform] = {
    "checkpoint": whole_checkpoint,
    "dce": simplify.dce,
    "cse": simplify.cse,
    "inline": simplify.inline,
    "drop_noops": drop_noops,
    "fold_constants": fold_constants,
    "simplify": clean.simplify,
    "unfold": unfolded,
}
"""Transforms that keep values. `unfold` writes structured ops out: what every other one makes of
them is judged by it.
"""

TRANSFORMS: dict[str, Transform] = {
    "vjp": pull,
    "jvp": push,
    "vmap": batch,
    "autocast": widened,
    **KEEPERS,
}
"""The transforms of the matrix."""


def floats(values: Sequence[object]) -> Inputs:
    """The floating and complex tensors among some values."""
    return tuple(value for value in values if isinstance(value, torch.Tensor) and is_inexact(value))


def is_comparable(trace: Trace) -> bool:
    """Test for a trace without random numbers and in float64."""
    return not draws(trace) and tolerance(trace) < 1e-6


# ---- a transform that keeps values, and any other ----


@law_of
def commute(keeper: Transform, trace: Trace, inputs: Inputs, other: Transform) -> bool:
    """``other(keeper(t)) == keeper(other(t)) == other(t)`` in values.

    A `LawBroken` has the trace `other(t)` as `plain`, and `other(keeper(t))` as `made` or
    `keeper(other(t))` as `changed`.
    """
    if not is_comparable(trace):
        return False
    plain, kept = once(other, trace), once(keeper, trace)
    if kept == trace and _leaves(keeper, plain):
        return True
    if not is_tame(values_of(trace, inputs)):
        return False
    arguments = arguments_of(plain, trace, inputs)
    want = floats(values_of(plain, arguments))
    for name, order, make in (
        ("made", "before", lambda: other(kept)),
        ("changed", "after", lambda: keeper(plain)),
    ):
        what, traces = f"with the transform {order} the other", {"trace": trace, "plain": plain}
        try:
            traces[name] = make()
            if traces[name] == plain:
                continue
            have = floats(run(traces[name], arguments))
        except Exception as error:
            raise LawBroken(f"{what}: {type(error).__name__}: {error}", **traces) from error
        close(have, want, tolerance(trace), what, None, **traces)
    return True


def _leaves(transform: Transform, trace: Trace) -> bool:
    """Test whether a transform leaves a trace as it is."""
    try:
        return transform(trace) == trace
    except Exception:  # noqa: BLE001 - the law says what is wrong
        return False


def arguments_of(made: Trace, trace: Trace, inputs: Inputs) -> Inputs:
    """Inputs for a trace made of another one: those of the other, where it takes them, too."""
    rest = example_inputs(made, 7)
    keeps_inputs = made.input_types[: len(inputs)] == trace.input_types
    return (*inputs, *rest[len(inputs) :]) if keeps_inputs else rest


def remembering(*made: Any) -> AbstractContextManager[None]:
    """Compute the transforms and values of one trace once for all laws that ask inside of this.

    A transform, a trace and what became of it may be known already.
    """
    known = {tuple(map(id, made[:2])): (made[:2], made[2])} if made else {}
    return setting(_known, known)


_known: ContextVar[dict[Any, tuple[Any, Any]] | None] = ContextVar("known", default=None)
"""Results of this trace, with the objects whose identities are the key."""


def once(transform: Transform, trace: Trace) -> Trace:
    """The trace that a transform makes, made once inside of `remembering`."""
    return _remembered(transform, trace, compute=lambda: transform(trace))


def values_of(trace: Trace, inputs: Inputs) -> Values:
    """The values of a trace, computed once inside of `remembering`."""
    return _remembered(run, trace, *inputs, compute=lambda: run(trace, inputs))


def _remembered(*objects: Any, compute: Callable[[], Any]) -> Any:
    known, key = _known.get(), tuple(map(id, objects))
    if known is None:
        return compute()
    if key not in known:
        known[key] = (objects, compute())
    return known[key][1]


# ---- autocast, and any other ----


@law_of
def commute_with_autocast(other: Transform, trace: Trace, inputs: Inputs) -> None:
    """``other(autocast(t)) == autocast(other(t)) == other(t)`` to float32's precision, autocast
    being to float64.
    """
    if draws(trace) or not is_tame(values_of(trace, inputs)):
        return
    plain = once(other, trace)
    arguments = arguments_of(plain, trace, inputs)
    want = doubles(run(plain, arguments))
    for made, order in ((other(once(widened, trace)), "before"), (widened(plain), "after")):
        have = doubles(run(made, in_types_of(made, arguments)))
        close(have, want, 2e-3, f"with autocast {order} the other", trace=trace, made=made)


def in_types_of(trace: Trace, values: Inputs) -> Inputs:
    """The values in the dtypes that a trace takes."""
    types = [type for type in trace.input_types if isinstance(type, TensorType)]
    return tuple(value.to(type.dtype) for value, type in zip(values, types, strict=True))


def doubles(values: Values) -> Inputs:
    """The floating and complex tensors, in double precision."""
    return tuple(x.to(torch.promote_types(x.dtype, torch.float64)) for x in floats(values))


# ---- derivatives of derivatives ----


def law_jvp_of_jvp_is_symmetric(trace: Trace, inputs: Inputs) -> None:
    """The second derivative along u and then v is the one along v and then u."""
    if not is_comparable(trace):
        return
    twice, count = push(push(trace)), sum(wanted_outputs(trace))
    u, v = directions(inputs, 3), directions(inputs, 4)
    zeros = tuple(map(torch.zeros_like, u))
    of_uv, of_vu = (run(twice, (*inputs, *a, *b, *zeros)) for a, b in ((u, v), (v, u)))
    if count and is_tame((*of_uv, *of_vu)):
        have, want = of_uv[-count:], of_vu[-count:]
        close(
            have,
            want,
            10 * tolerance(trace),
            "the second derivative along u and v",
            trace=trace,
            made=twice,
        )


def law_jvp_of_vjp_is_vjp_of_jvp(trace: Trace, inputs: Inputs) -> None:
    """The derivative of ``vjp(ct)`` along u is the gradient of ``<ct, jvp(u)>``, whose gradient
    for u is ``vjp(ct)``.
    """
    wanted, count = wanted_inputs(trace), len(trace.outputs)
    if not is_comparable(trace):
        return
    if not any(wanted) or not any(wanted_outputs(trace)):
        return
    u, cotangents = directions(inputs, 3), random_like(trace)
    pulled, pushed = pull(trace), push(trace)
    moving = (*wanted, *(False for _ in cotangents))
    left = run(forward.jvp(pulled, moving), (*inputs, *cotangents, *u))
    zeros = tuple(map(torch.zeros_like, cotangents))
    right = run(pull(pushed), (*inputs, *u, *zeros, *cotangents))[len(pushed.outputs) :]
    if is_tame((*left, *right)):
        gradients, second = left[count : count + len(u)], left[-len(u) :]
        what = "gradients of <ct, jvp(u)> for the inputs, then for u,"
        close(
            right,
            (*second, *gradients),
            10 * tolerance(trace),
            what,
            trace=trace,
            vjp_of_jvp=pull(pushed),
        )


# ---- batches of derivatives ----


def spread(values: Values, dims: InDims, size: int) -> Values:
    """Values with a leading batch dim, those that are not batched repeated."""
    return tuple(
        value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
        for value, dim in zip(values, dims, strict=True)
    )


def law_vmap_of_vmap_has_axes_in_any_order(trace: Trace, inputs: Inputs) -> None:
    """Batching over a and then over b gives what batching over b and then over a does, the batch
    dims exchanged.
    """
    if not is_comparable(trace):
        return
    first: InDims = (0,) * len(trace.inputs)
    second: InDims = (1,) * len(trace.inputs)
    inner, inner_dims = batching.vmap(trace, first, SIZE)
    rows = [examples(trace, example_inputs(trace, seed), first) for seed in (0, 5, 6)]
    values = tuple(map(torch.stack, zip(*(stack(row, first) for row in rows), strict=True)))
    found: list[Inputs] = []
    for dims in (first, second):
        outer, outer_dims = batching.vmap(inner, dims, SIZE)
        whole = spread(run(outer, values), outer_dims, SIZE)
        both = tuple(
            x.unsqueeze(1) if dim is None else x for x, dim in zip(whole, inner_dims, strict=True)
        )
        both = tuple(x.expand(SIZE, SIZE, *x.shape[2:]) for x in both)
        found.append(both if dims == first else tuple(x.transpose(0, 1) for x in both))
    if is_tame((*found[0], *found[1])):
        close(
            floats(found[0]),
            floats(found[1]),
            tolerance(trace),
            "vmap of vmap",
            trace=trace,
            made=inner,
        )


def law_vmap_of_jvp_is_jvp_of_vmap(trace: Trace, inputs: Inputs) -> None:
    """Tangents of a batch are a batch of tangents."""
    if not is_comparable(trace):
        return
    for in_dims in batchings(trace):
        dims = (*in_dims, *chosen(in_dims, wanted_inputs(trace)))
        one = push(trace)
        batched_one, one_dims = batching.vmap(one, dims, SIZE)
        whole, out_dims = batching.vmap(trace, in_dims, SIZE)
        two = push(whole)
        arguments = (*stack(examples(trace, inputs, in_dims), in_dims),)
        arguments = (*arguments, *directions(arguments))
        left = spread(run(batched_one, arguments), one_dims, SIZE)
        two_dims = (*out_dims, *chosen(out_dims, wanted_outputs(trace)))
        right = spread(run(two, arguments), two_dims, SIZE)
        if is_tame((*left, *right)):
            close(
                floats(left),
                floats(right),
                tolerance(trace),
                f"in_dims {in_dims}",
                trace=trace,
                jvp_of_vmap=two,
            )


def law_vmap_of_vjp_is_vjp_of_vmap(trace: Trace, inputs: Inputs) -> None:
    """Gradients of a batch are a batch of gradients, summed over the batch for an input that is
    not batched.
    """
    if not is_comparable(trace):
        return
    wanted, count = wanted_inputs(trace), len(trace.outputs)
    for in_dims in batchings(trace):
        whole, out_dims = batching.vmap(trace, in_dims, SIZE)
        given = tuple(
            torch.stack(column)
            for column in zip(*(random_like(trace, s) for s in range(SIZE)), strict=True)
        )
        values = stack(examples(trace, inputs, in_dims), in_dims)
        one, one_dims = batching.vmap(pull(trace), (*in_dims, *(0 for _ in given)), SIZE)
        each = spread(run(one, (*values, *given)), one_dims, SIZE)[count:]
        dims = chosen(in_dims, wanted)
        left = tuple(
            g.sum(0) if dim is None else g.movedim(0, dim)
            for g, dim in zip(each, dims, strict=True)
        )
        flags = chosen(out_dims, wanted_outputs(trace))
        cotangents = tuple(
            ct.sum(0) if dim is None else ct for ct, dim in zip(given, flags, strict=True)
        )
        right = run(pull(whole), (*values, *cotangents))[count:]
        if is_tame(
            (*each, *run(whole, values))
        ):  # what one example does not take may not be NaN in the others
            close(
                right,
                left,
                tolerance(trace),
                f"gradients with in_dims {in_dims}",
                trace=trace,
                vjp_of_vmap=whole,
            )


# ---- three in a row ----


def law_of_three(names: tuple[str, str, str]) -> Law:
    """``a(b(c(t)))`` is the same without those of the three that keep values, and with every loop
    of t written out.

    Autocast, which is to float64, keeps them to float32's precision.
    """
    rounds = "autocast" in names

    def law(trace: Trace, inputs: Inputs) -> None:
        if draws(trace) or not (rounds or is_comparable(trace)) or not is_tame(run(trace, inputs)):
            return
        made, plain = trace, unfolded(trace)
        for name in reversed(names):
            made = TRANSFORMS[name](made)
            plain = plain if name in KEEPERS or name == "autocast" else TRANSFORMS[name](plain)
        check(made)
        arguments = example_inputs(plain, 7)
        values = doubles if rounds else floats
        rtol = 100 * tolerance(trace)
        have, want = run(made, in_types_of(made, arguments)), run(plain, arguments)
        close(
            values(have),
            values(want),
            max(rtol, 2e-3) if rounds else rtol,
            " of ".join(names),
            trace=trace,
            made=made,
        )

    return law


# ---- the matrix ----


def _movers() -> dict[tuple[str, str], Law]:
    laws: dict[tuple[str, str], Law] = {
        ("vjp", "vjp"): law_second_order_is_symmetric,
        ("jvp", "jvp"): law_jvp_of_jvp_is_symmetric,
        ("vmap", "vmap"): law_vmap_of_vmap_has_axes_in_any_order,
        ("jvp", "vjp"): law_jvp_of_vjp_is_vjp_of_jvp,
        ("vmap", "jvp"): law_vmap_of_jvp_is_jvp_of_vmap,
        ("vmap", "vjp"): law_vmap_of_vjp_is_vjp_of_vmap,
    }
    return laws | {(b, a): law for (a, b), law in laws.items()}


PAIRS: dict[tuple[str, str], Law] = _movers()
"""The law of each pair. One law speaks of both orders, so the matrix is symmetric."""
for _other in TRANSFORMS:
    PAIRS["autocast", _other] = PAIRS[_other, "autocast"] = commute_with_autocast(
        TRANSFORMS[_other]
    )
for _keeper in KEEPERS:
    for _other in TRANSFORMS.keys() - {"autocast"}:
        PAIRS[_keeper, _other] = PAIRS[_other, _keeper] = commute(
            KEEPERS[_keeper], TRANSFORMS[_other]
        )
