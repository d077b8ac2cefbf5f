"""`python -m thunder_fn plan FILE:FUNCTION`: the predicted cost of a step on many ranks.

FUNCTION takes no argument and returns `(step, args)`, as for `inspect`. It is called as rank 0 of
the world, so it may make meshes of all ranks. Tensors on the meta device take no memory.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from thunder_fn.commands import UserError, failed
from thunder_fn.errors import ThunderError
from thunder_fn.inspect.command import load
from thunder_fn.planning.plans import planned
from thunder_fn.planning.rates import hardware_named
from thunder_fn.planning.worlds import fake_world


def main(argv: Sequence[str]) -> int:
    """Parse the command line and print the plan. The exit code."""
    options = _options(argv)
    try:
        with fake_world(options.world), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                hardware = hardware_named(options.hardware)
                step, args, kwargs = load(options.function)
            except (ThunderError, OSError) as error:
                return failed("plan", error, 2)
            found = planned(
                partial(step, **kwargs) if kwargs else step,
                args,
                hardware,
                fused=options.fused or None,
                model_flops=options.model_flops,
            )
    except (UserError, ThunderError) as error:
        return failed("plan", error)
    print(found)
    if options.out is not None:
        try:
            print(found.page().save(options.out))
        except OSError as error:
            what = f"{options.out} cannot be written: {error.strerror}"
            print(f"thunder_fn plan: {what}", file=sys.stderr)
            return 1
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m thunder_fn plan", description=__doc__)
    parser.add_argument("function", metavar="FILE:FUNCTION", help="returns (step, args)")
    parser.add_argument("--world", type=int, default=1, metavar="N", help="ranks; 1 by default")
    parser.add_argument(
        "--hardware", default="h100", help="h100, h200, b200, mi300x or a TOML file"
    )
    parser.add_argument(
        "--fused", action="store_true", help="count neighbouring pointwise ops as one kernel"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PAGE",
        help="write the plan and the step as an inspector's page",
    )
    parser.add_argument("--model-flops", type=float, help="of a rank's step, for the MFU")
    options = parser.parse_args(argv)
    if options.world < 1:
        parser.error(f"--world is a number of ranks from 1 on, given {options.world}")
    return options
