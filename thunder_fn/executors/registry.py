"""Executors by name: a convenience. A function runs on the values that `jit` was given."""

from __future__ import annotations

import difflib
import importlib
import threading
from collections.abc import Iterable
from typing import Any

from thunder_fn.errors import ExecutorError, UnknownOption, kind_of, located
from thunder_fn.executors.base import Executor
from thunder_fn.executors.eligibility import TORCH
from thunder_fn.ir.text import shown

BUILTIN: dict[str, str] = {
    "inductor": "thunder_fn.executors.torchinductor",
    "sdpa": "thunder_fn.executors.sdpa",
    "triton": "thunder_fn.executors.triton.operators",
    "nvfuser": "thunder_fn.executors.nvfuser",
    "cudagraphs": "thunder_fn.executors.cudagraphs",
    "quantized": "thunder_fn.executors.quantized.kernels",
    "codes": "thunder_fn.executors.quantized.codes_kernels",
    "torchao": "thunder_fn.executors.quantized.torchao_kernels",
    "bitsandbytes": "thunder_fn.executors.quantized.bitsandbytes_kernels",
}
"""Executors that come with thunder_fn, and the modules that have them as `EXECUTOR`, imported
when they are asked for.
"""

_registered: dict[str, Executor] = {TORCH.name: TORCH}
_lock = threading.RLock()


def register_executor(executor: Executor) -> Executor:
    """Let `jit(executors=[...])` find an executor by its name. Returns it.

    Law: ``get_executor(executor.name)`` is the executor, until it is deregistered.

    Raises:
        ExecutorError: it is no executor, or another one has the name.

    Example:
        >>> from thunder_fn.extend import OperatorExecutor
        >>> register_executor(OperatorExecutor("registered")).name
        'registered'
        >>> deregister_executor("registered")
    """
    if not isinstance(executor, Executor):
        raise ExecutorError(f"register_executor: expected an executor, given {kind_of(executor)}")
    with _lock:
        known = _registered.get(executor.name)
        if executor.name in BUILTIN or (known is not None and known is not executor):
            raise ExecutorError(
                f"register_executor: another executor is registered as {executor.name!r}",
                fix=f"Call `deregister_executor({executor.name!r})` first, or give this one another"
                " name.",
            )
        _registered[executor.name] = executor
    return executor


def deregister_executor(executor: Executor | str) -> None:
    """Forget a name. Functions that were jitted with the executor keep it.

    Law: a name that `register_executor` gave is unknown afterwards.

    Raises:
        ExecutorError: it comes with thunder_fn, is no executor, or another one is registered under
            its name.
        UnknownOption: no executor has this name.

    Example:
        >>> from thunder_fn.extend import OperatorExecutor
        >>> deregister_executor(register_executor(OperatorExecutor("short_lived")))
        >>> "short_lived" in list_executors()
        False
    """
    if not isinstance(executor, str | Executor):
        raise ExecutorError(
            f"deregister_executor: expected an executor or its name, given {kind_of(executor)}"
        )
    name = executor if isinstance(executor, str) else executor.name
    if name == TORCH.name or name in BUILTIN:
        raise ExecutorError(f"deregister_executor: {name!r} comes with thunder_fn")
    with _lock:
        known = _registered.get(name)
        if known is None:
            raise UnknownOption(_unknown("deregister_executor", name))
        if not isinstance(executor, str) and known is not executor:
            raise ExecutorError(
                f"deregister_executor: the executor that is registered as {name!r} is another one"
            )
        del _registered[name]


def get_executor(name: str) -> Executor:
    """The executor of a name.

    Law: the same executor for the same name, which `jit(executors=[name])` takes too.

    Raises:
        UnknownOption: there is none; names the nearest.

    Example:
        >>> get_executor("torch").name
        'torch'
    """
    return _find(name, "get_executor")


def list_executors() -> tuple[str, ...]:
    """The names of all executors that are registered or come with thunder_fn.

    Law: `get_executor` knows each of them.

    Example:
        >>> {"torch", "inductor"} <= set(list_executors())
        True
    """
    with _lock:
        return (*_registered, *(name for name in BUILTIN if name not in _registered))


def resolve_executors(given: Any, where: str = "jit") -> tuple[Executor, ...]:
    """Executors and names of executors as executors, each once, None as none; nobody comes after
    the torch executor.

    Raises:
        UnknownOption: no executor has this name.
        ExecutorError: something is neither an executor nor a name.
    """
    if isinstance(given, str | Executor) or not isinstance(given, Iterable):
        given = () if given is None else (given,)
    found: dict[Executor, None] = {}
    for one in given:
        if not isinstance(one, str | Executor):
            text = (
                f"{where}: an executor is a value such as `OperatorExecutor('mine')` or a name,"
                f" given {shown(one, 60)}"
            )
            raise ExecutorError(text)
        executor = _find(one, where) if isinstance(one, str) else one
        found[executor] = None
        if executor is TORCH:  # it takes everything
            break
    return tuple(found)


def _find(name: str, where: str) -> Executor:
    with _lock:
        known = _registered.get(name)
    if known is not None:
        return known
    if name not in BUILTIN:
        raise UnknownOption(_unknown(where, name))
    executor: Executor = importlib.import_module(BUILTIN[name]).EXECUTOR
    with _lock:
        return _registered.setdefault(name, executor)


def _unknown(where: str, name: Any) -> str:
    choices = list_executors()
    near = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.0)
    fix = f"There are {', '.join(choices)}; `register_executor` adds others."
    return located(f"{where}: unknown executor {name!r}; did you mean {near[0]!r}?", fix=fix)
