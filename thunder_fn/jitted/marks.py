"""`jit(f, dynamic={...})`: which sizes and numbers of which argument are symbols, and between which
bounds.

    jit(f, dynamic={"x": {0: (2, 512)}, 1: True, "n": False})

says that the first dim of x is a symbol from the first call on. So is everything in the second
argument, and n never is. A bound is the first question that is asked of a symbol. Programs for
calls within it know this, and decide nothing that follows from it. A call outside it is a miss and
gets a program of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn.capture.numbers.arguments import Place
from thunder_fn.errors import ArgnumError, JitError, is_int
from thunder_fn.ir.symbols import Bounds
from thunder_fn.ir.text import shown

if TYPE_CHECKING:
    from thunder_fn.jitted.call import Call

Mark = bool | Bounds | tuple[tuple[int, bool | Bounds], ...]
Marks = tuple[tuple[int | str, Mark], ...]
"""The mark of each argument, for all of it or for some dims of its tensors: dynamic, never, or
within bounds.
"""

_FIX = "Write `{'x': {0: True, 1: (2, 512)}, 'n': False}`: by argument, by dim, a flag or bounds."


@dataclass(frozen=True, slots=True)
class Marked:
    """The places of a call that are always, or never, dynamic, and the bounds of some."""

    always: frozenset[Place] = frozenset()
    never: frozenset[Place] = frozenset()
    bounds: tuple[tuple[Place, Bounds], ...] = ()


def read_marks(value: Any) -> Marks:
    """The marks as the user gave them, checked and frozen.

    Raises:
        JitError: they are not written as marks are.
    """
    return tuple((_key(key), _read(mark)) for key, mark in value.items())


def _key(key: Any) -> int | str:
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise JitError(
            f"jit: dynamic names arguments by position or name, given {shown(key, 60)}", fix=_FIX
        )
    return key


def _read(mark: Any) -> Mark:
    if isinstance(mark, bool):
        return mark
    if isinstance(mark, Mapping):
        return tuple((_dim(dim), _read_leaf(inner)) for dim, inner in mark.items())
    return _read_bounds(mark)


def _dim(dim: Any) -> int:
    if not is_int(dim):
        raise JitError(f"jit: dynamic has a dim that is no int: {shown(dim, 60)}", fix=_FIX)
    return dim


def _read_leaf(mark: Any) -> bool | Bounds:
    return mark if isinstance(mark, bool) else _read_bounds(mark)


def _read_bounds(mark: Any) -> Bounds:
    pair = tuple(mark) if isinstance(mark, (tuple, list)) else ()
    if len(pair) != 2 or not all(bound is None or type(bound) in (int, float) for bound in pair):
        text = (
            "jit: a mark is a flag or bounds (least, greatest), where None is no bound; given"
            f" {shown(mark, 60)}"
        )
        raise JitError(text, fix=_FIX)
    low, high = pair
    if low is not None and high is not None and low > high:
        raise JitError(
            f"jit: the bounds {pair} leave no value between them; the least bound comes first"
        )
    return low, high


@lru_cache(maxsize=1024)
def parameter_names(f: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's positional parameters."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in positional)


def marked(f: Callable[..., Any], marks: Marks, call: Call) -> Marked:
    """Apply the marks to a call.

    Raises:
        ArgnumError: the call has no such argument, or one of its tensors no such dim.
    """
    always, never, bounds = set[Place](), set[Place](), dict[Place, Bounds]()
    arguments = dict(_arguments(parameter_names(f), call))
    for key, mark in marks:
        if key not in arguments:
            continue  # it has a default, or is passed by another name
        for place, given in _places(call.leaves, arguments[key], mark, key):
            (never if given is False else always).add(place)
            if not isinstance(given, bool):
                bounds[place] = given
    return Marked(frozenset(always), frozenset(never), tuple(bounds.items()))


def _arguments(names: Sequence[str], call: Call) -> Iterator[tuple[int | str, range]]:
    """The leaves of each argument, by position and by name."""
    args, kwargs = call.spec.children()
    static, start = {position for position, _ in call.statics}, 0
    dynamic = [position for position in range(call.count) if position not in static]
    for position, child in zip(dynamic, args.children(), strict=True):
        leaves = range(start, start + child.num_leaves)
        yield position, leaves
        yield position - call.count, leaves
        if position < len(names):
            yield names[position], leaves
        start = leaves.stop
    for name, child in zip(kwargs.entries(), kwargs.children(), strict=True):
        leaves = range(start, start + child.num_leaves)
        yield name, leaves
        if name in names:
            yield names.index(name), leaves
        start = leaves.stop


def _places(
    leaves: Sequence[Any], chosen: range, mark: Mark, key: int | str
) -> Iterator[tuple[Place, bool | Bounds]]:
    for index in chosen:
        leaf = leaves[index]
        if not isinstance(leaf, torch.Tensor):
            if type(leaf) in (int, float) and _is_whole(mark):
                yield (index, None), mark  # type: ignore[misc]
            continue
        dims = [(dim, mark) for dim in range(leaf.dim())] if _is_whole(mark) else mark
        for dim, given in dims:  # type: ignore[misc, union-attr]
            if not -leaf.dim() <= dim < leaf.dim():
                raise ArgnumError(
                    f"jit: dynamic has dim {dim} of {key!r}, which has a tensor of {leaf.dim()}"
                    " dims"
                )
            yield (index, dim % leaf.dim()), given


def _is_whole(mark: Mark) -> bool:
    """Test whether the mark is for all of an argument, not for some dims of its tensors."""
    return isinstance(mark, bool) or (len(mark) == 2 and not isinstance(mark[0], tuple))
