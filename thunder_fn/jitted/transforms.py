"""Transforms as values with traits, and the order that follows from traits.

    Transform(fuse_norms, name="fuse_norms", after=("quantize",), conflicts=("keep_norms",))

Executors have the same traits. Transforms of the model come before those of the trace. Things that
no trait relates keep the order given.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from thunder_fn.capture.replaced.lookasides import same_function
from thunder_fn.errors import TraitError, callable_name, kind_of
from thunder_fn.executors.base import Numerics, check_numerics
from thunder_fn.interpreters.autocast import autocast
from thunder_fn.ir.text import shown

Subject = Literal["trace", "model", "compiled"]
_WHEN: dict[str, int] = {"model": 0, "trace": 1, "compiled": 2}


class HasTraits(Protocol):
    """A thing with a place among its like."""

    @property
    def name(self) -> str:
        """The name by which traits of others refer to it."""
        ...

    @property
    def after(self) -> tuple[str, ...]:
        """Names of those that come before it."""
        ...

    @property
    def before(self) -> tuple[str, ...]:
        """Names of those that come after it."""
        ...

    @property
    def conflicts(self) -> tuple[str, ...]:
        """Names of those with which it cannot be used."""
        ...


def _names(name: str, trait: str, names: Any) -> Any:
    """The names of other transforms that a trait of one gives.

    Raises:
        TraitError: they are no names, or its own is among them.
    """
    if isinstance(names, str) or not all(isinstance(one, str) for one in names):
        raise TraitError(f"Transform {name!r}: {trait} is a sequence of names, given {names!r}")
    if name in names:
        raise TraitError(f"Transform {name!r}: {trait} names itself")
    return tuple(names)


@dataclass(frozen=True, slots=True)
class Transform:
    """A function from trace to trace, or from model to model, that says where it stands among
    others.

    Law: applying it is applying `fn`.

    Args:
        fn: from a Trace to a Trace of the same inputs and outputs; with ``on="model"``, from a
            module or function to one.
        name: its name in the traits of others.
        after: names of transforms that come before this one, if they are used.
        before: names of transforms that come after this one, if they are used.
        conflicts: names of transforms that it cannot be used with.
        idempotent: applying it twice is applying it once, so it is applied once.
        numerics: how far results may be from those without it: "bitwise", "reassociating" or
            "precision-changing".
        on: what it is applied to, each "trace", the "model" before it is traced, or what `compile`
            returns, the "compiled" model.

    Raises:
        TraitError: fn is no function, or a name is not one of those that are known.
        ExecutorError: there are no such numerics.

    Example:
        >>> from thunder_fn import jit, simplify
        >>> tidy = Transform(simplify, name="tidy", idempotent=True)
        >>> jit(lambda x: x + 1, transforms=[tidy]).options.transforms == (tidy,)
        True
    """

    fn: Callable[..., Any]
    name: str
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    idempotent: bool = False
    numerics: Numerics = "bitwise"
    on: Subject = "trace"

    def __init__(  # noqa: PLR0913 - options, by keyword
        self,
        fn: Callable[..., Any],
        *,
        name: str,
        after: Sequence[str] = (),
        before: Sequence[str] = (),
        conflicts: Sequence[str] = (),
        idempotent: bool = False,
        numerics: Numerics = "bitwise",
        on: Subject = "trace",
    ) -> None:
        if not callable(fn):
            raise TraitError(
                f"Transform {name!r}: expected a function, given {kind_of(fn)}: {shown(fn, 60)}"
            )
        given: tuple[Any, Any] = (name, idempotent)
        if not (isinstance(given[0], str) and name):
            raise TraitError(
                f"a Transform's name is what the traits of others call it, given {shown(name, 60)}"
            )
        if not isinstance(given[1], bool):
            raise TraitError(
                f"Transform {name!r}: idempotent is True or False, given {shown(idempotent, 60)}"
            )
        if on not in _WHEN:
            raise TraitError(
                f"Transform {name!r}: on is 'trace', 'model' or 'compiled', given {on!r}"
            )
        others = {"after": after, "before": before, "conflicts": conflicts}
        values = {trait: _names(name, trait, names) for trait, names in others.items()}
        values |= {"fn": fn, "name": name, "idempotent": idempotent, "on": on}
        values["numerics"] = check_numerics(numerics, f"Transform {name!r}")
        for key, value in values.items():
            object.__setattr__(self, key, value)

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, subject: Any) -> Any:
        return self.fn(subject)

    def is_again(self, other: object) -> bool:
        """Test whether the other is this transform, perhaps made anew: the same function with the
        same traits.
        """
        if not isinstance(other, Transform) or same_function(self.fn) != same_function(other.fn):
            return False
        return all(
            getattr(self, trait) == getattr(other, trait)
            for trait in self.__slots__
            if trait != "fn"
        )


def as_transform(given: Callable[..., Any]) -> Transform:
    """Return a function as a transform without traits, and an interpreter with its label; a
    Transform as it is.
    """
    if isinstance(given, Transform):
        return given
    own = given
    while isinstance(own, functools.partial):
        own = own.func
    return Transform(given, name=callable_name(own), numerics=LABELS.get(own, "bitwise"))


LABELS: dict[Any, Numerics] = {autocast: "precision-changing"}
"""Interpreters that change results. All others from trace to trace with the same inputs and
outputs are bitwise.
"""


T = TypeVar("T", bound=HasTraits)


def in_order(given: Sequence[T], what: str = "transform") -> tuple[T, ...]:
    """Sort things by their traits; unrelated ones keep the order given.

    Laws: the result is a permutation of `given` without repeats of idempotent ones, and `in_order`
        of it is itself.

    Raises:
        TraitError: two conflict, or traits contradict each other; names both.
    """
    left = list[T]()
    for one in given:
        if not (
            isinstance(one, Transform)
            and one.idempotent
            and any(one.is_again(other) for other in left)
        ):
            left.append(one)
    for one in left:
        rival = next(
            (other for other in left if other.name in one.conflicts and other is not one), None
        )
        if rival is not None:
            raise TraitError(
                f"the {what}s {one.name!r} and {rival.name!r} conflict: {one.name} says that it"
                " cannot be used with it",
                fix="Leave one of them out.",
            )
    placed = list[T]()
    while left:
        ready = next(
            (one for one in left if not any(_comes_first(other, one) for other in left)), None
        )
        if ready is None:
            raise _contradiction(left, what)
        left.remove(ready)
        placed.append(ready)
    return tuple(placed)


def _comes_first(first: HasTraits, second: HasTraits) -> bool:
    """Test whether the traits of either, or their targets, say that `first` is before `second`."""
    return first is not second and (
        reason(first, second) is not None or _when(first) < _when(second)
    )


def _when(one: HasTraits) -> int:
    """Return the stage of a transform: models are changed before they are traced, compiled ones
    after that. Executors run traces.
    """
    return _WHEN[getattr(one, "on", "trace")]


def reason(first: HasTraits, second: HasTraits) -> str | None:
    """The reason why the one comes before the other; None if no trait says so."""
    if first.name in second.after:
        return f"after {first.name}, as {second.name} says"
    return f"after {first.name}, as {first.name} says" if second.name in first.before else None


def _contradiction(left: Sequence[HasTraits], what: str) -> TraitError:
    """Describe a contradiction among traits: follow who must come first until one comes twice."""
    chain: list[HasTraits] = [left[0]]
    while True:
        first = next(other for other in left if _comes_first(other, chain[-1]))
        if first in chain:
            cycle = [*chain[chain.index(first) :], first]
            lines = [
                f"  {after.name}: {_why(before, after)}"
                for after, before in itertools.pairwise(cycle)
            ]
            names = " and ".join(repr(one.name) for one in cycle[:-1])
            text = f"the {what}s {names} each want to come after the other\n" + "\n".join(lines)
            return TraitError(
                text, fix="Leave one of them out, or change the traits of one that is yours."
            )
        chain.append(first)


def _why(first: HasTraits, second: HasTraits) -> str:
    return (
        reason(first, second) or f"after {first.name}, which changes the model before it is traced"
    )
