"""Nodes of autograd's graph: what a call of a bridged trace leaves behind, one for each piece of
its backward.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal as OneOf, NoReturn, TypeAlias

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.generators import drawing_from
from thunder_fn.errors import located
from thunder_fn.executors import Program
from thunder_fn.executors.running import tell_line
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.noops import drop_noops
from thunder_fn.interpreters.simplify import cut_to
from thunder_fn.ir import ops
from thunder_fn.ir.constraints import close_symbols
from thunder_fn.ir.equations import needed
from thunder_fn.ir.rules import Mask, chosen
from thunder_fn.ir.symbols import bind, is_symbolic, made_by, replaced, specialize
from thunder_fn.ir.trace import (
    Equation,
    Expr,
    Literal,
    TensorType,
    Trace,
    TraceBuilder,
    cut,
    vars_in,
)
from thunder_fn.ir.walking import inline_into
from thunder_fn.jitted.autograd.pieces import Piece, depends

if TYPE_CHECKING:
    from thunder_fn.jitted.autograd.bridge import Bridge


Following = tuple[Callable[..., tuple[Any, ...]], tuple[Expr, ...]]
"""A trace as a function of tensors that autograd follows, and the constraints on the trace's
symbols.
"""

Keeping: TypeAlias = OneOf[
    "saved", "shape", "copy", "probed shape", "probed", "probed leaf", "number"
]
"""The ways to keep an input that a node needs. What the backward reads is saved. Of an input that
only the derivative of the backward reads, the version is probed. It is saved unless it is a leaf,
which lives without the node. What autograd keeps may be the shape alone, or a copy.
"""

MAX_KNOWN = 16
"""The number of derivatives of one node that are remembered: by sizes, where their rules do not
hold for all.
"""


@dataclass(frozen=True, eq=False)
class Node:
    """A piece of a bridge's backward, and where the numbers that it takes begin among those of
    the forward.
    """

    bridge: Bridge
    piece: Piece
    start: int
    known: dict[Any, Following] = field(default_factory=dict[Any, "Following"], repr=False)
    """Functions that compute `gradient` under autograd, by which inputs require grad, and by sizes
    where they hold for these only.
    """

    @cached_property
    def closed(self) -> tuple[Trace, tuple[Expr, ...]]:
        """The piece's trace with the numbers that it takes from the forward as its last inputs,
        and those.
        """
        return close_symbols(self.piece.trace)

    @property
    def numbers(self) -> tuple[Expr, ...]:
        """The numbers that it takes from the forward."""
        return self.closed[1]

    @cached_property
    def program(self) -> Program:
        """The program from residuals, cotangents and numbers to the results of the piece."""
        return self.bridge.lowered_backward(drop_noops(self.closed[0]))

    @cached_property
    def sources(self) -> tuple[tuple[bool, int], ...]:
        """The origin of each tensor whose gradient the piece gives: an input (True) or an edge."""
        places = self.bridge.wanted_places
        return tuple(
            (False, target.index) if target.kind == "edge" else (True, places[target.index])
            for target in self.piece.gives
        )

    @cached_property
    def inputs(self) -> tuple[int | None, ...]:
        """The input that each residual is, None if it is a result of the forward."""
        found = (self.bridge.split.residuals[number] for number in self.piece.residuals)
        return tuple(one.index if one.kind == "input" else None for one in found)

    @cached_property
    def kept(self) -> tuple[tuple[int, bool], ...]:
        """The residuals that are results of the forward, and whether they are what another node
        returns.
        """
        count, split = len(self.bridge.trace.outputs), self.bridge.split
        edges = {place: edge for edge, place in enumerate(self.bridge.active_places)}
        found = (split.residuals[number] for number in self.piece.residuals)
        return tuple(
            (
                (count + one.index, False)
                if one.kind == "extra"
                else (one.index, one.index in edges and edges[one.index] not in self.piece.takes)
            )
            for one in found
            if one.kind != "input"
        )

    @cached_property
    def read(self) -> frozenset[int]:
        """The inputs that the backward reads."""
        return frozenset(place for place in self.inputs if place is not None)

    @cached_property
    def residuals(self) -> tuple[int, ...]:
        """The place of each residual among the inputs that are needed and the results that are
        kept.
        """
        kept = iter(range(len(self.needed), len(self.needed) + len(self.kept)))
        return tuple(
            next(kept) if place is None else self.needed.index(place) for place in self.inputs
        )

    @cached_property
    def keeping(self) -> tuple[tuple[int, Keeping], ...]:
        """The inputs that are needed, and how each is kept."""
        return tuple((place, self._keeping(place)) for place in self.needed)

    @cached_property
    def reads_numbers(self) -> bool:
        """Test whether the backward reads inputs that are numbers."""
        how = dict(self.keeping)
        return any(place is not None and how[place] == "number" for place in self.inputs)

    def _keeping(self, place: int) -> Keeping:
        bridge = self.bridge
        if not isinstance(bridge.trace.inputs[place].type, TensorType):
            return "number"
        if place not in self.valued:
            return "shape"
        if place in bridge.overwritten:
            return "copy"
        if place in self.read:
            return "saved"
        if not bridge.wanted[place]:
            return "probed shape"
        return "probed" if place in bridge.unreachable else "probed leaf"

    @cached_property
    def needed(self) -> tuple[int, ...]:
        """The inputs that the backward reads, or its derivative does, which computes the other
        residuals again.
        """
        count = len(self.bridge.split.forward.inputs)
        return tuple(place for place in range(count) if self.binds_sizes or place in self.valued)

    @cached_property
    def binds_sizes(self) -> bool:
        """Test whether all inputs are kept: for their sizes, or for a backward without some of
        the cotangents.
        """
        return is_symbolic(self.bridge.split.forward) or self.bridge.sees_absent

    @cached_property
    def valued(self) -> frozenset[int]:
        """The inputs of which values are needed, not sizes alone."""
        forward = self.bridge.split.forward
        if self.bridge.sees_absent:
            return frozenset(range(len(forward.inputs)))
        wanted = self.computed
        needed(forward.equations, wanted, self.stays)
        return frozenset(place for place in range(len(forward.inputs)) if place in wanted)

    @property
    def computed(self) -> set[int]:
        """The variables of the forward that the backward reads, by index."""
        outputs = self.bridge.split.forward.outputs
        kept = {var.index for place, _ in self.kept for var in vars_in(outputs[place])}
        return {*self.read} | kept

    @cached_property
    def stays(self) -> Callable[[Equation], bool]:
        """Test for an equation that the derivative of the backward runs though nothing reads it:
        one that finds a size, or a draw of random numbers that other draws come after.
        """
        again = needed(self.bridge.split.forward.equations, self.computed)
        draws = self.bridge.sees_absent or any(map(ops.has_side_effect, again))
        return lambda equation: bool(made_by(equation)) or (draws and ops.has_side_effect(equation))

    @cached_property
    def gradient(self) -> Trace:
        """The trace from the inputs that are needed, and the cotangents, to the results of the
        piece.
        """
        split, name = self.bridge.split, self.bridge.trace.name
        builder = TraceBuilder(f"{name}_gradient")
        inputs = builder.take(split.forward.input_types)
        given = tuple(builder.input(self.bridge.pieces.edges[edge]) for edge in self.piece.takes)
        values = split.residual_values(inputs, inline_into(builder, split.forward, inputs))
        residuals = tuple(values[number] for number in self.piece.residuals)
        whole = builder.build(inline_into(builder, self.piece.trace, (*residuals, *given)))
        whole = cut_to(whole, whole.outputs, self.stays)
        kept = (*(whole.inputs[place] for place in self.needed), *whole.inputs[len(inputs) :])
        return cut(whole, inputs=kept)

    def differentiable(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Compute the piece from the inputs that are needed and the cotangents, so that autograd
        follows it.
        """
        if any(map(internals.is_legacy_batched, tensors)):  # no node of ours holds such a tensor
            return tuple(evaluate(self.gradient, tensors))
        wanted = tuple(
            isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
        )
        sizes = bind(self.gradient.inputs, tensors)
        call, decisions = self.following((wanted, ()), self.gradient, tensors)
        if sizes and any(replaced(decision, sizes) is False for decision in decisions):
            numbers = tuple((str(symbol), number) for symbol, number in sizes.items())
            call, _ = self.following((wanted, numbers), specialize(self.gradient, sizes), tensors)
        return call(*tensors)

    def following(self, key: Any, gradient: Trace, tensors: tuple[Any, ...]) -> Following:
        """The gradient as a function that autograd follows, and the decisions about symbols that
        its rules need.
        """
        if key not in self.known:
            if len(self.known) >= MAX_KNOWN:
                self.known.clear()
            self.known[key] = self.bridge.following(gradient, tensors)
        return self.known[key]

    def reached(self, given: Mask) -> Mask:
        """Tell which results are not None if only some of the edges have a cotangent."""
        return depends(self.piece.trace, (False,) * len(self.piece.residuals) + given)


class _Call:
    """The values of one call of a bridge, until all nodes are made."""

    def __init__(self, bridge: Bridge, inputs: tuple[Any, ...]) -> None:
        self.bridge, self.inputs = bridge, inputs
        self.edges: dict[int, Any] = {}
        self.outputs: tuple[Any, ...] = ()
        self.results: tuple[Any, ...] | None = None
        self.state: Any = None

    def run(self) -> tuple[Any, ...]:
        """Run the forward, once, with gradients off."""
        if self.results is not None:
            return self.results
        bridge = self.bridge
        self.state = bridge.random_state() if bridge.draws else None
        self.results = results = bridge.forward(*self.inputs)
        outputs = results[: len(bridge.trace.outputs)]
        if not bridge.is_plain:
            passing = zip(outputs, bridge.handed_over, bridge.trace.outputs, strict=True)
            outputs = tuple(
                value if flag or isinstance(atom, Literal) else None
                for value, flag, atom in passing
            )
        if any(isinstance(value, torch.Tensor) and value._is_view() for value in outputs):
            outputs = _own_tensors(outputs, self.inputs, bridge.active)
        self.outputs = outputs
        followed = outputs if bridge.is_plain else chosen(outputs, bridge.active)
        self.edges.update(enumerate(followed))
        if len(bridge.pieces.edges) > len(self.edges):
            self.stand_in()
        return results

    @cached_property
    def written(self) -> set[int]:
        """The memories of inputs that get other values before the backward runs."""
        places = self.bridge.overwritten | self.bridge.fixed
        return {internals.storage_id(self.inputs[place]) for place in places}

    def kept(self, value: torch.Tensor, is_others: bool) -> torch.Tensor:
        """Return a residual as a node keeps it: detached if another node returns it, a copy if its
        memory is written to.
        """
        if self.written and internals.storage_id(value) in self.written:
            return value.clone()
        return value.detach() if is_others else value

    def stand_in(self) -> None:
        """Put tensors of one element in place of the values on edges: autograd asks for their
        types only.
        """
        edges, sizes = self.bridge.pieces.edges, self.bridge.inner_sizes
        values = dict(zip(sizes, (self.results or ())[-len(sizes) :], strict=True)) if sizes else {}
        for edge in range(len(self.edges), len(edges)):
            type = edges[edge]
            shape = [values[size] if isinstance(size, Expr) else size for size in type.shape]
            strides = (0,) * len(shape)
            self.edges[edge] = torch.empty_strided(
                shape, strides, dtype=type.dtype, device=type.device
            )


def call(bridge: Bridge, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The trace's outputs that pass through autograd, and numbers; None for the others."""
    run = _Call(bridge, inputs)
    for node in bridge.nodes:
        tensors = [
            inputs[place] if is_input else run.edges[place] for is_input, place in node.sources
        ]
        values = _Function.apply(node, run, *tensors)  # type: ignore[no-untyped-call]
        if bridge.is_plain:
            return values
        run.edges.update(zip(node.piece.takes, values, strict=True))
    edges = iter(run.edges.values())
    return tuple(
        next(edges) if flag else value
        for value, flag in zip(run.outputs, bridge.active, strict=True)
    )


class _Function(torch.autograd.Function):
    """A node. Autograd keeps and frees the values that it keeps between forward and backward."""

    @staticmethod
    def forward(ctx: Any, node: Node, run: _Call, *tensors: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        results, bridge = run.run(), node.bridge
        kept = [run.kept(results[place], is_others) for place, is_others in node.kept]
        first = len(bridge.split.forward.outputs) + node.start
        ctx.node, ctx.state = node, run.state
        ctx.numbers = results[first : first + len(node.numbers)]
        ctx.set_materialize_grads(False)
        saved, ctx.others, ctx.probes = _kept_inputs(node, run.inputs)
        ctx.save_for_backward(*saved, *kept)
        edges = tuple(run.edges[edge] for edge in node.piece.takes)
        if len(edges) > 1:
            ctx.shapes = tuple(edge.shape for edge in edges)
        return edges

    @staticmethod
    @internals.skipped_by_dynamo
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:  # type: ignore[override]
        node: Node = ctx.node
        if all(cotangent is None for cotangent in cotangents):
            return (None,) * (2 + len(node.piece.gives))
        if node.bridge.sees_absent and any(cotangent is None for cotangent in cotangents):
            return None, None, *_backward_of_given(ctx, cotangents)
        followed = torch.is_grad_enabled()
        values = list[Any]()
        if followed or node.residuals:
            values += ctx.saved_tensors
            # unless the graph is retained, only this call holds them now
            ctx.maybe_clear_saved_tensors()
            for place, value in ctx.others.items() if followed or node.reads_numbers else ():
                values[node.needed.index(place)] = value
        given = [
            _zeros(node, place, ctx.shapes[place]) if cotangent is None else cotangent
            for place, cotangent in enumerate(cotangents)
        ]
        results: Sequence[Any]
        if followed:
            _check_unchanged(node, ctx.probes)
            with _drawing_again(node.bridge, ctx.state):
                results = node.differentiable((*values[: len(node.needed)], *given))
        else:
            box = [values[place] for place in node.residuals]
            box += [*given, *ctx.numbers]
            batched = any(map(internals.is_batched, given))
            values.clear()
            given.clear()
            try:
                results = evaluate(node.closed[0], box) if batched else node.program.take(box)
            except Exception as error:
                tell_line(error)
                raise
        if any(cotangent is None for cotangent in cotangents):
            reached = node.reached(tuple(cotangent is not None for cotangent in cotangents))
            results = [
                result if flag else None for result, flag in zip(results, reached, strict=True)
            ]
        return None, None, *results


def _backward_of_given(ctx: Any, cotangents: Sequence[Any]) -> list[Any]:
    """Compute the gradients of a node from its inputs, by the rules for the cotangents that are
    given.
    """
    node: Node = ctx.node
    narrow = node.bridge.narrowed(tuple(cotangent is not None for cotangent in cotangents))
    inputs = dict(zip(node.needed, ctx.saved_tensors, strict=False)) | ctx.others
    (part,) = narrow.nodes
    tensors = (
        *(inputs[place] for place in part.needed),
        *(one for one in cotangents if one is not None),
    )
    with _drawing_again(node.bridge, ctx.state):
        if torch.is_grad_enabled():
            _check_unchanged(node, ctx.probes)
            results = part.differentiable(tensors)
        else:
            results = evaluate(part.gradient, tensors)
    found = dict(zip(part.piece.gives, results, strict=True))
    return [found.get(target) for target in node.piece.gives]


def _drawing_again(
    bridge: Bridge, state: Callable[[], None] | None
) -> AbstractContextManager[None]:
    """Draw the numbers inside that were drawn from this state on. Outside, the generators are as if
    nothing had been drawn.
    """
    return nullcontext() if state is None else drawing_from(state, bridge.random_state())


def _zeros(node: Node, place: int, shape: torch.Size) -> torch.Tensor:
    """The cotangent of an edge for which autograd has none."""
    type = node.bridge.pieces.edges[node.piece.takes[place]]
    return torch.zeros(shape, dtype=type.dtype, device=type.device)


def _own_tensors(outputs: tuple[Any, ...], inputs: Sequence[Any], active: Mask) -> tuple[Any, ...]:
    """Return the outputs as the caller's own: views of nothing else are no longer views, and
    constants do not require grad.

    Autograd lets nobody change a view in place that such a function returns, since it does not know
    its base. A view of a result that requires grad would require it too.
    """
    followed = chosen(outputs, active)
    tensors = [value for value in (*followed, *inputs) if isinstance(value, torch.Tensor)]
    owners = collections.Counter(map(internals.storage_id, tensors))

    def is_alone(value: Any, flag: bool) -> bool:
        if not isinstance(value, torch.Tensor) or not value._is_view():
            return False
        return not flag or owners[internals.storage_id(value)] == 1

    pairs = zip(outputs, active, strict=True)
    return tuple(value.detach() if is_alone(value, flag) else value for value, flag in pairs)


def _kept_inputs(
    node: Node, inputs: Sequence[Any]
) -> tuple[list[torch.Tensor | None], dict[int, Any], list[tuple[torch.Tensor, int]]]:
    """The inputs that are needed, as autograd keeps them; those that it need not keep, by place;
    and whose version to check.

    Autograd refuses a backward if a saved tensor was changed. Values that only a derivative of the
    backward reads may change until there is one.
    """
    saved: list[torch.Tensor | None] = []
    others: dict[int, Any] = {}
    probes: list[tuple[torch.Tensor, int]] = []
    for place, how in node.keeping:
        tensor = inputs[place]
        if how not in ("saved", "number") and tensor.is_inference():
            tensor = tensor.clone()  # which autograd keeps, and which has a version
        if how == "saved" or (how == "probed leaf" and not tensor.is_leaf):
            saved.append(tensor)
        elif how == "shape":
            saved.append(tensor.data)
        elif how == "copy":
            saved.append(tensor.detach().clone())
        elif how == "probed shape":
            probes.append((internals.version_probe(tensor), tensor._version))
            saved.append(tensor.data)
        else:
            others[place] = tensor
            saved.append(None)
            if how != "number":
                probes.append((tensor, tensor._version))
    return saved, others, probes


def _check_unchanged(node: Node, probes: Sequence[tuple[torch.Tensor, int]]) -> None:
    if any(probe._version != version for probe, version in probes):
        what = (
            f"{node.bridge.trace.name}: an argument was changed in place before its gradient was"
            " differentiated"
        )
        raise RuntimeError(
            located(what, fix="Pass a clone, or change the tensor after the last derivative.")
        )


# ---- results whose graph is freed ----


_AGAIN = (
    "Trying to backward through the graph a second time (or directly access saved tensors after"
    " they have already been freed). Saved intermediate values of the graph are freed when you call"
    " .backward() or autograd.grad(). Specify retain_graph=True if you need to backward through the"
    " graph a second time or if you need to access saved tensors after calling backward."
)


class _Freed(torch.autograd.Function):
    """A node whose backward has run."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> NoReturn:  # type: ignore[override]
        raise RuntimeError(_AGAIN)


def freed(value: torch.Tensor, *inputs: Any) -> torch.Tensor:
    """The value as eager mode leaves it: it requires grad, and a backward from it raises, whichever
    of the inputs it goes to.
    """
    tensors = (one for one in inputs if isinstance(one, torch.Tensor) and one.requires_grad)
    return _Freed.apply(value, torch.empty((), requires_grad=True), *tensors)  # type: ignore[no-any-return]
