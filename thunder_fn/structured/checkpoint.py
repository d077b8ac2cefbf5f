"""checkpoint: a function whose backward computes residuals again instead of keeping them.

    outputs = checkpoint(*operands, policy=policy)      one body, on the operands

The equation survives every transform, its body transformed, until lowering. Its backward is a
`checkpoint` too. The body of that first computes the residuals again, from the operands and the
values that the policy keeps, and then pulls back. Bodies are closed and cse works on each by
itself, so nothing can merge the recomputation with the forward. As the gradients need it, dce
cannot drop it. Random equations never run again: the policy's choice is completed by the fewest
bytes that make that so (`remat.py`).

Source: jax.checkpoint for the semantics; JAX.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from thunder_fn import torch_internals as internals
from thunder_fn.capture import current, pytree
from thunder_fn.capture.apply import before_writes, write_back
from thunder_fn.capture.generators import drawing_from, random_state
from thunder_fn.capture.replaced.lookasides import divert
from thunder_fn.capture.scopes import user_source
from thunder_fn.errors import CheckpointError, callable_name, kind_of
from thunder_fn.interpreters.checkpoint.answers import Answers, is_marked, mark, unmark
from thunder_fn.interpreters.checkpoint.policies import (
    AllBut,
    Budget,
    Policy,
    check_policy,
    everything_saveable,
)
from thunder_fn.interpreters.checkpoint.recomputed import (
    Kept,
    backward_computing,
    forward_keeping,
    places_of,
)
from thunder_fn.interpreters.checkpoint.remat import (
    keep_random,
    numbers_read,
    recompute,
    variables,
    within_budget,
)
from thunder_fn.interpreters.checkpoint.selective import Selective, policy_of_contexts
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.grad import forward_backward
from thunder_fn.interpreters.partial_eval import partial_eval
from thunder_fn.interpreters.simplify import inline
from thunder_fn.interpreters.under_autograd import evaluate_followed
from thunder_fn.ir import ops
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import (
    CHECK,
    DCE,
    EVALUATE,
    FREE_TYPES,
    LOWER,
    PARTIAL_EVAL,
    VJP,
    VMAP,
    Mask,
    Residual,
    Split,
)
from thunder_fn.ir.symbols import finders
from thunder_fn.ir.text import shown
from thunder_fn.ir.trace import Atom, Equation, Literal, Op, Trace, cut, identity_of, type_of_value
from thunder_fn.structured.barrier import behind_barrier
from thunder_fn.structured.shared.bind import bind
from thunder_fn.structured.shared.bodies import call_on_own, capture_bodies
from thunder_fn.structured.shared.wrapping import (
    wrapped,
    wrapper_check_rule,
    wrapper_dce_rule,
    wrapper_vmap_rule,
)

CHECKPOINT = Op("structured", "checkpoint")


# ---- check ----


@CHECK.rule("checkpoint")
def checkpoint_check_rule(equation: Equation) -> None:
    """Check one body on the operands whose types the outputs have, and the policy."""
    wrapper_check_rule(equation)
    check_policy(policy_of(equation))


def policy_of(equation: Equation) -> Policy:
    """The policy of a checkpoint equation."""
    return equation.literals["policy"]


# ---- evaluate ----


@EVALUATE.rule("checkpoint")
def checkpoint_evaluate_rule(
    bodies: Sequence[Trace], *operands: Any, policy: Any
) -> tuple[Any, ...]:
    """Run the body; inside a capture, record the equation. If values are cheap to have again,
    autograd is told so.
    """
    recorder, (body,) = current(), bodies
    if recorder is None and isinstance(policy, AllBut):
        plain = lambda: evaluate(body, operands)
        return evaluate_followed(CHECKPOINT, tuple(bodies), operands, {"policy": policy}, plain)
    if recorder is None:
        return _eager(lambda *values: evaluate(body, values), policy, operands, {})
    return bind(recorder, CHECKPOINT, operands, tuple(bodies), body.output_types, policy=policy)


def alone(body: Trace, policy: Policy) -> Trace:
    """A trace of one checkpoint equation."""
    return wrapped(CHECKPOINT, (("policy", Literal(policy)),), body)


# ---- split ----


@VJP.rule("checkpoint")
def checkpoint_vjp_rule(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    """The forward keeps the values that the policy chooses; the backward computes the rest
    again.
    """
    return split_checkpoint(equation.body, policy_of(equation), wanted_inputs, wanted_outputs)


@memo(4096)
def split_checkpoint(
    body: Trace, policy: Policy, wanted_inputs: Mask, wanted_outputs: Mask
) -> Split:
    """Split a body for reverse mode, once for each distinct body, policy and question.

    If values are to be chosen, the body is unfolded first; otherwise it keeps its structure.
    """
    split = forward_backward(_marked(body, policy), wanted_inputs, wanted_outputs)
    flat, answers = unmark(split.forward)
    needed = split.residual_values(flat.inputs, flat.outputs)
    return _assemble(body, policy, split, flat, needed, _choose(policy, flat, needed, answers))


def _marked(body: Trace, policy: Policy) -> Trace:
    """Unfold the body, and mark the values that the policy keeps if it decides op by op."""
    if isinstance(policy, (Budget, AllBut)) or policy is everything_saveable:
        return inline(body)
    marked = mark(body, policy)
    return marked if is_marked(marked) or ops.has_effects(body) else body


def _choose(policy: Policy, flat: Trace, needed: Sequence[Atom], answers: Answers) -> Answers:
    inputs = {var.index for var in flat.inputs}
    if policy is everything_saveable:
        kept = frozenset(var.index for var in variables(needed))
    elif isinstance(policy, Budget):
        kept = within_budget(flat, needed, policy.budget_bytes)
    elif isinstance(policy, AllBut):
        kept = frozenset(var.index for var in variables(needed)) - policy.computed_from(
            flat.equations
        )
    else:
        kept = keep_random(flat, needed, answers)
    return {index: answers.get(index, "save") for index in kept if index not in inputs}


def _assemble(
    body: Trace, policy: Policy, split: Split, flat: Trace, needed: Sequence[Atom], kept: Answers
) -> Split:
    # Before: forward: operands -> outputs, needed      backward: needed, cotangents -> gradients
    # After:  forward: operands -> outputs, stored
    #         backward: operands, stored, cotangents -> gradients, which computes `needed` again
    plan = recompute(flat, (*needed, *numbers_read(split.backward, finders(flat))), kept)
    held: Kept = [(var, kept[var.index]) for var in plan.kept]
    stored, residuals = places_of(plan, held, flat, len(body.outputs))
    forward = alone(forward_keeping(flat, len(body.outputs), stored) if stored else body, policy)
    pull = backward_computing(split, flat, needed, plan, held)
    if isinstance(policy, AllBut) and policy.arrange is not None:
        pull = policy.arrange(pull)
    backward = alone(pull, policy) if plan.equations and pull.outputs else pull
    return Split(forward, backward, residuals, split.gradients)


# ---- lower ----


@LOWER.rule("checkpoint")
def checkpoint_lower_rule(equation: Equation) -> Trace:
    """The body behind a barrier: its values are never taken from earlier equations."""
    return behind_barrier(equation.body)


# ---- partial evaluation ----


@PARTIAL_EVAL.rule("checkpoint")
def checkpoint_divide_rule(equation: Equation, known: Mask, flags: Mask) -> tuple[Trace, Trace]:
    """The first half keeps the values that the policy chooses; the second computes the rest again,
    from the known operands.
    """
    # Before: operands -> outputs
    # After:  first:  known operands -> known outputs, known operands that are read again, stored
    #         second: what the first hands on, unknown operands -> unknown outputs
    policy, count = policy_of(equation), sum(flags)
    first, second = partial_eval(_marked(equation.body, policy), known, flags)
    flat, answers = unmark(inline(first))
    needed = flat.outputs[count:]
    kept = _choose(policy, flat, needed, answers)
    plan = recompute(flat, (*needed, *numbers_read(second, finders(flat))), kept)
    stored: Kept = [(var, kept[var.index]) for var in plan.kept]
    forward = forward_keeping(flat, count, stored)
    handed_on = tuple(
        forward.inputs[index] for index, var in enumerate(flat.inputs) if var in plan.inputs
    )
    outputs = (*forward.outputs[:count], *handed_on, *forward.outputs[count:])
    whole = cut(forward, outputs=outputs)
    parts = Split(first, second, tuple(Residual("extra", i) for i in range(len(needed))), ())
    return whole, backward_computing(parts, flat, needed, plan, stored)


VMAP.enter(wrapper_vmap_rule, "checkpoint")
DCE.enter(wrapper_dce_rule, "checkpoint")
FREE_TYPES.enter(True, "checkpoint")


# ---- functions ----


def checkpoint(f: Callable[..., Any], policy: Any = None) -> Callable[..., Any]:
    """f as one checkpoint equation in a trace. See `thunder_fn.checkpoint`."""
    if not callable(f):
        raise CheckpointError(
            f"checkpoint: expected a function, given {kind_of(f)}: {shown(f, 60)}"
        )
    chosen = check_policy(policy)

    @functools.wraps(f)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        recorder = current()
        if recorder is None:
            return _eager(f, chosen, args, kwargs)
        leaves = pytree.tensors_in((args, kwargs))
        bodies = capture_bodies(
            "checkpoint", (_called(f, args, kwargs),), [(args, kwargs)], writes=True, runs_once=True
        )
        (captured,), (body,) = bodies.captured, bodies.bodies
        values = (*before_writes(captured, leaves), *bodies.closures)
        types, strides = body.output_types, captured.strides
        results = bind(recorder, CHECKPOINT, values, (body,), types, strides, policy=chosen)
        return captured.result(write_back(captured, leaves, results))

    return checkpointed


def _called(f: Callable[..., Any], *given: Any) -> Callable[..., Any]:
    def call(args: Any, kwargs: Any) -> Any:
        return call_on_own(f, given, args, kwargs)

    call.__name__ = callable_name(f)
    return call


def _eager(f: Callable[..., Any], policy: Policy, args: Any, kwargs: Any) -> Any:
    """Call PyTorch's own checkpoint: outside a trace there is nothing to transform."""
    follows = torch.is_grad_enabled() and not internals.inside_torch_func()
    if policy is everything_saveable or not follows or internals.is_make_fx():
        return f(*args, **kwargs)
    if torch.compiler.is_compiling():  # Dynamo knows the contexts of selective checkpoints only
        return torch.utils.checkpoint.checkpoint(f, *args, use_reentrant=False, **kwargs)
    options: dict[str, Any] = {"use_reentrant": False, "context_fn": _same_numbers}
    try:
        return torch.utils.checkpoint.checkpoint(f, *args, **options, **kwargs)
    except BaseException as error:
        _leave(error)
        if not isinstance(error, RuntimeError) or "support saved tensor hooks" not in str(error):
            raise
        what = f"checkpoint: {callable_name(f)} calls a transform of torch.func, outside of a trace"
        fix = "Use thunder_fn's transform in it, or call it under `jit`."
        raise CheckpointError(what, source=user_source(), fix=fix) from error


def _leave(error: BaseException) -> None:
    """Leave the contexts of a checkpoint whose function has raised. PyTorch 2.12 keeps them open as
    long as the error lives.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            opened = frame.f_locals.get("gen")
            if isinstance(opened, types.GeneratorType):
                opened.close()


class _Noting(TorchFunctionMode):
    """Notes the generators that ops are given, with their states before. PyTorch sets back the
    default ones only.

    `writes` are those to tensors from outside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[int, tuple[torch.Generator, Callable[[], None]]] = {}
        self.outer: _Noting | None = None
        self.inside = contextlib.ExitStack()
        self.writes = internals.Writes(user_source)

    def __enter__(self) -> _Noting:
        """Take the place of the one around it, which notes what this one does."""
        self.outer = next(
            (mode for mode in reversed(internals.function_modes()) if type(mode) is _Noting), None
        )
        self.inside.enter_context(internals.without_function_modes(_Noting))
        self.inside.enter_context(self.writes)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.inside.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = kwargs.get("generator") if kwargs else None
        if generator is not None:
            state, noting = generator.get_state(), self
            restore: Callable[[], None] = lambda: generator.set_state(state) and None
            while noting is not None:
                noting.states.setdefault(identity_of(generator), (generator, restore))
                noting = noting.outer
        return func(*args, **(kwargs or {}))


class _Again:
    """The context of each time that the function is computed again: it draws the numbers that it
    drew, and finds what it wrote to as it was then.

    Raises:
        CheckpointError: it writes to a tensor from outside, and reads it or lets autograd follow.
    """

    def __init__(self, noting: _Noting) -> None:
        self.noting, self.entered = noting, list[contextlib.ExitStack]()

    def __enter__(self) -> None:
        if (blocking := self.noting.writes.cannot_repeat) is not None:
            tensor, source = blocking
            what = (
                f"checkpoint: the function writes in place to {type_of_value(tensor)} from outside,"
                " and reads it, and outside of a trace the backward runs it again"
            )
            fix = "Call it under `jit`, which writes once, or return the new value."
            raise CheckpointError(what, source=source, fix=fix)
        now = random_state([generator for generator, _ in self.noting.states.values()])

        def then() -> None:
            for _, restore in self.noting.states.values():
                restore()

        with contextlib.ExitStack() as stack:
            stack.enter_context(drawing_from(then, now))
            stack.enter_context(internals.as_before(self.noting.writes))
            self.entered.append(stack.pop_all())

    def __exit__(self, *error: object) -> None:
        self.entered.pop().__exit__(None, None, None)


def _same_numbers() -> tuple[_Noting, _Again]:
    noting = _Noting()
    return noting, _Again(noting)


def torch_checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Any] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """`torch.utils.checkpoint.checkpoint` inside a traced function: a checkpoint equation.

    Random numbers are never drawn again, whatever `preserve_rng_state` says. A `context_fn` of
    `create_selective_checkpoint_contexts` gives its policy. Of another, the first context is
    entered, around the function. The second never is, since Python does not run the function again.
    """
    if context_fn is None:
        return checkpoint(function)(*args, **kwargs)
    if policy_of_contexts(context_fn) is not None:
        return checkpoint(function, Selective(context_fn))(*args, **kwargs)
    forward, _ = context_fn()

    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with forward:
            return function(*args, **kwargs)

    return checkpoint(inside)(*args, **kwargs)


divert("checkpoint", torch_checkpoint)
