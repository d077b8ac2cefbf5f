"""Programs of calls: capture, transforms, lowering, and the epilogue that hands the results out.

def execute(l0, l1):
    r0, r1, = program(l0, l1)
    if r1 is not l0: write(l0, r1)
    return {"loss": r0}
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import TENSOR, Alias, Captured, GradRead, capture, current
from thunder_fn.capture.aliases import Joint, at_call, with_memory
from thunder_fn.capture.apply import (
    rebind,
    restride,
    write,
    write_back,
    write_data,
    write_to_result,
)
from thunder_fn.capture.capturing import beginning
from thunder_fn.capture.failures import check_aliases, source_of
from thunder_fn.capture.flags import required, tensors_of
from thunder_fn.capture.kept_state import KeptState, decided_by
from thunder_fn.capture.modules import TRACING
from thunder_fn.capture.numbers.arguments import Symbolic, value_at
from thunder_fn.capture.objects import ABSENT
from thunder_fn.capture.outside.properties import Read
from thunder_fn.capture.outside.reads import HOLDERS
from thunder_fn.capture.places import GRAD, Effect, Update, held_at, put, tensor_at
from thunder_fn.capture.recorded import Decision
from thunder_fn.capture.replaced import host_random
from thunder_fn.capture.replaced.lookasides import lookasides
from thunder_fn.capture.rewriting import rewritten_by, to_be_fused
from thunder_fn.capture.watching import made
from thunder_fn.derived.leaf_vjp import read_formulas
from thunder_fn.errors import (
    CaptureError,
    HostRandomWarning,
    JitError,
    ThunderError,
    TracedFunctionError,
    callable_name,
    kind_of,
    located,
)
from thunder_fn.executors import Executor, Program, any_fuses, lower
from thunder_fn.executors.idle import warn_of_idle
from thunder_fn.executors.reuse import is_dense
from thunder_fn.garbage import no_collections
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir.constraints import constraints_of
from thunder_fn.ir.memory import is_layout, is_view_step, viewed
from thunder_fn.ir.symbols import symbols_in
from thunder_fn.ir.trace import Atom, Source, Trace, Var, cut
from thunder_fn.jitted.autograd.bridge import Bridge, bridge, history_of
from thunder_fn.jitted.autograd.nodes import freed
from thunder_fn.jitted.call import Call
from thunder_fn.jitted.callpath import Namespace, put_together, skeleton
from thunder_fn.jitted.memory import all_exclusive, clash_check, give_away
from thunder_fn.jitted.modules.containers import Filling, filling, finish
from thunder_fn.jitted.options import Options, calls_within
from thunder_fn.jitted.outside import Outside, Watched, outside_of, watching
from thunder_fn.jitted.prologue import prologue_trace, structure_text


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A program for one kind of call.

    `execute` takes the tensor leaves and gives the function's result. `stages` are the traces on
    the way and the program. `grads_match` says of the tensors whether the gradients are those that
    the function read, None if it read none; `reads_match` says so of other properties. `outside`
    guards what it read from outside. `clash` says whether a tensor that is written to may share
    memory with another, None if nothing is written; `check_clash` raises if it does. If places of
    the call are symbols, `symbolic` says which one each place has, and the program serves all calls
    with these answers to `decisions`. `fills`: `execute` returns a `Filling`. `feeds_grads`:
    gradients are read in each call, so that it serves calls with others.
    """

    execute: Callable[..., Any]
    captured: Captured
    prologue: Trace
    stages: tuple[Trace | Program, ...]
    bridge: Bridge | None
    constants: tuple[torch.Tensor, ...]
    constants_match: Callable[..., bool]
    grads_match: Callable[..., bool] | None
    reads_match: Callable[..., bool] | None
    clash: Callable[..., bool] | None
    check_clash: Callable[[Sequence[torch.Tensor]], None]
    symbolic: Symbolic | None = None
    decisions: tuple[Decision, ...] = ()
    fills: bool = False
    feeds_grads: bool = False
    outside: Outside | None = None

    def arguments(self, call: Call) -> list[Any]:
        """The arguments of `execute` for a call: its tensors, then the numbers and strides that
        are symbols.
        """
        extra = self.symbolic.inputs if self.symbolic is not None else ()
        return [
            *call.values,
            *(value_at(call.leaves, place) for _, place in extra),
        ]

    def is_current(self) -> bool:
        """Test whether the closed-over tensors still have the dtype, shape and requires_grad that
        they were traced with.
        """
        return self.constants_match(*self.constants)

    def is_inside(self) -> bool:
        """Test that reads from outside give the old values."""
        return self.outside is None or self.outside.matches()

    def serves(self, call: Call) -> bool:
        """Test whether a program that was found for a call is right for it: its other conditions
        hold.
        """
        tensors, matches = call.values, (self.grads_match, self.reads_match)
        return (
            self.is_inside()
            and self.is_current()
            and all(match(*tensors) for match in matches if match is not None)
        )


def moved_numbers(known: Sequence[Entry], before: frozenset[Any]) -> frozenset[Any]:
    """Add to these places the numbers outside that have changed since the programs were made, such
    as those in the state of optimizers. Numbers that cannot be inputs are left out.
    """
    for entry in known:
        before |= frozenset(() if entry.outside is None else entry.outside.moved())
        for state in entry.outside.modules if entry.outside is not None else ():
            if isinstance(state, KeptState):
                before = (before | state.moved()) - state.refused
    return before


@no_collections()
def build(
    f: Callable[..., Any],
    options: Options,
    call: Call,
    symbolic: Symbolic | None = None,
    wanted: frozenset[Any] = frozenset(),
) -> Entry:
    """Trace f for a call, or for all calls with other numbers in its symbols, and lower the trace.
    `wanted` are places of numbers in the state of optimizers that should be inputs.

    Raises:
        CaptureError: f cannot be traced.
        JitError: a transform changed the types of the trace's inputs or outputs.
    """
    captured, traces, watched = _traced(f, options, call, symbolic, wanted)
    try:
        return _entry(f, options, call, symbolic, captured, traces, watched)
    except Exception:  # f has not run
        watched.begin_again()
        raise


def _entry(
    f: Callable[..., Any],
    options: Options,
    call: Call,
    symbolic: Symbolic | None,
    captured: Captured,
    traces: list[Trace],
    watched: Watched,
) -> Entry:
    """Lower the last of the traces of a call; what the call needs beside the program."""
    closed, constants = close_over(traces[-1])
    with _beginning(captured, call):
        execution = _lowered(captured, closed, constants, options, call, symbolic)
    warn_of_idle(options.executors, execution.program.claimed, source_of(f))
    split = None if execution.bridge is None else execution.bridge.split
    ran = (traces[-1],) if split is None else (traces[-1], split.forward, split.backward)
    decisions = _fed_apart(captured, decisions_of(captured, ran))
    decisions = decisions if symbolic is not None else ()
    before = close_over(captured.trace)[1]  # a transform may have let go of one
    targets = (one.target for one in captured.writes if isinstance(one.target, torch.Tensor))
    closed_over = tuple({id(one): one for one in (*constants, *before, *targets)}.values())
    structure = structure_text(call.leaves, call.spec)
    return Entry(
        execute=execution.function(),
        captured=captured,
        prologue=prologue_trace(call.leaves, structure, call.statics, symbolic, decisions),
        stages=(*traces, execution.program),
        bridge=execution.bridge,
        constants=closed_over,
        constants_match=internals.tensor_guard(closed_over),
        grads_match=grads_guard(captured.grads) if captured.grads else None,
        reads_match=reads_guard(captured.reads) if captured.reads else None,
        clash=_clash(captured, call, symbolic),
        check_clash=partial(_check_clash, captured, source_of(f)),
        symbolic=symbolic,
        decisions=decisions,
        fills=captured.out_spec.type is Filling,
        feeds_grads=any(read.is_fed for read in captured.grads),
        outside=outside_of(watched, captured.kept),
    )


def _traced(
    f: Callable[..., Any],
    options: Options,
    call: Call,
    symbolic: Symbolic | None,
    wanted: frozenset[Any],
) -> tuple[Captured, list[Trace], Watched]:
    """Trace f for a call: the capture, its trace after each transform, and what was seen of f."""
    before = host_random.state()
    objects = [leaf for leaf in call.leaves if not isinstance(leaf, torch.Tensor)]
    is_final = symbolic is None  # else f is traced again, without symbols
    with watching(f, [*(value for _, value in call.statics), *objects]) as watched:
        trace = lambda wanted: capture_call(
            f,
            options,
            call,
            symbolic,
            partial(_apply_unfinished, call) if is_final and not wanted else None,
            has_effects=current() is None,
            wanted=wanted,
        )
        try:
            captured, traces = _with_numbers(wanted, trace, watched.begin_again)
            if torch.is_grad_enabled():
                read_formulas(captured.trace)
        except Exception as error:
            if not is_final or (isinstance(error, ThunderError) and error.is_refusal):
                watched.begin_again()
            raise
    if (generator := host_random.drawn_since(before)) is not None:
        _warn_of_constants(f, captured.trace.name, generator)
    return captured, traces, watched


def _beginning(captured: Captured, call: Call) -> AbstractContextManager[None]:
    """Let tensors require grad as they do when the program begins."""
    return required(tensors_of(captured.flags, call.values))


def _apply_unfinished(call: Call, captured: Captured) -> None:
    """Make the changes of a function until it raised, and draw its random numbers, as eager mode
    does.
    """
    tensors = call.values
    with TRACING:
        values = (*tensors, *(feed.read(tensors) for feed in captured.feeds))
    made = captured.result(write_back(captured, values, evaluate(captured.trace, values)))
    if type(made) is Filling:
        finish(made, call.args, call.kwargs)


def _lowered(
    captured: Captured,
    closed: Trace,
    constants: tuple[torch.Tensor, ...],
    options: Options,
    call: Call,
    symbolic: Symbolic | None,
) -> _Execution:
    """Lower a trace, whose last inputs are the constants, and bridge it if autograd follows it."""
    tensors = call.values
    numbers = symbolic.inputs if symbolic is not None else ()
    with TRACING:
        feeds = tuple(feed.read(tensors) for feed in captured.feeds)
    targets = [write.target for write in captured.writes]
    places = places_of(targets, len(tensors) + len(numbers) + len(feeds), constants)
    pairs = zip(places, captured.writes, strict=True)
    writes = (
        *(None if write.rebinds else place for place, write in pairs),
        *(None for _ in range(captured.num_effects)),
    )
    executors = options.executors_of(closed)
    values = tuple(map(internals.plain, (*tensors, *numbers, *feeds, *constants)))
    followed = torch.is_grad_enabled() or is_followed(captured)
    bridged = bridge(closed, values, writes, executors) if followed else None
    if bridged is None:  # without a history, only values count
        valued = zip(writes, captured.writes, strict=False)
        count = len(captured.writes)
        in_place = (place if one.is_in_place else None for place, one in valued)
        writes = (*in_place, *writes[count:])
    return _Execution(captured, closed, constants, writes, call, bridged, executors, symbolic)


def _clash(captured: Captured, call: Call, symbolic: Symbolic | None) -> Callable[..., bool] | None:
    """The check whether tensors that are written to share memory; None if there are none."""
    tensors = call.values
    written = captured.targets_among(len(tensors))
    if not written:
        return None
    return clash_check(captured.trace, tensors, written, symbolic=symbolic is not None)


def _with_numbers(
    wanted: frozenset[Any],
    trace: Callable[[frozenset[Any]], tuple[Captured, list[Trace]]],
    put_back: Callable[[], None],
) -> tuple[Captured, list[Trace]]:
    """Trace with the numbers of these places as inputs, or with constants if that fails, or if a
    rule of the user's may read them: it runs later, where Python holds other values.
    """
    try:
        captured, traces = trace(wanted)
        if not wanted or not captured.trace.has_foreign:
            return captured, traces
    except (CaptureError, TracedFunctionError):
        if not wanted:
            raise
    put_back()
    captured, traces = trace(frozenset())
    if not captured.kept:
        name = captured.trace.name
        captured = replace(captured, kept=(KeptState(name),))
    for state in captured.kept:
        state.refused |= wanted
    return captured, traces


def grads_guard(grads: Sequence[GradRead]) -> Callable[..., bool]:
    """Make a check that a call's tensors have the very gradients that were read. It keeps none of
    them alive.
    """
    expected = [
        (read.tensor, None if read.grad is None else internals.weak_tensor(read.grad))
        for read in grads
        if read.grad is None or not read.is_fed
    ]
    places = [read.tensor for read in grads if read.grad is not None and read.is_fed]
    leaves = [read.tensor for read in grads if read.is_fed]
    of_types = internals.tensor_guard(
        [read.grad for read in grads if read.grad is not None and read.is_fed]
    )

    def match(*tensors: torch.Tensor) -> bool:
        for tensor, known in expected:
            given = tensor_at(tensor, tensors)
            grad = given.grad if given.is_leaf or given.retains_grad else None
            if (grad is None) != (known is None) or (known is not None and grad is not known()):
                return False
        fed = [tensor_at(place, tensors).grad for place in places]
        if any(internals.has_hooks(tensor_at(place, tensors)) for place in leaves):
            return False
        return all(grad is not None for grad in fed) and (not fed or of_types(*fed))

    return match


def _fed_apart(captured: Captured, decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
    """Give decisions about fed numbers to the guard of their objects, and return the others."""
    symbols = {feed.symbol for feed in captured.feeds if feed.symbol is not None}
    fed = [one for one in decisions if not symbols.isdisjoint(symbols_in((one.relation,)))]
    for state in captured.kept:
        state.decide = decided_by(state.feeds, [one.relation for one in fed])
    return tuple(one for one in decisions if one not in fed)


def reads_guard(reads: Sequence[Read]) -> Callable[..., bool]:
    """Make a check that the properties of a call's tensors that were read have their old values."""

    def match(*tensors: torch.Tensor) -> bool:
        for read in reads:
            given = tensors[read.tensor] if isinstance(read.tensor, int) else read.tensor
            if (read.find() if given is None else read.find(given)) != read.found:
                return False
        return True

    return match


def _warn_of_constants(f: Callable[..., Any], name: str, generator: str) -> None:
    what = (
        f"jit: {name} drew numbers from `{generator}` while it was traced; its program has them as"
        " constants"
    )
    fix = "Draw them with PyTorch, such as `torch.rand(())`, or outside the function and pass them."
    warnings.warn(located(what, source=source_of(f), fix=fix), HostRandomWarning, stacklevel=2)


def decisions_of(captured: Captured, traces: Sequence[Trace]) -> tuple[Decision, ...]:
    """Decisions made while f was traced, then those of the rules that made these traces of it."""
    asked = {str(decision.question) for decision in captured.decisions}
    known = set(captured.trace.constraints)
    further = dict.fromkeys(
        item for one in traces for item in constraints_of(one) if item not in known
    )
    return (
        *captured.decisions,
        *(Decision(item, True) for item in further if str(item) not in asked),
    )


def capture_call(
    f: Callable[..., Any],
    options: Options,
    call: Call,
    symbolic: Symbolic | None = None,
    on_raise: Callable[[Captured], None] | None = None,
    *,
    has_effects: bool = False,
    wanted: frozenset[Any] = frozenset(),
) -> tuple[Captured, list[Trace]]:
    """Capture a call: its trace, and the trace after each of the transforms. `on_raise` the
    last two as for `capture`.
    """
    with lookasides(options.lookasides), calls_within(options.numerics), ExitStack() as stack:
        if (rewrite := options.rewrite()) is not None:
            stack.enter_context(rewritten_by(rewrite))
            stack.enter_context(to_be_fused(any_fuses(options.chosen_executors())))
        function = with_statics(f, call)
        options_of_capture: dict[str, Any] = {
            "symbolic": symbolic,
            "on_raise": on_raise,
            "shares": True,
            "has_effects": has_effects,
            "stores": not has_effects,
            "wanted": wanted,
        }
        if not getattr(f, "fills_arguments", False):
            options_of_capture["returning"] = filling
        if on_raise is not None:
            options_of_capture["raising"] = filling
        begin_again = beginning()
        captured = capture(function, call.args, call.kwargs, **options_of_capture)
        if is_followed(captured):
            # again, with what is computed where gradients are off as constants
            leave = internals.state_kept()
            begin_again()
            with torch.enable_grad():
                captured = capture(
                    function, call.args, call.kwargs, grad_off=True, **options_of_capture
                )
            leave()
    return captured, transformed(captured.trace, options)


def is_followed(captured: Captured) -> bool:
    """Test whether autograd follows results, though gradients are off: the function turns them on,
    and no transform ignores `no_grad`.
    """
    outer = current()
    return (
        captured.follows
        and not torch.is_inference_mode_enabled()
        and (outer is None or outer.history.base_grad)
    )


def transformed(trace: Trace, options: Options) -> list[Trace]:
    """Return the trace, then the result of each transform in turn."""
    traces = [trace]
    for transform in options.transforms:
        traces.append(_transformed(transform, traces[-1]))
        made(transform.name, traces[-1], traces[-2])
    return traces


def close_over(trace: Trace) -> tuple[Trace, tuple[torch.Tensor, ...]]:
    """The trace with closed-over tensors as its last inputs, and those tensors.

    Then no memo of it keeps a tensor alive, and memos serve every function that closes over others.
    """
    moved = tuple(constant for constant in trace.constants if not constant.owned)
    if not moved:
        return trace, ()
    inputs = (*trace.inputs, *(constant.var for constant in moved))
    left = tuple(constant for constant in trace.constants if constant.owned)
    closed = cut(trace, inputs=inputs, constants=left)
    return closed, tuple(constant.tensor for constant in moved)


def places_of(
    targets: Sequence[int | torch.Tensor], count: int, constants: Sequence[torch.Tensor]
) -> tuple[int | None, ...]:
    """The input that is each written tensor, None if the program does not read it."""
    places = {id(tensor): count + i for i, tensor in enumerate(constants)}
    return tuple(
        target if isinstance(target, int) else places.get(id(target)) for target in targets
    )


def _check_clash(
    captured: Captured, source: Source | None, tensors: Sequence[torch.Tensor]
) -> None:
    targets = captured.targets_among(len(tensors))
    check_aliases(captured.trace, tensors, targets, source, captured.trace.name)


def with_statics(f: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """f as a function of the other arguments."""
    if not call.statics:
        return f
    values = dict(call.statics)
    named = {name: value for name, value in call.statics if isinstance(name, str)}

    def function(*args: Any, **kwargs: Any) -> Any:
        rest = iter(args)
        return f(
            *(values[i] if i in values else next(rest) for i in range(call.count)),
            **kwargs,
            **named,
        )

    function.__name__ = callable_name(f)
    return function


def _transformed(transform: Callable[[Trace], Trace], trace: Trace) -> Trace:
    new: Any = transform(trace)
    name = callable_name(transform)
    if not isinstance(new, Trace):
        raise JitError(f"jit: the transform {name} returned {kind_of(new)}, not a Trace")
    for what in ("input", "output"):
        before, after = getattr(trace, f"{what}_types"), getattr(new, f"{what}_types")
        if before != after:
            texts = (
                f"  before: {', '.join(map(str, before))}\n  after:  {', '.join(map(str, after))}"
            )
            fix = (
                "Write a function transform, such as grad or vmap, for what changes a function's"
                " signature."
            )
            raise JitError(
                f"jit: the transform {name} changes the trace's {what} types\n{texts}", fix=fix
            )
    return new


class _Execution:
    """The writer of the function that runs a program on tensor leaves and hands its results out.
    Holds no argument.
    """

    def __init__(  # noqa: PLR0913 - a part of the answer each
        self,
        captured: Captured,
        trace: Trace,
        constants: tuple[torch.Tensor, ...],
        writes: tuple[int | None, ...],
        call: Call,
        bridged: Bridge | None,
        executors: tuple[Executor, ...],
        symbolic: Symbolic | None,
    ) -> None:
        self.executors = executors
        self.captured, self.trace, self.writes, self.bridge = captured, trace, writes, bridged
        self.names = Namespace(all_exclusive=all_exclusive, give_away=give_away, write=write)
        tensors, donated = call.tensors, set(call.donated)
        self.leaves = [f"l{position}" for position, _ in tensors]
        self.is_leaf = {
            f"l{position}": tensor.is_leaf for position, tensor in tensors if tensor.requires_grad
        }
        self.leaves += [
            str(symbol) for symbol, _ in (symbolic.inputs if symbolic is not None else ())
        ]
        self.inputs = [*self.leaves, *(self.names.bind(tensor, "constant") for tensor in constants)]
        self.feeds = list(self.fed())
        self.inputs[len(self.leaves) : len(self.leaves)] = [name for name, _ in self.feeds]
        values = (*(tensor for _, tensor in tensors), *constants)
        first = len(self.leaves) + len(self.feeds)
        names = (*self.leaves[: len(tensors)], *self.inputs[first:])
        pairs = zip(names, values, strict=True)
        self.with_bits = {
            name: f"plain_{name}" for name, value in pairs if internals.bits_in_memory(value)
        }
        self.constants = constants
        requires_grad = any(tensor.requires_grad for tensor in values)
        self.stopped = torch.is_grad_enabled() and requires_grad
        self.copies = dict[int, str]()
        """The names of plain data that each call makes anew, by the identity of the model."""
        self.donated = [i for i, (position, _) in enumerate(tensors) if position in donated]
        self.writable = [
            i
            for i in self.donated
            if bridged is None and is_dense(tensors[i][1]) and self.leaves[i] not in self.with_bits
        ]
        pairs = zip(captured.writes, writes, strict=False)  # effects come last
        self.given = {self.leaves[i] for i in self.donated}
        self.targets = [
            self.inputs[write.target]
            if isinstance(write.target, int)
            else self.names.bind(write.target, "target")
            if place is None
            else self.inputs[place]
            for write, place in pairs
        ]

    def putting(self, target: str, place: int | None, atom: Atom) -> str:
        """The function that writes a new value to a target. The trace was made for a leaf that is
        written where gradients are off, or for a result of autograd's.
        """
        changed, moved = (
            (self.bridge.changed, self.bridge.moved) if self.bridge is not None else ((), ())
        )
        is_followed = target in self.is_leaf and torch.is_grad_enabled()
        is_kept = place in changed and place not in moved
        if is_kept or (is_followed and self.is_leaf[target]):
            return self.names.bind(torch.no_grad()(write), "write_values")
        if place is None or place in changed or not is_followed:
            return "write"
        if history_of(self.trace, atom) == self.trace.inputs[place]:
            return "write"
        return self.names.bind(write_to_result, "write_to_result")

    @cached_property
    def program(self) -> Program:
        """The program to run: that of a bridge where gradients may be asked for."""
        if self.bridge is None:
            return self.lowered(self.writable)
        return self.bridge.followed or self.bridge.forward

    def lowered(self, donated: Sequence[int]) -> Program:
        return lower(
            self.trace, donated, self.writes, below_autograd=True, executors=self.executors
        )

    def function(self) -> Callable[..., Any]:
        """Write and compile the function."""
        values = [f"r{i}" for i in range(len(self.trace.outputs))]
        lines = [
            f"def execute({', '.join(self.leaves)}):",
            *(["    made = {}"] if self.repeats else []),
            *self.required(),
            *self.alone([f"    {name} = {text}" for name, text in self.feeds]),
            *self.running(values),
            *self.views(values),
            *(line for joint in self.captured.joints for line in self.joint(joint, values)),
            *self.retained(values),
            *self.restrided(),
            *self.changes(values),
            *self.own_leaves(values),
            *self.alone([*self.effects(values)]),
        ]
        made, result = self.result(values)
        lines += made
        if self.donated:
            donated = ", ".join(self.leaves[i] for i in self.donated)
            lines += [f"    result = {result}", f"    give_away({donated})"]
            result = "result"
        return self.names.function("execute", [*lines, f"    return {result}", ""])

    @property
    def repeats(self) -> bool:
        """Test for objects that are in the result or in places more than once."""
        effects = (one for one in self.captured.effects if isinstance(one, Effect))
        return bool(self.captured.repeated) or any(one.repeated for one in effects)

    def required(self) -> Iterator[str]:
        """Lines that let tensors require grad from the beginning, or not."""
        for one, flag in self.captured.flags:
            name = self.leaves[one] if isinstance(one, int) else self.names.bind(one, "leaf")
            yield f"    {name}.requires_grad_({flag})"

    def running(self, values: Sequence[str]) -> Iterator[str]:
        """Lines that run the program."""
        is_node = self.bridge is not None and self.bridge.followed is None
        run = self.names.bind(self.bridge if is_node else self.program.run, "program")
        if self.writable:
            program = cache(partial(self.lowered, ()))  # lowered when it is first needed
            careful = self.names.bind(lambda *tensors: program().run(*tensors), "careful")
            given = ", ".join(self.inputs[i] for i in self.writable)
            yield f"    run = {run} if all_exclusive({given}) else {careful}"
            run = "run"
        indent, mode = "    ", self.grad_mode
        if mode is not None:
            yield f"    with {self.names.bind(mode, mode.__name__)}():"
            indent = "        "
        # values in a trace have no conjugate or negative bit
        for name, plain in self.with_bits.items():
            yield f"{indent}{plain} = {self.names.bind(internals.plain, 'plain')}({name})"
        given = ", ".join(self.with_bits.get(name, name) for name in self.inputs)
        targets = "".join(f"{value}, " for value in values)
        yield f"{indent}{targets}{'= ' if values else ''}{run}({given})"

    @property
    def grad_mode(self) -> type[torch.enable_grad] | type[torch.no_grad] | None:
        """The grad mode in which the program runs; None for that of the call.

        No result of a program without a bridge has a gradient, whatever PyTorch would make of the
        ops.
        """
        if self.bridge is not None:
            return None if torch.is_grad_enabled() else torch.enable_grad
        return torch.no_grad if self.stopped else None

    def retained(self, values: Sequence[str]) -> Iterator[str]:
        """Lines that keep the gradients of results."""
        for place in self.captured.retained:
            if self.bridge is not None and self.bridge.active[place]:
                yield f"    {values[place]}.retain_grad()"

    def restrided(self) -> Iterator[str]:
        """Lines that lay out the targets as the function does."""
        for one, target in zip(self.captured.writes, self.targets, strict=True):
            if one.strides is not None:
                yield f"    {self.names.bind(restride, 'restride')}({target}, {one.strides})"

    def changes(self, values: Sequence[str]) -> Iterator[str]:
        """Lines that give the targets their new values."""
        first, count = self.captured.num_results, len(self.targets)
        others = ", ".join((*self.inputs, *values[:first]))
        pairs = zip(values[first : first + count], self.written, strict=True)
        places = self.writes[:count]  # effects come after them
        changes = zip(self.captured.writes, self.targets, places, pairs, strict=True)
        for one, target, place, (value, atom) in changes:
            change = f"{self.putting(target, place, atom)}({target}, {value})"
            if not (one.rebinds or one.has_values):
                continue
            if one.rebinds:
                change = f"{self.names.bind(rebind, 'rebind')}({target}, {value}, {others})"
            elif not one.is_counted:
                change = f"{self.names.bind(write_data, 'write_data')}({target}, {value})"
            yield f"    if {value} is not {target}: {change}"

    def fed(self) -> Iterator[tuple[str, str]]:
        """The names of inputs that are read from places outside, and how they are read."""
        for count, feed in enumerate(self.captured.feeds):
            name = str(feed.symbol) if feed.symbol is not None else f"fed{count}"
            if isinstance(feed.holder, torch.Tensor):
                yield name, f"{self.names.bind(feed.holder, 'leaf')}.grad"
            elif isinstance(feed.holder, int):
                yield name, f"{self.leaves[feed.holder]}.grad"
            else:
                part = ".item()" if feed.is_item else ""
                holder, key = self.names.bind(feed.holder, "holder"), self.names.literal(feed.key)
                read = f"{self.names.bind(held_at, 'held_at')}({holder}, {key})"
                read = f"{holder}[{key}]" if isinstance(feed.holder, HOLDERS) else read
                for step in feed.path:
                    key = self.names.literal(step.key)
                    read = f"getattr({read}, {key})" if step.is_attribute else f"{read}[{key}]"
                yield name, f"{read}{part}"

    def alone(self, lines: Sequence[str]) -> list[str]:
        """Guard lines on places outside, so that they run while no other thread has tracers in
        them.
        """
        places = (*self.captured.feeds, *self.captured.effects)
        if not lines or all(isinstance(one.holder, (int, torch.Tensor)) for one in places):
            return [*lines]
        return [
            f"    with {self.names.bind(TRACING, 'tracing')}:",
            *(f"    {line}" for line in lines),
        ]

    def effects(self, values: Sequence[str]) -> Iterator[str]:
        """Lines that store what belongs to places outside."""
        first = self.captured.num_results + len(self.targets)
        given = (self.stored(place, values) for place in range(first, len(values)))
        for effect in self.captured.effects:
            if isinstance(effect, Update):
                yield f"    {self.names.bind(effect.apply, 'update')}()"
                continue
            holder = (
                self.leaves[effect.holder]
                if isinstance(effect.holder, int)
                else self.names.bind(effect.holder, "holder")
            )
            key = self.names.bind(effect.key, "key")
            stored = self.names.bind(put, "put")
            unless = f"if not {next(given)}: " if effect.is_conditional else ""
            if effect.spec is None:
                yield f"    {unless}{stored}({holder}, {key}, {self.names.bind(ABSENT)})"
                continue
            lines, texts = self.fixed(effect)
            yield from lines
            fixed = iter(texts)
            leaves = [next(given) if flag else next(fixed) for flag in effect.is_output]
            value = put_together(
                skeleton(effect.spec), leaves, self.names, effect.spec, effect.repeated
            )
            if effect.key is GRAD:
                yield f"    {holder}.grad = {value}"
            elif type(effect.holder) is dict and effect.key is not None:
                yield f"    {unless}{holder}[{key}] = {value}"
            else:
                yield f"    {unless}{stored}({holder}, {key}, {value})"

    def fixed(self, effect: Effect) -> tuple[list[str], list[str]]:
        """Lines, and the leaves of an effect that are no outputs."""
        lines, texts = list[str](), list[str]()
        for place, (leaf, flag) in enumerate(zip(effect.leaves, effect.is_output, strict=True)):
            if not flag and place in effect.anew:
                lines += self.copied(leaf)
                texts.append(self.copies[id(leaf)])
            elif not flag:
                texts.append(self.names.bind(leaf, "fixed"))
        return lines, texts

    def copied(self, leaf: Any) -> Iterator[str]:
        """The line that makes plain data anew, once for all places that have it."""
        if id(leaf) not in self.copies:
            self.copies[id(leaf)] = name = f"anew{len(self.copies)}"
            copied = self.names.bind(copy.deepcopy, "copy")
            yield f"    {name} = {copied}({self.names.bind(leaf, 'plain')})"

    def stored(self, position: int, values: Sequence[str]) -> str:
        """Return the text of an output that is stored outside: the very tensor that it is."""
        source = self.captured.source_of(position)
        if source is None:
            return self.in_memory(position, values)
        place = self.place_of(source)
        if place is None or self.inputs[place] in self.given:
            return values[position]
        return self.inputs[place]

    def own_leaves(self, values: Sequence[str]) -> Iterator[str]:
        """Lines that make results leaves of autograd's graph, each tensor once."""
        first: dict[Any, str] = {}
        for place, is_parameter in self.captured.own_leaves:
            value, atom = values[place], self.trace.outputs[place]
            kind = self.names.bind(torch.nn.Parameter, "Parameter") if is_parameter else ""
            memory = self.in_memory(place, values)
            made = f"{kind}({memory})" if kind else f"{memory}.detach().requires_grad_()"
            yield f"    {value} = {first.get(atom, made)}"
            first.setdefault(atom, value)

    def result(self, values: Sequence[str]) -> tuple[list[str], str]:
        """Lines, and the expression for the function's result that reads what they bind."""
        lines, texts = self.texts(values)
        supply, leaves = iter(texts), list[str]()
        for place, leaf in enumerate(self.captured.out_leaves):
            if place in self.captured.anew:
                lines += self.copied(leaf)
            if leaf is TENSOR:
                leaves.append(next(supply))
            else:
                leaves.append(self.copies.get(id(leaf)) or self.names.literal(leaf))
        spec = self.captured.out_spec
        return lines, put_together(skeleton(spec), leaves, self.names, spec, self.captured.repeated)

    def texts(self, values: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return lines, and the text of each result. A view of a written tensor is made here, once
        by a line, however often it is returned.
        """
        outputs = self.trace.outputs[: self.captured.num_results]
        found = [self.value(place, values) for place in range(len(outputs))]
        firsts = [outputs.index(atom) if isinstance(atom, Var) else -1 for atom in outputs]
        made = {
            first: f"made{first}"
            for place, first in enumerate(firsts)
            if 0 <= first < place and not found[place].isidentifier()
        }
        lines = [f"    {name} = {found[first]}" for first, name in made.items()]
        return lines, [made.get(first, text) for first, text in zip(firsts, found, strict=True)]

    def value(self, position: int, values: Sequence[str]) -> str:
        """Return the text of an output."""
        is_own = any(position == place for place, _ in self.captured.own_leaves)
        return values[position] if is_own else self.in_memory(position, values)

    def in_memory(self, position: int, values: Sequence[str]) -> str:
        """Return the text of an output where it lies: the written tensor itself if it holds the
        value, and never a donated one.
        """
        if position in self.captured.freed and torch.is_grad_enabled():
            names = ", ".join((values[position], *self.inputs))
            return f"{self.names.bind(freed, 'freed')}({names})"
        same = self.same_as_written(position)
        if same is not None:
            return same
        atom, written = self.trace.outputs[position], self.written
        alias = next((one for one in self.captured.aliases if one.result == position), None)
        if alias is not None and alias.is_written:
            places = [write.target for write in self.captured.writes]
            target = self.targets[next(_indices(places, alias.source))]
            if target not in self.given:
                return self.in_source(alias, target, values[position])
        if not isinstance(atom, Var):
            return values[position]
        if atom in written and not self.captured.writes[written.index(atom)].rebinds:
            target = self.targets[written.index(atom)]
            return f"{target}.detach()" if target in self.given else target
        given = self.inputs[atom.index] if atom.index < len(self.inputs) else None
        if given in self.given:
            return f"{values[position]}.detach()"
        return values[position] if given is None or given not in self.with_bits else given

    def in_source(self, alias: Alias, source: str, value: str) -> str:
        """The expression for a result in the memory of a source: a view where autograd gives that
        the history of the value, else the value with this memory.
        """
        is_active = self.bridge is not None and self.bridge.active[alias.result]
        if is_active and self.is_followed(alias):
            return self.view(alias, source)
        memory = self.view(alias, f"{source}.detach()")
        if not is_active:
            return memory
        return f"{self.names.bind(with_memory, 'with_memory')}({value}, {memory})"

    @property
    def written(self) -> tuple[Atom, ...]:
        """The outputs that are the new values of `targets`."""
        first = self.captured.num_results
        return self.trace.outputs[first : first + len(self.targets)]

    def same_as_written(self, position: int) -> str | None:
        """The tensor from outside that a result is, if the program writes to that."""
        source = self.captured.source_of(position)
        if source is None:
            return None
        places = [write.target for write in self.captured.writes]
        index = next(_indices(places, source), None)
        return None if index is None or self.targets[index] in self.given else self.targets[index]

    def views(self, values: Sequence[str]) -> Iterator[str]:
        """Write lines that take results as views of inputs that nothing writes to, each tensor
        once.
        """
        first: dict[Any, str] = {}
        for alias in self.captured.aliases:
            atom, value = self.trace.outputs[alias.result], values[alias.result]
            source = None if alias.is_written else self.viewed_by(alias, atom)
            if atom in first:  # which alone is an active output
                yield f"    {value} = {first[atom]}"
            elif source is not None:
                yield f"    {value} = {self.in_source(alias, source, value)}"
                first[atom] = value

    def joint(self, joint: Joint, values: Sequence[str]) -> Iterator[str]:
        """Write lines that lay results into one memory, each tensor once. Leave those alone that
        the program computes as views of one value.
        """
        atoms = [self.trace.outputs[place] for place in joint.results]
        if len({viewed(self.trace, atom, is_view_step) for atom in atoms}) == 1:
            return
        places, joint = joint.results, joint.once([atoms.index(atom) for atom in atoms])
        active = (False,) * len(values) if self.bridge is None else self.bridge.active
        roots = [
            viewed(self.trace, self.trace.outputs[place], is_layout) if active[place] else None
            for place in joint.results
        ]
        root = next(filter(None, roots), None) if joint.whole is None else roots[joint.whole]
        followed = tuple(root is not None and one == root for one in roots)
        names = ", ".join(values[place] for place in joint.results)
        yield f"    {names} = {self.at_call(joint)}.of({names}, followed={followed})"
        first = {self.trace.outputs[place]: values[place] for place in joint.results}
        yield from (
            f"    {values[place]} = {first[atom]}"
            for place, atom in zip(places, atoms, strict=True)
            if place not in joint.results
        )

    def at_call(self, known: Alias | Joint) -> str:
        """The expression for an alias or joint whose numbers are those of the call."""
        if not known.is_symbolic:
            return self.names.bind(known, "alias")
        made = self.names.bind(partial(at_call, known, self.trace.inputs), "alias")
        return f"{made}({', '.join(self.inputs)})"

    def view(self, alias: Alias, source: str) -> str:
        """The expression for a result that is a view of the source."""
        return f"{self.at_call(alias)}.of({source})"

    def viewed_by(self, alias: Alias, atom: Atom) -> str | None:
        """The tensor that a result is to be taken of; None if the program's value lies there."""
        place = self.place_of(alias.source)
        if place is None or self.inputs[place] in self.given:
            return None
        name, source = self.inputs[place], self.trace.inputs[place]
        lies_there = viewed(self.trace, atom, is_view_step) == source
        is_plain = name not in self.with_bits and not self.is_by_node(alias.result)
        return None if lies_there and is_plain else name

    def is_by_node(self, result: int) -> bool:
        """Test whether a result has the history of a node of ours, which lets nobody write to a
        view.
        """
        bridge = self.bridge
        return bridge is not None and bridge.active[result] and bridge.followed is None

    def is_followed(self, alias: Alias) -> bool:
        """Test whether a view of its source has the history of a result."""
        if alias.is_apart or alias.is_written:
            return not alias.is_apart
        place = self.place_of(alias.source)
        source = None if place is None else self.trace.inputs[place]
        return viewed(self.trace, self.trace.outputs[alias.result], is_layout) == source

    def place_of(self, source: int | torch.Tensor) -> int | None:
        """The input that an argument, by index, or a tensor from outside is; None if it is none."""
        if isinstance(source, int):
            return source
        first = len(self.leaves) + len(self.feeds)
        own = (first + i for i, one in enumerate(self.constants) if one is source)
        return next(own, None)


def _indices(targets: Sequence[int | torch.Tensor], target: int | torch.Tensor) -> Iterator[int]:
    """The places of a target, which is an int or this very tensor."""
    return (
        i
        for i, one in enumerate(targets)
        if one is target or (isinstance(one, int) and isinstance(target, int) and one == target)
    )
