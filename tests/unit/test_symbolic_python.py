"""Python's questions about symbolic numbers: their types, tensors made of them, and numbers among the results."""

from __future__ import annotations

import builtins
import collections
import copy
import enum
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.errors import DataDependentBranch, DataDependentValue, UnsupportedCall
from thunder_fn.jitted import cache_info, jit

Tensor = torch.Tensor


@functools.singledispatch
def _dispatched(n: Any) -> int:
    return 0


@_dispatched.register
def _(n: int) -> int:
    return 1


@_dispatched.register
def _(n: float) -> int:
    return 2


def _matched(n: Any) -> int:
    match n:
        case bool():
            return 1
        case int():
            return 2
        case float():
            return 3
        case _:
            return 4


KINDS: dict[str, Callable[[Any], Any]] = {
    "isinstance": lambda n: (isinstance(n, int), isinstance(n, float), isinstance(n, bool)),
    "class": lambda n: n.__class__ is int,
    "match": _matched,
    "dispatch": _dispatched,
    "equal": lambda n: (type(n) == int, float == type(n), type(n) != bool),  # noqa: E721
    "among": lambda n: (type(n) in (int, bool), type(n) in {float}),
    "table": lambda n: {int: 1, float: 2}[type(n)],
    "copy": lambda n: type(copy.deepcopy([n])[0]) == int,  # noqa: E721
}


@pytest.mark.parametrize("name", KINDS)
def test_types_of_numbers_are_pythons(name: str) -> None:
    f = KINDS[name]
    for mode in ("constant values", "symbolic values"):
        g = jit(lambda x, n: (x * n, f(n)), cache=mode)
        for n in (3, 4, 5, 2.5, 3.5, 4.5):
            assert g(torch.ones(2), n)[1] == f(n)
        assert cache_info(g).misses == (4 if mode == "constant values" else 2)


class _Tables:
    """Holders of what is searched."""

    shared = frozenset((3, 5))

    def __init__(self) -> None:
        self.counts = collections.Counter([3, 5, 5])


TABLES, SMALL, NAMED = _Tables(), {3: "three", 5: "five"}, {3: 1, "3": 2, None: 3}
SEARCHES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "literal": (lambda n: n in {3, 5}, 3),
    "dict": (lambda n: SMALL[n] if n in SMALL and n > 1 else "none", 3),
    "counter": (lambda n: 0.5 ** TABLES.counts[n] if n in TABLES.counts else 1.0, 3),
    "of the class": (lambda n: n in TABLES.shared, 3),
    "other keys": (lambda n: n in NAMED, 2),
    "sum": (lambda n: n + 1 in {4, 6}, 3),
    "large": (lambda n: n in {*range(3, 40, 2)}, 6),
    "numbers that are equal": (lambda n: n in {3.0, 5}, 6),
    "built": (lambda n: n in {n, 2}, 6),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_of_a_table_is_a_decision_about_its_keys(name: str) -> None:
    f, programs = SEARCHES[name]
    g = jit(lambda x, n: (x * n, f(n)), cache="symbolic values")
    for n in (3, 4, 5, 7, 9, 600, 5, 4):
        assert g(torch.ones(2), n)[1] == f(n)
    assert cache_info(g).misses == programs


POWERS: dict[str, Callable[[Any], Any]] = {
    "operator": lambda n: 0.999**n,
    "pow": lambda n: math.pow(0.999, n),
    "squared": lambda n: math.pow(n, 2),
    "two_symbols": lambda n: math.pow(1 / (n + 1), n),
    "to_zero": lambda n: 0.5 ** (n * 1e6),
    "growing": lambda n: 2.0 ** (n / 8),
}


@pytest.mark.parametrize("name", POWERS)
def test_powers_pin_nothing(name: str) -> None:
    f = POWERS[name]
    g = jit(lambda x, n: (x, f(n)), cache="symbolic values")
    for n in (3, 400, 7000, 20):
        mine, its = g(torch.ones(2), n)[1], f(n)
        assert type(mine) is type(its) and mine == its
    assert cache_info(g).misses == 1


@pytest.mark.parametrize("args", [(0.0, -1.0), (-8.0, 1 / 3), (10.0, 400.0), (-2.0, 3.0), (1.0, math.inf)])
def test_powers_raise_what_python_raises(args: tuple[float, float]) -> None:
    for f in (math.pow, lambda a, b: a**b):
        g = jit(lambda x, a, b, f=f: (x, f(a, b)), cache="symbolic values")
        g(torch.ones(2), 2.0, 3.0)
        try:
            its = f(*args)
        except (ArithmeticError, ValueError) as error:
            with pytest.raises(type(error)):
                g(torch.ones(2), *args)
        else:
            mine = g(torch.ones(2), *args)[1]
            assert mine == its and type(mine) is type(its)


def _bound_anew(n: Any) -> Any:
    n = n + 1 if type(n) is int else -9
    return n * 1


IDENTICAL: dict[str, Callable[[Any], Any]] = {
    "bound anew": _bound_anew,
    "is": lambda n: type(n) is int,
    "is_not": lambda n: type(n) is not float,
    "name": lambda n: (kind := type(n)) is int or kind is bool,
    "both": lambda n: type(n) is type(3),  # noqa: UP003
    "expression": lambda n: type(n + 0) is int,
    "subclass": lambda n: issubclass(type(n), int),
    "renamed class": lambda n: type(n) is _INT,
}


@pytest.mark.parametrize("name", IDENTICAL)
def test_the_type_itself_is_asked_of_a_number(name: str) -> None:
    """Nobody hears of `is`: sizes stand for themselves, and a function that asks of a found number is rewritten."""
    f = IDENTICAL[name]
    sized = lambda x: (x + 1, f(x.shape[0]))
    g = jit(sized, cache="symbolic values")
    for rows in (3, 4, 5):
        assert g(torch.ones(rows))[1] == sized(torch.ones(rows))[1]
    given = jit(lambda x, n: (x + 1, f(n)))
    for n in (3, 4, 5):
        assert given(torch.ones(2), n)[1] == f(n)
    found = lambda x: (x, f(x.sum().item()), type(x.sum().item()) is int)
    assert jit(found)(torch.tensor([1, 2]))[1:] == found(torch.tensor([1, 2]))[1:]


def _bound_before(n: Any) -> bool:
    kind = type
    return kind(n) is int


def _beside_a_local(n: Any, kind: Any = type) -> bool:
    return (n, kind(n) is int)[1]


def _of_a_local_beside_another(n: Any) -> bool:
    kinds = _KINDS
    return (n, kinds.kind(n) is int)[1]


def _between_locals(n: Any, number: type = int, kind: Any = type) -> bool:
    return number is kind(n)


_KIND, _INT = type, int


class _Kinds:
    of_class, static = type, staticmethod(type)

    def __init__(self) -> None:
        self.kind: Any = type
        self.inner: Any = self

    def asks(self, n: Any) -> bool:
        return self.kind(n) is int


_KINDS = _Kinds()


HIDDEN: dict[str, Callable[[Any], Any]] = {
    "renamed": lambda n: _KIND(n) is int,
    "both renamed": lambda n: _KIND(n) is _INT,
    "other way": lambda n: _INT is not _KIND(n),
    "bound": _bound_before,
    "beside a local": _beside_a_local,
    "of a local beside another": _of_a_local_beside_another,
    "between locals": _between_locals,
    "attribute": lambda n: _KINDS.kind(n) is int,
    "of self": _KINDS.asks,
    "of attributes": lambda n: _KINDS.inner.inner.kind(n + 0) is int,
    "of a class": lambda n: _Kinds.of_class(n) is int,
    "static": lambda n: _KINDS.static(n) is int,
    "of a module": lambda n: builtins.type(n) is int,
    "given": lambda n: next(map(type, (n,))) is int,
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_type_that_a_rewritten_function_still_asks_for_ends_the_attempts(name: str) -> None:
    """Its copy asks too, and is not copied again: sizes are constants, and a found number is refused."""
    f = HIDDEN[name]
    sized = lambda x: (x + 1, f(x.shape[0]))
    g = jit(sized, cache="symbolic values")
    for rows in (3, 4):
        assert g(torch.ones(rows))[1] == sized(torch.ones(rows))[1]
    with pytest.raises(UnsupportedCall, match="asks by `is` for the class"):
        jit(lambda x: (x, f(x.sum().item())))(torch.tensor([1, 2]))


class _Holder:
    def __init__(self, n: Any) -> None:
        self.n = n

    def asks(self) -> bool:
        return type(self.n) is int

    @property
    def is_int(self) -> bool:
        return int is type(self.n)


class _Slot:
    __slots__ = ("n",)


def _of_slot(n: Any) -> Any:
    slot = _Slot()
    slot.n = n
    return _asks(slot)


class _Sized(torch.nn.Module):
    def forward(self, n: Any) -> bool:
        self.n = n
        return _asks(self)


def _asks(holder: Any) -> bool:
    return type(holder.n) is int


def _asks_call(made: Callable[[], Any]) -> bool:
    return type(made()) is int


HELD: dict[str, Callable[[Any], Any]] = {
    "method": lambda n: _Holder(n).asks(),
    "property": lambda n: _Holder(n).is_int,
    "namespace": lambda n: _asks(types.SimpleNamespace(n=n)),
    "slot": _of_slot,
    "class": lambda n: _asks(type("Held", (), {"n": n})),
    "module": _Sized(),
    "deque": lambda n: _asks_call(collections.deque([n]).pop),
    "set": lambda n: _asks_call({n}.pop),
    "list of lists": lambda n: (lambda held: type(held[0][0][0][0][0][0]) is int)([[[[[[n]]]]]]),
    "partial": lambda n: _asks_call(functools.partial(lambda m: m, n)),
    "closure": lambda n: _asks_call(lambda: n),
    "iterator": lambda n: _asks_call(iter([n]).__next__),
    "generator": lambda n: _asks_call((m for m in (n,)).__next__),
}


@pytest.mark.parametrize("name", HELD)
def test_the_type_of_a_size_that_something_holds(name: str) -> None:
    """Any expression in the code of a user may give a size, whatever holds it."""
    sized = lambda x: (x + 1, HELD[name](x.shape[0]))
    g = jit(sized, cache="symbolic values")
    for rows in (3, 4, 5):
        assert g(torch.ones(rows))[1] is True


MADE: dict[str, Callable[[Any], Any]] = {
    "number": torch.tensor,
    "list": lambda n: torch.tensor([n, n + 1]),
    "mixed": lambda n: torch.tensor([n, 2.5]),
    "nested": lambda n: torch.tensor([[n, 1], [2, n // 2]]),
    "dtype": lambda n: torch.tensor((n,), dtype=torch.float64),
    "as_tensor": lambda n: torch.as_tensor([n]) + torch.as_tensor(n),
}


@pytest.mark.parametrize("name", MADE)
def test_tensors_of_symbols_pin_nothing(name: str) -> None:
    f = MADE[name]
    g = jit(lambda x, n: (x, f(n)), cache="symbolic values")
    for n in (3, -4, 0, 2**40):
        mine, its = g(torch.ones(2), n)[1], f(n)
        assert (mine.dtype, mine.shape, mine.requires_grad) == (its.dtype, its.shape, its.requires_grad)
        assert torch.equal(mine, its)
    assert cache_info(g).misses == 1


def test_tensors_of_sizes_and_of_items() -> None:
    f = lambda x: (torch.tensor(x.shape), torch.tensor([x.max().item(), x.shape[0]]))
    g = jit(f, cache="symbolic values")
    for shape in ((2, 3), (4, 2), (3, 5)):
        x = torch.arange(math.prod(shape)).reshape(shape)
        assert all(map(torch.equal, g(x), f(x)))
    assert cache_info(g).misses == 1


@pytest.mark.parametrize("ragged", [[1, [2]], [[1], 2], [[1], [2, 3]]])
def test_uneven_lists_raise_what_eager_raises(ragged: Any) -> None:
    with pytest.raises(Exception) as expected:
        torch.tensor(ragged)
    with pytest.raises(expected.type):
        jit(lambda n: torch.tensor([*ragged, n][:2]), cache="symbolic values")(3)


def test_too_many_numbers_to_list() -> None:
    assert jit(lambda x: sum(x.tolist()))(torch.arange(64)) == sum(range(64))
    with pytest.raises(DataDependentValue) as caught:
        jit(lambda x: sum(x.tolist()))(torch.arange(65))
    assert message_of(caught.value).splitlines()[::2] == [
        "`tolist` asked for 65 numbers in a traced tensor, and at most 64 ints and floats can be symbols",
        "Keep it a tensor, take the few numbers that are needed before (`x[:3].tolist()`), or pass the list as an argument.",
    ]


class _First(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[: int(x.max())] * len(x)


def _helper(x: Any) -> int:
    return int(x.max().item())


def _made_inside(x: Tensor) -> Tensor:
    def g(y: Tensor) -> int:
        return int(y.max()) + len(y[y > 1])

    return x * g(x)


def _made_elsewhere(k: int) -> Callable[[Tensor], Tensor]:
    def longer() -> Callable[[Tensor], Tensor]:
        return lambda y: y[: max(len(y[y > 1]), k)]

    return longer()


BUILTINS: dict[str, Callable[[Tensor], Any]] = {
    "made_elsewhere": lambda x: _made_elsewhere(1)(x),
    "trunc": lambda x: x[: math.trunc(x.max().double().item() * 0.5)],
    "int": lambda x: x[: int(x.max().item())],
    "int_of_tensor": lambda x: x.new_zeros(int(x.sum())),
    "int_of_float": lambda x: x * int(x.double().mean().item() * 1.5),
    "int_of_text": lambda x: x * int(x.max()) * int("11", base=2),
    "float": lambda x: x * float(x.max()),
    "len": lambda x: x * len(x[x > 1]) + len([x, x]),
    "type": lambda x: x * (2 if type(x.sum().item()) is int else 3) + (type([x]) is list),
    "max": lambda x: x[: max(x.max().item() - 1, 1)],
    "min": lambda x: x[: min(int(x.max()), len(x[x > 1]))],
    "key": lambda x: x.new_zeros(max(int(x.max()), 2) + max([1, 3], key=lambda n: -n)),
    "module": _First(),
    "helper": lambda x: x[: _helper(x)],
    "made_inside": _made_inside,
    "defaults": lambda x, k=3: x.new_zeros(int(x.sum())) + k,
}


@pytest.mark.parametrize("name", BUILTINS)
def test_builtins_of_found_numbers_are_symbols(name: str) -> None:
    """As under torch.compile, one program serves all numbers."""
    f = BUILTINS[name]
    g = jit(f)
    for x in (torch.tensor([1, 2, 1]), torch.tensor([3, 0, 1]), torch.tensor([2, 2, 2])):
        mine, its = g(x), f(x)
        assert torch.equal(mine, its) and mine.dtype == its.dtype
    assert cache_info(g).misses == 1


def test_a_function_that_is_made_in_each_attempt_and_needs_a_number_ends() -> None:
    """Each attempt to trace made another function, which was to be replaced in the next one, for ever."""

    def made(k: int) -> Callable[[Tensor], Any]:
        def g(x: Tensor) -> Any:
            return [x.sum()] * max(len(x[x > 1]), k)

        return g

    with pytest.raises(DataDependentBranch):
        jit(lambda x: made(1)(x))(torch.tensor([1, 2, 1]))


def _rows_of_two(x: Tensor) -> Tensor:
    def mean(y: Tensor) -> Tensor:
        return y.sum() / len(y)

    return mean(x) + mean(x[1:])


class _Mean(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0) / len(x)


LENGTHS: dict[str, Any] = {
    "factor": lambda x: x * len(x),
    "slice": lambda x: x[: len(x) // 2],
    "shape": lambda x: x.new_zeros(max(len(x), 2)),
    "made inside": _rows_of_two,
    "module": _Mean(),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_of_arguments_are_symbols(name: str) -> None:
    """`len(x)` is as good as `x.shape[0]`: a second program serves all lengths."""
    f = LENGTHS[name]
    g = jit(f)
    for rows in (3, 4, 5, 6):
        x = torch.arange(2.0 * rows).reshape(rows, 2)
        assert torch.equal(g(x), f(x))
    assert cache_info(g).misses == 2


def test_lengths_that_python_decides_by() -> None:
    """Each list is as long as its tensor, so each length has a program; a comparison serves many."""
    as_list = jit(lambda x: torch.tensor([1.0] * len(x)))
    compared = jit(lambda x: x * 2 if len(x) > 4 else x * 3)
    for rows in (3, 4, 5, 6):
        x = torch.ones(rows)
        assert torch.equal(as_list(x), x) and torch.equal(compared(x), x * (2 if rows > 4 else 3))
    assert (cache_info(as_list).misses, cache_info(compared).misses) == (4, 3)


def test_builtins_of_other_threads_and_calls_are_pythons() -> None:
    f = lambda x: (type(_helper(x)), x)
    code = _helper.__code__
    assert jit(lambda x: f(x))(torch.tensor([1, 2]))[0] is int
    assert _helper.__code__ is code and type(_helper(torch.tensor([3]))) is int


def test_found_numbers_that_python_decides_by() -> None:
    for f in (lambda x: [x] * int(x[0].item()), lambda x: [int(x.max()) for _ in range(int(x.max()))]):
        with pytest.raises(tfn.errors.DataDependentBranch):
            jit(f)(torch.tensor([1, 2]))


def test_numbers_are_results_under_autograd() -> None:
    """They were expressions of the trace."""
    f = lambda x, n: {"y": x * n, "size": x.shape[0] + 1, "stride": x.stride(), "number": -n, "shape": x.shape}
    g = jit(f, cache="symbolic values")
    for rows, n in ((3, 2.0), (5, 4.0), (2, -0.5)):
        x = torch.randn(rows, 2, requires_grad=True)
        mine, its = g(x, n), f(x, n)
        assert torch.equal(mine.pop("y"), its.pop("y"))
        assert mine == its and [type(value) for value in mine.values()] == [type(value) for value in its.values()]
    assert cache_info(g).misses == 1


def test_a_zero_keeps_its_sign() -> None:
    f = lambda n: (-n, math.copysign(1.0, n), -n * 2.0)
    g = jit(f, cache="symbolic values")
    for n in (0.0, -0.0, 1.0, 0.0):
        assert [repr(value) for value in g(n)] == [repr(value) for value in f(n)]


class Color(enum.IntEnum):
    RED = 1


VALUES = (
    torch.float32,
    torch.device("cpu"),
    torch.strided,
    torch.contiguous_format,
    Color.RED,
    slice(0, 2),
    slice(False, 2),
    range(0, 6, 2),
    range(0, 5, 2),
    np.float64(2.5),
    np.int64(3),
    np.float32(-0.0),
    np.float32(0.0),
    np.float32("nan"),
    np.bool_(True),
    torch.Size([1, 2]),
    Ellipsis,
)


@pytest.mark.parametrize("mode", ["constant values", "symbolic values"])
def test_values_of_all_kinds_come_in_and_go_out(mode: str) -> None:
    g = jit(lambda x, n: (x, n, repr(n), [n]), cache=mode)
    for _ in range(2):
        for value in VALUES:
            for rows in (2, 3):
                _, mine, text, (again,) = g(torch.ones(rows), value)
                assert type(mine) is type(again) is type(value) and text == repr(mine) == repr(value)


def test_generic_types_ask_for_no_number() -> None:
    """Older Pythons run `typing_extensions` where a generic type is written, which asks for the types of its parts."""
    pytest.importorskip("typing_extensions")

    def f(x: torch.Tensor) -> torch.Tensor:
        kind = typing.TypeVar("kind")
        pair = tuple[kind, typing.Callable[[kind], kind]]  # type: ignore[valid-type]
        return x * int(x.sum()) * len(typing.get_args(pair))

    assert torch.equal(jit(f)(torch.ones(2)), f(torch.ones(2)))
