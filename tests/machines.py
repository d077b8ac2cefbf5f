"""`python -m tests.machines [NAME ...] [-- PYTEST ...]`: what computes, as other processors, thread counts and orders run it.

A tolerance that one machine happened to give fails here on any machine. Without names all of them run, one after the other;
`--list` prints them. What stands behind `--` goes to pytest; without paths it is COMPUTING.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field

COMPUTING = ("tests/unit", "tests/laws", "tests/executors", "tests/models", "tests/ops", "tests/fuzz")

LEVELS = {  # PyTorch's own kernels, MKL, oneDNN
    "default": ("default", "SSE4_2", "SSE41"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512", "AVX512_CORE"),
    "mixed": ("avx512", "AVX2", "SSE41"),
}


@dataclass(frozen=True)
class Machine:
    """The settings of one run: environment, options of pytest, and the number of processes that keep the cores busy."""

    env: dict[str, str] = field(default_factory=dict[str, str])
    options: tuple[str, ...] = ()
    burners: int = 0


MACHINES = {
    **{
        name: Machine({"ATEN_CPU_CAPABILITY": aten, "MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": dnn})
        for name, (aten, mkl, dnn) in LEVELS.items()
    },
    **{f"threads-{n}": Machine({"TEST_THREADS": str(n), "OMP_NUM_THREADS": str(n)}) for n in (2, 8)},
    "load": Machine(burners=2 * (os.cpu_count() or 1)),
    "order": Machine(options=("--random-order", "fresh")),
}

BURN = "while True: sum(range(10**6))"


def run(machine: Machine, asked: list[str]) -> int:
    """Pytest as this machine; its exit status."""
    burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(machine.burners)]
    paths = () if any(os.path.exists(arg.partition("::")[0]) for arg in asked) else COMPUTING
    try:
        command = [sys.executable, "-m", "pytest", "-q", *machine.options, *paths, *asked]
        return subprocess.run(command, env=os.environ | machine.env, check=False).returncode
    finally:
        for process in burning:
            process.kill()


def main(words: list[str]) -> int:
    """Run the machines named, or all; the number of those that failed."""
    cut = words.index("--") if "--" in words else len(words)
    names, asked = words[:cut] or list(MACHINES), words[cut + 1 :]
    if names == ["--list"]:
        print(*MACHINES)
        return 0
    if unknown := [name for name in names if name not in MACHINES]:
        raise SystemExit(f"no machine is called {', '.join(unknown)}: there are {', '.join(MACHINES)}")
    failed: list[str] = []
    for name in names:
        print(f"---- {name}: {MACHINES[name]}", flush=True)
        failed += [name] if run(MACHINES[name], asked) else []
    print(f"failed: {', '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
