"""A backward in pieces, one for each node of autograd's graph.

Eager code has a node for each op. `backward` of one result frees nothing that another one alone
needs. One can ask for the gradient of a result by another, or for its `grad`. Here a piece is all
of the backward that depends on the same cotangents:

    y = f(x); z = g(y)      {y, z}: f's backward, from y's cotangent
                            {z}: g's backward, which adds to y's cotangent
    y = f(x); z = g(x)      {y}: f's backward    {z}: g's backward
                            autograd adds up the gradients of x

A value that goes from one piece to another is an edge. If a piece's backward begins with sums of
other pieces' values, autograd adds these up, with the caller's cotangents. With one cotangent there
is one piece, the whole backward.

A composite is cut only if it is a module that occurs once, because equal layers share one body and
one derivation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal as Choice

from thunder_fn.interpreters.simplify import makes_symbols
from thunder_fn.ir import ops
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import Mask, Split
from thunder_fn.ir.trace import Atom, Equation, TensorType, Trace, Var, cut, num_vars

_ADD = ops.leaf(ops.aten.add.Tensor)


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of a value: an edge, or the gradient of the wanted input of this number."""

    kind: Choice["edge", "gradient"]
    index: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a backward. `trace` takes residuals and edges, by number, and gives one value
    for each of the targets.
    """

    trace: Trace
    residuals: tuple[int, ...]
    takes: tuple[int, ...]
    gives: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The types of the edges, of which the cotangents are the first, and the pieces in an order
    in which they can run.
    """

    edges: tuple[TensorType, ...]
    pieces: tuple[Piece, ...]


def pieces_of(split: Split, *, whole: bool = False) -> Pieces:
    """The backward of a split in pieces; `whole`, in one.

    Law: run one after the other, the pieces give the gradients of the backward; values given to one
        edge or gradient are added up.
    """
    cutting = _Cutting(split)
    if whole or len(cutting.cotangents) < 2 or any(map(makes_symbols, split.backward.equations)):
        return cutting.whole()
    return cutting.pieces()


@memo(16384, derives=False)
def depends(trace: Trace, flags: Mask) -> Mask:
    """Tell which outputs of a trace are computed from the marked inputs."""
    marked = [False] * num_vars(trace)
    for var, flag in zip(trace.inputs, flags, strict=True):
        marked[var.index] = flag
    for equation in trace.equations:
        operands = tuple(marked[var.index] for var in equation.operands)
        if any(operands):
            is_composite = equation.op.kind == "composite"
            results = (
                depends(equation.body, operands)
                if is_composite
                else (True,) * len(equation.outputs)
            )
            for var, flag in zip(equation.outputs, results, strict=True):
                marked[var.index] = flag
    return tuple(isinstance(atom, Var) and marked[atom.index] for atom in trace.outputs)


class _Cutting:
    """The part of a backward to which each variable belongs. A part is the set of cotangents that
    it depends on, as bits.
    """

    def __init__(self, split: Split) -> None:
        self.trace, self.count = split.backward, len(split.residuals)
        self.cotangents = self.trace.inputs[self.count :]
        places = ((place, at) for place, at in enumerate(split.gradients) if at is not None)
        self.gradients = tuple(
            (self.trace.outputs[at], Target("gradient", place)) for place, at in places
        )
        self.edges = [var.type for var in self.cotangents if isinstance(var.type, TensorType)]
        self.takes: dict[int, list[tuple[int, Var]]] = {}
        self.gives: dict[int, list[tuple[Atom, Target]]] = {}

    def whole(self) -> Pieces:
        """The backward as one piece."""
        outputs, gives = zip(*self.gradients, strict=True) if self.gradients else ((), ())
        trace = self.trace
        if outputs != trace.outputs:
            trace = cut(trace, outputs=outputs)
        everything = tuple(range(len(trace.inputs)))
        piece = Piece(trace, everything[: self.count], everything[: len(self.cotangents)], gives)
        return Pieces(tuple(self.edges), (piece,))

    def pieces(self) -> Pieces:
        """The backward as one piece for each part."""
        self.find_parts()
        self.find_sums()
        added = {var for terms in self.sums.values() for var in terms}
        for edge, var in enumerate(self.cotangents):
            parts = {
                self.home[equation.outputs[0].index] for equation in self.readers.get(var.index, ())
            }
            if var not in added and len(parts) == 1 and var.index not in self.returned:
                (self.home[var.index],) = parts
            if var not in added or self.home[var.index] == 1 << edge:
                self.takes.setdefault(self.home[var.index], []).append((edge, var))
        for equation, part in zip(self.trace.equations, self.parts, strict=True):
            first = equation.outputs[0].index if equation.outputs else -1
            if first in self.sums:
                self.add_up(equation.outputs[0], part)
            elif first not in self.inner:
                self.cross(equation, part)
        for atom, target in self.gradients:
            self.give(atom, target)
        parts = sorted({*self.takes, *self.gives} - {0}, key=self.order)
        self.gives[parts[-1]] = [*self.gives.get(parts[-1], ()), *self.gives.pop(0, ())]
        return Pieces(tuple(self.edges), tuple(map(self.piece, parts)))

    def order(self, part: int) -> tuple[int, int, int]:
        """Order parts that depend on equally many cotangents as eager code sums their results."""
        end = len(self.trace.equations)
        terms = (
            self.maker.get(var.index, end)
            for terms in self.sums.values()
            for var in terms
            if self.home[var.index] == part
        )
        return part.bit_count(), min(terms, default=self.first.get(part, end)), -part

    def find_parts(self) -> None:
        """Find the part of each equation and of each variable, its readers and its maker."""
        self.home = [0] * num_vars(self.trace)
        self.home[self.count : len(self.trace.inputs)] = (
            1 << bit for bit in range(len(self.cotangents))
        )
        self.readers: dict[int, list[Equation]] = {}
        self.parts: list[int] = []
        self.maker: dict[int, int] = {}
        self.first: dict[int, int] = {}
        for position, equation in enumerate(self.trace.equations):
            part = 0
            for var in equation.operands:
                part |= self.home[var.index]
            self.parts.append(part)
            self.first.setdefault(part, position)
            for var in equation.operands:
                self.readers.setdefault(var.index, []).append(equation)
            for var in equation.outputs:
                self.home[var.index], self.maker[var.index] = part, position
        self.returned = {atom.index for atom, _ in self.gradients if isinstance(atom, Var)}

    def find_sums(self) -> None:
        """Find the additions that autograd makes, by their result, with their terms; those inside
        of longer ones are `inner`.

        They add up values of other parts, and at most one cotangent of the caller's.
        """
        chains: dict[int, tuple[tuple[Var, ...], frozenset[int]]] = {}
        for equation in self.trace.equations:
            if self.is_addition(equation):
                found = [
                    (
                        chains.pop(var.index, ((var,), frozenset[int]()))
                        if self.is_read_once(var)
                        else ((var,), frozenset[int]())
                    )
                    for var in equation.operands
                ]
                absorbed = {
                    var.index
                    for var in equation.operands
                    if var.index in self.maker and self.is_read_once(var)
                }
                terms = tuple(var for terms, _ in found for var in terms)
                chains[equation.outputs[0].index] = (
                    terms,
                    frozenset(absorbed).union(*(inner for _, inner in found)),
                )
        self.sums: dict[int, tuple[Var, ...]] = {}
        self.inner = set[int]()
        for index, (terms, inner) in chains.items():
            part = self.home[index]
            given = next(
                (var for var in terms if var in self.cotangents and self.is_read_once(var)), None
            )
            others = [var for var in terms if var is not given]
            at_an_end = given is not None or not self.readers.get(index)
            if (
                at_an_end
                and others
                and all(self.home[var.index] not in (0, part) for var in others)
            ):
                self.sums[index] = terms
                self.inner |= inner - {var.index for var in terms}
                if given is not None:
                    self.home[given.index] = part

    def is_addition(self, equation: Equation) -> bool:
        """Test for the sum of two tensors of its own type, as autograd makes it."""
        operands = equation.operands
        same = equation.op == _ADD and not equation.kwargs and len(operands) == 2
        return same and all(var.type == equation.outputs[0].type for var in operands)

    def is_read_once(self, var: Var) -> bool:
        """Test whether one equation reads the variable, and no input has it as its gradient."""
        return len(self.readers.get(var.index, ())) == 1 and var.index not in self.returned

    def passes(self, var: Var) -> bool:
        """Test for a sum that is only an input's gradient: its terms go to that input."""
        alone = not self.readers.get(var.index)
        return alone and all(
            self.home[term.index] != self.home[var.index] for term in self.sums[var.index]
        )

    def add_up(self, var: Var, part: int) -> None:
        """Add an edge for a sum. If the caller's cotangent is a term, it is the edge of that."""
        if self.passes(var):
            return
        given = [term for term in self.sums[var.index] if self.home[term.index] == part]
        edge = self.cotangents.index(given[0]) if given else self.new_edge(var)
        self.takes.setdefault(part, []).append((edge, var))
        for term in self.sums[var.index]:
            if term not in given:
                self.give(term, Target("edge", edge))

    def cross(self, equation: Equation, part: int) -> None:
        """Add an edge for each value that one part reads of another."""
        known = {var for _, var in self.takes.get(part, ())}
        for var in dict.fromkeys(equation.operands):
            if self.home[var.index] not in (0, part) and var not in known:
                edge = self.new_edge(var)
                self.takes.setdefault(part, []).append((edge, var))
                self.give(var, Target("edge", edge))

    def new_edge(self, var: Var) -> int:
        assert isinstance(var.type, TensorType), "only tensors have cotangents"
        self.edges.append(var.type)
        return len(self.edges) - 1

    def give(self, atom: Atom, target: Target) -> None:
        if isinstance(atom, Var) and atom.index in self.sums and self.passes(atom):
            for term in self.sums[atom.index]:
                self.give(term, target)
        else:
            self.gives.setdefault(self.home[atom.index] if isinstance(atom, Var) else 0, []).append(
                (atom, target)
            )

    def piece(self, part: int) -> Piece:
        """Build the trace of a part, with the equations that it needs and that depend on no
        cotangent.
        """
        takes, gives = self.takes.get(part, []), self.gives.get(part, [])
        positions, read = self.needed([atom for atom, _ in gives], {var.index for _, var in takes})
        residuals = tuple(place for place in range(self.count) if place in read)
        inputs = (*(self.trace.inputs[place] for place in residuals), *(var for _, var in takes))
        equations = tuple(self.trace.equations[position] for position in positions)
        outputs, whole = tuple(atom for atom, _ in gives), self.trace
        trace = cut(whole, inputs=inputs, equations=equations, outputs=outputs)
        return Piece(
            trace, residuals, tuple(edge for edge, _ in takes), tuple(target for _, target in gives)
        )

    def needed(self, atoms: Sequence[Atom], known: Collection[int]) -> tuple[list[int], set[int]]:
        """The positions of the equations that compute these from known values, and the variables
        that are read.
        """
        pending = [atom.index for atom in atoms if isinstance(atom, Var)]
        positions, read = set[int](), set[int]()
        while pending:
            index = pending.pop()
            if index in read or index in known:
                continue
            read.add(index)
            position = self.maker.get(index)
            if position is not None:
                positions.add(position)
                pending.extend(var.index for var in self.trace.equations[position].operands)
        return sorted(positions), read
