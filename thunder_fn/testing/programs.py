"""Programs as data: what the strategies draw, and what a failing law shrinks.

    Program ::= inputs: TensorType*  steps: Step*  outputs: pick*
    Step    ::= op  picks: pick*  body: Program?

A step names no variable. It has picks, small numbers that count back from the newest variable that suits the place, so
0 is the latest result; missing picks are 0, and a step that nothing suits does nothing. Hence every Program builds a
valid trace, whatever its numbers are, and still does when a step, a pick or an input is deleted: that is what lets
Hypothesis shrink it to the few equations that break a law. A composite's body is a Program without inputs of its own:
it takes the types of the operands that it is called with.

A new leaf is one more function with `@step`; a structured op is a step that builds its bodies with `Draft.closed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from thunder_fn import ops
from thunder_fn.check import fake_result_types
from thunder_fn.derive import is_differentiable
from thunder_fn.trace import Arg, Equation, Literal, Op, TensorType, Trace, TraceBuilder, Type, Var

aten = torch.ops.aten
MAX_ELEMENTS = 100


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a program: an op of `STEPS`, the picks that say on what, and a composite's body."""

    op: str
    picks: tuple[int, ...] = ()
    body: Program | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """A program as data. `build` makes it a trace; its repr is its own reproducer.

    Without picks for its outputs it returns every variable that nothing uses.
    """

    inputs: tuple[TensorType, ...] = ()
    steps: tuple[Step, ...] = ()
    outputs: tuple[int, ...] = ()


def build(program: Program, name: str = "program") -> Trace:
    """The trace of a program: closed, with types from running each op on fake tensors.

    Law: ``check(build(p))`` holds for every p, and ``build(p) == build(p)``.
    """
    return Draft.closed(program, program.inputs, name)


def example_inputs(trace: Trace, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Values for the inputs of a trace: finite, small, away from 0 and the other kinks. Some are not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(random_tensor(type, generator) for type in trace.input_types if isinstance(type, TensorType))


def random_tensor(type: TensorType, generator: torch.Generator) -> torch.Tensor:
    """A tensor of a type. Floats are quarters shifted by an irrational offset."""
    shape = tuple(size for size in type.shape if isinstance(size, int))
    turned = bool(torch.randint(0, 4, (), generator=generator) == 0)
    whole = torch.randint(-6, 7, shape[::-1] if turned else shape, generator=generator)
    if turned:
        whole = whole.permute(tuple(reversed(range(len(shape)))))
    if type.dtype is torch.bool:
        return whole > 0
    if type.dtype.is_complex:
        other = torch.randint(-6, 7, shape, generator=generator)
        return torch.complex(whole / 4 + 2**0.5 / 20, other / 4 + 3**0.5 / 20).to(type.dtype)
    if type.dtype.is_floating_point:
        return whole.to(type.dtype) / 4 + 2**0.5 / 20
    return whole.to(type.dtype)


# ---- drafting: programs become traces ----


class Skip(Exception):
    """Nothing suits a step here."""


Suits: TypeAlias = Callable[[Var], bool]


@dataclass(slots=True)
class Draft:
    """A trace that is being built from a program, and the picks of the step that is being taken."""

    builder: TraceBuilder
    env: list[Var]
    calls: list[Equation] = field(default_factory=list)
    picks: Iterator[int] = iter(())

    @staticmethod
    def closed(program: Program, types: tuple[TensorType, ...], name: str) -> Trace:
        """The trace of a program that takes inputs of these types."""
        builder = TraceBuilder(name)
        draft = Draft(builder, [builder.input(type) for type in types])
        for step in program.steps:
            draft.take(step)
        if not program.outputs:
            return builder.build(draft.unused())
        return builder.build(tuple(draft.env[-1 - pick % len(draft.env)] for pick in program.outputs if draft.env))

    def take(self, step: Step) -> None:
        """Append what a step does, or nothing if nothing suits it."""
        self.picks = iter(step.picks)
        mark = len(self.builder.equations), len(self.env)
        try:
            STEPS[step.op](self, step)
        except Skip:
            del self.builder.equations[mark[0] :], self.env[mark[1] :]

    def unused(self) -> tuple[Var, ...]:
        used = {var.index for equation in self.builder.equations for var in equation.operands}
        return tuple(var for var in self.env if var.index not in used)

    # picks

    def number(self, count: int) -> int:
        """A number below count."""
        if count <= 0:
            raise Skip
        return next(self.picks, 0) % count

    def var(self, suits: Suits) -> Var:
        """One of the variables that suit, 0 being the newest."""
        found = [var for var in reversed(self.env) if suits(var)]
        return found[self.number(len(found))]

    def dim(self, var: Var) -> int:
        return self.number(len(shape_of(var)))

    # equations

    def leaf(self, overload: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> tuple[Var, ...]:
        """Append a leaf; its tensor results join the environment."""
        op = ops.leaf(overload)
        new_args, new_kwargs = tuple(map(as_arg, args)), tuple((key, as_arg(value)) for key, value in kwargs.items())
        try:
            types = fake_result_types(Equation(op, new_args, new_kwargs, ()))
        except (RuntimeError, IndexError, TypeError, ValueError):
            raise Skip from None
        if types is None or any(_elements(type) > MAX_ELEMENTS for type in types):
            raise Skip
        return self.bind(self.builder.add(op, new_args, types, kwargs=new_kwargs))

    def call(self, op: Op, args: tuple[Arg, ...], body: Trace, kwargs: tuple[tuple[str, Arg], ...] = ()) -> None:
        """Append a composite."""
        self.bind(self.builder.add(op, args, body.output_types, kwargs=kwargs, bodies=(body,)))
        self.calls.append(self.builder.equations[-1])

    def bind(self, variables: tuple[Var, ...]) -> tuple[Var, ...]:
        self.env.extend(var for var in variables if isinstance(var.type, TensorType))
        return variables


def as_arg(value: Any) -> Arg:
    """A Python value as an argument of an equation."""
    if isinstance(value, Var):
        return value
    return tuple(map(as_arg, value)) if isinstance(value, (tuple, list)) else Literal(value)


def _elements(type: Type) -> int:
    return torch.Size(static_shape(type)).numel() if isinstance(type, TensorType) else 0


def static_shape(type: TensorType) -> tuple[int, ...]:
    return tuple(size for size in type.shape if isinstance(size, int))


def tensor_type(var: Var) -> TensorType:
    if not isinstance(var.type, TensorType):
        raise Skip
    return var.type


def shape_of(var: Var) -> tuple[int, ...]:
    return static_shape(tensor_type(var))


def dtype_of(var: Var) -> torch.dtype:
    return tensor_type(var).dtype


# ---- what suits ----


def is_any(_: Var) -> bool:
    return True


def is_inexact(var: Var) -> bool:
    return is_differentiable(var.type)


def is_real(var: Var) -> bool:
    return dtype_of(var).is_floating_point


def is_complex(var: Var) -> bool:
    return dtype_of(var).is_complex


def is_ordered(var: Var) -> bool:
    return not dtype_of(var).is_complex and dtype_of(var) is not torch.bool


def is_number(var: Var) -> bool:
    return dtype_of(var) is not torch.bool


def is_integer(var: Var) -> bool:
    return dtype_of(var) is torch.int64


def is_mask(var: Var) -> bool:
    return dtype_of(var) is torch.bool


def has_rank(*ranks: int) -> Suits:
    return lambda var: len(shape_of(var)) in ranks


def both(*conditions: Suits) -> Suits:
    return lambda var: all(condition(var) for condition in conditions)


def has_dims(var: Var) -> bool:
    return len(shape_of(var)) > 0


def has_elements(var: Var) -> bool:
    return 0 not in shape_of(var)


def broadcasts_with(*others: Var) -> Suits:
    def suits(var: Var) -> bool:
        try:
            torch.broadcast_shapes(shape_of(var), *map(shape_of, others))
        except RuntimeError:
            return False
        return True

    return suits


def has_type_of(other: Var) -> Suits:
    return lambda var: var.type == other.type


def same_dtype(other: Var) -> Suits:
    return lambda var: dtype_of(var) == dtype_of(other)


# ---- the steps ----

Rule: TypeAlias = Callable[[Draft, Step], None]
STEPS: dict[str, Rule] = {}
"""Each step by name: what it appends to a draft. Simple ones first, which is where shrinking leads."""

FAMILIES: dict[str, list[str]] = {}
"""The steps by family. A large family is drawn no more often than a small one."""

FREQUENT = ("binary", "binary", "unary", "arithmetic", "reduction", "matmul", "view", "list", "twin", "composite", "composite")
"""Families that are drawn more often, once more for each time they stand here."""


def register(family: str, name: str, rule: Rule) -> None:
    """Enter a step into the tables."""
    STEPS[name] = rule
    FAMILIES.setdefault(family, []).append(name)


def step(family: str) -> Callable[[Callable[[Draft], object]], Callable[[Draft], object]]:
    """Enter a function as a step of a family, under its own name."""

    def enter(f: Callable[[Draft], object]) -> Callable[[Draft], object]:
        register(family, f.__name__, lambda draft, _: void(f(draft)))
        return f

    return enter


def void(_: object) -> None:
    return None


def _unary(name: str, suits: Suits) -> None:
    overload = getattr(aten, name).default
    register("unary", name, lambda draft, _: void(draft.leaf(overload, draft.var(suits))))


def _binary(name: str, suits: Suits, variant: str = "Tensor") -> None:
    overload = getattr(getattr(aten, name), variant)

    def rule(draft: Draft, _: Step) -> None:
        x = draft.var(suits)
        draft.leaf(overload, x, draft.var(both(suits, broadcasts_with(x))))

    register("mask" if suits in (is_mask, is_ordered) else "binary", name, rule)


for _name in ("sin", "neg", "cos", "tanh", "sigmoid", "exp"):
    _unary(_name, is_inexact)
for _name in ("add", "mul"):
    _binary(_name, is_number)
for _name in ("sub", "div"):
    _binary(_name, is_inexact)
for _name in ("relu", "silu", "gelu", "erf", "softplus", "abs"):
    _unary(_name, is_real)
for _name, _variant in (("maximum", "default"), ("minimum", "default"), ("atan2", "default")):
    _binary(_name, is_real, _variant)
for _name in ("gt", "le", "ne"):
    _binary(_name, is_ordered)
for _name in ("logical_and", "bitwise_xor"):
    _binary(_name, is_mask, "default" if _name == "logical_and" else "Tensor")


@step("arithmetic")
def add_scaled(d: Draft) -> object:
    x = d.var(is_inexact)
    y = d.var(both(is_inexact, broadcasts_with(x)))
    return d.leaf(aten.add.Tensor, x, y, alpha=(2, 0, -3)[d.number(3)])


@step("arithmetic")
def scalar(d: Draft) -> object:
    x = d.var(is_inexact)
    overload = (aten.mul.Scalar, aten.add.Scalar, aten.div.Scalar)[d.number(3)]
    return d.leaf(overload, x, (2.0, -0.5, 3)[d.number(3)])


@step("arithmetic")
def power(d: Draft) -> object:
    return d.leaf(aten.pow.Tensor_Scalar, d.var(is_inexact), (2, 3, 1, 0)[d.number(4)])


@step("arithmetic")
def add_both(d: Draft) -> object:
    """Two equations that differ in a keyword argument alone."""
    x = d.var(is_inexact)
    y = d.var(both(is_inexact, broadcasts_with(x)))
    return d.leaf(aten.add.Tensor, x, y, alpha=2), d.leaf(aten.add.Tensor, x, y, alpha=-3)


@step("unary")
def clamp(d: Draft) -> object:
    bounds = ((-0.5, 0.5), (None, 0.25), (0.0, None))[d.number(3)]
    return d.leaf(aten.clamp.default, d.var(is_real), *bounds)


@step("arithmetic")
def lerp(d: Draft) -> object:
    x = d.var(is_real)
    y = d.var(both(same_dtype(x), broadcasts_with(x)))
    return d.leaf(aten.lerp.Tensor, x, y, d.var(both(same_dtype(x), broadcasts_with(x, y))))


# reductions


def _dims(d: Draft, var: Var) -> list[int]:
    """One dim, all of them, or the two outermost."""
    rank = len(shape_of(var))
    return ([d.dim(var)] if rank else [], list(range(rank)), [0, rank - 1] if rank > 1 else [])[d.number(3)]


@step("reduction")
def sum(d: Draft) -> object:
    x = d.var(is_any)
    return d.leaf(aten.sum.dim_IntList, x, _dims(d, x), d.number(2) == 1)


@step("reduction")
def sum_all(d: Draft) -> object:
    return d.leaf(aten.sum.default, d.var(is_any))


@step("reduction")
def mean(d: Draft) -> object:
    x = d.var(both(is_inexact, has_elements))
    return d.leaf(aten.mean.dim, x, _dims(d, x), d.number(2) == 1)


@step("reduction")
def amax(d: Draft) -> object:
    x = d.var(both(is_real, has_elements))
    return d.leaf(aten.amax.default, x, _dims(d, x), d.number(2) == 1)


@step("reduction")
def variance(d: Draft) -> object:
    x = d.var(both(is_real, has_elements))
    return d.leaf(aten.var.correction, x, _dims(d, x), correction=0, keepdim=True)


@step("reduction")
def max_along(d: Draft) -> object:
    x = d.var(both(is_real, has_elements, has_dims))
    return d.leaf(aten.max.dim, x, d.dim(x))


@step("reduction")
def cumsum(d: Draft) -> object:
    x = d.var(both(is_inexact, has_dims))
    return d.leaf(aten.cumsum.default, x, d.dim(x))


@step("reduction")
def sort(d: Draft) -> object:
    x = d.var(both(is_real, has_dims))
    return d.leaf(aten.sort.default, x, d.dim(x), d.number(2) == 1)


@step("reduction")
def logsumexp(d: Draft) -> object:
    x = d.var(both(is_real, has_elements, has_dims))
    return d.leaf(aten.logsumexp.default, x, [d.dim(x)])


# matrix products


def _matrix(d: Draft, like: Var | None = None) -> Var:
    return d.var(both(is_inexact, has_rank(2), is_any if like is None else same_dtype(like)))


@step("matmul")
def mm(d: Draft) -> object:
    x = _matrix(d)
    (turned,) = d.leaf(aten.t.default, _matrix(d, x))
    fits: Suits = lambda var: shape_of(var)[0] == shape_of(x)[1]
    return d.leaf(aten.mm.default, x, d.var(both(same_dtype(x), has_rank(2), fits, lambda var: var is turned or is_any(var))))


@step("matmul")
def addmm(d: Draft) -> object:
    x = _matrix(d)
    y = d.var(both(same_dtype(x), has_rank(2), lambda var: shape_of(var)[0] == shape_of(x)[1]))
    shape = (shape_of(x)[0], shape_of(y)[1])
    is_bias: Suits = lambda var: torch.Size(shape) == broadcast(shape_of(var), shape)
    return d.leaf(aten.addmm.default, d.var(both(same_dtype(x), is_bias)), x, y)


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> torch.Size | None:
    try:
        return torch.broadcast_shapes(a, b)
    except RuntimeError:
        return None


@step("matmul")
def bmm(d: Draft) -> object:
    x = d.var(both(is_inexact, has_rank(3)))
    (turned,) = d.leaf(aten.transpose.int, x, 1, 2)
    return d.leaf(aten.bmm.default, *((x, turned) if d.number(2) else (turned, x)))


# views


@step("view")
def reshape(d: Draft) -> object:
    x = d.var(is_any)
    shape = shape_of(x)
    shapes = ([torch.Size(shape).numel()], [*shape, 1], [*shape[::-1]], [1, *shape[1:], *shape[:1]])
    return d.leaf(aten.reshape.default, x, shapes[d.number(4)])


@step("view")
def transpose(d: Draft) -> object:
    x = d.var(has_dims)
    return d.leaf(aten.transpose.int, x, d.dim(x), -1)


@step("view")
def permute(d: Draft) -> object:
    x = d.var(has_dims)
    return d.leaf(aten.permute.default, x, list(reversed(range(len(shape_of(x))))))


@step("view")
def expand(d: Draft) -> object:
    x = d.var(is_any)
    like = d.var(lambda var: broadcast(shape_of(x), shape_of(var)) == torch.Size(shape_of(var)))
    return d.leaf(aten.expand.default, x, list(shape_of(like)))


@step("view")
def expand_front(d: Draft) -> object:
    x = d.var(is_any)
    return d.leaf(aten.expand.default, x, [(2, 1, 0)[d.number(3)], *shape_of(x)])


@step("view")
def select(d: Draft) -> object:
    x = d.var(both(has_dims, has_elements))
    dim = d.dim(x)
    return d.leaf(aten.select.int, x, dim, d.number(shape_of(x)[dim]))


@step("view")
def slice(d: Draft) -> object:
    x = d.var(has_dims)
    start, stop, stride = ((0, 1, 1), (1, 9223372036854775807, 1), (0, 2, 2), (1, 1, 1), (-2, -1, 1))[d.number(5)]
    return d.leaf(aten.slice.Tensor, x, d.dim(x), start, stop, stride)


@step("view")
def unsqueeze(d: Draft) -> object:
    x = d.var(is_any)
    return d.leaf(aten.unsqueeze.default, x, d.number(len(shape_of(x)) + 1))


@step("view")
def squeeze(d: Draft) -> object:
    x = d.var(has_dims)
    return d.leaf(aten.squeeze.dim, x, d.dim(x))


@step("view")
def flip(d: Draft) -> object:
    x = d.var(has_dims)
    return d.leaf(aten.flip.default, x, [d.dim(x)])


@step("view")
def diagonal(d: Draft) -> object:
    return d.leaf(aten.diagonal.default, d.var(has_rank(2)))


@step("view")
def pad(d: Draft) -> object:
    return d.leaf(aten.constant_pad_nd.default, d.var(both(is_inexact, has_dims)), [1, 0], 0.5)


# lists in, lists out


@step("list")
def cat(d: Draft) -> object:
    x = d.var(has_dims)
    dim = d.dim(x)
    y = d.var(lambda var: _without(shape_of(var), dim) == _without(shape_of(x), dim) and same_dtype(x)(var))
    return d.leaf(aten.cat.default, [x, y, x][: 1 + d.number(3)], dim)


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...] | None:
    return (*shape[:dim], *shape[dim + 1 :]) if dim < len(shape) else None


@step("list")
def stack(d: Draft) -> object:
    x = d.var(is_any)
    return d.leaf(aten.stack.default, [x, d.var(has_type_of(x))], d.number(len(shape_of(x)) + 1))


@step("list")
def split(d: Draft) -> object:
    x = d.var(both(has_dims, has_elements))
    return d.leaf(aten.split.Tensor, x, 1 + d.number(2), d.dim(x))


@step("list")
def unbind(d: Draft) -> object:
    x = d.var(both(has_dims, has_elements))
    return d.leaf(aten.unbind.int, x, d.dim(x))


# masks and choices


@step("mask")
def where(d: Draft) -> object:
    mask = d.var(is_mask)
    x = d.var(both(is_inexact, broadcasts_with(mask)))
    return d.leaf(aten.where.self, mask, x, d.var(both(same_dtype(x), broadcasts_with(mask, x))))


@step("mask")
def masked_fill(d: Draft) -> object:
    x = d.var(is_inexact)
    return d.leaf(aten.masked_fill.Scalar, x, d.var(both(is_mask, broadcasts_with(x))), 0.5)


@step("mask")
def is_positive(d: Draft) -> object:
    return d.leaf(aten.gt.Scalar, d.var(is_ordered), 0)


@step("mask")
def argmax(d: Draft) -> object:
    x = d.var(both(is_real, has_elements, has_dims))
    return d.leaf(aten.argmax.default, x, d.dim(x))


# indices: any integers, made valid by their remainder


def _indices(d: Draft, size: int, *conditions: Suits) -> Var:
    if size == 0:
        raise Skip
    (found,) = d.leaf(aten.remainder.Scalar, d.var(both(is_integer, *conditions)), size)
    return found


@step("index")
def index_select(d: Draft) -> object:
    x = d.var(has_dims)
    dim = d.dim(x)
    return d.leaf(aten.index_select.default, x, dim, _indices(d, shape_of(x)[dim], has_rank(0, 1)))


@step("index")
def gather(d: Draft) -> object:
    x = d.var(has_rank(1))
    return d.leaf(aten.gather.default, x, 0, _indices(d, shape_of(x)[0], has_rank(1)))


@step("index")
def embedding(d: Draft) -> object:
    x = d.var(both(is_real, has_rank(2)))
    return d.leaf(aten.embedding.default, x, _indices(d, shape_of(x)[0]))


@step("index")
def index(d: Draft) -> object:
    x = d.var(has_rank(2))
    return d.leaf(aten.index.Tensor, x, [None, _indices(d, shape_of(x)[1])])


@step("index")
def scatter_add(d: Draft) -> object:
    x = d.var(both(is_inexact, has_rank(1)))
    y = d.var(both(same_dtype(x), has_rank(1)))
    place = _indices(d, shape_of(x)[0], lambda var: shape_of(var) == shape_of(y))
    return d.leaf(aten.scatter_add.default, x, 0, place, y)


@step("index")
def index_put(d: Draft) -> object:
    x = d.var(both(is_inexact, has_rank(1, 2)))
    place = _indices(d, shape_of(x)[0], has_rank(0))
    return d.leaf(aten.index_put.default, x, [place], d.var(both(same_dtype(x), has_rank(0))), d.number(2) == 1)


# normalisation


@step("normalise")
def softmax(d: Draft) -> object:
    x = d.var(both(is_real, has_dims))
    return d.leaf((aten._softmax.default, aten._log_softmax.default)[d.number(2)], x, d.dim(x), False)


@step("normalise")
def layer_norm(d: Draft) -> object:
    x = d.var(both(is_real, has_dims, has_elements))
    is_weight: Suits = lambda var: shape_of(var) == shape_of(x)[-1:] and same_dtype(x)(var)
    weights = [d.var(is_weight), d.var(is_weight)] if d.number(2) else [None, None]
    return d.leaf(aten.native_layer_norm.default, x, [shape_of(x)[-1]], *weights, 0.1)


# dtypes, constants, copies


@step("make")
def to_inexact(d: Draft) -> object:
    dtype = (torch.float64, torch.float32, torch.complex128)[d.number(3)]
    return d.leaf(aten._to_copy.default, d.var(lambda var: not is_complex(var)), dtype=dtype)


@step("make")
def to_integer(d: Draft) -> object:
    return d.leaf(aten._to_copy.default, d.var(is_mask), dtype=torch.int64)


@step("make")
def complex(d: Draft) -> object:
    x = d.var(is_real)
    return d.leaf(aten.complex.default, x, d.var(both(same_dtype(x), broadcasts_with(x))))


@step("make")
def from_complex(d: Draft) -> object:
    return d.leaf((aten.view_as_real.default, aten.conj_physical.default)[d.number(2)], d.var(is_complex))


@step("make")
def full(d: Draft) -> object:
    shape = ([], [2], [2, 3], [0])[d.number(4)]
    value, dtype = ((0.75, torch.float64), (2, torch.int64), (True, torch.bool))[d.number(3)]
    return d.leaf(aten.full.default, shape, value, dtype=dtype, device=torch.device("cpu"))


@step("make")
def arange(d: Draft) -> object:
    return d.leaf(aten.arange.default, 2 + d.number(2), dtype=(torch.int64, torch.float64)[d.number(2)])


@step("stop")
def full_like(d: Draft) -> object:
    return d.leaf(aten.full_like.default, d.var(is_inexact), 1.5)


@step("make")
def clone(d: Draft) -> object:
    return d.leaf(aten.clone.default, d.var(is_any))


@step("stop")
def detach(d: Draft) -> object:
    return d.leaf(aten.detach.default, d.var(is_inexact))


CONSTANTS = (
    torch.nn.Parameter(torch.tensor([0.5, -1.25, 2.0], dtype=torch.float64)),
    torch.tensor([-0.75, 0.25, 1.0], dtype=torch.float64),
    torch.tensor([[1.5, -0.75, 0.25], [0.5, 2.5, -1.0]], dtype=torch.float64),
    torch.tensor([1, -2, 0], dtype=torch.int64),
)
"""Tensors that programs close over, by reference."""


@step("constant")
def constant(d: Draft) -> object:
    """The new variable binds before all equations, so it counts as the newest only until the next one."""
    var = d.builder.constant(CONSTANTS[d.number(len(CONSTANTS))])
    return None if var in d.env else d.bind((var,))


@step("constant")
def owned_constant(d: Draft) -> object:
    values = ([0.5, 1.5, -2.0], [1.0, -1.5, 0.75], [1, 0, 2], True)[d.number(4)]
    data = torch.tensor(values)
    return d.bind((d.builder.constant(data.double() if data.is_floating_point() else data, owned=True),))


@step("twin")
def twin(d: Draft) -> object:
    """An earlier equation once more: what cse merges unless it is random, and what makes cotangents meet."""
    known = d.builder.equations[-1 - d.number(len(d.builder.equations))]
    return d.bind(d.builder.copy(known, lambda var: var))


# random numbers


@step("random")
def bernoulli(d: Draft) -> object:
    (probability,) = d.leaf(aten.sigmoid.default, d.var(is_real))
    return d.leaf(aten.bernoulli.default, probability)


@step("random")
def dropout(d: Draft) -> object:
    """Not of an empty tensor: PyTorch's mask is then of the input's dtype on the CPU and bool on fake tensors."""
    return d.leaf(aten.native_dropout.default, d.var(both(is_real, has_elements)), 0.5, True)


@step("random")
def rand(d: Draft) -> object:
    return d.leaf(aten.rand.default, [2, 3], dtype=torch.float64, device=torch.device("cpu"), pin_memory=False)


@step("random")
def normal_like(d: Draft) -> object:
    return d.leaf(aten.randn_like.default, d.var(is_real))


# composites


def _composite(d: Draft, step: Step) -> None:
    """A composite in one of the ways in which one is called: plain, or as a user's call with literals and keywords."""
    style = d.number(3)
    operands = tuple(d.var(is_any) for _ in range((1, 2, 3, 0)[d.number(4)]))
    body = Draft.closed(step.body or Program(), tuple(map(tensor_type, operands)), "block")
    match style:
        case 0:
            d.call(ops.composite("Block"), operands, body)
        case 1:
            d.call(ops.composite("torch.nn.functional.block"), (*operands[:1], Literal(2), operands[1:]), body)
        case _:
            kwargs = tuple((f"weight_{i}", var) for i, var in enumerate(operands[1:]))
            d.call(ops.composite("torch.block"), operands[:1], body, (("eps", Literal(0.5)), *kwargs))


def _again(d: Draft, _: Step) -> None:
    """Call the body of an earlier composite again, on operands of the same types."""
    known = d.calls[-1 - d.number(len(d.calls))]
    operands = tuple(d.var(has_type_of(var)) for var in known.operands)
    d.call(ops.composite(ops.short_name(known.op)), operands, known.body)


def _sibling(d: Draft, step: Step) -> None:
    """An earlier call with another body: two composites of one name and the same operands."""
    known = d.calls[-1 - d.number(len(d.calls))]
    body = Draft.closed(step.body or Program(), tuple(map(tensor_type, known.operands)), "block")
    d.call(known.op, known.args, body, known.kwargs)


register("call", "composite", _composite)
register("call", "again", _again)
register("call", "sibling", _sibling)
