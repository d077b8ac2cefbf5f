"""`python -m tests.fuzz.states --seed 7 --programs 500 [--how compile]`: programs that read and change Python's objects.

A program is a function and what changes its objects between the calls, as text. After each of five calls, its result and all
objects, and which of them are the same, have to be those of eager PyTorch, or the function is refused. What differs is shrunk.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import thunder_fn as tfn
from tests.fuzz.statements import Drawn
from thunder_fn.errors import OutsideWarning, ThunderError


def content(value: Any, met: dict[Any, int]) -> Any:
    """Take objects apart, in order, and tell which of them, and which memories of tensors, are the same."""
    if value is None or isinstance(value, (bool, int, str)):
        return type(value).__name__, value
    if isinstance(value, float):
        return f"{value:.5g}"
    if id(value) in met:
        return f"number {met[id(value)]}"
    met[id(value)] = len(met)
    if isinstance(value, torch.Tensor):
        memory = met.setdefault(("memory", value.untyped_storage().data_ptr()), len(met))
        numbers = [f"{number:.4g}" for number in value.detach().flatten().tolist()]
        return (
            type(value).__name__,
            str(value.dtype),
            tuple(value.shape),
            numbers,
            value.requires_grad,
            memory,
            content(value.grad, met) if value.is_leaf else None,
        )
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, [content(item, met) for item in value]
    if isinstance(value, dict):
        return [(content(key, met), content(item, met)) for key, item in value.items()]
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
    """Run five calls. After each, note its result or its exception, and the objects."""
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, "<states>", "exec"), names)
    f, g, functions, changes, world, cells = names["make"]()
    f, functions["g"], log, kept = WAYS[how](f), WAYS[how](g), list[Any](), list[Any]()
    for call, rows in enumerate((2, 2, 4, 2, 4)):
        a = {"t": torch.full((3,), call + 1.0), "l": [1, 2], "n": 2}
        kept.append(a)  # else another object may have its identity
        for step in (
            lambda rows=rows, call=call, a=a: f(torch.full((rows, 3), 0.25 * (call + 1)), a),
            changes[min(call, 3)],
        ):
            result = error = None
            try:
                result = step()
            except Exception as raised:  # noqa: BLE001 - eager PyTorch raises it, too, or it is a difference
                error = raised
            log.append((error, content([result, world, cells(), a], {})))
    return log


@dataclasses.dataclass(frozen=True)
class Found:
    """The difference from eager PyTorch: `same`, `refused`, or what is wrong at which call."""

    kind: str
    call: float = 0
    why: str = ""

    @property
    def is_difference(self) -> bool:
        return self.kind not in ("same", "refused")


def judge(text: str, how: str) -> Found:
    """Compare a program with eager PyTorch."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        expected, got = play(text, "eager"), play(text, how)
    if any(issubclass(one.category, OutsideWarning) for one in warned):
        return Found("refused", why="a value from outside is a constant, as a warning says")
    for step, ((our, ours), (its, theirs)) in enumerate(zip(got, expected, strict=True)):
        if isinstance(its, ThunderError):
            return Found("refused", step / 2, f"in eager mode, too: {its}"[:300])
        if our is not None and not (its is not None and isinstance(our, type(its))):
            is_refused = isinstance(our, ThunderError) and how == "jit"
            return Found(
                "refused" if is_refused else "error",
                step / 2,
                f"{type(our).__name__}: {our}"[:300] + f", eager: {its!r}",
            )
        if our is None and its is not None:
            return Found("no error", step / 2, repr(its))
        if ours != theirs:
            return Found("state", step / 2, next(_differences(theirs, ours, ""), ""))
    return Found("same")


def _differences(its: Any, ours: Any, path: str) -> Iterator[str]:
    if isinstance(its, (list, tuple)) and type(its) is type(ours) and len(its) == len(ours):
        for place, pair in enumerate(zip(its, ours, strict=True)):
            yield from _differences(*pair, f"{path}.{place}")
    elif its != ours:
        yield f"at {path[1:]}: {its} in eager, {ours} in ours"


def shrink(text: str, how: str) -> str:
    """Leave statements out, or put what a statement holds in its place, as long as the program differs in the same way."""
    kind, lines, is_smaller = judge(text, how).kind, text.splitlines(), True
    first = lines.index("    def f(x, a):")
    while is_smaller:
        is_smaller = False
        for place in range(len(lines) - 1, first, -1):
            if place >= len(lines) or not lines[place].startswith(" " * 8):
                continue
            if lines[place].strip().startswith(("return", "nonlocal", *CLAUSES)):
                continue
            for smaller in _without(lines, place):
                if _is_still("\n".join(smaller) + "\n", how, kind):
                    lines, is_smaller = smaller, True
                    break
    return "\n".join(lines) + "\n"


CLAUSES = ("except", "else:", "finally:")


def _without(lines: list[str], place: int) -> Iterator[list[str]]:
    """Leave out the statement of a line, with what it holds, with its clauses; then only its head, then its clauses."""
    indent = " " * (len(lines[place]) - len(lines[place].lstrip()))

    def below(at: int) -> int:
        while at < len(lines) and lines[at].startswith(indent + " "):
            at += 1
        return at

    end = body = below(place + 1)
    while end < len(lines) and lines[end].startswith(tuple(indent + clause for clause in CLAUSES)):
        end = below(end + 1)
    yield [*lines[:place], *lines[end:]]
    if body > place + 1:
        yield [*lines[:place], *(line[4:] for line in lines[place + 1 : body]), *lines[end:]]


def _is_still(text: str, how: str, kind: str) -> bool:
    try:
        return judge(text, how).kind == kind
    except (SyntaxError, NameError):
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
