"""The results of a captured function: their outputs, memory, and place in the graph of autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.captured import Shared
from thunder_fn.capture.failures import check_static_output, source_of
from thunder_fn.capture.numbers.python_numbers import class_of_numbers
from thunder_fn.capture.outside import frames
from thunder_fn.capture.pytree import TENSOR
from thunder_fn.capture.recorder import Recorder, current
from thunder_fn.capture.replaced.autograd_functions import FREED_GRAPH
from thunder_fn.capture.supported import is_wrapped
from thunder_fn.errors import CaptureError, UnsupportedCall, UnsupportedOutput, callable_name
from thunder_fn.ir.trace import Atom, Dim, Expr, Literal, Var, as_dim


def is_itself(value: Any) -> bool:
    """Test for a container or object from outside: a result has the very object, and no copy."""
    watch, recorder = frames.observer(), current()
    if watch is None or value is None or isinstance(value, torch.Tensor):
        return False
    if not (pytree.is_node(value) or pytree.is_object(value)):
        return False
    if recorder is not None and any(one.container is value for one in recorder.around):
        return True  # of the function around this one
    if not watch.was_outside(value):
        return False
    return recorder is None or recorder.kept is None or not recorder.kept.fed.has_container(value)


def static_of(leaf: Any, f: Callable[..., Any], name: str) -> Any:
    """The mark of an output for a tensor or symbol among the results; else the plain value."""
    if isinstance(leaf, torch.Tensor):
        return TENSOR
    leaf = class_of_numbers(as_dim(leaf))
    if isinstance(leaf, Expr):
        return TENSOR
    if not is_itself(leaf):
        check_static_output(leaf, f, name)
        if (recorder := current()) is not None:
            recorder.texts.check(leaf, f"{name} returned")
    return leaf


def output_of(recorder: Recorder, leaf: Any, name: str) -> Atom:
    """The output of the trace for a tensor or number of the result."""
    if not isinstance(leaf, torch.Tensor):
        return Literal(as_dim(leaf))
    if is_wrapped(leaf):
        raise UnsupportedOutput(
            f"{name} returned a tensor that belongs to a torch.func transform which has ended",
            fix="Return the value from the transformed function instead of storing it.",
        )
    var = recorder.var_of(recorder.lift(leaf))
    if var is None:
        raise CaptureError(f"{name} returned a tensor that is unknown to its capture")
    return recorder.history.read(var)


def freed_output(recorder: Recorder, atom: Atom, name: str) -> Atom:
    """A result whose graph a backward has freed: a constant where the caller makes a node of it
    that raises, else a value that raises itself.
    """
    if recorder.kept is not None or not isinstance(atom, Var):
        return recorder.stopped(atom)
    return recorder.emit(FREED_GRAPH, (atom, Literal(name), ()), (atom.type,), ())[0]


def shared_memory(
    recorder: Recorder, results: Sequence[Any], tracers: Sequence[torch.Tensor]
) -> Iterator[Shared]:
    """Results that are inputs, tensors from outside, or views of them."""
    sources = recorder.sources(tracers)
    by_memory = {internals.memory_id(tracer): source for source, tracer in reversed(sources)}
    same = {id(tracer): source for source, tracer in reversed(sources)}
    for place, leaf in enumerate(results):
        tracer = recorder.lift(leaf) if isinstance(leaf, torch.Tensor) else leaf
        if not isinstance(tracer, internals.Tracer):
            continue
        if (source := same.get(id(tracer))) is not None:
            yield Shared(place, source, True)
        else:
            memories = recorder.history.linked(internals.memory_id(tracer))
            found = [by_memory[memory] for memory in memories if memory in by_memory]
            if found:
                yield Shared(place, found[0], False)


def strides_of(result: Any) -> tuple[Dim, ...] | None:
    """The strides of a result that is not contiguous."""
    if not isinstance(result, torch.Tensor):
        return None
    with internals.no_torch_function():
        is_plain = is_wrapped(result) or result.is_contiguous()
        return None if is_plain else tuple(map(as_dim, result.stride()))


def is_inner(leaf: Any) -> bool:
    """Test for a tensor inside of autograd's graph."""
    return (
        isinstance(leaf, torch.Tensor) and leaf.requires_grad and internals.is_leaf(leaf) is False
    )


def is_view_of_leaf(leaf: Any) -> bool:
    """Test for a view of a tensor that requires grad and has no history: a view taken before has
    the history that its base has later, where gradients were off when it was taken.
    """
    base = internals.base_of(leaf) if isinstance(leaf, torch.Tensor) else None
    return base is not None and base.requires_grad and internals.is_leaf(base) is True


def own_leaves_of(recorder: Recorder, results: list[Any]) -> Iterator[tuple[int, bool]]:
    """Results that the function made require grad. Where gradients are off around the call, a view
    says what its base requires, in a program as in eager mode.
    """
    given = {
        var.index
        for var in (
            *recorder.inputs,
            *(constant.var for constant in recorder.constants if not constant.owned),
        )
    }
    for place, leaf in enumerate(results):
        if (
            isinstance(leaf, internals.Tracer)  # not a tensor from outside
            and not is_wrapped(leaf)
            and leaf.requires_grad
            and internals.is_leaf(leaf)
            and not recorder.history.is_given(leaf)
            and (recorder.history.base_grad or not _is_taken_of_leaf(leaf))
        ):
            var = recorder.var_of(leaf)
            if var is not None and var.index not in given:
                yield place, isinstance(leaf, torch.nn.Parameter)


def _is_taken_of_leaf(leaf: torch.Tensor) -> bool:
    base = internals.base_of(leaf)
    return base is not None and base.requires_grad


def check_own_leaves(
    recorder: Recorder, f: Callable[..., Any], results: list[Any], own: tuple[tuple[int, bool], ...]
) -> None:
    """Refuse a result whose backward outside would have to reach a leaf that the function made."""
    if not own:
        return
    inner = (leaf for leaf in results if is_inner(leaf) and not recorder.gradients.is_freed(leaf))
    roots = list(map(internals.node_of, inner))
    behind = {id(getattr(node, "variable", None)) for node in internals.nodes_behind(roots)}
    if any(id(results[place]) in behind for place, _ in own):
        name = callable_name(f)
        what = (
            f"{name} returns a tensor that it makes require grad, and another result computed from"
            " it, whose backward outside would not reach it"
        )
        fix = (
            "Take the gradient inside, by `torch.autograd.grad`, or call `requires_grad_()` outside"
            " and pass the tensor."
        )
        raise UnsupportedOutput(what, source=source_of(f), fix=fix)


def check_inner_hooks(recorder: Recorder, results: list[Any]) -> None:
    """Refuse results whose backward outside would call hooks in eager mode: those of tensors that
    the function made require grad. A backward by the trace's rules would not.
    """
    hooked = [] if recorder.inside else recorder.hooked_inside
    if not hooked:
        return
    tensors = [leaf for leaf in results if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    roots = {internals.node_of(leaf) for leaf in tensors if not recorder.gradients.is_freed(leaf)}
    nodes = internals.nodes_behind(roots) | roots
    leaves = {id(leaf) for leaf in (*tensors, *(getattr(one, "variable", None) for one in nodes))}
    for tensor, handle, source in hooked:
        node, registered = internals.node_of(tensor), handle.hooks_dict_ref() or ()
        if handle.id in registered and (id(tensor) in leaves if node is None else node in nodes):
            raise UnsupportedCall(
                "a hook was registered on a tensor that is computed from one that the function"
                " makes require grad, and a backward of a result outside would not run it",
                source=source,
                fix="Call `torch.autograd.grad` inside, or make the tensor outside.",
            )
