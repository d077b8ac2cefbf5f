"""`torch.distributions` inside jitted functions, beside eager PyTorch: draws, densities and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributions as D
from torch import Tensor

import thunder_fn as tfn

EYE = torch.eye(3)
CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "Beta": lambda x: D.Beta(x.exp(), 2.0).rsample(),
    "Categorical": lambda x: D.Categorical(logits=x).entropy(),
    "Dirichlet": lambda x: D.Dirichlet(x.exp()).rsample(),
    "Gamma": lambda x: D.Gamma(x.exp(), 1.0).rsample(),
    "kl of MultivariateNormal": lambda x: D.kl_divergence(
        D.MultivariateNormal(x, EYE * x[0].exp()), D.MultivariateNormal(torch.zeros(3), EYE)
    ),
    "MixtureSameFamily": lambda x: D.MixtureSameFamily(D.Categorical(logits=x), D.Normal(x, 1.0)).log_prob(x[0]),
    "MultivariateNormal": lambda x: D.MultivariateNormal(x, EYE * x[0].exp() + x.outer(x)).rsample(),
    "RelaxedOneHotCategorical": lambda x: D.RelaxedOneHotCategorical(torch.tensor(0.5), logits=x).rsample(),
    "StudentT": lambda x: D.StudentT(x.exp() + 2).rsample(),
    "TransformedDistribution": lambda x: D.TransformedDistribution(D.Normal(x, 1.0), [D.SigmoidTransform()]).rsample(),
    "VonMises": lambda x: D.VonMises(x, x.exp()).log_prob(x),
    "Wishart": lambda x: D.Wishart(torch.tensor(4.0), EYE * x[0].exp()).log_prob(EYE * 2),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_eagers(name: str) -> None:
    """Draws and gradients, with the same random numbers."""

    def of(f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None]:
        torch.manual_seed(0)
        leaf = torch.linspace(-1, 1, 3, dtype=torch.float32, requires_grad=True)
        result = f(leaf)
        result.sum().backward()
        return result.detach(), leaf.grad

    torch.testing.assert_close(of(tfn.jit(CASES[name])), of(CASES[name]), rtol=1e-5, atol=1e-6)


HELD: dict[str, tuple[Callable[[], D.Distribution], Callable[[D.Distribution, Tensor], Tensor]]] = {
    "Normal": (lambda: D.Normal(torch.zeros(3), torch.ones(3)), lambda d, x: d.log_prob(x)),
    "Bernoulli": (lambda: D.Bernoulli(logits=torch.zeros(3)), lambda d, x: d.probs * x),
    "Categorical": (lambda: D.Categorical(probs=torch.ones(3)), lambda d, x: d.logits * x + d.entropy()),
    "MultivariateNormal": (
        lambda: D.MultivariateNormal(torch.zeros(3), covariance_matrix=EYE * 2),
        lambda d, x: d.precision_matrix @ x + d.log_prob(x),
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_distributions_from_outside_are_guarded(name: str) -> None:
    """Values that a distribution computes once and keeps are no tracers afterwards; a new parameter is seen."""
    make, use = HELD[name]
    held, x = make(), torch.linspace(-1, 1, 3)
    jitted = tfn.jit(lambda x: use(held, x))
    for _ in range(2):
        torch.testing.assert_close(jitted(x), use(make(), x))
    torch.testing.assert_close(use(held, x), use(make(), x))
    if name == "Normal":
        held.loc = held.loc + 1
        torch.testing.assert_close(jitted(x), use(held, x))
