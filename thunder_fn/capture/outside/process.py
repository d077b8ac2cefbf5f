"""The state of PyTorch in this process that no call is checked for, unless a traced function asks
for it.

Grad mode, autocast, the default dtype, determinism and function modes are looked at in every call
(`torch_internals/guards.py`). The number of threads, inference mode and the flags of backends are
state too. A function that asks for one of them is traced for the answer, also by a name bound
before, as by `from torch import get_num_threads` (`answers.py`). A lookaside of such a function
answers in its place: the state is not asked, and nothing is noted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.recorder import CHANGED, current
from thunder_fn.capture.replaced.lookasides import calling_frame
from thunder_fn.errors import UnsupportedCall
from thunder_fn.lines import is_internal

ASKED = (
    *("get_num_threads", "get_num_interop_threads", "get_autocast_dtype"),
    *(
        "get_autocast_cpu_dtype",
        "get_autocast_gpu_dtype",
        "get_autocast_ipu_dtype",
        "get_autocast_xla_dtype",
    ),
)
"""Functions of `torch` whose answers are noted. `torch.autocast` itself asks for a dtype where
it is given none.
"""


_THREADS = "is_multithreading_enabled"
"""The function of `torch.autograd` that says whether backwards may use threads."""


def _noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def asked(*args: Any) -> Any:
        recorder = current()
        if recorder is None:
            return original(*args)
        return recorder.properties.look_at_process(
            f"{name}{args or ''}", functools.partial(original, *args)
        )

    return asked


def _noting_from_users(name: str, original: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(original)
    def asked() -> Any:
        recorder = current()
        if recorder is None or is_internal(calling_frame().f_code.co_filename):
            return original()
        if name == "is_inference_mode_enabled" and recorder.call.inference:
            return recorder.call.inference[-1]
        return recorder.properties.look_at_process(name, original, recorder.call.answers[name])

    return asked


def _noting_flags(original: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Note reads of flags of `torch.backends`, which are properties of modules."""

    def __get__(self: Any, obj: Any, objtype: Any) -> Any:
        recorder = current()
        if recorder is None:
            return original(self, obj, objtype)
        return recorder.properties.look_at_process(
            f"a flag of {getattr(obj, '__name__', obj)} ({id(self)})", self.getter
        )

    return __get__


def _setting_flags(original: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """Note what flags of `torch.backends` are before they are set."""

    def __set__(self: Any, obj: Any, value: Any) -> None:
        recorder = current()
        if recorder is not None:
            name = f"a flag of {getattr(obj, '__name__', obj)} ({id(self)})"
            recorder.properties.look_at_process(name, self.getter)
        original(self, obj, value)

    return __set__


def _setting(
    function: str, names: tuple[str, ...], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Note what settings are before a function sets them: a program that does not set them is
    right where they have this value, and the function leaves them so.
    """

    @functools.wraps(original)
    def put(*args: Any, **kwargs: Any) -> Any:
        recorder = current()
        if recorder is None:
            return original(*args, **kwargs)
        if not names:
            what = f"the function calls `torch.{function}`, which its program would not call again"
            raise UnsupportedCall(what, source=None, fix="Call it outside of the function.")
        for name in names:
            recorder.properties.look_at_process(name, internals.SETTINGS[name].get)
        return original(*args, **kwargs)

    return put


def _overridden(original: Callable[..., bool]) -> Callable[..., bool]:
    """Ask for classes like tensors, and for modes of the user's: the capture's own do not count."""

    @functools.wraps(original)
    def has_torch_function(*args: Any) -> bool:
        recorder = current()
        if recorder is None or is_internal(calling_frame().f_code.co_filename):
            return original(*args)
        values = args[0] if original.__name__.endswith("has_torch_function") else args
        modes = (type(mode).__module__ for mode in internals.function_modes())
        is_users = any(not module.startswith("thunder_fn.") for module in modes)
        return is_users or any(map(internals.has_own_torch_function, values))

    return has_torch_function


def _entering_inference(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """`torch.inference_mode.__enter__`: gradients go off, as under `no_grad`. Functional tensors
    have no inference mode.
    """

    def __enter__(self: Any) -> None:
        recorder = current()
        if recorder is None:
            original(self)
            return
        self.recorder, self.gradients = recorder, torch.is_grad_enabled()
        recorder.call.inference.append(self.mode)
        torch.set_grad_enabled(not self.mode)

    return __enter__


def _leaving_inference(original: Callable[..., None]) -> Callable[..., None]:
    def __exit__(self: Any, *error: Any) -> None:
        recorder = vars(self).pop("recorder", None)
        if recorder is None:
            original(self, *error)
            return
        recorder.call.inference.pop()
        torch.set_grad_enabled(self.gradients)

    return __exit__


_asked = internals.process_patch(
    {name: functools.partial(_noting_from_users, name) for name in (*CHANGED, _THREADS)}
    | {name: functools.partial(_noting, name) for name in ASKED},
    _noting,
    _noting_flags,
    {"__enter__": _entering_inference, "__exit__": _leaving_inference},
    _setting_flags,
    _setting,
    _overridden,
)


def noted_state() -> AbstractContextManager[None]:
    """Note questions about PyTorch's state in captures. Other threads see no difference."""
    return _asked.applied()
