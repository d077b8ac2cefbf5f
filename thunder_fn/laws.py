"""`python -m thunder_fn laws`: plant each bug and say which law catches it."""

from __future__ import annotations

import argparse
import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thunder_fn.derived.leaf_vmap import LoopWarning


def main(argv: Sequence[str]) -> int:
    """Print the table of bugs and laws. Exit code 1 if a bug escapes."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.mutants:
        from thunder_fn.testing.mutations.survivors import print_survivors

        survivors = print_survivors(
            options.bugs, options.count, file=options.file, budget_seconds=options.seconds
        )
        return 1 if survivors else 0
    if options.backend:
        from thunder_fn.testing.backends import print_survey

        found = print_survey(
            options.backend, options.count, options.together, options.without, options.seed
        )
        return 1 if found else 0
    # needs the extra `testing`, which --help does not
    from thunder_fn.testing.mutations import MUTATIONS, print_table

    chosen = [
        bug
        for bug in MUTATIONS
        if not options.bugs or any(word in bug.bug for word in options.bugs)
    ]
    if not chosen:
        parser.error(f"no bug's description has one of the words {', '.join(options.bugs)}")
    if options.list:
        print("\n".join([*_laws(), "", "planted bugs, and the law that catches each:"]))
        print("\n".join(f"  {bug.bug}: {bug.law}" for bug in chosen))
        return 0
    warnings.simplefilter("ignore", LoopWarning)
    return 1 if print_table(chosen, every_law=options.all) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m thunder_fn laws",
        description="Plant bugs in the rules and print which law catches each.",
    )
    parser.add_argument(
        "bugs", nargs="*", help="only bugs whose description has one of these words"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="every law that catches a bug, not the one it names (slow)",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the laws and the bugs, and plant none"
    )
    _add_mutants(parser.add_argument_group("mutants"))
    _add_backend(parser.add_argument_group("backends of torch.compile"))
    return parser


def _add_mutants(group: Any) -> None:
    group.add_argument(
        "--mutants",
        action="store_true",
        help="mutants made by a program, of the transforms that are named as module:function, or of"
        " ours and ten users'; prints the survivors",
    )
    group.add_argument(
        "--count", type=int, default=200, help="how many mutants, or programs (default 200)"
    )
    group.add_argument(
        "--file",
        type=Path,
        metavar="PATH",
        help="keep the verdict on each mutant here, and go on from those that stand here",
    )
    group.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin no further mutant after so long (default: no limit)",
    )


def _add_backend(group: Any) -> None:
    group.add_argument(
        "--backend",
        metavar="NAME",
        help="compare a backend of torch.compile, such as inductor, with eager PyTorch; prints what"
        " differs, as scripts that need PyTorch only, and the number of programs",
    )
    group.add_argument(
        "--together", type=int, default=12, help="compile so many programs as one (default 12)"
    )
    group.add_argument(
        "--without", nargs="*", default=[], metavar="OP", help="leave out programs with these ops"
    )
    group.add_argument("--seed", type=int, default=0, help="draw other programs (default 0)")


def _laws() -> list[str]:
    from thunder_fn.testing.laws import GROUPS

    lines = list[str]()
    for group, laws in GROUPS.items():
        lines.append(f"laws of {group}:")
        lines += [
            f"  {name}: {' '.join((inspect.getdoc(law) or '').partition(chr(10) * 2)[0].split())}"
            for name, law in laws.items()
        ]
    return lines
