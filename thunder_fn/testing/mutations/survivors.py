"""The table of mutants: the law that catches each, and those that survive.

A table of hundreds takes an hour. So each verdict is a line of a file as soon as it is known, and
another run goes on from there. A verdict is known by the mutant's source: it is asked for again
when the function changes, and when the file is deleted.
"""

from __future__ import annotations

import hashlib
import json
import random
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from thunder_fn.progress import tracked
from thunder_fn.testing.mutations.mutants import (
    NO_BUG,
    OURS,
    SECONDS,
    mutants_of,
    transform_at,
    users,
    verdict,
)
from thunder_fn.testing.mutations.planting import Mutation


@dataclass(frozen=True, slots=True)
class Verdict:
    """A mutant, what was said of it, and the time of the processor that took."""

    key: str
    mutant: str
    said: str
    seconds: float

    @property
    def is_no_bug(self) -> bool:
        """Test whether no witness tells the mutant from the transform."""
        return self.said.startswith(NO_BUG)

    @property
    def survives(self) -> bool:
        """Test whether no law caught it, and it may be a bug."""
        return self.said.startswith(("SURVIVES", "OUT OF TIME"))


def drawn_mutants(paths: Sequence[str], count: int) -> tuple[list[tuple[str, Mutation]], int]:
    """So many mutants of the transforms, drawn with a fixed seed, and the number of all."""
    found = [(path, mutation) for path in paths for mutation in mutants_of(transform_at(path))]
    random.Random(0).shuffle(found)
    return found[:count], len(found)


def verdicts(
    mutants: Sequence[tuple[str, Mutation]], seconds: int, file: Path | None = None
) -> Iterator[tuple[Verdict, bool]]:
    """The verdict on each mutant, and whether it stood in the file."""
    known = read(file)
    for path, mutation in tracked(mutants, "trying mutants"):
        key = hashlib.sha256(f"{path}\n{mutation.after}".encode()).hexdigest()[:16]
        if key in known:
            yield known[key], True
            continue
        began = time.process_time()
        said = verdict(path, mutation, seconds)
        took = round(time.process_time() - began, 1)
        new = Verdict(key, f"{path.partition(':')[2]} / {mutation.bug}", said, took)
        if file is not None:
            _append(file, new)
        yield new, False


def _append(file: Path, verdict: Verdict) -> None:
    """Add a line to a file; a last line that was cut off is ended first, and stays unread."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as out:
        if out.tell() and not file.read_bytes().endswith(b"\n"):
            out.write(b"\n")
        out.write(json.dumps(asdict(verdict)).encode() + b"\n")


def read(file: Path | None) -> dict[str, Verdict]:
    """The verdicts of a file, by key. Lines that were cut off are left out."""
    if file is None or not file.exists():
        return {}
    found = dict[str, Verdict]()
    for line in file.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            one = Verdict(**json.loads(line))
            found[one.key] = one
    return found


def print_survivors(
    paths: Sequence[str] = (),
    count: int = 200,
    seconds: int = SECONDS,
    file: Path | None = None,
    budget_seconds: float = float("inf"),
) -> int:
    """Print the law that catches each mutant, and the survivors at the end; return their number.

    Mutants that no witness tells from a right transform are counted apart: see `verdict`.

    Args:
        paths: transforms as `module:name`; ours and the users' by default.
        count: how many mutants to try, drawn from all with a fixed seed.
        seconds: the time of the processor for each.
        file: where verdicts are kept, and where those of an earlier run are read.
        budget_seconds: the time after which no further mutant is begun.
    """
    mutants, total = drawn_mutants(paths or (*OURS, *users()), count)
    start, said = time.monotonic(), list[Verdict]()
    for one, is_known in verdicts(mutants, seconds, file):
        said.append(one)
        first, took = one.said.partition("\n")[0], "known" if is_known else f"{one.seconds:.0f} s"
        print(f"{one.mutant:<110} {first} ({took})", flush=True)
        if time.monotonic() - start > budget_seconds:
            break
    return _print_table(said, len(mutants), total)


def _print_table(said: Sequence[Verdict], wanted: int, total: int) -> int:
    no_bugs = [one for one in said if one.is_no_bug]
    survivors = [one for one in said if one.survives]
    told = [one for one in said if one.said != "does not fit" and not one.is_no_bug]
    took = sum(one.seconds for one in said)
    print(
        f"\n{len(told) - len(survivors)} of {len(told)} mutants caught ({total} there are), in"
        f" {took:.0f} s of the processor; {len(no_bugs)} others are no bugs:"
    )
    for one in no_bugs:
        print(f"  {one.mutant}: {one.said}")
    print("the survivors:" if survivors else "no survivors")
    for one in survivors:
        print(f"  {one.mutant}: {textwrap.indent(one.said, '    ').strip()}")
    if len(said) < wanted:
        print(f"{wanted - len(said)} mutants are left for the next run with this --file")
    return len(survivors)
