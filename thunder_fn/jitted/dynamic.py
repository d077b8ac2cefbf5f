"""The choice of a call's program where sizes and numbers may differ from call to call, and
reasons for a new trace.
"""

from __future__ import annotations

import logging
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from thunder_fn.capture.numbers.arguments import Place, Symbolic, symbolic_leaves
from thunder_fn.capture.recorded import Decision
from thunder_fn.errors import callable_name, located
from thunder_fn.ir.symbols import Bounds
from thunder_fn.ir.text import shown
from thunder_fn.ir.trace import Source
from thunder_fn.jitted.cache import Cache
from thunder_fn.jitted.call import Call
from thunder_fn.jitted.families import Family, Leaves, Question, family_key, places_of
from thunder_fn.jitted.marks import Marked, marked
from thunder_fn.jitted.options import Options
from thunder_fn.jitted.program import Entry, build, moved_numbers
from thunder_fn.jitted.prologue import argument_name

_log = logging.getLogger("thunder_fn.jit")

RETRACES = 32
"""The number of traces of calls that differ in sizes and numbers only after which a warning says
why.
"""


class RetraceWarning(UserWarning):
    """A function is traced again and again, since its sizes or numbers keep changing its trace."""


@dataclass(frozen=True, slots=True)
class Miss:
    """The reason why a call was traced: the failed condition, the user's line that asked for it,
    and the old and new value.

    `refused` says why no symbol could stand for the number.
    """

    what: str
    old: Any = None
    new: Any = None
    source: Source | None = None
    refused: str = ""

    def __str__(self) -> str:
        change = (
            ""
            if self.old is None and self.new is None
            else f": it was {_said(self.old)}, and is {_said(self.new)} now"
        )
        where = f" (asked at {self.source})" if self.source is not None else ""
        return f"{self.what}{change}{where}" + (f"; {self.refused}" if self.refused else "")


GRAD_READ = Miss("the `.grad` that the function reads of a tensor is another tensor, or is None")
"""A program reads gradients where they were when it was traced."""


def find(cache: Cache, call: Call, key: Any) -> tuple[Entry, ...]:
    """The programs with symbols for a call."""
    return cache.families.of(call, key).find(call)


def build_for(
    f: Callable[..., Any],
    options: Options,
    cache: Cache,
    call: Call,
    key: Any,
    known: tuple[Entry, ...],
) -> Entry:
    """A new program for a call, for calls with other sizes and numbers too where those have
    changed between calls.
    """
    family = cache.families.of(call, key)
    miss = reason(cache, family, call, key, known)
    numbers = cache.numbers = moved_numbers(known, cache.numbers)
    make = partial(build, f, options, call, wanted=numbers)
    entry = _with_symbols(f, options, family, call, make) if options.is_dynamic else None
    if entry is None:
        entry = cache.put(key, make(), known=known)
    else:
        cache.count_miss()
    _tell(f, cache, family, miss)
    family.traced(call)
    cache.families.latest = family_key(call, key)
    return entry


def _with_symbols(
    f: Callable[..., Any],
    options: Options,
    family: Family,
    call: Call,
    make: Callable[[Symbolic], Entry],
) -> Entry | None:
    """A program of jit with symbols; None where nothing is dynamic."""
    marks = marked(f, options.dynamic, call) if isinstance(options.dynamic, tuple) else Marked()
    every = options.cache == "symbolic values"
    wanted = (
        frozenset(places_of(call))
        if every
        else family.dynamic | family.changed(call) | marks.always
    )
    name, bounds = callable_name(f), dict(marks.bounds)
    return with_symbols(family, call, wanted - marks.never, make, name, bounds)


class Decided(Protocol):
    """A program for calls that give the same answers to some questions about sizes and numbers."""

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The questions and the answers."""
        ...


P = TypeVar("P", bound=Decided)


def with_symbols(
    family: Family,
    call: Leaves,
    wanted: frozenset[Place],
    make: Callable[[Symbolic], P],
    name: str,
    bounds: Mapping[Place, Bounds] | None = None,
) -> P | None:
    """A program with symbols in these places of a call, which its family keeps; None where there
    are none.

    If the function cannot be traced with symbols for numbers, it is traced without, and then
    without symbols for sizes.
    """
    wanted -= family.refused
    symbolic = symbolic_leaves(call.leaves, wanted, bounds)
    if not symbolic.places:
        return None
    try:
        program = make(symbolic)
    except Exception as error:  # noqa: BLE001 - not all code takes symbols for numbers; what is wrong without them, is raised then
        numbers = frozenset(place for place in wanted if place[1] is None)
        family.refused |= numbers or wanted
        why = next(iter(str(error).splitlines()), type(error).__name__)
        family.refusal = f"no symbol stands for it, since then: {why}"
        _log.info(
            "%s is traced for constant %s: %s", name, "numbers" if numbers else "sizes", error
        )
        return with_symbols(family, call, wanted, make, name, bounds)
    family.insert(call, symbolic, wanted, program.decisions, program)
    return program


# ---- why ----


def reason(
    cache: Cache, family: Family, call: Call, key: Any, known: tuple[Entry, ...]
) -> Miss | None:
    """The reason why a call finds no program; None for the first one."""
    if (
        known
        and (outside := known[0].outside) is not None
        and (change := outside.change()) is not None
    ):
        return Miss(*change)
    if known and known[0].is_current():
        return GRAD_READ
    if known:
        return Miss(
            "a tensor that the function closes over has another dtype, shape, layout or"
            " requires_grad"
        )
    if family.count:
        return _number_reason(family, call)
    latest = cache.families.latest
    return None if latest is None else _kind_reason(latest, call, family_key(call, key))


def _number_reason(family: Family, call: Call) -> Miss:
    asked = family.unanswered(call)
    if isinstance(asked, Question):
        return Miss(
            _with_names(call, family, asked.text),
            ", ".join(map(str, asked.answers)),
            asked.answer,
            asked.source,
        )
    for place, value in places_of(call).items():
        if value != family.latest[place]:
            refused = family.refusal if place in family.refused else ""
            return Miss(_place_text(call, place), family.latest[place], value, refused=refused)
    return Miss("the layout of an argument in memory has changed")


def _kind_reason(latest: tuple[Any, ...], call: Call, key: tuple[Any, ...]) -> Miss:
    if latest[0] != key[0] or latest[1] != key[1]:
        return _structure_reason(latest[1], key[1])
    tree = (call.args, call.kwargs)
    for index, (old, new) in enumerate(zip(latest[2], key[2], strict=True)):
        if old != new:
            return Miss(argument_name(tree, index), _kind_text(old), _kind_text(new))
    if latest[3] != key[3]:
        return Miss("a static argument", latest[3], key[3])
    return Miss("the state of PyTorch (grad mode, autocast, modes) has changed")


def _structure_reason(old: tuple[Any, ...], new: tuple[Any, ...]) -> Miss:
    if old[0] != new[0] or old[1] == new[1]:
        return Miss("the structure of the arguments", old[0], new[0])
    one, other = next((a, b) for a, b in zip(old[1], new[1], strict=True) if a != b)
    keys = len(one) // 2
    return Miss("the order or the types of a dict's keys", list(one[keys:]), list(other[keys:]))


def _kind_text(key: Any) -> str:
    if isinstance(key, tuple) and len(key) == 6 and isinstance(key[1], torch.dtype):
        kind, dtype, dims, device, bits, requires_grad = key
        asks = "".join(f", {bit}" for bit in bits) + (", requires_grad" if requires_grad else "")
        return (
            f"{kind.__name__} of {dims} dims, {str(dtype).removeprefix('torch.')} on {device}{asks}"
        )
    if isinstance(key, tuple) and key:
        return " ".join(map(_said, key))
    return _said(key)


def _said(value: Any) -> str:
    """The text of a part of a key, which may be or hold an object of the user's."""
    if isinstance(value, (type, types.FunctionType)):
        return value.__name__
    try:
        return str(value)
    except Exception:  # noqa: BLE001  the user's code
        return shown(value)


def _place_text(call: Call, place: tuple[int, int | None]) -> str:
    name = argument_name((call.args, call.kwargs), place[0])
    return (
        name
        if place[1] is None
        else f"{name}.{f'shape[{place[1]}]' if place[1] >= 0 else f'stride({-1 - place[1]})'}"
    )


def _with_names(call: Call, family: Family, text: str) -> str:
    where = family.places(call)
    used = [
        f"{name} is {_place_text(call, place)}" for name, place in where.items() if name in text
    ]
    return f"{text} ({', '.join(used)})" if used else text


def _tell(f: Callable[..., Any], cache: Cache, family: Family, miss: Miss | None) -> None:
    if miss is None:
        return
    cache.misses.append(miss)
    _log.info("%s is traced again: %s", callable_name(f), miss)
    if family.count == RETRACES:
        what = (
            f"jit: {callable_name(f)} has been traced {RETRACES} times for calls that differ in"
            " sizes and numbers only; "
        )
        fix = (
            "Pad to a few sizes, pass numbers that are computed with as tensors, or put the"
            " decision inside the program with `cond`. `explain_misses` shows every reason."
        )
        if miss is GRAD_READ:
            what = (
                f"jit: {callable_name(f)} has been traced {RETRACES} times for calls of one kind; "
            )
            fix = (
                "Pass the gradient as an argument, or keep it in place:"
                " `zero_grad(set_to_none=False)`."
            )
        warnings.warn(
            located(f"{what}the latest reason: {miss}", fix=fix), RetraceWarning, stacklevel=3
        )
