# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Executors and operators of your own
#
# An executor is a value that is passed to `jit`. It brings operators, says how ops that are there already are computed and
# differentiated, and applies nowhere but where it is passed. This is lightning-thunder's notebook "Extending Thunder", cell by
# cell; its fused cross entropy is in `10_fused_kernel.py`.

# %%
import warnings

import numpy as np
import torch

import thunder_fn as tfn
from thunder_fn.extend import OperatorExecutor, get_grad, put_grads

warnings.filterwarnings("ignore", message="__array_wrap__ must accept context")  # NumPy 2 on PyTorch's tensors
torch.manual_seed(0)

myex = OperatorExecutor("myex", version="0.1", numerics="bitwise")

# %% [markdown]
# An operator has a function that computes it, here with NumPy, and a `like` that says what it computes in PyTorch. `like` gives
# the types of the results, and is what every transform sees.


# %%
def multimul_impl(a, b, c, d):
    return np.multiply(a, b), np.multiply(c, d)


def multimul_like(a, b, c, d):
    return a * b, c * d


multimul = myex.register_operator("multimul", like=multimul_like, fn=multimul_impl)


def foo(a, b, c, d):
    return multimul(a, b, c, d)


a, b = torch.randn(2, 2), torch.randn(2, 2)
cfoo = tfn.jit(foo, executors=[myex])
assert torch.equal(cfoo(a, b, a, b)[0], a * b)


def program(f):
    return str(tfn.last_traces(f)[-1])


print(program(cfoo))
assert program(cfoo).count("= multimul(") == 1

# %% [markdown]
# `multimul` is differentiable because its `like` is. `grad` wants one number, so we sum.

# %%
cfoo_grad = tfn.grad(tfn.jit(lambda *xs: sum(x.sum() for x in foo(*xs)), executors=[myex]), argnums=(0, 1, 2, 3))
assert all(torch.equal(x, y) for x, y in zip(cfoo_grad(a, b, a, b), (b, a, b, a), strict=True))
print(program(cfoo_grad))

# %% [markdown]
# Existing ops can be computed by `multimul`: an execution transform says how, and a checker when. The checker sees
# tensors without values. A torch function, an ATen op, a `@composite` function or an operator can be named here.


# %%
def mul_to_multimul(a, b):
    result, _ = multimul(a, b, 0, 0)
    return result


def mul_to_multimul_checker(a, b):
    return all(x.device.type == "cpu" for x in (a, b) if isinstance(x, torch.Tensor))


myex.register_implementation(torch.mul, checker=mul_to_multimul_checker, execution_transform=mul_to_multimul)


def bar(a, b):
    return a * b


cbar = tfn.jit(bar, executors=[myex])
assert torch.equal(cbar(a, b), a * b)
print(program(cbar))
assert "= multimul(v0, v1, 0, 0)" in program(cbar)

# %% [markdown]
# Execution transforms come after all others, so the gradient of a product has two of them. Each ignores one multiplication.

# %%
cbar_grad = tfn.grad(tfn.jit(lambda a, b: bar(a, b).sum(), executors=[myex]), argnums=(0, 1))
cbar_grad(a, b)
assert program(cbar_grad).count("= multimul(") == 2

# %% [markdown]
# A grad transform is forward and backward as one function. `get_grad` is the cotangent of what it returns, `put_grads` gives the
# gradients of its arguments. Registering it traces again the functions that use this executor, and no others.


# %%
def mymul_grad(a, b):
    fwd = a * b
    g = get_grad(fwd)
    a_grad, b_grad = multimul(b, g, a, g)
    put_grads((a, b), (a_grad, b_grad))
    return fwd


myex.register_implementation(
    torch.mul, checker=mul_to_multimul_checker, execution_transform=mul_to_multimul, grad_transform=mymul_grad
)
assert all(torch.equal(x, y) for x, y in zip(cbar_grad(a, b), (b, a), strict=True))
print(program(cbar_grad))
assert program(cbar_grad).count("= multimul(") == 1

# %% [markdown]
# An execution transform may use any ops. Those that it leaves to others run on them, here on PyTorch.


# %%
def mul_to_contiguous_multimul(a, b):
    result, _ = multimul(a.contiguous(), b.contiguous(), 0, 0)
    return result


myex.register_implementation(torch.mul, checker=mul_to_multimul_checker, execution_transform=mul_to_contiguous_multimul)
ccaz = tfn.jit(lambda a, b: a * b, executors=[myex])
assert torch.equal(ccaz(a.t(), b), a.t() * b)
print(program(ccaz))
assert program(ccaz).count("= contiguous(") == 2
print(tfn.explain_claims(ccaz, a, b))

# %% [markdown]
# What must not hold: nothing of this reaches a function that was not given the executor.

# %%
plain = tfn.jit(bar)
assert torch.equal(plain(a, b), a * b) and "multimul" not in program(plain)

# %% [markdown]
# In the code: `executors/operators.py` and `operator_executor.py` (operators, and what is registered for ops),
# `grad_transforms.py`, and `claims.py` (who is asked, in which order).
