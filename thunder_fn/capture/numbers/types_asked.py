"""Questions of user code about the very type of a number or tensor: `type(n) is int`.

A symbolic number is an instance of `int` to user code, and `type(n) == int` holds. So it is with
tracers and `torch.Tensor`. Python compares by identity without asking anybody, and would answer
that it is no int. So code that asks is found by its instructions, and traced again as a copy that
asks otherwise if the value was symbolic.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import os
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.instructions import instructions
from thunder_fn.capture.numbers.python_numbers import Bool, Float, Int
from thunder_fn.capture.outside.frames import is_user_file
from thunder_fn.errors import UnsupportedCall
from thunder_fn.ir.trace import Source
from thunder_fn.version import FOLDER

_SILENT = ("CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "NOP")
_LOCALS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_NAME")


@lru_cache(maxsize=4096)
def types_asked(
    code: types.CodeType, aliases: frozenset[str] = frozenset({"type"})
) -> tuple[frozenset[str], bool]:
    """The locals whose types code compares by `is`, and whether it does so with other values.

    No call of `type` in other code is of interest.

    Args:
        aliases: the names that `type` has in the code.
    """
    steps = _comparing(code)
    names, others = set[str](), False
    stores = [step.argval for step in steps if step.opname.startswith("STORE")]
    bound = {name for one in stores for name in pytree.as_tuple(one)}
    for place, (step, value, call) in enumerate(zip(steps, steps[1:], steps[2:], strict=False)):
        if step.argval not in aliases or not step.opname.startswith("LOAD"):
            continue
        if place > 1 and (steps[place - 2].argval, value.arg) == ("isinstance", 2):
            continue  # isinstance(x, type): is x a class?
        if value.opname.startswith(_LOCALS) and (call.opname, call.arg) == ("CALL", 1):
            names.add(value.argval)
            others = others or value.argval in bound  # it may hold another value at the end
        else:
            others = True
    return frozenset(names), others


@lru_cache(maxsize=4096)
def _comparing(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    """The instructions of code that compares by `is` with more than a constant; none of other
    code.
    """
    steps = [step for step in instructions(code) if step.opname not in _SILENT]
    compared = any(
        step.opname == "IS_OP" and before.opname != "LOAD_CONST"
        for before, step in itertools.pairwise(steps)
    )
    return tuple(steps) if compared or "issubclass" in code.co_names else ()


def _aliases(frame: types.FrameType) -> frozenset[str]:
    """The names of `type` in a frame, be it an attribute of what a name leads to."""
    found, value = {"type"}, None
    for step in _comparing(frame.f_code):
        name: Any = step.argval
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            value = inspect.getattr_static(value, name, None)
            value = getattr(value, "__func__", value)
        elif step.opname.startswith("LOAD") and isinstance(name, str):
            value = frame.f_locals.get(name, frame.f_globals.get(name))
        else:
            value = None
        if value is type:
            found.add(name)
    return frozenset(found)


@lru_cache(maxsize=4096)
def _calls_inside(code: types.CodeType, aliases: frozenset[str]) -> bool:
    """Test whether the argument of some call of `type` is a call, such as `x.item()`."""
    steps = [step for step in instructions(code) if step.opname not in _SILENT]
    starts = [place for place, step in enumerate(steps) if step.argval in aliases]
    for start in starts:
        kinds = (step.opname for step in steps[start + 1 :])
        until = list(itertools.takewhile(lambda kind: kind != "IS_OP", kinds))
        if sum(kind.startswith("CALL") for kind in until) > 1:
            return True
    return False


class TypesAsked(UnsupportedCall):
    """The type of a symbolic value was asked by `is`. `codes` are those of the functions to trace
    as copies.
    """

    codes: tuple[types.CodeType, ...] = ()

    def and_before(self, earlier: Exception | None) -> TypesAsked:
        """The error, with the codes of an earlier one."""
        self.codes += earlier.codes if isinstance(earlier, TypesAsked) else ()
        return self

    def refuse(self) -> None:
        """Become an error of the public class, which users see: no copy can answer."""
        object.__setattr__(self, "__class__", UnsupportedCall)


def type_error(
    frame: types.FrameType, *, has_found: bool, may_reach: Callable[[], bool]
) -> TypesAsked | None:
    """The error for a frame that has asked for the type of a symbolic value; None for others.

    Args:
        has_found: numbers were found in data, so that a call may return one.
        may_reach: tells whether some value that the frame can reach may be or hold such a value.
            Nobody knows what an expression gave: of a user's code each is taken for one.
    """
    if not _comparing(frame.f_code):
        return None
    aliases = _aliases(frame)
    names, others = types_asked(frame.f_code, aliases)
    if not names and not others:
        return None
    values = frame.f_locals
    asked = [name for name in sorted(names) if _is_symbolic(values.get(name))]
    may_ask = others and (
        may_reach()
        or any(map(_has_symbols, values.values()))
        or (has_found and _calls_inside(frame.f_code, aliases))
    )
    if not asked and not may_ask:
        return None
    name = asked[0] if asked else "..."
    what = (
        f"`{frame.f_code.co_name}` asks by `is` for the class `type({name})`; while tracing, a"
        " tensor or number is symbolic, and its class is another"
    )
    where = Source(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    fix = f"Write `isinstance({name}, ...)`, or `{name}.__class__` for `type({name})`."
    error = TypesAsked(what, source=where, fix=fix)
    error.codes = (outermost(frame),)
    return error.with_traceback(types.TracebackType(None, frame, frame.f_lasti, frame.f_lineno))


def callers(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """The frames of the user's code in the capture, innermost first."""
    while frame is not None and frame.f_code.co_filename != _CAPTURE:
        if is_user_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def outermost(frame: types.FrameType) -> types.CodeType:
    """The code of a frame, or that of the outermost caller in which it stands."""
    around = [one.f_code for one in callers(frame) if is_in(frame.f_code, one.f_code)]
    return around[-1] if around else frame.f_code


def is_in(code: types.CodeType, outer: types.CodeType) -> bool:
    """Test whether code is, or stands in, another."""
    return code is outer or any(
        is_in(code, const) for const in outer.co_consts if isinstance(const, types.CodeType)
    )


_CAPTURE = os.path.join(FOLDER, "capture", "capturing.py")


def _is_symbolic(value: Any) -> bool:
    return issubclass(type(value), _CLASSES)


_CLASSES = (torch.SymInt, torch.SymFloat, torch.SymBool, Int, Float, Bool, internals.Tracer)


def _has_symbols(value: Any, depth: int = 1) -> bool:
    """Test for a symbolic number or tensor, or a list or tuple of such."""
    parts = value if depth and isinstance(value, (list, tuple)) else ()
    return _is_symbolic(value) or any(_has_symbols(part, depth - 1) for part in parts)
