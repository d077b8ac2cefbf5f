"""Questions of claiming about equations: who runs them as they are, who is asked about their
bodies, which bodies are shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.executors.base import Executor, HasExecutors, size_of
from thunder_fn.ir import ops
from thunder_fn.ir.rules import lowered
from thunder_fn.ir.trace import Equation, TensorType, Trace
from thunder_fn.structured.call import CALL, call_options

TORCH = Executor("torch", version=torch.__version__, numerics="bitwise")
TORCH.is_frozen = True
"""The executor of ATen leaves and structured ops that no other executor takes. Always there, and
the last.
"""


def frozen(executors: Sequence[Executor]) -> tuple[Executor, ...]:
    """The executors before torch, as they are now."""
    return tuple(executor.frozen() for executor in executors if executor is not TORCH)


def is_final(equation: Equation) -> bool:
    """Test whether somebody runs the equation as it is."""
    return ops.is_operator(equation.op) or lowered(equation) is None


def device_of(equation: Equation) -> torch.device | None:
    """The device that an equation computes on; None if it gives no tensors, or numbers of the
    CPU only.
    """
    types = [var.type for var in equation.outputs if isinstance(var.type, TensorType)]
    own = (type.device for type in types if type.shape or type.device.type != "cpu")
    return next(own, None)


def called(equation: Equation) -> str:
    """The name that a comment gives to an equation whose body follows."""
    return f"call of {call_options(equation)[0]}" if equation.op == CALL else equation.op.name


def own_executors(equation: Equation) -> tuple[Executor, ...] | None:
    """The executors of a jitted function that is called, None if it was given none or this is no
    call.
    """
    if equation.op != CALL:
        return None
    _, options = call_options(equation)
    return (
        frozen(options.executors_of(equation.body))
        if isinstance(options, HasExecutors) and options.executors
        else None
    )


def shared_bodies(trace: Trace, min_size: int) -> frozenset[Trace]:
    """The bodies of composites that occur more than once in the trace, and are large enough to
    be parts of their own.
    """
    counts = _occurrences(trace, {})
    return frozenset(
        body
        for body, count in counts.items()
        if count > 1 and sum(map(size_of, body.equations)) >= min_size
    )


def _occurrences(trace: Trace, known: dict[Trace, Counter[Trace]]) -> Counter[Trace]:
    """The number of times that each body occurs once the trace is unfolded."""
    if trace not in known:
        found = Counter[Trace]()
        for equation in trace.equations:
            body = lowered(equation)
            if body is not None and not ops.is_operator(equation.op):
                found[body] += 1
                found.update(_occurrences(body, known))
        known[trace] = found
    return known[trace]


def autocasts(equation: Equation) -> bool:
    """Test whether PyTorch's autocast, where it is on, would change what the equation computes."""
    if equation.op.kind != "leaf":
        return bool(equation.bodies)
    namespace, name, _ = equation.op.name.split(".")
    return namespace == "aten" and any(
        name in internals.autocast_ops(device) for device in ("cpu", "cuda")
    )
