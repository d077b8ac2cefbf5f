"""`python -m thunder_fn benchmarks`: run named benchmarks, print medians and ratios, write JSON."""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from thunder_fn.benchmarks.chart import read, svg
from thunder_fn.benchmarks.harness import machine, save, show
from thunder_fn.commands import output_folder, run_command
from thunder_fn.progress import tracked

NAMES = (
    *("call", "checkpoint", "compile", "compiled", "control_flow", "distributed", "dynamic", "gpu"),
    "growth",
    *("models", "plan", "quantize", "start", "trace", "train", "transforms"),
)
MODULES = {"models": "pretrained"}
"""Benchmarks that are in a module of another name."""


def main(argv: Sequence[str]) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m thunder_fn benchmarks",
        description=(
            "Run named benchmarks beside every peer that is installed; print medians and ratios."
        ),
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"which: {', '.join(NAMES)}; all of them by default",
    )
    parser.add_argument(
        "--json",
        type=output_folder,
        default="benchmark_out",
        metavar="FOLDER",
        help="where each result is written as JSON; benchmark_out by default",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few rounds and small sizes, to see that it runs"
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        help=(
            "models: only what has TEXT in its name, such as 'vit', 'decoding' or 'capture'; a"
            " model takes some two minutes"
        ),
    )
    parser.add_argument(
        "--chart",
        metavar="FILE",
        help="draw the saved results of the package as an SVG file, and measure nothing",
    )
    options = parser.parse_args(argv)
    if options.chart is not None:
        return _draw(Path(options.chart))
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    if options.only is not None:
        if options.names != ["models"]:
            parser.error("--only chooses among models: say `models --only TEXT`")
        pretrained = importlib.import_module("thunder_fn.benchmarks.pretrained")
        if not pretrained.cases(options.only, options.quick):
            known = "; ".join(pretrained.cases("", options.quick))
            parser.error(
                f"nothing among the models has {options.only!r} in its name; there are {known}"
            )
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    for name in options.names or NAMES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(f"thunder_fn.benchmarks.{MODULES.get(name, name)}")
            results = (
                module.run(options.quick)
                if options.only is None
                else module.run(options.quick, options.only)
            )
            for result in tracked(results, f"benchmarks of {name}"):
                print("\n" + show(result), flush=True)
                save(result, options.json)
    return 0


def _draw(path: Path) -> int:
    try:
        path.write_text(svg(read()), encoding="utf-8")
    except OSError as error:
        print(f"thunder_fn benchmarks: {path} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
