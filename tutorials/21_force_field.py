# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # A force field
#
# A model of atoms predicts an energy. Forces are its negative gradient, and a model is trained on forces: so each step of
# training takes the gradient, in the parameters, of a gradient in the positions. Here that is one trace like any other.

# %%
import torch
from torch import nn

import thunder_fn as tfn

torch.manual_seed(0)
ATOMS, CUTOFF = 6, 3.0
FIRST, SECOND = torch.triu_indices(ATOMS, ATOMS, 1)


def distances(positions):
    return (positions[FIRST] - positions[SECOND]).square().sum(-1).sqrt()


class PairEnergy(nn.Module):
    """A sum over pairs of a learned function of their distance, which goes to zero smoothly at the cutoff."""

    def __init__(self, width=16):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0.8, CUTOFF, width))
        self.net = nn.Sequential(nn.Linear(width, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, positions):
        r = distances(positions)
        basis = torch.exp(-4 * (r[:, None] - self.centers) ** 2)
        switch = torch.where(r < CUTOFF, 0.5 * (1 + torch.cos(torch.pi * r / CUTOFF)), torch.zeros_like(r))
        return (self.net(basis)[:, 0] * switch).sum()


model = PairEnergy().double()
params = {name: p.detach().clone() for name, p in model.named_parameters()}
buffers = dict(model.named_buffers())


def energy(params, positions):
    return tfn.functional_call(model, (params, buffers), (positions,))


def forces(params, positions):
    return -tfn.grad(energy, argnums=1)(params, positions)


# %% [markdown]
# Before anything is trained, physics can be checked: forces are the slopes of the energy, they turn with the atoms, and
# they add up to nothing.

# %%
grid = torch.cartesian_prod(torch.arange(3.0), torch.arange(2.0), torch.zeros(1)).double()
example = 1.2 * grid + 0.1 * torch.randn(ATOMS, 3, dtype=torch.float64)
f = forces(params, example)
step = torch.zeros_like(example)
step[2, 1] = 1e-5
slope = (energy(params, example + step) - energy(params, example - step)) / 2e-5
torch.testing.assert_close(-slope, f[2, 1])
rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
torch.testing.assert_close(forces(params, example @ rotation), f @ rotation)
torch.testing.assert_close(f.sum(0), torch.zeros(3, dtype=torch.float64))

# %% [markdown]
# ## Data
#
# The truth is a Morse potential, whose forces are also a gradient, and the examples are many at once by `vmap`.


# %%
def morse(positions):
    well = 1 - torch.exp(-1.5 * (distances(positions) - 1.3))
    return (well**2 - 1).sum()


def configurations(count):
    return 1.2 * grid + 0.1 * torch.randn(count, ATOMS, 3, dtype=torch.float64)


positions = configurations(32)
true_forces = -tfn.vmap(tfn.grad(morse))(positions)
true_energies = tfn.vmap(morse)(positions)

# %% [markdown]
# ## Training on forces
#
# Gradient in positions, batch, loss, gradient in parameters, optimizer: one function, jitted once. Nothing in it knows that
# the derivative is a second one. (With `executors=["inductor"]` the same step runs as compiled C++, after some seconds of
# compiling.)


# %%
def loss(params, positions, true_forces, true_energies):
    predicted = tfn.vmap(forces, (None, 0))(params, positions)
    energies = tfn.vmap(energy, (None, 0))(params, positions)
    return (predicted - true_forces).square().mean() + 0.01 * (energies - true_energies).square().mean()


optimizer = tfn.functional_optimizer(torch.optim.Adam, lr=1e-2)


@tfn.jit(donate_argnums=(0, 1))
def train_step(params, state, *batch):
    value, grads = tfn.value_and_grad(loss)(params, *batch)
    params, state = optimizer.update(params, grads, state)
    return params, state, value


batch = (positions, true_forces, true_energies)
print(f"{len(tfn.interpreters.simplify.inline(tfn.trace(tfn.grad(loss), params, *batch)).equations)} equations")

# %% [markdown]
# The gradient is that of plain PyTorch with `create_graph=True`, one configuration after the other.


# %%
def by_autograd(params):
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    total_forces, energies = [], []
    for one in positions:
        one = one.clone().requires_grad_()
        e = torch.func.functional_call(model, (leaves, buffers), (one,))
        total_forces.append(-torch.autograd.grad(e, one, create_graph=True)[0])
        energies.append(e)
    value = (torch.stack(total_forces) - true_forces).square().mean()
    value = value + 0.01 * (torch.stack(energies) - true_energies).square().mean()
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))


expected = by_autograd(params)
for name, gradient in tfn.jit(tfn.grad(loss))(params, *batch).items():
    torch.testing.assert_close(gradient, expected[name])

# %%
state, values = optimizer.init(params), []
for _ in range(200):
    params, state, value = train_step(params, state, *batch)
    values.append(value.item())
print(f"loss {values[0]:.3f} -> {values[-1]:.4f}")
assert values[-1] < values[0] / 20

fresh = configurations(16)
predicted, truth = tfn.vmap(forces, (None, 0))(params, fresh), -tfn.vmap(tfn.grad(morse))(fresh)
print(f"unseen forces: off by {(predicted - truth).square().mean().sqrt():.3f}, of {truth.square().mean().sqrt():.3f}")
assert (predicted - truth).square().mean() < 0.1 * truth.square().mean()

# %% [markdown]
# ## One derivative more
#
# Vibrations are the eigenvalues of the Hessian of the energy. A rigid motion costs nothing: at a minimum six of them are
# zero. The Hessian is a trace again, and jits.

# %%
relaxed = example
relax = tfn.jit(lambda p: p - 0.02 * tfn.grad(morse)(p))
for _ in range(600):
    relaxed = relax(relaxed)
hessian = tfn.jit(tfn.hessian(morse))(relaxed).reshape(3 * ATOMS, 3 * ATOMS)
modes = torch.linalg.eigvalsh(hessian)
print(modes)
assert (modes[:6].abs() < 1e-3).all() and (modes[6:] > 0.1).all()

# %% [markdown]
# ## What must not hold
#
# The distance of an atom to itself has no slope. A model that sums over all pairs, itself included, gets forces that are NaN.
# Leave those pairs out, as `FIRST` and `SECOND` do; masking the energy afterwards is too late.


# %%
def masked(positions):
    r = (positions[:, None] - positions[None]).square().sum(-1).sqrt()
    return torch.where(torch.eye(ATOMS, dtype=torch.bool), torch.zeros_like(r), torch.exp(-r)).sum()


assert masked(example).isfinite() and tfn.grad(masked)(example).isnan().any()

# %% [markdown]
# ## Where this lives
#
# `thunder_fn/derived/leaf_vjp.py`: rules come from PyTorch's formulas, and a rule is a trace, which is why it has a gradient too.
