"""Each program of the gallery runs, and has a page and a picture. With GALLERY=full it does what its picture shows."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from gallery import hmc, neural_ode, pictures
from gallery.force_field import ATOMS, REST, forces, morse, move

ROOT = Path(__file__).parents[2]
SMALL: dict[str, dict[str, int]] = {
    "neural_ode": {"steps": 2, "curves": 2, "points": 40},
    "force_field": {"steps": 2, "count": 4, "frames": 4},
    "dp_sgd": {"steps": 2, "count": 16, "batch": 8},
    "maml": {"steps": 2, "tasks": 2, "shots": 4},
    "hmc": {"chains": 2, "samples": 3, "length": 2},
    "meanflow": {"steps": 2, "batch": 8, "count": 4},
    "rnn": {"steps": 2, "count": 2, "length": 5, "drawn": 3},
    "qlora": {"steps": 2, "width": 64, "rank": 2},
}


def main(name: str, **settings: int) -> dict[str, Any]:
    return importlib.import_module(f"gallery.{name}").main(**settings)


def numbers(result: Any) -> list[torch.Tensor]:
    return [torch.as_tensor(leaf) for leaf in torch.utils._pytree.tree_leaves(result) if not callable(leaf)]


@pytest.mark.parametrize("name", SMALL)
def test_small(name: str) -> None:
    found = numbers(main(name, **SMALL[name]))
    assert len(found) > 1 and all(value.isfinite().all() for value in found)


def test_every_program_has_its_page_and_picture(tmp_path: Path) -> None:
    programs = {path.stem for path in (ROOT / "gallery").glob("*.py")} - {"__init__", "__main__", "pictures"}
    page = (ROOT / "docs" / "gallery.md").read_text()
    assert programs == set(SMALL) == set(pictures.DRAWN)
    for name in programs:
        assert f"[![{pictures.DRAWN[name][0]}](gallery/{name}.svg)](../gallery/{name}.py)" in page
        checked_in = ROOT / "docs" / "gallery" / f"{name}.svg"
        assert "<title>" in checked_in.read_text() and checked_in.stat().st_size < 120_000
        ElementTree.parse(checked_in)
        assert len((ROOT / "gallery" / f"{name}.py").read_text().splitlines()) < 90
    pictures.draw("rnn", main("rnn", **SMALL["rnn"]), tmp_path / "rnn.svg")
    assert ElementTree.parse(tmp_path / "rnn.svg").getroot().tag.endswith("svg")


def test_the_solver_is_of_fourth_order() -> None:
    """Against the matrix exponential: half the step has a sixteenth of the error."""
    matrix, start = torch.tensor([[0.0, 1.0], [-1.0, -0.1]]).double(), torch.ones(2).double()

    def error(count: int) -> torch.Tensor:
        times = torch.linspace(0, 2, count + 1).double()
        return (neural_ode.solve(lambda y: matrix @ y, start, times)[-1] - torch.matrix_exp(2 * matrix) @ start).norm()

    assert 14 < error(10) / error(20) < 18


def test_leapfrog_runs_backwards_too() -> None:
    x, p = torch.tensor([0.3, -0.2]).double(), torch.tensor([1.0, 0.5]).double()
    there = hmc.leapfrog(x, p, 0.05, 20)
    back = hmc.leapfrog(there[0], -there[1], 0.05, 20)
    torch.testing.assert_close(back, (x, -p))
    assert (hmc.energy(*there) - hmc.energy(x, p)).abs() < 0.05


def test_verlet_conserves_energy_of_second_order() -> None:
    velocities = 0.25 * torch.randn(ATOMS, 2).double()
    start = REST.double() + 0.05 * torch.randn(ATOMS, 2).double()
    drift = [
        torch.stack(move(morse, start, velocities, n, 0.4 / n))
        .sum(0)
        .sub(morse(start) + velocities.square().sum() / 2)
        .abs()
        .max()
        for n in (20, 40)
    ]
    assert 3.5 < drift[0] / drift[1] < 4.5
    torch.testing.assert_close(forces(morse)(start), -torch.func.grad(morse)(start))


CLAIMS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "neural_ode": lambda r: bool((r["curves"][0] - r["curves"][1]).abs().mean() < 0.15),
    "force_field": lambda r: bool(torch.stack(r["energies"]).sum(0).std() < 0.01),
    "dp_sgd": lambda r: r["accuracy"] > 0.9,
    "maml": lambda r: bool((r["curves"][1] - r["truth"]).square().mean() < 2),
    "hmc": lambda r: r["accepted"] > 0.8 and abs(r["path"][:, 50:, 0].std() - 1.6) < 0.2,
    "meanflow": lambda r: bool(torch.cdist(r["samples"], r["data"]).amin(1).mean() < 0.15),
    "rnn": lambda r: bool(torch.cdist(r["drawn"], r["strokes"].flatten(0, 1)).amin(1).max() < 0.2),
    "qlora": lambda r: r["losses"][1][-1] < 0.1 and 6 * r["bytes"]["weights, nf4"] < r["bytes"]["weights, float32"],
}


@pytest.mark.skipif(os.environ.get("GALLERY") != "full", reason="minutes; `make thorough` sets GALLERY=full")
@pytest.mark.parametrize("name", SMALL)
def test_full(name: str, tmp_path: Path) -> None:
    result = main(name)
    assert CLAIMS[name](result)
    pictures.draw(name, result, tmp_path / "picture.svg")
    assert pictures.DRAWN[name][0] in (tmp_path / "picture.svg").read_text()
