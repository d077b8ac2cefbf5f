"""scan and map for users: from PyTorch callables to the scan equation, or plainly in
Python.

Outside a trace they run the user's function step by step. Inside one the function is captured once,
whatever the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import Captured, current, pytree
from thunder_fn.capture.replaced.lookasides import divert
from thunder_fn.capture.scopes import user_source
from thunder_fn.errors import TraceTypeError, is_int, kind_of, spelled
from thunder_fn.ir.rules import divided, interleaved
from thunder_fn.ir.trace import Trace, Type, as_dim, cut, type_of_value
from thunder_fn.structured.checkpoint import checkpoint as checkpointed
from thunder_fn.structured.scan import scan_evaluate_rule
from thunder_fn.structured.shared.bodies import (
    Bodies,
    agreed,
    capture_bodies,
    check_takes,
    described_function,
    is_kept_open,
    next_carry,
    own_memory,
    standing_for,
    tensor_type,
    types_of_tensors,
)
from thunder_fn.structured.shared.scan_parts import Loop

Tensor = torch.Tensor
R = TypeVar("R")
Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


@spelled(f="combine_fn", axis="dim", _split_transpose="Leave it out.")
@internals.with_twin(internals.dynamo_scan)
def scan(  # noqa: PLR0913 - options, by keyword
    combine_fn: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X = None,  # pyright: ignore[reportInvalidTypeVarUse, reportArgumentType]
    *,
    dim: int = 0,
    reverse: bool = False,
    length: int | None = None,
    unroll: int | bool = 1,
    checkpoint: str | None = None,
) -> tuple[Carry, Y]:
    """Loop over the slices of xs with a carry: `carry, ys[t] = combine_fn(carry, xs[t])`.

    Law: equals the Python loop that collects the ys, under every transform.

    Args:
        combine_fn: takes the carry and a slice, returns the next carry and a slice of ys. The carry
            keeps its structure and types. It may close over tensors; ys may be None.
        init: the first carry, a pytree. A number in it that a step changes is a scalar tensor from
            there on in a trace.
        xs: a pytree of tensors with equal sizes in dim; None loops `length` times with None.
            Without any tensor and without a length, as `[]`, there is no step, and the ys are `[]`.
        dim: where xs are sliced and ys stacked.
        reverse: from the last slice to the first; ys[t] still belongs to xs[t].
        length: the number of steps; needed where xs has no tensor.
        unroll: how many steps an executor writes out in one turn of the loop; True or the number of
            steps leaves no loop.
        checkpoint: "sqrt" keeps the carry of about every sqrt(length)-th step for the backward,
            which computes the steps between anew. That is the memory of 2 sqrt(length) steps for
            one more forward.

    Returns:
        The last carry and the stacked ys.

    Raises:
        TraceTypeError: the carry changes its structure or types, sizes differ, or a y is no tensor.

    Example:
        >>> scan(lambda total, x: (total + x, total), torch.tensor(0), torch.arange(4))
        (tensor(6), tensor([0, 0, 1, 3]))

    Source: torch's scan and jax.lax.scan.
    """
    if not callable(combine_fn):
        what = f"scan: combine_fn must be a function, not {kind_of(combine_fn)}"
        raise TraceTypeError(what, fix="Write `scan(step, carry, xs)`.")
    check_takes("scan", "the carry and a slice of xs", 2, combine_fn)
    if xs is not None and length is None and not pytree.flatten(xs)[0]:
        return own_memory(init), cast("Y", [])
    size, dim = number_of_steps(xs, dim, length, unroll)
    if is_kept_open(size):
        return _by_pytorch(combine_fn, init, xs, size, dim, bool(reverse))
    if unroll is True or unroll > 1:
        size = int(size)  # a loop that is written out has a number of steps
    unroll = max(size, 1) if unroll is True else int(unroll)
    if checkpoint not in (None, "sqrt"):
        raise TraceTypeError(f"scan: checkpoint is None or 'sqrt', given {checkpoint!r}")
    if checkpoint is not None and size > 3:
        return _run_in_blocks(combine_fn, init, xs, dim, bool(reverse), size, unroll)

    @standing_for(combine_fn)
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        new, y = _pair(combine_fn, combine_fn(carry, x))
        return next_carry(carry, new), y

    if current() is None and size:
        return _run(step, init, xs, dim, reverse, size)
    moved = _sliced_first(xs, dim)
    carry, ys = _record(step, init, moved, reverse, size, unroll)
    return carry, _stacked_along(dim, ys)


def _by_pytorch(
    step: Callable[[Any, Any], Any], init: Any, xs: Any, size: Any, dim: int, reverse: bool
) -> Any:
    """PyTorch's scan, which keeps the number of steps open. Before 2.13 it stacks along dim 0."""
    if xs is None:
        one, xs = step, torch.empty(size)
        step = lambda carry, _: one(carry, None)
    moved = _sliced_first(xs, dim)
    carry, ys = internals.pytorchs("scan", step, init, moved, reverse=reverse)
    return carry, _stacked_along(dim, ys)


def _sliced_first(xs: Any, dim: int) -> Any:
    """Tensors with the dim along which they are sliced as their first."""
    return pytree.tree_map(lambda x: x.movedim(dim, 0) if dim else x, xs)


def _stacked_along(dim: int, ys: Any) -> Any:
    """Results that are stacked along their first dim, with it at dim."""
    return pytree.tree_map(lambda y: y.movedim(0, dim) if 0 < dim < y.ndim else y, ys)


def number_of_steps(
    xs: Any, dim: Any, length: int | None = None, unroll: int | bool = 1, op: str = "scan"
) -> tuple[int, int]:
    """The number of steps, and dim counted from the front."""
    if unroll is not True and not is_int(unroll, 1):
        raise TraceTypeError(f"{op}: unroll is True or a positive int, given {unroll!r}")
    if not is_int(dim):
        raise TraceTypeError(f"{op}: dim is an int, given {dim!r}")
    leaves = pytree.flatten(xs)[0]
    named = list(zip(pytree.paths(xs, "xs"), leaves, strict=True))
    for path, leaf in named:
        if not isinstance(leaf, Tensor):
            raise TraceTypeError(
                f"{op}: {path} is of type {type(leaf).__name__}, and only tensors can be sliced"
            )
        check_dense(op, path, leaf)
        if not -leaf.ndim <= dim < leaf.ndim:
            raise TraceTypeError(f"{op}: {path} is {type_of_value(leaf)} and has no dim {dim}")
    dim = dim % leaves[0].ndim if leaves else max(dim, 0)
    sizes = [(path, leaf.shape[dim]) for path, leaf in named] + (
        [("length", length)] if length is not None else []
    )
    if not sizes:
        what = (
            "there are no xs, so length is needed"
            if op == "scan"
            else "xs has no tensor to be sliced"
        )
        raise TraceTypeError(f"{op}: {what}", source=user_source())
    if any(size != sizes[0][1] for _, size in sizes):
        listed = "\n".join(f"  {path}: {size}" for path, size in sizes)
        raise TraceTypeError(
            f"{op}: the number of steps must be the same, but\n{listed}", source=user_source()
        )
    return sizes[0][1], dim


def check_dense(op: str, path: str, leaf: Tensor) -> None:
    """Raise for a sparse tensor, which has no slices."""
    if leaf.layout is not torch.strided:
        what = f"{op}: {path} is a tensor of layout {leaf.layout}, but xs must be dense tensors"
        raise TraceTypeError(what, source=user_source(), fix="Pass `x.to_dense()`.")


# ---- in Python ----


def _run(
    combine_fn: Callable[..., Any], carry: Any, xs: Any, dim: int, reverse: bool, size: int
) -> tuple[Any, Any]:
    leaves, spec = pytree.flatten(xs)
    slices = [leaf.unbind(dim) for leaf in leaves]
    columns: list[list[Tensor]] = []
    first, ys_spec = carry, None
    for step in reversed(range(size)) if reverse else range(size):
        carry, y = combine_fn(carry, pytree.unflatten(spec, [slice[step] for slice in slices]))
        if ys_spec is None:
            check_carry(*op_of(combine_fn), first, carry)
        y_leaves, ys_spec = pytree.flatten(y)
        _check_ys(combine_fn, y)
        columns = columns or [[] for _ in y_leaves]
        for column, leaf in zip(columns, y_leaves, strict=True):
            column.append(leaf)
    assert ys_spec is not None, "there was a step"
    stacks = [
        torch.stack(column[::-1] if reverse else column, dim if dim <= column[0].ndim else 0)
        for column in columns
    ]
    return own_memory(carry), pytree.unflatten(ys_spec, stacks)


def _pair(combine_fn: Callable[..., Any], result: Any) -> tuple[Any, Any]:
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        kind = "a Tensor" if isinstance(result, Tensor) else kind_of(result)
        what = f"{len(result)} values" if isinstance(result, (tuple, list)) else kind
        what = f"scan: {described_function(combine_fn)} must return (carry, y), not {what}"
        raise TraceTypeError(
            what, source=user_source(), fix="Return `(carry, None)` if there is no y."
        )
    return result[0], result[1]


def op_of(combine_fn: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    """The op that the user wrote, which runs a function as the step of a scan, and the function."""
    one: Any = combine_fn
    while one is not None and not hasattr(one, "step_of"):
        one = getattr(one, "__wrapped__", None)
    return getattr(one, "step_of", "scan"), combine_fn


def _check_ys(combine_fn: Callable[..., Any], y: Any) -> None:
    check_stackable("scan", combine_fn, y, "y", "Return a tensor, or None for no ys.")


def check_stackable(
    op: str, function: Callable[..., Any], result: Any, name: str, fix: str
) -> None:
    """Raise unless all leaves of a result are tensors; names the first other leaf."""
    for path, leaf in zip(pytree.paths(result, name), pytree.flatten(result)[0], strict=True):
        if not isinstance(leaf, (Tensor, TypeText)):
            what = f"{op}: {path} is of type {type(leaf).__name__}, and only tensors can be stacked"
            what += f"\nfunction:     {described_function(function)}"
            raise TraceTypeError(what, source=user_source(), fix=fix)


def check_carry(
    op: str, function: Callable[..., Any], before: Any, after: Any, name: str = "carry"
) -> None:
    """Raise unless a carry keeps its structure and the types of its leaves; names the leaf that
    does not.

    A number may become another of its type, or a scalar tensor.
    """
    leaves, spec = pytree.flatten(before)
    new, new_spec = pytree.flatten(after)
    where = f"function:     {described_function(function)}"
    other = pytree.difference(spec, new_spec, name, f"the new {name}")
    if other is not None:
        what = f"{op}: the {name} must keep its structure, but {other}\n{where}"
        fix = "Return the same tuples, lists and dicts as are given; None stands for nothing."
        raise TraceTypeError(what, source=user_source(), fix=fix)
    different: list[tuple[Any, str]] = []
    for path, old, leaf in zip(pytree.paths(before, name), leaves, new, strict=True):
        mine, theirs = _leaf_text(old), _leaf_text(leaf)
        if mine != theirs and not _is_moved(old, leaf):
            different.append((old, f"  {path}: {mine} becomes {theirs}"))
    if different:
        lines = "\n".join(line for _, line in different)
        fix = (
            "Make numbers in the first carry tensors, e.g. `torch.tensor(0.0)`."
            if not all(isinstance(old, Tensor) for old, _ in different)
            else (
                "Cast or reshape it, e.g. `.to(torch.float32)`, in the function or in the first"
                f" {name}."
            )
        )
        what = f"{op}: the {name} must keep its types, but\n{lines}\n{where}"
        raise TraceTypeError(what, source=user_source(), fix=fix)


def _is_moved(old: Any, new: Any) -> bool:
    """Test for a number that is another of its type, or a scalar tensor, after a step."""
    is_scalar = (isinstance(new, Tensor) and new.ndim == 0) or (
        isinstance(new, TypeText) and new.endswith("[]")
    )
    return isinstance(old, (bool, int, float)) and (is_scalar or type(new) is type(old))


def with_moving_numbers(init: Any, capture: Callable[[Any], tuple[R, Any]]) -> tuple[Any, R]:
    """The first carry with tensors for the numbers that a step changes, and its capture.

    Args:
        capture: from a first carry to a result, and the carry after a step, with `TypeText` for
            tensors.
    """
    leaves, spec = pytree.flatten(init)
    while True:
        result, after = capture(pytree.unflatten(spec, leaves))
        new, new_spec = pytree.flatten(after)
        if spec != new_spec:
            return init, result
        moved = [
            i
            for i, (old, leaf) in enumerate(zip(leaves, new, strict=True))
            if _is_moved(old, leaf) and old != leaf
        ]
        if not moved:
            return pytree.unflatten(spec, leaves), result
        for i in moved:
            leaves[i] = torch.tensor(
                leaves[i], dtype=new[i].dtype if isinstance(new[i], TypeText) else None
            )


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, TypeText):
        return str(leaf)
    return (
        str(type_of_value(leaf))
        if isinstance(leaf, Tensor)
        else f"the {type(leaf).__name__} {leaf!r}"
    )


# ---- in a trace ----


def _record(
    combine_fn: Callable[..., Any], init: Any, xs: Any, reverse: bool, size: int, unroll: int
) -> tuple[Any, Any]:
    example = pytree.tree_map(_slice_like, xs)

    def captured_with(carry: Any) -> tuple[Bodies, Any]:
        bodies = capture_bodies("scan", (combine_fn,), [(carry, example)])
        bodies = agreed(bodies, types_of_tensors(carry), bodies.bodies[0].output_types)
        return bodies, result_types(bodies.captured[0])[0]

    init, bodies = with_moving_numbers(init, captured_with)
    captured, closures = bodies.captured[0], bodies.closures
    carry, ys = result_types(captured)
    check_carry(*op_of(combine_fn), init, carry)
    _check_ys(combine_fn, ys)
    init_leaves, x_leaves = pytree.tensors_in(init), pytree.tensors_in(xs)
    body = consts_first(bodies.bodies[0], len(closures))
    body, is_fixed = _fix_carries(body, len(closures), len(init_leaves))
    consts, moving = divided(init_leaves, is_fixed)
    loop = Loop(len(closures) + len(consts), len(moving), as_dim(size), bool(reverse), unroll)
    found = scan_evaluate_rule((body,), *closures, *consts, *moving, *x_leaves, **loop.literals())
    last, stacks = loop.results(found)
    moved = own_memory(last) if current() is None else last
    final = interleaved(own_memory(consts), moved, is_fixed)
    return captured.result((*final, *stacks))


def _slice_like(x: Tensor) -> Tensor:
    """A slice of x without its values, which requires grad if x does."""
    example = x.new_empty_strided(x.shape[1:], x.stride()[1:])
    if x.requires_grad:
        internals.become_results((example,))
    return example


class TypeText(str):
    """Stand-in for a tensor of that type in a pytree."""

    dtype: torch.dtype


def _type_text(type: Type) -> TypeText:
    text = TypeText(type)
    text.dtype = tensor_type(type).dtype
    return text


def result_types(captured: Captured) -> Any:
    """The captured result with the text of its type for each tensor."""
    return captured.result(tuple(_type_text(type) for type in captured.trace.output_types))


def consts_first(body: Trace, num_closures: int) -> Trace:
    """The body with its closures in front."""
    first = len(body.inputs) - num_closures
    inputs = (*body.inputs[first:], *body.inputs[:first])
    return cut(body, inputs=inputs)


def _fix_carries(body: Trace, num_consts: int, num_carry: int) -> tuple[Trace, tuple[bool, ...]]:
    """Carries that the body returns as they are become consts."""
    carries = body.inputs[num_consts : num_consts + num_carry]
    flags = tuple(var == atom for var, atom in zip(carries, body.outputs[:num_carry], strict=True))
    fixed, moving = divided(carries, flags)
    inputs = (*body.inputs[:num_consts], *fixed, *moving, *body.inputs[num_consts + num_carry :])
    _, moved = divided(body.outputs[:num_carry], flags)
    outputs = (*moved, *body.outputs[num_carry:])
    return cut(body, inputs=inputs, outputs=outputs), flags


# ---- on top of scan ----


def _run_in_blocks(
    combine_fn: Callable[..., Any],
    init: Any,
    xs: Any,
    dim: int,
    reverse: bool,
    size: int,
    unroll: int,
) -> tuple[Any, Any]:
    """Blocks of about sqrt(size) steps, each under a checkpoint, and the steps that are left
    over as one more.
    """
    steps = math.isqrt(size)
    count = size - size % steps
    moved = _sliced_first(xs, dim)
    blocks = pytree.tree_map(
        lambda x: x[:count].reshape(count // steps, steps, *x.shape[1:]), moved
    )
    rest = pytree.tree_map(lambda x: x[count:], moved)

    def block(length: int) -> Callable[[Any, Any], Any]:
        @standing_for(combine_fn)
        def steps_of(carry: Any, slices: Any) -> Any:
            return scan(combine_fn, carry, slices, reverse=reverse, length=length, unroll=unroll)

        return checkpointed(steps_of)

    def main(carry: Any) -> Any:
        carry, ys = scan(block(steps), carry, blocks, reverse=reverse, length=count // steps)
        return carry, pytree.tree_map(lambda y: y.flatten(0, 1), ys)

    runs = [main]
    if count < size:
        runs.append(lambda carry: block(size - count)(carry, rest))
    carry, parts = init, list[Any]()
    for run in reversed(runs) if reverse else runs:
        carry, ys = run(carry)
        parts.append(ys)
    ordered = parts[::-1] if reverse else parts
    joined = pytree.tree_map(lambda *ys: torch.cat(ys), ordered[0], *ordered[1:])
    return carry, _stacked_along(dim, joined)


def map(f: Callable[..., Any], xs: Any, *args: Any, dim: int = 0) -> Any:
    """`f` on each slice of xs along dim, one after the other; the results are stacked along dim.
    See `thunder_fn.map`.
    """
    if xs is None or pytree.flatten(xs)[0]:
        size, dim = number_of_steps(xs, dim, op="map")
        if is_kept_open(size):
            first = _sliced_first(xs, dim)
            return _stacked_along(dim, internals.pytorchs("map", f, first, *args))
    mapped = mapped_function(f, args)

    @standing_for(f)
    def step(_: None, x: Any) -> tuple[None, Any]:
        return None, mapped(x)

    return scan(step, None, xs, dim=dim)[1]


def mapped_function(f: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[Any], Any]:
    """`f` on a slice and args, for `map`: its results must be tensors."""
    if not callable(f):
        what = f"map: f must be a function, not {kind_of(f)}"
        raise TraceTypeError(what, fix="Write `map(f, xs)`.")

    @standing_for(f)
    def mapped(x: Any) -> Any:
        result = f(x, *args)
        check_stackable(
            "map",
            f,
            result,
            "the result",
            "Return a tensor (`torch.tensor(1.0)`), or None for nothing.",
        )
        return result

    return mapped


def _torch_scan(
    combine_fn: Callable[..., Any], init: Any, xs: Any, *, dim: int = 0, reverse: bool = False
) -> Any:
    """PyTorch's scan: without xs there is no step."""
    if not pytree.flatten(xs)[0]:
        return own_memory(init), []
    return scan(combine_fn, init, xs, dim=dim, reverse=reverse)


divert("scan", _torch_scan)
