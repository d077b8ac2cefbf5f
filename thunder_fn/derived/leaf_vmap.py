"""Batching rules of leaf ops, derived from functorch's.

Run the op under `torch.vmap` on tracers and record the batching rule. Batched values have their
batch dim first. If functorch has no rule and would loop, the op is decomposed. If that fails too, a
scan runs it example by example, and a warning names the op once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.generators import generators_of
from thunder_fn.capture.recorder import Recorder
from thunder_fn.capture.replaced.layout import CONTIGUOUS, looks_at_layout
from thunder_fn.capture.replaced.seeds import GET_STATE, SET_STATE, of_device, state_type
from thunder_fn.derived import leaf_vjp as derive
from thunder_fn.derived.attempts import Attempt, Declined, first_rule, kept_rules
from thunder_fn.derived.decompositions import NOT_BATCHED
from thunder_fn.derived.leaf_vjp import call_leaf, close_recording, decomposition
from thunder_fn.derived.quirks import attention, collectives
from thunder_fn.derived.quirks.batching import KNOWN, WRONG, Batch, rule_of
from thunder_fn.errors import VmapError
from thunder_fn.ir import facts, ops
from thunder_fn.ir.constraints import (
    equations_between,
    fixes_numbers,
    is_in_data,
    names_of,
    pinned,
    product,
    renamed,
)
from thunder_fn.ir.rules import Mask, divided, scattered
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
    Var,
    as_kwargs,
    map_args,
    python_arg,
    python_args,
)
from thunder_fn.ir.walking import begun_with, resized

SCAN = Op("structured", "scan")
_MM, _BMM = Op("leaf", "aten.mm.default"), Op("leaf", "aten.bmm.default")
_EXPAND = Op("leaf", "aten.expand.default")
RANKED = (Literal(torch.channels_last), Literal(torch.channels_last_3d))
"""Memory formats that fit one rank only."""


@dataclass(frozen=True, slots=True)
class VmapRule:
    """A trace from inputs, the batched ones with a leading batch dim, to outputs with a leading
    batch dim.
    """

    trace: Trace


class LoopWarning(UserWarning):
    """An op has no batching rule; vmap runs it once for each example."""


def batched_type(type: Type, size: Dim) -> Type:
    """The type with a leading batch dim."""
    return (
        TensorType(type.dtype, (size, *type.shape), type.device)
        if isinstance(type, TensorType)
        else type
    )


def batched_types(types: Iterable[Type], batched: Mask, size: Dim) -> tuple[Type, ...]:
    """The types with a leading batch dim where the flags say so."""
    pairs = zip(types, batched, strict=True)
    return tuple([batched_type(type, size) if flag else type for type, flag in pairs])


@dataclass(frozen=True, slots=True)
class VmapQuestion:
    """A question for a batching rule.

    Args:
        single: the equation, `alone`.
        batched: operands that have a leading batch dim.
        size: of the batch.
        randomness: as `vmap` takes it.
    """

    single: Trace
    batched: Mask
    size: Dim
    randomness: str

    @property
    def equation(self) -> Equation:
        """The one equation."""
        return self.single.equations[0]

    @property
    def draws(self) -> bool:
        """Test whether the op draws random numbers."""
        return ops.draws(self.equation)

    @property
    def prefers_ours(self) -> bool:
        """Test whether a rule of ours comes before functorch's, which would take symbols for
        numbers.
        """
        op = self.equation.op
        ours = ops.is_collective(op) or op.name in attention.ALL or op.name in WRONG
        return op.name in KNOWN and (ours or _has_symbols(self.single, self.size))


def _by_one_size(question: VmapQuestion) -> VmapRule | Trace | Declined:
    if not made_by(question.equation):
        return Declined("no size is found in data")
    if question.equation.op.name in KNOWN:
        known = _known_rule(question.single, question.batched, question.size)
        if known is not None:
            return VmapRule(known)
    return _of_one_size(question.single, question.batched)


def _by_fill(question: VmapQuestion) -> VmapRule | Declined:
    if question.equation.op not in facts.FILLS:
        return Declined("the op does not fill a tensor")
    return VmapRule(_fill(question.single, question.batched, question.size, question.randomness))


def _by_whole_batch(question: VmapQuestion) -> VmapRule | Declined:
    if question.equation.op not in (ops.STOP_GRADIENT, ops.NO_GRAD) and not _is_elementwise(
        question.equation
    ):
        return Declined("the op is not elementwise, or promotes a scalar tensor")
    return VmapRule(_of_whole_batch(question.single, question.batched, question.size))


def _by_size(question: VmapQuestion) -> VmapRule | Declined:
    if question.equation.op != ops.RESHAPE:
        return Declined("the op takes no shape")
    builder = TraceBuilder("vmap_reshape")
    (value,) = builder.take(batched_types(question.single.input_types, (True,), question.size))
    type = batched_type(question.single.output_types[0], question.size)
    return VmapRule(builder.build((_sized(builder, ops.RESHAPE, value, type),)))


def _by_product(question: VmapQuestion) -> VmapRule | Declined:
    """Multiply the rows of all examples by one matrix, or the matrices pair by pair."""
    # Before: a left matrix of n x k, a right one of k x m
    # After:  the b * n rows by one right matrix; else b pairs of matrices
    single, size = question.single, question.size
    if question.equation.op != _MM or len(single.inputs) != 2:
        return Declined("the op is no product of two matrices")
    builder = TraceBuilder("vmap_mm")
    left, right = builder.take(batched_types(single.input_types, question.batched, size))
    (type,) = single.output_types
    result = batched_type(type, size)
    if not question.batched[1]:
        rows = _sized(builder, ops.RESHAPE, left, _with_rows(single.input_types[0], size))
        (found,) = builder.add(_MM, (rows, right), (_with_rows(type, size),))
        return VmapRule(builder.build((_sized(builder, ops.RESHAPE, found, result),)))
    if not question.batched[0]:
        left = _sized(builder, _EXPAND, left, batched_type(left.type, size))
    return VmapRule(builder.build(builder.add(_BMM, (left, right), (result,))))


def _with_rows(type: Type, size: Dim) -> Type:
    """The type of the rows of all examples."""
    assert isinstance(type, TensorType), "the operand is a matrix"
    return replace(type, shape=(product(size, type.shape[0]), *type.shape[1:]))


def _sized(builder: TraceBuilder, op: Op, value: Var, type: Type) -> Var:
    """An op that gives a tensor another shape, with the result of this type."""
    assert isinstance(type, TensorType), "a tensor has a shape"
    return ops.emit(builder, op, (value, type.shape), type)


def _by_parts_first(question: VmapQuestion) -> Trace | Declined:
    if question.equation.op.name not in NOT_BATCHED:
        return Declined("functorch's rule is right")
    parts = decomposition(question.single)
    return Declined("PyTorch has no decomposition") if parts is None else parts


def _by_cat(question: VmapQuestion) -> VmapRule | Declined:
    if question.equation.op.name != "aten.cat.default" or not _has_symbols(
        question.single, question.size
    ):
        return Declined("the op is not cat of symbolic sizes")
    return VmapRule(_cat(question.single, question.batched, question.size))


def _by_ours(question: VmapQuestion, *, first: bool) -> VmapRule | Declined:
    if question.equation.op.name not in KNOWN or question.prefers_ours != first:
        return Declined(
            "there is none" if question.equation.op.name not in KNOWN else "asked elsewhere"
        )
    known = _known_rule(question.single, question.batched, question.size)
    return Declined("it does not take these arguments") if known is None else VmapRule(known)


def _by_ours_first(question: VmapQuestion) -> VmapRule | Declined:
    is_attention = question.equation.op.name in attention.ALL
    if is_attention and question.draws and question.randomness == "same":
        raise_same(question.equation.op.name)
    return _by_ours(question, first=True)


def _by_functorch(question: VmapQuestion) -> VmapRule | Trace | Declined:
    single, size = question.single, question.size
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*performance drop.*")
            with internals.no_vmap_fallback():
                asked = _ask_functorch(single, question.batched, size, question.randomness)
                rule = _with_types_of_batch(asked, single, size)
    except (*CANNOT, UserWarning) as error:
        return Declined.by(error)
    if rule is None:
        return Declined("functorch gives no batch of what the op gives")
    parts = _parts(single) if fixes_numbers(rule) and not question.draws else None
    return parts if parts is not None and _is_better(parts) else VmapRule(rule)


def _by_parts(question: VmapQuestion) -> Trace | Declined:
    parts = None if question.draws else pinned(question.single) or _parts(question.single)
    return Declined("PyTorch has no decomposition") if parts is None else parts


def _by_draw_at_once(question: VmapQuestion) -> VmapRule | Declined:
    if (
        not question.draws
        or question.randomness != "different"
        or ops.inplace_twin(question.equation.op) is None
    ):
        return Declined(
            "the op does not fill its first operand with random numbers of each example's own"
        )
    return VmapRule(_drawn_at_once(question.single, question.batched, question.size))


def _by_loop(question: VmapQuestion) -> VmapRule:
    equation, same = question.equation, question.draws and question.randomness == "same"
    elsewhere = (
        isinstance(var.type, TensorType) and var.type.device.type != "cpu"
        for var in equation.outputs
    )
    if same and (generators_of(question.single) or any(elsewhere)):
        raise_same(equation.op.name)
    what = (
        f"vmap: {equation.op} has no batching rule, so it runs in a loop over {question.size}"
        " examples"
    )
    warnings.warn(what, LoopWarning, stacklevel=2)
    return VmapRule(_loop(question.single, question.batched, question.size, same))


VMAP_ATTEMPTS: tuple[Attempt[VmapQuestion, VmapRule | Trace], ...] = (
    Attempt("parts of one size", _by_one_size),
    Attempt("a fill of the whole batch", _by_fill),
    Attempt("the op on the whole batch", _by_whole_batch),
    Attempt("the shape with the batch in front", _by_size),
    Attempt("product of rows or pairs", _by_product),
    Attempt("decomposition in place of functorch's rule", _by_parts_first),
    Attempt("concatenation of symbolic sizes", _by_cat),
    Attempt("rule of thunder_fn in place of functorch's", _by_ours_first),
    Attempt("functorch's rule", _by_functorch),
    Attempt("rule of thunder_fn", lambda question: _by_ours(question, first=False)),
    Attempt("decomposition", _by_parts),
    Attempt("random numbers of all examples at once", _by_draw_at_once),
    Attempt("a loop over the examples, with a warning", _by_loop),
)
"""The attempts at a batching rule, in order."""


@kept_rules(65536)
def vmap_rule(single: Trace, batched: Mask, size: Dim, randomness: str) -> VmapRule | Trace:
    """The batched equation, or the op's decomposition."""
    question = VmapQuestion(single, batched, size, randomness)
    if question.draws and randomness == "error":
        raise_randomness(question.equation.op.name)
    collectives.check_batched(question.equation)
    rule = first_rule(VMAP_ATTEMPTS, question).rule
    assert rule is not None  # the loop has one
    return rule


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
"""Exceptions of PyTorch for an op without a batching rule; sympy raises the last one for
symbols.
"""


def _parts(single: Trace) -> Trace | None:
    """The op's decomposition; None where it does not take symbols."""
    if not is_symbolic(single):
        return decomposition(single)
    try:
        return decomposition(single)
    except CANNOT:
        return None


def _is_better(parts: Trace) -> bool:
    """Test whether the decomposition holds for all numbers, and its parts have batching rules,
    which PyTorch's prims have not.
    """
    return not fixes_numbers(parts) and not any(
        part.op.name.startswith("prims.") for part in parts.equations
    )


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
            value if flag else value.expand(length, *value.shape)
            for value, flag in zip(tracers, batched, strict=True)
        ]
        dim = python_arg(equation.args[1], lambda var: var) if len(equation.args) > 1 else 0
        return close_recording(
            recorder, [torch.cat(wide, dim + 1 if dim >= 0 else dim)], "vmap_aten.cat.default"
        )


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
        args, kwargs = python_args(equation, lambda var: tracers[var.index])
        results = ops.flatten_result(rule(batch, *args, **kwargs))
        return _with_types_of_batch(
            close_recording(recorder, list(results), f"vmap_{equation.op.name}"), single, size
        )


def raise_size(equation: Equation) -> NoReturn:
    """Raise for a result whose size differs between examples."""
    is_item = equation.op.name == "aten._local_scalar_dense.default"
    what = ".item() on a Tensor" if is_item else str(equation.op)
    raise VmapError(
        f"vmap: {what} has a result whose size or value as a number depends on data, "
        "so that it differs between examples",
        source=equation.source,
        fix=(
            "Keep the size and mask instead: `torch.where(mask, x, 0)`, and sums over masks; "
            "or share one mask (in_dims None), which has one size."
        ),
    )


def raise_randomness(name: str) -> None:
    """Raise the error for random numbers under `vmap(randomness="error")`."""
    raise VmapError(
        f"vmap: called random operation while in randomness error mode: {name} draws random"
        ' numbers, and randomness="error"',
        fix='Pass randomness="different" for numbers of its own in'
        ' each example, or randomness="same" for equal ones.',
    )


def raise_same(name: str) -> None:
    """Raise for a random op that cannot give every example the same numbers."""
    raise VmapError(
        f"Vmap does not currently support same randomness with a batched tensor input of {name}: it"
        " has no batching rule, and a loop would draw other numbers in each example",
        fix='Pass randomness="different", or draw uniform numbers first: `(torch.rand(shape) <'
        " p).to(p.dtype)`.",
    )


def _inputs(recorder: Recorder, single: Trace, batched: Mask, size: Dim) -> list[torch.Tensor]:
    return recorder.inputs_of_types(batched_types(single.input_types, batched, size))


def _ask_functorch(single: Trace, batched: Mask, size: Dim, randomness: str) -> Trace:
    (equation,) = single.equations
    recorder = Recorder(track_no_grad=False, symbolic=_has_symbols(single, size))
    with recorder.running():
        tracers = _inputs(recorder, single, batched, size)
        places = [index for index, flag in enumerate(batched) if flag]
        present: list[bool] = []

        def run(*examples: Any) -> Any:
            values = list(tracers)
            for index, example in zip(places, examples, strict=False):
                values[index] = example
            results = call_leaf(equation, lambda var: values[var.index])
            present.extend(isinstance(result, torch.Tensor) for result in results)
            return tuple(result for result in results if isinstance(result, torch.Tensor))

        examples = tuple(tracers[index] for index in places) or (
            torch.empty(recorder.mode.size(size), device="meta"),
        )
        outputs = torch.vmap(run, randomness=randomness)(*examples)
        results = list(scattered(outputs, present))
        return close_recording(recorder, results, f"vmap_{equation.op.name}")


def _with_types_of_batch(rule: Trace, single: Trace, size: Dim) -> Trace | None:
    """functorch's rule where it gives a batch of what the op gives. It does not for
    `index_select` with a scalar index.
    """
    wanted = tuple(batched_type(type, size) for type in single.output_types)
    names = names_of(rule.output_types, wanted)
    rule = renamed(names)(rule) if names else rule
    further = equations_between(rule.output_types, wanted)
    if further is None:
        return _of_these_sizes(rule, wanted, single) if _has_sizes_in_data(rule, wanted) else None
    return (
        replace(rule, constraints=tuple(dict.fromkeys((*rule.constraints, *further))))
        if further
        else rule
    )


def _has_sizes_in_data(rule: Trace, wanted: Sequence[Type]) -> bool:
    """Test whether the results are those that are wanted, but for sizes that depend on data."""
    pairs = zip(rule.output_types, wanted, strict=True)
    return all(
        one == other
        or (
            isinstance(one, TensorType)
            and isinstance(other, TensorType)
            and len(one.shape) == len(other.shape)
            and replace(one, shape=other.shape) == other
            and all(is_in_data(a) for a, b in zip(one.shape, other.shape, strict=True) if a != b)
        )
        for one, other in pairs
    )


def _of_these_sizes(rule: Trace, wanted: Sequence[Type], single: Trace) -> Trace:
    builder, found = begun_with(rule)
    name = f"vmap of {single.equations[0].op}"
    return builder.build(
        tuple(
            atom if atom.type == type else resized(builder, atom, type, name)
            for atom, type in zip(found, wanted, strict=True)
            if isinstance(atom, Var)
        )
    )


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
    """Random numbers in the shape of the first operand, which others broadcast to: the op on the
    whole batch.
    """
    # Before: one example: first: [s...], others broadcast to it
    # After:  first: [n, s...], a batched other of lower rank: [n, 1..., its dims]
    (equation,) = single.equations
    recorder = Recorder(track_no_grad=False, symbolic=_has_symbols(single, size))
    with recorder.running():
        values = _inputs(recorder, single, batched, size)
        first = next(i for i, var in enumerate(single.inputs) if var in equation.operands)
        count = recorder.mode.size(size)
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


def _is_elementwise(equation: Equation) -> bool:
    """Test that each element of the result follows from those of the operands at its place: a batch
    is no different, unless a scalar of another dtype becomes a vector, which is promoted otherwise.

    functorch takes some of these apart, and then the derivative of the parts is NaN where that of
    the op is not.
    """
    if not ops.is_pointwise(equation.op) or ops.is_random(equation.op):
        return False
    types = [var.type for var in (*equation.operands, *equation.outputs)]
    tensors = [type for type in types if isinstance(type, TensorType)]
    given = tensors[:-1]
    promotes_alike = len({type.dtype for type in given}) == 1 or all(type.shape for type in given)
    return len(tensors) == len(types) and len(equation.outputs) == 1 and promotes_alike


def _of_whole_batch(single: Trace, batched: Mask, size: Dim) -> Trace:
    """The op on the batch as it is. functorch unwraps what it detaches, so a recording would not
    show stop_gradient.
    """
    # Before: one example: operands broadcast to [s...]
    # After:  a batched operand of lower rank: [n, 1..., its dims], so that it broadcasts as before
    (equation,) = single.equations
    builder = TraceBuilder(f"vmap_{equation.op.name}")
    inputs = builder.take(batched_types(single.input_types, batched, size))
    (result,) = single.output_types
    rank = 1 + len(result.shape) if isinstance(result, TensorType) else 0
    values = [
        _of_rank(builder, value, rank) if flag else value
        for value, flag in zip(inputs, batched, strict=True)
    ]
    # the batch has one dim more
    given = tuple((key, arg) for key, arg in equation.kwargs if arg not in RANKED)
    args, kwargs = map_args(lambda var: values[var.index], replace(equation, kwargs=given))
    types = tuple(batched_type(var.type, size) for var in equation.outputs)
    return builder.build(builder.add(equation.op, args, types, kwargs=kwargs))


def _of_rank(builder: TraceBuilder, value: Var, rank: int) -> Var:
    """The batch with dims of size 1 behind its first dim, up to a rank."""
    type = value.type
    if not isinstance(type, TensorType) or len(type.shape) >= rank:
        return value
    shape = (type.shape[0], *(1,) * (rank - len(type.shape)), *type.shape[1:])
    return _sized(builder, ops.RESHAPE, value, replace(type, shape=shape))


def _loop(single: Trace, batched: Mask, size: Dim, same: bool) -> Trace:
    """A scan over the examples; `same`, with the generator set back before each, so that all
    draw the same numbers.
    """
    # Before: op: operands in their own order -> outputs
    # After:  scan without carry: unbatched operands (and the generator's state), slices of the
    #         batched ones -> outputs that are tensors
    (equation,) = single.equations
    builder, body = TraceBuilder(f"loop_{equation.op.name}"), TraceBuilder(equation.op.name)
    pairs = list(zip(single.inputs, batched, strict=True))
    inputs = builder.take(batched_types(single.input_types, batched, size))
    xs, consts = divided(inputs, batched)
    env = {var.index: body.input(var.type) for var, flag in pairs if not flag}
    if same:
        device = _device(equation)
        consts += builder.add(GET_STATE, (), (state_type(device),), kwargs=of_device(device))
        state = body.input(state_type(device))
        body.add(SET_STATE, (state,), (), kwargs=of_device(device))
    env |= {var.index: body.input(var.type) for var, flag in pairs if flag}
    if looks_at_layout(equation.op.name):  # a slice begins anywhere
        clone = ops.leaf(torch.ops.aten.clone.default)
        env = {i: body.add(clone, (x,), (x.type,), kwargs=CONTIGUOUS)[0] for i, x in env.items()}
    results = body.copy(equation, lambda var: env[var.index])
    kept = tuple(var for var in results if isinstance(var.type, TensorType))
    numbers = {"num_consts": len(consts), "num_carry": 0, "length": size}
    numbers |= {"reverse": False, "unroll": 1}
    types = tuple(batched_type(var.type, size) for var in kept)
    kwargs = as_kwargs(numbers)
    whole = builder.add(SCAN, (*consts, *xs), types, kwargs=kwargs, bodies=(body.build(kept),))
    supply = iter(whole)
    return builder.build(tuple(next(supply) if var in kept else Literal(None) for var in results))


def _device(equation: Equation) -> torch.device:
    """The device whose generator an equation draws from."""
    types = [var.type for var in (*equation.operands, *equation.outputs)]
    found = [type.device for type in types if isinstance(type, TensorType)]
    return next((device for device in found if device.type == "cuda"), found[0])
