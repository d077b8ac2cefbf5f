"""Programs for many sizes and numbers: which places of a call are dynamic, and how the right
program is found.

A *family* is all calls of a function that differ in sizes and numbers only. It knows which *places*
(a dim of a tensor, a number) are dynamic. These are the ones that have changed between calls, those
that the user marked, or all of them. Calls of a family whose other places agree form a *class*, and
its programs are the leaves of a tree of questions:

    s0 > 5 ?
      True:  program 1
      False: s0 % 2 ?
               0: program 2
               1: program 3

A traced function asks the same first question whatever the numbers are, the same second one after
the same answer, and so on. So the decisions of its traces make a tree. Finding a program takes one
look for each question on its way, however many programs there are.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.numbers.arguments import (
    Place,
    Symbolic,
    is_number,
    stride_pattern,
    value_at,
)
from thunder_fn.capture.recorded import Decision
from thunder_fn.ir.trace import Source
from thunder_fn.jitted.call import Call
from thunder_fn.jitted.prologue import static_key

MAX_PROGRAMS = 1024
"""The number of programs that a class keeps."""

MAX_STATES = 8
"""The number of programs kept that differ only in what the function read from outside, such as
train and eval.
"""


class Leaves(Protocol):
    """A call of which the leaves of the arguments matter."""

    @property
    def leaves(self) -> Sequence[Any]:
        """The leaves of the arguments."""
        ...


def beside(program: Any, known: Sequence[Any]) -> tuple[Any, ...]:
    """Put a new program in front of those for other reads from outside, other properties of
    tensors, or absent gradients. It replaces the others.
    """
    kept = (
        other
        for other in known
        if not other.is_inside() or other.reads_match is not None or other.feeds_grads
    )
    return program, *[*kept][: MAX_STATES - 1]


# ---- what a call is, sizes and numbers aside ----


def places_of(call: Leaves) -> dict[Place, Any]:
    """Return each place of a call that can be dynamic, and its value: sizes, ints and floats.

    Parameters of modules keep their sizes. A bool is not dynamic, since asking for it would give a
    program for each of its two values anyway.
    """
    found: dict[Place, Any] = {}
    for index, leaf in enumerate(call.leaves):
        if isinstance(leaf, torch.Tensor):
            if not isinstance(leaf, torch.nn.Parameter):
                found.update(((index, dim), size) for dim, size in enumerate(leaf.shape))
        elif is_number(leaf):
            found[index, None] = leaf
    return found


def family_key(call: Call, key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key of a call, as `call_key` gives it, without sizes, strides and numbers."""
    count, spec, leaves, statics, state = key
    return count, spec, tuple(map(_leaf_family, call.leaves, leaves)), statics, state


def _leaf_family(leaf: Any, key: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter):
        return (
            internals.class_of(leaf),
            leaf.dtype,
            leaf.dim(),
            leaf.device,
            internals.bits_of(leaf),
            leaf.requires_grad,
        )
    if is_number(leaf):
        return type(leaf)
    return key


def class_key(call: Leaves, dynamic: frozenset[Place]) -> tuple[Any, ...]:
    """Return the key that calls of one class share: sizes and numbers that are not dynamic, and the
    kinds of layout.
    """
    return dynamic, tuple(
        _leaf_class(index, leaf, dynamic) for index, leaf in enumerate(call.leaves)
    )


def _leaf_class(index: int, leaf: Any, dynamic: frozenset[Place]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return None if (index, None) in dynamic else static_key(leaf)
    sizes = tuple(
        None if (index, dim) in dynamic and size > 1 else size
        for dim, size in enumerate(leaf.shape)
    )
    if None not in sizes:
        return sizes, leaf.stride()
    return sizes, stride_pattern(leaf.shape, leaf.stride())


# ---- finding a program ----


@dataclass(slots=True)
class Node:
    """A question about symbols, with what follows each answer: another question or a program."""

    text: str
    ask: Callable[..., Any]
    source: Source | None = None
    children: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Question:
    """A question to which a call gives an answer that no program was made for."""

    text: str
    answers: tuple[Any, ...]
    answer: Any
    source: Source | None


@dataclass(slots=True)
class Class:
    """The programs of calls that differ in the values of their symbols only.

    A function asks other questions where it read other values from outside: there is a tree for
    each such state.
    """

    places: tuple[Place, ...]
    names: tuple[str, ...]
    roots: tuple[Any, ...] = ()
    size: int = 0

    def find(self, leaves: Sequence[Any]) -> Any:
        """The programs for these leaves of a call; a question that has no such answer; None if
        there is nothing.
        """
        values = [value_at(leaves, place) for place in self.places]
        found = [followed(root, values) for root in self.roots]
        programs = tuple(program for one in found if isinstance(one, tuple) for program in one)
        return programs or next(iter(found), None)

    def insert(self, decisions: Sequence[Decision], program: Any) -> None:
        """Put a program where its decisions lead, in the first tree that asks the same."""
        self.size += 1
        if self.size > MAX_PROGRAMS:
            self.roots, self.size = (), 1
        node = next((root for root in self.roots if _asks(root, decisions)), None)
        others = tuple(root for root in self.roots if root is not node)
        first = [node]
        put = functools.partial(first.__setitem__, 0)
        for decision in decisions:
            text = str(decision.question)
            if not isinstance(node, Node):
                node = Node(text, question(self.names, text), decision.source)
                put(node)
            key = (type(decision.answer), decision.answer)
            put = functools.partial(node.children.__setitem__, key)
            node = node.children.get(key)
        put(beside(program, node or ()))
        self.roots = (*first, *others[: MAX_STATES - 1])


def followed(node: Any, values: Sequence[Any]) -> Any:
    """Follow the answers in a tree: to programs, to a question that has no such answer, or to
    None.
    """
    while isinstance(node, Node):
        try:
            answer = node.ask(*values)
        except (ArithmeticError, ValueError) as error:
            answer = repr(error)
        known, node = node, node.children.get((type(answer), answer))
        if node is None:
            return Question(
                known.text, tuple(value for _, value in known.children), answer, known.source
            )
    return node


def _asks(node: Any, decisions: Sequence[Decision]) -> bool:
    """Test whether a tree asks these questions, as far as it goes in the direction of their
    answers.
    """
    for decision in decisions:
        if node is None:
            return True
        if not isinstance(node, Node) or node.text != str(decision.question):
            return False
        node = node.children.get((type(decision.answer), decision.answer))
    return node is None or isinstance(node, tuple)


@lru_cache(maxsize=4096)
def question(names: tuple[str, ...], text: str) -> Callable[..., Any]:
    """A function of the symbols' values that answers a question."""
    return eval(f"lambda {', '.join(names)}: {text}", {"math": math})


class Family:
    """Calls that differ in sizes and numbers only: their dynamic places, and their programs."""

    def __init__(self, call: Leaves) -> None:
        self.first = places_of(call)
        self.latest = self.first
        self.varied: frozenset[Place] = frozenset()
        self.dynamic: frozenset[Place] = frozenset()
        self.count = 0
        self.refused: frozenset[Place] = frozenset()
        self.pinned: frozenset[Place] = frozenset()
        self.refusal = ""
        self.classes: OrderedDict[Any, Class] = OrderedDict()

    def find(self, call: Leaves) -> tuple[Any, ...]:
        """The programs for a call."""
        found = self.unanswered(call)
        return found if isinstance(found, tuple) else ()

    def unanswered(self, call: Leaves) -> Any:
        """The programs for a call, or the question that it answers in a new way."""
        known = self._class(call)
        return known.find(call.leaves) if known is not None else None

    def _class(self, call: Leaves) -> Class | None:
        return self.classes.get(class_key(call, self.dynamic)) if self.dynamic else None

    def places(self, call: Leaves) -> Mapping[str, Place]:
        """The places from which the symbols of programs for such calls are read, by name."""
        known = self._class(call)
        return dict(zip(known.names, known.places, strict=True)) if known is not None else {}

    def traced(self, call: Leaves) -> None:
        """Note that a program has been made for a call."""
        self.count += 1
        self.varied = self.changed(call)
        self.latest = places_of(call)

    def changed(self, call: Leaves) -> frozenset[Place]:
        """The places whose values differ between this call, those that were traced, and the first
        one.
        """
        return self.varied.union(
            place for place, value in places_of(call).items() if value != self.first[place]
        )

    def pin(self, symbolic: Symbolic, decisions: Sequence[Decision]) -> None:
        """Refuse the places whose values a function has asked for, not something about them, in two
        traces.
        """
        asked = [one.question.value for one in decisions if not isinstance(one.answer, bool)]
        pinned = frozenset(
            place
            for symbol, place in symbolic.places.items()
            if any((value - symbol).is_number for value in asked)
        )
        self.refused |= self.pinned & pinned
        self.pinned |= pinned

    def insert(
        self,
        call: Leaves,
        symbolic: Symbolic,
        dynamic: frozenset[Place],
        decisions: Sequence[Decision],
        program: Any,
    ) -> None:
        """Keep a program that was made for a call with these places dynamic."""
        self.dynamic = dynamic
        key = class_key(call, self.dynamic)
        if key not in self.classes:
            self.classes[key] = Class(
                tuple(symbolic.places.values()), tuple(map(str, symbolic.places))
            )
        self.classes[key].insert(decisions, program)
        while len(self.classes) > MAX_PROGRAMS:
            self.classes.popitem(last=False)


class Families:
    """The families of one function, by what their calls agree in. Changed under a lock only."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.latest: tuple[Any, ...] | None = None
        self._known: OrderedDict[Any, Family] = OrderedDict()

    def of(self, call: Call, key: tuple[Any, ...]) -> Family:
        """The family of a call."""
        where = family_key(call, key)
        with self.lock:
            if where not in self._known:
                self._known[where] = Family(call)
                while len(self._known) > MAX_PROGRAMS:
                    self._known.popitem(last=False)
            return self._known[where]

    @property
    def size(self) -> int:
        """The number of programs."""
        return sum(
            known.size for family in self._known.values() for known in family.classes.values()
        )

    def clear(self) -> None:
        """Forget every program."""
        with self.lock:
            self._known.clear()
