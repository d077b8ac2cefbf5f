"""The commands: `python -m thunder_fn COMMAND`, or `thunder-fn COMMAND`. Each is a module with a
`main(argv) -> exit code`.
"""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Sequence

import torch

from thunder_fn.commands import run_command
from thunder_fn.version import __version__

COMMANDS = {
    "demo": (
        "thunder_fn.demo",
        "train a small GPT on Python's own source with one jitted train step",
    ),
    "compile": (
        "thunder_fn.recipes.command",
        "compile a model by its configuration and report what was done",
    ),
    "inspect": (
        "thunder_fn.inspect.command",
        "write the inspector's page of a function, or print a report",
    ),
    "plan": (
        "thunder_fn.planning.command",
        "predict memory, time and communication of a step on many ranks",
    ),
    "measure-hardware": ("thunder_fn.planning.measure", "measure this machine's rates, for `plan`"),
    "benchmarks": (
        "thunder_fn.benchmarks.__main__",
        "measure calls, tracing and training beside its peers",
    ),
    "explain": (
        "thunder_fn.explain",
        "print the page of an error: its meaning, an example and the fix",
    ),
    "laws": ("thunder_fn.laws", "plant bugs in the rules and print which law catches each"),
}
"""Name, the module that has the command's `main`, and its summary. A new command is a line here."""

USAGE = "\n".join(
    [
        "usage: python -m thunder_fn COMMAND [--help], or thunder-fn COMMAND [--help]",
        "",
        "commands:",
        *(f"  {name:<18}{summary}" for name, (_, summary) in COMMANDS.items()),
        "",
        (
            "The beginning of a command's name is enough, such as bench. --version prints the"
            " versions in use."
        ),
        "Exit codes: 0 well, 1 failed, 2 misused, 130 interrupted.",
    ]
)


def main(argv: Sequence[str]) -> int:
    """Run a command and return its exit code: 0 well, 1 failed, 2 misused, 130 interrupted."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    name, *rest = argv
    if name == "--version":
        print(
            f"thunder_fn {__version__}, torch {torch.__version__}, Python"
            f" {platform.python_version()}, {platform.platform()}"
        )
        return 0
    found = [known for known in COMMANDS if name and known.startswith(name)]
    if len(found) != 1:
        print(f"thunder_fn: there is no command {name!r}\n\n{USAGE}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[found[0]]
    return importlib.import_module(module).main(rest)


def script() -> int:
    """Run the command `thunder-fn`."""
    return run_command(main, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(script())
