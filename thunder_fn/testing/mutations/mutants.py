"""Bugs made by a program: each mutant of a transform has one small edit somewhere in its code.

`check_transform` should break a law for each. A mutant that no law breaks survives. It does the
same as the transform, or it shows which programs are not drawn.

Source: Offutt, Lee, Rothermel, Untch and Zapf, An experimental determination of sufficient mutant
operators, ACM TOSEM 5(2), 1996.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import random
import signal
import textwrap
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from thunder_fn.ir.trace import Trace
from thunder_fn.progress import tracked
from thunder_fn.testing.growing import DRAWS, around_chains
from thunder_fn.testing.laws.simplify import ENSURED_BY
from thunder_fn.testing.mutations.planting import Mutation, OutdatedMutation, planted
from thunder_fn.testing.mutations.reasons import reason_of
from thunder_fn.testing.sized import of_steps
from thunder_fn.testing.strategies import Case
from thunder_fn.testing.user import STEPS, check_transform, steps_alone
from thunder_fn.testing.vocabulary import functions_of

SECONDS = 30
"""The time of the processor that a mutant is given."""

Edit = tuple[str, Callable[[], object]]
"""The name of an edit, and the call that makes it."""

LAW = "any law of check_transform"
OURS = (
    "thunder_fn.interpreters.simplify:dce",
    "thunder_fn.interpreters.simplify:cse",
    "thunder_fn.interpreters.simplify:inline",
    "thunder_fn.interpreters.noops:drop_noops",
    "thunder_fn.interpreters.fold:fold_constants",
)
"""Transforms of this package that keep values."""


def laws_of(path: str) -> dict[str, Any]:
    """The promises of a transform, as options of `check_transform`: those of its attribute `laws`;
    of ours, all that a simplification promises.
    """
    module, _, name = path.partition(":")
    if path in OURS:
        promises = ("flops", "launches")
        return {"idempotent": True, "promises": promises, "ensures": ENSURED_BY[name]}
    return getattr(getattr(importlib.import_module(module), name), "laws", {})


_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
"""The operators that are exchanged."""


def edits_of(node: ast.AST) -> Iterator[Edit]:
    """The edits of one node, each with its name; calling it changes the node."""
    for make in (_of_operators, _of_constants, _of_calls, _of_conditions, _of_sequences):
        yield from make(node)


def _of_operators(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
        new: Any = _SWAPPED[type(node.ops[0])]()
        yield "comparison", functools.partial(node.ops.__setitem__, 0, new)
    if isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in _SWAPPED:
        yield "operator", functools.partial(setattr, node, "op", _SWAPPED[type(node.op)]())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        yield "sign", functools.partial(setattr, node, "op", ast.UAdd())


def _of_constants(node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield "constant", functools.partial(setattr, node, "value", not node.value)
    elif isinstance(node.value, int):
        yield "constant", functools.partial(setattr, node, "value", node.value + 1)


def _of_calls(node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    for place, keyword in enumerate(node.keywords):
        if keyword.arg == "strict":  # an assertion of `zip`
            continue
        yield "dropped keyword", functools.partial(node.keywords.pop, place)
    if _is_plain(node.args):
        yield "swapped arguments", functools.partial(_swap, node.args)


def _of_conditions(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        negated = ast.UnaryOp(ast.Not(), node.test)
        yield "negated condition", functools.partial(setattr, node, "test", negated)
    if isinstance(node, (ast.If, ast.IfExp)):
        yield "condition false", functools.partial(setattr, node, "test", ast.Constant(False))
    if isinstance(node, ast.BoolOp):
        for place in range(len(node.values)):
            yield "dropped condition", functools.partial(node.values.pop, place)
    if isinstance(node, ast.comprehension) and node.ifs:
        yield "dropped filter", functools.partial(node.ifs.pop, 0)


def _of_sequences(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and _is_plain(node.elts):
        yield "swapped items", functools.partial(_swap, node.elts)
    if isinstance(node, ast.Slice) and (node.lower or node.upper or node.step):
        yield "whole slice", functools.partial(_whole, node)
    body = getattr(node, "body", None)
    if isinstance(body, list) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        for place, line in enumerate(body):
            if isinstance(line, (ast.Expr, ast.AugAssign, ast.Continue)):
                yield "dropped statement", functools.partial(body.__setitem__, place, ast.Pass())


def _is_plain(items: list[ast.expr]) -> bool:
    """Test for two items or more, of which none is a list."""
    return len(items) > 1 and not any(isinstance(item, ast.Starred) for item in items)


def _swap(items: list[Any]) -> None:
    items[0], items[1] = items[1], items[0]


def _whole(node: ast.Slice) -> None:
    node.lower = node.upper = node.step = None


def mutants_of(transform: Callable[[Trace], Trace]) -> list[Mutation]:
    """The mutants of a transform and of the functions of its own module that it calls."""
    found = list[Mutation]()
    home = inspect.unwrap(transform).__module__
    module = importlib.import_module(home)
    for function in functions_of(transform):
        name = function.__qualname__
        if function.__module__ == home and _is_bound(module, name, function):
            found += _mutants_of_function(f"{home}:{name}", function)
    return found


def _that_run(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that say what is computed: no annotations, and no assertions."""
    if isinstance(node, ast.Assert) or (isinstance(node, ast.keyword) and node.arg == "strict"):
        return
    yield node
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for item in field if isinstance(field, list) else [field]:
            if isinstance(item, ast.AST):
                yield from _that_run(item)


def _is_bound(module: Any, name: str, function: Any) -> bool:
    value = getattr(module, name, None)
    return callable(value) and inspect.unwrap(value) is function


def _mutants_of_function(path: str, function: Any) -> Iterator[Mutation]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    own = tree.body[0]
    assert isinstance(own, ast.FunctionDef)
    own.decorator_list = [line for line in own.decorator_list if ".rule(" not in ast.unparse(line)]
    before = ast.unparse(tree)
    number = 0
    while True:
        changed = copy.deepcopy(tree)
        edits = [
            (node, what, edit)
            for line in changed.body[0].body  # type: ignore[attr-defined]
            for node in _that_run(line)
            for what, edit in edits_of(node)
        ]
        if number == len(edits):
            return
        node, what, edit = edits[number]
        old = ast.unparse(node)
        edit()
        number += 1
        try:
            after = ast.unparse(ast.fix_missing_locations(changed))
            compile(after, "<mutant>", "exec")
        except (SyntaxError, ValueError):
            continue
        if after != before:
            line = getattr(node, "lineno", 1)
            bug = f"{path.partition(':')[2]}:{line} {what}: {' '.join(old.split())[:60]}"
            yield Mutation(bug, path, before, after, LAW)


@contextmanager
def within(seconds: int) -> Generator[None]:
    """Raise TimeoutError after so many seconds of the processor, where signals are to be had."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    old = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


def verdict(path: str, mutation: Mutation, seconds: int = SECONDS) -> str:
    """The law that a mutant of the transform at this path (`module:name`) breaks; "SURVIVES" if
    there is none, with the reason as far as it is seen, "OUT OF TIME" if none was broken in time.
    """
    module, _, name = path.partition(":")
    made, laws = _made(path), laws_of(path)
    try:
        with planted(mutation):
            transform = getattr(importlib.import_module(module), name)
            with within(seconds):
                check_transform(transform, **laws)
            same = all(transform(trace) == new for trace, new in made)
            return f"SURVIVES: makes {'the same' if same else 'other'} traces, with right values"
    except TimeoutError:
        return "OUT OF TIME"
    except OutdatedMutation:
        return "does not fit"
    except Exception as error:  # noqa: BLE001 - LawBroken, or what a mutant raises when it is made
        said = str(error).partition('breaks the law "')[2].partition('"')[0]
        return said or type(error).__name__


@functools.cache
def _made(path: str) -> tuple[tuple[Trace, Trace], ...]:
    """Traces, and the traces that a transform without a bug makes of them."""
    module, _, name = path.partition(":")
    transform = getattr(importlib.import_module(module), name)
    programs = (*around_chains((1, 4)), *DRAWS, *(p for step in STEPS for p in steps_alone(step)))
    traces = [Case(program).trace for program in programs]
    traces += [case.trace for case in of_steps()]  # captured before there is a bug
    return tuple((trace, transform(trace)) for trace in traces)


def users() -> tuple[str, ...]:
    """The paths of the users' transforms."""
    from thunder_fn.testing.mutations import users as module

    return tuple(f"{module.__name__}:{transform.__name__}" for transform in module.USERS)


def print_survivors(paths: Sequence[str] = (), count: int = 200, seconds: int = SECONDS) -> int:
    """Print the law that catches each mutant, and the survivors at the end; return their number.

    Args:
        paths: transforms as `module:name`; ours and the users' by default.
        count: how many mutants to try, drawn from all with a fixed seed.
    """
    found = list[tuple[str, Mutation]]()
    for path in paths or (*OURS, *users()):
        module, _, name = path.partition(":")
        transform = getattr(importlib.import_module(module), name)
        found += [(path, mutation) for mutation in mutants_of(transform)]
    total = len(found)
    random.Random(0).shuffle(found)
    start, survivors, fitting = time.perf_counter(), list[str](), 0
    for path, mutation in tracked(found[:count], "trying mutants"):
        began = time.process_time()
        said = verdict(path, mutation, seconds)
        fitting += said != "does not fit"
        line = f"{path.partition(':')[2]} / {mutation.bug}"
        print(f"{line:<110} {said} ({time.process_time() - began:.0f} s)", flush=True)
        if said.startswith(("SURVIVES", "OUT OF TIME")):
            survivors.append(f"{line}: {said}\n    {reason_of(mutation.bug)}")
    caught = fitting - len(survivors)
    seconds_taken = time.perf_counter() - start
    print(f"\n{caught} of {fitting} mutants caught ({total} there are), in {seconds_taken:.0f} s")
    for line in survivors:
        print(f"  {line}")
    return len(survivors)
