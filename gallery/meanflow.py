"""MeanFlow: a generative model that needs one step, because it learns average velocities.

The average u over [r, t] obeys u = v - (t - r) du/dt. The total derivative along the path is one `jvp`, which costs one
forward pass; the gradient for the optimizer goes over it.

Source: Geng et al., Mean flows for one-step generative modeling (2025), algorithm 1.
"""

import torch
from torch import nn

import thunder_fn as tfn


def pinwheel(count):
    """Return points on five bent arms, [count, 2]."""
    arm = 2 * torch.pi / 5 * torch.randint(5, (count,))
    radial, across = 1 + 0.28 * torch.randn(count), 0.06 * torch.randn(count)
    angle = arm + 0.9 * radial.exp() / 2.7
    return 1.4 * torch.stack(
        [radial * angle.cos() - across * angle.sin(), radial * angle.sin() + across * angle.cos()], 1
    )


class Velocity(nn.Module):
    """The average velocity between the times r and t of a point that is at z at the time t."""

    def __init__(self, width=128):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(10, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()),
            *(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)),
        )

    def forward(self, z, r, t):
        times = torch.stack([r, t, t - r, *(f(torch.pi * s) for f in (torch.sin, torch.cos) for s in (t, t - r))], -1)
        return self.net(torch.cat([z, times, times[..., 2:3] ** 2], -1))


def main(steps=5000, batch=256, count=2000):
    torch.manual_seed(0)
    model = Velocity()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def u(params, z, r, t):
        return tfn.functional_call(model, params, (z, r, t))

    def loss(params, data, noise, r, t):
        z, v = torch.lerp(data, noise, t[:, None]), noise - data
        velocity, slope = tfn.jvp(
            lambda z, r, t: u(params, z, r, t), (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t))
        )
        target = tfn.stop_gradient(v - (t - r)[:, None] * slope)
        error = (velocity - target).square().sum(1)
        return (error / tfn.stop_gradient(error + 1e-2).sqrt()).mean()

    optimizer = tfn.functional_optimizer(torch.optim.Adam, lr=1e-3)

    @tfn.jit(donate_argnums=(0, 1, 2))
    def train_step(params, state, average, data, noise, times):
        r, t = times.amin(0), times.amax(0)
        r = torch.where(torch.arange(len(r)) % 2 == 0, t, r)  # half of the batch learns the velocity itself
        value, grads = tfn.value_and_grad(loss)(params, data, noise, r, t)
        params, state = optimizer.update(params, grads, state)
        return params, state, {name: torch.lerp(average[name], p, 0.005) for name, p in params.items()}, value

    state, losses, average = optimizer.init(params), [], {name: p.clone() for name, p in params.items()}
    for _ in range(steps):
        examples = pinwheel(batch), torch.randn(batch, 2), torch.rand(2, batch)
        params, state, average, value = train_step(params, state, average, *examples)
        losses.append(value.item())
    noise = torch.randn(count, 2)
    at = lambda time: noise - (1 - time) * u(average, noise, torch.full((count,), time), torch.ones(count))
    return {"losses": losses, "data": pinwheel(count), "noise": noise, "halfway": at(0.5), "samples": at(0.0)}


if __name__ == "__main__":
    result = main()
    print(f"loss {result['losses'][0]:.2f} -> {result['losses'][-1]:.2f}")
