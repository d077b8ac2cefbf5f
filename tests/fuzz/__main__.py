"""`python -m tests.fuzz --programs 1000 --seed 7`: draws programs, compares, shrinks what differs and writes it to a folder.

Programs run in child processes, a few hundred in each: a crash is a find like any other, and memory is given back.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import sys
import time
import traceback
from pathlib import Path

import torch

from tests.fuzz import differential
from tests.fuzz.differential import Outcome, judge
from tests.fuzz.explained import is_open, reason
from tests.fuzz.generate import generate
from tests.fuzz.shrink import shrink

CHUNK = 200


def normalised(outcome: Outcome) -> str:
    """The common part of finds that are one: the kind, and an error's text without names and numbers."""
    why = outcome.why.splitlines()[0] if outcome.why else ""
    why = re.sub(r"call \d+: |0x[0-9a-f]+", "", why)
    why = re.sub(r"'[^']*'|\b[avfxcgu]\d+\b|-?\d+(\.\d+)?(e-?\d+)?", "_", why)
    return f"{outcome.kind}: {why if outcome.kind in ('error', 'raised', 'refused', 'accepts') else why[:40]}"[:200]


def is_still(text: str, name: str) -> bool:
    """Test whether a smaller program runs and differs in the same way."""
    try:
        return normalised(judge(text, seconds=10)) == name
    except Exception:  # noqa: BLE001  # it has lost what makes it a program
        return False


def run_chunk(seeds: range, folder: Path, shrinks: bool, skip: str, steady: bool) -> None:
    """In a child: one line for each program, a file for each find."""
    torch.set_num_threads(1)
    with (folder / "log.txt").open("a", buffering=1) as log:
        for seed in seeds:
            log.write(f"{seed} begins\n")
            text = generate(seed)
            if text is None or (skip and re.search(skip, text)) or (steady and is_open(text)):
                log.write(f"{seed} none\n")
                continue
            log.write(f"{seed} drawn\n")
            outcome = judge(text)
            name = normalised(outcome)
            log.write(f"{seed} {name}\n")
            if not outcome.is_difference:
                continue
            path = folder / f"{seed}.py"
            path.write_text(f'"""{name}"""\n{text}')
            known = reason(text, outcome)
            if known is None and shrinks:
                text = shrink(text, lambda smaller: is_still(smaller, name))
                outcome = judge(text)
                known = reason(text, outcome)
            kept = folder / ("explained" if known else "found")
            kept.mkdir(exist_ok=True)
            path.unlink()
            why = outcome.why.replace('"""', "'''").replace("\\", "/")
            (kept / f"{seed}.py").write_text(f'"""{known or name}\n\n{why}\n"""\n{text}\n')
            log.write(f"{seed} {'explained' if known else 'FOUND'} {known or name}\n")


def warm_up() -> None:
    """Import what children need, and derive the rules of some ops, once for all of them."""
    torch.set_num_threads(1)
    for seed in range(40):
        if (text := generate(seed)) is not None:
            judge(text)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    parser.add_argument("--folder", type=Path, default=Path("fuzz_out"))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--skip", default="", help="leave out programs whose text this matches")
    parser.add_argument("--steady", action="store_true", help="leave out the classes of programs that are open")
    parser.add_argument("--executors", nargs="*", default=(), help="run jitted programs on these, such as inductor")
    asked = parser.parse_args()
    differential.EXECUTORS = tuple(asked.executors)
    asked.folder.mkdir(parents=True, exist_ok=True)
    warm_up()
    print(f"seed {asked.seed}", flush=True)
    begun, done, end = time.time(), asked.seed, asked.seed + asked.programs
    log = asked.folder / "log.txt"
    while done < end and time.time() - begun < asked.seconds:
        seeds = range(done, min(done + CHUNK, end))
        child = os.fork()
        if not child:
            status = 1
            try:
                run_chunk(seeds, asked.folder, not asked.no_shrink, asked.skip, asked.steady)
                status = 0
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        done = seeds.stop
        if status:
            last, at = re.findall(r"^(\d+) (begins|drawn)$", log.read_text(), re.M)[-1]
            whose = "FOUND crash" if at == "drawn" else "eager PyTorch crashed"  # while the program was drawn
            with log.open("a") as out:
                out.write(f"{last} {whose}: status {status}\n")
            last = int(last)
            done = last + 1
        print(f"{done - asked.seed} programs, {(done - asked.seed) / (time.time() - begun):.2f} a second", flush=True)
    lines = [line.split(" ", 1)[1] for line in log.read_text().splitlines() if " " in line]
    for line, count in collections.Counter(line for line in lines if line not in ("begins", "drawn")).most_common(60):
        print(f"{count:6} {line}")


if __name__ == "__main__":
    main()
