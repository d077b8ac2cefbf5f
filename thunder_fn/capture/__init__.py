"""Capture: a PyTorch callable becomes a trace.

The function runs once on tracers and is recorded, as in JAX. In-place code and views come out pure;
closed-over tensors become constants; mutations become extra outputs. Capture nests and is
thread-safe: all state lives in one Recorder, found through a context variable.

`recorder.py` records, `scopes.py` sees torch functions, `nesting.py` folds the recording.
`outside/` finds reads of globals and attributes, `numbers/` makes numbers symbolic, `replaced/`
stands in for functions. A replacement of a PyTorch function belongs into its tables; it must not be
visible to other threads.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.aliases import Alias, aliases_of
from thunder_fn.capture.failures import (
    check_aliases,
    check_argument,
    check_static_output,
    failure,
    is_told,
    source_of,
)
from thunder_fn.capture.kept import GRAD, Effect, Feed, Kept, KeptState, MustFeed
from thunder_fn.capture.modules import modules_of
from thunder_fn.capture.nesting import nest
from thunder_fn.capture.numbers.arguments import Symbolic
from thunder_fn.capture.numbers.counts import tensors_of_numbers
from thunder_fn.capture.numbers.python_numbers import class_of_numbers
from thunder_fn.capture.outside import frames
from thunder_fn.capture.outside.process import noted_state
from thunder_fn.capture.outside.properties import Read, types_of
from thunder_fn.capture.pytree import TENSOR
from thunder_fn.capture.recorded import Decision
from thunder_fn.capture.recorder import Recorder, current
from thunder_fn.capture.replaced.autograd_functions import FREED_GRAPH
from thunder_fn.capture.replaced.host_random import untouched_by_refusals
from thunder_fn.capture.replaced.lookasides import Lookaside, diverted, lookasides
from thunder_fn.capture.replaced.number_calls import LengthsAsked, answered
from thunder_fn.capture.replaced.patches import module_scopes
from thunder_fn.capture.replaced.seeds import stand_in
from thunder_fn.capture.rewriting import rewritten
from thunder_fn.capture.scopes import ScopeMode, composite, named_composite
from thunder_fn.capture.supported import is_wrapped
from thunder_fn.capture.watching import made
from thunder_fn.errors import (
    CaptureError,
    DataDependentBranch,
    DataDependentShape,
    DataDependentValue,
    TracedFunctionError,
    UnsupportedCall,
    UnsupportedOutput,
    with_article,
)
from thunder_fn.garbage import no_collections
from thunder_fn.ir.constraints import equations_between
from thunder_fn.ir.trace import Atom, Dim, Expr, Literal, Trace, Var, as_dim, cut, type_of_value

__all__ = [
    "EVERY_LEAF",
    "TENSOR",
    "Alias",
    "Captured",
    "GradRead",
    "Write",
    "capture",
    "composite",
    "current",
    "named_composite",
    "pytree",
]


EVERY_LEAF = range(sys.maxsize)
"""The positions of all leaves of a call, however many there are."""

Seen = TypeVar("Seen", "Alias", "Shared")


@dataclass(frozen=True, slots=True)
class Write:
    """A mutation by the function: of an input of the trace, by index, or of a closed-over tensor.

    `strides`: the tensor is its own view from then on, as after `t_()`, with other strides in the
        same memory.
    `rebinds`: the tensor gets other memory, as by `x.data = y`, and its own keeps its content.
    """

    target: int | torch.Tensor
    strides: tuple[int, ...] | None = None
    rebinds: bool = False


@dataclass(frozen=True, slots=True)
class Shared:
    """A result, by position, that shares memory with an input of the trace, by index, or with a
    closed-over tensor.

    `is_same`: it is that tensor; else it may be a view.
    """

    result: int
    source: int | torch.Tensor
    is_same: bool


@dataclass(frozen=True, slots=True)
class GradRead:
    """The function looked at the `.grad` of an input of the trace, by index, or of a closed-over
    tensor: this one, or None.

    `is_fed`: the trace is right for any gradient of this type, since its value is read in each
        call.
    """

    tensor: int | torch.Tensor
    grad: torch.Tensor | None
    is_fed: bool = False


@dataclass(frozen=True, slots=True)
class Captured:
    """A function as a trace, with the data that a call like the function's needs.

    The trace has one input for each tensor leaf of `(args, kwargs)`, then one for each number or
    stride that is a symbol. Its outputs are the leaves of the result that are tensors or depend on
    symbols, then one new value for each write. `decisions` are the decisions about symbols, in
    order. `own_leaves` are results that the function made leaves that require grad: positions among
    the outputs, and whether they are Parameters. The trace is right for as long as the gradients in
    `grads` are the very tensors that they were, and `reads` find what they found. `retained` are
    results whose gradient is to be kept (`retain_grad`), by position. `follows`: gradients are off
    around the function, on inside of it, and some result requires grad.

    With effects, the inputs end with one for each of `feeds`, and the outputs with those of the
    `effects`. `kept` guards the objects that they belong to. `freed` are results, by position,
    whose graph `backward()` has freed. `strides` are those of the results of a function inside
    another one, None for contiguous ones.

    `is_told`: Python was told values of the call, so that the trace serves no other.
    `is_kept`: later calls use the capture again. Then tensors from outside are the last inputs.
    """

    trace: Trace
    in_spec: pytree.PyTreeSpec
    in_leaves: tuple[Any, ...]
    out_spec: pytree.PyTreeSpec
    out_leaves: tuple[Any, ...]
    writes: tuple[Write, ...] = ()
    decisions: tuple[Decision, ...] = ()
    own_leaves: tuple[tuple[int, bool], ...] = ()
    grads: tuple[GradRead, ...] = ()
    retained: tuple[int, ...] = ()
    follows: bool = False
    reads: tuple[Read, ...] = ()
    aliases: tuple[Alias, ...] = ()
    shared: tuple[Shared, ...] = ()
    feeds: tuple[Feed, ...] = ()
    effects: tuple[Effect, ...] = ()
    kept: tuple[KeptState, ...] = ()
    freed: tuple[int, ...] = ()
    strides: tuple[tuple[Dim, ...] | None, ...] = ()
    is_told: bool = False
    is_kept: bool = False

    @property
    def num_results(self) -> int:
        """The number of the trace's outputs that belong to the result."""
        return len(self.trace.outputs) - len(self.writes) - self.num_effects

    def targets_among(self, count: int) -> list[int | torch.Tensor]:
        """The tensors whose memory is written to, but for the gradients that are fed: of the
        `count` tensors of a call, or closed over.
        """
        targets = (write.target for write in self.writes if not write.rebinds)
        return [one for one in targets if not isinstance(one, int) or one < count]

    @property
    def num_effects(self) -> int:
        """The number of the trace's outputs that are stored in places outside."""
        return sum(effect.count for effect in self.effects)

    def result(self, outputs: tuple[Any, ...]) -> Any:
        """The function's result from the first outputs of the trace."""
        return pytree.unflatten(self.out_spec, pytree.filled(self.out_leaves, outputs))

    def tangent(self, outputs: tuple[Any, ...]) -> Any:
        """The result's tangent from those of its tensors: that of a Python number is zero."""
        zeros = map(_without_value, self.out_leaves)
        return pytree.unflatten(self.out_spec, pytree.filled(zeros, outputs))

    def paths(self, root: str = "out") -> list[str]:
        """The path of each tensor of the result, such as `out['w']`."""
        paths = pytree.paths_of(self.out_spec, root)
        return [path for path, leaf in zip(paths, self.out_leaves, strict=True) if leaf is TENSOR]


def _without_value(leaf: Any) -> Any:
    """Zero for a number; anything else as it is."""
    return (
        type(leaf)()
        if type(leaf) in (int, float, complex)
        else 0
        if isinstance(leaf, bool)
        else leaf
    )


def capture(  # noqa: PLR0913 - options, by keyword
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    track_no_grad: bool = True,
    symbolic: Symbolic | None = None,
    on_raise: Callable[[Captured], None] | None = None,
    shares: bool = False,
    grad_off: bool = False,
    returning: Callable[[Any], Callable[[Any], Any]] | None = None,
    inside: str = "",
    differentiated: Collection[int] | None = None,
    has_effects: bool = False,
    wanted: frozenset[Any] = frozenset(),
    known: Collection[int] | None = None,
) -> Captured:
    """Run f once on tracers and record what it does.

    Law: evaluating the trace on the tensors of `(args, kwargs)` gives the tensors of `f(*args,
        **kwargs)`.

    Args:
        f: any PyTorch callable. Non-tensor leaves of its arguments are baked in.
        track_no_grad: keep `no_grad` and `detach` as stops for gradients.
        symbolic: the leaves of `(args, kwargs)` that are, or have sizes that are, symbols.
        on_raise: called if f raises, with what it did until then: a trace without results, and its
            writes.
        shares: a tensor that is passed more than once is one input, and the same tensor for f.
        grad_off: f runs under `no_grad`, though gradients are on around it.
        returning: of the arguments that f is given, what makes of its result the one that is
            captured.
        inside: the transform that f is captured for, whose arguments stand for the caller's
            tensors.
        differentiated: for reverse mode, the leaves of `(args, kwargs)` that are differentiated, by
            position. As under torch.func, gradients are on when f begins, and floating and complex
            tensors among those leaves require grad.
        has_effects: f may step optimizers from outside and leave gradients, which the caller
            stores.
        wanted: places of numbers in the state of optimizers that are inputs of the trace.
        known: for a trace that serves this call only, the leaves of `(args, kwargs)` for whose
            values Python may ask, by position, as it may for those of tensors from outside.

    Raises:
        CaptureError: f cannot be traced; the subclass says why. Modules and random generators are
            as they were before.
        TracedFunctionError: f raised. The error is an instance of the original type too.
    """
    options = track_no_grad, symbolic, on_raise, shares, grad_off, returning, inside
    asked = _Asked(f, args, kwargs or {}, *options, differentiated, known)
    kept = _Wanted(wanted) if has_effects else None
    has_symbols, copies = symbolic is not None, tuple[Lookaside, ...]()
    is_first = is_outermost = current() is None and known is None
    while True:
        try:
            with _attempting(differentiated, copies):
                return _Attempt(asked, has_symbols, kept, is_first).run()
        except LengthsAsked as again:
            copies, is_first = copies + again.answered(copies), False
        except (DataDependentShape, DataDependentValue, DataDependentBranch, UnsupportedCall) as e:
            more = answered(e, copies) if is_outermost else ()
            is_new = not has_symbols and isinstance(e, (DataDependentShape, DataDependentValue))
            if not more and (not is_new or current() is not None):
                raise
            copies += more
        except MustFeed as again:
            assert kept is not None, "others have no kept objects"
            kept = dataclasses.replace(kept, places=again.places)
        has_symbols = True  # again: sizes that depend on data, and fed numbers, are symbols


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Findings of captures of a function for the next one: numbers in the state of objects that
    have to be inputs, and the objects; places of others that it reads and writes tensors to.
    """

    places: frozenset[Any]
    met: dict[int, tuple[Any, str]] = dataclasses.field(default_factory=dict)
    written: dict[Any, tuple[Any, Any]] = dataclasses.field(default_factory=dict)


@contextmanager
def _attempting(
    differentiated: Collection[int] | None, copies: tuple[Lookaside, ...]
) -> Generator[None]:
    """The surroundings of one attempt, in which `copies` take the place of functions."""
    with no_collections(), untouched_by_refusals(), _grad_mode(differentiated), lookasides(copies):
        yield


def _grad_mode(differentiated: Collection[int] | None) -> AbstractContextManager[Any]:
    """Gradients on for reverse mode; else as they are."""
    return nullcontext() if differentiated is None else torch.enable_grad()


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """The function and the options of `capture`, which every attempt is made of."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    track_no_grad: bool
    symbolic: Symbolic | None
    on_raise: Callable[[Captured], None] | None
    shares: bool
    grad_off: bool
    returning: Callable[[Any], Callable[[Any], Any]] | None
    inside: str
    differentiated: Collection[int] | None
    known: Collection[int] | None

    @property
    def name(self) -> str:
        """The function's name, or that of its class."""
        return getattr(self.f, "__name__", type(self.f).__name__)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a function's run: what was found, but for the trace and what depends on it, and
    the atoms of the outputs, the writes, the effects and the fed inputs. `met` are the tensors from
    outside.
    """

    found: Captured
    outputs: tuple[Atom, ...]
    changes: tuple[tuple[Write, Atom], ...]
    effects: tuple[tuple[Effect, tuple[Atom, ...]], ...]
    fed: tuple[tuple[Feed, torch.Tensor | None], ...]
    met: tuple[torch.Tensor, ...]


_NO_TRACE = Trace((), (), (), (), ())
"""The trace of a run that has not been folded yet."""


class _Attempt:
    """One run of a function on tracers, and the trace that is made of it."""

    def __init__(
        self, asked: _Asked, has_symbols: bool, wanted: _Wanted | None, is_first: bool
    ) -> None:
        outer = current()
        if outer is not None:
            outer.selections.settle()
        self.asked, self.symbolic = asked, asked.symbolic or Symbolic({}, {}, {})
        self.leaves, self.in_spec = pytree.flatten((asked.args, asked.kwargs))
        first: dict[int, int] = {}
        self.place_of = {
            i: first.setdefault(id(leaf), i) if asked.shares else i
            for i, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor)
        }
        self.places = [i for i, place in self.place_of.items() if i == place]
        self.tensors = [self.leaves[i] for i in self.places]
        for i, leaf in enumerate(self.leaves):
            check_argument(leaf, lambda i=i: _path(asked.args, asked.kwargs, i))
        self.recorder = Recorder(
            track_no_grad=asked.track_no_grad,
            symbolic=has_symbols,
            outer=outer,
            inside=asked.inside,
            is_same_function=asked.shares,
            is_of_call=asked.known is not None,
        )
        self.recorder.lengths = {} if is_first else None
        if wanted is not None:
            self.recorder.kept = Kept(
                self.recorder, wanted.places, met=wanted.met, places=wanted.written
            )
        self.is_off = asked.grad_off or not torch.is_grad_enabled()

    def run(self) -> Captured:
        """Run the function, and make a trace of what it did."""
        asked, recorder = self.asked, self.recorder
        unfinished: _End | None = None
        try:
            # diverted comes after what else replaces functions: lookasides are around it
            with recorder.running(
                module_scopes(), noted_state(), diverted(), ScopeMode(recorder).alone()
            ):
                tracers = self.tracers()
                given = self.given(tracers)
                recorder.modules.is_exclusive = True
                try:
                    recorder.take_kept()
                    for module, path in modules_of(asked.f, self.leaves):
                        recorder.modules.watch(module, path)
                    arguments = pytree.unflatten(self.in_spec, given)
                    made_of = None if asked.returning is None else asked.returning(arguments)
                    recorder.filled = recorder.filled if made_of is None else arguments
                    result = _run(recorder, asked.f, asked.name, asked.grad_off, *arguments)
                    if recorder.lengths:
                        raise LengthsAsked(tuple(recorder.lengths))
                    result = result if made_of is None else made_of(result)
                    end = self.end(tracers, result)
                    recorder.generators.check()
                except TracedFunctionError:
                    if asked.on_raise is not None:
                        unfinished = self.end(tracers, ())
                    raise
                finally:
                    recorder.restore()
        except TracedFunctionError:
            if asked.on_raise is not None and unfinished is not None:
                asked.on_raise(self.captured(unfinished))
            raise
        del tracers, given, arguments, result, made_of
        whole = self.captured(end)
        targets = whole.targets_among(len(self.tensors))
        check_aliases(whole.trace, self.tensors, targets, source_of(asked.f), asked.name)
        return whole

    def tracers(self) -> list[torch.Tensor]:
        """A tracer for each tensor that is an input."""
        wrt, known = frozenset(self.asked.differentiated or ()), self.asked.known
        tracers = {
            i: self.recorder.input(
                self.leaves[i],
                self.symbolic.layouts.get(i),
                is_differentiated=i in wrt,
                has_value=known is not None and i in known,
            )
            for i in self.places
        }
        places = (self.place_of[i] for i in sorted(wrt) if i in self.place_of)
        internals.become_results([tracers[place] for place in places])
        if self.asked.shares and self.recorder.outer is not None:
            for place, tracer in tracers.items():  # the function may close over it too
                self.recorder.identify(self.leaves[place], tracer)
        return list(tracers.values())

    def given(self, tracers: list[torch.Tensor]) -> list[Any]:
        """The leaves of the arguments for the function: tracers, symbols, and generators of its
        own.
        """
        recorder, symbolic = self.recorder, self.symbolic
        inputs = dict(zip(self.places, tracers, strict=True))
        values: dict[Any, Any] = {
            symbol: recorder.number(Expr(symbol)) for symbol, _ in symbolic.inputs
        }
        given: dict[int, Any] = {i: inputs[place] for i, place in self.place_of.items()}
        given |= {i: values[number.value] for i, number in symbolic.numbers.items()}
        given |= {
            i: stand_in(recorder, leaf)
            for i, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Generator)
        }
        return [given.get(i, leaf) for i, leaf in enumerate(self.leaves)]

    def end(self, tracers: list[torch.Tensor], result: Any) -> _End:
        """The result of the run and its changes, while the recorder knows them."""
        recorder, f, name = self.recorder, self.asked.f, self.asked.name
        recorder.selections.settle()
        positions = {id(tensor): position for position, tensor in enumerate(self.tensors)}
        reads = recorder.properties.reads(positions)  # by the function: those below are ours
        leaves, spec = pytree.flatten(result)
        statics = tuple(_static(leaf, f, name) for leaf in leaves)
        results = [leaf for leaf, static in zip(leaves, statics, strict=True) if static is TENSOR]
        outputs = tuple(_output(recorder, leaf, name) for leaf in results)
        _check_results(recorder, f, results, tracers)
        own = tuple(_own_leaves(recorder, results))
        _check_own_leaves(recorder, f, results, own)
        changes = tuple(_changes(recorder, f, self.tensors, tracers))
        stored = dict[int, Atom]()
        effects = tuple(_effects(recorder, positions, name, stored))
        kept = () if recorder.kept is None else recorder.kept.state()
        fed = tuple(_feeds(recorder))
        is_freed = [recorder.gradients.is_freed(leaf) for leaf in results]
        outputs = tuple(
            _freed(recorder, atom, name) if flag else stored.get(id(leaf), atom)
            for leaf, atom, flag in zip(results, outputs, is_freed, strict=True)
        )
        grads = tuple(_grads(recorder, positions))  # before closed-over tensors are looked up below
        begun = Captured(
            _NO_TRACE,
            self.in_spec,
            self.in_leaves,
            spec,
            statics,
            own_leaves=own,
            grads=grads,
            reads=reads,
            effects=tuple(effect for effect, _ in effects),
            kept=kept,
            freed=tuple(place for place, flag in enumerate(is_freed) if flag),
        )
        targets = [write.target for write, _ in changes]
        found = self.with_memory(begun, results, tracers, targets)
        met = () if recorder.outer is not None else tuple(recorder.met.values())
        return _End(found, outputs, changes, effects, fed, met)

    def with_memory(
        self,
        begun: Captured,
        results: list[Any],
        tracers: list[torch.Tensor],
        targets: list[int | torch.Tensor],
    ) -> Captured:
        """Add the place of the results in autograd's graph, and in memory."""
        recorder = self.recorder
        inner = [place for place, leaf in enumerate(results) if _is_inner(leaf)]
        return dataclasses.replace(
            begun,
            retained=tuple(place for place in inner if results[place].retains_grad),
            follows=(recorder.gradients.follows or bool(inner)) and self.is_off,
            aliases=tuple(aliases_of(recorder, results, tracers, targets)),
            shared=tuple(_shared(recorder, results, tracers)),
            strides=() if recorder.outer is None else tuple(map(_strides_of, results)),
        )

    @property
    def in_leaves(self) -> tuple[Any, ...]:
        """The leaves of the arguments that are static, with marks for the others."""
        return tuple(
            TENSOR if isinstance(leaf, torch.Tensor) or i in self.symbolic.numbers else leaf
            for i, leaf in enumerate(self.leaves)
        )

    def captured(self, end: _End) -> Captured:
        """Fold the recording into a trace, and say what a call needs to know of it."""
        recorder, found, bounds = self.recorder, end.found, self.symbolic.decisions
        effects = (atom for _, atoms in end.effects for atom in atoms)
        outputs = (*end.outputs, *(var for _, var in end.changes), *effects)
        nested = nest(recorder, outputs, _identifier(self.asked.name))
        trace, writes, feeds, places = _fed(
            recorder.decisions.settled(rewritten(nested, recorder)),
            tuple(write for write, _ in end.changes),
            end.fed,
        )
        made("capture", trace)
        if bounds:
            relations = (decision.relation for decision in bounds)
            constraints = tuple(dict.fromkeys((*relations, *trace.constraints)))
            trace = dataclasses.replace(trace, constraints=constraints)
        given = {id(one) for one in (*self.tensors, *(c.tensor for c in trace.constants))}
        unread = types_of(one for one in end.met if id(one) not in given)
        return dataclasses.replace(
            found,
            trace=trace,
            reads=(*found.reads, *unread),
            writes=writes,
            decisions=(*bounds, *recorder.decisions.by_question.values()),
            aliases=tuple(_at(places, alias) for alias in found.aliases),
            shared=tuple(_at(places, shared) for shared in found.shared),
            feeds=feeds,
            is_told=recorder.values.is_told,
        )


def _check_results(
    recorder: Recorder, f: Callable[..., Any], results: list[Any], tracers: list[torch.Tensor]
) -> None:
    """Refuse to lose an attribute that the function sets on a tensor that it has made."""
    given = {id(tracer) for tracer in (*tracers, *(tracer for _, tracer, _ in recorder.lifted()))}
    for leaf in results:
        if isinstance(leaf, internals.Tracer) and id(leaf) not in given:
            _check_attributes(f, leaf, "that it returns")


def _feeds(recorder: Recorder) -> Iterator[tuple[Feed, torch.Tensor | None]]:
    """The places outside that are read in each call: numbers, then gradients and other tensors,
    each with the tensor that was there.
    """
    if recorder.kept is not None:
        yield from ((feed, None) for feed in recorder.kept.feeds)
        yield from recorder.gradients.feeds()
        yield from recorder.kept.tensors


def _grads(recorder: Recorder, positions: Mapping[int, int]) -> Iterator[GradRead]:
    """The gradients that the function has looked at."""
    for tensor, grad in recorder.gradients.read.values():
        yield GradRead(positions.get(id(tensor), tensor), grad, recorder.gradients.is_fed(grad))


def _is_inner(leaf: Any) -> bool:
    """Test for a tensor inside of autograd's graph."""
    return (
        isinstance(leaf, torch.Tensor) and leaf.requires_grad and internals.is_leaf(leaf) is False
    )


def _strides_of(result: Any) -> tuple[Dim, ...] | None:
    """The strides of a result that is not contiguous."""
    if not isinstance(result, torch.Tensor):
        return None
    with internals.no_torch_function():
        is_plain = is_wrapped(result) or result.is_contiguous()
        return None if is_plain else tuple(map(as_dim, result.stride()))


def _freed(recorder: Recorder, atom: Atom, name: str) -> Atom:
    """A result whose graph a backward has freed: a constant where the caller makes a node of it
    that raises, else a value that raises itself.
    """
    if recorder.kept is not None or not isinstance(atom, Var):
        return recorder.stopped(atom)
    return recorder.emit(FREED_GRAPH, (atom, Literal(name), ()), (atom.type,), ())[0]


def _effects(
    recorder: Recorder, positions: Mapping[int, int], name: str, stored: dict[int, Atom]
) -> Iterator[tuple[Effect, tuple[Atom, ...]]]:
    """The changes of places outside, each with the outputs that it stores: gradients of leaves,
    then the state of kept objects. `stored` gets the output of each tensor in them.
    """
    if recorder.kept is None:
        return
    for tensor, grad in recorder.gradients.assigned():
        holder, (leaves, spec) = positions.get(id(tensor), tensor), pytree.flatten(grad)
        effect = Effect(holder, GRAD, spec, tuple(None for _ in leaves), (True,) * len(leaves))
        yield effect, tuple(_stored(recorder, leaf, name, stored) for leaf in leaves)
    for effect, leaves in recorder.kept.effects(recorder.is_from_outside):
        yield effect, tuple(_stored(recorder, leaf, name, stored) for leaf in leaves)


def _stored(recorder: Recorder, leaf: Any, name: str, stored: dict[int, Atom]) -> Atom:
    """The output for a value that is stored outside: a constant, if autograd does not follow it."""
    if id(leaf) not in stored or not isinstance(leaf, torch.Tensor):
        atom = _output(recorder, leaf, name)
        is_followed = isinstance(leaf, torch.Tensor) and leaf.requires_grad
        stored[id(leaf)] = atom if is_followed else recorder.stopped(atom)
    return stored[id(leaf)]


def _fed(
    trace: Trace,
    writes: tuple[Write, ...],
    given: tuple[tuple[Feed, torch.Tensor | None], ...],
) -> tuple[Trace, tuple[Write, ...], tuple[Feed, ...], dict[int, int]]:
    """The trace with gradients from outside as its last inputs, and the writes to them by index.
    Numbers are inputs already.
    """
    feeds = [feed for feed, grad in given if grad is None]
    fed = {id(grad): (feed, grad) for feed, grad in given if grad is not None}
    known = {id(one.tensor): one.var for one in trace.constants if id(one.tensor) in fed}
    targets = (id(one.target) for one in writes if id(one.target) in fed)
    inputs, places = list(trace.inputs), dict[int, int]()
    for count, key in enumerate(dict.fromkeys((*known, *targets))):
        feed, grad = fed[key]
        places[key] = len(inputs)
        inputs.append(known.get(key) or Var(_UNREAD + count, type_of_value(grad)))
        feeds.append(feed)
    left = tuple(one for one in trace.constants if id(one.tensor) not in known)
    moved = tuple(
        dataclasses.replace(one, target=places.get(id(one.target), one.target)) for one in writes
    )
    return cut(trace, inputs=inputs, constants=left), moved, tuple(feeds), places


def _at(places: Mapping[int, int], one: Seen) -> Seen:
    """The same with the index of an input for a gradient that is one."""
    return dataclasses.replace(one, source=places.get(id(one.source), one.source))


_UNREAD = 1 << 40
"""Variables of gradients that are written to and not read begin here."""


def _shared(
    recorder: Recorder, results: Sequence[Any], tracers: Sequence[torch.Tensor]
) -> Iterator[Shared]:
    """Results that are inputs, tensors from outside, or views of them."""
    sources = recorder.sources(tracers)
    by_memory = {
        internals.storage_id(internals.memory_in(tracer)): source
        for source, tracer in reversed(sources)
    }
    same = {id(tracer): source for source, tracer in reversed(sources)}
    for place, leaf in enumerate(results):
        tracer = recorder.lift(leaf) if isinstance(leaf, torch.Tensor) else leaf
        if not isinstance(tracer, internals.Tracer):
            continue
        if (source := same.get(id(tracer))) is not None:
            yield Shared(place, source, True)
        else:
            memories = recorder.history.linked(internals.storage_id(internals.memory_in(tracer)))
            found = [by_memory[memory] for memory in memories if memory in by_memory]
            if found:
                yield Shared(place, found[0], False)


def _own_leaves(recorder: Recorder, results: list[Any]) -> Iterator[tuple[int, bool]]:
    """Results that the function made require grad."""
    given = {
        var.index
        for var in (
            *recorder.inputs,
            *(constant.var for constant in recorder.constants if not constant.owned),
        )
    }
    for place, leaf in enumerate(results):
        if (
            isinstance(leaf, torch.Tensor)
            and not is_wrapped(leaf)
            and leaf.requires_grad
            and internals.is_leaf(leaf)
            and not recorder.history.is_given(leaf)
        ):
            var = recorder.var_of(leaf)
            if var is not None and var.index not in given:
                yield place, isinstance(leaf, torch.nn.Parameter)


def _check_own_leaves(
    recorder: Recorder,
    f: Callable[..., Any],
    results: list[Any],
    own: tuple[tuple[int, bool], ...],
) -> None:
    """Refuse a result whose backward outside would have to reach a leaf that the function made."""
    if not own:
        return
    inner = (leaf for leaf in results if _is_inner(leaf) and not recorder.gradients.is_freed(leaf))
    roots = list(map(internals.node_of, inner))
    behind = {id(getattr(node, "variable", None)) for node in internals.nodes_behind(roots)}
    if any(id(results[place]) in behind for place, _ in own):
        name = getattr(f, "__name__", type(f).__name__)
        what = (
            f"{name} returns a tensor that it makes require grad, and another result computed from"
            " it, whose backward outside would not reach it"
        )
        fix = (
            "Take the gradient inside, by `torch.autograd.grad`, or call `requires_grad_()` outside"
            " and pass the tensor."
        )
        raise UnsupportedOutput(what, source=source_of(f), fix=fix)


def _path(args: tuple[Any, ...], kwargs: dict[str, Any], index: int) -> str:
    """The path of a leaf of a call, such as `args[0]['w']`."""
    return [*pytree.paths(args, "args"), *pytree.paths(kwargs, "kwargs")][index]


def _identifier(name: str) -> str:
    return name if name.isidentifier() else "program"


def _run(
    recorder: Recorder, f: Callable[..., Any], name: str, grad_off: bool, args: Any, kwargs: Any
) -> Any:
    try:
        with torch.no_grad() if grad_off else nullcontext(), frames.running():
            result = f(*args, **kwargs)
    except Exception as error:
        internals.release_guards(error)
        if recorder.late_error is not None and error is not recorder.late_error:
            raise recorder.late_error from error
        if recorder.kept is not None and isinstance(error, internals.NEEDS_A_NUMBER):
            recorder.kept.ask_for_items(tensors_of_numbers(recorder, error.cond))
        if is_told(error):
            raise
        raise failure(error, name, recorder) from error
    if recorder.late_error is not None:
        raise recorder.late_error
    return result


def _static(leaf: Any, f: Callable[..., Any], name: str) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TENSOR
    leaf = class_of_numbers(as_dim(leaf))
    if isinstance(leaf, Expr):
        return TENSOR
    check_static_output(leaf, f, name)
    return leaf


def _output(recorder: Recorder, leaf: Any, name: str) -> Atom:
    if not isinstance(leaf, torch.Tensor):
        return Literal(as_dim(leaf))
    if is_wrapped(leaf):
        raise UnsupportedOutput(
            f"{name} returned a tensor that belongs to a torch.func transform which has ended",
            fix="Return the value from the transformed function instead of storing it.",
        )
    var = recorder.var_of(recorder.lift(leaf))
    if var is None:
        raise CaptureError(f"{name} returned a tensor that is unknown to its capture")
    return recorder.history.read(var)


def _changes(
    recorder: Recorder,
    f: Callable[..., Any],
    tensors: list[torch.Tensor],
    tracers: list[torch.Tensor],
) -> list[tuple[Write, Atom]]:
    """The changes of the function with the new values: tensors in place, buffers of modules,
    gradients of leaves.
    """
    positions = {id(tensor): position for position, tensor in reversed(list(enumerate(tensors)))}
    found: list[tuple[Write, Atom]] = []
    for position, tracer in enumerate(tracers):
        found += _written(recorder, f, Write(position), recorder.inputs[position], tracer)
    for tensor, tracer, before in recorder.lifted():
        found += _written(recorder, f, Write(tensor), before, tracer)
    watch = None if recorder.kept is None or recorder.outer is not None else frames.observer()
    is_kept = lambda value: watch is None or id(value) in watch.contents
    for rebound in recorder.modules.rebound(is_kept):
        var = recorder.var_of(recorder.lift(rebound.tracer))
        if var is not None:
            found.append(
                (
                    Write(positions.get(id(rebound.tensor), rebound.tensor)),
                    recorder.history.read(var),
                )
            )
    for _, tracer, before in recorder.gradients.taken:
        found += _accumulated(recorder, f, tracer, before)
    for tensor, tracer in (
        *zip(tensors, tracers, strict=True),
        *((one, own) for one, own, _ in recorder.lifted()),
    ):
        _check_marks(f, tensor, tracer, recorder.required_grad.get(id(tracer)))
    return found


def _check_marks(
    f: Callable[..., Any], tensor: torch.Tensor, tracer: torch.Tensor, required_grad: bool | None
) -> None:
    """Refuse to lose a `requires_grad` or an attribute that the function sets on a tensor from
    outside.

    A tensor that is differentiated is no leaf; one that was written to has the history of the
    write.
    """
    _check_attributes(f, tracer, "from outside", vars(tensor))
    with internals.no_torch_function():
        if (
            required_grad is None
            or not internals.is_leaf(tracer)
            or tracer.requires_grad == required_grad
        ):
            return
        type = with_article(type_of_value(tracer))
    what = (
        f"the function sets requires_grad to {not required_grad}, by Tensor.requires_grad_(), on"
        f" {type} from outside"
    )
    fix = (
        "Do it outside of the function; inside, take `x.detach().requires_grad_()`, which is"
        " another tensor."
    )
    raise UnsupportedCall(what, source=source_of(f), fix=fix)


def _check_attributes(
    f: Callable[..., Any], tracer: torch.Tensor, where: str, known: Collection[str] = ()
) -> None:
    """Refuse to lose an attribute, other than the known ones, that the function sets on a
    tensor.
    """
    with internals.no_torch_function():
        names = [name for name in internals.attributes_set(tracer) if name not in known]
        if names:
            what = (
                f"the function sets `{names[0]}` on {with_article(type_of_value(tracer))} {where}"
            )
            fix = "Return it beside the tensor, or set it where the function is called."
            raise CaptureError(what, source=source_of(f), fix=fix)


def _written(
    recorder: Recorder, f: Callable[..., Any], write: Write, before: Var, tracer: torch.Tensor
) -> list[tuple[Write, Atom]]:
    after = recorder.var_of(tracer)
    if after is None or after == before:
        return []
    same = equations_between((before.type,), (after.type,)) if recorder.symbolic else None
    for constraint in same or ():
        bool(recorder.mode.size(constraint))  # of two names for a size; a write keeps it
    if after.type != before.type and same is None:
        raise CaptureError(
            f"the function changes {with_article(before.type)} from outside in place to"
            f" {after.type}",
            source=source_of(f),
            fix="A mutated tensor keeps its dtype and shape; return the new tensor instead.",
        )
    if internals.is_own_view(tracer):
        write = dataclasses.replace(write, strides=_strides(tracer))
    if recorder.history.is_rebound(tracer):
        write = dataclasses.replace(write, rebinds=True)
    with internals.no_torch_function():
        is_leaf = recorder.kept is not None and tracer.is_leaf and tracer.requires_grad
    # what is written to a leaf is a constant for autograd, which a jitted function's caller knows
    return [(write, recorder.stopped(after) if is_leaf else recorder.history.read(after))]


def _strides(tracer: torch.Tensor) -> tuple[int, ...]:
    with internals.no_torch_function():
        strides = tuple(tracer.stride())
    if any(type(stride) is not int for stride in strides):
        what = (
            "the function changes the shape of a tensor from outside in place, and its strides are"
            " symbols"
        )
        raise CaptureError(what, fix="Return the new tensor instead, or jit with `dynamic=False`.")
    return strides


def _accumulated(
    recorder: Recorder, f: Callable[..., Any], tracer: torch.Tensor, before: torch.Tensor | None
) -> list[tuple[Write, Atom]]:
    """The gradient that `backward()` left in a leaf from outside. One that was changed in place
    is none any more.
    """
    if not internals.is_leaf(tracer):
        return []
    with internals.no_torch_function():
        after = tracer.grad
    if recorder.kept is not None:
        return []
    known = None if before is None else recorder.lift(before)
    if after is not known or (before is not None and recorder.gradients.is_changed(before)):
        recorder.gradients.look_at(tracer)
    if after is known:
        return []
    if after is None or before is None:
        raise CaptureError(
            f"the function leaves {'no gradient' if after is None else 'a gradient'} in the"
            f" `.grad` of {with_article(recorder.type_of(tracer))} from outside that had"
            f" {'none' if before is None else 'one'}",
            source=source_of(f),
            fix="Use `torch.autograd.grad`, which returns gradients, or thunder_fn's `grad`.",
        )
    var = recorder.var_of(after)
    return [] if var is None else [(Write(before), recorder.history.read(var))]
