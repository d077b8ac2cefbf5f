# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # One-step generation: `jvp` through a transformer
#
# MeanFlow trains a network to generate in one step. The network gives the average velocity $u$ between two times $r$ and
# $t$, and its loss needs the derivative of $u$ along the path, $du/dt$. That is one `jvp`, and the network may be a
# transformer: attention has a tangent here.
#
# The data are eight points on a circle, at equal distances. Each circle has a radius and an angle of its own, so no point
# can be placed without looking at the others.

# %%
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn

torch.manual_seed(0)
POINTS, WIDTH, HEADS = 8, 32, 4


def circles(count):
    """Return circles of points, [count, POINTS, 2]."""
    angle = 2 * torch.pi * (torch.arange(POINTS) / POINTS + torch.rand(count, 1))
    return (1 + 0.2 * torch.randn(count, 1, 1)) * torch.stack([angle.cos(), angle.sin()], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Velocity(nn.Module):
    """The average velocity between the times r and t of points that are at z at the time t."""

    def __init__(self):
        super().__init__()
        self.embed, self.times, self.read = nn.Linear(2, WIDTH), nn.Linear(6, WIDTH), nn.Linear(WIDTH, 2)
        self.places = nn.Parameter(torch.randn(POINTS, WIDTH) / 4)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, z, r, t):
        s = torch.stack([t, t - r], -1)
        times = self.times(torch.cat([s, (torch.pi * s).sin(), (torch.pi * s).cos()], -1))
        return self.read(self.blocks(self.embed(z) + self.places + times[:, None]))


# %% [markdown]
# The path from data $x$ to noise $e$ is straight: $z = (1 - t) x + t e$ with the velocity $v = e - x$. Along it the average
# velocity obeys $u = v - (t - r)\, du/dt$. The right-hand side is the target; no gradient goes through it.

# %%
model = Velocity()
params = {name: p.detach().clone() for name, p in model.named_parameters()}


def u(params, z, r, t):
    return tfn.functional_call(model, params, (z, r, t))


def loss(params, x, e, r, t):
    z, v = torch.lerp(x, e, t[:, None, None]), e - x
    velocity, slope = tfn.jvp(lambda *at: u(params, *at), (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = tfn.stop_gradient(v - (t - r)[:, None, None] * slope)
    error = (velocity - target).square().mean((1, 2))
    return (error / tfn.stop_gradient(error + 1e-2).sqrt()).mean()


def drawn(count):
    """Return data, noise and two times in order; half of the pairs are one time twice."""
    t = torch.rand(count, 2).sort(-1, descending=True)[0]
    r = torch.where(torch.rand(count) < 0.5, t[:, 0], t[:, 1])
    return circles(count), torch.randn(count, POINTS, 2), r, t[:, 0]


# %% [markdown]
# In the trace the tangent of attention is one equation. It takes a block of queries at a time, so its memory grows with the
# length of the sequence, and not with its square. So do its gradient and the second derivatives of attention.

# %%
text = str(tfn.trace(loss, params, *drawn(2)))
next(line.strip() for line in text.splitlines() if "attention_tangent" in line)

# %% [markdown]
# The law of every `jvp`: it is the slope of the function along the tangents. In double precision, differences show it.

# %%
wide = {name: p.double() for name, p in params.items()}
x, e, r, t = (one.double() for one in drawn(4))
along = lambda step: u(wide, torch.lerp(x, e, t[:, None, None]) + step * (e - x), r, t + step)
slope = tfn.jvp(along, (torch.tensor(0.0, dtype=torch.float64),), (torch.tensor(1.0, dtype=torch.float64),))[1]
torch.testing.assert_close(slope, (along(1e-5) - along(-1e-5)) / 2e-5, rtol=1e-6, atol=1e-8)

# %% [markdown]
# A training step is one program: the forward, its tangent, the backward and the optimizer.

# %%
optimizer = tfn.functional_optimizer(torch.optim.Adam, lr=4e-3)


@tfn.jit(donate_argnums=(0, 1))
def train_step(params, state, *batch):
    grads, value = tfn.grad_and_value(loss)(params, *batch)
    return *optimizer.update(params, grads, state), value


def roughness(points):
    """Return how far points are from a circle with equal distances, relative to its radius."""
    neighbours = (points - points.roll(1, 1)).norm(dim=-1)
    radii = points.norm(dim=-1)
    return ((neighbours.std(1) + radii.std(1)) / radii.mean(1)).mean().item()


noise = torch.randn(256, POINTS, 2)
generate = tfn.jit(lambda params, e: e - u(params, e, torch.zeros(len(e)), torch.ones(len(e))))
before = roughness(generate(params, noise))
state = optimizer.init(params)
for _ in range(150):
    params, state, value = train_step(params, state, *drawn(64))
after = roughness(generate(params, noise))
print(f"noise {roughness(noise):.2f}, one step before training {before:.2f}, after {after:.2f}")
assert after < 0.8 * before
