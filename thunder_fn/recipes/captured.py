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
from thunder_fn.ir import ops
from thunder_fn.ir.rules import lowered
from thunder_fn.ir.symbols import is_symbolic
from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace, Var, type_of

LAUNCH_SECONDS = 5e-6
"""The time that the CPU takes for one launch."""

LEAST_LAUNCHES = 8
"""A program of fewer gains nothing by a replay, which has costs of its own."""

ON_THE_HOST = (
    "_ctc_loss",
    "_fft",
    "_linalg",
    "_local_scalar_dense",
    "allclose",
    "bincount",
    "cholesky",
    "embedding_renorm",
    "equal",
    "geqrf",
    "histc",
    "is_nonzero",
    "item",
    "linalg",
    "lu_",
    "multinomial",
    "ormqr",
    "triangular_solve",
    "unique",
)
"""Ops of ATen, by the beginnings of their names, that wait for the GPU or plan on the host."""


def pays(trace: Trace) -> bool:
    """Test whether recording a program of this trace pays: it can be recorded, as far as the trace
    says, and its launches take longer than its work.
    """
    types = [type for type in map(type_of, trace.inputs) if isinstance(type, TensorType)]
    device = next((type.device for type in types if _is_on_gpu(type)), None)
    if device is None or is_symbolic(trace) or not all(map(_is_input, trace.inputs)):
        return False
    machine = known_machine(device) or machine_named("A100 80GB")
    launches, seconds = 0, 0.0
    for equation, times in _leaves(trace, 1):
        if not _is_recordable(equation):
            return False
        if not ops.is_view(equation.op):
            launches += times
            seconds += times * cost_of(equation).seconds(machine)
    return launches >= LEAST_LAUNCHES and seconds < launches * LAUNCH_SECONDS


def _leaves(trace: Trace, times: int) -> Iterator[tuple[Equation, int]]:
    """The equations that run, and how often."""
    for equation in trace.equations:
        body = None if ops.is_operator(equation.op) else lowered(equation)
        if body is not None:
            yield from _leaves(body, times)
        elif equation.op.name == "scan":
            length = dict(equation.kwargs).get("length", Literal(1))
            steps = length.value if isinstance(length, Literal) else 1
            yield from _leaves(equation.bodies[0], times * steps)
        else:
            yield equation, times


def _is_recordable(equation: Equation) -> bool:
    """Test for an op of PyTorch that computes on the GPU and asks for no values of it."""
    namespace, _, rest = equation.op.name.partition(".")
    if equation.op.kind != "leaf" or namespace not in ("aten", "prims"):
        return False
    is_masked = rest.startswith("index") and any(
        isinstance(type := type_of(var), TensorType) and type.dtype in (torch.bool, torch.uint8)
        for var in equation.operands[1:]
    )
    tensors = (var for var in equation.outputs if isinstance(var.type, TensorType))
    is_there = all(map(_is_input, (*equation.operands, *tensors)))
    return is_there and not is_masked and not rest.startswith(ON_THE_HOST)


def _is_on_gpu(type: object) -> bool:
    return isinstance(type, TensorType) and type.device.type == "cuda"


def _is_input(var: Var) -> bool:
    """Test for a tensor of the GPU, or a number of the CPU, which is computed in front."""
    type = var.type
    return _is_on_gpu(type) or (
        isinstance(type, TensorType) and not type.shape and type.device.type == "cpu"
    )


GRAPHS = CudaGraphs(pays=pays)
"""The executor that records what pays. `compile` has it on a machine with a GPU."""
