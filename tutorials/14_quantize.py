# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Quantise a model
#
# `quantize` stores the weights of a function or a module in eight bits, four, or as fp8. It is a **rewrite**: it gives the new
# program, and the traces that turn the old parameters into the new ones and back. Here are the first two.

# %%
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn

torch.manual_seed(0)


def layer(params, x):
    return F.linear(x, params["w"], params["b"])


params, x = {"w": torch.randn(4, 6), "b": torch.randn(4)}, torch.randn(2, 6)
small = tfn.quantize(layer, "int8")
rewrite = small.rewrite(params, x)
print(rewrite.compute)
print(rewrite.prepare)

# %% [markdown]
# The matrix has become eight-bit codes and a scale for each row, and the linear layer works on those: an equation of its own,
# which an executor may claim. Parameters are prepared once.

# %%
new = small.prepare(params)
print(new)
assert new["w.values"].dtype == torch.int8
result = small(new, x)
assert torch.allclose(result, layer(params, x), atol=0.1) and not torch.equal(result, layer(params, x))

# %% [markdown]
# ## What a scheme promises
#
# Each scheme states by how much a weight may be off, element by element. A test suite that draws weights of every size holds it
# to that.

# %%
for name in ("int8", "int4", "nf4", "fp8"):
    scheme = tfn.parameters.SCHEMES[name]
    w = torch.randn(64, 256)
    parts = scheme.encode(w)
    off = (scheme.decode(parts, w.shape, w.dtype) - w).abs()
    bits = 8 * sum(part.numel() * part.element_size() for part in parts.values()) / w.numel()
    print(f"{name}: {bits:.2f} bits a weight, off by at most {off.max():.4f}")
    assert bool((off <= scheme.bound(w)).all())

# %% [markdown]
# ## Modules
#
# A rewritten module is called as the original is, and its state has the original's names, shapes and dtypes. A jitted one
# runs its linear layers with kernels that read codes, where the machine has any: PyTorch's own, or C++ that is compiled once.

# %%
model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
quantised = tfn.quantize(model, "nf4")
assert {k: v.shape for k, v in quantised.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
print(quantised)

# %% [markdown]
# ## Activations too
#
# `int8_static` multiplies integers by integers, so activations are rounded as well, in steps that are known beforehand:
# `calibrate` takes them from the inputs of some calls. Until then they are NaN, which nobody overlooks.

# %%
fast = tfn.quantize(tfn.jit(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))), "int8_static")
samples = [(torch.randn(16, 64),) for _ in range(4)]
assert fast(*samples[0]).isnan().all()
fast.calibrate(samples)
print({name: round(float(part), 3) for name, part in fast.parts().items() if name.endswith("input_scale")})
off = (fast(*samples[0]) - fast.restored()(*samples[0])).abs().max()
assert off < 0.05

# %% [markdown]
# A rewritten function is a function: it has gradients where its parameters are floats, and batches. With `lora`, which puts a
# trainable matrix of low rank beside each weight, that is QLoRA, two tutorials from here.

# %%
gradient = tfn.grad(lambda x: small(new, x).square().sum())(x)
assert torch.allclose(gradient, tfn.grad(lambda x: layer(params, x).square().sum())(x), atol=0.5)
assert tfn.vmap(small, (None, 0))(new, x).shape == (2, 4)

# %% [markdown]
# ## Layers of a loop
#
# A stack of layers, of which `scan` takes one at each step, is one parameter. `stacked=` says so: each layer has codes
# and scales of its own, and a step works on those of its layer.

# %%
layers, x = {"w": torch.randn(3, 6, 6), "b": torch.randn(3, 6)}, torch.randn(2, 6)


def deep(params, x):
    return tfn.scan(lambda c, own: (torch.tanh(layer(own, c)), None), x, params)[0]


loop = tfn.quantize(deep, "int8", stacked="*")
new = loop.prepare(layers)
print(new)
print(loop.rewrite(layers, x).compute)
assert torch.allclose(loop(new, x), deep(new.restore(), x), atol=1e-5)

# %% [markdown]
# ## What must not hold
#
# Parameters that were not prepared are no parameters of the new function.

# %%
try:
    small(params, x)
except tfn.errors.RewriteError as error:
    print(error)
else:
    raise AssertionError("parameters that are no codes were taken")

# %% [markdown]
# ## Where this lives
#
# The interpreter that carries parts to where they are used: `thunder_fn/interpreters/rewriting/rewrite.py`. Schemes
# and the choice of weights: `thunder_fn/interpreters/quantize/`. The functions for users: `thunder_fn/parameters/`.
