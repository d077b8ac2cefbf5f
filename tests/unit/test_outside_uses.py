"""Every use of a holder from outside as a whole, of every kind of holder, against eager PyTorch.

The uses are those in which C, or a library, reads what the holder holds. Those that Python does not allow
are left out.
"""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import json
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import thunder_fn as tfn

X = torch.ones(2)


@dataclasses.dataclass
class Row:
    """An object with attributes."""

    a: Any = 1.0
    b: float = 2.0


@dataclasses.dataclass(slots=True)
class Slotted:
    """An object with slots."""

    a: float = 1.0
    b: float = 2.0


def _at(key: Any) -> Callable[[Any], None]:
    return lambda held: held.__setitem__(key, 5)


def _field(held: Any) -> None:
    held.b = 5.0


def _inner(held: Any) -> None:
    held[0][1] = 5.0


def _proxied(held: Any) -> None:
    PROXIED["b"] = 5.0


def _proxy() -> Any:
    PROXIED.clear()
    PROXIED.update(a=1.0, b=2.0)
    return types.MappingProxyType(PROXIED)


PROXIED: dict[str, float] = {}
HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "list": (lambda: [1.0, 2.0], _at(1)),
    "dict": (lambda: {"a": 1.0, "b": 2.0}, _at("b")),
    "set": (lambda: {1.0, 2.0}, lambda held: held.add(5.0)),
    "tuple of a list": (lambda: ([1.0, 2.0],), _inner),
    "deque": (lambda: collections.deque([1.0, 2.0]), _at(1)),
    "counter": (lambda: collections.Counter({"a": 1, "b": 2}), _at("b")),
    "defaultdict": (lambda: collections.defaultdict(float, {"a": 1.0, "b": 2.0}), _at("b")),
    "ordered": (lambda: collections.OrderedDict({"a": 1.0, "b": 2.0}), lambda held: held.move_to_end("a")),
    "chain": (lambda: collections.ChainMap({"a": 1.0}, {"b": 2.0}), lambda held: _at("b")(held.maps[1])),
    "user dict": (lambda: collections.UserDict({"a": 1.0, "b": 2.0}), _at("b")),
    "user list": (lambda: collections.UserList([1.0, 2.0]), _at(1)),
    "proxy": (_proxy, _proxied),
    "namespace": (lambda: types.SimpleNamespace(a=1.0, b=2.0), _field),
    "dataclass": (Row, _field),
    "slots": (Slotted, _field),
    "numpy": (lambda: numpy.array([1.0, 2.0]), _at(1)),
    "array": (lambda: array.array("d", [1.0, 2.0]), _at(1)),
    "bytearray": (lambda: bytearray([1, 2]), _at(1)),
    "memoryview": (lambda: memoryview(bytearray([1, 2])), _at(1)),
}


def _hashed(held: Any) -> float:
    return float(len(repr(held)) + sum(map(ord, repr(held))))


def _positions(held: Any) -> float:
    _, *rest = held
    return float(len(str(rest)) + sum(map(ord, str(rest))))


USES: dict[str, Callable[[Any], Any]] = {
    "equal": lambda held: held == HOLDERS_AT_FIRST[type(held)],
    "unequal": lambda held: held != HOLDERS_AT_FIRST[type(held)],
    "text": _hashed,
    "shown": lambda held: sum(map(ord, f"{held}")),
    "formatted": lambda held: sum(map(ord, "%s" % (held,))),  # noqa: UP031 - another way to format
    "listed": lambda held: sum(map(ord, str(list(held)))),
    "sorted": lambda held: sum(map(ord, str(sorted(held)))),
    "first of it": lambda held: sum(map(ord, str(next(iter(held))))),
    "unpacked": _positions,
    "most": lambda held: sum(map(ord, str(max(held)))),
    "added": lambda held: sum(held),
    "long": len,
    "contains": lambda held: 5 in held,
    "counts": lambda held: held.count(5),
    "values": lambda held: sum(held.values()),
    "items": lambda held: sum(map(ord, str(list(held.items())))),
    "copied": lambda held: sum(map(ord, repr(copy.copy(held)))),
    "deeply copied": lambda held: sum(map(ord, repr(copy.deepcopy(held)))),
    "pickled": lambda held: sum(pickle.dumps(held)),
    "as JSON": lambda held: sum(map(ord, json.dumps(held))),
    "as bytes": lambda held: sum(bytes(held)),
    "a tensor": lambda held: torch.tensor(held).sum(),
    "as a tensor": lambda held: torch.as_tensor(held).sum(),
    "an array": lambda held: float(numpy.asarray(held).sum()),
    "by variables": lambda held: sum(vars(held).values()),
    "spread": lambda held: (lambda *all: sum(map(ord, str(all))))(*held),
    "as keywords": lambda held: (lambda a, b: a + 2 * b)(**held),
    "matched": lambda held: _matched(held),
    "joined": lambda held: sum(map(ord, str([*held, 0]))),
    "merged": lambda held: sum(map(ord, str({**held, "z": 0}))),
    "compared": lambda held: held < type(held)([4.0, 4.0]),
    "zipped": lambda held: sum(a * b for a, b in zip(held, held, strict=True)),
    "replaced": lambda held: dataclasses.replace(held).b,
    "as a dict": lambda held: sum(dataclasses.asdict(held).values()),
}


def _matched(held: Any) -> float:
    match held:
        case {"b": found} | [_, found] | Row(b=found) | Slotted(b=found):
            return float(found)
        case _:
            raise TypeError


HOLDERS_AT_FIRST: dict[type, Any] = {type(held := make()): make() for make, _ in HOLDERS.values()}


def _program(held: Any, use: Callable[[Any], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * use(held)


def _allowed(make: Callable[[], Any], use: Callable[[Any], Any]) -> bool:
    """Test that Python allows it without a warning, and that it does not read where an object lies."""
    held, same = make(), make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return torch.equal(_program(held, use)(X), _program(same, use)(X))
        except Exception:  # noqa: BLE001 - whatever Python raises
            return False


PAIRS = [(holder, use) for holder, (make, _) in HOLDERS.items() for use in USES if _allowed(make, USES[use])]


def test_most_pairs_are_allowed() -> None:
    assert len(PAIRS) > 300, len(PAIRS)


REFUSED = ("set", "proxy", "numpy", "bytearray", "memoryview")
"""Holders that no jitted function takes as an argument."""


def _is_right(holder: str, use: str, *, is_given: bool) -> bool:
    """Compare calls before and after a change of a holder that is closed over or given, jitted and not."""
    (make, change), found = HOLDERS[holder], list[list[torch.Tensor]]()
    for wrap in (lambda f: f, tfn.jit):
        held = make()
        f = wrap(lambda x, given: x * USES[use](given)) if is_given else wrap(_program(held, USES[use]))
        args = (X, held) if is_given else (X,)
        results = [f(*args)]
        change(held)
        found.append([*results, f(*args), f(*args)])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_any_use_reads_counts(holder: str) -> None:
    uses = [use for of, use in PAIRS if of == holder]
    assert not [use for use in uses if not _is_right(holder, use, is_given=False)]


@pytest.mark.parametrize("holder", [one for one in HOLDERS if one not in REFUSED])
def test_what_any_use_reads_of_an_argument_counts(holder: str) -> None:
    uses = [use for of, use in PAIRS if of == holder]
    assert not [use for use in uses if not _is_right(holder, use, is_given=True)]


@pytest.mark.parametrize("holder", REFUSED)
def test_other_holders_are_no_arguments(holder: str) -> None:
    with pytest.raises(tfn.errors.UnsupportedInput, match=r"args\[1\] is a"):
        tfn.jit(lambda x, given: x * len(given))(X, HOLDERS[holder][0]())


def test_tensors_in_an_ordered_dict_whose_keys_were_moved() -> None:
    def f(held: dict[str, torch.Tensor]) -> tuple[list[str], Any, Any]:
        first = next(iter(held.values()))
        held = collections.OrderedDict(held)
        held.move_to_end(next(iter(held)))
        return list(held), collections.OrderedDict((name, one * first) for name, one in held.items()), held

    given = collections.OrderedDict(a=X, b=X * 2, c=X * 3)
    given.move_to_end("a")
    assert str(tfn.jit(f)(given)) == str(f(given))
    loss = lambda held: sum(n * one.sum() for n, one in enumerate(held.values()))
    assert list(tfn.grad(loss)(given)) == ["b", "c", "a"]
    assert str(tfn.grad(loss)(given)) == str(torch.func.grad(loss)(given))


@pytest.mark.parametrize(
    "inside", [lambda held: {"k": [held]}, Row, lambda held: [Row(Row(held))]], ids=["dict", "row", "rows"]
)
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_returned_is_that_of_the_call(holder: str, inside: Callable[[Any], Any]) -> None:
    make, change = HOLDERS[holder]
    given = inside(held := make())
    f = tfn.jit(lambda x: (x * 2, given))
    for step in range(3):
        assert repr(f(X)[1]) == repr(given)
        if step == 1:
            change(held)
