"""functionalize: a function without in-place ops. `functional_call` and `stack_module_state` are
torch.func's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch.func import functional_call as functional_call, stack_module_state as stack_module_state

from thunder_fn.api.calling import Transformed, transformed
from thunder_fn.api.captures import Plan, in_place, planned
from thunder_fn.capture import EVERY_LEAF, Captured
from thunder_fn.errors import GradError, spelled
from thunder_fn.jitted import Jitted

P = ParamSpec("P")
R = TypeVar("R")


REMOVES = ("mutations", "mutations_and_views")


@dataclass(frozen=True)
class Functionalized(Transformed):
    """A function that computes new values, and writes those of its arguments at the end. See
    `functionalize`.
    """

    fn: Callable[..., Any]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        make = lambda capture: self._plan(capture(self.fn, args, kwargs, known=EVERY_LEAF))
        return planned(self, args, kwargs, make)

    def by_torch(self) -> Callable[..., Any]:
        """The same function by torch.func."""
        return torch.func.functionalize(self.fn)

    def _plan(self, captured: Captured) -> Plan:
        return Plan(self.__name__, captured, captured.trace, in_place(captured))


@overload
def functionalize(f: Jitted[P, R], *, remove: str = "mutations") -> Jitted[P, R]: ...
@overload
def functionalize(f: Callable[P, R], *, remove: str = "mutations") -> Callable[P, R]: ...
@spelled()
def functionalize(f: Callable[..., Any], *, remove: str = "mutations") -> Any:
    """Rewrite a function with pure ops: in-place changes become new values, which arguments get at
    the end.

    Law: the values, and the final values of the arguments, are those of f.

    Args:
        f: any PyTorch callable.
        remove: "mutations" or "mutations_and_views"; a trace has neither.

    Raises:
        GradError: remove is something else.

    Example:
        >>> import torch
        >>> functionalize(lambda x: x.clone().mul_(2))(torch.ones(2))
        tensor([2., 2.])

    Source: torch.func.functionalize for the signature.
    """
    if remove not in REMOVES:
        raise GradError(
            f"functionalize: remove is one of {', '.join(map(repr, REMOVES))}, given {remove!r}"
        )
    return transformed(f, Functionalized)
