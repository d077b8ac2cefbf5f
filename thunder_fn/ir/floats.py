"""Float arithmetic in expressions, computed as Python computes it.

sympy's sums and products are those of the real numbers. There `(a + b) - b` is `a`, and `a + 0.1 +
0.2` is `a + 0.3`. Floats round after each step, so each step is a function here that sympy leaves
alone: `(zf0 + 0.1) + 0.2`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import sympy
from sympy.printing.precedence import PRECEDENCE


class FloatStepBase(sympy.Function):
    """One step of float arithmetic on two operands. sympy prints functions by the name of a base
    that ends so.
    """

    nargs = 2
    is_extended_real = True
    sign: ClassVar[str]
    compute: ClassVar[Callable[[float, float], float]]
    precedence: ClassVar[int]
    _torch_handler_name = "pow"  # of which PyTorch knows no range

    @classmethod
    def eval(cls, *args: Any) -> Any:
        """The number, where both operands are numbers."""
        return (
            sympy.Float(cls.compute(*map(float, args)))
            if all(arg.is_number for arg in args)
            else None
        )

    def text(self, printer: Any) -> str:
        """The step as Python, by a printer for expressions."""
        left, right = self.args
        is_power = self.sign == "**"
        first = printer.parenthesize(left, self.precedence, strict=not is_power)
        return f"{first}{self.sign}{printer.parenthesize(right, self.precedence, strict=False)}"


def _step(
    name: str, sign: str, compute: Callable[[Any, Any], Any], level: str
) -> type[FloatStepBase]:
    members: dict[str, Any] = {
        "sign": sign,
        "compute": staticmethod(compute),
        "precedence": PRECEDENCE[level],
        "__module__": __name__,
    }
    return type(name, (FloatStepBase,), members)


FloatAdd = _step("FloatAdd", " + ", operator.add, "Add")
FloatSub = _step("FloatSub", " - ", operator.sub, "Add")
FloatMul = _step("FloatMul", "*", operator.mul, "Mul")
FloatDiv = _step("FloatDiv", "/", operator.truediv, "Mul")
FloatFloorDiv = _step("FloatFloorDiv", "//", operator.floordiv, "Mul")
FloatMod = _step("FloatMod", " % ", operator.mod, "Mul")
FloatPower = _step("FloatPower", "**", operator.pow, "Pow")


class IntDivision(FloatStepBase):
    """`a / b` of ints, rounded once. PyTorch knows a division too, whose integral part it takes
    to be `a // b`.
    """

    sign = "/"
    precedence = PRECEDENCE["Mul"]

    @classmethod
    def eval(cls, *args: Any) -> Any:
        """The number, where both operands are numbers."""
        return (
            sympy.Float(int(args[0]) / int(args[1])) if all(arg.is_number for arg in args) else None
        )


STEPS = {
    "add": FloatAdd,
    "sub": FloatSub,
    "mul": FloatMul,
    "truediv": FloatDiv,
    "floordiv": FloatFloorDiv,
    "mod": FloatMod,
    "pow": FloatPower,
}
"""The steps by the names of Python's operators."""
