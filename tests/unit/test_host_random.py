"""Random numbers of Python and NumPy: what cannot be traced draws none, and `compile` of a module draws as eager does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import thunder_fn as tfn
from thunder_fn.capture.replaced import host_random

X = torch.linspace(-1, 1, 6).reshape(2, 3)
DRAWS: dict[str, Callable[[], float]] = {
    "random": lambda: random.uniform(0, 1),
    "numpy.random": lambda: numpy.random.rand(),
}
BREAKS = "ignore:The .grad attribute of a Tensor"  # Dynamo looks at it where it resumes


def seed() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


class Noisy(nn.Module):
    """Adds numbers that Python draws; refuses to be traced if it decides on values, too."""

    def __init__(self, draw: Callable[[], float], decides: bool) -> None:
        super().__init__()
        self.draw, self.decides, self.linear = draw, decides, nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) + self.draw()
        if self.decides and x.sum() > 0:
            x = x * self.draw()
        return nn.functional.dropout(x, 0.5) + self.draw()


@pytest.mark.parametrize("module", DRAWS)
def test_drawn_since(module: str) -> None:
    before = host_random.state()
    assert host_random.drawn_since(before) is None
    DRAWS[module]()
    assert host_random.drawn_since(before) == module


@pytest.mark.parametrize("module", DRAWS)
def test_what_cannot_be_traced_draws_nothing(module: str) -> None:
    for refused in (Noisy(DRAWS[module], decides=True), lambda x: x.nonzero().tolist() and DRAWS[module]()):
        before = host_random.state()
        with pytest.raises(tfn.errors.CaptureError):
            tfn.trace(refused, X)
        assert host_random.drawn_since(before) is None


@pytest.mark.parametrize("module", DRAWS)
def test_a_function_that_raises_has_drawn(module: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        DRAWS[module]()
        raise ValueError("after a number")

    seed()
    with pytest.raises(ValueError, match="after a number"):
        tfn.jit(f)(X)
    after = DRAWS[module]()
    seed()
    DRAWS[module]()
    assert after == DRAWS[module]()


@pytest.mark.filterwarnings(BREAKS)
@pytest.mark.parametrize("decides", (False, True))
@pytest.mark.parametrize("module", DRAWS)
def test_compiled_modules_draw_as_eager_does(module: str, decides: bool) -> None:
    eager = Noisy(DRAWS[module], decides)
    for frontend in (None, "dynamo"):
        compiled = tfn.compile(eager, executors="torch", frontend=frontend)
        seed()
        expected = [eager(X) for _ in range(3)]
        seed()
        if frontend is None:
            with pytest.warns(tfn.errors.GraphBreakWarning):
                found = [compiled(X)]
        else:
            found = [compiled(X)]
        found += [compiled(X) for _ in range(2)]
        for mine, its in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, its)


@pytest.mark.filterwarnings(BREAKS)
def test_functions_through_dynamo_draw_as_eager_does() -> None:
    f = tfn.compile(lambda x: x * numpy.random.random(), frontend="dynamo", executors="torch")
    seed()
    found = [f(X), f(X)]
    seed()
    assert all(torch.equal(mine, X * numpy.random.random()) for mine in found)


@pytest.mark.filterwarnings(BREAKS)
@pytest.mark.parametrize("module", DRAWS)
def test_compiled_functions_draw_as_eager_does(module: str) -> None:
    f = tfn.compile(lambda x: x * DRAWS[module](), executors="torch")
    seed()
    with pytest.warns(tfn.errors.GraphBreakWarning):
        found = [f(X)]
    found += [f(X), f(X)]
    seed()
    for mine in found:
        torch.testing.assert_close(mine, X * DRAWS[module]())


@pytest.mark.parametrize("module", DRAWS)
def test_jit_says_that_numbers_are_constants(module: str) -> None:
    jitted = tfn.jit(Noisy(DRAWS[module], decides=False))
    with pytest.warns(tfn.errors.HostRandomWarning) as caught:
        jitted(X)
    what, source, fix = str(caught[0].message).splitlines()
    assert what == f"jit: Noisy drew numbers from `{module}` while it was traced; its program has them as constants"
    assert "test_host_random.py" in source
    assert fix == "Draw them with PyTorch, such as `torch.rand(())`, or outside the function and pass them."
    jitted(X)


class Refused(nn.Module):
    """Calls what a trace cannot have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(numpy.sign(x.detach().numpy()))


def test_what_no_trace_can_have_goes_through_dynamo() -> None:
    compiled = tfn.compile(Refused(), executors="torch")
    with pytest.raises(tfn.errors.CaptureError):
        tfn.compile(Refused(), frontend="direct")(X)
    with pytest.warns(tfn.errors.GraphBreakWarning, match="Refused is no single trace"):
        assert torch.equal(compiled(X), Refused()(X))


GENERATORS: dict[str, Any] = {
    "random": lambda: (own := random.Random(3), own.random, own.getstate),
    "generator": lambda: (own := numpy.random.default_rng(3), own.random, lambda: own.bit_generator.state),
    "state": lambda: (own := numpy.random.RandomState(3), own.rand, lambda: str(own.get_state())),
}
"""Generators of the user's: one, how it draws, and where it is."""


@pytest.mark.filterwarnings("ignore::thunder_fn.errors.OutsideWarning")
@pytest.mark.parametrize("kind", GENERATORS)
def test_what_cannot_be_traced_draws_from_no_generator_of_the_users(kind: str) -> None:
    _, draw, where = GENERATORS[kind]()
    before = where()
    with pytest.raises(tfn.errors.DataDependentBranch):
        tfn.jit(lambda x: x * draw() if x.sum() > 0 else x)(X)
    assert where() == before


@pytest.mark.filterwarnings(BREAKS)
@pytest.mark.parametrize("kind", ["generator", "state"])  # Dynamo has those of `random.Random` as constants
def test_compiled_functions_draw_from_generators_of_the_users(kind: str) -> None:
    _, draw, _ = GENERATORS[kind]()
    expected = [X * draw() for _ in range(3)]
    own, _, _ = GENERATORS[kind]()
    f = tfn.compile((lambda x: x * own.random()) if kind == "generator" else (lambda x: x * own.rand()))
    with pytest.warns(tfn.errors.GraphBreakWarning):
        found = [f(X)]
    torch.testing.assert_close([*found, f(X), f(X)], expected)
