"""The backend "thunder_fn" of `torch.compile`: each graph that Dynamo finds becomes a jitted function.

Dynamo runs the bytecode, breaks graphs where it must and guards what it baked in. Its graphs consist of torch functions, so
they are traced as any function is, composites included, and get the transforms and executors that were asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn.errors import RecipeError, located
from thunder_fn.jit import Options, jit
from thunder_fn.jit.module import with_forward
from thunder_fn.rewrites import RewrittenModule

Compiled = Callable[..., Any]


def backend(**options: Any) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Compiled]:
    """A backend for `torch.compile` with options of `jit`.

    Raises:
        UnknownOption: jit has no such option.
    """
    Options().changed(options)

    def thunder_fn(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        return jit(graph_module.forward, **options)

    return thunder_fn


@dataclass(frozen=True, eq=False)
class DynamoForward:
    """A module's `forward`, compiled by Dynamo with our backend. Pickled and copied by its options."""

    module: torch.nn.Module
    options: tuple[tuple[str, Any], ...]

    @property
    def again(self) -> Callable[[torch.nn.Module], DynamoForward]:
        """What makes the same of another module."""
        return functools.partial(DynamoForward, options=self.options)

    @functools.cached_property
    def compiled(self) -> Compiled:
        """What Dynamo makes."""
        return torch.compile(self.module.forward, backend=backend(**dict(self.options)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)


def through_dynamo(model: Compiled, options: dict[str, Any]) -> Any:
    """A function or module whose graphs are found by Dynamo; a module stays one of its class, on the same state.

    Raises:
        RecipeError: the module's parameters are stored in another way.
    """
    if isinstance(model, RewrittenModule):
        what = (
            "the frontend 'dynamo' cannot trace what a rewrite such as quantize or fsdp made: it is captured directly"
        )
        raise RecipeError(located(what, fix='Leave `frontend="dynamo"` out, or that recipe.'))
    if isinstance(model, torch.nn.Module):
        return with_forward(model, functools.partial(DynamoForward, options=tuple(options.items())))
    return torch.compile(model, backend=backend(**options))


def thunder_fn(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Compiled:
    """What `torch.compile(f, backend="thunder_fn", options={...})` calls. The options are those of `jit`."""
    return backend(**(options or {}))(graph_module, example_inputs)
