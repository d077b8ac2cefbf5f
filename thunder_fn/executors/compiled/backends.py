"""Any registered backend of torch.compile as an executor: it is given regions as FX graphs of ATen calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from thunder_fn import torch_internals_inductor as internals
from thunder_fn.errors import UnknownOption, located
from thunder_fn.executors.base import RunFunction
from thunder_fn.executors.compiled.codegen import Strides, closed_region
from thunder_fn.executors.compiled.regions import RegionCompiler
from thunder_fn.trace import Trace


class Backend(RegionCompiler):
    """Compiles regions with a backend of torch.compile. Made by `backend`."""

    def __init__(self, backend: str, *, fuel: int | None = None) -> None:
        super().__init__(f"backend_{re.sub(r'[^0-9a-zA-Z_]', '_', backend)}", min_shared=6, fuel=fuel)
        self.compiler = internals.lookup_backend(backend)

    def compile(self, region: Trace) -> RunFunction:
        """The region, given to the backend when it is first called with tensors of some layout."""
        closed, constants = closed_region(region)
        known: dict[tuple[Strides, ...], Callable[..., Any]] = {}

        def run(*inputs: torch.Tensor) -> tuple[Any, ...]:
            inputs = (*inputs, *constants)
            layout = tuple(tensor.stride() for tensor in inputs)
            with torch.no_grad():
                if layout not in known:
                    known[layout] = self.compiler(closed.to_fx(), list(inputs))
                return tuple(known[layout](*inputs))

        return run


def backend(name: str, *, fuel: int | None = None) -> Backend:
    """An executor that gives regions to a registered backend of torch.compile.

    Law: results are those of the torch executor, up to what the backend does to rounding.

    Args:
        name: as in ``torch.compile(backend=name)``: "inductor", "aot_eager", or one that was registered with
            PyTorch's `register_backend`.
        fuel: so many regions are compiled, see `bisect`.

    Raises:
        UnknownOption: no backend has this name; names those there are.

    Example:
        >>> import torch
        >>> from thunder_fn import jit
        >>> jit(lambda x: x.sin() + 1, executors=[backend("eager")])(torch.zeros(2))
        tensor([1., 1.])
    """
    known = internals.list_backends()
    if name not in known:
        raise UnknownOption(located(f"backend: there is no backend {name!r}", fix=f"There are {', '.join(known)}."))
    return Backend(name, fuel=fuel)
