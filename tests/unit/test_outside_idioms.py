"""Every way by which Python hands an object on, and reads it: the attribute that is read counts, whatever is between.

Each idiom reads a number of an object from outside, which then changes. The oracle is the function itself, without jit.
Operators, builtins, containers that are built on the way, functions of C and of Python's library, classes and their bases.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import copy
import dataclasses
import functools
import heapq
import inspect
import itertools
import json
import math
import operator
import re
import statistics
import string
import sys
import textwrap
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import thunder_fn as tfn


class Base:
    """An object with most of Python's methods. All of them read `k`."""

    ck = 2.0

    def __init__(self, k: Any) -> None:
        self.k = k

    def __eq__(self, other: object) -> bool:
        return self.k == getattr(other, "k", other)

    def __lt__(self, other: Any) -> bool:
        return self.k < other.k

    def __ge__(self, other: Any) -> bool:
        return self.k >= other

    def __hash__(self) -> int:
        return hash(self.k)

    def __add__(self, other: Any) -> Any:
        return self.k + other

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        return other * self.k

    def __matmul__(self, other: Any) -> Any:
        return other * self.k

    def __pow__(self, other: Any) -> Any:
        return self.k**other

    def __and__(self, other: Any) -> Any:
        return self.k

    def __divmod__(self, other: Any) -> Any:
        return self.k, other

    def __neg__(self) -> Any:
        return -self.k

    def __invert__(self) -> Any:
        return self.k

    def __abs__(self) -> Any:
        return abs(self.k)

    def __round__(self, digits: Any = None) -> Any:
        return self.k

    def __trunc__(self) -> int:
        return int(self.k)

    def __len__(self) -> int:
        return int(self.k)

    def __getitem__(self, place: int) -> Any:
        if place >= 3:
            raise IndexError
        return self.k + place

    def __contains__(self, value: Any) -> bool:
        return self.k > value

    def __reversed__(self) -> Iterator[Any]:
        return iter([self.k])

    def __bool__(self) -> bool:
        return self.k > 2

    def __int__(self) -> int:
        return int(self.k)

    __index__ = __int__

    def __float__(self) -> float:
        return float(self.k)

    def __complex__(self) -> complex:
        return complex(self.k)

    def __call__(self, x: Any) -> Any:
        return x * self.k

    def __str__(self) -> str:
        return "a" * int(self.k)

    def __repr__(self) -> str:
        return "c" * int(self.k)

    def __format__(self, spec: str) -> str:
        return "b" * int(self.k)

    def __dir__(self) -> list[str]:
        return ["a"] * int(self.k)


class Sub(Base):
    def inherited(self) -> Any:
        return super().ck

    @classmethod
    def of_class(cls) -> Any:
        return cls.ck


class Looped:
    def __init__(self, k: Any) -> None:
        self.k = k

    def __iter__(self) -> Iterator[Any]:
        yield self.k
        yield 1.0


class Passing:
    def __init__(self, o: Base) -> None:
        self.__dict__["o"] = o

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["o"], name)


class Slotted:
    __slots__ = ("k",)

    def __init__(self, k: Any) -> None:
        self.k = k


@dataclasses.dataclass
class Data:
    k: Any
    o: Any = None


class Holder:
    def __init__(self, o: Base) -> None:
        self.o = o

    @functools.cached_property
    def cached(self) -> Base:
        return self.o

    @property
    def prop(self) -> Base:
        return self.o

    @staticmethod
    def static(o: Base) -> Any:
        return o.k

    @classmethod
    def of_class(cls, o: Base) -> Any:
        return o.k


class Net(torch.nn.Module):
    ck = 2.0

    def __init__(self, o: Base) -> None:
        super().__init__()
        self.held, self.key = {"o": o}, "o"

    @property
    def entries(self) -> dict[str, Base]:
        return self.held

    @property
    def active(self) -> Base:
        return self.entries[self.key]

    @functools.cached_property
    def cached(self) -> list[Base]:
        return [self.active]

    @staticmethod
    def static(o: Base) -> Any:
        return o.k

    @classmethod
    def of_class(cls, o: Base) -> Any:
        return o.k * cls.ck

    def listed(self) -> list[Base]:
        return [*self.entries.values()]


class Pair(typing.NamedTuple):
    k: Any
    o: Any


LIBRARIES: dict[str, Any] = {
    module.__name__: module
    for module in (bisect, collections, contextlib, copy, dataclasses, functools, heapq, inspect, itertools, json, math)
} | {module.__name__: module for module in (operator, re, statistics, string, torch, types, typing, weakref)}


def read(o: Base) -> Any:
    """Return the number."""
    return o.k


IDIOMS = """
max([o,p],key=lambda q:q.k).k
min(o,p,key=read).k
sorted([p,o])[0].k
sorted([p,o],key=lambda v:v.k)[0].k
next(iter([o])).k
list((o,))[0].k
list(reversed([p,o]))[0].k
next(filter(lambda q: q.k, [o])).k
list(map(read,[o,p]))[0]
[a.k for a,b in zip([o],[p])][0]
[v.k for i,v in enumerate([o])][0]
list(D.values())[0].k
D.get('o').k
D.setdefault('o',p).k
D.setdefault('new',o).k
(lambda get: get('o'))(D.get).k
(lambda get: get('o',p))(D.setdefault).k
list(map(D.get,['o']))[0].k
T.get((a,b))+(lambda get:get((a,b)))(T.get)
(lambda get:get(D,'o'))(dict.get).k
[get('o') for get in [D.get]][0].k
list(map(T.get,[(1,2)]))[0]
functools.partial(D.setdefault,'o')().k
collections.ChainMap({},D)['o'].k
copy.copy(o).k
copy.deepcopy(o).k
vars(o)['k']
o.__dict__['k']
getattr(o,'k')
getattr(o,'zz',o.k)
operator.attrgetter('k')(o)
operator.itemgetter('o')(D).k
operator.methodcaller('__neg__')(o)
functools.reduce(lambda a,b:a+b.k,[o,p],0)
(lambda q:q.k)(o)
(None or o).k
(o if len(one)>0 else p).k
[o][0].k
{**D}['o'].k
read(*[o])
read(**{'o':o})
(q:=o).k
dataclasses.replace(data).o.k
dataclasses.asdict(Data(o.k))['k']
dataclasses.astuple(Data(o.k))[0]
pair.o.k
pair._asdict()['o'].k
pair._replace(k=1).o.k
inspect.getattr_static(o,'k')
type(o).__mro__[0].__len__(o)
types.MappingProxyType(D)['o'].k
collections.UserDict(D)['o'].k
types.SimpleNamespace(o=o).o.k
len('{0.k}'.format(o))
len(f'{o.k}')
len(f'{o}')
len(f'{o!r}')
len('%s' % o)
len(str(o))
len(repr(o))
len(format(o,''))
len(json.dumps({'k':o.k}))
hash(o)%1000
float(o==5.)
float(o!=5.)
float(o<p)
sorted([o,p]).index(p)
(o+1)
(1+o)
o*x
-o
abs(o)
len(o)
o[1]
sum(v for v in looped)
list(looped)[0]
(lambda a,b:a)(*looped)
float(3 in o)
float(bool(o))
float(not o)
(5. if o else 6.)
float((o and 1) == 1)
int(o)
float(o)
operator.index(o)
len(range(o))
len([1,2,3,4,5,6,7][o:])
round(o)
divmod(o,1)[0]
o(x)
list(reversed(o))[0]
~o
(o&1)
o@x
passing.k
passing.__len__()
slotted.k
data.k
float(data==Data(5.0,data.o))
holder.cached.k
holder.prop.k
holder.static(o)
Holder.of_class(o)
complex(o).real
math.trunc(o)
o**2
float(o>=5)
sum([o],0)
float(any(q.k>4 for q in [o]))
float(all(q.k>4 for q in [o]))
heapq.nsmallest(1,[o,p])[0].k
bisect.bisect([1.,3.,9.],o.k)
statistics.mean([o.k,o.k])
math.fsum([o.k])
math.prod([o.k,2])
math.hypot(o.k)
len(re.sub('a','bb',str(o)))
len(string.Template('$a').substitute(a=o))
len(','.join([str(o)]))
list(itertools.accumulate([o.k,1]))[1]
[k for k,g in itertools.groupby([o],key=lambda q:q.k)][0]
list(itertools.starmap(lambda q:q.k,[(o,)]))[0]
collections.Counter([o.k])[5.0]
collections.deque([o])[0].k
float(o in {p})
{o.k:2.}.get(5.0,3.)
{o:2.}.get(p,3.)
ref().k
functools.partial(read,o)()
functools.partial(Base.__len__,o)()
functools.wraps(read)(lambda q:q.k)(o)
len(dir(o))
o.k
typing.cast(Base,o).k
eval('o.k')
(exec('r=o.k',G:={'o':o}),G['r'])[1]
torch.tensor(o.k)
torch.tensor([o.k,1.])[0]
torch.full((),o.k)
x.clamp(max=o.k)
torch.add(x,x,alpha=o.k)
torch.zeros(int(o)).sum()+int(o)
torch.linspace(0,o.k,3)[1]
torch.where(x>o.k,1.,2.)
x**o.k
torch.arange(9)[int(o)]
module.k
module.buffer
module.table['w']
T[a,b]
T.get((a,b))
(lambda a,b:T[a,b])(1,2)
[[o]][0][0].k
{'a':o}['a'].k
{'a':[o]}['a'][0].k
next(iter({o})).k
((o,)+(p,))[0].k
([o]*2)[1].k
([p]+single)[1].k
[q for q in [o]][0].k
{1:q for q in [o]}[1].k
next(q for q in [o]).k
(lambda a,*b:b[0].k)(p,o)
(lambda **kw:kw['o'].k)(o=o)
[p,o][1:][0].k
single[:][0].k
single[-1].k
dict(zip('ab',[o,p]))['a'].k
dict.fromkeys('ab',o)['a'].k
dict(a=o)['a'].k
[p,o][1 if one else 0].k
list(itertools.chain([o],[p]))[0].k
list(itertools.islice([o,p],1))[0].k
list(itertools.product([o],[p]))[0][0].k
next(itertools.cycle([o])).k
next(itertools.repeat(o)).k
next(itertools.tee([o])[0]).k
functools.partial(operator.attrgetter('k'),o)()
list(map(operator.attrgetter('k'),[o]))[0]
sum(map(operator.attrgetter('k'),single))
type(o)(o.k).k
o.__class__(o.k).k
dict(o.__dict__)['k']
{**vars(o)}['k']
getattr(data,dataclasses.fields(data)[0].name)
pair[1].k
(lambda k,o:o.k)(*pair)
types.SimpleNamespace(**{'o':o}).o.k
next(iter(weakref.WeakSet([o]))).k
(lambda e:e.args[0].k)(ValueError(o))
contextlib.nullcontext(o).__enter__().k
collections.OrderedDict(a=o)['a'].k
collections.defaultdict(lambda:o)['z'].k
collections.Counter({'a':o.k})['a']
(D|{'z':p})['o'].k
(lambda d:d.update(D) or d['o'].k)({})
(lambda n:setattr(n,'q',o) or n.q.k)(types.SimpleNamespace())
(lambda l:l.append(o) or l[0].k)([])
(lambda l:l.extend(single) or l[0].k)([])
list(reversed(both))[0].k
sorted(both,key=id)[0].k+sorted(both,key=id)[1].k
min(both,key=lambda q:q.z).k
(lambda l:l.reverse() or l[0].k)(list(both))
list(both).pop().k
tuple(both)[1].k
both.copy()[1].k
(both*2)[3].k
D.copy()['o'].k
list(D.items())[0][1].k
dict(D).pop('o').k
collections.deque(both).pop().k
[q for q in set(both) if q.z==0][0].k
[q.k for q in reversed(both)][0]
[q.k for _,q in enumerate(both)][1]
[b.k for a,b in zip(both,both[1:])][0]
list(itertools.chain.from_iterable([both]))[1].k
functools.reduce(lambda a,b:b,both).k
getattr(holder,'o').k
operator.attrgetter('o.k')(holder)
operator.itemgetter(1)(both).k
operator.methodcaller('__getitem__',1)(both).k
both.__getitem__(1).k
D.__getitem__('o').k
object.__getattribute__(o,'k')
type(o).ck
o.__class__.ck
type(o).__mro__[0].ck
Base.ck
vars(type(o))['ck']
getattr(type(o),'ck')
inspect.getmro(type(o))[0].ck
type(both[1]).ck
holder.o.__class__.ck
type(holder.prop).ck
[type(q) for q in both][0].ck
type(type(o)(1)).ck
Base(1).ck
Base.__dict__['ck']
sub.ck
type(sub).__base__.ck
type(sub).__bases__[0].ck
super(type(sub),sub).ck
getattr(o,'k '.strip())
getattr(module,'k '.strip())
getattr(type(o),'ck '.strip())
getattr(types.SimpleNamespace(o=o),'o '.strip()).k
[getattr(o,name) for name in vars(o)][0]
[getattr(module,name) for name in vars(module)][-1]
module.__dict__['k']
vars(module)['k']
(lambda ref:ref().k)(weakref.ref(o))
weakref.proxy(o).k
type(sub).mro()[1].ck
sub.inherited()
sub.of_class()
functools.partial(type(sub).of_class)()
type(net).ck
net.__class__.ck
net.ck
[c.__dict__['ck'] for c in type(net).__mro__ if 'ck' in c.__dict__][0]
next(vars(c)['ck'] for c in type(net).__mro__ if 'ck' in vars(c))
[c.ck for c in net.__class__.__mro__ if 'forward' in c.__dict__ and hasattr(c,'ck')]==[] and net.ck
[v for c in type(o).__mro__ for n,v in vars(c).items() if n=='ck'][0]
net.entries['o'].k
net.entries[net.key].k
net.entries.get(net.key).k
net.active.k
len(net.active)
net.cached[0].k
net.static(o)
net.of_class(o)
net.listed()[0].k
[one.k for one in net.listed()][0]
{**net.entries}['o'].k
dict(net.entries)['o'].k
next(iter(net.entries.values())).k
sum(one.k for one in net.entries.values())
getattr(net,'entries')['o'].k
operator.attrgetter('entries')(net)['o'].k
(lambda q:q['o'].k)(net.entries)
json.dumps(net.entries,default=read).count('5')
"""


def objects() -> dict[str, Any]:
    """Objects that hold a number, by the names that the idioms have for them."""
    o, p = Base(2.0), Base(3.0)
    o.z, p.z = 0, 1  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    module: Any = torch.nn.Module()
    module.k = 2.0
    module.register_buffer("buffer", torch.tensor(2.0))
    module.table = torch.nn.ParameterDict({"w": torch.tensor(2.0)})
    return {
        "o": o,
        "p": p,
        "D": {"o": o},
        "one": [1],
        "data": Data(2.0, o),
        "pair": Pair(1, o),
        "looped": Looped(2.0),
        "passing": Passing(Base(2.0)),
        "slotted": Slotted(2.0),
        "T": {(1, 2): 2.0, 1: 3.0, 2: 3.0},
        "holder": Holder(o),
        "ref": weakref.ref(o),
        "module": module,
        "net": Net(o),
        "sub": Sub(1.0),
        "single": [o],
        "both": [p, o],
    }


def change(held: dict[str, Any]) -> None:
    """Change all numbers that objects hold."""
    for one in (*(held[name] for name in ("o", "data", "looped", "slotted", "module")), held["passing"].__dict__["o"]):
        one.k = 5.0
    held["module"].buffer.fill_(5.0)
    held["module"].table["w"].data.fill_(5.0)
    held["T"][1, 2] = 5.0


NAMES: dict[str, Any] = {**LIBRARIES, "Base": Base, "Data": Data, "Holder": Holder, "read": read, "a": 1, "b": 2}


def program(idiom: str) -> tuple[Callable[[torch.Tensor], Any], Callable[[], None]]:
    """A function that reads by an idiom, and what changes all that it may read."""
    held = {**NAMES, **objects()}
    exec(f"def f(x):\n    return x * ({idiom})", held)

    def change_all() -> None:
        change(held)
        Base.ck = Net.ck = 5.0

    Base.ck = Net.ck = 2.0
    return held["f"], change_all


@pytest.mark.parametrize("use", [tfn.jit, lambda f: lambda x: tfn.vmap(f)(x)], ids=["jit", "vmap"])
@pytest.mark.parametrize("idiom", IDIOMS.strip().splitlines())
def test_what_is_read_by_any_idiom_counts(idiom: str, use: Callable[[Any], Any]) -> None:
    x = torch.tensor([1.0, 4.0])
    (f, change_all), (g, change_too) = program(idiom), program(idiom)
    used = use(g)
    torch.testing.assert_close(used(x), f(x))
    change_all()
    change_too()
    torch.testing.assert_close(used(x), f(x))
    torch.testing.assert_close(used(x), f(x))


@pytest.mark.parametrize("idiom", ["[{}][0]", "next({})", "sum({})", "[*({})][0]"])
def test_code_that_is_defined_again(idiom: str) -> None:
    """The code of a cell that runs again, or of a module that is reloaded, equals that of before and is another object."""
    idiom = idiom.format("c.__dict__['ck'] for c in type(o).__mro__ if 'ck' in c.__dict__")
    x = torch.tensor([1.0, 4.0])
    for _ in range(3):
        f, change_all = program(idiom)
        used = tfn.jit(f)
        used(x)
        change_all()
        torch.testing.assert_close(used(x), f(x))


@pytest.mark.parametrize("idiom", [one for one in IDIOMS.strip().splitlines() if "exec" not in one])
def test_what_the_function_makes_is_not_from_outside(idiom: str) -> None:
    """The function reads, changes and reads again what it has made itself. It is traced once.

    The globals of a text that it runs by `exec` count as a module's.
    """
    Base.ck = Net.ck = 2.0
    names = ", ".join(objects())
    text = f"def read_here(x, {names}):\n    return x * ({idiom})\n"
    text += "def f(x):\n    held = objects()\n    y = read_here(x, **held)\n    change(held)\n"
    text += "    return y + read_here(x, **held)\n"
    held = {**NAMES, "objects": objects, "change": change}
    exec(text, held)
    f, x = held["f"], torch.tensor([1.0, 4.0])
    used = tfn.jit(f)
    for _ in range(3):
        torch.testing.assert_close(used(x), f(x))
    assert tfn.cache_info(used).misses == 1, tfn.explain_misses(used)


# ---- keys that are found on the way ----

FOUND_KEYS = {
    "a list of classes": """
found = [C for C in (A, B)]
for C in found:
    if C.name in sys.modules:
        return x + 1
return x * 3""",
    "a loop over classes": """
for C in (A, B):
    if C.name in sys.modules:
        return x + 1
return x * 3""",
    "a list that is filled": """
found = []
for C in (A, B):
    found.append(C)
for C in found:
    if C.name in sys.modules:
        return x + 1
return x * 3""",
    "subclasses": """
todo = Kind.__subclasses__()
while todo:
    C = todo.pop()
    todo += C.__subclasses__()
    if C.name in sys.modules:
        return x + 1
return x * 3""",
    "subclasses in a list": """
found, todo = [], Kind.__subclasses__()
while todo:
    C = todo.pop()
    todo += C.__subclasses__()
    found.append(C)
for C in found:
    if C.name in sys.modules:
        return x + 1
return x * 3""",
}
"""Programs that look for modules by names that they find on the way."""

NEVER_REACHED = {
    "in": "if C.name in sys.modules: x = x + 1",
    "get": "x = x + (sys.modules.get(C.name) is not None)",
    "item": "x = x + len(sys.modules[C.name].__name__)",
}
"""Uses of a key in a part of a function that does not run."""


def looking(body: str) -> tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any]]:
    """A function with this body, and its globals."""
    held: dict[str, Any] = {"sys": sys, "A": type("A", (), {"name": "none_a"}), "B": type("B", (), {"name": "none_b"})}
    kind = held["Kind"] = type("Kind", (), {"name": "none"})
    first = held["First"] = type("First", (kind,), {"name": "none_a"})
    held["Second"] = type("Second", (first,), {"name": "none_b"})
    held["scale"] = 2.0
    exec("def f(x):\n" + textwrap.indent(body.strip(), "    "), held)
    return held["f"], held


@pytest.fixture
def other_modules(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Import a new module of a name; it is gone after the test."""

    def add(name: str) -> None:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))

    return add


CHANGES: dict[str, Callable[[dict[str, Any], Callable[[str], None]], None]] = {
    "the first module appears": lambda held, add: add("none_a"),
    "the second module appears": lambda held, add: add("none_b"),
    "the first name changes": lambda held, add: (
        [setattr(held[one], "name", "torch") for one in ("A", "First")] and None
    ),
    "the second name changes": lambda held, add: (
        [setattr(held[one], "name", "torch") for one in ("B", "Second")] and None
    ),
    "a class is added": lambda held, add: held.update(A=type("More", (held["Kind"],), {"name": "torch"})),
    "a class is added below": lambda held, add: held.update(B=type("More", (held["Second"],), {"name": "torch"})),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", FOUND_KEYS)
def test_keys_that_are_found_on_the_way_count(kind: str, change: str, other_modules: Callable[[str], None]) -> None:
    (f, held), x = looking(FOUND_KEYS[kind]), torch.ones(2)
    used = tfn.jit(f)
    assert torch.equal(used(x), x * 3)
    CHANGES[change](held, other_modules)
    for _ in range(2):
        assert torch.equal(used(x), f(x)) and torch.equal(f(x), x + 1)
    assert tfn.cache_info(used).misses == 2


@pytest.mark.parametrize("kind", FOUND_KEYS)
def test_keys_that_are_found_on_the_way_are_the_only_ones(kind: str, other_modules: Callable[[str], None]) -> None:
    (f, _), x = looking(FOUND_KEYS[kind]), torch.ones(2)
    used = tfn.jit(f)
    used(x)
    other_modules("none_of_these")
    assert torch.equal(used(x), x * 3) and tfn.cache_info(used).misses == 1, tfn.explain_misses(used)


@pytest.mark.parametrize("use", NEVER_REACHED)
def test_keys_that_are_never_found_are_not_read(use: str, other_modules: Callable[[str], None]) -> None:
    body = (
        f"if scale > 1:\n    return x * scale\nfor C in Kind.__subclasses__():\n    {NEVER_REACHED[use]}\nreturn x * 3"
    )
    (f, held), x = looking(body), torch.ones(2)
    used = tfn.jit(f)
    used(x)
    other_modules("none_a")
    assert torch.equal(used(x), x * 2) and tfn.cache_info(used).misses == 1, tfn.explain_misses(used)
    held["scale"] = 0.0
    other_modules("torch_like"), setattr(held["First"], "name", "torch")
    for _ in range(2):
        assert torch.equal(used(x), f(x))
    held["First"].name = "thunder_fn"
    assert torch.equal(used(x), f(x))


@pytest.mark.parametrize("other", ["B.name", "''.join(['none', '_b'])", "held[1].name"])
@pytest.mark.parametrize(
    "key",
    [
        "C.name if scale < 1 else {}",
        "scale < 1 and C.name or {}",
        "C.name if not scale else D.name if scale < 1 else {}",
    ],
)
def test_a_key_that_is_one_of_several_counts(key: str, other: str, other_modules: Callable[[str], None]) -> None:
    body = f"held = [A, B]\nif scale < 1:\n    C = D = A\nreturn x * 2 if ({key.format(other)}) in sys.modules else x"
    (f, _), x = looking(body), torch.ones(2)
    used = tfn.jit(f)
    assert torch.equal(used(x), x)
    other_modules("none_b")
    assert torch.equal(used(x), x * 2)


KEYED = r"""
for C in (P, Q, R): t = t + D[C.name]
for C in [P, Q] + [R]: t = t + D[C.name]
for C in [C for C in (P, Q, R) if C.name]: t = t + D.get(C.name)
held = [P]; held.append(Q); held += (R,); t = sum(D[C.name] for C in held)
held = [P]; held += others(); t = sum(D[C.name] for C in held); C = held.pop(); t = t + D[C.name]
held = others(); held.append(P); C = held.pop(0); t = t + D[C.name]; C = held.pop(); t = t + D[C.name]
held = [P, Q, R]; other = held; other.pop(); C = held.pop(); t = t + D[C.name]
held = [P]; add(held); C = held.pop(); t = t + D[C.name]
held = [P]; add(held); C = None; t = sum(D[C.name] for C in held)
held = [P, Q]; held[0] = R; C = held.pop(0); t = t + D[C.name]
held = [P, Q]; held[:] = [R]; C = held.pop(); t = t + D[C.name]
held = [[P], [Q, R]]; C = held.pop().pop(); t = t + D[C.name]
held = [P]; held.extend([Q, R]); C = held.pop(); t = t + D[C.name]
held = [P]; held.insert(0, R); C = held.pop(0); t = t + D[C.name]
held = [P, Q, R]; held.sort(key=lambda C: -D[C.name]); C = held.pop(); t = t + D[C.name]
held = [C for C in (P, Q, R)]; C = held.pop(); C = held.pop(); t = t + D[C.name]; C = P
held = {P, Q}; held.add(R); t = sum(D[C.name] for C in held)
held = {P}; held.update({R}); C = held.pop(); t = t + D[C.name]; C = held.pop(); t = t + D[C.name]
held = [*others(), P]; C = held.pop(0); t = t + D[C.name]
held = [others()[0], P]; C = held.pop(0); t = t + D[C.name]
held = [P] if t else others(); C = held.pop(); t = t + D[C.name]
held = [name for name in names()]; n = held.pop(); t = t + D[n]
held = [P, Q]; it = iter(held); C = next(it); C = next(it); t = t + D[C.name]
for C in REGISTRY: t = t + D[C.name]
for C in list(REGISTRY)[1:]: t = t + D[C.name]
for n in NAMES: t = t + D[n]
for n, C in zip(NAMES, REGISTRY): t = t + D[n] + D[C.name]
for n in TABLE: t = t + D[n] + TABLE[n].z
for n in map(str.lower, CAPITALS): t = t + D[n]
for n in (C.name for C in REGISTRY): t = t + D[n]
while (C := REGISTRY[int(t) % 3]) is not R and t < 3: t = t + D[C.name]
for C in REGISTRY: del C; t = t + D[REGISTRY[0].name]
try: C = fails(REGISTRY[1].z)\nexcept ValueError: t = t + D[REGISTRY[1].name]
try: C = fails(REGISTRY[1].z)\nexcept ValueError as C: t = t + D[C.args[0]]
if t: C = REGISTRY[2]; t = t + C.z; del C
with closed(P) as C: t = t + D[C.name] + C.z
for C in REGISTRY: t = t + D[C.name]; D[C.name] = 7.0
C = REGISTRY[1]; t = t + D[C.name]; D[C.name] = 7.0; C.name = "p"
for C in REGISTRY: t = t + D[C.name]; C.name = "r"
held = [P]; held.append(Q); REGISTRY.append(P); C = REGISTRY.pop(); t = t + D[C.name] + D[held.pop().name]
C = REGISTRY.pop(); t = t + D[C.name]; REGISTRY.append(C)
held = REGISTRY; C = held.pop(); t = t + D[C.name]; held.append(C); C = P
held = REGISTRY; held.append(P); t = sum(D[C.name] for C in held); held.pop()
for C in REGISTRY: t = t + C.z; C.z = 1.0; C = C.name
n = "r"; t = t + D[n]; n = NAMES[0]
for n in "pqr": t = t + D[n]
for n in ("p", "q"): t = t + D.get(n if t > 3 else "r", 0.0)
t = sum(D[C.name] for C in REGISTRY if C.z) + sum([D[C.name] for C in others()])
for C in REGISTRY: t = t + (lambda: D[C.name])()
def g(): return D[C.name]\nfor C in REGISTRY: t = t + g()
t = sum(each(REGISTRY, D))
"""
"""Programs that look into a dict by keys that they find on the way; they leave a number in `t`."""


def each(found: list[Any], table: dict[str, float]) -> Iterator[float]:
    """Yield what a table has for each of these, one frame in many parts."""
    for one in found:
        yield table[one.name]
        name = one.name
        yield table[name]


def fails(value: float) -> None:
    """Raise an error."""
    raise ValueError("r" if value > 2 else "q")


def keyed(body: str) -> tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any]]:
    """A function with this body, and its globals."""
    p, q, r = objects = [*map(Entry, "pqr", (1.0, 2.0, 3.0))]
    held = {"D": {"p": 2.0, "q": 3.0, "r": 4.0}, "P": p, "Q": q, "R": r, "REGISTRY": objects, "NAMES": ["p", "q", "r"]}
    held |= {
        "TABLE": {"p": p, "q": q},
        "CAPITALS": ["P", "Q"],
        "fails": fails,
        "each": each,
        "closed": contextlib.nullcontext,
    }
    held |= {"others": lambda: [q, r], "names": lambda: ["q", "r"], "add": lambda found: found.append(r)}
    text = textwrap.indent(body.replace("\\n", "\n"), "    ")
    exec(f"def f(x):\n    t = 1.0\n{text}\n    return x * t", held)
    return held["f"], held


class Entry:
    """An object with a name and a number."""

    def __init__(self, name: str, z: float) -> None:
        self.name, self.z = name, z


EDITS: list[Callable[[dict[str, Any]], Any]] = [
    lambda held: held["D"].update(p=11.0),
    lambda held: held["D"].update(q=13.0),
    lambda held: held["D"].update(r=17.0),
    lambda held: setattr(held["P"], "name", "r"),
    lambda held: setattr(held["Q"], "name", "p"),
    lambda held: setattr(held["R"], "name", "q"),
    lambda held: [setattr(held[one], "z", 2.5) for one in "PQR"],
    lambda held: held["REGISTRY"].reverse(),
    lambda held: held["NAMES"].reverse(),
    lambda held: held["D"].update(other=1.0),
]


@pytest.mark.parametrize("edit", range(len(EDITS)))
@pytest.mark.parametrize("body", KEYED.strip().splitlines())
def test_keys_that_are_found_on_the_way(body: str, edit: int) -> None:
    x = torch.tensor([1.0, 4.0])
    (f, held), (g, held_too) = keyed(body), keyed(body)
    used = tfn.jit(g)
    for _ in range(2):
        torch.testing.assert_close(used(x), f(x))
    EDITS[edit](held), EDITS[edit](held_too)
    for _ in range(2):
        torch.testing.assert_close(used(x), f(x))
    assert held["D"] == held_too["D"]
