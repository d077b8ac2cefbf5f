# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # A recipe for your own model
#
# A recipe is what its author knows about a model: what must be diverted for it to be traced, which transforms and
# executors suit it. Users of the model then write `compile(model, "yours")` and nothing else. Here is a model that looks
# at its values before it computes.

# %%
import torch
from torch import nn

import thunder_fn as tfn
from thunder_fn import Lookaside, Recipe, Transform, recipes


def warn_if_large(x):
    if x.abs().max() > 100:  # a decision on values, which a trace does not have
        print("inputs are large")


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        warn_if_large(x)
        return self.linear(x) * 1 + 0


torch.manual_seed(0)
model, x = Mine(), torch.randn(2, 4)

# %% [markdown]
# Left to itself, `compile` would run such a model in parts, through Dynamo, and warn. Asked for one trace, it says why not.

# %%
try:
    tfn.compile(model, frontend="direct")(x)
except tfn.errors.DataDependentBranch as error:
    print(error)
else:
    raise AssertionError("a trace cannot decide on values")

# %% [markdown]
# The recipe diverts the check while the model is traced, and tidies the trace. It overrides the questions that it has an
# answer to; an attribute configures it.

# %%


@recipes.register
class ForMine(Recipe):
    name, models = "mine", ("__main__.Mine",)

    def __init__(self, tidy=True):
        self.tidy = tidy

    def validate(self, model):
        if not isinstance(model, Mine):
            raise ValueError("The model must be a Mine")

    def setup_lookasides(self):
        return (Lookaside(warn_if_large, lambda x: None),)

    def setup_transforms(self):
        return (Transform(tfn.simplify, name="simplify", idempotent=True),) if self.tidy else ()


assert "mine" in recipes.list()
compiled = tfn.compile(model, "auto", executors="torch")  # "auto" finds the recipe by the model's class
assert torch.equal(compiled(x), model(x))

# %% [markdown]
# The trace before and after the transform: the multiplication by one and the addition of zero are gone.

# %%
before, after = tfn.last_traces(compiled)[:2]
print(before)
print(after)
assert "aten.mul" in str(before) and "aten.mul" not in str(after)

# %% [markdown]
# A recipe is a value: it does not change, and one object serves many models. It refuses models that it is not for, and
# says what it would do.

# %%
recipe = ForMine(tidy=False)
for size in (1, 3):
    assert tfn.compile(Mine(), recipe, executors="torch")(torch.randn(size, 4)).shape == (size, 4)
print(recipe.explain(model))

for wrong, kind in (
    (lambda: tfn.compile(nn.ReLU(), recipe), ValueError),
    (lambda: setattr(recipe, "tidy", True), ValueError),
):
    try:
        wrong()
    except kind as error:
        print(error)
    else:
        raise AssertionError("it must not")

# %% [markdown]
# Outside of the trace the function is what it was.

# %%
warn_if_large(torch.full((1,), 1000.0))

# %% [markdown]
# In the code: `thunder_fn/recipes/recipe.py` is the class, `thunder_fn/recipes/huggingface.py` has recipes for the models of
# transformers, `thunder_fn/capture/replaced/lookasides.py` diverts functions.
