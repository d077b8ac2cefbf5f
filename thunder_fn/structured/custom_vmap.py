"""custom_vmap: a function with its own batching rule.

    outputs = custom_vmap(*operands, rule=call)       one body, on the operands

The operands are the tensors of the arguments, then what the function closes over. vmap captures the
rule for the operands that are batched. Values that the rule closes over become constants. A batch
of batches asks the rule once, for the inner vmap, and batches its result.

Derivatives are those of the function, so that vmap of a gradient batches the gradient's own ops;
the gradient of a vmap differentiates the rule.

Source: jax.custom_batching.custom_vmap for the semantics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder_fn.capture import TENSOR, Captured, current
from thunder_fn.capture.numbers.python_numbers import running
from thunder_fn.capture.rewriting import rules_in_context
from thunder_fn.errors import CustomRuleError
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.vmap import batched_types
from thunder_fn.ir.rules import CHECK, DCE, EVALUATE, VMAP, Mask, keep_all
from thunder_fn.ir.trace import Dim, Equation, Op, Trace, Type
from thunder_fn.structured.shared import custom_calls as calls
from thunder_fn.structured.shared.bind import bind
from thunder_fn.structured.shared.custom_calls import Call, F, P, R
from thunder_fn.structured.shared.wrapping import wrapper_check_rule

CUSTOM_VMAP = Op("structured", "custom_vmap")


# ---- check ----


CHECK.enter(wrapper_check_rule, "custom_vmap")


# ---- evaluate ----


@EVALUATE.rule("custom_vmap")
def custom_vmap_evaluate_rule(
    bodies: Sequence[Trace], *operands: Any, **options: Any
) -> tuple[Any, ...]:
    """Run the function; inside a capture, record the call."""
    recorder, (body,) = current(), bodies
    if recorder is None:
        return evaluate(body, operands)
    return bind(recorder, CUSTOM_VMAP, operands, tuple(bodies), body.output_types, **options)


# ---- vmap ----


@VMAP.rule("custom_vmap")
def custom_vmap_vmap_rule(
    equation: Equation, batched: Mask, size: Dim, randomness: str
) -> tuple[Trace, Mask]:
    """The user's rule. Closed-over tensors have no batch dim in it."""
    call, types = equation.literals["rule"], equation.operand_types
    count = sum(call.is_tensor)
    if any(batched[count:]):
        raise CustomRuleError(
            f"custom_vmap: {call.name} closes over a tensor that differs between examples",
            fix="Pass it as an argument.",
        )
    return capture_rule(call, types, batched, size)


@rules_in_context
def capture_rule(
    call: Any, types: tuple[Type, ...], batched: Mask, size: Dim
) -> tuple[Trace, Mask]:
    """Capture the user's rule for operands of which some are batched."""
    count = sum(call.is_tensor)
    wide = batched_types(types, batched, size)
    flags: list[bool] = []

    def run() -> Captured:
        examples = calls.examples_of(types[:count])
        captured = calls.captured_body("custom_vmap", call.primal, examples)

        def rule(*tensors: Any) -> Any:
            outputs, flags[:] = call.vmap(captured, size, batched[:count], tensors)
            return outputs

        rule.__name__ = f"{call.name}_vmap"
        return calls.captured_body("custom_vmap", rule, calls.examples_of(wide[:count]))

    return calls.with_inputs(calls.inside_capture(run, call.begun).trace, wide), tuple(flags)


DCE.enter(keep_all, "custom_vmap")


# ---- for users ----


class VmapCall(Call):
    """A call of a `custom_vmap` function, and the use of its rule."""

    def vmap(
        self, primal: Captured, size: Dim, batched: Mask, tensors: Sequence[Any]
    ) -> tuple[tuple[Any, ...], list[bool]]:
        """The outputs and which of them are batched, from the user's rule."""
        where = f"custom_vmap: the rule of {self.name}"
        in_batched = self.tree(batched, lambda leaf: False)
        found = self.function.rule(running(size), in_batched, *self.args(tensors))
        output, out_batched = calls.pair_of(found, "(output, out_batched)", where)
        spread = calls.spread(out_batched, primal.marks, "out_batched", where)
        leaves = zip(spread, primal.out_leaves, strict=True)
        flags = [flag for flag, leaf in leaves if leaf is TENSOR]
        for flag, path in zip(flags, primal.paths("out_batched"), strict=True):
            if not isinstance(flag, bool):
                raise CustomRuleError(
                    f"{where} returned {calls.described(flag)} for {path}, which is a bool"
                )
        types = batched_types(primal.trace.output_types, tuple(flags), size)
        return tuple(calls.tensors_like(output, primal, "out", where, types=types)), flags


class custom_vmap(calls.CustomFunction[P, R]):
    """A function whose batching rule is yours.

    Law: ``vmap(f)`` is the rule; everything else sees f.

    Args:
        f: any PyTorch callable.

    Then `f.def_vmap(rule)`: `rule(axis_size, in_batched, *args)` returns `(output, out_batched)`.
    Batched tensors have their batch dim first. `in_batched` is a tuple with the structure of the
    arguments, `out_batched` has the structure of the output, or is one bool for all of it.

    Raises:
        CustomRuleError: f has no rule when it is batched, or the rule returns something that does
            not fit f.

    Example:
        >>> import torch
        >>> from thunder_fn import vmap
        >>> @custom_vmap
        ... def square(x):
        ...     return x * x
        >>> @square.def_vmap
        ... def square_vmap(axis_size, in_batched, x):
        ...     return x**2 + 100, in_batched[0]
        >>> vmap(square)(torch.ones(2))
        tensor([101., 101.])

    Source: jax.custom_batching.custom_vmap.
    """

    is_differentiated = False
    asked_for = "def_vmap(rule)` before batching it"

    def __init__(self, f: Callable[P, R]) -> None:
        super().__init__(f)

    def def_vmap(self, rule: F) -> F:
        """Set the rule, and return it, so that this is a decorator."""
        self._check_functions(rule)
        self._rule = rule
        return rule

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        recorder = current()
        if recorder is None:
            return self.f(*args, **kwargs)
        call, tensors = self.call(VmapCall, args, kwargs)
        captured = calls.captured_body("custom_vmap", call.primal, tensors)
        return calls.bind_captured(recorder, CUSTOM_VMAP, call, [captured], tensors, rule=call)
