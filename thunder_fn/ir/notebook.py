"""Programs and reports as the last line of a notebook's cell: their text, highlighted, every piece
of it escaped.

Names in a text come from users, so a piece is escaped before it gets a colour. Nothing in the
result is a script, a link or a style sheet.
"""

from __future__ import annotations

import html
import re
from typing import TypeVar

T = TypeVar("T")

COLOURS = {
    "comment": "#7d8590",
    "word": "#8250df",
    "op": "#0969da",
    "text": "#1a7f37",
    "type": "#b35900",
}
"""Colours with contrast on light and on dark pages."""

PIECES = re.compile(
    r"(?P<text>'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\")"
    r"|(?P<type>\b(?:[fiucb]|bf|bool|f8\w*)\d*\[[^\]\n]*\])"
    r"|(?P<word>\b(?:def|return)\b)"
    r"|(?P<op>\b[A-Za-z_][\w.]*(?=\())"
    r"|(?P<comment>\#)"
)
LONG = 60
"""A text of more lines begins folded."""


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
        >>> as_html("return (<b>,)")
        '<pre style="line-height:1.35"><span style="color:#8250df">return</span> (&lt;b&gt;,)</pre>'
    """
    body = f'<pre style="line-height:1.35">{highlighted(text)}</pre>'
    if text.count("\n") < LONG:
        return body
    title = text.partition("\n")[0][:120]
    return f"<details><summary><code>{html.escape(title)}</code></summary>{body}</details>"


def highlighted(text: str) -> str:
    """The text with its pieces coloured. Law: without its tags, and unescaped, it is the text."""
    parts, end = list[str](), 0
    for found in PIECES.finditer(text):
        parts.append(html.escape(text[end : found.start()]))
        parts.append(
            f'<span style="color:{COLOURS[str(found.lastgroup)]}">{html.escape(found[0])}</span>'
        )
        end = found.end()
    return "".join([*parts, html.escape(text[end:])])
