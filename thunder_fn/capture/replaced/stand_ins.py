"""Stand-ins for functions of PyTorch that write to memory of their own or read values, which
tracers do not have.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_map

from thunder_fn import torch_internals as internals
from thunder_fn.capture.numbers.arithmetic import Sym
from thunder_fn.capture.outside.properties import address_in
from thunder_fn.capture.recorder import Recorder, current
from thunder_fn.capture.replaced.lookasides import divert, original_of
from thunder_fn.capture.supported import is_wrapped
from thunder_fn.derived.quirks.packed import (
    CELLS,
    is_of_cudnn,
    is_packed,
    pack_padded_sequence,
    packed_rnn,
    pad_packed_sequence,
    whole_rnn,
)
from thunder_fn.errors import UnsupportedCall, with_article
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.trace import type_of_value


def deepcopy(x: Tensor, memo: dict[int, Any]) -> Tensor:
    """A copy with the same `requires_grad`, as eager's."""
    if not x.is_leaf:
        raise RuntimeError("only graph leaves support deepcopy; call `.detach().clone()` instead")
    if id(x) not in memo:
        memo[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
    return memo[id(x)]


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """PyTorch's, which writes lengths that are numbers into memory of its own. Reduction: 0
    none, 1 mean, 2 sum.
    """
    if isinstance(input_lengths, Tensor) or isinstance(target_lengths, Tensor):
        return torch.ctc_loss(
            log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        )
    batch = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    labels = targets.to(batch.device, torch.int64)
    loss, _ = torch.ops.aten._ctc_loss(
        batch, labels, input_lengths, target_lengths, blank, zero_infinity
    )
    if zero_infinity:
        loss = torch.where(loss == float("inf"), 0.0, loss)
    if reduction == 1:
        lengths = torch.tensor(target_lengths, dtype=loss.dtype, device=loss.device)
        return (loss / lengths.clamp_min(1)).mean()
    if reduction == 2:
        return loss.sum()
    return loss if log_probs.dim() == 3 else loss.squeeze(0)


def dropout(x: Tensor, p: Any, train: bool) -> Tensor:
    """PyTorch's; where it drops nothing it is its argument, of which PyTorch's rule for symbolic
    sizes makes a copy.
    """
    return torch.dropout(x, p, train) if train and p != 0 else x


def batch_norm(*args: Any) -> Tensor:
    """PyTorch's, on a GPU by its own kernel where it updates statistics: cuDNN's op changes these
    and does not say so.
    """
    x, _, _, running_mean, _, trains, *_, _ = args
    if not (trains and running_mean is not None and x.device.type == "cuda"):
        return torch.batch_norm(*args)
    return torch.native_batch_norm(*args[:-1])[0]


def one_hot(x: Tensor, num_classes: Any = -1) -> Tensor:
    """Compute by a scatter, which refuses classes that there are not; PyTorch's own looks at
    values, or gives rows of zeros.
    """
    if (isinstance(num_classes, int) and num_classes <= 0) or x.dtype != torch.int64:
        return torch.nn.functional.one_hot(x, num_classes)
    zeros = torch.zeros((*x.shape, num_classes), dtype=torch.int64, device=x.device)
    return zeros.scatter(-1, x.unsqueeze(-1), 1)


def tensor(
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    **options: Any,
) -> Tensor:
    """`torch.tensor`; where some of the numbers are symbols or in tensors, of one equation for
    each.
    """
    shape, numbers = _nested(data)
    if not _are_traced(data, numbers):
        return torch.tensor(
            data, dtype=dtype, device=device, requires_grad=requires_grad, **options
        )
    if dtype is None:
        dtype = functools.reduce(torch.promote_types, map(_dtype_of, numbers))
    place = torch.get_default_device() if device is None else device
    with torch.no_grad():
        parts = [
            (
                number.to(dtype=dtype, device=place)
                if isinstance(number, Tensor)
                else torch.full((), number, dtype=dtype, device=device)
            )
            for number in numbers
        ]
        made = torch.stack(parts).reshape(shape)
    return made.requires_grad_(requires_grad)


def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """`torch.as_tensor`, which makes a tensor of numbers."""
    made = tensor if _are_traced(data, _nested(data)[1]) else torch.as_tensor
    return made(data, dtype=dtype, device=device)


def _are_traced(data: Any, numbers: list[Any]) -> bool:
    """Test for a few numbers, some of which a trace does not know."""
    is_traced = any(isinstance(number, (Tensor, *Sym)) for number in numbers)
    return is_traced and len(numbers) <= MAX_LISTED and not isinstance(data, Tensor)


def _dtype_of(number: Any) -> torch.dtype:
    if isinstance(number, Tensor):
        return number.dtype
    if isinstance(number, (bool, torch.SymBool)):
        return torch.bool
    return torch.get_default_dtype() if isinstance(number, (float, torch.SymFloat)) else torch.int64


def _nested(data: Any) -> tuple[tuple[int, ...], list[Any]]:
    """The shape and the numbers of nested lists; no numbers where they are not nested evenly, or
    are no numbers.
    """
    if isinstance(data, (bool, int, float, *Sym)):
        return (), [data]
    if isinstance(data, Tensor):
        return tuple(data.shape), [data] if data.dim() == 0 else []
    if not isinstance(data, (list, tuple)) or not data:
        return (), []
    parts = [_nested(item) for item in data]
    shape, numbers = parts[0][0], [number for _, found in parts for number in found]
    is_even = all(inner == shape and found for inner, found in parts)
    return ((len(data), *shape), numbers) if is_even else ((), [])


MAX_LISTED = 64
"""The number of elements up to which `tolist` makes symbols."""


def can_be_listed(x: Tensor) -> bool:
    """Test for a tensor of a few numbers, each of which can be a symbol."""
    sizes = [size if type(size) is int else math.inf for size in x.shape]
    return math.prod(sizes) <= MAX_LISTED and not x.dtype.is_complex and x.dtype != torch.bool


HAS_NUMBERS: dict[Any, Callable[[Tensor], bool]] = {
    Tensor.tolist: can_be_listed,
    Tensor.item: lambda x: not x.is_complex(),  # no symbol is a complex number
}
"""For each method that asks for a tensor's numbers, a test whether these can be symbols."""


def tolist(x: Tensor) -> Any:
    """The numbers, each an unbacked one."""
    return list(map(tolist, x.unbind(0))) if x.dim() else x.item()


def as_strided(x: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    """Take a view of a view from the tensor that has the memory, so that it can be changed. The
    bits are the view's.
    """
    recorder, base = current(), None if is_wrapped(x) else internals.base_of(x)
    if recorder is None or is_wrapped(x):
        return torch.as_strided(x, size, stride, storage_offset)
    if storage_offset is not None:
        storage_offset = address_in(recorder, x, storage_offset)
    if (
        base is None
        or x.dtype is not base.dtype  # the numbers count the base's elements
        or not internals.have_one_memory(x, base)
        or _have_other_histories(recorder, x, base)
    ):
        _check_layout(recorder, x)
        return torch.as_strided(x, size, stride, storage_offset)
    _check_layout(recorder, base)
    found = torch.as_strided(
        base, size, stride, x.storage_offset() if storage_offset is None else storage_offset
    )
    for view in internals.bits_between(base, x):
        found = view(found)
    return found


def _addressed(function: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
    """A function with `count` arguments between a tensor and an address in its memory."""

    @functools.wraps(function)
    def call(x: Tensor, *args: Any, storage_offset: int | None = None, **kwargs: Any) -> Tensor:
        recorder = current()
        if len(args) > count:
            args, storage_offset = args[:count], args[count]
        if recorder is not None and storage_offset is not None and not is_wrapped(x):
            storage_offset = address_in(recorder, x, storage_offset)
        return function(x, *args, storage_offset=storage_offset, **kwargs)

    return call


def _check_layout(recorder: Recorder, x: Tensor) -> None:
    """Refuse addresses in the memory of a tensor with gaps that was written to, whose value in
    the trace has none.
    """
    if recorder.var_of(x) is not None and internals.is_laid_out_anew(x):
        what = (
            "as_strided was called on a tensor with gaps between its elements that the function"
            " wrote to"
        )
        fix = "Call as_strided before the write, or write to the tensor that has the memory."
        raise UnsupportedCall(what, source=recorder.where(), fix=fix)


def _have_other_histories(recorder: Recorder, view: Tensor, base: Tensor) -> bool:
    """Test whether autograd follows one of two tracers and not the other."""
    first, second = recorder.var_of(view), recorder.var_of(base)
    if first is None or second is None or view.requires_grad != base.requires_grad:
        return True
    return recorder.history.is_stopped(first) != recorder.history.is_stopped(second)


_has_more_rows: ContextVar[bool] = ContextVar("thunder_fn_more_rows", default=False)


def _engine(outputs: Any, cotangents: Any, keep: Any, *args: Any, **options: Any) -> Any:
    """Run autograd, which keeps its graph while more rows of cotangents follow."""
    original = original_of(internals.higher_order_function("backward engine"))
    return original(outputs, cotangents, keep or _has_more_rows.get(), *args, **options)


def _run_within(recorder: Recorder, outputs: Any, *args: Any, **options: Any) -> Any:
    """Autograd through the graph of the traced function alone."""
    recorder.gradients.check_hooks([internals.node_of(x) for x in outputs])
    found = _engine(outputs, *args, **options)
    recorder.gradients.has_freed |= not args[1]
    return found


def _run_backward(t_outputs: Any, *args: Any, **options: Any) -> Any:
    """Autograd inside the traced function. Its graph ends at tensors from outside, which may have a
    graph of their own.

    An outermost transform may ask for gradients through both: that from outside is a linear map.

    Raises:
        UnsupportedCall: the gradient would go on into such a graph otherwise. Where that is all of
            the graph, an eager transform is then torch.func's, whose backward is autograd's own:
            hooks see cotangents, and the graph is freed or kept as asked.
    """
    recorder = current()
    if recorder is None or not recorder.track_no_grad:
        return _engine(t_outputs, *args, **options)
    cotangents, _, create, inputs, *unused = args
    ends = _ends(recorder, t_outputs)
    if ends:  # the graphs behind them are those of this call
        recorder.values.tell()
    behind = internals.nodes_behind([internals.node_of(x) for _, x in ends])
    leaves = [leaf for node in behind if (leaf := internals.leaf_of(node)) is not None]
    asked = [recorder.outside_of(x) for x in inputs if isinstance(x, Tensor)]
    crossing = [internals.node_of(x) in behind or any(x is one for one in leaves) for x in asked]
    if not any(crossing) and (asked or not leaves):
        return _run_within(recorder, t_outputs, *args, **options)
    tracers = [tracer for tracer, _ in ends]
    begins = any(all(x is not one for one in tracers) for x in t_outputs)
    fits = begins and len(asked) == len(inputs) and all(recorder.lift(x) is not x for _, x in ends)
    if (
        recorder.outer is not None
        or not recorder.inside
        or create
        or not (asked and fits)
        or options.get("accumulate_grad")
    ):
        _refuse_graph(recorder)
    found = list(
        _engine(
            t_outputs, cotangents, True, False, (*inputs, *tracers), True, accumulate_grad=False
        )
    )
    results, cotangents = found[: len(asked)], found[len(asked) :]
    for place, (x, flag) in enumerate(zip(asked, crossing, strict=True)):
        if flag:
            results[place] = _pulled_further(recorder, results[place], x, ends, cotangents)
    if not (unused and unused[0]) and any(result is None for result in results):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph."
        )
    return tuple(results)


def _pulled_further(
    recorder: Recorder,
    result: Tensor | None,
    x: Tensor,
    ends: Sequence[tuple[Tensor, Tensor]],
    cotangents: Sequence[Tensor | None],
) -> Tensor | None:
    """Add to the gradient of x that through the graphs behind the ends."""
    for (_, y), cotangent in zip(ends, cotangents, strict=True):
        if cotangent is None or y is x:
            continue
        further = _pulled(recorder, y, x, cotangent)
        if further is not None:
            result = further if result is None else result + further
    return result


def _ends(recorder: Recorder, outputs: Any) -> list[tuple[Tensor, Tensor]]:
    """The ends of a backward at tensors from outside that have a graph: their tracers, and the
    tensors.
    """
    tensors = [x for x in outputs if isinstance(x, Tensor) and not is_wrapped(x)]
    own = [x for x in tensors if isinstance(x, internals.Tracer) and recorder.owns(x)]
    found = [(x, x) for x in tensors if not any(x is one for one in own)]
    roots = [internals.node_of(x) for x in own]
    reached = internals.nodes_behind(roots).union(roots)
    return [
        *found,
        *((tracer, x) for tracer, node, x in recorder.results_from_outside if node in reached),
    ]


MAX_JACOBIAN = 2**20
"""The number of elements up to which a Jacobian of a graph from outside is computed."""


def _pulled(recorder: Recorder, y: Tensor, x: Tensor, cotangent: Tensor) -> Tensor | None:
    """The gradient of x for a cotangent of y, through a graph from outside."""
    jacobian = _jacobian(recorder, y, x)
    if jacobian is None:
        return None
    wide = torch.promote_types(cotangent.dtype, x.dtype)
    return torch.tensordot(cotangent.reshape(-1).to(wide), jacobian.to(wide), 1).to(x.dtype)


def _jacobian(recorder: Recorder, y: Tensor, x: Tensor) -> Tensor | None:
    """The Jacobian of a tensor from outside by another, as autograd recorded it; one row for
    each number in y.
    """
    if y.is_complex() or x.is_complex() or y.numel() * x.numel() > MAX_JACOBIAN:
        _refuse_graph(recorder)
    with internals.isolated(), internals.no_torch_function():
        count = y.numel()
        # a row has memory of its own: eager's backward of `as_strided` reads at an absolute offset
        basis = [row.reshape(y.shape).clone() for row in torch.eye(count).to(y)]
        rows = [
            _engine((y,), (row,), True, False, (x,), True, accumulate_grad=False)[0]
            for row in basis or [torch.zeros_like(y)]
        ]
        return None if rows[0] is None else torch.stack(rows)[:count]


def _refuse_graph(recorder: Recorder) -> NoReturn:
    error = UnsupportedCall(
        "autograd is asked for gradients through a graph that was recorded outside the traced"
        " function",
        source=recorder.where(),
        fix=(
            "Compute what is differentiated inside the function; for many cotangents use `vjp`"
            " and `vmap`."
        ),
    )
    error.is_eager = True
    raise error


divert("backward engine", _run_backward)


def _row_by_row(func: Callable[..., Any], *dims: int, **options: Any) -> Callable[..., Any]:
    """The vmap of `torch.autograd.grad(is_grads_batched=True)` and of vectorised Jacobians, in a
    capture: one row after the other, since its batched tensors are nobody's tracers.
    """

    def run(*args: Any) -> Any:
        tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
        count = tensors[0].shape[0]
        rows: list[Any] = []
        for i in range(max(count, 1)):
            with setting(_has_more_rows, _has_more_rows.get() or i + 1 < count):
                rows.append(func(*tree_map(lambda x, i=i: _row(x, i), args)))
        return _stacked(rows, count)

    is_ours = current() is not None
    original = original_of(internals.higher_order_function("rows of a backward"))
    return run if is_ours else original(func, *dims, **options)


def _row(x: Any, i: int) -> Any:
    """Row i of a batched argument; zeros if it has none."""
    if not isinstance(x, Tensor):
        return x
    return x[i] if x.shape[0] else x.new_zeros(x.shape[1:])


def _stacked(rows: list[Any], count: int) -> Any:
    """The results of all rows, of which each may be None, as batched ones."""
    if isinstance(rows[0], (tuple, list)):
        return tuple(_stacked(list(parts), count) for parts in zip(*rows, strict=True))
    return None if rows[0] is None else torch.stack(rows)[:count]


divert("rows of a backward", _row_by_row)


def _column_by_column(
    func: Callable[..., Any], inputs: Any, strict: bool = False, vectorize: bool = False
) -> Any:
    """PyTorch's Jacobian by forward mode. Its vmap calls the function once and notes the outputs
    of that call, where captures call it for each column.
    """
    functional: Any = torch.autograd.functional
    if current() is None or strict or not vectorize:
        original = original_of(internals.higher_order_function("columns of forward mode"))
        return original(func, inputs, strict, vectorize)
    is_tuple, inputs = functional._as_tuple(inputs, "inputs", "jacobian")
    sizes = [one.numel() for one in inputs]
    bases = functional._construct_standard_basis_for(inputs, tuple(sizes))
    is_outputs_tuple, columns = False, list[list[Tensor]]()
    for tangents in zip(*bases, strict=True):
        with forward_ad.dual_level():
            duals = (
                forward_ad.make_dual(x, v.view_as(x)) for x, v in zip(inputs, tangents, strict=True)
            )
            is_outputs_tuple, outputs = functional._as_tuple(func(*duals), "outputs")
            pairs = map(forward_ad.unpack_dual, outputs)
            columns.append([torch.zeros_like(y) if v is None else v for y, v in pairs])
    jacobians = [
        [
            part.reshape(*part.shape[:-1], *x.shape)
            for part, x in zip(torch.stack(column, -1).split(sizes, -1), inputs, strict=True)
        ]
        for column in zip(*columns, strict=True)
    ]
    return functional._tuple_postprocess(jacobians, (is_outputs_tuple, is_tuple))


divert("columns of forward mode", _column_by_column)


def _recurrent(cell: str) -> Callable[..., Any]:
    original = CELLS[cell]

    def instead(x: Any, *rest: Any) -> Any:
        """Run on packed sequences as ops that read their lengths when they run, and so what cuDNN
        runs. On CPUs autocast casts inside of PyTorch's only.
        """
        recorder, args = current(), (x, *rest)
        if recorder is not None and len(args) > 2 and is_of_cudnn(x):
            run = packed_rnn if is_packed(cell, args) else whole_rnn
            return run(cell, *tree_map(_cast, args))
        if is_packed(cell, args):
            is_cast = torch.is_autocast_enabled(x.device.type)
            return original(*args) if is_cast else packed_rnn(cell, *args)
        if recorder is not None and recorder.symbolic and len(args) > 2:
            return _shaped(args[1], *_layer_by_layer(original, *args))
        return original(*args)

    return instead


def _cast(value: Any) -> Any:
    """A floating tensor as CUDA's autocast casts it for a recurrent layer."""
    if not isinstance(value, Tensor) or not torch.is_autocast_enabled("cuda"):
        return value
    is_cast = value.is_cuda and value.is_floating_point() and value.dtype != torch.float64
    return value.to(torch.get_autocast_dtype("cuda")) if is_cast else value


def _layer_by_layer(  # noqa: PLR0913 - PyTorch's signature
    original: Callable[..., Any],
    x: Tensor,
    state: Any,
    weights: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Run a recurrent function layer by layer. PyTorch's Python code for symbolic sizes forgets
    to drop.
    """
    if num_layers == 1 or not train or dropout == 0:
        return original(
            x, state, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )
    states, count, width = tuple(state), len(weights) // num_layers, 2 if bidirectional else 1
    if isinstance(state, Tensor):
        states = (state,)
    x, finals = x.transpose(0, 1) if batch_first else x, list[tuple[Tensor, ...]]()
    for layer in range(num_layers):
        first = tuple(one[layer * width : (layer + 1) * width] for one in states)
        given = first[0] if isinstance(state, Tensor) else first
        own = weights[layer * count : (layer + 1) * count]
        x, *last = original(x, given, own, has_biases, 1, 0.0, train, bidirectional, False)
        finals.append(tuple(last))
        if layer < num_layers - 1:
            x = torch.dropout(x, dropout, train=True)
    return (x.transpose(0, 1) if batch_first else x, *map(torch.cat, zip(*finals, strict=True)))


def _shaped(state: Any, x: Tensor, *finals: Tensor) -> tuple[Tensor, ...]:
    """The final states have the dims of the first: those of an LSTM come with one more out of
    PyTorch 2.11's Python code.
    """
    ndim = (state if isinstance(state, Tensor) else state[0]).ndim
    return (x, *(final if final.ndim == ndim else final.squeeze(1) for final in finals))


def squeeze(x: Tensor, *dim: Any, **named: Any) -> Tensor:
    """Drop one dim after the other where sizes depend on data: the program holds for calls in
    which those that go have size 1, and rules of `squeeze` take other sizes for two or more.
    """
    given = named.get("dim", dim)
    given = given if isinstance(given, (tuple, list)) else (given,)
    given = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    is_plain = len(named) > 1 or not any(map(internals.depends_on_data, x.shape))
    if is_plain or not all(isinstance(one, int) and -x.ndim <= one < x.ndim for one in given):
        return Tensor.squeeze(x, *dim, **named)
    dims = {one % x.ndim for one in given} if dim or named else range(x.ndim)
    for one in sorted(dims, reverse=True):
        x = x.select(one, 0) if _is_one(x.shape[one]) else Tensor.squeeze(x, one)
    return x


def unbind(x: Tensor, dim: int = 0) -> Any:
    """Select each slice where their number depends on data: the program holds for so many."""
    if type(dim) is int and -x.ndim <= dim < x.ndim and internals.depends_on_data(x.shape[dim]):
        count = int(x.shape[dim])
        internals.demand(x.shape[dim] == count, f"{count} slices are not all there are")
        return tuple(x.select(dim, index) for index in range(count))
    return Tensor.unbind(x, dim)


def _is_one(size: Any) -> bool:
    """Ask whether a size that depends on data is 1. Where that is not known, it is not, and the
    program checks it; a function that can run in parts does.
    """
    recorder = current()
    if recorder is None or not internals.depends_on_data(size):
        return False
    said = internals.says(size == 1)
    return bool(size == 1) if said is None and recorder.texts.is_wary else bool(said)


def _becoming(change: Callable[..., Any], view: Callable[..., Tensor]) -> Callable[..., Any]:
    def instead(x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        if is_wrapped(x) or (x.requires_grad and not torch.is_grad_enabled()):
            _check_own_gradient(x, view)
        if is_wrapped(x) or (x.requires_grad and internals.is_leaf(x)):
            return change(x, *args, **kwargs)
        with torch.enable_grad():
            internals.become(x, view(x, *args, **kwargs))
        return x

    return instead


def _check_own_gradient(x: Tensor, view: Any) -> None:
    """Refuse to change the shape of a tensor where its gradient keeps the old one. Eager PyTorch
    sums a gradient over dims of size 1, and takes others for those of the old shape.
    """
    recorder = current()
    if torch.is_grad_enabled() or recorder is None or not x.requires_grad:
        return
    is_given = recorder.history.is_given(x)
    if not is_given and (internals.is_leaf(x) or view in (squeeze, Tensor.unsqueeze)):
        return
    what = (
        f"the shape of {with_article(type_of_value(x))}{' from outside' * is_given} that requires"
        " grad is changed in place where gradients are off"
    )
    fix = "Compute with a view such as `x.t()`, or change the tensor where f is called."
    raise UnsupportedCall(what, source=recorder.source, fix=fix)


def _resized(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that resizes a tensor in place. A view becomes another one of the same memory,
    where that has room.
    """

    def instead(x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        base = None if is_wrapped(x) else internals.base_of(x)
        if base is None:
            return original(x, *args, **kwargs)
        layout = kwargs.get("memory_format")
        if layout not in (None, torch.contiguous_format):
            what = f"a view is resized in place to {layout}"
            raise UnsupportedCall(what, fix="Compute with `x.as_strided(...)`, or copy it first.")
        if original in _RESIZE_AS:
            args = tuple(args[0].shape)
        size = torch.Size(args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
        end = base.storage_offset() + internals.extent(base.shape, base.stride())
        if x.storage_offset() + size.numel() > end:
            return original(x, *args, **kwargs)
        if size == x.shape and layout is None:
            return x
        strides = [size[i + 1 :].numel() for i in range(len(size))]
        return _BECOMING_STRIDED(x, size, strides)

    return instead


_BECOMING_STRIDED = _becoming(Tensor.as_strided_, as_strided)
_RESIZE_AS = (
    torch.resize_as_,
    Tensor.resize_as_,
    torch.ops.aten.resize_as_,
    torch.ops.aten.resize_as_.default,
)
RESIZED = {
    change: _resized(change)
    for change in (
        Tensor.resize_,
        torch.ops.aten.resize_,
        torch.ops.aten.resize_.default,
        *_RESIZE_AS,
    )
}

_VIEWS = ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze", "as_strided")
_OWN_VIEWS: dict[str, Callable[..., Tensor]] = {"as_strided": as_strided, "squeeze": squeeze}
VIEWS_IN_PLACE: dict[Any, Callable[..., Any]] = {
    change: _becoming(change, _OWN_VIEWS.get(name) or getattr(Tensor, name))
    for name in _VIEWS
    for change in (
        getattr(Tensor, f"{name}_"),
        getattr(torch, f"{name}_", None),
        getattr(torch.ops.aten, f"{name}_"),
        *(
            getattr(packet, overload)
            for packet in [getattr(torch.ops.aten, f"{name}_")]
            for overload in packet.overloads()
        ),
    )
    if change is not None
}
"""`x.transpose_(0, 1)` and its like: x becomes a view of its old tensor, which others may view too.

A plain tensor's views are told by strides. Those of a tracer are made again by their ops, which
want it as it was.
"""


def _unsafe(
    original: Callable[..., Any], safe: Callable[..., Any]
) -> Callable[..., tuple[Tensor, ...]]:
    def instead(x: Tensor, /, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        x = x.resolve_neg().resolve_conj()  # PyTorch has no kernel for the bits, and copies
        parts, recorder = original(x, *args, **kwargs), current()
        if recorder is not None and not is_wrapped(x):
            for view, part in zip(safe(x, *args, **kwargs), parts, strict=True):
                recorder.history.share(view, part)
        return parts

    return instead


UNSAFE: dict[Any, Callable[..., Any]] = {
    getattr(owner, f"unsafe_{name}"): _unsafe(
        getattr(owner, f"unsafe_{name}"), getattr(owner, name)
    )
    for owner, names in (
        (Tensor, ("chunk", "split", "split_with_sizes")),
        (torch, ("chunk", "split", "split_with_sizes")),
    )
    for name in names
}
"""`x.unsafe_chunk(2)` and its like: parts in the memory of x, each with a history of its own."""


def _is_definite(constraint: Any, value: Tensor) -> Tensor:
    """The arguments of distributions are not validated."""
    return torch.ones(value.shape[:-2], dtype=torch.bool, device=value.device)


def _fused(step: Callable[..., None]) -> Callable[..., None]:
    """A fused step of an optimizer that takes a symbolic learning rate as a tensor: PyTorch knows
    the other numbers of the op.
    """

    def instead(*args: Any, lr: Any, **options: Any) -> None:
        rate = lr
        if isinstance(lr, Sym):
            rate = torch.scalar_tensor(rate, dtype=torch.float64)
        step(*args, lr=rate, **options)

    return instead


def _saved_tensors_hooks(self: Any) -> None:
    """Hooks on what autograd saves: they run for a backward inside the traced function.
    `save_on_cpu` changes no value.

    Raises:
        UnsupportedCall: something from outside requires grad. A later backward, by the trace's
            rules, would not run them.
    """
    recorder = current()
    if recorder is None or not any(tracer.requires_grad for tracer in recorder.given):
        internals.enter_saved_tensors_hooks(self)
        if recorder is not None:
            recorder.call.runs_users = True
    elif isinstance(self, torch.autograd.graph.save_on_cpu):
        internals.save_as_it_is()
    else:
        raise UnsupportedCall(
            "`saved_tensors_hooks` are used in a traced function that is differentiated; its"
            " backward would not run them",
            source=recorder.where(),
            fix=(
                "Use `checkpoint` to save memory, `custom_vjp` to change a gradient, or hooks"
                " around the traced function."
            ),
        )


divert("saved tensors hooks", _saved_tensors_hooks)
divert("positive definite", _is_definite)
divert("positive semidefinite", _is_definite)

REWRITTEN: dict[Any, Callable[..., Any]] = {
    **{
        function: instead
        for instead, overloads in ((squeeze, ("default", "dim")), (unbind, ("int",)))
        for packet in [getattr(torch.ops.aten, instead.__name__)]
        for function in (
            getattr(torch, instead.__name__),
            getattr(Tensor, instead.__name__),
            packet,
            *(getattr(packet, overload) for overload in overloads),
        )
    },
    torch.dropout: dropout,
    torch.batch_norm: batch_norm,
    torch.nn.functional.one_hot: one_hot,
    **VIEWS_IN_PLACE,
    **RESIZED,
    **UNSAFE,
    **dict.fromkeys((torch.as_strided, Tensor.as_strided), as_strided),
    **dict.fromkeys((torch.ops.aten.as_strided, torch.ops.aten.as_strided.default), as_strided),
    **{
        function: _addressed(function, count)
        for count, name in ((2, "as_strided_copy"), (3, "as_strided_scatter"))
        for packet in [getattr(torch.ops.aten, name)]
        for function in (getattr(torch, name), packet, packet.default)
    },
    Tensor.as_strided_scatter: _addressed(Tensor.as_strided_scatter, 3),
    Tensor.__deepcopy__: deepcopy,
    Tensor.tolist: tolist,
    torch.as_tensor: as_tensor,
    torch.ctc_loss: ctc_loss,
    internals.PACK_PADDED_SEQUENCE: pack_padded_sequence,
    internals.PAD_PACKED_SEQUENCE: pad_packed_sequence,
    **{original: _recurrent(cell) for cell, original in CELLS.items()},
    torch.tensor: tensor,
    **{step: _fused(step) for step in internals.FUSED_FUNCTIONS},
}
