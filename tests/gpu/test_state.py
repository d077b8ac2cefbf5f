"""The state of a CUDA process that a program depends on or changes: generators, the current device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import thunder_fn as tfn


def drawn() -> Tensor:
    return torch.rand(4, device="cuda")


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[0]):
        first = x + drawn()
    return first + drawn()


def set_back(x: Tensor) -> Tensor:
    state = torch.cuda.get_rng_state()
    first = x + drawn()
    torch.cuda.set_rng_state(state)
    return first * drawn()


def all_set_back(x: Tensor) -> Tensor:
    states = torch.cuda.get_rng_state_all()
    first = x + drawn()
    torch.cuda.set_rng_state_all(states)
    return first * drawn()


def seeded(x: Tensor) -> Tensor:
    torch.cuda.manual_seed(3)
    return x + drawn() + torch.rand(4).cuda()


def all_seeded(x: Tensor) -> Tensor:
    torch.cuda.manual_seed_all(3)
    return x + drawn()


FUNCTIONS = forked, set_back, all_set_back, seeded, all_seeded


@pytest.mark.filterwarnings("ignore:.*cannot be recorded:thunder_fn.errors.RegionWarning")
@pytest.mark.parametrize("executor", ["torch", "cudagraphs"])
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_generators_are_where_eager_leaves_them(f: Callable[[Tensor], Tensor], executor: str) -> None:
    x = torch.randn(4, device="cuda")

    def calls(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(11)
        return [*(run(x) for _ in range(3)), torch.cuda.get_rng_state(), torch.get_rng_state()]

    executors = [] if executor == "torch" else [executor]
    for mine, wanted in zip(calls(tfn.jit(f, executors=executors)), calls(f), strict=True):
        torch.testing.assert_close(mine, wanted)


def test_same_numbers_in_a_loop_over_examples() -> None:
    """A loop sets the generator of the device back, not the CPU's."""
    x = torch.ones(3, 4, device="cuda")
    found = tfn.vmap(lambda x: x + torch.randn(4, device="cuda"), randomness="same")(x)
    assert torch.equal(found[0], found[2])


MADE = {
    "zeros": lambda x: torch.zeros(2, device="cuda"),
    "rand": lambda x: torch.rand(2, device="cuda"),
    "like": lambda x: torch.empty_like(x, device="cuda"),
    "new": lambda x: x.new_zeros(2, device="cuda"),
    "moved": lambda x: x.cuda(),
    "moved to": lambda x: x.to("cuda"),
    "from the CPU": lambda x: torch.ones(2).cuda(),
    "from a number": lambda x: torch.tensor([1.0], device="cuda"),
    "asked": lambda x: x + torch.cuda.current_device(),
}


def current_devices() -> dict[str, bool]:
    """Say of each function whether its program follows the current device."""
    found, x = dict[str, bool](), torch.zeros(2, device="cuda:0")
    for name, f in MADE.items():
        run, results = tfn.jit(f), list[tuple[Tensor, Tensor]]()
        for place in (0, 1, 0):
            with torch.cuda.device(place):
                results.append((run(x), f(x)))
        found[name] = all(mine.device == wanted.device for mine, wanted in results)
        found[name] &= name != "asked" or all(torch.equal(*pair) for pair in results)
    return found


def test_the_current_device() -> None:
    """ "cuda" is the device that is current in the call, not in the capture. In a process with two."""
    if "nullcuda" not in os.environ.get("LD_PRELOAD", "") and torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device")
    command = "import json, tests.gpu.test_state as t; print(json.dumps(t.current_devices()))"
    found = subprocess.run(
        [sys.executable, "-c", command],
        env=os.environ | {"NULLCUDA_DEVICES": "2"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert json.loads(found.stdout.splitlines()[-1]) == dict.fromkeys(MADE, True)


def test_a_profile_has_the_devices_kernels_or_says_that_it_may_not() -> None:
    """PyTorch's profiler sees a device through CUPTI, which the simulated one lacks."""
    found = tfn.inspect.measure(torch.sin, torch.ones(2, device="cuda"))
    assert bool(found.kernels) != ("the profiler recorded nothing of the device" in repr(found))
    assert "aten::sin" in found.profile and found.device_seconds < 1
