# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Gradients are traces
#
# `grad` takes a function and gives a function, as in `torch.func`. Between the two stands a function from trace to
# trace.

# %%
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn

torch.manual_seed(0)


def loss(x, w):
    return (torch.sin(x) * w).sum()


x, w = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
print(tfn.trace(loss, x, w))
print(tfn.trace(tfn.grad(loss), x, w))

# %% [markdown]
# The second trace begins with the first, then runs backwards: `cos` is the derivative of `sin`. Nobody wrote that rule here:
# it was derived by asking PyTorch for the derivative of one equation, and recording what PyTorch did.

# %%
assert torch.allclose(tfn.grad(loss)(x, w), torch.cos(x) * w)
assert torch.allclose(tfn.grad(loss)(x, w), torch.func.grad(loss)(x, w))

# %% [markdown]
# ## Any order
#
# A gradient is a trace like any other, so it has a gradient.

# %%
cubes = lambda x: (x**3).sum()
once = tfn.grad(cubes)
twice = tfn.grad(lambda x: once(x).sum())
thrice = tfn.grad(lambda x: twice(x).sum())
assert torch.allclose(once(x), 3 * x**2)
assert torch.allclose(twice(x), 6 * x)
assert torch.allclose(thrice(x), torch.full_like(x, 6))

# %% [markdown]
# `detach`, `no_grad` and `stop_gradient` keep their meaning.

# %%
assert torch.allclose(tfn.grad(lambda x: (x.detach() * x).sum())(x), x)

# %% [markdown]
# ## Work grows with distinct code, not with depth
#
# A composite is differentiated by differentiating its body, once for each distinct body. The gradient of this model of 12
# equal layers has a forward body and a backward body for the layer, each used 12 times.


# %%
class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + F.gelu(self.linear(x))


model = nn.Sequential(*(Layer(4) for _ in range(12)))
params = {name: p.detach() for name, p in model.named_parameters()}


def model_loss(params, x):
    return torch.func.functional_call(model, params, (x,)).square().mean()


batch = torch.randn(2, 4)
gradient = tfn.trace(tfn.grad(model_loss), params, batch)
layers = [
    e for inner in gradient.equations for body in inner.bodies for e in body.equations if e.op.name.startswith("Layer")
]
assert len(layers) == 24
assert len({layer.body for layer in layers}) <= 4  # forward and backward; the ends of the chain may need less

# %% [markdown]
# ## vjp
#
# `vjp` evaluates a function and gives the pullback of its derivative: from a cotangent of the output to cotangents of
# the inputs. The backward reads the **residuals** of the forward.

# %%
y, pullback = tfn.vjp(lambda x, w: torch.sin(x) * w, x, w)
dx, dw = pullback(torch.ones_like(y))
assert torch.allclose(dx, torch.cos(x) * w) and torch.allclose(dw, torch.sin(x))

# %% [markdown]
# ## A whole train step is one trace
#
# An optimizer's own code is captured like any other in-place code. Its state goes in and comes out.

# %%
optimizer = tfn.functional_optimizer(torch.optim.SGD, lr=0.02, momentum=0.9)


def step(params, state, x):
    grads, value = tfn.grad_and_value(model_loss)(params, x)
    params, state = optimizer.update(params, grads, state)
    return params, state, value


jitted = tfn.jit(step, donate_argnums=(0, 1))
state = optimizer.init(params)
params = {name: p.clone() for name, p in params.items()}  # donated: the program may overwrite them
values = []
for _ in range(5):
    params, state, value = jitted(params, state, batch)
    values.append(value.item())
assert values[-1] < values[0]

# %% [markdown]
# ## What must not hold
#
# Only a scalar has a gradient, and only floating tensors have one taken.

# %%
for bad, error in (
    (lambda: tfn.grad(lambda x: x * 2)(x), tfn.errors.NonScalarLoss),
    (lambda: tfn.grad(lambda n: n.sum())(torch.arange(3)), tfn.errors.NotDifferentiable),
    (lambda: tfn.grad(loss, argnums=2)(x, w), tfn.errors.ArgnumError),
):
    try:
        bad()
    except error as caught:
        print(caught, end="\n\n")
    else:
        raise AssertionError("the mistake was not noticed")

# %% [markdown]
# ## Where this lives
#
# The interpreter: `thunder_fn/interpreters/grad.py`. The rules: `derived/leaf_vjp.py`. The function on functions:
# `api/gradients.py`.
