# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # For users of torch.func
#
# `grad`, `grad_and_value`, `vjp`, `jvp`, `linearize`, `vmap`, `jacrev`, `jacfwd`, `hessian`, `functional_call`,
# `functionalize` and `stack_module_state` are here under their names, with the signatures of `torch.func`. Change the import.

# %%
import inspect

import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn

torch.manual_seed(0)
NAMES = ("grad", "grad_and_value", "vjp", "jvp", "vmap", "jacrev", "jacfwd", "hessian", "functional_call")
for name in NAMES:
    theirs = list(inspect.signature(getattr(torch.func, name)).parameters)
    ours = list(inspect.signature(getattr(tfn, name)).parameters)
    print(f"{name:<16} torch.func{theirs}  tfn{ours}")

# %% [markdown]
# The same program with either:


# %%
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
params = {name: p.detach() for name, p in model.named_parameters()}
xs, ys = torch.randn(6, 4), torch.randn(6, 1)


def per_sample_gradients(library):
    def loss(params, x, y):
        return F.mse_loss(library.functional_call(model, params, (x,)), y)

    return library.vmap(library.grad(loss), (None, 0, 0))(params, xs, ys)


for ours, theirs in zip(per_sample_gradients(tfn).values(), per_sample_gradients(torch.func).values(), strict=True):
    torch.testing.assert_close(ours, theirs)

# %% [markdown]
# Order of results, `has_aux`, `argnums`, `in_dims`, `out_dims`, `randomness` and `chunk_size` mean what they mean there.

# %%
f = lambda x: ((x**3).sum(), x.mean())
for ours, theirs in zip(
    torch.utils._pytree.tree_leaves(tfn.grad_and_value(f, has_aux=True)(xs)),
    torch.utils._pytree.tree_leaves(torch.func.grad_and_value(f, has_aux=True)(xs)),
    strict=True,
):
    torch.testing.assert_close(ours, theirs)

# %% [markdown]
# ## What is different: transforms make traces
#
# `torch.func` runs a program on wrapped tensors. thunder_fn traces it, and a transform is a function of the trace. So the
# result can be read, and be compiled as a whole.

# %%
step = tfn.jit(tfn.vmap(tfn.grad(lambda w, x: torch.tanh(w @ x).sum()), (None, 0)))
step(torch.randn(3, 4), xs)
print(tfn.last_traces(step)[0])
assert torch.equal(tfn.jit(step)(torch.ones(3, 4), xs), step(torch.ones(3, 4), xs))  # jit of jit is jit

# %% [markdown]
# ## What is new: control flow
#
# `torch.func` does not go through PyTorch's `cond`, `scan` and `while_loop`. Here they are equations, with rules for all
# transforms.


# %%
def clipped_power(x, n):
    """x ** n by repeated products, as long as it stays small."""
    return tfn.while_loop(
        lambda i, p: (i < n) & (p.abs() < 100), lambda i, p: (i + 1, p * x), (n * 0, torch.ones_like(x))
    )[1]


x, n = torch.tensor([1.5, 3.0, 0.5]), torch.tensor([4, 9, 2])
powers = tfn.vmap(clipped_power)(x, n)
slopes = tfn.vmap(tfn.grad(clipped_power))(x, n)  # each example has its own number of steps
torch.testing.assert_close(powers, torch.stack([clipped_power(a, b) for a, b in zip(x, n, strict=True)]))
torch.testing.assert_close(slopes, torch.tensor([4 * 1.5**3, 5 * 3.0**4, 2 * 0.5]))

# %% [markdown]
# Attention has forward mode and second derivatives too, which `torch.func` refuses for the fused kernel.

# %%
q = torch.randn(1, 1, 3, 4)
attention = lambda q: F.scaled_dot_product_attention(q, q, q).square().sum()
_, tangent = tfn.jvp(tfn.grad(attention), (q,), (torch.ones_like(q),))
eps = 1e-3
difference = (tfn.grad(attention)(q + eps) - tfn.grad(attention)(q - eps)) / (2 * eps)
torch.testing.assert_close(tangent, difference, atol=1e-2, rtol=1e-2)

# %% [markdown]
# ## Grad modes mean the same
#
# Reverse mode sees the `no_grad` inside a function, whatever is around it. Forward mode goes on there, and stops at `detach`.

# %%
x = torch.tensor([1.0, 2.0])
half = lambda x: (x * torch.no_grad()(torch.square)(x)).sum()
with torch.no_grad():
    torch.testing.assert_close(tfn.grad(half)(x), torch.func.grad(half)(x))
torch.testing.assert_close(tfn.jacfwd(half)(x), torch.func.jacfwd(half)(x))
torch.testing.assert_close(tfn.hessian(half)(x), torch.func.hessian(half)(x))

# %% [markdown]
# ## They mix
#
# A transform of `torch.func` may be inside a traced function, and a traced function inside one of `torch.func`'s.

# %%
cubes = lambda x: (x**3).sum()
v = torch.randn(3)
torch.testing.assert_close(tfn.jit(torch.func.grad(cubes))(v), 3 * v**2)
torch.testing.assert_close(torch.func.grad(lambda x: tfn.jit(cubes)(x))(v), 3 * v**2)
torch.testing.assert_close(tfn.grad(lambda x: torch.func.grad(cubes)(x).sum())(v), 6 * v)

# %% [markdown]
# ## What must not hold
#
# Python that looks at values is not a program of tensors. `torch.func.grad` runs it, since values are there while it runs, and so
# does `tfn.grad`. A jitted function is a program for all values, so the question is an error, which says what to write.

# %%
relu = lambda x: x if x > 0 else x * 0
assert torch.func.grad(relu)(torch.tensor(2.0)) == tfn.grad(relu)(torch.tensor(2.0)) == 1
assert torch.func.grad(relu)(torch.tensor(-2.0)) == tfn.grad(relu)(torch.tensor(-2.0)) == 0
try:
    tfn.jit(tfn.grad(relu))(torch.tensor(2.0))
except tfn.errors.DataDependentBranch as error:
    print(error)
else:
    raise AssertionError("it must not")
step = lambda x: tfn.cond(x > 0, lambda x: x, lambda x: x * 0, (x,))
assert tfn.jit(tfn.grad(step))(torch.tensor(2.0)) == 1

# %% [markdown]
# ## Where this lives
#
# `thunder_fn/api/`, one file for each transform; `tests/unit/test_torch_func.py` compares them.
