"""Text that is generated: the only way in which names and values enter a program, a comment or a
line that people read.

Names come from users: paths of modules, names of functions, ops and arguments, keys of dicts. Any
of them may hold quotes, line breaks or code. A name in a program is an `identifier`. A value is a
`literal_text`, or a program gets it by name. Every line passes `program_text`, where nothing can
begin another line.
"""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from thunder_fn.errors import escaped
from thunder_fn.ir.trace import Expr

LONGEST = 100
"""Names of more characters are cut."""

"""Line breaks, control characters, marks that turn or hide text, and halves of surrogate pairs."""

_VARIABLES = re.compile(r"(v|x|y|a|s|u|z[a-z]{1,2})\d+(_\d+|_copy)?|choice|_+")
"""Names that generated code has for its own variables."""


def program_text(lines: Iterable[str]) -> str:
    """Join lines to a text. Line breaks inside a line are escaped."""
    return "\n".join(map(escaped, lines))


def run_text(text: str, name: str, context: dict[str, Any]) -> None:
    """Run a program that `program_text` gave, in a context."""
    exec(compile(text, f"<thunder_fn {escaped(name)}>", "exec"), context)


def is_usable(name: str) -> bool:
    """Test for a name that generated code may use: an identifier as Python itself reads it,
    and none of its own names.
    """
    return (
        name.isidentifier()
        and len(name) <= LONGEST
        and not keyword.iskeyword(name)
        and not _VARIABLES.fullmatch(name)
        and (name.isascii() or unicodedata.normalize("NFKC", name) == name)
    )


def identifier(name: str) -> str:
    """A Python identifier from the last components of a name: `torch.relu` gives `relu`, `h.0`
    `h_0`, `my::mul` `mul`.

    Law: ``is_usable(identifier(name))`` for every string.
    """
    parts = [
        re.sub(r"\W", "_", part)
        for part in re.split(r"\.|::", unicodedata.normalize("NFKC", name))
        if part
    ]
    text = parts.pop() if parts else "_"
    while parts and text[0].isdigit():
        text = f"{parts.pop()}_{text}"
    text = (text.strip("_") or "unnamed")[:LONGEST]
    if not text.isidentifier():
        text = (
            f"_{text}"
            if f"_{text}".isidentifier()
            else f"_{text.encode('ascii', 'ignore').decode()}"
        )
    while not is_usable(text):
        text = f"{text[: LONGEST - 1]}_"
    return text


def is_keyword_name(name: str) -> bool:
    """Test whether `name=value` may stand in a call."""
    return (
        name.isidentifier()
        and not keyword.iskeyword(name)
        and unicodedata.normalize("NFKC", name) == name
    )


def literal_text(value: Any, name_object: Callable[[Any], str]) -> str:
    """A Python expression for a literal; objects that Python cannot spell go through
    `name_object`.
    """
    match value:
        case float():
            value = float.__pos__(value)
            return repr(value) if value - value == 0 else f'float("{value}")'
        case complex():
            value = complex.__pos__(value)
            return (
                f"complex({literal_text(value.real, name_object)},"
                f" {literal_text(value.imag, name_object)})"
            )
        case int() if type(value) is int and value.bit_length() > _LONG_INT:
            return hex(value)
        case None | bool() | int() | str() | bytes() if value is None or type(value) in (
            bool,
            int,
            str,
            bytes,
        ):
            return repr(value)
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case torch.device():
            text = repr(str(value))[1:-1]
            return f'torch.device("{text}")' if '"' not in text else f"torch.device({str(value)!r})"
        case tuple() | list():
            items = tuple.__iter__(value) if isinstance(value, tuple) else list.__iter__(value)
            return tuple_text([literal_text(item, name_object) for item in items])
        case Expr():
            return str(value)
        case _:
            return "..." if value is Ellipsis else name_object(value)


_LONG_INT = 4096
"""Python writes and reads decimal ints up to some thousand digits; longer ones are written as
hexadecimal.
"""


def object_name(value: Any) -> str:
    """A name for an object that Python cannot spell: a function's own, or that of the object's
    class.
    """
    try:
        name = getattr(value, "__name__", None)
    except Exception:  # noqa: BLE001  the user's attribute
        name = None
    return name if type(name) is str and name else type(value).__name__


def shown(value: Any, length: int = 10_000) -> str:
    """The `repr` of a user's value in a message: in one line, cut, and whatever the value's own
    code does.
    """
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  the user's code
        return f"<{escaped(type(value).__name__)} whose repr raises {type(error).__name__}>"
    return escaped(text[:length])


def tuple_text(parts: Iterable[str]) -> str:
    """The text of a tuple."""
    texts: Sequence[str] = list(parts)
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"
