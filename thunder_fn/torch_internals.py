"""Every private PyTorch API that thunder_fn uses, behind names of our own.

A new PyTorch release should break this file and no other.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, disable_functional_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

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


# ---- calls: C functions for overloads, and running below autograd ----

below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context: ops skip autograd's part of the dispatcher. Half a microsecond to enter, a tenth saved on each op."""

_C_MODULES = (
    ("torch", torch._C._VariableFunctions),
    ("torch._C._nn", torch._C._nn),
    ("torch.special", torch._C._special),
    ("torch.linalg", torch._C._linalg),
    ("torch.fft", torch._C._fft),
    ("torch.Tensor", torch._C.TensorBase),
)


def c_functions(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """PyTorch's C-bound functions of this name, with where they are from. They are called faster than overloads."""
    for label, module in _C_MODULES:
        function = getattr(module, name, None)
        if function is not None and type(function).__name__ in ("builtin_function_or_method", "method_descriptor"):
            yield label, function


def is_decomposed(overload: torch._ops.OpOverload) -> bool:
    """The op has no kernel: PyTorch runs it as other ops, and may return an input as it is."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), torch._C.DispatchKey.CompositeImplicitAutograd)


def schema_arguments(overload: torch._ops.OpOverload) -> list[Any]:
    """The op's arguments: each has `name`, `type`, `kwarg_only` and `alias_info`."""
    return list(overload._schema.arguments)


class _FirstOp(Exception):
    """Carries the first op that a call dispatches out of it, before any kernel runs."""


class _FirstOpMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _FirstOp(func, tuple(args), dict(kwargs or {}))


def first_op(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The overload and the arguments with which a call first reaches the dispatcher, None if it fails before."""
    with isolated(), torch._C.DisableTorchFunction(), torch.no_grad(), _FirstOpMode():
        try:
            function(*args, **kwargs)
        except _FirstOp as found:
            return found.args[0], found.args[1], found.args[2]
        except (TypeError, RuntimeError, ValueError, IndexError, NotImplementedError):
            return None
    return None


# ---- guards ----


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A C++ check that tensors are like these in class, dtype, sizes, strides, device and requires_grad.

    It holds no reference to them. It is False where one tensor is passed twice.
    """
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def global_state_guard() -> Callable[[], bool]:
    """A C++ check that grad mode, autocast, default dtype, determinism and thread count are as they are now."""
    return GlobalStateGuard().check


def global_state() -> tuple[Any, ...]:
    """What changes the meaning of a PyTorch program, as a key: the guard's state but for the thread count, and modes."""
    state = json.loads(GlobalStateGuard().__getstate__())
    flags = tuple((name, repr(value)) for name, value in sorted(state.items()) if name != "num_threads")
    modes = tuple((type(mode), str(getattr(mode, "device", id(mode)))) for mode in function_modes())
    return flags, modes


def function_modes() -> list[Any]:
    """The active torch function modes, such as that of `torch.set_default_device`."""
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many torch function modes are active."""


def inside_torch_func() -> bool:
    """A transform of torch.func is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_exclusive(tensor: torch.Tensor) -> bool:
    """No other tensor, array or view shares the tensor's memory, as far as PyTorch knows."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == 2 and storage.resizable()  # its own, and `storage` here


# ---- batching ----


@contextlib.contextmanager
def no_vmap_fallback() -> Iterator[None]:
    """Ops without a batching rule raise instead of running in a loop that PyTorch hides."""
    before = torch._C._functorch._is_vmap_fallback_enabled()
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(before)
