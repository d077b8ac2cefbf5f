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
    for path, transform in _named(config):
        items.append(LawItem.from_parent(session, name=f"laws[{path}]", transform=transform))


def _named(config: pytest.Config) -> list[tuple[str, Callable[..., Any]]]:
    """The transforms of the modules that `--tfn-laws` names."""
    options: Any = config.option
    try:
        modules = [importlib.import_module(name) for name in options.tfn_laws]
    except ImportError as error:
        said = (
            f"--tfn-laws: {error}. Name a module that Python can import from here; with"
            " `python -m pytest` it finds those in this folder, too."
        )
        raise pytest.UsageError(said) from error
    return [found for module in modules for found in transforms_of(module)]


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


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Print one line: how many of the transforms keep the laws, on how many traces. `--tfn-badge`
    writes it to a file, too. A transform whose test did not end counts as one that was not tried.
    """
    if exitstatus == pytest.ExitCode.USAGE_ERROR:
        return
    named = len(_named(config))
    found = [
        (report.passed, traces)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, traces in report.user_properties
        if name == TRACES
    ]
    kept, traces = sum(passed for passed, _ in found), sum(traces for _, traces in found)
    left = f"; {named - len(found)} not tried" if len(found) < named else ""
    terminalreporter.write_line(
        f"laws: {kept} of {named} transforms keep them, on {traces} traces{left}"
    )
    options: Any = config.option
    if options.tfn_badge is not None:
        badge = {
            "schemaVersion": 1,
            "label": "laws",
            "message": f"{kept} of {named} transforms, {traces:,} traces",
            "color": "brightgreen" if kept == named else "red",
        }
        Path(options.tfn_badge).write_text(json.dumps(badge))
