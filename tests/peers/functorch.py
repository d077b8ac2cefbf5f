"""Run PyTorch's own tests of torch.func with thunder_fn's functions in the place of torch.func's.

    python -m tests.peers.functorch ~/pytorch/test/functorch/test_vmap.py -k randomness --jit
    python -m tests.peers.functorch ~/pytorch/test/functorch/test_ops.py --slice 3/40 --limit 60

The files are PyTorch's and are no part of this repository: the caller names a copy, best of the version that is installed. Names
that both packages have are exchanged in the file, and in files beside it, wherever it imports or writes them (`vmap`,
`torch.func.vmap`, `functorch.vmap`), so PyTorch and thunder_fn themselves go on using torch.func. `not_applicable.py` lists what
is left out.

Prints each test that fails, or runs for long, as it ends. Then prints the failures by kind, most frequent first, and the rate
of those that pass. `--slice i/n` runs each n-th test, since there are thousands of OpInfo tests. `--limit` ends a test after so
many seconds. Tests that PyTorch itself expects to fail count neither way.
"""

from __future__ import annotations

import argparse
import ast
import io
import multiprocessing
import re
import sys
import time
import types
import unittest
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tests.peers.not_applicable import NOT_APPLICABLE
from tests.peers.plugin.exchange import Exchange, names


def load(path: Path, known: dict[str, Any]) -> types.ModuleType:
    """The test file as a module that uses our functions."""
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    module.__dict__.update({f"_peer_{name}": value for name, value in known.items()})
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    parsed = ast.parse(path.read_text())
    for name in {node.module for node in ast.walk(parsed) if isinstance(node, ast.ImportFrom) and node.module}:
        if name not in sys.modules and (beside := path.parent / f"{name}.py").exists():
            load(beside, known)  # what a test calls in such a file, as `compute_quantities_for_vmap_test`
    tree = ast.fix_missing_locations(Exchange(known).visit(parsed))
    exec(compile(tree, str(path), "exec"), module.__dict__)
    return module


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


def reason_of(name: str) -> str | None:
    """The reason why a test is left out; None for one that applies."""
    return next((reason for pattern, reason in NOT_APPLICABLE.items() if re.search(pattern, name)), None)


def kind_of(text: str) -> str:
    """The kind of a failure: the last line of its traceback, without numbers."""
    lines = [
        line for line in text.strip().splitlines() if not line.startswith(("Docs: ", "To execute", "This message"))
    ]
    last = next(
        (
            line
            for line in reversed(lines)
            if re.match(r"[\w.]+(Error|Exception|Warning|Failure|Rule|TookTooLong)\b", line)
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


def main() -> int:
    """Run the tests that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-k", default="", help="run tests whose name has this pattern")
    parser.add_argument("--jit", action="store_true", help="jit what each transform makes")
    parser.add_argument("--plain", action="store_true", help="exchange nothing: what the copy does on this PyTorch")
    parser.add_argument("--show", action="store_true", help="show the tracebacks")
    parser.add_argument("--slice", default="0/1", help="i/n: the i-th of n interleaved parts, from 0")
    parser.add_argument("--limit", type=int, default=0, help="end a test after so many seconds")
    options = parser.parse_args()
    part, of = (int(number) for number in options.slice.split("/"))
    passed, skipped, total = 0, Counter[str](), 0
    failed: defaultdict[str, list[str]] = defaultdict(list)
    for path in options.files:
        known = {} if options.plain else names(jit=options.jit, control_flow="control_flow" in path.name)
        module = load(path, known)
        found = [test for number, test in enumerate(tests_of(module, options.k)) if number % of == part]
        skipped.update(reason for test in found if (reason := reason_of(name_of(test))) is not None)
        found = [test for test in found if reason_of(name_of(test)) is None]
        begin = time.time()
        for test, (how, text) in zip(found, outcomes(found, options.limit), strict=True):
            took, begin = time.time() - begin, time.time()
            shown = f"{name_of(test)} ({took:.1f} s)" if took > 5 else name_of(test)
            if how in ("skipped", "expected"):
                skipped[text[:100]] += 1
                continue
            total += 1
            passed += how == "passed"
            if how == "failed":
                failed[kind_of(text)].append(shown)
                print("failed", shown, text if options.show else kind_of(text), flush=True)
            elif took > 5:
                print("passed", shown, flush=True)
    for kind, tests in sorted(failed.items(), key=lambda item: -len(item[1])):
        print(f"{len(tests):4} {kind}", *(f"       {name}" for name in tests[:8]), sep="\n")
    print(*(f"{count:4} left out: {reason}" for reason, count in skipped.most_common()), sep="\n")
    print(f"{passed} of {total} pass ({passed / max(total, 1):.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
