"""The best way to cut a training step, by enumeration: mesh, checkpoint and micro-batches.

Each way is a plan of its own: the loss is rewritten by `tensor_parallel`, `context_parallel`,
`checkpoint`, `fsdp` and `pipeline`, and captured on its mesh. Ways that cannot be are left out: a
mesh that the world does not have, a batch that does not divide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

import torch

from thunder_fn.errors import InspectError, ThunderError, UnknownOption, is_int, kind_of
from thunder_fn.inspect.tables import bytes_text, plain, seconds_text
from thunder_fn.interpreters.pipeline.schedules import SCHEDULES
from thunder_fn.ir.notebook import Shown
from thunder_fn.jitted.options import unknown
from thunder_fn.planning.cuts import (
    ORDER,
    POLICIES,
    Cut,
    PlannedRecipe,
    Way,
    checkpointed,
    forwards_of,
)
from thunder_fn.planning.plans import Plan, planned
from thunder_fn.planning.rates import Hardware
from thunder_fn.planning.worlds import fake_world


@dataclass(frozen=True)
class Choices:
    """The ways that a search tries: each of `tensor`, `context`, ... is a field of `Way`.

    Raises:
        InspectError: a choice cannot be; names it.
    """

    split: Mapping[str, str] = field(default_factory=dict)
    blocks: Sequence[torch.nn.Module] = ()
    tensor: Sequence[int] = (1, 2, 4, 8)
    keeps: Sequence[str | int] = ("all", "matmuls", "none")
    micro: Sequence[int] = (1, 2, 4)
    context: Sequence[int] = (1,)
    stages: Sequence[int] = (1,)
    precision: Sequence[torch.dtype | None] = (None,)
    offload: Sequence[bool] = (False,)
    schedule: Sequence[str] = ("1f1b",)
    order: Sequence[tuple[str, ...]] = (ORDER,)

    def __post_init__(self) -> None:
        is_kept = lambda value: is_int(value, 0) or value in ("all", *POLICIES)
        is_float = lambda value: (
            value is None or (isinstance(value, torch.dtype) and value.is_floating_point)
        )
        is_order = lambda value: isinstance(value, tuple | list) and {*value} == {*ORDER}
        known: dict[str, tuple[Callable[[Any], bool], str]] = {
            "blocks": (lambda value: isinstance(value, torch.nn.Module), "modules"),
            "keeps": (is_kept, f"all, {', '.join(POLICIES)} or numbers of bytes"),
            "precision": (is_float, "floating dtypes or None"),
            "offload": (lambda value: isinstance(value, bool), "True and False"),
            "schedule": (lambda value: value in SCHEDULES, ", ".join(SCHEDULES)),
            "order": (is_order, f"orders of {ORDER}"),
        }
        for name in ("tensor", "micro", "context", "stages"):
            known[name] = (lambda value: is_int(value, 1), "numbers from 1 on")
        for name, (holds, text) in known.items():
            given = getattr(self, name)
            is_several = isinstance(given, Sequence | torch.nn.ModuleList)
            if isinstance(given, str) or not is_several or not all(map(holds, given)):
                raise InspectError(f"search: {name} is a sequence of {text}, given {given!r}")
            if name != "blocks" and not given:
                raise InspectError(
                    f"search: {name} has no choice", fix="Give one, or leave it out."
                )
        if not isinstance(self.split, Mapping):
            what = f"search: split is a plan of tensor_parallel, given {kind_of(self.split)}"
            raise InspectError(what)

    def ways(self, world: int) -> list[tuple[Way, str]]:
        """All ways, and for each why it is not possible in a world, or nothing."""
        found = list[tuple[Way, str]]()
        tensor, keeps = self.tensor if self.split else (1,), self.keeps if self.blocks else ("all",)
        every = (tensor, self.context, self.stages, keeps, self.micro, self.precision, self.offload)
        for size, positions, depth, kept, parts, dtype, away in product(*every):
            together = size * positions * depth
            one = Way(world // together, size, kept, parts, positions, depth, dtype, away)
            divides = world % together == 0
            why = "" if divides else f"{together} ranks do not divide {world}"
            found += [(way, why) for way in self.arranged(one)]
        return found

    def arranged(self, way: Way) -> list[Way]:
        """The schedules of a pipeline, and the orders of dims that have more ranks than one."""
        schedules = self.schedule if way.stages > 1 else (way.schedule,)
        orders = dict[tuple[str, ...], tuple[str, ...]]()
        for order in map(tuple, self.order):
            orders.setdefault(tuple(name for name in order if way.sizes[name] > 1), order)
        every = product(schedules, orders.values())
        return [replace(way, schedule=schedule, order=order) for schedule, order in every]


@dataclass(frozen=True, repr=False)
class Search(Shown):
    """The ways that were tried, best first.

    Attributes:
        found: each way that is possible, with its plan of one micro-batch and the seconds of a
            whole step. Those that fit in memory come first.
        refused: ways that are not possible, and why.
        choices: that were given.

    Example:
        >>> import torch
        >>> from thunder_fn.planning import plan
        >>> w, x = torch.empty(64, 64, device="meta"), torch.empty(16, 64, device="meta")
        >>> loss = lambda params, x: (x @ params["w"]).square().sum()
        >>> found = plan(loss, ({"w": w}, x), "h100", 8, search={"micro": (1, 2)})
        >>> print(found.best)
        fsdp 8 x tp 1, keeps all, 1 micro
    """

    found: tuple[tuple[Way, Plan, float], ...]
    refused: tuple[tuple[Way, str], ...] = field(repr=False)
    choices: Choices = field(default_factory=Choices, repr=False)

    @property
    def best(self) -> Way:
        """The fastest way that fits, or the smallest where none does."""
        return self.found[0][0]

    @property
    def plan(self) -> Plan:
        """The plan of the best way."""
        return self.found[0][1]

    @property
    def recipe(self) -> PlannedRecipe:
        """The best way, for `compile`: on each rank of the planned world, `compile(loss, recipe)`
        is a step of `(params, *batch)` that returns the loss and the gradients.

        `step.prepare(params)` gives the parameters that the rank holds, and `step.part(*batch)` its
        part of a whole batch.
        """
        return PlannedRecipe(self.best, self.choices.split, tuple(self.choices.blocks))

    def why(self) -> str:
        """Say in one sentence what the runner-up has less of."""
        if len(self.found) < 2:
            return "There is no other way."
        (one, first, took), (other, second, longer) = self.found[:2]
        if not first.fits:
            return f"No way fits: {one} needs least, {bytes_text(first.peak_bytes)}."
        if not second.fits:
            return f"{one} alone fits: {other} needs {bytes_text(second.peak_bytes)}."
        parts = {
            "computing": second.timeline.computing * other.times
            - first.timeline.computing * one.times,
            "waiting for others": second.timeline.exposed * other.times
            - first.timeline.exposed * one.times,
        }
        cause = max(parts, key=parts.__getitem__)
        more = seconds_text(parts[cause]) if parts[cause] > 0 else "no more"
        return (
            f"{other} takes {seconds_text(longer)} where {one} takes {seconds_text(took)}:"
            f" {more} of it {cause}."
        )

    def __str__(self) -> str:
        rows = [
            (
                str(way),
                seconds_text(took),
                f"{found.mfu:.1%}",
                bytes_text(found.peak_bytes),
                "yes" if found.fits else "no",
            )
            for way, found, took in self.found[:12]
        ]
        refused = ""
        if self.refused:
            way, why = self.refused[0]
            count = len(self.refused)
            refused = f"{count} ways are not possible; {way}: {why.splitlines()[0]}"
        table = plain(("way", "step", "MFU", "peak", "fits"), rows)
        return "\n".join(part for part in (table, self.why(), refused) if part)


def read_choices(given: Any) -> Choices:
    """The choices of `search=`: those of a mapping, or the default ones.

    Raises:
        InspectError: it is no mapping, or a choice cannot be.
        UnknownOption: there is no such choice; names the nearest one.
    """
    if given is True:
        return Choices()
    if not isinstance(given, Mapping):
        what = f"plan: search is True, False or a mapping of choices, given {kind_of(given)}"
        raise InspectError(what, fix='Write `search={"tensor": (1, 8), "micro": (1, 2)}`.')
    known = [one.name for one in fields(Choices)]
    for name in given:
        if name not in known:
            raise UnknownOption(unknown("search", "choice", name, known))
    return Choices(**given)


def searched(
    loss: Callable[..., torch.Tensor],
    args: Sequence[Any],
    hardware: Hardware | str,
    world: int,
    choices: Choices,
    *,
    fused: bool | None = None,
) -> Search:
    """Plan a training step in every way, and put the fastest that fits in memory first.

    Args:
        loss: a function of `(params, *batch)`.
        args: params, and the batch of a rank of fsdp. Ranks that work on one batch together have as
            many times more, so that all ways train on as much. Dim 1 of a batch has the positions.

    Raises:
        InspectError: no way is possible; says why the first is not.
    """
    found: list[tuple[Way, Plan, float]] = []
    refused: list[tuple[Way, str]] = []
    for way, why in choices.ways(world):
        if why:
            refused.append((way, why))
            continue
        try:
            one = _planned(loss, args, way, choices, hardware, fused=fused)
            found.append((way, one, one.seconds * way.times))
        except ThunderError as error:
            refused.append((way, str(error)))
    if not found:
        way, why = refused[0]
        what = f"search: no way is possible; {way}: {why}"
        raise InspectError(
            what, fix="Give other choices of tensor, context, stages, keeps or micro."
        )
    return Search(tuple(sorted(found, key=_order)), tuple(refused), choices)


def _planned(
    loss: Callable[..., torch.Tensor],
    args: Sequence[Any],
    way: Way,
    choices: Choices,
    hardware: Hardware | str,
    *,
    fused: bool | None,
) -> Plan:
    params, *batch = args
    blocks = () if way.keeps == "all" else tuple(choices.blocks)
    forwards = forwards_of(blocks, way.keeps) if blocks else ()
    with fake_world(way.world), checkpointed(blocks, forwards):
        cut = Cut(loss, way, choices.split)
        given = (cut.prepare(params), *(_part(x, way) for x in batch))
        one = planned(cut.step, given, hardware, fused=fused)
    if way.times == 1:
        return one
    sums = one.memory.output_bytes  # gradients that add up
    return replace(one, live_bytes=one.live_bytes + sums)


def _order(one: tuple[Way, Plan, float]) -> tuple[bool, float]:
    _, found, seconds = one
    return not found.fits, seconds if found.fits else float(found.peak_bytes)


def _part(x: Any, way: Way) -> Any:
    """The part of a batch that a program of a rank is given: all micro-batches of a pipeline."""
    if not isinstance(x, torch.Tensor) or not x.dim():
        return x
    rows, shape = x.shape[0] * way.together, list(x.shape[1:])
    if rows % way.micro:
        what = f"{rows} examples are no {way.micro} micro-batches"
        raise InspectError(what, fix="Give a batch that the numbers in `micro` divide.")
    if way.context > 1 and (not shape or shape[0] % way.context):
        what = f"{tuple(x.shape)} has no dim 1 of positions that {way.context} ranks divide"
        raise InspectError(what, fix="Give other numbers in `context`, or pad the positions.")
    shape[:1] = [shape[0] // way.context] if shape else []
    return x.new_empty((rows // way.times, *shape))
