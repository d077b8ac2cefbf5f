# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # QLoRA is a composition
#
# QLoRA trains small adapters beside frozen weights of four bits. There is no class for it here, and no need of one: it is
# `quantize` after `lora`, and what falls out composes with everything else.

# %%
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


model = nn.Sequential(nn.Embedding(32, 64), Block(64), Block(64), nn.Linear(64, 32))
weights = ["1.*.weight", "2.*.weight", "3.weight"]  # matrices only: norms and the embedding stay as they are
qlora = tfn.quantize(tfn.lora(tfn.jit(model), rank=4, filter=weights), "nf4", filter=weights)

# %% [markdown]
# What is stored: codes of four bits with their scales, two thin matrices for each weight, and the rest.

# %%
size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)
parts = qlora.parts()
for name in parts:
    if name.startswith("3.weight"):
        print(name, parts[name].dtype, tuple(parts[name].shape))
big = [p for p in model.parameters() if p.dim() == 2][1:]
codes = [value for name, value in parts.items() if "weight." in name and "lora" not in name]
print(f"weights {size(big):,} bytes, their codes {size(codes):,}")
assert size(codes) < size(big) / 6

# %% [markdown]
# Only the adapters are trained. The loss goes down, and not a code moves.

# %%
trained = {name: p for name, p in qlora.named_parameters() if p.requires_grad and "lora" in name}
optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
before = {name: value.clone() for name, value in parts.items()}
tokens = torch.randint(0, 32, (128,))
losses = []
for _ in range(15):
    optimizer.zero_grad()
    loss = F.cross_entropy(qlora(tokens), (tokens * 3 + 1) % 32)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"{losses[0]:.2f} -> {losses[-1]:.2f}, {sum(p.numel() for p in trained.values()):,} numbers trained")
assert losses[-1] < losses[0] - 0.5
moved = {name for name, value in qlora.parts().items() if not torch.equal(value, before[name])}
assert moved and all("lora" in name for name in moved)

# %% [markdown]
# ## Order does not matter
#
# An adapter belongs to a matrix, not to its codes. Asked for the other way round, the program is the same: as functions
# of parameters, the two are **equal traces**.


# %%
def linear(params, x):
    return F.linear(x, params["w"], params["b"])


params, x = {"w": torch.randn(64, 64), "b": torch.randn(64)}, torch.randn(2, 64)
one = tfn.quantize(tfn.lora(linear, 2), "nf4")
other = tfn.lora(tfn.quantize(linear, "nf4"), 2)
assert one.rewrite(params, x) == other.rewrite(params, x)
print(one.rewrite(params, x).compute)

# %% [markdown]
# And with what else there is: the gradient for each example of the batch, with respect to the adapters only.

# %%
prepared = one.prepare(params)
adapters, frozen = prepared.partition(lambda name: "lora" in name)


def example_loss(adapters, x):
    return one(prepared.replaced(frozen, adapters), x).square().sum()


per_example = tfn.jit(tfn.vmap(tfn.grad(example_loss), (None, 0)))(adapters, x)
assert {name: g.shape[0] for name, g in per_example.items()} == dict.fromkeys(adapters, 2)

# %% [markdown]
# ## And back
#
# `state_dict()` has the names and shapes of the model that came in, adapters merged. It loads into plain PyTorch.

# %%
plain = nn.Sequential(nn.Embedding(32, 64), Block(64), Block(64), nn.Linear(64, 32))
plain.load_state_dict(qlora.state_dict())
torch.testing.assert_close(plain(tokens), qlora(tokens), atol=1e-3, rtol=1e-3)

# %% [markdown]
# `merge` adds the adapters to their matrices in place, which are rounded again, and gives them back; `unmerge` takes them
# out. So one model serves the adapters of many.

# %%
before_merge = qlora(tokens).detach()
adapters = qlora.merge()
assert not any(part.any() for name, part in qlora.parts().items() if name.endswith("lora_b"))
assert F.mse_loss(qlora(tokens), before_merge) < 0.05
qlora.unmerge(adapters)
assert F.mse_loss(qlora(tokens), before_merge) < 0.05

# %% [markdown]
# ## What must not hold
#
# A part that nobody prepared is no part, so a typing error in a checkpoint of adapters cannot pass for training.

# %%
try:
    prepared.replaced({"w.lora_A": torch.zeros(2, 64)})
except tfn.errors.RewriteError as error:
    print(error)
else:
    raise AssertionError("there is no such part")

# %% [markdown]
# ## Where this lives
#
# `thunder_fn/interpreters/lora.py` and `quantize/` decide for each parameter, `parameters/rewritten.py` puts steps into an
# order in which they can work, and `thunder_fn/interpreters/rewriting/rewrite.py` carries parts to where parameters were used.
