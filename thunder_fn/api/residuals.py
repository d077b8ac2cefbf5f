"""saved_residuals: what the forward of a gradient keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.api.captures import capture_watched
from thunder_fn.capture import pytree
from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.interpreters.checkpoint.cost import bytes_of
from thunder_fn.interpreters.checkpoint.recomputed import COPY_TO
from thunder_fn.interpreters.grad import forward_backward
from thunder_fn.interpreters.storages import values_without_numbers
from thunder_fn.ir.notebook import ShownList
from thunder_fn.ir.trace import Atom, Equation, Literal, Source, Trace, Type, Var
from thunder_fn.structured.checkpoint_name import name_of


@dataclass(frozen=True, slots=True)
class SavedResidual:
    """A value that the backward reads: its type, its size, why it is there, and the user's line
    that made it.

    `own_bytes` is the memory that it alone keeps alive, all of it for a view. An argument, which
    its caller holds, has none, nor has a value in the memory of an argument, a result or an earlier
    residual.
    """

    type: Type
    num_bytes: int
    own_bytes: int
    reason: str
    source: Source | None = None

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        if not self.own_bytes and not self.reason.startswith("argument"):
            where += ", in memory that is there anyhow"
        return f"{self.num_bytes:>12,} B  {self.type}  {self.reason}{where}"


def saved_residuals(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[SavedResidual]:
    """List the residuals of the gradient of f at these arguments, in the order in which the
    backward gets them.

    Law: the sum of their `own_bytes` is what ``vjp(f, *args)`` keeps beside its arguments and its
        outputs.

    Args:
        f: any PyTorch callable. The gradient is that of all its floating results, to all floating
            arguments.

    Returns:
        One `SavedResidual` for each; its `reason` is `argument args[0]['w']`, `named 'hidden'` for
            a value that `checkpoint_name` has named, or `output of` an op.

    Raises:
        CaptureError: f cannot be traced, and other errors of `vjp`.

    Example:
        >>> for residual in saved_residuals(lambda x: x.sin().exp().sum(), torch.ones(3)):
        ...     print(residual.type, residual.reason)
        f32[3] output of aten.exp.default
        f32[3] argument args[0]

    Source: jax.ad_checkpoint.saved_residuals.
    """
    trace = capture_watched(f, args, kwargs).trace
    leaves, _ = pytree.flatten((args, kwargs))
    names = (*pytree.paths(args, "args"), *pytree.paths(kwargs, "kwargs"))
    paths = [
        path for path, leaf in zip(names, leaves, strict=True) if isinstance(leaf, torch.Tensor)
    ]
    wanted_inputs = tuple(is_differentiable(var.type) for var in trace.inputs)
    wanted_outputs = tuple(
        isinstance(atom, Var) and is_differentiable(atom.type) for atom in trace.outputs
    )
    split = forward_backward(trace, wanted_inputs, wanted_outputs)
    atoms = split.residual_values(split.forward.inputs, split.forward.outputs)
    values = [atom for atom in atoms if isinstance(atom, Var)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    own = _own_bytes(split.forward, tensors, split.forward.outputs[: len(trace.outputs)], values)
    return ShownList(
        _describe(split.forward, var, size, paths) for var, size in zip(values, own, strict=True)
    )


def _own_bytes(
    trace: Trace, tensors: Sequence[torch.Tensor], outputs: Sequence[Atom], residuals: Sequence[Var]
) -> list[int]:
    """The bytes of each residual's storage, zero where that is there anyhow."""
    mode = internals.fake_mode()
    env = values_without_numbers(
        mode, trace, [internals.fake_like(mode, tensor) for tensor in tensors]
    )
    there = (*trace.inputs, *(constant.var for constant in trace.constants), *outputs)
    held = (env[atom.index] for atom in there if isinstance(atom, Var))
    known = {internals.storage_id(value) for value in held if isinstance(value, torch.Tensor)}
    found: list[int] = []
    for var in residuals:
        value = env[var.index]
        if not isinstance(value, torch.Tensor):
            found.append(bytes_of(var.type))
            continue
        place, size = internals.storage_id(value), value.untyped_storage().nbytes()
        depends_on_data = not isinstance(size, int)  # pyright: ignore[reportUnnecessaryIsInstance]
        found.append(0 if place in known else bytes_of(var.type) if depends_on_data else size)
        known.add(place)
    return found


def _describe(trace: Trace, var: Var, own: int, paths: list[str]) -> SavedResidual:
    size = bytes_of(var.type)
    if var in trace.inputs:
        return SavedResidual(var.type, size, own, f"argument {paths[trace.inputs.index(var)]}")
    name = _name(trace, var)
    equation = _maker(trace, var)
    if name is not None:
        return SavedResidual(
            var.type, size, own, f"named {name!r}", equation.source if equation else None
        )
    if equation is None:
        return SavedResidual(var.type, size, own, "a closed-over tensor")
    return SavedResidual(var.type, size, own, f"output of {equation.op}", equation.source)


def _maker(trace: Trace, var: Var) -> Equation | None:
    """The innermost equation that computes a variable."""
    equation = next((equation for equation in trace.equations if var in equation.outputs), None)
    if (
        equation is not None and equation.op == COPY_TO and equation.source is None
    ):  # a policy offloads it
        return _maker(trace, equation.operands[0])
    if equation is None or len(equation.bodies) != 1:
        return equation
    atom = _inner(equation, var)
    inner = _maker(equation.body, atom) if isinstance(atom, Var) else None
    if inner is None:
        return equation
    return replace(
        inner, source=inner.source.called_from(equation.source) if inner.source else equation.source
    )


def _inner(equation: Equation, var: Var) -> Var | Literal | None:
    body = equation.body
    if len(body.outputs) != len(equation.outputs):
        return None
    return body.outputs[equation.outputs.index(var)]


def _name(trace: Trace, var: Var) -> str | None:
    """The name of a value, given to it or to the value that it copies."""
    readers = (
        equation for equation in trace.equations if var in (*equation.operands, *equation.outputs)
    )
    name = next((name for equation in readers if (name := name_of(equation)) is not None), None)
    maker = next((equation for equation in trace.equations if var in equation.outputs), None)
    if name is not None or maker is None:
        return name
    if maker.op == COPY_TO:
        return _name(trace, maker.operands[0])
    inner = _inner(maker, var) if len(maker.bodies) == 1 else None
    return _name(maker.body, inner) if isinstance(inner, Var) else None
