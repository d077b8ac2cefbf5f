"""Linear layers in one call: PyTorch's `linear` in place of the views and the product that it
consists of, each of which costs a microsecond or more on the host.
"""

from __future__ import annotations

from thunder_fn.ir import facts, ops
from thunder_fn.ir.trace import Equation, Trace, Var

NAME = "torch.nn.functional.linear"


def whole_linear(call: Equation) -> Equation | None:
    """Return the op for a call of `linear` that a trace recorded; None if its body computes, or
    keeps, something else.

    Law: same values, bitwise: the layouts of operands are those of the capture, for which PyTorch
    chose the calls in the body.
    """
    if call.op.name != NAME or len(call.bodies) != 1 or not _is_linear(call.body):
        return None
    return Equation(ops.LINEAR, call.operands, (), call.outputs, (), call.source)


def _is_linear(body: Trace) -> bool:
    """Test for a product of rows of the first input with the second one's transpose, and the third
    one added.
    """
    # x, w, bias -> reshape(addmm(bias, reshape(x, rows), t(w)), shape), or without some of that
    makers = {one.outputs[0].index: one for one in body.equations if len(one.outputs) == 1}
    if len(body.outputs) != 1 or len(makers) != len(body.equations) or body.constants:
        return False
    product = makers.get(_index(_flat(body.outputs[0], makers)))
    if product is None or product.op not in facts.MATMULS_OF_LINEAR or product.kwargs:
        return False
    *bias, rows, turned = product.args
    turn = makers.get(_index(turned))
    weight = turn.args[0] if turn is not None and turn.op in facts.TRANSPOSES else None
    return (_flat(rows, makers), weight, *bias) == body.inputs


def _flat(arg: object, makers: dict[int, Equation]) -> object:
    """The operand of a reshape, or what is none."""
    maker = makers.get(_index(arg))
    return maker.args[0] if maker is not None and maker.op == ops.RESHAPE else arg


def _index(arg: object) -> int:
    return arg.index if isinstance(arg, Var) else -1
