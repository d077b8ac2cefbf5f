"""Runs that lose ranks go on from the last checkpoint, on another number of ranks, as if nothing had been."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.distributed.elastic import EVERY, PLACES, STEPS, Net, data
from tests.forks import ROOT, Done
from thunder_fn.parameters import Checkpoints

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
Moment = tuple[str, int, int]
SAVING = ("write", "metadata", "rename")


def drawn(rng: random.Random) -> list[Moment]:
    """A moment of a run on two ranks, and a later one of the run on one that goes on."""
    place, later = rng.choice(PLACES), rng.choice(PLACES)
    step = rng.randrange(EVERY * 2)
    step += place in SAVING and (EVERY - 1 - step) % EVERY
    after = STEPS - 1
    return [(place, 0 if place == "metadata" else rng.randrange(2), step), (later, 0, after)]


def undisturbed() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of eager PyTorch in one process, and the parameters."""
    torch.manual_seed(0)
    net = Net().double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    losses = list[float]()
    for x, y in map(data, range(STEPS)):
        loss = F.cross_entropy(net.down(F.gelu(net.up(x))), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net.state_dict()


def runs_of(runs: list[list[Moment]], folder: Path) -> list[list[list[Done]]]:
    """Make runs; how the ranks of each world ended."""
    command = [sys.executable, "-m", "tests.distributed.elastic", str(folder), json.dumps(runs)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return [[[Done(*rank) for rank in world] for world in run] for run in json.loads(done.stdout)]


def check_run(moments: list[Moment], worlds: list[list[Done]], folder: Path) -> None:
    """Each world but the last one lost the rank that was killed; the losses are those of a run that nobody disturbed."""
    for (_, rank, _), world in zip(moments, worlds, strict=False):
        assert world[rank].returncode == -9, world[rank].text
        assert all(other.returncode for other in world)
    assert not any(rank.returncode for rank in worlds[-1]), worlds[-1]
    want, parameters = undisturbed()
    lines = [line.split() for line in (folder / "losses.txt").read_text().splitlines()]
    assert {int(step) for step, _, _ in lines} == set(range(STEPS))
    assert len({size for _, _, size in lines}) == 2
    for step, loss, _ in lines:
        assert float(loss) == pytest.approx(want[int(step)], rel=1e-9)
    saved = Checkpoints(folder / "saved")
    state = {"model": {name: torch.zeros_like(value) for name, value in parameters.items()}}
    assert saved.load(state) == STEPS and len(saved.steps()) == 2
    torch.testing.assert_close(state["model"], parameters, rtol=1e-7, atol=1e-7)


def test_a_run_that_loses_a_rank_goes_on(tmp_path: Path) -> None:
    moments: list[Moment] = [("metadata", 0, 3)]
    ((*worlds,),) = runs_of([moments], tmp_path)
    check_run(moments, worlds, tmp_path / "0")


@pytest.mark.skipif(not THOROUGH, reason="thirty worlds: `make thorough` starts them")
def test_ranks_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random(0)
    runs = [drawn(rng) for _ in range(10)]
    for place, worlds in enumerate(runs_of(runs, tmp_path)):
        check_run(runs[place], worlds, tmp_path / str(place))


def test_checkpoints_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Checkpoints(tmp_path, keep=2)
    for step in range(1, 5):
        saved.save(step, {"w": torch.full((2,), float(step))})
    assert saved.steps() == (3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_end", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            saved.save(5, {"w": torch.zeros(2)})
    state = {"w": torch.zeros(2), "step": 0}
    assert saved.load({"w": state["w"]}) == 4 and torch.equal(state["w"], torch.full((2,), 4.0))
    saved.save(5, {"w": torch.ones(2), "step": 7})
    saved.save(5, {"w": torch.ones(2), "step": 8})
    assert saved.load(state) == 5 and state["step"] == 8 and saved.steps() == (4, 5)
    assert not [path for path in tmp_path.iterdir() if path.suffix]
