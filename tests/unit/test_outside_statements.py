"""Every statement in which code may stand, and every kind of name by which it reads a number of an object from outside.

The number then changes. The oracle is the function itself, without jit. Python compiles one statement in other ways in
each version: comprehensions are inlined, class bodies and type parameters have frames of their own.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import thunder_fn as tfn
from thunder_fn.capture.instructions import instructions
from thunder_fn.capture.outside import bytecode

STATEMENTS = {
    "assignment": "y = E",
    "two locals": "a = E; b = a; y = b; z = y; b, a = z, y; y = a",
    "star": "(*a,) = (E,); y = a[0]",
    "augmented": "y = 0.0; y += E",
    "conditional": "y = 1.0 if E > 2.5 else 2.0",
    "chain": "y = 1.0 if 0 < E < 2.5 else 2.0",
    "if": """
        if E > 2.5: y = 1.0
        elif E > 1.5: y = 2.0
        else: y = 3.0""",
    "while": """
        y = 0.0
        while y < E: y += 1.0""",
    "for": """
        for y in (E,): pass
        else: y = y + E""",
    "list": "y = [E for _ in (1,)][0]",
    "list of lists": "y = [[E for _ in (1,)] for _ in (1,)][0][0]",
    "iterable": "y = [v for v in (E,)][0]",
    "second iterable": "y = [v for _ in (1,) for v in (E,)][0]",
    "condition": "y = len([v for v in (1.0, 2.0, 3.0, 9.0) if v < E])",
    "set": "y = {E for _ in (1,)}.pop()",
    "key": "y = [*{E: 1 for _ in (1,)}][0]",
    "entry": "y = {1: E for _ in (1,)}[1]",
    "generator expression": "y = sum(E for _ in (1,))",
    "walrus": "[v := E for _ in (1,)]; y = v",
    "lambda": "y = (lambda: E)()",
    "lambdas in a list": "y = [lambda: E for _ in (1,)][0]()",
    "list in a lambda": "y = (lambda: [E for _ in (1,)][0])()",
    "text": "y = float(f'{E}')",
    "text in text": "y = float(f'{f\"{E:.3f}\"}')",
    "width": "y = len(f'{1:{int(E)}}')",
    "function": """
        def g(): return E
        y = g()""",
    "functions": """
        def g():
            def h(): return [E for _ in (1,)][0]
            return h
        y = g()()""",
    "default": """
        def g(v=E, *, w=E): return v + w
        y = g()""",
    "recursion": """
        def g(n): return E if n == 0 else g(n - 1)
        y = g(30)""",
    "nonlocal": """
        y = 0.0
        def g():
            nonlocal y
            y = E
        g()""",
    "decorator": """
        def times(k):
            def decorate(g):
                @functools.wraps(g)
                def call(*a, **k): return g(*a, **k) * k
                return functools.wraps(g)(lambda: g() * k)
            return decorate
        @times(E)
        @times(2.0)
        def g(): return E
        y = g()""",
    "class": """
        class A: v = E
        y = A.v""",
    "class in a class": """
        class A:
            class B: v = E
        y = A.B.v""",
    "list in a class": """
        class A: v = [E for _ in (1,)][0]
        y = A.v""",
    "function in a class": """
        class A:
            def g(v=E): return v
            v = g()
        y = A.v""",
    "method": """
        class A:
            def g(self): return E
        y = A().g()""",
    "list in a method": """
        class A:
            def g(self): return [E for _ in (1,)][0]
        y = A().g()""",
    "class in a method": """
        class A:
            def g(self):
                class B: v = [E for _ in (1,)][0] + E
                return B.v
        y = A().g()""",
    "property": """
        class A:
            @property
            def g(self): return E
        y = A().g""",
    "super": """
        class A:
            def g(self): return E
        class B(A):
            def g(self): return super().g() + [super(B, self).g() for _ in (1,)][0]
        y = B().g()""",
    "metaclass": """
        class M(type):
            def __new__(cls, *a, v): return super().__new__(cls, *a)
            def __init__(cls, *a, v): cls.v = v + E
        class A(metaclass=M, v=E): pass
        y = A.v""",
    "generator": """
        def g():
            yield 1.0
            yield E
        _, y = g()""",
    "generators": """
        def g():
            v = yield E
            return v * E
        def h():
            y = yield from g()
            yield y
        h = h(); next(h); y = h.send(2.0)""",
    "thrown": """
        def g():
            try: yield 1.0
            except ValueError: yield E
        g = g(); next(g); y = g.throw(ValueError())""",
    "coroutine": """
        async def g(): return E
        async def h(): return await g()
        y = run(h())""",
    "async generator": """
        async def g(): yield E
        async def h(): return [v async for v in g()][0] + [E + v async for v in g()][0]
        y = run(h())""",
    "async with": """
        @contextlib.asynccontextmanager
        async def g(): yield E
        async def h():
            async with g() as y: return y
        y = run(h())""",
    "with": """
        @contextlib.contextmanager
        def g(v): yield v * E
        with g(1.0) as a, g(a) as b: y = a + b""",
    "exit": """
        class C:
            def __enter__(self): pass
            def __exit__(self, *error): return E > 2.5
        y = 1.0
        try:
            with C(): raise ValueError
        except ValueError: y = 2.0""",
    "except": """
        try: raise ValueError
        except ValueError: y = E""",
    "raise": """
        try: raise ValueError(E)
        except ValueError as e: y = e.args[0]""",
    "finally": """
        try: y = 1.0
        except ValueError: pass
        else: y = E
        finally: y = y + E""",
    "except*": """
        y = 0.0
        try: raise ExceptionGroup("", [ValueError(E), TypeError(1)])
        except* ValueError as e: y = y + e.exceptions[0].args[0]
        except* TypeError: y = y + E""",
    "match": """
        match E:
            case float() as v if v > 2.5: y = v
            case v: y = -v""",
    "guard": """
        match 1:
            case 1 if E > 2.5: y = 1.0
            case _: y = 2.0""",
    "sequence": """
        match [1, E, 2]:
            case [1, v, *_]: y = v""",
    "mapping": """
        match {"a": E, "b": E}:
            case {"a": v, **rest}: y = v + rest["b"]""",
    "class pattern": """
        match types.SimpleNamespace(v=E):
            case types.SimpleNamespace(v=2.0): y = 1.0
            case types.SimpleNamespace(v=v): y = v""",
    "locals": "v = E; y = locals()['v']",
    "deleted": """
        v = E
        y = v
        del v
        try: v
        except UnboundLocalError: y = y + E""",
}
NEW = {
    "generic function": """
        def g[T](v: T, w: T = E) -> T: return v * w * [E for _ in (1,)][0]
        y = g(1.0)""",
    "generic class": """
        class A[T]:
            v = E
            w = [E for _ in (1,)][0]
            def g[U](self, u: U) -> T: return E
        y = A.v + A.w + A[int]().g(1)""",
    "bound": """
        def g[T: E](): pass
        y = g.__type_params__[0].__bound__""",
    "bound in a class": """
        class A:
            def g[T: E](self): pass
        y = A.g.__type_params__[0].__bound__""",
    "alias": """
        type A[T] = E
        y = A.__value__""",
    "alias in a class": """
        class A:
            type B = E
        y = A.B.__value__""",
    "quotes in text": "y = float(f'{f'{E}'}')",
}
CALLED_BY_PYTORCH = {
    "index": """
        class I:
            def __index__(self): return int(E)
        y = torch.arange(9.0)[I()]""",
    "slice": """
        class I:
            def __index__(self): return int(E)
        y = torch.arange(9.0)[I():].sum()""",
    "sequence of numbers": """
        class S:
            def __len__(self): return 1
            def __getitem__(self, i): return [E][i]
        y = torch.tensor(S())""",
    "torch function": """
        class T:
            @classmethod
            def __torch_function__(cls, *a): return E
        y = torch.add(x, T())""",
    "function mode": """
        class M(TorchFunctionMode):
            def __torch_function__(self, f, types, args=(), kwargs=None): return f(*args, **(kwargs or {})) * E
        with M(): y = torch.sin(x)""",
    "dispatch mode": """
        class M(TorchDispatchMode):
            def __torch_dispatch__(self, f, types, args=(), kwargs=None): return f(*args, **(kwargs or {})) * E
        with M(): y = torch.sin(x)""",
    "hook": """
        v = x.detach().requires_grad_()
        w = v * 2.0
        w.register_hook(lambda g: g * E)
        y, = torch.autograd.grad(w.sum(), v)""",
    "hook of a node": """
        v = x.detach().requires_grad_()
        w = v * 2.0
        w.grad_fn.register_hook(lambda g, _: (g[0] * E, None))
        y, = torch.autograd.grad(w.sum(), v)""",
    "hook of what is saved": """
        v = x.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * E, lambda t: t * E): w = v**2
        y, = torch.autograd.grad(w.sum(), v)""",
    "autograd function": """
        class F(torch.autograd.Function):
            @staticmethod
            def forward(ctx, v): return v * E
            @staticmethod
            def backward(ctx, g): return g * E
        v = x.detach().requires_grad_()
        w = F.apply(v)
        y = torch.autograd.grad(w.sum(), v)[0] + w""",
    "vmap": "y = torch.func.vmap(lambda v: v * E)(x)",
    "jacobian": "y = torch.func.jacrev(lambda v: v * E)(x).sum()",
    "checkpoint": "y = torch.utils.checkpoint.checkpoint(lambda v: v * E, x, use_reentrant=False)",
}
STATEMENTS |= CALLED_BY_PYTORCH
if sys.version_info >= (3, 12):
    STATEMENTS |= NEW
if sys.version_info >= (3, 13):
    STATEMENTS["type default"] = """
        def g[T = E](): pass
        y = g.__type_params__[0].__default__"""

PLACES = {
    "global": ("", "G", "G = 3.0"),
    "attribute": ("", "O.k", "O.k = 3.0"),
    "item": ("", "L[0]", "L[0] = 3.0"),
    "entry": ("", "D[1]", "D[1] = 3.0"),
    "sum": ("", "sum(L)", "L.append(1.0)"),
    "call": ("", "read(O)", "O.k = 3.0"),
    "cell": ("", "c", "c = 3.0"),
    "attribute of a cell": ("", "cell.k", "O.k = 3.0"),
    "item of a cell": ("", "cells[0]", "L[0] = 3.0"),
    "local": ("local = G", "local", "G = 3.0"),
    "attribute of a local": ("local = O", "local.k", "O.k = 3.0"),
    "item of a local": ("local = L", "local[0]", "L[0] = 3.0"),
    "sum of a local": ("local = L", "sum(local)", "L.append(1.0)"),
    "sum of an attribute": ("local = H", "sum(local.held)", "H.held.append(1.0)"),
    "item of an attribute": ("local = H", "local.held[0]", "H.held[0] = 3.0"),
    "attribute of an argument": ("", "given.k", "O.k = 3.0"),
    "attribute of an item": ("for each in LO: pass", "each.k", "O.k = 3.0"),
}
"""Statements that the function begins with, the expression, and a change of its value."""
TEXT = """
def read(o): return o.k

def make():
    c, cell, cells = 2.0, O, L
    def f(x, given=O):
        {before}
{statement}
        return x * y
    def change():
        global G
        nonlocal c
        {change}
    return f, change
"""


def run(coroutine: Any) -> Any:
    """Return the result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value


NAMES = {"torch": torch, "TorchFunctionMode": TorchFunctionMode, "TorchDispatchMode": TorchDispatchMode}
NAMES |= {"functools": functools, "contextlib": contextlib, "types": types, "run": run}


def text_of(statement: str, place: str) -> str:
    """A program that reads a place in a statement."""
    before, expression, change = PLACES[place]
    text = re.sub(r"\bE\b", expression, textwrap.dedent(STATEMENTS[statement]).strip())
    return TEXT.format(before=before, statement=textwrap.indent(text, " " * 8), change=change)


def program(statement: str, place: str) -> tuple[Callable[[torch.Tensor], Any], Callable[[], None]]:
    """A function that reads a place in a statement, and what changes it."""
    held: dict[str, Any] = {**NAMES, "O": types.SimpleNamespace(k=2.0), "L": [2.0], "D": {1: 2.0}, "G": 2.0}
    held |= {"LO": [held["O"]], "H": types.SimpleNamespace(held=[2.0])}
    exec(text_of(statement, place), held)
    return held["make"]()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("statement", STATEMENTS)
def test_what_is_read_in_any_statement_counts(statement: str, place: str) -> None:
    x = torch.tensor([1.0, 4.0])
    f, change = program(statement, place)
    used = tfn.jit(f)
    torch.testing.assert_close(used(x), f(x))
    change()
    torch.testing.assert_close(used(x), f(x))
    torch.testing.assert_close(used(x), f(x))
    assert tfn.cache_info(used).misses == 2


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from codes_in(one)


def test_each_rule_changes_the_stack_as_its_instruction_does() -> None:
    """Before Python 3.12, a call is two instructions, with one rule."""
    texts = [Path(module.__file__ or "").read_text() for module in (contextlib, functools, types, typing)]
    texts += [text_of(statement, "attribute of a local") for statement in STATEMENTS]
    before = 0
    for code in (one for text in texts for one in codes_in(compile(text, "", "exec"))):
        reader = bytecode._Reader(code)
        for one in instructions(code):
            if dis.opmap.get(one.opname) != one.opcode:
                continue  # half of an instruction
            reader.stack = [None] * 1000
            bytecode._INSTRUCTIONS.get(one.opname, bytecode._by_its_effect)(reader, one)
            effect = before + dis.stack_effect(one.opcode, one.arg, jump=False)
            before = effect if one.opname == "PRECALL" else 0
            assert len(reader.stack) - 1000 == effect - before, one
