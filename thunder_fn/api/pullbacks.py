"""vjp: evaluate a function and prepare its vector-Jacobian product."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal as Choice, TypeVar, overload

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.api.calling import (
    check_output,
    described,
    kind_of_tensor,
    main_only,
    main_output,
    run,
    type_of_kind,
    unwritten,
    write_back,
)
from thunder_fn.api.captures import Plan, planned
from thunder_fn.capture import EVERY_LEAF, TENSOR, Captured, pytree
from thunder_fn.capture.rewriting import is_to_be_fused
from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.errors import CotangentError, NotDifferentiable, callable_name, kind_of, spelled
from thunder_fn.interpreters import grad as reverse
from thunder_fn.interpreters.carried import self_contained, told_by_inputs
from thunder_fn.ir.rules import Split
from thunder_fn.ir.trace import type_of_value

R = TypeVar("R")
A = TypeVar("A")


@dataclass(frozen=True)
class Pullback:
    """The result of `vjp`: a linear function from a cotangent of the output to cotangents of the
    primals.
    """

    KEY: ClassVar = "captured", "wanted_outputs", "residuals", "primals"
    """The fields from which the others follow."""

    split: Split
    residuals: tuple[torch.Tensor, ...]
    captured: Captured
    wanted_outputs: tuple[bool, ...]
    kinds: tuple[tuple[Any, ...], ...]
    primals: tuple[torch.Tensor, ...]
    in_spec: pytree.PyTreeSpec
    name: str

    @internals.outside_dynamo
    def __call__(self, *cotangents: Any) -> tuple[Any, ...]:
        if len(cotangents) != 1:
            raise CotangentError(
                f"{self.name}: takes one cotangent with the structure of the output, given"
                f" {len(cotangents)}",
                fix="For an output that is a tuple pass a tuple: `pullback((a, b))`.",
            )
        given = self._check(cotangents[0])
        found = run(
            f"{self.name}_backward", self.split.backward, (*self.residuals, *given), self.captured
        )
        wanted = iter(self.split.gradients)
        leaves: list[torch.Tensor] = []
        for primal in self.primals:
            place = next(wanted) if is_differentiable(type_of_value(primal)) else None
            leaves.append(torch.zeros_like(primal) if place is None else found[place])
        return pytree.unflatten(self.in_spec, leaves)

    def _check(self, cotangents: Any) -> list[Any]:
        leaves, spec = pytree.flatten(cotangents)
        different = pytree.difference(spec, self.captured.out_spec, "cotangent", "out")
        if different is not None:
            raise CotangentError(
                f"{self.name}: Expected pytree structure of the cotangent to be that of the output,"
                f" but {different}"
            )
        tensors = [
            leaf
            for leaf, known in zip(leaves, self.captured.out_leaves, strict=True)
            if known is TENSOR
        ]
        paths = zip(self.captured.paths("cotangent"), self.captured.paths(), strict=True)
        given: list[Any] = []
        rest = zip(self.wanted_outputs, self.kinds, strict=True)
        for value, (mine, its), (wanted, kind) in zip(tensors, paths, rest, strict=False):
            if not wanted:
                continue
            if kind_of_tensor(value) != kind:
                have = type_of_value(value) if isinstance(value, torch.Tensor) else described(value)
                type = type_of_kind(kind)
                raise CotangentError(f"{self.name}: {mine} is {have}, but {its} is {type}")
            given.append(value)
        return given


@overload
def vjp(
    f: Callable[..., R], *primals: Any, has_aux: Choice[False] = False
) -> tuple[R, Pullback]: ...
@overload
def vjp(
    f: Callable[..., tuple[R, A]], *primals: Any, has_aux: Choice[True]
) -> tuple[R, Pullback, A]: ...
@overload
def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool) -> Any: ...
@spelled(
    aux="has_aux",
    primals="Pass the primals one by one: `vjp(f, x, y)`.",
    reduce_axes="Leave it out: batch dims have no names.",
    strict="Leave it out: a primal that the output does not depend on has a gradient of zeros.",
    create_graph="Leave it out: the pullback is a function like any other.",
    v="The cotangent is the argument of the pullback: `vjp(f, x)[1](v)`.",
)
def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Evaluate f and prepare its vector-Jacobian product.

    Law: ``<ct, jvp(f)(x; v)> == <pullback(ct), v>`` for all v and ct.

    Args:
        f: any function of the primals; with has_aux it returns `(output, aux)`.
        primals: pytrees of tensors, one for each argument of f.

    Returns:
        `(output, pullback)` or `(output, pullback, aux)`. `pullback(cotangent)` takes the structure
            of the output and returns a tuple with one cotangent for each primal.

    Raises:
        CotangentError: the cotangent differs from the output in structure, shape or dtype.

    Example:
        >>> y, pullback = vjp(torch.sin, torch.zeros(2))
        >>> pullback(torch.ones(2))
        (tensor([1., 1.]),)

    Source: torch.func.vjp for the signature.
    """
    if internals.is_dynamo_compiling() and internals.is_one_graph():
        return torch.func.vjp(f, *primals, has_aux=has_aux)
    make = functools.partial(_plan_of_vjp, f, primals, has_aux=has_aux)
    return planned(("vjp", f, has_aux), primals, {}, make)


def _check_tensors(primals: tuple[Any, ...], leaves: Sequence[Any]) -> None:
    for path, leaf in zip(pytree.paths(primals, "primals"), leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise NotDifferentiable(f"vjp: {path} is {kind_of(leaf)}; pass numbers as tensors")


def _plan_of_vjp(
    f: Callable[..., Any],
    primals: tuple[Any, ...],
    capture: Callable[..., Captured],
    *,
    has_aux: bool,
) -> Plan:
    name = callable_name(f)
    leaves, in_spec = pytree.flatten(primals)
    _check_tensors(primals, leaves)
    places = range(len(leaves))
    captured = capture(f, primals, inside="vjp", differentiated=places, known=EVERY_LEAF)
    main = main_output(captured, has_aux, "vjp(f, *primals)")
    check_output(captured, main, "vjp(f, *primals)")
    types = captured.trace.output_types
    wanted = tuple(flag and is_differentiable(type) for flag, type in zip(main, types, strict=True))
    num_leaves, count = len(leaves), len(captured.trace.outputs)
    active = tuple(
        place < num_leaves and is_differentiable(var.type)
        for place, var in enumerate(captured.trace.inputs)
    )
    split = reverse.forward_backward(captured.trace, active, wanted, fused=is_to_be_fused())
    split = told_by_inputs(self_contained(split))
    shown = main_only(captured) if has_aux else captured

    def arrange(inputs: Sequence[Any], outputs: tuple[Any, ...]) -> Any:
        residuals = split.residual_values(inputs, outputs)
        backward, residuals = unwritten(captured, split.backward, residuals)
        result = captured.result(write_back(captured, inputs, outputs[:count]))
        found = tuple(map(kind_of_tensor, outputs[:count]))  # sizes that depend on data are known
        halves, given = replace(split, backward=backward), tuple(inputs[:num_leaves])
        known = found, given, in_spec, f"vjp_{name}"
        pullback = Pullback(halves, residuals, shown, wanted, *known)
        return (result[0], pullback, result[1]) if has_aux else (result, pullback)

    return Plan(f"{name}_forward", captured, split.forward, arrange, later=(split.backward,))
