"""Contexts: modes and states of PyTorch that are active while something runs."""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def only_memory() -> Generator[None]:
    """Hide tensors that are made inside from all modes and torch.func levels."""
    outside = temporarily_clear_interpreter_stack()
    with outside, torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


get_dispatch_mode = torch._C._get_dispatch_mode


@classmethod
def never_compiled(cls: type) -> bool:
    """Answer PyTorch that nothing has to keep Dynamo out of a mode: a capture runs outside of it
    (`outside_dynamo`). The wrapper that does so imports Dynamo and costs microseconds for each op.
    """
    return False


_KEYS = torch._C._TorchDispatchModeKey
PROXY, FAKE, FUNCTIONAL = _KEYS.PROXY, _KEYS.FAKE, _KEYS.FUNCTIONAL

levels_outside: ContextVar[int] = ContextVar("thunder_fn_levels_outside", default=0)


def forward_mode_on() -> contextlib.AbstractContextManager[None]:
    """Let forward mode follow what runs inside, as `torch.func.jvp` does."""
    return forward_ad._set_fwd_grad_enabled(True)


def is_forward_mode_on() -> bool:
    """Test whether forward mode follows what runs now."""
    return torch._C._is_fwd_grad_enabled()


def is_multithreaded() -> bool:
    """Test whether backwards may use threads: none of a capture does."""
    return torch._C._is_multithreading_enabled()


@contextlib.contextmanager
def isolated() -> Generator[None]:
    """Leave all modes and torch.func levels: a capture starts from nothing but the grad mode,
    whatever runs around it.
    """
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    token = levels_outside.set(depth + levels_outside.get())
    try:
        with (
            temporarily_clear_interpreter_stack(),
            _disable_current_modes(),
            torch.autograd.set_multithreading_enabled(False),
            outside_inference_mode(),
            outside_saved_tensors_hooks(),
            autograd_as_usual(),
        ):
            yield
    finally:
        levels_outside.reset(token)


@contextlib.contextmanager
def outside_saved_tensors_hooks() -> Generator[None]:
    """Hooks of `saved_tensors_hooks` that run around a capture, as those of a checkpoint do, are
    not told of tracers.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    save_as_it_is()
    try:
        yield
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def save_as_it_is() -> None:
    """Begin a scope of `saved_tensors_hooks` in which autograd keeps what it saves."""
    same: Callable[[Any], Any] = lambda value: value
    torch._C._autograd._push_saved_tensors_default_hooks(same, same)


def enter_saved_tensors_hooks(hooks: Any) -> None:
    """Begin the scope of an object of `saved_tensors_hooks`, as its `__enter__` does."""
    torch._C._autograd._push_saved_tensors_default_hooks(hooks.pack_hook, hooks.unpack_hook)


@contextlib.contextmanager
def outside_inference_mode() -> Generator[None]:
    """Inference mode off, gradients on or off as they were: functional tensors look for memory
    in inference mode.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    gradients = torch.is_grad_enabled()
    with torch._C._InferenceMode(False), torch.set_grad_enabled(gradients):
        yield


@contextlib.contextmanager
def outside_torch_func() -> Generator[None]:
    """Work on tensors themselves inside, not at the level of the torch.func transforms around."""
    with temporarily_clear_interpreter_stack(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def no_autocast_cache() -> Generator[None]:
    """Weights cast by autocast are cast anew, so that no cast made in one capture is used in
    another.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


no_torch_function = torch._C.DisableTorchFunction
"""Context: torch function modes and subclasses see nothing."""


@contextlib.contextmanager
def symbolic_dispatch() -> Generator[None]:
    """Compose ops, which PyTorch composes of others, by Python code, which computes with
    symbolic numbers.
    """
    before = _symbolic.set(True)
    try:
        with torch._C._EnablePythonDispatcher():  # begins where it is made, so no earlier
            yield
    finally:
        _symbolic.reset(before)


_symbolic: ContextVar[bool] = ContextVar("symbolic", default=False)


def compose_by(overload: Any, formula: Callable[..., Any]) -> None:
    """Compose an op by this function in `symbolic_dispatch`, where PyTorch's own one is wrong.

    PyTorch's Python dispatcher has no other place for it than its table of kernels.
    """
    kernels = overload.py_kernels
    theirs = kernels.get(torch._C.DispatchKey.Autograd)
    if theirs is None:
        return

    @functools.wraps(theirs)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (formula if _symbolic.get() else theirs)(*args, **kwargs)

    kernels[torch._C.DispatchKey.Autograd] = chosen
    overload._dispatch_cache.clear()


no_autocast = torch._C._DisableAutocast
"""Context: autocast is off on every device."""

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


def autocast_off() -> contextlib.AbstractContextManager[None]:
    """Turn autocast off inside, until somebody turns it on: a trace says which casts there are."""
    return _autocast_off() if torch._C._is_any_autocast_enabled() else _NOTHING


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


@contextlib.contextmanager
def _autocast_off() -> Generator[None]:
    devices = [device for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
    for device in devices:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in devices:
            torch.set_autocast_enabled(device, True)


def is_autocast_on() -> bool:
    """Test whether autocast is on for some device."""
    return torch._C._is_any_autocast_enabled()


@contextlib.contextmanager
def autocast_on(dtype: torch.dtype, devices: Sequence[str] = _AUTOCAST_DEVICES) -> Generator[None]:
    """Turn autocast to this dtype on inside, whether or not this machine has the devices."""
    before = [
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices
    ]
    for device in devices:
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        for device, (was_on, old) in zip(devices, before, strict=True):
            torch.set_autocast_enabled(device, was_on)
            torch.set_autocast_dtype(device, old)


def without_autocast(
    run: Callable[..., Any], take: Callable[[list[Any]], Any] | None = None
) -> Callable[..., Any]:
    """The function with autocast off, and so its attribute `take`."""

    def run_without_autocast(*args: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return run(*args)
        with _autocast_off():
            return run(*args)

    if take is not None:
        run_without_autocast.take = without_autocast(take)  # type: ignore[attr-defined]
    return run_without_autocast


def current_gpu() -> int:
    """The index of the CUDA device that "cuda" stands for."""
    return torch._C._cuda_getDevice() if torch.cuda.is_initialized() else 0


def has_several_gpus() -> bool:
    """Test whether "cuda" may stand for one device or another."""
    return torch.cuda.is_initialized() and torch.cuda.device_count() > 1


@functools.cache
def autocast_ops(device: str) -> frozenset[str]:
    """The names of the ATen ops for which autocast has a rule on a type of device."""
    key = {
        "cpu": "AutocastCPU",
        "cuda": "AutocastCUDA",
        "xpu": "AutocastXPU",
        "mps": "AutocastMPS",
    }.get(device)
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key) if key else []
    return frozenset(
        name.removeprefix("aten::").split(".")[0] for name in names if name.startswith("aten::")
    )


below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context: ops skip autograd's part of the dispatcher. Half a microsecond to enter, a tenth
saved on each op.
"""


def _keys_of_autograd() -> Any:
    outside = torch._C._dispatch_tls_local_exclude_set()
    with below_autograd():
        return torch._C._dispatch_tls_local_exclude_set() - outside


_AUTOGRAD_KEYS = _keys_of_autograd()


@contextlib.contextmanager
def autograd_as_usual() -> Generator[None]:
    """Run code of users inside `below_autograd` as it runs outside: it may use autograd itself."""
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradOther):
        yield
        return
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded - _AUTOGRAD_KEYS):
        yield


def release_guards(error: BaseException | None) -> None:
    """Free what an exception holds of PyTorch's printing of tensors, and leave the dispatcher as it
    is.

    A printing that fails keeps a guard in its frame. When the exception goes, the guard would give
    the thread the state that the dispatcher had inside. Every op after that would run without
    autograd and without modes.
    """
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    seen = set[int]()
    with torch._C._ForceDispatchKeyGuard(included, excluded):  # which puts back what is so now
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if frame.f_code is _PRINTING:
                    with contextlib.suppress(RuntimeError):  # it runs
                        frame.clear()
            error = error.__cause__ or error.__context__


def print_options() -> dict[str, Any]:
    """The options by which PyTorch writes a tensor's values."""
    return torch._tensor_str.get_printoptions()


_PRINTING = torch._tensor_str._str.__code__
_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
_is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD = torch._C.DispatchKey.AutogradOther


def call_as_usual(fn: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    """Call code of users without a graph of autograd's: `autograd_as_usual` and `torch.no_grad`,
    whose objects take longer to make than a small op to run.
    """
    before = torch.is_grad_enabled()
    _set_grad_enabled(False)
    try:
        if _is_excluded(_AUTOGRAD):
            with autograd_as_usual():
                return fn(*args, **kwargs)
        return fn(*args, **kwargs)
    finally:
        _set_grad_enabled(before)


def function_modes() -> list[Any]:
    """The active torch function modes, such as that of `torch.set_default_device`."""
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def default_device() -> torch.device | None:
    """The device of `torch.set_default_device`."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def keep_function_modes(modes: Sequence[Any]) -> bool:
    """Make these the active torch function modes, and test whether they were. The default device,
    which is below all others, stays.
    """
    present = function_modes()
    device, others = _apart(present)
    expected = _apart(modes)[1]
    if list(map(id, others)) == list(map(id, expected)):
        return True
    _exchange_function_modes(len(present), [*device, *expected])
    return False


def _apart(modes: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Modes that say a device, and others."""
    devices = [mode for mode in modes if isinstance(mode, DeviceContext)]
    return devices, [mode for mode in modes if mode not in devices]


def dispatch_modes() -> list[Any]:
    """The active torch dispatch modes."""
    return [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]


@contextlib.contextmanager
def without_function_modes(kind: type | None = None) -> Generator[None]:
    """Leave the active torch function modes of a class, or all; the others stay."""
    modes = function_modes()
    first = next((i for i, mode in enumerate(modes) if kind in (None, type(mode))), None)
    if first is None:
        yield
        return
    others = [mode for mode in modes[first:] if kind not in (None, type(mode))]
    _exchange_function_modes(len(modes) - first, others)
    try:
        yield
    finally:
        _exchange_function_modes(len(others), modes[first:])


def _exchange_function_modes(count: int, others: Iterable[Any]) -> None:
    for _ in range(count):
        torch._C._pop_torch_function_stack()
    for mode in others:
        torch._C._push_on_torch_function_stack(mode)


count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""The number of active torch function modes."""


def torch_func_level() -> int:
    """The number of transforms of torch.func that are running."""
    innermost = torch._C._functorch.peek_interpreter_stack()
    return 0 if innermost is None else innermost.level()


def is_batching() -> bool:
    """Test whether the innermost transform of torch.func that runs is a vmap."""
    innermost = torch._C._functorch.peek_interpreter_stack()
    return innermost is not None and innermost.key() == torch._C._functorch.TransformType.Vmap


def inside_torch_func() -> bool:
    """Test whether a transform of torch.func is running, or a dual level of forward mode."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    )


def inside_derivative_or_vmap() -> bool:
    """Test whether a transform of torch.func other than `functionalize` is running, or a dual level
    of forward mode.
    """
    pure = torch._C._functorch.TransformType.Functionalize
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return forward_ad._current_level >= 0 or any(level.key() != pure for level in levels)


def is_script_traced() -> bool:
    """Test whether `torch.jit.trace` records what runs."""
    return torch._C._get_tracing_state() is not None


def is_intercepted() -> bool:
    """Test whether somebody sees the ops that run: a transform of torch.func, a dispatch mode, or
    a compiler.
    """
    return (
        inside_torch_func()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.compiler.is_compiling()
    )


@contextlib.contextmanager
def no_vmap_fallback() -> Generator[None]:
    """Let ops without a batching rule raise instead of running in a loop that PyTorch hides."""
    before = torch._C._functorch._is_vmap_fallback_enabled()
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(before)
