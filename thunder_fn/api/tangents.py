"""jvp and linearize: derivatives along given directions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal as Choice, TypeVar, overload

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.api.calling import (
    check_output,
    kind_of_tensor,
    main_only,
    main_output,
    run,
    type_of_kind,
    unwritten,
    write_back,
)
from thunder_fn.api.captures import Plan, planned
from thunder_fn.capture import EVERY_LEAF, Captured, current, pytree
from thunder_fn.capture.apply import join, shows_inputs
from thunder_fn.capture.numbers.python_numbers import running_zeros
from thunder_fn.capture.replaced.lookasides import divert
from thunder_fn.capture.scopes import user_source
from thunder_fn.capture.supported import is_wrapped
from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.errors import AliasedMutation, NotDifferentiable, TangentError, kind_of, spelled
from thunder_fn.interpreters.jvp import JvpRule, jvp_trace
from thunder_fn.interpreters.partial_eval import partial_eval
from thunder_fn.ir import text
from thunder_fn.ir.rules import chosen, scattered
from thunder_fn.ir.trace import Trace, type_of_value
from thunder_fn.torch_internals import have_one_memory, shares_memory

R = TypeVar("R")
A = TypeVar("A")


@overload
def jvp(
    f: Callable[..., R],
    primals: Any,
    tangents: Any,
    *,
    strict: bool = False,
    has_aux: Choice[False] = False,
) -> tuple[R, R]: ...
@overload
def jvp(
    f: Callable[..., tuple[R, A]],
    primals: Any,
    tangents: Any,
    *,
    strict: bool = False,
    has_aux: Choice[True],
) -> tuple[R, R, A]: ...
@overload
def jvp(
    f: Callable[..., Any], primals: Any, tangents: Any, *, strict: bool = False, has_aux: bool
) -> Any: ...
@spelled(
    aux="has_aux",
    inputs="primals",
    v="tangents",
    create_graph="Leave it out: a tangent is differentiated like any other value.",
)
def jvp(
    f: Callable[..., Any],
    primals: Any,
    tangents: Any,
    *,
    strict: bool = False,
    has_aux: bool = False,
) -> Any:
    """Evaluate f and its derivative along the tangents.

    Law: the tangent of the output is linear in the tangents, and equals ``vjp(f)``'s transpose.
        A constant adds no term, so an infinity in a constant factor makes no NaN.

    Args:
        f: any function of the primals; with has_aux it returns `(output, aux)`.
        primals: a tuple of pytrees of tensors, one for each argument of f.
        tangents: the same structure, shapes and dtypes.
        strict: raise if the output does not depend on the primals.

    Returns:
        `(output, tangent of the output)`, or `(output, tangent, aux)`. Outputs that do not depend
            on the primals have tangents of zeros.

    Raises:
        TangentError: the tangents differ from the primals in structure, shape or dtype.

    Example:
        >>> jvp(torch.sin, (torch.zeros(2),), (torch.ones(2),))
        (tensor([0., 0.]), tensor([1., 1.]))

    Source: torch.func.jvp for the signature.
    """
    if internals.is_dynamo_compiling() and internals.is_one_graph():
        return torch.func.jvp(f, primals, tangents, strict=strict, has_aux=has_aux)
    make = functools.partial(_plan_of_jvp, f, primals, tangents, has_aux=has_aux, strict=strict)
    whole = functools.partial(jvp, f, has_aux=has_aux, strict=strict)
    return planned(("jvp", f, has_aux, strict), (primals, tangents), {}, make, whole)


def _plan_of_jvp(
    f: Callable[..., Any],
    primals: Any,
    tangents: Any,
    capture: Callable[..., Captured],
    *,
    has_aux: bool,
    strict: bool,
) -> Plan:
    leaves = check_primals(primals, "jvp")
    given = check_tangents(primals, tangents)
    captured = capture(f, tuple(primals), inside="jvp", known=EVERY_LEAF)
    _check_apart(captured, leaves, given)
    main = main_output(captured, has_aux, "jvp(f, primals, tangents)")
    check_output(captured, main, "jvp(f, primals, tangents)")
    active = tuple(is_differentiable(type_of_value(leaf)) for leaf in leaves)
    count, further = len(leaves), len(captured.trace.inputs) - len(leaves)
    rule = jvp_trace(captured.trace, (*active, *(False,) * further))

    def inputs_of(tensors: Sequence[Any], closed: Sequence[Any]) -> Sequence[Any]:
        return (*tensors[:count], *closed, *chosen(tensors[count:], active))

    def arrange(inputs: Sequence[Any], outputs: tuple[Any, ...]) -> Any:
        return _arrange(captured, rule, outputs, main, inputs, has_aux, strict)

    name = f"jvp_{captured.trace.name}"
    return Plan(name, captured, rule.trace, arrange, inputs_of)


def _check_apart(
    captured: Captured, leaves: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
) -> None:
    """Refuse a write to memory of a tangent: PyTorch reads the tangent after it, of which a
    trace has the value before.
    """
    recorder = current()
    place: Callable[[torch.Tensor], torch.Tensor] = lambda one: (
        one if recorder is None else recorder.lift(one)
    )
    share = shares_memory if recorder is None else have_one_memory
    for write in captured.writes:
        target = place(leaves[write.target] if isinstance(write.target, int) else write.target)
        for tangent in map(place, tangents):
            if not is_wrapped(target) and not is_wrapped(tangent) and share(target, tangent):
                what = (
                    "jvp: the function changes a tensor in place that shares memory with a tangent"
                )
                fix = "Pass a clone as the tangent."
                raise AliasedMutation(what, source=user_source(), fix=fix)


def _arrange(
    captured: Captured,
    rule: JvpRule,
    outputs: tuple[Any, ...],
    main: tuple[bool, ...],
    inputs: Sequence[Any],
    has_aux: bool,
    strict: bool,
) -> Any:
    count = len(captured.trace.outputs)
    tangents = scattered(outputs[count:], rule.active_outputs)
    if strict and any(
        tangent is None for tangent, flag in zip(tangents, main, strict=True) if flag
    ):
        raise TangentError(
            "jvp: with strict=True every output depends on the primals, but one does not"
        )
    result = captured.result(write_back(captured, inputs, outputs[:count]))
    tangents, active = [*tangents], itertools.accumulate(rule.active_outputs, initial=count)
    join(captured, rule.trace, inputs, tangents, at=[*active])
    shown = main_only(captured) if has_aux else captured
    filled = tuple(
        _zero_of(value) if tangent is None else tangent
        for value, tangent, flag in zip(outputs[:count], tangents, main, strict=True)
        if flag
    )
    tangent_out = shown.tangent(filled)
    return (result[0], tangent_out, result[1]) if has_aux else (result, tangent_out)


def _zero_of(value: Any) -> Any:
    """The tangent of an output that does not depend on the primals: a tensor, or a number that
    the trace computes.
    """
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)


def check_primals(primals: Any, name: str) -> list[torch.Tensor]:
    """The leaves of the primals, all of them tensors."""
    if not isinstance(primals, (tuple, list)):
        raise TangentError(
            f"{name}: Expected primals to be a tuple with one entry for each argument, given"
            f" {kind_of(primals)}",
            fix="Put a single argument into a tuple: `(x,)`, and its tangent too.",
        )
    leaves, _ = pytree.flatten(tuple(primals))
    for path, leaf in zip(pytree.paths(tuple(primals), "primals"), leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise NotDifferentiable(
                f"{name}: Expected primals to only contain Tensors, but {path} is {kind_of(leaf)};"
                " pass numbers as tensors"
            )
    if not leaves:
        raise NotDifferentiable(
            f"{name}: Expected primals to contain at least one Tensor, given"
            f" {text.shown(primals, 40)}"
        )
    return leaves


def check_tangents(primals: Any, tangents: Any, name: str = "jvp") -> list[torch.Tensor]:
    """The leaves of the tangents, which match the primals."""
    leaves, spec = pytree.flatten(tuple(primals))
    if not isinstance(tangents, (tuple, list)):
        raise TangentError(
            f"{name}: Expected tangents to be a tuple of the same python structure as primals,"
            f" given {kind_of(tangents)}",
            fix="Put the tangent of a single argument into a tuple: `(t,)`.",
        )
    given, given_spec = pytree.flatten(tuple(tangents))
    different = pytree.difference(given_spec, spec, "tangents", "primals")
    if isinstance(tangents, list) != isinstance(primals, list):
        different = f"tangents is {kind_of(tangents)}, and primals is {kind_of(primals)}"
    if different is not None:
        raise TangentError(
            f"{name}: Expected primals and tangents to have the same python structure, but"
            f" {different}"
        )
    for path, primal, tangent in zip(
        pytree.paths(tuple(primals), "tangents"), leaves, given, strict=True
    ):
        if not isinstance(tangent, torch.Tensor):
            raise TangentError(
                f"{name}: Expected tangents to only contain Tensors, but {path} is"
                f" {kind_of(tangent)}, and its primal is {type_of_value(primal)}"
            )
        if kind_of_tensor(tangent) != kind_of_tensor(primal):
            have, wanted = type_of_value(tangent), type_of_value(primal)
            raise TangentError(f"{name}: {path} is {have}, but its primal is {wanted}")
    return given


@dataclass(frozen=True)
class Linear:
    """The result of `linearize`: a linear function from tangents of the primals to the tangent
    of the output.
    """

    KEY: ClassVar = "captured", "residuals", "primals"
    """The fields from which the others follow."""

    trace: Trace
    residuals: tuple[torch.Tensor, ...]
    captured: Captured
    active: tuple[bool, ...]
    active_outputs: tuple[bool, ...]
    primals: Any
    kinds: tuple[tuple[Any, ...], ...]
    device: torch.device | None = None

    @internals.outside_dynamo
    def __call__(self, *tangents: Any) -> Any:
        given = check_tangents(self.primals, tangents, "linearize")
        of, active = self.captured.trace, chosen(given, self.active)
        found = run(f"{of.name}_linear", self.trace, (*self.residuals, *active), self.captured)
        shown = shows_inputs(self.trace)
        own = [value.clone() if flag else value for value, flag in zip(found, shown, strict=True)]
        filled = tuple(
            value if value is not None else running_zeros(type_of_kind(kind)) if kind else 0
            for kind, value in zip(self.kinds, scattered(own, self.active_outputs), strict=True)
        )
        return self.captured.tangent(filled)


@spelled(
    has_aux="Leave it out: f may return a tuple, and the tangents of what is not needed are free.",
    primals="Pass the primals one by one: `linearize(f, x, y)`.",
)
def linearize(f: Callable[..., R], *primals: Any) -> tuple[R, Linear]:
    """Evaluate f and give its derivative at the primals as a linear function, computed once.

    Law: ``linearize(f, x)[1](v) == jvp(f, (x,), (v,))[1]``.

    Raises:
        NotDifferentiable: a primal is no tensor.

    Example:
        >>> value, derivative = linearize(lambda x: x ** 3, torch.tensor(2.0))
        >>> value, derivative(torch.tensor(1.0)), derivative(torch.tensor(0.5))
        (tensor(8.), tensor(12.), tensor(6.))

    Source: torch.func.linearize for the signature; autodidax part 4 for the partial evaluation.
    """
    if internals.is_dynamo_compiling() and internals.is_one_graph():
        derivative: Any = lambda *tangents: torch.func.jvp(f, primals, tangents)[1]
        return f(*primals), derivative
    make = functools.partial(_plan_of_linearize, f, primals)
    return planned(("linearize", f), primals, {}, make)


def _plan_of_linearize(
    f: Callable[..., Any], primals: tuple[Any, ...], capture: Callable[..., Captured]
) -> Plan:
    leaves = check_primals(primals, "linearize")
    captured = capture(f, primals, inside="linearize", known=EVERY_LEAF)
    active = tuple(is_differentiable(type_of_value(leaf)) for leaf in leaves)
    further = len(captured.trace.inputs) - len(leaves)
    rule = jvp_trace(captured.trace, (*active, *(False,) * further))
    count, num_inputs = len(captured.trace.outputs), len(captured.trace.inputs)
    known = (True,) * num_inputs + (False,) * (len(rule.trace.inputs) - num_inputs)
    first, second = partial_eval(
        rule.trace, known, (True,) * count + (False,) * (len(rule.trace.outputs) - count)
    )
    flags = rule.active_outputs[: captured.num_results]
    spec, num_leaves = pytree.flatten(primals)[1], len(leaves)

    def arrange(inputs: Sequence[Any], outputs: tuple[Any, ...]) -> Any:
        linear, residuals = unwritten(captured, second, outputs[count:])
        result = captured.result(write_back(captured, inputs, outputs[:count]))
        given = pytree.unflatten(spec, inputs[:num_leaves])
        kinds = tuple(map(kind_of_tensor, outputs[: captured.num_results]))
        return result, Linear(linear, residuals, captured, active, flags, given, kinds)

    return Plan(f"{captured.trace.name}_primal", captured, first, arrange, later=(second,))


divert("linearize", linearize)
