"""Numbers on the CPU in front of a program that a GPU records, such as a step count.

    v3 = add(v1, 1)             # on the CPU, in each call
    ...
    v9 = div(v7, v3)            # in the recording: v3 is a tensor of the GPU, which is copied there

A kernel takes a number of the CPU as an argument, and a recording would repeat its first value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_fn.ir import ops
from thunder_fn.ir.equations import bound
from thunder_fn.ir.rules import divided, interleaved
from thunder_fn.ir.splitting import handing_on, split
from thunder_fn.ir.trace import (
    Arg,
    Atom,
    Equation,
    Literal,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
    every_equation,
    subtraces,
)
from thunder_fn.ir.types import is_on, is_scalar
from thunder_fn.ir.walking import put, rewritten

TO_COPY = ops.leaf(torch.ops.aten._to_copy.default)
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class InFront:
    """A trace in two: `first` computes on the CPU, and returns its outputs, then what `rest` reads.

    `rest` takes what it reads of first, then its own inputs. `is_given` says of each input who
    takes it, `is_first` of each output who gives it.
    """

    first: Trace
    rest: Trace
    is_given: tuple[bool, ...]
    is_first: tuple[bool, ...]
    device: torch.device

    def run(
        self, first: Callable[..., tuple[Any, ...]], rest: Callable[..., tuple[Any, ...]]
    ) -> Callable[..., tuple[Any, ...]]:
        """The function of the trace's inputs, made of those of the two parts."""
        count, device = sum(self.is_first), self.device

        def run(*inputs: Any) -> tuple[Any, ...]:
            numbers, others = divided(inputs, self.is_given)
            found = first(*numbers)
            sent = (value.to(device, non_blocking=True) for value in found[count:])
            return interleaved(found, rest(*sent, *others), self.is_first)

        return run


def in_front(trace: Trace) -> InFront | None:
    """The numbers of the CPU in front of the rest; None if there are none, or if the rest computes
    on the CPU too.

    Law: running `first`, then `rest`, computes what the trace computes, up to the order in which
        a kernel divides by a number.
    """
    known = {var.index for var in trace.inputs if _is_number(var)}
    devices = [var.type.device for var in trace.inputs if is_on(var.type, "cuda")]  # type: ignore[union-attr]
    if not known or not devices or trace.constraints:
        return None
    for equation in trace.equations:
        is_early = equation.operands and all(var.index in known for var in equation.operands)
        if is_early and ops.has_side_effect(equation):
            return None
        if is_early and all(map(_is_number, equation.outputs)):
            known.update(var.index for var in equation.outputs)
    late = {var.index for var in (*trace.inputs, *bound(trace.equations)) if var.index not in known}
    is_first = tuple(isinstance(atom, Var) and atom.index in known for atom in trace.outputs)
    outputs = divided(trace.outputs, is_first)
    halves = split(trace, late, outputs, names=(f"{trace.name}_numbers", trace.name))
    if not _may_move(halves.backward):
        return None
    is_given = tuple(var.index in known for var in trace.inputs)
    rest = _moved(halves.backward, devices[0])
    return InFront(handing_on(halves), rest, is_given, is_first, devices[0])


def _is_number(var: Var) -> bool:
    """Test for a tensor of the CPU with one element and no dims."""
    return is_scalar(var.type) and is_on(var.type, "cpu")


def _may_move(rest: Trace) -> bool:
    """Test that nothing in a trace is on the CPU but numbers from outside, and what is computed
    with them.
    """
    return all(
        (is_on(var.type, "cuda") or _is_number(var) or not isinstance(var.type, TensorType))
        for inner in subtraces(rest)
        for var in (*inner.inputs, *(var for one in inner.equations for var in one.outputs))
    ) and not any(
        _names_cpu(arg)
        for one in every_equation(rest)
        for arg in (*one.args, *(value for _, value in one.kwargs))
    )


def _names_cpu(arg: Arg) -> bool:
    if isinstance(arg, tuple):
        return any(map(_names_cpu, arg))
    value = arg.value if isinstance(arg, Literal) else None
    return isinstance(value, torch.device) and value.type == "cpu"


def _moved(trace: Trace, device: torch.device) -> Trace:
    """The trace with its numbers on the GPU."""

    def move(type: Any) -> Any:
        is_there = not isinstance(type, TensorType) or type.device.type == device.type
        return type if is_there else replace(type, device=device)

    def step(
        builder: TraceBuilder, equation: Equation, operands: tuple[Atom, ...]
    ) -> Sequence[Atom]:
        types = tuple(move(var.type) for var in equation.outputs)
        if _is_rounded(equation):
            return _in_float32(builder, equation, operands, types)
        bodies = tuple(_moved(body, device) for body in equation.bodies)
        return put(builder, equation, operands, bodies=bodies, types=types)

    return rewritten(trace, step, types=tuple(map(move, trace.input_types)))


def _is_rounded(equation: Equation) -> bool:
    """Test for a pointwise op of tensors of 16 bits and of a wider number of the CPU.

    With such a number a kernel computes in float32. A number of the GPU it would round first.
    """
    if not ops.is_pointwise(equation.op):
        return False
    numbers = [_dtype(var) for var in equation.operands if _is_number(var)]
    others = [_dtype(var) for var in equation.operands if not _is_number(var)]
    result = _dtype(equation.outputs[0])
    return result in HALVES and result in others and any(one not in HALVES for one in numbers)


def _dtype(var: Var) -> torch.dtype | None:
    return var.type.dtype if isinstance(var.type, TensorType) else None


def _in_float32(
    builder: TraceBuilder, equation: Equation, operands: tuple[Atom, ...], types: tuple[Any, ...]
) -> Sequence[Atom]:
    """An equation on numbers of 16 bits, computed in float32."""

    def cast(atom: Atom, type: Any, dtype: torch.dtype) -> Atom:
        return ops.emit(builder, TO_COPY, (atom,), replace(type, dtype=dtype), dtype=dtype)

    wide = [
        cast(atom, atom.type, torch.float32)
        if isinstance(atom, Var) and isinstance(atom.type, TensorType) and atom.type.dtype in HALVES
        else atom
        for atom in operands
    ]
    wider = tuple(replace(type, dtype=torch.float32) for type in types)
    results = put(builder, equation, wide, types=wider)
    return [cast(result, type, type.dtype) for result, type in zip(results, types, strict=True)]
