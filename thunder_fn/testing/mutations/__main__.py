"""`python -m thunder_fn laws`: plant each bug and say which law catches it."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from thunder_fn.derived.leaf_vmap import LoopWarning
from thunder_fn.testing.mutations import MUTATIONS, print_table


def main(argv: Sequence[str]) -> int:
    """Print the table of bugs and laws. Exit code 1 if a bug escapes."""
    parser = argparse.ArgumentParser(
        prog="python -m thunder_fn laws", description="Plant bugs in the rules and print which law catches each."
    )
    parser.add_argument("bugs", nargs="*", help="only bugs whose description has one of these words")
    parser.add_argument("--all", action="store_true", help="every law that catches a bug, not the one it names (slow)")
    options = parser.parse_args(argv)
    chosen = [bug for bug in MUTATIONS if not options.bugs or any(word in bug.bug for word in options.bugs)]
    if not chosen:
        parser.error(f"no bug's description has one of the words {', '.join(options.bugs)}")
    warnings.simplefilter("ignore", LoopWarning)
    return 1 if print_table(chosen, every_law=options.all) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
