"""Ops that look at memory layout, recorded so that the trace does not depend on it.

Strides are not part of a type: a trace runs on tensors of any layout, and rules are derived on
contiguous ones. The few ops whose result or derivative depends on strides are recorded behind a
contiguous `clone`.

- `as_strided` and `as_strided_scatter` address memory. The strides at hand when they are recorded
  say which element lies where. So they become the same op on a flat contiguous clone, or a gather
  if the tensor has gaps.
- `linalg.det`, `slogdet` and `solve` factor the matrix or its transpose, whichever is contiguous,
  and their derivatives ask again which it was.
- `view_as_complex` takes pairs of neighbours.
- The backward of efficient attention reads the output as its forward lays it out, whatever its
  strides (halves on a GPU).
- Kernels of other libraries may read memory: their callers say `x.contiguous()`, which is nothing
  on the tensors that rules are derived on. What is contiguous there is so in the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.errors import UnsupportedCall
from thunder_fn.ir import facts, ops
from thunder_fn.ir.memos import kept_of_ops
from thunder_fn.ir.trace import Arg, Literal, Op, TensorType, Var, as_arg, as_dim, type_of_value

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

aten = torch.ops.aten
READS_OUTPUT = "aten._scaled_dot_product_efficient_attention_backward.default"

HIDDEN = ops.leaf(aten.as_strided_copy.default)
"""An `as_strided` that reads memory which does not belong to the tensor."""

CONTIGUOUS = (("memory_format", Literal(torch.contiguous_format)),)


def with_plain_layout(
    recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[Var, ...] | None:
    """Record an op that looks at layout; the variables of its results. None if it can be
    recorded as it is.
    """
    if not looks_at_layout(name):
        return None
    if name in facts.FACTORS:
        return _factor(recorder, name, args, kwargs, result)
    if name in facts.READ_AS_CONTIGUOUS:
        return _on_clones(recorder, name, args, kwargs, result)
    if name == READS_OUTPUT:
        return _with_output_as_computed(recorder, args, kwargs, result)
    if name == "aten.view_as_complex.default":
        base = _clone(recorder, recorder.read(args[0]), args[0].shape, args[0])
        return (_emit(recorder, aten.view_as_complex.default, (base,), result.shape, result),)
    if name in facts.ADDRESSES and args[0].numel() and not _is_plain(recorder, args):
        found = _scatter(recorder, *args) if "scatter" in name else _gather(recorder, *args)
        return found or _record_as_is(recorder, args, result)
    return None


def as_found(
    recorder: Recorder, op: Op, given: tuple[Any, ...], args: tuple[Arg, ...]
) -> tuple[Arg, ...]:
    """The arguments of an op of another library, contiguous in the program where they are now."""
    if internals.schema_of(ops.overload(op)).is_mutable:
        return args
    return tuple(_as_found(recorder, *pair) for pair in zip(given, args, strict=True))


def _as_found(recorder: Recorder, given: Any, arg: Arg) -> Arg:
    if isinstance(arg, tuple):
        return tuple(_as_found(recorder, *pair) for pair in zip(given, arg, strict=True))
    is_known = isinstance(arg, Var) and arg.index in recorder.contiguous
    if is_known or not isinstance(given, torch.Tensor) or not isinstance(arg, Var):
        return arg
    if not given.is_contiguous():
        return arg
    (laid,) = recorder.emit(ops.CONTIGUOUS, (arg,), (arg.type,), ())
    recorder.contiguous.add(laid.index)
    return laid


@kept_of_ops()
def looks_at_layout(name: str) -> bool:
    """Test whether the result of an op, by name, or its derivative depends on layout."""
    known = (facts.FACTORS, facts.READ_AS_CONTIGUOUS, facts.ADDRESSES)
    exact = (READS_OUTPUT, "aten.view_as_complex.default")
    return name in exact or any(name in names for names in known)


def _emit(
    recorder: Recorder,
    overload: Any,
    args: tuple[Any, ...],
    shape: Any,
    like: torch.Tensor,
    kwargs: Any = (),
) -> Var:
    type = TensorType(like.dtype, tuple(map(as_dim, shape)), like.device)
    return recorder.emit(ops.leaf(overload), tuple(map(as_arg, args)), (type,), kwargs)[0]


def _clone(recorder: Recorder, var: Var, shape: Any, like: torch.Tensor) -> Var:
    """A contiguous copy, or the variable itself where it is one already."""
    if var.index in recorder.contiguous:
        return var
    new = _emit(recorder, aten.clone.default, (var,), shape, like, CONTIGUOUS)
    recorder.contiguous.add(new.index)
    return new


def _record_as_is(
    recorder: Recorder, args: tuple[Any, ...], result: torch.Tensor
) -> tuple[Var, ...]:
    """An op that reads memory beyond the elements of a tensor from outside: it runs, but nothing
    can be derived from it.

    A computed value has no memory but its elements, and neither has what an argument with a bit
    stands for.
    """
    tensor, var = args[0], recorder.read(args[0])
    is_inner = recorder.outer is not None or not _is_outside(recorder, var)
    if is_inner or tensor.is_conj() or tensor.is_neg():
        what = (
            "as_strided reads memory that its tensor does not hold, beside the elements of a"
            " computed tensor"
        )
        fix = "Call as_strided on the tensor that has this memory, outside of the traced function."
        raise UnsupportedCall(what, source=recorder.source, fix=fix)
    return recorder.emit(HIDDEN, tuple(map(recorder.encode, args)), (type_of_value(result),), ())


def _is_outside(recorder: Recorder, var: Var) -> bool:
    """Test for a tensor from outside, whose memory may begin before it."""
    constants = (constant.var for constant in recorder.constants if not constant.owned)
    return var in (*recorder.inputs, *constants)


def _check_address(recorder: Recorder, var: Var, offset: int | None) -> None:
    """Refuse an address in the memory of a tensor from outside where sizes are symbols: its
    beginning is not known there.
    """
    if offset is not None and recorder.symbolic and _is_outside(recorder, var):
        raise UnsupportedCall(
            "as_strided: a storage_offset in a program of symbolic sizes, whose tensors may begin"
            " anywhere in memory",
            source=recorder.source,
            fix="Leave the storage offset out, or take a slice first.",
        )


def _with_args(
    recorder: Recorder, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> tuple[Var, ...]:
    """Record an op on other arguments, with results of the same types."""
    types = tuple(type_of_value(value) for value in ops.flatten_result(result))
    options = tuple((key, recorder.encode(value)) for key, value in kwargs.items())
    return recorder.emit(ops.leaf(ops.overload_named(name)), tuple(args), types, options)


def _with_output_as_computed(
    recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[Var, ...]:
    """Efficient attention's backward on an output whose heads lie side by side: a copy where the
    forward's was moved.
    """
    new, place = [recorder.encode(arg) for arg in args], 5
    out = args[place]
    batch, heads, length, size = out.shape
    turned = _emit(
        recorder, aten.transpose.int, (new[place], 1, 2), (batch, length, heads, size), out
    )
    (laid,) = recorder.emit(ops.CONTIGUOUS, (turned,), (turned.type,), ())
    new[place] = _emit(recorder, aten.transpose.int, (laid, 1, 2), out.shape, out)
    return _with_args(recorder, READS_OUTPUT, new, kwargs, result)


def _on_clones(
    recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[Var, ...]:
    """An op that reads some arguments as memory: PyTorch's callers make them contiguous, and a
    trace does it always. Others have other strides now than where rules are derived.
    """
    new = [recorder.encode(arg) for arg in args]
    strided = [
        place
        for place, value in enumerate(args)
        if name in facts.SHAPED_BY_STRIDES
        and isinstance(value, torch.Tensor)
        and not value.is_contiguous()
    ]
    for position in dict.fromkeys((*facts.READ_AS_CONTIGUOUS[name], *strided)):
        var = new[position]
        if isinstance(var, Var):
            new[position] = _clone(recorder, var, args[position].shape, args[position])
    return _with_args(recorder, name, new, kwargs, result)


# ---- matrix factorisations ----


def _factor(
    recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[Var, ...] | None:
    matrix, *rest = args
    var = recorder.read(matrix)
    if matrix.is_complex() or var.index in recorder.contiguous:
        return None
    if not matrix.is_contiguous() and "solve" not in name:
        # eager factors the matrix itself, not its transpose: the same numbers as for a transposed
        # contiguous one
        matrix = matrix.mT
        var = _emit(recorder, aten.transpose.int, (var, -2, -1), matrix.shape, matrix)
    var = _clone(recorder, var, matrix.shape, matrix)
    return _with_args(recorder, name, (var, *map(recorder.encode, rest)), kwargs, result)


# ---- addresses ----


def _is_plain(recorder: Recorder, args: tuple[Any, ...]) -> bool:
    tensor = args[0]
    return (
        tensor.dim() == 1
        and tensor.storage_offset() == 0
        and recorder.read(tensor).index in recorder.contiguous
    )


def _places(shape: Any, stride: Any, offset: int) -> torch.Tensor:
    """The place in memory of each element."""
    places = torch.full(tuple(shape), offset, dtype=torch.int64)
    for dim, (size, step) in enumerate(zip(shape, stride, strict=True)):
        places += (torch.arange(size) * step).view([-1] + [1] * (len(shape) - dim - 1))
    return places


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _order(tensor: torch.Tensor) -> list[int] | None:
    """The dims from the outermost in memory to the innermost; None if the tensor has gaps or
    overlaps.
    """
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.size(dim) > 1, -tensor.stride(dim)))
    expected = 1
    for dim in reversed(order):
        if tensor.size(dim) > 1:
            if tensor.stride(dim) != expected:
                return None
            expected *= tensor.size(dim)
    return order


def _flat(recorder: Recorder, tensor: torch.Tensor, var: Var, order: list[int]) -> Var:
    """The elements in the order of memory."""
    shape = [tensor.size(dim) for dim in order]
    if order != list(range(tensor.dim())):
        var = _emit(recorder, aten.permute.default, (var, order), shape, tensor)
    var = _clone(recorder, var, shape, tensor)
    if tensor.dim() != 1:
        var = _emit(
            recorder, aten.reshape.default, (var, [tensor.numel()]), [tensor.numel()], tensor
        )
        recorder.contiguous.add(var.index)
    return var


def _memory_of(recorder: Recorder, tensor: torch.Tensor) -> torch.Tensor:
    """The fake tensor that this one is a view of, as far as autograd follows, or itself."""
    var: Var | None = recorder.known(tensor)
    memory, seen = internals.storage_id(tensor), set[int]()
    while var is not None:
        seen.add(var.index)
        var = recorder.viewed.get(var.index)
    for fake, var in recorder.fakes():
        if (
            var.index in seen
            and fake.dtype == tensor.dtype
            and internals.storage_id(fake) == memory
        ):
            return fake
    return tensor


def _gather(
    recorder: Recorder, tensor: torch.Tensor, size: Any, stride: Any, offset: int | None = None
) -> tuple[Var, ...] | None:
    first = _offset(tensor) if offset is None else offset
    view, tensor = tensor, _memory_of(recorder, tensor)
    var = recorder.read(tensor)
    _check_address(recorder, var, offset)
    if tensor is not view and recorder.history.is_stopped(recorder.known(view)):
        var = _emit(recorder, aten.alias.default, (var,), tensor.shape, tensor)
    order, start = _order(tensor), _offset(tensor)
    last = first + internals.last_offset(size, stride)
    if order is not None and start <= first and last < start + tensor.numel():
        flat = _flat(recorder, tensor, var, order)
        return (
            _emit(
                recorder, aten.as_strided.default, (flat, size, stride, first - start), size, tensor
            ),
        )
    with internals.isolated(), internals.no_torch_function():
        known = dict[int, list[int]]()
        for i, at in enumerate(_places(tensor.shape, tensor.stride(), start).flatten().tolist()):
            known.setdefault(at, []).append(i)
        wanted = _places(size, stride, first).flatten().tolist()
        if not all(place in known for place in wanted):
            return None
        elements = [known[place] for place in wanted]
    taken = _taken_with_means(recorder, var, tensor, elements)
    return (_emit(recorder, aten.reshape.default, (taken, size), size, tensor),)


def _scatter(
    recorder: Recorder,
    tensor: torch.Tensor,
    source: torch.Tensor,
    size: Any,
    stride: Any,
    offset: int | None = None,
) -> tuple[Var, ...]:
    expanded = any(
        n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    laid = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if expanded else tensor
    )  # eager's own copy
    _check_address(recorder, recorder.read(tensor), offset)
    start = _offset(laid)
    first = start if offset is None else offset
    order, shape = _order(laid), tuple(tensor.shape)
    last = first + internals.last_offset(size, stride)
    new = recorder.read(source)
    if order is not None and start <= first and last < start + tensor.numel():
        flat = _flat(recorder, tensor, recorder.read(tensor), order)
        args = (flat, new, size, stride, first - start)
        changed = _emit(recorder, aten.as_strided_scatter.default, args, [tensor.numel()], tensor)
        ordered = [shape[dim] for dim in order]
        changed = _emit(recorder, aten.reshape.default, (changed, ordered), ordered, tensor)
        back = sorted(range(len(order)), key=order.__getitem__)
        return (_emit(recorder, aten.permute.default, (changed, back), shape, tensor),)
    end = start + sum((n - 1) * step for n, step in zip(shape, laid.stride(), strict=True))
    if last > end and source.numel():
        raise RuntimeError(
            f"as_strided_scatter: sizes {list(size)}, strides {list(stride)} and storage offset"
            f" {first} are out of bounds for {end + 1} elements"
        )
    with internals.isolated(), internals.no_torch_function():
        places = _places(shape, laid.stride(), start).flatten().tolist()
        wanted = _places(size, stride, first).flatten().tolist()
    return _chosen_by_place(recorder, tensor, (new, source), places, wanted)


def _chosen_by_place(
    recorder: Recorder,
    tensor: torch.Tensor,
    source: tuple[Var, torch.Tensor],
    places: list[int],
    wanted: list[int],
) -> tuple[Var, ...]:
    """A tensor whose elements at the wanted places of its memory are those of a source."""
    given, shape = {place: i for i, place in enumerate(wanted)}, tuple(tensor.shape)
    with internals.isolated(), internals.no_torch_function():
        index = torch.tensor(
            [given.get(place, 0) for place in places], dtype=torch.int64, device=tensor.device
        )
        mask = torch.tensor([place in given for place in places], device=tensor.device)
        mask = mask.reshape(shape)
    taken = _taken(recorder, *source, index)
    taken = _emit(recorder, aten.reshape.default, (taken, shape), shape, tensor)
    args = (recorder.constant(mask, owned=True), taken, recorder.read(tensor))
    return (_emit(recorder, aten.where.self, args, shape, tensor),)


def _taken_with_means(
    recorder: Recorder, var: Var, like: torch.Tensor, elements: list[list[int]]
) -> Var:
    """One number for each list of elements, which are one in memory. Each of them has the same
    part of its gradient, as in eager mode.
    """
    with internals.isolated(), internals.no_torch_function():
        place: dict[str, Any] = {"device": like.device}
        index = torch.tensor([found[0] for found in elements], dtype=torch.int64, **place)
        every = torch.tensor([i for found in elements for i in found], dtype=torch.int64, **place)
        number = [at for at, found in enumerate(elements) for _ in found]
        parts = [1 / len(found) for found in elements for _ in found]
        target = torch.tensor(number, dtype=torch.int64, **place)
        weights = torch.tensor(parts, dtype=torch.float64, **place).to(like.dtype)
        zeros = torch.zeros(len(elements), dtype=like.dtype, **place)
    value = _taken(recorder, var, like, index)
    if len(every) == len(elements) or not internals.is_inexact(like):
        return value
    given = [recorder.constant(one, owned=True) for one in (weights, zeros, target)]
    shares = _emit(
        recorder,
        aten.mul.Tensor,
        (_taken(recorder, var, like, every), given[0]),
        [len(every)],
        like,
    )
    args = (given[1], 0, given[2], shares)
    means = _emit(recorder, aten.index_add.default, args, [len(elements)], like)
    return recorder.emit(ops.STRAIGHT_THROUGH, (value, means), (value.type,), ())[0]


def _taken(recorder: Recorder, var: Var, like: torch.Tensor, index: torch.Tensor) -> Var:
    """The elements of a tensor, which `like` is, at these numbers."""
    flat = _emit(recorder, aten.reshape.default, (var, [-1]), [like.numel()], like)
    args = (flat, 0, recorder.constant(index, owned=True))
    return _emit(recorder, aten.index_select.default, args, [index.numel()], like)
