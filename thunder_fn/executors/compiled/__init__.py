"""The inductor executor: regions of a trace become C++ (on CPU) through Inductor, without Dynamo and AOTAutograd.

    jit(f, executors=[inductor()])                  compiled before the first call is answered
    jit(f, executors=[inductor(tiered=True)])       runs at once on the torch executor, and compiled when that is ready

What makes it fast to compile: equal regions are compiled once, however often the program calls them; all kernels of a
program are compiled by one or two runs of the C++ compiler; what was compiled is on disk for the next process, which
does not even import Inductor. What makes calls fast: a region is one Python function that calls kernels, with no guard
of its own.

Random numbers stay with the torch executor, which draws those that eager would.
"""

from __future__ import annotations

import types
from dataclasses import replace

import torch

from thunder_fn import ops
from thunder_fn.executors.base import NOT_REGISTERED, FusionExecutor, RunFunction
from thunder_fn.executors.compiled.programs import Region, Staged, has_regions
from thunder_fn.executors.compiled.worker import WORKER
from thunder_fn.executors.torch_executor import Program
from thunder_fn.interpreters.simplify import is_kept
from thunder_fn.trace import Equation, NoneType, TensorType, Trace, Var

_EXTERN = frozenset(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "convolution_backward"))
"""Ops that Inductor leaves to PyTorch."""


class Inductor(FusionExecutor):
    """Compiles regions with Inductor. Made by `inductor`."""

    def __init__(self, *, tiered: bool = False) -> None:
        super().__init__("inductor", version=torch.__version__, numerics="precision-changing", min_shared=6)
        self.tiered = tiered

    def supports(self, equation: Equation) -> str | None:
        """Leaves of ATen on tensors of fixed shape may be compiled, if they draw no random numbers."""
        if equation.op.kind != "leaf":
            return NOT_REGISTERED.reason
        if not equation.op.name.startswith(("aten.", "prims.")):
            return "an op that Inductor does not know runs as it is"
        if ops.is_random(equation.op) or is_kept(equation):
            return "random numbers and effects stay with torch, which draws what eager draws"
        for var in (*equation.operands, *equation.outputs):
            reason = _refused(var)
            if reason is not None:
                return reason
        return None

    def is_worth(self, region: Trace) -> bool:
        """There is something to fuse: several ops that compute, and not only calls of PyTorch's kernels."""
        own = [equation for equation in region.equations if equation.op.name.split(".")[1] not in _EXTERN]
        return super().is_worth(region) and any(not ops.is_view(equation.op) for equation in own)

    def fuse(self, region: Trace) -> RunFunction:
        """The region: compiled when a program that has it knows its layouts."""
        found = Region(region)
        return found.on_torch if found.has_private_outputs() else found

    def finish(self, program: Program) -> Program:
        """The program, which compiles its regions when it is first called."""
        run = program.run
        assert isinstance(run, types.FunctionType), "programs are functions that were made from text"
        if not has_regions(run):
            return program
        if self.tiered:
            WORKER.start()
        return replace(program, run=Staged(run, tiered=self.tiered))


def _refused(var: Var) -> str | None:
    type = var.type
    if isinstance(type, NoneType):
        return None
    if not isinstance(type, TensorType):
        return "regions take tensors only"
    if any(not isinstance(size, int) for size in type.shape):
        return "regions are compiled for fixed shapes"
    if type.device.type != "cpu":
        return f"tensors on {type.device.type}: regions are compiled for the CPU"
    if type.dtype.is_complex:
        return "Inductor does not compile complex numbers"
    return None


def inductor(*, tiered: bool = False) -> Inductor:
    """An executor that compiles regions with Inductor.

    Law: results are those of the torch executor, up to rounding.

    Args:
        tiered: run on the torch executor at once, and compile in another process meanwhile. `wait` waits for that.

    Example:
        >>> from thunder_fn import jit
        >>> f = jit(lambda x: x.sin() + 1, executors=[inductor()])
    """
    return Inductor(tiered=tiered)


EXECUTOR = inductor()
"""The executor that is called "inductor"."""
