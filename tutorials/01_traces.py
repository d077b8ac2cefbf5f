# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # What a trace is
#
# thunder_fn turns a PyTorch program into a **trace**: a value that says what the program computes. Everything else is a
# function from trace to trace. Here is a program of four lines.

# %%
import pickle

import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn


def scale_and_shift(x, w):
    y = torch.sin(x) * w
    y[0] = 0.0  # in-place code is fine
    return y + 1


x, w = torch.randn(3), torch.randn(3)
t = tfn.trace(scale_and_shift, x, w)
print(t)

# %% [markdown]
# Each line is an **equation**: it binds new variables to the result of an op. The ops are PyTorch's own (`aten.*`), the
# types are dtypes and shapes, and the write to `y[0]` has become a pure op. The trace computes what the function computes,
# bit for bit.

# %%
(result,) = tfn.evaluate(t, [x, w])
assert torch.equal(result, scale_and_shift(x, w))

# %% [markdown]
# The printed text is a Python program, and it runs.

# %%
assert torch.equal(t.python_callable()(x, w)[0], result)

# %% [markdown]
# ## A trace is a value
#
# A trace is frozen. Variables are numbered in the order in which they are bound, so two traces are equal exactly
# if they are the same program; they hash, and they pickle.

# %%
assert t == tfn.trace(scale_and_shift, x, w)
assert hash(t) == hash(tfn.trace(scale_and_shift, torch.randn(3), torch.randn(3)))
assert pickle.loads(pickle.dumps(t)) == t
assert t != tfn.trace(scale_and_shift, torch.randn(4), torch.randn(4))  # other types, another program

# %%
try:
    t.equations[0].outputs = ()
except AttributeError as error:
    print(error)
else:
    raise AssertionError("a trace was changed")

# %% [markdown]
# ## Composites keep structure
#
# A torch function, a module call and a function marked with `@tfn.composite` each become one equation that owns its body,
# a trace of its own. Identical layers have the same body, so work that is done once for each body does not grow with depth.


# %%
class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + F.gelu(self.linear(self.norm(x)))


model = nn.Sequential(Layer(4), Layer(4), Layer(4))
deep = tfn.trace(model, torch.randn(2, 4))
print(deep)

# %%
first, second, third = deep.equations
assert first.body is second.body is third.body
assert (first.source.module, third.source.module) == (
    "0",
    "2",
)  # where each call stands is known, and is no part of equality

# %% [markdown]
# The model's parameters are **constants** of this trace: tensors that the function closed over, by reference. To have them as
# inputs, pass them, as one does with `torch.func`.

# %%
assert any(constant.tensor is model[0].linear.weight for constant in deep.constants)
params = dict(model.named_parameters())
pure = tfn.trace(lambda params, x: torch.func.functional_call(model, params, (x,)), params, torch.randn(2, 4))
assert not pure.constants and len(pure.inputs) == len(params) + 1

# %% [markdown]
# ## What must not hold
#
# A trace has no values in it while it is made, so Python cannot branch on them. The error says where and what to write.


# %%
def branch(x):
    if x.sum() > 0:
        return x
    return -x


try:
    tfn.trace(branch, x)
except tfn.errors.DataDependentBranch as error:
    print(error)
else:
    raise AssertionError("a branch on values was traced")

# %% [markdown]
# ## Where this lives
#
# The data: `thunder_fn/ir/trace.py`. Its text: `pretty.py`. Its rules: `check.py`. From a function to a trace:
# `capture/`.
