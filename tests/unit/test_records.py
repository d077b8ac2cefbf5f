"""Dataclasses and objects of plain classes, as results and in places outside: all that they hold counts, as for Python."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.capture import stored

Tensor = torch.Tensor


@dataclasses.dataclass
class Plain:
    k: Any
    m: Any = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    k: Any
    m: Any = 1


@dataclasses.dataclass(slots=True)
class Slots:
    k: Any
    m: Any = 1


@dataclasses.dataclass(kw_only=True, eq=False)
class Keywords:
    k: Any
    m: Any = 1


@dataclasses.dataclass
class More:
    """Has attributes beside its fields, and a field that `__init__` does not take."""

    k: Any
    m: Any = 1
    late: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.late, self.twice, self.name, self.scale = self.k * 3, self.k * 2, "more", 2.5

    @functools.cached_property
    def half(self) -> Any:
        return self.k / 2


class Derived(More):
    pass


class Bare:
    """No dataclass: an object is what its attributes are."""

    def __init__(self, k: Any, m: Any = 1) -> None:
        self.k, self.m = k, m

    @property
    def double(self) -> Any:
        return self.k * 2


class BareSlots:
    __slots__ = ("k", "m")

    def __init__(self, k: Any, m: Any = 1) -> None:
        self.k, self.m = k, m


class Both(BareSlots):
    """Has slots of its base and attributes beside them."""

    def __init__(self, k: Any, m: Any = 1) -> None:
        super().__init__(k, m)
        self.twice, self.name = k * 2, "both"

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value if name != "m" else (value, "set by the class")[0])


class Namespace(SimpleNamespace):
    def __init__(self, k: Any = None, m: Any = 1) -> None:
        super().__init__(k=k, m=m)


CLASSES = [Plain, Frozen, Slots, Keywords, More, Derived]
OBJECTS = [Bare, BareSlots, Both, Namespace]


def plain(value: Any) -> Any:
    """The value as numbers and names, in its order."""
    if isinstance(value, Tensor):
        assert type(value) is Tensor, value
        return value.tolist(), value.requires_grad
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(item) for item in value]
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]
    if dataclasses.is_dataclass(value):
        names = [entry.name for entry in dataclasses.fields(value)]
        names = dict.fromkeys([*getattr(value, "__dict__", {}), *names])
        return type(value).__name__, [(name, plain(getattr(value, name))) for name in names]
    if isinstance(value, (*OBJECTS, Cell)):
        names = [
            *getattr(type(value), "__slots__", ()),
            *getattr(BareSlots, "__slots__", ()),
            *getattr(value, "__dict__", {}),
        ]
        return type(value).__name__, [(name, plain(getattr(value, name))) for name in names if hasattr(value, name)]
    return type(value).__name__, value


def make(cls: type, k: Any, m: Any = 1) -> Any:
    return cls(k=k, m=m)


# ---- attributes beside the fields ----


def with_extra(value: Any, scale: float) -> Any:
    value.extra, value.scale = value.k + 10, scale
    return value


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "a tensor": lambda d: d.twice + d.k,
    "a number": lambda d: d.k * d.scale,
    "a name": lambda d: d.k * 2 if d.name == "more" else d.k,
    "a field of none": lambda d: d.late + 1,
    "a cached property": lambda d: d.half + d.half,
    "whether it is there": lambda d: d.k * (100 if hasattr(d, "extra") else 1),
    "its value or none": lambda d: d.k + getattr(d, "extra", 0),
    "all of them": lambda d: sum(value for value in vars(d).values() if isinstance(value, Tensor)) + len(vars(d)),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_attributes_beside_the_fields_of_an_argument(name: str) -> None:
    f = QUESTIONS[name]
    jitted = tfn.jit(f)
    for call, how in enumerate(("bare", "bare", "extra", "other", "bare")):
        one, other = (More(torch.arange(3.0) + call) for _ in range(2))
        for value in (one, other):
            value.name = "more" if call % 2 else "less"
            if how != "bare":
                with_extra(value, 2.5 if how == "extra" else 7.5)
        torch.testing.assert_close(jitted(one), f(other))
        vars(other).pop("half", None)  # what a copy has cached is lost
        assert plain(one) == plain(other)


def test_attributes_beside_the_fields_of_what_is_differentiated() -> None:
    """A cached property is a value of its own, of which torch.func knows nothing: PyTorch's autograd is the oracle."""
    d = More(torch.arange(3.0), torch.ones(()))
    f = lambda d: (d.k * d.twice).sum() + (d.late**2).sum()
    found = tfn.grad(f)(d)
    assert type(found) is More
    for name, want in {"k": d.twice, "twice": d.k, "late": 2 * d.late}.items():
        torch.testing.assert_close(getattr(found, name), want)


def set_anew(value: Any) -> Any:
    """The attribute is the last one now."""
    del value.k
    value.k = value.extra
    return value


def asked_for_half(value: More) -> More:
    assert value.half is not None
    return value


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "made": lambda x: More(x.sin()),
    "with a cached property": lambda x: asked_for_half(More(x.sin())),
    "derived": lambda x: Derived(x.sin(), 3),
    "with others": lambda x: with_extra(More(x + 1), 4.5),
    "in a list": lambda x: [More(x), Plain(x * 2)],
    "in one another": lambda x: Plain(More(x), Frozen(x + 1)),
    "replaced": lambda x: dataclasses.replace(Frozen(x), k=x * 2),
    "less": lambda x: (lambda d: (delattr(d, "late"), d)[1])(More(x)),
    "set anew": lambda x: set_anew(with_extra(Plain(x + 1, "m"), 4.5)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_attributes_beside_the_fields_of_a_result(name: str) -> None:
    f = RESULTS[name]
    jitted = tfn.jit(f)
    for call in range(2):
        x = torch.arange(3.0) + call
        if name == "less":
            found, want = (vars(g(x)) for g in (jitted, f))
        else:
            found, want = jitted(x), f(x)
        assert plain(found) == plain(want)


# ---- objects of plain classes ----


class Cell:
    """Holds what a step has found, and leads to other objects."""

    def __init__(self, value: Any, *others: Any, **more: Any) -> None:
        self.value, self.others = value, others
        self.__dict__.update(more)


OUTSIDE = ["from", "outside"]
OBJECT_RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "alone": lambda x: Bare(x.sin()),
    "in a list": lambda x: [Bare(x, [x + 1, {"a": x * 2}]), Both(x * 2)],
    "in a dict": lambda x: {"b": BareSlots(x), "a": Namespace(x + 1, "name")},
    "in one another": lambda x: Cell(Bare(x, Cell(x * 2)), Plain(Bare(x)), deep=[[Cell(x)]]),
    "in a dataclass": lambda x: Plain(Bare(x), {"c": Cell(x)}),
    "with what is outside": lambda x: Cell(x, OUTSIDE, name="n"),
    "an argument in it": lambda x: Cell(x, x.view(-1)),
    "others between tensors": lambda x: Cell("a", name="b", y=x * 2, of=OUTSIDE, z=Bare(x), flag=True),
    "set anew": lambda x: set_anew(Cell(x, k=x * 2, name="n", extra=x + 1)),
    "a number of the sizes": lambda x: Cell(x, x.shape[0], x.numel() * 2),
    "written to later": lambda x: (lambda c: (c.others[0].add_(1), c)[1])(Cell(x, x * 2)),
}


@pytest.mark.parametrize("how", ["jit", "grad", "compile", "no grad"])
@pytest.mark.parametrize("name", OBJECT_RESULTS)
def test_objects_of_plain_classes_among_the_results(name: str, how: str) -> None:
    f = OBJECT_RESULTS[name]
    ours: Any = {
        "jit": tfn.jit(f),
        "compile": tfn.compile(f),
        "grad": lambda x: tfn.grad(lambda x: (x.sum(), f(x)), has_aux=True)(x)[1],
        "no grad": torch.no_grad()(tfn.jit(f)),
    }[how]
    before = None
    for size in (3, 3, 4):
        x = torch.arange(float(size))
        found, want = ours(x), f(x.clone())
        assert found is not before
        before = found
        assert plain(found) == plain(want)


def test_an_object_that_leads_to_itself_is_refused() -> None:
    def f(x: Tensor) -> Any:
        cell = Cell(x * 2)
        cell.others = ([cell],)
        return cell

    with pytest.raises(tfn.errors.UnsupportedOutput, match="Cell that holds traced tensors leads to itself"):
        tfn.jit(f)(torch.ones(2))


# ---- records that a function makes and stores ----


def appended(s: Any, x: Tensor, cls: type) -> Tensor:
    s.log.append(make(cls, x * 2, len(s.log)))
    return x * len(s.log)


def renewed(s: Any, x: Tensor, cls: type) -> Tensor:
    s.d = make(cls, s.d.k + x, 2)
    return s.d.k * 2


def counted(s: Any, x: Tensor, cls: type) -> Tensor:
    s.d = make(cls, s.d.k * 0.9 + x, s.d.m + 1)
    return s.d.k * s.d.m


def nested(s: Any, x: Tensor, cls: type) -> Tensor:
    s.d = make(cls, s.d.k + x, [make(Plain, x * 3), {"x": x}])
    return s.d.m[0].k + s.d.m[1]["x"]


def by_key(s: Any, x: Tensor, cls: type) -> Tensor:
    s.table["d"] = make(cls, s.table["d"].k + x)
    return s.table["d"].k * 2


def replaced(s: Any, x: Tensor, cls: type) -> Tensor:
    if type(s.d) in CLASSES:
        s.d = dataclasses.replace(s.d, k=s.d.k + x)
    else:
        s.d = copy.copy(s.d)
        s.d.k = s.d.k + x
    return s.d.k * 2


def twice(s: Any, x: Tensor, cls: type) -> Tensor:
    s.d = make(cls, s.d.k + x)
    s.d = make(cls, s.d.k * 2)
    return s.d.k + 1


def not_read(s: Any, x: Tensor, cls: type) -> Tensor:
    s.last = make(cls, x * 2)
    return x + 1


STORES = [appended, renewed, counted, nested, by_key, replaced, twice, not_read]


def fresh(cls: type) -> Any:
    return SimpleNamespace(d=make(cls, torch.zeros(2)), log=[], table={"d": make(cls, torch.ones(2))}, last=None)


@pytest.mark.parametrize("how", ["closed", "argument", "grad"])
@pytest.mark.parametrize("cls", [*CLASSES, *OBJECTS])
@pytest.mark.parametrize("store", STORES)
def test_records_that_a_function_stores(store: Callable[..., Tensor], cls: type, how: str) -> None:
    ours, theirs = fresh(cls), fresh(cls)
    closed, given = (lambda x: store(ours, x, cls)), (lambda s, x: store(s, x, cls))
    jitted: Any = tfn.jit(closed if how == "closed" else given)
    for call in range(3):
        x = torch.full((2,), call + 1.0)
        want = store(theirs, x, cls)
        if how == "grad":
            found = tfn.grad(lambda x: (lambda y: (y.sum(), y))(store(ours, x, cls)), has_aux=True)(x)[1]
        else:
            found = jitted(x) if how == "closed" else jitted(ours, x)
        torch.testing.assert_close(found, want)
        assert plain(vars(ours)) == plain(vars(theirs))


@dataclasses.dataclass
class Linked:
    k: Any
    next: Any = None
    all: Any = dataclasses.field(default_factory=list)


def ring(k: Tensor) -> Linked:
    """Records that lead to one another."""
    one, other = Linked(k), Linked(k * 2)
    one.next, other.next = other, one
    for record in (one, other):
        record.all += [one, other, {"both": (one, other)}]
    return one


@pytest.mark.parametrize("how", ["grad", "trace"])
def test_records_that_lead_to_one_another(how: str) -> None:
    s = SimpleNamespace(ring=ring(torch.ones(2)), k=None, log=[])

    def f(x: Tensor) -> Tensor:
        s.k = s.ring.next.next.all[1].k * x
        s.log.append(Plain(x * 2))
        return (s.k + s.ring.k).sum()

    x = torch.arange(2.0)
    if how == "trace":
        assert len(tfn.trace(lambda x: s.ring.next.k * x, x).equations) == 1
        return
    for call in range(3):
        torch.testing.assert_close(tfn.grad(f)(x), torch.full((2,), 2.0))
        assert torch.equal(s.k, 2 * x) and torch.equal(s.log[call].k, x * 2)


# ---- records of dims ----


@pytest.mark.parametrize("cls", [Plain, Frozen, Slots, Keywords])
def test_dims_of_a_batch_are_records_too(cls: type) -> None:
    """A record of dims is a prefix of a record of tensors, as a dict of dims is one of a dict."""
    d = make(cls, torch.randn(3, 4), {"a": torch.randn(4), "b": torch.randn(4, 3)})
    f = lambda d: make(cls, d.k + d.m["a"], [d.m["b"].sum(), d.m["a"] * 2])
    in_dims, out_dims = make(cls, 0, {"a": None, "b": 1}), make(cls, 1, [0, None])
    found = tfn.vmap(f, in_dims=(in_dims,), out_dims=out_dims)(d)
    torch.testing.assert_close(found.k, (d.k + d.m["a"]).T)
    torch.testing.assert_close(found.m, [d.m["b"].sum(0), d.m["a"] * 2])
    with pytest.raises(tfn.errors.VmapError, match="in_dims is not compatible"):
        tfn.vmap(f, in_dims=(make(cls, 0, {"a": None}),))(d)


# ---- results without tensors that a caller may change ----


class Notes:
    """An object of the user's with plain data in it."""

    names: list[Any]

    def __init__(self) -> None:
        self.names, self.count = ["first"], 1

    def __repr__(self) -> str:
        return repr(vars(self))


class Row(list[Any]):
    """A list of the user's."""


class Bag:
    """Gives what it holds in a way that no reading of code finds."""

    def __init__(self, *held: Any) -> None:
        self._held = collections.ChainMap(dict(enumerate(held)))

    def __getitem__(self, number: int) -> Any:
        return self._held[number]


MUTABLE: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "set": (lambda: {1, 2}, lambda made: made.add(7)),
    "bytearray": (lambda: bytearray(b"a"), lambda made: made.append(7)),
    "object": (Notes, lambda made: made.names.append("second")),
    "list of a class": (lambda: Row([1, 2]), lambda made: made.append(7)),
    "object in a list of a class": (lambda: Row([Notes()]), lambda made: made[0].names.clear()),
}


@pytest.mark.parametrize("name", MUTABLE)
def test_results_that_the_caller_changes_are_made_anew(name: str) -> None:
    make, change = MUTABLE[name]

    def f(x: Tensor) -> Any:
        made = make()
        return x + 1, made, made

    jitted, known = tfn.jit(f), repr(make())
    for _ in range(3):
        _, one, two = jitted(torch.ones(2))
        assert repr(one) == known and one is two
        change(one)


KEPT, HOLDER = {1, 2}, SimpleNamespace(notes=Notes(), rows={"a": Row([1])})


def test_results_from_outside_are_those_very_objects() -> None:
    own, hidden = Notes(), Bag(Notes(), [Notes()])

    def f(x: Tensor, notes: Notes) -> Any:
        return x + 1, KEPT, HOLDER.notes, HOLDER.rows["a"], own, notes, hidden[0], hidden[1][0]

    jitted, given = tfn.jit(f), Notes()
    for _ in range(2):
        expected, found = f(torch.ones(2), given), jitted(torch.ones(2), given)
        assert all(one is two for one, two in zip(expected[1:], found[1:], strict=True))


def test_an_argument_that_is_filled_and_returned() -> None:
    """An object that holds traced tensors may be a result if it is from outside: it gets them in each call."""

    def f(rows: Row, notes: Notes, x: Tensor) -> Any:
        rows.append(x * 2)
        notes.last = x * 3  # type: ignore[attr-defined]
        return rows, notes, x + 1

    jitted = tfn.jit(f)
    for _ in range(2):
        known, found = (Row([1]), Notes()), (Row([1]), Notes())
        one, two = f(*known, torch.ones(2)), jitted(*found, torch.ones(2))
        assert two[0] is found[0] and two[1] is found[1] and repr(one) == repr(two)


# ---- large tables of records outside ----


@pytest.mark.parametrize("cls", [Plain, Bare])
def test_a_capture_does_not_look_into_all_records_of_a_table(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that the function leaves alone holds nothing of the trace."""
    looks = list[Any]()
    for name in ("content_of", "fields_of"):
        plain = getattr(stored, name)
        monkeypatch.setattr(stored, name, lambda value, plain=plain: (looks.append(value), plain(value))[1])

    def count(size: int) -> int:
        record = lambda: make(cls, 2.0, [make(cls, 3.0, {"a": [make(cls, 4.0)]}) for _ in range(3)])
        table = {f"{number}": record() for number in range(size)}
        looks.clear()
        tfn.trace(lambda x: x * table["3"].k + len(table["3"].m), torch.ones(2))
        return len(looks)

    assert count(200) <= count(10) + 10


# ---- a container that a result holds twice ----


@dataclasses.dataclass
class Twice:
    a: Any
    b: Any = None


def an_object(x: Tensor) -> Any:
    made = Notes()
    made.names = [x]
    return made


MADE: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda x: [x + 1],
    "dict": lambda x: {"b": x + 1, "a": [x]},
    "empty": lambda x: [],
    "numbers": lambda x: [1, 2.0, None],
    "default dict": lambda x: collections.defaultdict(list, {3: [x], 1: [x]}),
    "ordered dict": lambda x: collections.OrderedDict(z=[x], a=x),
    "record": lambda x: Twice([x + 1]),
    "object": an_object,
}
HELD: dict[str, Callable[[Any, Tensor], Any]] = {
    "pair": lambda made, x: (made, x, made),
    "dict": lambda made, x: {"z": made, "b": 3, "a": (x, made)},
    "nested": lambda made, x: (outer := Twice(made, (made, x)), Twice(outer, made), outer),
    "once": lambda made, x: (made, [x], [x]),
}


def identities(tree: Any, known: dict[int, int]) -> Any:
    """The parts of a result, with a number for each object that may be changed."""
    if isinstance(tree, Tensor):
        return tree.tolist()
    number = known.setdefault(id(tree), len(known)) if isinstance(tree, (list, dict, Twice, Notes)) else None
    parts = vars(tree) if isinstance(tree, (Twice, Notes)) else tree
    if isinstance(parts, dict):
        return number, type(tree), [(key, identities(item, known)) for key, item in parts.items()]
    return (number, [identities(item, known) for item in parts]) if isinstance(parts, (list, tuple)) else tree


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("made", MADE)
def test_what_a_result_holds_twice_is_one_object(made: str, held: str) -> None:
    """Each place had an object of its own."""
    f = lambda x: HELD[held](MADE[made](x), x)
    jitted = tfn.jit(f)
    for x in (torch.ones(2), torch.zeros(2), torch.ones(2, requires_grad=True)):
        if made == "object" and held == "nested":
            continue  # records around objects are made for each place
        assert identities(jitted(x), {}) == identities(f(x), {})
