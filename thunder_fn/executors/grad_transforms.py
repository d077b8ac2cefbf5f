"""Grad transforms: forward and backward of an op as one function.

    def mul_grad(a, b):
        out = a * b
        g = get_grad(out)
        put_grads((a, b), (b * g, a * g))
        return out

The function is captured once with cotangents as further inputs, and cut in two: the equations that
depend on a cotangent are the backward. The op becomes a `custom_vjp` equation with that rule,
before any transform sees it; lowering takes it away again where nobody asked for a gradient.

Source: `get_grad` and `put_grad` are lightning-thunder's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch

from thunder_fn.capture import current, pytree
from thunder_fn.capture.recorder import Recorder
from thunder_fn.capture.replaced.lookasides import lookasides
from thunder_fn.capture.rewriting import remembered_in_context, rewritten_by
from thunder_fn.derived.leaf_vjp import alone, is_differentiable
from thunder_fn.errors import ExecutorError, kind_of, with_article
from thunder_fn.executors.matching import LAYOUT_IS_UNKNOWN, apply_to, located_in
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import ops
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import numbered
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.splitting import dependent, handing_on, split
from thunder_fn.ir.text import shown
from thunder_fn.ir.trace import (
    Equation,
    Literal,
    TensorType,
    Trace,
    TraceBuilder,
    Type,
    Var,
    cut,
    type_of_value,
)
from thunder_fn.ir.walking import inline_into
from thunder_fn.structured.custom_vjp import CUSTOM_VJP
from thunder_fn.structured.shared import custom_calls as calls

# ---- for users ----


@dataclass(slots=True)
class _Joint:
    """A grad transform that is being captured: what it asked for and what it gave, by variable."""

    recorder: Recorder
    where: str
    cotangents: list[tuple[Var, torch.Tensor]] = field(default_factory=list)
    gradients: dict[Var, torch.Tensor | None] = field(default_factory=dict)
    inputs: tuple[Var, ...] = ()


_joint: ContextVar[_Joint | None] = ContextVar("thunder_fn_grad_transform", default=None)


def get_grad(output: torch.Tensor) -> torch.Tensor:
    """Return the cotangent of an output, in a grad transform.

    Law: it is what reverse mode hands to the operator, and the same for each call on an output.

    Raises:
        ExecutorError: this is no grad transform, or `output` is no tensor of it.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> from thunder_fn.extend import OperatorExecutor, get_grad, put_grad
        >>> def twice_as_steep(a):
        ...     out = a * 1
        ...     put_grad(a, 2 * get_grad(out))
        ...     return out
        >>> ex, same = OperatorExecutor("mine"), lambda a: a * 1
        >>> steep = ex.register_operator("steep", fn=same, like=same, grad_transform=twice_as_steep)
        >>> tfn.grad(lambda x: steep(x).sum())(torch.ones(2))
        tensor([2., 2.])
    """
    joint = _running("get_grad")
    var = joint.recorder.var_of(output) if isinstance(output, torch.Tensor) else None
    if var is None or not isinstance(var.type, TensorType) or not is_differentiable(var.type):
        raise ExecutorError(
            f"{joint.where}: get_grad takes a floating tensor that is returned, given"
            f" {_told(output)}"
        )
    for known, cotangent in joint.cotangents:
        if known == var:
            return cotangent
    cotangent = joint.recorder.input_of_type(var.type)
    joint.cotangents.append((var, cotangent))
    return cotangent


def put_grad(argument: Any, gradient: torch.Tensor | None) -> None:
    """Add to the gradient of an argument, in a grad transform. Numbers have none; None is zero.

    Law: the gradient of an argument is the sum of all that is put for it.

    Raises:
        ExecutorError: this is no grad transform, `argument` is no argument, or the gradient has
            another type.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> from thunder_fn.extend import OperatorExecutor, get_grad, put_grad
        >>> def clipped(a):
        ...     out = a.square()
        ...     put_grad(a, (2 * a * get_grad(out)).clamp(-1, 1))
        ...     return out
        >>> ex, square = OperatorExecutor("mine"), torch.square
        >>> gentle = ex.register_operator("gentle", fn=square, like=square, grad_transform=clipped)
        >>> tfn.grad(lambda x: gentle(x).sum())(torch.tensor([0.25, 3.0]))
        tensor([0.5000, 1.0000])
    """
    joint = _running("put_grad")
    if not isinstance(argument, torch.Tensor):
        return
    var = joint.recorder.var_of(argument)
    if var is None or var not in joint.inputs:
        raise ExecutorError(
            f"{joint.where}: put_grad was given a tensor that is no argument: {_told(argument)}"
        )
    if gradient is None:
        joint.gradients.setdefault(var, None)
        return
    if not isinstance(gradient, torch.Tensor) or type_of_value(gradient) != var.type:
        raise ExecutorError(
            f"{joint.where}: the gradient of argument {joint.inputs.index(var)} is"
            f" {_told(gradient)}, but the argument is {var.type}",
            fix=(
                "Give it the argument's shape and dtype, e.g. with `.sum_to_size(a.shape)` or"
                " `.to(a.dtype)`."
            ),
        )
    known = joint.gradients.get(var)
    joint.gradients[var] = gradient if known is None else known + gradient


def put_grads(arguments: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
    """`put_grad` for several arguments.

    Law: as `put_grad` one by one.

    Raises:
        ExecutorError: there are more of one than of the other, or as for `put_grad`.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> from thunder_fn.extend import OperatorExecutor, get_grad, put_grads
        >>> def mul_grad(a, b):
        ...     out = a * b
        ...     g = get_grad(out)
        ...     put_grads((a, b), (b * g, a * g))
        ...     return out
        >>> ex = OperatorExecutor("mine")
        >>> mul = ex.register_operator("mul", fn=torch.mul, like=torch.mul, grad_transform=mul_grad)
        >>> tfn.grad(lambda x: mul(x, torch.ones(2)).sum())(torch.zeros(2))
        tensor([1., 1.])
    """
    joint = _running("put_grads")
    if len(arguments) != len(gradients):
        raise ExecutorError(
            f"{joint.where}: put_grads got {len(arguments)} arguments and {len(gradients)}"
            " gradients"
        )
    for argument, gradient in zip(arguments, gradients, strict=True):
        put_grad(argument, gradient)


def _running(name: str) -> _Joint:
    joint = _joint.get()
    if joint is None:
        raise ExecutorError(
            f"{name} was called outside a grad transform", fix="Register one: `grad_transform=`."
        )
    if current() is not joint.recorder:
        raise ExecutorError(
            f"{joint.where}: {name} was called inside another transform or a body of control flow"
        )
    return joint


def _told(value: Any) -> str:
    return (
        str(type_of_value(value))
        if isinstance(value, torch.Tensor)
        else f"{kind_of(value)}: {shown(value, 40)}"
    )


# ---- from a grad transform to a rule ----


CapturedRule = tuple[Trace, Trace, tuple[int | None, ...]]
"""fwd, bwd and which gradient belongs to which operand, as `custom_vjp` wants them."""


Transform = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class DerivedRule:
    """A grad transform cut in two, and the gradients that it says nothing about.

    `put` says for each operand whether the transform gives its gradient, zero included; `asked`
    says for each output whether it asks for its cotangent.
    """

    captured: CapturedRule
    put: tuple[bool, ...]
    asked: tuple[bool, ...]
    where: str

    def check_wanted(
        self, inputs: Sequence[bool], outputs: Sequence[bool], equation: Equation
    ) -> None:
        """Raise if the transform says nothing about a gradient that is wanted: it would be zero,
        and nobody would know.

        Args:
            inputs, outputs: whose gradients are wanted, and who has a cotangent.
        """
        lost = next(
            (
                i
                for i, (want, flag) in enumerate(zip(outputs, self.asked, strict=True))
                if want > flag
            ),
            None,
        )
        if lost is not None:
            what = (
                f"{self.where}: the gradient through result {lost} would be lost: the grad"
                " transform does not ask for it"
            )
            raise ExecutorError(located_in(what, equation, f"Call `get_grad` of result {lost}."))
        lost = next(
            (
                i
                for i, (want, flag) in enumerate(zip(inputs, self.put, strict=False))
                if want > flag
            ),
            None,
        )
        if lost is not None:
            type = equation.operands[lost].type
            what = (
                f"{self.where}: the grad transform gives no gradient for argument {lost},"
                f" {with_article(type)}"
            )
            fix = "Call `put_grad` for it; with None if the gradient is zero."
            raise ExecutorError(located_in(what, equation, fix))


def derive_rule(
    transform: Transform, operands: Sequence[Type], outputs: Sequence[Type], where: str
) -> DerivedRule:
    """Capture a grad transform and cut it in two.

    Args:
        transform: a function of the operands.
        operands, outputs: their types, and those of what it has to return.
        where: whose transform it is, for errors.

    Raises:
        ExecutorError: it returns something else, or asks for the gradient of what it does not
            return.
    """

    def run() -> tuple[Trace, list[tuple[int, ...]], list[bool], tuple[bool, ...]]:
        given: list[tuple[int, ...]] = []
        flags: list[bool] = []
        put: list[bool] = []

        def joint(*tensors: Any) -> Any:
            with _capturing(where, tensors) as state:
                result = transform(*tensors)
                results = pytree.tensors_in(result)
                _check_results(results, outputs, where)
                given.extend(_asked(state, results))
                put.extend(var in state.gradients for var in state.inputs)
                gradients = [state.gradients.get(var) for var in state.inputs]
                flags.extend(gradient is not None for gradient in gradients)
                return (*results, *(gradient for gradient in gradients if gradient is not None))

        joint.__name__ = f"{where}_grad"
        captured = calls.captured_body("grad_transform", joint, calls.examples_of(operands))
        return captured.trace, given, flags, tuple(put)

    with rewritten_by(None), lookasides(LAYOUT_IS_UNKNOWN):
        trace, given, flags, put = calls.inside_capture(run)
    asked = {position for places in given for position in places}
    found = tuple(position in asked for position in range(len(outputs)))
    return DerivedRule(_cut(trace, len(operands), given, flags, outputs), put, found, where)


@contextmanager
def _capturing(where: str, tensors: Sequence[torch.Tensor]) -> Generator[_Joint]:
    recorder = current()
    assert recorder is not None, "a capture is running"
    variables = tuple(recorder.var_of(recorder.lift(tensor)) for tensor in tensors)
    state = _Joint(recorder, where, inputs=tuple(var for var in variables if var is not None))
    with setting(_joint, state):
        yield state


def _check_results(results: Sequence[torch.Tensor], outputs: Sequence[Type], where: str) -> None:
    found = tuple(map(type_of_value, results))
    if found != tuple(outputs):
        texts = f"({', '.join(map(str, found))}), but the op gives ({', '.join(map(str, outputs))})"
        raise ExecutorError(f"{where}: the grad transform returned {texts}")


def _asked(state: _Joint, results: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """The positions of the output for each cotangent that was asked for, in order."""
    positions = [state.recorder.var_of(state.recorder.lift(result)) for result in results]
    found: list[tuple[int, ...]] = []
    for var, _ in state.cotangents:
        if var not in positions:
            raise ExecutorError(
                f"{state.where}: get_grad was asked for the gradient of {with_article(var.type)}"
                " that is not returned"
            )
        found.append(tuple(position for position, other in enumerate(positions) if other == var))
    return found


def _cut(
    trace: Trace,
    count: int,
    given: Sequence[tuple[int, ...]],
    flags: Sequence[bool],
    outputs: Sequence[Type],
) -> CapturedRule:
    """fwd: operands to outputs and residuals; bwd: residuals and all cotangents to gradients.

    `given` says for each cotangent that was asked for which outputs it is of; `flags` who has a
    gradient.
    """
    flat, names = dce(trace), (f"{trace.name}_fwd", f"{trace.name}_bwd")
    late = dependent(flat, tuple(i >= count for i in range(len(flat.inputs))))
    results, gradients = flat.outputs[: len(outputs)], flat.outputs[len(outputs) :]
    halves = split(flat, late, (results, gradients), names=names)
    builder = TraceBuilder(halves.backward.name)
    residuals = [
        builder.input(type) for type in halves.backward.input_types[: len(halves.residuals)]
    ]
    cotangents = builder.take_some(outputs, map(is_differentiable, outputs))
    # more than one place: a tensor that is returned several times
    sums = [
        reduce(partial(_sum, builder), [cotangents[place] for place in places]) for places in given
    ]
    fwd = handing_on(halves)
    bwd = builder.build(inline_into(builder, halves.backward, (*residuals, *sums)))
    return fwd, bwd, numbered(flags)


def _sum(builder: TraceBuilder, a: Any, b: Any) -> Any:
    return ops.emit(builder, ops.aten.add.Tensor, (a, b), a.type)


@remembered_in_context(4096)
def _derived(rule: LazyRule) -> DerivedRule:
    return rule.derive()


@dataclass(frozen=True)
class LazyRule(calls.Rule):
    """The rule of a `custom_vjp` equation before it is captured, which happens when a derivative
    asks for it.
    """

    primal: Trace

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the equation."""
        return {"rule": self, "gradients": (None,) * len(self.primal.inputs)}

    def derive(self) -> DerivedRule:
        """The rule, captured."""
        raise NotImplementedError

    def capture(self) -> CapturedRule:
        """The rule's bodies."""
        return _derived(self).captured

    def check_wanted(
        self, inputs: Sequence[bool], outputs: Sequence[bool], equation: Equation
    ) -> None:
        """Raise if the rule says nothing about a gradient that is wanted."""
        _derived(self).check_wanted(inputs, outputs, equation)


@dataclass(frozen=True)
class _ImplementationRule(LazyRule):
    """An executor's grad transform for one equation."""

    transform: Transform
    name: str

    @property
    def __name__(self) -> str:
        return self.name.replace(": ", "_")

    def derive(self) -> DerivedRule:
        """The executor's rule."""
        (equation,) = self.primal.equations
        operands, outputs = (
            [var.type for var in side] for side in (equation.operands, equation.outputs)
        )
        try:
            return derive_rule(
                partial(apply_to, self.transform, equation), operands, outputs, self.name
            )
        except ExecutorError as error:
            raise ExecutorError(located_in(str(error), equation)) from error


# ---- the rules of executors, put into a trace ----


@dataclass(frozen=True)
class GradTransforms:
    """The rewrite that gives ops the grad transforms that executors have for them.

    `executors` are frozen; each has `grad_transform_of(equation)`, a function and a name, or None.

    Law: it keeps what a trace computes; only its derivatives change.
    """

    executors: tuple[Any, ...]

    def __call__(self, trace: Trace, done: frozenset[Trace]) -> Trace:
        """The trace with `custom_vjp` equations around the ops that have a grad transform, but
        for bodies that are done.
        """
        return _rewrite(self, trace, done) if self.executors else trace

    def rule_of(self, equation: Equation) -> tuple[Transform, str] | None:
        """The first executor's that has one."""
        found = (executor.grad_transform_of(equation) for executor in self.executors)
        return next((one for one in found if one is not None), None)


@memo(1024)
def _rewrite(transforms: GradTransforms, trace: Trace, done: frozenset[Trace]) -> Trace:
    equations = [_with_rule(transforms, equation, done) for equation in trace.equations]
    is_changed = any(new is not old for new, old in zip(equations, trace.equations, strict=True))
    return cut(trace, equations=equations) if is_changed else trace


def _with_rule(transforms: GradTransforms, equation: Equation, done: frozenset[Trace]) -> Equation:
    """The equation with its rule around it, or in its body."""
    found = None if equation.op.kind == "structured" else transforms.rule_of(equation)
    if found is not None and any(
        is_differentiable(var.type) for var in (*equation.operands, *equation.outputs)
    ):
        primal = alone(equation)
        kwargs = tuple(
            (key, Literal(value))
            for key, value in _ImplementationRule(primal, *found).options.items()
        )
        return replace(
            equation, op=CUSTOM_VJP, args=equation.operands, kwargs=kwargs, bodies=(primal,)
        )
    if (
        equation.op.kind == "composite"
        and not ops.is_operator(equation.op)
        and equation.body not in done
    ):
        body = _rewrite(transforms, equation.body, done)
        return equation if body is equation.body else replace(equation, bodies=(body,))
    return equation
