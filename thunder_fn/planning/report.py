"""A plan as text."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from thunder_fn.inspect.tables import bytes_text, count_text, plain, seconds_text
from thunder_fn.ir.text import escaped

if TYPE_CHECKING:
    from thunder_fn.planning.plans import Plan

ROWS = 10


def text(plan: Plan) -> str:
    """The whole report."""
    parts = [*_head(plan), "", "at the peak:", _peak(plan), "", "time by op:", _ops(plan)]
    if plan.stages:
        parts += ["", f"ranks of the pipeline, whose bubble is {plan.bubble:.1%}:", _ranks(plan)]
    if plan.timeline.collectives:
        parts += ["", "collectives:", _collectives(plan)]
    return "\n".join(parts)


def _head(plan: Plan) -> list[str]:
    times, limit = plan.timeline, plan.hardware.memory_bytes
    ranks = "1 rank" if plan.world == 1 else f"{plan.world:,} ranks"
    fits = "fits in" if plan.fits else "DOES NOT FIT in"
    at = plan.memory.peak_at
    where = f"{plan.memory.names[at]}" if plan.memory.names else "nothing"
    return [
        escaped(f"plan of {plan.function} on {ranks} of {plan.hardware.name}, for each rank"),
        f"  step    {seconds_text(plan.seconds)}, MFU {plan.mfu:.1%}",
        (
            f"  memory  {bytes_text(plan.peak_bytes)} at the peak, {fits} {bytes_text(limit)}:"
            f" {bytes_text(plan.held_bytes)} of arguments and"
            f" {bytes_text(plan.live_bytes)} beside them, at equation {at} of"
            f" {len(plan.memory.names)} ({where})"
            + (f"; {bytes_text(plan.offloaded_bytes)} offloaded" if plan.offloaded_bytes else "")
        ),
        (
            f"  compute {seconds_text(times.computing)}: {count_text(times.flops)} FLOP,"
            f" {bytes_text(times.num_bytes)} moved, {times.launches:,} launches"
        ),
        (
            f"  network {seconds_text(times.communicating)}: {bytes_text(times.wire_bytes)} sent;"
            f" {seconds_text(plan.hidden_communication)} hidden,"
            f" {seconds_text(plan.exposed_communication)} exposed"
        ),
    ]


def _peak(plan: Plan) -> str:
    """The memory at the peak, by the op and the module that made it; layers are not told apart."""
    size, times = defaultdict[tuple[str, ...], int](int), Counter[tuple[str, ...]]()
    for one in plan.memory.at_peak():
        module = re.sub(r"\.\d+(?=\.|$)", ".*", one.module)
        line = f"{Path(one.source.file).name}:{one.source.line}" if one.source else ""
        key = one.kind, one.what.replace("_for_cpu", ""), module, line
        size[key] += one.num_bytes
        times[key] += 1
    found = sorted(size.items(), key=lambda item: -item[1])
    rows = [(bytes_text(held), str(times[key]), *key) for key, held in found[:ROWS]]
    rest = sum(held for _, held in found[ROWS:])
    if rest:
        count = sum(times[key] for key, _ in found[ROWS:])
        rows.append((bytes_text(rest), str(count), "", f"{len(found) - ROWS} more", "", ""))
    return plain(("live", "buffers", "kind", "made by", "module", "line"), rows)


def _ops(plan: Plan) -> str:
    # fused attention is planned as the kernel that has fewest results, whatever the hardware
    found = [(name.replace("_for_cpu", ""), took) for name, took in plan.timeline.by_op]
    whole = plan.timeline.computing or 1.0
    rows = [(name, seconds_text(took), f"{took / whole:.1%}") for name, took in found[:ROWS]]
    rest = sum(took for _, took in found[ROWS:])
    if rest:
        more = f"{len(found) - ROWS} more"
        rows.append((more, seconds_text(rest), f"{rest / whole:.1%}"))
    return plain(("op", "time", "part"), rows)


def _ranks(plan: Plan) -> str:
    rows = [
        (
            str(rank),
            seconds_text(one.timeline.computing),
            seconds_text(one.exposed_communication),
            bytes_text(one.peak_bytes),
            "yes" if one.fits else "no",
        )
        for rank, one in enumerate(plan.stages)
    ]
    return plain(("rank", "computes", "waits", "peak", "fits"), rows)


def _collectives(plan: Plan) -> str:
    rows = [
        (
            one.kind,
            f"{one.ranks}",
            f"{one.nodes}",
            bytes_text(one.num_bytes),
            f"{times}",
            seconds_text(took / times),
            seconds_text(took),
        )
        for one, times, took in plan.timeline.collectives[:ROWS]
    ]
    return plain(("kind", "ranks", "nodes", "bytes", "times", "each", "all"), rows)
