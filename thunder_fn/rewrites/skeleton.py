"""A module without tensors, as a function of them: what a rewritten module runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, cast

import torch

from thunder_fn.jit.module import STATE
from thunder_fn.rewrites.prepared import Layout, Prepared
from thunder_fn.rewrites.rewritten import Rewritten


def with_tensors(module: torch.nn.Module, make: Callable[[str, torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    """A copy of a module on other tensors, made from names and old ones. What was tied stays tied."""
    memo: dict[int, Any] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        new = make(name, tensor)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
    return copy.deepcopy(module, memo)


def places_of(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """One name for each place where a module holds a tensor, and the name under which that is listed.

    A module that is there twice has its places once: `functional_call` would put a tensor there twice, and leave it there.
    """
    listed = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    for path, child in module.named_modules():
        params = child.named_parameters(recurse=False, remove_duplicate=False)
        buffers = child.named_buffers(recurse=False, remove_duplicate=False)
        for own, tensor in (*params, *buffers):
            yield (f"{path}.{own}" if path else own), listed[id(tensor)]


class Skeleton:
    """A module without tensors, as a function of its parameters, its buffers and its arguments."""

    of_parameters: ClassVar[bool] = True

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = with_tensors(module, lambda _, tensor: torch.empty_like(tensor, device="meta"))
        self.__name__ = type(module).__name__
        self.places = tuple(places_of(self.module))

    def __call__(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        given = {**params, **buffers}
        tensors = {place: given[name] for place, name in self.places if name in given}
        return torch.func.functional_call(self.module, tensors, args, kwargs, tie_weights=False)


class OnState:
    """A rewritten function of a module, as one of plain tensors: the parts, then the buffers. Calls take those apart
    faster than `Prepared`, and arguments keep the numbers that they have for the user."""

    def __init__(self, function: Rewritten, layout: Layout, buffer_names: tuple[str, ...]) -> None:
        self.function, self.layout, self.buffer_names = function, layout, buffer_names
        self.__name__ = function.__name__
        self.__wrapped__ = cast(Skeleton, function.fn).module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = kwargs.pop(STATE)
        count = len(state) - len(self.buffer_names)
        buffers = dict(zip(self.buffer_names, state[count:], strict=True))
        return self.function.run(Prepared(self.layout, state[:count]), buffers, *args, **kwargs)
