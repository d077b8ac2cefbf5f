"""The data: traces, equations and variables; `types` and `sources` have what they are made of.

    Trace     ::= inputs: Var*  constants: Constant*  equations: Equation*  outputs: Atom*
                  constraints: Expr*
    Equation  ::= outputs: Var* = op(args, kwargs)  bodies: Trace*  source
    Arg       ::= Var | Literal | (Arg, ...)
    Var       ::= index : Type
    Type      ::= TensorType(dtype, shape, device) | NumberType(kind, Expr?) | NoneType
    Dim       ::= int | Expr
    Op        ::= leaf (an ATen or custom OpOverload) | composite (a name) | structured (cond, ...)

Everything is frozen. Variables are numbered densely in binding order (inputs, constants, then the
outputs of each equation). So `==` is equality up to renaming and the hash is structural. Bodies are
closed: values that a body uses from outside are among its inputs. The operands of an equation are
the variables in its args and kwargs, in order, with repeats. A composite's body has exactly one
input for each operand.

Expressions are over symbols, which the types of the outermost trace's inputs bind; see
`symbols.py`.

Sources, names and spans are for people: they take no part in equality.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal as Choice, Protocol, TypeAlias

import numpy as np
import torch

from thunder_fn.errors import InvalidTrace, TraceTypeError, counted, kind_of
from thunder_fn.ir.nesting import make_room
from thunder_fn.ir.notebook import Shown
from thunder_fn.ir.sources import Source as Source
from thunder_fn.ir.types import (
    Dim as Dim,
    Expr as Expr,
    NoneType as NoneType,
    NumberType as NumberType,
    TensorType as TensorType,
    Type as Type,
    as_dim as as_dim,
    is_differentiable as is_differentiable,
    short_dtype as short_dtype,
    static_shape as static_shape,
    symbols_of_type as symbols_of_type,
)

Kind: TypeAlias = Choice["leaf", "composite", "structured"]


@dataclass(frozen=True, slots=True)
class Var:
    """A variable: bound once, by an input, a constant or an equation.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> (x,) = tfn.trace(torch.sin, torch.ones(2)).inputs
        >>> x.index, str(x.type)
        (0, 'f32[2]')
    """

    index: int
    type: Type

    def __str__(self) -> str:
        return f"v{self.index}"

    def __hash__(self) -> int:
        return self.index


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """A value written into the trace. Equal only if the types are equal too: 1, 1.0 and True are
    three literals.

    Example:
        >>> from thunder_fn.ir import Literal
        >>> Literal(1) == Literal(1), Literal(1) == Literal(1.0)
        (True, False)
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Literal) and _literal_key(self.value) == _literal_key(other.value)

    def __hash__(self) -> int:
        return hash(_literal_key(self.value))

    def __str__(self) -> str:
        return repr(self.value)


def _literal_key(value: Any) -> tuple[type, Any]:
    match value:
        case str() | int() | None:
            return type(value), value
        case float():
            return type(value), value.hex()
        case complex():
            return type(value), (value.real.hex(), value.imag.hex())
        case tuple():
            return type(value), tuple(map(_literal_key, value))
        case frozenset():
            return type(value), frozenset(map(_literal_key, value))
        case slice() | range():
            return type(value), tuple(map(_literal_key, (value.start, value.stop, value.step)))
        case np.generic():
            return type(value), value.tobytes()
        case torch.Generator():
            return torch.Generator, identity_of(value)
        case _ if is_compared_by_fields(value):
            return type(value), (value, _types_in(value))
        case _:
            return type(value), value


def is_compared_by_fields(value: Any) -> bool:
    """Test for a dataclass that compares by its fields."""
    known = getattr(type(value), "__dataclass_params__", None)
    return known is not None and known.eq


def _types_in(value: Any) -> Any:
    """The types in a record, and the signs of its zeros: equal records may differ in them."""
    if is_compared_by_fields(value):
        fields = (one.name for one in dataclasses.fields(value) if one.compare)
        return type(value), *(_types_in(getattr(value, name, None)) for name in fields)
    if isinstance(value, tuple):
        return type(value), *map(_types_in, value)
    return _literal_key(value) if isinstance(value, (float, complex, frozenset)) else type(value)


def identity_of(generator: torch.Generator) -> int:
    """Identify a generator: PyTorch hands it to dispatch modes as another Python object."""
    return getattr(generator, "_cdata")  # noqa: B009


Atom: TypeAlias = Var | Literal
Arg: TypeAlias = "Var | Literal | tuple[Arg, ...]"


_KNOWN_LIBRARIES = ("aten.", "prims.", "_c10d_functional.", "quantized.", "thunder_fn")


@dataclass(frozen=True, slots=True)
class Op:
    """The operation of an equation. `name` is `aten.add.Tensor` for a leaf, else the name of a
    function or a module class.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> trace = tfn.trace(torch.nn.functional.gelu, torch.ones(2))
        >>> trace.equations[0].op
        Op(kind='leaf', name='aten.gelu.default')
    """

    kind: Kind
    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def is_foreign(self) -> bool:
        """Test for a leaf of another library than PyTorch and this one, such as a custom op.

        Its formulas are Python functions of the user's, which may read what changes.
        """
        return self.kind == "leaf" and not self.name.startswith(_KNOWN_LIBRARIES)


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A closed-over tensor, by reference: never copied, never inlined.

    `owned` tensors were made by the traced function from Python data (`torch.tensor([1, 2])`).
    Nobody else holds them, so two of them are equal if their contents are. The others are equal
    only if they are the same tensor.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> table = torch.ones(2)
        >>> (constant,) = tfn.trace(lambda x: x + table, torch.ones(2)).constants
        >>> constant.tensor is table, constant.owned
        (True, False)
    """

    var: Var
    tensor: torch.Tensor = field(repr=False)
    owned: bool = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant) or self.var != other.var or self.owned != other.owned:
            return False
        return self.tensor is other.tensor or (self.owned and _same_bits(self.tensor, other.tensor))

    def __hash__(self) -> int:
        return hash(
            (self.var.index, self.owned) if self.owned else (self.var.index, id(self.tensor))
        )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bitwise, so that NaN equals NaN and 0.0 differs from -0.0."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    from thunder_fn.torch_internals import isolated, no_torch_function

    with isolated(), no_torch_function():  # traces are compared during captures too
        return torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8),
            b.contiguous().reshape(-1).view(torch.uint8),
        )


@dataclass(frozen=True, slots=True)
class Equation:
    """`outputs = op(*args, **kwargs)`; a composite or structured op owns its bodies.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> (equation,) = tfn.trace(lambda x: x + 1, torch.ones(2)).equations
        >>> equation.op.name, equation.args[1], str(equation.outputs[0].type)
        ('aten.add.Tensor', Literal(value=1), 'f32[2]')
    """

    op: Op
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[Var, ...]
    bodies: tuple[Trace, ...] = ()
    source: Source | None = field(default=None, compare=False)
    _operands: tuple[Var, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def operands(self) -> tuple[Var, ...]:
        """The variables in args and kwargs, in order, with repeats."""
        if self._operands is None:
            found = vars_in(all_args(self) if self.kwargs else self.args)
            object.__setattr__(self, "_operands", tuple(found))
            return tuple(found)
        return self._operands

    @property
    def operand_types(self) -> tuple[Type, ...]:
        """The types of the operands, in order."""
        return tuple([var.type for var in self.operands])

    @property
    def output_types(self) -> tuple[Type, ...]:
        """The types of the outputs, in order."""
        return tuple([var.type for var in self.outputs])

    def reading(self, read: Callable[[Var], Any]) -> Equation:
        """The equation on other operands, each read through `read`; its outputs stay."""
        atoms = [read(var) for var in self.operands]
        if all(map(operator.is_, atoms, self.operands)):
            return self
        args, kwargs = map_args(supplying(atoms), self)
        return Equation(self.op, args, kwargs, self.outputs, self.bodies, self.source)

    @property
    def has_foreign(self) -> bool:
        """Test for a body that calls an op of another library, or a rule that is the user's."""
        return any(body.has_foreign for body in self.bodies) or any(
            getattr(arg.value, "has_foreign", False)
            for _, arg in self.kwargs
            if isinstance(arg, Literal)
        )

    @property
    def body(self) -> Trace:
        """The only body of a composite."""
        (body,) = self.bodies
        return body

    def named(self, names: Iterable[str]) -> dict[str, Arg]:
        """The arguments by name, where the positional ones have these names."""
        return dict(zip(names, self.args, strict=False)) | dict(self.kwargs)

    @property
    def literals(self) -> dict[str, Any]:
        """The values of the keyword arguments that are literals, by name."""
        return {key: arg.value for key, arg in self.kwargs if isinstance(arg, Literal)}


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Trace(Shown):
    """A closed program. See the grammar at the top of this module.

    Law: two traces are equal exactly if they differ only in names and sources.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> trace = tfn.trace(lambda x: x.sin() + 1, torch.ones(2))
        >>> trace == tfn.trace(lambda y: torch.sin(y) + 1, torch.zeros(2))
        True
        >>> trace.python_callable()(torch.zeros(2))
        (tensor([1., 1.]),)
    """

    inputs: tuple[Var, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]
    constants: tuple[Constant, ...]
    constraints: tuple[Expr, ...]
    name: str = "program"
    origin: int = field(default=0, init=False, repr=False)
    """A hash of what equality leaves out: names and sources. Memos of interpreters tell traces
    apart by it.
    """
    depth: int = field(default=0, init=False, repr=False)
    """The number of levels of bodies inside each other."""
    has_foreign: bool = field(default=False, init=False, repr=False)
    """A mark of traces that call an op of another library (`Op.is_foreign`) or a function with a
    rule of the user's (`Equation.has_foreign`), in bodies too.
    """
    _hash: int = field(default=0, init=False, repr=False)
    _kind: object = field(default=None, init=False, repr=False)
    """A mark that traces share which were found equal, so that no two of them are compared
    twice.
    """

    def __post_init__(self) -> None:
        _check_numbering(self)
        types = tuple([var.type for var in self.inputs])  # variables hash by their numbers alone
        parts = (types, self.equations, self.outputs, self.constants, self.constraints)
        object.__setattr__(self, "_hash", hash(parts))
        depth = max(
            (body.depth + 1 for equation in self.equations for body in equation.bodies), default=0
        )
        object.__setattr__(self, "depth", depth)
        make_room(depth)
        inside = tuple(body.origin for equation in self.equations for body in equation.bodies)
        foreign = any(one.op.is_foreign for one in self.equations) or any(
            one.has_foreign for one in self.equations if one.bodies
        )
        object.__setattr__(self, "has_foreign", foreign)
        sources = tuple(equation.source for equation in self.equations)
        object.__setattr__(self, "origin", hash((self.name, sources, inside)))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Trace) or self._hash != other._hash:
            return False
        if self._kind is not None and self._kind is other._kind:
            return True
        is_equal = (
            self.inputs == other.inputs
            and self.outputs == other.outputs
            and self.constants == other.constants
            and self.constraints == other.constraints
            and self.equations == other.equations
        )
        if is_equal and self.depth:
            kind = self._kind or other._kind or object()
            object.__setattr__(self, "_kind", kind)
            object.__setattr__(other, "_kind", kind)
        return is_equal

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild through the constructor: hashes differ from process to process."""
        return Trace, (
            self.inputs,
            self.equations,
            self.outputs,
            self.constants,
            self.constraints,
            self.name,
        )

    def __str__(self) -> str:
        from thunder_fn.ir.pretty import to_text

        return to_text(self)

    def _repr_html_(self) -> str:
        from thunder_fn.ir.pretty import to_html

        return to_html(self)

    def __repr__(self) -> str:
        parts = {"input": self.inputs, "equation": self.equations, "output": self.outputs}
        said = ", ".join(counted(len(part), noun) for noun, part in parts.items())
        return f"<Trace {self.name}: {said}>"

    def python_callable(self) -> Callable[..., tuple[Any, ...]]:
        """The printed program, compiled by Python. Law: it computes the same as `evaluate`."""
        from thunder_fn.ir.pretty import python_callable

        return python_callable(self)

    def to_fx(self) -> torch.fx.GraphModule:
        """The trace, inlined, as an FX graph module of ATen calls."""
        from thunder_fn.ir.fx import to_fx

        return to_fx(self)

    @staticmethod
    def from_fx(module: torch.fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> Trace:
        """The trace of an FX graph module of ATen calls. See `fx.from_fx`."""
        from thunder_fn.ir.fx import from_fx

        return from_fx(module, example_inputs)

    @property
    def input_types(self) -> tuple[Type, ...]:
        """The types of the inputs, in order."""
        return tuple(var.type for var in self.inputs)

    @property
    def output_types(self) -> tuple[Type, ...]:
        """The types of the outputs, in order."""
        return tuple(type_of(atom) for atom in self.outputs)

    def renamed(self, name: str) -> Trace:
        """The program under another name."""
        return dataclasses.replace(self, name=name)


def type_of(atom: Atom) -> Type:
    """The type of a variable, or of the number or None that a literal holds.

    Law: it is the type of the value that `evaluate` gives the atom.

    Raises:
        InvalidTrace: a literal holds something else than a number or None.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> trace = tfn.trace(torch.sin, torch.ones(2))
        >>> str(tfn.ir.type_of(trace.inputs[0])), str(tfn.ir.type_of(tfn.ir.Literal(1.5)))
        ('f32[2]', 'float')
    """
    if isinstance(atom, Var):
        return atom.type
    match atom.value:
        case None:
            return NoneType()
        case bool() | int() | float() | complex():
            return NumberType(type(atom.value))
        case Expr():
            return NumberType(atom.value.kind, atom.value)
        case other:
            raise InvalidTrace(
                f"a literal of type {type(other).__name__} has no type in a trace; only numbers and"
                " None do"
            )


def type_of_value(value: Any) -> Type:
    """The type of a runtime value: a tensor, a number or None."""
    match value:
        case torch.Tensor():
            return TensorType(value.dtype, tuple(map(as_dim, value.shape)), value.device)
        case None:
            return NoneType()
        case bool() | int() | float() | complex():
            return NumberType(type(value))
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return type_of(Literal(as_dim(value)))
        case _:
            raise InvalidTrace(f"{kind_of(value)} has no type in a trace")


def num_vars(trace: Trace) -> int:
    """The number of variables that a trace binds; they are numbered from zero."""
    return (
        len(trace.inputs)
        + len(trace.constants)
        + sum(len(equation.outputs) for equation in trace.equations)
    )


def vars_in(arg: Any) -> list[Var]:
    """The variables in an argument, in order, with repeats."""
    if isinstance(arg, Var):
        return [arg]
    found: list[Var] = []
    if isinstance(arg, tuple):
        for item in arg:
            if isinstance(item, Var):
                found.append(item)
            elif isinstance(item, tuple) and item:
                found += vars_in(item)
    return found


def map_arg(f: Callable[[Var], Any], arg: Any) -> Any:
    """Apply f to every variable in an argument; literals and tuples stay."""
    if isinstance(arg, Var):
        return f(arg)
    if isinstance(arg, tuple):
        return tuple(map_arg(f, item) for item in arg)
    return arg


def as_arg(value: Any) -> Arg:
    """A Python value as an argument: what is no variable becomes a literal, a list a tuple."""
    if isinstance(value, (Var, Literal)):
        return value
    return tuple(map(as_arg, value)) if isinstance(value, (list, tuple)) else Literal(as_dim(value))


def as_kwargs(values: Mapping[str, Any]) -> tuple[tuple[str, Arg], ...]:
    """Values as the keyword arguments of an equation, each a literal."""
    return tuple((key, Literal(value)) for key, value in values.items())


class Call(Protocol):
    """The interface of an equation and of its record: it has arguments."""

    @property
    def args(self) -> tuple[Arg, ...]:
        """The positional arguments."""
        ...

    @property
    def kwargs(self) -> tuple[tuple[str, Arg], ...]:
        """The names and values of the others."""
        ...


def all_args(call: Call) -> tuple[Arg, ...]:
    """The arguments of a call, those by keyword last."""
    return (*call.args, *[arg for _, arg in call.kwargs])


def map_args(
    f: Callable[[Var], Any], call: Call
) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """Apply f to every variable in the arguments of a call, in order: new args and kwargs."""
    args = tuple([f(arg) if type(arg) is Var else map_arg(f, arg) for arg in call.args])
    return args, tuple([(key, map_arg(f, arg)) for key, arg in call.kwargs])


def supplying(values: Iterable[Any]) -> Callable[[Var], Any]:
    """A function for `map_args` that gives the next value for each variable that it is asked."""
    supply = iter(values)
    return lambda _: next(supply)


def python_args(call: Call, read: Callable[[Var], Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call as PyTorch takes them, variables read."""
    args = [python_arg(arg, read) for arg in call.args]
    return args, {key: python_arg(arg, read) for key, arg in call.kwargs}


def python_arg(arg: Any, read: Callable[[Var], Any]) -> Any:
    """An argument as PyTorch takes it: variables read, literals unwrapped, tuples as lists.

    Law: each variable is replaced by what `read` returns for it.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> (equation,) = tfn.trace(lambda x: x + 1, torch.ones(2)).equations
        >>> tfn.ir.python_arg(equation.args, lambda var: f"v{var.index}")
        ['v0', 1]
    """
    if isinstance(arg, Var):
        return read(arg)
    if isinstance(arg, Literal):
        return _running(arg.value) if isinstance(arg.value, Expr) else arg.value
    return [python_arg(item, read) for item in arg]


def _running(expr: Expr) -> Any:
    from thunder_fn.torch_internals import running_number

    return running_number(expr)


def _check_numbering(trace: Trace) -> None:
    bound = 0
    for var in (*trace.inputs, *(constant.var for constant in trace.constants)):
        if var.index != bound:
            raise InvalidTrace(
                f"variables are numbered densely in binding order, but {var} is bound where"
                f" v{bound} is due"
            )
        bound += 1
    for equation in trace.equations:
        for var in equation.outputs:
            if var.index != bound:
                raise InvalidTrace(
                    f"variables are numbered densely in binding order, but {var} is bound by"
                    f" {equation.op} where v{bound} is due"
                )
            bound += 1


class TraceBuilder:
    """Appends equations and numbers their variables; `build` gives the frozen trace.

    The one mutable thing here, and it never leaves the interpreter that makes it. Vars that it
    hands out are provisional: `build` numbers them in binding order.

    Example:
        >>> import torch
        >>> from thunder_fn.ir import Op, TensorType, TraceBuilder
        >>> vector = TensorType(torch.float32, (2,))
        >>> builder = TraceBuilder("twice")
        >>> x = builder.input(vector)
        >>> (y,) = builder.add(Op("leaf", "aten.sin.default"), (x,), (vector,))
        >>> print(builder.build((y,)))
        def twice(v0):
            # v0: f32[2]
            v1 = aten.sin.default(v0)  # f32[2]
            return (v1,)
    """

    def __init__(self, name: str = "program", first: int = 0) -> None:
        """Begin without equations; `first` is the index of the first variable, where the equations
        are to be put into a trace by `cut`.
        """
        self.name = name
        self.inputs: list[Var] = []
        self.constants: list[Constant] = []
        self.equations: list[Equation] = []
        self.constraints: list[Expr] = []
        self._next = first
        self._constant_vars: dict[int, Var] = {}

    @property
    def num_vars(self) -> int:
        """The number of variables handed out so far; they are numbered in this order."""
        return self._next

    def fresh(self, type: Type) -> Var:
        """A new variable, which the caller binds."""
        var = Var(self._next, type)
        self._next += 1
        return var

    def input(self, type: Type) -> Var:
        """Append an input and return its variable."""
        var = self.fresh(type)
        self.inputs.append(var)
        return var

    def take(self, types: Iterable[Type]) -> tuple[Var, ...]:
        """Append an input of each type and return their variables."""
        return tuple([self.input(type) for type in types])

    def take_some(self, types: Iterable[Type], wanted: Iterable[bool]) -> list[Var | None]:
        """Append an input of each type that is wanted; None in the place of the others."""
        pairs = zip(types, wanted, strict=True)
        return [self.input(type) if flag else None for type, flag in pairs]

    def constant(
        self, tensor: torch.Tensor, type: Type | None = None, *, owned: bool = False
    ) -> Var:
        """The variable of a closed-over tensor: the same one each time."""
        known = self._constant_vars.get(id(tensor))
        if known is not None:
            return known
        var = self.fresh(type or type_of_value(tensor))
        self.constants.append(Constant(var, tensor, owned))
        self._constant_vars[id(tensor)] = var
        return var

    def require(self, constraints: Iterable[Expr]) -> None:
        """Take over the constraints of a trace that becomes part of this one."""
        self.constraints.extend(item for item in constraints if item not in self.constraints)

    def add(
        self,
        op: Op,
        args: tuple[Arg, ...],
        output_types: tuple[Type, ...],
        *,
        kwargs: tuple[tuple[str, Arg], ...] = (),
        bodies: tuple[Trace, ...] = (),
        source: Source | None = None,
    ) -> tuple[Var, ...]:
        """Append an equation and return the variables that it binds."""
        outputs = tuple(self.fresh(type) for type in output_types)
        self.equations.append(Equation(op, args, kwargs, outputs, bodies, source))
        return outputs

    def copy(
        self,
        equation: Equation,
        read: Callable[[Var], Arg],
        *,
        bodies: tuple[Trace, ...] | None = None,
        types: tuple[Type, ...] | None = None,
        source: Source | None = None,
    ) -> tuple[Var, ...]:
        """Append an equation of another trace, its operands read through `read`; other bodies,
        types and source if given.
        """
        args, kwargs = map_args(read, equation)
        types = equation.output_types if types is None else types
        return self.add(
            equation.op,
            args,
            types,
            kwargs=kwargs,
            bodies=equation.bodies if bodies is None else bodies,
            source=source or equation.source,
        )

    def build(self, outputs: tuple[Atom, ...]) -> Trace:
        """Freeze: number the variables in binding order."""
        return canonical(
            tuple(self.inputs),
            tuple(self.equations),
            outputs,
            tuple(self.constants),
            tuple(self.constraints),
            self.name,
        )


def check_is_trace(function: str, value: object) -> None:
    """Check what a public function of traces is given.

    Raises:
        TraceTypeError: it is something else than a trace.
    """
    if not isinstance(value, Trace):
        fix = "`thunder_fn.trace(f, *args)` makes the trace of a function." * callable(value)
        raise TraceTypeError(
            f"{function}: expected a trace, given {kind_of(value)}", fix=fix or None
        )


def cut(
    trace: Trace | TraceBuilder,
    *,
    inputs: Iterable[Var] | None = None,
    equations: Iterable[Equation] | None = None,
    outputs: Iterable[Atom] | None = None,
    constants: Iterable[Constant] | None = None,
    name: str | None = None,
) -> Trace:
    """Return the trace with other inputs, equations or outputs over the same variables.

    All constraints stay, and so do the constants that are still read. With `walk` (`walking.py`)
    this is the way to make a trace from a trace. So no author has to remember what else a trace
    carries.

    Law: with nothing given, the result is the trace: `==` holds.

    Args:
        outputs: must be given for a builder, which has none of its own.
        constants: those that stay constants, where others become inputs.

    Raises:
        InvalidTrace: a variable is read before it is bound, or bound twice.
        TraceTypeError: a builder is given without outputs.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> trace = tfn.trace(lambda x: (x.sin(), x.cos()), torch.ones(2))
        >>> print(tfn.ir.cut(trace, outputs=trace.outputs[1:], equations=trace.equations[1:]))
        def program(v0):
            # v0: f32[2]
            v1 = aten.cos.default(v0)  # f32[2]
            return (v1,)
    """
    if outputs is None:
        check_is_trace("cut without `outputs`", trace)
        outputs = trace.outputs  # type: ignore[union-attr]
    return canonical(
        tuple(trace.inputs if inputs is None else inputs),
        tuple(trace.equations if equations is None else equations),
        tuple(outputs),
        tuple(trace.constants if constants is None else constants),
        tuple(trace.constraints),
        trace.name if name is None else name,
    )


def canonical(
    inputs: tuple[Var, ...],
    equations: tuple[Equation, ...],
    outputs: tuple[Atom, ...],
    constants: tuple[Constant, ...],
    constraints: tuple[Expr, ...],
    name: str = "program",
) -> Trace:
    """Return the trace of recorded parts, its variables renumbered in binding order. Unused
    constants are left out.

    For what makes a trace from nothing. A trace that is made from a trace is `cut` or walked.
    """
    used = {var.index for equation in equations for var in equation.operands}
    used |= {atom.index for atom in outputs if isinstance(atom, Var)}
    constants = tuple(constant for constant in constants if constant.var.index in used)
    names: dict[int, Var] = {}

    def bind(var: Var) -> Var:
        if var.index in names:
            raise InvalidTrace(f"{var} is bound twice")
        new = names[var.index] = var if var.index == len(names) else Var(len(names), var.type)
        return new

    def read(var: Var) -> Var:
        try:
            return names[var.index]
        except KeyError:
            raise InvalidTrace(f"{var}: {var.type} is used before it is bound") from None

    new_inputs = tuple(bind(var) for var in inputs)
    new_constants = tuple(
        Constant(bind(constant.var), constant.tensor, constant.owned) for constant in constants
    )
    new_equations = tuple(_rebind(equation, read, bind) for equation in equations)
    new_outputs = tuple(map_arg(read, atom) for atom in outputs)
    return Trace(new_inputs, new_equations, new_outputs, new_constants, constraints, name)


def _rebind(equation: Equation, read: Callable[[Var], Var], bind: Callable[[Var], Var]) -> Equation:
    new = equation.reading(read)
    outputs = tuple([bind(var) for var in equation.outputs])
    if all(map(operator.is_, outputs, equation.outputs)):
        return new
    return Equation(new.op, new.args, new.kwargs, outputs, new.bodies, new.source)


def subtraces(trace: Trace) -> Iterator[Trace]:
    """The trace and every distinct trace inside it, each once, outermost first.

    Law: each is closed, so `check` accepts each alone.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> trace = tfn.trace(tfn.checkpoint(torch.sin), torch.ones(2))
        >>> [one.name for one in tfn.ir.subtraces(trace)]
        ['sin', 'sin']
    """
    seen: set[Trace] = set()
    pending = [trace]
    while pending:
        current = pending.pop()
        if current not in seen:
            seen.add(current)
            yield current
            pending.extend(
                body
                for equation in reversed(current.equations)
                for body in reversed(equation.bodies)
            )


def every_equation(trace: Trace) -> Iterator[Equation]:
    """The equations of the trace and of every distinct trace inside it, outermost first."""
    return (equation for inner in subtraces(trace) for equation in inner.equations)
