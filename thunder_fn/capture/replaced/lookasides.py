"""Lookasides: inside a capture, calls of a function go to another one.

A Python function may have been imported under any name, so its code is replaced. While some capture
runs, the function is a short trampoline to a dispatcher. The dispatcher calls the replacement in
threads that capture, and a copy of the original in all others. Calls that were under way go on
undisturbed. With the last capture the code comes back.

Functions of C that compute with tensors, such as `torch.sin`, reach the recorder by themselves
(`scopes.py`) and are diverted there. Other functions of C, such as `math.sqrt` and `print`, are
replaced where modules and classes have them, for as long as a capture runs. So are results of
`functools.cache` and `functools.partial`, and cached properties. So is what a capture itself
replaces (`torch.get_num_threads`, `torch.initial_seed`): the lookaside is around the capture's own
replacement.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from thunder_fn import torch_internals as internals
from thunder_fn.capture.recorder import current
from thunder_fn.capture.replaced.trampolines import copy_of, trampoline_code
from thunder_fn.errors import LookasideError, kind_of
from thunder_fn.garbage import referrers
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.text import shown

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Lookaside:
    """A replacement of a function: inside the captures that are given it, calls of `fn` go to
    `replace_with`; nowhere else.

    Law: outside a capture, and in other threads, `fn` is what it was.

    Args:
        fn: a Python function, however it was imported. Or a function or method of PyTorch's, to
            which `x + y` is `x.add(y)`. Or an operator such as `torch.ops.aten.sin`, or a property,
            `Class.name`. Or a builtin, a cached function or a `functools.partial` that modules or
            classes have by name, such as `math.sqrt`: calls that look it up there are diverted, in
            users' code and not in libraries. Values in a cache are neither read nor changed.
        replace_with: takes the same arguments, after `self` or the class where `fn` is a method. A
            call of `fn` inside it goes to the original, in a generator's steps too.

    Raises:
        LookasideError: fn can not be replaced, or replace_with is no function.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> f = tfn.jit(lambda x: torch.sin(x), lookasides=[Lookaside(torch.sin, lambda x: x)])
        >>> f(torch.tensor(2.0)), torch.sin(torch.tensor(0.0))
        (tensor(2.), tensor(0.))
    """

    fn: Any
    replace_with: Function

    def __post_init__(self) -> None:
        if not callable(self.replace_with):
            raise LookasideError(
                f"Lookaside: replace_with is a function, given {kind_of(self.replace_with)}"
            )
        given: Any = self.fn
        of_class = isinstance(given, types.MethodType) and isinstance(given.__self__, type)
        if of_class or isinstance(given, staticmethod | classmethod):
            object.__setattr__(self, "fn", given.__func__)
        if isinstance(given, property):
            object.__setattr__(self, "fn", given.fget)
        object.__setattr__(self, "fn", internals.unpatched(self.fn))
        known = isinstance(self.fn, types.FunctionType | types.BuiltinFunctionType) or is_by_name(
            self.fn
        )
        if not known and not _is_method(self.fn) and not internals.is_op(self.fn):
            raise LookasideError(
                f"Lookaside: fn must be a function, given {shown(self.fn, 60)}",
                fix="For a method give"
                " the function in its class, `Class.method`; for a module its class's `forward`.",
            )
        if is_by_name(self.fn) and not _places(self.fn):
            raise LookasideError(
                f"Lookaside: no module or class has {shown(self.fn, 60)} by name, so calls of it"
                " cannot be reached",
                fix="Call it in a Python function of yours, and give that one.",
            )


CACHED = type(functools.cache(lambda: None))
"""The type of functions made by `functools.cache` and `functools.lru_cache`."""


def is_by_name(fn: Any) -> bool:
    """Test for a function that the recorder does not see and that has no code to replace: of C, or
    made by `functools`.
    """
    if isinstance(fn, types.BuiltinFunctionType):
        return not internals.is_told_to_modes(fn)
    return isinstance(fn, CACHED | functools.partial | functools.cached_property)


def _is_method(fn: Any) -> bool:
    """Test for a method of tensors written in C."""
    kinds = types.MethodDescriptorType | types.WrapperDescriptorType
    return isinstance(fn, kinds) and internals.is_tensor_type(fn.__objclass__)


def _places(fn: Any) -> list[tuple[Any, str]]:
    """The modules and classes that have it, and the names."""
    modules = {
        id(vars(module)): module
        for module in list(sys.modules.values())
        if isinstance(module, types.ModuleType)
    }
    found = internals.patched_places(fn)
    for holder in referrers(fn):
        owners = [modules[id(holder)]] if id(holder) in modules else _classes(holder)
        found += [
            (owner, name)
            for owner in owners
            for name, value in list(vars(owner).items())
            if value is fn
        ]
    return found


def _classes(holder: Any) -> list[Any]:
    """The class whose attributes a dictionary has."""
    if not isinstance(holder, dict) or "__module__" not in holder:
        return []
    return [one for one in referrers(holder) if isinstance(one, type) and "__module__" in vars(one)]


def same_function(fn: Function) -> object:
    """Equal for functions that one expression makes anew in each call, as a method may, and that
    close over the same.
    """
    if isinstance(fn, functools.partial):
        return same_function(fn.func), fn.args, fn.keywords
    if isinstance(fn, types.MethodType):
        return same_function(fn.__func__), fn.__self__
    if not isinstance(fn, types.FunctionType):
        return fn
    values = (
        *(fn.__defaults__ or ()),
        *(fn.__kwdefaults__ or {}).values(),
        *(fn.__closure__ or ()),
    )
    return id(fn.__code__), tuple(id(_content(value)) for value in values)


def _content(value: Any) -> Any:
    """The content of a cell; the cell itself while it is empty, and anything else as it is."""
    try:
        return value.cell_contents if isinstance(value, types.CellType) else value
    except ValueError:
        return value


_chosen: ContextVar[Mapping[Any, Lookaside]] = ContextVar(
    "thunder_fn_lookasides", default=types.MappingProxyType({})
)
_running: ContextVar[tuple[Any, ...]] = ContextVar("thunder_fn_lookasides_running", default=())
_in_parts: ContextVar[bool] = ContextVar("thunder_fn_lookasides_in_parts", default=False)
_always: dict[str, Function] = {}


def divert(name: str, replace_with: Function) -> None:
    """Divert one of PyTorch's higher-order functions (`torch_internals.HIGHER_ORDER`) in every
    capture.
    """
    _always[name] = replace_with


def chosen_lookasides() -> frozenset[Lookaside]:
    """The lookasides of this context."""
    return frozenset(_chosen.get().values())


def replacement(fn: Any) -> Function | None:
    """The function to which a call of fn goes in this thread; None for fn itself."""
    lookaside = _chosen.get().get(fn)
    if (
        lookaside is None
        or lookaside.fn in _running.get()
        or not (_in_parts.get() or current() is not None)
    ):
        return None

    def replaced(*args: Any, **kwargs: Any) -> Any:
        with _inside(lookaside.fn):
            result = lookaside.replace_with(*args, **kwargs)
        return (
            _stepwise(result, lookaside.fn) if isinstance(result, types.GeneratorType) else result
        )

    return replaced


def _inside(fn: Any) -> AbstractContextManager[None]:
    """Let calls of fn inside go to the original."""
    return setting(_running, (*_running.get(), fn))


def _stepwise(generator: Generator[Any, Any, Any], fn: Any) -> Generator[Any, Any, Any]:
    """A generator whose steps are inside, as the call is that made it."""
    step: Callable[[], Any] = generator.__next__
    while True:
        try:
            with _inside(fn):
                made = step()
        except StopIteration as stop:
            return stop.value
        try:
            sent = yield made
            step = functools.partial(generator.send, sent)
        except GeneratorExit:
            generator.close()
            raise
        except BaseException as error:  # noqa: BLE001 - it is the generator's to handle
            step = functools.partial(generator.throw, error)


def lookasides(given: Sequence[Lookaside]) -> AbstractContextManager[None]:
    """Use these lookasides in the captures inside, in this thread."""
    return setting(
        _chosen,
        {**_chosen.get(), **{name: one for one in given for name in internals.arrives_as(one.fn)}},
    )


@contextmanager
def diverted() -> Generator[None]:
    """Lead Python functions that have a lookaside to the dispatcher while a capture runs."""
    with ExitStack() as stack:
        missing = [name for name in _always if not _divert(stack, name)]
        if missing:
            stack.enter_context(internals.on_import(missing, lambda name: _divert(stack, name)))
        for fn in _chosen.get():
            if isinstance(fn, types.FunctionType):
                stack.enter_context(_trampoline(fn).applied())
            if is_by_name(fn) or internals.patched_places(fn):
                stack.enter_context(_by_name(fn).applied())
        yield


@contextmanager
def diverted_in_parts(given: Sequence[Lookaside]) -> Generator[None]:
    """Lead Python functions to the dispatcher while something runs that Dynamo compiles, in its
    graphs and between them.

    Code is exchanged while no thread compiles: Dynamo guards the code of each function that it
    inlines.
    """
    stack = ExitStack()
    with setting(_in_parts, True):
        try:
            with lookasides(given):
                with internals.no_compilation():
                    for one in given:
                        if isinstance(one.fn, types.FunctionType):
                            stack.enter_context(_trampoline(one.fn).applied())
                yield
        finally:
            with internals.no_compilation():
                stack.close()


def _divert(stack: ExitStack, name: str) -> bool:
    """Divert one of PyTorch's functions until the stack unwinds; False while nobody has imported
    it.
    """
    fn = internals.higher_order_function(name)
    if fn is not None:
        stack.enter_context(_trampoline(fn).applied(_always[name]))
    return fn is not None


def original_of(fn: Any) -> Any:
    """A function as it was before any trampoline."""
    known = _trampolines.get(fn) if isinstance(fn, types.FunctionType) else None
    return known.copy if known is not None and known.users else fn


# ---- by name ----

_LIBRARIES = frozenset(
    (
        "thunder_fn",
        "torch",
        "optree",
        "sympy",
        "mpmath",
        "networkx",
        "numpy",
        *sys.stdlib_module_names,
    )
)
"""Libraries whose calls of a builtin are not the user's: machinery of tracing is written in
them.
"""
_patches: weakref.WeakValueDictionary[Any, internals.Patch] = weakref.WeakValueDictionary()
"""The patches in use, by function. They hold classes and modules of the user's."""


def _by_name(fn: Any) -> internals.Patch:
    """The modules and classes that have it have a dispatcher in its place, around what a capture
    itself puts there.

    A Python function has its trampoline, but where a capture puts something else, its code is not
    called.
    """

    def make(place: Any, before: Any) -> Any:
        if isinstance(fn, functools.cached_property):
            return _Property(fn)
        dispatch: Any = _dispatching(fn, before)
        # it has no `self`
        is_unbound = isinstance(fn, functools.partial) and isinstance(place, type)
        return staticmethod(dispatch) if is_unbound else dispatch

    with _lock:
        known = _patches.get(fn)
        if known is None or not known.users:
            places = (
                internals.patched_places(fn) if isinstance(fn, types.FunctionType) else _places(fn)
            )
            made = ((place, name, functools.partial(make, place)) for place, name in places)
            known = _patches[fn] = internals.Patch(*made, outermost=True)
        return known


def _dispatching(fn: Any, before: Any) -> Function:
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return (_of_user(fn) or before)(*args, **kwargs)

    return functools.update_wrapper(dispatch, fn) if isinstance(fn, CACHED) else dispatch


_DISPATCH = _dispatching(len, len).__code__


def calling_frame() -> types.FrameType:
    """The frame of the caller's caller, dispatchers left out."""
    frame = _frame(2)
    return frame.f_back if frame.f_code is _DISPATCH and frame.f_back is not None else frame


def _of_user(fn: Any) -> Function | None:
    """The function to which a call of fn goes: that of a builtin, if users' code makes it."""
    caller = _frame(2).f_globals.get("__name__", "")
    is_users = caller.partition(".")[0] not in _LIBRARIES or caller == "__main__"
    return replacement(fn) if is_users or isinstance(fn, types.FunctionType) else None


class _Property:
    """Stand-in for a cached property. It has a `__set__`, so it is asked before what the
    instance holds.
    """

    def __init__(self, given: functools.cached_property[Any]) -> None:
        self.given, self.name = given, given.attrname

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self.given
        chosen = _of_user(self.given)
        if chosen is not None:
            return chosen(instance)
        held = vars(instance)
        return held[self.name] if self.name in held else self.given.__get__(instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = value

    def __delete__(self, instance: Any) -> None:
        if self.name not in vars(instance):
            raise AttributeError(self.name)
        del vars(instance)[self.name]


_frame = sys._getframe  # pyright: ignore[reportPrivateUsage]


# ---- trampolines ----


class _Trampoline:
    """Swaps the code of one function while somebody needs it."""

    def __init__(self, fn: types.FunctionType, number: int) -> None:
        self.fn, self.number = fn, number
        self.users = 0
        self._always: Function | None = None
        self.depth = [0]
        self.replacements = list[Function]()
        self.place = internals.constant_of_dynamo(lambda: self._place())
        self._remember()

    def _remember(self) -> None:
        self.code, self.copy = self.fn.__code__, copy_of(self.fn)
        self.swapped = trampoline_code(self.code, __name__, self.number)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """The call, in whatever thread it was made."""
        chosen = replacement(self.fn)
        if chosen is not None:
            return chosen(*args, **kwargs)
        if current() is not None and self._always is not None and self.fn not in _running.get():
            return self._always(*args, **kwargs)
        return self.copy(*args, **kwargs)

    def _place(self) -> int:
        """The place of the replacement that Dynamo compiles in this thread; -1 if there is none."""
        lookaside = _chosen.get().get(self.fn) if _in_parts.get() else None
        if lookaside is None:
            return -1
        with _lock:
            if lookaside.replace_with not in self.replacements:
                self.replacements.append(lookaside.replace_with)
            return self.replacements.index(lookaside.replace_with)

    def in_dynamo(self, *args: Any, **kwargs: Any) -> Any:
        """The call as Dynamo inlines it, which knows no context variables: nested calls are
        counted.
        """
        place = self.place()
        if place < 0 or self.depth[0]:
            return self.copy(*args, **kwargs)
        self.depth[0] += 1
        try:
            return self.replacements[place](*args, **kwargs)
        finally:
            self.depth[0] -= 1

    @contextmanager
    def applied(self, always: Function | None = None) -> Generator[None]:
        with _lock:
            if self.users == 0 and self.fn.__code__ is not self.code:
                self._remember()
            self.users += 1
            self._always = always or self._always
            if self.users == 1:
                self.fn.__code__ = self.swapped
        try:
            yield
        finally:
            with _lock:
                self.users -= 1
                if self.users == 0:
                    self.fn.__code__ = self.code


_lock = threading.RLock()
_trampolines: dict[types.FunctionType, _Trampoline] = {}
_numbered: list[_Trampoline] = []


def is_diverted(fn: types.FunctionType) -> bool:
    """Test whether the function's code is, or was, exchanged for a trampoline."""
    return fn in _trampolines


def _trampoline(fn: types.FunctionType) -> _Trampoline:
    with _lock:
        if fn not in _trampolines:
            _trampolines[fn] = _Trampoline(fn, len(_numbered))
            _numbered.append(_trampolines[fn])
        return _trampolines[fn]


def dispatcher(number: int) -> Function:
    """The function to which the code of a trampoline leads."""
    trampoline = _numbered[number]
    return trampoline.in_dynamo if internals.is_dynamo_compiling() else trampoline.dispatch
