"""The trace of a rank of a pipeline, part by part: equal parts are lowered and timed once.

A rank runs its stages' forwards and backwards on each micro-batch. These are composites of its
trace, and equal stages have equal ones. The program that `jit` makes of the trace is flat, and as
long as stages times micro-batches. Here each part is a program of its own.

A flat program computes equal things once: what a part computes from parameters alone, such as a
gather of shards, is computed in its first call and kept for later ones. So are parts here
(`shared`). And it sends gradients while it computes the next micro-batch. So parts are cut where
they send reductions whose results they only hand on (`Parts.opened`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

from thunder_fn.distributed.ranks import REDUCE, SCATTER, WAIT
from thunder_fn.distributed.schedule import awaited_late, is_light
from thunder_fn.executors.claims import claim
from thunder_fn.executors.regions import grouped
from thunder_fn.executors.reuse import plan_reuse
from thunder_fn.executors.torch_executor import lower
from thunder_fn.inspect.costs import FREE, cost_of
from thunder_fn.inspect.memory_use import Memory
from thunder_fn.inspect.storages import Buffer, Run, live_of, scratch_at, sent_until
from thunder_fn.interpreters.checkpoint.cost import bytes_of
from thunder_fn.interpreters.simplify import dce, makes_symbols
from thunder_fn.ir import ops
from thunder_fn.ir.equations import bound, last_uses, made_at, operands_in
from thunder_fn.ir.trace import (
    Atom,
    Equation,
    Trace,
    TraceBuilder,
    Var,
    cut,
    map_arg,
    map_args,
    num_vars,
)
from thunder_fn.ir.walking import inline_into, put, rewritten, unfolded

Mask = tuple[bool, ...]


def has_messages(trace: Trace) -> bool:
    """Test whether ranks of a pipeline send each other something in a trace."""
    messages = (ops.SEND, ops.SENT, ops.RECEIVE)
    return any(one.op in messages or any(map(has_messages, one.bodies)) for one in trace.equations)


def in_parts(trace: Trace) -> Trace:
    """The trace, unfolded down to composites in which no message is sent."""
    is_open: Callable[[Equation], bool] = lambda one: (
        one.op.kind == "composite" and has_messages(one.body)
    )
    while any(map(is_open, trace.equations)):
        trace = unfolded(trace, is_open)
    return trace


# ---- what calls of a part have in common ----


@dataclass
class Parts:
    """The programs of parts, of all ranks: each is made once for equal bodies."""

    flat: dict[Trace, Trace] = field(default_factory=dict[Trace, Trace])
    split: dict[tuple[Trace, Mask], _Shared] = field(
        default_factory=dict[tuple[Trace, Mask], "_Shared"]
    )
    pieces: dict[Trace, Trace] = field(default_factory=dict[Trace, Trace])
    runs: dict[tuple[Trace, tuple[int, ...]], Run] = field(
        default_factory=dict[tuple[Trace, tuple[int, ...]], Run]
    )

    def shared(self, trace: Trace) -> Trace:
        """The trace with what the calls of a part compute alike in the first of them alone, and
        with collectives whose results parts only hand on beside them.

        Law: same values.
        """
        names, fresh = dict[int, Var](), num_vars(trace)
        equations = list(trace.equations)
        bodies = defaultdict[Trace, list[int]](list)
        for at, one in enumerate(equations):
            if one.op.kind == "composite":
                bodies[one.body].append(at)
        for places in (group for calls in bodies.values() for group in _alike(trace, calls, names)):
            operands = [[_named(names, var) for var in equations[at].operands] for at in places]
            same = tuple(len(set(column)) == 1 for column in zip(*operands, strict=True))
            found = self.split_at(equations[places[0]].body, same, alone=len(places) == 1)
            first = equations[places[0]]
            kept = tuple(Var(fresh + at, var.type) for at, var in enumerate(found.kept))
            fresh += len(kept)
            outputs = (*first.outputs, *kept)
            equations[places[0]] = _call(first, found.first, tuple(operands[0]), outputs)
            for at, given in zip(places[1:], operands[1:], strict=True):
                late, known = list[Var](), equations[at].outputs
                for var, before, is_late in zip(known, first.outputs, found.late, strict=True):
                    late += [var] if is_late else []
                    names |= {} if is_late else {var.index: before}
                equations[at] = _call(equations[at], found.later, (*given, *kept), tuple(late))
        read: Callable[[Var], Var] = lambda var: _named(names, var)
        new = list[Equation]()
        for one in equations:
            args, kwargs = map_args(read, one)
            new.append(Equation(one.op, args, kwargs, one.outputs, one.bodies, one.source))
        return self.opened(cut(trace, equations=new, outputs=map_arg(read, trace.outputs)))

    def opened(self, trace: Trace) -> Trace:
        """The trace with parts cut where they send what they only hand on, each awaited late."""

        def step(
            builder: TraceBuilder, one: Equation, operands: tuple[Atom, ...]
        ) -> tuple[Atom, ...]:
            if one.op.kind != "composite":
                return put(builder, one, operands)
            if one.body not in self.pieces:
                self.pieces[one.body] = _pieces(one.body)
            pieces = self.pieces[one.body]
            if pieces is one.body:
                return put(builder, one, operands)
            return inline_into(builder, pieces, operands, one.source)

        return awaited_late(rewritten(trace, step))[0]

    def split_at(self, body: Trace, same: Mask, *, alone: bool) -> _Shared:
        """A part whose calls have these operands in common."""
        if body not in self.flat:
            self.flat[body] = claim(dce(body), below_autograd=True).trace
        same = (False,) * len(same) if alone else same
        key = body, same
        if key not in self.split:
            self.split[key] = _shared(self.flat[body], same)
        return self.split[key]

    def lowered(self, trace: Trace) -> Trace:
        """The trace with its parts as they run."""
        runs = {body: run.trace for (body, _), run in self.runs.items()}
        new = list[Equation]()
        for one in trace.equations:
            is_part = one.op.kind == "composite"
            new.append(replace(one, bodies=(runs[one.body],)) if is_part else one)
        return cut(trace, equations=new)

    def run(self, body: Trace, given: tuple[int, ...] = ()) -> Run:
        """A part on tensors without values, which may write to the memory of some operands."""
        key = body, given
        if key not in self.runs:
            program = lower(body, given, below_autograd=True)
            self.runs[key] = Run(program.trace, 0, 0, (), _modules(program.trace), program)
        return self.runs[key]


@dataclass(frozen=True)
class _Shared:
    """A part as its first call runs it, and as later ones do.

    Attributes:
        first: the part; then what later calls read.
        kept: the variables of these values.
        later: the part's inputs, then these values -> the late results.
        late: the results that differ between calls.
    """

    first: Trace
    kept: tuple[Var, ...]
    later: Trace
    late: Mask


def _shared(body: Trace, same: Mask) -> _Shared:
    known = {var.index for var, flag in zip(body.inputs, same, strict=True) if flag}
    given = {var.index for var in body.inputs}
    known |= {constant.var.index for constant in body.constants}
    given |= {constant.var.index for constant in body.constants}
    rest = list[Equation]()
    for one in body.equations:
        is_same = one.op.kind == "leaf" and not ops.has_side_effect(one) and not makes_symbols(one)
        if any(same) and is_same and all(var.index in known for var in one.operands):
            known.update(var.index for var in one.outputs)
        else:
            rest.append(one)
    apart = {id(one) for one in rest}
    if all(cost_of(one) == FREE for one in body.equations if id(one) not in apart):
        return _Shared(body, (), body, (True,) * len(body.outputs))
    read = {var.index for var in operands_in(rest)}
    kept = tuple(
        var
        for var in bound(body.equations)
        if var.index in known and var.index in read and var.index not in given
    )
    late = tuple(isinstance(atom, Var) and atom.index not in known for atom in body.outputs)
    outputs = [atom for atom, flag in zip(body.outputs, late, strict=True) if flag]
    first = cut(body, outputs=(*body.outputs, *kept)) if kept else body
    later = cut(body, inputs=(*body.inputs, *kept), equations=rest, outputs=outputs)
    return _Shared(first, kept, later, late)


def _pieces(body: Trace) -> Trace:
    """A part as pieces around reductions that it hands on: with what moves their results, they
    stand beside the pieces.
    """
    is_late: Callable[[Equation], bool] = lambda one: one.op.name == WAIT or is_light(one)
    read = {var.index for one in body.equations if not is_late(one) for var in one.operands}
    for one in reversed(body.equations):
        if is_late(one) and any(var.index in read for var in one.outputs):
            read.update(var.index for var in one.operands)
    makers, apart = made_at(body.equations), set[int]()
    for at, one in enumerate(body.equations):
        needs = {makers[var.index] for var in one.operands if var.index in makers}
        if not is_late(one) or any(var.index in read for var in one.outputs):
            continue
        sent = {need for need in needs if body.equations[need].op.name in (REDUCE, SCATTER)}
        if needs & apart or (one.op.name == WAIT and sent):
            apart |= {at, *sent}
    if not apart:
        return body
    groups = list[tuple[int, ...]]()
    for is_apart, places in groupby(range(len(body.equations)), apart.__contains__):
        groups += [] if is_apart else [tuple(places)]
    return grouped(body, groups, body.name)[0]


def _alike(trace: Trace, calls: list[int], names: dict[int, Var]) -> list[list[int]]:
    """Group the calls of a part by the operands that not every call has for itself: those of one
    stage read the same parameters.
    """
    rows = [[_named(names, var) for var in trace.equations[at].operands] for at in calls]
    common = [len(set(column)) < len(calls) for column in zip(*rows, strict=True)]
    groups = defaultdict[tuple[Var, ...], list[int]](list)
    for at, row in zip(calls, rows, strict=True):
        groups[tuple(var for var, flag in zip(row, common, strict=True) if flag)].append(at)
    return list(groups.values())


def _call(
    one: Equation, body: Trace, operands: tuple[Atom, ...], outputs: tuple[Var, ...]
) -> Equation:
    return Equation(one.op, operands, (), outputs, (body,), one.source)


def _modules(trace: Trace) -> list[str]:
    return [one.source.module if one.source else "" for one in trace.equations]


def _named(names: dict[int, Var], var: Var) -> Var:
    return names.get(var.index, var)


# ---- memory ----


def memory_in_parts(trace: Trace, parts: Parts, name: str) -> Memory:
    """The memory of a rank's trace. While a part runs, that is the part's own peak; the part with
    the highest is shown equation by equation. Inputs are those of all ranks.
    """
    rank = _Rank(trace, parts)
    for at in range(len(trace.equations)):
        rank.step(at)
    return rank.memory(name)


@dataclass
class _Rank:
    """The memory of a trace while its equations run.

    `storage` says of each variable which buffer it lies in. `inside` are the parts by their places.
    `dying` are for each part the buffers that it reads last, and the equation in it that does;
    `births` are for buffers that a part makes the equation in it that does.
    """

    trace: Trace
    parts: Parts
    storage: dict[int, int] = field(default_factory=dict[int, int])
    buffers: list[Buffer] = field(default_factory=list[Buffer])
    inside: dict[int, Run] = field(default_factory=dict[int, Run])
    dying: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]])
    births: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        region_of: Callable[[Equation], Trace | None] = lambda one: (
            one.bodies[0] if one.bodies else None
        )
        self.reuse, self.last = plan_reuse(self.trace, region_of=region_of), last_uses(self.trace)
        for var in (*self.trace.inputs, *(one.var for one in self.trace.constants)):
            self.make(var, 0, "input", "argument", None)

    def make(self, var: Var, at: int, kind: str, what: str, one: Equation | None) -> None:
        """Make a buffer for a variable."""
        source = one.source if one is not None else None
        module = source.module if source is not None else ""
        device = str(getattr(getattr(var.type, "device", None), "type", "cpu"))
        self.storage[var.index] = len(self.buffers)
        self.buffers.append(
            Buffer(at, at, bytes_of(var.type), kind, what, module, source, 0, var.index, device)
        )

    def step(self, at: int) -> None:
        """Run one equation."""
        one = self.trace.equations[at]
        if one.op.kind == "composite":
            self.call(at, one)
        elif one.operands and (
            ops.is_view(one.op)
            or one.op.name == WAIT
            or one.op == ops.CONTIGUOUS
            or at in self.reuse.in_place
        ):
            self.storage |= {var.index: self.storage[one.operands[0].index] for var in one.outputs}
        else:
            for var in one.outputs:
                self.make(var, at, "intermediate", one.op.name, one)

    def call(self, at: int, one: Equation) -> None:
        """Run a part."""
        run = self.parts.run(one.body, self.reuse.given.get(at, ()))
        places = {
            run.storage[var.index]: place
            for place, var in enumerate(run.trace.inputs)
            if var.index in run.storage
        }
        made = dict[int, int]()
        for var, atom in zip(one.outputs, run.trace.outputs, strict=True):
            own = run.storage.get(atom.index) if isinstance(atom, Var) else None
            if own in places:
                self.storage[var.index] = self.storage[one.operands[places[own]].index]
            elif own in made:
                self.storage[var.index] = made[own]
            else:
                inner = run.made[own] if own is not None else None
                self.make(var, at, "intermediate", inner.what if inner else one.op.name, one)
                if own is not None and inner is not None:
                    made[own] = self.storage[var.index]
                    self.births[made[own]] = inner.born
                    known = self.buffers[-1]
                    self.buffers[-1] = replace(
                        known, num_bytes=inner.num_bytes, module=inner.module, source=inner.source
                    )
        self.inside[at] = run

    def memory(self, name: str) -> Memory:
        """All of it, with the part of the highest peak in full."""
        self.free()
        count = len(self.trace.equations)
        names = [one.op.name for one in self.trace.equations]
        modules, equations = _modules(self.trace), self.trace.equations
        for at, run in self.inside.items():
            self.dying[at] = self.own_of(at, run)
        scratch = [
            scratch_at(at, self.peak_of(at) - self.counted(at), equations[at], modules[at], 0)
            for at in self.inside
        ]
        coarse = Memory(name, (*self.buffers, *scratch), tuple(names), tuple(modules))
        at = coarse.peak_at
        if not count or at not in self.inside:
            return coarse
        return self.opened(coarse, at)

    def free(self) -> None:
        """Free each buffer after the last use of any variable in it."""
        end, sent = len(self.trace.equations), sent_until(self.trace)
        for index, place in self.storage.items():
            known = self.buffers[place]
            last = max(self.last[index], sent.get(index, 0))
            kind = "output" if last == end and known.kind == "intermediate" else known.kind
            self.buffers[place] = replace(known, dies=max(known.dies, last), kind=kind)

    def own_of(self, at: int, run: Run) -> dict[int, int]:
        """The buffers that die in a part, and the equation in it that reads each last."""
        found = dict[int, int]()
        one = self.trace.equations[at]
        for var, inner in zip(one.operands, run.trace.inputs, strict=True):
            place = self.storage.get(var.index)
            if place is None or inner.index not in run.storage:
                continue
            known = self.buffers[place]
            if known.dies == at and known.born < at and known.kind != "input":
                last = run.made[run.storage[inner.index]].dies
                found[place] = max(found.get(place, 0), last)
        return found

    def counted(self, at: int) -> int:
        """The bytes that are counted as alive at a part anyway: its results, and what dies in it.

        Its peak may be less, so that the rest is negative.
        """
        new = {place for place in self.results_of(at) if self.buffers[place].born == at}
        return sum(self.buffers[place].num_bytes for place in {*new, *self.dying[at]})

    def results_of(self, at: int) -> set[int]:
        """The buffers that the results of an equation lie in."""
        results = self.trace.equations[at].outputs
        return {self.storage[var.index] for var in results if var.index in self.storage}

    def peak_of(self, at: int) -> int:
        """The most bytes that live in a part, of its own buffers and those that die in it."""
        count = len(self.inside[at].trace.equations)
        return max(live_of(self.of_part(at), count), default=0)

    def of_part(self, at: int) -> Iterator[Buffer]:
        """The buffers that live in a part alone or die in it, by its equations; its results too."""
        yield from (one for one in self.inside[at].buffers if one.kind != "input")
        for place, last in self.dying[at].items():
            yield replace(self.buffers[place], born=0, dies=last)

    def opened(self, coarse: Memory, at: int) -> Memory:
        """The memory with the equations of a part in its place."""
        run = self.inside[at]
        more = len(run.trace.equations) - 1
        results = self.results_of(at)
        own = {
            id(self.buffers[place])
            for place in {*results, *self.dying[at]}
            if place in self.dying[at] or self.buffers[place].born == at
        }
        later = lambda place: place + more if place > at else place
        moved = [
            replace(one, born=later(one.born), dies=one.dies + more if one.dies >= at else one.dies)
            for one in coarse.buffers
            if id(one) not in own and not (one.kind == "scratch" and one.born == at)
        ]
        inner = [
            replace(one, born=one.born + at, dies=one.dies + at)
            for one in run.buffers
            if one.kind not in ("input", "output")
        ]
        for place in results:
            known = self.buffers[place]
            if known.born == at:
                born = at + self.births.get(place, 0)
                inner.append(replace(known, born=born, dies=known.dies + more))
        inner += [
            replace(self.buffers[place], dies=at + last) for place, last in self.dying[at].items()
        ]
        names = (
            *coarse.names[:at],
            *(one.op.name for one in run.trace.equations),
            *coarse.names[at + 1 :],
        )
        modules = (*coarse.modules[:at], *run.modules, *coarse.modules[at + 1 :])
        return replace(coarse, buffers=(*moved, *inner), names=names, modules=modules)
