"""The guard of a traced function's reads from outside: the edges of its trace, as conditions of a
call path.

    if not (get1("LR") is v2 and cell3.cell_contents is w4 and "k" not in dict5): return MISS

A module from outside is checked as a whole: its layout, its very tensors, its hooks, and the
attributes that were read.
"""

from __future__ import annotations

import builtins
import gc
import operator
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.comparisons import is_numeric
from thunder_fn.capture.failures import source_of
from thunder_fn.capture.generators import state_error
from thunder_fn.capture.kept_state import KeptState
from thunder_fn.capture.numbers.arguments import is_number
from thunder_fn.capture.objects import ABSENT, answers_itself, dict_of, is_a, own_of
from thunder_fn.capture.outside.edges import PLACES, Edge, entries, is_same, look, now
from thunder_fn.capture.outside.frames import Irreversible, observed_by
from thunder_fn.capture.outside.kinds import drawn_error, reference_to
from thunder_fn.capture.outside.moments import Moment
from thunder_fn.capture.outside.reached import MAX_ARRAY_BYTES
from thunder_fn.capture.outside.reads import (
    ARRAYS,
    PLAIN,
    Changed,
    Reads,
    Tracked,
    attribute,
    is_overridden,
    met,
    nbytes_of,
    parts_of,
    seen,
    tracked,
)
from thunder_fn.capture.outside.watch import Watch
from thunder_fn.capture.places import Entry
from thunder_fn.errors import (
    OutsideWarning,
    ThunderError,
    TracedFunctionError,
    UnsupportedCall,
    callable_name,
    kind_of,
    located,
)
from thunder_fn.ir.memos import forgetting
from thunder_fn.ir.text import escaped, is_usable
from thunder_fn.ir.trace import Literal
from thunder_fn.jitted.callpath import Namespace
from thunder_fn.jitted.modules import state as module_state


class Outside:
    """The edges and modules that a program depends on."""

    def __init__(
        self, edges: tuple[Edge, ...], modules: tuple[ModuleCheck | KeptState, ...]
    ) -> None:
        self.edges, self.modules = edges, modules
        names = Namespace()
        text = " and ".join(f"({condition})" for condition in self.conditions(names)) or "True"
        lines = [
            "def matches():",
            "    try:",
            f"        return {text}",
            f"    except {FAILURES}:",
            "        return False",
        ]
        self.matches: Callable[[], bool] = names.function("matches", [*lines, ""])

    @property
    def may_fail(self) -> bool:
        """Test whether some condition raises one of `FAILURES` where its object is gone."""
        kinds = ("cell", "index", "attr", "key", "class", "builtin")
        return any(edge.kind in kinds for edge in self.edges)

    def conditions(self, names: Namespace) -> Iterator[str]:
        """Expressions that hold while nothing has changed."""
        names.values.update(ABSENT=ABSENT, Literal=Literal, seen=seen)
        for edge in self.edges:
            if edge.kind != "builtin":
                yield from _conditions(edge, names)
        for found in _by_globals(self.edges):
            yield _builtins_condition(found, names)
        for module in self.modules:
            yield f"{names.bind(module, 'module')}()"

    def moved(self) -> Iterator[tuple[int, Any]]:
        """Find the places of numbers that have changed since the trace."""
        for edge in self.edges:
            found = now(edge)
            is_numbers = is_numeric(edge.value) and type(found) is type(edge.value)
            if edge.kind in PLACES and is_numbers and found != edge.value:
                yield id(edge.holder), edge.key
        for module in self.modules:
            for place, value in module.reads.items() if isinstance(module, ModuleCheck) else ():
                found = attribute(place)
                if is_number(found) and seen(found, 0) != value:
                    yield id(place.module.__dict__), place.name

    def change(self) -> tuple[str, Any, Any] | None:
        """Describe the change since the trace: the path, the old and the new value."""
        for edge in self.edges:
            found = now(edge)
            if found is edge.value or (is_same(found, edge.value, edge.kind) and not edge.is_exact):
                continue
            if type(edge.value) is Changed:
                what = "which no program can do"
                return f"the function itself changes {edge.path} in each call, {what}", None, None
            if edge.kind in ("content", "entries", "names"):
                what = "content" if edge.kind == "content" else "set of attributes"
                return f"the {what} of {edge.path} has changed", None, None
            if any(is_a(one, PLAIN) or one is ABSENT for one in (found, edge.value)):
                return edge.path, _described(edge.value), _described(found)
            return f"{edge.path} is another {type(found).__name__}", None, None
        for module in self.modules:
            if not module():
                return module.change(), None, None
        return None


FAILURES = "(ValueError, LookupError, AttributeError)"
"""Exceptions of a read where a cell is empty, a list is shorter, or an attribute is gone."""


def _described(value: Any) -> str:
    """A value in a message, which does not keep it alive."""
    if value is ABSENT:
        return "missing"
    return repr(value) if is_a(value, PLAIN) else kind_of(value)


# ---- edges as text ----


def _conditions(edge: Edge, names: Namespace) -> Iterator[str]:  # noqa: C901 - a branch for each kind of edge
    holder = edge.holder
    key = repr(edge.key) if type(edge.key) in (str, int) else names.bind(edge.key, "key")
    match edge.kind:
        case "key" if edge.owner is not None:
            yield _own_condition(edge, key, names)
        case "key":
            yield _key_condition(edge, key, names)
        case "index" if edge.value is not ABSENT:
            yield _equal(f"{names.bind(holder, 'list')}[{key}]", edge, names)
        case "cell" | "index" as kind if edge.value is ABSENT:
            found = f"{names.bind(look, 'look')}({kind!r}, {names.bind(holder, kind)}, {key})"
            yield f"{found} is ABSENT"
        case "cell":
            yield _equal(f"{names.bind(holder, 'cell')}.cell_contents", edge, names)
        case "attr":
            yield _attribute_condition(edge, key, names)
        case "type":
            yield f"type({names.bind(holder, 'ref')}()) is {names.bind(edge.value, 'class')}"
        case "entries" | "names" as kind:
            ask = (
                f"{names.bind(entries, 'entries')}(%s, {key})" if kind == "entries" else "tuple(%s)"
            )
            yield f"{ask % names.bind(holder, 'dict')} == {names.bind(edge.value, 'entries')}"
        case "dict":
            _, held = _own_dict(holder, names)
            yield f"{held} is {names.bind(edge.value, 'dict')}"
        case "alive":
            yield f"({names.bind(holder, 'ref')}() is not None) is {edge.value}"
        case "context":
            yield _equal(f"{names.bind(holder.get, 'get')}(ABSENT)", edge, names)
        case "answer":
            yield _equal(f"{names.bind(holder.ask, 'ask')}()", edge, names)
        case "class":
            yield from _class_conditions(edge, key, names)
        case _:
            value, same = names.bind(edge.value, "seen"), names.bind(_quick(edge), "same")
            yield f"{same}() or seen({names.bind(holder, 'of')}) == {value}"


def _attribute_condition(edge: Edge, key: str, names: Namespace) -> str:
    """A condition on an attribute that no dict holds. It runs no code of the holder's class."""
    of = names.bind(edge.holder, "of")
    if answers_itself(type(edge.holder)):
        return _equal(f"{names.bind(own_of, 'own_of')}({of}, {key})", edge, names)
    is_written_out = edge.value is not ABSENT and is_usable(edge.key)
    found = f"{of}.{edge.key}" if is_written_out else f"getattr({of}, {key}, ABSENT)"
    return _equal(found, edge, names)


def _by_globals(edges: Sequence[Edge]) -> Iterator[list[Edge]]:
    """The names of Python's own that code of each module uses."""
    found = [edge for edge in edges if edge.kind == "builtin"]
    for holder in {id(edge.holder): None for edge in found}:
        yield [edge for edge in found if id(edge.holder) == holder]


def _builtins_condition(found: list[Edge], names: Namespace) -> str:
    """A condition that the names are Python's, and that nobody has bound them anew."""
    of = found[0].holder
    held = of.get("__builtins__", builtins)
    held = held if is_a(held, dict) else vars(held)
    is_one = len(found) == 1
    read = operator.itemgetter(*(edge.key for edge in found))
    values = found[0].value if is_one else tuple(edge.value for edge in found)
    mine = "not in" if is_one else "isdisjoint"
    key = repr(found[0].key) if is_one else names.bind(frozenset(one.key for one in found), "names")
    module = names.bind(of, "dict")
    absent = f"{key} {mine} {module}" if is_one else f"{key}.{mine}({module})"
    same = "is" if is_one else "=="
    got = f"{names.bind(read, 'get')}({names.bind(held, 'builtins')})"
    return f"{absent} and {got} {same} {names.bind(values, 'own')}"


def _key_condition(edge: Edge, key: str, names: Namespace) -> str:
    """A condition on an entry of a mapping."""
    holder = edge.holder
    if edge.value is ABSENT:
        return f"{key} not in {names.bind(holder, 'dict')}"
    if type(holder) is dict:
        return _equal(f"{names.bind(holder, 'dict')}[{key}]", edge, names)
    get = (dict.get if is_a(holder, dict) else type(holder).get).__get__(holder)
    return _equal(f"{names.bind(get, 'get')}({key}, ABSENT)", edge, names)


def _own_condition(edge: Edge, key: str, names: Namespace) -> str:
    """A condition on an attribute of the object itself, whatever its `__dict__` is now."""
    of, held = _own_dict(edge.owner, names)
    if edge.value is ABSENT:
        return f"{key} not in {held}"
    is_attribute = held == f"{of}.__dict__" and is_usable(edge.key)
    return _equal(f"{of}.{edge.key}" if is_attribute else f"{held}[{key}]", edge, names)


def _own_dict(owner: Any, names: Namespace) -> tuple[str, str]:
    """Expressions for an object, or what a weak reference leads to, and for its `__dict__`.
    Neither runs code of the user.
    """
    is_reference = type(owner) is weakref.ref
    of, cls = names.bind(owner, "of"), type(owner() if is_reference else owner)
    of = f"{of}()" if is_reference else of
    return of, f"{names.bind(dict_of, 'dict_of')}({of})" if answers_itself(
        cls
    ) else f"{of}.__dict__"


def _class_conditions(edge: Edge, key: str, names: Namespace) -> Iterator[str]:
    """Yield conditions on the class that has the attribute, and on those before it."""
    for base in edge.holder.__mro__[:-1]:
        (held,) = gc.get_referents(base.__dict__)  # a lookup in the dict itself takes a third
        if edge.key in held and edge.value is not ABSENT:
            yield _equal(f"{names.bind(held, 'dict')}[{key}]", edge, names)
            return
        yield f"{key} not in {names.bind(held, 'dict')}"


def _equal(found: str, edge: Edge, names: Namespace) -> str:
    value = edge.value
    if value is None or value is True or value is False:
        return f"{found} is {value}"
    known = names.bind(value, "v")
    if not edge.is_exact and is_a(value, (tuple, frozenset)):
        return (
            f"(v := {found}) is {known} or type(v) is type({known}) and seen(v) =="
            f" {names.bind(seen(value), 'seen')}"
        )
    if not is_a(value, PLAIN):
        return f"{found} is {known}"
    if is_a(value, (float, complex)) and (value != value or value == 0):
        return (
            f"(v := {found}) is {known} or type(v) is type({known}) and Literal(v) =="
            f" {names.bind(Literal(value), 'v')}"
        )
    return f"(v := {found}) is {known} or type(v) is type({known}) and v == {known}"


def _quick(edge: Edge) -> Callable[[], bool]:
    """Make a quick check that a container, and those in it, hold the same objects as before. It
    fails if the function itself has changed the content since it was read.
    """
    value, parts = edge.holder, list[tuple[Any, list[Any]]]()
    if seen(value) != edge.value:
        return lambda: False
    for part in parts_of(value):
        if is_overridden(part) or is_a(part, ARRAYS):
            return lambda: False
        parts.append((part, list(part)))
        if is_a(part, dict):
            parts.append((part.values(), list(part.values())))
    if not parts:
        return lambda: False
    same, every = operator.is_, all
    return lambda: every(
        len(part) == len(items) and every(map(same, part, items)) for part, items in parts
    )


class ModuleCheck:
    """A check of a module from outside. A change of something else in its dicts renews the quick
    check.

    The content of objects among its attributes is found in the frames that read it. `stored` are
    attributes that each call gives a new tensor, by the dict that holds them and their name.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        path: str,
        reads: Reads,
        stored: Container[tuple[int, str]] = (),
    ) -> None:
        self.module, self.path, self.reads, self.stored = module, path, reads, stored
        self.reading, self.hooks = module_state.read(module, stored), self.own_hooks()
        self.quick = (lambda: False) if self.change() else self.quick_check()

    def without(self, stored: Container[Entry], fed: Container[Entry]) -> ModuleCheck:
        """Return the check without attributes that each call gives a new tensor (`stored`) and
        numbers that are inputs of the program (`fed`).
        """
        reads = {
            place: value
            for place, value in self.reads.items()
            if (id(place.module.__dict__), place.name) not in fed
        }
        return ModuleCheck(self.module, self.path, reads, stored)

    def own_hooks(self) -> list[Any]:
        """The hooks of the module itself, which are part of no layout."""
        return [list(self.module.__dict__[name].values()) for name in internals.HOOKS]

    def quick_check(self) -> Callable[[], bool]:
        """A check of the versions of its dicts."""
        own = tuple(self.module.__dict__[name] for name in internals.HOOKS)
        reading = replace(self.reading, dicts=(*self.reading.dicts, *own))
        return module_state.unchanged(reading, self.reads)

    def __call__(self) -> bool:
        if self.quick():
            return True
        if self.change():
            return False
        self.reading = module_state.read(self.module, self.stored)
        self.quick = self.quick_check()
        return True

    def change(self) -> str:
        """Describe the change; empty if nothing has changed."""
        now = module_state.read(self.module, self.stored)
        if now.layout != self.reading.layout or self.own_hooks() != self.hooks:
            return f"the parts or hooks of {self.path} have changed"
        if len(now.tensors) != len(self.reading.tensors) or not all(
            map(operator.is_, now.tensors, self.reading.tensors)
        ):
            return f"a parameter or buffer of {self.path} is another tensor"
        attribute = module_state.changed_attribute(self.module, self.reads)
        return "" if attribute is None else f"{self.path}.{escaped(attribute)} has changed"


def outside_of(watched: Watched, kept: tuple[KeptState, ...]) -> Outside | None:
    """The guard of reads that were found, and of kept objects; None if there is nothing to
    guard.
    """
    read = watched.reads
    if not kept:
        return read[0] if read else None
    edges, modules = (read[0].edges, read[0].modules) if read else ((), ())
    held = {id(one.container) for state in kept for one in state.contents}
    fed = {(id(holder), key) for state in kept for holder, key, _ in state.places}
    held = held.union(*(state.within for state in kept))

    def is_held(one: Edge) -> bool:
        """Test whether the state of kept objects has the edge."""
        holder = one.holder() if type(one.holder) is weakref.ref else one.holder
        own = dict_of(one.holder) if one.kind == "content" else None
        return bool(held & {id(holder), id(own)}) or (id(one.holder), one.key) in fed

    others = (one for one in edges if not is_held(one))
    stored = frozenset[tuple[int, str]]().union(*(state.stored for state in kept))
    if stored or fed:
        checks = (one for one in modules if isinstance(one, ModuleCheck))
        with watched.first_moment.visited():
            modules = tuple(one.without(stored, fed) for one in checks)
    return Outside(tuple(others), (*modules, *kept))


# ---- watching a trace ----


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """A function that was traced: its reads from outside, once it is finished, and the moment
    before it ran. `put_back` gives PyTorch the state of that moment.
    """

    reads: list[Outside]
    first_moment: Moment
    put_back: Callable[[], None]

    def begin_again(self) -> None:
        """Undo what the function wrote to places outside, and what it set in PyTorch."""
        self.put_back()
        self.first_moment()


@contextmanager
def watching(f: Callable[..., Any], given: Sequence[Any] = ()) -> Generator[Watched]:
    """Watch f while it is traced inside. Objects among its arguments, such as modules and
    optimizers, are outside, too.

    Raises:
        UnsupportedCall: it reads what can be neither guarded nor baked in: an iterator, a large
            array. Or it leaves PyTorch in another state, such as the grad mode.
    """
    own = getattr(f, "module", None)
    parts = (
        frozenset(map(id, own.modules())) if isinstance(own, torch.nn.Module) else frozenset[int]()
    )
    watch = Watch(f, parts)
    watch.irreversible = Irreversible.CERTAIN_REFUSED
    before = internals.state()
    watched = Watched([], watch.first_moment, internals.state_kept())
    for value in given:
        watch.reach(value, type(value).__name__)
    try:
        with observing(watch) as attributes:
            yield watched
    except TracedFunctionError:
        _refuse_search(f, watch)
        _refuse_draws(f, watch, is_over=False)
        raise
    except ThunderError as error:
        if error.is_refusal:
            watch.draw_again()
        raise
    watch.finish()
    _refuse_state(f, before, watched.put_back)
    _refuse(f, watch)
    outside = reads_of(watch, attributes)
    for one in watch.constants.values():
        what = f"jit: {one} is taken as a constant: no guard can look into it"
        fix = "Pass it as an argument, or say that it never changes: `tfn.constant(...)`."
        warnings.warn(located(what, source=source_of(f), fix=fix), OutsideWarning, stacklevel=3)
    if outside is not None:
        watched.reads.append(outside)


@contextmanager
def observing(watch: Watch) -> Generator[Tracked]:
    """Let a watch see what runs inside, and track the attributes of modules that are read there."""
    with observed_by(watch), forgetting(), tracked() as attributes:  # the watch knows counters
        yield attributes


def reads_of(
    watch: Watch, attributes: Tracked, *, but: Collection[int] = frozenset()
) -> Outside | None:
    """The reads that a watch has found, once it is finished; None if there are none.

    Args:
        attributes: the attributes of modules that were read.
        but: the ids of holders that are compared elsewhere.
    """
    inner = {
        id(part)
        for module in watch.modules.values()
        for part in module.modules()
        if part is not module
    }
    roots = [module for key, module in watch.modules.items() if key not in inner]
    reads = {
        place: value
        for place, value in attributes.reads.items()
        if id(place.module) not in watch.own
    }
    edges = tuple(
        edge
        for edge in watch.edges.values()
        if not _is_settled(edge) and not _is_compared(edge, but)
    )
    with watch.first_moment.visited() if roots else nullcontext():
        checks = [ModuleCheck(module, watch.outside[id(module)][1], reads) for module in roots]
    held = {id(edge.value) for edge in edges}
    for edge in edges:
        if edge.owner is not None and id(edge.owner) not in held:  # a guard keeps no object alive
            edge.owner = reference_to(edge.owner)
    return Outside(edges, tuple(checks)) if edges or checks else None


def _is_compared(edge: Edge, holders: Collection[int]) -> bool:
    """Test for an edge from one of these holders, whose items are compared: content may reach into
    others, and functions have names and texts.
    """
    if edge.kind == "attr" and is_a(edge.holder, types.FunctionType):
        is_part = edge.key in ("__code__", "__defaults__", "__kwdefaults__")
        return is_part and id(edge.holder) in holders
    if edge.kind != "content":
        return id(edge.holder) in holders
    return all(id(part) in holders for part, _ in met(edge.holder))


def _is_settled(edge: Edge) -> bool:
    """Test for an edge that another edge implies."""
    return edge.kind == "attr" and edge.key == "__kwdefaults__" and edge.value is None


def _refuse_state(
    f: Callable[..., Any], before: Mapping[str, Any], put_back: Callable[[], None]
) -> None:
    """Refuse a function that leaves PyTorch in another state: its program would not set it."""
    after = internals.state()
    if after == before:
        return
    names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    put_back()
    raise UnsupportedCall(
        f"{callable_name(f)} leaves another {', '.join(names)} than it found;"
        " its program would not set it in later calls",
        source=source_of(f),
        fix=(
            "Set it outside of the function; or inside for a part of it, by a `with`, such as"
            " `torch.no_grad()`."
        ),
    )


def _refuse_search(f: Callable[..., Any], watch: Watch) -> None:
    """Refuse a search for an argument by its identity, which says nothing about a tracer's."""
    for path in watch.searched:
        raise UnsupportedCall(
            f"{callable_name(f)} looks for a tensor argument, or its id, among the keys of {path},"
            " but its trace serves other arguments, too",
            source=source_of(f),
            fix="Use names or indices as keys, or pass what the tensor leads to as an argument.",
        )


def _refuse_draws(f: Callable[..., Any], watch: Watch, *, is_over: bool) -> None:
    """Refuse draws from iterators outside. One that does not tell its position counts as drawn from
    when the function is over.
    """
    for value, path, progress in watch.drawn.values():
        if is_over if progress is None else watch.has_drawn(value, progress):
            raise drawn_error(callable_name(f), path, value, source_of(f))


def _refuse(f: Callable[..., Any], watch: Watch) -> None:
    _refuse_draws(f, watch, is_over=True)
    for path, name in watch.states.items():
        raise state_error(
            f"{callable_name(f)} calls `{name}` of {path}, a generator from outside,", source_of(f)
        )
    _refuse_search(f, watch)
    for value, path in watch.arrays.values():
        raise UnsupportedCall(
            f"{callable_name(f)} reads {path}, an array of {nbytes_of(value)} bytes from"
            " outside, which is too large to be compared in each call (the limit is"
            f" {MAX_ARRAY_BYTES})",
            source=source_of(f),
            fix=(
                f"Pass `torch.as_tensor({path})` as an argument, or write"
                f" `tfn.constant({path})` if it never changes."
            ),
        )
