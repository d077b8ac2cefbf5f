"""Reads of module attributes by a capture.

A program depends on the plain attributes that the traced code asked for (`training`, `self.p`,
`self.config`), and on no others. A counter that a training loop keeps on its model is not a reason
to trace again.
"""

from __future__ import annotations

import array
import dis
import enum
import functools
import itertools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard, TypeVar, cast

import numpy
import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.objects import ABSENT, dict_of, is_a, own_of
from thunder_fn.capture.outside import frames
from thunder_fn.ir import hooks
from thunder_fn.ir.trace import Literal

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Attribute:
    """An attribute of a module. The module counts by the identity of its `__dict__`, which a
    jitted module has in common with the given one.
    """

    module: torch.nn.Module
    name: str

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Attribute)
            and other.name == self.name
            and other.module.__dict__ is self.module.__dict__
        )

    def __hash__(self) -> int:
        return hash((id(self.module.__dict__), self.name))


Reads = dict[Attribute, Any]
"""The findings, by their places, as `seen` describes them."""
_Found: TypeAlias = dict[tuple[int, str], tuple[torch.nn.Module, Any]]
"""Modules and their attributes, by identity and name, each with the value before."""

OF_BUFFERS = "_buffers"
"""The name of the buffers of a module, which code reads to go through them."""
_OWN = frozenset(torch.nn.Module().__dict__) - {
    "training",
    OF_BUFFERS,
}  # hooks and sections, which are no plain attributes
_REGISTERS = (
    torch.nn.Module.register_buffer.__code__,
    torch.nn.Module.register_parameter.__code__,
)
_reads: ContextVar[tuple[_Found, _Found] | None] = ContextVar("thunder_fn_reads", default=None)
"""Attributes that were read, and counters that only `+=` has read."""
_written: ContextVar[dict[Attribute, Any] | None] = ContextVar("thunder_fn_written", default=None)
_SCALARS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    range,
    slice,
    type(Ellipsis),
)
_TORCH_SCALARS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
PLAIN = (*_SCALARS, *_TORCH_SCALARS)
"""Plain data, which is compared by value."""
_FUNCTIONS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
)
BUFFERS = (bytearray, memoryview, array.array)
"""Arrays of Python's own, which hold numbers."""
ARRAYS = (numpy.ndarray, numpy.generic, *BUFFERS)
SEQUENCES = (list, tuple, deque)
"""Containers whose items have positions."""
CONTAINERS = (list, tuple, set, frozenset, dict, deque)
HOLDERS = (list, set, dict, deque)
"""Containers, and classes of the user's that derive from them, to which a function may write."""
DEPTH, LONG = 4, 256
HEAP_TYPE = 1 << 9


def is_object(value: Any) -> bool:
    """Test for an object that counts by identity: of a class written in Python that has no equality
    of its own, or no hash, since its state may change.

    A function may have it for an argument: its attributes are guarded where they are read.
    Iterators are none, since each use changes them.
    """
    cls = type(value)
    if cls in (functools.partial, types.SimpleNamespace):
        return True
    is_plain = cls.__eq__ is object.__eq__ and cls.__hash__ is object.__hash__
    return (
        bool(cls.__flags__ & HEAP_TYPE)
        and (is_plain or cls.__hash__ is None)
        and not hasattr(cls, "__next__")
        and not issubclass(cls, (type, torch.Tensor))
    )


def module_of(cls: Any) -> str:
    """The name of the module of a class or function; empty if it has none."""
    name: Any = getattr(cls, "__module__", "")
    return name if is_a(name, str) else ""


def attribute(place: Attribute) -> Any:
    """The value of a module's attribute: its own, a buffer among them, or its class's if that is
    plain data.
    """
    held, name = place.module.__dict__, place.name
    found = held.get(name, ABSENT)
    if found is ABSENT and type(buffers := held.get(OF_BUFFERS)) is dict:  # else of TorchScript
        found = cast(dict[str, Any], buffers).get(name, ABSENT)
    return of_class(type(place.module), name) if found is ABSENT else found


def section_of(held: dict[str, Any], name: str) -> dict[str, Any]:
    """The dict that holds an attribute, of the `__dict__` of an object: in a module, that of its
    buffers, parameters or submodules.
    """
    if name not in held and "_modules" in held:
        sections = (held.get(kind) for kind in ("_buffers", "_parameters", "_modules"))
        return next((one for one in sections if type(one) is dict and name in one), held)
    return held


def of_class(cls: type, name: str) -> Any:
    """The attribute of a class, if it is plain data; else ABSENT."""
    value = next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), ABSENT)
    return value if is_a(value, (*PLAIN, *CONTAINERS)) else ABSENT


@dataclass(frozen=True, slots=True)
class Tracked:
    """Uses of module attributes: the values that were read, filled in at the end, and the
    attributes that were written, each with its value before.
    """

    reads: Reads = field(default_factory=dict[Attribute, Any])
    written: dict[Attribute, Any] = field(default_factory=dict[Attribute, Any])

    def has_changes(self) -> bool:
        """Test whether attributes that were written have other values now. Those that have not are
        reads from now on.
        """
        for place, old in self.written.items():
            now = attribute(place)
            if seen(now) != seen(old):
                return True
            if not is_a(now, torch.Tensor):
                self.reads.setdefault(place, seen(now, 0))
        return False


@contextmanager
def tracked() -> Generator[Tracked]:
    """Track the attributes, other than tensors, that are read and written inside, in this thread.

    Trackers around this one see the reads as well. No later call matches the note of an attribute
    that the code inside reads and then changes. What objects and containers hold is left to the
    edges.
    """
    found, counted = _Found(), _Found()
    result, around = Tracked(), _reads.get()
    token, written = _reads.set((found, counted)), _written.set(result.written)
    try:
        with _patch.applied():
            yield result
    finally:
        for (key, name), (module, value) in counted.items():
            if not is_counter(module, name):
                found.setdefault((key, name), (module, value))
        _reads.reset(token)
        _written.reset(written)
        for (key, name), (module, value) in found.items():
            if around is not None:
                around[0].setdefault((key, name), (module, value))
            now = attribute(place := Attribute(module, name))
            if name != OF_BUFFERS and not is_a(value, torch.Tensor) and not is_a(now, torch.Tensor):
                before = seen(value, 0)
                result.reads[place] = before if seen(now, 0) == before else Changed(name)


def value_read(place: Attribute) -> Any:
    """The value that the code read first from an attribute, while it is tracked; ABSENT if none."""
    reads = _reads.get()
    known = None if reads is None else reads[0].get((id(place.module.__dict__), place.name))
    return ABSENT if known is None else known[1]


def values_read() -> list[Any]:
    """The values that the code has read first from attributes of modules, while it is tracked."""
    reads = _reads.get()
    return [] if reads is None else [value for _, value in reads[0].values()]


def is_counter(module: torch.nn.Module, name: str) -> bool:
    """Test for an integer of a module that the code only adds to, while it is tracked. Each call
    of its program adds to it.
    """
    reads, watch = _reads.get(), frames.observer()
    key, place = (id(module.__dict__), name), ("key", id(module.__dict__), name)
    if reads is None or watch is None or key in reads[0] or key not in reads[1]:
        return False
    return place in watch.added and place not in watch.before


def _is_own(module: torch.nn.Module, name: str, is_counted: bool) -> bool:
    """Test for an attribute that the code has written before it reads it for the first time."""
    written = _written.get()
    return bool(written) and not is_counted and Attribute(module, name) in written


def _adds(frame: types.FrameType) -> bool:
    """Test whether a frame reads an attribute for an assignment such as `self.steps += 1`."""
    return frame.f_lasti in _additions(frame.f_code)


@functools.lru_cache(maxsize=4096)
def _additions(code: types.CodeType) -> frozenset[int]:
    """The offsets of reads that leave the object on the stack, which augmented assignments do."""
    pairs = itertools.pairwise(dis.get_instructions(code))
    found = (two for one, two in pairs if one.opname == "COPY" and one.arg == 1)
    return frozenset(one.offset for one in found if one.opname == "LOAD_ATTR")


def _tracking(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def __getattribute__(self: torch.nn.Module, name: str) -> Any:
        reads = _reads.get()
        if (
            reads is not None
            and name not in _OWN
            and (not name.startswith("__") or not name.endswith("__"))
        ):
            (found, counted), held = reads, original(self, "__dict__")
            frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            if frame.f_code in _REGISTERS:  # they test that nothing else has the name
                _writes_to(self)
            elif (key := (id(held), name)) not in found and not _is_own(self, name, key in counted):
                watching = hooks.pause()
                value = attribute(Attribute(self, name))
                if type(value) is int and _adds(frame):
                    counted.setdefault(key, (self, value))
                else:  # if it was counted before, what it was then
                    found[key] = counted.get(key, (self, value))
                hooks.resume(watching)
        return original(self, name)

    return __getattribute__


def _tracking_writes(original: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
    def __setattr__(self: torch.nn.Module, name: str, value: Any) -> None:
        written, place = _written.get(), Attribute(self, name)
        if written is not None and place not in written:
            written[place] = attribute(place)
        if written is not None:
            _writes_to(self, name)  # in each attempt at a trace
        original(self, name, value)

    return __setattr__


def _tracking_deletes(original: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    def __delattr__(self: torch.nn.Module, name: str) -> None:
        if _reads.get() is not None:
            with suppress(AttributeError):  # there has to be one
                torch.nn.Module.__getattribute__(self, name)
            _writes_to(self, name)
        original(self, name)

    return __delattr__


def _writes_to(module: torch.nn.Module, name: str | None = None) -> None:
    if (watch := frames.observer()) is not None:
        watch.writes_to(module, name)


_patch = internals.Patch(
    (torch.nn.Module, "__getattribute__", _tracking),
    (torch.nn.Module, "__setattr__", _tracking_writes),
    (torch.nn.Module, "__delattr__", _tracking_deletes),
)


# ---- values as a later call compares them ----


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """Equal to itself only: a value that is compared by identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    """Mark of an attribute that the traced code itself changed after it had read it. Equal to
    nothing that is seen.
    """

    name: str


_BY_IDENTITY = (
    *(torch.Tensor, torch.nn.Module, torch.SymInt, torch.SymFloat, torch.SymBool),
    *_FUNCTIONS,
)


def seen(value: Any, depth: int = DEPTH) -> Any:
    """Describe a value as a program depends on it. Numbers count by value and type, containers by
    content, objects by identity and by the plain values that they hold.
    """
    if is_a(value, PLAIN):
        return type(value), Literal(value)
    if is_a(value, _BY_IDENTITY) or depth == 0:
        return Same(value)
    if is_a(value, CONTAINERS):
        items = content_of(value)
        if len(items) > LONG:
            return type(value), tuple(
                map(Same, (part for pair in items for part in pair) if is_a(value, dict) else items)
            )
        if is_a(value, dict):  # the pairs are made anew in each look, and have no identity
            rest = max(depth - 2, 0)
            return type(value), tuple((seen(key, rest), seen(item, rest)) for key, item in items)
        return type(value), tuple(seen(item, depth - 1) for item in items)
    if is_a(value, ARRAYS):
        return _seen_in_array(value, depth)
    fields = fields_of(value)
    if fields is None:
        return Same(value)
    found = (
        (name, seen(item, depth - 1))
        for name, item in fields.copy().items()
        if not holds_tensor(item, depth - 1)
    )
    return Same(value), tuple(found)


def _seen_in_array(value: Any, depth: int) -> Any:
    if has_objects(value):
        return type(value), value.shape, tuple(seen(item, depth - 1) for item in value.flat)
    if is_a(value, numpy.ma.MaskedArray):
        parts: Any = value.data, numpy.ma.getmaskarray(value)
        return type(value), tuple(seen(part, depth - 1) for part in parts)
    if nbytes_of(value) > 4096:
        return type(value), Same(value)
    if is_a(value, BUFFERS):
        with memoryview(value) as held:
            return type(value), held.format, held.shape, held.tobytes()
    return type(value), value.dtype, value.shape, value.tobytes()


def has_objects(value: Any) -> TypeGuard[numpy.ndarray[Any, Any]]:
    """Test for an array of NumPy whose items are objects of Python."""
    return not is_a(value, BUFFERS) and value.dtype.hasobject


def nbytes_of(value: Any) -> int:
    """The size of an array in bytes."""
    if is_a(value, BUFFERS):
        with memoryview(value) as held:
            return held.nbytes
    return int(value.nbytes)


def holds_tensor(value: Any, depth: int) -> bool:
    """Test whether the value is a tensor or a container of some: data of a computation, and nothing
    that decides on it.
    """
    if is_a(value, torch.Tensor):
        return True
    if depth == 0 or not is_a(value, CONTAINERS) or len(items := content_of(value)) > LONG:
        return False
    return any(holds_tensor(item[1] if is_a(value, dict) else item, depth - 1) for item in items)


def content_of(value: Any) -> list[Any]:
    """The content of a container, pairs of a dict, by the methods of its builtin class: a subclass
    may override its own. Another thread may change a dict while its pairs are made, as imports
    change `sys.modules`; nothing runs within a copy.
    """
    kind, value = builtin_of(value), value.copy() if type(value) is dict else value
    return list(kind.items(value) if is_a(value, dict) else kind.__iter__(value))


def copy_of(value: Any) -> Any:
    """Copy a list, deque, set or dict by its builtin class. `copy` of a subclass may run methods of
    the user's: its `__init__`, `keys`, `__iter__` or `__getitem__`.
    """
    kind = builtin_of(value)
    if type(value) is kind:
        return value.copy()
    limits = (deque.maxlen.__get__(value),) if kind is deque else ()
    return kind(content_of(value), *limits)


def fill(value: Any, content: Any) -> None:
    """Add items to a list, deque, set or dict by its builtin class; see `copy_of`."""
    match builtin_of(value):
        case kind if issubclass(kind, dict):
            for key, item in content_of(content):
                kind.__setitem__(value, key, item)
        case kind if issubclass(kind, set):
            kind.update(value, content)
        case kind:
            kind.extend(value, content)


def drop(value: Any, key: Any) -> None:
    """Remove a key from a dict by its builtin class, if it is there; see `copy_of`."""
    if dict.__contains__(value, key):
        builtin_of(value).__delitem__(value, key)


def length_of(value: Any) -> int:
    """The number of items in a container, by its builtin class."""
    return int(builtin_of(value).__len__(value))


def is_longer(value: Any, index: int) -> bool:
    """Test for a container that has an item under an index."""
    return length_of(value) > index


def is_overridden(value: Any) -> bool:
    """Test for a container whose class answers for its length or items itself."""
    if not is_a(value, CONTAINERS):
        return False
    own, kind = type(value), builtin_of(value)
    names = ("__len__", "__iter__", *(("values",) if is_a(value, dict) else ()))
    return any(getattr(own, name) is not getattr(kind, name) for name in names)


def builtin_of(value: Any) -> Any:
    """Python's own class of a container, whose methods no class of the user's overrides."""
    return next(kind for kind in (OrderedDict, *CONTAINERS) if is_a(value, kind))


def fields_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object by name, those in slots too; None if it has none, or very
    many.
    """
    fields = dict_of(value)
    names = [name for cls in type(value).__mro__ for name in _slots(cls)]
    if type(fields) is not dict:
        fields = {} if names else None
    if fields is None or len(fields) > LONG:
        return None
    in_slots = {name: own_of(value, name) for name in names}
    return (
        fields
        if not names
        else {**fields, **{name: it for name, it in in_slots.items() if it is not ABSENT}}
    )


def _slots(cls: type) -> tuple[str, ...]:
    found = cls.__dict__.get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    of = f"_{cls.__name__.lstrip('_')}"  # names with two underscores are private to their class
    private = (f"{of}{name}" if name.startswith("__") else name for name in names)
    return tuple(name for name in private if not name.endswith("__"))


@dataclass(frozen=True, slots=True, eq=False)
class Fields:
    """The attributes of an object with slots, as a list of what they hold now."""

    value: Any

    def __iter__(self) -> Iterator[Any]:
        return iter((fields_of(self.value) or {}).values())

    def __len__(self) -> int:
        return len(fields_of(self.value) or {})


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """The present items of a list or set."""

    value: Any

    def __iter__(self) -> Iterator[Any]:
        return iter(content_of(self.value))

    def __len__(self) -> int:
        return len(content_of(self.value))


def met(value: Any, depth: int = DEPTH) -> Iterator[tuple[Any, int]]:
    """Find the arrays, containers and objects that `seen` meets in a value, each with the depth
    that is left. It does not look into those where none is left.
    """
    if is_a(value, (*PLAIN, *_BY_IDENTITY)):
        return
    yield value, depth
    if is_a(value, ARRAYS) or depth == 0:
        return
    if is_a(value, CONTAINERS):
        items, rest = content_of(value), max(depth - (2 if is_a(value, dict) else 1), 0)
        for item in items if len(items) <= LONG else ():
            yield from met(item[1] if is_a(value, dict) else item, rest)
        return
    for item in (fields_of(value) or {}).copy().values():
        if not holds_tensor(item, depth - 1):
            yield from met(item, depth - 1)


def parts_of(value: Any, depth: int = DEPTH) -> Iterator[Any]:
    """Find the containers that the answer of `seen` about a value depends on."""
    for part, left in met(value, depth):
        if left == 0 or is_a(part, (tuple, frozenset)):
            continue
        if is_a(part, CONTAINERS):
            yield part if type(part) in (list, set) or is_a(part, dict) else Items(part)
        elif is_a(part, ARRAYS):
            yield part
        elif (fields := fields_of(part)) is not None:
            yield fields if fields is dict_of(part) else Fields(part)
