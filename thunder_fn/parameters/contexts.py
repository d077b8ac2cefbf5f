"""context_parallel: a function whose positions are cut among the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thunder_fn.api.calling import Transformed, transformed
from thunder_fn.api.captures import Plan, in_place, planned
from thunder_fn.capture import Captured
from thunder_fn.distributed.groups import Group, group_of
from thunder_fn.errors import RewriteError
from thunder_fn.interpreters.context_parallel import KINDS, context_parallel as replaced


@dataclass(frozen=True)
class ContextParallel(Transformed):
    """A function on a part of the positions. See `context_parallel`."""

    fn: Callable[..., Any]
    group: Group
    kind: str

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        make = lambda capture: self._plan(capture(self.fn, args, kwargs))
        return planned(self, args, kwargs, make)

    def _plan(self, captured: Captured) -> Plan:
        new = replaced(captured.trace, self.group, self.kind)
        return Plan(self.__name__, captured, new, in_place(captured))


def context_parallel(f: Any, mesh: Any, kind: str = "ring") -> Any:
    """Give each rank a part of the positions, and compute attention over all of them together.

    Law: if all but attention acts on each position alone, rank r computes, of its part of the
        positions, the r-th part of what f computes of all of them; gradients are those of the sum
        over ranks.

    Args:
        f: any PyTorch callable, jitted or not, that calls
            `torch.nn.functional.scaled_dot_product_attention` without mask or dropout. Every rank
            calls it on its own positions, as `x.chunk(size, dim)[rank]`; numbers of positions are
            passed along. Put `ddp` or `fsdp` over the same mesh around it for the parameters.
        mesh: a DeviceMesh of one dim, such as `mesh["cp"]`.
        kind: `"ring"` sends keys and values around, in a forward and again in its backward, which
            stores none of them. `"all_to_all"` sends heads for positions (Ulysses); the numbers of
            heads are multiples of that of ranks.

    Raises:
        RewriteError: there is no such kind; or an attention has a mask, dropout or numbers of heads
            that do not fit.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> attention = torch.nn.functional.scaled_dot_product_attention
        >>> f = lambda x: attention(x, x, x, is_causal=True)
        >>> x = torch.randn(1, 2, 6, 4)
        >>> ranks = [context_parallel(f, group) for group in tfn.parameters.simulated(3)]
        >>> parts = x.chunk(3, 2)
        >>> traces = [tfn.trace(rank, part) for rank, part in zip(ranks, parts)]
        >>> found = tfn.parameters.evaluate_ranks(traces, [[part] for part in parts])
        >>> torch.allclose(torch.cat([y for y, in found], 2), f(x), atol=1e-6)
        True

    Source: `thunder_fn.interpreters.context_parallel` names the papers.
    """
    if kind not in KINDS:
        raise RewriteError(f"context_parallel: kind is {' or '.join(KINDS)}, given {kind!r}")
    group = group_of(mesh)
    return transformed(f, lambda fn: ContextParallel(fn, group, kind), "reassociating")
