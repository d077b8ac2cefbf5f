"""Functions whose answers change by themselves: clocks, the file system, the system's random
numbers.

Those that the user's code names are found among its expressions. A library's function may ask
them in its place, as `uuid.uuid4` asks for random numbers. Its frames are passed over, but for
those whose code names such a function. Both count where the function is called: a branch that is
not taken asks nothing.
"""

from __future__ import annotations

import _thread
import builtins
import concurrent.futures
import contextvars
import datetime
import dis
import gc
import inspect
import io
import itertools
import os
import queue
import select
import socket
import subprocess
import threading
import time
import types
import uuid
from collections.abc import Iterable
from typing import Any

import numpy
import torch

from thunder_fn.capture.objects import ABSENT
from thunder_fn.capture.outside.answers import ASKED_AGAIN
from thunder_fn.capture.outside.bytecode import reading
from thunder_fn.capture.outside.effects import is_stateful
from thunder_fn.capture.outside.expressions import Source, Span

_NAMES: tuple[tuple[Any, str], ...] = (
    (builtins, "open input"),
    (io, "open_code FileIO"),
    (time, "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time"),
    (time, "process_time_ns thread_time thread_time_ns clock_gettime clock_gettime_ns"),
    (time, "localtime gmtime ctime strftime"),
    (datetime.datetime, "now today utcnow"),
    (datetime.date, "today"),
    (os, "getcwd getcwdb listdir scandir stat lstat fstat statvfs access readlink open read pread"),
    (os, "getpid getppid urandom getrandom getloadavg times system popen wait waitpid getlogin"),
    (os, "getxattr listxattr sched_getaffinity get_terminal_size"),
    (os.path, "exists isfile isdir getmtime getsize"),
    (subprocess, "Popen"),
    (uuid, "uuid1"),
    (socket, "gethostname getaddrinfo gethostbyname gethostbyname_ex gethostbyaddr getnameinfo"),
    (socket.socket.__base__, "connect recv accept"),
    (select, "select"),
    (contextvars, "copy_context"),
    (concurrent.futures.Executor, "submit map"),
    (concurrent.futures.ThreadPoolExecutor, "submit"),
    (queue.Queue, "get get_nowait qsize empty full"),
    (queue.SimpleQueue, "get get_nowait qsize empty"),
    (threading, "enumerate"),
    (_thread.LockType, "locked"),
    (gc, "isenabled get_threshold get_count get_objects"),
    (io.StringIO, "getvalue"),
    (io.BytesIO, "getvalue getbuffer"),
    (numpy, "fromfile"),
    (torch.cuda, "memory_allocated memory_reserved max_memory_allocated max_memory_reserved"),
    (torch.cuda, "memory_stats mem_get_info utilization temperature power_draw clock_rate"),
)
_KNOWN = {
    id(found): found
    for of, names in _NAMES
    for name in names.split()
    if (found := inspect.getattr_static(of, name, None)) is not None
}


_PASSED_OVER = ("_pytest", "pluggy", "hypothesis", "importlib", "_frozen_importlib")
_WORDS = frozenset(name for _, names in _NAMES for name in names.split())
_ANSWERED = frozenset(
    id(code)
    for function in (*ASKED_AGAIN.values(), os.getenv)
    if (code := getattr(inspect.unwrap(function), "__code__", None)) is not None
)
"""Code whose answer is guarded."""


def _code_of(function: Any) -> types.CodeType | None:
    """The code that Python runs for a call of a function or a class; None for one of C."""
    called = vars(function).get("__init__") if isinstance(function, type) else function
    return getattr(called, "__code__", None)


_CODES = {id(code): one for one in _KNOWN.values() if (code := _code_of(one)) is not None}


def known_as(function: Any) -> Any:
    """The function whose answer changes by itself, as its module or class has it, for one that may
    be bound to an object or a class, or for its code; None for another.
    """
    if id(function) in _KNOWN:
        return function
    if type(function) is types.CodeType:
        return _CODES.get(id(function))
    if type(function) is not types.BuiltinFunctionType or function.__name__ not in _WORDS:
        return None
    of = function.__self__
    if of is None or type(of) is types.ModuleType:
        return None
    cls = of if isinstance(of, type) else type(of)
    return _KNOWN.get(id(inspect.getattr_static(cls, function.__name__, None)))


def is_heard(known: Any) -> bool:
    """Test for such a function whose calls are heard. Those of a class of C are not."""
    return not isinstance(known, type) or _code_of(known) is not None


def is_passed_over(names: dict[str, Any]) -> bool:
    """Test for the globals of code whose answers are of no interest: of a test tool that reports a
    failed assertion, and of Python where it looks for packages.
    """
    return bool(names.get("__name__", "").startswith(_PASSED_OVER))


def asks_anew(code: types.CodeType, names: dict[str, Any]) -> bool:
    """Test whether code of a library, with these globals, names such a function. The environment is
    a library's configuration: `torch.cuda.is_available` reads it.
    """
    if is_passed_over(names) or not is_stateful(names.get("__name__", ""), code.co_name):
        return False
    if not any(name in _WORDS or id(names.get(name)) in _KNOWN for name in code.co_names):
        return False
    is_named = any(map(_is_asking, reading(code).settled, itertools.repeat(names)))
    return is_named or any(_is_of_class(name, names) for name in _WORDS.intersection(code.co_names))


def _is_asking(source: Source, names: dict[str, Any]) -> bool:
    return id(_value(source, names)) in _KNOWN


def _is_of_class(name: str, names: dict[str, Any]) -> bool:
    """Test whether a class of a module holds such a function by this name, as a static method."""
    classes = (vars(one) for one in tuple(names.values()) if isinstance(one, type))
    return any(id(getattr(one.get(name), "__func__", None)) in _KNOWN for one in classes)


def _value(source: Source, names: dict[str, Any]) -> Any:
    """The value of an expression on globals. No code of the user's runs."""
    match source:
        case ("global", name):
            return names.get(name, vars(builtins).get(name, ABSENT))
        case ("attr", of, ("const", str(name))):
            return inspect.getattr_static(_value(of, names), name, ABSENT)
        case _:
            return ABSENT


def is_dropped(frame: types.FrameType) -> bool:
    """Test whether the result of the call in which a frame is goes nowhere, as that of a logger's
    `info`. A frame that returns it gives it to its caller.
    """
    code = frame.f_code.co_code
    after = frame.f_lasti + 2
    while after < len(code) and dis.opname[code[after]] == "CACHE":
        after += 2
    kind = dis.opname[code[after]] if after < len(code) else ""
    if kind == "RETURN_VALUE" and frame.f_back is not None:
        return is_dropped(frame.f_back)
    return kind == "POP_TOP"


def is_baked(frame: types.FrameType, constants: Iterable[Span]) -> bool:
    """Test whether what a frame does now lies in one of these spans of its source."""
    line, last, column, end = [*frame.f_code.co_positions()][frame.f_lasti // 2]
    now = line, column, last, end
    if None in now:
        return False
    return any(one[:2] <= now[:2] and now[2:] <= one[2:] for one in constants if None not in one)


def library_called(frame: types.FrameType, caller: types.CodeType) -> types.FrameType | None:
    """The frame of the library's function that code of the user's called, in which a frame runs;
    None if its answer is of no interest.
    """
    called: types.FrameType | None = None
    while frame.f_code is not caller and frame.f_back is not None:
        called, frame = frame, frame.f_back
    if called is None or called.f_back is None or id(called.f_code) in _ANSWERED:
        return None
    name: str = called.f_globals.get("__name__", "")
    return called if is_stateful(name, called.f_code.co_name) else None


def name_of(frame: types.FrameType) -> str:
    """The name of the library's function that a frame runs, with its module."""
    name = frame.f_code.co_qualname
    function = frame.f_globals.get(name.partition(".")[0])
    return f"{getattr(function, '__module__', frame.f_globals.get('__name__'))}.{name}"
