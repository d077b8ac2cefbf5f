"""context_parallel: a function whose positions are cut among the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thunder_fn.api.calling import Transformed, transformed
from thunder_fn.api.captures import Plan, in_place, planned
from thunder_fn.capture import Captured
from thunder_fn.capture.replaced.lookasides import lookasides
from thunder_fn.distributed.groups import group_of
from thunder_fn.errors import RewriteError
from thunder_fn.interpreters.context_parallel import (
    KINDS,
    Positions,
    context_parallel as replaced,
    seeing_all,
)


@dataclass(frozen=True)
class ContextParallel(Transformed):
    """A function on a part of the positions. See `context_parallel`."""

    fn: Callable[..., Any]
    positions: Positions
    kind: str

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return planned(self, args, kwargs, lambda capture: self._plan(capture, args, kwargs))

    def _plan(self, capture: Callable[..., Captured], args: Any, kwargs: Any) -> Plan:
        with lookasides([seeing_all(self.positions.group)]):
            captured = capture(self.fn, args, kwargs)
        new = replaced(captured.trace, self.positions, self.kind)
        return Plan(self.__name__, captured, new, in_place(captured))


def positions(mesh: Any, *, balanced: bool = False) -> Positions:
    """The positions that each rank has: `part` takes a rank's, and `joined` is its inverse.

    Law: ``rank.joined([one.part(x, dim) for one in ranks], dim)`` is x, on each rank.

    Args:
        mesh: a DeviceMesh of one dim, such as `mesh["cp"]`.
        balanced: as in `context_parallel`.

    Raises:
        RewriteError: mesh is no DeviceMesh of one dim.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> ranks = [positions(group, balanced=True) for group in tfn.parameters.simulated(2)]
        >>> parts = [rank.part(torch.arange(8), 0) for rank in ranks]
        >>> parts, ranks[0].joined(parts, 0)
        ([tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5])], tensor([0, 1, 2, 3, 4, 5, 6, 7]))
    """
    return Positions(group_of(mesh), balanced)


def context_parallel(f: Any, mesh: Any, kind: str = "ring", *, balanced: bool = False) -> Any:
    """Give each rank a part of the positions, and compute attention over all of them together.

    Law: if all but attention acts on each position alone, rank r computes, of its part of the
        positions, the r-th part of what f computes of all of them; gradients are those of the sum
        over ranks.

    Args:
        f: any PyTorch callable, jitted or not, that calls
            `torch.nn.functional.scaled_dot_product_attention` without dropout. Every rank calls it
            on its own positions, `positions(mesh, balanced=...).part(x, dim)`; numbers of positions
            are passed along. A mask has the rows of this rank's queries and the columns of all
            ranks' keys, in the order of positions; a dim of one is for all of them. Put `ddp` or
            `fsdp` over the same mesh around it for the parameters.
        mesh: a DeviceMesh of one dim, such as `mesh["cp"]`.
        kind: `"ring"` sends keys and values around, in a forward and again in its backward, which
            stores none of them. `"all_to_all"` sends heads for positions (Ulysses); the numbers of
            heads are multiples of that of ranks.
        balanced: a rank has a part from the front of the sequence and one from its end, so that a
            causal ring gives all ranks the same work, half of that of the plain order.

    Raises:
        RewriteError: there is no such kind; or an attention has dropout, a mask of other positions,
            or numbers of positions or heads that do not fit.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> attention = torch.nn.functional.scaled_dot_product_attention
        >>> f = lambda x: attention(x, x, x, is_causal=True)
        >>> x = torch.randn(1, 2, 12, 4)
        >>> groups = tfn.parameters.simulated(3)
        >>> ranks = [context_parallel(f, group, balanced=True) for group in groups]
        >>> places = [tfn.parameters.positions(group, balanced=True) for group in groups]
        >>> parts = [place.part(x, 2) for place in places]
        >>> traces = [tfn.trace(rank, part) for rank, part in zip(ranks, parts)]
        >>> found = tfn.parameters.evaluate_ranks(traces, [[part] for part in parts])
        >>> torch.allclose(places[0].joined([y for y, in found], 2), f(x), atol=1e-6)
        True

    Source: `thunder_fn.interpreters.context_parallel` names the papers.
    """
    if kind not in KINDS:
        raise RewriteError(f"context_parallel: kind is {' or '.join(KINDS)}, given {kind!r}")
    own = positions(mesh, balanced=balanced)
    return transformed(f, lambda fn: ContextParallel(fn, own, kind), "reassociating")
