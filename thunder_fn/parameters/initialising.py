"""Modules that were made on the meta device: their parameters begin to exist one module at a
time, as parts at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from thunder_fn.errors import RewriteError, kind_of

Init = Callable[[torch.nn.Module], object]


def reset(name: str, module: torch.nn.Module) -> None:
    """Fill a module's own parameters and buffers, by its `reset_parameters`.

    Raises:
        RewriteError: it has none.
    """
    own: Any = getattr(module, "reset_parameters", None)
    if own is None:
        what = f"initialise: {name!r}, {kind_of(module)}, has parameters and no reset_parameters"
        fix = (
            "Pass `init=`, a function that fills the parameters and buffers of one module in place."
        )
        raise RewriteError(what, fix=fix)
    own()


def initialised(
    module: torch.nn.Module, device: Any, init: Init | None
) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Yield the first values, by name, of each module that has parameters or buffers of its own, in
    order.

    Law: drawn from the same generator, they are the values of `reset_parameters` of each module in
        order.
    """
    for path, child in module.named_modules():
        if not any(True for _ in (*child.parameters(recurse=False), *child.buffers(recurse=False))):
            continue
        alone = copy.copy(child)
        alone._parameters, alone._buffers = dict(child._parameters), dict(child._buffers)  # pyright: ignore[reportPrivateUsage]
        alone._modules = {}  # pyright: ignore[reportPrivateUsage]
        alone.to_empty(device=device, recurse=False)
        with torch.no_grad():
            init(alone) if init is not None else reset(path, alone)
        name = lambda own: f"{path}.{own}" if path else own
        yield (
            {name(own): value.detach() for own, value in alone.named_parameters(recurse=False)},
            {name(own): value for own, value in alone.named_buffers(recurse=False)},
        )
