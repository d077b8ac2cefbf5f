"""expert_parallel: a mixture of experts whose experts lie on the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from thunder_fn.distributed.collectives import collectives
from thunder_fn.distributed.groups import Group, group_of
from thunder_fn.errors import RewriteError, is_int, kind_of

Tensor = torch.Tensor


@dataclass(frozen=True)
class ExpertParallel:
    """A mixture of experts on one rank. See `expert_parallel`."""

    expert: Callable[..., Any]
    group: Group
    experts: int
    capacity: int | None
    ragged: bool = False

    def __call__(self, params: Any, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The weighted results of each token's experts.

        Args:
            params: of this rank's experts, what `expert` takes.
            x: tokens of this rank, [tokens, width].
            indices: the experts of each token, [tokens, choices], each at most once.
            weights: of their results, [tokens, choices].
        """
        if x.dim() != 2 or indices.dim() != 2 or indices.shape != weights.shape:
            shapes = ", ".join(str(tuple(one.shape)) for one in (x, indices, weights))
            what = "expert_parallel: tokens are [tokens, width], indices and weights"
            raise RewriteError(
                f"{what} [tokens, choices]; given {shapes}",
                fix="Flatten the dims of tokens: `x.flatten(0, -2)`.",
            )
        if self.ragged:
            chosen = self._computed_where_they_are(params, x, indices)
            return (chosen * weights.unsqueeze(-1)).sum(1)
        room = x.shape[0] if self.capacity is None else self.capacity
        places, is_kept = self._places(indices, room)
        rows = x.repeat_interleave(indices.shape[1], 0)
        slots = x.new_zeros(self.experts * room + 1, x.shape[1])
        slots = slots.index_put((places,), rows)[:-1]  # the last holds what has no room
        found = self._exchanged(self.expert(params, self._exchanged(slots, room)), room, back=True)
        chosen = F.pad(found, (0, 0, 0, 1))[places] * is_kept.unsqueeze(-1)
        scaled = chosen.unflatten(0, indices.shape) * weights.unsqueeze(-1)
        return scaled.sum(1)

    def _computed_where_they_are(self, params: Any, x: Tensor, indices: Tensor) -> Tensor:
        """The results of all choices, [tokens, choices, width]. Ranks tell each other how many rows
        come, and send those. Rows without values are spread evenly.
        """
        size, own, flat = self.group.size, self.experts // self.group.size, indices.flatten()
        order = flat.argsort(stable=True)
        counts = F.one_hot(flat, self.experts).sum(0)
        blocks = self._sent(counts, [own] * size, [own] * size)  # of rows: by rank, then by expert
        grid = blocks.reshape(size, own)
        room = grid.sum(0).amax().reshape(1)  # of the expert with most rows
        numbers = torch.cat((counts.reshape(size, own).sum(1), grid.sum(1), room))
        if flat.is_meta:  # no values, as in a plan: rows are spread evenly
            count = flat.shape[0]
            there = here = [count * (i + 1) // size - count * i // size for i in range(size)]
            most = -(-count // own)
        else:
            *both, most = numbers.cpu().tolist()
            there, here = both[:size], both[size:]
        rows = self._sent(x[order // indices.shape[1]], here, there)
        ends, ahead = blocks.cumsum(0), (grid.cumsum(0) - grid).flatten()
        at = torch.arange(rows.shape[0], device=x.device)
        block = torch.searchsorted(ends, at, right=True)
        place = block % own, at + (ahead + blocks - ends)[block]
        slots = x.new_zeros(own, most, x.shape[1]).index_put(place, rows)
        found = self._sent(self.expert(params, slots)[place], there, here)
        return found[order.argsort()].unflatten(0, indices.shape)

    def _sent(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """The rows that all ranks send to this one, for those that it sends to them."""
        name = self.group.name
        return collectives.wait_tensor(collectives.all_to_all_single(x, received, sent, name))

    def _places(self, indices: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """The slot of each choice, in the order of tokens, and whether there is one."""
        flat = indices.flatten()
        chosen = F.one_hot(flat, self.experts)
        before = (chosen.cumsum(0) - chosen).gather(1, flat.unsqueeze(1)).squeeze(1)
        is_kept = before < room
        return torch.where(is_kept, flat * room + before, self.experts * room), is_kept

    def _exchanged(self, slots: Tensor, room: int, *, back: bool = False) -> Tensor:
        """Slots of all experts for those of this rank's experts from all ranks, or back.

        [experts * room, width] for [own experts, ranks * room, width].
        """
        size, own = self.group.size, self.experts // self.group.size
        width = slots.shape[-1]
        if back:
            slots = slots.reshape(own, size, room, width).transpose(0, 1)
        sizes = [own] * size
        sent = slots.reshape(size * own, room, width).contiguous()
        found = self._sent(sent, sizes, sizes)
        if back:
            return found.reshape(self.experts * room, width)
        return found.reshape(size, own, room, width).transpose(0, 1).reshape(own, -1, width)


def expert_parallel(
    expert: Callable[..., Any],
    mesh: Any,
    experts: int,
    *,
    capacity: int | None = None,
    ragged: bool = False,
) -> ExpertParallel:
    """Put the experts of a mixture on the ranks of a mesh; tokens travel to their experts.

    Law: on each rank, the result is that of a loop over the choices of each of its tokens, with the
        parameters of all ranks. A token's choice that finds its expert full counts zero.

    Args:
        expert: a function of `(params, tokens)`, with tokens [own experts, any, width]; a rank has
            ``experts / ranks`` experts, in order. Rows without a token are zeros.
        mesh: a DeviceMesh of one dim, such as `mesh["ep"]`.
        experts: the number of experts on all ranks.
        capacity: the most tokens that an expert takes from a rank, in the order of tokens. Left
            out, it takes all (dropless), and room for all of a rank's tokens travels.
        ragged: send the rows that there are, and no room beside them. Their numbers are found in
            the data, so each call waits for them, and `vmap` of it is refused.

    Returns:
        A function of `(params, x, indices, weights)`: the parameters of this rank's experts,
            tokens [tokens, width], and for each the numbers and weights of its experts.

    Raises:
        RewriteError: the experts are no multiple of the ranks, capacity is not positive, or
            `ragged` has one.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> first, second = tfn.parameters.simulated(2)
        >>> moe = expert_parallel(lambda w, x: x @ w, first, experts=4)
        >>> x, choices = torch.ones(3, 2), torch.tensor([[0, 2], [1, 3], [0, 1]])
        >>> args = torch.ones(2, 2, 2), x, choices, torch.full((3, 2), 0.5)
        >>> trace = tfn.trace(moe, *args)
        >>> tfn.parameters.evaluate_ranks(trace, [list(args)] * 2)[0][0]
        tensor([[2., 2.],
                [2., 2.],
                [2., 2.]])

    Source: GShard (arXiv:2006.16668), Switch Transformers (arXiv:2101.03961), MegaBlocks
    (arXiv:2211.15841).
    """
    group = group_of(mesh)
    if not callable(expert):
        raise RewriteError(f"expert_parallel: expected a function, given {kind_of(expert)}")
    for name, value in (("experts", experts), ("capacity", 1 if capacity is None else capacity)):
        if not is_int(value, 1):
            raise RewriteError(f"expert_parallel: {name} is a number from 1 on, given {value!r}")
    if experts % group.size:
        what = f"expert_parallel: {experts} experts on {group.size} ranks"
        raise RewriteError(what, fix="Give a multiple of the number of ranks.")
    if ragged and capacity is not None:
        what = f"expert_parallel: rows that are ragged have no capacity, given {capacity}"
        raise RewriteError(what, fix="Leave out capacity, or ragged.")
    return ExpertParallel(expert, group, experts, capacity, ragged)
