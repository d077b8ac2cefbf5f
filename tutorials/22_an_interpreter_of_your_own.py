# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # An interpreter of your own, through loops and branches
#
# How far can a result be off if an input is off by at most `r`? An interpreter answers that for a whole program: beside
# each number it carries a bound on its error. JAX calls such an interpreter a transformation; here it is a function from
# trace to trace. It has three rules, and it goes through `scan`, `cond` and `while_loop` without a word about them.

# %%
from functools import partial

import torch

import thunder_fn as tfn
from thunder_fn.ir import (
    WIRINGS,
    Companion,
    Flow,
    Literal,
    Rules,
    TensorType,
    TraceBuilder,
    ops,
    put,
    through_bodies,
    walk,
)
from thunder_fn.testing import check_transform

aten = torch.ops.aten


def call(b, op, *args):
    return b.add(ops.leaf(op), args, (args[0].type,))[0]


# %% [markdown]
# A rule takes the builder, the value that the equation computes, and for each operand a pair of its value and its bound.
# It gives the bound of the value. `Rules` is the table; one line registers one rule.

# %%
bound = Rules("bound")


@bound.rule("aten.sin.default", "aten.cos.default", "aten.tanh.default")
def _(b, value, x):  # no steeper than the identity
    return x[1]


@bound.rule("aten.add.Tensor")
def _(b, value, x, y):
    return call(b, aten.add.Tensor, x[1], y[1])


@bound.rule("aten.mul.Tensor")
def _(b, value, x, y):  # (x + e)(y + f) - xy = xf + ey + ef
    first = call(b, aten.mul.Tensor, call(b, aten.abs.default, x[0]), y[1])
    second = call(b, aten.mul.Tensor, x[1], call(b, aten.add.Tensor, call(b, aten.abs.default, y[0]), y[1]))
    return call(b, aten.add.Tensor, first, second)


# %% [markdown]
# Where there is no rule the bound is infinite, which is always right. A flow says which values have a bound at all: all
# floating results of what has one. `Companion` puts the parts together, and `through_bodies` takes any structured op
# through them. Carries that get a bound on the way begin with zero, and branches agree.


# %%
def is_float(var):
    return isinstance(var.type, TensorType) and var.type.dtype.is_floating_point


def filled(b, atom, number):
    return (b.add(ops.leaf(aten.full_like.default), (atom, Literal(number)), (atom.type,))[0],)


def bound_of(b, equation, value, operands):
    rule = bound.find(equation.op)
    pairs = [slots if len(slots) > 1 else (slots[0], *filled(b, slots[0], 0.0)) for slots in operands]
    plain = len(equation.args) == len(pairs) and not equation.kwargs  # no numbers among the arguments
    same = plain and all(slots[0].type == value.type for slots in pairs)  # nothing is broadcast
    return rule(b, value, *pairs) if rule and same else filled(b, value, float("inf"))[0]


def step(b, equation, operands):
    if WIRINGS.find(equation.op):
        return through_bodies(b, equation, operands, BOUNDS)
    if equation.op.kind == "composite":
        return walk(b, equation.body, operands, partial(step, b), lift=lambda a: (a,), call=equation.source)
    values = put(b, equation, [slots[0] for slots in operands])
    if all(len(slots) == 1 for slots in operands):
        return [(value,) for value in values]
    return [(v, bound_of(b, equation, v, operands)) if is_float(v) else (v,) for v in values]


def on_pairs(trace, given, wanted):
    b = TraceBuilder(f"{trace.name}_bounds")
    inputs = []
    for var, flag in zip(trace.inputs, given, strict=True):
        value = b.input(var.type)
        inputs.append((value, b.input(var.type)) if flag else (value,))
    outputs = walk(b, trace, inputs, partial(step, b), lift=lambda a: (a,))
    found = [
        (s[0], *(s[1:] or filled(b, s[0], 0.0))) if flag else s[:1] for s, flag in zip(outputs, wanted, strict=True)
    ]
    return b.build(tuple(atom for slots in found for atom in slots))


has_bound = Flow("forward", lambda equation, flags: tuple(map(is_float, equation.outputs)), only=is_float)
BOUNDS = Companion(has_bound, on_pairs, lambda b, atom: filled(b, atom, 0.0), lambda type: (type,))


def with_bounds(trace):
    """The trace on values and bounds of their errors, for every floating input and output."""
    given = tuple(map(is_float, trace.inputs))
    return on_pairs(trace, given, has_bound.over(trace, given))


# %% [markdown]
# A program with a loop, a choice in each step, and a loop until something holds:


# %%
def program(x, rows):
    def turn(c, row):
        c = tfn.cond(c.sum() > 0, lambda c: c * row, lambda c: c.sin() + row, (c,))
        return c, c.cos()

    c, ys = tfn.scan(turn, x, rows)
    _, c = tfn.while_loop(lambda n, c: n < 2, lambda n, c: (n + 1, (c * c).sin()), (torch.tensor(0), c))
    return c, ys


torch.manual_seed(0)
x, rows = torch.randn(3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
trace = tfn.trace(program, x, rows)
new = with_bounds(trace)
print(new)
tfn.check(new)

# %% [markdown]
# The values are those of the program, bitwise. The bounds hold for every disturbance that we try, and are not idle.

# %%
radius = torch.full_like(x, 1e-3)
c, c_bound, ys, ys_bound = tfn.evaluate(new, (x, radius, rows, torch.zeros_like(rows)))
assert torch.equal(c, program(x, rows)[0]) and torch.equal(ys, program(x, rows)[1])
worst = 0.0
for _ in range(100):
    found = program(x + radius * (2 * torch.rand_like(x) - 1), rows)[0]
    worst = max(worst, float(((found - c).abs() / c_bound).max()))
print(f"largest change seen, as a part of the bound: {worst:.2f}")
assert 0.01 < worst <= 1.0

# %% [markdown]
# It composes: the bounds of a gradient's program, by the same function. And the law suite holds it to what every
# transform promises, on traces that nobody wrote: its result checks, equal traces give equal traces, and constraints stay.

# %%
gradient = tfn.trace(tfn.grad(lambda x: tfn.scan(lambda c, row: (c.sin() * row, None), x, rows)[0].sum()), x)
tfn.check(with_bounds(gradient))
check_transform(with_bounds, keeps="nothing", max_examples=5)

# %% [markdown]
# What must not hold: a bound that forgets the product of both errors is too small, and a disturbance shows it.

# %%
a, r = torch.ones(1, dtype=torch.float64), torch.full((1,), 0.5, dtype=torch.float64)
square = with_bounds(tfn.trace(lambda x: x * x, a))
_, right = tfn.evaluate(square, (a, r))
wrong = 2 * a.abs() * r
assert wrong < (a + r) ** 2 - a**2 <= right

# %% [markdown]
# Where this lives: `thunder_fn/ir/` has `walk`, `put`, flows and `through_bodies`; forward mode
# (`thunder_fn/interpreters/jvp.py`) is such an interpreter, whose companions are tangents. A structured op says once how
# values go through its bodies (`@wiring` in its file under `thunder_fn/structured/`), and then every interpreter knows it.
