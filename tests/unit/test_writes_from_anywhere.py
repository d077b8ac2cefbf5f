"""Writes to objects from outside by code that Python or a library calls: methods, callbacks, hooks, generators, classes.

Each row is one way to have `w()` called. In every call the function reads, calls, and reads again.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn

WAYS = """
[w() for _ in range(2)]
{w() for _ in range(2)}
list(map(lambda _: w(), [1]))
list(w() for _ in [1])
sorted([2,1], key=lambda k: (w(), k)[1])
max([1,2], key=lambda k: (w(), k)[1])
net.apply(lambda m: w())
torch.utils._pytree.tree_map(lambda t: (w(), t)[1], [x])
functools.reduce(lambda a,b: (w(), b)[1], [1,2])
any(w() for _ in [1])
all((w(),True)[1] for _ in [1,2])
next(filter(lambda k: (w(), k)[1], [1,2]))
exec_cm()
exec_gen()
exec_stack()
exec_finally()
functools.partial(w)()
operator.methodcaller('w')(o)
operator.call(w) if hasattr(operator,'call') else w()
Fn.apply(x)
hooked(x)
o.prop
setattr(o,'prop',3)
o.missing
o[0]
o()
len(o)
bool(o)
o == 1
1 in o
hash(o)
str(o)
f"{o}"
"%s" % o
repr(o)
[*o]
o + 1
1 + o
-o
o @ 2
range(3)[o]
int(o)
float(o)
abs(o)
round(o)
o < 1
divmod(o, 2)
o.__class__.cm(o)
D(1)
NT(1)
exec_class()
exec_deco()
compile("w()","<q>","eval") and w()
exec_match()
(lambda k=w(): k)()
exec_star(*[w()])
exec_kw(**{'a': w()})
exec_walrus()
exec_nested()
exec_recursion(3)
exec_coroutine()
exec_send()
exec_throw()
exec_close()
exec_del()
exec_sub()
exec_super()
itertools.starmap(lambda a: w(), [(1,)]).__next__()
list(itertools.accumulate([1,2], lambda a,b: (w(), b)[1]))
list(itertools.takewhile(lambda a: (w(), a)[1], [1,0]))
[k for k in itertools.groupby([1,1,2], key=lambda a: (w(), a)[1])]
copy.copy(o)
copy.deepcopy(o)
pickle.loads(pickle.dumps(o))
re.sub('a', lambda m: (w(), 'b')[1], 'aa')
heapq.nsmallest(1,[2,1],key=lambda a: (w(), a)[1])
bisect.bisect([1,2],1,key=lambda a: (w(), a)[1])
collections.defaultdict(w)['q']
dict.fromkeys(iter(lambda: (w(), None)[1], None))
type('T',(),{'__set_name__': lambda *a: w(), 'a': 1})()
functools.singledispatch(lambda q: w())(1)
functools.lru_cache(lambda: w())()
o.cached
statistics.mean([w() or 1, 2])
torch.vmap(lambda r: (w(), r)[1])(x)
torch.func.grad(lambda r: (w(), r.sum())[1])(x)
torch.utils.checkpoint.checkpoint(lambda r: (w(), r*2)[1], x, use_reentrant=False)
torch.func.functional_call(side, {}, (x,))
lin_hook(x)
""".strip().splitlines()
PROGRAM = """
import bisect, collections, contextlib, copy, dataclasses, functools, heapq, itertools, operator, pickle, re, statistics, types
import torch, torch.utils.checkpoint
def make(s):
    def w():
        WRITE
    class O:
        def w(self): w()
        @property
        def prop(self): w(); return 1
        @prop.setter
        def prop(self, v): w()
        @functools.cached_property
        def cached(self): w(); return 1
        def __getattr__(self, name):
            if name.startswith('_'): raise AttributeError(name)
            w(); return 1
        def __getitem__(self, k): w(); return 1
        def __call__(self): w()
        def __len__(self): w(); return 1
        def __bool__(self): w(); return True
        def __eq__(self, other): w(); return True
        def __contains__(self, k): w(); return True
        def __hash__(self): w(); return 1
        def __str__(self): w(); return 'a'
        def __format__(self, spec): w(); return 'a'
        def __repr__(self): w(); return 'b'
        def __iter__(self): w(); yield 1; w()
        def __add__(self, k): w(); return 1
        def __radd__(self, k): w(); return 1
        def __neg__(self): w(); return 1
        def __matmul__(self, k): w(); return 1
        def __index__(self): w(); return 1
        def __int__(self): w(); return 1
        def __float__(self): w(); return 1.0
        def __abs__(self): w(); return 1
        def __round__(self, n=None): w(); return 1
        def __lt__(self, k): w(); return True
        def __divmod__(self, k): w(); return 1
        def __copy__(self): w(); return self
        def __deepcopy__(self, memo): w(); return self
        def __reduce__(self): w(); return (int, (1,))
        @classmethod
        def cm(cls, o): w()
    o = O()
    @dataclasses.dataclass
    class D:
        a: int
        def __post_init__(self): w()
    class NT(collections.namedtuple('NT','a')):
        def __new__(cls, a):
            w(); return super().__new__(cls, a)
    class Base:
        def go(self): w()
        def __init_subclass__(cls): w()
    class Sub(Base):
        def go(self): super().go(); w()
    class Fn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): w(); return x * 2
        @staticmethod
        def backward(ctx, g): return g * 2
    net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    hooked = torch.nn.Identity(); hooked.register_forward_pre_hook(lambda m, a: w())
    lin_hook = torch.nn.Linear(3, 3); lin_hook.register_forward_hook(lambda m, a, r: w())
    class Side(torch.nn.Module):
        def forward(self, x): w(); return x
    side = Side()
    @contextlib.contextmanager
    def cm():
        w(); yield; w()
    def gen():
        w(); yield 1; w(); yield 2
    def exec_cm():
        with cm(): pass
    def exec_gen():
        for _ in gen(): break
    def exec_stack():
        with contextlib.ExitStack() as st: st.callback(w)
    def exec_finally():
        try: raise KeyError
        except KeyError: pass
        finally: w()
    def exec_class():
        class Q: w()
    def exec_deco():
        def deco(f): w(); return f
        @deco
        def q(): pass
    def exec_match():
        match o:
            case O(prop=1): pass
    def exec_star(*a): return a
    def exec_kw(**k): return k
    def exec_walrus():
        if (k := w()) is None: return k
    def exec_nested():
        def inner():
            def deep(): w()
            deep()
        inner()
    def exec_recursion(k):
        if k: w(); exec_recursion(k-1)
    def exec_coroutine():
        async def co(): w()
        try: co().send(None)
        except StopIteration: pass
    def exec_send():
        def g():
            while True:
                k = yield
                w()
        it = g(); next(it); it.send(1)
    def exec_throw():
        def g():
            try: yield
            except KeyError: w(); yield
        it = g(); next(it); it.throw(KeyError())
    def exec_close():
        def g():
            try: yield
            finally: w()
        it = g(); next(it); it.close()
    def exec_del():
        class Q:
            def __del__(self): w()
        q = Q(); del q
    def exec_sub():
        class Q(Base): pass
    def exec_super(): Sub().go()
    def f(x):
        b = READ
        HOW
        return x * (READ) + b
    return f"""
WRITES = "s.n += 1", "s.l.append(s.n + len(s.l))", "s.n = s.n * 2 + len(s.l)", "s.d['k'] = s.d['k'] + [s.n]; s.n += 2"
READS = "s.n", "sum(s.l)", "len(s.d['k']) + s.n"


def calls(how: str, write: str, read: str, way: Callable[..., Any]) -> list[Any]:
    """Note the results of four calls, and what they leave."""
    s = types.SimpleNamespace(n=1, l=[1, 2], d={"k": [1]})
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": __name__}
    exec(PROGRAM.replace("WRITE", write).replace("HOW", how).replace("READ", read), names)
    f = way(names["make"](s))
    return [*(f(torch.ones(1, 3)).sum().item() for _ in range(4)), s.n, s.l, s.d]


@pytest.mark.parametrize(("number", "how"), [*enumerate(WAYS)])
def test_writes_by_code_that_something_calls(number: int, how: str) -> None:
    for place in range(number, number + 2):
        row = how, WRITES[place % len(WRITES)], READS[place % len(READS)]
        assert calls(*row, tfn.jit) == calls(*row, lambda f: f), row


@pytest.mark.parametrize("use", ["", "y * s.n", "x * s.n + n", "y * 1"])
def test_a_forward_counts_once(use: str) -> None:
    """A counter in the `forward` of an autograd.Function, whose result is used or not."""
    how = f"n = s.n; y = Fn.apply(x); x = {use or 'x'}"
    for write in WRITES:
        for read in READS:
            assert calls(how, write, read, tfn.jit) == calls(how, write, read, lambda f: f), (write, read)
