"""The plans that transforms keep between eager calls.

`grad(f)(x)` in a Python loop captures f once. A later call takes the plan of the first, if it is a
call of the same function with arguments of the same kind, and nothing that f read from outside has
changed. A function whose run does more than its trace says, such as one that prints, is captured
each time.

Two functions are the same if they have one code and close over the same: plain data and containers
by value, other functions likewise, tensors by their kind, anything else by identity. So a function
that a training step defines anew each time is captured once too. Tensors from outside are inputs of
the kept trace.

When the sizes of arguments change for the second time, f is captured with symbols for them, as
`jit` does. The plan serves all sizes that give the same answers to what f asked about them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.api.calling import Transformed, run
from thunder_fn.capture import EVERY_LEAF, Captured, capture, current, pytree
from thunder_fn.capture.apply import close_over, write_back
from thunder_fn.capture.numbers.arguments import Place, Symbolic, value_at
from thunder_fn.capture.objects import is_a
from thunder_fn.capture.outside.frames import observer
from thunder_fn.capture.outside.kinds import parts_in
from thunder_fn.capture.outside.properties import Read
from thunder_fn.capture.outside.reads import CONTAINERS, LONG, PLAIN, Same, is_object, module_of
from thunder_fn.capture.outside.watch import Watch
from thunder_fn.capture.recorded import Decision
from thunder_fn.capture.replaced import host_random
from thunder_fn.capture.supported import has_symbols
from thunder_fn.errors import ThunderError, UnsupportedCall, UnsupportedInput, callable_name
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir.memos import clears, is_closed
from thunder_fn.ir.ops import has_effects
from thunder_fn.ir.symbols import made_by
from thunder_fn.ir.trace import Trace
from thunder_fn.jitted.dynamic import with_symbols
from thunder_fn.jitted.families import Family
from thunder_fn.jitted.outside import ModuleCheck, Outside, observing, reads_of
from thunder_fn.jitted.program import decisions_of, reads_guard

LIVING, ORPHANS = 64, 16
"""The number of captures that are kept: of functions that live, and of those that are gone."""
STATES = 4
"""The number of captures of one call, for states of what the function reads."""
WITH_NUMBERS = 4
"""So many captures of calls that differ in sizes only are made with numbers, before one is made
with symbols. That takes several times as long, and data often has one other size: the last batch's.
"""
MISSES = 32
"""A function that was captured so often is watched no more."""

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_EXACT = frozenset((bool, int, str, bytes, type(None), torch.dtype, torch.device))
"""Types of plain data of which only equal values are the same."""
_BY_IDENTITY = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


T = TypeVar("T")


class _Unknown(Exception):
    """Raised for a call that has no key."""


@dataclass(frozen=True, slots=True)
class _Equal:
    """An object that is compared by value."""

    value: Hashable


class _Kind(NamedTuple):
    """The kind of a tensor."""

    cls: type
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    requires_grad: bool
    is_conj: bool
    is_neg: bool
    is_inference: bool

    def of_any_size(self) -> Hashable:
        """The kind without sizes; those of parameters stay."""
        if self.cls is torch.nn.Parameter:
            return self
        return self._replace(shape=(-1,) * len(self.shape), stride=())


def _of_any_size(key: Any) -> Hashable:
    """The key of a call without the sizes of its arguments."""
    (leaves, *others), modes = key
    found = (leaf.of_any_size() if isinstance(leaf, _Kind) else leaf for leaf in leaves)
    return tuple(found), *others, modes


@dataclass(slots=True, eq=False)
class _Call:
    """A call as its key is made.

    `leaves` are those of its arguments, with None for what is no tensor, and `given` the tensors
    among them. `tensors` are these, then those that its function
    closes over, each once, by `places`. `closed` are the places of the latter. `holders` are the
    objects whose content the key compares, by their ids, in order. `objects` are arguments that it
    compares by identity.
    """

    leaves: list[Any] = field(default_factory=list[Any])
    given: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    tensors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    places: dict[int, int] = field(default_factory=dict[int, int])
    closed: set[int] = field(default_factory=set[int])
    holders: dict[int, int] = field(default_factory=dict[int, int])
    objects: list[Any] = field(default_factory=list[Any])

    def inputs(self, extra: Sequence[Place]) -> list[Any]:
        """The tensors of the arguments, then the strides at these places."""
        return [*self.given, *(value_at(self.leaves, place) for place in extra)]

    def find_key(self, f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
        """The key of the call under the present modes; None for a call that has none."""
        try:
            return self.key(f, args, kwargs), internals.kinds_of_modes()
        except _Unknown:
            return None

    def key(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """The key of the call.

        Raises:
            _Unknown: a leaf is neither a plain tensor nor plain data.
        """
        leaves, spec = pytree.flatten((args, kwargs))
        found = tuple(map(self.key_of_leaf, leaves))
        self.leaves = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        self.given = [leaf for leaf in self.leaves if leaf is not None]
        orders = pytree.orders_of((args, kwargs)) if pytree.has_dicts(spec) else ()
        return found, spec, orders, self.key_of(f)

    def key_of_leaf(self, leaf: Any) -> Hashable:
        """The key of a leaf of the arguments."""
        kind = type(leaf)
        if kind in _TENSORS:
            return self.key_of_tensor(leaf)
        if kind in _EXACT:
            return kind, leaf
        if is_a(leaf, PLAIN):
            return _plain(leaf)
        if not (is_a(leaf, _BY_IDENTITY) or is_object(leaf)):
            raise _Unknown
        self.objects.append(leaf)
        if is_a(leaf, types.MethodType):
            return Same(leaf.__func__), Same(leaf.__self__)
        return Same(leaf)

    def key_of_tensor(self, tensor: torch.Tensor) -> Hashable:
        """The kind of a tensor, or its place if it was met before."""
        place = self.places.setdefault(id(tensor), len(self.tensors))
        if place < len(self.tensors):
            return place
        self.tensors.append(tensor)
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise _Unknown
        return _Kind(
            type(tensor),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.device,
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
            tensor.is_inference(),
        )

    def key_of(self, value: Any) -> Hashable:
        """The key of the function, or of a value that it closes over."""
        kind = type(value)
        if kind in _EXACT:
            return kind, value
        if kind is Same or kind is _Equal:
            return value
        if kind in _TENSORS:
            named = _attributes_of(value)
            key = self.key_of_tensor(value)
            self.closed.add(self.places[id(value)])
            return (key, named) if named else key
        if kind not in _PARTS and is_a(value, PLAIN):
            return _plain(value)
        parts = _parts_of(value)
        if parts is None:
            return Same(value)
        place = self.holders.setdefault(id(value), len(self.holders))
        if place < len(self.holders) - 1:
            return "met", place
        return type(value), *map(self.key_of, parts)


@functools.cache
def _fields_of(cls: type) -> tuple[str, ...]:
    """The fields that make a value of a frozen class of ours, such as that of a transformed
    function or a pullback; those in its `KEY` if it has one. Empty for other classes.
    """
    known, chosen = getattr(cls, "__dataclass_params__", None), getattr(cls, "KEY", None)
    if chosen is not None and module_of(cls).startswith("thunder_fn."):
        return tuple(chosen)
    is_ours = module_of(cls).startswith("thunder_fn.") and cls not in (Trace, Captured)
    is_value = is_ours and known is not None and known.frozen and known.eq
    return tuple(one.name for one in dataclasses.fields(cls)) if is_value else ()


def _attributes_of(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """The attributes that Python code gave a tensor, as a key.

    Raises:
        _Unknown: one of them is no plain data.
    """
    named = internals.attributes(tensor)
    if not all(is_a(value, PLAIN) for value in named.values()):
        raise _Unknown
    return tuple((name, _plain(value)) for name, value in named.items())


def _has_attributes(tensor: torch.Tensor, known: tuple[Hashable, ...]) -> bool:
    """Test whether the attributes of a tensor are still those."""
    try:
        return _attributes_of(tensor) == known
    except _Unknown:
        return False


def _plain(value: Any) -> Hashable:
    """The key of plain data: `1`, `1.0` and `True` are apart, `0.0` and `-0.0` too.

    Raises:
        _Unknown: a slice has something else in it, such as a tensor.
    """
    if is_a(value, slice):  # has no hash in Python 3.11
        parts = value.start, value.stop, value.step
        if not all(is_a(part, (int, type(None))) for part in parts):
            raise _Unknown
        return slice, *map(_plain, parts)
    return type(value), repr(value) if is_a(value, (float, complex)) else value


def _parts_of(value: Any) -> tuple[Any, ...] | None:
    """The parts of a value that say all about it; None for a value that is itself only."""
    of = _PARTS.get(type(value))
    if of is not None:
        return of(value)
    names = _fields_of(type(value))
    return tuple(getattr(value, name) for name in names) if names else None


def _parts_of_function(value: types.FunctionType) -> tuple[Any, ...]:
    """The code, and what it is closed over."""
    known, closed = (Same(value.__code__), Same(value.__globals__)), value.__closure__ or ()
    more = value.__dict__, value.__defaults__, value.__kwdefaults__
    return (*known, *(part or None for part in more), *closed) if any(more) else (*known, *closed)


def _parts_of_cell(value: types.CellType) -> tuple[Any, ...] | None:
    try:
        return (value.cell_contents,)
    except ValueError:
        return None


def _items_of(value: Any) -> tuple[Any, ...] | None:
    if len(value) > LONG:
        return None
    return tuple(value) if type(value) is not dict else (*value, *value.values())


_PARTS: dict[type, Callable[[Any], tuple[Any, ...] | None]] = {
    types.FunctionType: _parts_of_function,
    types.CellType: _parts_of_cell,
    types.MethodType: lambda value: (value.__func__, value.__self__),
    functools.partial: lambda value: (value.func, value.args, value.keywords),
    pytree.PyTreeSpec: lambda value: (_Equal(value),),
    Captured: lambda value: (Same(value.trace),) if value.is_kept else None,
    list: _items_of,
    tuple: _items_of,
    dict: _items_of,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """A call of a transformed function, but for its tensors.

    Args:
        name: of the transformed function.
        captured: the function.
        trace: what runs: a trace that was made of the captured one.
        arrange: makes the result, from the inputs of the trace and its outputs. It holds no tensor
            of the call.
        inputs: makes the inputs of the trace, from the tensors of the call and those that the trace
            closes over; they are the inputs in this order if it is None.
        later: traces that the result runs, such as the backward of a pullback.
    """

    name: str
    captured: Captured
    trace: Trace
    arrange: Callable[[Sequence[Any], tuple[Any, ...]], Any]
    inputs: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]] | None = None
    later: tuple[Trace, ...] = ()

    def run(self, given: Sequence[Any], closed: Sequence[Any] = ()) -> Any:
        """The result of a call with these tensors."""
        inputs = (*given, *closed) if self.inputs is None else self.inputs(given, closed)
        return self.arrange(inputs, run(self.name, self.trace, inputs, self.captured))


def in_place(captured: Captured) -> Callable[[Sequence[Any], tuple[Any, ...]], Any]:
    """Arrange the outputs of a trace as the function's result, and write what it writes."""
    return lambda inputs, outputs: captured.result(write_back(captured, inputs, outputs))


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A plan, and the conditions under which it serves a call. `sources` are the tensors that its
    trace closes over: places among the tensors of the call, or tensors, which `match` compares.
    `bare` are tensors to which nobody has given an attribute, `named` those with attributes, and
    these. `root` is the function, as long as it lives. `extra` are the places of strides that are
    symbols. `decisions` are what the function asked about sizes.
    """

    plan: Plan
    sources: tuple[int | torch.Tensor, ...]
    match: Callable[..., bool]
    outside: Outside | None
    bare: tuple[torch.Tensor, ...]
    named: tuple[tuple[torch.Tensor, tuple[Hashable, ...]], ...]
    reads_match: Callable[..., bool] | None
    is_unchanged: Callable[[], bool]
    root: Callable[[], Any]
    extra: tuple[Place, ...] = ()
    decisions: tuple[Decision, ...] = ()
    feeds_grads: ClassVar = False

    def is_inside(self) -> bool:
        """Test whether nothing outside has changed that the function read."""
        return (
            self.is_unchanged()
            and self.match(*(one for one in self.sources if isinstance(one, torch.Tensor)))
            and (self.outside is None or self.outside.matches())
            and not any(map(internals.attributes, self.bare))
            and all(itertools.starmap(_has_attributes, self.named))
        )

    def serves(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Test whether nothing has changed that the function read."""
        return self.is_inside() and (self.reads_match is None or self.reads_match(*tensors))

    def run(self, call: _Call) -> Any:
        """The result of a call that it serves."""
        found = [call.tensors[one] if isinstance(one, int) else one for one in self.sources]
        return self.plan.run(call.inputs(self.extra), found)


class _Sizes(Family):
    """Calls that differ in sizes only. `layouts` are the orders of the dims in memory of the first
    result, with which those of others agree. `root` is the function, as long as it lives.
    """

    def __init__(self, call: _Call, root: Callable[[], Any]) -> None:
        super().__init__(call)
        self.root = root
        self.layouts: tuple[tuple[int, ...] | None, ...] = ()

    def agrees(self, kept: _Kept, result: Any) -> bool:
        """Test whether a result lies in memory like the first one, which is noted."""
        if kept.plan.later or has_effects(kept.plan.trace):  # a pullback; not to be run again
            return True
        found = tuple(map(_order_of, pytree.tensors_in(result)))
        self.layouts = self.layouts or found
        pairs = zip(found, self.layouts, strict=False)
        return all(one is None or other is None or one == other for one, other in pairs)


def _order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dims of a tensor in the order of their strides; None where that is open."""
    if tensor.layout is not torch.strided or any(size < 2 for size in tensor.shape):
        return None
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim)))


class _Captures:
    """The captures that a process keeps, by call; those of a call with the latest first. Calls that
    differ in sizes only have a family for those with symbols. Threads share them.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kept: OrderedDict[Hashable, tuple[_Kept, ...]] = OrderedDict()
        self.families: OrderedDict[Hashable, _Sizes] = OrderedDict()
        self.misses: weakref.WeakKeyDictionary[types.CodeType, int] = weakref.WeakKeyDictionary()

    def cache_clear(self) -> None:
        """Forget every capture."""
        with self.lock:
            self.kept.clear()
            self.families.clear()
            self.misses.clear()

    def family(self, key: Hashable) -> _Sizes | None:
        """The family of a call, if one like it was kept."""
        return self.families.get(_of_any_size(key))

    def find(self, key: Hashable, call: _Call) -> _Kept | None:
        """The plan that serves a call."""
        for one in self.kept.get(key, ()):
            if one.serves(call.tensors):
                return one
        family = self.family(key)
        found = () if family is None else family.find(call)
        return next((one for one in found if one.serves(call.tensors)), None)

    def put(self, key: Hashable, call: _Call, new: _Kept) -> _Sizes:
        """Keep a capture, and let the oldest ones go. The family of the call."""
        with self.lock:
            self.kept[key] = new, *self.kept.pop(key, ())[: STATES - 1]
            _let_go(self.kept, lambda kept: kept[0].root())
            where = _of_any_size(key)
            family = self.families.pop(where, None) or _Sizes(call, new.root)
            self.families[where] = family
            family.traced(call)
            _let_go(self.families, lambda family: family.root())
            return family

    def is_watched(self, root: Any) -> bool:
        """Test whether captures of functions like this one are likely to be met again."""
        code = getattr(root, "__code__", None)
        return not isinstance(code, types.CodeType) or self.misses.get(code, 0) < MISSES

    def count(self, root: Any, *, is_miss: bool) -> None:
        """Count the captures of functions like this one since a kept one was last used."""
        code = getattr(root, "__code__", None)
        if isinstance(code, types.CodeType) and (is_miss or code in self.misses):
            with self.lock:
                self.misses[code] = self.misses.get(code, 0) + 1 if is_miss else 0


def _let_go(kept: OrderedDict[Hashable, T], root: Callable[[T], Any]) -> None:
    """Let the oldest entries go: of functions that live, and of those that are gone."""
    living = [key for key, one in kept.items() if root(one) is not None]
    orphans = [key for key, one in kept.items() if root(one) is None]
    for gone in (*living[:-LIVING], *orphans[:-ORPHANS]):
        del kept[gone]


_CAPTURES = clears(_Captures())


def _capture(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> Captured:
    """Capture a function for a transform, which is given what it stores outside. What it has
    written to tensors until it raises stays, but under vmap, whose arguments are examples.
    """
    if options.get("inside") != "vmap" and options.get("symbolic") is None:
        tensors = pytree.tensors_in((args, kwargs or {}))
        options["on_raise"] = functools.partial(_apply_unfinished, tensors)
    return capture(f, args, kwargs, stores=True, **options)


def _apply_unfinished(tensors: Sequence[torch.Tensor], captured: Captured) -> None:
    """Make the changes of a function until it raised, as eager mode does."""
    captured.result(write_back(captured, tensors, evaluate(captured.trace, tensors)))


@internals.outside_dynamo
def planned(
    of: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    make: Callable[[Callable[..., Captured]], Plan],
    whole: Callable[..., Any] | None = None,
) -> Any:
    """The result of a call of a transformed function: by our plan, or by torch.func outside of
    traces where a trace cannot hold what the call needs and eager PyTorch can. These are nested and
    sparse tensors, and a graph of autograd's that was recorded before.
    """
    try:
        return _planned(of, args, kwargs, make, whole)
    except (UnsupportedCall, UnsupportedInput) as error:
        twin = _by_torch(of) if error.is_eager and current() is None else None
        if twin is None:
            raise
        refusal = error
    try:
        return twin(*args, **kwargs)
    except RuntimeError as error:
        if "Please file an issue" not in str(error):
            raise
        raise refusal from None


def _planned(
    of: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    make: Callable[[Callable[..., Captured]], Plan],
    whole: Callable[..., Any] | None,
) -> Any:
    """The result by a plan that an eager call may have left.

    Law: it is ``make(capture).run(tensors)``, with the tensors among the arguments.

    Args:
        of: the transformed function, or a tuple of what makes it one.
        make: captures the function, by what it is given in the place of `capture`.
        whole: the transformed function, to be captured with symbols, where the function itself has
            other arguments than the call.
    """
    if current() is not None:
        return make(_capture).run(pytree.tensors_in((args, kwargs)))
    root, call, key = _root_of(of), _Call(), None
    if internals.is_intercepted():
        if (twin := twin_of(of, args, kwargs)) is not None:
            return twin(*args, **kwargs)
    elif _CAPTURES.is_watched(root):
        key = call.find_key(of, args, kwargs)
    if key is None:
        return _run_once(make, root, args, kwargs)
    found = _CAPTURES.find(key, call)
    _CAPTURES.count(root, is_miss=found is None)
    if found is not None:
        return found.run(call)
    with_sizes = make if whole is None else functools.partial(plan_of, whole, args, kwargs)
    return _run_first(call, key, root, make, with_sizes)


def _run_first(
    call: _Call,
    key: Hashable,
    root: Any,
    make: Callable[[Callable[..., Captured]], Plan],
    with_sizes: Callable[[Callable[..., Captured]], Plan],
) -> Any:
    """The result of a call that no plan serves. Its own plan is kept, if it may serve others:
    those with other sizes too, where these have changed between calls.
    """
    family = _CAPTURES.family(key)
    if family is not None and family.count >= WITH_NUMBERS:
        first = _First(call, root, with_sizes)
        wanted = family.dynamic | family.changed(call)
        make_with = functools.partial(first.with_sizes, family)
        if with_symbols(family, call, wanted, make_with, callable_name(root)) is not None:
            return first.result
        if first.plan is not None:
            return first.run_once()
    first = _First(call, root, make)
    if (new := first.kept()) is None:
        return first.run_once()
    family, result = _CAPTURES.put(key, call, new), new.run(call)
    family.agrees(new, result)
    return result


def twin_of(of: Any, args: Any, kwargs: Any) -> Callable[..., Any] | None:
    """torch.func's transform, under a `make_fx` with symbolic sizes, which no trace of ours has.

    PyTorch cannot trace forward mode so.
    """
    if current() is not None or not internals.is_make_fx():
        return None
    if not any(map(has_symbols, pytree.tensors_in((args, kwargs)))):
        return None
    is_forward = of[0] != "vjp" if isinstance(of, tuple) else of.is_forward
    return None if is_forward else _by_torch(of)


def _by_torch(of: Any) -> Callable[..., Any] | None:
    """torch.func's transform in the place of ours, if it has one."""
    match of:
        case ("vjp", f, has_aux):
            return functools.partial(torch.func.vjp, f, has_aux=has_aux)
        case ("jvp", f, has_aux, strict):
            return functools.partial(torch.func.jvp, f, has_aux=has_aux, strict=strict)
        case Transformed() if type(of).by_torch is not Transformed.by_torch:
            return of.by_torch()
        case _:
            return None


@contextmanager
def _undone(watch: Watch, *, always: bool = False) -> Generator[None]:
    """Undo what the function wrote outside, if it is refused: it has not run. After any error if it
    runs again.
    """
    try:
        yield
    except Exception as error:
        if always or (isinstance(error, ThunderError) and error.is_refusal):
            watch.put_back()
        raise


def _watch_of(f: Any, args: tuple[Any, ...], kwargs: Any) -> Watch:
    """A watch of f, to which the objects among its arguments are outside."""
    watch = Watch(f)
    for one in pytree.flatten((args, kwargs))[0]:
        if is_object(one):
            watch.reach(one, type(one).__name__)
    return watch


def capture_watched(f: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> Captured:
    """Capture f once for its trace. Where a body in it changes Python's objects, it is known
    whether the rest of f reads them.
    """
    if observer() is not None:
        return capture(f, args, kwargs)
    watch = _watch_of(f, args, kwargs)
    with observing(watch), _undone(watch):
        captured = capture(f, args, kwargs)
    watch.finish()
    return captured


def _run_once(
    make: Callable[[Callable[..., Captured]], Plan],
    root: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The result of a call whose plan is not kept."""
    watch = _watch_of(root, args, kwargs)
    with observing(watch), _undone(watch):
        plan = make(_capture)
    return plan.run(pytree.tensors_in((args, kwargs)))


def plan_of(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    capture: Callable[..., Captured],
) -> Plan:
    """A plan that is the trace of the call."""
    captured = capture(f, args, kwargs, known=EVERY_LEAF)
    return Plan(captured.trace.name, captured, captured.trace, in_place(captured))


class _NotKept(Exception):
    """Raised for a capture with symbols that serves no other call."""


@dataclass(slots=True, eq=False)
class _First:
    """A call that no plan serves. Its own plan is kept, if it may serve others."""

    call: _Call
    root: Any
    make: Callable[[Callable[..., Captured]], Plan]
    plan: Plan | None = None
    given: Sequence[Any] = ()
    result: Any = None
    lifting: _Lifting = field(default_factory=lambda: _Lifting())

    def kept(self, symbolic: Symbolic | None = None) -> _Kept | None:
        """Capture the function. The plan with its conditions; None if it serves this call only."""
        call, self.lifting = self.call, _Lifting(symbolic)
        extra = () if symbolic is None else tuple(place for _, place in symbolic.inputs)
        self.given = call.inputs(extra)
        is_unchanged, before = internals.global_state_guard(), host_random.state()
        watch = Watch(self.root, hears_calls=True)
        for one in call.objects:
            watch.reach(one, type(one).__name__)
        with observing(watch) as attributes, _undone(watch, always=symbolic is not None):
            plan = self.plan = self.make(self.lifting.capture)
        watch.finish()
        captured = self.lifting.captured
        if (
            captured is None
            or not watch.is_repeatable
            or attributes.has_changes()
            or host_random.drawn_since(before)
            or not is_unchanged()
            or not all(map(is_closed, (plan.trace, *plan.later)))
        ):
            return None
        outside = reads_of(watch, attributes, but=call.holders)
        read = tuple(_tensors_of(outside))
        sources = _sources(call, self.lifting.tensors, read)
        try:
            found = tuple((one, _attributes_of(one)) for one in read)
        except _Unknown:
            return None
        if sources is None:
            return None
        match = internals.tensor_guard([one for one in sources if not isinstance(one, int)])
        bare = tuple(one for one, attributes in found if not attributes)
        named = tuple(one for one in found if one[1])
        reads_match = _placed(call, captured.reads)
        known = plan, sources, match, outside, bare, named, reads_match, is_unchanged
        asked = () if symbolic is None else decisions_of(captured, (plan.trace, *plan.later))
        return _Kept(*known, _weak(self.root), extra, asked)

    def with_sizes(self, family: _Sizes, symbolic: Symbolic) -> _Kept:
        """Capture the function with symbols for sizes, and run the plan. If it asks for their very
        values each time, further calls are captured without.

        Raises:
            _NotKept: the capture serves this call only, or has results with other strides.
        """
        if (new := self.kept(symbolic)) is None:
            raise _NotKept("it serves one call")
        self.plan = None  # it is kept
        self.result = new.run(self.call)
        if not family.agrees(new, self.result):
            raise _NotKept("its results have other strides than those of the first call")
        family.pin(symbolic, new.decisions)
        return new

    def run_once(self) -> Any:
        """The result by a plan that is not kept: it is not lowered."""
        assert self.plan is not None, "the function has been captured"
        once = dataclasses.replace(self.plan.captured, is_kept=False)
        plan = dataclasses.replace(self.plan, captured=once)
        return plan.run(self.given, self.lifting.tensors)


@dataclass(slots=True, eq=False)
class _Lifting:
    """A capture that makes tensors from outside the last inputs of its trace, where it can."""

    symbolic: Symbolic | None = None
    captured: Captured | None = None
    tensors: tuple[torch.Tensor, ...] = ()

    def capture(
        self,
        f: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Captured:
        """Capture f, once."""
        captured = _capture(f, args, kwargs, symbolic=self.symbolic, **options)
        decides = bool(captured.decisions) and self.symbolic is None
        lifted = _lifted(captured) if _is_plain(captured) and not decides else None
        if lifted is None:
            return captured
        given = pytree.tensors_in((args, kwargs or {}))
        reads = tuple(
            dataclasses.replace(read, tensor=given[read.tensor])
            if isinstance(read.tensor, int)
            else read
            for read in captured.reads
        )
        self.tensors, self.captured = lifted[1], dataclasses.replace(lifted[0], reads=reads)
        return lifted[0]


def _lifted(captured: Captured) -> tuple[Captured, tuple[torch.Tensor, ...]] | None:
    """The capture with tensors from outside as its last inputs, and these; None where a result
    shares memory with another tensor from outside.
    """
    trace, tensors = close_over(captured.trace)
    count = len(trace.inputs) - len(tensors)
    places = {id(tensor): count + i for i, tensor in enumerate(tensors)}
    found: dict[str, tuple[Any, ...]] = {"aliases": captured.aliases, "shared": captured.shared}
    for name, seen in found.items():
        if any(not isinstance(one.source, int) and id(one.source) not in places for one in seen):
            return None
        found[name] = tuple(
            one
            if isinstance(one.source, int)
            else dataclasses.replace(one, source=places[id(one.source)])
            for one in seen
        )
    return dataclasses.replace(captured, trace=trace, is_kept=True, reads=(), **found), tensors


def _root_of(f: Any) -> Any:
    """The function behind transforms."""
    while isinstance(f, (Transformed, tuple)):
        f = f[1] if isinstance(f, tuple) else f.fn
    return f


def _weak(value: Any) -> Callable[[], Any]:
    """A weak reference; to what has none, one that always has its answer."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: True


def _is_plain(captured: Captured) -> bool:
    """Test for a capture that is its trace and the arrangement of results, and nothing else. Sizes
    that are found in data belong to one call.
    """
    more = (
        captured.writes,
        captured.own_leaves,
        captured.grads,
        captured.retained,
        captured.follows,
        captured.feeds,
        captured.effects,
        captured.kept,
        captured.freed,
        captured.is_told,
    )
    return not any(more) and not _finds_numbers(captured.trace)


def _finds_numbers(trace: Trace) -> bool:
    """Test whether a trace, or a body in it, finds sizes or numbers in data."""
    return any(made_by(one) or any(map(_finds_numbers, one.bodies)) for one in trace.equations)


def _sources(
    call: _Call, tensors: Sequence[torch.Tensor], seen: Sequence[torch.Tensor]
) -> tuple[int | torch.Tensor, ...] | None:
    """The places in a call of the tensors that a trace closes over, or the tensors themselves. None
    where the function may reach one of them in another way (`seen`), of which a later call may
    change one.
    """
    others = set(map(id, seen))
    places = (call.places.get(id(tensor)) for tensor in tensors)
    known = [place if place in call.closed else None for place in places]
    if any(
        place is not None and id(tensor) in others
        for place, tensor in zip(known, tensors, strict=True)
    ):
        return None
    pairs = zip(known, tensors, strict=True)
    return tuple(tensor if place is None else place for place, tensor in pairs)


def _placed(call: _Call, reads: Sequence[Read]) -> Callable[..., bool] | None:
    """The guard of reads, as a function of the tensors of a call; None if there are none."""
    placed = [
        dataclasses.replace(read, tensor=call.places.get(id(read.tensor), read.tensor))
        for read in reads
    ]
    return reads_guard(placed) if placed else None


def _tensors_of(outside: Outside | None) -> Iterator[torch.Tensor]:
    """The tensors that reads from outside lead to."""
    if outside is None:
        return
    for edge in outside.edges:
        value = edge.holder if edge.kind == "content" else edge.value
        yield from (leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))
    for module in outside.modules:
        if isinstance(module, ModuleCheck):
            yield from module.reading.tensors


def _leaves(value: Any, depth: int = 4) -> Iterator[Any]:
    """The values in a container, and in those in it."""
    if depth and is_a(value, CONTAINERS):
        for part in parts_in(value):
            yield from _leaves(part, depth - 1)
    else:
        yield value
