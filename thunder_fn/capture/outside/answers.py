"""Questions about the state of the process whose answers a trace depends on.

`threading.get_ident()` or `locale.localeconv()` read nothing that an edge could lead to. A call of
such a function is an edge of its own: a `Question` that each call of the program asks again. What
other functions compute may rest on state that they are not given, as a quotient of `Decimal`s does.
The answer to another question then counts for them.
"""

from __future__ import annotations

import abc
import decimal
import inspect
import locale
import logging
import operator
import os
import pathlib
import signal
import sys
import tempfile
import threading
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy
import torch
import torch.multiprocessing

from thunder_fn import torch_internals as internals
from thunder_fn.capture.objects import ABSENT, is_a
from thunder_fn.capture.outside.process import ASKED
from thunder_fn.capture.outside.reads import module_of, seen
from thunder_fn.capture.recorder import CHANGED


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A call of a function of Python's or NumPy's."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def ask(self) -> Any:
        """The answer now, as a value that can be compared; ABSENT if there is none."""
        try:
            answer = self.function(*self.arguments)
        except Exception:  # noqa: BLE001 - whatever it raises now, it raised then
            return ABSENT
        if is_a(answer, dict):
            return tuple(answer.items())
        return tuple(answer) if is_a(answer, list) else answer


@dataclass(slots=True, eq=False)
class Registered:
    """The classes that are registered with an abstract class. The answer counts their changes."""

    cls: type
    token: Any = field(default_factory=abc.get_cache_token)
    found: frozenset[Any] = frozenset()
    changes: int = 0

    def __post_init__(self) -> None:
        self.found = frozenset(_registered(self.cls, set()))

    def ask(self) -> int:
        """The number of changes so far. Python counts what is registered anywhere."""
        if (token := abc.get_cache_token()) != self.token:
            self.token, now = token, frozenset(_registered(self.cls, set()))
            self.changes, self.found = self.changes + (now != self.found), now
        return self.changes


@dataclass(slots=True, eq=False)
class OfTensors:
    """An attribute of many tensors, by their `__dict__`s. The answer counts its changes."""

    name: str
    held: list[dict[str, Any]]
    values: list[Any] = field(default_factory=list[Any])
    changes: int = 0

    def __post_init__(self) -> None:
        self.values = self.read()

    def read(self) -> list[Any]:
        """The values now; ABSENT where there is none."""
        return [*map(dict.get, self.held, repeat(self.name), repeat(ABSENT))]

    def extend(self, held: Iterable[dict[str, Any]]) -> None:
        """Ask tensors that were found later, too."""
        known = set(map(id, self.held))
        self.held += [one for one in held if id(one) not in known]
        self.values += self.read()[len(known) :]

    def ask(self) -> int:
        """The number of changes so far."""
        now = self.read()
        if not all(map(operator.is_, now, self.values)):
            self.changes += seen(tuple(now)) != seen(tuple(self.values))
            self.values = now
        return self.changes


def _registered(cls: type, known: set[type]) -> Iterator[Any]:
    """Weak references to the classes that are registered with a class, its subclasses, and such
    classes.
    """
    if cls in known:
        return
    known.add(cls)
    data = cls.__dict__.get("_abc_impl")
    of_python = getattr(sys.modules["abc"], "_get_dump", None)
    if data is not None and of_python is not None:
        for reference in of_python(cls)[0]:
            yield reference
            if (one := reference()) is not None:
                yield from _registered(one, known)
    for one in type.__subclasses__(cls):
        yield from _registered(one, known)


def members_of(protocol: type) -> Iterator[str]:
    """The attributes that an instance of a protocol has, if that can be asked at runtime."""
    if not getattr(protocol, "_is_runtime_protocol", False):
        return
    for base in protocol.__mro__:
        if base.__dict__.get("_is_protocol") and base is not typing.Protocol:
            names = (*base.__dict__, *inspect.get_annotations(base))
            yield from (name for name in names if name not in typing.Protocol.__dict__)


def decimal_context() -> tuple[Any, ...]:
    """The settings of `Decimal` arithmetic in this thread."""
    now = decimal.getcontext()
    traps = tuple(sorted(one.__name__ for one, flag in now.traps.items() if flag))
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, traps


def levels_of(logger: logging.Logger) -> tuple[Any, ...]:
    """The settings that decide whether a logger logs."""
    level, is_heard = logger.getEffectiveLevel(), logger.hasHandlers()
    return level, logger.manager.disable, logger.disabled, is_heard


def _locale_of(category: int) -> str:
    """The answer of `locale.setlocale` where it sets nothing."""
    return locale.setlocale(category)


ASKED_AGAIN: dict[int, Callable[..., Any]] = {
    id(getattr(function, "__func__", function)): function
    for function in (
        threading.get_ident,
        threading.get_native_id,
        threading.current_thread,
        threading.main_thread,
        threading.active_count,
        sys.getrecursionlimit,
        sys.getswitchinterval,
        locale.getlocale,
        locale.localeconv,
        locale.getpreferredencoding,
        numpy.geterr,
        numpy.geterrcall,
        numpy.getbufsize,
        numpy.get_printoptions,
        signal.getsignal,
        os.getenvb,
        os.path.expandvars,
        os.path.expanduser,
        pathlib.Path.home,
        tempfile.gettempdir,
        logging.getLogger,
        logging.getLevelName,
        torch.__future__.get_overwrite_module_params_on_conversion,
        torch.__future__.get_swap_module_params_on_conversion,
        torch.multiprocessing.get_sharing_strategy,
        *(getattr(torch, name) for name in (*ASKED, *CHANGED)),
        *(torch.autograd.is_multithreading_enabled, torch.autograd.is_view_replay_enabled),
        *internals.PROFILER,
        type.__subclasses__,
    )
} | {id(locale.setlocale): _locale_of}
"""Functions whose answer is asked for again in each call."""

RESTS_ON: dict[int, Callable[[], Any]] = {
    id(function): question
    for question, functions in (
        (numpy.get_printoptions, (numpy.array2string, numpy.array_str, numpy.array_repr)),
        (
            locale.localeconv,
            (locale.atof, locale.atoi, locale.format_string, locale.str, locale.currency),
        ),
    )
    for function in functions
}
"""Functions whose results depend on the answer to a question, which they are not given."""


def rests_on(value: Any) -> Callable[[], Any] | None:
    """The question whose answer decides about the use of a value; None if there is none."""
    is_named = is_a(value, (type, types.BuiltinFunctionType, types.FunctionType))
    of = value if is_named else type(value)
    if module_of(of) in ("decimal", "_decimal"):
        return decimal_context
    return RESTS_ON.get(id(value))
