"""Results of ops on fake tensors where PyTorch has no rule, or a wrong one."""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    has_free_unbacked_symbols,
)
from torch.utils._pytree import tree_leaves, tree_map

from thunder_fn.torch_internals.calls import aten, runnable
from thunder_fn.torch_internals.modes import isolated, no_torch_function, only_memory

WITH_LOG_SUMS = (
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
"""Kernels that give the log-sum-exp if they are asked for it, by their fifth argument."""


def asking_log_sums(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of such a kernel, asking for what its backward reads: a trace may be
    differentiated later.
    """
    if "compute_log_sumexp" in kwargs:
        return args, {**kwargs, "compute_log_sumexp": True}
    return (*args[:4], True, *args[5:]), kwargs


QUESTIONS: dict[Any, Callable[..., Any]] = {
    aten.equal.default: lambda a, b: aten.all(aten.eq(a, b)),
    aten.allclose.default: lambda *args, **kwargs: aten.all(aten.isclose(*args, **kwargs)),
    aten._local_scalar_dense.default: lambda a: aten.ne(a, 0),
}
"""Ops with which PyTorch asks whether something is true, and the answer as a tensor."""


def eager_error(func: Any, args: Any, kwargs: Any) -> Exception | None:
    """The error of an op on small tensors of these types, in the class and the words of eager
    mode: rules for fake tensors have their own. None where it has none.
    """

    def real(leaf: Any) -> Any:
        is_fake = isinstance(leaf, torch.Tensor)
        return torch.zeros(tuple(leaf.shape), dtype=leaf.dtype) if is_fake else leaf

    leaves = tree_leaves((args, kwargs))
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    is_static = all(type(size) is int for shape in shapes for size in shape)
    others = (torch.SymInt, torch.SymFloat, torch.device, torch.Generator)
    if not is_static or any(isinstance(leaf, others) for leaf in leaves):
        return None
    if sum(map(math.prod, shapes)) > _SMALL:
        return None
    with only_memory(), torch._C._DisablePythonDispatcher():
        try:
            func(*tree_map(real, args), **tree_map(real, kwargs))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return error.with_traceback(None)
    return None


_SMALL = 1 << 16
"""The number of elements up to which an op is run for its error."""


def _lstsq(
    a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> Any:
    """Residuals are computed for more equations than unknowns, by gels always, by gelsd and
    gelss if the rank is full. The kernel takes as many batch dims of b as a has.
    """
    driver = driver or ("gelsy" if a.device.type == "cpu" else "gels")
    (m, n), batch = a.shape[-2:], list(a.shape[:-2])
    if m > n and driver in ("gelsd", "gelss"):
        return NotImplemented
    is_vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and a.shape[:-1] == b.shape)
    columns = [] if is_vector else [b.shape[-1]]
    both = list(torch.broadcast_shapes(batch, b.shape[: a.dim() - 2]))
    residuals = [*both, *(columns or [1])] if m > n and driver == "gels" else [0]
    real = a.dtype.to_real()
    return (
        b.new_empty([*both, n, *columns]),
        b.new_empty(residuals, dtype=real),
        a.new_empty([0] if driver == "gels" else batch, dtype=torch.int64),
        a.new_empty([*batch, min(m, n)] if driver in ("gelsd", "gelss") else [0], dtype=real),
    )


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    batch = len(target_lengths)
    longest = max(target_lengths, default=0)
    alpha = log_probs.new_empty([batch, log_probs.shape[0], 2 * longest + 1])
    return log_probs.new_empty([batch] if log_probs.dim() == 3 else []), alpha


def _ctc_loss_of_tensors(
    log_probs: FakeTensor, targets: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Compute the loss as above, where data says how long the longest target is."""
    numbers = log_probs.fake_mode.shape_env
    if numbers is None or not numbers.allow_dynamic_output_shape_ops:
        return NotImplemented
    lengths = args[0]
    alpha = log_probs.new_empty(
        [lengths.numel(), log_probs.shape[0], numbers.create_unbacked_symint()]
    )
    return log_probs.new_empty([lengths.numel()] if log_probs.dim() == 3 else []), alpha


def _ctc_loss_backward(
    grad: torch.Tensor, log_probs: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    return torch.empty_like(log_probs)


def _cdist_backward(
    grad: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor, p: float, cdist: torch.Tensor
) -> Any:
    """One gradient for each pair of batches, which autograd sums; without any pair or number,
    zeros like x1.
    """
    batches = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    is_empty = any(
        isinstance(size, int) and size == 0 for size in (*batches, *x1.shape[-2:], x2.shape[-2])
    )
    return x1.new_empty(x1.shape if is_empty else [*batches, *x1.shape[-2:]])


def _rnn_layer(*args: Any) -> Any:
    """Run with the workspace that its backward needs, whose size oneDNN decides: PyTorch says
    that it is empty.
    """
    asked = tuple(
        (tuple(arg.shape), arg.dtype) if isinstance(arg, torch.Tensor) else _frozen(arg)
        for arg in args
    )
    *results, workspace = torch._meta_registrations.mkldnn_rnn_layer(*args)
    return *results, workspace.new_empty(_workspace_bytes(asked))


def _frozen(arg: Any) -> Any:
    return tuple(arg) if isinstance(arg, list) else arg


@functools.lru_cache(maxsize=1024)
def _workspace_bytes(asked: tuple[Any, ...]) -> int:
    """Found by running the layer once on zeros, since nothing else knows."""
    with isolated(), no_torch_function():
        args = [torch.zeros(one[0], dtype=one[1]) if _is_type(one) else one for one in asked]
        return runnable(aten.mkldnn_rnn_layer.default)(*args)[-1].numel()


def _is_type(asked: Any) -> bool:
    return isinstance(asked, tuple) and len(asked) == 2 and isinstance(asked[1], torch.dtype)


def _bincount(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    """Sums of weights are floats: PyTorch 2.11 says that they are counts."""
    if weights is None:
        return NotImplemented
    dtype = weights.dtype if weights.dtype is torch.float32 else torch.float64
    return torch.empty_like(aten.bincount(x, None, minlength), dtype=dtype)


def _attention(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The logarithms are of the precision that is computed in: PyTorch 2.11 says float32 of
    float64 too.
    """
    out, logs = aten._scaled_dot_product_flash_attention_for_cpu(q, *args, **kwargs)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, (
        logs if logs.dtype == dtype else torch.empty_strided(logs.shape, logs.stride(), dtype=dtype)
    )


def _loss_backward(
    grad: torch.Tensor, input: torch.Tensor, target: torch.Tensor, *args: Any
) -> Any:
    """Differentiate a loss of no elements: PyTorch divides by their number in Python."""
    shape = torch.broadcast_shapes(input.shape, target.shape)
    is_empty = any(isinstance(size, int) and size == 0 for size in shape)
    return (
        input.new_empty(shape, dtype=torch.result_type(input, target))
        if is_empty
        else NotImplemented
    )


def _nearest(x: torch.Tensor, output_size: Any, *scales: Any, **named: Any) -> Any:
    """Interpolate a batch of nothing, which PyTorch's Python code takes for an error."""
    if type(x.shape[0]) is not int or x.shape[0] != 0:
        return NotImplemented
    return x.new_empty([*x.shape[:2], *output_size])


def _group_norm_backward(  # noqa: PLR0913 - PyTorch's signature
    cotangent: torch.Tensor,
    x: torch.Tensor,
    mean: Any,
    rstd: Any,
    weight: Any,
    n: Any,
    channels: Any,
    rest: Any,
    *others: Any,
) -> Any:
    """Differentiate a norm of no elements: PyTorch's formula divides by their number."""
    if type(rest) is not int or type(channels) is not int or rest * channels:
        return NotImplemented
    _, mask = others
    parts = torch.empty_like(x), x.new_empty((channels,)), x.new_empty((channels,))
    return tuple(part if wanted else None for part, wanted in zip(parts, mask, strict=True))


def _fused_step(func: OpOverload) -> Callable[..., Any]:
    """A step of an optimizer on lists of tensors, which returns a new list for each of the
    first.
    """
    count = len(func._schema.returns)
    return lambda *args, **kwargs: tuple(
        [torch.empty_like(tensor) for tensor in tensors] for tensors in args[:count]
    )


def _of_first(func: OpOverload) -> Callable[..., Any]:
    """An op of the dtype of its first argument, where PyTorch's rule promotes."""

    def result(x: torch.Tensor, other: Any, *args: Any, **kwargs: Any) -> Any:
        if x.dtype == other.dtype:
            return NotImplemented
        found = func(x, other, *args, **kwargs)
        return found if found.dtype == x.dtype else torch.empty_like(found, dtype=x.dtype)

    return result


def _norm(func: OpOverload) -> Callable[..., Any]:
    """A norm of small floats by parameters of float32: the CPU has its statistics in those."""

    def result(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        is_mixed = x.dtype in (torch.float16, torch.bfloat16) and any(
            isinstance(one, torch.Tensor) and one.dtype == torch.float32 for one in given
        )
        if not is_mixed or x.device.type != "cpu":
            return NotImplemented
        out, *statistics = func(x, *args, **kwargs)
        found = (torch.empty_like(one, dtype=torch.float32) for one in statistics[:2])
        return (out, *found, *statistics[2:])

    return result


def _on_one_device(func: OpOverload) -> Callable[..., Any]:
    """An op whose kernels take no number of the CPU beside tensors of a GPU, as PyTorch's rule
    does.
    """

    def result(*args: Any, **kwargs: Any) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        devices = list(dict.fromkeys(str(one.device) for one in given))
        if len(devices) > 1:
            raise RuntimeError(
                f"{func.name()}: expected all tensors to be on the same device, but found"
                f" {' and '.join(devices)}. Numbers of the CPU count too: move them, or pass"
                " Python's."
            )
        return NotImplemented

    return result


def _lstm_cell(a: Any, _: Any, cx: Any, *biases: Any) -> Any:
    """PyTorch asks for the device of a bias that is not there."""
    return cx.new_empty(cx.shape), cx.new_empty(cx.shape), a.new_empty(a.shape)


def _gru_cell(a: Any, _: Any, hx: Any, *biases: Any) -> Any:
    """PyTorch has no shapes for it."""
    rows, size = hx.shape
    return hx.new_empty(rows, size), a.new_empty(rows, 5 * size)


def _gru_cell_backward(grad: Any, _: Any, has_bias: bool) -> Any:
    rows, size = grad.shape
    gates = [grad.new_empty(rows, 3 * size) for _ in range(2)]
    biases = [grad.new_empty(3 * size) if has_bias else None for _ in range(2)]
    return *gates, grad.new_empty(rows, size), *biases


def _power(a: Any, b: Any) -> Any:
    """A power with a symbolic number, which PyTorch 2.11 compares with 0.5, 1 and 2."""
    if not isinstance(a, torch.SymFloat) and not isinstance(b, torch.SymFloat):
        return NotImplemented
    return aten.mul.Tensor(b, a) if isinstance(a, torch.SymFloat) else aten.mul.Tensor(a, b)


def _shift(as_bits: OpOverload) -> Callable[..., Any]:
    """A rule of a shift of bools, which the kernels compute in the type that both promote to."""

    def rule(x: torch.Tensor, by: Any) -> Any:
        is_promoted = x.dtype == torch.bool and torch.result_type(x, by) != torch.bool
        return as_bits(x, by) if is_promoted else NotImplemented

    return rule


def depends_on_data(size: Any) -> bool:
    """Test for a size that is found in a tensor's values."""
    return isinstance(size, torch.SymInt) and has_free_unbacked_symbols(size)


def says(is_so: Any) -> bool | None:
    """The truth of a relation of sizes; None if it depends on data that are not known. What is
    said holds for the program from then on.
    """
    try:
        said = bool(is_so)
    except GuardOnDataDependentSymNode:
        return None
    torch._check(is_so if said else torch.sym_not(is_so))
    return said


def _squeeze(x: torch.Tensor, dim: Any = None) -> Any:
    """PyTorch keeps a dim whose size depends on data, which is 1 in some calls: the program is for
    those where it is what it is in this one, or not 1 where that is not known.
    """
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    for size in [x.shape[one] for one in dims if -x.ndim <= one < x.ndim]:
        if depends_on_data(size) and says(size == 1) is None:
            torch._check(size != 1)
    return NotImplemented


FAKE_RESULTS: dict[Any, Callable[..., Any]] = {
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Scalar: _power,
    aten.__lshift__.Scalar: _shift(aten.bitwise_left_shift.Tensor_Scalar),
    aten.__lshift__.Tensor: _shift(aten.bitwise_left_shift.Tensor),
    aten.__rshift__.Scalar: _shift(aten.bitwise_right_shift.Tensor_Scalar),
    aten.__rshift__.Tensor: _shift(aten.bitwise_right_shift.Tensor),
    **{
        func: _of_first(func)
        for func in (
            aten.huber_loss.default,
            aten.soft_margin_loss.default,
            aten.normal.Tensor_Tensor,
        )
    },
    **{
        func: _norm(func)
        for func in (
            aten.native_layer_norm.default,
            aten.native_group_norm.default,
            aten.native_batch_norm.default,
            aten._native_batch_norm_legit.default,
            aten._native_batch_norm_legit.no_stats,
            aten._native_batch_norm_legit_functional.default,
            aten._batch_norm_with_update.default,
            aten._batch_norm_with_update_functional.default,
            aten._batch_norm_no_update.default,
        )
    },
    **{
        func: _on_one_device(func)
        for func in (
            aten.clamp.Tensor,
            aten.clamp_max.Tensor,
            aten.clamp_min.Tensor,
            aten.stack.default,
            aten.cat.default,
            aten.gcd.default,
            aten.lcm.default,
            aten.igamma.default,
            aten.igammac.default,
            aten.logaddexp.default,
            aten.logaddexp2.default,
            aten.nextafter.default,
        )
    },
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.mse_loss_backward.default: _loss_backward,
    aten.huber_loss_backward.default: _loss_backward,
    aten.smooth_l1_loss_backward.default: _loss_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten.bincount.default: _bincount,
    aten.mkldnn_rnn_layer.default: _rnn_layer,
    aten._cdist_backward.default: _cdist_backward,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss_of_tensors,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten.linalg_lstsq.default: _lstsq,
    **{
        getattr(aten, f"{name}{dims}d").default: _nearest
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for dims in (1, 2, 3)
    },
    **{
        getattr(getattr(aten, name), overload): _fused_step(getattr(getattr(aten, name), overload))
        for name in ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
        for overload in getattr(aten, name).overloads()
        if not overload.endswith("out")
    },
}
"""Results of ops that PyTorch says depend on data and whose shape does not, or whose type it
says wrongly.
"""


def call_on_fakes(overload: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Call an op on fake tensors, in their mode."""
    rule = FAKE_RESULTS.get(overload)
    result = NotImplemented if rule is None else rule(*args, **kwargs)
    return overload(*args, **kwargs) if result is NotImplemented else result
