"""Compiled regions write over donated memory, and over nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import thunder_fn as tfn
from tests.executors.test_inductor_laws import staged
from thunder_fn.errors import DonatedTensorError
from thunder_fn.executors import inductor, lower
from thunder_fn.executors.torchinductor import Inductor, codegen, store
from thunder_fn.executors.torchinductor.programs import jobs_of
from thunder_fn.ir.trace import Equation


class WithoutSums(Inductor):
    """Leaves `cumsum` to the torch executor."""

    def supports(self, equation: Equation) -> str | None:
        return "not here" if "cumsum" in equation.op.name else super().supports(equation)


def update(state: dict[str, Tensor], gradient: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A step with momentum; the norm is read from the old parameters, by another region than the one that updates them."""
    order = torch.sort(state["p"].flatten()).values
    momentum = state["m"] * 0.9 + gradient
    new = state["p"] - 0.1 * momentum / (momentum.square().mean().sqrt() + 1e-8)
    return {"p": new, "m": momentum}, (order.sin() * order.cos()).sum()


def steps(run: Callable[..., Any], make: Callable[[], dict[str, Tensor]], count: int = 3) -> list[Tensor]:
    """The results of some steps, and the state after them."""
    state, found = make(), list[Tensor]()
    for number in range(count):
        gradient = torch.linspace(-1, 1, 4096).reshape(64, 64) * (number + 1)
        state, value = run(state, gradient)
        found.append(value)
    return [*found, state["p"].clone(), state["m"].clone()]


def plain() -> dict[str, Tensor]:
    return {"p": torch.linspace(-2, 3, 4096).reshape(64, 64).clone(), "m": torch.zeros(64, 64)}


def transposed() -> dict[str, Tensor]:
    return {name: torch.empty_strided((64, 64), (1, 64)).copy_(value) for name, value in plain().items()}


def leaves() -> dict[str, Tensor]:
    return {name: value.requires_grad_() for name, value in plain().items()}


@pytest.mark.parametrize("make", [plain, transposed, leaves], ids=lambda make: make.__name__)
def test_donated_state_is_updated_where_it_lies(make: Callable[[], dict[str, Tensor]]) -> None:
    run = tfn.jit(update, donate_argnums=0, executors=[inductor()])
    with torch.no_grad():
        expected = steps(tfn.jit(update, executors=[inductor()]), make)
        assert all(map(torch.equal, expected, steps(run, make)))
        state = make()
        old, places = dict(state), {name: value.data_ptr() for name, value in state.items()}
        for _ in range(3):
            state, _ = run(state, torch.ones(64, 64))
            assert {name: value.data_ptr() for name, value in state.items()} == places
        assert all(value.is_leaf and not value.requires_grad and value._base is None for value in state.values())
        with pytest.raises(DonatedTensorError):
            old["p"] + 1


def test_memory_that_is_not_the_programs_stays_as_it_is() -> None:
    run = tfn.jit(update, donate_argnums=0, executors=[inductor()])
    expected = steps(update, plain, 1)
    shared = torch.linspace(-2, 3, 4096)
    outside, array = shared.clone(), torch.zeros(64, 64).numpy()
    state, value = run(
        {"p": shared.reshape(64, 64), "m": torch.from_numpy(array)}, torch.linspace(-1, 1, 4096).reshape(64, 64)
    )
    torch.testing.assert_close([value, state["p"], state["m"]], expected)
    assert torch.equal(shared, outside) and not array.any()
    kept = plain()
    before = {name: x.clone() for name, x in kept.items()}
    tfn.jit(update, executors=[inductor()])(kept, torch.ones(64, 64))
    assert all(torch.equal(kept[name], before[name]) for name in kept)


def test_intermediates_are_given_without_asking() -> None:
    """The cumulative sum is no region's, and what is behind it reads it last, unless it is a result."""

    def f(x: Tensor) -> Tensor:
        y = torch.cumsum(x.sin() / 64 + 0.01, 0)
        return y.cos() * y + 1

    def flipped(x: Tensor) -> Tensor:
        y = torch.cumsum(x.sin() / 64 + 0.01, 0)
        return y.cos() * y + y.flip(0)  # an element is read after its place is written to: not in place

    def returned(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.cumsum(x.sin() / 64 + 0.01, 0)
        return y.cos() * y + 1, y

    x = torch.linspace(-1, 1, 4096).reshape(64, 64)
    keys = set[str]()
    for function, donated, in_place in ((f, (0,), True), (flipped, (0,), False), (returned, (), False)):
        program = lower(tfn.trace(function, x), executors=[WithoutSums()], below_autograd=True)
        torch.testing.assert_close(program(x), function(x) if function is returned else (function(x),))
        run = staged(program.run)
        assert run is not None
        _, last = jobs_of(run, (x,))
        assert last.donated == donated and ("reinterpret_tensor(buf" in codegen.generate(last).text) == in_place
        keys |= {store.job_key(last), store.job_key(replace(last, donated=()))}
    assert len(keys) == 4  # `f` and `returned` have one region, which is compiled for either
