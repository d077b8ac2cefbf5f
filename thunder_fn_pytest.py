"""The options of the pytest plugin: `pytest --tfn-laws mypackage.transforms`.

Every run of pytest where thunder_fn is installed loads this module, so it imports nothing. The rest
of the plugin, and PyTorch, are imported where the option is given.
"""

from __future__ import annotations

from typing import Any


def pytest_addoption(parser: Any) -> None:
    """Add `--tfn-laws`, `--tfn-examples` and `--tfn-badge`."""
    group = parser.getgroup("thunder_fn")
    text = "hold every public transform of this module or package to the laws"
    group.addoption("--tfn-laws", action="append", default=[], metavar="MODULE", help=text)
    text = "how many random traces each transform is tried on (50)"
    group.addoption("--tfn-examples", type=int, default=50, metavar="N", help=text)
    text = "write the summary as the JSON of a badge (the endpoint format of shields.io)"
    group.addoption("--tfn-badge", metavar="FILE", help=text)


def pytest_configure(config: Any) -> None:
    """Load the rest of the plugin where its option is given."""
    if config.getoption("--tfn-laws"):
        config.pluginmanager.import_plugin("thunder_fn.testing.plugin")
