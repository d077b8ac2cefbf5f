"""Places that come to hold another object: what was changed in the one before, and in the new one, is as in plain Python.

Each statement stands in a function that is called six times, with a change from outside before the last two.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn

STATEMENTS = """
h.items[0]+=1; h.items=a.items
h.items[0]=h.items[0]+1; h.items=a.items
h.items.append(1); h.items=a.items
h.items[0]=9; h.items=a.items
t=h.items; t[0]+=1; h.items=a.items
h.d['k']+=1; h.d=a.d
h.o.n+=1; h.o=a.o
h.o.n=h.o.n+1; h.o=a.o
h.o.n=h.o.n+1; h.o=h.o2
h.o.n=h.o.n+1; h.o,h.o2=h.o2,h.o
h.items, h.d = a.items, a.d; h.items[0]+=1
h.l[0].n += 1; h.l.append(h.l.pop(0))
h.l[h.n%2].n += 1; h.n += 1
h.i = 1-h.i; h.items[h.i] += 1
h.items[h.i] += 1; h.i = 1-h.i
h.items[h.i] = h.items[h.i]*2; h.i = 1-h.i
h.d[h.key] += 1; h.key = 'm' if h.key=='k' else 'k'
h.t=h.ts[h.i]; h.t.add_(x); h.i=1-h.i
h.t.add_(x); h.t=h.ts[h.i]; h.i=1-h.i
h.o.t.add_(x); h.o=a.o
h.o.t=h.o.t+x; h.o=a.o
h.o.t=h.o.t+x; h.o,h.o2=h.o2,h.o
h.d['t']=h.d['t']+x; h.d=a.d
h.ts[0]=h.ts[0]+x; h.ts=a.ts
h.ts.append(x*1); h.ts=a.ts
h.ts=a.ts; h.ts.append(x*1)
h.d=a.d; h.d['t']=x+h.d['t']
h.ts, a.ts = a.ts, h.ts; h.ts.append(x*2)
h.kept=h.ts; h.kept[0]=x*2
""".strip().splitlines()


def made(first: int) -> Any:
    """An object with numbers, tensors, and containers and objects of them."""
    one = types.SimpleNamespace
    h = one(n=0, i=0, key="k", items=[first + 1, first + 2, first + 3])
    h.d = {"k": first, "m": first + 1, "t": torch.full((1,), float(first))}
    h.o, h.o2 = (one(n=first + by, t=torch.full((1,), float(first + by))) for by in (0, 5))
    h.l = [one(n=first), one(n=first + 2)]
    h.ts = [torch.full((1,), float(first + by)) for by in (0, 1)]
    h.t = h.ts[0]
    return h


def content(value: Any, met: dict[int, int]) -> Any:
    """Take objects apart, and tell which of them are the same."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (int, str)):
        return value
    if id(value) in met:
        return f"number {met[id(value)]}"
    met[id(value)] = len(met)
    if isinstance(value, list):
        return [content(item, met) for item in value]
    parts = value if isinstance(value, dict) else vars(value)
    return {key: content(item, met) for key, item in parts.items()}


def calls(statement: str, way: Callable[..., Any]) -> list[Any]:
    """Note the objects after each of six calls."""
    h, a, found = made(0), made(10), list[Any]()
    names: dict[str, Any] = {"h": h, "a": a}
    exec(f"def f(x):\n    {statement}\n    return x * 2", names)
    f, items, o = way(names["f"]), h.items, h.o
    for call in range(6):
        f(torch.full((1,), call + 1.0))
        found.append(content([h, a, items, o], {}))
        if call == 3:
            h.items, h.o = items, o
    return found


@pytest.mark.parametrize("statement", STATEMENTS)
def test_every_call_leaves_what_python_leaves(statement: str) -> None:
    assert calls(statement, tfn.jit) == calls(statement, lambda f: f)
