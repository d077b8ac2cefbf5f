"""Reads of objects from outside after writes to them, in the same function or in one that it calls.

The value that counts for the next call is the one before the write. Each program writes, then reads, in four calls.
"""

from __future__ import annotations

import collections
import contextvars
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.capture.outside.reached import Reached

WRITES = {
    "L": """L.append(7); del L[0]; L.pop(); L.insert(0, 9); L[0] += 1; L[:1] = []; L.reverse(); L.extend([1, 2]);
        L[:] = [i + 1 for i in L]; L += [1]; list.append(L, 4); L.sort(key=lambda i: -i); L[-1], L[0] = L[0], L[-1]""",
    "D": """D['a'] += 1; D[len(D)] = 1; D.update(a=D['a'] + 2); D['b'], D['a'] = D['a'], D['b'] + 1;
        D.setdefault(len(D), 3); D.popitem() if len(D) > 3 else D.update({len(D): 1}); D |= {len(D): 2}""",
    "Q": "Q.append(7); Q.popleft(); Q.rotate(1); Q[0] += 1; Q.appendleft(Q[0] + 1)",
    "E": "E.add(len(E) + 1); E.update({len(E) + 5}); E ^= {7}; E.discard(min(E))",
    "b": """b.n += 1; b.l.append(b.n); b.l[0] += 1; b.d['k'].append(1); b.d['k'] = b.d['k'] + [2]; b.l = b.l + [1];
        b.l = [len(b.l)] + b.l; setattr(b, 'n', b.n * 2); vars(b)['n'] += 1; b.__dict__.update(n=b.n + 2)""",
    "s": "s.n += 1; s.l.append(s.n); s.l = [1] + s.l; s.n = s.n * 3",
    "m": "m.n += 1; m.l.append(m.n); m.l = [1] + m.l; m.n = m.n * 3; m.lin.n += 1; m.lin.l.append(2)",
    "N": "N[0].append(1); N.append([len(N)]); N[0], N[1] = N[1], N[0]; N[1][0] += 1; N[0] = N[0] + [2]",
}
READS = {
    "L": """sum(u); len(u); u[0]; u[-1]; max(u); sum(i for i in u); u[len(u) // 2]; u.index(u[-1]); sum(u[1:]); u.count(7);
        sorted(u)[1]; sum(map(abs, u)); (3 in u) + 1; int(str(u)[1]); sum(copy.copy(u)); sum(reversed(u));
        operator.itemgetter(0)(u); functools.reduce(operator.add, u); sum([*u, 1]); (u or [1])[0]; min(*u)""",
    "D": """u['a']; len(u); sum(u.values()); u.get('a', 0); sum(dict(u).values()); sum(v for k, v in u.items());
        sum({**u}.values()); list(u.values())[-1]; sum(u[k] for k in u); (len(u) in u) + 1; len(str(u))""",
    "Q": "sum(u); len(u); u[0]; u[-1]; list(u)[1]; max(u)",
    "E": "sum(u); len(u); (3 in u) + 1; max(u); sum(sorted(u)[:2]); (7 in u) + 2",
    "b": """u.n; sum(u.l); u.l[-1] + u.l[0]; sum(u.d['k']); len(u.d['k']); getattr(u, 'n'); vars(u)['n']; sum(copy.copy(u).l);
        copy.deepcopy(u).n; sum(copy.deepcopy(u).l); operator.attrgetter('n')(u); sum(sum(v) for v in u.d.values());
        len(str(vars(u))); len(json.dumps(u.d)); len(repr(sorted(vars(u).items())))""",
    "s": "u.n; sum(u.l); u.l[-1] + u.l[0]; copy.copy(u).n; getattr(u, 'n')",
    "m": "u.n; sum(u.l); u.l[-1] + u.l[0]; getattr(u, 'n'); vars(u)['n']; u.lin.n + len(u.lin.l)",
    "N": "sum(map(sum, u)); len(u); u[0][0]; u[-1][-1]; sum(sum(u, [])); sum(copy.deepcopy(u)[0]); len(str(u)); sum(u[0])",
}
WAYS = {
    "itself": "x * (lambda u: {read})({name})",
    "another": "x * value({name})",
    "deeper": "x * further(held={name})",
    "in a transform": "torch.func.vmap(lambda x: x * value({name}))(x[None])[0]",
}


class Slots:
    __slots__ = ("l", "n")

    def __init__(self) -> None:
        self.n, self.l = 1, [3]


def world() -> dict[str, Any]:
    """The objects, by name."""
    module = torch.nn.Sequential(collections.OrderedDict(lin=torch.nn.Identity()))
    for part, n in ((module, 2), (module.lin, 5)):
        part.n, part.l = n, [4]  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    b = types.SimpleNamespace(n=1, l=[1, 2], d={"k": [1]})
    digits = [1, 2, 3, 4, 5, 6]
    objects = {"L": digits, "D": {"a": 1, "b": 2}, "Q": collections.deque(digits), "E": {1, 2}, "b": b, "s": Slots()}
    return objects | {"m": module, "N": [[1], [2]]}


def plain(value: Any) -> Any:
    """An object as data that can be compared."""
    if isinstance(value, torch.nn.Module):
        return [plain({"n": part.n, "l": part.l}) for part in value.modules() if hasattr(part, "n")]
    if isinstance(value, Slots):
        return value.n, value.l
    return sorted(value) if isinstance(value, set) else str(value)


def calls(name: str, write: str, read: str, how: str, way: Callable[..., Any]) -> list[Any]:
    """Note the result, or what is raised, and the object after each of four calls."""
    objects = world()
    text = f"""
import copy, functools, json, operator, torch
def make({", ".join(objects)}):
    def value(u):
        return {read}
    def further(held):
        got = value(held)
        return got
    def f(x):
        nonlocal {name}
        {write}
        return {WAYS[how].format(name=name, read=read)}
    return f
"""
    names: dict[str, Any] = {}
    exec(text, names)
    f, found = way(names["make"](**objects)), list[Any]()
    for _ in range(4):
        try:
            result = f(torch.ones(1)).item()
        except (LookupError, ValueError, TypeError) as error:
            result = next(kind for kind in (IndexError, KeyError, ValueError, TypeError) if isinstance(error, kind))
        found.append((result, plain(objects[name])))
    return found


ROWS = [
    (name, write.strip(), read.strip(), how)
    for name in WRITES
    for write in WRITES[name].split(";")
    for read in READS[name].split(";")
    for how in WAYS
]
random.Random(0).shuffle(ROWS)


@pytest.mark.parametrize("part", range(0, len(ROWS), 16))
def test_reads_after_writes(part: int) -> None:
    for row in ROWS[part : part + 16]:
        expected = calls(*row, lambda f: f)
        assert calls(*row, tfn.jit) == expected, row


def test_a_guard_of_what_was_written_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: what a list holds when it is read counts, not what it held before."""
    row = "L", "L.append(7)", "sum(u)", "another"
    monkeypatch.setattr(Reached, "at_first", lambda self, kind, holder, key, now: now)  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    assert calls(*row, tfn.jit) != calls(*row, lambda f: f)


def test_what_is_appended_moves_no_item() -> None:
    """A list that gets longer and is read at its beginning: one program."""
    held = [torch.ones(2)]
    first = lambda items: items[0]

    def f(x: torch.Tensor) -> Any:
        held.append(x)
        return first(held)

    jitted = tfn.jit(f)
    for _ in range(3):
        assert jitted(torch.zeros(2)) is held[0]
    assert tfn.cache_info(jitted).misses == 1


class Counting(torch.nn.Module):
    rate = 2

    def __init__(self) -> None:
        super().__init__()
        self.n, self.items = 1, [1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        self.items.append(self.n)
        return x * self.n


@pytest.mark.parametrize("way", [tfn.jit, tfn.compile])
def test_a_number_of_a_refused_attempt_is_put_back(way: Callable[..., Any]) -> None:
    """A counter is an input of the first attempt, which is refused, and a constant of the second."""
    net = Counting()

    def f(x: torch.Tensor) -> torch.Tensor:
        Counting.rate = len(net.items)
        return net(x)

    jitted = way(f)
    assert [jitted(torch.ones(())).item() for _ in range(4)] == [2, 3, 4, 5]
    assert (net.n, net.items, Counting.rate) == (5, [1, 2, 3, 4, 5], 4)


NAMES = """
import contextvars, functools, os, types
N, LIST = 1, [1]
class C:
    k, ks = 1, [1]
    p = property(lambda self: self.k * 2)
    def get(self):
        return self.k
    @classmethod
    def of_class(cls):
        return cls.k
    @staticmethod
    def static():
        return C.k
current = contextvars.ContextVar("current", default=1)
def function():
    return function.k
function.k = 1
def of_globals():
    return N
def remembering(v=[1]):
    v.append(len(v))
    return sum(v)
def peek(v=LIST):
    return v[-1]
def make():
    n, held, c, d = 1, [1], C(), types.SimpleNamespace(k=1)
    get, total, part = lambda: n, lambda: sum(held), functools.partial(sum, held)
    def bump():
        nonlocal n
        n += 1
        return n
    def f(x):
        global N
        nonlocal n
        WRITE
        return x * (READ)
    return f
"""
WRITES_OF_NAMES = """
n += 1; n = n * 2; bump(); N += 1; N = N * 3; LIST.append(N); C.k += 1; C.k = C.k * 2; c.k += 1; c.k = C.k + c.k; C.ks.append(1);
function.k += 1; function.k *= 2; held.append(n); held[0] += 1; current.set(current.get() + 1); globals()["N"] = N + 1;
os.environ["TFN_N"] = str(int(os.environ.get("TFN_N", "1")) + 1); setattr(C, "k", C.k + 2); d.k = len(held) + d.k; remembering();
peek.__defaults__[0].append(4); get.__closure__[0].cell_contents += 1; get.__closure__[0].cell_contents = n + 2
"""
READS_OF_NAMES = """
get(); total(); bump(); of_globals(); sum(LIST); c.get(); c.p; C.of_class(); C.static(); c.of_class(); function(); part();
current.get(); int(os.environ.get("TFN_N", "1")); (lambda: n)(); (lambda: N)(); sum([n for _ in held]); remembering(); peek();
len(C.ks); max(n, N, C.k); (lambda o: o.k)(d); next(iter([n])); functools.reduce(lambda a, b: a + n, held, 0)
"""


def calls_of_names(write: str, read: str, way: Callable[..., Any]) -> list[Any]:
    names: dict[str, Any] = {"__name__": __name__}
    exec(NAMES.replace("WRITE", write.strip()).replace("READ", read.strip()), names)
    f = way(names["make"]())
    results = [f(torch.ones(1)).item() for _ in range(4)]
    return [*results, names["N"], names["LIST"], vars(names["C"])["k"], names["C"].ks, names["function"].k]


@pytest.mark.parametrize("read", READS_OF_NAMES.split(";"))
def test_reads_of_names_after_writes(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells, globals, classes, functions, defaults, context variables and the environment."""
    for write in WRITES_OF_NAMES.split(";"):
        found = list[list[Any]]()
        for way in (lambda f: f, tfn.jit):
            monkeypatch.setenv("TFN_N", "1")
            found.append(contextvars.copy_context().run(calls_of_names, write, read, way))
        assert found[0] == found[1], (write, read)
