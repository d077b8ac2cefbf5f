"""Programs and reports as the last line of a notebook's cell: their text, highlighted, every piece
of it escaped.

Names in a text come from users, so a piece is escaped before it gets a colour. Nothing in the
result is a script or a style sheet. Links lead to an editor.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from thunder_fn.ir.sources import Source
from thunder_fn.lines import editor_link

T = TypeVar("T")

COLOURS = {
    "comment": "#7d8590",
    "word": "#8250df",
    "op": "#0969da",
    "text": "#1a7f37",
    "type": "#b35900",
    "added": "#1a7f37",
    "removed": "#cf222e",
    "changed": "#9a6700",
}
"""Colours of pieces. Each is mixed with the colour of the text around it, which is dark on light
pages and light on dark ones, so that it has contrast on both.
"""
PAGE = "font-family:ui-monospace,monospace;line-height:1.35;white-space:pre;overflow-x:auto"
"""The style of a text in columns, whatever a notebook's own style sheet says."""

PIECES = re.compile(
    r"(?P<text>'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\")"
    r"|(?P<type>\b(?:[fiucb]|bf|bool|f8\w*)\d*\[[^\]\n]*\])"
    r"|(?P<word>\b(?:def|return)\b)"
    r"|(?P<op>\b[A-Za-z_][\w.]*(?=\())"
    r"|(?P<comment>\#)"
    r"|(?P<var>\bv\d+\b)"
    r"|^(?:(?P<added>\+)|(?P<removed>-)|(?P<changed>~))(?= [v(])",
    re.MULTILINE,
)
LONG = 60
"""A text of more lines begins folded."""


@dataclass(frozen=True, slots=True)
class ProgramLine:
    """A line of a program, the level of bodies that it is at, the types of its variables, and the
    user's line.
    """

    text: str
    level: int
    types: Mapping[str, str]
    source: Source | None = None


class Shown:
    """A value that a notebook shows as its `str`, highlighted. A dataclass passes `repr=False`, so
    that its `repr` is one line.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        first, rest = str(self).partition("\n")[::2]
        return f"<{type(self).__name__}: {first[:120]}{' ...' if rest or first[120:] else ''}>"

    def _repr_html_(self) -> str:
        return as_html(str(self))


class ShownList(Shown, list[T]):
    """A list that prints its items, one a line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return list.__repr__(self)

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def as_html(text: str) -> str:
    """A program or a report as HTML; a long one is folded under its first line.

    Example:
        >>> as_html("f32[2] <b>").endswith(">f32[2]</span> &lt;b&gt;</pre>")
        True
    """
    body = f'<pre style="{PAGE}">{highlighted(text)}</pre>'
    if text.count("\n") < LONG:
        return body
    title = text.partition("\n")[0][:120]
    return _folded(title, body)


def _folded(title: str, page: str) -> str:
    return f"<details><summary><code>{html.escape(title)}</code></summary>{page}</details>"


def as_program(lines: Sequence[ProgramLine]) -> str:
    """A program as HTML. Bodies are folded under their calls; they begin open in a short program.

    Law: without its tags, and unescaped, it is the text.
    """
    body = "".join(_blocks(lines, " open" if len(lines) < LONG else ""))
    page = f'<pre style="{PAGE};padding-left:1.2em">{body}</pre>'
    if sum(line.level == 0 for line in lines) < LONG:
        return page
    return _folded(lines[0].text[:120], page)


def _blocks(lines: Sequence[ProgramLine], is_open: str) -> Iterator[str]:
    start = 0
    while start < len(lines):
        first, stop = lines[start], start + 1
        while stop < len(lines) and lines[stop].level > first.level:
            stop += 1
        shown = highlighted(first.text, first.types, first.source) + "\n"
        if stop == start + 1:
            yield shown
        else:
            inner = "".join(_blocks(lines[start + 1 : stop], is_open))
            style = "list-style-position:outside"  # the triangles stand in the margin
            yield f'<details{is_open}><summary style="{style}">{shown}</summary>{inner}</details>'
        start = stop


def highlighted(
    text: str, types: Mapping[str, str] = MappingProxyType({}), source: Source | None = None
) -> str:
    """The text with its pieces coloured, types of variables on hover, and the first call as a link
    to the user's line. Law: without its tags, and unescaped, it is the text.
    """
    parts, end = list[str](), 0
    for found in PIECES.finditer(text):
        kind, piece = str(found.lastgroup), html.escape(found[0])
        parts.append(html.escape(text[end : found.start()]))
        end = found.end()
        if kind == "var":
            parts.append(_hover(piece, types.get(found[0])))
            continue
        colour = f"color-mix(in srgb,{COLOURS[kind]} 60%,currentColor)"
        coloured = f'<span style="color:{colour}">{piece}</span>'
        if kind == "op" and source is not None:
            coloured, source = _linked(coloured, source), None
        parts.append(coloured)
    return "".join([*parts, html.escape(text[end:])])


def _hover(piece: str, title: str | None) -> str:
    return piece if title is None else f'<span title="{html.escape(title)}">{piece}</span>'


def _linked(piece: str, source: Source) -> str:
    """A piece that leads to a line in the user's editor, if that is in a file."""
    title = html.escape(f"{source.file}:{source.line} in {source.function}")
    if source.file.startswith("<"):
        return f'<span title="{title}">{piece}</span>'
    link = html.escape(editor_link(source.file, source.line))
    style = "color:inherit;text-decoration:none"
    return f'<a href="{link}" title="{title}" style="{style}">{piece}</a>'
