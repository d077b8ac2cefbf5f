"""A force field: a network learns an energy from forces, and atoms move in it.

Forces are the gradient of the energy in positions, so training takes a gradient of a gradient. The dynamics afterwards are
a `scan` of the same function, and conserve energy, because their forces are a gradient.
"""

import torch
from torch import nn

import thunder_fn as tfn

ATOMS = 7
FIRST, SECOND = torch.triu_indices(ATOMS, ATOMS, 1)
HEXAGON = torch.stack([f(torch.arange(6) * torch.pi / 3) for f in (torch.cos, torch.sin)], 1)
REST = 1.1 * torch.cat([torch.zeros(1, 2), HEXAGON])


def distances(positions):
    return (positions[FIRST] - positions[SECOND]).square().sum(-1).sqrt()


def morse(positions):
    """Return the energy that is to be learned."""
    return ((1 - torch.exp(-2 * (distances(positions) - 1.1))) ** 2 - 1).sum()


class PairEnergy(nn.Module):
    """A sum over pairs of a learned function of their distance."""

    def __init__(self, width=24):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0.6, 3.2, width))
        self.net = nn.Sequential(nn.Linear(width, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, positions):
        return self.net(torch.exp(-10 * (distances(positions)[:, None] - self.centers) ** 2)).sum()


def forces(energy):
    return lambda positions: -tfn.grad(energy)(positions)


def move(energy, positions, velocities, steps, dt=0.02):
    """Return the potential and the kinetic energy after each step of velocity Verlet."""

    def step(state, _):
        x, v = state
        v = v + dt / 2 * forces(energy)(x)
        x = x + dt * v
        v = v + dt / 2 * forces(energy)(x)
        return (x, v), (energy(x), v.square().sum() / 2)

    return tfn.scan(step, (positions, velocities), None, length=steps)[1]


def main(steps=400, count=64, frames=600):
    torch.manual_seed(0)
    model = PairEnergy()
    params = {name: p.detach() for name, p in model.named_parameters()}
    energy = lambda params: lambda x: tfn.functional_call(model, params, (x,))
    positions = REST + 0.12 * torch.randn(2 * count, ATOMS, 2)
    truth = tfn.vmap(forces(morse))(positions)

    def loss(params, positions, truth):
        return (tfn.vmap(forces(energy(params)))(positions) - truth).abs().mean()

    optimizer = tfn.functional_optimizer(torch.optim.Adam, lr=5e-3)

    @tfn.jit(donate_argnums=(0, 1))
    def train_step(params, state, positions, truth):
        value, grads = tfn.value_and_grad(loss)(params, positions, truth)
        return *optimizer.update(params, grads, state), value

    state, losses = optimizer.init(params), []
    for _ in range(steps):
        params, state, value = train_step(params, state, positions[:count], truth[:count])
        losses.append(value.item())
    predicted = tfn.vmap(forces(energy(params)))(positions[count:])
    run = tfn.jit(lambda params, v: move(energy(params), REST, v, frames))
    energies = run(params, 0.25 * torch.randn(ATOMS, 2))
    return {"losses": losses, "forces": (truth[count:], predicted), "energies": energies}


if __name__ == "__main__":
    result = main()
    total = sum(result["energies"])
    print(f"error of forces {result['losses'][0]:.3f} -> {result['losses'][-1]:.3f}, energy moves by {total.std():.4f}")
