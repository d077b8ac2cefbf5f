"""Statements that change Python's objects: every call leaves what plain Python leaves, and gives what it gives.

Each statement stands in a function that is called four times, with a change of the objects in between. Oracles are the
function itself for `jit`, and `torch.func.grad` for `grad` in Python, which keeps its capture.
"""

import array
import collections
import copy  # noqa: F401 - used by statements
import dataclasses
import functools  # noqa: F401 - used by statements
import linecache
import operator  # noqa: F401 - used by statements
import types
import warnings
import weakref  # noqa: F401 - used by statements
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.errors import UnsupportedCall

X = torch.tensor([1.0, 2.0])


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Mixed(Slotted):
    """With a slot and a `__dict__`."""


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.part = torch.nn.Identity()


class Overridden:
    def __init__(self) -> None:
        self.n = 0

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


class Property:
    def __init__(self) -> None:
        self.held = 0

    @property
    def n(self) -> int:
        return self.held

    @n.setter
    def n(self, value: int) -> None:
        self.held = value


class Dict(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)


class List(list[Any]):
    pass


class Class:
    n = 0
    table: ClassVar[dict[str, Any]] = {}


class Meta(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        type.__setattr__(cls, name, value)


class OfMeta(metaclass=Meta):
    n = 0


@dataclasses.dataclass
class Record:
    n: int = 0
    l: list[Any] = dataclasses.field(default_factory=list)  # noqa: E741


class Callee:
    n = 0

    def __call__(self) -> None:
        self.n += 1


class Context:
    n = 0

    def __enter__(self) -> "Context":
        self.n += 1
        return self

    def __exit__(self, *error: Any) -> None:
        self.n += 10


def same(value: Any) -> Any:
    return value


def by_name(*, value: Any) -> Any:
    return value


def state() -> Any:
    return types.SimpleNamespace(
        n=2,
        other=0,
        flag=True,
        d={},
        l=[],
        numbers=[3, 1, 2],
        deque=collections.deque(maxlen=3),
        counter=collections.Counter(),
        default=collections.defaultdict(int),
        ordered=collections.OrderedDict(a=1, b=2),
        set=set(),
        slotted=Slotted(),
        mixed=Mixed(),
        module=Module(),
        over=Overridden(),
        property=Property(),
        Dict=Dict(),
        List=List(),
        record=Record(),
        callee=Callee(),
        context=Context(),
        array=array.array("i", [0]),
        bytes=bytearray(b"a"),
        nested={"a": {"b": [0]}},
        chained=collections.ChainMap({}, {}),
        wrapped=collections.UserDict(),
    )


STATEMENTS = """
s.n += 1
s.n = s.n + 1
s.n -= 1
s.n = 5
s.n, s.other = s.other, s.n + 1
s.d["k"] = 1
s.d["k"] = s.d.get("k", 0) + 1
s.d.update(k=1)
s.d |= {"a": s.n}
s.d.pop("k", None)
s.l.append(1)
list(map(s.l.append, [1, 2]))
[s.l.append(i) for i in range(2)]
s.l += [1]
s.l[:] = [1, 2]
s.l.extend(range(2))
s.l = s.l + [1]
s.deque.append(1)
s.deque.rotate(1); s.deque.append(s.n)
s.counter["a"] += 1
s.counter.update("abc")
s.default["a"] += 1
s.default["x"]
s.ordered.move_to_end("a")
s.set.add(s.n); s.n += 1
s.set |= {1}
s.slotted.n += 1
s.slotted.n = 7
Slotted.n.__set__(s.slotted, 5)
if hasattr(s.slotted, "n"): del s.slotted.n
s.mixed.n += 1
s.mixed.n = 7
s.mixed.other = s.mixed.n; s.mixed.n = 4
if hasattr(s.mixed, "n"): delattr(s.mixed, "n")
s.module.n += 1
s.module.n = 7
s.module.train(not s.module.training)
s.module.train(not s.module.training); s.n = s.n + 1
s.module.part.train(not s.module.training); s.l.append(1)
if hasattr(s.module, "n"): del s.module.n
s.over.n += 1
s.over.n = 3
s.property.n += 1
s.property.n = 4
s.Dict["k"] = s.Dict.get("k", 0) + 1
s.List.append(1)
s.List += [1]
Class.n += 1
Class.table["k"] = Class.table.get("k", 0) + 1
OfMeta.n += 1
setattr(OfMeta, "n", OfMeta.n + 2)
s.record.n += 1
s.record.l.append(1)
s.record = dataclasses.replace(s.record, n=s.record.n + 1)
s.callee()
with s.context: pass
s.array[0] += 1
s.array.append(1)
s.bytes.extend(b"x")
s.nested["a"]["b"][0] += 1
s.nested["a"] = {"b": [s.nested["a"]["b"][0] + 1]}
s.chained["k"] = s.chained.get("k", 0) + 1
s.wrapped["k"] = s.wrapped.get("k", 0) + 1
setattr(s, "n", s.n + 1)
setattr(s, "new", 1)
delattr(s, "flag") if hasattr(s, "flag") else setattr(s, "flag", 1)
if hasattr(s, "flag"): del s.flag
if hasattr(s, "flag"): object.__delattr__(s, "flag")
if hasattr(s, "flag"): s.__delattr__("flag")
if s.flag is not None: s.new = s.flag; del s.flag; s.flag = None
object.__setattr__(s, "n", s.n + 1)
s.__dict__["n"] = s.n + 1
vars(s).update(n=s.n + 1)
operator.setitem(s.d, "k", s.d.get("k", 0) + 1)
s.l = operator.iadd(s.l, [1])
functools.reduce(lambda a, b: (a.append(b), a)[1], [1, 2], s.l)
sorted([1, 2], key=lambda v: s.l.append(v) or v)
max([1, 2], key=lambda v: s.d.__setitem__(v, s.n) or v)
s.numbers.sort()
s.numbers.reverse()
s.numbers.insert(0, 9)
s.numbers.pop()
del s.numbers[0:1]
s.numbers[0], s.numbers[1] = s.numbers[1], s.numbers[0]
dict.__setitem__(s.d, "k", s.d.get("k", 0) + 1)
dict.update(s.d, k=len(s.d))
list.append(s.l, 1)
(lambda: s.l.append(1))()
any(s.l.append(i) for i in range(2))
s.tmp = 1; del s.tmp
copy.copy(s.l).append(1)
t = copy.deepcopy(s.record); t.n += 1; t.l.append(1)
t = Property(); t.n = 5; t.n += 1
t = Dict(); t["a"] = 1; t.update(b=2)
t = Overridden(); t.n = 3
t = collections.OrderedDict(s.ordered); t.move_to_end("a"); t["z"] = 1
t = types.SimpleNamespace(**vars(s)); t.n += 1
t = type("T", (), {})(); t.n = 1; s.n += t.n
t = [s.l]; t[0].append(1)
t = (s,); t[0].n += 1
t = {"s": s}; t["s"].n += 1
t = weakref.ref(s.record); t().n += 1
t = functools.partial(setattr, s, "n"); t(s.n + 1)
t = s.l.append; t(1)
t = operator.methodcaller("append", 1); t(s.l)
t = operator.attrgetter("record")(s); t.n += 1
t = getattr(s, "rec" + "ord"); t.n += 1
t = [o for o in (s.record, s.callee)][0]; t.n += 1
t = max([s.record], key=lambda o: o.n); t.n += 1
t = dict(a=s.record)["a"]; t.n += 1
t = list(zip([s.record], [1]))[0][0]; t.n += 1
t = next(iter([s.record])); t.n += 1
t = copy.copy(s.nested); t["a"]["b"][0] += 1
t = sorted([s.record], key=id)[0]; t.n += 1
t = functools.reduce(lambda a, b: b, [s.callee, s.record]); t.n += 1
t = same(s.record); t.n += 1
t = list(map(same, [s.record]))[0]; t.n += 1
t = by_name(value=s.record); t.n += 1
t, *_ = [s.record, 1]; t.n += 1
for t in [s.record]: t.n += 1
for k, t in {"a": s.record}.items(): t.n += 1
[setattr(t, "n", t.n + 1) for t in [s.record]]
""".strip().splitlines()


def function(statement: str, s: Any, result: str) -> Callable[..., Any]:
    """A function that runs the statement, as a file would have it."""
    name = f"<state: {statement}>"
    code = f"def f(x):\n    {statement}\n    return {result}\n"
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
    found: dict[str, Any] = {}
    exec(compile(code, name, "exec"), globals() | {"s": s}, found)
    return found["f"]


def content(value: Any, depth: int = 5) -> Any:
    """Take an object apart: its parts, in order."""
    if depth == 0 or isinstance(value, (int, str, bytes, type(None))):
        return value
    if isinstance(value, collections.ChainMap):
        value = value.maps
    if isinstance(value, dict):
        return [(key, content(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, (list, tuple, collections.deque, array.array, bytearray)):
        return [content(item, depth - 1) for item in value]
    if isinstance(value, set):
        return sorted(value)
    return getattr(value, "n", None) if type(value) is Slotted else content(fields(value), depth - 1)


def fields(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.nn.Module):
        return {name: it for name, it in vars(value).items() if name in ("n", "training")} | dict(
            value.named_children()
        )
    return {**vars(value), "slot": getattr(value, "n", None)} if isinstance(value, Mixed) else vars(value)


def change(s: Any) -> None:
    """Change the objects from outside."""
    s.n, s.flag, s.new, s.numbers[:] = 11, 3, 0, [7, 5, 6]
    s.d["k"], s.ordered["c"] = 50, 1
    for one in (s.record, s.over, s.slotted, s.mixed, s.module, s.property, s.callee, s.context, Class, OfMeta):
        one.n = 9


def calls(statement: str, result: str, transform: Callable[..., Any], *, again: bool) -> list[Any]:
    """The results of four calls, and what they leave."""
    Class.n = OfMeta.n = 0
    Class.table.clear()
    s, found = state(), list[Any]()
    f = function(statement, s, result)
    transformed = transform(f)
    for i in range(4):
        value = (transform(f) if again else transformed)(X)
        found.append((value.tolist(), content(s), Class.n, dict(Class.table), OfMeta.n))
        if i == 2:
            change(s)
    return found


@pytest.mark.parametrize("statement", STATEMENTS)
def test_every_call_leaves_what_python_leaves(statement: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for result in ("(x * x).sum() * s.n", "(x * x).sum()"):
            assert calls(statement, result, tfn.jit, again=False) == calls(statement, result, same, again=False)
            expected = calls(statement, result, torch.func.grad, again=True)
            assert calls(statement, result, tfn.grad, again=True) == expected


@pytest.mark.parametrize("statement", ["next(s.draws)", "s.stream.write('a')"])
def test_what_no_program_can_repeat_is_refused(statement: str) -> None:
    import io

    s = state()
    s.draws, s.stream = iter(range(9)), io.StringIO()
    with pytest.raises(UnsupportedCall, match="from outside, which gives something else in each call"):
        tfn.jit(function(statement, s, "x"))(X)
