"""Tables as plain text, which pipes well, and as `rich` renders them in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from thunder_fn.ir.text import escaped


def plain(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns that line up: the first one and texts to the left, numbers to the right."""
    table = [tuple(header), *(tuple(map(escaped, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = [_is_numeric(column) for column in zip(*table, strict=True)]
    lines: list[str] = []
    for row in table:
        cells = zip(row, widths, right, strict=True)
        lines.append(
            "  ".join(
                cell.rjust(width) if flag else cell.ljust(width) for cell, width, flag in cells
            ).rstrip()
        )
    return "\n".join(lines)


def rich_table(header: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> Any:
    """Render as a table of `rich`."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    known = [tuple(map(escaped, row)) for row in rows]
    table = Table(
        title=Text(escaped(title)) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        header_style="bold",
    )
    for name, column in zip(header, zip(header, *known, strict=True), strict=True):
        table.add_column(name, justify="right" if _is_numeric(column) else "left", overflow="fold")
    for row in known:
        table.add_row(*map(Text, row))
    return table


def _is_numeric(column: Sequence[str]) -> bool:
    """Test that the column has numbers below its name and nothing else."""
    return all(not cell or cell[0].isdigit() or cell[0] in "-." for cell in column[1:]) and any(
        column[1:]
    )


def bytes_text(count: float) -> str:
    """Write bytes such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


def count_text(count: float) -> str:
    """`1.5 G`: a number with the SI prefix that is at hand."""
    for unit in ("", " k", " M", " G", " T"):
        if abs(count) < 1000 or unit == " T":
            return f"{count:.0f}{unit}" if not unit else f"{count:.1f}{unit}"
        count /= 1000
    return ""


def seconds_text(seconds: float) -> str:
    """Write seconds such as `1.50 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e6:.1f} µs"
