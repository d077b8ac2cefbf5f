"""Docstrings as mkdocstrings reads them: `Example:` is a section of examples, other lists of
errors are lists, types that say nothing are left out.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

CONTINUED = re.compile(
    r"^(?P<first>(?:Laws?|Source|Example): .*)\n(?P<rest>(?: {4}\S.*\n?)+)", re.MULTILINE
)
"""A paragraph whose later lines are indented, which would be read as a box with a title."""
LIST = re.compile(r"^(?P<title>\w[\w ,]* raises):\n(?P<items>(?: {4}.*\n?)+)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Called by griffe for every object that it reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring, if there is one."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = LIST.sub(_as_list, CONTINUED.sub(_as_paragraph, text))

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Drop types that say nothing, and defaults of `*args` and `**kwargs`."""
        for one in func.parameters:
            one.annotation = None if str(one.annotation) == "Any" else one.annotation
            if one.kind in (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword):
                one.default = None


def _as_paragraph(found: re.Match[str]) -> str:
    return f"{found['first']}\n{re.sub(r'^ {4}', '', found['rest'], flags=re.MULTILINE)}"


def _as_list(found: re.Match[str]) -> str:
    items = re.sub(r"^ {4}(\w+): ", r"- `\1`: ", found["items"], flags=re.MULTILINE)
    items = re.sub(r"^ {8}", "  ", items, flags=re.MULTILINE)
    return f"{found['title']}:\n\n{items}"
