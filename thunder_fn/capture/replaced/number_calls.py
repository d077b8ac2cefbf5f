"""Calls of Python's builtins that return nothing but Python's own numbers: `int(n)`, `float(n)`,
`len(x)`, `type(n)`, `min(n, 1)`, `max(n, 1)`.

Python asks `n.__int__()` and takes no symbolic number for an answer. So a function is traced again
as a copy if its call of such a builtin cannot be answered. In the copy's code the call goes to a
function of this module. The copy takes the place of the function as a lookaside does: inside that
capture, and nowhere else.
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import itertools
import math
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.numbers.python_numbers import Float, Int, as_python, class_of_numbers
from thunder_fn.capture.numbers.types_asked import TypesAsked, callers, is_in, outermost
from thunder_fn.capture.outside.frames import is_user_file
from thunder_fn.capture.replaced.lookasides import Lookaside, original_of
from thunder_fn.capture.replaced.trampolines import copy_of
from thunder_fn.garbage import referrers

_CODES: dict[int, types.CodeType] = {}
"""Rewritten code objects, by the identity of the user's, for as long as that lives. Equal ones may
be of two files.
"""


# ---- the builtins ----


def _number_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The symbolic number that a builtin is called with; None if there is none."""
    given = args[0] if len(args) == 1 and not kwargs else None
    if isinstance(given, torch.Tensor) and given.numel() == 1:
        given = given.item()
    return given if type(given) in (Int, Float) else None


def _int(*args: Any, **kwargs: Any) -> Any:
    number = _number_in(args, kwargs)
    if type(number) is Float:
        return math.trunc(number)
    return int(*args, **kwargs) if number is None else number


def _float(*args: Any, **kwargs: Any) -> Any:
    number = _number_in(args, kwargs)
    if type(number) is Int:
        return as_python(torch.sym_float(number))
    return float(*args, **kwargs) if number is None else number


def _len(*args: Any) -> Any:
    is_tensor = len(args) == 1 and isinstance(args[0], torch.Tensor) and args[0].dim() > 0
    return args[0].shape[0] if is_tensor else len(*args)


def _type(*args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and issubclass(found := type(args[0]), internals.Tracer):
        return found.outside_class
    return class_of_numbers(type(*args, **kwargs))


def _extreme(name: str) -> Callable[..., Any]:
    """`min` or `max` of numbers of one type, some of which are symbolic."""
    otherwise, choose = getattr(builtins, name), getattr(torch, f"sym_{name}")

    def extreme(*args: Any, **kwargs: Any) -> Any:
        kinds = {_type(arg) for arg in args}
        is_symbolic = any(type(arg) in (Int, Float) for arg in args)
        if len(args) < 2 or kwargs or not is_symbolic or kinds not in ({int}, {float}):
            return otherwise(*args, **kwargs)
        return as_python(functools.reduce(choose, args))

    return extreme


_STAND_INS: dict[str, Callable[..., Any]] = {
    "int": _int,
    "float": _float,
    "len": _len,
    "type": _type,
    "min": _extreme("min"),
    "max": _extreme("max"),
}


# ---- the code that calls them ----


def _calls(code: types.CodeType) -> Iterator[tuple[str, int, int]]:
    """The loads of these builtins that are called: the name, where the load begins, and ends."""
    steps = list(dis.get_instructions(code))
    for step, after in itertools.pairwise(steps):
        is_call = step.opname == "LOAD_GLOBAL" and step.arg is not None and step.arg & 1
        if is_call and step.argval in _STAND_INS:
            yield step.argval, step.offset, after.offset


def _rewritten(code: types.CodeType) -> types.CodeType:
    """The code, and that of functions that it makes, with calls of the builtins led to ours."""
    if id(code) not in _CODES:
        text = bytearray(code.co_code)
        consts = [_rewritten(c) if isinstance(c, types.CodeType) else c for c in code.co_consts]
        for name, begin, end in _calls(code):
            steps = [*_load(len(consts)), *[(dis.opmap["NOP"], 0)] * (end - begin)]
            text[begin:end] = bytes(part for step in steps for part in step)[: end - begin]
            consts.append(_STAND_INS[name])
        _CODES[id(code)] = code.replace(co_code=bytes(text), co_consts=tuple(consts))
        weakref.finalize(code, _CODES.pop, id(code), None).atexit = False
    return _CODES[id(code)]


def _load(place: int) -> list[tuple[int, int]]:
    """The instructions that push a constant to be called, which fit into a load of a global."""
    null = (dis.opmap["PUSH_NULL"], 0)
    load = [(dis.opmap["EXTENDED_ARG"], place >> 8), (dis.opmap["LOAD_CONST"], place & 255)]
    ordered = [*load, null] if _NULL_COMES_LAST else [null, *load]
    return [(dis.opmap["NOP"], 0), *ordered]


_NULL_COMES_LAST = dis.opmap.get("CALL_KW") is not None
"""Python 3.13 and later push the callee first."""


# ---- the functions to which it belongs ----


def answered(error: Exception, known: tuple[Lookaside, ...]) -> tuple[Lookaside, ...]:
    """The functions to trace as copies after a capture has failed because of such a call; none if
    it failed for another reason, or if there is nothing new.
    """
    if isinstance(error, TypesAsked):  # a copy that asks by another name is refused
        is_new = not any(map(is_copied, error.codes))
        found = _copies(error.codes, known) if is_new else ()
        if not found:
            error.refuse()
        return found
    frames = list(_frames(error))
    if not frames or not _is_about_a_call(error, *frames[-1]):
        return ()
    code = frames[-1][0].f_code
    if is_copied(code):
        return ()
    return _copies([next(frame.f_code for frame, _ in frames if is_in(code, frame.f_code))], known)


class LengthsAsked(BaseException):
    """Signal of a capture that has to begin again, since `len(x)` took symbolic sizes for numbers.
    `codes` are those of the functions that said so.
    """

    def __init__(self, codes: Sequence[types.CodeType]) -> None:
        super().__init__(codes)
        self.codes = codes

    def answered(self, known: tuple[Lookaside, ...]) -> tuple[Lookaside, ...]:
        """The functions to trace as copies."""
        return _copies(self.codes, known)


def asks_length() -> types.CodeType | None:
    """The code of the user's function that calls `len` at the moment; None if none does, or if it
    is a copy.
    """
    frames = list(callers(sys._getframe(1)))  # pyright: ignore[reportPrivateUsage]
    if not frames or is_copied(frames[0].f_code):
        return None
    code, place = frames[0].f_code, frames[0].f_lasti
    if not dis.opname[code.co_code[place]].startswith(("CALL", "PRECALL")):
        return None
    if not any(name == "len" for name, *_ in _calls(code)):
        return None
    return outermost(frames[0])


def _copies(codes: Sequence[types.CodeType], known: tuple[Lookaside, ...]) -> tuple[Lookaside, ...]:
    """Lookasides from functions of these codes to copies, but for those that are known.

    A function that the traced one makes is another one in each attempt. After the first of them
    the functions that make it are copied.
    """
    tried = {id(one.fn.__code__) for one in known}
    functions = [
        one
        for code in codes
        for one in (_makers(code) if id(code) in tried else referrers(code))
        if _has_code(one, code) or id(code) in tried
    ]
    replaced = {one.fn for one in known}
    return tuple(
        Lookaside(fn, _copy(fn)) for fn in functions if fn not in replaced and _uses_builtins(fn)
    )


def _makers(code: types.CodeType) -> list[Any]:
    """The functions in whose code the code of another one stands."""
    return [
        one
        for one in gc.get_objects()
        if type(one) is types.FunctionType  # `isinstance` asks some objects for more
        and one.__code__.co_filename == code.co_filename
        and one.__code__ is not code
        and is_in(code, one.__code__)
        and original_of(one) is one
    ]


def _frames(error: BaseException) -> Iterator[tuple[types.FrameType, int]]:
    """The frames of the user's code that an exception came through, outermost first, each with
    the place of its instruction.
    """
    step = error.__traceback__ if error.__cause__ is None else error.__cause__.__traceback__
    while step is not None:
        if is_user_file(step.tb_frame.f_code.co_filename):
            yield step.tb_frame, step.tb_lasti
        step = step.tb_next


def _is_about_a_call(error: Exception, frame: types.FrameType, place: int) -> bool:
    """Test whether the instruction that failed may be a call of a builtin."""
    code = frame.f_code
    is_call = dis.opname[code.co_code[place]].startswith(("CALL", "PRECALL"))
    return is_call and any(True for _ in _calls(code))


def is_copied(code: types.CodeType) -> bool:
    """Test for code in which the calls are led to ours."""
    return any(code is one for one in tuple(_CODES.values()))


def _has_code(fn: Any, code: types.CodeType) -> bool:
    return isinstance(fn, types.FunctionType) and fn.__code__ is code and original_of(fn) is fn


def _uses_builtins(fn: types.FunctionType) -> bool:
    """Test that the names of the builtins are theirs in a function."""
    own: Any = fn.__builtins__
    return not any(
        name in fn.__globals__ or own.get(name) is not getattr(builtins, name)
        for name in _STAND_INS
    )


def _copy(fn: types.FunctionType) -> types.FunctionType:
    copy = copy_of(fn)
    copy.__code__ = _rewritten(fn.__code__)
    return copy
