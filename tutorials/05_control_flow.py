# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Control flow is in the trace
#
# A Python `for` or `if` is gone once a function is traced: the loop is unrolled, one branch is taken. `scan`,
# `while_loop`, `cond` and their kin stay, as equations that own traces of their own.

# %%
import torch

import thunder_fn as tfn

torch.manual_seed(0)


w, h0, xs = torch.randn(3, 3) * 0.5, torch.zeros(3), torch.randn(5, 3)


def rnn(w, h0, xs):
    def step(h, x):
        h = torch.tanh(x + h @ w)
        return h, h

    return tfn.scan(step, h0, xs)


print(tfn.trace(rnn, w, h0, xs))

# %% [markdown]
# `scan(step, carry, xs)` is the loop that hands a carry from step to step and stacks what each step gives. Its body was
# traced once, so the trace has the same size for 5 steps and for 5,000. Outside a trace it runs as the Python loop it
# stands for.


# %%
def python_loop(w, h, xs):
    ys = []
    for x in xs:
        h = torch.tanh(x + h @ w)
        ys.append(h)
    return h, torch.stack(ys)


for ours, theirs in zip(tfn.jit(rnn)(w, h0, xs), python_loop(w, h0, xs), strict=True):
    assert torch.allclose(ours, theirs)
longer = tfn.trace(rnn, w, h0, torch.randn(5000, 3))
assert len(longer.equations) == len(tfn.trace(rnn, w, h0, xs).equations)

# %% [markdown]
# ## The gradient of a loop is a loop
#
# The gradient is a scan that keeps what its backward reads, and a scan in the other direction. Look at what is stacked:
# only `tanh`'s results and the carries. `w` is not: it is the same in every step, so it is passed again, and its gradient is
# a sum that the backward carries.

# %%
loss = lambda w: rnn(w, h0, xs)[1].square().sum()
gradient = tfn.trace(tfn.grad(loss), w)
print(gradient)
assert torch.allclose(tfn.grad(loss)(w), torch.func.grad(lambda w: python_loop(w, h0, xs)[1].square().sum())(w))

assert str(gradient).count("= scan") == 2 and "reverse=True" in str(gradient)

# %% [markdown]
# It has derivatives in turn, and batches like any function: what is batched in the carry, in `w` or in `xs` is found by a
# fixpoint over the steps.

# %%
hessian = tfn.hessian(loss)(w)
assert hessian.shape == (3, 3, 3, 3)
many = torch.randn(7, 5, 3)
batched = tfn.vmap(rnn, (None, None, 0))(w, h0, many)[1]
assert torch.allclose(batched[2], rnn(w, h0, many[2])[1])

# %% [markdown]
# ## vmap turns a choice into a select
#
# With one predicate for all examples `cond` stays a choice. With one for each example there is no branch to take: both run
# and each example selects.


# %%
def safe_root(x):
    return tfn.cond(x > 0, torch.sqrt, torch.zeros_like, (x,))


x = torch.tensor([4.0, -1.0, 9.0, 0.0])
print(tfn.trace(safe_root, x[0]))
print(tfn.trace(tfn.vmap(safe_root), x))
assert "cond" in str(tfn.trace(safe_root, x[0])) and "cond" not in str(tfn.trace(tfn.vmap(safe_root), x))
assert tfn.vmap(safe_root)(x).tolist() == [2, 0, 3, 0]

# %% [markdown]
# What must not hold: a NaN from the branch that an example does not take. Written with `torch.where`, the infinite slope of
# the square root at zero reaches the gradient. `cond` gives the branches that are not taken operands of their own.

# %%
where_root = lambda x: torch.where(x > 0, torch.sqrt(x), torch.zeros_like(x))
assert tfn.vmap(tfn.grad(where_root))(x).isnan().any()
assert torch.allclose(tfn.vmap(tfn.grad(safe_root))(x), torch.tensor([1 / 4, 0, 1 / 6, 0]))

# %% [markdown]
# ## Layers are a loop too
#
# `roll` finds equal composites in sequence, such as the layers of a model, and makes them one scan over their stacked
# parameters. `unroll` is its inverse.

# %%
deep = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(12)))
trace = tfn.trace(deep, x[:3])
rolled = tfn.roll(trace)
print(rolled)
assert [equation.op.name for equation in rolled.equations][-1] == "scan"
assert tfn.unroll(rolled) == trace

# %% [markdown]
# ## The program
#
# The torch executor writes loops as Python loops. Invariants are computed in front, and a step may work in the memory
# of a carry that nobody else sees.

# %%
jitted = tfn.jit(rnn)
jitted(w, h0, xs)
program = str(tfn.last_traces(jitted)[-1])
print(program)
assert "for v" in program

# %% [markdown]
# Where this lives: `thunder_fn/structured/` has one file for each op with all its rules, `fixpoint.py` the one question that
# every loop's rules ask, `roll.py` the last part; `executors/loops.py` writes the loops.
