# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # For users of lightning-thunder
#
# A trace there is a trace here, and the verbs are the same: `jit`, executors, transforms, recipes, `last_traces`. The
# great difference is that nothing changes a trace: a transform returns another one. (lightning-thunder is not run
# here; its side of the table is from its sources, version 0.2.7.dev0.)
#
# | lightning-thunder | here |
# |---|---|
# | `thunder.jit(f)` | `tfn.jit(f)` |
# | `thunder.compile(model, recipe=, plugins=)` | `tfn.compile(model, recipe)`, recipes added with `+` |
# | `thunder.last_traces(jf)[-1]`, `last_prologue_traces`, `last_backward_traces` | the same names |
# | `OperatorExecutor`, `register_operator`, `register_implementation` | the same names, in `thunder_fn.extend` |
# | `get_grad`, `put_grads`, `FusionExecutor`, `register_supported`, `fuse` | the same names, likewise |
# | `cache="constant values"`, `"symbolic values"`, `"same input"`, `"no caching"` | the same names |
# | `Transform`, with hooks that edit traces and the module | a function from trace to trace, or a rewrite of three traces |
# | `thunder.transforms.autocast`, `torch.autocast` | `tfn.autocast(f, dtype)` |
# | `thunder.core.transforms.grad(jf)` | `tfn.grad(jf)`, to any order; `vmap`, `jvp` and the others too |
# | `BitsAndBytesLinearQuant4bit()`, `LORATransform(...)` | `tfn.quantize(jf, "nf4")`, `tfn.lora(jf, rank)` |
# | `thunder.distributed.fsdp(jm)` | `tfn.fsdp(jm, mesh)`, before or after `quantize` |
# | prims, clang and ltorch | PyTorch's own ops: ATen at the bottom, torch functions and modules as composites above |

# %%
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn import Recipe, Transform

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
x = torch.randn(2, 8)

jitted = tfn.jit(model)
jitted(x).sum().backward()
print(tfn.last_traces(jitted)[0])
print(tfn.last_backward_traces(jitted)[-1])
assert isinstance(jitted, nn.Sequential) and model[0].weight.grad is not None

# %% [markdown]
# A torch function is one equation that owns its body, as a bound symbol has subsymbols. But the body is a program of its
# own, closed and with inputs of its own, so equal layers have equal bodies, and `cond`, `scan` and `checkpoint` are
# equations too.
#
# ## Transforms wrap in any order
#
# There, `grad` goes around `jit` and autocast inside. Here `grad(jit(f))` is `jit(grad(f))`, and a transform is applied where
# one likes.


# %%
def loss(w, x):
    return F.mse_loss(torch.tanh(x @ w), torch.zeros(2, 3))


w = torch.randn(8, 3)
half = lambda f: tfn.autocast(f, torch.bfloat16)
assert torch.equal(tfn.grad(tfn.jit(loss))(w, x), tfn.jit(tfn.grad(loss))(w, x))
assert torch.equal(tfn.jit(tfn.grad(half(loss)))(w, x), tfn.grad(half(tfn.jit(loss)))(w, x))
hessian = tfn.jit(tfn.jacfwd(tfn.grad(loss)))(w, x)
assert hessian.shape == (8, 3, 8, 3)

# %% [markdown]
# ## A transform of your own
#
# There is no base class with hooks, and no trace to edit: write the trace that you want.

# %%
fewer = tfn.jit(model, transforms=[Transform(tfn.simplify, name="simplify", idempotent=True)])
torch.testing.assert_close(fewer(x), model(x))
with_checkpoints = tfn.jit(lambda w, x: tfn.checkpoint(loss)(w, x))
torch.testing.assert_close(tfn.grad(with_checkpoints)(w, x), tfn.grad(loss)(w, x))

# %% [markdown]
# ## Recipes and plugins
#
# Both are recipes here: frozen values that add up, in an order that follows from what they say about each other.

# %%
recipe = Recipe() + tfn.recipes.get("quantize_int8")()
small = tfn.compile(model, recipe, executors="torch")
assert 0 < (small(x) - model(x)).abs().max() < 0.05
print(recipe.explain(model))

# %% [markdown]
# ## Jit in jit, and control flow
#
# A jitted function inside another one keeps its name, options and executors; it is a `call` equation. A whole train step that
# jits its model jits.

# %%
optimizer = tfn.functional_optimizer(torch.optim.SGD, lr=0.1)


@tfn.jit
def train_step(w, state, x):
    grads, value = tfn.grad_and_value(tfn.jit(loss))(w, x)
    w, state = optimizer.update(w, grads, state)
    return w, state, value


state = optimizer.init(w)
w, state, value = train_step(w, state, x)
assert loss(w, x) < value
nested = tfn.trace(lambda w, x: tfn.jit(loss)(w, x) * 2, w, x)
print(nested)
assert nested.equations[0].op.name == "call"

# %% [markdown]
# ## Executors apply where they are passed
#
# Registering an executor by name is a convenience: nothing is added to functions that were not given it.
# `explain_claims` lists what was not claimed, with reasons.

# %%
attention = tfn.jit(lambda q: F.scaled_dot_product_attention(q, q, q) * 2, executors=["sdpa"])
report = str(tfn.explain_claims(attention, torch.randn(1, 2, 4, 8)))
print(report)
assert "sdpa" in report

# %% [markdown]
# ## What must not hold
#
# An option that does not exist is an error, not a silent wish.

# %%
try:
    tfn.jit(model, cache_mode="symbolic values")
except tfn.errors.UnknownOption as error:
    print(error)
else:
    raise AssertionError("it must not")

# %% [markdown]
# ## Where this lives
#
# `thunder_fn/jitted/`, `thunder_fn/extend/`, `thunder_fn/recipes/`. The notebook "Extending Thunder", cell by cell, is
# tutorial 8.
