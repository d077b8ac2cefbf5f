# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Hello, compile
#
# `compile` takes a model and gives back a model: same class, same parameters, same results, faster. Nothing has to be
# decided, and nothing else in a program changes.

# %%
import copy

import torch
from torch import nn

import thunder_fn as tfn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
eager = copy.deepcopy(model)
compiled = tfn.compile(model)

assert isinstance(compiled, nn.Sequential)
assert list(compiled.state_dict()) == list(eager.state_dict())

# %% [markdown]
# The usual training loop trains it. `compile` says what it does:

# %%
print(tfn.Recipe().explain(model))

x, y = torch.randn(64, 8), torch.randn(64, 1)
losses = []
optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
for _ in range(20):
    loss = nn.functional.mse_loss(compiled(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0]

# %% [markdown]
# The model and the compiled one are one: they share their state, so a checkpoint goes in and out under the user's names, and
# `train` and `eval` mean what they mean.

# %%
assert torch.equal(model[0].weight, compiled[0].weight)
eager.load_state_dict(compiled.state_dict())
torch.testing.assert_close(compiled.eval()(x), eager.eval()(x))

# %% [markdown]
# What compilers do to sums is a matter of rounding. `numerics="bitwise"` uses nothing that does, and then five steps of
# training are those of eager PyTorch to the last bit.

# %%


def parameters_after(model, steps=5):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


exact = tfn.compile(copy.deepcopy(eager), numerics="bitwise")
assert all(map(torch.equal, parameters_after(exact), parameters_after(copy.deepcopy(eager))))

# %% [markdown]
# What must not happen is a wrong number. A program holds for what was read while it was traced; a changed attribute is
# another program, not an old result.

# %%
with_dropout = tfn.compile(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), executors="torch")
with_dropout(x)
with_dropout[1].p = 1.0
assert not with_dropout(x).any()
assert tfn.cache_info(with_dropout).misses == 2

# %% [markdown]
# In the code: `thunder_fn/recipes/entry.py` is `compile`, `thunder_fn/jitted/modules/module.py` the module that comes back.
