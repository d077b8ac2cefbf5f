"""The frames of a user's code that run in a thread, as an observer sees them begin and end.

Python 3.12 has `sys.monitoring`, in which code that is passed over costs nothing. Before that there
is the profile hook of a thread, which sees all Python frames and all calls of C (`ir/hooks.py`).

Frames of PyTorch, of ours and of the standard library are passed over, and all that runs below an
import. Other packages are the user's code, and so are `torch.optim` and `torch.distributions`.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from thunder_fn.errors import UnsupportedCall
from thunder_fn.ir.hooks import as_hook
from thunder_fn.ir.memos import unset_in_memos
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.trace import Op
from thunder_fn.lines import OWN_PROGRAMS
from thunder_fn.torch_internals import Patch
from thunder_fn.version import FOLDER

if TYPE_CHECKING:
    from thunder_fn.capture.outside.moments import Moment
    from thunder_fn.capture.places import Snapshot

ROOT = FOLDER + os.sep
"""The folder of this package."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_LIKE_USERS = ("torch.optim", "torch.distributions", "torch.nn.attention.flex_attention")
"""Packages of PyTorch that are seen as a user's: their objects are the user's state."""
_SEEN = tuple(
    root + name.partition(".")[2].replace(".", os.sep)
    for root, names in ((_TORCH, _LIKE_USERS), (ROOT, OWN_PROGRAMS))
    for name in names
)
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_MACHINERY = frozenset(
    (
        "thunder_fn",
        "torch",
        "torchgen",
        "functorch",
        "optree",
        "sympy",
        "networkx",
        "numpy",
        "mpmath",
        "typing_extensions",
        "hypothesis",
        "_pytest",
        "pluggy",
    )
)
_HAS_MONITORING = sys.version_info >= (3, 12)
_NAME = "thunder_fn"
"""The name among the tools of `sys.monitoring`."""


class Irreversible(IntEnum):
    """The treatment of a step that cannot be undone, such as a draw from an iterator from outside.
    An eager transform takes it, since it runs the function once.
    """

    TAKEN = 0
    CERTAIN_REFUSED = 1
    """It is refused before it happens if no branch leads around it."""
    REFUSED = 2


class Observer(Protocol):
    """An observer of the frames of a capture. With `hears_calls`, it hears of all calls of
    libraries that leave them, too.
    """

    hears_calls: bool
    before: dict[tuple[str, int, Any], tuple[Any, Any]]
    """The places outside that the code of these frames writes to. A place is (kind, id of the
    holder, key); each has the holder and the value that was there.
    """
    counted: dict[tuple[str, int, Any], tuple[Any, Any]]
    """The places whose old value nothing else reads, as in `before`."""
    added: set[tuple[str, int, Any]]
    """Those of them that are integers to which it adds."""
    changing: dict[int, set[str]]
    """The names of methods that change a container outside, by its identity, as far as its code
    asks for them.
    """
    edges: dict[tuple[str, int, Any], Any]
    """The places outside that it reads."""
    constants: dict[str, Any]
    """Values from outside that it reads in ways that no guard sees."""
    contents: dict[int, Snapshot]
    """Lists and dicts outside, with the content that they had."""
    dicts: dict[int, tuple[dict[str, Any], dict[str, Any]]]
    """The `__dict__`s of objects outside, and what they held."""
    irreversible: Irreversible
    """The treatment of steps that cannot be undone."""
    around: Observer | None
    """The observer of the function in which it observes bodies."""

    def started(self, frame: types.FrameType) -> None:
        """Note that a frame of the user's code begins, a generator goes on, or an import begins
        (`is_import`).
        """

    def ended(self, frame: types.FrameType, value: Any) -> None:
        """Note the end of a frame: it returns or yields a value, or raises, which is None."""

    def thread_started(self, name: str) -> None:
        """Note that a thread is started, whose frames nobody sees."""

    def called_custom_op(self, op: Op) -> None:
        """Note a call of an op that may be defined anew."""

    @staticmethod
    def asks(of: Any, names: dict[str, Any]) -> bool:
        """Test whether a function gives an answer that changes by itself, or whether code with
        these globals, whose frames are passed over, does or may ask for one. All observers say the
        same.
        """
        ...

    def called(self, function: Any, by: types.FrameType | None = None) -> None:
        """Note a call by the user's code, or by a frame of code that asks: of a function of C, or
        of a function by its code.
        """

    def called_library(self, module: str, name: str) -> None:
        """Note that a frame of the user's code calls a function whose frames are passed over."""

    def stopped(self) -> None:
        """Note that the user's function has returned or raised; its tracers live still."""

    def length(self, container: Any, beyond: int | None = None) -> None:
        """Guard the length of a list or deque outside, into which an index points, or that it goes
        beyond an index.
        """

    def item_before(self, container: Any, index: int, value: Any) -> None:
        """Guard an item of a list or deque outside that held a value before."""

    def value_before(self, place: tuple[str, int, Any], holder: Any, old: Any) -> None:
        """Guard a place by the value that it held before."""

    def writes_to(self, module: Any, name: str | None = None) -> None:
        """Note that an attribute of a module is about to be set or deleted."""

    def note_late(self) -> None:
        """Note the places that are known at the end alone."""

    def put_back(self) -> None:
        """Give places outside what they held before the function ran."""

    def is_outside(self, value: Any) -> bool:
        """Test whether a value was not made by the traced function."""
        ...

    def is_made(self, value: Any) -> bool:
        """Test for an object of the traced function, which may be met where it has been stored."""
        ...

    def was_outside(self, value: Any) -> bool:
        """Test for an object that was outside before the function ran: one that the function made
        may be met where it has been stored.
        """
        ...

    def is_built(self, value: Any) -> bool:
        """Test for an object whose `__init__` has run in a frame of the traced function."""
        ...

    def moved_generator(self) -> str | None:
        """Return the class of a generator of the user's that has drawn random numbers, if any."""
        ...

    def gives_itself(self, value: Any) -> None:
        """Note a part of the result that is the very object from outside."""

    def gives(self, nodes: Sequence[Any]) -> None:
        """Note the nodes of the result, which is taken apart."""

    def moment(self) -> Moment:
        """Note what places outside hold now; a call of the result gives it back to them."""
        ...


_observer = unset_in_memos(ContextVar[Observer | None]("thunder_fn_frames", default=None))
_told = unset_in_memos(ContextVar[Observer | None]("thunder_fn_frames_told", default=None))


def observer() -> Observer | None:
    """Return the observer of the frames that run now."""
    return _observer.get()


@cache
def is_library(file: str) -> bool:
    """Test for a file of an installed package or of Python, whose globals nobody binds anew."""
    return "site-packages" in file or file.startswith((_STDLIB, _TORCH))


@cache
def is_machinery(name: str) -> bool:
    """Test for a module of PyTorch, of ours or of Python."""
    first = name.partition(".")[0]
    if first in _MACHINERY:
        return not name.startswith((*_LIKE_USERS, *OWN_PROGRAMS))
    return first in sys.stdlib_module_names and first != "__main__"


@cache
def is_user_file(file: str) -> bool:
    """Test for a file whose functions are the user's, or of a package that is not machinery."""
    if file.startswith((_TORCH, ROOT)):
        return file.startswith(_SEEN)
    return not file.startswith("<frozen") and (
        "site-packages" in file or not file.startswith(_STDLIB)
    )


def is_watched(code: types.CodeType, module: Any) -> bool:
    """Test whether the frames of this code, whose globals belong to a module of that name, are
    the user's.
    """
    return is_user_file(code.co_filename) and not (isinstance(module, str) and is_machinery(module))


def is_import(frame: types.FrameType) -> bool:
    """Test whether an import begins: of any module, by the import system or by a loader."""
    name = frame.f_code.co_name
    if name == "<module>":
        return frame.f_back is not None and _is_loader(frame.f_back.f_code)
    return name == "_find_and_load" and _is_loader(frame.f_code)


def _is_loader(code: types.CodeType) -> bool:
    return code.co_filename.startswith("<frozen importlib") or code.co_name == "exec_module"


def _is_told(frame: types.FrameType) -> bool:
    return is_watched(frame.f_code, frame.f_globals.get("__name__")) or is_import(frame)


def observed_by(observer: Observer) -> AbstractContextManager[None]:
    """Let `observer` hear of the frames that run within `running`, in this thread."""
    return setting(_observer, observer)


def _noting_threads(
    original: Callable[[threading.Thread], None],
) -> Callable[[threading.Thread], None]:
    def start(self: threading.Thread) -> None:
        if (observer := _told.get()) is not None:
            observer.thread_started(self.name)
        original(self)

    return start


_threads = Patch((threading.Thread, "start", _noting_threads))


@contextmanager
def running() -> Generator[None]:
    """Run the user's function inside. Without an observer, nothing is different."""
    observer = _observer.get()
    if observer is None:
        yield
        return
    if observer is _told.get():  # the formulas of a custom op, below machinery
        with nullcontext() if _HAS_MONITORING else _profiled(observer):
            yield
        return
    token = _told.set(observer)
    try:
        with (
            _threads.applied(),
            _monitored(observer) if _HAS_MONITORING else _profiled(observer),
        ):
            yield
    finally:
        _told.reset(token)
        observer.stopped()


# ---- Python 3.11: the profile hook ----


@contextmanager
def _profiled(observer: Observer) -> Generator[None]:
    before = sys.getprofile()
    sys.setprofile(_hook(observer))
    try:
        yield
    finally:
        restart = getattr(before, "enable", None)  # a profiler in C is no function
        sys.setprofile(None if restart is not None else before)
        if restart is not None:
            restart()


_PASSED, _ASKS, _TOLD = range(3)
"""Kinds of code: what is passed over; of that, what `Observer.asks` is true for; the user's."""


def _kind_of(frame: types.FrameType, asks: Callable[[Any, dict[str, Any]], bool]) -> int:
    if _is_told(frame):
        return _TOLD
    return _ASKS if asks(frame.f_code, frame.f_globals) else _PASSED


def _hook(observer: Observer) -> Callable[[types.FrameType, str, Any], None]:
    kinds: dict[int, int] = {}
    alive: list[types.CodeType] = []
    """The codes whose identities are keys of `kinds`."""
    hears_calls = observer.hears_calls

    def meet(frame: types.FrameType) -> int:
        alive.append(frame.f_code)
        found = kinds[id(frame.f_code)] = _kind_of(frame, observer.asks)
        return found

    def hook(frame: types.FrameType, event: str, value: Any) -> None:
        # Most events are those of PyTorch's own functions and calls of C, which nobody hears of.
        found = kinds.get(id(frame.f_code))
        if event == "call":
            if found is None:
                found = meet(frame)
            if found == _TOLD:
                observer.started(frame)
            elif found or hears_calls:
                _passed(frame, observer, kinds)
        elif found:
            if event == "c_call":
                observer.called(value, None if found == _TOLD else frame)
            elif event == "return" and found == _TOLD:
                observer.ended(frame, value)

    return as_hook(hook)


def _passed(frame: types.FrameType, observer: Observer, kinds: dict[int, int]) -> None:
    """Tell the observer of a frame of a library that begins, by who called it."""
    back = frame.f_back
    caller = _PASSED if back is None else kinds.get(id(back.f_code), _PASSED)
    if observer.hears_calls and caller == _TOLD:
        observer.called_library(frame.f_globals.get("__name__", ""), frame.f_code.co_name)
    if caller and kinds[id(frame.f_code)]:
        observer.called(frame.f_code, None if caller == _TOLD else back)


# ---- Python 3.12 and later ----


class _Monitor:
    """The process's use of `sys.monitoring`, while at least one thread captures. Other threads'
    frames are told to nobody.

    Python disables an event for all threads, and may keep that until the code is changed. So what
    is passed over depends on the code alone, and on no thread's observer.
    """

    def __init__(self) -> None:
        self.lock, self.users, self.tool = threading.Lock(), 0, -1
        self.asks: Callable[[Any, dict[str, Any]], bool] = lambda of, names: True

    def start(self, observer: Observer) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        with self.lock:
            if self.tool < 0 or monitoring.get_tool(self.tool) != _NAME:
                self.register()
            self.users += 1
            self.asks = observer.asks
            self.watch()

    def register(self) -> None:
        """Register as a tool for as long as the process runs. Python would give the next tool in
        this place the events that this one disabled as disabled, and the other way round.

        Raises:
            UnsupportedCall: other tools have all the places that Python has.
        """
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        events = monitoring.events
        free = [one for one in (4, 3, 5, 2, 1, 0) if monitoring.get_tool(one) is None]
        if not free:
            raise UnsupportedCall(
                "all tool ids of `sys.monitoring` are in use, so nothing sees what the function"
                " reads from outside",
                source=None,
                fix="Free one: `sys.monitoring.free_tool_id`.",
            )
        self.tool = free[0]
        monitoring.use_tool_id(self.tool, _NAME)
        monitoring.restart_events()
        for event in (events.PY_START, events.PY_RESUME):
            monitoring.register_callback(self.tool, event, _started)
        for event in (events.PY_RETURN, events.PY_YIELD):
            monitoring.register_callback(self.tool, event, _ended)
        monitoring.register_callback(self.tool, events.PY_THROW, _thrown)
        monitoring.register_callback(self.tool, events.PY_UNWIND, _unwound)
        monitoring.register_callback(self.tool, events.CALL, _called)

    def watch(self) -> None:
        """Hear of frames and calls."""
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        events = monitoring.events
        monitoring.set_events(
            self.tool,
            events.PY_START
            | events.PY_RESUME
            | events.PY_THROW
            | events.PY_RETURN
            | events.PY_YIELD
            | events.PY_UNWIND
            | events.CALL,
        )

    def stop(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
                monitoring.set_events(self.tool, 0)


_monitor = _Monitor()


@contextmanager
def _monitored(observer: Observer) -> Generator[None]:
    _monitor.start(observer)
    try:
        yield
    finally:
        _monitor.stop()


def _started(code: types.CodeType, offset: int) -> Any:
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    if not _is_told(frame):
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]
    if (observer := _told.get()) is not None:
        observer.started(frame)
    return None


def _thrown(code: types.CodeType, offset: int, error: BaseException) -> None:
    """Hear of a generator that goes on with an exception. Python lets nobody disable this event."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    if (observer := _told.get()) is not None and _is_told(frame):
        observer.started(frame)


def _ended(code: types.CodeType, offset: int, value: Any) -> Any:
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    if not _is_told(frame):
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]
    if (observer := _told.get()) is not None:
        observer.ended(frame, value)
    return None


def _unwound(code: types.CodeType, offset: int, error: BaseException) -> Any:
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    if (observer := _told.get()) is not None and _is_told(frame):
        observer.ended(frame, None)


def _called(code: types.CodeType, offset: int, function: Any, first: Any) -> Any:
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    kind = _kind_of(frame, _monitor.asks)
    if not kind and not _monitor.asks(function, {}):
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]
    if (observer := _told.get()) is None:
        return None
    by = None if kind == _TOLD else frame
    if isinstance(function, (types.MethodDescriptorType, types.ClassMethodDescriptorType)):
        observer.called(getattr(first, function.__name__, function), by)
    elif isinstance(function, types.BuiltinFunctionType):
        observer.called(function, by)
    else:
        _called_python(getattr(function, "__func__", function), observer, by)
    return None


def _called_python(function: Any, observer: Observer, by: types.FrameType | None) -> None:
    """Tell the observer of a call of a function or class of Python."""
    python = vars(function).get("__init__") if isinstance(function, type) else function
    module, code = getattr(python, "__module__", None), getattr(python, "__code__", None)
    if code is None or not isinstance(module, str) or is_watched(code, module):
        return
    if observer.hears_calls and by is None and python is function:
        observer.called_library(module, code.co_name)
    observer.called(code, by)
