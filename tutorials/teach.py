"""thunder_fn in miniature: an immutable trace, capture, five interpreters, control flow, lowering, and their laws.

Read it from top to bottom, and run it: `python tutorials/teach.py`. Each part is what one folder of thunder_fn does, with all
that a small vocabulary lets one leave out. It is written after JAX's autodidax, for another design: transforms here are not
stacked interpreters of a running program but **functions from trace to trace**.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# ---- 1. The data ----------------------------------------------------------------------------------------------------
#
# A program is a value. Everything is frozen, and variables are numbered in the order in which they are bound, so that
# two traces are equal exactly if they are the same program. So a trace can be compared, hashed, and be the key of a memo.


@dataclass(frozen=True)
class Type:
    """The type of a tensor, which is known before its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Var:
    index: int
    type: Type

    def __str__(self) -> str:
        return f"v{self.index}"


@dataclass(frozen=True)
class Equation:
    """`outputs = op(*args, **params)`. A structured op runs its bodies, which are traces too."""

    op: str
    args: tuple[Var, ...]
    params: tuple[tuple[str, Any], ...]
    bodies: tuple[Trace, ...]
    outputs: tuple[Var, ...]


@dataclass(frozen=True)
class Trace:
    """A closed program: equations read its inputs and the results of equations before them."""

    inputs: tuple[Var, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Var, ...]

    def __str__(self) -> str:
        return program_text(self)


# ---- 2. The vocabulary ----------------------------------------------------------------------------------------------
#
# Leaf ops are PyTorch's own. PyTorch gives the type of a result: the op runs on tensors without memory. There is no
# broadcasting: an `expand` says so where it happens, which keeps the rules below short.

UNARY = ("neg", "sin", "cos", "exp", "tanh", "reciprocal")
LEAVES: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in (*UNARY, "add", "mul", "gt", "where", "matmul", "full_like")},
    "sum": lambda x, dims: torch.sum(x, dims) if dims else x.clone(),
    "expand": lambda x, shape: x.expand(shape),
    "reshape": lambda x, shape: x.reshape(shape),
    "permute": lambda x, dims: x.permute(dims),
}


def result_types(op: str, types: list[Type], params: dict[str, Any]) -> list[Type]:
    fakes = [torch.empty(type.shape, dtype=type.dtype, device="meta") for type in types]
    return [type_of(LEAVES[op](*fakes, **params))]


types_of = lambda variables: [var.type for var in variables]
type_of = lambda x: x.type if isinstance(x, Tracer) else Type(x.dtype, tuple(x.shape))


# ---- 3. Capture: a PyTorch function becomes a trace ------------------------------------------------------------------
#
# The function is run once, on tracers. A tracer stands for a variable, and every op on it adds an equation. Python's
# loops and choices leave no mark: a trace is what the function did for these types.


class Builder:
    """The one thing that changes, and it lives only while a function is captured."""

    def __init__(self) -> None:
        self.equations: list[Equation] = []
        self.indices = itertools.count()

    def tracer(self, type: Type) -> Tracer:
        return Tracer(self, Var(next(self.indices), type))


@dataclass(frozen=True, eq=False)
class Tracer:
    builder: Builder
    var: Var

    type = property(lambda self: self.var.type)
    shape = property(lambda self: self.type.shape)
    dtype = property(lambda self: self.type.dtype)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """PyTorch calls this for `torch.sin(tracer)`: PyTorch programs are captured as they are."""
        if function not in CAPTURED:
            raise NotImplementedError(f"the miniature does not know {function.__name__}; add it to CAPTURED")
        return CAPTURED[function](*args, **(kwargs or {}))

    def __bool__(self) -> bool:
        raise TypeError(f"the value of a {self.type} is not known while it is traced; write cond instead of if")

    sum = lambda self, *dims: sum_(self, dims or None)
    reshape = lambda self, *shape: bind("reshape", self, shape=shape)
    __neg__ = lambda self: bind("neg", self)
    __add__ = lambda self, other: binary("add", self, other)
    __mul__ = lambda self, other: binary("mul", self, other)
    __gt__ = lambda self, other: binary("gt", self, other)
    __sub__ = lambda self, other: binary("add", self, -other)
    __rsub__ = lambda self, other: binary("add", -self, other)
    __matmul__ = lambda self, other: bind("matmul", self, other)
    __radd__, __rmul__ = __add__, __mul__


def bind(op: str, *args: Any, bodies: tuple[Trace, ...] = (), **params: Any) -> Any:
    """Add an equation. On tensors, run it: rules and programs are written once and serve both."""
    tracers = [arg for arg in args if isinstance(arg, Tracer)]
    if not tracers:
        return EVALUATE[op](bodies, *args, **params)
    builder = tracers[0].builder
    if len(tracers) < len(args) or any(tracer.builder is not builder for tracer in tracers):
        raise TypeError(f"{op}: an operand is no value of this trace; make it an argument of the traced function")
    types = types_of(bodies[0].outputs) if bodies else result_types(op, [arg.type for arg in args], params)
    outputs = tuple(map(builder.tracer, types))
    names = tuple(tracer.var for tracer in tracers), tuple(tracer.var for tracer in outputs)
    builder.equations.append(Equation(op, names[0], tuple(params.items()), bodies, names[1]))
    return outputs if bodies else outputs[0]


def capture(f: Callable[..., Any], *types: Type) -> Trace:
    """The trace of a function on tensors of these types."""
    builder = Builder()
    inputs = tuple(builder.tracer(type) for type in types)
    outputs = as_tuple(f(*inputs))
    if not all(isinstance(output, Tracer) and output.builder is builder for output in outputs):
        raise TypeError("a traced function returns what it computed from its arguments")
    return Trace(tuple(x.var for x in inputs), tuple(builder.equations), tuple(x.var for x in outputs))


def binary(op: str, x: Any, y: Any) -> Any:
    """An elementwise op, broadcasting spelled out."""
    x = x if isinstance(x, (Tracer, torch.Tensor)) else bind("full_like", y, fill_value=x)
    y = y if isinstance(y, (Tracer, torch.Tensor)) else bind("full_like", x, fill_value=y)
    shape = tuple(torch.broadcast_shapes(x.shape, y.shape))
    return bind(op, expand(x, shape), expand(y, shape))


def sum_(x: Any, dim: int | tuple[int, ...] | None = None) -> Any:
    dims = range(len(x.shape)) if dim is None else as_tuple(dim)
    return bind("sum", x, dims=tuple(d % len(x.shape) for d in dims))


# Shorthands, for tensors and tracers alike, and the torch functions that are captured.
as_tuple = lambda x: x if isinstance(x, tuple) else (x,)
one_or_all = lambda outs: outs[0] if len(outs) == 1 else outs
expand = lambda x, shape: x if tuple(x.shape) == shape else bind("expand", x, shape=shape)
where = lambda c, x, y: bind("where", c, x, y)
run = lambda equation, args: bind(equation.op, *args, bodies=equation.bodies, **dict(equation.params))
tuple_text = lambda variables: f"({''.join(f'{var}, ' for var in variables)})"
transpose = lambda x: bind("permute", x, dims=(*range(len(x.shape) - 2), len(x.shape) - 1, len(x.shape) - 2))
CAPTURED: dict[Any, Callable[..., Any]] = {getattr(torch, name): functools.partial(bind, name) for name in UNARY}
CAPTURED |= {torch.sum: sum_, torch.where: where, torch.matmul: functools.partial(bind, "matmul")}
CAPTURED |= {torch.add: Tracer.__add__, torch.mul: Tracer.__mul__}


# ---- 4. Interpreters ------------------------------------------------------------------------------------------------
#
# An interpreter walks the equations with an environment from variables to values and asks a table what to do for each.
# The first one computes. On tracers it copies the trace into another one, which is how the others use it.

EVALUATE: dict[str, Callable[..., Any]] = {
    op: lambda bodies, *args, op=op, **params: LEAVES[op](*args, **params) for op in LEAVES
}


def evaluate(trace: Trace, *values: Any) -> tuple[Any, ...]:
    env = environment(trace, values)
    return tuple(env[var] for var in trace.outputs)


def environment(trace: Trace, values: tuple[Any, ...]) -> dict[Var, Any]:
    """The value of every variable."""
    env = dict(zip(trace.inputs, values, strict=True))
    for equation in trace.equations:
        outputs = run(equation, [env[var] for var in equation.args])
        env.update(zip(equation.outputs, as_tuple(outputs), strict=True))
    return env


# dce: the smallest interpreter. A walk backwards finds what is needed, a walk forwards copies it. (The new trace is made by
# capture again, which numbers the variables anew.)


def dce(trace: Trace) -> Trace:
    """The trace without equations that no output needs. Law: evaluates the same, and dce(dce(t)) == dce(t)."""
    needed = set(trace.outputs)
    for equation in reversed(trace.equations):
        if needed & set(equation.outputs):
            needed |= set(equation.args)
    kept = tuple(equation for equation in trace.equations if needed & set(equation.outputs))
    live = Trace(trace.inputs, kept, trace.outputs)
    return capture(functools.partial(evaluate, live), *types_of(trace.inputs))


# jvp and vjp share their knowledge of elementwise ops: the partial derivative by each operand, in ops of the vocabulary, so that
# a derivative has derivatives. 1.0 changes nothing and None is zero, everywhere below: neither costs an equation.

PARTIALS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "neg": lambda out, x: (bind("full_like", x, fill_value=-1.0),),
    "sin": lambda out, x: (bind("cos", x),),
    "cos": lambda out, x: (bind("neg", bind("sin", x)),),
    "exp": lambda out, x: (out,),
    "tanh": lambda out, x: (1.0 - out * out,),
    "reciprocal": lambda out, x: (-(out * out),),
    "add": lambda out, x, y: (1.0, 1.0),
    "mul": lambda out, x, y: (y, x),
    "gt": lambda out, x, y: (None, None),
    "full_like": lambda out, x, fill_value: (None,),
}

scaled = lambda partial, t: None if partial is None or t is None else t if isinstance(partial, float) else partial * t
plus = lambda x, y: y if x is None else x if y is None else x + y
zero_if_none = lambda t, like: bind("full_like", like, fill_value=0) if t is None else t


def jvp_rule(equation: Equation, args: list[Any], tangents: list[Any]) -> tuple[Any, Any]:
    """Operands and their tangents to results and their tangents."""
    op, params = equation.op, dict(equation.params)
    if equation.bodies:
        return structured_jvp_rule(equation, args, tangents)
    out = run(equation, args)
    if all(t is None for t in tangents):
        return out, None
    if op in PARTIALS:
        partials = PARTIALS[op](out, *args, **params)
        return out, functools.reduce(plus, map(scaled, partials, tangents))
    if op == "matmul":
        (x, y), (tx, ty) = args, tangents
        return out, plus(tx if tx is None else bind(op, tx, y), ty if ty is None else bind(op, x, ty))
    if op == "where":
        return out, where(args[0], *map(zero_if_none, tangents[1:], args[1:]))
    return out, bind(op, tangents[0], **params)  # the others are linear


@functools.cache
def jvp(trace: Trace) -> Trace:
    """Primals and tangents to results and their tangents. Law: those are the limit of (t(x + h v) - t(x)) / h."""
    n = len(trace.inputs)

    def program(*values: Any) -> tuple[Any, ...]:
        primals = dict(zip(trace.inputs, values[:n], strict=True))
        tangents: dict[Var, Any] = dict(zip(trace.inputs, values[n:], strict=True))
        for equation in trace.equations:
            args, moved = [primals[v] for v in equation.args], [tangents[v] for v in equation.args]
            out, tangent = jvp_rule(equation, args, moved)
            tangent = tangent if isinstance(tangent, tuple) else (tangent,) * len(equation.outputs)
            primals.update(zip(equation.outputs, as_tuple(out), strict=True))
            tangents.update(zip(equation.outputs, tangent, strict=True))
        outs = [primals[v] for v in trace.outputs]
        return (*outs, *(zero_if_none(tangents[v], out) for v, out in zip(trace.outputs, outs, strict=True)))

    return capture(program, *types_of(trace.inputs * 2))


def sum_to(ct: Any, shape: tuple[int, ...]) -> Any:
    lead = len(ct.shape) - len(shape)
    dims = (*range(lead), *(lead + i for i, n in enumerate(shape) if n == 1 and ct.shape[lead + i] != 1))
    return bind("reshape", bind("sum", ct, dims=dims), shape=shape)


def spread(ct: Any, shape: tuple[int, ...], dims: tuple[int, ...]) -> Any:
    kept = tuple(1 if i in dims else n for i, n in enumerate(shape))
    return expand(bind("reshape", ct, shape=kept), shape)


TRANSPOSE: dict[str, Callable[..., Any]] = {
    "sum": lambda ct, x, dims: spread(ct, tuple(x.shape), dims),
    "expand": lambda ct, x, shape: sum_to(ct, tuple(x.shape)),
    "reshape": lambda ct, x, shape: bind("reshape", ct, shape=tuple(x.shape)),
    "permute": lambda ct, x, dims: bind("permute", ct, dims=tuple(sorted(range(len(dims)), key=dims.__getitem__))),
}


def vjp_rule(equation: Equation, args: list[Any], outs: list[Any], cts: list[Any]) -> list[Any]:
    """The cotangents of the results to those of the operands. For a linear op this is its transpose."""
    op, params = equation.op, dict(equation.params)
    if all(ct is None for ct in cts):
        return [None] * len(args)
    if equation.bodies:
        return structured_vjp_rule(equation, args, list(map(zero_if_none, cts, outs)))
    (ct,) = cts
    if op in PARTIALS:
        return [scaled(partial, ct) for partial in PARTIALS[op](outs[0], *args, **params)]
    if op == "matmul":
        x, y = args
        return [bind(op, ct, transpose(y)), bind(op, transpose(x), ct)]
    if op == "where":
        zero = bind("full_like", ct, fill_value=0)
        return [None, where(args[0], ct, zero), where(args[0], zero, ct)]
    return [TRANSPOSE[op](ct, *args, **params)]


@functools.cache
def vjp(trace: Trace) -> Trace:
    """Inputs and the outputs' cotangents to the inputs' cotangents. Law: dot(vjp(t)(x, w), v) == dot(w, jvp(t)(x, v)).

    thunder_fn's own vjp gives two traces, forward and backward, with residuals between. Here one trace does both.
    """
    n = len(trace.inputs)

    def program(*values: Any) -> tuple[Any, ...]:
        env = environment(trace, values[:n])
        cts: dict[Var, Any] = {}
        for var, ct in zip(trace.outputs, values[n:], strict=True):
            cts[var] = plus(cts.get(var), ct)
        for equation in reversed(trace.equations):
            args, outs = [env[v] for v in equation.args], [env[v] for v in equation.outputs]
            found = vjp_rule(equation, args, outs, [cts.get(v) for v in equation.outputs])
            for var, ct in zip(equation.args, found, strict=True):
                cts[var] = plus(cts.get(var), ct)
        return tuple(zero_if_none(cts.get(var), env[var]) for var in trace.inputs)

    return dce(capture(program, *types_of(trace.inputs + trace.outputs)))


# vmap: a batched value has its batch dim first. An operand without one is expanded to have it, so that a rule only says what
# happens to the params.

VMAP: dict[str, Callable[..., Any]] = {
    "sum": lambda n, x, dims: bind("sum", x, dims=tuple(d + 1 for d in dims)),
    "reshape": lambda n, x, shape: bind("reshape", x, shape=(n, *shape)),
    "permute": lambda n, x, dims: bind("permute", x, dims=(0, *(d + 1 for d in dims))),
    "expand": lambda n, x, shape: expand(align(x, len(shape) + 1), (n, *shape)),
}


def align(x: Any, rank: int) -> Any:
    shape = (x.shape[0], *(1,) * (rank - len(x.shape)), *x.shape[1:])
    return x if tuple(x.shape) == shape else bind("reshape", x, shape=shape)


batched = lambda x, is_batched, n: x if is_batched else expand(x, (n, *x.shape))


@functools.cache
def vmap(trace: Trace, is_batched: tuple[bool, ...], n: int) -> Trace:
    """Give the outputs, and the inputs that `is_batched` marks, a first dim of size n. Law: it is a loop over that dim."""

    def program(*values: Any) -> tuple[Any, ...]:
        env = dict(zip(trace.inputs, zip(values, is_batched, strict=True), strict=True))
        for equation in trace.equations:
            out = vmap_rule(equation, [env[v] for v in equation.args], n)
            env.update(zip(equation.outputs, out, strict=True))
        return tuple(batched(*env[var], n) for var in trace.outputs)

    types = zip(types_of(trace.inputs), is_batched, strict=True)
    return capture(program, *(Type(type.dtype, (n, *type.shape)) if is_new else type for type, is_new in types))


def vmap_rule(equation: Equation, args: list[tuple[Any, bool]], n: int) -> list[tuple[Any, bool]]:
    if not any(is_batched for _, is_batched in args):
        return [(out, False) for out in as_tuple(run(equation, [x for x, _ in args]))]
    if equation.op == "cond":
        return vmap_cond_rule(equation, args, n)
    full = [batched(x, is_batched, n) for x, is_batched in args]
    if equation.op in VMAP:
        return [(VMAP[equation.op](n, *full, **dict(equation.params)), True)]
    outs = with_bodies(equation, lambda body: vmap(body, (True,) * len(full), n), *full)
    return [(out, True) for out in as_tuple(outs)]


# ---- 5. Structured ops: equations that own traces --------------------------------------------------------------------
#
# `call` is a composite: a function that keeps its name. `cond` runs one of two bodies. Every interpreter maps over bodies, and
# because a trace is a value and interpreters are pure, `functools.cache` does so once for each distinct body: twelve equal
# layers cost what one costs. The derivative of a cond is a cond of derivatives, on the same predicate, its first operand.

EVALUATE["call"] = lambda bodies, *args, name: evaluate(bodies[0], *args)
EVALUATE["cond"] = lambda bodies, predicate, *args: evaluate(bodies[0] if predicate else bodies[1], *args)


def cond(predicate: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    types = tuple(map(type_of, operands))
    bodies = (capture(true_fn, *types), capture(false_fn, *types))
    first, second = (types_of(body.outputs) for body in bodies)
    if first != second:
        raise TypeError(f"cond: the branches return {[*map(str, first)]} and {[*map(str, second)]}; make them equal")
    return one_or_all(bind("cond", predicate, *operands, bodies=bodies))


def with_bodies(equation: Equation, interpreter: Callable[[Trace], Trace], *operands: Any) -> Any:
    return bind(equation.op, *operands, bodies=tuple(map(interpreter, equation.bodies)), **dict(equation.params))


def structured_jvp_rule(equation: Equation, args: list[Any], tangents: list[Any]) -> tuple[Any, Any]:
    """The same op on the bodies' jvp. What precedes the operands of the bodies, a predicate, has no tangent."""
    first = len(args) - len(equation.bodies[0].inputs)
    outs = with_bodies(equation, jvp, *args, *map(zero_if_none, tangents[first:], args[first:]))
    return outs[: len(equation.outputs)], outs[len(equation.outputs) :]


def structured_vjp_rule(equation: Equation, args: list[Any], cts: list[Any]) -> list[Any]:
    first = len(args) - len(equation.bodies[0].inputs)
    found = with_bodies(equation, vjp, *args, *cts)
    return [None] * first + [
        ct if x.dtype.is_floating_point else None for x, ct in zip(args[first:], found, strict=True)
    ]


def vmap_cond_rule(equation: Equation, args: list[tuple[Any, bool]], n: int) -> list[tuple[Any, bool]]:
    """With one predicate for all, a cond of batched bodies. With a batched one, both branches and a select."""
    (predicate, varies), *operands = args
    full = [batched(x, is_batched, n) for x, is_batched in operands]
    interpreter = lambda body: vmap(body, (True,) * len(full), n)
    if not varies:
        return [(out, True) for out in with_bodies(equation, interpreter, predicate, *full)]
    branches = [evaluate(interpreter(body), *full) for body in equation.bodies]
    masks = [expand(align(predicate, len(x.shape)), tuple(x.shape)) for x in branches[0]]
    return [(where(mask, x, y), True) for mask, x, y in zip(masks, *branches, strict=True)]


# ---- 6. Lowering: the last interpreter -------------------------------------------------------------------------------
#
# A trace becomes the text of a Python program, and the text runs. Equal bodies become one function.


def program_text(trace: Trace, name: str = "program") -> str:
    names: dict[Trace, str] = {trace: name}
    texts: list[str] = []
    while len(texts) < len(names):  # writing a function may name more of them
        body = list(names)[len(texts)]
        texts.append(function_text(body, names[body], names))
    return "\n".join(reversed(texts))


def function_text(trace: Trace, name: str, names: dict[Trace, str]) -> str:
    lines = [f"def {name}({', '.join(f'{var}: {str(var.type)!r}' for var in trace.inputs)}):"]
    last = {var: position for position, equation in enumerate(trace.equations) for var in equation.args}
    for position, equation in enumerate(trace.equations):
        lines.append(f"    {line_text(equation, names)}  # {', '.join(str(var.type) for var in equation.outputs)}")
        dead = dict.fromkeys(v for v in equation.args if last[v] == position and v not in trace.outputs)
        lines += [f"    del {', '.join(map(str, dead))}"] if dead else []
    return "\n".join([*lines, f"    return {tuple_text(trace.outputs)}", ""])


def line_text(equation: Equation, names: dict[Trace, str]) -> str:
    args = list(map(str, equation.args))
    if not equation.bodies:
        params = [f"{key}={value!r}" for key, value in equation.params]
        return f"{equation.outputs[0]} = ops[{equation.op!r}]({', '.join([*args, *params])})"
    own = dict(equation.params).get("name", equation.op)
    bodies = [names.setdefault(body, f"{own}_{len(names)}") for body in equation.bodies]
    value = f"{bodies[0]}({', '.join(args)})"
    if equation.op == "cond":
        value = f"({bodies[0]} if {args[0]} else {bodies[1]})({', '.join(args[1:])})"
    return f"{tuple_text(equation.outputs)} = {value}"


@functools.cache
def lower(trace: Trace) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A function that computes what the trace says. Law: lower(t)(*xs) == evaluate(t, *xs), bit for bit."""
    context: dict[str, Any] = {"ops": LEAVES}
    exec(program_text(dce(trace)), context)
    return context["program"]


# ---- 7. The API: functions in, functions out -------------------------------------------------------------------------
#
# Each transform captures its function, transforms the trace and evaluates it. Where that happens inside another capture the
# values are tracers, evaluate inlines, and so everything nests. A jitted function becomes one `call` there.


def jit(f: Callable[..., Any]) -> Callable[..., Any]:
    traces: dict[tuple[Type, ...], Trace] = {}

    def jitted(*args: Any) -> Any:
        types = tuple(map(type_of, args))
        trace = traces.setdefault(types, traces.get(types) or capture(f, *types))
        if any(isinstance(arg, Tracer) for arg in args):
            return one_or_all(bind("call", *args, bodies=(trace,), name=f.__name__.strip("<>")))
        return one_or_all(lower(trace)(*args))

    return jitted


def grad(f: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient by the first argument of a function that returns a scalar."""

    def gradient(*args: Any) -> Any:
        trace = capture(f, *map(type_of, args))
        if len(trace.outputs) != 1 or trace.outputs[0].type.shape != ():
            raise TypeError(f"grad: expected one scalar, the function returns {[str(v.type) for v in trace.outputs]}")
        one = bind("full_like", evaluate(trace, *args)[0], fill_value=1.0)
        return evaluate(vjp(trace), *args, one)[0]

    return gradient


def batch(f: Callable[..., Any], in_dims: tuple[int | None, ...]) -> Callable[..., Any]:
    """f over the first dim of the arguments whose entry of in_dims is 0."""

    def mapped(*args: Any) -> Any:
        sizes = {arg.shape[0] for arg, dim in zip(args, in_dims, strict=True) if dim == 0}
        if len(sizes) != 1:
            raise TypeError(f"batch: the batched arguments must agree in their first size, given {sorted(sizes)}")
        new = tuple(dim == 0 for dim in in_dims)
        inner = (Type(x.dtype, tuple(x.shape)[first:]) for x, first in zip(args, new, strict=True))
        return one_or_all(evaluate(vmap(capture(f, *inner), new, sizes.pop()), *args))

    return mapped


# ---- 8. The laws -----------------------------------------------------------------------------------------------------
#
# A transform is right if equations hold between it and the others; a working example does not show that.
# thunder_fn.testing draws programs at random and holds every transform and every pair to its laws; here are the laws
# on two programs.

layer = lambda x, w: torch.tanh(x @ w) * 2.0


def network(x: Any, w: Any) -> Any:
    block = jit(layer)
    h = block(block(x, w), w)
    return cond(h.sum() > 0, lambda h: torch.sin(h), lambda h: h * h - 1.0, (h,)).sum()


def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = layer(layer(x, w), w)
    return (torch.sin(h) if h.sum() > 0 else h * h - 1.0).sum()


close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def main() -> None:
    torch.manual_seed(0)
    shapes = ((3, 4), (3, 4), (4, 4), (4, 4), (5, 3, 4))
    x, v, w, dw, xs = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    t = capture(network, type_of(x), type_of(w))
    print(t)
    print(vjp(t))

    # A trace is a value, and it computes what the function computes.
    assert t == capture(network, type_of(x), type_of(w)) and dce(dce(t)) == dce(t)
    for sign in (1.0, -1.0):
        close(lower(t)(sign * x, w)[0], reference(sign * x, w))
        close(evaluate(t, sign * x, w)[0], reference(sign * x, w))

    # Derivatives are those of autograd, and the two modes are adjoint.
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(reference(leaf, w), leaf)
    close(grad(network)(x, w), expected)
    tangent = evaluate(jvp(t), x, w, v, dw)[1]
    gx, gw = evaluate(vjp(t), x, w, torch.tensor(1.0, dtype=torch.float64))
    close((gx * v).sum() + (gw * dw).sum(), tangent)

    # Transforms commute: with jit, with each other, and with a loop.
    close(grad(jit(network))(x, w), expected)
    close(jit(grad(network))(x, w), expected)
    per_sample = torch.stack([grad(network)(row, w) for row in xs])
    close(batch(grad(jit(network)), (0, None))(xs, w), per_sample)
    close(jit(batch(grad(network), (0, None)))(xs, w), per_sample)
    close(grad(lambda xs, w: batch(network, (0, None))(xs, w).sum())(xs, w), per_sample)
    hvp = evaluate(jvp(capture(grad(network), *map(type_of, (x, w)))), x, w, v, torch.zeros_like(w))[1]
    close(grad(lambda x, w, v: (grad(network)(x, w) * v).sum())(x, w, v), hvp)

    # Equal layers are transformed once: of the deep network's calls, each derivative has one body.
    tower = lambda x, w: functools.reduce(lambda h, _: jit(layer)(h, w), range(12), x).sum()
    deep = capture(tower, type_of(x), type_of(w))
    assert len({e.bodies for e in deep.equations if e.op == "call"}) == 1
    assert len({e.bodies for e in vjp(deep).equations if e.op == "call"}) == 2


if __name__ == "__main__":
    main()
