# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # An interpreter in 20 lines
#
# An interpreter walks the equations of a trace with an environment from variables to values, and does something at each. All
# of thunder_fn is made of them. The first one computes: it is what `tfn.evaluate` does, for leaf ops and composites.

# %%
import torch
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.ir import ops, python_arg

torch.manual_seed(0)


def evaluate(trace, inputs, apply):
    env = [*inputs, *(constant.tensor for constant in trace.constants)]  # env[i] is the value of vi
    read = lambda var: env[var.index]
    for equation in trace.equations:
        if equation.bodies:  # a composite owns a trace: do with it what is done here
            results = evaluate(equation.body, [read(var) for var in equation.operands], apply)
        else:
            args = [python_arg(arg, read) for arg in equation.args]
            kwargs = {name: python_arg(arg, read) for name, arg in equation.kwargs}
            results = apply(equation, args, kwargs)
        env.extend(results)
    return tuple(python_arg(atom, read) for atom in trace.outputs)


def call(equation, args, kwargs):
    return ops.flatten_result(ops.overload(equation.op)(*args, **kwargs))


def layer(w, x):
    return F.gelu(F.layer_norm(x, (4,)) @ w).sum()


w, x = torch.randn(4, 4), torch.randn(2, 4)
t = tfn.trace(layer, w, x)
print(t)
assert torch.equal(evaluate(t, [w, x], call)[0], layer(w, x))

# %% [markdown]
# The environment is a list that grows, because a variable's number is its place in it. `python_arg` reads
# variables and unwraps literals.
#
# ## Do something else at each equation
#
# Which equation makes the first NaN, and which line of the program does it come from?


# %%
def find_nan(equation, args, kwargs):
    results = call(equation, args, kwargs)
    if any(result.isnan().any() for result in results):
        raise ArithmeticError(f"{equation.op} makes a NaN in {equation.source}")
    return results


def entropy(p):
    scaled = p / p.sum()
    return -(scaled * scaled.log()).sum()  # log of zero times zero


p = torch.tensor([0.0, 1.0, 3.0])
try:
    evaluate(tfn.trace(entropy, p), [p], find_nan)
except ArithmeticError as error:
    print(error)
    assert "aten.mul" in str(error)
else:
    raise AssertionError("0 * log(0) is a NaN")

# %% [markdown]
# ## From trace to trace
#
# An interpreter need not know whether its values are tensors. Run it while a function is traced, and what it does is written
# down: now it goes **from trace to trace**. This one computes GELU by another formula.


# %%
def tanh_gelu(equation, args, kwargs):
    if equation.op == ops.leaf(torch.ops.aten.gelu.default):
        return (F.gelu(args[0], approximate="tanh"),)
    return call(equation, args, kwargs)


cheap = tfn.trace(lambda w, x: evaluate(t, [w, x], tanh_gelu), w, x)
print(cheap)
assert 0 < (tfn.evaluate(cheap, [w, x])[0] - layer(w, x)).abs() < 1e-2

# %% [markdown]
# So it composes with every transform, in either order: the gradient of the cheap program, and the cheap program of a
# gradient, in which only the forward is computed with the other formula.


# %%
def transformed(f):
    """The transform as a function from function to function, like `tfn.grad`."""
    return lambda *args: evaluate(tfn.trace(f, *args), args, tanh_gelu)[0]


of_cheap = tfn.grad(transformed(layer))(w, x)
exact = tfn.grad(layer)(w, x)
assert torch.equal(transformed(tfn.grad(layer))(w, x), exact)  # the gradient reads no GELU's result
assert 0 < (of_cheap - exact).abs().max() < 1e-2
per_sample = tfn.vmap(tfn.grad(transformed(layer)), (None, 0))(w, torch.randn(7, 2, 4))
assert per_sample.shape == (7, 4, 4)

# %% [markdown]
# ## What must not hold
#
# `find_nan` decides on values, and a trace has none while it is made. It stays an interpreter of values, and says so.

# %%
try:
    tfn.trace(lambda p: evaluate(tfn.trace(entropy, p), [p], find_nan), p)
except tfn.errors.DataDependentBranch as error:
    print(error)
else:
    raise AssertionError("it must not")

# %% [markdown]
# ## Where this lives
#
# `thunder_fn/interpreters/evaluate.py` is the first interpreter, with a rule for each structured op; `simplify.py` has the
# smallest ones that go from trace to trace. Most of those write equations themselves (`TraceBuilder`), which keeps composites
# whole; tutorial 7 does it.
