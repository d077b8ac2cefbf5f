"""The tests of the pytest plugin: `pytest --tfn-laws mypackage.transforms`.

It collects every public transform of a module, or of the modules of a package: each function whose
one required argument and whose result are annotated as `Trace`. A transform may have a dict
`laws` with options of `check_transform`, such as `f.laws = {"keeps": "nothing"}`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TRACES = "thunder_fn_traces"
"""The property of a report that says on how many traces a transform was tried: workers of xdist
send it on.
"""


pytest_plugins = ["thunder_fn_pytest"]
"""The module that adds the options, for where pytest has not found it by itself."""


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add one test for each transform."""
    names: Any = config.getoption("--tfn-laws")
    for name in names:
        for path, transform in transforms_of(importlib.import_module(name)):
            items.append(LawItem.from_parent(session, name=f"laws[{path}]", transform=transform))


def transforms_of(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public transforms that a module, or a module of a package, defines."""
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or not inspect.isfunction(value):
            continue
        if value.__module__ == module.__name__ and _is_transform(value):
            yield f"{module.__name__}.{name}", value
    for found in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if not found.name.startswith("_"):
            yield from transforms_of(importlib.import_module(f"{module.__name__}.{found.name}"))


def _is_transform(f: Callable[..., Any]) -> bool:
    signature = inspect.signature(f)
    required = [p for p in signature.parameters.values() if p.default is inspect.Parameter.empty]
    return (
        len(required) == 1
        and _is_trace(required[0].annotation)
        and _is_trace(signature.return_annotation)
    )


def _is_trace(annotation: Any) -> bool:
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return str(name).rpartition(".")[2] == "Trace"


class LawItem(pytest.Item):
    """The test of one transform."""

    def __init__(self, *, transform: Callable[..., Any], **options: Any) -> None:
        super().__init__(**options)
        self.transform = transform

    def runtest(self) -> None:
        """Run `check_transform`; its report of coverage goes to the test's output."""
        from thunder_fn.testing.user import check_transform

        options: dict[str, Any] = {"max_examples": self.config.getoption("--tfn-examples")}
        options |= getattr(self.transform, "laws", {})
        self.user_properties[:] = [(TRACES, 0)]
        coverage = check_transform(self.transform, **options)
        self.user_properties[:] = [(TRACES, coverage.traces)]
        self.add_report_section("call", "laws", str(coverage))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        """The report of the broken law, without a traceback."""
        return str(excinfo.value)

    def reportinfo(self) -> tuple[str, int | None, str]:
        """The place of the transform."""
        code = inspect.unwrap(self.transform).__code__
        return code.co_filename, code.co_firstlineno - 1, self.name


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print one line: how many transforms keep the laws, on how many traces. `--tfn-badge` writes
    it to a file, too.
    """
    found = [
        (report.passed, traces)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, traces in report.user_properties
        if name == TRACES
    ]
    if not found:
        return
    kept, traces = sum(passed for passed, _ in found), sum(traces for _, traces in found)
    terminalreporter.write_line(
        f"laws: {kept} of {len(found)} transforms keep them, on {traces} traces"
    )
    file: Any = config.getoption("--tfn-badge", None)
    if file is not None:
        badge = {
            "schemaVersion": 1,
            "label": "laws",
            "message": f"{kept} of {len(found)} transforms, {traces:,} traces",
            "color": "brightgreen" if kept == len(found) else "red",
        }
        Path(file).write_text(json.dumps(badge))
