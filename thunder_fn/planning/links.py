"""Seconds of collectives: latency and bandwidth, by algorithm.

A ring passes each byte once around: ``(n - 1) * alpha + (n - 1) / n * bytes / rate``; an all-reduce
is two of them. A tree adds up along ``log2`` steps between nodes, with half of the rate. The faster
one is taken, as NCCL's model does, from whose `tuning.cc` the counts of steps are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal as Choice, TypeAlias, get_args

from thunder_fn.errors import InspectError
from thunder_fn.planning.rates import Hardware

Kind: TypeAlias = Choice[
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "send", "receive"
]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a group.

    Attributes:
        num_bytes: of the whole: all shards of a gather or a scatter, the sum of an all-reduce.
        ranks: of the group.
        nodes: that the group's ranks are in.

    Raises:
        InspectError: there is no collective of that kind, or a number is not positive.

    Example:
        >>> from thunder_fn.planning import Collective
        >>> Collective("all-reduce", 10**9, ranks=8, nodes=1).wire_bytes
        1750000000.0
    """

    kind: Kind
    num_bytes: int
    ranks: int
    nodes: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            what = f"Collective: kind is one of {', '.join(get_args(Kind))}, given {self.kind!r}"
            raise InspectError(what)
        if self.num_bytes < 0 or not 1 <= self.nodes <= self.ranks:
            what = f"Collective: {self.num_bytes} bytes of {self.ranks} ranks in {self.nodes} nodes"
            raise InspectError(what, fix="Give at least as many ranks as nodes, and one of each.")

    @property
    def wire_bytes(self) -> float:
        """The bytes that each rank sends around a ring."""
        if self.kind in ("send", "receive"):
            return self.num_bytes if self.kind == "send" else 0
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.num_bytes * (self.ranks - 1) / self.ranks


def collective_seconds(one: Collective, hardware: Hardware) -> float:
    """The time of a collective on idle links, by the faster algorithm.

    Law: more bytes take no less time, and a group of one rank takes none.

    Example:
        >>> from thunder_fn.planning import hardware_named
        >>> one = Collective("all-gather", 10**9, ranks=8, nodes=1)
        >>> round(1e3 * collective_seconds(one, hardware_named("h100")), 2)  # milliseconds
        2.46
    """
    if one.ranks == 1:
        return 0.0
    if one.kind in ("send", "receive"):
        link = hardware.inside if one.nodes == 1 else hardware.across
        return link.step_seconds + one.num_bytes / link.rate
    times = [ring_seconds(one, hardware)]
    if one.kind == "all-reduce":
        times.append(tree_seconds(one, hardware))
    return hardware.collective_seconds + min(times)


def rate(one: Collective, hardware: Hardware) -> float:
    """Bytes a second of a ring through a group.

    Of a node's ranks each sends across by its own link. So as many rings leave a node as the group
    has ranks in it, and all of those share the links inside.
    """
    if one.nodes == 1:
        return hardware.inside.rate
    beside = one.ranks / one.nodes
    across = beside * hardware.across.rate
    return across if beside == 1 else min(hardware.inside.rate, across)


def ring_seconds(one: Collective, hardware: Hardware) -> float:
    """Steps of a ring, those between nodes among them, and the bytes that each rank sends."""
    rounds = 2 if one.kind == "all-reduce" else 1
    between = one.nodes - 1
    inside = one.ranks - 1 - between
    latency = inside * hardware.inside.step_seconds + between * hardware.across.step_seconds
    return rounds * latency + one.wire_bytes / rate(one, hardware)


def tree_seconds(one: Collective, hardware: Hardware) -> float:
    """Up a tree and down again: a chain in each node, a binary tree of nodes."""
    chain = (one.ranks / one.nodes - 1) * hardware.inside.step_seconds
    tree = math.ceil(math.log2(one.nodes)) * hardware.across.step_seconds
    return 2 * (chain + tree) + 2 * one.num_bytes / (0.9 * rate(one, hardware))
