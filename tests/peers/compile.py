"""Run PyTorch's own tests of torch.compile with thunder_fn's functions in the place of torch.compile.

    python -m tests.peers.compile ~/pytorch/test/dynamo/test_functions.py -k numpy --how compile
    python -m tests.peers.compile ~/pytorch/test/functorch/test_aotdispatch.py --slice 3/40 --limit 20

The files are PyTorch's and are no part of this repository: the caller names a copy. `--how` says what `torch.compile` and
`torch._dynamo.optimize` make of a function in the file, and in files beside it: `tfn.jit(f)`, `tfn.compile(f)`, or `f` itself.
PyTorch and thunder_fn go on using torch.compile. Names that the installed PyTorch does not have become decorators that change
nothing. What such tests say of frames, ops and graphs holds of `Anything`, so that a test goes on to compare values.

Each test that does not pass runs again with `--how eager`. A test ends as one of these:

    passed          nothing of what it compares differs
    not applicable  `not_applicable.py` or PyTorch leaves it out, it fails eagerly at the same line or before it, or its
                    line looks at what only torch.compile has
    refused         an error of thunder_fn's
    wrong           an assertion fails, which holds eagerly
    crashed         any other error, the limit of `--limit` or the end of the process

Prints the last three as they end, then their kinds, most frequent first, and a line of numbers. `--slice i/n` runs each n-th
test.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
import types
import unittest
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.test_case
import torch._dynamo.testing
from torch._dynamo import eval_frame
from torch.testing._internal.common_utils import TestCase

import thunder_fn as tfn
from tests.peers.not_applicable import NOT_APPLICABLE_TO_COMPILE
from tests.peers.running import Outcome, asked, command_line, kind_of, load, name_of, outcomes, split, summarize

ENDS = ("passed", "not applicable", "refused", "wrong", "crashed")
HOW: dict[str, Callable[[Any], Any]] = {"jit": tfn.jit, "compile": tfn.compile, "eager": lambda f: f}
ENTRIES = ("aot_function", "aot_module", "aot_module_simplified", "compiled_function", "compiled_module")
"""Names that a file imports from `functorch.compile`, or defines, whose results take the place of their first argument."""
BACKENDS = (
    "CompileCounter",
    "CompileCounterWithBackend",
    "EagerAndRecordGraphs",
    "AotEagerAndRecordGraphs",
    "InductorAndRecordGraphs",
)
"""Backends of `torch._dynamo.testing` that count and record."""
RENAMED = {
    "cache_size_limit": "recompile_limit",
    "accumulated_cache_size_limit": "accumulated_recompile_limit",
}
"""Settings of Dynamo. `mock.patch` of a former name deletes it for the tests after it."""
EXPLAINED = "python -m thunder_fn explain"
"""The note that every error of thunder_fn carries, the error of a traced function included."""
ONLY_COMPILE = re.compile(
    r"graphs?\b|op_count|frame_count|count_ops|counters|cache_size|node_names|placeholder|recompil|graph_break"
    r"|\bguards?\b|FileCheck|source_codes?\b|[bf]w_code|\bcodes?\b|metrics|\bgm\b|_orig_mod"
)
"""Words of an assertion that looks at what only torch.compile has."""


class Missing:
    """A name that the installed PyTorch does not have: a decorator, context and base class that changes nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Give back a lone function; anything else was an argument of a decorator."""
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return self

    def __getattr__(self, name: str) -> Missing:
        """A module that is missing has missing names."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(name)

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        """A class without this base."""
        return ()

    def __enter__(self) -> Missing:
        """Change nothing."""
        return self

    def __exit__(self, *args: Any) -> None:
        """Change nothing."""


class Anything(int):
    """A count, a graph or a text that says yes to every question. In a comparison it is equal, less and greater."""

    def __getattr__(self, name: str) -> Anything:
        """The node of a graph, the metadata of a node, ..."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of a method."""
        return Anything()

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter((Anything(),))

    def __bool__(self) -> bool:
        return True

    __hash__ = int.__hash__
    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __call__
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda self, other: True
    __ne__ = lambda self, other: False


class Recorder:
    """A backend of `torch._dynamo.testing` that nobody asks to compile."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.clear()

    def clear(self) -> None:
        """Count anew, from `Anything`."""
        self.frame_count = self.op_count = self.graphs = self.fw_graphs = self.bw_graphs = Anything()

    def __call__(self, gm: Any, example_inputs: Any) -> Any:
        """Run the graph as it is, where a test does ask."""
        return gm.forward


class Lenient(ast.NodeTransformer):
    """Lets a file go without names that the installed PyTorch does not have, and exchanges the entries of AOTAutograd."""

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """Leave imports alone whose error the file itself handles."""
        return node if any("ImportError" in ast.unparse(one) for one in node.handlers) else self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> Any:
        """Give each name a stand-in, where the import fails."""
        return [_leniently(ast.Import([one]), one.asname or one.name.partition(".")[0], node) for one in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        """Give each name a stand-in, where the import fails. `from . import x` finds the file that was loaded."""
        if node.names[0].name == "*" or node.module == "__future__":
            return node
        made = []
        for one in node.names:
            statement = ast.ImportFrom(node.module, [one], 0) if node.module else ast.Import([one])
            name = one.asname or one.name
            entry = ast.parse(f"{name} = _peer_{one.name}").body[0]
            made.append(_at(node, entry) if one.name in ENTRIES else _leniently(statement, name, node))
        return made

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """A setting has its name of today."""
        node.attr = RENAMED.get(node.attr, node.attr)
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        """A setting has its name of today."""
        node.arg = RENAMED.get(node.arg, node.arg) if node.arg else None
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """A setting has its name of today, as in `patch.object(config, "cache_size_limit", 1)`."""
        if isinstance(node.value, str) and len(node.value) < 80:
            names = node.value.split(".")
            node.value = ".".join(RENAMED.get(name, name) for name in names)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """`check_model` of Inductor's tests does not ask whether its backend was called."""
        for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if one.arg == "check_has_compiled" and isinstance(default, ast.Constant):
                default.value = False
        return self.generic_visit(node)


def _leniently(statement: ast.stmt, name: str, place: ast.stmt) -> ast.AST:
    text = f"try:\n    {ast.unparse(statement)}\nexcept (ImportError, KeyError):\n    {name} = _peer_Missing({name!r})"
    return _at(place, ast.parse(text).body[0])


def _at(place: ast.stmt, made: ast.stmt) -> ast.stmt:
    for one in ast.walk(made):
        ast.copy_location(one, place)
    return made


class Exchanged:
    """The stand-in for torch.compile. `how` may change between runs: it is read when a test compiles a function."""

    def __init__(self, how: str) -> None:
        self.how = how

    def of(self, f: Any, *args: Any, **kwargs: Any) -> Any:
        """Our function for theirs. A class stays itself."""
        return HOW[self.how](f) if callable(f) and not isinstance(f, (type, Anything)) else f

    def compile(self, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        """In the place of `torch.compile`."""
        return self.of if model is None else self.of(model)

    def optimize(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of `torch._dynamo.optimize`: a decorator."""
        return self.of

    def known(self) -> dict[str, Any]:
        """The names that a file has as `_peer_name`. That it has them says that it is a test's."""
        return {"Missing": Missing, **dict.fromkeys(ENTRIES, self.of)}

    def adapt(self, module: types.ModuleType) -> None:
        """Exchange what a loaded file itself defines: entries, and methods that leave a graph in a cell."""

        def run_autograd(test: Any, f: Any, fw_graph_cell: list[Any], *args: Any) -> Any:
            fw_graph_cell[0] = Anything()
            return self.of(f)

        for name in set(ENTRIES) & vars(module).keys():
            setattr(module, name, self.of)
        for one in list(vars(module).values()):
            if isinstance(one, type) and "run_autograd" in vars(one):
                one.run_autograd = run_autograd

    def eagerly(self, test: unittest.TestCase, limit: int) -> Outcome:
        """The outcome of a test where nothing is compiled."""
        before, self.how = self.how, "eager"
        try:
            (outcome,) = outcomes([test], limit)
            return outcome
        finally:
            self.how = before


def _for_tests(real: Any, ours: Any) -> Any:
    """`real`, which a test file finds to be `ours`: tfn.compile itself calls torch.compile."""

    @functools.wraps(real)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals
        is_test = "_peer_Missing" in caller or caller.get("__name__") == "torch._dynamo.testing"
        return (ours if is_test else real)(*args, **kwargs)

    return chosen


def exchange(exchanged: Exchanged) -> None:
    """Put our functions in the place of torch.compile, for the rest of this process."""
    torch.compile = _for_tests(torch.compile, exchanged.compile)
    for name in ("optimize", "optimize_assert"):
        ours = _for_tests(getattr(torch._dynamo, name), exchanged.optimize)
        for module in (torch._dynamo, eval_frame, torch._dynamo.testing):
            if hasattr(module, name):
                setattr(module, name, ours)
    for name in BACKENDS:
        setattr(torch._dynamo.testing, name, Recorder)
    torch._dynamo.testing.normalize_gm = lambda text: text  # of a graph
    torch.nn.Module.compile = _compile_module(exchanged)
    TestCase.assertEqual = _lenient_about_counts(TestCase.assertEqual)
    for name in ("assertExpectedInline", "assertExpected"):
        setattr(TestCase, name, lambda *args, **kwargs: None)  # the text of a graph


def _compile_module(exchanged: Exchanged) -> Any:
    def compile(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        self._compiled_call_impl = exchanged.of(self._call_impl)

    return compile


def _lenient_about_counts(real: Any) -> Any:
    @functools.wraps(real)
    def assert_equal(self: TestCase, x: Any, y: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(x, Anything) and not isinstance(y, Anything):
            real(self, x, y, *args, **kwargs)

    return assert_equal


def end_of(text: str, file: Path) -> str:
    """The end of a test that fails, by its traceback alone."""
    kind, lines = kind_of(text), text.splitlines()
    if not kind.startswith("AssertionError") and ("thunder_fn.errors." in kind or EXPLAINED in text):
        return "refused"
    lines_of_test = [after for line, after in itertools.pairwise(lines) if f'{file.name}"' in line]
    if lines_of_test and ONLY_COMPILE.search(lines_of_test[-1]):
        return "not applicable"
    return "wrong" if kind.startswith("AssertionError") else "crashed"


def fails_before(text: str, eagerly: str, file: Path) -> bool:
    """Whether a test fails at an earlier line than eagerly, by its tracebacks: what comes between holds eagerly."""
    line = re.compile(rf'{re.escape(file.name)}", line (\d+)')
    last = (one.rpartition("Traceback (most recent call last)")[2] for one in (text, eagerly))  # after its causes
    ours, theirs = ([int(number) for number in line.findall(one)] for one in last)
    return ours < theirs


def ends(found: list[unittest.TestCase], path: Path, exchanged: Exchanged, limit: int) -> Iterator[tuple[str, str]]:
    """The end of each test and its traceback or reason. One that fails runs again at once, eagerly."""
    for test, (how, text) in zip(found, outcomes(found, limit), strict=True):
        if how == "passed":
            yield how, text
        elif how in ("skipped", "expected"):
            yield "not applicable", text[:100]
        else:
            end = end_of(text, path)
            eagerly, why = exchanged.eagerly(test, limit)
            if eagerly != "passed" and not fails_before(text, why, path):
                end, text = "not applicable", f"fails eagerly, {end} here: {kind_of(why)}"[:100]
            elif end == "not applicable":
                text = "looks at what only torch.compile has"
            yield end, text


def main() -> int:
    """Run the tests that the command line names."""
    parser = command_line(__doc__, limit=60)
    parser.add_argument("--how", default="jit", choices=HOW, help="what takes the place of torch.compile")
    options = parser.parse_args()
    sys.argv = sys.argv[:1]  # test files read it
    exchanged = Exchanged(options.how)
    exchange(exchanged)
    tally, left_out = Counter[str](), Counter[str]()
    failed: defaultdict[str, list[str]] = defaultdict(list)
    for path in options.files:
        module = load(path, Lenient(), exchanged.known())
        exchanged.adapt(module)
        found, reasons = split(asked(module, options), NOT_APPLICABLE_TO_COMPILE)
        left_out.update(reasons)
        for test, (end, text) in zip(found, ends(found, path, exchanged, options.limit), strict=True):
            tally[end] += 1
            if end == "not applicable":
                left_out[text] += 1
            elif end != "passed":
                failed[f"{end}: {kind_of(text)}"].append(name_of(test))
                print(end, name_of(test), text if options.show else kind_of(text), flush=True)
    tally["not applicable"] = left_out.total()
    summarize(failed, left_out)
    print(f"{options.how}:", ", ".join(f"{tally[end]} {end}" for end in ENDS), f"of {tally.total()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
