"""The statements that drawn programs about Python's objects are made of: `Drawn(seed).text()` is one program.

A program is text: the objects, a function that reads and changes them, and what changes them between its calls.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator

WORLD = """
import contextlib
import contextvars
import copy
import dataclasses
import enum
import functools
import itertools
import operator
import random
import threading
import weakref
from array import array as numbers
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque, namedtuple
from concurrent.futures import Future
from types import SimpleNamespace
import numpy as np
import torch
from torch import nn
import thunder_fn as tfn

COUNT, LOG = 1, [1]
Point = namedtuple("Point", "a b")

def tick(by=1):
    global COUNT
    COUNT += by
    LOG.append(COUNT)
    return COUNT

def total(items, start=0):
    return sum(items, start)

def peek(it, name="n"):
    return getattr(it, name)

def last(items):
    return items[-1] if items else 0

def in_thread(call, *args):
    future = Future()
    def run():
        try:
            future.set_result(call(*args))
        except Exception as error:
            future.set_exception(error)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return future.result()

async def later(value):
    return value

def awaited(coroutine):
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value

@functools.lru_cache
def remembered(number):
    LOG.append(number)
    return number * 2

def asking(box):
    got = 0
    while True:
        got = yield box.n + (got or 0)
        box.n += 1

class Mode(enum.Enum):
    A, B = 1, 2

def walk(box, times=2):
    for i in range(times):
        box.n += i
        yield box.n

@contextlib.contextmanager
def scaled(box):
    old, box.f = box.f, box.f + 1
    try:
        yield box.f
    finally:
        box.f = old
        box.n += 1

class Scope:
    def __init__(self, box, by=1):
        self.box, self.by = box, by
    def __enter__(self):
        self.box.n += self.by
        return self.box.n
    def __exit__(self, kind, error, trace):
        self.box.n -= 2
        return kind is not None and issubclass(kind, LookupError)

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
        self.grid, self.kind = [[1, 2], [3]], Mode.A
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
        self.grid, self.kind = [[4], [5, 6]], Mode.B
        self.mods, self.named = nn.ModuleList([nn.Linear(3, 3)]), nn.ModuleDict({"a": nn.Tanh()})
        self.pars = nn.ParameterList([nn.Parameter(torch.ones(3))])
    bump, swap, average, twice = Box.bump, Box.swap, Box.average, Box.twice

class Guarded:
    def __init__(self):
        self.__dict__.update(writes=0, n=2, t=torch.ones(3), items=[5])
    def __setattr__(self, name, value):
        self.__dict__["writes"] += 1
        super().__setattr__(name, value)

class Lazy:
    def __init__(self):
        self.__dict__["store"] = {"n": 2, "t": torch.full((3,), 6.0), "items": [6]}
    def __getattr__(self, name):
        if name not in self.__dict__.get("store", ()):
            raise AttributeError(name)
        return self.store[name]
    def __setattr__(self, name, value):
        self.store[name] = value

class Twice:
    def __set_name__(self, owner, name):
        self.name = name + "_kept"
    def __get__(self, it, owner=None):
        return self if it is None else it.__dict__.get(self.name, 1)
    def __set__(self, it, value):
        it.__dict__[self.name] = 2 * value

class Vec:
    level, doubled = property(lambda self: len(self.xs) + self.by), Twice()
    def __init__(self, *xs):
        self.xs, self.by, self.n, self.t, self.items = list(xs), 1, 3, torch.ones(3), [9]
    @level.setter
    def level(self, value):
        self.by = value - len(self.xs)
    @functools.cached_property
    def cached(self):
        return self.n * 10
    def __len__(self):
        return len(self.xs)
    def __bool__(self):
        return self.n > 2
    def __getitem__(self, place):
        return self.xs[place]
    def __setitem__(self, place, value):
        self.xs[place] = value
    def __delitem__(self, place):
        del self.xs[place]
    def __iter__(self):
        return iter(self.xs)
    def __contains__(self, value):
        return value in self.xs
    def __call__(self, v):
        self.n += 1
        return v * self.by
    def __iadd__(self, other):
        self.xs.extend(other)
        return self

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
    guarded, lazy, vec, fs = Guarded(), Lazy(), Vec(1, 2, 3), {}
    G["vec"], G["point"] = vec, Point(1, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    adam = torch.optim.Adam([par], lr=0.1)
    sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    var, ticks, ask, rng = contextvars.ContextVar("var", default=1), itertools.count(1), asking(Slots()), random.Random(7)
    next(ask)
    chain, bag, raw, view = ChainMap({}, {"a": 1, "b": 2}), Counter("aab"), bytearray(b"ab"), numbers("d", [1.0, 2.0])
    space, ref, words = SimpleNamespace(n=1, t=torch.ones(3), items=[2]), weakref.ref(box), ["p", "q"]
    remembered.cache_clear()
"""
END = """    world = [box, net, slots, mixed, data, G, nums, tens, queue, kept, found, od, counts, array, par, guarded]
    world += [lazy, vec, chain, bag, space, words]
    cells = lambda: (
        *(cell, cellt, COUNT, LOG, opt.state_dict(), adam.state_dict(), sched.last_epoch, var.get(), repr(ticks)),
        *(ask.gi_frame.f_locals["got"], list(raw), view.tolist(), rng.getstate()[1][-1]),
    )
    return f, g, fs, [m0, m1, m2, m3], world, cells
"""
RULES: dict[
    str, str
] = {  # alternatives, one in each line; <name> is one of a rule's, and written twice, twice as often
    "obj": "box\nnet\nnet.sub\nbox.other",
    "any": "<obj>\n<obj>\n<obj>\nslots\nmixed\ndata\nguarded\nlazy\nvec",
    "key": "a\nb\nc",
    "table": "<net>.table",
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
max(<list>, default=0)
total(<list>)
total(<list>, start=<small>)
last(<list>)
last(<any>.items)
peek(<any>)
len(peek(<any>, 'items'))
total(peek(<any>, 'items'))
(lambda items: len(items) + items[0] if items else 1)(<list>)
sum(i * 2 for i in <list>)
len([i for i in <list> if i % 2])
next((i for i in <list> if i > 2), 0)
sum(map(lambda i: i + <small>, <list>))
sorted(<list>, key=lambda i: -i)[0]
(lambda k: k + <any>.n)(<small>)
vec[0]
vec[-1]
len(vec)
sum(vec)
vec.level
vec.doubled
vec.cached
guarded.writes
G['point'].a
COUNT
LOG[-1]
tick()
getattr(<any>, 'n')
vars(<obj>)['n']
operator.attrgetter('n')(<any>)
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
sum(a['l'])
var.get()
next(ticks)
ask.send(<small>)
rng.randint(0, 3)
chain['a']
chain.maps[0].get('b', 5)
bag['<key>']
bag.total()
raw[0]
view[1]
space.n
ref().n
words.index('q')
len(words[0])
<net>.kind.value
len(<net>.grid)
<net>.grid[0][-1]
sum(sum(row) for row in <net>.grid)
sum(itertools.chain(*<net>.grid))
len([*itertools.islice(itertools.cycle(<list> or [1]), 3)])
remembered(<small>)
copy.copy(<obj>).n
len(copy.deepcopy(<list>))
awaited(later(<small>))
in_thread(operator.add, <num>, <small>)
opt.param_groups[0]['lr']
adam.param_groups[0]['betas'][0]
len(adam.state)
sched.get_last_lr()[0]
len(net.mods)
net.mods[0].in_features
len(net.pars)""",
    "net": "box\nnet\nnet.sub\nbox.other",
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
hasattr(<any>, 'extra')
any(i > 3 for i in <list>)
all(<list>)
vec
<small> in vec
(k := <num>) > k % 3
isinstance(<any>, Vec)
<net>.kind is Mode.A
'q' in words
'b' in chain
'a' in net.named
ref() is box""",
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
<obj>.average(v)
<obj>.bump(*[v], **{'by': <small>})
functools.partial(<obj>.bump, by=<small>)(v)
vec(v)
par.grad if par.grad is not None else v
net.lin.weight.grad[0] if net.lin.weight.grad is not None else v
torch.func.grad(lambda u: (u * u * <num>).sum())(<plain>)
torch.func.vmap(lambda u: u * <num>)(x).sum(0)
tfn.grad(lambda u: (u * u * <num>).sum())(<plain>)
tfn.jvp(lambda u: u * u * <num>, (<plain>,), (<plain>,))[1]
tfn.vmap(lambda u: u * <num>)(x).sum(0)
tfn.checkpoint(lambda u: u.sin() * <num>)(v)
in_thread(torch.mul, <tensor>, <num>)
awaited(later(<tensor>))
space.t
net.mods[-1](v)
net.named['a'](v)
net.pars[0] * v
copy.copy(<obj>).t
copy.deepcopy(<any>).t
torch.nn.utils.parameters_to_vector(net.lin.parameters())[:3]
fs['g'](x, a)
sum(<tensors>)
total(<tensors>)
last(<tensors>)
peek(<any>, 't')
torch.stack([*<tensors>]).sum(0)""",
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
guarded.n = <number>
guarded.t = <new>
lazy.n += 1
lazy.t = <new>
vec[0] = <number>
vec[<small>] += 1
del vec[0]
vec.level = <number>
vec.level += 1
vec.doubled = <number>
vec.xs = <list>
vec.xs.append(<number>)
operator.iadd(vec, [<number>])
vec.cached = <number>
vars(vec).pop('cached', None)
tick()
tick(<small>)
LOG.append(<num>)
LOG[:] = LOG[-2:]
G['point'] = G['point']._replace(a=<number>)
vars(<obj>)['n'] = <number>
<obj>.__dict__.update(n=<number>)
object.__setattr__(guarded, 'n', <number>)
list.append(<list>, <number>)
operator.setitem(<obj>.table, '<key>', <number>)
[<list>.append(i) for i in range(2)]
<list>.pop()
<list>.remove(<small>)
<list>[<small>] = <number>
del <list>[-1]
<obj>.table.popitem()
del <obj>.table['<key>']
opt.zero_grad()
opt.step()
(net.lin(<plain>) * <num>).sum().backward()
(par * <plain>).sum().backward()
par.grad = None
opt.param_groups[0]['lr'] = 0.1 * <small>
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
cellt = <new>
var.set(<number>)
next(ticks)
ask.send(<number>)
rng.random()
chain['<key>'] = <number>
chain.maps[1]['a'] = <number>
chain.pop('<key>')
bag['<key>'] += 1
bag.update('ab')
bag.subtract({'a': <number>})
raw[0] = <small>
raw.extend(b'c')
view[0] += 1
view.append(<num>)
space.n += 1
space.t = <new>
space.extra = <number>
ref().n += 1
words.append('<key>')
words[0] += 'q'
words.sort()
<net>.kind = Mode.B
<net>.grid[0].append(<number>)
<net>.grid[-1][0] = <number>
<net>.grid.append([<number>])
<net>.grid.append(<list>)
<net>.grid.reverse()
<net>.grid[0], <net>.grid[-1] = <net>.grid[-1], <net>.grid[0]
<net>.grid = copy.deepcopy(<net>.grid)
<net>.grid = [row for row in <net>.grid if <small> in row] or [[1]]
remembered(<number>)
remembered.cache_clear()
adam.step()
adam.zero_grad(set_to_none=False)
sched.step()
adam.param_groups[0]['betas'] = (0.1 * <small>, 0.9)
opt.add_param_group({'params': [nn.Parameter(<new>)]}) if len(opt.param_groups) < 3 else None
net.mods.append(nn.Linear(3, 3)) if len(net.mods) < 3 else None
net.named['b'] = nn.Sigmoid()
if 'b' in net.named: net.named.pop('b')
net.pars.append(nn.Parameter(<new>)) if len(net.pars) < 3 else None
net.lin.bias = nn.Parameter(<new>)
net.sub, net.lin = net.sub, nn.Linear(3, 3, bias=False)
net.load_state_dict(net.state_dict())
net.requires_grad_(False)
net.lin.requires_grad_(bool(<test>))
net.register_buffer('t', <new>)
if hasattr(net, 'extra'): del net.extra
net.lin.register_forward_hook(lambda m, args, out: out + <num>) if len(net.lin._forward_hooks) < 2 else None
net.zero_grad()
nn.init.constant_(net.lin.weight, <num>)
nn.utils.clip_grad_norm_(net.parameters(), 0.5)
torch.manual_seed(<small>)
random.seed(<small>)""",
    "write inside": "<write>\n" * 9 + "a['l'].append(<number>)\na['new'] = <new>\na['t'] = <new>\na['n'] = <number>",
    "new": "(<value>).detach()\n(<value>).detach()\n<value>",
    "plain": "v.detach()",
    "raising": """
nums[99]
<obj>.table['zz']
<any>.missing
raise ValueError(<num>)
if <test>: raise KeyError(<num>)
if <test>: raise StopIteration
next(iter(()))
net.mods[9]
int('q')
<num> // 0
torch.ones(2) + torch.ones(3)
<list>.remove(77)
assert <test>, 'no'""",
    "caught": """
Exception
Exception as error
(KeyError, IndexError, ValueError)
LookupError
(ValueError, AttributeError) as error
BaseException""",
    "context": """
Scope(<any>)
Scope(<any>, <small>)
scaled(<obj>)
contextlib.suppress(LookupError)
contextlib.suppress(Exception)
torch.no_grad()
contextlib.nullcontext()""",
    "loop": """
k, i in enumerate(<list>[:4])
k, i in zip(<list>, range(3))
k in [*walk(<any>)]
k in walk(<any>)
k in reversed(<list>)
k in sorted(<list>)[:3]
k in filter(None, list(<list>))
k in [*vec][:4]
k in (i + 1 for i in list(<list>)[:2])""",
    "items": """
list(<list>)[:4]
<list>[:4]
range(min(box.n, 3))
list(<obj>.table.values())
list(<tensors>)[-3:]
[i * 2 for i in <list>][:3]
list(vec)[:4]""",
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
        if kind < 0.35 or (kind > 0.72 and depth == 2):
            yield f"v = {self.one('value')}"
        elif kind < 0.72:
            yield self.one("write inside")
        else:
            compound = self.random.choice(COMPOUND)
            yield from compound(self, depth + 1)

    def indented(self, depth: int, *first: str, most: int = 2) -> list[str]:
        return [f"    {line}" for line in [*first, *self.body(depth, most)]]

    def choice(self, depth: int) -> Iterator[str]:
        yield f"if {self.one('test')}:"
        yield from self.indented(depth)
        if self.random.random() < 0.3:
            yield "else:"
            yield from self.indented(depth, most=1)

    def loop(self, depth: int) -> Iterator[str]:
        item = f"k{next(self.names)}"
        yield f"for {item} in {self.one('items')}:"
        yield from self.indented(depth, f"v = v + {item}")

    def other_loop(self, depth: int) -> Iterator[str]:
        yield f"for {self.one('loop')}:"
        first = ["v = v + k"]
        if self.random.random() < 0.3:
            first.append(f"if {self.one('test')}: {self.random.choice(['break', 'continue'])}")
        yield from self.indented(depth, *first, most=1)

    def shortening(self, depth: int) -> Iterator[str]:
        items = self.one("list")
        yield f"while len({items}) > {self.one('small')}:"
        yield f"    v = v + {items}.pop()"

    def trying(self, depth: int) -> Iterator[str]:
        yield "try:"
        yield from self.indented(depth, most=1)
        if self.random.random() < 0.8:
            yield f"    {self.one('raising')}"
            yield from self.indented(depth, most=1)
        yield f"except {self.one('caught')}:"
        yield from self.indented(depth, most=1)
        for clause, chance in (("else:", 0.2), ("finally:", 0.3)):
            if self.random.random() < chance:
                yield clause
                yield from self.indented(depth, most=1)

    def context(self, depth: int) -> Iterator[str]:
        yield f"with {self.one('context')}:"
        yield from self.indented(depth)
        if self.random.random() < 0.3:
            yield f"    {self.one('raising')}"

    def function(self, depth: int) -> Iterator[str]:
        name = f"g{next(self.names)}"
        yield f"def {name}(u, k={self.one('num')}):"
        yield from self.indented(depth, "nonlocal v, cell, cellt")
        yield f"    return u * k + {self.one('tensor')}"
        yield from self.body(depth, 1)
        yield f"v = {name}(v{self.random.choice(['', ', 2', ', k=' + self.one('num')])})"

    def matching(self, depth: int) -> Iterator[str]:
        value, patterns = self.random.choice(PATTERNS)
        yield f"match {self.one(value)}:"
        for pattern in self.random.sample(patterns, 2):
            yield f"    case {pattern}:"
            yield from (f"    {line}" for line in self.indented(depth, most=1))

    def transform(self, depth: int) -> Iterator[str]:
        """A function that a transform calls: it sees the objects, and changes them once."""
        name = f"g{next(self.names)}"
        yield f"def {name}(u):"
        yield from self.indented(depth, "nonlocal v, cell, cellt")
        yield f"    return (u * u * {self.one('num')}).sum()"
        call = self.random.choice(TRANSFORMS).replace("g0", name)
        yield f"v = v + {call.replace('<plain>', self.one('plain'))}"

    def generator(self, depth: int) -> Iterator[str]:
        name = f"g{next(self.names)}"
        yield f"def {name}():"
        yield from self.indented(depth, "nonlocal v, cell, cellt", most=1)
        yield f"    k = yield {self.one('num')}"
        yield from self.indented(depth, most=1)
        yield f"    yield from {self.one('items')}"
        yield from self.indented(depth, most=1)
        yield f"for k in {name}():"
        yield from self.indented(depth, "v = v + k", most=1)

    def coroutine(self, depth: int) -> Iterator[str]:
        name = f"g{next(self.names)}"
        yield f"async def {name}(u):"
        yield from self.indented(depth, "nonlocal v, cell, cellt", most=1)
        yield f"    return u * await later({self.one('num')})"
        yield f"v = awaited({name}(v))"

    def body(self, depth: int, most: int) -> list[str]:
        return [line for _ in range(self.random.randint(1, most)) for line in self.statement(depth)]

    def text(self) -> str:
        """The program: the objects, the function, and four functions that change the objects between its calls."""
        results = self.random.choice(["v", f"v, {self.one('num')}, {self.one('tensor')}", f"v, {self.one('list')}"])
        lines = ["    def f(x, a):", *self.function_of(2, 4), f"        return {results}"]
        of_g = (line.replace("fs['g'](x, a)", "v") for line in self.function_of(0, 2))  # it does not call itself
        lines += ["    def g(x, a):", *of_g, "        return v"]
        for number in range(4):
            changes = [self.change() for _ in range(self.random.randint(0, 2))]
            if self.random.random() < 0.15:
                changes.append("fs['g'](torch.ones(2, 3), {'t': torch.ones(3), 'l': [1], 'n': 1})")
            lines += [f"    def m{number}():", "        nonlocal cell, cellt", *(f"        {one}" for one in changes)]
        return WORLD + "\n".join(lines) + "\n" + END

    def function_of(self, least: int, most: int) -> Iterator[str]:
        """The body of a function with that many statements."""
        yield "        nonlocal cell, cellt"
        yield "        v = x.sum(0)"
        for _ in range(self.random.randint(least, most)):
            yield from (f"        {line}" for line in self.body(0, 2))


COMPOUND = [
    *(Drawn.choice, Drawn.loop, Drawn.other_loop, Drawn.shortening, Drawn.trying, Drawn.context, Drawn.function),
    *(Drawn.matching, Drawn.transform, Drawn.generator, Drawn.coroutine),
]
PATTERNS = [
    ("list", ["[]", "[k]", "[k, *rest] if k > 1", "[*rest, 3]", "[_, _]", "list() as k"]),
    ("num", ["0", "1 | 2", "int(k) if k > 2", "float()", "_ if False"]),
    ("any", ["Box(n=3)", "Vec(by=k)", "object(n=1 | 2)", "nn.Module(training=True)", "Slots() | Lazy()"]),
    ("table", ["{'a': 1}", "{'b': k, **rest}", "{}", "dict(k)"]),
]
"""Pairs of what a `match` looks at and the patterns for it."""
TRANSFORMS = [
    *("tfn.grad(g0)(<plain>)", "tfn.value_and_grad(g0)(<plain>)[0]", "tfn.jvp(g0, (<plain>,), (<plain>,))[1]"),
    *("tfn.vjp(g0, <plain>)[1](torch.tensor(2.0))[0]", "tfn.jit(g0)(<plain>)", "tfn.checkpoint(g0)(v)"),
    *("torch.func.grad(g0)(<plain>)", "tfn.linearize(g0, <plain>)[0]"),
]
