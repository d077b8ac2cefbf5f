"""Kinds of values that a function reads from outside, each as a function and a change after which it computes something else.

Every row is a class of reads: a test that a new kind of read is guarded begins with a row here.
"""

# ruff: noqa: B007, B024, B039, B905, C417, E741, F841, RUF059, UP028, UP031, RUF015  # the rows are written in the many ways in which users write

from __future__ import annotations

import abc
import builtins
import collections
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import decimal
import enum
import functools
import importlib
import inspect
import itertools
import json
import logging
import operator
import os
import string
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable
from os import getenv as variable
from types import SimpleNamespace as ns
from typing import Any

import numpy as np
import torch
from torch import nn

import thunder_fn as tfn

Row = Callable[[], tuple[Callable[..., Any], Callable[[], Any]]]
ROWS: list[Row] = []
X = torch.tensor([1.5, 2.0, 0.5])
G = G2 = None


def row(make: Row) -> Row:
    ROWS.append(make)
    return make


@row
def global_number():
    global G
    G = 2.0

    def change():
        global G
        G = 3.0

    return (lambda x: x * G), change


@row
def cell():
    k = 2.0

    def change():
        nonlocal k
        k = 3.0

    return (lambda x: x * k), change


@row
def default():
    def f(x, k=2.0):
        return x * k

    def change():
        f.__defaults__ = (3.0,)

    return f, change


@row
def kwdefault():
    def f(x, *, k=2.0):
        return x * k

    def change():
        f.__kwdefaults__ = {"k": 3.0}

    return f, change


@row
def helper_default():
    def g(x, k=2.0):
        return x * k

    def change():
        g.__defaults__ = (3.0,)

    return (lambda x: g(x)), change


@row
def attribute():
    o = ns(k=2.0)
    return (lambda x: x * o.k), lambda: setattr(o, "k", 3.0)


@row
def nested_attribute():
    o = ns(a=ns(k=2.0))
    return (lambda x: x * o.a.k), lambda: setattr(o.a, "k", 3.0)


@row
def getattr_default():
    o = ns()
    return (lambda x: x * getattr(o, "k", 2.0)), lambda: setattr(o, "k", 3.0)


@row
def hasattr_():
    o = ns()
    return (lambda x: x * (3.0 if hasattr(o, "k") else 2.0)), lambda: setattr(o, "k", 3.0)


@row
def dict_entry():
    d = {"k": 2.0}
    return (lambda x: x * d["k"]), lambda: d.update(k=3.0)


@row
def dict_get():
    d = {}
    return (lambda x: x * d.get("k", 2.0)), lambda: d.update(k=3.0)


@row
def dict_in():
    d = {}
    return (lambda x: x * (3.0 if "k" in d else 2.0)), lambda: d.update(k=3.0)


@row
def dict_loop_keys():
    d = {"a": 2.0, "b": 3.0, "c": 1.0}

    def f(x):
        for k in ("a", "b", "c"):
            x = x * d[k]
        return x

    return f, lambda: d.update(a=5.0)


@row
def dict_items():
    d = {"a": 2.0}

    def f(x):
        for k, v in d.items():
            x = x * v
        return x

    return f, lambda: d.update(b=5.0)


@row
def list_item():
    d = [1.0, 2.0]
    return (lambda x: x * d[1]), lambda: d.__setitem__(1, 3.0)


@row
def list_loop():
    d = [1.0, 2.0]

    def f(x):
        for v in d:
            x = x * v
        return x

    return f, lambda: d.append(3.0)


@row
def list_objects():
    d = [ns(k=1.0), ns(k=2.0)]

    def f(x):
        for v in d:
            x = x * v.k
        return x

    return f, lambda: setattr(d[0], "k", 3.0)


@row
def comprehension_objects():
    d = [ns(k=1.0), ns(k=2.0)]
    return (lambda x: x * sum([v.k for v in d])), lambda: setattr(d[0], "k", 3.0)


@row
def genexpr_objects():
    d = [ns(k=1.0), ns(k=2.0)]
    return (lambda x: x * sum(v.k for v in d)), lambda: setattr(d[0], "k", 3.0)


@row
def zip_objects():
    d = [ns(k=1.0), ns(k=2.0)]

    def f(x):
        for a, i in zip(d, range(2)):
            x = x * (a.k + i)
        return x

    return f, lambda: setattr(d[0], "k", 3.0)


@row
def linked():
    a = ns(k=1.0, next=ns(k=2.0, next=ns(k=3.0, next=ns(k=4.0, next=None))))

    def f(x):
        n = a
        while n is not None:
            x = x * n.k
            n = n.next
        return x

    return f, lambda: setattr(a.next.next.next, "k", 5.0)


@row
def tuple_rebound():
    o = ns(t=(1, 2))
    return (lambda x: x * o.t[1]), lambda: setattr(o, "t", (1, 3))


@row
def set_():
    s = {1}
    return (lambda x: x * (2.0 if 2 in s else 3.0)), lambda: s.add(2)


@row
def deque_():
    s = collections.deque([1.0])
    return (lambda x: x * sum(s)), lambda: s.append(2)


@row
def slots():
    class S:
        __slots__ = ("k",)

    o = S()
    o.k = 2.0
    return (lambda x: x * o.k), lambda: setattr(o, "k", 3.0)


@row
def dataclass_():
    @dataclasses.dataclass
    class C:
        k: float = 2.0

    o = C()
    return (lambda x: x * o.k), lambda: setattr(o, "k", 3.0)


@row
def dataclass_replace():
    @dataclasses.dataclass
    class C:
        k: float = 2.0

    o = C()
    return (lambda x: x * dataclasses.replace(o).k), lambda: setattr(o, "k", 3.0)


@row
def copied():
    o = ns(k=2.0)
    return (lambda x: x * copy.copy(o).k), lambda: setattr(o, "k", 3.0)


@row
def deepcopied():
    o = {"a": ns(k=2.0)}
    return (lambda x: x * copy.deepcopy(o)["a"].k), lambda: setattr(o["a"], "k", 3.0)


@row
def itemgetter():
    o = {"a": ns(k=2.0)}
    g = operator.itemgetter("a")
    return (lambda x: x * g(o).k), lambda: setattr(o["a"], "k", 3.0)


@row
def attrgetter():
    o = ns(a=ns(k=2.0))
    g = operator.attrgetter("a.k")
    return (lambda x: x * g(o)), lambda: setattr(o.a, "k", 3.0)


@row
def max_of_objects():
    o = [ns(k=2.0), ns(k=1.0)]
    return (lambda x: x * max(o, key=lambda a: a.k).k), lambda: setattr(o[0], "k", 3.0)


@row
def map_getter():
    o = [ns(k=2.0), ns(k=1.0)]
    return (lambda x: x * sum(map(lambda a: a.k, o))), lambda: setattr(o[0], "k", 3.0)


@row
def class_attribute():
    class C:
        k = 2.0

    return (lambda x: x * C.k), lambda: setattr(C, "k", 3.0)


@row
def inherited():
    class B:
        k = 2.0

    class C(B):
        pass

    o = C()
    return (lambda x: x * o.k), lambda: setattr(C, "k", 3.0)


@row
def method_replaced():
    class C:
        def m(self, x):
            return x * 2

    o = C()
    return (lambda x: o.m(x)), lambda: setattr(C, "m", lambda self, x: x * 3)


@row
def method_on_instance():
    class C:
        def m(self, x):
            return x * 2

    o = C()
    return (lambda x: o.m(x)), lambda: setattr(o, "m", lambda x: x * 3)


@row
def call_replaced():
    class C:
        def __call__(self, x):
            return x * 2

    o = C()
    return (lambda x: o(x)), lambda: setattr(C, "__call__", lambda self, x: x * 3)


@row
def property_():
    class C:
        def __init__(s):
            s._k = 2.0

        @property
        def k(s):
            return s._k

    o = C()
    return (lambda x: x * o.k), lambda: setattr(o, "_k", 3.0)


@row
def property_replaced():
    class C:
        @property
        def k(s):
            return 2.0

    o = C()
    return (lambda x: x * o.k), lambda: setattr(C, "k", property(lambda s: 3.0))


@row
def getattr_method():
    class C:
        def __init__(s):
            s.d = {"k": 2.0}

        def __getattr__(s, n):
            return s.d[n]

    o = C()
    return (lambda x: x * o.k), lambda: o.d.update(k=3.0)


@row
def getitem_method():
    class C:
        def __init__(s):
            s.d = {"k": 2.0}

        def __getitem__(s, n):
            return s.d[n]

    o = C()
    return (lambda x: x * o["k"]), lambda: o.d.update(k=3.0)


@row
def dunder_mul():
    class C:
        k = 2.0

        def __rmul__(s, x):
            return s.k * x

        @classmethod
        def __torch_function__(cls, *a):
            return NotImplemented

    o = C()
    return (lambda x: o.__rmul__(x)), lambda: setattr(o, "k", 3.0)


@row
def object_made_inside():
    cfg = ns(k=2.0)

    class B:
        def __init__(s, c):
            s.c = c

        def run(s, x):
            return x * s.c.k

    return (lambda x: B(cfg).run(x)), lambda: setattr(cfg, "k", 3.0)


@row
def list_made_inside():
    a, b = ns(k=2.0), ns(k=1.0)

    def f(x):
        l = [a, b]
        for o in l:
            x = x * o.k
        return x

    return f, lambda: setattr(a, "k", 3.0)


@row
def dict_made_inside():
    a, b = ns(k=2.0), ns(k=1.0)

    def f(x):
        l = {"a": a, "b": b}
        return x * l["a"].k

    return f, lambda: setattr(a, "k", 3.0)


@row
def returned_by_helper():
    cfg = ns(k=2.0)

    def get():
        return cfg

    def f(x):
        c = get()
        return x * c.k

    return f, lambda: setattr(cfg, "k", 3.0)


@row
def returned_in_tuple():
    cfg = ns(k=2.0)

    def get():
        return cfg, 1

    def f(x):
        c, _ = get()
        return x * c.k

    return f, lambda: setattr(cfg, "k", 3.0)


@row
def chained_return():
    cfg = ns(k=2.0)

    def get():
        return cfg

    return (lambda x: x * get().k), lambda: setattr(cfg, "k", 3.0)


@row
def passed_to_helper():
    cfg = ns(k=2.0)

    def h(x, c):
        return x * c.k

    return (lambda x: h(x, cfg)), lambda: setattr(cfg, "k", 3.0)


@row
def passed_as_kwargs():
    cfg = ns(k=2.0)

    def h(x, **o):
        return x * o["c"].k

    return (lambda x: h(x, c=cfg)), lambda: setattr(cfg, "k", 3.0)


@row
def passed_as_args():
    cfg = ns(k=2.0)

    def h(x, *o):
        return x * o[0].k

    return (lambda x: h(x, cfg)), lambda: setattr(cfg, "k", 3.0)


@row
def star_dict():
    o = {"k": 2.0}

    def h(x, k):
        return x * k

    return (lambda x: h(x, **o)), lambda: o.update(k=3.0)


@row
def star_list():
    o = [2.0]

    def h(x, k):
        return x * k

    return (lambda x: h(x, *o)), lambda: o.__setitem__(0, 3.0)


@row
def partial_():
    def h(k, x):
        return x * k

    o = ns(f=functools.partial(h, 2.0))
    return (lambda x: o.f(x)), lambda: setattr(o, "f", functools.partial(h, 3.0))


@row
def partial_kw():
    def h(x, k):
        return x * k

    p = functools.partial(h, k=2.0)
    return (lambda x: p(x)), lambda: p.keywords.update(k=3.0)


@row
def root_partial():
    def h(x, c):
        return x * c.k

    c = ns(k=2.0)
    return functools.partial(h, c=c), lambda: setattr(c, "k", 3.0)


@row
def root_bound():
    class C:
        k = 2.0

        def m(s, x):
            return x * s.k

    o = C()
    return o.m, lambda: setattr(o, "k", 3.0)


@row
def root_object():
    class C:
        k = 2.0

        def __call__(s, x):
            return x * s.k

    o = C()
    return o, lambda: setattr(o, "k", 3.0)


@row
def decorated():
    cfg = ns(k=2.0)

    def deco(f):
        @functools.wraps(f)
        def w(*a):
            return f(*a)

        return w

    @deco
    def f(x):
        return x * cfg.k

    return f, lambda: setattr(cfg, "k", 3.0)


@row
def decorator_cell():
    def deco(k):
        def d(f):
            def w(x):
                return f(x) * k[0]

            return w

        return d

    k = [2.0]
    f = deco(k)(lambda x: x + 1)
    return f, lambda: k.__setitem__(0, 3.0)


@row
def function_replaced():
    o = ns(f=lambda x: x * 2)
    return (lambda x: o.f(x)), lambda: setattr(o, "f", lambda x: x * 3)


@row
def function_code():
    def h(x):
        return x * 2

    def g(x):
        return x * 3

    return (lambda x: h(x)), lambda: setattr(h, "__code__", g.__code__)


@row
def own_code():
    def h(x):
        return x * 2

    def g(x):
        return x * 3

    return h, lambda: setattr(h, "__code__", g.__code__)


@row
def function_attribute():
    def h(x):
        return x * h.k

    h.k = 2.0
    return (lambda x: h(x)), lambda: setattr(h, "k", 3.0)


@row
def environ():
    os.environ["TFN_K"] = "2"
    return (lambda x: x * float(os.environ["TFN_K"])), lambda: os.environ.__setitem__("TFN_K", "3")


@row
def environ_get():
    os.environ.pop("TFN_J", None)
    return (lambda x: x * float(os.environ.get("TFN_J", 2))), lambda: os.environ.__setitem__("TFN_J", "3")


@row
def getenv():
    os.environ.pop("TFN_L", None)
    return (lambda x: x * float(os.getenv("TFN_L", "2"))), lambda: os.environ.__setitem__("TFN_L", "3")


@row
def contextvar():
    v = contextvars.ContextVar("v")
    v.set(2.0)
    return (lambda x: x * v.get()), lambda: v.set(3.0)


@row
def contextvar_default():
    v = contextvars.ContextVar("v")
    return (lambda x: x * v.get(2.0)), lambda: v.set(3.0)


@row
def numpy_small():
    a = np.array([2.0, 1.0])
    return (lambda x: x * float(a[0])), lambda: a.__setitem__(0, 3.0)


@row
def numpy_in_dict():
    d = {"a": np.array([2.0, 1.0])}
    return (lambda x: x * torch.tensor(d["a"]).sum()), lambda: d["a"].__setitem__(0, 3.0)


@row
def numpy_scalar():
    o = ns(a=np.float32(2.0))
    return (lambda x: x * float(o.a)), lambda: setattr(o, "a", np.float32(3.0))


@row
def tensor_rebound():
    o = ns(w=torch.ones(3))
    return (lambda x: x * o.w), lambda: setattr(o, "w", torch.full((3,), 2.0))


@row
def tensor_inplace():
    w = torch.ones(3)
    return (lambda x: x * w), lambda: w.fill_(4.0)


@row
def tensor_data():
    w = torch.ones(3)
    return (lambda x: x * w), lambda: setattr(w, "data", torch.full((3,), 2.0))


@row
def tensor_in_list():
    l = [torch.ones(3)]
    return (lambda x: torch.stack(l).sum() * x), lambda: l.append(torch.ones(3))


@row
def module_training():
    m = nn.Dropout(1.0)
    return (lambda x: m(x)), lambda: m.eval()


@row
def module_attr():
    m = nn.Dropout(1.0)
    m.eval()

    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.k = 2.0

        def forward(s, x):
            return x * s.k

    m = M()
    return (lambda x: m(x)), lambda: setattr(m, "k", 3.0)


@row
def module_config():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.c = ns(k=2.0)

        def forward(s, x):
            return x * s.c.k

    m = M()
    return (lambda x: m(x)), lambda: setattr(m.c, "k", 3.0)


@row
def module_param():
    m = nn.Linear(3, 3)
    return (lambda x: m(x)), lambda: setattr(m, "weight", nn.Parameter(torch.ones(3, 3)))


@row
def module_hook():
    m = nn.Linear(3, 3)
    return (lambda x: m(x)), lambda: m.register_forward_hook(lambda m, i, o: o * 2)


@row
def module_child():
    m = nn.Sequential(nn.Identity())
    return (lambda x: m(x)), lambda: m.__setitem__(0, nn.Tanh())


@row
def module_in_dict():
    d = {"m": nn.Identity()}
    return (lambda x: d["m"](x)), lambda: d.update(m=nn.Tanh())


@row
def module_forward_replaced():
    class M(nn.Module):
        def forward(s, x):
            return x * 2

    m = M()
    return (lambda x: m(x)), lambda: setattr(M, "forward", lambda s, x: x * 3)


@row
def module_method_replaced():
    class M(nn.Module):
        def h(s, x):
            return x * 2

        def forward(s, x):
            return s.h(x)

    m = M()
    return (lambda x: m(x)), lambda: setattr(M, "h", lambda s, x: x * 3)


@row
def jitted_module_global():
    class M(nn.Module):
        def forward(s, x):
            return x * G2.k

    global G2
    G2 = ns(k=2.0)
    return M(), lambda: setattr(G2, "k", 3.0)


@row
def jitted_module_method():
    class M(nn.Module):
        def h(s, x):
            return x * 2

        def forward(s, x):
            return s.h(x)

    return M(), lambda: setattr(M, "h", lambda s, x: x * 3)


@row
def jitted_module_config():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.c = ns(k=2.0)

        def forward(s, x):
            return x * s.c.k

    m = M()
    return m, lambda: setattr(m.c, "k", 3.0)


@row
def user_module():
    mod = types.ModuleType("usermod")
    sys.modules["usermod"] = mod
    mod.K = 2.0
    return (lambda x: x * mod.K), lambda: setattr(mod, "K", 3.0)


@row
def thread_local():
    t = threading.local()
    t.k = 2.0
    return (lambda x: x * t.k), lambda: setattr(t, "k", 3.0)


@row
def enum_field():
    class E(enum.Enum):
        A = 2.0
        B = 3.0

    o = ns(e=E.A)
    return (lambda x: x * o.e.value), lambda: setattr(o, "e", E.B)


@row
def namedtuple_():
    P = collections.namedtuple("P", "k j")
    o = ns(p=P(2.0, 1.0))
    return (lambda x: x * o.p.k), lambda: setattr(o, "p", P(3.0, 1.0))


@row
def dtype_():
    o = ns(d=torch.float32)
    return (lambda x: x.to(o.d)), lambda: setattr(o, "d", torch.float64)


@row
def match_class():
    class P:
        __match_args__ = ("k",)

        def __init__(s, k):
            s.k = k

    o = P(2.0)

    def f(x):
        match o:
            case P(k=2.0):
                return x * 2
            case P(k):
                return x * k

    return f, lambda: setattr(o, "k", 3.0)


def matched_by_place(name, value):
    class P:
        __match_args__ = ("j", "k")

        def __init__(s):
            s.j, s.k, s.unread = 1, 2.0, 1

    o = P()

    def f(x):
        match o:
            case P(1, k):
                return x * k
            case _:
                return x

    return f, lambda: setattr(P if name == "__match_args__" else o, name, value)


@row
def match_class_by_place():
    return matched_by_place("k", 3.0)


@row
def match_class_by_another_place():
    return matched_by_place("j", 2)


@row
def match_args():
    return matched_by_place("__match_args__", ("unread", "j"))


@row
def match_value():
    o = ns(mode="a")

    def f(x):
        match o.mode:
            case "a":
                return x * 2
            case _:
                return x * 3

    return f, lambda: setattr(o, "mode", "b")


@row
def match_mapping():
    o = {"mode": "a"}

    def f(x):
        match o:
            case {"mode": "a"}:
                return x * 2
            case _:
                return x * 3

    return f, lambda: o.update(mode="b")


@row
def dict_subclass():
    class D(dict):
        def __getattr__(s, n):
            return s[n]

    o = D(k=2.0)
    return (lambda x: x * o.k), lambda: o.update(k=3.0)


@row
def userdict():
    o = collections.UserDict(k=2.0)
    return (lambda x: x * o["k"]), lambda: o.update(k=3.0)


@row
def defaultdict():
    o = collections.defaultdict(lambda: 2.0)
    return (lambda x: x * o["k"]), lambda: o.update(k=3.0)


@row
def chainmap():
    d = {"k": 2.0}
    o = collections.ChainMap({}, d)
    return (lambda x: x * o["k"]), lambda: d.update(k=3.0)


@row
def ordered_dict():
    d = collections.OrderedDict(k=2.0)
    return (lambda x: x * d["k"]), lambda: d.update(k=3.0)


@row
def mapping_proxy():
    d = {"k": 2.0}
    p = types.MappingProxyType(d)
    return (lambda x: x * p["k"]), lambda: d.update(k=3.0)


@row
def lru_cached():
    o = ns(k=2.0)

    def g():
        return o

    def f(x):
        return x * functools.lru_cache(g)().k

    return f, lambda: setattr(o, "k", 3.0)


@row
def torch_flag():

    def change():
        torch.backends.cudnn.benchmark = True

    torch.backends.cudnn.benchmark = False
    return (lambda x: x * (3.0 if torch.backends.cudnn.benchmark else 2.0)), change


@row
def vars_():
    o = ns(k=2.0)
    return (lambda x: x * vars(o)["k"]), lambda: setattr(o, "k", 3.0)


@row
def dunder_dict():
    o = ns(k=2.0)
    return (lambda x: x * o.__dict__["k"]), lambda: setattr(o, "k", 3.0)


@row
def fstring():
    o = ns(k=2.0)
    return (lambda x: x * float(f"{o.k}")), lambda: setattr(o, "k", 3.0)


@row
def walrus():
    o = ns(k=2.0)
    return (lambda x: x * (c := o).k), lambda: setattr(o, "k", 3.0)


@row
def ternary():
    a, b = ns(k=2.0), ns(k=1.0)
    return (lambda x, s=1: x * (a if s else b).k), lambda: setattr(a, "k", 3.0)


@row
def or_():
    a = ns(k=2.0)
    b = None
    return (lambda x: x * (b or a).k), lambda: setattr(a, "k", 3.0)


@row
def try_():
    d = {}

    def f(x):
        try:
            k = d["k"]
        except KeyError:
            k = 2.0
        return x * k

    return f, lambda: d.update(k=3.0)


@row
def with_():
    class C:
        k = 2.0

        def __enter__(s):
            return s

        def __exit__(s, *a):
            pass

    o = C()

    def f(x):
        with o as c:
            return x * c.k

    return f, lambda: setattr(o, "k", 3.0)


@row
def generator_helper():
    d = [ns(k=1.0), ns(k=2.0)]

    def g():
        for o in d:
            yield o

    def f(x):
        for o in g():
            x = x * o.k
        return x

    return f, lambda: setattr(d[1], "k", 3.0)


class _Carrying(Exception):
    held: Any


def _raise_with(d):
    error = _Carrying()
    error.held = d[0]
    raise error


@row
def generator_that_handles_what_is_thrown_into_it():
    d = [ns(k=2.0)]

    def g():
        held = None
        try:
            yield
        except _Carrying as error:
            held = error.held
        yield held.k

    def f(x):
        values = g()
        next(values)
        try:
            _raise_with(d)
        except _Carrying as error:
            return x * values.throw(error)

    return f, lambda: setattr(d[0], "k", 3.0)


@row
def context_manager_that_handles_an_exception():
    d = [ns(k=2.0)]

    @contextlib.contextmanager
    def handling(found):
        try:
            yield
        except _Carrying as error:
            held = error.held
            found.append(held.k)

    def f(x):
        found = []
        with handling(found):
            _raise_with(d)
        return x * found[0]

    return f, lambda: setattr(d[0], "k", 3.0)


@row
def sorted_attr():
    d = [ns(k=1.0), ns(k=2.0)]

    def f(x):
        for i, o in enumerate(sorted(d, key=lambda o: o.k)):
            x = x * (o.k + i)
        return x

    return f, lambda: setattr(d[0], "k", 7.0)


@row
def inner_function():
    o = ns(k=2.0)

    def f(x):
        def g(y):
            return y * o.k

        return g(x)

    return f, lambda: setattr(o, "k", 3.0)


@row
def nonlocal_inner_cell():
    k = 2.0

    def f(x):
        def g(y):
            return y * k

        return g(x)

    def change():
        nonlocal k
        k = 3.0

    return f, change


@row
def staticmethod_():
    class C:
        K = 2.0

        @staticmethod
        def h(x):
            return x * C.K

        @classmethod
        def c(cls, x):
            return x * cls.K

    return (lambda x: C.h(x) + C.c(x)), lambda: setattr(C, "K", 3.0)


@row
def metaclass_():
    class M(type):
        @property
        def k(cls):
            return cls._k

    class C(metaclass=M):
        _k = 2.0

    return (lambda x: x * C.k), lambda: setattr(C, "_k", 3.0)


@row
def super_():
    class B:
        k = 2.0

        def h(s, x):
            return x * s.k

    class C(B):
        def h(s, x):
            return super().h(x)

    o = C()
    return (lambda x: o.h(x)), lambda: setattr(B, "h", lambda s, x: x * 5)


@row
def reduce_():
    l = [2.0, 1.0]
    return (lambda x: functools.reduce(lambda a, b: a * b, l, x)), lambda: l.append(3.0)


@row
def slice_():
    l = [2.0, 1.0]
    return (lambda x: x * sum(l[:1])), lambda: l.__setitem__(0, 3.0)


@row
def unpack():
    l = [2.0, 1.0]

    def f(x):
        a, b = l
        return x * a

    return f, lambda: l.__setitem__(0, 3.0)


@row
def unpack_objects():
    l = [ns(k=2.0), ns(k=1.0)]

    def f(x):
        a, b = l
        return x * a.k

    return f, lambda: setattr(l[0], "k", 3.0)


@row
def dict_of_modules():
    m = nn.ModuleDict({"a": nn.Identity()})
    return (lambda x: m["a"](x)), lambda: m.update({"a": nn.Tanh()})


@row
def isinstance_():
    o = ns(v=1)
    return (lambda x: x * (2 if isinstance(o.v, int) else 3)), lambda: setattr(o, "v", 1.0)


@row
def zero_sign():
    o = ns(v=0.0)
    return (lambda x: x / 1e-30 * 0 + torch.copysign(x, torch.tensor(o.v))), lambda: setattr(o, "v", -0.0)


@row
def prop_returns_object():
    cfg = ns(k=2.0)

    class C:
        @property
        def cfg(s):
            return cfg

    o = C()
    return (lambda x: x * o.cfg.k), lambda: setattr(cfg, "k", 3.0)


@row
def getattr_returns_object():
    cfg = ns(k=2.0)

    class C:
        def __getattr__(s, n):
            return cfg

    o = C()
    return (lambda x: x * o.foo.k), lambda: setattr(cfg, "k", 3.0)


@row
def getitem_returns_object():
    cfg = ns(k=2.0)

    class C:
        def __getitem__(s, n):
            return cfg

    o = C()
    return (lambda x: x * o[0].k), lambda: setattr(cfg, "k", 3.0)


@row
def iter_returns_objects():
    cfg = ns(k=2.0)

    class C:
        def __iter__(s):
            yield cfg

    o = C()

    def f(x):
        for c in o:
            x = x * c.k
        return x

    return f, lambda: setattr(cfg, "k", 3.0)


@row
def call_returns_object():
    cfg = ns(k=2.0)

    class C:
        def __call__(s):
            return cfg

    o = C()
    return (lambda x: x * o().k), lambda: setattr(cfg, "k", 3.0)


@row
def or_operator():
    class C:
        def __init__(s, k):
            s.k = k

        def __or__(s, o):
            return s

    a, b = C(2.0), C(1.0)
    return (lambda x: x * (a | b).k), lambda: setattr(a, "k", 3.0)


@row
def len_of_user():
    class C:
        def __init__(s):
            s.n = 2

        def __len__(s):
            return s.n

    a = C()
    return (lambda x: x * len(a)), lambda: setattr(a, "n", 3)


@row
def bool_of_user():
    class C:
        def __init__(s):
            s.n = True

        def __bool__(s):
            return s.n

    a = C()
    return (lambda x: x * 2 if a else x), lambda: setattr(a, "n", False)


@row
def lt_of_user():
    class C:
        def __init__(s):
            s.n = 1

        def __lt__(s, o):
            return s.n < o

    a = C()
    return (lambda x: x * 2 if a < 2 else x), lambda: setattr(a, "n", 5)


@row
def enter_other():
    cfg = ns(k=2.0)

    class C:
        def __enter__(s):
            return cfg

        def __exit__(s, *a):
            pass

    o = C()

    def f(x):
        with o as c:
            return x * c.k

    return f, lambda: setattr(cfg, "k", 3.0)


@row
def nested_dict():
    d = {"a": {"b": [ns(k=2.0)]}}
    return (lambda x: x * d["a"]["b"][0].k), lambda: setattr(d["a"]["b"][0], "k", 3.0)


@row
def nested_rebound():
    d = {"a": {"b": [2.0]}}
    return (lambda x: x * d["a"]["b"][0]), lambda: d["a"].update(b=[3.0])


@row
def negative_index():
    d = [1.0, 2.0]
    return (lambda x: x * d[-1]), lambda: d.append(3.0)


@row
def key_from_global():
    d = {"a": 2.0, "b": 3.0}
    o = ns(name="a")
    return (lambda x: x * d[o.name]), lambda: setattr(o, "name", "b")


@row
def key_computed():
    d = {"a1": 2.0, "b": 3.0}
    return (lambda x: x * d["a" + str(1)]), lambda: d.update(a1=5.0)


@row
def tuple_of_objects():
    t = (ns(k=2.0), ns(k=1.0))
    return (lambda x: x * t[0].k), lambda: setattr(t[0], "k", 3.0)


@row
def starred():
    l = [ns(k=2.0), ns(k=1.0)]

    def f(x):
        a, *b = l
        return x * a.k * b[0].k

    return f, lambda: setattr(l[1], "k", 3.0)


@row
def dictcomp():
    l = {"a": ns(k=2.0)}
    return (lambda x: x * {k: v.k for k, v in l.items()}["a"]), lambda: setattr(l["a"], "k", 3.0)


@row
def nested_comp():
    l = [[ns(k=2.0)], [ns(k=1.0)]]
    return (lambda x: x * sum(o.k for r in l for o in r)), lambda: setattr(l[0][0], "k", 3.0)


@row
def any_all():
    l = [ns(k=True)]
    return (lambda x: x * (2 if all(o.k for o in l) else 3)), lambda: setattr(l[0], "k", False)


@row
def filter_():
    l = [ns(k=True, v=2.0)]
    return (lambda x: x * sum(o.v for o in filter(lambda o: o.k, l))), lambda: setattr(l[0], "v", 5.0)


@row
def reversed_():
    l = [ns(k=2.0)]

    def f(x):
        for o in reversed(l):
            x = x * o.k
        return x

    return f, lambda: setattr(l[0], "k", 3.0)


@row
def chain_():
    l, m = [ns(k=2.0)], [ns(k=1.0)]

    def f(x):
        for o in itertools.chain(l, m):
            x = x * o.k
        return x

    return f, lambda: setattr(m[0], "k", 3.0)


@row
def popped_copy():
    l = [ns(k=2.0)]

    def f(x):
        c = list(l)
        o = c.pop()
        return x * o.k

    return f, lambda: setattr(l[0], "k", 3.0)


@row
def next_iter():
    l = [ns(k=2.0)]
    return (lambda x: x * next(iter(l)).k), lambda: setattr(l[0], "k", 3.0)


@row
def dict_values_list():
    d = {"a": ns(k=2.0)}
    return (lambda x: x * list(d.values())[0].k), lambda: setattr(d["a"], "k", 3.0)


@row
def min_by():
    l = [ns(k=2.0), ns(k=4.0)]
    return (lambda x: x * min(l, key=operator.attrgetter("k")).k), lambda: setattr(l[0], "k", 3.0)


@row
def asdict():
    @dataclasses.dataclass
    class C:
        k: float = 2.0

    o = C()
    return (lambda x: x * dataclasses.asdict(o)["k"]), lambda: setattr(o, "k", 3.0)


@row
def json_dump():
    d = {"a": {"b": 2.0}}
    return (lambda x: x * json.loads(json.dumps(d))["a"]["b"]), lambda: d["a"].update(b=3.0)


@row
def formatted():
    d = {"a": 2.0}
    return (lambda x: x * float("{a}".format(**d))), lambda: d.update(a=3.0)


@row
def str_of_object():
    class C:
        k = 2.0

        def __str__(s):
            return str(s.k)

    o = C()
    return (lambda x: x * float(str(o))), lambda: setattr(o, "k", 3.0)


@row
def float_of_object():
    class C:
        def __init__(s):
            s.k = 2.0

        def __float__(s):
            return s.k

    o = C()
    return (lambda x: x * float(o)), lambda: setattr(o, "k", 3.0)


@row
def descriptor():
    class D:
        def __init__(s):
            s.k = 2.0

        def __get__(s, i, o):
            return s.k

    class C:
        d = D()

    o = C()
    return (lambda x: x * o.d), lambda: setattr(C.__dict__["d"], "k", 3.0)


@row
def cached_prop():
    class C:
        def __init__(s):
            s.k = 2.0

        @functools.cached_property
        def d(s):
            return s.k

    o = C()
    return (lambda x: x * o.d), lambda: o.__dict__.update(d=3.0)


@row
def weak_ref():
    class C:
        pass

    c = C()
    c.k = 2.0
    r = weakref.ref(c)
    f = lambda x: x * r().k
    f.keep = c
    return f, lambda: setattr(c, "k", 3.0)


@row
def closure_in_closure():
    k = [2.0]

    def a():
        def b(x):
            def c(y):
                return y * k[0]

            return c(x)

        return b

    return a(), lambda: k.__setitem__(0, 3.0)


@row
def function_in_list():
    fs = [lambda x: x * 2, lambda x: x * 3]

    def f(x):
        for g in fs:
            x = g(x)
        return x

    return f, lambda: fs.append(lambda x: x * 5)


@row
def cell_in_listed_function():
    o = ns(k=2.0)
    fs = [lambda x: x * o.k]

    def f(x):
        for g in fs:
            x = g(x)
        return x

    return f, lambda: setattr(o, "k", 3.0)


@row
def cell_value_in_listed_function():
    k = 2.0
    fs = {"a": lambda x: x * k}

    def change():
        nonlocal k
        k = 3.0

    def f(x):
        return fs["a"](x)

    return f, change


@row
def singledispatch():
    o = ns(k=2.0)

    @functools.singledispatch
    def g(x):
        return x

    @g.register
    def _(x: torch.Tensor):
        return x * o.k

    return (lambda x: g(x)), lambda: setattr(o, "k", 3.0)


@row
def partialmethod():
    class C:
        def m(s, x, k):
            return x * k * s.j

        h = functools.partialmethod(m, k=2.0)

        def __init__(s):
            s.j = 1.0

    o = C()
    return (lambda x: o.h(x)), lambda: setattr(o, "j", 3.0)


@row
def lru_global():
    o = ns(k=2.0)

    @functools.lru_cache
    def g(n):
        return o

    return (lambda x: x * g(1).k), lambda: setattr(o, "k", 3.0)


@row
def abc_subclass():
    class B(abc.ABC):
        @property
        @abc.abstractmethod
        def k(s): ...

    class C(B):
        _k = 2.0

        @property
        def k(s):
            return self_k(s)

    def self_k(s):
        return s._k

    o = C()
    return (lambda x: x * o.k), lambda: setattr(o, "_k", 3.0)


@row
def numpy_2d_index():
    a = np.ones((2, 2))
    return (lambda x: x * a[0, 1]), lambda: a.__setitem__((0, 1), 3.0)


@row
def numpy_sum():
    a = np.ones(4)
    return (lambda x: x * a.sum()), lambda: a.__setitem__(0, 3.0)


@row
def numpy_method_arg():
    a = np.ones(4)
    return (lambda x: x * float(np.mean(a))), lambda: a.__setitem__(0, 3.0)


@row
def numpy_in_object():
    o = ns(a=np.ones(4))
    return (lambda x: x * float(o.a.mean())), lambda: o.a.__setitem__(0, 3.0)


@row
def numpy_list_of():
    l = [np.ones(2), np.ones(2)]
    return (lambda x: x * float(np.stack(l).sum())), lambda: l[0].__setitem__(0, 3.0)


@row
def user_config_class():
    class Config:
        def __init__(s, **k):
            s.__dict__.update(k)

        def get(s, n, d=None):
            return getattr(s, n, d)

    o = Config(k=2.0)
    return (lambda x: x * o.get("k")), lambda: setattr(o, "k", 3.0)


@row
def optimizer_group():
    p = nn.Parameter(torch.ones(3))
    opt = torch.optim.SGD([p], lr=0.1)
    return (lambda x: x * opt.param_groups[0]["lr"]), lambda: opt.param_groups[0].update(lr=0.5)


@row
def module_param_list():
    m = nn.ParameterList([nn.Parameter(torch.ones(3))])
    return (lambda x: x * m[0]), lambda: m.__setitem__(0, nn.Parameter(torch.zeros(3)))


@row
def module_attr_direct():
    m = nn.Linear(3, 3)
    m.k = 2.0
    return (lambda x: x * m.k), lambda: setattr(m, "k", 3.0)


@row
def module_method_call():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.k = 2.0

        def h(s, x):
            return x * s.k

    m = M()
    return (lambda x: m.h(x)), lambda: setattr(m, "k", 3.0)


@row
def module_parameters_loop():
    m = nn.Linear(3, 3)
    return (lambda x: x * sum(p.sum() for p in m.parameters())), lambda: setattr(
        m, "weight", nn.Parameter(torch.ones(3, 3))
    )


@row
def module_in_object():
    o = ns(m=nn.Dropout(1.0))
    return (lambda x: o.m(x)), lambda: o.m.eval()


@row
def module_in_object_list():
    o = ns(ms=[nn.Dropout(1.0)])

    def f(x):
        for m in o.ms:
            x = m(x)
        return x

    return f, lambda: o.ms[0].eval()


@row
def module_buffer():
    m = nn.BatchNorm1d(3).eval()
    return (lambda x: m(x[None])[0]), lambda: setattr(m, "running_mean", torch.ones(3))


@row
def module_forward_instance():
    m = nn.Identity()
    return (lambda x: m(x)), lambda: setattr(m, "forward", lambda x: x * 3)


@row
def functional_call():
    m = nn.Dropout(1.0)
    return (lambda x: torch.func.functional_call(m, {}, (x,))), lambda: m.eval()


@row
def grad_enabled_flag():
    o = ns(on=True)

    def f(x):
        with torch.set_grad_enabled(o.on):
            return x * (2 if torch.is_grad_enabled() else 3)

    return f, lambda: setattr(o, "on", False)


@row
def custom_vjp_global():
    o = ns(k=2.0)

    @tfn.custom_vjp
    def g(x):
        return x * 2

    g.defvjp(lambda x: (x * 2, x), lambda r, ct: (ct * o.k,))
    return tfn.grad(lambda x: g(x).sum()), lambda: setattr(o, "k", 3.0)


@row
def autograd_function():
    o = ns(k=2.0)

    class G(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * o.k

    return tfn.grad(lambda x: G.apply(x).sum()), lambda: setattr(o, "k", 3.0)


@row
def autograd_grad_inside():
    o = ns(k=2.0)

    class G(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * o.k

    def f(x):
        y = x.detach().requires_grad_()
        with torch.enable_grad():
            l = G.apply(y).sum()
        return torch.autograd.grad(l, y)[0]

    return f, lambda: setattr(o, "k", 3.0)


@row
def torch_func_vmap():
    o = ns(k=2.0)
    return (lambda x: torch.func.vmap(lambda y: y * o.k)(x)), lambda: setattr(o, "k", 3.0)


@row
def triplet():
    o = ns(k=2.0)
    return (
        lambda x: torch.nn.functional.triplet_margin_with_distance_loss(
            x[None], x[None] + 1, x[None] * 2, distance_function=lambda a, b: ((a - b).abs() * o.k).sum(-1)
        )
    ), lambda: setattr(o, "k", 9.0)


@row
def tree_map():
    o = ns(k=2.0)
    return (lambda x: torch.utils._pytree.tree_map(lambda t: t * o.k, [x])[0]), lambda: setattr(o, "k", 3.0)


@row
def exec_made():
    d = {}
    exec("def g(x): return x * K", d)
    d["K"] = 2.0
    return (lambda x: d["g"](x)), lambda: d.update(K=3.0)


@row
def long_list():
    l = list(range(500))
    return (lambda x: x * sum(l)), lambda: l.__setitem__(400, 0)


@row
def long_list_of_objects():
    l = [ns(k=1.0) for _ in range(300)]

    def f(x):
        s = 0
        for o in l:
            s += o.k
        return x * s

    return f, lambda: setattr(l[290], "k", 3.0)


@row
def deep_containers():
    d = {"a": [[[[[2.0]]]]]}

    def f(x):
        def total(t):
            return t if isinstance(t, float) else sum(map(total, t))

        return x * total(d["a"])

    return f, lambda: d["a"][0][0][0][0].__setitem__(0, 3.0)


@row
def string_template():
    o = ns(k="2.0")
    return (lambda x: x * float(string.Template("$k").substitute(vars(o)))), lambda: setattr(o, "k", "3.0")


@row
def type_name():
    class A:
        pass

    class B:
        pass

    o = A()
    return (lambda x: x * len(type(o).__name__ + ("" if type(o) is A else "zz"))), lambda: setattr(o, "__class__", B)


@row
def isinstance_class_changed():
    class A:
        pass

    class B(A):
        pass

    o = A()
    return (lambda x: x * (3 if isinstance(o, B) else 2)), lambda: setattr(o, "__class__", B)


@row
def int_enum():
    class E(enum.IntEnum):
        A = 1
        B = 2

    o = ns(e=E.A)
    return (lambda x: x * int(o.e)), lambda: setattr(o, "e", E.B)


@row
def device_():
    o = ns(d="cpu")
    return (lambda x: x.to(o.d) if o.d == "cpu" else x * 3), lambda: setattr(o, "d", "meta")


@row
def global_function_rebound():
    g = {"h": lambda x: x * 2}
    exec("def f(x): return h(x)", g)
    return g["f"], lambda: g.update(h=lambda x: x * 3)


@row
def global_absent():
    g = {"__builtins__": {"NameError": NameError}}
    exec("def f(x):\n    try: return x * K\n    except NameError: return x", g)
    return g["f"], lambda: g.update(K=3.0)


@row
def name_in_builtins():
    held = {"K": 2.0}
    g = {"__builtins__": held}
    exec("def f(x): return x * K", g)
    return g["f"], lambda: g.update(K=3.0)


@row
def globals_called():
    g = {"__builtins__": __builtins__}
    exec("def f(x): return x * globals().get('K', 2.0)", g)
    return g["f"], lambda: g.update(K=3.0)


@row
def imported_name():
    module = sys.modules["settings_of_a_row"] = types.ModuleType("settings_of_a_row")
    module.k = 2.0

    def f(x):
        from settings_of_a_row import k

        return x * k

    return f, lambda: setattr(module, "k", 3.0)


@row
def imported_module_exchanged():
    def put(k):
        sys.modules["settings_of_another"] = types.ModuleType("settings_of_another")
        sys.modules["settings_of_another"].k = k

    def f(x):
        import settings_of_another as s

        return x * s.k

    put(2.0)
    return f, lambda: put(3.0)


@row
def getattr_of_a_module():
    module, table = types.ModuleType("with_getattr"), {"k": 2.0}
    module.__getattr__ = lambda name: table[name]
    return (lambda x: x * module.k), lambda: table.update(k=3.0)


@row
def getattribute():
    class C:
        def __init__(s):
            s.k = 2.0

        def __getattribute__(s, n):
            v = object.__getattribute__(s, n)
            return v * 2 if n == "k" else v

    o = C()
    return (lambda x: x * o.k), lambda: setattr(o, "k", 3.0)


@row
def getattribute_of_super():
    class C:
        def __init__(s):
            s.k = 2.0

        def __getattribute__(s, n):
            v = super().__getattribute__(n)
            return v * 2 if n == "k" else v

    o = C()
    return (lambda x: x * o.k), lambda: setattr(o, "k", 3.0)


@row
def attribute_of_a_metaclass():
    class M(type):
        k = 2.0

    class C(metaclass=M):
        pass

    return (lambda x: x * C.k), lambda: setattr(M, "k", 3.0)


@row
def instancecheck_of_a_metaclass():
    class M(type):
        yes = True

        def __instancecheck__(cls, o):
            return M.yes

    class C(metaclass=M):
        pass

    o = ns()
    return (lambda x: x * (2 if isinstance(o, C) else 3)), lambda: setattr(M, "yes", False)


@row
def class_of_an_object():
    class A:
        def g(s, x):
            return x * 2

    class B:
        def g(s, x):
            return x * 3

    o = A()
    return (lambda x: o.g(x)), lambda: setattr(o, "__class__", B)


@row
def class_of_a_module():
    class A(nn.Module):
        k = 2.0

        def forward(s, x):
            return x * s.k

    class B(A):
        k = 3.0

    m = nn.Sequential(A())
    return (lambda x: m(x)), lambda: setattr(m[0], "__class__", B)


@row
def method_by_another_name():
    class C(nn.Module):
        forward = lambda s, x: x * 2

    m = C()
    return (lambda x: m(x)), lambda: setattr(C, "forward", lambda s, x: x * 3)


@row
def decorated_method():
    def decorated(g):
        @functools.wraps(g)
        def wrapper(*args):
            return g(*args) + 1

        return wrapper

    class C(nn.Module):
        @decorated
        def forward(s, x):
            return x * 2

    m = C()
    return (lambda x: m(x)), lambda: setattr(C, "forward", lambda s, x: x * 3)


@row
def dict_of_a_module():
    m = nn.Identity()
    m.k = 2.0
    return (lambda x: x * m.__dict__["k"]), lambda: setattr(m, "k", 3.0)


@row
def partial_made_anew():
    def g(k, x):
        return x * k

    p = functools.partial(g, 2.0)
    return (lambda x: p(x)), lambda: p.__setstate__((g, (3.0,), {}, None))


@row
def weak_ref_that_dies():
    class C:
        k = 2.0

    held = [C()]
    r = weakref.ref(held[0])
    return (lambda x: x * (3 if r() is None else r().k)), held.clear


@row
def cleared_cache():
    k = [2.0]

    @functools.lru_cache
    def cached(n):
        return n * k[0]

    def change():
        k[0] = 3.0
        cached.cache_clear()
        cached(2)

    return (lambda x: x * cached(2)), change


@row
def answer_of_a_cache_that_is_full():
    k = [2.0]

    @functools.lru_cache(maxsize=1)
    def cached(n):
        return {"k": n * k[0]}

    cached(2)

    def change():
        k[0] = 3.0
        cached(1)

    return (lambda x: x * cached(2)["k"]), change


@row
def answer_of_a_cache_that_is_filled_again():
    k = [2.0]

    @functools.lru_cache(maxsize=1)
    def cached(n):
        return ns(k=n * k[0])

    cached(2)

    def change():
        k[0] = 3.0
        cached(1), cached(2)

    return (lambda x: x * cached(2).k), change


@row
def number_of_a_cache_that_is_filled_again():
    k = [2.0]

    @functools.lru_cache(maxsize=2)
    def cached(n):
        return n * k[0]

    cached(2), cached(4)

    def change():
        k[0] = 3.0
        cached(1), cached(3), cached(4), cached(2)

    return (lambda x: x * cached(2)), change


@row
def cached_answer_that_is_written():
    cached = functools.cache(lambda: {"k": 2.0})
    cached()
    return (lambda x: x * cached()["k"]), lambda: cached().update(k=3.0)


@row
def cached_tensor():
    k = [2.0]
    cached = functools.cache(lambda n: torch.full((n,), k[0]))
    cached(3)

    def change():
        k[0] = 3.0
        cached.cache_clear()

    return (lambda x: x * cached(3)), change


@row
def registered_dispatch():
    g = functools.singledispatch(lambda x: 2.0)
    return (lambda x: x * g(1)), lambda: g.register(int)(lambda x: 3.0)


@row
def registered_dispatch_of_a_method():
    class C:
        g = functools.singledispatchmethod(lambda s, x: 2.0)

    c = C()
    return (lambda x: x * c.g(1)), lambda: C.__dict__["g"].register(int)(lambda s, x: 3.0)


# ---- the state of the process, which code asks for ----


def asked(name: str, f: Callable[..., Any], change: Callable[[], Any]) -> None:
    def make():
        return f, change

    make.__name__ = name
    ROWS.append(make)


def named(name: str) -> None:
    threading.current_thread().name = name


def set_variable(value: str) -> None:
    os.environ["TFN_K"] = value


LOG = logging.getLogger("tests.outside")
THIRD = decimal.Decimal(1), decimal.Decimal(3)
asked("decimal_context", lambda x: x * decimal.getcontext().prec, lambda: decimal.getcontext().__setattr__("prec", 3))
asked("decimal_quotient", lambda x: x * float(THIRD[0] / THIRD[1]), lambda: decimal.getcontext().__setattr__("prec", 2))
asked(
    "level_of_a_logger",
    lambda x: x * (2 if LOG.isEnabledFor(logging.DEBUG) else 3),
    lambda: LOG.setLevel(logging.DEBUG),
)
asked(
    "level_of_a_parent",
    lambda x: x * LOG.getEffectiveLevel(),
    lambda: logging.getLogger("tests").setLevel(logging.ERROR),
)
asked("level_by_attribute", lambda x: x * LOG.level, lambda: LOG.setLevel(logging.INFO))
asked(
    "logger_by_name",
    lambda x: x * logging.getLogger("tests.outside").getEffectiveLevel(),
    lambda: LOG.setLevel(logging.INFO),
)
asked(
    "logging_is_off",
    lambda x: x * (2 if LOG.isEnabledFor(logging.ERROR) else 3),
    lambda: logging.disable(logging.CRITICAL),
)
asked("numpy_errors", lambda x: x * (2 if np.geterr()["divide"] == "ignore" else 3), lambda: np.seterr(divide="ignore"))
asked("numpy_text", lambda x: x * len(np.array2string(np.array([1 / 3]))), lambda: np.set_printoptions(precision=3))
asked(
    "recursion_limit", lambda x: x * sys.getrecursionlimit(), lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1)
)
asked(
    "name_of_the_thread",
    lambda x: x * len(threading.current_thread().name),
    lambda: setattr(threading.current_thread(), "name", "another"),
)
asked("getenv_by_name", lambda x: x * float(variable("TFN_K", "1")), lambda: set_variable("2"))
asked(
    "environment_in_a_loop",
    lambda x: x + sum(k == "TFN_K" for k, v in os.environ.items()),
    lambda: os.environ.__setitem__("TFN_K", "2"),
)
asked(
    "environment_in_a_path",
    lambda x: x * len(os.path.expandvars("$TFN_K/a")),
    lambda: os.environ.__setitem__("TFN_K", "2"),
)


@row
def registered_class():
    class Base(abc.ABC):
        pass

    class C:
        pass

    return (lambda x: x * (2 if isinstance(C(), Base) else 3)), lambda: Base.register(C)


@row
def registered_class_in_a_pattern():
    class C:
        pass

    c = C()

    def f(x):
        match c:
            case collections.abc.Sequence():
                return x * 2
            case _:
                return x * 3

    return f, lambda: collections.abc.Sequence.register(C)


@row
def registered_with_a_registered_class():
    class Base(abc.ABC):
        pass

    class Other(abc.ABC):
        pass

    class C:
        pass

    Base.register(Other)
    return (lambda x: x * (2 if issubclass(C, (int, Base)) else 3)), lambda: Other.register(C)


@row
def protocol_at_runtime():
    @typing.runtime_checkable
    class P(typing.Protocol):
        def go(self): ...

    c = ns()
    return (lambda x: x * (2 if isinstance(c, P) else 3)), lambda: setattr(c, "go", 1)


@row
def callable_by_its_class():
    class C:
        pass

    c = C()
    return (lambda x: x * (2 if callable(c) else 3)), lambda: setattr(C, "__call__", lambda s: 1)


@row
def missing_attribute_of_a_class():
    class C:
        pass

    c = C()
    return (lambda x: x * (2 if hasattr(c, "k") else 3)), lambda: setattr(C, "k", 1)


@row
def class_attribute_of_a_dict():
    class D(dict):
        k = 2.0

        def __missing__(self, key):
            return self.k

    d = D()
    return (lambda x: x * d["a"]), lambda: setattr(D, "k", 3.0)


@row
def bases_of_a_class():
    class A:
        k = 2.0

    class B:
        k = 3.0

    class C(A):
        pass

    c = C()
    return (lambda x: x * c.k), lambda: setattr(C, "__bases__", (B,))


@row
def content_of_a_class():
    class C:
        pass

    return (lambda x: x * len(vars(C))), lambda: setattr(C, "k", 1)


@row
def text_of_a_function():
    def g():
        "One."

    return (lambda x: x * len(g.__doc__)), lambda: setattr(g, "__doc__", "Other.")


@row
def format_of_an_object():
    c = ns(k=2.0)
    return (lambda x: x * float("{0.k}".format(c))), lambda: setattr(c, "k", 3.0)  # noqa: UP030, UP032


@row
def context_of_the_library():
    c = contextlib.nullcontext(2.0)

    def f(x):
        with c as k:
            return x * k

    return f, lambda: setattr(c, "enter_result", 3.0)


@row
def default_of_a_context_variable():
    c = contextvars.ContextVar("c", default={"k": 2.0})
    return (lambda x: x * c.get()["k"]), lambda: c.get().update(k=3.0)


@row
def weak_set():
    class C:
        k = 2.0

    kept = [C(), C()]
    held = weakref.WeakSet(kept)
    return (lambda x: x * sum(c.k for c in held)), lambda: setattr(kept[0], "k", 3.0)


@row
def weak_set_by_length():
    class C:
        pass

    kept = [C(), C()]
    held = weakref.WeakSet(kept)
    return (lambda x: x * len(held)), kept.clear


@row
def weak_values():
    c = C2()
    held = weakref.WeakValueDictionary(c=c)
    return (lambda x: x * held["c"].k), lambda: setattr(c, "k", 3.0)


class C2:
    k = 2.0


@row
def masked_array():
    a = np.ma.array([1.0, 2.0], mask=[0, 0])
    return (lambda x: x * float(a.sum())), lambda: a.__setitem__(0, np.ma.masked)


@row
def array_of_objects():
    k = [2.0]
    a = np.array([None], dtype=object)
    a[0] = k
    return (lambda x: x * a[0][0]), lambda: k.__setitem__(0, 3.0)


@row
def array_in_an_object():
    c = ns(b=ns(a=np.array([2.0])))
    return (lambda x: x * copy.deepcopy(c).b.a[0]), lambda: c.b.a.__setitem__(0, 3.0)


@row
def missing_attribute_of_the_library():
    if hasattr(string, "tfn_k"):
        del string.tfn_k
    return (lambda x: x * getattr(string, "tfn_k", 2.0)), lambda: setattr(string, "tfn_k", 3.0)


@row
def number_of_the_library():
    string.tfn_j = 2.0
    return (lambda x: x * string.tfn_j), lambda: setattr(string, "tfn_j", 3.0)


@row
def attribute_of_a_string():
    class S(str):
        pass

    s = S("a")
    s.k = 2.0
    return (lambda x: x * s.k), lambda: setattr(s, "k", 3.0)


@row
def attribute_of_a_number():
    class S(float):
        def scaled(self):
            return self * self.k

    s = ns(v=S(1.0))
    s.v.k = 2.0
    return (lambda x: x * s.v.scaled()), lambda: setattr(s.v, "k", 3.0)


@row
def defaults_of_init():
    class C:
        def __init__(self, k=2.0):
            self.k = k

    return (lambda x: x * C().k), lambda: setattr(C.__init__, "__defaults__", (3.0,))


@row
def defaults_of_a_dataclass():
    @dataclasses.dataclass
    class C:
        k: float = 2.0

    return (lambda x: x * C().k), lambda: setattr(C.__init__, "__defaults__", (3.0,))


@row
def defaults_of_forward():
    class M(nn.Module):
        def forward(s, x, k=2.0):
            return x * k

    m = M()
    return (lambda x: m(x)), lambda: setattr(M.forward, "__defaults__", (3.0,))


@row
def code_of_a_method():
    class C:
        def m(s, x):
            return x * 2

    def n(s, x):
        return x * 3

    return (lambda x: C().m(x)), lambda: setattr(C.m, "__code__", n.__code__)


@row
def code_of_a_property():
    class C:
        @property
        def k(s):
            return 2.0

    def n(s):
        return 3.0

    c = C()
    return (lambda x: x * c.k), lambda: setattr(C.k.fget, "__code__", n.__code__)


@row
def print_options_of_an_array():
    a = np.array([1.23456])
    return (lambda x: x * len(str(a))), lambda: np.set_printoptions(precision=2)


class Holding(nn.Module):
    """A module that holds others, and tensors, where PyTorch does not look for them."""

    def __init__(s):
        super().__init__()
        s.parts, s.held = [nn.Dropout(1.0)], ns(part=nn.Dropout(1.0), k=torch.ones(3))

    def forward(s, x):
        return s.parts[0](x + 1) + s.held.part(x) + s.held.k


@row
def module_in_a_list_of_a_jitted_module():
    m = Holding()
    return m, lambda: m.parts[0].eval()


@row
def module_in_an_object_of_a_jitted_module():
    m = Holding()
    return m, lambda: m.held.part.eval()


@row
def tensor_in_an_object_of_a_jitted_module():
    m = Holding()
    return m, lambda: setattr(m.held, "k", torch.zeros(3))


class Kind(enum.Enum):
    A = 1
    B = 2


@row
def attribute_of_an_enum_member():
    Kind.A.k = 2.0
    o = ns(kind=Kind.A)
    return (lambda x: x * o.kind.k), lambda: setattr(Kind.A, "k", 3.0)


@row
def attribute_of_enum_members_in_a_loop():
    Kind.A.k = Kind.B.k = 2.0

    def f(x):
        for one in Kind:
            x = x * one.k
        return x

    return f, lambda: setattr(Kind.B, "k", 3.0)


@row
def attribute_of_super():
    class A:
        k = 2.0

    class B(A):
        k = 5.0

        def m(s, x):
            return x * super().k

    b = B()
    return (lambda x: b.m(x)), lambda: setattr(A, "k", 3.0)


@row
def attribute_of_super_in_a_class_method():
    class A:
        k = 2.0

    class B(A):
        k = 5.0

        @classmethod
        def m(s, x):
            return x * super().k

    return (lambda x: B.m(x)), lambda: setattr(A, "k", 3.0)


def nested(depth, make):
    inner = top = ns(k=2.0)
    for _ in range(depth):
        top = make(top)
    return top, inner


@row
def end_of_a_chain():
    top, inner = nested(9, lambda of: ns(a=of))

    def f(x):
        o = top
        while hasattr(o, "a"):
            o = o.a
        return x * o.k

    return f, lambda: setattr(inner, "k", 3.0)


@row
def deep_in_what_is_copied():
    top, inner = nested(9, lambda of: ns(a=of))

    def f(x):
        o = copy.deepcopy(top)
        while hasattr(o, "a"):
            o = o.a
        return x * o.k

    return f, lambda: setattr(inner, "k", 3.0)


@row
def deep_in_lists_and_objects():
    top, inner = nested(9, lambda of: [ns(a=of)])
    return (lambda x: x * len(str(top))), lambda: setattr(inner, "k", 3.25)


@row
def partial_below_many_wrappers():
    def g(x, k):
        return x * k

    def wrapped(h):
        return lambda x: h(x)

    partial = outer = functools.partial(g, k=2.0)
    for _ in range(10):
        outer = wrapped(outer)
    return (lambda x: outer(x)), lambda: partial.keywords.update(k=3.0)


@row
def keywords_of_a_partialmethod():
    class C:
        def g(s, x, k=1.0):
            return x * k

        h = functools.partialmethod(g, k=2.0)

    c = C()
    return (lambda x: c.h(x)), lambda: vars(C)["h"].keywords.update(k=3.0)


@row
def text_of_a_namespace():
    o = ns(k=ns(j=[2.0]))
    return (lambda x: x * len(f"{o}")), lambda: setattr(o.k, "j", [2.25])


@row
def print_options_in_a_format():
    a = [np.array([1.23456])]
    return (lambda x: x * len(f"{a}")), lambda: np.set_printoptions(precision=2)


@row
def print_options_behind_a_percent():
    a = np.array([1.23456])
    return (lambda x: x * len("%s" % a)), lambda: np.set_printoptions(precision=2)


@row
def class_attribute_of_a_new_object():
    class C:
        k = 2.0

    return (lambda x: x * C().k), lambda: setattr(C, "k", 3.0)


@row
def class_attribute_in_a_method_of_a_new_object():
    class A:
        k = 2.0

    class C(A):
        def m(s):
            return s.k

    return (lambda x: x * C().m()), lambda: setattr(A, "k", 3.0)


@row
def missing_attribute_of_a_new_object():
    class C:
        def __init__(s):
            s.j = 1.0

    return (lambda x: x * getattr(C(), "k", 2.0)), lambda: setattr(C, "k", 3.0)


@row
def method_of_a_new_object():
    class C:
        def m(s):
            return 2.0

    return (lambda x: x * C().m()), lambda: setattr(C, "m", lambda s: 3.0)


@row
def operator_of_a_new_object():
    class C:
        def __mul__(s, x):
            return x * 2.0

    return (lambda x: C() * x), lambda: setattr(C, "__mul__", lambda s, x: x * 3.0)


@row
def init_of_a_new_object():
    class C:
        k = 2.0

    def init(s):
        s.k = 3.0

    return (lambda x: x * C().k), lambda: setattr(C, "__init__", init)


@row
def object_in_a_slot_of_a_new_object():
    class C:
        __slots__ = ("o",)

        def __init__(s, o):
            s.o = o

    o = ns(k=2.0)
    return (lambda x: x * C(o).o.k), lambda: setattr(o, "k", 3.0)


@row
def field_of_a_replaced_namedtuple():
    Pair = collections.namedtuple("Pair", "k j")
    o = ns(t=Pair([2.0], 1.0))
    return (lambda x: x * o.t._replace(j=2).k[0]), lambda: o.t.k.__setitem__(0, 3.0)


@row
def view_of_a_dict():
    d = {"k": 2.0}
    keys = d.keys()
    return (lambda x: x * len(keys)), lambda: d.update(j=3.0)


@row
def variable_of_another_context():
    v = contextvars.ContextVar("v", default=2.0)
    context = contextvars.Context()  # empty: other variables are none of its business
    return (lambda x: x * context.run(v.get)), lambda: context.run(v.set, 3.0)


@row
def module_that_is_missing():
    sys.modules.pop("tfn_none", None)

    def f(x):
        try:
            import tfn_none
        except ImportError:
            return x
        return x * tfn_none.k

    return f, lambda: sys.modules.update(tfn_none=ns_module("tfn_none", 3.0))


def ns_module(name, k):
    module = types.ModuleType(name)
    module.k = k
    return module


@row
def module_imported_by_name():
    sys.modules["tfn_m"] = module = ns_module("tfn_m", 2.0)
    return (lambda x: x * importlib.import_module("tfn_m").k), lambda: setattr(module, "k", 3.0)


@row
def globals_of_a_function():
    global G2
    G2 = 2.0

    def f(x):
        return x * f.__globals__["G2"]

    return f, lambda: f.__globals__.update(G2=3.0)


@row
def cell_of_a_function():
    k = 2.0

    def g():
        return k

    def change():
        g.__closure__[0].cell_contents = 3.0

    return (lambda x: x * g.__closure__[0].cell_contents), change


@row
def object_among_the_locals():
    o = ns(k=2.0)

    def f(x):
        held = o
        return x * locals()["held"].k

    return f, lambda: setattr(o, "k", 3.0)


@row
def function_of_a_library():
    lib = ns_module("tfn_lib", lambda x: x * 2.0)
    lib.__file__ = "site-packages/tfn_lib.py"
    return (lambda x: lib.k(x)), lambda: setattr(lib, "k", lambda x: x * 3.0)


@row
def attribute_that_c_reads():
    os = [ns(k=2.0, w=1.0), ns(k=1.0, w=5.0)]
    return (lambda x: x * max(os, key=operator.attrgetter("k")).w), lambda: setattr(os[1], "k", 3.0)


@row
def object_in_a_cache_that_is_filled():
    o = ns(k=2.0)

    @functools.lru_cache
    def g(n):
        return o

    g(1)
    return (lambda x: x * g(1).k), lambda: setattr(o, "k", 3.0)


@row
def object_in_an_attribute_of_a_tensor():
    t = torch.ones(3)
    t.k = ns(j=2.0)
    return (lambda x: x * t.k.j), lambda: setattr(t.k, "j", 3.0)


@row
def attributes_of_a_tensor():
    t = torch.ones(3)
    t.k = 2.0
    return (lambda x: x * vars(t)["k"]), lambda: setattr(t, "k", 3.0)


class Plain:
    """An object with a `__dict__`, which may become another dict."""

    k = 1.0

    def __init__(self, k: float = 2.0) -> None:
        self.k = k


@row
def dict_of_an_object_exchanged():
    o = Plain()
    return (lambda x: x * o.k), lambda: setattr(o, "__dict__", {"k": 3.0})


@row
def dict_of_an_object_in_another_exchanged():
    o = ns(a=Plain())
    return (lambda x: x * (3.0 if hasattr(o.a, "flag") else 2.0)), lambda: setattr(o.a, "__dict__", {"flag": 1})


@row
def dict_of_an_object_read_by_name_exchanged():
    o = Plain()
    return (lambda x: x * o.__dict__["k"] * vars(o)["k"]), lambda: setattr(o, "__dict__", {"k": 3.0})


@row
def dict_that_is_its_object():
    class Options(dict):
        def __init__(self, **given):
            super().__init__(given)
            self.__dict__ = self

    o = Options(k=2.0)
    return (lambda x: x * o.k), lambda: o.update(k=3.0)


@row
def property_that_comes_before_an_attribute():
    class Here(Plain):
        pass

    o = Here()
    return (lambda x: x * o.k), lambda: setattr(Here, "k", property(lambda self: 3.0))


@row
def attribute_of_a_list_that_is_missing():
    class Items(list):
        pass

    o = Items()
    return (lambda x: x * (3.0 if hasattr(o, "k") else 2.0)), lambda: setattr(o, "k", 1)


@row
def attribute_that_a_dict_has_from_its_class():
    class Table(dict):
        k = 2.0

        def __missing__(self, name):
            return self.k

    o = Table()
    return (lambda x: x * o["any"]), lambda: setattr(o, "k", 3.0)


@row
def attributes_by_computed_names():
    o = ns(lr_0=2.0, lr_1=1.0, steps=0)
    return (lambda x: x * sum(getattr(o, f"lr_{i}") for i in range(2))), lambda: setattr(o, "lr_1", 3.0)


@row
def attributes_by_computed_names_that_are_missing():
    o, suffix = ns(), ["0"]
    return (lambda x: x * (3.0 if hasattr(o, "lr_" + suffix[0]) else 2.0)), lambda: setattr(o, "lr_0", 1)


@row
def method_by_a_computed_name():
    class Ops:
        def do_mul(self, x):
            return x * 2.0

    o = Ops()
    return (lambda x: [getattr(o, f"do_{name}") for name in ["mul", "sub"][:1]][0](x)), lambda: setattr(
        Ops, "do_mul", lambda self, x: x * 3.0
    )


@row
def class_attribute_by_a_computed_name():
    class Values:
        k0 = 2.0

    return (lambda x: x * sum(getattr(Values, f"k{i}") for i in range(1))), lambda: setattr(Values, "k0", 3.0)


@row
def slots_by_computed_names():
    class Slots:
        __slots__ = ("k0", "k1")

    o = Slots()
    o.k0 = 2.0
    return (lambda x: x * sum(getattr(o, f"k{i}", 1.0) for i in range(2))), lambda: setattr(o, "k1", 3.0)


@row
def computed_name_in_getattribute():
    class Hidden:
        def __getattribute__(self, name):
            return object.__getattribute__(self, "_" + name)

    o = Hidden()
    object.__setattr__(o, "_k", 2.0)
    return (lambda x: x * o.k), lambda: object.__setattr__(o, "_k", 3.0)


@row
def object_by_a_computed_name_in_a_module():
    m = nn.Module()
    m.cfg0 = ns(k=2.0)
    return (lambda x: x * sum(getattr(m, f"cfg{i}").k for i in range(1))), lambda: setattr(m.cfg0, "k", 3.0)


@row
def private_slot_in_a_copy():
    class Private:
        __slots__ = ("__k",)

        def __init__(self):
            self.__k = 2.0

        @property
        def k(self):
            return self.__k

    o = Private()
    return (lambda x: x * copy.copy(o).k), lambda: setattr(o, "_Private__k", 3.0)


def tagged_tensor():
    t = torch.ones(3)
    t.k = 2.0
    return t


def tagged_module():
    m = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    for p in m.parameters():
        p.k = 2.0
    return m


@row
def attribute_of_a_tensor_in_a_local():
    t = tagged_tensor()
    return (lambda x: x * (lambda p: p.k)(t)), lambda: setattr(t, "k", 3.0)


@row
def attribute_of_a_tensor_in_a_list():
    ts = [(tagged_tensor(), 1.0)]

    def f(x):
        for t, scale in ts:
            x = x * t.k * scale
        return x

    return f, lambda: setattr(ts[0][0], "k", 3.0)


@row
def attribute_of_a_tensor_that_is_missing():
    t = torch.ones(3)
    return (lambda x: x * (lambda p: getattr(p, "j", 2.0))(t)), lambda: setattr(t, "j", 3.0)


@row
def attribute_of_a_tensor_in_the_key_of_a_sort():
    ts = [tagged_tensor(), tagged_tensor() * 2.0]
    ts[1].k = 5.0
    return (lambda x: x * sorted(ts, key=lambda t: t.k)[0]), lambda: setattr(ts[0], "k", 7.0)


@row
def attribute_of_a_tensor_that_is_returned():
    t = tagged_tensor()

    def g():
        return t

    return (lambda x: x * g().k), lambda: setattr(t, "k", 3.0)


@row
def attribute_of_a_tensor_that_leads_on():
    t = torch.ones(3)
    t.cfg = ns(k=2.0)

    def g(p):
        q = p
        return q.cfg.k

    return (lambda x: x * g(t)), lambda: setattr(t.cfg, "k", 3.0)


@row
def attributes_of_parameters():
    m = tagged_module()

    def f(x):
        for p in m.parameters():
            x = x * p.k
        return x

    return f, lambda: setattr(m[0].bias, "k", 3.0)


@row
def attributes_of_parameters_that_are_missing():
    m = tagged_module()
    scales = lambda: [3.0 for name, p in m.named_parameters() if not getattr(p, "frozen", False)]
    return (lambda x: x * sum(scales())), lambda: setattr(m[0].weight, "frozen", True)


def tagged_tensors():
    """Tensors in a list, a generator that gives them by name, and the list."""
    tensors = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    for one in tensors:
        one.k = 2.0

    def named():
        for place, one in enumerate(tensors):
            yield str(place), one

    return named, tensors


@row
def attributes_of_tensors_that_a_generator_gives():
    named, tensors = tagged_tensors()
    return (lambda x: x * sum([one.k for _, one in named()])), lambda: setattr(tensors[0], "k", 3.0)


@row
def attributes_of_tensors_that_a_generator_gives_are_missing():
    named, tensors = tagged_tensors()
    scales = lambda: [3.0 for _, one in named() if not hasattr(one, "frozen")]
    return (lambda x: x * sum(scales())), lambda: setattr(tensors[0], "frozen", True)


@row
def attributes_of_tensors_in_a_tuple_that_a_generator_gives():
    _, tensors = tagged_tensors()
    held = tuple(tensors)

    def each():
        yield from held

    return (lambda x: x * len({one.k for one in each()})), lambda: setattr(held[1], "k", 3.0)


@row
def attributes_of_parameters_in_a_dict_of_them():
    m = tagged_module()
    scales = lambda: {name: 1.0 for name, p in dict(m.named_parameters()).items() if getattr(p, "on", True)}
    return (lambda x: x * len(scales())), lambda: setattr(m[0].weight, "on", False)


@row
def attribute_of_the_first_parameter():
    m = tagged_module()
    return (lambda x: x * next(m.parameters()).k), lambda: setattr(m[0].weight, "k", 3.0)


@row
def attribute_of_a_parameter_of_a_jitted_module():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.w.k = 2.0

        def forward(self, x):
            w = self.w
            return (x * w.k).detach()

    m = Scaled()
    return m, lambda: setattr(m.w, "k", 3.0)


@row
def class_attribute_of_a_tensor():
    class Weight(nn.Parameter):
        scale = 2.0

    w = Weight(torch.ones(3))
    return (lambda x: x * (lambda p: p.scale)(w)), lambda: setattr(Weight, "scale", 3.0)


@row
def attribute_of_all_tensors():
    torch.Tensor.of_tests = lambda t: t * 2.0
    return (lambda x: x.of_tests()), lambda: setattr(torch.Tensor, "of_tests", lambda t: t * 3.0)


@row
def object_from_a_method_named_get():
    class Registry:
        one = ns(k=2.0)

        @classmethod
        def get(cls):
            return cls.one

    return (lambda x: x * Registry.get().k), lambda: setattr(Registry.one, "k", 3.0)


@row
def objects_from_a_method_named_values():
    class Registry:
        def __init__(self):
            self.held = [ns(k=2.0)]

        def values(self):
            return list(self.held)

    of = Registry()
    return (lambda x: x * sum(one.k for one in of.values())), lambda: setattr(of.held[0], "k", 3.0)


@row
def item_elsewhere_in_a_list():
    items = [3, 7, 7, 7]
    return (lambda x: x * (2.0 if 3 in items else 3.0)), lambda: items.__setitem__(0, 0)


@row
def contained_in_an_object():
    class Holder:
        def __init__(self):
            self.held = []

        def __contains__(self, one):
            return one in self.held

    o = Holder()
    return (lambda x: x * (3.0 if 1 in o else 2.0)), lambda: o.held.append(1)


@row
def index_beyond_the_end():
    items = [1.0]

    def f(x):
        try:
            return x * items[2]
        except IndexError:
            return x

    return f, lambda: items.extend([2.0, 3.0])


@row
def weak_proxy():
    o = Plain()
    proxy = weakref.proxy(o)
    return (lambda x: x * proxy.k), lambda: setattr(o, "k", 3.0)


@row
def annotations_of_a_class():
    class Of:
        k: float

    return (lambda x: x * len(typing.get_type_hints(Of))), lambda: Of.__annotations__.update(j=int)


@row
def cells_of_a_function():
    k = 2.0

    def g():
        return k

    def change():
        nonlocal k
        k = 3.0

    return (lambda x: x * inspect.getclosurevars(g).nonlocals["k"]), change


@row
def names_of_an_object():
    class Of:
        pass

    o = Of()
    return (lambda x: x * len([name for name in dir(o) if name[0] != "_"])), lambda: setattr(Of, "k", 1)


@row
def members_of_an_object():
    class Of:
        pass

    o = Of()
    return (lambda x: x * len(inspect.getmembers(o))), lambda: setattr(Of, "k", 1)


@row
def global_of_a_frame():
    global G
    G = 2.0

    def change():
        global G
        G = 3.0

    return (lambda x: x * sys._getframe().f_globals["G"]), change


@row
def property_with_a_getter_of_c():
    class Of:
        k = property(operator.attrgetter("_k"))

    o = Of()
    o._k = 2.0
    return (lambda x: x * o.k), lambda: setattr(o, "_k", 3.0)


@row
def field_of_a_structure():
    class Of(ctypes.Structure):
        _fields_ = (("k", ctypes.c_double),)

    o = Of(2.0)
    return (lambda x: x * o.k), lambda: setattr(o, "k", 3.0)


@row
def attribute_of_a_module_with_two_underscores():
    m = nn.Identity()
    setattr(m, "__k", 2.0)
    return (lambda x: x * getattr(m, "__k")), lambda: setattr(m, "__k", 3.0)


@row
def object_that_torch_functions_take():
    class Scale:
        def __init__(self):
            self.k = 2.0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return func(*[one.k if isinstance(one, Scale) else one for one in args])

    scale = Scale()
    return (lambda x: torch.mul(x, scale)), lambda: setattr(scale, "k", 3.0)


# ---- things that are replaced as a whole, and names that come later ----

DIVMOD = divmod


def forget() -> None:
    """Undo what the changes of these rows leave behind."""
    for place in (torch.Tensor, torch):
        if hasattr(place, "of_tests"):
            del place.of_tests
    globals().pop("divmod", None)
    builtins.divmod = DIVMOD


def exchanged(one: Any, other: Any) -> Callable[[], Any]:
    return lambda: setattr(one, "__dict__", other.__dict__)


def modules_with(*numbers):
    found = [nn.Linear(3, 3) for _ in numbers]
    for module, k in zip(found, numbers):
        module.k = k
    return found


@row
def dict_of_a_module_exchanged():
    m, other = modules_with(2.0, 3.0)
    return (lambda x: x * m.k), exchanged(m, other)


@row
def dict_of_a_called_module_exchanged():
    m, other = modules_with(2.0, 3.0)
    return (lambda x: m(x)), exchanged(m, other)


@row
def dict_of_a_submodule_exchanged():
    m, other = modules_with(2.0, 3.0)
    outer = nn.Sequential(m, nn.ReLU())
    return (lambda x: outer(x) * outer[0].k), exchanged(m, other)


@row
def dir_of_a_module():
    (m,) = modules_with(2.0)
    return (lambda x: x * (3.0 if "of_tests" in dir(m) else 2.0)), lambda: setattr(m, "of_tests", 1)


@row
def dir_of_a_tensor():
    w = torch.ones(3)
    return (lambda x: x * w * (3.0 if "of_tests" in dir(w) else 2.0)), lambda: setattr(w, "of_tests", 1)


@row
def dir_of_an_object():
    o = ns(k=2.0)
    return (lambda x: x * (3.0 if "of_tests" in dir(o) else 2.0)), lambda: setattr(o, "of_tests", 1)


@row
def attribute_added_to_tensors():
    return (lambda x: x * getattr(x, "of_tests", 2.0)), lambda: setattr(torch.Tensor, "of_tests", 3.0)


@row
def attribute_of_tensors_asked_for():
    w = torch.ones(3)
    return (lambda x: x * w * (3.0 if hasattr(w, "of_tests") else 2.0)), lambda: setattr(torch.Tensor, "of_tests", 1)


@row
def attribute_of_tensors_tried():
    def f(x):
        try:
            return x * x.of_tests
        except AttributeError:
            return x * 2

    return f, lambda: setattr(torch.Tensor, "of_tests", 3.0)


@row
def attribute_added_to_a_library():
    return (lambda x: x * getattr(torch, "of_tests", 2.0)), lambda: setattr(torch, "of_tests", 3.0)


@row
def builtin_hidden():
    return (lambda x: x * divmod(7.0, 2.0)[0]), lambda: globals().update(divmod=lambda a, b: (a, b))


@row
def builtins_hidden_of_several():
    return (lambda x: x * divmod(7.0, 2.0)[0] * abs(-2.0) * len([1, 2])), lambda: globals().update(
        divmod=lambda a, b: (a, b)
    )


@row
def builtin_replaced():
    return (lambda x: x * divmod(7.0, 2.0)[0]), lambda: setattr(builtins, "divmod", lambda a, b: (a, b))


# ---- containers that are passed to the user's functions ----


def _times(held, x):
    return x * held["k"]


def _size(held):
    return len(held)


def _same(held):
    return held


def _pair(held):
    return 1, held


def _put(on, held):
    on.held = held


def _values(held):
    yield from held.values()


def _deep(held, depth):
    return sum(held.values()) if depth == 0 else _deep(held, depth - 1)


def _spread(*given, **named):
    return _times(*given, **named)


class _Scaler:
    def __call__(self, held, x):
        return x * sum(held.values())

    def scaled(self, held, x):
        return _times(held, x)


def _traced(f):
    @functools.wraps(f)
    def wrapper(*args, **kwargs):
        return f(*args, **kwargs)

    return wrapper


PASSED = {
    "item": lambda d, x: _times(d, x),
    "size": lambda d, x: x * _size(d),
    "returned": lambda d, x: x * _same(d)["k"],
    "size_of_returned": lambda d, x: x * len(_same(d)),
    "in_tuple": lambda d, x: x * _pair(d)[1]["k"],
    "generator": lambda d, x: x * sum(_values(d)),
    "recursive": lambda d, x: x * _deep(d, 3),
    "spread": lambda d, x: _spread(d, x=x),
    "object": lambda d, x: _Scaler()(d, x),
    "method": lambda d, x: _Scaler().scaled(d, x),
    "decorated": lambda d, x: _traced(_times)(d, x),
    "partial": lambda d, x: functools.partial(_times, d)(x),
    "from_table": lambda d, x: {"f": _times}["f"](d, x),
    "chosen": lambda d, x: (_times if x.dim() else _put)(d, x),
    "any": lambda d, x: x * sum(f(d) for f in (len, _size, lambda d: max(d.values()))),
    "mapped": lambda d, x: x * sum(map(_size, [d, d])),
    "sorted": lambda d, x: x * len(sorted([d, d], key=_size)[0]),
    "reduced": lambda d, x: functools.reduce(lambda y, held: _times(held, y), [d, d], x),
    "inner": lambda d, x: (lambda held: (lambda: _times(held, x))())(d),
    "printed": lambda d, x: x * len(f"{_same(d)}"),
    "compared": lambda d, x: x * (2 if _same(d) == {"k": 2.0} else 3),
    "jitted": lambda d, x: tfn.jit(lambda y: _times(d, y))(x),
    "comprehended": lambda d, x: x * sum(v for v in _same(d).values()),
}


def _stored(d, x):
    on = ns()
    _put(on, d)
    return x * on.held["k"]


def _rebound(d, x):
    f = len
    y = x * f(d)
    f = _times
    return f(d, y)


def _from_loop(d, x):
    for f in (_same, _size, len):
        found = f(d)
    return x * found


def _passed(name: str, f: Callable[..., Any]) -> Row:
    def make():
        held = {"k": 2.0}
        return (lambda x: f(held, x)), lambda: held.update(k=3.0, j=10.0)

    make.__name__ = f"passed_{name}"
    return make


ROWS += [
    _passed(name, f) for name, f in {**PASSED, "stored": _stored, "rebound": _rebound, "from_loop": _from_loop}.items()
]


class Stateful:
    """An object whose state is asked for."""

    def __init__(self) -> None:
        self.k = 2.0


@row
def state_of_an_object():
    o = Stateful()
    return (lambda x: x * o.__getstate__()["k"]), lambda: setattr(o, "k", 3.0)  # type: ignore[index]


@row
def parts_for_a_copy():
    o = Stateful()
    return (lambda x: x * o.__reduce_ex__(2)[2]["k"]), lambda: setattr(o, "k", 3.0)  # type: ignore[index]


COMPUTED = {
    "item": "globals()['g' + n]",
    "get": "globals().get(f'g{n}', 5.0)",
    "local": "(lambda names, key: names[key])(globals(), n.replace('k', 'gk'))",
    "of an object": "globals()['h' + n].k",
    "of a function": "globals()['f' + n]()",
    "dunder": "hk.__getattribute__('k')",
    "computed dunder": "hk.__getattribute__(''.join(n))",
    "other globals": "fk.__globals__['g' + n]",
}


def _computed(name: str, text: str) -> Row:
    def make():
        names: dict[str, Any] = {"n": "k", "gk": 2.0, "hk": ns(k=2.0)}
        exec(f"def f(x):\n    return x * {text}\ndef fk():\n    return gk", names)

        def change():
            names["gk"] = names["hk"].k = 3.0

        return names["f"], change

    make.__name__ = f"computed_name_{name.replace(' ', '_')}"
    return make


ROWS += [_computed(name, text) for name, text in COMPUTED.items()]
