"""The changes that a captured function makes outside of it: to tensors, gradients and objects."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.captured import GradRead, Write
from thunder_fn.capture.failures import source_of
from thunder_fn.capture.objects import is_a
from thunder_fn.capture.outside import frames
from thunder_fn.capture.outside.edges import look
from thunder_fn.capture.outside.reads import content_of
from thunder_fn.capture.overlaps import overlaps
from thunder_fn.capture.places import GRAD, REQUIRES_GRAD, Effect, Entry, Feed, Update
from thunder_fn.capture.recorder import Recorder
from thunder_fn.capture.results import output_of
from thunder_fn.capture.stored import changed, holds_numbers, stored_inside
from thunder_fn.errors import CaptureError, UnsupportedCall, with_article
from thunder_fn.ir.constraints import equations_between
from thunder_fn.ir.trace import Atom, Var, type_of_value


def changes_of(
    recorder: Recorder,
    f: Callable[..., Any],
    tensors: list[torch.Tensor],
    tracers: list[torch.Tensor],
) -> list[tuple[Write, Atom]]:
    """Find the changes of the function, with the new values: of tensors in place, buffers of
    modules, and gradients of leaves.
    """
    positions = {id(tensor): position for position, tensor in reversed(list(enumerate(tensors)))}
    found: list[tuple[Write, Atom]] = []
    for position, tracer in enumerate(tracers):
        found += _written(recorder, f, Write(position), recorder.inputs[position], tracer)
    for tensor, tracer, before in recorder.lifted():
        found += _written(recorder, f, Write(tensor), before, tracer)
    watch = None if recorder.kept is None or recorder.outer is not None else frames.observer()
    is_kept = lambda value: watch is None or id(value) in watch.contents
    for rebound in recorder.modules.rebound(is_kept, keeps=recorder.kept is not None):
        var = recorder.var_of(recorder.lift(rebound.tracer))
        if var is not None:
            found.append(
                (
                    Write(positions.get(id(rebound.tensor), rebound.tensor)),
                    recorder.history.read(var),
                )
            )
    for _, tracer, before in recorder.gradients.taken:
        found += _accumulated(recorder, f, tracer, before)
    for tensor, tracer in (
        *zip(tensors, tracers, strict=True),
        *((one, own) for one, own, _ in recorder.lifted()),
    ):
        _check_attributes(f, tracer, "from outside", vars(tensor))
    return found


def _written(
    recorder: Recorder, f: Callable[..., Any], write: Write, before: Var, tracer: torch.Tensor
) -> list[tuple[Write, Atom]]:
    after = recorder.var_of(tracer)
    if after is None or after == before:
        return []
    same = equations_between((before.type,), (after.type,)) if recorder.symbolic else None
    for constraint in same or ():
        bool(recorder.mode.size(constraint))  # of two names for a size; a write keeps it
    if after.type != before.type and same is None:
        raise CaptureError(
            f"the function changes {with_article(before.type)} from outside in place to"
            f" {after.type}",
            source=source_of(f),
            fix="A mutated tensor keeps its dtype and shape; return the new tensor instead.",
        )
    if internals.is_own_view(tracer):
        given = next(fake for fake, var in recorder.fakes() if var == before)
        write = dataclasses.replace(write, strides=_strides(tracer), has_values=not overlaps(given))
    if recorder.history.is_rebound(tracer):
        write = dataclasses.replace(write, rebinds=True)
    with internals.no_torch_function():
        is_leaf = recorder.kept is not None and tracer.is_leaf and tracer.requires_grad
        is_counted = write.strides is not None or tracer._version > 0
    write = dataclasses.replace(write, is_counted=is_counted)
    # what is written to a leaf is a constant for autograd, which a jitted function's caller knows
    return [(write, recorder.stopped(after) if is_leaf else recorder.history.read(after))]


def _strides(tracer: torch.Tensor) -> tuple[int, ...]:
    with internals.no_torch_function():
        strides = tuple(tracer.stride())
    if any(type(stride) is not int for stride in strides):
        what = (
            "the function changes the shape of a tensor from outside in place, and its strides are"
            " symbols"
        )
        raise CaptureError(what, fix="Return the new tensor instead, or jit with `dynamic=False`.")
    return strides


def _accumulated(
    recorder: Recorder, f: Callable[..., Any], tracer: torch.Tensor, before: torch.Tensor | None
) -> list[tuple[Write, Atom]]:
    """Find the gradient that `backward()` left in a leaf from outside, as a write to the gradient
    that was there.
    """
    if not internals.is_leaf(tracer):
        return []
    with internals.no_torch_function():
        after = tracer.grad
    if recorder.kept is not None:
        return []
    known = None if before is None else recorder.lift(before)
    if after is not known or (before is not None and recorder.gradients.is_changed(before)):
        recorder.gradients.look_at(tracer)
    if after is known:
        return []
    if after is None or before is None:
        raise CaptureError(
            f"the function leaves {'no gradient' if after is None else 'a gradient'} in the"
            f" `.grad` of {with_article(recorder.type_of(tracer))} from outside that had"
            f" {'none' if before is None else 'one'}",
            source=source_of(f),
            fix="Use `torch.autograd.grad`, which returns gradients, or thunder_fn's `grad`.",
        )
    var = recorder.var_of(after)
    return [] if var is None else [(Write(before), recorder.history.read(var))]


def effects_of(
    recorder: Recorder,
    positions: Mapping[int, int],
    name: str,
    stored: dict[int, Atom],
    stores: bool,
    flags: Sequence[tuple[torch.Tensor, bool]],
) -> Iterator[tuple[Effect | Update, tuple[Atom, ...], Sequence[Any]]]:
    """Find the changes of places outside, each with the outputs that it stores, and what these are:
    gradients of leaves first, then `flags` of tensors and kept objects. `stored` gets the output of
    each tensor in them.
    """
    if recorder.kept is None:
        for effect, leaves in stored_inside(recorder) if stores else ():
            yield effect, tuple(_stored(recorder, leaf, name, stored) for leaf in leaves), leaves
        return
    for tensor, grad in recorder.gradients.assigned():
        holder, (leaves, spec) = positions.get(id(tensor), tensor), pytree.flatten(grad)
        effect = Effect(holder, GRAD, spec, tuple(None for _ in leaves), (True,) * len(leaves))
        yield effect, tuple(_stored(recorder, leaf, name, stored) for leaf in leaves), leaves
    for tensor, flag in flags:
        leaves, spec = pytree.flatten(flag)
        holder = positions.get(id(tensor), tensor)
        yield Effect(holder, REQUIRES_GRAD, spec, (flag,), (False,)), (), ()
    for effect, leaves in recorder.kept.effects():
        yield effect, tuple(_stored(recorder, leaf, name, stored) for leaf in leaves), leaves


def check_numbers(recorder: Recorder) -> None:
    """Refuse a number of the trace in a place outside, which has its old value again.

    Raises:
        UnsupportedCall: the function stores one. Where it stands for an argument, the function is
            traced for the argument's value.
    """
    watch = frames.observer()
    if watch is None or recorder.outer is not None:
        return
    known = recorder.kept
    kept, fed = ({}, {}) if known is None else (known.contents, known.elsewhere.places)
    places = {**watch.counted, **watch.before}.items()
    pairs = [
        (old, look(kind, on, key))
        for (kind, on_id, key), (on, old) in places
        if on_id not in kept and (on_id, key) not in fed
    ]
    for one in changed(watch.contents.values()):
        if (identity := id(one.container)) not in kept:
            both = one.before, one.container
            pairs.append(tuple(_but(held, identity, fed) for held in both))
    if any(holds_numbers(now) and not holds_numbers(old) for old, now in pairs):
        watch.put_back()
        what = "the function stores a number outside that its program computes anew in each call"
        fix = "Return it, and store it outside of the jitted function."
        raise UnsupportedCall(what, fix=fix)


def _but(held: Any, identity: int, fed: Collection[Entry]) -> Any:
    """The content of a container, but for entries that are fed."""
    keys = {key for of, key in fed if of == identity}
    if not keys or not is_a(held, (dict, list, deque)):
        return held
    items = content_of(held) if is_a(held, dict) else enumerate(content_of(held))
    return [(key, item) for key, item in items if holds_numbers(key) or key not in keys]


def _stored(recorder: Recorder, leaf: Any, name: str, stored: dict[int, Atom]) -> Atom:
    """Return the output for a value that is stored outside. It is a constant for autograd if the
    value does not require grad. A tensor from outside is itself.
    """
    if id(leaf) not in stored or not isinstance(leaf, torch.Tensor):
        atom = output_of(recorder, leaf, name)
        is_tensor = isinstance(leaf, torch.Tensor)
        is_given = recorder.history.is_given(leaf) or recorder.is_from_outside(leaf)
        is_kept = is_tensor and (leaf.requires_grad or is_given)
        stored[id(leaf)] = atom if is_kept else recorder.stopped(atom)
    return stored[id(leaf)]


def feeds_of(recorder: Recorder) -> Iterator[tuple[Feed, torch.Tensor | None]]:
    """Find the places outside that are read in each call: numbers, then gradients and other
    tensors, each with the tensor that was there.
    """
    if recorder.kept is not None:
        yield from ((feed, None) for feed in recorder.kept.fed.numbers)
        yield from recorder.gradients.feeds()
        yield from recorder.kept.fed.tensors


def grads_read(recorder: Recorder, positions: Mapping[int, int]) -> Iterator[GradRead]:
    """The gradients that the function has looked at."""
    for tensor, grad in recorder.gradients.read.values():
        yield GradRead(positions.get(id(tensor), tensor), grad, recorder.gradients.is_fed(grad))


def check_results(
    recorder: Recorder, f: Callable[..., Any], results: list[Any], tracers: list[torch.Tensor]
) -> None:
    """Refuse attributes that the function sets on tensors that it has made: they would be lost."""
    given = {id(tracer) for tracer in (*tracers, *(tracer for _, tracer, _ in recorder.lifted()))}
    for leaf in results:
        if isinstance(leaf, internals.Tracer) and id(leaf) not in given:
            _check_attributes(f, leaf, "that it returns")


def _check_attributes(
    f: Callable[..., Any], tracer: torch.Tensor, where: str, known: Collection[str] = ()
) -> None:
    """Refuse attributes, other than the known ones, that the function sets on a tensor: they would
    be lost.
    """
    with internals.no_torch_function():
        names = [name for name in internals.attributes_set(tracer) if name not in known]
        if names:
            what = (
                f"the function sets `{names[0]}` on {with_article(type_of_value(tracer))} {where}"
            )
            fix = "Return it beside the tensor, or set it where the function is called."
            raise CaptureError(what, source=source_of(f), fix=fix)
