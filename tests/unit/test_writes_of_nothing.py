"""Writes that change nothing when a function is traced, and something later: every call leaves what plain Python leaves.

Each row has a statement, what the objects are at first, and what is done to them from outside between calls.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn

ROWS = """
s.l.clear() | s.l=[] | s.l.append(3)
s.l[:]=[] | s.l=[] | s.l.append(3)
s.l[:1]=[] | s.l=[] | s.l.extend([3,4])
del s.l[:1] | s.l=[] | s.l.extend([3,4])
del s.l[2:] | s.l=[1] | s.l.extend([3,4])
s.l[:]=[1] | s.l=[1] | s.l.append(2)
s.l[:]=s.m[-1:] | s.l=[1];s.m=[1] | s.l.append(2)
s.l[1:]=[] | s.l=[1] | s.l.append(2)
s.l.sort() | s.l=[1,2] | s.l.append(0)
s.l.reverse() | s.l=[1,1] | s.l.append(0)
s.l.extend(s.m) | s.l=[1];s.m=[] | s.m.append(0)
s.l+=s.m | s.l=[1];s.m=[] | s.m.append(0)
s.l*=s.n | s.l=[1];s.n=1 | s.n=2
s.d.clear() | s.d={} | s.d.update(a=1)
s.d.pop('a',None) | s.d={} | s.d.update(a=1)
s.d.update(s.e) | s.d={};s.e={} | s.e.update(a=1)
s.d|=s.e | s.d={};s.e={} | s.e.update(a=1)
s.d.setdefault('a',5) | s.d={'a':1} | s.d.clear()
s.d['a']=1 | s.d={'a':1} | s.d.clear()
s.d['a']=1 | s.d={'a':1} | s.d.update(a=2)
s.t.discard(1) | s.t=set() | s.t.add(1)
s.t.clear() | s.t=set() | s.t.add(1)
s.t.add(1) | s.t={1} | s.t.clear()
s.t&={2} | s.t={2} | s.t.add(1)
s.t-={1} | s.t={2} | s.t.add(1)
s.q.rotate(1) | s.q=collections.deque([1,1]) | s.q.append(2)
s.q.clear() | s.q=collections.deque() | s.q.append(2)
s.l[0]=1 | s.l=[1] | s.l[0]=2
s.l[-1]=1 | s.l=[1] | s.l.append(2)
s.l[len(s.l)-1]=1 | s.l=[1] | s.l.append(2)
s.o.move_to_end('a') | s.o=collections.OrderedDict(a=1) | s.o.update(b=1)
s.n=1 | s.n=1 | s.n=2
s.l=s.m | s.l=s.m=[] | s.l=[1]
s.l.remove(9) if 9 in s.l else None | s.l=[] | s.l.append(9)
s.l[:]=[v for v in s.l if v<5] | s.l=[1] | s.l.append(9)
s.l[::2]=[0]*len(s.l[::2]) | s.l=[0,1] | s.l.append(9)
s.ts[:1]=[] | s.ts=[] | s.ts.extend([torch.ones(1),torch.zeros(1)])
s.ts[:]=s.ts[-1:] | s.ts=[torch.ones(1)] | s.ts.append(torch.zeros(1))
s.ts.clear() | s.ts=[] | s.ts.append(torch.zeros(1))
s.td.clear() | s.td={} | s.td.update(a=torch.zeros(1))
s.td.pop('a',None) | s.td={} | s.td.update(a=torch.zeros(1))
""".strip().splitlines()


def content(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return [(key, content(item)) for key, item in value.items()]
    if isinstance(value, set):
        return sorted(value)
    return [*map(content, value)] if isinstance(value, (list, collections.deque)) else value


def calls(row: str, way: Callable[..., Any]) -> list[Any]:
    """Note the objects after each of five calls."""
    statement, first, change = row.split(" | ")
    s, found = types.SimpleNamespace(), list[Any]()
    names: dict[str, Any] = {"s": s, "collections": collections, "torch": torch}
    exec(first, names)
    exec(f"def f(x):\n    {statement}\n    return x * 2", names)
    f = way(names["f"])
    for call in range(5):
        f(torch.ones(1))
        found.append(content(vars(s)))
        if call in (1, 3):
            exec(change, names)
    return found


@pytest.mark.parametrize("row", ROWS)
def test_every_call_leaves_what_python_leaves(row: str) -> None:
    assert calls(row, tfn.jit) == calls(row, lambda f: f)
