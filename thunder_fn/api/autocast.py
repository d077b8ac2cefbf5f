"""autocast: a function whose ops run in lower precision where that is worth it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar, overload

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.api.calling import Transformed, transformed
from thunder_fn.api.captures import Plan, in_place, planned
from thunder_fn.capture import EVERY_LEAF, Captured, current, pytree
from thunder_fn.capture.replaced.autocast_regions import REGION
from thunder_fn.derived.leaf_autocast import Answer, autocast_policy, policy_on_meta
from thunder_fn.errors import AutocastError
from thunder_fn.interpreters.autocast import Policy, autocast as autocast_trace
from thunder_fn.interpreters.simplify import cse
from thunder_fn.ir import ops
from thunder_fn.ir.text import shown
from thunder_fn.ir.trace import Equation
from thunder_fn.jitted import Jitted

P = ParamSpec("P")
R = TypeVar("R")


__all__ = ["Autocast", "Table", "autocast", "autocast_policy"]


@dataclass(frozen=True)
class Table:
    """Answers by the names of ops: full (`aten.mm.default`), without the overload (`aten.mm`), or
    short (`linear`).

    Ops that are not in the table are as PyTorch has them.
    """

    answers: tuple[tuple[str, Answer], ...]

    @property
    def __name__(self) -> str:
        return "table"

    def __call__(self, equation: Equation) -> Answer | str:
        name = equation.op.name
        names = (
            name,
            name.rsplit(".", 1)[0] if equation.op.kind == "leaf" else ops.short_name(equation.op),
        )
        return next(
            (answer for key, answer in self.answers if key in names), autocast_policy(equation)
        )


@dataclass(frozen=True)
class Autocast(Transformed):
    """A function in mixed precision. See `autocast`."""

    fn: Callable[..., Any]
    dtype: torch.dtype
    policy: Policy

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        is_pytorchs, policy = self.policy is autocast_policy, self.policy
        if is_pytorchs and any(one.is_meta for one in pytree.tensors_in((args, kwargs))):
            is_pytorchs, policy = False, policy_on_meta  # PyTorch casts nothing there
        f = self._under_pytorchs() if is_pytorchs else self.fn
        known = EVERY_LEAF if is_pytorchs else None  # another policy changes the values afterwards
        make = lambda capture: self._plan(capture(f, args, kwargs, known=known), policy)
        return planned(self, args, kwargs, make)

    def _plan(self, captured: Captured, policy: Policy) -> Plan:
        new = (
            cse(captured.trace)
            if policy is autocast_policy
            else autocast_trace(captured.trace, self.dtype, policy)
        )
        name = self.__name__ if current() is None else f"{REGION}_{captured.trace.name}"
        return Plan(name, captured, new, in_place(captured))

    def _under_pytorchs(self) -> Callable[..., Any]:
        """The function under PyTorch's own autocast, on every device, whose casts are then part
        of the trace.
        """

        @wraps(self.fn, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            with internals.autocast_on(self.dtype):
                return self.fn(*args, **kwargs)

        return run


@overload
def autocast(
    f: Jitted[P, R], dtype: torch.dtype = torch.bfloat16, policy: Any = None
) -> Jitted[P, R]: ...
@overload
def autocast(
    f: Callable[P, R], dtype: torch.dtype = torch.bfloat16, policy: Any = None
) -> Callable[P, R]: ...
def autocast(f: Callable[..., Any], dtype: torch.dtype = torch.bfloat16, policy: Any = None) -> Any:
    """Run the ops of a function in lower precision, as a policy says.

    Law: with PyTorch's policy, the values and dtypes of f under `torch.autocast`, op by op;
        derivatives are those of the casts.

    Args:
        f: any PyTorch callable. Arguments in double precision, and what is computed from them
            alone, stay as they are.
        dtype: the lower precision, a floating dtype.
        policy: None for PyTorch's own, on the device of an op's arguments (on `meta`, that for
            CUDA): matrix products, convolutions and attention in lower precision, ops that need
            range in float32. Or a table from names of ops to answers, beside PyTorch's. Or a
            function of an `Equation`, asked about a composite before its body, in place of
            PyTorch's (`autocast_policy` is that). The answers are "lower", "float32", "promote"
            (the widest of the arguments) and None: leave it as it is, and ask about its body.

    Returns:
        A function with the arguments of f. Carries of loops keep their types, and branches that
            autocast leaves in different precisions give the widest. The result for a jitted
            function is jitted.

    Raises:
        AutocastError: the dtype is not floating, or the policy is not one or returned an invalid
            answer.

    Example:
        >>> autocast(torch.nn.functional.linear)(torch.ones(2, 3), torch.ones(4, 3)).dtype
        torch.bfloat16

    Source: torch.autocast for the policy.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise AutocastError(
            f"autocast: the lower precision is a floating dtype, given {dtype!r}",
            fix="Write `autocast(f, torch.bfloat16)`, then call the result.",
        )
    chosen = check_policy(policy)
    return transformed(f, lambda fn: Autocast(fn, dtype, chosen), "precision-changing")


def check_policy(policy: Any) -> Policy:
    """The policy, None being PyTorch's and a table laid over it."""
    if policy is None:
        return autocast_policy
    if isinstance(policy, Mapping):
        return Table(tuple((str(name), answer) for name, answer in policy.items()))
    if not callable(policy):
        raise AutocastError(
            "autocast: a policy is a function of an equation or a table of answers, given"
            f" {shown(policy, 60)}"
        )
    return policy
