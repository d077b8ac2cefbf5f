"""Values and gradients do not depend on the layout that a function was traced with, on lazy bits or on grad modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.capture import capture
from thunder_fn.errors import MissingRule
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.grad import grad_and_value
from thunder_fn.ir.check import check

X = torch.linspace(-1, 1, 9, dtype=torch.float64).reshape(3, 3).sin() + 2 * torch.eye(3, dtype=torch.float64)
LAYOUTS = (X, X.t().contiguous().t(), torch.stack([X, X], -1)[..., 0])


def _clamped_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    with torch.no_grad():
        y[0].clamp_(min=0.5)
        y.t()[1].mul_(3)
    return y.sin().sum()


def _clamped_inside(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * 2
        y.clamp_(min=0.5)
    return (y * x).sum()


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "det": lambda x: torch.linalg.det(x),
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "solve": lambda x: torch.linalg.solve(x, torch.ones_like(x)).sin().sum(),
    "solve from the right": lambda x: torch.linalg.solve(x, x.sin().detach() + 1, left=False).sin().sum(),
    "svdvals": lambda x: torch.linalg.svdvals(x).sin().sum(),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x + x.mT).sin().sum(),
    "pdist": lambda x: torch.nn.functional.pdist(x).sin().sum(),
    "as_strided of a copy": lambda x: torch.as_strided(
        x.clone(memory_format=torch.contiguous_format), (2, 2), (1, 3)
    ).prod(),
    "stft": lambda x: torch.stft(x, 2, 1, center=False, window=torch.ones(2).double(), return_complex=True).abs().sum(),
    "clamped view": _clamped_view,
    "clamped inside": _clamped_inside,
    "cosine similarity": lambda x: torch.cosine_similarity(x, x.t().sin()).sum(),
    "conjugated": lambda x: torch.view_as_real(torch.complex(x, x.sin()).conj().resolve_conj()).prod(-1).sum(),
    "imaginary part": lambda x: (torch.complex(x, x.sin()).conj().imag * x).sum(),
    "covariance": lambda x: torch.cov(x).sin().sum() + torch.corrcoef(x).sum(),
    "narrow": lambda x: x.narrow(0, torch.tensor(1), 2).prod(),
}


@pytest.mark.parametrize("traced", range(3), ids=("contiguous", "transposed", "gaps"))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_layout(name: str, traced: int) -> None:
    f = FUNCTIONS[name]
    trace = capture(f, (LAYOUTS[traced],)).trace
    backward = grad_and_value(trace, (True,))
    check(backward)
    for x in LAYOUTS:
        leaf = x.detach().requires_grad_()
        (expected,) = torch.autograd.grad(f(leaf), leaf)
        torch.testing.assert_close(evaluate(trace, [x])[0], f(x))
        torch.testing.assert_close(evaluate(backward, [x])[0], expected)


def test_a_conjugate_bit_on_an_input() -> None:
    z = torch.complex(X, X.sin())
    trace = capture(torch.view_as_real, (z,)).trace
    torch.testing.assert_close(evaluate(trace, [z.conj()])[0], torch.view_as_real(z.conj().resolve_conj()))


def test_memory_that_a_tensor_does_not_hold_has_no_gradient() -> None:
    gaps = LAYOUTS[2]
    f = lambda x: torch.as_strided(x, (3,), (1,), 0).sum()
    assert torch.equal(evaluate(capture(f, (gaps,)).trace, [gaps])[0], f(gaps))
    with pytest.raises(MissingRule, match="memory that its tensor does not hold"):
        tfn.grad(f)(gaps)


@pytest.mark.parametrize(
    ("size", "stride", "start"), [((2, 1), (1, 1), 0), ((2, 2), (1, 2), None), ((2, 2), (4, 1), 3)]
)
def test_scattering_into_an_expanded_tensor(size: Any, stride: Any, start: int | None) -> None:
    """Eager scatters into a contiguous copy, of which each element is one; what was written to one showed in all."""
    f = lambda x, new: torch.as_strided_scatter(x.expand(3, 3), new, size, stride, start)
    x, new = torch.randn(1, 3), torch.randn(size)
    assert torch.equal(tfn.jit(f)(x, new), f(x, new))


def test_what_eager_demands_of_addresses_and_weights() -> None:
    """Addresses behind a tensor's memory were passed over, and weights of any shape taken."""
    x, int_weights = torch.ones(4, 4), torch.ones(4, dtype=torch.int64)
    for f, message in (
        (lambda x: torch.as_strided_scatter(x, torch.zeros(2, 2), [2, 2], [200, 200]), "out of bounds"),
        (lambda x: torch.cov(x, fweights=int_weights[:1]), "fweights"),
        (lambda x: torch.cov(x, fweights=x[0]), "fweights"),
        (lambda x: torch.cov(x, aweights=int_weights), "aweights"),
        (lambda x: torch.cov(x, aweights=x), "aweights"),
    ):
        for g in (f, tfn.jit(f)):
            with pytest.raises(RuntimeError, match=message):
                g(x)


def test_seeds_are_equations() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            y = torch.nn.functional.dropout(x, 0.5)
        return y + torch.rand(3)

    torch.manual_seed(1)
    expected, after = f(X), torch.get_rng_state()
    for run in (tfn.jit(f), lambda x: evaluate(capture(f, (x,)).trace, [x])[0]):
        torch.manual_seed(1)
        assert torch.equal(run(X), expected)
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("cache", ["constant values", "symbolic values"])
@pytest.mark.parametrize("address", [0, 6])
def test_an_address_is_of_the_memory_of_the_argument(address: int, cache: str) -> None:
    """A `storage_offset` counts from where the memory begins, not the argument, in each call."""
    memory = torch.arange(24.0)
    f = lambda x: x.as_strided((2, 2), (1, 2), address)
    for order in ((0, 5), (5, 0)):
        jitted = tfn.jit(f, cache=cache)
        for begin in order:
            x = memory[begin : begin + 10]
            assert torch.equal(jitted(x), f(x))


ZEROS, AT = torch.zeros(2, 2), ((2, 2), (1, 2), 6)
ADDRESSED = {
    "as_strided_scatter": lambda x: torch.as_strided_scatter(x, ZEROS, *AT),
    "a method": lambda x: x.as_strided_scatter(ZEROS, (2, 2), (1, 2), storage_offset=6),
    "as_strided_copy": lambda x: torch.as_strided_copy(x, *AT),
    "as_strided_": lambda x: x.detach().as_strided_(*AT),
    "an overload": lambda x: torch.ops.aten.as_strided.default(x, *AT),
    "an overload of scatter": lambda x: torch.ops.aten.as_strided_scatter.default(x, ZEROS, *AT),
    "detach": lambda x: x.detach().as_strided(*AT),
    "the beginning": lambda x: x * x.detach().storage_offset(),
    "the beginning of data": lambda x: x * x.view(-1).data[1:].storage_offset(),
}


@pytest.mark.parametrize("f", ADDRESSED.values(), ids=ADDRESSED)
def test_other_functions_take_addresses_alike(f: Any) -> None:
    memory = torch.arange(24.0)
    for order in ((0, 5), (5, 0)):
        jitted = tfn.jit(f)
        for begin in order:
            x = memory[begin : begin + 10]
            assert torch.equal(jitted(x), f(x))


@pytest.mark.parametrize("kept", ("weight", "both"))
@pytest.mark.parametrize("name", ("plain", "strided weight", "strided factors", "strided both"))
def test_results_whose_shapes_depend_on_strides(name: str, kept: str) -> None:
    """What `embedding_bag` keeps for its derivative has other sizes for operands with gaps; autograd is the oracle."""
    bags, starts = torch.tensor([1, 3, 5, 0, 2]), torch.tensor([0, 3])
    weight = torch.randn(6, 10)[:, ::2] if name in ("strided weight", "strided both") else torch.randn(6, 5)
    factors = torch.rand(10)[::2] if name in ("strided factors", "strided both") else torch.rand(5)
    for x in (weight, factors):
        x.requires_grad_()

    def f(weight: torch.Tensor, factors: torch.Tensor = factors) -> torch.Tensor:
        return torch.nn.functional.embedding_bag(bags, weight, starts, mode="sum", per_sample_weights=factors)

    given = (weight, factors) if kept == "both" else (weight,)
    wanted = torch.autograd.grad(f(*given).sin().sum(), given)
    for pull in (tfn.vjp, tfn.jit(lambda *given: tfn.vjp(f, *given)[1](f(*given).cos()))):
        found = pull(f, *given)[1](f(*given).cos()) if pull is tfn.vjp else pull(*given)
        torch.testing.assert_close(found, wanted)
