"""A gradient that touches some rows of a matrix, added to one that touches all: row by row, in
place if nobody sees it.

    v2 = embedding_dense_backward(v0, v1, 50257, -1, False)     zeros plus a row for each index
    v4 = add(v3, v2)

That is the gradient of an embedding which is tied to a head. Written so, it takes three matrices of
the embedding's size, two of them for a few rows. Such a pair is a region of its own, which is no
compiler's.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch

from thunder_fn.extend.regions import Group
from thunder_fn.ir import ops
from thunder_fn.ir.equations import operands_in
from thunder_fn.ir.trace import Equation, Expr, Literal, Trace, Var
from thunder_fn.torch_internals import is_exclusive, is_kept_by_autograd

EMBEDDING = ops.leaf(torch.ops.aten.embedding_dense_backward.default)
ADD = ops.leaf(torch.ops.aten.add.Tensor)


def added_rows(trace: Trace) -> tuple[Group, ...]:
    """The pairs of equations: the rows, which nothing else reads, and the sum with another
    matrix.
    """
    reads = Counter(var.index for var in operands_in(trace.equations))
    reads.update(atom.index for atom in trace.outputs if isinstance(atom, Var))
    rows = {
        equation.outputs[0].index: position
        for position, equation in enumerate(trace.equations)
        if equation.op == EMBEDDING
        and _is_plain(equation)
        and reads[equation.outputs[0].index] == 1
    }
    found = list[Group]()
    for position, equation in enumerate(trace.equations):
        if equation.op != ADD or equation.kwargs or len(equation.operands) != 2:
            continue
        places = [rows[var.index] for var in equation.operands if var.index in rows]
        others = [var for var in equation.operands if var.index not in rows]
        if places and others and others[0].type == equation.outputs[0].type:
            found.append((places[0], position))
    return tuple(found)


def is_added_rows(region: Trace) -> bool:
    """Test whether the region is such a pair."""
    match region.equations:
        case (rows, total) if rows.op == EMBEDDING and _is_plain(rows):
            operands = total.operands
            return (
                total.op == ADD
                and not total.kwargs
                and operands.count(rows.outputs[0]) == 1 == len(operands) - 1
            )
        case _:
            return False


def _is_plain(equation: Equation) -> bool:
    """Test whether the rows are not divided by how often they occur, and sizes are numbers."""
    numbers = [arg.value for arg in equation.args if isinstance(arg, Literal)]
    return (
        len(numbers) == 3
        and numbers[2] is False
        and not any(isinstance(number, Expr) for number in numbers)
    )


class AddedRows:
    """A region that is such a pair.

    Law: it computes the region, whose sums come in another order.
    """

    def __init__(self, region: Trace) -> None:
        rows, total = region.equations
        places = {var.index: place for place, var in enumerate(region.inputs)}
        gradient, indices = rows.operands
        (known,) = (var for var in total.operands if var != rows.outputs[0])
        self.gradient = places[gradient.index]
        self.indices = places[indices.index]
        self.known = places[known.index]
        padding = rows.args[3]
        assert isinstance(padding, Literal), "as `added_rows` says"
        self.padding: int = padding.value

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        return self._add(inputs[self.gradient], inputs[self.indices], inputs[self.known].clone())

    def take(self, box: list[Any]) -> tuple[Any, ...]:
        """Run on values that only the box holds, in the memory of the matrix if nobody else sees
        it.
        """
        known = box[self.known]
        alone = is_exclusive(known) and not is_kept_by_autograd(known)
        del known
        alone = alone and _references(box, self.known) == _ALONE
        gradient, indices, known = box[self.gradient], box[self.indices], box[self.known]
        box.clear()
        return self._add(gradient, indices, known if alone else known.clone())

    dry_run = __call__

    def _add(
        self, gradient: torch.Tensor, indices: torch.Tensor, known: torch.Tensor
    ) -> tuple[Any, ...]:
        indices, rows = indices.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
        if self.padding >= 0:
            rows = rows.masked_fill((indices == self.padding).unsqueeze(-1), 0)
        return (known.index_put_((indices,), rows, accumulate=True),)


def _references(box: list[Any], place: int) -> int:
    return sys.getrefcount(box[place])


_ALONE = _references([torch.empty(0)], 0)
"""The reference count of a tensor that a list holds and nothing else."""
