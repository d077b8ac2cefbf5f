# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Batches: vmap
#
# Write a function of one example; `vmap` makes it a function of many. It is a transform of the trace, so it reads like what
# it did: each equation got a batch dim.

# %%
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn

torch.manual_seed(0)


def affine(w, b, x):
    return w @ x + b


w, b, xs = torch.randn(3, 4), torch.randn(3), torch.randn(5, 4)
print(tfn.trace(affine, w, b, xs[0]))
print(tfn.trace(tfn.vmap(affine, (None, None, 0)), w, b, xs))

# %% [markdown]
# `in_dims` says where the batch is: `None` for what all examples share. The law of `vmap` is that it is a loop.

# %%
batched = tfn.vmap(affine, (None, None, 0))(w, b, xs)
torch.testing.assert_close(batched, torch.stack([affine(w, b, x) for x in xs]))
assert tfn.vmap(affine, (None, None, 0), out_dims=1)(w, b, xs).shape == (3, 5)
assert tfn.vmap(tfn.vmap(torch.dot, (None, 0)), (0, None))(xs, xs).shape == (5, 5)  # all pairs

# %% [markdown]
# What does not depend on the batch is computed once: the product of shared arguments stays a matrix.

# %%
shared = tfn.trace(tfn.vmap(lambda w, x: (w @ w.t()) @ x, (None, 0)), torch.randn(4, 4), xs)
print(shared)
assert str(shared).count("f32[5, 4, 4]") == 0

# %% [markdown]
# ## A gradient for each example
#
# `vmap` of `grad` is the gradient of each example, which a sum over the batch hides. No hook and no second backward is
# needed. Differentially private training clips these.

# %%
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
params = {name: p.detach() for name, p in model.named_parameters()}
labels = torch.randint(0, 3, (5,))


def loss(params, x, y):
    return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)


per_sample = tfn.jit(tfn.vmap(tfn.grad(loss), (None, 0, 0)))(params, xs, labels)
assert per_sample["0.weight"].shape == (5, 8, 4)
whole = tfn.grad(lambda params: loss(params, xs, labels))(params)
for name, gradients in per_sample.items():
    torch.testing.assert_close(gradients.mean(0), whole[name])

norms = sum(g.flatten(1).square().sum(1) for g in per_sample.values()).sqrt()
print(norms)

# %% [markdown]
# ## An ensemble is a batch of models
#
# Stack the parameters and batch over them.

# %%
models = [nn.Linear(4, 3) for _ in range(6)]
stacked, _ = tfn.stack_module_state(models)
ensemble = tfn.vmap(lambda params, x: tfn.functional_call(models[0], params, (x,)), (0, None))(stacked, xs)
assert ensemble.shape == (6, 5, 3)
torch.testing.assert_close(ensemble[2], models[2](xs))

# %% [markdown]
# ## Jacobians
#
# A Jacobian is a batch of pullbacks, one for each output, or of pushforwards, one for each input; a Hessian is one in the
# other.

# %%
f = lambda x: torch.tanh(w @ x)
torch.testing.assert_close(tfn.jacrev(f)(xs[0]), tfn.jacfwd(f)(xs[0]))
many = tfn.vmap(tfn.hessian(lambda x: f(x).square().sum()))(xs)
assert many.shape == (5, 4, 4)
torch.testing.assert_close(many, many.transpose(1, 2))

# %% [markdown]
# ## What must not hold
#
# Random numbers under `vmap` could be the same for all examples or not. One has to say which, and sizes have to agree.

# %%
noisy = lambda x: x + torch.randn_like(x)
for wrong in (lambda: tfn.vmap(noisy)(xs), lambda: tfn.vmap(torch.dot)(xs, torch.randn(4, 4))):
    try:
        wrong()
    except tfn.errors.VmapError as error:
        print(error, end="\n\n")
    else:
        raise AssertionError("it must not")
same = tfn.vmap(noisy, randomness="same")(torch.zeros(5, 4))
different = tfn.vmap(noisy, randomness="different")(torch.zeros(5, 4))
assert torch.equal(same[0], same[1]) and not torch.equal(different[0], different[1])

# %% [markdown]
# ## Where this lives
#
# The interpreter: `thunder_fn/interpreters/vmap.py`. The rules, which come from PyTorch's own: `derived/leaf_vmap.py`. The
# function on functions: `api/batching.py`. The next tutorial batches loops and choices.
