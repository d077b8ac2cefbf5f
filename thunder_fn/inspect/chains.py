"""The chain of traces from capture through every transform to the programs that run.

Nothing is rebuilt for show: the chain has the traces of a `jit` call, told by `capture.watching` as
they are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal as Choice, TypeAlias

import torch

from thunder_fn.capture import pytree
from thunder_fn.capture.apply import close_over, without_values
from thunder_fn.capture.watching import watched_by
from thunder_fn.derived.leaf_vjp import Split
from thunder_fn.errors import PortableError, callable_name, spelled
from thunder_fn.executors import Decision, Program
from thunder_fn.inspect.diffs import Diff, diff_flat, paired
from thunder_fn.inspect.flat import Flat, Value, flatten
from thunder_fn.ir.notebook import Shown
from thunder_fn.ir.trace import Trace
from thunder_fn.jitted import Jitted, jit
from thunder_fn.jitted.call import Call, call_key, read_call
from thunder_fn.jitted.claim_report import decisions_of, left_out
from thunder_fn.jitted.dynamic import build_for
from thunder_fn.jitted.modules.module import as_function
from thunder_fn.jitted.program import Entry
from thunder_fn.portable import PortableFunction
from thunder_fn.portable.functions import portable_function

Kind: TypeAlias = Choice["capture", "transform", "split", "program"]


@dataclass(frozen=True)
class Step:
    """One trace of a chain.

    Attributes:
        name: "capture loss", "grad_loss", "forward", ...
        seconds: what it took to make, since the step that was made before it.
        before: the position of the step that it is compared with; None for one that starts from
            nothing.
        inputs: pairs of values (see `flatten`) of that step and of this one that are equal; None
            for those of the same position.
        program: what runs, if the step is one.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> step = tfn.inspect.chain(torch.sin, torch.ones(2)).steps[0]
        >>> step.name, step.kind, step.seconds > 0
        ('capture sin', 'capture', True)
    """

    name: str
    kind: Kind
    trace: Trace
    seconds: float
    before: int | None = None
    inputs: tuple[tuple[int, int], ...] | None = None
    program: Program | None = None

    @cached_property
    def flat(self) -> Flat:
        """The trace, unfolded."""
        return flatten(self.trace)


@dataclass(frozen=True)
class Chain(Shown):
    """The traces and programs that `jit` makes of a call, in order. `str` of it is a table.

    Attributes:
        name: of the function.
        steps: the traces.
        arguments: how one writes the call's tensors, `args[0]['w']`, in the order of the inputs of
            `trace`.
        trace: what was captured of the whole function, after all transforms.
        split: forward and backward, where an argument requires a gradient.
        decisions: which executor takes what and why others do not, as `explain_claims` has them.
        left_out: executors that were not asked, and why.
        jitted: the function with the one program of the call in its cache.
        portable: the function as data, or the reason why it cannot be.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> found = tfn.inspect.chain(tfn.grad(lambda x: x.sin().sum()), torch.ones(2))
        >>> [step.name for step in found.steps], found.arguments
        (['capture program', 'grad_<lambda>', 'program'], ('args[0]',))
    """

    name: str
    steps: tuple[Step, ...]
    arguments: tuple[str, ...]
    trace: Trace
    split: Split | None = None
    decisions: tuple[Decision, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    jitted: Jitted | None = field(default=None, repr=False, compare=False)
    portable: PortableFunction | PortableError | None = field(
        default=None, repr=False, compare=False
    )

    def __repr__(self) -> str:
        counts = " -> ".join(str(len(step.flat.leaves)) for step in self.steps)
        return f"<chain of {self.name}: {counts} equations>"

    def diff(self, position: int) -> Diff | None:
        """The changes of a step; None for one that starts from nothing."""
        return self._diffs[position]

    @cached_property
    def _diffs(self) -> tuple[Diff | None, ...]:
        return tuple(
            (
                None
                if step.before is None
                else diff_flat(self.steps[step.before].flat, step.flat, step.inputs)
            )
            for step in self.steps
        )

    def modules(self, position: int) -> tuple[str, ...]:
        """The module of each of a step's leaves."""
        return tuple(leaf.module for leaf in self.steps[position].flat.leaves)

    @cached_property
    def saved(self) -> tuple[tuple[int, int], ...]:
        """The values that the forward keeps for the backward: pairs of the value in the one and in
        the other (see `flatten`).
        """
        if self.split is None:
            return ()
        forward, backward = (flatten(half) for half in (self.split.forward, self.split.backward))
        values = self.split.residual_values(forward.roots, forward.outputs)
        return tuple(
            (value, root)
            for value, root in zip(values, backward.roots, strict=False)
            if isinstance(value, int)
        )

    @property
    def programs(self) -> tuple[Step, ...]:
        """The steps that run: one, or forward and backward."""
        return tuple(step for step in self.steps if step.program is not None)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The table: name, equations (unfolded), added, removed, changed, milliseconds."""
        for step, found in zip(self.steps, self._diffs, strict=True):
            counts = (
                ("", "", "")
                if found is None
                else tuple(f"{found.counts[k] or ''}" for k in _COUNTS)
            )
            yield step.name, str(len(step.flat.leaves)), *counts, f"{step.seconds * 1e3:.1f}"

    def __str__(self) -> str:
        from thunder_fn.inspect.tables import plain

        return plain(self._header, self.rows())

    def __rich__(self) -> Any:
        from thunder_fn.inspect.tables import rich_table

        return rich_table(self._header, self.rows(), title=self.name)

    @property
    def _header(self) -> tuple[str, ...]:
        return ("step", "equations", *_COUNTS, "ms")


_COUNTS = ("added", "removed", "changed")


@spelled()
def chain(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Chain:
    """The traces of `jit(f)(*args, **kwargs)`, from capture through every transform to the
    programs. Nothing is run.

    If an argument requires a gradient, the forward and the backward of the split are steps, and
    both programs.

    Law: the last step is the program that the call runs.

    Args:
        f: any PyTorch callable: a function, a module, a jitted or transformed function. `jit`'s
            options are its own.
        args, kwargs: as of the call, or `TensorType`s in the place of tensors.

    Raises:
        CaptureError: f cannot be traced; other errors are those of `jit`.

    Example:
        >>> from thunder_fn import grad
        >>> steps = chain(grad(lambda x: x.sin().sum()), torch.ones(3)).steps
        >>> [(step.name, len(step.flat.leaves)) for step in steps]
        [('capture program', 2), ('grad_<lambda>', 6), ('program', 4)]
    """
    events = [_Event("start", None, None, time.perf_counter())]
    with watched_by(
        lambda how, trace, of: events.append(_Event(how, trace, of, time.perf_counter()))
    ):
        found = _built(f, args, kwargs)
    halves, options = _lowered(found.entry), found.jitted.options
    executors = options.executors_of(halves[0])
    decisions = tuple(one for trace in halves for one in decisions_of(trace, executors))
    whole = _Assembly(events, found.entry).chain(found.name, found.arguments)
    return replace(
        whole,
        decisions=decisions,
        left_out=left_out(options, halves),
        jitted=found.jitted,
        portable=found.portable,
    )


def chain_of_programs(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Chain:
    """The programs of `jit(f)(*args, **kwargs)` alone: `chain` without the steps before them, in
    half of the time.
    """
    found = _built(f, args, kwargs)
    bridge, ran = found.entry.bridge, programs_of(found.entry)
    steps = tuple(Step("program", "program", one.trace, 0.0, program=one) for one in ran)
    trace = [stage for stage in found.entry.stages if isinstance(stage, Trace)][-1]
    split = bridge.split if bridge is not None else None
    return Chain(
        found.name,
        steps,
        found.arguments,
        trace,
        split,
        jitted=found.jitted,
        portable=found.portable,
    )


@dataclass(frozen=True, slots=True)
class _Built:
    """The one entry of the cache of a function that was jitted for one call."""

    name: str
    jitted: Jitted
    entry: Entry
    arguments: tuple[str, ...]
    portable: PortableFunction | PortableError


def _built(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Built:
    jitted = f if isinstance(f, Jitted) else jit(f)
    if isinstance(jitted, torch.nn.Module):
        jitted, kwargs = as_function(jitted, kwargs)
    args, kwargs = without_values((args, kwargs))
    call = read_call(jitted.options, args, kwargs)
    built = Jitted(jitted.fn, jitted.options)
    entry = build_for(jitted.fn, jitted.options, built.programs, call, call_key(call), ())
    programs_of(entry)
    paths = (*pytree.paths(call.args, "args"), *pytree.paths(call.kwargs, "kwargs"))
    known = {id(tensor): name for name, tensor in _tensors_of(f)}
    arguments = tuple(known.get(id(tensor), paths[position]) for position, tensor in call.tensors)
    return _Built(callable_name(f), built, entry, arguments, _portable(entry, call))


def programs_of(entry: Entry) -> tuple[Program, ...]:
    """The program of an entry, or those of its two halves. Where autograd follows the program
    itself, ours tell what it computes and keeps.
    """
    if entry.bridge is not None:
        return entry.bridge.forward, entry.bridge.backward
    program = entry.stages[-1]
    assert isinstance(program, Program), "the last stage"
    return (program,)


def _portable(entry: Entry, call: Call) -> PortableFunction | PortableError:
    """The function as data, made now, so that nothing keeps the arguments of the call."""
    try:
        return portable_function(entry, call)
    except PortableError as error:
        return error.with_traceback(None)


def _lowered(entry: Entry) -> tuple[Trace, ...]:
    """The lowered traces: the whole function, or its forward and its backward."""
    if entry.bridge is not None:
        return entry.bridge.split.forward, entry.bridge.split.backward
    return tuple(stage for stage in entry.stages if isinstance(stage, Trace))[-1:]


def _tensors_of(f: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's parameters and buffers by name; a jitted module passes them as further
    arguments.
    """
    if isinstance(f, torch.nn.Module):
        yield from f.named_parameters()
        yield from f.named_buffers()


@dataclass(frozen=True, slots=True)
class _Event:
    how: str
    trace: Trace | None
    of: Trace | None
    at: float


class _Assembly:
    """The assembly of the steps in order, which knows the step that each trace became."""

    def __init__(self, events: list[_Event], entry: Entry) -> None:
        self.events, self.entry = events, entry
        self.steps: list[Step] = []
        self.places: dict[int, int] = {}
        self.made: dict[int, _Event] = {id(event.trace): event for event in events}
        self.clock = events[0].at

    def chain(self, name: str, arguments: tuple[str, ...]) -> Chain:
        traces = [stage for stage in self.entry.stages if isinstance(stage, Trace)]
        transforms = {id(trace) for trace in traces[1:]}
        for event in self.events:
            if (
                event.trace is not None
                and event.of is not None
                and event.how not in ("split", "program")
            ):
                if id(event.trace) in transforms and id(event.of) == id(traces[0]):
                    self.captured(traces[0])
                self.captured(event.of)
                self.transformed(event)
        self.captured(traces[0])
        self.lowered(traces[-1])
        split = self.entry.bridge.split if self.entry.bridge else None
        return Chain(name, tuple(self.steps), arguments, traces[-1], split)

    def add(self, name: str, kind: Kind, trace: Trace, at: float, **more: Any) -> int:
        self.steps.append(Step(name, kind, trace, max(0.0, at - self.clock), **more))
        self.clock = max(self.clock, at)
        self.places.setdefault(id(trace), len(self.steps) - 1)
        return len(self.steps) - 1

    def captured(self, trace: Trace) -> None:
        """Add a capture as a step, unless it only calls the result of the step before."""
        if id(trace) in self.places:
            return
        flat, at = flatten(trace), self.time_of(trace)
        found, pairs = self.origin(flat)
        if found is None:
            self.add(f"capture {trace.name}", "capture", trace, at)
            return
        known = self.steps[found].flat
        is_wrapper = all(mine == theirs for mine, theirs in pairs) and len(flat.leaves) == len(
            known.leaves
        )
        if (
            is_wrapper
            and len(flat.roots) == len(known.roots)
            and diff_flat(known, flat, pairs).is_empty
        ):
            self.places[id(trace)] = found
            return
        self.add(f"capture {trace.name}", "capture", trace, at, before=found, inputs=pairs)

    def origin(self, flat: Flat) -> tuple[int | None, tuple[tuple[int, int], ...]]:
        """The latest step whose trace is called in this one, and which of their values are equal.

        A trace that was replayed op by op has no call; then a transform's of the same inputs is the
        replayed one.
        """
        for position in reversed(range(len(self.steps))):
            known = self.steps[position]
            operands = flat.calls.get(close_over(known.trace)[0])
            if operands is not None:
                return position, _pairs(known.flat, operands)
        last = len(self.steps) - 1
        if (
            last < 0
            or self.steps[last].kind != "transform"
            or self.steps[last].trace.input_types != flat.trace.input_types
        ):
            return None, ()
        return last, tuple(paired(self.steps[last].flat, flat))

    def transformed(self, event: _Event) -> None:
        assert event.trace is not None, "only the start has no trace"
        if id(event.trace) not in self.places:
            self.add(
                event.how, "transform", event.trace, event.at, before=self.places[id(event.of)]
            )

    def lowered(self, trace: Trace) -> None:
        """Add the programs, and the two halves that they are made of where there is a gradient
        to ask for.
        """
        last, bridge = self.places[id(trace)], self.entry.bridge
        program, *others = programs_of(self.entry)
        inputs = _closed(trace)
        if bridge is None:
            self.add(
                "program",
                "program",
                program.trace,
                self.at(program),
                before=last,
                inputs=inputs,
                program=program,
            )
            return
        split = bridge.split
        forward = self.add(
            "forward",
            "split",
            split.forward,
            self.time_of(split.forward),
            before=last,
            inputs=inputs,
        )
        self.add(
            "forward program",
            "program",
            program.trace,
            self.at(program),
            before=forward,
            program=program,
        )
        backward = self.add("backward", "split", split.backward, self.clock)
        (ran,) = others
        self.add(
            "backward program", "program", ran.trace, self.at(ran), before=backward, program=ran
        )

    def at(self, program: Program) -> float:
        return self.time_of(program.trace)

    def time_of(self, trace: Trace) -> float:
        return self.made[id(trace)].at if id(trace) in self.made else self.clock


def _pairs(known: Flat, operands: tuple[Value, ...]) -> tuple[tuple[int, int], ...]:
    pairs = zip(known.roots, operands, strict=False)
    return tuple((mine, theirs) for mine, theirs in pairs if isinstance(theirs, int))


def _closed(trace: Trace) -> tuple[tuple[int, int], ...]:
    """Match the inputs of a trace that was closed over (`jit.program.close_over`) to values of
    the trace.
    """
    count = len(trace.inputs)
    places = range(count, count + len(trace.constants))
    moved = [
        place for place, constant in zip(places, trace.constants, strict=True) if not constant.owned
    ]
    kept = [
        place for place, constant in zip(places, trace.constants, strict=True) if constant.owned
    ]
    return tuple((mine, theirs) for theirs, mine in enumerate((*range(count), *moved, *kept)))
