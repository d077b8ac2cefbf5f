"""Programs as data: what the strategies draw, and what a failing law shrinks.

    Program ::= inputs: TensorType*  steps: Step*  outputs: pick*
    Step    ::= op  picks: pick*  bodies: Program*

A step names no variable. It has picks, small numbers that count back from the newest variable that
suits the place, so 0 is the latest result. Missing picks are 0, and a step that nothing suits does
nothing. Hence every Program builds a valid trace, whatever its numbers are, and still does when a
step, a pick or an input is deleted. So Hypothesis can shrink it to the few equations that break a
law. A body is a Program without inputs of its own: it takes the types of the operands that it is
called with. A branch or the step of a loop must return certain types. The outputs of such a body
are picked among the variables that have them.

A new leaf is one more function with `@step`, a new structured op one with `@structured` (see
`steps/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from thunder_fn.ir import ops
from thunder_fn.ir.check import fake_result_types, types_in
from thunder_fn.ir.equations import operands_in
from thunder_fn.ir.trace import (
    Arg,
    Equation,
    Literal,
    Op,
    TensorType,
    Trace,
    TraceBuilder,
    Type,
    Var,
    as_arg,
    as_kwargs,
)

aten = torch.ops.aten
MAX_ELEMENTS = 100


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a program: an op of `STEPS`, the picks that say on what, and the bodies of a
    composite or structured op.

    Example:
        >>> from thunder_fn.testing import Step
        >>> Step("add", (0, 1))
        Step(op='add', picks=(0, 1), bodies=())
    """

    op: str
    picks: tuple[int, ...] = ()
    bodies: tuple[Program, ...] = ()

    def body(self, position: int = 0) -> Program:
        """One of the bodies; one that is not there does nothing."""
        return self.bodies[position] if position < len(self.bodies) else Program()


@dataclass(frozen=True, slots=True)
class Program:
    """A program as data. `build` makes it a trace; its repr is its own reproducer.

    Without picks for its outputs it returns every variable that nothing uses. A pick below 0 is a
    number that is written in the trace.

    Example:
        >>> import torch
        >>> from thunder_fn.testing import Program, Step, build
        >>> from thunder_fn.ir import TensorType
        >>> program = Program((TensorType(torch.float32, (2,)),), (Step("sin", (0,)),))
        >>> print(build(program))
        def program(v0):
            # v0: f32[2]
            v1 = aten.sin.default(v0)  # f32[2]
            return (v1,)
    """

    inputs: tuple[TensorType, ...] = ()
    steps: tuple[Step, ...] = ()
    outputs: tuple[int, ...] = ()


def build(program: Program, name: str = "program") -> Trace:
    """The trace of a program: closed, with types from running each op on fake tensors.

    Law: ``check(build(p))`` holds for every p, and ``build(p) == build(p)``.

    Raises:
        KeyError: a step is neither of `FAMILIES` nor a functional op.

    Example:
        >>> import torch
        >>> from thunder_fn.ir import TensorType
        >>> from thunder_fn.testing import Program, Step, build
        >>> vector = TensorType(torch.float32, (2,))
        >>> program = Program((vector,), (Step("sin", (0,)), Step("cos", (1,))))
        >>> [equation.op.name for equation in build(program).equations]
        ['aten.sin.default', 'aten.cos.default']
    """
    return Draft.closed(program, program.inputs, name)


def source_of(program: Program) -> str:
    """A program as the Python that makes it, defaults left out."""
    types = _tuple_source(f"TensorType({type.dtype}, {type.shape})" for type in program.inputs)
    steps = _tuple_source(map(_step_source, program.steps))
    parts = {"inputs": types, "steps": steps, "outputs": str(program.outputs)}
    return f"Program({', '.join(f'{key}={text}' for key, text in parts.items() if text != '()')})"


def _step_source(step: Step) -> str:
    bodies = _tuple_source(map(source_of, step.bodies))
    parts = {
        "picks": str(step.picks),
        "bodies": bodies if any(map(Program().__ne__, step.bodies)) else "()",
    }
    given = (f"{key}={text}" for key, text in parts.items() if text != "()")
    return f"Step({', '.join([repr(step.op), *given])})"


def _tuple_source(parts: Iterable[str]) -> str:
    texts = list(parts)
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def example_inputs(trace: Trace, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Values for the inputs of a trace: finite, small, away from 0 and the other kinks. Some are
    not contiguous.
    """
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        random_tensor(type, generator) for type in trace.input_types if isinstance(type, TensorType)
    )


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


# ---- the tables of steps ----

Rule: TypeAlias = "Callable[[Draft, Step], None]"
STEPS: dict[str, Rule] = {}
"""Each step by name: what it appends to a draft. `steps/` fills the tables, simple ones first
for shrinking.
"""

FAMILIES: dict[str, list[str]] = {}
"""The steps by family. A large family is drawn no more often than a small one."""

BODIES: dict[str, int] = {}
"""The steps that call programs of their own, and how many."""

FREQUENT = (
    "binary",
    "binary",
    "unary",
    "arithmetic",
    "reduction",
    "matmul",
    "view",
    "list",
    "twin",
    "random",
    "constant",
    "stop",
    *("composite",) * 4,
    *("loop",) * 3,
    "choice",
)
"""Families that are drawn more often, once more for each time they stand here."""


def register(family: str, name: str, rule: Rule, bodies: int = 0) -> None:
    """Enter a step into the tables."""
    STEPS[name] = rule
    FAMILIES.setdefault(family, []).append(name)
    if bodies:
        BODIES[name] = bodies


def rule_of(name: str) -> Rule:
    """The rule of a step: one of the tables, or that of the overload of PyTorch of this name."""
    return STEPS[name] if name in STEPS else RULES_OF_OVERLOADS[0](name)


RULES_OF_OVERLOADS: list[Callable[[str], Rule]] = []
"""The function that `schemas.py` gives: the rule of a step that calls an overload."""


# ---- drafting: programs become traces ----


class Skip(Exception):
    """The exception of a step that nothing suits here."""


_refused: set[object] = set()
"""The calls of leaves, with types for variables, that PyTorch has refused: to ask again costs as
much as any answer, and programs that are drawn ask it often.
"""


Suits: TypeAlias = Callable[[Var], bool]


@dataclass(slots=True)
class Draft:
    """A trace that is being built from a program, and the picks of the step that is being taken."""

    builder: TraceBuilder
    env: list[Var]
    calls: list[Equation] = field(default_factory=list[Equation])
    picks: Iterator[int] = field(default_factory=lambda: iter(()))

    @staticmethod
    def closed(
        program: Program,
        types: tuple[TensorType, ...],
        name: str,
        outputs: Callable[[Draft], tuple[Var, ...]] | None = None,
    ) -> Trace:
        """The trace of a program that takes inputs of these types; `outputs` picks what it
        returns, if given.
        """
        builder = TraceBuilder(name)
        draft = Draft(builder, list(builder.take(types)))
        for step in program.steps:
            draft.take(step)
        draft.picks = iter(program.outputs)
        if outputs is not None:
            return builder.build(outputs(draft))
        if not program.outputs:
            return builder.build(draft.unused())
        return builder.build(
            tuple(
                draft.env[-1 - pick % len(draft.env)] if pick >= 0 else Literal(0.5)
                for pick in program.outputs
                if draft.env
            )
        )

    def take(self, step: Step) -> None:
        """Append the equations of a step, or nothing if nothing suits it."""
        self.picks = iter(step.picks)
        mark = len(self.builder.equations), len(self.env)
        try:
            rule_of(step.op)(self, step)
        except Skip:
            del self.builder.equations[mark[0] :], self.env[mark[1] :]

    def unused(self) -> tuple[Var, ...]:
        """The variables that no equation reads."""
        used = {var.index for var in operands_in(self.builder.equations)}
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

    def of_type(self, type: TensorType) -> Var:
        """One of the variables of a type; halves everywhere, or what the dtype makes of them,
        where there is none.
        """
        if any(var.type == type for var in self.env):
            return self.var(lambda var: var.type == type)
        value = 0.5 if type.dtype.is_floating_point or type.dtype.is_complex else 0
        shape = list(static_shape(type))
        return self.leaf(
            torch.ops.aten.full.default, shape, value, dtype=type.dtype, device=type.device
        )[0]

    def dim(self, var: Var) -> int:
        """A dim of a variable."""
        return self.number(len(shape_of(var)))

    # equations

    def leaf(self, overload: Any, *args: Any, **kwargs: Any) -> tuple[Var, ...]:
        """Append a leaf; its tensor results join the environment."""
        op = ops.leaf(overload)
        new_args = tuple(map(as_arg, args))
        new_kwargs = tuple((key, as_arg(value)) for key, value in kwargs.items())
        call = Equation(op, new_args, new_kwargs, ())
        question = (op, *types_in(call))
        if question in _refused:
            raise Skip
        try:
            types = fake_result_types(call)
        except (RuntimeError, IndexError, TypeError, ValueError, AssertionError):
            _refused.add(question)
            raise Skip from None
        if types is None or any(elements(type) > MAX_ELEMENTS for type in types):
            raise Skip
        return self.bind(self.builder.add(op, new_args, types, kwargs=new_kwargs))

    def call(
        self, op: Op, args: tuple[Arg, ...], body: Trace, kwargs: tuple[tuple[str, Arg], ...] = ()
    ) -> None:
        """Append a composite."""
        self.bind(self.builder.add(op, args, body.output_types, kwargs=kwargs, bodies=(body,)))
        self.calls.append(self.builder.equations[-1])

    def structured(
        self, op: Op, args: Sequence[Arg], types: Sequence[Type], *bodies: Trace, **literals: Any
    ) -> None:
        """Append a structured op."""
        if any(elements(type) > MAX_ELEMENTS for type in types):
            raise Skip
        kwargs = as_kwargs(literals)
        self.bind(self.builder.add(op, tuple(args), tuple(types), kwargs=kwargs, bodies=bodies))

    def bind(self, variables: tuple[Var, ...]) -> tuple[Var, ...]:
        """The tensors among these join the environment."""
        self.env.extend(var for var in variables if isinstance(var.type, TensorType))
        return variables


def elements(type: Type) -> int:
    """The number of elements of a tensor's type; 0 for other types."""
    return torch.Size(static_shape(type)).numel() if isinstance(type, TensorType) else 0


def static_shape(type: TensorType) -> tuple[int, ...]:
    """The sizes of a type; those of programs are numbers."""
    return tuple(size for size in type.shape if isinstance(size, int))


def tensor_type(var: Var) -> TensorType:
    """The type of a variable that is a tensor."""
    if not isinstance(var.type, TensorType):
        raise Skip
    return var.type


def shape_of(var: Var) -> tuple[int, ...]:
    """The variable's sizes."""
    return static_shape(tensor_type(var))


def dtype_of(var: Var) -> torch.dtype:
    """The variable's dtype."""
    return tensor_type(var).dtype
