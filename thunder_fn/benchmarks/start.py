"""The time until the first call, in processes of their own: what `import thunder_fn` and the first
jitted call take beyond `import torch`, beside `jax` and `torch.compile`.

Processor time of the process itself: other processes and compilers that it starts do not count.
Peers take turns, and each difference is between neighbours.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from thunder_fn.benchmarks.harness import OURS, Result, single

ROUNDS = 9
TORCH = "import torch"
FUNCTION = "(lambda x, y: (x @ y).relu().sum() + 1)(torch.ones(4, 4), torch.ones(4, 4))"
IMPORTS = {OURS: "import torch, thunder_fn", "jax": "import jax"}
CALLS = {
    OURS: "import torch, thunder_fn; thunder_fn.jit" + FUNCTION,
    "torch.compile": "import torch; torch.compile" + FUNCTION,
    "jax.jit": "import jax; jax.jit"
    + FUNCTION.replace("torch", "jax.numpy").replace(".relu()", ".clip(0)"),
}
"""Programs of a line. jax needs no torch, so its own import counts in full."""


def run(quick: bool = False) -> Iterator[Result]:
    """The import alone, then with the first jitted call."""
    rounds = 1 if quick else ROUNDS
    has_jax = find_spec("jax") is not None
    for what, programs, target in (
        ("import", IMPORTS, "0.3 s"),
        ("import and first jitted call", CALLS, "0.6 s"),
    ):
        peers = {who: text for who, text in programs.items() if has_jax or "jax" not in who}
        if quick:
            peers.pop("torch.compile", None)  # its compiler takes a while
        seconds = measured(peers, rounds)
        notes = (f"medians of {rounds} processes, beyond `{TORCH}` for all but jax",)
        yield single(f"start: {what}", seconds, target, notes)


def measured(programs: dict[str, str], rounds: int) -> dict[str, float]:
    """The median processor time of each program, beyond `import torch` in the same round."""
    for text in (TORCH, *programs.values()):
        seconds_of(text)  # what it leaves on the disk is there for all that count
    found: dict[str, list[float]] = {who: [] for who in programs}
    for _ in range(rounds):
        base = seconds_of(TORCH)
        for who, text in programs.items():
            found[who].append(seconds_of(text) - (0.0 if "jax" in who else base))
    return {who: statistics.median(values) for who, values in found.items()}


def seconds_of(program: str) -> float:
    """The processor time of a Python process that runs the program."""
    text = f"{program}\nimport time; print(time.process_time())"
    command = [sys.executable, "-W", "ignore", "-c", text]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
