"""The nvfuser executor: regions of a trace as definitions of NVIDIA's nvFuser, which compiles them
to CUDA kernels.

    jit(f, executors=["nvfuser"])

It takes pointwise ops, reductions, and ops that move elements, on CUDA tensors. Other ops, such as
softmax, norms and activations, go through PyTorch's decompositions. Sizes may be symbols: a region
is defined once for all of them (`sized.py`). Matrix products, random numbers, complex numbers and
integers of 8 and 16 bits are left to others. nvFuser would draw other numbers than eager; its
Python module has no such integers. `explain_claims` lists the claims and refusals on any machine; a
run needs the package `nvfuser_direct`, 0.2.34 or later.

Half precision is computed in float32, each result rounded to the dtype of the trace; nvFuser
reorders sums.

Tested: the translation, on CPU, with a stand-in for the package
(`tests/executors/nvfuser_stand_in.py`). It checks every call against nvFuser's signatures and
computes with PyTorch. nvFuser itself has not run it, and nothing of it has run on a GPU.

`pointwise.py` and `dims.py` are the tables of emitters; `definitions.py` builds and keeps
definitions. A new op is one emitter.
"""

from __future__ import annotations

import importlib
from typing import Any

from thunder_fn.errors import ExecutorError, MissingRule
from thunder_fn.executors.nvfuser import dims as dims, pointwise as pointwise
from thunder_fn.executors.nvfuser.definitions import Definitions, Region
from thunder_fn.executors.nvfuser.sized import SizedRegion
from thunder_fn.executors.nvfuser.writer import DTYPES, UNKNOWN, Library, why_not
from thunder_fn.executors.torchinductor.regions import RegionCompiler
from thunder_fn.extend.regions import CANNOT, RunFunction, alone, decomposition
from thunder_fn.ir.symbols import is_symbolic
from thunder_fn.ir.trace import Equation, TensorType, Trace, Var

__all__ = ["EXECUTOR", "NvFuser"]

MODULE = "nvfuser_direct"
OLDEST = "0.2.34"
MAX_RANK = 8


def find_library() -> Library:
    """nvFuser's Python module.

    Raises:
        ExecutorError: it is not installed, or too old.
    """
    fix = (
        "Install a wheel of nvFuser for this PyTorch and CUDA, or leave the executor 'nvfuser' out."
    )
    try:
        module: Any = importlib.import_module(MODULE)
    except ImportError as error:
        raise ExecutorError(
            f"nvfuser: the package {MODULE} cannot be imported: {error}\n{fix}"
        ) from error
    found = str(module.version()) if hasattr(module, "version") else "too old to say its version"
    if not hasattr(module, "version") or module.version() < OLDEST:
        raise ExecutorError(f"nvfuser: {MODULE} is {found}, and {OLDEST} or later is needed\n{fix}")
    return module


class NvFuser(RegionCompiler):
    """The executor that compiles regions with nvFuser.

    Args:
        library: nvFuser's Python module; found when the first program is made.
        device: the type of device that it works on.
        fuel: the most regions to compile, see `bisect`.
    """

    def __init__(
        self, *, library: Library | None = None, device: str = "cuda", fuel: int | None = None
    ) -> None:
        super().__init__("nvfuser", min_shared=6, fuel=fuel, takes_symbols=True)
        self.library, self.device = library, device
        self.definitions = Definitions()
        self._reasons: dict[Trace, str | None] = {}

    def supports(self, equation: Equation) -> str | None:
        """Accept an op that has an emitter which does not refuse, or that decomposes into such."""
        reason = super().supports(equation)
        if reason is not None:
            return reason
        if any(
            isinstance(var.type, TensorType) and var.type.device.type != self.device
            for var in equation.outputs
        ):
            return f"a result that is not on {self.device}"
        single = alone(equation)
        if single not in self._reasons:
            self._reasons[single] = self.why_not(single)
        return self._reasons[single]

    def why_not(self, single: Trace) -> str | None:
        """The reason why an equation can neither be written nor decomposed into some that can."""
        reason = why_not(single.equations[0])
        if reason != UNKNOWN:
            return reason
        try:
            parts = decomposition(single)
        except (MissingRule, *CANNOT):
            parts = None
        if parts is None or parts.constants or not parts.equations:
            return UNKNOWN
        return next(
            (why for inner in parts.equations if (why := self.supports(inner)) is not None), None
        )

    def refused(self, var: Var) -> str | None:
        """Regions have tensors on the device, and scalars on the CPU, of dtypes that nvFuser
        knows.
        """
        reason = super().refused(var)
        if reason is not None or not isinstance(var.type, TensorType):
            return reason
        dtype, shape, device = var.type.dtype, var.type.shape, var.type.device
        if device.type != self.device and (device.type != "cpu" or shape):
            return f"tensors on {device.type}: regions are compiled for {self.device}"
        if dtype not in DTYPES:
            return f"nvFuser's Python module has no {str(dtype).removeprefix('torch.')}"
        if 0 in shape or len(shape) > MAX_RANK:
            return f"tensors without elements, or with more than {MAX_RANK} dims"
        return None

    def is_worth(self, region: Trace) -> bool:
        """Test for several ops that compute, all on one device."""
        types = [var.type for equation in region.equations for var in equation.outputs]
        devices = {type.device for type in types if isinstance(type, TensorType)}
        return len(devices) == 1 and super().is_worth(region)

    def fuse(self, region: Trace) -> RunFunction:
        """The region, defined when it is first called."""
        kind = SizedRegion if is_symbolic(region) else Region
        return kind(self.library or find_library(), self.definitions, region, self.device)


EXECUTOR = NvFuser()
"""The executor that is called "nvfuser"."""
