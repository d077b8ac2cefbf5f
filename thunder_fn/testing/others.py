"""The laws for other people's FX passes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from thunder_fn.errors import MissingRule
from thunder_fn.ir.fx import from_fx, to_fx
from thunder_fn.ir.trace import Trace
from thunder_fn.testing.laws.comparing import is_flat
from thunder_fn.testing.laws.interpreters import fakes
from thunder_fn.testing.laws.promises import Promised
from thunder_fn.testing.user import Search
from thunder_fn.testing.watching import Coverage
from thunder_fn.torch_internals import FakeTensorMode
from thunder_fn.torch_internals.patches import no_meta_log

Pass = Callable[[torch.fx.GraphModule], Any]
OF_FX = ("carries facts", "leaves closed-over tensors alone")
"""Laws about what an FX graph does not hold."""


def check_pass(fx_pass: Pass, *, max_examples: int = 50, ops: tuple[Any, ...] = ()) -> Coverage:
    """Hold an FX pass to the laws of `check_transform`.

    The pass takes a GraphModule of ATen ops, with fake tensors in `meta["val"]`. It returns a
    GraphModule, or changes the one that it is given. Traces that no FX graph expresses, those with
    structured ops or with symbols as numbers, are left as they are.

    Law: a pass that returns its graph as it is keeps all laws.

    Raises:
        LawBroken: a law does not hold; names it and prints the smallest trace found.

    Example:
        >>> import torch
        >>> from thunder_fn.testing import LawBroken, check_pass
        >>> def cosine_for_sine(graph):
        ...     for node in graph.graph.nodes:
        ...         if node.target is torch.ops.aten.sin.default:
        ...             node.target = torch.ops.aten.cos.default
        >>> try:
        ...     check_pass(cosine_for_sine, max_examples=1)
        ... except LawBroken:
        ...     print("broken")
        broken
    """

    transform = transform_of(fx_pass)
    with warnings.catch_warnings(), no_meta_log():
        warnings.simplefilter("ignore")
        search = Search(transform, Promised(), ops, without=OF_FX)
        search.run(max_examples)
    return search.coverage


def transform_of(fx_pass: Pass) -> Callable[[Trace], Trace]:
    """Return the pass as a function of traces, which leaves alone those that no graph expresses."""

    def transform(trace: Trace) -> Trace:
        if not is_flat(trace):
            return trace
        try:
            graph = to_fx(trace)
        except MissingRule:
            return trace
        with suppress(Exception):  # PyTorch refuses some arguments that schemas allow
            FakeTensorProp(graph, FakeTensorMode(allow_non_fake_inputs=True)).propagate(
                *fakes(trace)
            )
        made = fx_pass(graph)
        made = getattr(made, "graph_module", made)  # of torch.fx.passes, a PassResult
        return from_fx(made if isinstance(made, torch.fx.GraphModule) else graph)

    transform.__name__ = getattr(fx_pass, "__name__", type(fx_pass).__name__)
    transform.__wrapped__ = fx_pass  # type: ignore[attr-defined]
    return transform
