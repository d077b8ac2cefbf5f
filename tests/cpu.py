"""The cost of tests: `python -m pytest -p tests.cpu ...` ends with CPU seconds by folder, and the dearest files and
tests.

Seconds of this process and of those that it has waited for, which say more than wall time where other programs run.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import pytest

COST, OUTSIDE = "cpu_seconds", "workers' imports and collection"
SHOWN = 25
_BEFORE = pytest.StashKey[float]()


def spent() -> float:
    """CPU seconds of this process and of its ended children."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The report of a test's teardown carries what the test cost, its fixtures included."""
    item.stash[_BEFORE] = spent()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if call.when == "teardown":
        report.user_properties = [(COST, spent() - item.stash[_BEFORE])]
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist says what it spent in all."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[COST] = spent()


class _Workers:
    def __init__(self) -> None:
        self.spent = 0.0

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.spent += getattr(node, "workeroutput", {}).get(COST, 0.0)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Workers(), "tests.cpu.workers")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The tables."""
    if hasattr(config, "workerinput"):
        return
    tests: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            tests[getattr(report, "nodeid", "")] += sum(
                value for name, value in getattr(report, "user_properties", ()) if name == COST
            )
    total = config.pluginmanager.get_plugin("tests.cpu.workers").spent or spent()
    folders: dict[str, float] = defaultdict(float)
    files: dict[str, float] = defaultdict(float)
    for test, seconds in tests.items():
        path = PurePath(test.partition("::")[0])
        folders["/".join(path.parts[:2] if path.parts[:1] == ("tests",) else path.parts[:1])] += seconds
        files[path.as_posix()] += seconds
    folders[OUTSIDE] = total - sum(tests.values())
    for title, table in {"folder": folders, "file": files, "test": tests}.items():
        terminalreporter.section(f"CPU seconds by {title}")
        for name, seconds in sorted(table.items(), key=lambda row: -row[1])[:SHOWN]:
            terminalreporter.line(f"{seconds:9.1f}  {name}")
    terminalreporter.line(f"{total:9.1f}  in all")
