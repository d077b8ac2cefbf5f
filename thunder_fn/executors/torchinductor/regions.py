"""The common part of executors that compile ATen regions: the ops that they take, and
optimisation fuel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from thunder_fn.errors import ExecutorError
from thunder_fn.extend import FusionExecutor
from thunder_fn.extend.regions import NOT_REGISTERED, Numerics
from thunder_fn.ir import facts, ops
from thunder_fn.ir.equations import bound
from thunder_fn.ir.symbols import Symbol
from thunder_fn.ir.trace import Equation, Expr, Literal, NoneType, TensorType, Trace, Var, all_args

EXTERN = facts.MATMULS | facts.CONVOLUTIONS
"""Ops that compilers leave to PyTorch."""


class RegionCompiler(FusionExecutor):
    """Base of executors that compile regions of ATen ops. Arguments are those of a
    FusionExecutor.
    """

    is_checked = False

    def __init__(
        self,
        name: str,
        *,
        min_shared: int,
        fuel: int | None = None,
        takes_symbols: bool = False,
        allocates: bool = False,
    ) -> None:
        super().__init__(
            name,
            version=torch.__version__,
            numerics="precision-changing",
            min_shared=min_shared,
            takes_symbols=takes_symbols,
            allocates=allocates,
            fuel=fuel,
        )

    def supports(self, equation: Equation) -> str | None:
        """Leaves of ATen on tensors of fixed shape may be compiled, if they draw no random
        numbers.
        """
        if equation.op.kind != "leaf":
            return NOT_REGISTERED.reason
        if not equation.op.name.startswith(("aten.", "prims.")):
            return "an op that PyTorch does not bring runs as it is"
        if ops.is_random(equation.op) or ops.has_side_effect(equation):
            return "random numbers and effects stay with torch, which draws what eager draws"
        if equation.op in facts.WITH_WORKSPACE:
            return "a kernel that saves a workspace for its backward runs as it is"
        if not all(map(_is_size, _expressions(all_args(equation)))):
            return "a number that is no size, and no constant"
        reasons = (self.refused(var) for var in (*equation.operands, *equation.outputs))
        return next((reason for reason in reasons if reason is not None), None)

    def numerics_of(self, meaning: Trace) -> Numerics:
        """The label by dtype: compilers keep halves in float32, which changes precision, and only
        reorder other dtypes.
        """
        variables = (*meaning.inputs, *bound(meaning.equations))
        return self.numerics if any(map(_is_half, variables)) else "reassociating"

    def refused(self, var: Var) -> str | None:
        """The reason why a region may not have such a variable."""
        if isinstance(var.type, NoneType):
            return None
        if not isinstance(var.type, TensorType):
            return "regions take tensors only"
        symbolic = [size for size in var.type.shape if isinstance(size, Expr)]
        if symbolic and not self.takes_symbols:
            return "regions are compiled for fixed shapes"
        if not all(map(_is_size, symbolic)):
            return "sizes that depend on data"
        return None

    def is_worth(self, region: Trace) -> bool:
        """Test for something to fuse: several ops that compute, and not only calls of PyTorch's
        kernels.
        """
        own = [equation for equation in region.equations if equation.op not in EXTERN]
        return super().is_worth(region) and any(not ops.is_view(equation.op) for equation in own)


def _is_half(var: Var) -> bool:
    return (
        isinstance(var.type, TensorType)
        and var.type.dtype.is_floating_point
        and var.type.dtype.itemsize < 4
    )


def _expressions(value: Any) -> Iterator[Expr]:
    """The expressions in arguments."""
    match value:
        case Expr():
            yield value
        case Literal():
            yield from _expressions(value.value)
        case tuple() | list():
            for item in value:
                yield from _expressions(item)
        case _:
            pass


def _is_size(expr: Expr) -> bool:
    """Test for an int that follows from sizes and numbers that a function is called with."""
    return expr.kind is int and all(
        isinstance(symbol, Symbol) for symbol in expr.value.free_symbols
    )


def bisect(check: Callable[[Any], bool], make: Callable[..., FusionExecutor]) -> Trace | None:
    """Find the region that is compiled wrongly.

    Law: with all regions before it compiled and the others not, `check` holds; with it compiled
        too, it does not.

    Args:
        check: jits and runs a program with the executor that it is given, and says whether the
            results are right. It does the same every time.
        make: `inductor`, or another function that takes `fuel=` and makes a FusionExecutor with it.

    Returns:
        The region; None if the results are right with all regions compiled.

    Raises:
        ExecutorError: the results are wrong with no region compiled, so no compiler is to blame.

    Example:
        >>> import torch
        >>> from thunder_fn import jit
        >>> from thunder_fn.executors import bisect, inductor
        >>> x = torch.ones(3)
        >>> def check(executor):
        ...     compiled = jit(lambda x: x.sin() + 1, executors=[executor])
        ...     return torch.allclose(compiled(x), x.sin() + 1)
        >>> bisect(check, inductor)
    """
    full = make()
    if check(full):
        return None
    if not check(make(fuel=0)):
        raise ExecutorError(
            "bisect: the results are wrong with no region compiled, so no compiled region is to"
            " blame"
        )
    good, bad = 0, len(full.taken)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if check(make(fuel=middle)) else (good, middle)
    return full.taken[bad - 1]
