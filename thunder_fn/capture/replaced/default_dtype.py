"""Promotion of ints where the traced function sets another default dtype: a cast in the trace.

An op of ints and bools only, with a float result, gives the default dtype. A trace means what it
would in the default dtype that the capture began with. So an op that is recorded under another one
reads its operands as floats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from thunder_fn.ir import ops
from thunder_fn.ir.trace import TensorType, Type, Var, map_arg, vars_in

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder
    from thunder_fn.ir.trace import Arg

_TO = ops.leaf(torch.ops.aten._to_copy.default)


def promoted(
    recorder: Recorder,
    args: tuple[Arg, ...],
    kwargs: tuple[tuple[str, Arg], ...],
    types: tuple[Type, ...],
) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """The arguments, with ints cast to the result's dtype where that follows from another
    default dtype.
    """
    if torch.get_default_dtype() == recorder.call.default_dtype:
        return args, kwargs
    atoms = (*args, *(arg for _, arg in kwargs))
    operands = {
        var.type for atom in atoms for var in vars_in(atom) if isinstance(var.type, TensorType)
    }
    results = {
        type.dtype for type in types if isinstance(type, TensorType) and _is_float(type.dtype)
    }
    if (
        len(results) != 1
        or not operands
        or any(_is_float(type.dtype) for type in operands)
        or _says_dtype(atoms)
    ):
        return args, kwargs
    (dtype,) = results

    def cast(var: Var) -> Var:
        assert isinstance(var.type, TensorType), "no number is a variable here"
        type = TensorType(dtype, var.type.shape, var.type.device)
        return recorder.emit(_TO, (var,), (type,), (("dtype", recorder.encode(dtype)),))[0]

    return tuple(map_arg(cast, arg) for arg in args), tuple(
        (key, map_arg(cast, arg)) for key, arg in kwargs
    )


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _says_dtype(atoms: tuple[Any, ...]) -> bool:
    """Test whether an argument is a dtype: the result has it whatever the default is."""
    return any(isinstance(getattr(atom, "value", None), torch.dtype) for atom in atoms)
