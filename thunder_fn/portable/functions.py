"""A function whose program is data: a trace, the structure of its arguments and results, and the
conditions under which the trace is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import TENSOR, Captured, current, pytree
from thunder_fn.capture.apply import write
from thunder_fn.capture.numbers.arguments import Place, has_own_input, value_at
from thunder_fn.capture.outside.properties import FOUND, OF_MEMORY
from thunder_fn.errors import TraceTypeError
from thunder_fn.executors import Program, lower
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir.constraints import constraints_of
from thunder_fn.ir.symbols import Values, compute
from thunder_fn.ir.trace import Constant, Expr, Literal, TensorType, Trace, Var, cut, type_of_value
from thunder_fn.jitted.call import Call
from thunder_fn.jitted.program import Entry
from thunder_fn.portable.errors import refused


@dataclass(frozen=True, slots=True)
class NumberLeaf:
    """Stand-in for a number among the arguments, which is the input of the trace with this place
    after the tensors.
    """

    input: int


@dataclass(frozen=True, slots=True)
class Arguments:
    """The structure of a call, and for each leaf what it has to be.

    `leaves` has `TENSOR` for tensors, a `NumberLeaf` for a number that is a symbol, and values.
    `strides` are those of the tensors, in order.
    """

    tree: Any
    leaves: tuple[Any, ...]
    strides: tuple[tuple[int | Expr, ...], ...]
    symbols: tuple[tuple[Expr, Place], ...] = ()
    """Each symbol, and where it is read from. Those of numbers and strides are inputs of the trace,
    in order, after the tensors.
    """
    properties: tuple[tuple[int, str, Any], ...] = ()
    """Facts about the memory of tensors that the function looked at, and what it found. The place
    in autograd's graph is not among them: the function is the one of tensors that are leaves.
    """

    @property
    def extra(self) -> tuple[Place, ...]:
        """The places of the inputs after the tensors."""
        return tuple(place for _, place in self.symbols if has_own_input(place))


@dataclass(frozen=True, eq=False)
class PortableFunction:
    """A function that `save` can write and `load` has read. It never traces.

    Made by `jit(f).lower(*args).portable()`, and by `load`. Inside a traced function, and where
    autograd follows an argument, its trace is run op by op. So it can be jitted, differentiated and
    batched as any other.

    Attributes:
        trace: from the tensors, and the numbers that are symbols, to the results and the new values
            of arguments.
        relations: conditions on sizes and numbers, such as `s0 > 5`. A call that breaks one is an
            error, never another program.
    """

    trace: Trace
    arguments: Arguments
    results: Any
    result_leaves: tuple[Any, ...]
    writes: tuple[int, ...] = ()
    relations: tuple[Expr, ...] = ()
    _spec: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_spec", pytree.flatten(self.arguments.tree)[1])
        object.__setattr__(self, "__name__", self.trace.name)

    def __repr__(self) -> str:
        return f"<PortableFunction {self.trace.name}>"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the program.

        Raises:
            TraceTypeError: the program was made for another call; names the first difference.
        """
        leaves, spec = pytree.flatten((args, kwargs))
        if spec != self._spec:
            told = pytree.difference(spec, self._spec, "call", "saved")
            raise self._other(told or "the structure of the arguments differs")
        values = self._values(leaves)
        outputs = self._run(values)
        count = len(outputs) - len(self.writes)
        for place, value in zip(self.writes, outputs[count:], strict=True):
            write(_tensors(leaves)[place], value)
        filled = pytree.filled(self.result_leaves, outputs[:count])
        return pytree.unflatten(pytree.flatten(self.results)[1], filled)

    @cached_property
    def program(self) -> Program:
        """The program of the torch executor."""
        return lower(self.trace, below_autograd=True)

    def _run(self, values: list[Any]) -> tuple[Any, ...]:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        tensors += [constant.tensor for constant in self.trace.constants]
        if current() is not None or any(map(internals.is_followed, tensors)):
            return evaluate(self.trace, values)
        return self.program.run(*values)

    def _values(self, leaves: list[Any]) -> list[Any]:
        """The values of the trace's inputs, if the trace is right for them."""
        for position, (known, leaf) in enumerate(zip(self.arguments.leaves, leaves, strict=True)):
            self._check_leaf(position, known, leaf)
        tensors = _tensors(leaves)
        extra = [value_at(leaves, place) for place in self.arguments.extra]
        for var, tensor in zip(self.trace.inputs, tensors, strict=False):
            self._check_tensor(var.type, tensor)
        known = self.arguments.symbols
        found = {symbol.value: value_at(leaves, place) for symbol, place in known}
        self._check_numbers(found, tensors)
        for place, name, value in self.arguments.properties if current() is None else ():
            if (given := FOUND[name](tensors[place])) != value:
                raise self._other(f"`{name}` of an argument is {given}, and was {value}")
        for tensor, stride in zip(tensors, self.arguments.strides, strict=True):
            self._check_layout(tensor, tuple(_number(size, found) for size in stride))
        return [*map(internals.plain, tensors), *extra]

    def _check_leaf(self, position: int, known: Any, leaf: Any) -> None:
        if known is TENSOR:
            fits = isinstance(leaf, torch.Tensor)
        elif isinstance(known, NumberLeaf):
            fits = type(leaf) is self.trace.inputs[known.input].type.kind  # type: ignore[union-attr]
        else:
            fits = not isinstance(leaf, torch.Tensor) and Literal(leaf) == Literal(known)
        if not fits:
            path = pytree.paths(self.arguments.tree)[position]
            wanted = (
                "a tensor"
                if known is TENSOR
                else "a number"
                if isinstance(known, NumberLeaf)
                else repr(known)
            )
            given = type_of_value(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)
            raise self._other(f"the argument {path} is {given}, and was {wanted}")

    def _check_tensor(self, type: Any, tensor: torch.Tensor) -> None:
        given = type_of_value(tensor)
        fits = (
            isinstance(given, TensorType)
            and (given.dtype, given.device) == (type.dtype, type.device)
            and len(given.shape) == len(type.shape)
            and all(
                size == own
                for size, own in zip(type.shape, given.shape, strict=True)
                if isinstance(size, int) and isinstance(own, int)
            )
        )
        if not fits:
            raise self._other(f"an argument is {given}, and was {type}")

    def _check_layout(self, tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
        """Raise unless the tensor lies in memory as the function's did, which may look at that."""
        pairs = zip(tensor.shape, tensor.stride(), stride, strict=True)
        if tensor.numel() and any(size != 1 and mine != its for size, mine, its in pairs):
            raise self._other(
                f"an argument has the strides {tensor.stride()}, and had {stride}; pass"
                " `x.contiguous()`, say"
            )

    def _check_numbers(self, found: Values, tensors: Sequence[torch.Tensor]) -> None:
        for symbol, value in found.items():
            low, high = getattr(symbol, "bounds", (None, None))
            least = 2 if symbol.is_positive and low is None else low
            if (least is not None and value < least) or (high is not None and value > high):
                raise self._other(f"{symbol} is {value}, and has to be {_range(least, high)}")
        for relation in self.relations:
            if not compute(relation, found):
                told = ", ".join(f"{symbol} = {value}" for symbol, value in found.items())
                raise self._other(f"{relation} has to hold, and does not where {told}")
        for var, tensor in zip(self.trace.inputs, tensors, strict=False):
            for size, own in zip(var.type.shape, tensor.shape, strict=True):  # type: ignore[union-attr]
                if isinstance(size, Expr) and compute(size, found) != own:
                    raise self._other(f"an argument is {type_of_value(tensor)}, and was {var.type}")

    def _other(self, what: str) -> TraceTypeError:
        fix = "Call it as it was saved, or save a program for this call too."
        return TraceTypeError(f"{self.trace.name} was saved for another call: {what}", fix=fix)


def _range(low: Any, high: Any) -> str:
    if high is None:
        return f"at least {low}"
    return f"at most {high}" if low is None else f"from {low} to {high}"


def _tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _number(size: int | Expr, found: Values) -> int:
    return size if isinstance(size, int) else int(compute(size, found))


# ---- from jit ----


def portable_function(entry: Entry, call: Call) -> PortableFunction:
    """The function of a program that `jit` has made of a call.

    Raises:
        PortableError: the program does something besides computing results and writing to
            arguments.
    """
    captured = entry.captured
    for what, fix in _in_the_way(captured, call):
        raise refused(what, fix=fix)
    trace, results, leaves = _with_results(captured, _trace_of(entry))
    decided = (decision.relation for decision in (*captured.decisions, *entry.decisions))
    return PortableFunction(
        trace,
        _arguments(entry, call),
        results,
        leaves,
        tuple(one.target for one in captured.writes if isinstance(one.target, int)),
        tuple(dict.fromkeys((*decided, *constraints_of(trace)))),
    )


def _with_results(captured: Captured, trace: Trace) -> tuple[Trace, Any, tuple[Any, ...]]:
    """The trace, the structure of its results and their leaves, with the content of containers
    from outside that are results themselves.
    """
    outputs, constants, tree = iter(trace.outputs), list(trace.constants), list[Any]()
    leaves, results = list[Any](), list[Any]()
    for leaf in captured.out_leaves:
        inner, spec = pytree.flatten(leaf)
        tree.append(pytree.unflatten(spec, range(len(leaves), len(leaves) + len(inner))))
        for one in inner:
            if one is TENSOR:
                results.append(next(outputs))
            elif isinstance(one, torch.Tensor):
                constants.append(
                    Constant(Var(_GIVEN + len(constants), type_of_value(one)), one, owned=False)
                )
                results.append(constants[-1].var)
        leaves += pytree.statics(inner)
    trace = cut(trace, outputs=(*results, *outputs), constants=constants)
    return trace, pytree.unflatten(captured.out_spec, tree), tuple(leaves)


_GIVEN = 1 << 41
"""Variables of tensors in such containers begin here."""


def _arguments(entry: Entry, call: Call) -> Arguments:
    symbolic, count = entry.symbolic, len(call.tensors)
    symbols = () if symbolic is None else tuple(symbolic.places.items())
    extra = [place for _, place in symbols if has_own_input(place)]
    leaves = tuple(
        TENSOR
        if isinstance(leaf, torch.Tensor)
        else NumberLeaf(count + extra.index((position, None)))
        if (position, None) in extra
        else leaf
        for position, leaf in enumerate(call.leaves)
    )
    return Arguments(
        pytree.unflatten(call.spec, range(len(leaves))),
        leaves,
        tuple(_stride(entry, position, tensor) for position, tensor in call.tensors),
        tuple((Expr(symbol), place) for symbol, place in symbols),
        tuple(
            (read.tensor, read.name, read.found)
            for read in entry.captured.reads
            if isinstance(read.tensor, int) and read.name in OF_MEMORY
        ),
    )


def _trace_of(entry: Entry) -> Trace:
    return [stage for stage in entry.stages if isinstance(stage, Trace)][-1]


def _stride(entry: Entry, position: int, tensor: torch.Tensor) -> tuple[int | Expr, ...]:
    if entry.symbolic is not None and position in entry.symbolic.layouts:
        return entry.symbolic.layouts[position].stride
    return tuple(tensor.stride())


def _in_the_way(captured: Captured, call: Call) -> Iterator[tuple[str, str]]:
    """Reasons why a program cannot leave the process, each with what to write instead."""
    if call.statics:
        yield (
            f"the argument {call.statics[0][0]} is static, and may be any object",
            "Give it to the function before: `jit(functools.partial(f, n=3)).lower(x)`.",
        )
    if len(call.tensors) != sum(leaf is not None for leaf in call.leaves if _is_tensor(leaf)):
        yield "a tensor is passed twice", "Pass it once, or a copy of it."
    if any(not isinstance(one.target, int) for one in captured.writes):
        yield (
            "the function changes a tensor that it closes over",
            "Pass the tensor, or return its new value.",
        )
    if any(one.strides is not None for one in captured.writes):
        yield "the function changes the layout of an argument", "Return the view instead."
    effects = [effect for effect in captured.effects if effect.count]  # others store plain data
    kept = (captured.feeds, effects, captured.kept, captured.grads, captured.own_leaves)
    if any(kept):
        yield (
            "the function reads or stores gradients or the state of an optimizer outside",
            "Write the step as a function of parameters and state, with `functional_optimizer`.",
        )


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) or type(leaf).__name__ == "Repeated"
