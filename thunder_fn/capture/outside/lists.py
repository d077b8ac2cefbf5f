"""Lists that a function fills itself: whether all their items are known from its code.

todo = Base.__subclasses__()
while todo:
    C = todo.pop()
    todo += C.__subclasses__()
    if C.name in sys.modules: ...        # all that C may be is known, so each name is a key

A list is known if each use of its variable is one of these: a loop over it, a test of its truth,
and methods that put something in or take something out. Then nobody else can fill it.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from thunder_fn.capture.outside.expressions import Source

_COMPREHENSIONS = ("<listcomp>", "<setcomp>")
_Sources = Mapping[str, Set[Source]]


@dataclass(slots=True)
class Lists:
    """The uses of locals in a code object: how often each is loaded, and how many of these uses
    are understood. An item that is taken out of a list in `popped` is in it no more at the end.
    """

    code: types.CodeType
    loads: Counter[str] = field(default_factory=Counter[str])
    understood: Counter[str] = field(default_factory=Counter[str])
    popped: set[str] = field(default_factory=set[str])
    appended: set[Source] = field(default_factory=set[Source])
    """The items of comprehensions that are inlined."""

    def load(self, source: Source) -> None:
        """Count a load of a local."""
        if source is not None and source[0] == "local":
            self.loads[source[1]] += 1

    def understand(self, source: Source) -> str | None:
        """Count a use of a local that is understood. Return its name; None for no local."""
        if source is None or source[0] != "local":
            return None
        self.understood[source[1]] += 1
        return str(source[1])

    def known(self, assigned: _Sources, filled: _Sources) -> Known:
        """Find the locals of which all values are known, and the lists of which all items are, from
        what is assigned to them and what they are filled with.
        """
        given = self.code.co_argcount + self.code.co_kwonlyargcount
        known = Known(frozenset(self.code.co_varnames[:given]) - assigned.keys(), self.appended)
        cells = {*self.code.co_cellvars}
        known.names = {name for name in assigned if name not in cells}
        known.lists = {
            name
            for name in known.names
            if self.loads[name] == self.understood[name]
            and name not in self.code.co_varnames[:given]
        }
        before = -1
        while before != (before := len(known.names) + len(known.lists)):
            known.lists = {
                name
                for name in known.lists
                if all(map(known.is_filling, filled.get(name, ())))
                and all(
                    source == ("inplace", ("local", name), "+=")
                    or known.is_list(source, is_popped=name in self.popped, is_assigned=True)
                    for source in assigned[name]
                )
            }
            known.names = {name for name in known.names if all(map(known.is_known, assigned[name]))}
        return known


@dataclass(slots=True)
class Known:
    """The locals of which all values are known as far as is seen, and of which all items are."""

    given: frozenset[str]
    appended: Set[Source]
    names: set[str] = field(default_factory=set[str])
    lists: set[str] = field(default_factory=set[str])

    def is_known(self, source: Source) -> bool:
        """Test whether all values of an expression are known."""
        match source:
            case ("const" | "global" | "cell", *_):
                return True
            case ("local", name):
                return name in self.names or name in self.given
            case ("attr", of, ("const", str())):
                return self.is_known(of)
            case ("each", of):
                return self.is_list(of)
            case ("any", (_, ("each", of))) if is_taken(source):
                return self.is_list(of)
            case _:
                return False

    def is_filling(self, source: Source) -> bool:
        """Test whether all that a list is filled with is known: items, or those of a list."""
        return source is not None and source[0] == "built" and all(map(self.is_known, source[1]))

    def is_list(
        self, source: Source, *, is_popped: bool = False, is_assigned: bool = False
    ) -> bool:
        """Test for a list of which all items are known.

        Args:
            is_popped: items of it are taken away, so that its content at the end does not tell.
            is_assigned: it is assigned to a local, which has the items of comprehensions, too.
        """
        match source:
            case ("const", _):
                return True
            case ("global" | "cell", _):
                return not is_assigned  # others may change it, too
            case ("local", name):
                return name in self.lists
            case ("built", ()):
                return is_assigned or not self.appended
            case ("built", parts):
                return all(map(self.is_known, parts))
            case ("call", ("code", code), ()):
                return not is_popped and code.co_name in _COMPREHENSIONS
            case ("call", ("attr", of, ("const", "__subclasses__")), ()):
                return self.is_known(of)
            case _:
                return False


def parts_through(
    source: Source, assigned: _Sources, filled: _Sources
) -> Iterator[tuple[Any, ...]]:
    """An expression, those in it, and those that the locals in it may be."""
    pending, seen = [source], set[Source]()
    while pending:
        one = pending.pop()
        if not isinstance(one, tuple) or not one or one in seen:
            continue
        seen.add(one)
        if isinstance(one[0], str):
            yield one
        if one[:1] == ("local",):
            pending += (*assigned.get(one[1], ()), *filled.get(one[1], ()))
        elif one[:1] not in (("const",), ("code",)):
            pending += one


def is_taken(source: Source) -> bool:
    """Test for an item that is taken out of a list."""
    match source:
        case ("any", (("call", ("attr", of, ("const", "pop" | "popleft")), ()), ("each", same))):
            return bool(of == same)
        case _:
            return False
