"""The values for which Python asks while it is traced: `if x.sum() > 0`, `float(x)`.

Every capture knows a value that a function makes of sizes and numbers alone, such as a mask of
ones: it is the same in every call. A capture that serves one call, as that of an eager `grad` does,
also knows what depends on the tensors of that call. A value is computed when it is asked for, from
the equations recorded so far.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.numbers.counts import fed_number
from thunder_fn.capture.recorded import Leaf, Scope, leaves_of
from thunder_fn.capture.supported import EscapedValue, has_settled
from thunder_fn.ir import facts, ops
from thunder_fn.ir.rules import EVALUATE
from thunder_fn.ir.symbols import bind, made_by, specialize_equation, symbols_in
from thunder_fn.ir.trace import (
    Constant,
    Equation,
    Literal,
    Trace,
    Var,
    all_args,
    is_differentiable,
    python_arg,
    python_args,
    vars_in,
)

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

CUSTOM_RULE = "a custom rule"
"""The place of captures of one function, which have to draw the same numbers: none draws now."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class KnownValues:
    """The values of one recorder's variables, as far as they are known.

    Args:
        recorder: whose equations are computed.
        is_of_call: the trace serves one call, whose tensors from outside have their values.
    """

    def __init__(self, recorder: Recorder, *, is_of_call: bool) -> None:
        self._recorder, self.is_of_call = recorder, is_of_call
        self.is_told = False
        """Python was told a value that another call may not have."""
        self._given: dict[int, torch.Tensor | Callable[[], Any]] = {}
        self._found: dict[int, Any] = {}
        self._numbers: dict[Any, Any] = {}
        self._undo: Callable[[], None] | None = None
        self._versions: dict[int, int] | None = None
        """The versions of tensors from outside at the end of the capture."""

    @property
    def _is_over(self) -> bool:
        """The capture has ended."""
        return self._versions is not None

    def past(self) -> Past:
        """The values after the end of the capture."""
        constants = (one.tensor for one in self._recorder.constants if not one.owned)
        given = (one for one in self._given.values() if isinstance(one, torch.Tensor))
        outside = (one for one in (*constants, *given) if type(one) in _PLAIN)
        self._versions = {id(one): _version(one) for one in outside}
        return Past(self)

    def value_then(self, var: Var) -> torch.Tensor | None:
        """The value that a variable had; None if it is not known, or a tensor from outside that it
        depends on has changed since.
        """
        values = self._values([var])
        return None if values is None else values[0]

    def give(self, var: Var, tensor: torch.Tensor) -> None:
        """Take the value of a variable from a tensor of the call, or of the capture around."""
        if self.is_of_call:
            self._given[var.index] = tensor

    def give_results(
        self, tracers: Sequence[torch.Tensor], trace: Trace, inputs: Sequence[torch.Tensor]
    ) -> None:
        """Let tracers of this recorder have the values of a trace's last outputs on inputs."""
        if not self.is_of_call:
            return

        @functools.cache
        def results() -> Sequence[Any] | None:
            with self._recorder.resumed():
                values = list(map(self._from_anywhere, inputs))
            constants = [self._from_anywhere(one.tensor) for one in trace.constants]
            is_known = all(value is not None for value in (*values, *constants))
            is_pure = not any(
                ops.has_side_effect(one) or ops.communicates(one) for one in trace.equations
            )
            return _run(trace, values, constants) if is_known and is_pure else None

        for place, tracer in enumerate(reversed(tracers), 1):
            var = self._recorder.var_of(tracer)
            if var is not None:
                self._given[var.index] = lambda place=place: (found := results()) and found[-place]

    def _from_anywhere(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not has_settled(tensor):
            return None
        is_own = internals.is_tracer(tensor) and self._recorder.owns(tensor)
        return self.value(tensor) if is_own else self._from_outside(tensor)

    def answer(self, question: Any, args: Any, kwargs: Any) -> Any:
        """Answer a value query about fake tensors, or return NotImplemented if a value is
        unknown.
        """
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        try:
            values = self._values([self._recorder.known(tensor) for tensor in tensors])
        except KeyError:  # a tensor that reached the dispatcher without passing a torch function
            return NotImplemented
        if values is None:
            is_number = question is internals.NUMBER_OF
            wanted = self._recorder.known(tensors[0])
            number = fed_number(self._recorder, wanted) if is_number else None
            return NotImplemented if number is None else number
        supply = iter(values)
        with self._recorder.suspended():
            return question(
                *(next(supply) if isinstance(arg, torch.Tensor) else arg for arg in args), **kwargs
            )

    def value(self, tracer: torch.Tensor) -> torch.Tensor | None:
        """The value of a tracer in the call that is traced, or None."""
        if not self.is_of_call or (var := self._recorder.var_of(tracer)) is None:
            return None
        values = self._values([var])
        return None if values is None else values[0]

    def constant(self, tracer: torch.Tensor) -> torch.Tensor | None:
        """The value of a tracer that the traced function made of Python's numbers, or None."""
        var = self._recorder.var_of(tracer)
        owned = (one for one in self._recorder.constants if one.owned)
        return next((one.tensor for one in owned if one.var == var), None)

    def write(self, tracer: torch.Tensor, write: Callable[[torch.Tensor], str]) -> str | None:
        """The text of a tracer's value in the call that is traced, or None."""
        value = self.value(tracer)
        if value is None:
            self._recorder.texts.ask()
            return None
        with self._recorder.suspended():
            return write(value)

    def number(self, symbol: Any) -> Any:
        """The number for which an unbacked symbol stands in the call that is traced, or None."""
        if not self.is_of_call:
            return None
        if symbol not in self._numbers:
            makers = (leaf for leaf in _backwards(self._recorder.root) if symbol in made_by(leaf))
            maker = next(makers, None)
            if maker is None:
                outer = self._recorder.outer
                return None if outer is None else outer.values.number(symbol)
            self._values(list(maker.outputs))
        return self._numbers.get(symbol)

    def _values(self, wanted: Sequence[Var]) -> list[Any] | None:
        """The values of variables; None if one depends on an input that has none, or on an effect
        that cannot be had now.
        """
        with self._recorder.suspended():
            needed = {var.index for var in wanted} - self._found.keys()
            leaves = self._leaves_for(needed)
            if leaves is None and self._draw():
                needed = {var.index for var in wanted} - self._found.keys()
                leaves = self._leaves_for(needed)
            if leaves is None or not all(map(self._take, needed)):
                return None
            for leaf in reversed(leaves):
                self._compute(leaf)
        return [self._found[var.index] for var in wanted]

    def _leaves_for(self, needed: set[int]) -> list[Leaf] | None:
        """The equations that compute variables, the last one first. They leave in `needed` what no
        equation computes. None if one cannot be computed.
        """
        found, symbols = list[Leaf](), set[Any]()
        for leaf in _backwards(self._recorder.root) if needed else ():
            made = made_by(leaf) if symbols else ()
            if not symbols.isdisjoint(made) or any(var.index in needed for var in leaf.outputs):
                used = set(symbols_in(all_args(leaf)))
                if not _is_repeatable(leaf) or (used and not (self.is_of_call or self._is_over)):
                    return None
                found.append(leaf)
                symbols = (symbols | used) - self._numbers.keys() - set(made)
                needed.difference_update(var.index for var in leaf.outputs)
                needed.update(var.index for var in vars_in(all_args(leaf)))
                needed.difference_update(self._found)
        for symbol in symbols:
            number = self._number_from_outside(symbol)
            if number is None:
                return None
            self._numbers[symbol] = number
        return found

    def _number_from_outside(self, symbol: Any) -> Any:
        """The number for which a symbol stands that no equation of this capture makes, or None.
        After the end, a size of an argument is the one it had: eager code would have kept that.
        """
        outer = self._recorder.outer
        number = None if outer is None else outer.values.number(symbol)
        return getattr(symbol, "hint", None) if number is None and self._is_over else number

    def _take(self, index: int) -> bool:
        """Take the value of a variable that no equation computes; False if it has none."""
        tensor, is_owned = self._given.get(index), False
        is_of_call = self.is_of_call or self._is_over
        for constant in () if tensor is not None else self._recorder.constants:
            if constant.var.index == index and (constant.owned or is_of_call):
                tensor, is_owned = constant.tensor, constant.owned
        if isinstance(tensor, torch.Tensor):
            value = self._from_outside(tensor)
        else:
            value = None if tensor is None else tensor()
        if value is None:
            return False
        self._found[index] = value
        if not is_owned:
            self.tell()
        return True

    def tell(self) -> None:
        """Note, for the captures around this one too, that the trace serves this call only."""
        recorder: Recorder | None = self._recorder
        while recorder is not None:
            recorder.values.is_told, recorder = True, recorder.outer

    def _from_outside(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that is not of this capture."""
        if type(tensor) is EscapedValue:
            return tensor if has_settled(tensor) else None
        if self._versions is not None and self._versions.get(id(tensor)) != _version(tensor):
            return None
        if not internals.is_tracer(tensor):
            has_values = type(tensor) in _PLAIN and not internals.is_functorch_wrapped(tensor)
            is_data = has_values and not tensor.is_meta and tensor.layout is torch.strided
            return internals.plain(tensor.detach()) if is_data else None
        outer = self._recorder.outer
        while outer is not None and not internals.is_functorch_wrapped(tensor):
            if outer.owns(tensor):
                with outer.resumed():
                    return outer.values.value(tensor)
            outer = outer.outer
        return None

    def _draw(self) -> bool:
        """Draw the random numbers of the captures up to here, in order, as eager code has drawn
        them by now. They are constants from then on. False if they cannot be drawn now.
        """
        around = [self._recorder]
        while around[0].outer is not None:
            around.insert(0, around[0].outer)
        effects = [
            (recorder, leaf, scope)
            for recorder in around
            for leaf, scope in leaves_of(recorder.root)
            if ops.has_side_effect(leaf)
        ]
        is_shared = any(recorder.inside in ("vmap", CUSTOM_RULE) for recorder in around)
        if (
            not self.is_of_call
            or is_shared
            or self._is_over
            or not all(_is_draw(leaf) for _, leaf, _ in effects)
        ):
            return False
        outermost = around[0].values
        outermost._undo = outermost._undo or _undoing_draws()
        return all(recorder.values._drawn(leaf, scope) for recorder, leaf, scope in effects)

    def _drawn(self, leaf: Leaf, scope: Scope) -> bool:
        if self._values(vars_in(all_args(leaf))) is None:
            return False
        self._compute(leaf)
        scope.items[:] = [item for item in scope.items if item is not leaf]
        self._recorder.constants.extend(
            Constant(var, self._found[var.index], owned=True) for var in leaf.outputs
        )
        self.tell()
        return True

    def undo_draws(self) -> None:
        """Set the generators back: the function is captured anew."""
        if self._undo is not None:
            self._undo()

    def _compute(self, leaf: Leaf) -> None:
        given = leaf.args, leaf.kwargs, leaf.outputs, leaf.bodies
        equation = Equation(leaf.op, *given, leaf.source)
        results = _computed(specialize_equation(equation, self._numbers), self._found)
        self._numbers.update(bind(leaf.outputs, results) if made_by(leaf) else {})
        self._found.update(
            (var.index, value) for var, value in zip(leaf.outputs, results, strict=True)
        )

    def forget(self) -> None:
        """Let go of the values."""
        del self._recorder
        for kept in (self._given, self._found, self._numbers):
            kept.clear()


class Past:
    """The values of a capture that has ended, for tensors that have outlived it and hold this."""

    def __init__(self, values: KnownValues) -> None:
        self._values = values

    def value(self, var: Var) -> torch.Tensor | None:
        """The value of a variable; None if it is not known any more."""
        return self._values.value_then(var)

    def __del__(self) -> None:
        self._values.forget()


def _version(tensor: torch.Tensor) -> int:
    """The number of writes to a tensor; less each time for one that does not count them."""
    with internals.no_torch_function():
        return tensor._version if not tensor.is_inference() else next(_UNCOUNTED)


_UNCOUNTED = itertools.count(-1, -1)


def _backwards(scope: Scope) -> Iterator[Leaf]:
    """All ops recorded in a scope, the last one first."""
    for item in reversed(scope.items):
        if isinstance(item, Scope):
            yield from _backwards(item)
        else:
            yield item


def _is_repeatable(leaf: Leaf) -> bool:
    """Test for an op that can be computed once more: it draws nothing, changes nothing outside and
    waits for no other rank.
    """
    return not ops.has_side_effect(leaf) and not ops.communicates(leaf)


def _is_draw(leaf: Leaf) -> bool:
    """Test for an op that draws from the default generator numbers through which no gradient
    flows.
    """
    if not ops.is_random(leaf.op) or _generators_in(all_args(leaf)):
        return False
    has_no_derivative = leaf.op in facts.DRAWS or leaf.op in facts.LIKE
    operands = (var.type for var in leaf.operands)
    is_count = not any(map(is_differentiable, leaf.output_types))
    return has_no_derivative or is_count or not any(map(is_differentiable, operands))


def _generators_in(arg: Any) -> bool:
    if isinstance(arg, tuple):
        return any(map(_generators_in, arg))
    return isinstance(arg, Literal) and isinstance(arg.value, torch.Generator)


def _undoing_draws() -> Callable[[], None]:
    """The states of the default generators, as a function that sets them back."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    states = [(generator, generator.get_state()) for generator in generators]

    def undo() -> None:
        for generator, state in states:
            generator.set_state(state)

    return undo


def _computed(equation: Equation, values: dict[int, Any]) -> Sequence[Any]:
    """The results of an equation; on the CPU in place of the meta device, on which nothing has
    values.
    """
    if equation.op.kind == "composite":
        constants = [one.tensor for one in equation.body.constants]
        return _run(equation.body, [values[var.index] for var in equation.operands], constants)
    args, kwargs = python_args(equation, lambda var: values[var.index])
    if equation.op.kind == "structured":
        return EVALUATE.of(equation)(equation.bodies, *args, **kwargs)
    if kwargs.get("device") == torch.device("meta"):
        kwargs["device"] = torch.device("cpu")
    return ops.run(equation.op, args, kwargs)


def _run(trace: Trace, inputs: Sequence[Any], constants: Sequence[Any]) -> tuple[Any, ...]:
    """The outputs of a trace."""
    given = (*trace.inputs, *(one.var for one in trace.constants))
    values = dict(zip((var.index for var in given), (*inputs, *constants), strict=True))
    numbers: dict[Any, Any] = bind(trace.inputs, inputs)
    for equation in trace.equations:
        results = _computed(specialize_equation(equation, numbers), values)
        numbers.update(bind(equation.outputs, results))
        values.update(zip((var.index for var in equation.outputs), results, strict=True))
    return tuple(python_arg(atom, lambda var: values[var.index]) for atom in trace.outputs)
