# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Recipes add up
#
# Recipes compose by addition: `a + b` answers with what a says and then what b says. In which order transforms are applied
# does not depend on that, but on what they say about each other: their traits.

# %%
import torch
from torch import nn

import thunder_fn as tfn
from thunder_fn import Recipe, Transform
from thunder_fn.errors import TraitError

torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(2, 64)


def transform(name, **traits):
    return Transform(lambda trace: trace, name=name, **traits)


cast = Recipe().with_(transforms=[transform("cast")])
shard = Recipe().with_(transforms=[transform("shard", after=("cast",))])


def order(recipe):
    return [one.name for one in recipe.assemble(model).transforms]


assert order(cast + shard) == order(shard + cast) == ["cast", "shard"]
print((shard + cast).explain(model))

# %% [markdown]
# Addition is associative, and the empty recipe is neutral, so a list of recipes is their sum.

# %%
tidy = Recipe().with_(transforms=[Transform(tfn.simplify, name="simplify", idempotent=True)])
assert (cast + shard) + tidy == cast + (shard + tidy)
assert cast + Recipe() == cast == Recipe() + cast
assert order(tidy + cast + tidy) == ["simplify", "cast"]  # idempotent: once is enough
assert torch.equal(tfn.compile(model, [cast, tidy], executors="torch")(x), model(x))

# %% [markdown]
# Small recipes come with the library, to be added to others. This one stores weights in eight bits.

# %%
small = tfn.compile(model, ["auto", "quantize_int8"], executors="torch")
assert 0 < (small(x) - model(x)).abs().max() < 0.05
assert small.state_dict()["0.weight"].shape == (64, 64)

# %% [markdown]
# Another one shards them over ranks. A rank's rows are cut from the codes, so the order is the same however it was asked for.

# %%
ranks = tfn.parameters.simulated(2)
shards = tfn.recipes.get("fsdp")(ranks[0])
codes = tfn.recipes.get("quantize_int8")()
assert order(codes + shards) == order(shards + codes) == ["quantize_int8", "fsdp"]
print((shards + codes).explain(model))

# %% [markdown]
# What must not happen is an order that nobody meant. Traits that contradict each other are an error that names both.

# %%
first = Recipe().with_(transforms=[transform("a", after=("b",))])
second = Recipe().with_(transforms=[transform("b", after=("a",))])
either = Recipe().with_(transforms=[transform("int8", conflicts=("nf4",)), transform("nf4")])
for wrong in (first + second, either):
    try:
        wrong.assemble(model)
    except TraitError as error:
        print(error)
    else:
        raise AssertionError("it must not")

# %% [markdown]
# In the code: `thunder_fn/jitted/transforms.py` orders by traits, and `jit(transforms=[...])` uses it too;
# `thunder_fn/recipes/plugins.py` has the small recipes.
