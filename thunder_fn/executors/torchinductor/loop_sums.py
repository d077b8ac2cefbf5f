"""Sums of matrix products over the steps of a loop, such as a weight's gradient: few long products
for many short ones.

    total = total + a.t() @ b        in each step, where total is a carry that nothing else reads

is `total + A.t() @ B` for the rows `A`, `B` of many steps, laid one under the other. A loop in C++
keeps the rows of some steps and multiplies them at once: `total` is read and written once for all
of them. The same sum up to rounding.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from thunder_fn.extend.regions import Loop, dce
from thunder_fn.ir import ops
from thunder_fn.ir.equations import operands_in
from thunder_fn.ir.trace import Atom, Equation, Op, TensorType, Trace, Var, cut, static_shape

aten = torch.ops.aten
ADD, MM, T = (ops.leaf(op) for op in (aten.add.Tensor, aten.mm.default, aten.t.default))
DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Sum:
    """A carry that is such a sum: its number among the carries, and the pairs `a`, `b`,
    variables of the body.
    """

    carry: int
    products: tuple[tuple[Var, Var], ...]


def sums_of(equation: Equation) -> tuple[Sum, ...]:
    """The carries of a scan that are sums of products."""
    loop, body = Loop.of(equation), equation.body
    made = {var: one for one in body.equations for var in one.outputs}
    times = Counter[Atom]((*operands_in(body.equations), *body.outputs))

    def maker(atom: object, op: Op) -> Equation | None:
        """The equation that makes a value that is read once, if it is of this op."""
        found = made.get(atom) if isinstance(atom, Var) and times[atom] == 1 else None
        return found if found is not None and found.op == op and not found.kwargs else None

    def addends(atom: object) -> list[object]:
        found = maker(atom, ADD)
        return [atom] if found is None else [leaf for arg in found.args for leaf in addends(arg)]

    def product(atom: object, total: Var) -> tuple[Var, Var] | None:
        """`a` and `b` of a product `a.t() @ b` of the total's type."""
        found = maker(atom, MM)
        if found is None or found.outputs[0].type != total.type:
            return None
        left, right = found.operands
        turned = made.get(left)
        return (turned.operands[0], right) if turned is not None and turned.op == T else None

    sums = list[Sum]()
    for number, (carry, output) in enumerate(
        zip(loop.parts(body.inputs)[1], body.outputs, strict=False)
    ):
        found = addends(output)
        products = [product(atom, carry) for atom in found if atom != carry]
        whole = tuple(pair for pair in products if pair is not None)
        if (
            found.count(carry) == times[carry] == 1
            and 0 < len(whole) == len(products)
            and _is_taken(carry)
        ):
            sums.append(Sum(number, whole))
    return tuple(sums)


def _is_taken(carry: Var) -> bool:
    return (
        isinstance(carry.type, TensorType)
        and carry.type.dtype in DTYPES
        and 0 not in static_shape(carry.type)
    )


def without_sums(equation: Equation, sums: tuple[Sum, ...], rows: tuple[Var, ...]) -> Trace:
    """The body of a scan without these carries; its last outputs are `rows`."""
    loop, body = Loop.of(equation), equation.body
    consts, carries, xs = loop.parts(body.inputs)
    dropped = {one.carry for one in sums}
    inputs = (*consts, *(var for number, var in enumerate(carries) if number not in dropped), *xs)
    outputs = tuple(atom for number, atom in enumerate(body.outputs) if number not in dropped)
    keep = dce(cut(body, outputs=(*outputs, *rows)))
    kept_inputs = tuple(keep.inputs[var.index] for var in inputs)
    return cut(keep, inputs=kept_inputs)
