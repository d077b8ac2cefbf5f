"""A neural ODE: a vector field is learned from the curves that follow it.

The solver is one `scan` over time. The gradient goes through it, and `vmap` solves for all starts at once.
"""

import torch
from torch import nn

import thunder_fn as tfn

SPIRAL = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])


def solve(field, start, times):
    """Return the curve from `start` at `times`, by Runge-Kutta of fourth order."""

    def step(y, dt):
        k1 = field(y)
        k2 = field(y + dt / 2 * k1)
        k3 = field(y + dt / 2 * k2)
        k4 = field(y + dt * k3)
        y = y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return y, y

    return tfn.scan(step, start, times.diff())[1]


def main(steps=600, curves=16, points=40):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 2))
    params = {name: p.detach() for name, p in model.named_parameters()}
    times = torch.linspace(0, 2.5, points)
    starts = 4 * torch.rand(curves, 2) - 2
    observed = tfn.vmap(lambda y: solve(lambda y: y**3 @ SPIRAL, y, times))(starts)

    def predict(params, start):
        return solve(lambda y: tfn.functional_call(model, params, (y**3,)), start, times)

    def loss(params):
        return (tfn.vmap(predict, (None, 0))(params, starts) - observed).abs().mean()

    optimizer = tfn.functional_optimizer(torch.optim.Adam, lr=1e-2)

    @tfn.jit(donate_argnums=(0, 1))
    def train_step(params, state):
        value, grads = tfn.value_and_grad(loss)(params)
        return *optimizer.update(params, grads, state), value

    state, losses = optimizer.init(params), []
    for _ in range(steps):
        params, state, value = train_step(params, state)
        losses.append(value.item())
    learned = lambda y: tfn.functional_call(model, params, (y**3,))
    unseen, fine = torch.tensor([1.8, 0.3]), torch.linspace(0, 5, 8 * points)
    curves = [solve(field, unseen, fine) for field in (lambda y: y**3 @ SPIRAL, learned)]
    return {"losses": losses, "observed": observed, "curves": curves, "field": learned}


if __name__ == "__main__":
    result = main()
    print(f"error {result['losses'][0]:.3f} -> {result['losses'][-1]:.3f}")
