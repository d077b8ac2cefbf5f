"""Run a library's own tests with thunder_fn's functions in the place of torch.func's.

    python -m tests.peers.libraries curvlinops ~/curvlinops/test -k hessian
    python -m tests.peers.libraries posteriors ~/posteriors/tests --plain

The first word names the installed library, the second its tests: a file or a folder. What follows is pytest's. Names that both
packages have are exchanged in the library's modules and in its tests, wherever they import or write them, as
`tests.peers.functorch` does it for PyTorch's own. PyTorch and other libraries go on using torch.func.

Runs pytest twice in processes of their own, first with torch.func and then with thunder_fn. Prints the tests that pass with
the first and fail with the second, those that slow down most, and both CPU times. `--plain` and `--ours` run one of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import thunder_fn as tfn
from tests.peers.plugin.exchange import LIBRARIES, TESTS, TIMES


def outcomes(library: str, tests: Path, rest: list[str], *, ours: bool) -> dict[str, tuple[str, float]]:
    """Run pytest in a process of its own; what each test ends as, and its seconds, by name."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        env = {**os.environ, TIMES: file.name, TESTS: str(tests.resolve())}
        env |= {LIBRARIES: library} if ours else {}
        env["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parent / "plugin"), str(Path(tfn.__file__).parents[1]), env.get("PYTHONPATH", "")]
        )
        options = [
            "-q",
            "-p",
            "exchange",
            "-p",
            "no:cacheprovider",
            "--assert=plain",
            "--tb=short",
            "--disable-warnings",
        ]
        command = [sys.executable, "-P", "-m", "pytest", *options, str(tests.resolve()), *rest]
        subprocess.run(command, env=env, cwd=tests.parent, check=False)
        return json.loads(Path(file.name).read_text() or "{}")


def compare(theirs: dict[str, tuple[str, float]], ours: dict[str, tuple[str, float]]) -> None:
    """Print where the two runs differ."""
    passed = [name for name, (how, _) in theirs.items() if how == "passed"]
    lost = [name for name in passed if ours.get(name, ("missing", 0.0))[0] != "passed"]
    shared = [name for name in passed if name not in lost]
    print(*(f"lost {name}: {ours.get(name, ('missing', 0.0))[0]}" for name in lost), sep="\n")
    for name in sorted(shared, key=lambda name: theirs[name][1] - ours[name][1])[:10]:
        print(f"{theirs[name][1]:8.2f} s {ours[name][1]:8.2f} s {name}")
    before, after = (sum(run[name][1] for name in shared) for run in (theirs, ours))
    print(f"{len(shared)} of {len(passed)} pass with thunder_fn, in {after:.1f} s; torch.func's take {before:.1f} s")


def main() -> int:
    """Run the tests that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", help="the library's package; several with commas between")
    parser.add_argument("tests", type=Path, help="the file or folder of its tests")
    parser.add_argument("--plain", action="store_true", help="run with torch.func only")
    parser.add_argument("--ours", action="store_true", help="run with thunder_fn only")
    options, rest = parser.parse_known_args()
    runs = [ours for ours in (False, True) if not (ours and options.plain) and not (not ours and options.ours)]
    found = [outcomes(options.library, options.tests, rest, ours=ours) for ours in runs]
    if len(found) == 2:
        compare(*found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
