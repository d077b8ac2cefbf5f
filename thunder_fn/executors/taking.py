"""Calling a program with values that nobody else holds, so that each is freed when the program has
read it last.

A caller of `run(*values)` holds the values until the call returns. A program that is made to be
taken from has a second entry, a function of one list, which it empties before it begins. It deletes
each value after its last use. So has a compiled region, to which a program hands over large values
that are read there last. Handing over frees memory early; a region may write its results to memory
that it is also *given* (`reuse.py`).
"""

from __future__ import annotations

import ast
import math
import types
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from thunder_fn.ir.trace import TensorType, Var, static_shape

Run = Callable[..., tuple[Any, ...]]
TEXT = "_taken"
"""The key, in the context of a program or compiled region that is made to be taken from, of its
text.
"""
WORTH_BYTES = 1 << 20
"""The least bytes of a value that a program hands over to the region that reads it last."""


def is_worth_handing_over(variables: Iterable[Var]) -> bool:
    """Test whether freeing so much memory inside of a call, rather than after it, is worth a
    microsecond.
    """
    types = (var.type for var in variables)
    sizes = (
        math.prod(static_shape(type)) * type.dtype.itemsize
        for type in types
        if isinstance(type, TensorType) and all(isinstance(size, int) for size in type.shape)
    )
    return sum(sizes) >= WORTH_BYTES


def taken_from(run: types.FunctionType, text: str) -> types.FunctionType:
    """The function, which may be taken from; it is defined in this text, which ran in its
    globals.
    """
    run.__globals__[TEXT] = text
    return run


def take(run: Run, box: list[Any]) -> tuple[Any, ...]:
    """`run(*box)`, after which the box is empty. A wrapper of a program has a method `take` that
    does it.
    """
    own = getattr(run, "take", None)
    if own is not None:
        return own(box)
    if isinstance(run, types.FunctionType) and TEXT in run.__globals__:
        code = _emptying(run.__globals__[TEXT], run.__code__.co_name, run.__code__.co_filename)
        return types.FunctionType(code, run.__globals__, run.__name__)(box)
    values = tuple(box)
    box.clear()
    return run(*values)


def donating(run: Run, places: tuple[int, ...]) -> Run:
    """A region that may write its results over these of its operands; as it is where it has no
    method `donating`.
    """
    own = getattr(run, "donating", None)
    return own(places) if places and own is not None else run


@lru_cache(maxsize=1024)
def _emptying(text: str, name: str, filename: str) -> types.CodeType:
    """The code of a function that takes its arguments out of a list. Its lines have the numbers
    that they had.
    """
    module = ast.parse(text)
    function = next(
        node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    names = "".join(f"{argument.arg}, " for argument in function.args.args)
    new = ast.parse(
        f"def f(_box):\n    {f'{names}= _box' if names else 'pass'}\n    _box.clear()"
    ).body[0]
    assert isinstance(new, ast.FunctionDef), "as it was just written"
    for node in ast.walk(new):
        ast.copy_location(node, function)
    function.args, function.body = new.args, [*new.body, *function.body]
    code = compile(module, filename, "exec")
    codes = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return next(found for found in codes if found.co_name == name)
