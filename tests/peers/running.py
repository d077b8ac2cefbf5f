"""The common part of programs that run PyTorch's test files: a file as a module with names exchanged, its tests, a summary."""

from __future__ import annotations

import argparse
import ast
import io
import multiprocessing
import re
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any


def load(path: Path, exchange: ast.NodeTransformer, known: Mapping[str, Any]) -> types.ModuleType:
    """The test file as a module, exchanged. A name of `known` is there as `_peer_name`."""
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    module.__dict__.update({f"_peer_{name}": value for name, value in known.items()})
    sys.modules[path.stem] = sys.modules[f"{path.parent.name}.{path.stem}"] = module
    sys.path.insert(0, str(path.parent))
    parsed = ast.parse(path.read_text())
    for name in sorted(_imported(parsed)):
        folder, _, stem = name.rpartition(".")  # `test_x` and `inductor.test_x` are one file
        is_beside = folder in ("", path.parent.name) and (beside := path.parent / f"{stem}.py").exists()
        if is_beside and name not in sys.modules:
            load(beside, exchange, known)  # what a test calls in such a file, as `compute_quantities_for_vmap_test`
    tree = ast.fix_missing_locations(exchange.visit(parsed))
    exec(compile(tree, str(path), "exec"), module.__dict__)
    return module


def _imported(parsed: ast.Module) -> set[str]:
    """The modules that `from name import ...` and `from . import name` import."""
    found = [node for node in ast.walk(parsed) if isinstance(node, ast.ImportFrom)]
    return {name for node in found for name in ([node.module] if node.module else [one.name for one in node.names])}


def tests_of(module: types.ModuleType, pattern: str) -> Iterator[unittest.TestCase]:
    """The tests of a module whose name has the pattern."""

    def flat(suite: Any) -> Iterator[unittest.TestCase]:
        for one in suite:
            yield from flat(one) if isinstance(one, unittest.TestSuite) else (one,)

    for test in flat(unittest.defaultTestLoader.loadTestsFromModule(module)):
        if re.search(pattern, name_of(test)):
            yield test


def name_of(test: unittest.TestCase) -> str:
    """`Class.test`."""
    return ".".join(test.id().split(".")[-2:])


def reason_of(name: str, table: Mapping[str, str]) -> str | None:
    """The reason why a test is left out, by a table of patterns; None for one that applies."""
    return next((reason for pattern, reason in table.items() if re.search(pattern, name)), None)


def kind_of(text: str) -> str:
    """The kind of a failure: the last line of its traceback, without numbers."""
    lines = [
        line for line in text.strip().splitlines() if not line.startswith(("Docs: ", "To execute", "This message"))
    ]
    last = next(
        (
            line
            for line in reversed(lines)
            if re.match(r"(thunder_fn\.errors\.\w+|[\w.]+(Error|Exception|Warning|Failure|Rule|TookTooLong))\b", line)
        ),
        "?",
    )
    return re.sub(r"\d+(\.\d+)?", "#", last)[:150]


Outcome = tuple[str, str]
"""The end of a test (passed, failed, skipped, expected), and the traceback or reason."""


def run(test: unittest.TestCase) -> Outcome:
    """The end of each test. `expected` are those that PyTorch expects to fail, whatever they do here."""
    result, out = unittest.TestResult(), io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(out), redirect_stderr(out):
        test.run(result)
    for _, text in (*result.errors, *result.failures):
        return "failed", text
    if result.skipped:
        return "skipped", f"skipped by itself: {result.skipped[0][1]}"
    if result.unexpectedSuccesses or result.expectedFailures:
        return "expected", f"a failure that PyTorch expects, {'passes' if result.unexpectedSuccesses else 'fails'}"
    return "passed", ""


def outcomes(tests: list[unittest.TestCase], limit: int) -> Iterator[Outcome]:
    """The outcomes of tests, in order. Each runs in a forked process, which goes on with the next ones.

    A test that runs for longer than `limit` seconds fails, and its process ends: an exception in the middle of it would
    leave PyTorch and thunder_fn half changed for the tests after it.
    """
    done = 0
    while done < len(tests):
        reader, writer = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=_run_all, args=(tests[done:], writer))
        process.start()
        writer.close()
        while done < len(tests):
            outcome: Outcome = "failed", "TookTooLong"
            is_over = True
            if reader.poll(limit or None):
                try:
                    outcome, is_over = reader.recv(), False
                except EOFError:
                    outcome = "failed", "ProcessError: the process ended"
            done += 1
            yield outcome
            if is_over:
                break
        process.kill()
        process.join()


def _run_all(tests: list[unittest.TestCase], writer: Any) -> None:
    for test in tests:
        writer.send(run(test))


def command_line(text: str | None, limit: int) -> argparse.ArgumentParser:
    """The options that every such program has; `limit` is the one that it has without `--limit`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-k", default="", help="run tests whose name has this pattern")
    parser.add_argument("--show", action="store_true", help="show the tracebacks")
    parser.add_argument("--slice", default="0/1", help="i/n: the i-th of n interleaved parts, from 0")
    parser.add_argument("--limit", type=int, default=limit, help="end a test after so many seconds, 0 for never")
    return parser


def asked(module: types.ModuleType, options: argparse.Namespace) -> list[unittest.TestCase]:
    """The tests of a module that `-k` and `--slice` ask for."""
    part, of = (int(number) for number in options.slice.split("/"))
    return [test for number, test in enumerate(tests_of(module, options.k)) if number % of == part]


def summarize(failed: Mapping[str, list[str]], left_out: Counter[str]) -> None:
    """Print failures by kind, most frequent first, and why tests are left out."""
    for kind, tests in sorted(failed.items(), key=lambda item: -len(item[1])):
        print(f"{len(tests):4} {kind}", *(f"       {name}" for name in tests[:8]), sep="\n")
    print(*(f"{count:4} left out: {reason}" for reason, count in left_out.most_common()), sep="\n")


def split(tests: Iterable[unittest.TestCase], table: Mapping[str, str]) -> tuple[list[unittest.TestCase], Counter[str]]:
    """The tests that apply, by a table of patterns, and the reasons of those that do not."""
    named = [(test, reason_of(name_of(test), table)) for test in tests]
    return [test for test, reason in named if reason is None], Counter(reason for _, reason in named if reason)
