"""Calling a program with values that nobody else holds, so that each is freed when the program has read it last.

A caller of `run(*values)` holds the values until the call returns. A program that is made to be taken from has a second
entry, a function of one list, which it empties before it begins; in between it deletes each value after its last use.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

Run = Callable[..., tuple[Any, ...]]
TEXT = "_taken"
"""In the context of a program that is made to be taken from: its text."""


def take(run: Run, box: list[Any]) -> tuple[Any, ...]:
    """`run(*box)`, after which the box is empty. What wraps a program says with a method `take` how it does that."""
    own = getattr(run, "take", None)
    if own is not None:
        return own(box)
    if isinstance(run, types.FunctionType) and TEXT in run.__globals__:
        code = _emptying(run.__globals__[TEXT], run.__code__.co_filename)
        return types.FunctionType(code, run.__globals__, run.__name__)(box)
    values = tuple(box)
    box.clear()
    return run(*values)


@lru_cache(maxsize=1024)
def _emptying(text: str, filename: str) -> types.CodeType:
    """The code of a function that takes its arguments out of a list. Its lines have the numbers that they had."""
    module = ast.parse(text)
    function = next(node for node in module.body if isinstance(node, ast.FunctionDef))
    names = "".join(f"{argument.arg}, " for argument in function.args.args)
    new = ast.parse(f"def f(_box):\n    {f'{names}= _box' if names else 'pass'}\n    _box.clear()").body[0]
    assert isinstance(new, ast.FunctionDef), "as it was just written"
    for node in ast.walk(new):
        ast.copy_location(node, function)
    function.args, function.body = new.args, [*new.body, *function.body]
    code = compile(module, filename, "exec")
    return next(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
