"""Traces run as PyTorch's own code: leaves as ATen calls, loops and choices as PyTorch's
higher-order ops. `torch.export` records what runs here.

Other structured ops are what they compute. Their derivatives are not in an exported program, which
`has_rules` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_fn.ir import ops
from thunder_fn.ir.symbols import bind, compute, symbols_of
from thunder_fn.ir.trace import (
    Equation,
    Expr,
    Literal,
    TensorType,
    Trace,
    Var,
    every_equation,
    subtraces,
)
from thunder_fn.portable.errors import not_exported
from thunder_fn.random import IN_ATEN
from thunder_fn.structured.shared.scan_parts import Loop
from thunder_fn.structured.shared.while_parts import While

Values = tuple[Any, ...]


class Running:
    """A run of a trace: the numbers that its symbols stand for, and the tensors that stand for its
    constants, by identity.
    """

    def __init__(self, numbers: dict[Any, Any], constants: dict[int, Any]) -> None:
        self.numbers, self.constants = numbers, constants

    def run(self, trace: Trace, inputs: Sequence[Any]) -> Values:
        """The outputs of a trace.

        Raises:
            PortableError: PyTorch has no equal of an op.
        """
        env = [*inputs, *(self.constants[id(one.tensor)] for one in trace.constants)]
        for equation in trace.equations:
            results = self._apply(equation, env)
            for symbol, value in bind(equation.outputs, results).items():
                self.numbers.setdefault(symbol, value)
            env.extend(results)
        return tuple(self._read(atom, env) for atom in trace.outputs)

    def _read(self, arg: Any, env: list[Any]) -> Any:
        match arg:
            case Var():
                return env[arg.index]
            case Literal(value=Expr() as value):
                return self._number(value)
            case Literal():
                return arg.value
            case _:
                return [self._read(item, env) for item in arg]

    def _number(self, value: Any) -> Any:
        return compute(value, self.numbers) if isinstance(value, Expr) else value

    def _apply(self, equation: Equation, env: list[Any]) -> Values:
        operands = [env[var.index] for var in equation.operands]
        match equation.op.kind:
            case "leaf":
                return self._leaf(equation, env)
            case "composite":
                return self.run(equation.body, operands)
            case "structured" if equation.op.name in _HIGHER_ORDER:
                return _HIGHER_ORDER[equation.op.name](self, equation, operands)
            case "structured" if equation.op.name in _FIRST:
                return (operands[0],)
            case "structured" if equation.bodies and equation.op.name != "carry_at":
                return self.run(equation.bodies[0], operands)
            case _:
                raise not_exported(equation, "has no equal in PyTorch")

    def _leaf(self, equation: Equation, env: list[Any]) -> Values:
        args = [self._read(arg, env) for arg in equation.args]
        kwargs = {key: self._read(arg, env) for key, arg in equation.kwargs}
        if equation.op in IN_ATEN:
            return (IN_ATEN[equation.op](*args, **kwargs),)
        if not _is_pytorchs(equation):
            raise not_exported(equation, "is an op that only this process has")
        return ops.run(equation.op, args, kwargs)

    # ---- bodies as functions of all that they read ----

    def _closed(self, bodies: Sequence[Trace]) -> tuple[Values, Callable[[Values], Running]]:
        """The values that bodies read besides their inputs, and a run with others instead."""
        tensors = {
            id(one.tensor): self.constants[id(one.tensor)]
            for body in bodies
            for inner in subtraces(body)
            for one in inner.constants
        }
        mentioned = dict.fromkeys(symbol for body in bodies for symbol in symbols_of(body))
        moving = [
            symbol for symbol in mentioned if isinstance(self.numbers.get(symbol), torch.SymInt)
        ]
        values = (*tensors.values(), *(self.numbers[symbol] for symbol in moving))

        def inside(values: Values) -> Running:
            own = dict(zip(tensors, values, strict=False))
            numbers = dict(zip(moving, values[len(tensors) :], strict=True))
            return Running(self.numbers | numbers, own)

        return values, inside

    def cond(self, equation: Equation, operands: list[Any]) -> Values:
        """Run one of two bodies."""
        pred, *given = operands
        return self._chosen(pred, equation.bodies, given)

    def switch(self, equation: Equation, operands: list[Any]) -> Values:
        """Run one of several bodies: a choice of two, the second of which is the rest."""
        index, *given = operands
        return self._switched(index, 0, equation.bodies, given)

    def _switched(
        self, index: Any, first: int, bodies: Sequence[Trace], given: Sequence[Any]
    ) -> Values:
        if len(bodies) == 1:
            return self.run(bodies[0], given)
        extra, inside = self._closed(bodies)
        count = len(given)

        def taken(*values: Any) -> list[Any]:
            return _own(inside(values[count + 1 :]).run(bodies[0], values[1 : count + 1]))

        def rest(*values: Any) -> list[Any]:
            own = inside(values[count + 1 :])
            return _own(own._switched(values[0], first + 1, bodies[1:], values[1 : count + 1]))

        return tuple(
            torch.ops.higher_order.cond(index <= first, taken, rest, (index, *given, *extra))
        )

    def _chosen(self, pred: Any, bodies: Sequence[Trace], given: Sequence[Any]) -> Values:
        extra, inside = self._closed(bodies)
        count = len(given)

        def branch(body: Trace) -> Callable[..., list[Any]]:
            return lambda *values: _own(inside(values[count:]).run(body, values[:count]))

        return tuple(torch.ops.higher_order.cond(pred, *map(branch, bodies), (*given, *extra)))

    def while_loop(self, equation: Equation, operands: list[Any]) -> Values:
        """Run a body while a condition holds; where there is a greatest number of steps, a carry
        counts them.
        """
        loop, (condition, body) = While.of(equation), equation.bodies
        consts, carry = loop.parts(operands)
        extra, inside = self._closed(equation.bodies)
        count, first = len(carry), len(consts)
        device = next((x.device for x in carry if isinstance(x, torch.Tensor)), None)
        start = torch.zeros((), dtype=torch.int64, device=device)

        def holds(steps: Any, *values: Any) -> Any:
            own, given = values[:count], values[count:]
            (found,) = inside(given[first:]).run(condition, (*given[:first], *own))
            return found if loop.max_steps is None else found & (steps < loop.max_steps)

        def step(steps: Any, *values: Any) -> tuple[Any, ...]:
            own, given = values[:count], values[count:]
            new = inside(given[first:]).run(body, (*given[:first], *own))
            return (steps + 1, *_own(new))

        found = torch.ops.higher_order.while_loop(
            holds, step, (start, *_own(carry)), (*consts, *extra)
        )
        return tuple(found)[1:]

    def scan(self, equation: Equation, operands: list[Any]) -> Values:
        """Run a body for each slice. A step counter is a carry, since PyTorch's wants one, and an
        operand to slice.
        """
        loop, body = Loop.of(equation), equation.body
        consts, carry, xs = loop.parts(operands)
        length = self._number(loop.length)
        if isinstance(length, int) and length == 0:
            return (*_own(carry), *self._nothing(equation, loop))
        extra, inside = self._closed((body,))
        device = next((x.device for x in operands if isinstance(x, torch.Tensor)), None)
        counter = torch.zeros((), dtype=torch.int64, device=device)
        steps = torch.arange(length, device=device)
        flip = (lambda x: x.flip(0)) if loop.reverse else (lambda x: x)
        stop = 1 + len(carry)

        def step(*values: Any) -> list[Any]:
            own, slices = values[1:stop], values[stop + 1 : stop + 1 + len(xs)]
            given = values[stop + 1 + len(xs) :]
            new = inside(given[len(consts) :]).run(body, (*given[: len(consts)], *own, *slices))
            return [values[0] + 1, *_own(new)]

        found = torch.ops.higher_order.scan(
            step, [counter, *_own(carry)], [steps, *map(flip, xs)], (*consts, *extra)
        )
        return (*found[1:stop], *map(flip, found[stop:]))

    def _nothing(self, equation: Equation, loop: Loop) -> Values:
        types = equation.output_types[loop.num_carry :]
        return tuple(
            torch.empty(
                [self._number(size) for size in type.shape], dtype=type.dtype, device=type.device
            )
            for type in types
            if isinstance(type, TensorType)
        )


_HIGHER_ORDER: dict[str, Callable[[Running, Equation, list[Any]], Values]] = {
    "cond": Running.cond,
    "switch": Running.switch,
    "while_loop": Running.while_loop,
    "scan": Running.scan,
}
_FIRST = frozenset(("checkpoint_name", "straight_through", "no_grad_write", "pushed_write"))
"""Ops whose value is that of their first operand."""

_RULES = frozenset(
    (
        *("custom_vjp", "custom_jvp", "straight_through", "no_grad_write", "pushed_write"),
        "differentiated_as",
    )
)


def has_rules(trace: Trace) -> bool:
    """Test whether derivatives of the trace are other than those of the ops that it runs."""
    return any(
        equation.op.name in _RULES or equation.op == ops.STOP_GRADIENT or equation.op == ops.NO_GRAD
        for equation in every_equation(trace)
    )


def _own(values: Sequence[Any]) -> list[Any]:
    """The values in memory of their own, as PyTorch's higher-order ops want them."""
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


def _is_pytorchs(equation: Equation) -> bool:
    return not equation.op.name.startswith("thunder_fn")


__all__ = ["Running", "has_rules"]
