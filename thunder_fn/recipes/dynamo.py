"""The backend "thunder_fn" of `torch.compile`: each graph that Dynamo finds becomes a jitted function.

Dynamo runs the bytecode, breaks graphs where it must and guards what it baked in. Its graphs consist of torch functions, so
they are traced as any function is, composites included, and get the transforms and executors that were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_fn.jit import Options, jit

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


def thunder_fn(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Compiled:
    """What `torch.compile(f, backend="thunder_fn", options={...})` calls. The options are those of `jit`."""
    return backend(**(options or {}))(graph_module, example_inputs)
