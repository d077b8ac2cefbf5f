"""Use a backend of torch.compile as an executor. It gets regions as FX graphs of ATen calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from thunder_fn.errors import ExecutorError, UnknownOption, callable_name, kind_of
from thunder_fn.executors.torchinductor.codegen import Strides, closed_region
from thunder_fn.executors.torchinductor.regions import RegionCompiler
from thunder_fn.extend.regions import RunFunction, not_compiled
from thunder_fn.ir.text import shown
from thunder_fn.ir.trace import Trace
from thunder_fn.torch_internals import inductor as internals

Compiler = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
"""A backend in torch.compile's sense: a function of a graph and of its inputs that returns a
function of such inputs.
"""


class Backend(RegionCompiler):
    """The executor that compiles regions with a backend of torch.compile. Made by `backend`."""

    is_checked = True

    def __init__(self, name: str, compiler: Compiler, *, fuel: int | None = None) -> None:
        super().__init__(f"backend_{re.sub(r'[^0-9a-zA-Z_]', '_', name)}", min_shared=6, fuel=fuel)
        self.compiler = compiler

    def fuse(self, region: Trace) -> RunFunction:
        """The region, given to the backend when it is first called with tensors of some layout."""
        closed, constants = closed_region(region)
        known: dict[tuple[Strides, ...], Callable[..., Any]] = {}

        def compiled(inputs: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
            try:
                return self.compiler(closed.to_fx(), list(inputs))
            except Exception as error:  # noqa: BLE001  # the program runs without the compiler
                return not_compiled(self, closed, region.name, error)

        def run(*inputs: torch.Tensor) -> tuple[Any, ...]:
            inputs = (*inputs, *constants)
            layout = tuple(tensor.stride() for tensor in inputs)
            with torch.no_grad():
                if layout not in known:
                    known[layout] = compiled(inputs)
                return tuple(known[layout](*inputs))

        return run


def backend(compiler: str | Compiler, *, fuel: int | None = None) -> Backend:
    """An executor that gives regions to a backend of torch.compile.

    Law: results are those of the torch executor, up to the backend's rounding.

    Args:
        compiler: as in ``torch.compile(backend=compiler)``. A function of a graph module and its
            inputs that returns a function, or the name of one: "inductor", "aot_eager", or one
            registered with PyTorch's `register_backend`.
        fuel: the most regions to compile, see `bisect`.

    Raises:
        UnknownOption: no backend has this name; names those there are.
        ExecutorError: it is neither a function nor a name.

    Example:
        >>> import torch
        >>> from thunder_fn import jit
        >>> jit(lambda x: x.sin() + 1, executors=[backend("eager")])(torch.zeros(2))
        tensor([1., 1.])
        >>> own = backend(lambda graph, inputs: graph.forward)
        >>> jit(lambda x: x.cos() + 1, executors=[own])(torch.zeros(2))
        tensor([2., 2.])
    """
    if isinstance(compiler, str):
        known = internals.list_backends()
        if compiler not in known:
            fix = f"There are {', '.join(known)}; or pass the function itself."
            raise UnknownOption(f"backend: there is no backend {compiler!r}", fix=fix)
        return Backend(compiler, internals.lookup_backend(compiler), fuel=fuel)
    if not callable(compiler):
        what = (
            "backend: a backend is a function of a graph and its inputs, or the name of one, given"
            f" {kind_of(compiler)}"
        )
        raise ExecutorError(f"{what}: {shown(compiler, 60)}")
    return Backend(_name_of(compiler), compiler, fuel=fuel)


def _name_of(compiler: Any) -> str:
    """The name of a function, of a partial of one, or of a callable object."""
    inner = getattr(compiler, "func", compiler)
    return callable_name(inner)
