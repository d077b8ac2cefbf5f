"""Functions of PyTorch without their imports of Dynamo, which take half a second."""

from __future__ import annotations

import builtins
import importlib
import types
from typing import Any

import torch


class _Settings:
    """Dynamo's settings of fake tensors before it is imported, which takes half a second."""

    fake_tensor_cache_enabled = True
    fake_tensor_cache_crosscheck_enabled = False
    _custom_ops_profile = None

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo.config"), name)


class _Torch:
    """Stand-in for `torch` in functions of PyTorch: its Dynamo has settings without being
    imported.
    """

    @property
    def _dynamo(self) -> Any:
        whole = vars(torch).get("_dynamo")  # set when its import, maybe in another thread, is done
        return types.SimpleNamespace(config=_Settings()) if whole is None else whole

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _NoValidation:
    """Stand-in for the module that validates Dynamo's guards, which it imports. Guards of ours are
    none of its business.
    """

    @staticmethod
    def translation_validation_enabled() -> bool:
        return False


def _import(name: str, *rest: Any) -> Any:
    """Import a module for a function of PyTorch: `import torch.x` gives the stand-in."""
    if name == "torch._dynamo.config":
        return _Torch()
    if name == "torch.fx.experimental.validator":  # of guards, by Z3
        return _NoValidation
    module = __import__(name, *rest)
    return _Torch() if module is torch else module


def without_dynamo(made: Any, **names: Any) -> Any:
    """A function of PyTorch that reads Dynamo's settings without importing it. It says `names` for
    others.
    """
    own = {"torch": _Torch(), "__builtins__": {**vars(builtins), "__import__": _import}}
    names = {**made.__globals__, **own, **names}
    new = types.FunctionType(
        made.__code__, names, made.__name__, made.__defaults__, made.__closure__
    )
    new.__kwdefaults__ = made.__kwdefaults__
    return new
