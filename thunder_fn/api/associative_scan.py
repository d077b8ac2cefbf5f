"""associative_scan: all prefixes of an associative function, in logarithmically many steps.

Not an op of its own: the recursion is made of traced ops (slices and vectorised calls of the
function), so every transform knows it. An even prefix is one step on from the odd one before it,
and the odd prefixes are the scan of the pairs. In a trace the function is captured once, and the
recursion is a composite, which equal layers of a model share.

Source: jax.lax.associative_scan; Blelloch, "Prefix sums and their applications", 1990.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from thunder_fn import torch_internals as internals
from thunder_fn.api.batching import example_of, place, vmap
from thunder_fn.api.calling import apply
from thunder_fn.capture import capture, current, pytree
from thunder_fn.capture.apply import close_over
from thunder_fn.capture.replaced.lookasides import divert
from thunder_fn.capture.rewriting import remembered_in_context
from thunder_fn.errors import TraceTypeError, kind_of, spelled
from thunder_fn.interpreters.vmap import vmap as vmap_trace
from thunder_fn.ir.symbols import made_by
from thunder_fn.ir.trace import Trace, Type, type_of_value
from thunder_fn.structured.loop_functions import check_carry, check_dense, result_types, scan
from thunder_fn.structured.shared.bind import bind_composite
from thunder_fn.structured.shared.bodies import is_kept_open, next_carry, own_memory, standing_for
from thunder_fn.structured.shared.custom_calls import examples_of
from thunder_fn.structured.shared.side_effects import without_side_effects

Tensor = torch.Tensor
Combine = Callable[[list[Tensor], list[Tensor]], list[Tensor]]
MODES = ("pointwise", "generic")


@spelled(fn="combine_fn", elems="xs", axis="dim")
@internals.with_twin(internals.dynamo_associative_scan)
def associative_scan(
    combine_fn: Callable[[Any, Any], Any],
    xs: Any,
    dim: int = 0,
    reverse: bool = False,
    combine_mode: str = "generic",
) -> Any:
    """Compute all prefixes of xs along dim: `ys[t] = combine_fn(ys[t - 1], xs[t])`, in any
    bracketing.

    Law: equals `scan` on associative functions; about log2(n) vectorised calls instead of n.

    Args:
        combine_fn: takes two slices of xs and returns one of the same structure and types.
            Associative.
        xs: a pytree of tensors with equal sizes in dim.
        reverse: suffixes instead of prefixes.
        combine_mode: "pointwise" calls the function on whole stacks of slices, which elementwise
            functions understand; "generic" batches it with vmap.

    Raises:
        TraceTypeError: sizes differ, or the function changes structure or types.

    Example:
        >>> associative_scan(torch.mul, torch.tensor([1, 2, 3, 4]), 0)
        tensor([ 1,  2,  6, 24])

    Source: torch's associative_scan for the signature.
    """
    if combine_mode not in MODES:
        raise TraceTypeError(
            f"associative_scan: combine_mode is 'pointwise' or 'generic', given {combine_mode!r}"
        )
    leaves, spec = pytree.flatten(xs)
    if not leaves:
        return xs
    _check(combine_fn, xs, leaves, dim)

    @standing_for(combine_fn)
    def combine(a: Any, b: Any) -> Any:
        return next_carry(a, combine_fn(a, b))

    moved = [leaf.movedim(dim, 0) if dim else leaf for leaf in leaves]
    if reverse:
        moved = [leaf.flip(0) for leaf in moved]
    found = None
    if is_kept_open(moved[0].shape[0]):
        found = _step_by_step(combine_fn, spec, moved)
    elif combine_mode == "generic":
        found = _scan_in_trace(combine, spec, moved)
    if found is None:
        found = _scan(
            _called(combine if combine_mode == "pointwise" else vmap(combine), combine, spec), moved
        )
    if moved[0].shape[0] < 2:
        found = own_memory(found)
    if reverse:
        found = [leaf.flip(0) for leaf in found]
    return pytree.unflatten(
        spec, [leaf.movedim(0, dim).contiguous() if dim else leaf for leaf in found]
    )


def _step_by_step(
    combine_fn: Callable[[Any, Any], Any], spec: pytree.PyTreeSpec, xs: list[Tensor]
) -> list[Tensor]:
    """The prefixes by PyTorch's `scan`, which keeps a number of steps open. Its own
    `associative_scan` writes the recursion out for the size of the example.
    """

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        new = combine_fn(carry, x)
        return new, tree_map(torch.clone, new)  # PyTorch's, which Dynamo can read

    init = pytree.unflatten(spec, [x[0].clone() for x in xs])
    rest = pytree.flatten(scan(step, init, pytree.unflatten(spec, [x[1:] for x in xs]))[1])[0]
    return [torch.cat([x[:1], y]) for x, y in zip(xs, rest, strict=True)]


def _called(
    batched: Callable[[Any, Any], Any],
    combine_fn: Callable[[Any, Any], Any],
    spec: pytree.PyTreeSpec,
) -> Combine:
    """Call the user's function on stacks of slices."""

    def combine(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        result = batched(pytree.unflatten(spec, a), pytree.unflatten(spec, b))
        check_carry("associative_scan", combine_fn, pytree.unflatten(spec, a), result, "value")
        return pytree.flatten(result)[0]

    return combine


def _scan_in_trace(
    combine_fn: Callable[[Any, Any], Any], spec: pytree.PyTreeSpec, xs: list[Tensor]
) -> list[Tensor] | None:
    """The prefixes as one equation. None outside of a trace, or where the function has to be
    called for each size.
    """
    recorder = current()
    if recorder is None or recorder.symbolic or xs[0].shape[0] < 2:
        return None
    examples = [pytree.unflatten(spec, [example_of(x, 0) for x in xs]) for _ in range(2)]
    (captured,) = without_side_effects(
        "associative_scan", (combine_fn,), lambda _: (capture(combine_fn, tuple(examples)),)
    )
    if captured.writes or any(map(made_by, captured.trace.equations)):
        return None
    check_carry("associative_scan", combine_fn, examples[0], result_types(captured), "value")
    step, closures = close_over(captured.trace)
    whole = _whole(step, tuple(map(type_of_value, (*xs, *closures))), len(xs))
    return list(bind_composite(recorder, "associative_scan", whole, (*xs, *closures)))


@remembered_in_context(256)
def _whole(step: Trace, types: tuple[Type, ...], count: int) -> Trace:
    """The scan of `count` stacks of slices as a trace. `step` takes two slices and what the
    function closes over.
    """

    def associative_scan(*given: Tensor) -> list[Tensor]:
        closures = given[count:]

        def combine(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
            size = a[0].shape[0]
            in_dims = (*(0 for _ in (*a, *b)), *(None for _ in closures))
            batched, flags = vmap_trace(step, in_dims, size, "error")
            found = apply("associative_scan", batched, (*a, *b, *closures), step)
            return [
                place(x, flag is not None, 0, size, "value")
                for x, flag in zip(found, flags, strict=True)
            ]

        return _scan(combine, list(given[:count]))

    return capture(associative_scan, tuple(examples_of(types))).trace


def _check(combine_fn: Any, xs: Any, leaves: list[Any], dim: int) -> None:
    if not callable(combine_fn):
        what = f"associative_scan: expected a function, given {kind_of(combine_fn)}"
        raise TraceTypeError(what, fix="Write `associative_scan(combine_fn, xs)`.")
    sizes: list[str] = []
    for path, leaf in zip(pytree.paths(xs, "xs"), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            raise TraceTypeError(
                f"associative_scan: {path} is of type {type(leaf).__name__}, and only tensors can"
                " be sliced"
            )
        check_dense("associative_scan", path, leaf)
        if not -leaf.ndim <= dim < leaf.ndim:
            raise TraceTypeError(
                f"associative_scan: {path} is {type_of_value(leaf)} and has no dim {dim}"
            )
        sizes.append(f"  {path}: {leaf.shape[dim]}")
    if len({text.rsplit(" ", 1)[1] for text in sizes}) > 1:
        raise TraceTypeError(
            "associative_scan: the sizes must be the same, but\n" + "\n".join(sizes)
        )


def _scan(combine: Combine, xs: list[Tensor]) -> list[Tensor]:
    size = xs[0].shape[0]
    if size < 2:
        return xs
    pairs = combine([x[: size - 1 : 2] for x in xs], [x[1::2] for x in xs])
    odd = _scan(combine, pairs)
    if size == 2:
        even = [x[:1] for x in xs]
    else:
        rest = [x[2::2] for x in xs]
        before = [x[: rest[0].shape[0]] for x in odd]
        even = [torch.cat([x[:1], y]) for x, y in zip(xs, combine(before, rest), strict=True)]
    return [_interleave(a, b) for a, b in zip(even, odd, strict=True)]


def _interleave(even: Tensor, odd: Tensor) -> Tensor:
    """`even[0], odd[0], even[1], ...`: as many of one as of the other, or one more of even."""
    count = odd.shape[0]
    mixed = torch.stack([even[:count], odd], 1).reshape(2 * count, *odd.shape[1:])
    return mixed if even.shape[0] == count else torch.cat([mixed, even[count:]])


def _torch_associative_scan(
    combine_fn: Callable[[Any, Any], Any],
    xs: Any,
    dim: int,
    reverse: bool = False,
    combine_mode: str = "pointwise",
) -> Any:
    """PyTorch's associative_scan, whose function is pointwise unless it says otherwise."""
    return associative_scan(combine_fn, xs, dim, reverse, combine_mode)


divert("associative_scan", _torch_associative_scan)
