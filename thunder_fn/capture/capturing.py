"""Capture of a function: it is run on tracers, and again with what the run before found to be
missing.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.aliases import Alias, aliases_of, joints_of
from thunder_fn.capture.captured import Captured, Shared, Write
from thunder_fn.capture.changes import (
    changes_of,
    check_numbers,
    check_results,
    effects_of,
    feeds_of,
    grads_read,
)
from thunder_fn.capture.failures import (
    check_aliases,
    check_argument,
    failure,
    is_complete,
    source_of,
)
from thunder_fn.capture.fed import MustFeed
from thunder_fn.capture.flags import MustBegin, check_late, required
from thunder_fn.capture.kept import Kept
from thunder_fn.capture.made import made_anew
from thunder_fn.capture.modules import modules_of
from thunder_fn.capture.nesting import nest
from thunder_fn.capture.numbers.arguments import Symbolic
from thunder_fn.capture.numbers.counts import tensors_of_numbers
from thunder_fn.capture.numbers.types_asked import TypesAsked
from thunder_fn.capture.objects import is_a
from thunder_fn.capture.outside import frames
from thunder_fn.capture.outside.process import noted_state
from thunder_fn.capture.outside.properties import types_of
from thunder_fn.capture.outside.reads import HOLDERS
from thunder_fn.capture.places import Effect, Feed, Update, snapshot
from thunder_fn.capture.pytree import TENSOR
from thunder_fn.capture.recorder import Recorder, current
from thunder_fn.capture.replaced.host_random import untouched_by_refusals
from thunder_fn.capture.replaced.lookasides import Lookaside, diverted, lookasides
from thunder_fn.capture.replaced.number_calls import LengthsAsked, answered
from thunder_fn.capture.replaced.patches import module_scopes
from thunder_fn.capture.replaced.refusals import check_found
from thunder_fn.capture.replaced.seeds import stand_in
from thunder_fn.capture.results import (
    check_inner_hooks,
    check_own_leaves,
    freed_output,
    is_inner,
    is_itself,
    is_view_of_leaf,
    output_of,
    own_leaves_of,
    shared_memory,
    static_of,
    strides_of,
)
from thunder_fn.capture.rewriting import rewritten
from thunder_fn.capture.scopes import ScopeMode, check_unchanged
from thunder_fn.capture.stored import alive, around, with_objects
from thunder_fn.capture.watching import made
from thunder_fn.errors import (
    DataDependentBranch,
    DataDependentShape,
    DataDependentValue,
    TracedFunctionError,
    UnsupportedCall,
    UnsupportedInput,
    callable_name,
    kind_of,
)
from thunder_fn.garbage import no_collections
from thunder_fn.ir.hooks import machinery
from thunder_fn.ir.text import shown
from thunder_fn.ir.trace import Atom, Expr, Trace, Var, cut, type_of_value

EVERY_LEAF = range(sys.maxsize)
"""The positions of all leaves of a call, however many there are."""

Seen = TypeVar("Seen", "Alias", "Shared")


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
    raising: Callable[[Any], Callable[[Any], Any]] | None = None,
    inside: str = "",
    differentiated: Collection[int] | None = None,
    has_effects: bool = False,
    stores: bool = False,
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
        on_raise: called if f raises, with what it did until then: a trace of its writes, and of the
            result that `raising` makes of None.
        shares: a tensor that is passed more than once is one input, and the same tensor for f. A
            container from outside that f returns is the result itself.
        grad_off: f runs under `no_grad`, though gradients are on around it.
        returning: of the arguments that f is given, what makes of its result the one that is
            captured.
        raising: the same for a function that raises.
        inside: the transform that f is captured for, whose arguments stand for the caller's
            tensors.
        differentiated: for reverse mode, the leaves of `(args, kwargs)` that are differentiated, by
            position. As under torch.func, gradients are on when f begins, and floating and complex
            tensors among those leaves require grad.
        has_effects: f may step optimizers from outside and leave gradients, which the caller
            stores.
        stores: f may store tensors outside, where `write_back` puts what the transform of the trace
            gives for them.
        wanted: places of numbers in the state of optimizers that are inputs of the trace.
        known: for a trace that serves this call only, the leaves of `(args, kwargs)` for whose
            values Python may ask, by position, as it may for those of tensors from outside.

    Raises:
        CaptureError: f cannot be traced; the subclass says why. Modules and random generators are
            as they were before.
        TracedFunctionError: f raised. The error is an instance of the original type too.
    """
    options = track_no_grad, symbolic, on_raise, shares, grad_off, returning, raising, inside
    asked = _Options(f, args, kwargs or {}, *options, differentiated, known, stores)
    kept = _Found(wanted) if has_effects else None
    has_symbols, copies, needs_symbols = symbolic is not None, tuple[Lookaside, ...](), True
    is_first = is_outermost = current() is None and (known is None or has_symbols)
    begin_again = beginning() if current() is None else lambda: None  # others are captured once
    while True:
        try:
            with _attempting(asked, copies, kept):
                return _Attempt(asked, has_symbols, kept, is_first).run()
        except LengthsAsked as again:
            copies, is_first = copies + again.answered(copies), False
        except (DataDependentShape, DataDependentValue, DataDependentBranch, UnsupportedCall) as e:
            more = answered(e, copies) if is_outermost or _is_about_types(e) else ()
            if not more and (has_symbols or not _wants_symbols(e)):
                raise
            copies, needs_symbols = copies + more, not _is_about_types(e)
        except (MustBegin, MustFeed) as again:
            kept = dataclasses.replace(kept or _Found(wanted), **again.found)
        begin_again()  # sizes that depend on data, and fed numbers, are symbols
        has_symbols, needs_symbols = has_symbols or needs_symbols, True


def _is_about_types(error: Exception) -> bool:
    """Test for a question that a function's copy answers, in the outermost capture."""
    return isinstance(error, TypesAsked) and current() is None


def _wants_symbols(error: Exception) -> bool:
    """Test for an error that sizes found in data, as symbols, would settle. A capture inside of
    another has them from that.
    """
    return isinstance(error, (DataDependentShape, DataDependentValue)) and current() is None


def beginning(given: Any = ()) -> Callable[[], None]:
    """Note PyTorch's state, and what places outside and the containers among these arguments hold
    now. The result puts it back, before the function runs again.
    """
    watch = frames.observer()
    held = [snapshot(node) for node in pytree.nodes_in(given) if is_a(node, HOLDERS)]
    moment = (lambda: None) if watch is None else watch.moment()
    put_back = internals.state_kept()

    def begin_again() -> None:
        put_back()
        moment()
        for one in held:
            one.restore()

    return begin_again


@dataclass(frozen=True, slots=True)
class _Found:
    """Findings of earlier attempts for the next one.

    `places` are those of the numbers that have to be inputs. `flags` tell which tensors require
    grad from the beginning. `met` are the optimizers that were met. `written` are the places of
    other objects that f reads tensors from and writes them to.
    """

    places: frozenset[Any]
    flags: tuple[tuple[torch.Tensor, bool], ...] = ()
    met: dict[int, tuple[Any, str]] = dataclasses.field(default_factory=dict)
    written: dict[Any, tuple[Any, Any]] = dataclasses.field(default_factory=dict)


@contextmanager
def _attempting(
    asked: _Options, copies: tuple[Lookaside, ...], kept: _Found | None
) -> Generator[None]:
    """Set up one attempt, in which `copies` take the place of functions. What a function that
    raises has set stays, where it is stored (`on_raise`).
    """
    mode = nullcontext() if asked.differentiated is None else torch.enable_grad()  # reverse mode
    unless = () if asked.on_raise is None else (TracedFunctionError,)
    flags = required(() if kept is None else kept.flags, unless)
    with no_collections(), untouched_by_refusals(), mode, lookasides(copies), flags:
        yield


@dataclass(frozen=True, slots=True, eq=False)
class _Options:
    """The function and the options of `capture`, the same for every attempt."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    track_no_grad: bool
    symbolic: Symbolic | None
    on_raise: Callable[[Captured], None] | None
    shares: bool
    grad_off: bool
    returning: Callable[[Any], Callable[[Any], Any]] | None
    raising: Callable[[Any], Callable[[Any], Any]] | None
    inside: str
    differentiated: Collection[int] | None
    known: Collection[int] | None
    stores: bool

    def __post_init__(self) -> None:
        if not callable(self.f):
            what = f"expected a function to trace, given {kind_of(self.f)}: {shown(self.f, 60)}"
            raise UnsupportedInput(what, fix="Pass a function, then its arguments: `trace(f, x)`.")

    @property
    def name(self) -> str:
        """The function's name, or that of its class."""
        return callable_name(self.f)


@dataclass(frozen=True, slots=True)
class _End:
    """The state at the end of a run, before the trace is folded. `found` has what does not depend
    on the trace. The atoms are those of the outputs, writes, effects (`stored`) and fed inputs.
    `met` are the tensors from outside, `late` those of them that require grad only after a use.
    `followed` are outputs, by position, that may require grad: results, and what is stored.
    """

    found: Captured
    outputs: tuple[Atom, ...]
    changes: tuple[tuple[Write, Atom], ...]
    stored: tuple[Atom, ...]
    fed: tuple[tuple[Feed, torch.Tensor | None], ...]
    met: tuple[torch.Tensor, ...]
    late: tuple[int | torch.Tensor, ...]
    followed: tuple[int, ...]


_NO_TRACE = Trace((), (), (), (), ())
"""The trace of a run that has not been folded yet."""


class _Attempt:
    """One run of a function on tracers, and the trace that is made of it."""

    def __init__(
        self,
        asked: _Options,
        has_symbols: bool,
        wanted: _Found | None,
        is_first: bool,
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
        self.recorder.is_users = True
        self.recorder.around = [*around(asked.f)] if outer is not None and asked.stores else []
        self.recorder.lengths = {} if is_first else None
        if wanted is not None:
            self.recorder.kept = Kept.beginning(
                self.recorder, wanted.places, wanted.met, wanted.written
            )
        self.flags = () if wanted is None else wanted.flags
        self.recorder.flags.begun = {id(tensor): tensor for tensor, _ in self.flags}
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
                recorder.modules.is_exclusive, raised = True, None
                try:
                    recorder.take_kept()
                    for module, path in modules_of(asked.f, self.leaves):
                        recorder.modules.watch(module, path)
                    arguments = pytree.unflatten(self.in_spec, given)
                    made_of = None if asked.returning is None else asked.returning(arguments)
                    raised = None if asked.raising is None else asked.raising(arguments)
                    recorder.filled = recorder.filled if made_of is None else arguments
                    with _unchanged(asked, arguments):
                        result = _run(recorder, asked.f, asked.name, asked.grad_off, *arguments)
                    if recorder.lengths:
                        raise LengthsAsked(tuple(recorder.lengths))
                    result = result if made_of is None else made_of(result)
                    end = self.end(tracers, result)
                    recorder.call.generators.check()
                except TracedFunctionError:
                    if asked.on_raise is not None:
                        unfinished = self.end(tracers, None if raised is None else raised(None))
                    raise
                finally:
                    recorder.restore()
        except TracedFunctionError:
            if asked.on_raise is not None and unfinished is not None:
                asked.on_raise(self.captured(unfinished))
            raise
        del tracers, given, arguments, result, made_of, raised
        captured = self.captured(end)
        targets = captured.targets_among(len(self.tensors))
        check_aliases(captured.trace, self.tensors, targets, source_of(asked.f), asked.name)
        return captured

    @machinery
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
        batched = (i for i in self.places if known is not None and i not in known)
        inputs = {i: var.index for i, var in zip(self.places, self.recorder.inputs, strict=True)}
        self.recorder.batched = frozenset(inputs[i] for i in batched)
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

    @machinery
    def end(self, tracers: list[torch.Tensor], result: Any) -> _End:
        """The result of the run and its changes, while the recorder knows them."""
        recorder, f, name = self.recorder, self.asked.f, self.asked.name
        recorder.selections.settle()
        recorder.flags.put_back()
        positions = {id(tensor): position for position, tensor in enumerate(self.tensors)}
        reads = recorder.properties.reads(positions)  # by the function: those below are ours
        begun, results, outputs = self.results(tracers, result)
        changes = tuple(changes_of(recorder, f, self.tensors, tracers))
        pairs = self.pairs(tracers)
        flags = recorder.flags.settle(pairs, source_of(f))
        check_numbers(recorder)
        stored = dict[int, Atom]()
        effects = tuple(effects_of(recorder, positions, name, stored, self.asked.stores, flags))
        kept = () if recorder.kept is None else recorder.kept.state()
        fed = tuple(feeds_of(recorder))
        outputs = tuple(
            freed_output(recorder, atom, name)
            if place in begun.freed
            else stored.get(id(leaf), atom)
            for place, (leaf, atom) in enumerate(zip(results, outputs, strict=True))
        )
        begun = dataclasses.replace(
            begun,
            grads=tuple(grads_read(recorder, positions)),  # before tensors are looked up below
            reads=reads,
            **self.joined([effect for effect, *_ in effects]),
            flags=tuple((positions.get(id(one), one), flag) for one, flag in self.flags),
            kept=kept,
        )
        targets = [write.target for write, _ in changes]
        kept_leaves = (leaf for *_, leaves in effects for leaf in leaves)
        placed = [*results, *(None for _ in changes), *kept_leaves]
        found = self.with_memory(begun, results, placed, tracers, targets)
        met = () if recorder.outer is not None else tuple(recorder.call.met.values())
        atoms = tuple(atom for _, own, _ in effects for atom in own)
        late = (one for one, tracer in pairs if id(tracer) in recorder.flags.late)
        late = tuple(positions.get(id(one), one) for one in late)
        # a view made where gradients are off says later what its base requires then
        inner = [i for i, leaf in enumerate(placed) if is_inner(leaf) or is_view_of_leaf(leaf)]
        followed = {*inner, *range(len(results) * self.is_off)}.difference(begun.freed)
        return _End(found, outputs, changes, atoms, fed, met, late, tuple(followed))

    def joined(self, effects: list[Effect | Update]) -> dict[str, Any]:
        """The effects, and the nodes of the result, with those that are one object in several."""
        known = [] if self.recorder.kept is None else self.recorder.kept.nodes
        nodes = {id(effect): found for effect, found in known}
        trees = [self.nodes, *(nodes.get(id(effect), []) for effect in effects)]
        result, *others = pytree.repeated_among(trees)
        pairs = zip(effects, others, strict=True)
        stored = (dataclasses.replace(one, repeated=same) if same else one for one, same in pairs)
        return {"repeated": result, "effects": tuple(stored)}

    def pairs(self, tracers: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors from outside, each with its tracer: arguments, then closed-over ones."""
        lifted = ((tensor, tracer) for tensor, tracer, _ in self.recorder.lifted())
        return [*zip(self.tensors, tracers, strict=True), *lifted]

    def results(
        self, tracers: list[torch.Tensor], result: Any
    ) -> tuple[Captured, list[Any], tuple[Atom, ...]]:
        """Return the tree of the result, its leaves that are outputs of the trace, and the atoms of
        those.
        """
        recorder, f, name = self.recorder, self.asked.f, self.asked.name
        tree, leaves, spec = self.taken_apart(result)
        statics = tuple(static_of(leaf, f, name) for leaf in leaves)
        results = [leaf for leaf, static in zip(leaves, statics, strict=True) if static is TENSOR]
        outputs = tuple(output_of(recorder, leaf, name) for leaf in results)
        check_results(recorder, f, results, tracers)
        own = tuple(own_leaves_of(recorder, results))
        check_own_leaves(recorder, f, results, own)
        check_inner_hooks(recorder, results)
        is_freed = (recorder.gradients.is_freed(leaf) for leaf in results)
        freed = tuple(place for place, flag in enumerate(is_freed) if flag)
        trees = self.in_spec, self.in_leaves, spec, statics
        begun = Captured(_NO_TRACE, *trees, own_leaves=own, freed=freed)
        is_leaf = is_itself if self.asked.shares else pytree.no_leaf
        self.nodes = pytree.changeable(tree, spec, is_leaf)
        (same,) = pytree.repeated_among([self.nodes])
        anew = tuple(place for place in made_anew(leaves) if not is_leaf(leaves[place]))
        begun = dataclasses.replace(begun, anew=anew, repeated=same)
        return begun, results, outputs

    def taken_apart(self, result: Any) -> tuple[Any, list[Any], pytree.PyTreeSpec]:
        """The result with nodes for what a program makes anew, its leaves and structure. Containers
        from outside are leaves of a jitted function's.
        """
        if not self.asked.shares:
            tree, is_leaf = with_objects(result), pytree.no_leaf
        else:
            tree, is_leaf = with_objects(pytree.adorned(result, is_itself), is_itself), is_itself
            tree = pytree.adorned(tree, is_itself)  # with objects among their parts
        leaves, spec = pytree.flatten_but(tree, is_leaf)
        if (watch := frames.observer()) is not None:
            nodes = pytree.nodes_in(result if tree is result else (result, tree), is_leaf)
            watch.gives([node for node in nodes if not is_leaf(node)])
            for leaf in filter(is_leaf, leaves):
                watch.gives_itself(leaf)
                if self.recorder.kept is not None:
                    self.recorder.kept.elsewhere.returned.add(id(leaf))
        return tree, [*map(alive, leaves)], spec

    def with_memory(
        self,
        begun: Captured,
        results: list[Any],
        placed: list[Any],
        tracers: list[torch.Tensor],
        targets: list[int | torch.Tensor],
    ) -> Captured:
        """Add the place of the results in autograd's graph, and of all outputs in memory."""
        recorder = self.recorder
        inner = [place for place, leaf in enumerate(results) if is_inner(leaf)]
        aliases = tuple(aliases_of(recorder, placed, tracers, targets))
        shared = tuple(shared_memory(recorder, placed, tracers))
        outside = {one.result for one in (*aliases, *shared)}
        return dataclasses.replace(
            begun,
            retained=tuple(place for place in inner if results[place].retains_grad),
            follows=(recorder.gradients.follows or bool(inner)) and self.is_off,
            aliases=aliases,
            joints=tuple(joints_of(recorder, placed, outside)),
            shared=shared,
            strides=() if recorder.outer is None else tuple(map(strides_of, results)),
        )

    @property
    def in_leaves(self) -> tuple[Any, ...]:
        """The leaves of the arguments that are static, with marks for the others."""
        return tuple(
            TENSOR if isinstance(leaf, torch.Tensor) or i in self.symbolic.numbers else leaf
            for i, leaf in enumerate(self.leaves)
        )

    @machinery
    def captured(self, end: _End) -> Captured:
        """Fold the recording into a trace, and add the data that a call needs."""
        recorder, found, bounds = self.recorder, end.found, self.symbolic.decisions
        number = recorder.decisions.settled_number
        outputs = (*end.outputs, *(var for _, var in end.changes), *end.stored)
        nested = nest(recorder, outputs, _identifier(self.asked.name))
        trace, writes, feeds, places = _fed(
            recorder.decisions.settled(rewritten(nested, recorder)),
            tuple(write for write, _ in end.changes),
            end.fed,
        )
        made("capture", trace)
        check_late(trace, end.late, end.followed, source_of(self.asked.f))
        if recorder.outer is None and recorder.mode.shape_env is not None:
            check_found(trace, source_of(self.asked.f))
        if bounds:
            relations = (decision.relation for decision in bounds)
            constraints = tuple(dict.fromkeys((*relations, *trace.constraints)))
            trace = dataclasses.replace(trace, constraints=constraints)
        given = {id(one) for one in (*self.tensors, *(c.tensor for c in trace.constants))}
        with required([(tensor, False) for tensor, _ in self.flags]):  # as calls find them
            unread = tuple(types_of(one for one in end.met if id(one) not in given))
        return dataclasses.replace(
            found,
            trace=trace,
            reads=(*found.reads, *unread),
            writes=writes,
            decisions=(*bounds, *recorder.decisions.by_question.values()),
            aliases=tuple(_at(places, one).with_numbers(number) for one in found.aliases),
            joints=tuple(one.with_numbers(number) for one in found.joints),
            shared=tuple(_at(places, shared) for shared in found.shared),
            feeds=feeds,
            is_told=recorder.values.is_told,
        )


@contextmanager
def _unchanged(asked: _Options, arguments: Any) -> Generator[None]:
    """Refuse a function that changes a dataclass without tensors among the arguments of a
    transform: it has a copy. So it has of lists and dicts, as under torch.func.
    """
    nodes = pytree.nodes_in(arguments) if asked.inside else []
    nodes = [
        one for one in nodes if dataclasses.is_dataclass(type(one)) and not pytree.tensors_in(one)
    ]
    held = pytree.Contents(nodes)
    yield
    fix = "Return the new value, or close over the object instead of passing it."
    check_unchanged(held, asked.name, fix)


@contextmanager
def _same_modes(f: Callable[..., Any], name: str) -> Generator[None]:
    """Refuse a function that leaves other torch function modes than it found: they would see, in
    the place of the recorder's or below it, the ops of others.
    """
    modes = internals.function_modes()
    try:
        yield
    finally:
        is_same = internals.keep_function_modes(modes)
    if not is_same:
        what = f"{name} leaves other torch function modes than it found"
        raise UnsupportedCall(what, source=source_of(f), fix="Enter a mode by a `with`.")


def _run(
    recorder: Recorder, f: Callable[..., Any], name: str, grad_off: bool, args: Any, kwargs: Any
) -> Any:
    try:
        off = torch.no_grad() if grad_off else nullcontext()
        with _same_modes(f, name), off, frames.running():
            result = f(*args, **kwargs)
    except Exception as error:
        internals.release_guards(error)
        if recorder.late_error is not None and error is not recorder.late_error:
            raise recorder.late_error from error
        if recorder.kept is not None and isinstance(error, internals.NEEDS_A_NUMBER):
            recorder.kept.ask_for_items(tensors_of_numbers(recorder, error.cond))
        if is_complete(error):
            raise
        raise failure(error, name, recorder) from error
    if recorder.late_error is not None:
        raise recorder.late_error
    return result


def _fed(
    trace: Trace, writes: tuple[Write, ...], given: tuple[tuple[Feed, torch.Tensor | None], ...]
) -> tuple[Trace, tuple[Write, ...], tuple[Feed, ...], dict[int, int]]:
    """Make gradients from outside the last inputs of the trace, and let writes to them refer to
    these inputs. Numbers are inputs already.
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


_UNREAD = 1 << 40
"""Variables of gradients that are written to and not read begin here."""


def _at(places: Mapping[int, int], one: Seen) -> Seen:
    """Return an alias or `Shared` whose source, a gradient that has become an input, is that
    input's index.
    """
    return dataclasses.replace(one, source=places.get(id(one.source), one.source))


def _path(args: tuple[Any, ...], kwargs: dict[str, Any], index: int) -> str:
    """The path of a leaf of a call, such as `args[0]['w']`."""
    return [*pytree.paths(args, "args"), *pytree.paths(kwargs, "kwargs")][index]


def _identifier(name: str) -> str:
    return name if name.isidentifier() else "program"
