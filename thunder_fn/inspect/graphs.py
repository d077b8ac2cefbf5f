"""A trace as a picture of boxes and arrows (SVG). igraph lays it out, by Sugiyama's method."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from thunder_fn.errors import spelled
from thunder_fn.extras import extra
from thunder_fn.inspect.chains import chain
from thunder_fn.inspect.memory_use import common_module
from thunder_fn.ir import ops
from thunder_fn.ir.equations import operands_in
from thunder_fn.ir.text import escaped
from thunder_fn.ir.trace import Equation, Trace, Var

Point = tuple[float, float]
MAX_BOXES = 2000
ROW, GAP, CHAR = 58, 24, 6.6
FILLS = {
    "composite": "#e8eef6",
    "structured": "#f3e9dc",
    "leaf": "#ffffff",
    "input": "#eef3ea",
    "output": "#eef3ea",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG picture. Notebooks show it; `str` of it is the SVG.

    Example:
        >>> from thunder_fn.inspect import Picture
        >>> str(Picture("<svg></svg>"))
        '<svg></svg>'
    """

    svg: str

    def save(self, path: str | Path) -> Path:
        """Write it to a file."""
        Path(path).write_text(self.svg, encoding="utf-8")
        return Path(path)

    def __str__(self) -> str:
        return self.svg

    def _repr_svg_(self) -> str:
        return self.svg


@dataclass(frozen=True, slots=True)
class _Box:
    title: str
    note: str
    kind: str
    tip: str


@spelled()
def graph(f: Trace | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Picture:
    """A trace, or that of `f(*args, **kwargs)`, as a picture; composites are boxes.

    In a trace of more than 2,000 equations, consecutive equations of a module are one box, at a
    depth that gives at most so many. Without modules, equal runs of equations are boxes.

    Law: pictures of equal traces differ only in names and in lines of source.

    Raises:
        MissingExtra: igraph is not installed.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> picture = tfn.inspect.graph(torch.sin, torch.ones(2))  # of the extra `inspect`
        >>> str(picture).startswith("<svg")
        True
    """
    trace = f if isinstance(f, Trace) else chain(f, *args, **kwargs).trace
    return Picture(_svg(trace, _runs(trace.equations)))


def _runs(equations: Sequence[Equation]) -> list[Sequence[Equation]]:
    """The equations of each box: one, unless there are too many."""
    if len(equations) <= MAX_BOXES:
        return [[equation] for equation in equations]
    paths = [_path(equation) for equation in equations]
    for depth in range(max(map(len, paths)), 0, -1):
        runs: list[Sequence[Equation]] = [
            list(run) for _, run in groupby(equations, lambda equation: _path(equation)[:depth])
        ]
        if len(runs) <= MAX_BOXES:
            return runs
    size = math.ceil(len(equations) / MAX_BOXES)
    return [equations[start : start + size] for start in range(0, len(equations), size)]


def _path(equation: Equation) -> list[str]:
    module = equation.source.module if equation.source is not None else ""
    return module.split(".") if module else []


def _boxes(trace: Trace, runs: Sequence[Sequence[Equation]]) -> Iterator[_Box]:
    read = {var.index for var in operands_in(trace.equations)}
    for var in (*trace.inputs, *(constant.var for constant in trace.constants)):
        yield _Box(
            str(var) if var.index in read else f"{var} (unused)",
            str(var.type),
            "input",
            f"input {var}: {var.type}",
        )
    yield from map(_box, runs)
    yield _Box("return", f"{len(trace.outputs)} values", "output", "what the trace returns")


def _box(run: Sequence[Equation]) -> _Box:
    if len(run) > 1:
        ops_of = Counter(_name(equation) for equation in run)
        shared = common_module([".".join(_path(equation)) for equation in run])
        tip = "\n".join(f"{count} {name}" for name, count in ops_of.most_common(12))
        return _Box(shared or "…", f"{len(run)} equations", "composite", tip)
    (equation,) = run
    note = ", ".join(str(var.type) for var in equation.outputs[:2]) + (
        ", …" if len(equation.outputs) > 2 else ""
    )
    return _Box(_title(equation), note, equation.op.kind, f"{equation.op}\n{equation.source or ''}")


def _title(equation: Equation) -> str:
    module = equation.source.module if equation.source is not None and equation.bodies else ""
    return f"{_name(equation)} {module}".strip()


def _name(equation: Equation) -> str:
    return (
        ops.short_name(equation.op)
        if equation.op.kind != "leaf"
        else equation.op.name.split(".")[1]
    )


def _edges(trace: Trace, runs: Sequence[Sequence[Equation]]) -> list[tuple[int, int]]:
    """Pairs of boxes: who makes a value and who reads it, each once."""
    count = len(trace.inputs) + len(trace.constants)
    maker = list(range(count))
    found: dict[tuple[int, int], None] = {}
    for box, run in enumerate(runs, count):
        for equation in run:
            found.update(
                ((maker[var.index], box), None)
                for var in equation.operands
                if maker[var.index] != box
            )
            maker += [box] * len(equation.outputs)
    end = count + len(runs)
    for atom in trace.outputs:
        if isinstance(atom, Var):
            found[maker[atom.index], end] = None
    return list(found)


def _svg(trace: Trace, runs: Sequence[Sequence[Equation]]) -> str:
    igraph = extra("igraph", "a picture of a trace")
    boxes, edges = list(_boxes(trace, runs)), _edges(trace, runs)
    layers = [0] * len(boxes)
    for source, target in sorted(edges, key=lambda edge: edge[1]):
        layers[target] = max(layers[target], layers[source] + 1)
    first = dict(sorted(edges, key=lambda edge: -layers[edge[1]]))
    for box, target in first.items():
        if boxes[box].kind == "input":  # beside what reads it first
            layers[box] = max(0, layers[target] - 1)
    used = {layer: rank for rank, layer in enumerate(sorted(set(layers)))}
    layers = [used[layer] for layer in layers]
    widths = [max(60.0, CHAR * max(len(box.title), len(box.note)) + 20) for box in boxes]
    drawn = igraph.Graph(n=len(boxes), edges=edges, directed=True)
    layout = drawn.layout_sugiyama(layers=layers, hgap=max(widths) + GAP, vgap=ROW)
    points: list[Point] = [(x, y) for x, y in layout.coords]
    ways = [[(x, y) for x, y in way] for way in layout.edge_routing]
    bends = [x for way in ways for x, _ in way]
    low = (
        min(*(x - width / 2 for (x, _), width in zip(points, widths, strict=True)), *bends, 0.0)
        - 12
    )
    high = (
        max(*(x + width / 2 for (x, _), width in zip(points, widths, strict=True)), *bends, 0.0)
        + 12
    )
    height = max(y for _, y in points) + ROW
    body = [_arrow(points[a], way, points[b]) for (a, b), way in zip(edges, ways, strict=True)]
    body += [_rect(box, points[i], widths[i]) for i, box in enumerate(boxes)]
    size = f'viewBox="{low:.0f} {-ROW / 2:.0f} {high - low:.0f} {height + ROW / 2:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} width="{high - low:.0f}">',
            _STYLE,
            *body,
            "</svg>\n",
        ]
    )


_STYLE = (
    "<style>text{font:11px"
    " ui-monospace,SFMono-Regular,Menlo,monospace;text-anchor:middle;fill:#1b1f24}"
    ".n{fill:#6a737d;font-size:10px}path{fill:none;stroke:#9aa4af}</style><defs><marker"
    ' id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="6" markerHeight="6"'
    ' orient="auto"><path d="M0 0L8 4L0 8z" style="fill:#9aa4af;stroke:none"/></marker></defs>'
)


def _arrow(start: Point, way: list[Point], end: Point) -> str:
    """A curve from the bottom of a box through the points between the layers to the top of
    another.
    """
    stops = [(start[0], start[1] + 17), *way, (end[0], end[1] - 17)]
    curves = [f"M{stops[0][0]:.0f} {stops[0][1]:.0f}"]
    for (x, y), (u, v) in pairwise(stops):
        curves.append(f"C{x:.0f} {(y + v) / 2:.0f} {u:.0f} {(y + v) / 2:.0f} {u:.0f} {v:.0f}")
    return f'<path d="{"".join(curves)}" marker-end="url(#a)"/>'


def _text(text: str) -> str:
    """A text as SVG has it, which allows few control characters."""
    return html.escape("\n".join(map(escaped, text.split("\n"))))


def _rect(box: _Box, point: Point, width: float) -> str:
    x, y = point
    return (
        f'<g><title>{_text(box.tip)}</title><rect x="{x - width / 2:.0f}" y="{y - 17:.0f}"'
        f' width="{width:.0f}" height="34" rx="4" fill="{FILLS[box.kind]}" stroke="#9aa4af"/><text'
        f' x="{x:.0f}" y="{y - 3:.0f}">{_text(box.title)}</text><text class="n" x="{x:.0f}"'
        f' y="{y + 10:.0f}">{_text(box.note)}</text></g>'
    )
