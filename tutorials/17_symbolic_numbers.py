# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Symbolic numbers
#
# A program that holds for one shape has to be made again for the next. With **symbols** in place of sizes and numbers it
# holds for all of them, and what Python decided on the way becomes a condition that each call is checked against.

# %%
import torch

import thunder_fn as tfn

torch.manual_seed(0)


def scaled(x, factor):
    return x.reshape(-1) * (factor / x.shape[0])


symbolic = tfn.jit(scaled, cache="symbolic values")
for rows, factor in ((2, 1.0), (5, 2.0), (1000, -0.5)):
    x = torch.randn(rows, 3)
    torch.testing.assert_close(symbolic(x, factor), scaled(x, factor))
print(tfn.last_traces(symbolic)[0])
assert tfn.cache_info(symbolic).misses == 1

# %% [markdown]
# `s0` and `s1` are sizes, `zf2` is a number. The trace shows all arithmetic on them where it is used.
#
# ## A decision is a condition
#
# Python can take one branch only. Which one depends on the number, so the trace holds under the condition that it comes out
# the same way, and no narrower one: not `flag == 6`.


# %%
def choose(x, flag):
    if flag > 5:
        return x + 1
    return x - 1


chosen = tfn.jit(choose, cache="symbolic values")
x = torch.zeros(2)
assert [chosen(x, flag)[0].item() for flag in (6, 7, 100, 0, 5, -3)] == [1, 1, 1, -1, -1, -1]
assert tfn.cache_info(chosen).misses == 2  # one program for each branch
for miss in tfn.explain_misses(chosen):
    print(miss)
print(tfn.last_prologue_traces(chosen)[-1])

# %% [markdown]
# Comparing two sizes is a condition on both.


# %%
def pairwise(x, y):
    return x @ y if x.shape[1] == y.shape[0] else x @ y.t()


either = tfn.jit(pairwise, cache="symbolic values")
for x_size, y_size in (((2, 3), (3, 4)), ((5, 7), (7, 2)), ((2, 3), (4, 3)), ((3, 2), (5, 2))):
    x, y = torch.randn(x_size), torch.randn(y_size)
    torch.testing.assert_close(either(x, y), pairwise(x, y))
print([str(miss) for miss in tfn.explain_misses(either)])
assert tfn.cache_info(either).misses == 2

# %% [markdown]
# ## By default
#
# Symbols cost a little, so `jit` begins without. A number that changes between calls becomes a symbol on its own.

# %%
plain = tfn.jit(lambda x: (x * x).sum())
for n in (4, 5, 6, 7, 8):
    plain(torch.randn(n))
assert tfn.cache_info(plain).misses == 2  # for 4, and then for all
print(tfn.last_traces(plain)[0])

fixed = tfn.jit(lambda x: (x * x).sum(), dynamic=False)
for n in (4, 5, 6):
    fixed(torch.randn(n))
assert tfn.cache_info(fixed).misses == 3

# %% [markdown]
# ## Transforms do not notice
#
# Symbols are in types and arguments, which rules carry along. Gradients and batches are symbolic where their function is.

# %%
gradient = tfn.grad(tfn.jit(lambda x: torch.softmax(x, -1).square().sum(), cache="symbolic values"))
for n in (3, 8, 21):
    x = torch.randn(n)
    torch.testing.assert_close(gradient(x), torch.func.grad(lambda x: torch.softmax(x, -1).square().sum())(x))
assert tfn.cache_info(gradient).misses == 1

# %% [markdown]
# ## What must not hold
#
# A program must not be used where a decision would have come out otherwise. This one looks at the parity of a size, and is
# traced once for each answer, not once for all sizes.

# %%
parity = tfn.jit(lambda x: x.sum() if x.shape[0] % 2 == 0 else x.sum() * 0, cache="symbolic values")
assert [parity(torch.ones(n)).item() for n in (4, 5, 6, 7, 100, 101)] == [4, 0, 6, 0, 100, 0]
assert tfn.cache_info(parity).misses == 2

# %% [markdown]
# A symbol stands for one type of numbers: `isinstance(n, int)` and `n.__class__ is int` are true of one that stands for ints.
# `type(n) is int` asks nobody, so the number of a call that asks is the program's: each number has a program. A number that
# is found in data has none, and there the functions that ask are rewritten: `int(n)`, `float(n)`, `len(x)`, `type(n)`, `max`
# and `min` give symbols.

# %%
kind = tfn.jit(lambda x, n: x * 2 if isinstance(n, int) else x, cache="symbolic values")
assert [kind(torch.ones(()), n).item() for n in (3, 4, 2.5)] == [2, 2, 1]

first = tfn.jit(lambda x: x[: max(int(x.max()), 1)] * len(x[x > 1]))
assert [first(torch.tensor(x)).tolist() for x in ([2, 1, 2], [0, 0, 0])] == [[4, 2], [0]]
assert tfn.cache_info(first).misses == 1

# %% [markdown]
# ## Where this lives
#
# `thunder_fn/ir/symbols.py` (symbols and what is known of them), `thunder_fn/jitted/families.py` (which program a call gets),
# `thunder_fn/jitted/dynamic.py` (when a number becomes a symbol).
