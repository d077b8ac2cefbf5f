"""The inductor executor: regions of a trace become C++ or, on CUDA, Triton through Inductor,
without Dynamo and AOTAutograd.

    jit(f, executors=[inductor()])               compiled before the first call is answered
    jit(f, executors=[inductor(tiered=True)])    on the torch executor until that is compiled

Compilation is fast. Equal regions are compiled once, however often the program calls them. All
kernels of a program are compiled by one or two runs of the C++ compiler. Compiled code is on disk
for the next process, which does not even import Inductor. Calls are fast: a region is one Python
function that calls kernels, with no guard of its own.

Random numbers stay with the torch executor, which draws those that eager would.

A job (`codegen.Job`) is a region with the strides of its inputs. `codegen.py` turns it into text
and `native.py` into modules. `store.py` keeps these on disk, under a digest that covers the files
here. Each step is a function of the one before.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from dataclasses import replace

from thunder_fn.executors.torchinductor.adding_rows import AddedRows, added_rows, is_added_rows
from thunder_fn.executors.torchinductor.backends import Backend, backend
from thunder_fn.executors.torchinductor.loop_triton import suits
from thunder_fn.executors.torchinductor.parts import is_on_cpu
from thunder_fn.executors.torchinductor.products import is_worth_a_region
from thunder_fn.executors.torchinductor.programs import Region, Staged, has_regions
from thunder_fn.executors.torchinductor.regions import EXTERN, RegionCompiler, bisect
from thunder_fn.executors.torchinductor.worker import WORKER
from thunder_fn.extend.regions import Program, RunFunction
from thunder_fn.ir import facts, ops
from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace, Var
from thunder_fn.ir.types import is_on
from thunder_fn.torch_internals import inductor as internals

__all__ = [
    "EXECUTOR",
    "Backend",
    "Inductor",
    "RegionCompiler",
    "backend",
    "bisect",
    "inductor",
    "wait",
]


MOST_UNROLLED = 128
"""The most ops up to which a loop on a GPU is unrolled."""


class Inductor(RegionCompiler):
    """The executor that compiles regions with Inductor. Made by `inductor`."""

    def __init__(self, *, tiered: bool = False, fuel: int | None = None) -> None:
        super().__init__("inductor", min_shared=6, fuel=fuel, takes_symbols=True, allocates=True)
        self.tiered = tiered
        self.again = functools.partial(inductor, tiered=tiered, fuel=fuel)

    def supports(self, equation: Equation) -> str | None:
        """Accept what Inductor compiles, and compiles rightly."""
        if equation.op.name == "aten.max_pool3d_with_indices.default":
            return "Inductor's indices of pools are wrong for inputs that are not contiguous"
        if equation.op in facts.INDEX_OF_ONE and equation.args[1:2] in ((), (Literal(None),)):
            return "Inductor numbers the elements as they lie in memory, if no dim is given"
        if equation.op.name == "aten.fill.Tensor" and _devices(equation) > 1:
            return "a number of the CPU: Inductor copies it to the GPU, and waits"
        return super().supports(equation)

    def refused(self, var: Var) -> str | None:
        """Regions are compiled for the CPU, by a C++ compiler, and for CUDA devices, by Triton."""
        if isinstance(var.type, TensorType) and not internals.compiles_for(var.type.device.type):
            fix = " (`pip install triton`)" if var.type.device.type == "cuda" else ""
            return f"tensors on {var.type.device.type}: Inductor has no compiler here{fix}"
        if isinstance(var.type, TensorType) and var.type.dtype.is_complex:
            return "Inductor does not compile complex numbers"
        if isinstance(var.type, TensorType) and 0 in var.type.shape:
            return (
                "an empty tensor: there is nothing to compute, and Inductor takes the mean of"
                " nothing for 0"
            )
        return super().refused(var)

    def is_worth(self, region: Trace) -> bool:
        """Test for something to fuse, or a large product, which is faster by our kernel."""
        return super().is_worth(region) or any(map(is_worth_a_region, region.equations))

    def apart(self, trace: Trace) -> tuple[tuple[int, ...], ...]:
        """Rows that are added to a matrix: where that lies decides how."""
        return added_rows(trace) if is_on_cpu(trace) else ()

    def joins(self, region: Trace) -> bool:
        """Join what a GPU computes in one launch: each launch takes longer than a small update."""
        return not is_on_cpu(region) and not any(
            equation.op in EXTERN for equation in region.equations
        )

    def unrolls(self, leaves: Sequence[Equation]) -> int:
        """Have many small steps in one launch of a GPU."""
        own = [leaf for leaf in leaves if not ops.is_view(leaf.op)]
        on_gpu = all(is_on(type, "cuda") for leaf in own for type in leaf.output_types)
        if not own or not on_gpu or not all(ops.is_pointwise(leaf.op) for leaf in own):
            return 1
        return MOST_UNROLLED // len(own)

    def runs_whole(self, loop: Trace) -> bool:
        """Have all small steps in one launch of a GPU, if a kernel can run them."""
        return not is_on_cpu(loop) and suits(loop)

    def fuse(self, region: Trace) -> RunFunction:
        """The region: compiled when a program that has it knows its layouts."""
        if is_added_rows(region) and is_on_cpu(region):
            return AddedRows(region)
        found = Region(region)
        return found.on_torch if found.has_private_outputs() else found

    def fuse_loop(self, loop: Trace) -> RunFunction | None:
        """The loop as compiled code, so that no step runs Python."""
        (equation,) = loop.equations
        results = [atom for body in equation.bodies for atom in body.outputs]
        atoms = (*equation.operands, *equation.outputs, *results)
        if not all(isinstance(atom, Var) and self.refused(atom) is None for atom in atoms):
            return None
        if not is_on_cpu(loop) and not self.runs_whole(loop):
            return None
        return Region(loop) if self.has_fuel(loop) else None

    def finish(self, program: Program) -> Program:
        """The program, which compiles its regions when it is first called."""
        run = program.run
        if not isinstance(run, types.FunctionType) or not has_regions(run):
            return program
        if self.tiered:
            WORKER.start()
        settled = self.settles(program.trace) and not (self.tiered and _chooses(program.trace))
        return replace(program, run=Staged(run, tiered=self.tiered, settled=settled))

    def settles(self, trace: Trace) -> bool:
        """Test that everything in the program is PyTorch's or compiled, and gives results in the
        layouts that it says.
        """
        return all(
            (
                all(map(self.settles, equation.bodies))
                if equation.op.kind == "structured"
                else equation.op.name.startswith((f"{self.name}::", "aten.", "prims."))
            )
            for equation in trace.equations
        )


def _devices(equation: Equation) -> int:
    """The number of devices that its tensors are on."""
    types = (var.type for var in (*equation.operands, *equation.outputs))
    return len({type.device for type in types if isinstance(type, TensorType)})


def _chooses(trace: Trace) -> bool:
    """Test whether something in the program may go one way or another, by values."""
    return any(equation.op.kind == "structured" for equation in trace.equations)


def inductor(*, tiered: bool = False, fuel: int | None = None) -> Inductor:
    """An executor that compiles regions with Inductor.

    Law: results are those of the torch executor, up to rounding.

    Args:
        tiered: run on the torch executor at once, and compile in another process meanwhile. `wait`
            waits for that.
        fuel: the most regions to compile, see `bisect`.

    Example:
        >>> from thunder_fn import jit
        >>> f = jit(lambda x: x.sin() + 1, executors=[inductor()])
    """
    return Inductor(tiered=tiered, fuel=fuel)


def wait() -> None:
    """Wait until everything that tiered executors have to compile is compiled."""
    WORKER.submit([]).result()


EXECUTOR = inductor()
"""The executor that is called "inductor"."""
