"""Modules that were made on the meta device: their parameters begin to exist one module at a
time, as parts at once. Values come from `reset_parameters`, or from files of safetensors.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from thunder_fn.errors import RewriteError, kind_of
from thunder_fn.extras import extra

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


class Safetensors(Mapping[str, torch.Tensor]):
    """The tensors of files of safetensors, by name; each is read when it is asked for.

    Args:
        path: a file, or a folder with one or with an index, as Hugging Face writes them.

    Raises:
        RewriteError: there is no such file.
    """

    def __init__(self, path: str | Path) -> None:
        self._open: Any = extra("safetensors", "initialise: weights in files").safe_open
        self._files = {
            name: file for file in _files_of(Path(path)) for name in self._names_in(file)
        }

    def _names_in(self, file: Path) -> Sequence[str]:
        with self._open(file, framework="pt") as opened:
            return list(opened.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        with self._open(self._files[name], framework="pt") as opened:
            return opened.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _files_of(path: Path) -> list[Path]:
    """The files of a folder: those that its index names, or all."""
    indices = sorted(path.glob("*.safetensors.index.json"))
    if path.is_file():
        return [path]
    if indices:
        named = json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"].values()
        found = [path / name for name in dict.fromkeys(named)]
    else:
        found = sorted(path.glob("*.safetensors"))
    missing = [one.name for one in found if not one.is_file()]
    if missing or not found:
        what = f"initialise: {path} has no {', '.join(missing) or 'file of safetensors'}"
        raise RewriteError(what, fix="Give a file, or the folder of a model of Hugging Face.")
    return found


def from_weights(
    module: torch.nn.Module, weights: Mapping[str, torch.Tensor], init: Init | None
) -> Callable[[str, torch.nn.Module], None]:
    """Fill one module's parameters and buffers with the weights of their names, and others by
    `init`. A parameter of several names takes the weight of any.

    Raises:
        RewriteError: a weight is missing, or has another shape.
    """
    names = dict[int, list[str]]()
    for path, child in module.named_modules():
        for own, value in (*child._parameters.items(), *child._buffers.items()):  # pyright: ignore[reportPrivateUsage]
            names.setdefault(id(value), []).append(f"{path}.{own}" if path else own)

    def fill(path: str, alone: torch.nn.Module) -> None:
        if init is not None:
            init(alone)
        given = module.get_submodule(path)
        for own, value in (*alone._parameters.items(), *alone._buffers.items()):  # pyright: ignore[reportPrivateUsage]
            name = f"{path}.{own}" if path else own
            aliases = names[id(getattr(given, own))]
            known = next((one for one in aliases if one in weights), None)
            if value is None or (known is None and init is not None):
                continue
            if known is None:
                what = f"initialise: there is no weight of {name!r}"
                raise RewriteError(what, fix="Pass `init=`, which fills what has no weight.")
            weight = weights[known]
            if weight.shape != value.shape:
                what = f"initialise: {name!r} is of shape {tuple(value.shape)}"
                raise RewriteError(f"{what}, its weight of {tuple(weight.shape)}")
            value.copy_(weight)

    return fill


def initialised(
    module: torch.nn.Module, device: Any, fill: Callable[[str, torch.nn.Module], object]
) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Yield the first values, by name, of each module that has parameters or buffers of its own, in
    order.

    Law: drawn from the same generator, they are the values of `reset_parameters` of each module in
        order.

    Args:
        fill: fills a module's own parameters and buffers in place; given its path, too.
    """
    for path, child in module.named_modules():
        if not any(True for _ in (*child.parameters(recurse=False), *child.buffers(recurse=False))):
            continue
        alone = copy.copy(child)
        alone._parameters, alone._buffers = dict(child._parameters), dict(child._buffers)  # pyright: ignore[reportPrivateUsage]
        alone._modules = {}  # pyright: ignore[reportPrivateUsage]
        alone.to_empty(device=device, recurse=False)
        with torch.no_grad():
            fill(path, alone)
        name = lambda own: f"{path}.{own}" if path else own
        yield (
            {name(own): value.detach() for own, value in alone.named_parameters(recurse=False)},
            {name(own): value for own, value in alone.named_buffers(recurse=False)},
        )
