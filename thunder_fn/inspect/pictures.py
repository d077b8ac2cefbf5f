"""The memory timeline as a picture, by matplotlib."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thunder_fn.extras import extra

if TYPE_CHECKING:
    from thunder_fn.inspect.memory_use import Buffer, Memory

MiB = 1 << 20
OTHER, RESIDUALS = "#c9ced6", "#e3a857"
COLORS = ("#3b6ea5", "#5b9a8b", "#8f6bb0", "#c0635e", "#7d8a3c", "#4b8fb8")


def memory_picture(found: Memory, path: Path) -> Path:
    """Write the timeline to a file; its ending says in which format."""
    figure = _figure(found)
    figure.savefig(path, dpi=144)
    return path


def memory_png(found: Memory) -> bytes:
    """The timeline as PNG."""
    stream = io.BytesIO()
    _figure(found).savefig(stream, dpi=96, format="png")
    return stream.getvalue()


def _figure(found: Memory) -> Any:
    figure = extra("matplotlib.figure", "a picture of memory").Figure(
        figsize=(9, 4), layout="constrained"
    )
    axes = figure.subplots()
    parts = stacks(found)
    colors = [
        RESIDUALS if name == "residuals" else OTHER if name == "other" else None
        for name, _ in parts
    ]
    palette = iter(COLORS)
    colors = [color or next(palette) for color in colors]
    heights = [[value / MiB for value in live] for _, live in parts]
    axes.stackplot(
        range(len(found.names)),
        *heights,
        labels=[name for name, _ in parts],
        colors=colors,
        step="post",
    )
    whole = [value / MiB for value in found.live]
    axes.plot(
        range(len(found.names)), whole, color="#1b1f24", linewidth=0.8, drawstyle="steps-post"
    )
    for start in found.starts[1:]:
        axes.axvline(start, color="#1b1f24", linewidth=0.8, linestyle=":")
        axes.annotate("backward", (start, 0), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.annotate(
        f"peak {found.peak / MiB:.2f} MiB: {found.names[found.peak_at] if found.names else ''}",
        (found.peak_at, found.peak / MiB),
        xytext=(6, 6),
        textcoords="offset points",
        fontsize=8,
    )
    axes.set(xlabel="equation", ylabel="MiB that live", title=f"memory of {found.function}")
    axes.set(xlim=(0, max(1, len(found.names) - 1)), ylim=(0, found.peak / MiB * 1.15 or 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    return figure


def stacks(found: Memory, largest: int = 5) -> list[tuple[str, tuple[int, ...]]]:
    """The live bytes in parts: residuals, the modules that have most of them at the peak, and
    the rest.
    """

    def module(buffer: Buffer) -> str:
        return ".".join(buffer.module.split(".")[:2])

    kept = [name for name in found.by_module() if name != "(no module)"][:largest]
    parts: list[tuple[str, Any]] = []
    if found.residual_bytes:
        parts.append(("residuals", lambda one: one.kind == "residual"))
    parts += [
        (name, lambda one, name=name: one.kind != "residual" and module(one) == name)
        for name in kept
    ]
    parts.append(("other", lambda one: one.kind != "residual" and module(one) not in kept))
    return [
        (name, found.live_of(lambda one, wanted=wanted: one.kind != "input" and wanted(one)))
        for name, wanted in parts
    ]
