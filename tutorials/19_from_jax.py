# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # For users of JAX
#
# The model is yours: a function becomes a trace (your jaxpr), and `grad`, `vmap` and `jit` are functions on functions that
# compose. The programs are PyTorch's. Each cell is a JAX habit; where JAX is installed, results are compared with it.

# %%
import importlib.util
import os

import torch
from torch.nn import functional as F

import thunder_fn as tfn

torch.manual_seed(0)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
HAS_JAX = importlib.util.find_spec("jax") is not None
if HAS_JAX:
    import jax
    import jax.numpy as jnp


def agree(ours, theirs):
    for a, b in zip(ours if isinstance(ours, tuple) else (ours,), jax.tree.leaves(theirs), strict=True):
        torch.testing.assert_close(a, torch.tensor(b), atol=1e-5, rtol=1e-5)


# %% [markdown]
# `docs/coming_from.md` has the names side by side. `jit` takes the same options (`static_argnums`,
# `static_argnames`, `donate_argnums`); `debug.callback`, `pure_callback`, `custom_vjp`, `custom_jvp` and `custom_vmap` keep
# their names. `tfn.debug.check(p, text)` is `checkify.check`. Pytrees are tuples, lists, dicts, dataclasses and modules' outputs.

# %%
f = lambda x: (torch.sin(x) * x).sum()
x = torch.linspace(0, 1, 4)
print(tfn.trace(tfn.grad(f), x))
value, gradient = tfn.value_and_grad(f)(x)
if HAS_JAX:
    agree((value, gradient), jax.value_and_grad(lambda x: (jnp.sin(x) * x).sum())(jnp.array(x.numpy())))

# %% [markdown]
# ## Loops


# %%
def cumulative(scan, exp, xs):
    return scan(lambda total, x: (total + exp(x), total), xs[0] * 0, xs)


ours = cumulative(tfn.scan, torch.exp, x)
if HAS_JAX:
    agree(ours, cumulative(jax.lax.scan, jnp.exp, jnp.array(x.numpy())))

# %% [markdown]
# A `while_loop` has reverse mode here, which JAX's has not.


# %%
def newton_root(a):
    step = lambda y, n: ((y + a / y) / 2, n + 1)
    return tfn.while_loop(lambda y, n: ((y * y - a).abs() > 1e-6) & (n < 50), step, (a, torch.tensor(0)))[0]


two = torch.tensor(2.0)
torch.testing.assert_close(newton_root(two), two.sqrt())
torch.testing.assert_close(tfn.grad(newton_root)(two), 0.5 / two.sqrt())
torch.testing.assert_close(tfn.vmap(tfn.grad(newton_root))(x + 2), 0.5 / (x + 2).sqrt())

# %% [markdown]
# ## A rule of your own


# %%
@tfn.custom_vjp
def clipped(x):
    return x * 1


clipped.defvjp(lambda x: (x * 1, None), lambda residuals, ct: (ct.clamp(-1, 1),))
assert tfn.grad(lambda x: (10 * clipped(x)).sum())(x).tolist() == [1, 1, 1, 1]

# %% [markdown]
# ## Models and optimizers
#
# An `nn.Module` is a function of its parameters by `functional_call`, and any `torch.optim` optimizer is a pair of functions,
# `init` and `update`. The step is one pure function, donated and jitted, as you know it.

# %%
model = torch.nn.Linear(4, 2)
params = {name: p.detach().clone() for name, p in model.named_parameters()}
optimizer = tfn.functional_optimizer(torch.optim.Adam, lr=0.05)


def loss(params, x, y):
    return F.mse_loss(tfn.functional_call(model, params, (x,)), y)


@tfn.jit(donate_argnums=(0, 1))
def train_step(params, state, x, y):
    value, grads = tfn.value_and_grad(loss)(params, x, y)
    params, state = optimizer.update(params, grads, state)
    return params, state, value


state, batch = optimizer.init(params), (torch.randn(8, 4), torch.randn(8, 2))
values = []
for _ in range(20):
    params, state, value = train_step(params, state, *batch)
    values.append(value.item())
assert values[-1] < values[0]

# %% [markdown]
# ## What is PyTorch's here
#
# - In-place code works and is traced to pure equations: no `x.at[i].set(v)`.
# - Types promote, and 64-bit numbers are there, as in PyTorch.
# - Random ops draw from PyTorch's generator. A jitted function draws new numbers at each call, the numbers that eager draws.
#   Keys are there too: `tfn.random` draws the same numbers on every device and under every transform.
# - Gradients of complex numbers follow PyTorch's convention, which is the conjugate of JAX's.
# - Shapes may change: what differs between calls becomes a symbol (tutorial 17).


# %%
def mask(x):
    y = x.clone()
    y[1:] = 0
    return y


assert tfn.jit(mask)(x + 1).tolist() == [1, 0, 0, 0]
draw = tfn.jit(lambda: torch.rand(2))
torch.manual_seed(1)
first = draw()
torch.manual_seed(1)
assert torch.equal(first, torch.rand(2)) and not torch.equal(first, draw())

keys = tfn.random.split(tfn.random.key(0), 4)
noise = tfn.vmap(lambda key: tfn.random.normal(key, (2,)))(keys)
assert torch.equal(noise[1], tfn.random.normal(keys[1], (2,)))

z = torch.tensor(1 + 2j)
ours = tfn.grad(lambda z: (z * z).real)(z)
if HAS_JAX:
    agree(ours.conj().resolve_conj(), jax.grad(lambda z: (z * z).real)(jnp.array(1 + 2j)))

# %% [markdown]
# ## What must not hold
#
# A donated argument is gone, as in JAX, and says so.

# %%
used = torch.ones(3)
tfn.jit(lambda x: x + 1, donate_argnums=0)(used)
try:
    used + 1
except tfn.errors.DonatedTensorError as error:
    print(error)
else:
    raise AssertionError("it must not")

# %% [markdown]
# ## Where this lives
#
# `thunder_fn/api/` and `thunder_fn/structured/`, one file for each name.
