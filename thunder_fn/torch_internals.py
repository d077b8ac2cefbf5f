"""Every private PyTorch API that thunder_fn uses, behind names of our own.

A new PyTorch release should break this file and no other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, disable_functional_mode
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from thunder_fn.trace import TensorType

__all__ = [
    "DATA_DEPENDENT_SHAPE",
    "DATA_DEPENDENT_VALUE",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "RecordingMode",
    "compiling",
    "fake_like",
    "fake_of_type",
    "functionalize",
    "only_mode",
    "inner_fake",
    "is_below_tracers",
    "isolated",
    "without_torch_function_checks",
]

DATA_DEPENDENT_VALUE = DataDependentOutputException
DATA_DEPENDENT_SHAPE = DynamicOutputShapeException

OnOp = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


# ---- recording: a fake tensor mode that reports every op below autograd and functionalization ----


class RecordingMode(FakeTensorMode):
    """FakeTensorMode that calls `on_op(overload, args, kwargs, result)` for every op that reaches it.

    It sits where FakeTensorMode always sits, at the bottom of the dispatcher's modes, so what it sees is functional
    and differentiation, batching and autocast have already happened.
    """

    supports_higher_order_operators = True

    def __init__(self, on_op: OnOp) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._on_op = on_op
        self._silent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._silent:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self.silent():
            result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            self._on_op(func, args, kwargs, result)
        return result

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Ops inside are not reported."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1


@contextlib.contextmanager
def only_mode(mode: RecordingMode) -> Iterator[None]:
    """Tensors made inside are fake tensors of mode, and nothing is reported."""
    with torch._C.DisableTorchFunction(), disable_functional_mode(), mode.silent(), mode:
        yield


def fake_like(mode: RecordingMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of mode with the dtype, sizes, strides and device of `tensor`, unrelated to it otherwise."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    with only_mode(mode):
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)


def fake_of_type(mode: RecordingMode, type: TensorType) -> torch.Tensor:
    """A contiguous fake tensor of mode."""
    with only_mode(mode):
        return torch.empty(type.shape, dtype=type.dtype, device=type.device)


def functionalize(fake: torch.Tensor, mode: FunctionalTensorMode) -> torch.Tensor:
    """Wrap a fake tensor so that in-place code and views on it come out pure."""
    with mode:
        return FunctionalTensor.to_functional(fake)


def inner_fake(tensor: torch.Tensor) -> torch.Tensor:
    """The up-to-date fake tensor inside a functional one; replays pending view updates."""
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor.elem)  # type: ignore[attr-defined]


def is_below_tracers(tensor: torch.Tensor, mode: RecordingMode) -> bool:
    """The tensor is what a tracer is made of: PyTorch's own machinery is at work, not the traced function."""
    if isinstance(tensor, FakeTensor):
        return tensor.fake_mode is mode
    return torch._is_functional_tensor(tensor) and not isinstance(tensor, FunctionalTensor)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """No dispatch modes and no torch.func levels: a capture starts from nothing, whatever runs around it."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Weights cast by autocast are cast anew, so that no cast made in one capture is used in another."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


# ---- torch.compiler.is_compiling() answers True in the threads that capture, and only there ----


class _CompilingHere(threading.local):
    depth = 0

    def __bool__(self) -> bool:
        return self.depth > 0 or bool(_compiling_before)


_compiling_here = _CompilingHere()
_compiling_lock = threading.Lock()
_compiling_users = 0
_compiling_before: Any = False


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """`torch.compiler.is_compiling()` is true in this thread; libraries then skip their data-dependent checks."""
    global _compiling_users, _compiling_before
    with _compiling_lock:
        if _compiling_users == 0:
            _compiling_before = torch.compiler._is_compiling_flag
            torch.compiler._is_compiling_flag = _compiling_here  # type: ignore[assignment]
        _compiling_users += 1
    _compiling_here.depth += 1
    try:
        yield
    finally:
        _compiling_here.depth -= 1
        with _compiling_lock:
            _compiling_users -= 1
            if _compiling_users == 0:
                torch.compiler._is_compiling_flag = _compiling_before


# ---- torch functions written in Python ----

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _no_torch_function(*args: Any) -> bool:
    return False


def without_torch_function_checks(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a Python torch function that skips its own `has_torch_function` check.

    Run under a TorchFunctionMode, the copy's body is seen by the mode though the function itself has been already.
    The original is not touched.
    """
    code, names = function.__code__, function.__globals__
    if not any(name in names for name in _CHECKS):
        return function
    patched = {**names, **{name: _no_torch_function for name in _CHECKS if name in names}}
    copy = type(function)(code, patched, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# ---- decompositions ----


def decomposition_of(overload: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """PyTorch's decomposition of an op: from its Python tables, or the C++ one of a composite op."""
    from torch._decomp import decomposition_table

    if overload in decomposition_table:
        return decomposition_table[overload]
    if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), torch._C.DispatchKey.CompositeImplicitAutograd):
        return overload.decompose
    return None
