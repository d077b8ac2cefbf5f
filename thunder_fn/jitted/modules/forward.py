"""The `forward` of a jitted module, which may be assigned another one, and wrappers around the
old one.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

SLOT = "_thunder_fn_jit"
"""The slot of a jitted module that has what its calls go to."""


class Forward:
    """The `forward` of a jitted module. Another one that is assigned to an instance is traced in
    its place.

    The `forward` of before, which the new one may call as wrappers do, stays what it was then, and
    is traced with it.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def forward(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            inner = getattr(self, SLOT)
            if "forward" not in self.__dict__:
                return inner(*args, **kwargs)
            return original(inner.module, *args, **kwargs)

        self.function = forward

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self.function
        assigned = _held(instance)
        return (
            types.MethodType(self.function, instance)
            if assigned is None
            else _assigned(instance, assigned)
        )

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__["forward"] = value

    def __delete__(self, instance: Any) -> None:
        del instance.__dict__["forward"]


def _held(module: torch.nn.Module) -> Any:
    """The assigned `forward`. The module behind is asked, for Dynamo of PyTorch 2.11 takes
    `__dict__.get` for `getattr`.
    """
    return getattr(module, SLOT).module.__dict__.get("forward")


def _assigned(module: torch.nn.Module, assigned: Any) -> Any:
    """The jitted module for as long as `assigned` is its forward, then the assigned one. A
    method if that is one.
    """

    def chosen() -> Any:
        return getattr(module, SLOT) if _held(module) is assigned else None

    if isinstance(assigned, types.MethodType):
        function = assigned.__func__

        @functools.wraps(function, updated=())
        def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            inner = chosen()
            return function(self, *args, **kwargs) if inner is None else inner(*args, **kwargs)

        return types.MethodType(method, assigned.__self__)

    @functools.wraps(assigned, updated=())
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (chosen() or assigned)(*args, **kwargs)

    return forward
