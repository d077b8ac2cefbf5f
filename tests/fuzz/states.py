"""`python -m tests.fuzz.states --seed 7 --programs 500 [--how compile]`: programs that read and change Python's objects.

A program is a function and what changes its objects between the calls, as text. After each of five calls, its result and all
objects, and which of them are the same, have to be those of eager PyTorch, or the function is refused. What differs is shrunk.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import re
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import thunder_fn as tfn
from thunder_fn.errors import ThunderError

WORLD = """
import dataclasses
from collections import OrderedDict, defaultdict, deque
import numpy as np
import torch
from torch import nn

class Slots:
    __slots__ = ("n", "t", "items", "last", "pair")
    def __init__(self):
        self.n, self.t, self.items, self.last, self.pair = 1, torch.ones(3), [3], None, (1, 2)

class Mixed(Slots):
    pass

class Box:
    rate = 2
    def __init__(self):
        self.n, self.f, self.flag, self.mode, self.last, self.pair = 3, 0.5, True, "a", None, (1, 2)
        self.items, self.table, self.t = [1, 2, 3], {"a": 1, "b": 2}, torch.arange(3.0)
        self.ts, self.tt = [torch.ones(3), torch.full((3,), 2.0)], {"p": torch.full((3,), 3.0)}
    def bump(self, v, by=1):
        self.n += by
        self.items.append(self.n)
        return v * self.n + self.t
    def swap(self, other):
        self.t, other.t = other.t, self.t
        self.items, other.items = other.items, self.items
    def average(self, v):
        is_first = not isinstance(self.last, torch.Tensor)
        self.last = v.detach() if is_first else 0.5 * self.last + 0.5 * v.detach()
        return v - self.last
    @property
    def twice(self):
        return self.n * 2

class Net(nn.Module):
    rate = 3
    def __init__(self, sub=None):
        super().__init__()
        self.lin, self.sub = nn.Linear(3, 3), sub
        self.register_buffer("t", torch.arange(3.0))
        self.n, self.f, self.flag, self.mode, self.last, self.pair = 2, 1.5, False, "b", None, (3, 1)
        self.items, self.table = [4, 5], {"a": 3}
        self.ts, self.tt = [torch.full((3,), 4.0)], {"p": torch.full((3,), 5.0)}
    bump, swap, average, twice = Box.bump, Box.swap, Box.average, Box.twice

@dataclasses.dataclass
class Data:
    n: int = 1
    t: object = None
    items: list = dataclasses.field(default_factory=list)

def make():
    torch.manual_seed(0)
    box, net, slots, mixed = Box(), Net(Net()), Slots(), Mixed()
    box.other, data = Box(), Data(2, torch.ones(3), [1])
    G = {"n": 1, "f": 0.25, "items": [7, 8], "t": torch.ones(3), "flag": True, "last": None}
    cell, cellt, nums, tens = 2, torch.full((3,), 7.0), [1, 2], [torch.zeros(3), torch.ones(3)]
    queue, kept, found = deque([1, 2], maxlen=4), deque([torch.ones(3)], maxlen=3), {1, 2}
    od, counts = OrderedDict(a=torch.ones(3), b=torch.zeros(3)), defaultdict(int)
    array, par = np.arange(3.0), nn.Parameter(torch.full((3,), 2.0))
"""
END = """    world = [box, net, slots, mixed, data, G, nums, tens, queue, kept, found, od, counts, array, par]
    return f, [m0, m1, m2, m3], world, lambda: (cell, cellt)
"""
RULES: dict[
    str, str
] = {  # alternatives, one in each line; <name> is one of a rule's, and written twice, twice as often
    "obj": "box\nnet\nnet.sub\nbox.other",
    "any": "<obj>\n<obj>\nslots\nmixed\ndata",
    "key": "a\nb\nc",
    "small": "0\n1\n2\n3",
    "num": """
<any>.n
<any>.n
<obj>.f
<obj>.twice
type(<obj>).rate
<obj>.pair[1]
len(<list>)
sum(<list>)
<obj>.table.get('<key>', 0)
G['n']
cell
len(<tensors>)
<small>
x.shape[0]
len(queue)
sum(queue)
len(found)
counts['k']
len(kept)
float(array[1])
a['n']
sum(a['l'])""",
    "list": "<any>.items\n<any>.items\nG['items']\nnums",
    "tensors": "<obj>.ts\ntens",
    "test": """
<obj>.flag
<obj>.mode == '<key>'
<obj>.last is None
<num> > <small>
<num> == <num>
G['flag']
'<key>' in <obj>.table
<small> in <list>
not <list>
<list> is <list>
<obj>.t is <obj>.t
net.training
isinstance(<obj>.last, torch.Tensor)
hasattr(<any>, 'extra')""",
    "tensor": """
v
v
v
x.sum(0)
<any>.t
<obj>.tt['p']
G['t']
cellt
<tensors>[-1]
(<obj>.last if isinstance(<obj>.last, torch.Tensor) else v)
net.lin(v)
net.sub.lin(v)
par
od['a']
next(iter(od.values()))
kept[-1]
a['t']
<obj>.bump(v)
<obj>.average(v)""",
    "value": """
<tensor> * <num>
<tensor> + <num>
<tensor> + <tensor>
<tensor> * <tensor>
<tensor>.sin()
<tensor>""",
    "number": "<num> + 1\n<num>\n<num> * 2 % 7\n<num> + <num>\n<small>",
    "write": """
<any>.n = <number>
<any>.n += 1
<any>.n -= 1
<obj>.f = 1.5
<obj>.flag = not <obj>.flag
<obj>.mode = '<key>'
<obj>.last = <new>
<obj>.last = None
slots.last = <new>
<list>.append(<number>)
<list>.append(<number>)
<list>[:1] = []
<list>.extend(<list>[:2])
<list>.reverse()
<list>.sort()
<list>[:] = <list>[-3:]
<list>.insert(0, <number>)
<any>.items = <list>
<any>.items = list(<list>)
<any>.items = <list> + [1]
<any>.items, <any>.items = <list>, <list>
<obj>.table['<key>'] = <number>
<obj>.table.pop('<key>', None)
<obj>.table.update(c=<number>)
<obj>.table.setdefault('c', <number>)
<obj>.table = dict(<obj>.table)
<obj>.table = <obj>.table
<obj>.pair = (<number>, <number>)
<any>.t = <new>
<any>.t = <any>.t
<any>.t.add_(1)
<obj>.t.mul_(<num>)
<obj>.t.copy_(<plain>)
<tensors>.append(<new>)
<tensors>[-1] = <new>
<tensors>[:] = <tensors>[-2:]
<tensors>.reverse()
<tensors>[0].add_(1)
<obj>.ts = <tensors>
<obj>.ts = [*<tensors>]
<obj>.tt['<key>'] = <new>
G['n'] = <number>
G['flag'] = not G['flag']
G['t'] = <new>
G['items'] = <list>
<any>.n, <any>.n = <num>, <num>
<obj>.extra = <number>
if hasattr(<obj>, 'extra'): del <obj>.extra
mixed.extra = <number>
setattr(<obj>, 'n', <number>)
type(<obj>).rate = <number>
net.train(not net.training)
net.sub.eval()
queue.append(<number>)
if queue: queue.popleft()
found.add(<small>)
found.discard(<small>)
counts['k'] += 1
counts['<key>'] = <number>
od['<key>'] = <new>
od.move_to_end('a')
kept.append(<new>)
array[1] += 1
<obj>.swap(<obj>)
<obj>.bump(<plain>)
with torch.no_grad(): par.add_(1)
cell = <number>
cellt = <new>""",
    "write inside": "<write>\n" * 9 + "a['l'].append(<number>)\na['new'] = <new>\na['t'] = <new>\na['n'] = <number>",
    "new": "(<value>).detach()\n(<value>).detach()\n<value>",
    "plain": "v.detach()",
    "items": "list(<list>)[:4]\n<list>[:4]\nrange(min(box.n, 3))\nlist(<obj>.table.values())\nlist(<tensors>)[-3:]",
}
OUTSIDE = {"new": "torch.ones(3) * <small>\n<obj>.t.detach() + 1\n<obj>.t.detach()", "plain": "torch.ones(3)"}
NO_ARGUMENTS = re.compile(r"\b(x|a|v)\b[.\[]|\bv\b")
"""Names of the arguments and of the local, which do not exist outside of the function."""


class Drawn:
    """A program drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.random, self.names = random.Random(seed), itertools.count()

    def one(self, rule: str, rules: dict[str, str] = RULES) -> str:
        """Expand a rule."""
        text = self.random.choice(rules[rule].strip().splitlines())
        return re.sub(r"<([a-z ]+)>", lambda match: self.one(match[1], rules), text)

    def change(self) -> str:
        """A statement outside of the function."""
        while NO_ARGUMENTS.search(text := self.one("write", RULES | OUTSIDE)):
            pass
        return text

    def statement(self, depth: int) -> Iterator[str]:
        kind = self.random.random()
        if kind < 0.35 or (kind > 0.8 and depth == 2):
            yield f"v = {self.one('value')}"
        elif kind < 0.8:
            yield self.one("write inside")
        else:
            item = f"k{next(self.names)}"
            head = f"for {item} in {self.one('items')}:" if kind > 0.9 else f"if {self.one('test')}:"
            body = [f"v = v + {item}"] if kind > 0.9 else []
            yield head
            yield from (f"    {line}" for line in [*body, *self.body(depth + 1, 2)])

    def body(self, depth: int, most: int) -> list[str]:
        return [line for _ in range(self.random.randint(1, most)) for line in self.statement(depth)]

    def text(self) -> str:
        """The program: the objects, the function, and four functions that change the objects between its calls."""
        results = self.random.choice(["v", f"v, {self.one('num')}, {self.one('tensor')}", f"v, {self.one('list')}"])
        lines = ["    def f(x, a):", "        nonlocal cell, cellt", "        v = x.sum(0)"]
        lines += [f"        {line}" for _ in range(self.random.randint(2, 4)) for line in self.body(0, 2)]
        lines += [f"        return {results}"]
        for number in range(4):
            changes = [self.change() for _ in range(self.random.randint(0, 2))]
            lines += [f"    def m{number}():", "        nonlocal cell, cellt", *(f"        {one}" for one in changes)]
        return WORLD + "\n".join(lines) + "\n" + END


def content(value: Any, met: dict[Any, int]) -> Any:
    """Take objects apart, in order, and tell which of them, and which memories of tensors, are the same."""
    if value is None or isinstance(value, (bool, int, str)):
        return type(value).__name__, value
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if id(value) in met:
        return f"number {met[id(value)]}"
    met[id(value)] = len(met)
    if isinstance(value, torch.Tensor):
        memory = met.setdefault(("memory", value.untyped_storage().data_ptr()), len(met))
        numbers = [float(f"{number:.4g}") for number in value.detach().flatten().tolist()]
        return type(value).__name__, str(value.dtype), tuple(value.shape), numbers, value.requires_grad, memory
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, [content(item, met) for item in value]
    if isinstance(value, dict):
        return [(key, content(item, met)) for key, item in value.items()]
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    fields = [(name, content(item, met)) for name, item in _fields(value).items()]
    return type(value).__name__, getattr(type(value), "rate", None), fields


def _fields(value: Any) -> dict[str, Any]:
    fields = {name: it for name, it in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    for cls in type(value).__mro__:
        fields |= {name: getattr(value, name) for name in getattr(cls, "__slots__", ()) if hasattr(value, name)}
    if isinstance(value, torch.nn.Module):
        fields |= {**dict(value.named_parameters(recurse=False)), **dict(value.named_buffers(recurse=False))}
        fields |= dict(value.named_children())
    return fields


WAYS: dict[str, Callable[..., Any]] = {"eager": lambda f: f, "jit": tfn.jit, "compile": tfn.compile}


def play(text: str, how: str) -> list[Any]:
    """Run five calls and note results and objects after each. The last item is an exception, if any."""
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, "<states>", "exec"), names)
    f, changes, world, cells = names["make"]()
    f, log, kept = WAYS[how](f), list[Any](), list[Any]()
    for call, rows in enumerate((2, 2, 4, 2, 4)):
        a = {"t": torch.full((3,), call + 1.0), "l": [1, 2], "n": 2}
        kept.append(a)  # else another object may have its identity
        try:
            result = f(torch.full((rows, 3), 0.25 * (call + 1)), a)
            log.append(content([result, world, cells(), a], {}))
            changes[min(call, 3)]()
        except Exception as error:  # noqa: BLE001 - eager PyTorch raises it, too, or it is a difference
            return [*log, error]
    return log


@dataclasses.dataclass(frozen=True)
class Found:
    """The difference from eager PyTorch: `same`, `refused`, or what is wrong at which call."""

    kind: str
    call: int = 0
    why: str = ""

    @property
    def is_difference(self) -> bool:
        return self.kind not in ("same", "refused")


def judge(text: str, how: str) -> Found:
    """Compare a program with eager PyTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, got = play(text, "eager"), play(text, how)
    for call, (ours, its) in enumerate(zip(got, expected, strict=False)):
        if isinstance(ours, Exception) and not isinstance(its, Exception):
            is_refused = isinstance(ours, ThunderError) and how == "jit"
            return Found("refused" if is_refused else "error", call, f"{type(ours).__name__}: {ours}")
        if isinstance(ours, Exception) or isinstance(its, Exception):
            return Found("same" if isinstance(ours, Exception) else "no error", call)
        if ours != its:
            return Found("state", call, next(_differences(its, ours, ""), ""))
    return Found("same")


def _differences(its: Any, ours: Any, path: str) -> Iterator[str]:
    if isinstance(its, (list, tuple)) and type(its) is type(ours) and len(its) == len(ours):
        for place, pair in enumerate(zip(its, ours, strict=True)):
            yield from _differences(*pair, f"{path}.{place}")
    elif its != ours:
        yield f"at {path[1:]}: {its} in eager, {ours} in ours"


def shrink(text: str, how: str) -> str:
    """Leave statements out as long as the program differs in the same way."""
    kind, lines, is_smaller = judge(text, how).kind, text.splitlines(), True
    first = lines.index("    def f(x, a):")
    while is_smaller:
        is_smaller = False
        for place in range(len(lines) - 1, first, -1):
            one = lines[place] if place < len(lines) else ""
            if not one.startswith(" " * 8) or one.strip().startswith(("return", "nonlocal")):
                continue
            indent = len(one) - len(one.lstrip())
            below = itertools.takewhile(lambda line: line.startswith(" " * (indent + 1)), lines[place + 1 :])
            after = lines[place + 1 + len([*below]) :]
            smaller = [*lines[:place], *after]
            if _is_still("\n".join(smaller) + "\n", how, kind):
                lines, is_smaller = smaller, True
    return "\n".join(lines) + "\n"


def _is_still(text: str, how: str, kind: str) -> bool:
    try:
        return judge(text, how).kind == kind
    except SyntaxError:
        return False


def shown(text: str) -> str:
    """A program without the objects that all have in common."""
    return text[text.index("    def f(x, a):") : text.index("    world = ")]


def main() -> None:
    """Draw programs and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**8))
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--how", choices=("jit", "compile"), default="jit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"seed {options.seed}, by {options.how}")
    end, kinds = time.monotonic() + options.seconds, dict[str, int]()
    for seed in range(options.seed, options.seed + options.programs):
        if time.monotonic() > end:
            break
        found = judge(text := Drawn(seed).text(), options.how)
        kinds[found.kind] = kinds.get(found.kind, 0) + 1
        if found.is_difference:
            print(f"\nseed {seed}, call {found.call}: {found.kind}: {found.why[:500]}")
            print(shown(shrink(text, options.how)), flush=True)
    print(kinds)
    raise SystemExit(any(Found(kind).is_difference for kind in kinds))


if __name__ == "__main__":
    main()
