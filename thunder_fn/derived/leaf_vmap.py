"""Batching rules of leaf ops, derived from functorch's.

Run the op under `torch.vmap` on tracers and record the batching rule. Batched values have their batch dim first. If
functorch has no rule and would loop, the op is decomposed. If that fails too, a scan runs it example by example, and
a warning names the op once.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NoReturn

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.generators import generators_of
from thunder_fn.capture.recorder import Recorder
from thunder_fn.capture.replaced.seeds import GET_STATE, SET_STATE, SIZE
from thunder_fn.derived import leaf_vjp as derive
from thunder_fn.derived.decompositions import NOT_BATCHED
from thunder_fn.derived.leaf_vjp import call_leaf, close_recording, decomposition
from thunder_fn.derived.quirks import attention
from thunder_fn.derived.quirks.batching import KNOWN, Batch, rule_of
from thunder_fn.errors import located
from thunder_fn.ir import facts, ops
from thunder_fn.ir.constraints import equations_between, fixes_numbers, pinned
from thunder_fn.ir.rules import Mask
from thunder_fn.ir.symbols import is_symbolic, made_by
from thunder_fn.ir.trace import (
    Dim,
    Equation,
    Expr,
    Literal,
    Op,
    TensorType,
    Trace,
    TraceBuilder,
    Type,
    map_arg,
    python_arg,
)

SCAN = Op("structured", "scan")
STATE = TensorType(torch.uint8, (SIZE,))
RANKED = (Literal(torch.channels_last), Literal(torch.channels_last_3d))
"""Layouts of values with so many dims."""


@dataclass(frozen=True, slots=True)
class VmapRule:
    """A trace from inputs, the batched ones with a leading batch dim, to outputs with a leading batch dim."""

    trace: Trace


class LoopWarning(UserWarning):
    """An op has no batching rule; vmap runs it once for each example."""


def batched_type(type: Type, size: Dim) -> Type:
    """The type with a leading batch dim."""
    return TensorType(type.dtype, (size, *type.shape), type.device) if isinstance(type, TensorType) else type


@lru_cache(maxsize=65536)
def vmap_rule(single: Trace, batched: Mask, size: Dim, randomness: str) -> VmapRule | Trace:
    """The batched equation, or the op's decomposition."""
    (equation,) = single.equations
    if made_by(equation):
        return _of_one_size(single, batched)
    if equation.op in facts.FILLS:
        return VmapRule(_fill(single, batched, size, randomness))
    if equation.op in (ops.STOP_GRADIENT, ops.NO_GRAD) or _is_unary(equation):
        return VmapRule(_of_whole_batch(single, size))
    if equation.op.name in NOT_BATCHED:
        parts = decomposition(single)
        if parts is not None:
            return parts
    if equation.op.name == "aten.cat.default" and _has_symbols(single, size):
        return VmapRule(_cat(single, batched, size))
    if equation.op.name in attention.KERNELS and ops.draws(equation) and randomness != "different":
        raise_randomness(equation.op.name) if randomness == "error" else raise_same(equation.op.name)
    ours = ops.is_collective(equation.op) or equation.op.name in attention.KERNELS
    asked = equation.op.name in KNOWN and (ours or _has_symbols(single, size))
    known = _known_rule(single, batched, size) if asked else None
    if known is not None:
        return VmapRule(known)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*performance drop.*")
            with internals.no_vmap_fallback():
                rule = _with_types_of_batch(_ask_functorch(single, batched, size, randomness), single, size)
    except (*CANNOT, UserWarning):
        rule = None
    if rule is not None:
        found = _parts(single) if fixes_numbers(rule) and not ops.draws(equation) else None
        return found if found is not None and _is_better(found) else VmapRule(rule)
    known = _known_rule(single, batched, size) if equation.op.name in KNOWN and not asked else None
    if known is not None:
        return VmapRule(known)
    found = None if ops.draws(equation) else pinned(single) or _parts(single)
    if found is not None:
        return found
    if ops.draws(equation) and randomness == "error":
        raise_randomness(equation.op.name)
    if ops.draws(equation) and randomness == "different" and ops.inplace_twin(equation.op) is not None:
        return VmapRule(_drawn_at_once(single, batched, size))
    same = ops.draws(equation) and randomness == "same"
    if same and generators_of(single):
        raise_same(equation.op.name)
    if same and any(isinstance(var.type, TensorType) and var.type.device.type != "cpu" for var in equation.outputs):
        raise_same(equation.op.name)
    warnings.warn(
        f"vmap: {equation.op} has no batching rule, so it runs in a loop over {size} examples",
        LoopWarning,
        stacklevel=2,
    )
    return VmapRule(_loop(single, batched, size, same))


def _of_one_size(single: Trace, batched: Mask) -> Trace:
    """The parts of an op with an unbacked size, where the data is the same in all examples."""
    parts = decomposition(single)
    if parts is None or _sizes_differ(parts, batched):
        raise_size(single.equations[0])
    return parts


def _sizes_differ(parts: Trace, batched: Mask) -> bool:
    """Test whether a size is found in what differs between examples."""
    differing = {var.index for var, flag in zip(parts.inputs, batched, strict=True) if flag}
    for equation in parts.equations:
        if differing.isdisjoint(var.index for var in equation.operands):
            continue
        if made_by(equation):
            return True
        differing.update(var.index for var in equation.outputs)
    return False


CANNOT = (*derive.CANNOT, TypeError)
"""Exceptions of PyTorch for an op without a batching rule; sympy raises the last one for symbols."""


def _parts(single: Trace) -> Trace | None:
    """The op's decomposition; None where it does not take symbols."""
    if not is_symbolic(single):
        return decomposition(single)
    try:
        return decomposition(single)
    except CANNOT:
        return None


def _is_better(parts: Trace) -> bool:
    """Test whether the decomposition holds for all numbers, and its parts have batching rules, which PyTorch's prims
    have not.
    """
    return not fixes_numbers(parts) and not any(part.op.name.startswith("prims.") for part in parts.equations)


def _has_symbols(single: Trace, size: Dim) -> bool:
    return is_symbolic(single) or isinstance(size, Expr)


def _cat(single: Trace, batched: Mask, size: Dim) -> Trace:
    """functorch's rule looks at sizes, as if they were numbers."""
    (equation,) = single.equations
    recorder = Recorder(track_no_grad=False, symbolic=True)
    with recorder.running():
        tracers = _inputs(recorder, single, batched, size)
        length = recorder.mode.size(size)
        wide = [
            value if flag else value.expand(length, *value.shape) for value, flag in zip(tracers, batched, strict=True)
        ]
        dim = python_arg(equation.args[1], lambda var: var) if len(equation.args) > 1 else 0
        return close_recording(recorder, [torch.cat(wide, dim + 1 if dim >= 0 else dim)], "vmap_aten.cat.default")


def _known_rule(single: Trace, batched: Mask, size: Dim) -> Trace | None:
    """A rule of ours, where functorch's would take sizes for numbers."""
    (equation,) = single.equations
    recorder = Recorder(track_no_grad=False, symbolic=True)
    with recorder.running():
        tracers = _inputs(recorder, single, batched, size)
        given = frozenset(id(value) for value, flag in zip(tracers, batched, strict=True) if flag)
        batch = Batch(ops.overload(equation.op), recorder.mode.size(size), given)
        rule = rule_of(equation, tracers, batch)
        if rule is None:
            return None
        args = [python_arg(arg, lambda var: tracers[var.index]) for arg in equation.args]
        kwargs = {key: python_arg(arg, lambda var: tracers[var.index]) for key, arg in equation.kwargs}
        results = ops.flatten_result(rule(batch, *args, **kwargs))
        return _with_types_of_batch(close_recording(recorder, list(results), f"vmap_{equation.op.name}"), single, size)


def raise_size(equation: Equation) -> NoReturn:
    """Raise for a result whose size differs between examples."""
    from thunder_fn.errors import VmapError

    raise VmapError(
        located(
            f"vmap: {equation.op} has a result whose size or value as a number depends on data, "
            "so that it differs between examples",
            source=equation.source,
            fix="Keep the size and mask instead: `torch.where(mask, x, 0)`, and sums over masks; "
            "or share one mask (in_dims None), which has one size.",
        )
    )


def raise_randomness(name: str) -> None:
    """Raise the error for random numbers under `vmap(randomness="error")`."""
    from thunder_fn.errors import VmapError

    raise VmapError(
        f'vmap: called random operation while in randomness error mode: {name} draws random numbers, and randomness="error"\n'
        'Pass randomness="different" for numbers of its own in each example, or randomness="same" for equal ones.'
    )


def raise_same(name: str) -> None:
    """Raise for a random op that cannot give every example the same numbers."""
    from thunder_fn.errors import VmapError

    raise VmapError(
        f"Vmap does not currently support same randomness with a batched tensor input of {name}: it has no batching rule, and a "
        "loop would draw other numbers in each example\n"
        'Pass randomness="different", or draw uniform numbers first: `(torch.rand(shape) < p).to(p.dtype)`.'
    )


def _inputs(recorder: Recorder, single: Trace, batched: Mask, size: Dim) -> list[torch.Tensor]:
    types = [
        batched_type(var.type, size) if flag else var.type for var, flag in zip(single.inputs, batched, strict=True)
    ]
    return [recorder.input_of_type(type) for type in types if isinstance(type, TensorType)]


def _ask_functorch(single: Trace, batched: Mask, size: Dim, randomness: str) -> Trace:
    (equation,) = single.equations
    recorder = Recorder(track_no_grad=False, symbolic=_has_symbols(single, size))
    with recorder.running():
        tracers = _inputs(recorder, single, batched, size)
        moved = [index for index, flag in enumerate(batched) if flag]
        present: list[bool] = []

        def run(*examples: Any) -> Any:
            values = list(tracers)
            for index, example in zip(moved, examples, strict=False):
                values[index] = example
            results = call_leaf(equation, lambda var: values[var.index])
            present.extend(isinstance(result, torch.Tensor) for result in results)
            return tuple(result for result in results if isinstance(result, torch.Tensor))

        examples = tuple(tracers[index] for index in moved) or (torch.empty(recorder.mode.size(size), device="meta"),)
        outputs = torch.vmap(run, randomness=randomness)(*examples)
        supply = iter(outputs)
        return close_recording(
            recorder, [next(supply) if flag else None for flag in present], f"vmap_{equation.op.name}"
        )


def _with_types_of_batch(rule: Trace, single: Trace, size: Dim) -> Trace | None:
    """functorch's rule where it gives a batch of what the op gives. It does not for `index_select` with a scalar index."""
    wanted = tuple(batched_type(type, size) for type in single.output_types)
    further = equations_between(rule.output_types, wanted)
    if further is None:
        return None
    return replace(rule, constraints=tuple(dict.fromkeys((*rule.constraints, *further)))) if further else rule


def _fill(single: Trace, batched: Mask, size: Dim, randomness: str) -> Trace:
    """Random numbers of their own for each example, drawn at once, or one draw for all of them."""
    (equation,) = single.equations
    if randomness == "error":
        raise_randomness(equation.op.name)
    recorder = Recorder(track_no_grad=False, symbolic=_has_symbols(single, size))
    with recorder.running():
        (like,), count = _inputs(recorder, single, batched, size), recorder.mode.size(size)
        if randomness == "same":
            like = like.new_empty(like.shape[1:]) if batched[0] else like
        elif not batched[0]:
            like = like.new_empty((count, *like.shape))
        (result,) = call_leaf(equation, lambda var: like)
        result = result.expand(count, *result.shape) if randomness == "same" else result
        return close_recording(recorder, [result], f"vmap_{equation.op.name}")


def _drawn_at_once(single: Trace, batched: Mask, size: Dim) -> Trace:
    """Random numbers in the shape of the first operand, which others broadcast to: the op on the whole batch."""
    (equation,) = single.equations
    recorder = Recorder(track_no_grad=False, symbolic=_has_symbols(single, size))
    with recorder.running():
        values = _inputs(recorder, single, batched, size)
        first, count = (
            next(i for i, var in enumerate(single.inputs) if var in equation.operands),
            recorder.mode.size(size),
        )
        rank = values[first].dim() - batched[first]
        for index, flag in enumerate(batched):
            missing = rank - (values[index].dim() - flag)
            if flag and missing:
                shape = values[index].shape
                values[index] = values[index].reshape((shape[0], *(1,) * missing, *shape[1:]))
        if not batched[first]:
            values[first] = values[first].expand((count, *values[first].shape))
        (result,) = call_leaf(equation, lambda var: values[var.index])
        return close_recording(recorder, [result], f"vmap_{equation.op.name}")


def _is_unary(equation: Equation) -> bool:
    """Test that each element of the result follows from one of its only operand's: a batch is no different.

    functorch takes some of these apart, and then the derivative of the parts is NaN where that of the op is not.
    """
    pointwise = ops.is_pointwise(equation.op) and not ops.is_random(equation.op)
    return pointwise and len(equation.operands) == 1 and isinstance(equation.outputs[0].type, TensorType)


def _of_whole_batch(single: Trace, size: Dim) -> Trace:
    """The op on the batch as it is. functorch unwraps what it detaches, so a recording would not show stop_gradient."""
    (equation,) = single.equations
    builder = TraceBuilder(f"vmap_{equation.op.name}")
    value = builder.input(batched_type(single.inputs[0].type, size))
    args = tuple(map_arg(lambda _: value, arg) for arg in equation.args)
    given = ((key, arg) for key, arg in equation.kwargs if arg not in RANKED)  # the batch has one dim more
    kwargs = tuple((key, map_arg(lambda _: value, arg)) for key, arg in given)
    types = tuple(batched_type(var.type, size) for var in equation.outputs)
    return builder.build(builder.add(equation.op, args, types, kwargs=kwargs))


def _loop(single: Trace, batched: Mask, size: Dim, same: bool) -> Trace:
    """A scan over the examples; `same`, with the generator set back before each, so that all draw the same numbers."""
    (equation,) = single.equations
    builder, body = TraceBuilder(f"loop_{equation.op.name}"), TraceBuilder(equation.op.name)
    pairs = list(zip(single.inputs, batched, strict=True))
    inputs = [builder.input(batched_type(var.type, size) if flag else var.type) for var, flag in pairs]
    consts = [value for value, flag in zip(inputs, batched, strict=True) if not flag]
    xs = [value for value, flag in zip(inputs, batched, strict=True) if flag]
    env = {var.index: body.input(var.type) for var, flag in pairs if not flag}
    if same:
        consts += builder.add(GET_STATE, (), (STATE,))
        state = body.input(STATE)
        body.add(SET_STATE, (state,), ())
    env |= {var.index: body.input(var.type) for var, flag in pairs if flag}
    results = body.copy(equation, lambda var: env[var.index])
    kept = tuple(var for var in results if isinstance(var.type, TensorType))
    numbers = {"num_consts": len(consts), "num_carry": 0, "length": size, "reverse": False, "unroll": 1}
    types = tuple(batched_type(var.type, size) for var in kept)
    kwargs = tuple((key, Literal(value)) for key, value in numbers.items())
    whole = builder.add(SCAN, (*consts, *xs), types, kwargs=kwargs, bodies=(body.build(kept),))
    supply = iter(whole)
    return builder.build(tuple(next(supply) if var in kept else Literal(None) for var in results))
