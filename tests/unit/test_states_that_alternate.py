"""Places outside that a jitted function sets to one of a few values, and reads in the next call: each call stores what
eager code stores. The oracle is eager code.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import operator
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace as ns
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import thunder_fn as tfn
from thunder_fn import cache_info

F = nn.functional


class Phase(enum.Enum):
    WARM = 1
    RUN = 2
    COOL = 3


class First:
    value = 1


class Second:
    value = 2


def one() -> int:
    return 1


def two() -> int:
    return 2


FIRST, SECOND = ns(value=1), ns(value=2)
VALUES: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "int": (1, 2, lambda v: v),
    "float": (1.0, 2.0, lambda v: v),
    "text": ("a", "bb", len),
    "bool": (True, False, lambda v: 2 if v else 1),
    "None": (None, 3, lambda v: v or 1),
    "tuple": ((1, 2), (2, 3), lambda v: v[0]),
    "enum": (Phase.WARM, Phase.RUN, lambda v: v.value),
    "class": (First, Second, lambda v: v.value),
    "builtin class": (dict, list, lambda v: 1 if v is dict else 2),
    "object": (FIRST, SECOND, lambda v: v.value),
    "function": (one, two, lambda v: v()),
    "module": (nn.Identity(), nn.ReLU(), lambda v: 1 if type(v) is nn.Identity else 2),
    "dtype": (torch.float32, torch.float64, lambda v: 1 if v is torch.float32 else 2),
    "frozenset": (frozenset([1]), frozenset([1, 2]), len),
    "list": ([1], [1, 2], len),
    "number of NumPy": (np.int64(1), np.int64(2), int),
    "range": (range(1), range(2), len),
    "slice": (slice(0, 1), slice(0, 2), lambda v: v.stop),
    "partial": (functools.partial(one), functools.partial(two), lambda v: v()),
    "tensor": (torch.tensor(1.0), torch.tensor(2.0), lambda v: v),
}
BY_VALUE = ("int", "float", "text", "tuple", "frozenset", "number of NumPy", "range", "slice")


class Slot:
    __slots__ = ("k",)


@dataclasses.dataclass
class Data:
    k: Any = None


def held_in(kind: str, value: Any) -> tuple[str, dict[str, Any]]:
    """The expression of a place that holds the value, and the names in it."""
    slot, module, other = Slot(), nn.Module(), types.ModuleType("other")
    slot.k, other.k = value, value  # type: ignore[attr-defined]
    module.__dict__["k"] = value
    return {
        "list": ("h[0]", {"h": [value]}),
        "dict": ("h['k']", {"h": {"k": value}}),
        "object": ("h.k", {"h": ns(k=value)}),
        "slot": ("h.k", {"h": slot}),
        "class": ("h.k", {"h": type("Class", (), {"k": value})}),
        "deque": ("h[0]", {"h": collections.deque([value])}),
        "module": ("h.k", {"h": module}),
        "defaultdict": ("h['k']", {"h": collections.defaultdict(int, k=value)}),
        "dataclass": ("h.k", {"h": Data(value)}),
        "global": ("K", {"K": value}),
        "python module": ("h.k", {"h": other}),
    }[kind]


HOLDERS = ("list", "dict", "object", "slot", "class", "deque", "module", "defaultdict", "dataclass", "global")
PAIRS = [
    (value, holder)
    for value in VALUES
    for holder in (*HOLDERS, "python module")
    if (value, holder) != ("module", "module")
]


@pytest.mark.parametrize(("value", "holder"), PAIRS)
def test_a_place_that_alternates(value: str, holder: str) -> None:
    first, second, number = VALUES[value]

    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        place, names = held_in(holder, first)
        scope = {"number": number, "first": first, "second": second, **names}
        is_first = f"{place} {'==' if value in BY_VALUE else 'is'} first"
        lines = "global K" if holder == "global" else "pass"
        exec(
            f"def f(x):\n    {lines}\n    y = x * number({place})\n"
            f"    if {is_first}: {place} = second\n    else: {place} = first\n    return y\n",
            scope,
        )
        step = wrap(scope["f"])
        return [step(torch.ones(1) * (i + 1)) for i in range(6)]

    torch.testing.assert_close(run(tfn.jit), run(lambda f: f))


# ---- ways to store ----


class Held:
    def __init__(self, k: Any) -> None:
        self.k = k

    def set(self, value: Any) -> None:
        self.k = value

    @property
    def p(self) -> Any:
        return self.k

    @p.setter
    def p(self, value: Any) -> None:
        self.k = value

    def __setitem__(self, key: Any, value: Any) -> None:
        self.k = value

    def __call__(self, value: Any) -> None:
        self.k = value

    @contextlib.contextmanager
    def at(self, value: Any) -> Iterator[None]:
        self.k = value
        yield


class Setting(Held):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


@dataclasses.dataclass(frozen=True)
class Frozen:
    k: Any

    def set(self, value: Any) -> None:
        object.__setattr__(self, "k", value)


STORES = """
d['k'] | operator.setitem(d, 'k', new)
d['k'] | dict.__setitem__(d, 'k', new)
d['k'] | d.__setitem__('k', new)
d['k'] | d.update(k=new)
d['k'] | operator.ior(d, {'k': new})
d['k'] | d.pop('k'); d.setdefault('k', new)
d['k'] | list(map(d.__setitem__, ['k'], [new]))
d['k'] | functools.partial(d.__setitem__, 'k')(new)
d['k'] | s = d.__setitem__; s('k', new)
d['k'] | list((d.__setitem__('k', new), 1)[1] for _ in range(1))
d['k'] | d['k'], *_ = new, 1, 2
o.k | setattr(o, 'k', new)
o.k | object.__setattr__(o, 'k', new)
o.k | o.__setattr__('k', new)
o.k | vars(o)['k'] = new
o.k | o.__dict__.update(k=new)
o.k | del o.k; o.k = new
l[0] | list.__setitem__(l, 0, new)
l[0] | l[:] = [new]
l[0] | l.pop(); l.append(new)
l[0] | l.clear(); l.extend([new])
l[0] | l.insert(0, new); l.pop()
l[0] | l.remove(l[0]); l.append(new)
l[0] | for i, _ in enumerate(l): l[i] = new
h.k | h.set(new)
h.k | h.p = new
h.k | h['z'] = new
h.k | h(new)
h.k | with h.at(new): pass
s.k | s.k = new
s.k | s.set(new)
z.k | z.set(new)
deep.a.b.k | deep.a.b.k = new
many['a']['b'][0] | many['a']['b'][0] = new
cell.get() | cell.set(new)
function.k | function.k = new
C.k | C.k = new
C.k | C.set(new)
C.k | setattr(C, 'k', new)
""".strip().splitlines()


def places() -> dict[str, Any]:
    """Places outside by name, each with the first value."""
    c: Any = FIRST

    def set_cell(value: Any) -> None:
        nonlocal c
        c = value

    class Class:
        k = FIRST

        @classmethod
        def set(cls, value: Any) -> None:
            cls.k = value

    def function() -> None:
        pass

    function.k = FIRST  # type: ignore[attr-defined]
    cell = ns(get=lambda: c, set=set_cell)
    holders = {"o": ns(k=FIRST), "h": Held(FIRST), "s": Setting(FIRST), "z": Frozen(FIRST), "C": Class, "cell": cell}
    deep, many = ns(a=ns(b=ns(k=FIRST))), {"a": {"b": [FIRST]}}
    return {"d": {"k": FIRST}, "l": [FIRST], "function": function, "deep": deep, "many": many, **holders}


@pytest.mark.parametrize("line", STORES)
def test_a_way_to_store(line: str) -> None:
    place, statement = line.split(" | ")

    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        scope = {**places(), "A": FIRST, "B": SECOND, "operator": operator, "functools": functools}
        lines = f"    y = x * {place}.value\n    new = B if {place} is A else A\n    {statement}\n"
        exec(f"def f(x):\n{lines}    return y + {place}.value\n", scope)
        step = wrap(scope["f"])
        return [step(torch.ones(1) * (i + 1)) for i in range(6)]

    torch.testing.assert_close(run(tfn.jit), run(lambda f: f))


# ---- patterns ----


@dataclasses.dataclass(frozen=True)
class State:
    n: int


class Swapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Identity(), nn.ReLU6()
        self.current = self.a

    def forward(self, x: Tensor) -> Tensor:
        y = self.current(x * 3)
        self.current = self.b if self.current is self.a else self.a
        return y


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.i = nn.ModuleList([nn.Identity(), nn.ReLU6(), nn.Softsign()]), 0
        self.__dict__["f"], self.mode = torch.sin, "x"

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(self.layers[self.i](x * 3))
        self.i = (self.i + 1) % len(self.layers)
        self.__dict__["f"] = torch.cos if self.f is torch.sin else torch.sin
        self.mode = {"x": "y", "y": "z", "z": "x"}[self.mode]
        return y * ord(self.mode[0])


def patterns() -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:  # noqa: C901 - a function for each pattern
    """Functions with a state of their own, made anew."""
    a, b, c = ns(v=1), ns(v=2), ns(v=3)
    ring, pair, named, stack = [a, b, c], [a, b], {"p": a, "q": b}, [a]
    o = ns(phase=Phase.WARM, n=0, state=State(0), act=F.relu, t=(a, 0), node=None, f=lambda v: v, log={})
    first, second, third = ns(v=1), ns(v=2), ns(v=3)
    first.next, second.next, third.next, o.node = second, third, first, first
    tensors, buffers = [torch.tensor(1.0), torch.tensor(2.0)], ns(front=torch.zeros(2), back=torch.ones(2))
    queue, numbers, swapping, choosing = collections.deque([a, b, c]), {1}, Swapping(), Choosing()

    def rotates(x: Tensor) -> Tensor:
        ring.append(ring.pop(0))
        return x * ring[0].v

    def swaps(x: Tensor) -> Tensor:
        pair[0], pair[1] = pair[1], pair[0]
        named["p"], named["q"] = named["q"], named["p"]
        return x * pair[0].v + named["q"].v

    def walks(x: Tensor) -> Tensor:
        y = x * o.node.v
        o.node = o.node.next
        return y

    def has_phases(x: Tensor) -> Tensor:
        o.n += 1
        if o.phase is Phase.WARM and o.n >= 2:
            o.phase, o.n = Phase.RUN, 0
        elif o.phase is Phase.RUN and o.n >= 2:
            o.phase, o.n = Phase.COOL, 0
        elif o.phase is Phase.COOL:
            o.phase, o.n = Phase.WARM, 0
        return x * o.phase.value + o.n

    def replaces(x: Tensor) -> Tensor:
        o.state = dataclasses.replace(o.state, n=(o.state.n + 1) % 3)
        return x * o.state.n

    def activates(x: Tensor) -> Tensor:
        y = o.act(x - 2)
        o.act = torch.tanh if o.act is F.relu else F.relu
        return y

    def makes_functions(x: Tensor) -> Tensor:
        k = o.f(1)
        o.f = (lambda v: v + 1) if k == 1 else (lambda v: v)
        return x * k

    def stacks(x: Tensor) -> Tensor:
        if len(stack) < 3:
            stack.append(b if len(stack) == 1 else c)
        else:
            del stack[1:]
        return x * sum(one.v for one in stack)

    def logs(x: Tensor) -> Tensor:
        if "e" in o.log:
            o.log.pop("e")
            o.log.setdefault("z", a)
        else:
            o.log["e"] = b
        return x * len(o.log) + sum(one.v for one in o.log.values())

    def pairs(x: Tensor) -> Tensor:
        o.t = (b if o.t[0] is a else a, 1 - o.t[1])
        return x * o.t[0].v + o.t[1]

    def turns(x: Tensor) -> Tensor:
        queue.rotate(1)
        numbers.symmetric_difference_update({2})
        return x * queue[0].v + sum(numbers)

    def exchanges(x: Tensor) -> Tensor:
        tensors[0], tensors[1] = tensors[1], tensors[0]
        buffers.front, buffers.back = buffers.back, buffers.front
        buffers.front.add_(1)
        return x * tensors[0] - tensors[1] + buffers.front

    functions = (rotates, swaps, walks, has_phases, replaces, activates, makes_functions, stacks, logs, pairs, turns)
    yield from ((f.__name__, f) for f in (*functions, exchanges))
    yield from (("swapping", lambda x: swapping(x)), ("choosing", lambda x: choosing(x)))


@pytest.mark.parametrize("name", [name for name, _ in patterns()])
def test_a_state_machine(name: str) -> None:
    eager, step = dict(patterns())[name], tfn.jit(dict(patterns())[name])
    for i in range(9):
        x = torch.full((2,), i + 1.0)
        torch.testing.assert_close(step(x), eager(x))


@pytest.mark.parametrize("wrap", [tfn.jit, lambda m: tfn.jit(lambda x: m(x))], ids=["module", "function"])
def test_a_submodule_that_somebody_replaces_by_another_one(wrap: Callable[[Any], Any]) -> None:
    module = Swapping()
    module.forward = lambda x: module.current(x * 3)  # type: ignore[method-assign]
    step, x = wrap(module), torch.full((2,), 4.0)
    for current in (module.a, module.b, module.a):
        module.current = current
        torch.testing.assert_close(step(x), current(x * 3))


def test_a_state_that_is_made_anew_and_set_back() -> None:
    """A program cannot make the object of a class anew: the function is traced again."""

    class Own:
        def __init__(self, n: int) -> None:
            self.n = n

    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        start = Own(0)
        o, found = ns(state=start), list[Any]()

        def f(x: Tensor) -> Tensor:
            o.state = Own(o.state.n + 1)
            return x * o.state.n

        step = wrap(f)
        for i in range(6):
            o.state = start if i in (2, 4) else o.state
            found.append(step(torch.ones(2)))
        return found

    torch.testing.assert_close(run(tfn.jit), run(lambda f: f))


# ---- the kinds of attributes of a module, which may hold a tensor or nothing ----


def _empties(s: Any, x: Tensor) -> Tensor:
    if s.c is None:
        return x * 10
    s.c = None
    return x


def _empties_what_it_measured(s: Any, x: Tensor) -> Tensor:
    if s.c is None:
        return x * 10
    n, s.c = s.c.shape[0], None
    return x * n


def _fills_once(s: Any, x: Tensor) -> Tensor:
    if s.c is None:
        s.c = x.detach().clone()
    return x + s.c


def _grows(s: Any, x: Tensor) -> Tensor:
    s.c = x.clone() if s.c is None else torch.cat([s.c, x])
    return s.c.sum()


def _toggles(s: Any, x: Tensor) -> Tensor:
    old = getattr(s, "c", None)
    s.c = x + 1 if old is None else None
    return x * 2 if old is None else x * 3


def _deletes(s: Any, x: Tensor) -> Tensor:
    if getattr(s, "c", None) is None:
        return x * 7
    del s.c
    return x


def _resets_to_another_size(s: Any, x: Tensor) -> Tensor:
    if isinstance(s.c, Tensor):
        s.c = None
        return x
    s.c = torch.zeros(3)
    return x * 9


def _goes_through_buffers(s: Any, x: Tensor) -> Tensor:
    count = len(list(s.buffers()))
    s.c = None if count else x * 1
    return x * (count + 2)


def _in_its_dict(s: Any, x: Tensor) -> Tensor:
    held = s._buffers if "c" in s._buffers else s.__dict__
    y, held["c"] = held["c"], x * 2 if held["c"] is None else None
    return x if y is None else y


EMPTY_OR_NOT = (
    _empties,
    _empties_what_it_measured,
    _fills_once,
    _grows,
    _toggles,
    _deletes,
    _resets_to_another_size,
    _goes_through_buffers,
    _in_its_dict,
)


@pytest.mark.parametrize("use", EMPTY_OR_NOT, ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("kind", ["buffer", "attribute", "class"])
def test_an_attribute_of_a_module_is_empty_in_turns(kind: str, use: Callable[[Any, Tensor], Tensor]) -> None:
    """A buffer that a call binds counts by what it held before the call, as any attribute does."""

    def run(wrap: Callable[[Any], Any], is_full: bool) -> list[Any]:
        class Net(nn.Module):
            forward = use  # type: ignore[assignment]

        module, value = Net(), torch.ones(2) if is_full else None
        if kind == "buffer":
            module.register_buffer("c", value)
        else:
            (module if kind == "attribute" else Net).c = value
        step = wrap(module)
        return [(step(torch.ones(2) + i), getattr(module, "c", None)) for i in range(4)]

    for is_full in (True, False):
        if not (use in (_in_its_dict, _deletes) and kind == "class"):
            expected = run(lambda m: m, is_full)
            torch.testing.assert_close(run(lambda m: tfn.jit(lambda x: m(x)), is_full), expected)
            torch.testing.assert_close(run(tfn.jit, is_full), expected)


@pytest.mark.parametrize("is_argument", [True, False])
def test_a_buffer_that_is_bound_in_a_functional_call(is_argument: bool) -> None:
    """A stand-in for a buffer is no earlier value: the module has its own again, and its program serves each call."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.n = self.n + 1
            return x * self.n

    net, given = Counting(), {"n": torch.full((3,), 5.0)} if is_argument else {}
    own = net.n
    step = tfn.jit(lambda x, given: tfn.functional_call(net, given, (x,)))
    for call in range(4):
        x, count = torch.full((3,), 2.0), 6.0 + call if is_argument else 1.0 + call
        torch.testing.assert_close(step(x, given), x * count)
        assert (net.n is own) == is_argument
    assert tfn.cache_info(step).misses == 1


class _Made(nn.Module):
    """A module with a buffer and a plain attribute, which are read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", None)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if self.weight is None else x * self.weight


MADE: dict[str, Callable[[], nn.Module]] = {
    "criterion": nn.CrossEntropyLoss,
    "own": _Made,
    "nothing": nn.Identity,
    "two": lambda: nn.Sequential(_Made(), nn.ReLU()),
}


@pytest.mark.parametrize("name", MADE)
def test_a_module_that_the_function_makes_is_none_from_outside(name: str) -> None:
    make, targets = MADE[name], torch.tensor([1, 0])

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made = make()
            return made(x, targets) if name == "criterion" else made(x)

    model, x = Model(), torch.randn(2, 3)
    jitted, jitted_function = tfn.jit(model), tfn.jit(lambda x: model(x))
    for value in (x, x + 1, x + 2):
        for one in (jitted, jitted_function):
            torch.testing.assert_close(one(value), model(value))
        torch.testing.assert_close(tfn.vmap(model)(value.expand(2, 2, 3)), model(value).expand(2, *model(value).shape))
    assert (cache_info(jitted).misses, cache_info(jitted_function).misses) == (1, 1)
