"""A module without tensors, as a function of them: what a rewritten module runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, cast

import torch
from torch.nn.parameter import is_lazy

from thunder_fn import torch_internals as internals
from thunder_fn.capture.modules import TRACING
from thunder_fn.errors import RewriteError
from thunder_fn.interpreters.rewriting.prepared import Layout, Prepared
from thunder_fn.jitted.modules.module import STATE
from thunder_fn.parameters.rewritten import Rewritten

EXTRA_STATE = "_extra_state"


def with_tensors(
    module: torch.nn.Module, make: Callable[[str, torch.Tensor], torch.Tensor]
) -> torch.nn.Module:
    """A copy of a module on other tensors, made from names and old ones. Tied tensors stay tied."""
    memo: dict[int, Any] = {}
    for child in module.modules():  # a pruned weight, say, which a hook computes anew in each call
        memo |= {id(value): value.detach() for value in vars(child).values() if is_computed(value)}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        new = make(name, tensor)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = (
            torch.nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
        )
    return copy.deepcopy(module, memo)


def is_computed(value: Any) -> bool:
    """Test for a tensor that autograd has made, which Python cannot copy."""
    return isinstance(value, torch.Tensor) and not internals.is_leaf(value)


def is_extra(name: str) -> bool:
    """Test for the name, in a module's state, of extra state that is no tensor:
    `get_extra_state`.
    """
    return name.rpartition(".")[2] == EXTRA_STATE


def check_initialised(module: torch.nn.Module) -> None:
    """Raises:
    RewriteError: a parameter has no shape yet; names it.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            what = f"the parameter {name!r} of the {type(module).__name__} has no shape yet"
            raise RewriteError(
                what, fix="Call the module once, which gives it one, and rewrite it then."
            )


def check_inside(module: torch.nn.Module) -> None:
    """Raise if a part of the module was rewritten by itself: its parameters are none of the whole.

    Raises:
        RewriteError: names that part.
    """
    for path, child in module.named_modules():
        if isinstance(vars(child).get("_skeleton"), Skeleton):
            what = f"the module {path!r} of the {type(module).__name__} was rewritten by itself"
            fix = (
                f"Rewrite the whole, with a filter such as `filter='{path}.*'`; or begin with"
                " `restored()` of that module."
            )
            raise RewriteError(what, fix=fix)


def places_of(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """One name for each place where a module holds a tensor, and the name under which that is
    listed.

    A module that is there twice has its places once: `functional_call` would put a tensor there
    twice, and leave it there.
    """
    listed = {
        id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    for path, child in module.named_modules():
        params = child.named_parameters(recurse=False, remove_duplicate=False)
        buffers = child.named_buffers(recurse=False, remove_duplicate=False)
        for own, tensor in (*params, *buffers):
            yield (f"{path}.{own}" if path else own), listed[id(tensor)]


def state_names(module: torch.nn.Module) -> tuple[tuple[str, str], ...]:
    """The names in a module's state, and for each the one under which its tensor is listed: tied
    ones have one.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    listed = {id(tensor): name for name, tensor in tensors.items()}
    every = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    own = {name: listed[id(tensor)] for name, tensor in every}
    return tuple(
        (name, own.get(name, name)) for name in module.state_dict() if name in own or is_extra(name)
    )


def named_parts(
    names: Iterable[tuple[str, str]], parts: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Parts of parameters, tied ones under each of their names."""
    parts = tuple(parts)
    for name, canonical in names:
        for part in parts:
            if part == canonical or part.startswith(f"{canonical}."):
                yield name + part.removeprefix(canonical), part


class Skeleton:
    """A module without tensors, as a function of its parameters, its buffers and its arguments."""

    of_parameters: ClassVar[bool] = True

    def __init__(self, module: torch.nn.Module) -> None:
        check_initialised(module)
        check_inside(module)
        self.module = with_tensors(
            module, lambda _, tensor: torch.empty_like(tensor, device="meta")
        )
        self.__name__ = type(module).__name__
        self.places = tuple(places_of(self.module))

    def extras(self) -> dict[str, Any]:
        """Data that modules save besides tensors, by its name in the state."""
        return {name: value for name, value in self.module.state_dict().items() if is_extra(name)}

    def set_extras(self, state: Mapping[str, Any]) -> bool:
        """Load the values of `extras`, as far as they are there. Tells whether any is."""
        names = self.extras().keys() & state.keys()
        for name in names:
            self.module.get_submodule(name.rpartition(".")[0]).set_extra_state(state[name])
        return bool(names)

    def __call__(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given = {**params, **buffers}
        tensors = {place: given[name] for place, name in self.places if name in given}
        with TRACING:  # there is one module, for all threads
            return torch.func.functional_call(self.module, tensors, args, kwargs, tie_weights=False)


class OnState:
    """A rewritten function of a module, as one of plain tensors: the parts, then the buffers.
    Calls take those apart faster than `Prepared`, and arguments keep the numbers that they have
    for the user.
    """

    def __init__(self, function: Rewritten, layout: Layout, buffer_names: tuple[str, ...]) -> None:
        self.function, self.layout, self.buffer_names = function, layout, buffer_names
        self.__name__ = function.__name__
        self.__wrapped__ = cast(Skeleton, function.fn).module.forward

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        state = kwargs.pop(STATE)
        count = len(state) - len(self.buffer_names)
        buffers = dict(zip(self.buffer_names, state[count:], strict=True))
        return self.function.run(Prepared(self.layout, state[:count]), buffers, *args, **kwargs)
