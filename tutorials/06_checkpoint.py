# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Memory: what the backward reads
#
# A gradient keeps values of the forward until the backward has read them. They are called **residuals**, and they, not the
# parameters, are what fills a machine. Here is how to see them, and how to trade them for time.

# %%
import torch
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn import checkpoint_name, checkpoint_policies

torch.manual_seed(0)
WIDTH = 64


def block(x, w1, w2):
    hidden = checkpoint_name(F.gelu(x @ w1), "hidden")
    return x + torch.tanh(hidden @ w2)


x, w1, w2 = torch.randn(32, WIDTH), torch.randn(WIDTH, 4 * WIDTH), torch.randn(4 * WIDTH, WIDTH)
for residual in tfn.saved_residuals(block, x, w1, w2):
    print(residual)

# %% [markdown]
# Arguments cost nothing: their caller holds them anyhow. The rest is what a gradient allocates.


# %%
def kept_bytes(f, *args):
    return sum(residual.own_bytes for residual in tfn.saved_residuals(f, *args))


whole = kept_bytes(block, x, w1, w2)
print(f"{whole:,} bytes")

# %% [markdown]
# ## checkpoint
#
# `checkpoint` keeps nothing but the operands, and computes the rest again when the backward asks. The gradient is the same,
# to the last bit.


# %%
def loss(block):
    return lambda x, w1, w2: block(x, w1, w2).square().sum()


remat = tfn.checkpoint(block)
assert kept_bytes(remat, x, w1, w2) == 0
gradients = tfn.grad(loss(block), argnums=(0, 1, 2))(x, w1, w2)
again = tfn.grad(loss(remat), argnums=(0, 1, 2))(x, w1, w2)
assert all(map(torch.equal, gradients, again))

# %% [markdown]
# In the trace it is an equation like any other, and the backward is one too: a `checkpoint` whose body computes the hidden
# values before it pulls back. So no other transform can merge the two by mistake.

# %%
trace = tfn.trace(tfn.grad(loss(remat), argnums=(1, 2)), x, w1, w2)
print(trace)
assert str(trace).count("policy=nothing_saveable") == 2
assert str(trace).count("aten.gelu.default(") == 2  # computed twice: that is the price

# %% [markdown]
# ## Policies
#
# Between all and nothing there is a choice, and a policy makes it: by op, by the names that `checkpoint_name` has given, or
# by a budget in bytes, for which the cheapest values to compute again are found.

# %%
policies = {
    "everything": checkpoint_policies.everything_saveable,
    "matrix products": checkpoint_policies.matmuls_saveable,
    "'hidden'": checkpoint_policies.save_only_these_names("hidden"),
    "40,000 bytes": checkpoint_policies.budget(40_000),
    "nothing": checkpoint_policies.nothing_saveable,
}
table = {}
for name, policy in policies.items():
    f = tfn.checkpoint(block, policy=policy)
    table[name] = kept_bytes(f, x, w1, w2)
    matmuls = str(tfn.trace(tfn.grad(loss(f), argnums=(0, 1, 2)), x, w1, w2)).count("aten.mm.default(")
    print(f"{name:<16}{table[name]:>10,} bytes  {matmuls} matrix products")
    assert torch.equal(tfn.grad(loss(f), argnums=1)(x, w1, w2), gradients[1])
assert table["everything"] == whole and table["nothing"] == 0
assert table["'hidden'"] == 32 * 4 * WIDTH * 4
assert table["40,000 bytes"] <= 40_000

# %% [markdown]
# ## Loops
#
# A scan keeps the residuals of every step. `checkpoint="sqrt"` cuts n steps into runs of about the square root of n, keeps
# the carry at each run's start, and computes a run again when the backward comes to it.


# %%
def recurrent(checkpoint):
    def f(w, h):
        step = lambda h, _: (torch.sin(h @ w), None)
        return tfn.scan(step, h, length=400, checkpoint=checkpoint)[0].sum()

    return f


w, h = torch.randn(8, 8) / 4, torch.ones(8)
plain, rooted = (kept_bytes(recurrent(choice), w, h) for choice in (None, "sqrt"))
print(f"400 steps: {plain:,} bytes, with sqrt {rooted:,}")
assert rooted < plain / 20
torch.testing.assert_close(tfn.grad(recurrent("sqrt"))(w, h), tfn.grad(recurrent(None))(w, h))

# %% [markdown]
# ## What must not hold
#
# A mask of dropout that is drawn again would be another mask, and the gradient wrong without a word. Random equations never
# run again: what they drew is kept, whatever the policy says.

# %%
dropped = tfn.checkpoint(lambda x: F.dropout(torch.sin(x), 0.5))
value, pullback = tfn.vjp(dropped, x)
(gradient,) = pullback(torch.ones_like(x))
torch.testing.assert_close(gradient, torch.where(value != 0, 2 * torch.cos(x), 0.0))
assert kept_bytes(dropped, x) > 0

# %% [markdown]
# ## Where this lives
#
# `thunder_fn/structured/checkpoint.py`, `policies.py`, and `remat.py` for the minimum cut behind budgets;
# `thunder_fn/api/residuals.py`.
