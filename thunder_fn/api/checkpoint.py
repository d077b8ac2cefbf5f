"""checkpoint: a function that is computed again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from thunder_fn import torch_internals as internals
from thunder_fn.api.calling import transformed
from thunder_fn.errors import spelled
from thunder_fn.jitted import Jitted
from thunder_fn.structured.checkpoint import checkpoint as recorded

P = ParamSpec("P")
R = TypeVar("R")


@overload
def checkpoint(f: Jitted[P, R], policy: Any = None) -> Jitted[P, R]: ...
@overload
def checkpoint(f: Callable[P, R], policy: Any = None) -> Callable[P, R]: ...
@spelled(
    use_reentrant="Leave it out: there is one kind of checkpoint.",
    preserve_rng_state="Leave it out: random numbers are never drawn again.",
    context_fn="policy",
    determinism_check="Leave it out: what is computed again is the same trace.",
    debug="Leave it out: `tfn.saved_residuals` shows what is kept.",
    prevent_cse="Leave it out: what is computed again is never merged.",
    early_stop="Leave it out: what nobody reads is not computed again.",
    concrete="Leave it out, and give `jit` the `static_argnums`.",
    static_argnums="Give them to `jit`.",
)
@internals.with_twin(internals.dynamo_checkpoint)
def checkpoint(f: Callable[..., Any], policy: Any = None) -> Callable[..., Any]:
    """Compute f again in the backward instead of keeping its residuals.

    Law: values and gradients are those of f, bitwise. The residuals are inputs of f and what the
        policy keeps.

    Args:
        f: any PyTorch callable. Random numbers are drawn once, and their consequences are kept.
            In-place writes to arguments and buffers happen once, too.
        policy: the values to keep besides the inputs. A function of an `Equation` answers True or
            "save", False or "recompute", or "offload"; `checkpoint_policies` has such functions.
            None keeps nothing.

    Returns:
        A function with the arguments of f; that of a jitted function is jitted. Outside a transform
            and outside `jit` autograd computes all of f again (`torch.utils.checkpoint`), unless
            the policy is `everything_saveable`.

    Raises:
        CheckpointError: `policy` is not a policy, or it returned an invalid decision.

    Example:
        >>> import torch
        >>> from thunder_fn import grad
        >>> grad(checkpoint(lambda x: x.sin().sin().sum()))(torch.zeros(2))
        tensor([1., 1.])

    Source: jax.checkpoint; torch.utils.checkpoint.
    """
    recorded(f, policy)  # looks at both
    return transformed(f, lambda fn: recorded(fn, policy))
