"""Values that can be part of a trace, and the errors for others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.generators import TracedState, state_error
from thunder_fn.errors import EscapedTracer, UnsupportedCall, UnsupportedInput, kind_of
from thunder_fn.ir.text import shown
from thunder_fn.ir.trace import Expr, Literal, Op, Source, as_dim

LITERALS = (
    Expr,
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    type(None),
)


class EscapedValue(internals.Tracer):
    """The value that a tracer becomes when its capture has ended: the tensor that eager code would
    have kept, where the capture knows it, such as a table that a model makes at its first call.

    `find`: computes that tensor; None if it cannot be known.
    """

    find: Callable[[], torch.Tensor | None] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tensors_in((args, kwargs))
        for tensor in given:
            if type(tensor) is EscapedValue and not has_settled(tensor):
                raise escaped_error(func)
        return func(*args, **(kwargs or {}))

    def __repr__(self, **kwargs: Any) -> str:
        return repr(self) if has_settled(self) else "EscapedTracer()"


def has_settled(tensor: torch.Tensor) -> bool:
    """Let the tensor that an escaped tracer stands for take its place, and tell whether there is
    one. Other tensors stay. Whatever is being traced where it is asked for sees nothing of it.
    """
    if type(tensor) is not EscapedValue:
        return True
    with internals.isolated():
        value = None if tensor.find is None else tensor.find()
        if value is None:
            tensor.find = None
            return False
        internals.become_plain(tensor, value)
    return True


def escaped_error(func: Any = None) -> EscapedTracer:
    """The error for a tracer that is used when its capture has ended."""
    used = f" by {getattr(func, '__name__', func)}" if func is not None else ""
    return EscapedTracer(
        f"a tracer was used{used} after the function that made it had been traced",
        fix=(
            "Return the value from the traced function instead of storing it in a global, a"
            " closure or an attribute."
        ),
    )


def thread_error(func: Any, source: Source | None) -> UnsupportedCall:
    """The error for a tracer that is used in another thread than the one that traces."""
    thread, name = threading.current_thread().name, getattr(func, "__name__", func)
    return UnsupportedCall(
        f"the thread {thread!r} calls `{name}` on a tracer, while the function is traced in"
        " another thread",
        source=source,
        fix=(
            "Compute in the traced function itself, not in a thread that it starts; or start"
            " threads outside, and call the traced function in each of them."
        ),
    )


def higher_order_error(func: Any, args: tuple[Any, ...], source: Source | None) -> UnsupportedCall:
    """The error for PyTorch's ops that take functions."""
    name = str(func).removeprefix("torch.ops.higher_order.")
    text = f"PyTorch's higher-order op `{name}` cannot be captured"
    return UnsupportedCall(text, source=source, fix="Call it outside the traced function.")


def check_forward_mode(source: Source | None) -> None:
    """Refuse code that turns forward mode off alone: a trace stops derivatives of both modes. The
    forward of an autograd function runs with both off.
    """
    if torch.is_grad_enabled():
        what = "forward mode is turned off inside a traced function, by `_set_fwd_grad_enabled`"
        raise UnsupportedCall(
            what, source=source, fix="Write `x.detach()`, which stops both modes."
        )


def check_results(op: Op, values: Sequence[Any], source: Source | None) -> None:
    """Refuse a result of an op that has no type.

    Raises:
        UnsupportedCall: a result is sparse, nested or quantized.
    """
    has_types = all(
        internals.has_type(value) for value in values if isinstance(value, torch.Tensor)
    )
    if not has_types or op.name.startswith(
        "aten.quantize_per"
    ):  # their fake results look like plain tensors
        raise UnsupportedCall(
            f"{op} makes a sparse, nested or quantized tensor, "
            "and a traced tensor has only a dtype, shape and device",
            source=source,
            fix="Keep it dense, or make it outside the traced function.",
        )


def encode_literal(value: Any, source: Source | None = None) -> Literal:
    """A Python value as a literal of the trace."""
    value = as_dim(value)
    if isinstance(value, LITERALS):
        return Literal(value)
    what = (
        f"an op was called with {kind_of(value)}, which cannot be part of a trace:"
        f" {shown(value, 80)}"
    )
    fix = "Pass tensors, numbers, strings, dtypes, devices or None."
    raise UnsupportedInput(what, source=source, fix=fix)


is_wrapped = internals.is_functorch_wrapped
"""Test for a torch.func wrapper: made inside the traced function, it stays as it is."""


def check_supported(
    tensor: torch.Tensor, what: Callable[[], str] = lambda: "a closed-over tensor"
) -> None:
    """Raise for tensors that have no type in a trace; `what` says which one."""
    if not has_settled(tensor):
        raise escaped_error()
    if type(tensor) is TracedState:
        raise state_error("the result of `torch.get_rng_state` is used", None)
    with internals.no_torch_function():
        kind, fix = _unsupported(tensor)
    if kind:
        text = (
            f"{what()} is {kind}, which cannot be traced: the type of a tensor is its dtype, shape"
            " and device"
        )
        error = UnsupportedInput(text, fix=fix)
        with internals.no_torch_function():
            error.is_eager = tensor.is_nested or tensor.layout is not torch.strided
        raise error


def has_symbols(tensor: torch.Tensor) -> bool:
    """Test for a tensor whose sizes are symbols of PyTorch's."""
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def _unsupported(tensor: torch.Tensor) -> tuple[str, str]:
    components = "or pass its components as separate tensors."
    if internals.is_make_fx() and not internals.is_tracer(tensor) and has_symbols(tensor):
        kind = "a tensor whose sizes are symbols of PyTorch's `make_fx`"
        return kind, "Leave `tracing_mode='symbolic'` out, or `export` it with ranges of sizes."
    if tensor.is_nested:
        return "a nested tensor", f"Convert it with `.to_padded_tensor(0)`, {components}"
    if getattr(tensor, "is_quantized", False):
        return "a quantized tensor", f"Convert it with `.dequantize()`, {components}"
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").removeprefix("_")
        return f"a tensor of layout {layout}", f"Convert it with `.to_dense()`, {components}"
    if internals.has_own_dispatch(tensor):
        return (
            f"{kind_of(tensor)}, a tensor class with its own dispatch",
            "Pass the plain tensors that it holds.",
        )
    return "", ""
