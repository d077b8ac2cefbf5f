"""The difference of two traces, equation by equation, whatever composites they are folded into.

Both traces are unfolded. Equations that compute the same expression of the same inputs are the same
(value numbering). The rest is paired by its looks: op, arguments and user's line first, then op and
line, then op and operands. So a change near the inputs leaves everything that follows from it
paired, and says which of it has changed itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal as Choice, TypeAlias

from thunder_fn.inspect.flat import Flat, Leaf, Value, flatten, held
from thunder_fn.interpreters.simplify import inline
from thunder_fn.ir import ops
from thunder_fn.ir.notebook import Shown
from thunder_fn.ir.pretty import format_equation
from thunder_fn.ir.text import escaped, program_text
from thunder_fn.ir.trace import Literal, Trace, Type, Var, all_args, check_is_trace, map_args

Status: TypeAlias = Choice["same", "changed", "added"]
Pairs: TypeAlias = Sequence[tuple[int, int]]


@dataclass(frozen=True, repr=False)
class Diff(Shown):
    """Two traces, unfolded and compared.

    `matches` has for each leaf of `after` the position of its partner in `before`, None for a new
    one. `status` says "same", "changed" or "added", and `whys` what has changed. `removed` are the
    leaves of `before` without a partner.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> before = tfn.trace(lambda x: x.sin() * 2, torch.ones(2))
        >>> after = tfn.trace(lambda x: x.sin() * 3, torch.ones(2))
        >>> found = tfn.inspect.diff(before, after)
        >>> found.status, found.whys, found.is_empty
        (('same', 'changed'), ('', 'arguments (2) to (3)'), False)
    """

    before: Flat
    after: Flat
    matches: tuple[int | None, ...]
    status: tuple[Status, ...]
    whys: tuple[str, ...]
    removed: tuple[int, ...]

    @cached_property
    def counts(self) -> dict[str, int]:
        """The numbers of equations that were added, removed, changed, and are the same."""
        found = Counter(self.status)
        return {
            "added": found["added"],
            "removed": len(self.removed),
            "changed": found["changed"],
            "same": found["same"],
        }

    @property
    def is_empty(self) -> bool:
        """Test that nothing differs but the folding of equations."""
        counts = self.counts
        return not (counts["added"] or counts["removed"] or counts["changed"])

    def lines(self, context: int = 2) -> list[tuple[str, str]]:
        """The text of the difference: pairs of a mark (" ", "+", "-", "~" or "@") and a line."""
        return _lines(self, context)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        names = f"{self.before.trace.name} -> {self.after.trace.name}"
        return program_text(
            [f"{names}: {counts}", *(f"{mark} {text}" for mark, text in self.lines())]
        )

    def __rich__(self) -> Any:
        from rich.text import Text

        styles = {"+": "green", "-": "red", "~": "yellow", "@": "dim cyan"}
        lines = str(self).split("\n")
        parts = [Text(lines[0] + "\n", style="bold")]
        parts += [
            Text(escaped(f"{mark} {text}") + "\n", style=styles.get(mark, "dim"))
            for mark, text in self.lines()
        ]
        return Text.assemble(*parts, end="")


def diff(before: Trace, after: Trace, inputs: Pairs | None = None) -> Diff:
    """Compare two traces.

    Laws: ``diff(t, t)`` is empty, also where one of the two is folded otherwise; each leaf of
        either trace is in exactly one of matched, added and removed.

    Args:
        inputs: pairs of values (see `flatten`) of the two that are equal. Left out, inputs and
            constants are paired by position.

    Raises:
        TraceTypeError: one of the two is no trace.

    Example:
        >>> import torch
        >>> from thunder_fn import trace
        >>> x = torch.ones(2)
        >>> print(diff(trace(lambda x: x.sin() * 2, x), trace(lambda x: x.sin() * 3, x)))
        program -> program: 0 added, 0 removed, 1 changed, 1 same
          v1: f32[2] = aten.sin.default(v0)
        ~ v2: f32[2] = aten.mul.Tensor(v1, 3)  (arguments (2) to (3))
    """
    check_is_trace("diff", before)
    check_is_trace("diff", after)
    return diff_flat(flatten(before), flatten(after), inputs)


def diff_flat(before: Flat, after: Flat, inputs: Pairs | None = None) -> Diff:
    """Compare, as `diff` does, traces that are unfolded already."""
    return _Matching(before, after, inputs).diff()


class _Matching:
    def __init__(self, before: Flat, after: Flat, inputs: Pairs | None) -> None:
        self.before, self.after = before, after
        self.partner: list[int | None] = [None] * len(after.leaves)
        self.free = [True] * len(before.leaves)
        self.numbers: dict[Hashable, int] = {}
        pairs = paired(before, after) if inputs is None else inputs
        self.values: dict[int, int] = {theirs: mine for mine, theirs in pairs}
        seeds = {theirs: ("root", mine) for mine, theirs in pairs}
        self.keys = (
            self.numbered(before, {mine: ("root", mine) for mine in range(len(before.types))}),
            self.numbered(after, seeds),
        )

    def number(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def numbered(self, flat: Flat, seeds: dict[int, tuple[str, int]]) -> list[Hashable]:
        """Number the computation of each leaf; numbers are equal in both traces exactly if the
        expressions are equal.
        """
        known: dict[int, int] = {}
        for value in (*flat.roots, *flat.constants):
            known[value] = self.number(seeds.get(value, ("own", id(flat), value)))
        found: list[Hashable] = []
        draws = Counter[Hashable]()
        for leaf in flat.leaves:
            operands = tuple(
                known[one] if isinstance(one, int) else ("literal", one) for one in leaf.operands
            )
            key: Hashable = (_shape(leaf), operands)
            if ops.has_random(leaf.equation) or ops.is_effectful(leaf.equation.op):
                draws[key] += 1
                key = (key, draws[key])
            number = self.number(key)
            known.update(
                (out, self.number((number, place))) for place, out in enumerate(leaf.outputs)
            )
            found.append(number)
        return found

    def diff(self) -> Diff:
        self.pair(*self.keys)
        self.pair(
            *(list(map(_look, flat.leaves)) for flat in (self.before, self.after)), follow=True
        )
        self.pair(
            *(list(map(_place, flat.leaves)) for flat in (self.before, self.after)), follow=True
        )
        self.pair(
            *(list(map(_name, flat.leaves)) for flat in (self.before, self.after)),
            follow=True,
            strict=True,
        )
        status: list[Status] = []
        whys: list[str] = []
        for leaf, match in zip(self.after.leaves, self.partner, strict=True):
            why = None if match is None else self.why(self.before.leaves[match], leaf)
            status.append("added" if why is None else "changed" if why else "same")
            whys.append(why or "")
        removed = tuple(position for position, free in enumerate(self.free) if free)
        return Diff(
            self.before, self.after, tuple(self.partner), tuple(status), tuple(whys), removed
        )

    def pair(
        self,
        mine: Sequence[Hashable],
        its: Sequence[Hashable],
        *,
        follow: bool = False,
        strict: bool = False,
    ) -> None:
        """Pair free leaves with equal keys in order; `follow` prefers the one whose operands are
        paired, `strict` insists.
        """
        queues: defaultdict[Hashable, deque[int]] = defaultdict(deque)
        for position, key in enumerate(mine):
            if self.free[position]:
                queues[key].append(position)
        for position, key in enumerate(its):
            if self.partner[position] is not None or not queues.get(key):
                continue
            queue = queues[key]
            leaf = self.after.leaves[position]
            known = (
                next((one for one in _first(queue, 8) if self.agree(one, leaf)), None)
                if follow
                else None
            )
            if strict and (known is None or not leaf.operands):
                continue
            chosen = queue[0] if known is None else known
            queue.remove(chosen)
            self.join(chosen, position)

    def agree(self, position: int, leaf: Leaf) -> bool:
        return self.before.leaves[position].operands == tuple(map(self.partner_of, leaf.operands))

    def partner_of(self, value: Value) -> Value | None:
        return self.values.get(value) if isinstance(value, int) else value

    def join(self, before: int, after: int) -> None:
        self.partner[after], self.free[before] = before, False
        outputs = zip(
            self.after.leaves[after].outputs, self.before.leaves[before].outputs, strict=False
        )
        self.values.update(outputs)

    def why(self, before: Leaf, after: Leaf) -> str:
        """Describe the differences of partners; nothing if there are none."""
        parts: list[str] = []
        if before.equation.op != after.equation.op:
            parts.append(f"{before.equation.op} to {after.equation.op}")
        if _types(before) != _types(after):
            parts.append(f"{_types_text(before)} to {_types_text(after)}")
        if _shape(before)[1:3] != _shape(after)[1:3]:
            parts.append(f"arguments {_arguments(before)} to {_arguments(after)}")
        if not _equal_bodies(before, after):
            parts.append("its bodies")
        if before.operands != tuple(map(self.partner_of, after.operands)) and not parts:
            parts.append("what it reads")
        return ", ".join(parts)


def paired(before: Flat, after: Flat) -> list[tuple[int, int]]:
    """Inputs by position, and closed-over tensors by identity, which another trace may have as
    inputs.
    """
    pairs = dict(zip(after.roots, before.roots, strict=False))
    known = held(before)
    pairs.update((value, known[key]) for key, value in held(after).items() if key in known)
    return [(mine, theirs) for theirs, mine in pairs.items()]


def _first(queue: Iterable[int], count: int) -> list[int]:
    return [one for one, _ in zip(queue, range(count), strict=False)]


def _shape(leaf: Leaf) -> tuple[Any, ...]:
    """The parts of an equation other than the variables that it reads."""
    args, kwargs = map_args(lambda var: None, leaf.equation)
    return leaf.equation.op, args, kwargs, _types(leaf), leaf.equation.bodies


def _equal_bodies(before: Leaf, after: Leaf) -> bool:
    """Test whether the bodies of a loop or a choice are the same, whatever is folded in them."""
    mine, its = before.equation.bodies, after.equation.bodies
    return mine == its or tuple(map(inline, mine)) == tuple(map(inline, its))


def _types(leaf: Leaf) -> tuple[Type, ...]:
    return leaf.equation.output_types


def _look(leaf: Leaf) -> Hashable:
    return _shape(leaf), leaf.source


def _place(leaf: Leaf) -> Hashable:
    return _name(leaf), leaf.source


def _name(leaf: Leaf) -> str:
    """The op, whichever of its overloads."""
    return leaf.equation.op.name.rpartition(".")[0] or leaf.equation.op.name


def _types_text(leaf: Leaf) -> str:
    return ", ".join(map(str, _types(leaf)))


def _arguments(leaf: Leaf) -> str:
    """The literals of an equation."""
    found: list[str] = []

    def read(arg: Any) -> None:
        if isinstance(arg, Literal):
            found.append(str(arg))
        elif isinstance(arg, tuple):
            for item in arg:
                read(item)

    read(all_args(leaf.equation))
    return f"({', '.join(found)})"


# ---- as text ----


def _lines(found: Diff, context: int) -> list[tuple[str, str]]:
    marks = {"same": " ", "added": "+", "changed": "~"}
    lines: list[tuple[str, str]] = []
    gone = iter(found.removed)
    waiting = next(gone, None)
    for leaf, match, status, why in zip(
        found.after.leaves, found.matches, found.status, found.whys, strict=True
    ):
        while match is not None and waiting is not None and waiting < match:
            lines.append(("-", leaf_text(found.before.leaves[waiting])))
            waiting = next(gone, None)
        lines.append((marks[status], leaf_text(leaf) + (f"  ({why})" if why else "")))
    while waiting is not None:
        lines.append(("-", leaf_text(found.before.leaves[waiting])))
        waiting = next(gone, None)
    return _shortened(lines, context)


def _shortened(lines: list[tuple[str, str]], context: int) -> list[tuple[str, str]]:
    """Long runs of equal lines, left out."""
    kept = [False] * len(lines)
    for position, (mark, _) in enumerate(lines):
        if mark != " ":
            start = max(0, position - context)
            stop = min(len(lines), position + context + 1)
            kept[start:stop] = [True] * (stop - start)
    found: list[tuple[str, str]] = []
    skipped = 0
    for line, keep in zip(lines, kept, strict=True):
        if keep and skipped:
            found.append(("@", f"{skipped} the same"))
        skipped = 0 if keep else skipped + 1
        if keep:
            found.append(line)
    return [*found, ("@", f"{skipped} the same")] if skipped else found


def leaf_text(leaf: Leaf) -> str:
    """An equation in the values of its flat trace: `v7: f32[3] = aten.sin.default(v6)`."""
    operands = iter(leaf.operands)
    types = iter(leaf.equation.operands)

    def read(_: Var) -> Var | Literal:
        value, var = next(operands), next(types)
        return Var(value, var.type) if isinstance(value, int) else value

    pairs = zip(leaf.outputs, leaf.equation.output_types, strict=True)
    outputs = tuple(Var(value, type) for value, type in pairs)
    return format_equation(replace(leaf.equation.reading(read), outputs=outputs))
