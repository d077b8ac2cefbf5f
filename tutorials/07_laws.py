# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Laws: write a transform, watch it fail, fix it
#
# Here is a transform: it sorts the operands of sums, so that `x + y` and `y + x` become
# the same equation and `cse` computes it once. `rewritten` copies a trace equation by equation; a function of ours says what
# stands in place of each, and `put` appends it as it is.

# %%
import torch

import thunder_fn as tfn
from thunder_fn.ir import Literal, TensorType, Trace, ops, put, rewritten
from thunder_fn.testing import LawBroken, build, cases, check_transform, in_dims, programs, pytrees

SUM = ops.leaf(torch.ops.aten.add.Tensor)


def sorted_sums(trace: Trace) -> Trace:
    def rewrite(builder, equation, operands):
        if equation.op == SUM:
            args = tuple(sorted(operands, key=lambda var: var.index))
            return builder.add(SUM, args, (equation.outputs[0].type,), kwargs=equation.kwargs)
        return put(builder, equation, operands)

    return rewritten(trace, rewrite)


twice = tfn.trace(lambda x, y: (x + y) * (y + x), torch.ones(3), torch.ones(3))
print(twice)
print(tfn.interpreters.simplify.cse(sorted_sums(twice)))

# %% [markdown]
# It works here. Does it always? One call tries it on random traces: is what it makes a checked trace, is it pure, does it
# keep values and what a trace carries, and does it commute with every transform there is?

# %%
try:
    check_transform(sorted_sums, max_examples=300)
except LawBroken as error:
    print(error)
    smallest = str(error)
assert smallest.startswith('sorted_sums breaks the law "keeps values"')
assert "alpha" in smallest and "The first equation whose value is not in the new trace" in smallest

# %% [markdown]
# The traces that are drawn have loops, choices and dead code in them. The failing trace shrinks to a single sum of
# two different things, and one look at it is enough: `add` has a keyword argument, `alpha`, that multiplies the
# second operand. A random trace is *data*, a list of steps of which any may be missing, so what broke the law was
# deleted step by step for as long as the law stayed broken. The last lines say how to see it again.


# %%
def sorted_plain_sums(trace: Trace) -> Trace:
    def rewrite(builder, equation, operands):
        if equation.op == SUM and len(operands) == 2 and not equation.kwargs:
            args = tuple(sorted(operands, key=lambda var: var.index))
            return builder.add(SUM, args, (equation.outputs[0].type,))
        return put(builder, equation, operands)

    return rewritten(trace, rewrite)


check_transform(sorted_plain_sums, idempotent=True, max_examples=20)

# %% [markdown]
# ## What a trace carries
#
# A trace has more than equations: constraints, which guard what it may be called with, and the user's tensors that it closes
# over. The values of a copy that leaves the constraints out are right, and it would be called where it must not be.


# %%
def without_constraints(trace: Trace) -> Trace:
    return Trace(trace.inputs, trace.equations, trace.outputs, trace.constants, constraints=())


try:
    check_transform(without_constraints, max_examples=20)
except LawBroken as error:
    careless = str(error)
assert careless.startswith('without_constraints breaks the law "carries facts"')

# %% [markdown]
# ## Pairs
#
# The next one drops `detach`, which computes nothing. Its values are right on every trace, and tests that look at values
# would never complain.

# %%
DETACH = ops.STOP_GRADIENT


def without_detach(trace: Trace) -> Trace:
    return rewritten(trace, _without_detach)


def _without_detach(builder, equation, operands):
    return operands if equation.op == DETACH else put(builder, equation, operands)


stopped = tfn.trace(lambda x: x.detach() * x, torch.ones(3))
x = torch.randn(3)
assert torch.equal(tfn.evaluate(without_detach(stopped), [x])[0], tfn.evaluate(stopped, [x])[0])

try:
    check_transform(without_detach, max_examples=300)
except LawBroken as error:
    print(error)
    broken = str(error)
assert broken.startswith('without_detach breaks the law "commutes with vjp"')

# %% [markdown]
# To commute with `vjp` is to mean the same when gradients are taken afterwards. In thunder_fn every two of `vjp`, `jvp`,
# `vmap`, `checkpoint`, `dce`, `cse`, `inline` and the other simplifying transforms are tested so, in both orders
# (`tests/laws/test_pairs.py`), and the pairs that do *not* commute have witnesses, which fail when they start to.
#
# ## What must not hold
#
# A transform that changes values promises less. Rounding to bfloat16 gives checked traces and is pure; that is all.

# %%
F64, DOWN = torch.float64, ops.leaf(torch.ops.aten._to_copy.default)


def rounded(trace: Trace) -> Trace:
    def rewrite(builder, equation, operands):
        type = equation.outputs[0].type if len(equation.outputs) == 1 else None
        if equation.op.kind != "leaf" or not isinstance(type, TensorType) or type.dtype != F64:
            return put(builder, equation, operands)
        (exact,) = put(builder, equation, operands)
        half = TensorType(torch.bfloat16, type.shape)
        (low,) = builder.add(DOWN, (exact,), (half,), kwargs=(("dtype", Literal(torch.bfloat16)),))
        return builder.add(DOWN, (low,), (type,), kwargs=(("dtype", Literal(F64)),))

    return rewritten(trace, rewrite)


check_transform(rounded, keeps="nothing", max_examples=20)
try:
    check_transform(rounded)
except LawBroken as error:
    assert str(error).startswith('rounded breaks the law "keeps values"')
else:
    raise AssertionError("bfloat16 has eight bits")

# %% [markdown]
# ## Your own laws
#
# `programs`, `traces`, `cases`, `in_dims` and `pytrees` are Hypothesis strategies, for laws of your own.

# %%
from hypothesis import given, settings


@settings(max_examples=10, deadline=None, database=None)
@given(case=cases(max_steps=5))
def evaluating_twice_gives_the_same(case):
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        runs.append(tfn.evaluate(case.trace, case.inputs))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*runs, strict=True))


evaluating_twice_gives_the_same()
assert all(map(callable, (build, programs, in_dims, pytrees)))

# %% [markdown]
# The laws themselves are tested by planting bugs in the library: `python -m thunder_fn laws` prints which law catches which.
#
# Where this lives: strategies in `thunder_fn/testing/strategies.py`, laws in `thunder_fn/testing/laws/`, planted bugs in
# `thunder_fn/testing/mutations/`, `check_transform` in `thunder_fn/testing/user.py`.
