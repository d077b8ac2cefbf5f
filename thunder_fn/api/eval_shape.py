"""eval_shape: the types of a function's results, without a number computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_fn.api.captures import capture_watched
from thunder_fn.capture.apply import without_values
from thunder_fn.ir.trace import Atom, Literal, NumberType


def eval_shape(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return the result of `f(*args, **kwargs)` with a `TensorType` for each tensor. Nothing is
    computed or allocated.

    Law: a type has the dtype, shape and device of the tensor that the call would give. Other leaves
        are those of the call.

    Args:
        f: any PyTorch callable: a function, a module, a jitted or transformed function. It is
            traced, so its writes to tensors are not made, and an error of shapes is the one that
            the call would raise.
        args, kwargs: pytrees of tensors, of `TensorType`s in the place of tensors, and of other
            values.

    Returns:
        The structure of f's result. A size that depends on data is an expression such as `u0`.

    Raises:
        CaptureError: f cannot be traced; the subclass and the text say why.
        UnsupportedInput: a size of a `TensorType` among the arguments is symbolic.

    Example:
        >>> import torch
        >>> from thunder_fn.ir.trace import TensorType
        >>> found = eval_shape(torch.mm, TensorType(torch.float32, (2, 3)), torch.ones(3, 4))
        >>> print(found)
        f32[2, 4]
        >>> found.shape
        (2, 4)

    Source: jax.eval_shape.
    """
    args, kwargs = without_values((args, kwargs))
    captured = capture_watched(f, args, kwargs)
    outputs = captured.trace.outputs[: captured.num_results]
    return captured.result(tuple(map(_described, outputs)))


def _described(atom: Atom) -> Any:
    """The type of a tensor; a number itself, or its expression."""
    if isinstance(atom, Literal):
        return atom.value
    return atom.type.value if isinstance(atom.type, NumberType) else atom.type
