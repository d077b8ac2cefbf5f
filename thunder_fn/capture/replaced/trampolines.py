"""Functions made of code objects, which take the place of functions whose calls go elsewhere."""

from __future__ import annotations

import inspect
import types
from typing import Any


def copy_of(fn: types.FunctionType) -> types.FunctionType:
    """Copy a function, so that its code stays when that of the first is exchanged."""
    copy = types.FunctionType(
        fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    copy.__qualname__, copy.__module__ = fn.__qualname__, fn.__module__
    copy.__dict__.update(fn.__dict__)
    return copy


def trampoline_code(code: types.CodeType, module: str, number: int) -> types.CodeType:
    """Code that calls the `dispatcher` of a module.

    It has as many free variables as `code`, as Python asks of a function's new code. The dispatcher
    is imported there: the function's globals and closure stay as they are, and Dynamo can follow.
    """
    cells = [f"cell_{i}" for i in range(len(code.co_freevars))]
    text = "\n".join(
        [
            f"def outer({', '.join(cells)}):",
            "    def trampoline(*args, **kwargs):",
            f"        if None: {', '.join(cells) or 'pass'}",
            f"        from {module} import dispatcher",
            f"        return dispatcher({number})(*args, **kwargs)",
            "    return trampoline",
        ]
    )
    names: dict[str, Any] = {}
    exec(compile(text, code.co_filename, "exec"), names)
    made: types.CodeType = names["outer"](*cells).__code__
    kind = code.co_flags & _KINDS  # a mark only: the function's own code makes the generator
    return made.replace(
        co_name=code.co_name, co_firstlineno=code.co_firstlineno, co_flags=made.co_flags | kind
    )


_KINDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of code that a function's new code must share with the old, says Python 3.13."""
