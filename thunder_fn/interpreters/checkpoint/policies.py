"""Checkpoint policies: which values of the forward are kept for the backward.

A policy is a function of an equation. It answers True or "save", False or "recompute", or "offload"
(keep the value in the CPU's memory). It is asked about each equation of the checkpointed function:
about a composite before its body. `budget` is another kind: it sees all equations at once and
chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal as Choice, TypeAlias

from thunder_fn.errors import CheckpointError, callable_name, is_int, kind_of
from thunder_fn.interpreters.checkpoint.selective import Selective
from thunder_fn.ir import facts
from thunder_fn.ir.pretty import format_equation
from thunder_fn.ir.trace import Equation, Trace
from thunder_fn.spellings import no_such_name
from thunder_fn.structured.checkpoint_name import name_of

Answer: TypeAlias = Choice["save", "recompute", "offload"]
Policy: TypeAlias = "Callable[[Equation], bool | Answer] | Budget | AllBut | Selective"


def nothing_saveable(equation: Equation) -> bool:
    """Keep only the inputs: least memory, most computation. The default."""
    return False


def everything_saveable(equation: Equation) -> bool:
    """Keep whatever the backward reads, as without a checkpoint."""
    return True


def matmuls_saveable(equation: Equation) -> bool:
    """Keep the results of matrix products, which are dear, and compute the cheap rest again."""
    return equation.op in facts.MATMULS


@dataclass(frozen=True, slots=True)
class Named:
    """A policy that answers by the names that `checkpoint_name` has given."""

    names: tuple[str, ...]
    answer: Answer
    otherwise: Answer = "recompute"

    @property
    def __name__(self) -> str:
        return {"save": "save_only_these_names", "offload": "offload_only_these_names"}[self.answer]

    def __call__(self, equation: Equation) -> Answer:
        return self.answer if name_of(equation) in self.names else self.otherwise


@dataclass(frozen=True, slots=True)
class Budget:
    """Keep at most so many bytes, chosen so that as little as possible is computed again."""

    budget_bytes: int

    @property
    def __name__(self) -> str:
        return "budget"


@dataclass(frozen=True, slots=True)
class AllBut:
    """Keep whatever the backward reads, except values computed from the results of some ops alone.

    For values that are cheap to have again, and all that follows from nothing else: a gathered
    weight, its transpose. `arrange` reorders the body of a backward.
    """

    ops: frozenset[str]
    arrange: Callable[[Trace], Trace] | None = None

    @property
    def __name__(self) -> str:
        return "all_but"

    def computed_from(self, equations: Sequence[Equation]) -> set[int]:
        """The variables that are computed from results of these ops alone."""
        found = set[int]()
        for equation in equations:
            operands = {var.index for var in equation.operands}
            if equation.op.name in self.ops or (operands and operands <= found):
                found.update(var.index for var in equation.outputs)
        return found


class _Policies(type):
    def __getattr__(cls, name: str) -> Any:
        raise no_such_name("thunder_fn:checkpoint_policies", name)


class checkpoint_policies(metaclass=_Policies):
    """The named policies.

    Law: a policy changes what is kept for the backward, and no value.

    Raises:
        CheckpointError: a policy that is made of names was given something else.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> f = tfn.checkpoint(torch.sin, policy=checkpoint_policies.nothing_saveable)
        >>> f(torch.tensor(0.0))
        tensor(0.)
    """

    nothing_saveable = staticmethod(nothing_saveable)
    everything_saveable = staticmethod(everything_saveable)
    matmuls_saveable = staticmethod(matmuls_saveable)

    @staticmethod
    def save_only_these_names(*names: str) -> Named:
        """Keep the values that `checkpoint_name` has given one of these names."""
        return Named(_names(names), "save")

    @staticmethod
    def offload_only_these_names(*names: str) -> Named:
        """Keep those values in the CPU's memory, and bring them back for the backward."""
        return Named(_names(names), "offload")

    @staticmethod
    def budget(budget_bytes: int) -> Budget:
        """Keep at most so many bytes for each checkpointed call, besides its inputs and what random
        numbers need.

        The choice is a minimum cut between kept and recomputed values, at the price of memory that
        meets the budget. The rest of the budget goes to the values that save most computation for
        their bytes.
        """
        if not is_int(budget_bytes, 0):
            raise CheckpointError(
                f"checkpoint_policies.budget: a number of bytes, not {budget_bytes!r}"
            )
        return Budget(budget_bytes)


def _names(names: tuple[Any, ...]) -> tuple[str, ...]:
    for name in names:
        if not isinstance(name, str):
            raise CheckpointError(f"checkpoint_policies: names are strings, not {name!r}")
    return names


def check_policy(policy: Any) -> Any:
    """The policy, None being `nothing_saveable`."""
    if policy is None:
        return nothing_saveable
    if not isinstance(policy, (Budget, AllBut, Selective)) and not callable(policy):
        raise CheckpointError(
            "checkpoint: a policy is a function of an equation or one of `checkpoint_policies`,"
            f" not {policy!r}",
            fix=(
                f"There are {', '.join(one for one in vars(checkpoint_policies) if one[0] != '_')}."
                if isinstance(policy, str)
                else "Arguments go to the function that checkpoint returns: `checkpoint(f)(x)`."
            ),
        )
    try:
        hash(policy)
    except TypeError:
        raise CheckpointError(
            f"checkpoint: a policy has a hash, but {kind_of(policy)} has none"
        ) from None
    return policy


def ask(policy: Callable[[Equation], Any], equation: Equation) -> Answer:
    """The policy's answer about an equation.

    Raises:
        CheckpointError: it is none of the answers that there are.
    """
    match policy(equation):
        case True | "save":
            return "save"
        case False | "recompute":
            return "recompute"
        case "offload":
            return "offload"
        case other:
            name = callable_name(policy)
            raise CheckpointError(
                f"checkpoint: the policy {name} answered {other!r}",
                equation=format_equation(equation),
                source=equation.source,
                fix='Answer True or "save", False or "recompute", or "offload".',
            )
