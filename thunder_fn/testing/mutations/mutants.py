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
import signal
import textwrap
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from thunder_fn.ir.trace import Trace
from thunder_fn.testing.given import Given
from thunder_fn.testing.laws.comparing import num_equations
from thunder_fn.testing.laws.pairs import TRANSFORMS
from thunder_fn.testing.laws.promises import Promised
from thunder_fn.testing.laws.simplify import ENSURED_BY
from thunder_fn.testing.mutations.planting import Mutation, OutdatedMutation, planted
from thunder_fn.testing.reports import AnyCase
from thunder_fn.testing.samples import samples
from thunder_fn.testing.schemas import calls_of_samples, is_callable
from thunder_fn.testing.sized import sized_cases
from thunder_fn.testing.strategies import Case, cases, drawn_cases
from thunder_fn.testing.user import Search, check_transform
from thunder_fn.testing.vocabulary import functions_of

SECONDS = 30
"""The time of the processor that a mutant is given."""

PATIENCE = 4
"""The witnesses have so many times as long."""

Edit = tuple[str, Callable[[], object]]
"""The name of an edit, and the call that makes it."""

LONG, FAR = cases(max_steps=16, depth=3), 10_000
"""Programs that are longer and deeper than those of a search, and seeds that it never takes."""

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
        yield f"dropped keyword {keyword.arg}", functools.partial(node.keywords.pop, place)
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
            what = f"dropped condition {place + 1}"
            yield what, functools.partial(node.values.pop, place)
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


class OutOfTime(BaseException):
    """The end of a mutant's time. Laws take every Exception for an error of the transform."""


@contextmanager
def within(seconds: float) -> Generator[None]:
    """Raise OutOfTime after so many seconds of the processor, or ten times as many by the clock
    for what waits for ever.
    """

    def stop(*_: Any) -> None:
        raise OutOfTime

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, 1), (signal.SIGALRM, signal.ITIMER_REAL, 10))
    old = [signal.signal(number, stop) for number, _, _ in timers]
    for _, timer, times in timers:
        signal.setitimer(timer, seconds * times)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, old, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


NO_BUG = ("EQUAL", "NO WORSE")
"""The beginnings of the verdicts on mutants that are no bugs, as far as the witnesses tell."""


def verdict(path: str, mutation: Mutation, seconds: float = SECONDS) -> str:
    """The law that a mutant of the transform at this path (`module:name`) breaks in time.

    If there is none, or the time is up, the mutant is tried on the witnesses: "EQUAL" if it
    makes the same trace of each; "NO WORSE" if some are others, which keep every law and have no
    more equations; or else "SURVIVES" with a witness that shows the bug. "OUT OF TIME" if the
    witnesses took `PATIENCE` times as long.
    """
    laws = laws_of(path)
    try:
        with planted(mutation), suppress(OutOfTime), within(seconds):
            check_transform(transform_at(path), **laws)
        made_of(path)
        with within(PATIENCE * seconds):
            return beyond(path, mutation)
    except OutOfTime:
        return "OUT OF TIME"
    except OutdatedMutation:
        return "does not fit"
    except Exception as error:  # noqa: BLE001 - LawBroken, or what a mutant raises when it is made
        said = str(error).partition('breaks the law "')[2].partition('"')[0]
        return said or type(error).__name__


def transform_at(path: str) -> Callable[[Trace], Trace]:
    """The transform that is named as `module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def beyond(path: str, mutation: Mutation) -> str:
    """The verdict of the witnesses on a mutant that the search has not caught."""
    made = made_of(path)  # while there is no bug: capturing and other transforms call ours
    with planted(mutation):
        search, others = search_of(path), 0
        for case, new, origin in made:
            wrong, is_other = _wrong(search, case, new, origin)
            others += is_other
            if wrong:
                return f"SURVIVES: {wrong} with\n{case.trace}"
    if not others:
        return f"EQUAL: makes the same trace of each of {len(made)} witnesses"
    return (
        f"NO WORSE: {others} of {len(made)} witnesses become other traces, all right, none larger"
    )


def _wrong(search: Search, case: AnyCase, new: Trace, origin: int) -> tuple[str, bool]:
    """The fault of the trace that a mutant makes of a case, and whether it is another trace."""
    try:
        other = search.transform(case.trace)
    except Exception as error:  # noqa: BLE001 - a mutant may raise anything
        return f"raises {type(error).__name__}", True
    if other == new and other.origin == origin:
        return "", False
    for name in search.alone:
        if search.error_of(name, case.trace, case.inputs) is not None:
            return f'breaks the law "{name}"', True
    return "makes more equations" * (num_equations(other) > num_equations(new)), True


def search_of(path: str) -> Search:
    """The search of a transform, with what it promises."""
    laws = laws_of(path)
    promised = ("idempotent", "promises", "ensures")
    options = {name: laws[name] for name in promised if name in laws}
    return Search(transform_at(path), Promised(**options))


@functools.cache
def made_of(path: str) -> tuple[tuple[AnyCase, Trace, int], ...]:
    """The witnesses for a transform, each with what it makes of it, and where that is from."""
    search, found = search_of(path), dict[tuple[Trace, int], tuple[AnyCase, Trace, int]]()
    own = (*map(Case, search.programs()), *sized_cases(search.ops))
    for case in (*filter(is_made, own), *witnesses()):
        new = search.transform(case.trace)
        found[case.trace, case.trace.origin] = (case, new, new.origin)
    return tuple(found.values())


@functools.cache
def witnesses() -> tuple[AnyCase, ...]:
    """Programs that no search draws: longer and deeper random ones, calls of every op of which
    there are PyTorch's own samples, and all the transforms of some of both.
    """
    drawn = [case for n in range(12) for case in drawn_cases(LONG, FAR + n, 25)]
    names = filter(is_callable, samples())
    called = [Case(program) for name in names for _, program in calls_of_samples(name)]
    plain = [*filter(is_made, (*drawn, *called))]
    moved = [_moved(move, case.trace) for case in plain[::15] for move in TRANSFORMS.values()]
    return (*plain, *(Given(trace) for trace in moved if trace is not None))


def _moved(move: Callable[[Trace], Trace], trace: Trace) -> Trace | None:
    try:
        return move(trace)
    except Exception:  # noqa: BLE001 - not every op has every rule
        return None


def is_made(case: AnyCase) -> bool:
    """Test whether there is the trace of a case: PyTorch refuses some arguments."""
    try:
        return bool(case.trace.equations)
    except Exception:  # noqa: BLE001 - PyTorch raises anything
        return False


def users() -> tuple[str, ...]:
    """The paths of the users' transforms."""
    from thunder_fn.testing.mutations import users as module

    return tuple(f"{module.__name__}:{transform.__name__}" for transform in module.USERS)
