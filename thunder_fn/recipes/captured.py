"""CUDA graphs where they pay: programs whose launches take longer than their work.

A launch takes the CPU some microseconds, whatever it does. So the GPU waits in a program of many
small kernels, and a replay is one launch. Both are estimated from the trace: the work by the peaks
of the machine, before anything is fused.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from thunder_fn.executors.cudagraphs import CudaGraphs
from thunder_fn.inspect.costs import cost_of
from thunder_fn.inspect.machines import known_machine, machine_named
from thunder_fn.ir import facts, ops
from thunder_fn.ir.rules import lowered
from thunder_fn.ir.symbols import is_symbolic
from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace, Var, type_of
from thunder_fn.ir.types import is_on, is_scalar

LAUNCH_SECONDS = 5e-6
"""The time that the CPU takes for one launch."""

LEAST_LAUNCHES = 8
"""A program of fewer gains nothing by a replay, which has costs of its own."""

READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""PyTorch's tags of ops that wait for the GPU's values."""

BY_LIBRARIES = ("_fft_", "_linalg_", "linalg_", "_cholesky", "cholesky", "geqrf", "ormqr")
"""The beginnings of PyTorch's names for what cuFFT, cuSOLVER and MAGMA compute: they plan, or look
at what failed, on the host.
"""


def why_not(trace: Trace) -> str | None:
    """The reason to record no program of this trace: it cannot be recorded, as far as the trace
    says, or its launches take less than its work. None if recording pays.
    """
    types = [type for type in map(type_of, trace.inputs) if isinstance(type, TensorType)]
    device = next((type.device for type in types if is_on(type, "cuda")), None)
    if device is None:
        return "no input is on a GPU"
    if is_symbolic(trace):
        return "its sizes are found in data"
    if not all(map(_is_input, trace.inputs)):
        return "an input is a number, or on another device"
    machine = known_machine(device) or machine_named("A100 80GB")
    launches, seconds = 0, 0.0
    for equation, times in leaves(trace):
        reason = unrecordable(equation)
        if reason is not None:
            return f"{equation.op.name} {reason}"
        if not ops.is_view(equation.op):
            launches += times
            seconds += times * cost_of(equation).seconds(machine)
    if launches < LEAST_LAUNCHES:
        return f"of {launches} launches it would gain nothing"
    is_small = seconds < launches * LAUNCH_SECONDS
    return None if is_small else "its work takes longer than its launches"


def leaves(trace: Trace, times: int = 1) -> Iterator[tuple[Equation, int]]:
    """The equations that run, and how often."""
    for equation in trace.equations:
        body = None if ops.is_operator(equation.op) else lowered(equation)
        if body is not None:
            yield from leaves(body, times)
        elif equation.op.name == "scan":
            length = dict(equation.kwargs).get("length", Literal(1))
            steps = length.value if isinstance(length, Literal) else 1
            yield from leaves(equation.bodies[0], times * steps)
        else:
            yield equation, times


def unrecordable(equation: Equation) -> str | None:
    """The reason why a recording cannot have a leaf: it is not PyTorch's, or asks for values."""
    namespace = equation.op.name.partition(".")[0]
    if equation.op.kind != "leaf" or namespace not in ("aten", "prims"):
        return "is not an op of PyTorch"
    tensors = (var for var in equation.outputs if isinstance(var.type, TensorType))
    if not all(map(_is_input, (*equation.operands, *tensors))):
        return "is not on the GPU alone"
    return "waits for the GPU" if waits(equation) else None


def waits(equation: Equation) -> bool:
    """Test for a leaf that reads the GPU's values on the host, or plans there."""
    op = equation.op
    if op in facts.INDEXES:  # a mask is counted
        types = (var.type for var in equation.operands[1:])
        masks = (torch.bool, torch.uint8)
        return any(isinstance(type, TensorType) and type.dtype in masks for type in types)
    overload = ops.overload(op)
    by_library = op.name.partition(".")[2].startswith(BY_LIBRARIES) and op not in facts.NORMS
    return by_library or op in facts.WAITS or not READS_VALUES.isdisjoint(overload.tags)


def _is_input(var: Var) -> bool:
    """Test for a tensor of the GPU, or a number of the CPU, which is computed in front."""
    type = var.type
    return is_on(type, "cuda") or (is_scalar(type) and is_on(type, "cpu"))


GRAPHS = CudaGraphs(why_not=why_not)
"""The executor that records what pays. `compile` has it on a machine with a GPU."""


def graphs() -> CudaGraphs:
    """The executor that records what pays, where it is unpickled."""
    return GRAPHS


GRAPHS.again = graphs
