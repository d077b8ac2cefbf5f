"""The vocabulary: the ops, and facts about each.

A leaf is a functional `OpOverload` of ATen or of a custom library, named `namespace.op.overload`.
Facts about leaves come from PyTorch's own schemas and tags; nothing here is written by hand that
PyTorch knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from thunder_fn.errors import InvalidTrace
from thunder_fn.ir import facts
from thunder_fn.ir.memos import clear_caches, kept_of_ops, memo
from thunder_fn.ir.trace import Arg, Literal, Op, Trace, TraceBuilder, Type, Var, as_arg
from thunder_fn.torch_internals import OpOverload, argument_names, runnable, schema_of
from thunder_fn.torch_internals.pure_twins import PREFIX, twin_of

STOP_GRADIENT = Op("leaf", "aten.detach.default")
NO_GRAD = Op("leaf", "aten.alias.default")
"""Marks a value that was computed under `no_grad` and is read where gradients are on. It is
constant to reverse mode and not to forward mode, as in torch.func. Nothing else in a trace is an
`alias`.
"""
RESHAPE = Op("leaf", "aten.reshape.default")
LINEAR = Op("leaf", "aten.linear.default")
CONTIGUOUS = Op("leaf", "aten.contiguous.default")
ASSERT = Op("leaf", "aten._assert_scalar.default")
STRAIGHT_THROUGH = Op("structured", "straight_through")
"""The value of one tensor with the derivatives of another: what a write to `x.detach()` leaves
in x.
"""
NO_GRAD_WRITE = Op("structured", "no_grad_write")
"""The same in reverse mode; in forward mode the tangent is the value's: what a write under
`no_grad` leaves in x.
"""
PUSHED_WRITE = Op("structured", "pushed_write")
"""Stand-in for `NO_GRAD_WRITE` while a trace is pushed forward, where what is written has
derivatives.
"""
DIFFERENTIATED_AS = Op("structured", "differentiated_as")


@kept_of_ops()
def leaf(overload: OpOverload) -> Op:
    """The leaf op of a PyTorch overload."""
    return Op("leaf", str(overload))


def emit(
    builder: TraceBuilder, op: OpOverload | Op, args: Iterable[Any], type: Type, **options: Any
) -> Var:
    """Append a leaf with one result of a type. Values that are no variables become literals."""
    kwargs = tuple([(key, as_arg(value)) for key, value in options.items()])
    known = op if isinstance(op, Op) else leaf(op)
    return builder.add(known, tuple(map(as_arg, args)), (type,), kwargs=kwargs)[0]


def overload(op: Op) -> OpOverload:
    """The PyTorch overload of a leaf op.

    A custom op may be defined anew, as by a notebook's cell that runs once more. PyTorch frees the
    operator that was called so before, and nothing that was known of it holds any longer.
    """
    known = _overload(op)
    if may_be_defined_anew(op) and _look_up(op) is not known:
        clear_caches()
        return _overload(op)
    return known


def may_be_defined_anew(op: Op) -> bool:
    """Test for a custom op, or the twin of one."""
    return op.is_foreign or op.name.startswith(PREFIX)


def packet_place(op: Op) -> tuple[dict[str, Any], str]:
    """The place where PyTorch keeps a custom op; that of its op for a twin. It has another value
    when the op is defined anew.
    """
    namespace, name, _ = op.name.removeprefix(PREFIX).split(".")
    return vars(getattr(torch.ops, namespace)), name


def program_call(op: Op) -> Callable[..., Any]:
    """The function by which a program calls a leaf op.

    It calls the custom op that has the name now. One that was defined anew with another schema is
    refused: the program was made for the arguments and results of the old one.
    """
    known = overload(op)
    if not may_be_defined_anew(op):
        return runnable(known)
    schema, (packets, name) = str(schema_of(known)), packet_place(op)
    packet = packets[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        if packets.get(name) is packet:
            return known(*args, **kwargs)
        present = overload(op)
        if str(schema_of(present)) != schema:
            raise InvalidTrace(
                f"{op} was defined anew with another schema after this program was made"
                f"\n  then: {schema}\n  now:  {schema_of(present)}"
                "\nTrace the function again, or give the new op another name."
            )
        return present(*args, **kwargs)

    return call


@kept_of_ops()
def _overload(op: Op) -> OpOverload:
    if op.kind != "leaf":
        raise InvalidTrace(f"{op} is a {op.kind} op and has no PyTorch overload")
    return _look_up(op)


def _look_up(op: Op) -> OpOverload:
    """The overload that has the name now."""
    namespace, name, variant = op.name.split(".")
    if namespace.startswith(PREFIX):
        return twin_of(overload_named(op.name.removeprefix(PREFIX)))
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), variant)
    except AttributeError:
        raise InvalidTrace(
            f"PyTorch has no op {op.name}; is the library that defines it imported?"
        ) from None


def overload_named(name: str) -> OpOverload:
    """The PyTorch overload of a name such as `aten.add.Tensor`."""
    return overload(Op("leaf", name))


def composite(name: str) -> Op:
    """A composite op: its meaning is its body."""
    return Op("composite", name)


@kept_of_ops()
def is_random(op: Op) -> bool:
    """Test for an op that draws from a random number generator: never merged, never drawn again."""
    return op.kind == "leaf" and torch.Tag.nondeterministic_seeded in overload(op).tags


class Applied(Protocol):
    """The common part of equations and of records that become one: an op, its arguments and
    bodies.
    """

    @property
    def op(self) -> Op:
        """The op that is applied."""
        ...

    @property
    def args(self) -> tuple[Arg, ...]:
        """The arguments."""
        ...

    @property
    def kwargs(self) -> tuple[tuple[str, Arg], ...]:
        """The keyword arguments."""
        ...

    @property
    def bodies(self) -> tuple[Any, ...]:
        """The traces that it owns."""
        ...


def draws(equation: Applied) -> bool:
    """Test whether the equation, its bodies apart, draws random numbers: its op does, and drops
    with a probability other than 0.
    """
    return is_random(equation.op) and not _drops_nothing(equation)


def _drops_nothing(equation: Applied) -> bool:
    """Test for attention without dropout and its like."""
    position = _dropout_position(equation.op)
    if position is None:
        return False
    given = (
        equation.args[position]
        if position < len(equation.args)
        else dict(equation.kwargs).get("dropout_p")
    )
    return given is None or (isinstance(given, Literal) and given.value == 0)


@kept_of_ops()
def _dropout_position(op: Op) -> int | None:
    names = argument_names(overload(op))
    return names.index("dropout_p") if "dropout_p" in names else None


@kept_of_ops()
def is_constant(op: Op) -> bool:
    """Test whether no derivative goes back through the op: it draws numbers, or makes a tensor
    like another.
    """
    return op in (STOP_GRADIENT, NO_GRAD, RECEIVE) or op in facts.DRAWS or op in facts.LIKE


@kept_of_ops()
def is_effectful(op: Op) -> bool:
    """Test for an op that does something besides computing its outputs, so it is never dropped."""
    if op.kind != "leaf":
        return False
    schema = schema_of(overload(op))
    return op in (SEND, RECEIVE) or schema.is_mutable or not schema.returns


def calls_back(trace: Any) -> bool:
    """Test whether some equation of a trace, however deep, prints or calls Python
    (`thunder_fn.debug`).
    """
    return any(
        equation.op.name == "thunder_fn.debug.default" or any(map(calls_back, equation.bodies))
        for equation in trace.equations
    )


@memo(4096, derives=False)
def refuses_values(trace: Trace) -> bool:
    """Test whether some equation of a trace, however deep, raises for some values."""
    return any(
        equation.op in facts.RAISING or any(map(refuses_values, equation.bodies))
        for equation in trace.equations
    )


ON_OPERANDS = ("call", "checkpoint")
"""Structured ops that compute what their one body computes of the operands."""


def computes_body(op: Op) -> bool:
    """Test for an op that computes what its one body computes of the operands."""
    return op.kind == "composite" or op.name in ON_OPERANDS


@kept_of_ops()
def is_view(op: Op) -> bool:
    """Test whether the output shares memory with an input."""
    return op.kind == "leaf" and any(
        argument.alias_info is not None and not argument.alias_info.is_write
        for argument in schema_of(overload(op)).arguments
    )


@kept_of_ops()
def is_pointwise(op: Op) -> bool:
    """Test for an op that computes each element of its output from those at the same place, so it
    promotes operands of several dtypes.
    """
    return op.kind == "leaf" and torch.Tag.pointwise in overload(op).tags


@kept_of_ops()
def linear_in(op: Op, place: int = 0) -> tuple[tuple[int, ...], ...]:
    """The sets of arguments whose zeros make the result at this place zero: `facts.LINEAR_IN`,
    views, and the cotangents of backwards.
    """
    if op.kind != "leaf":
        return ()
    for name in (op.name, op.name.rpartition(".")[0]):
        if name in facts.LINEAR_IN:
            return facts.LINEAR_IN[name]
        if name in facts.PARTS_LINEAR_IN:
            return facts.PARTS_LINEAR_IN[name][place]
    is_backward = "_backward" in op.name and argument_names(overload(op))[0].startswith("grad")
    return ((0,),) if is_backward or is_view(op) or op in facts.RESHAPES else ()


@kept_of_ops()
def is_factory(op: Op) -> bool:
    """Test whether the op makes a tensor from nothing: where no dtype and device are given, the
    defaults of the moment decide.
    """
    if op.kind != "leaf":
        return False
    arguments = schema_of(overload(op)).arguments
    tensors = any("Tensor" in str(argument.type) for argument in arguments)
    return not tensors and {"dtype", "device"} <= {
        argument.name for argument in arguments if argument.kwarg_only
    }


def flatten_result(result: Any) -> tuple[Any, ...]:
    """The results of a leaf in the order of its equation's outputs: lists and tuples are spread,
    None stays.
    """
    if isinstance(result, (list, tuple)):
        return tuple(
            leaf
            for item in result
            for leaf in (item if isinstance(item, (list, tuple)) else (item,))
        )
    return (result,)


def run(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Call a leaf's overload; its results in the order of its equation's outputs."""
    result = runnable(overload(op))(*args, **kwargs)
    return () if returns_nothing(op) else flatten_result(result)


@kept_of_ops()
def returns_nothing(op: Op) -> bool:
    """Test whether the leaf has no results, such as an assertion."""
    return op.kind == "leaf" and not schema_of(overload(op)).returns


@kept_of_ops()
def lists_returned(op: Op) -> tuple[bool, ...]:
    """Tell for each result in a leaf's schema whether it is a list."""
    return tuple(
        isinstance(result.type, torch.ListType) for result in schema_of(overload(op)).returns
    )


def has_random(equation: Applied) -> bool:
    """Test whether the equation or anything in its bodies draws random numbers."""
    return draws(equation) or any(
        has_random(inner) for body in equation.bodies for inner in body.equations
    )


def has_side_effect(equation: Applied) -> bool:
    """Test whether the equation or anything in its bodies draws random numbers or has an effect."""
    return draws(equation) or is_effectful(equation.op) or any(map(has_effects, equation.bodies))


@memo(16384, derives=False)
def has_effects(trace: Trace) -> bool:
    """Test whether some equation of a trace, however deep, draws random numbers or has another
    effect.
    """
    return any(map(has_side_effect, trace.equations))


@kept_of_ops()
def inplace_twin(op: Op) -> OpOverload | None:
    """The overload that does the same in place: `aten.copy_.default` for `aten.copy.default`."""
    if op.kind != "leaf":
        return None
    namespace, name, variant = op.name.split(".")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    return getattr(packet, variant, None) if packet is not None else None


COLLECTIVES = "_c10d_functional."
SEND = Op("leaf", "thunder_fn.send.default")
RECEIVE = Op("leaf", "thunder_fn.receive.default")
SENT = Op("leaf", "thunder_fn.sent.default")
"""The messages of `distributed/messages.py`."""


def is_collective(op: Op) -> bool:
    """Test for a leaf that talks to other ranks."""
    is_message = op in (SEND, RECEIVE, SENT)
    return is_message or (op.kind == "leaf" and op.name.startswith(COLLECTIVES))


def communicates(equation: Applied) -> bool:
    """Test whether the equation, or one in its bodies, talks to other ranks."""
    return is_collective(equation.op) or any(
        communicates(inner) for body in equation.bodies for inner in body.equations
    )


def is_call(op: Op) -> bool:
    """Test for a composite that is a call of a torch function as its user wrote it, such as
    `torch.nn.functional.linear`.
    """
    return op.kind == "composite" and op.name.startswith("torch.")


def is_operator(op: Op) -> bool:
    """Test for a composite that an executor brings, such as `myex::multimul`: its body says what it
    computes, all or nothing.
    """
    return op.kind == "composite" and "::" in op.name


def short_name(op: Op) -> str:
    """The last part of a composite's name: `linear` of `torch.nn.functional.linear`, `mul` of
    `myex::mul`.
    """
    return op.name.rsplit("::", 1)[-1].rsplit(".", 1)[-1]


aten = torch.ops.aten
