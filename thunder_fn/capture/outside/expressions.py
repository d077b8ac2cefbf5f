"""Expressions of a function: what it loads from outside of its frame, and what it does with it.

def f(x):
    return x * cfg.lr + box["w"]

reading(f.__code__).settled
# ("global", "cfg"), ("attr", ("global", "cfg"), ("const", "lr")),
# ("item", ("global", "box"), ("const", "w")), ...
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import torch

Span: TypeAlias = tuple[Any, Any, Any, Any]
"""A part of a file: its first line and column, and its last; None for what is not known."""
Source: TypeAlias = tuple[Any, ...] | None
"""An expression, by kind; None where it is not understood.

    ("global", name), ("cell", name), ("local", name), ("const", value), ("code", code)
    ("attr", of, key)            of.key, and getattr
    ("item", of, key)            of[key], of.get(key), key in of
    ("in", of, key)              it is asked whether it is in there
    ("each", of)                 any item of it, as a loop gets it
    ("any", sources)             one of several
    ("built", sources)           a new container of these
    ("call", target, arguments)  the result of a call
    ("drawn", of, is_later)      an item is drawn from it; `is_later`: after the code has branched
    ("whole", of)                all that a container holds counts
    ("import", name, level, is_whole)  a module; its first package unless `is_whole`
    ("given", target, of)        an argument of a call
    ("before", place)            it is written here: the value that it had before counts
    ("counted", place)           it is written or deleted here, and its old value counts for nothing
    ("augmented", place, operator)  it is written by `+=` or another such operator
    ("dropped", of, method)      a method takes an item away, at which nobody looks
    ("mutated", of)              it is changed in place, if it can be
    ("unless", target, source)   it counts unless the target is `constant`
    ("kinds", classes, of)       it is asked whether it is of one of these classes
    ("super", cls, of)           what `super(cls, of)` gives
    ("shown", of)                its text becomes a part of a string
    ("joined", parts)            a string of these parts
"""


@dataclass(slots=True)
class Reading:
    """A code object: its expressions and their lines, and the sources of locals and comprehensions.

    `keys` are the locals that are keys, with all that is assigned to them, if that is understood.
    `tagged` are the locals that are asked for an attribute which tensors do not have by themselves.
    `passing` are those among them that are locals of an inlined comprehension, so that no look at
    the frame finds the tensors in them.
    `filled` is what is put into lists that locals hold.
    `kept` are the locals that stay bound once they are: what is made of one that is unbound at the
    end of a frame has not run.
    `sure` are the items, and questions for them, whose keys are all known at the end of a frame.
    `vague` are others, whose keys come from a list that is changed.
    `constants` are the calls of what is named `constant`, each with its place.

    `settled` are the expressions that depend on globals alone, and `open` all others. Those in
    `moving` may give other values at the end of a frame.
    """

    settled: dict[Source, int] = field(default_factory=dict[Source, int])
    open: dict[Source, int] = field(default_factory=dict[Source, int])
    moving: dict[Source, int] = field(default_factory=dict[Source, int])
    assigned: dict[str, set[Source]] = field(default_factory=dict[str, set[Source]])
    comprehensions: dict[types.CodeType, Source] = field(
        default_factory=dict[types.CodeType, Source]
    )
    keys: dict[str, tuple[Source, ...]] = field(default_factory=dict[str, tuple[Source, ...]])
    tagged: frozenset[str] = frozenset()
    passing: frozenset[str] = frozenset()
    constants: tuple[tuple[Source, Span], ...] = ()
    filled: dict[str, set[Source]] = field(default_factory=dict[str, set[Source]])
    kept: frozenset[str] = frozenset()
    sure: frozenset[Source] = frozenset()
    vague: frozenset[Source] = frozenset()
    known: dict[Any, dict[Source, int]] = field(default_factory=dict[Any, dict[Source, int]])
    not_run: dict[frozenset[str], frozenset[Source]] = field(
        default_factory=dict[frozenset[str], frozenset[Source]]
    )

    def live(self, names: frozenset[str], *, gives: bool, is_moving: bool) -> dict[Source, int]:
        """The open expressions that lead to more than plain data and tensors.

        Args:
            names: the locals whose values do, and with a `TAGGED` before them those that hold
                tensors whose attributes are asked for.
            gives: some callee has returned such a value.
            is_moving: only those in `moving`.
        """
        key = names, gives, is_moving
        if key not in self.known:
            found, before = set(names), -1
            while before != len(found):
                before = len(found)
                found.update(
                    name
                    for name, source in self.sources()
                    if name not in found and _is_live(source, found, gives)
                )
            of = self.moving if is_moving else self.open
            self.known[key] = {
                source: line
                for source, line in of.items()
                if _is_live(
                    source if source is None or source[0] != "call" else source[1], found, gives
                )
            }
        return self.known[key]

    def waiting(self, unbound: frozenset[str]) -> frozenset[Source]:
        """The open expressions that need the value of a local that is not bound."""
        if unbound not in self.not_run:
            found = (source for source in self.open if has_not_run(source, unbound))
            self.not_run[unbound] = frozenset(found)
        return self.not_run[unbound]

    def sources(self) -> Iterator[tuple[str, Source]]:
        """The locals, each with what is assigned to it or put into it."""
        for given in (self.assigned, self.filled):
            for name, sources in given.items():
                for source in sources:
                    yield name, source


TAGGED = "~"
_IS_FILLED = sys.version_info >= (3, 12)
"""Comprehensions are inlined, and fill what is built empty."""
_OF_TENSORS = frozenset(dir(torch.Tensor)) - {"__dict__"}


def is_of_python(key: Source) -> bool:
    """Test whether a tensor has an attribute of that name only where Python gave it one."""
    return key is None or key[0] != "const" or key[1] not in _OF_TENSORS


class Node(tuple[Any, ...]):
    """An expression of a code object, which is there once: it is compared by identity."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def shared(source: Any, known: dict[Any, Node]) -> Any:
    """The one node of an expression in a code object, whose nodes are `known`."""
    if not isinstance(source, tuple) or source[:1] == ("const",):
        return (
            source
            if not isinstance(source, tuple)
            else known.setdefault((source[0], type(source[1]), source[1]), Node(source))
        )
    if source not in known:
        is_source = bool(source) and isinstance(source[0], str)
        parts = [shared(part, known) if isinstance(part, tuple) else part for part in source]
        known[source] = Node(parts) if is_source else tuple(parts)  # type: ignore[assignment]
    return known[source]


def is_moving(source: Any, fixed: frozenset[str]) -> bool:
    """Test whether an expression may give another value at the end of a frame: it depends on calls,
    or on bound locals.
    """
    if not isinstance(source, tuple) or not source or source[0] == "const":
        return False
    if source[0] == "local":
        return source[1] not in fixed
    return source[0] in ("call", "import") or any(is_moving(part, fixed) for part in source)


def is_settled(source: Any) -> bool:
    """Test whether an expression depends on globals and constants alone."""
    if not isinstance(source, tuple) or not source or source[0] == "const":
        return True
    return source[0] not in _UNSETTLED and all(map(is_settled, source))


_UNSETTLED = frozenset(("local", "cell", "call", "before", "counted", "augmented", "import"))


def _is_live(source: Any, names: set[str], gives: bool) -> bool:
    """Test whether an expression may lead to more than plain data and tensors, where of all
    locals these do.
    """
    match source:
        case None | ("const" | "code" | "joined", *_):
            return False
        case ("global" | "cell" | "import", *_) | ("built", ()):
            return source[0] != "built" or _IS_FILLED
        case ("local", name):
            return name in names
        case ("any" | "built", parts):
            return any(_is_live(part, names, gives) for part in parts)
        case ("call", target, arguments):  # a question has fixed arguments, or none
            is_fixed = all(one is not None and one[0] == "const" for one in arguments)
            is_given = any(_is_live(one, names, gives) for one in arguments)
            return gives or is_given or (is_fixed and _is_live(target, names, gives))
        case ("counted" | "augmented", (_, None, *_), *_):
            return True
        case ("attr", ("local", name), key) if TAGGED + name in names and is_of_python(key):
            return True
        case (
            "before"
            | "counted"
            | "augmented"
            | "mutated"
            | "dropped"
            | "attr"
            | "item"
            | "in"
            | "each"
            | "drawn"
            | "whole"
            | "fields"
            | "inplace"
            | "kinds"
            | "shown",
            of,
            *_,
        ):
            return _is_live(of, names, gives)
        case _:  # "given", "unless" and "super"
            return _is_live(source[2], names, gives)


def has_not_run(source: Any, unbound: Set[str]) -> bool:
    """Test whether an expression needs the value of a local that is not bound."""
    if not isinstance(source, tuple) or source[:1] in (("const",), ("code",)):
        return False
    if source[:1] == ("local",):
        return source[1] in unbound
    if source[:1] == ("any",):
        return all(has_not_run(part, unbound) for part in source[1])
    return any(has_not_run(part, unbound) for part in source)


def gives_others(source: Source) -> bool:
    """Test for the items of something that gives others, too, which are not known."""
    match source:
        case None:
            return True
        case ("each", ("any", parts)):
            return any(gives_others(("each", part)) for part in parts)
        case ("each", of):
            return gives_others(of)
        case _:
            return False


def pattern_of(source: Source) -> str:
    """A regular expression for the strings that an expression may give."""
    match source:
        case ("const", str(text)):
            return re.escape(text)
        case ("joined", parts):
            return "".join(map(pattern_of, parts))
        case _:
            return ".*"


def parts_of(source: Source) -> Iterator[Source]:
    """An expression and those in it, outermost first."""
    if source is None or source[0] in ("const", "local"):
        return
    yield source
    for part in source[1:]:
        if isinstance(part, tuple) and part and isinstance(part[0], str):
            yield from parts_of(part)


@lru_cache(maxsize=4096)
def text(source: Source) -> str:
    """An expression as a user would write it."""
    match source:
        case ("global" | "cell" | "local" | "import", name, *_):
            return str(name)
        case ("any", (of, None) | (None, of)):
            return text(of)
        case ("const", value):
            return repr(value)
        case ("attr", of, ("const", name)):
            return f"{text(of)}.{name}"
        case ("item", of, key):
            return f"{text(of)}[{text(key)}]"
        case ("call", target, _):
            return f"{text(target)}(...)"
        case ("super", *_):
            return "super()"
        case ("whole" | "each" | "fields", of) | ("drawn", of, _):
            return text(of)
        case ("given", _, of):
            return text(of)
        case _:
            return "..."
