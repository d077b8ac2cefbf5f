"""Transforms of functions: `grad`, `jvp`, `vmap` and their relatives, with pytrees around the
interpreters.

A transformed function is a frozen value with a `repr`. A call captures the function on the
arguments, transforms the trace and applies it; under `jit` that happens once. Outside `jit` each
call captures anew, so closures and globals mean what they mean in Python.

`calling.py` has the steps that all transforms share. A new transform is one file here and one
interpreter below; its law stands in the docstring and in `testing/laws`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder_fn.api.batching import Vmap, vmap
from thunder_fn.api.captures import capture_watched
from thunder_fn.api.gradients import Grad, grad, grad_and_value, value_and_grad
from thunder_fn.api.jacobians import hessian, jacfwd, jacrev
from thunder_fn.api.pullbacks import Pullback, vjp
from thunder_fn.api.residuals import SavedResidual, saved_residuals
from thunder_fn.api.tangents import Linear, jvp, linearize
from thunder_fn.capture import pytree
from thunder_fn.ir.trace import Trace
from thunder_fn.structured import (
    autograd_function as _autograd_function,  # noqa: F401  # pyright: ignore[reportUnusedImport]  # a lookaside
    differentiated_as as _differentiated_as,  # noqa: F401  # pyright: ignore[reportUnusedImport]  # its rules
    straight_through as _straight_through,  # noqa: F401  # pyright: ignore[reportUnusedImport]  # its rules
)

__all__ = [
    "Grad",
    "Linear",
    "Pullback",
    "SavedResidual",
    "Vmap",
    "grad",
    "grad_and_value",
    "hessian",
    "jacfwd",
    "jacrev",
    "jvp",
    "linearize",
    "saved_residuals",
    "stop_gradient",
    "trace",
    "value_and_grad",
    "vjp",
    "vmap",
]


def trace(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Trace:
    """Trace `f(*args, **kwargs)`: the trace is closed, with its composites nested.

    Law: ``evaluate(trace(f, *xs), xs)`` gives the tensors of ``f(*xs)``, bitwise.

    Args:
        f: any PyTorch callable: a function, a module, a jitted or transformed function.
        args, kwargs: pytrees. Tensors become inputs, one for each leaf in order; other leaves are
            baked in.

    Raises:
        CaptureError: f cannot be traced; the subclass and the text say why.

    Example:
        >>> print(trace(lambda x: x * 2, torch.ones(3)), end="")
        def program(v0):
            # v0: f32[3]
            v1 = aten.mul.Tensor(v0, 2)  # f32[3]
            return (v1,)
    """
    return capture_watched(f, args, kwargs).trace


def stop_gradient(tree: Any) -> Any:
    """Keep the values and make them constant for every derivative.

    Law: ``grad(lambda x: f(stop_gradient(x)))`` is zero.

    Example:
        >>> import thunder_fn as tfn
        >>> tfn.grad(lambda x: x * stop_gradient(x))(torch.tensor(3.0))
        tensor(3.)
    """
    return pytree.tree_map(
        lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree
    )
