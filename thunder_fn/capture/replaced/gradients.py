"""The `.grad` of leaves from outside: which tensors they are while a function is traced, and
whether anybody looked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.places import GRAD, Feed
from thunder_fn.capture.supported import is_wrapped
from thunder_fn.errors import UnsupportedCall

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder


@dataclass(slots=True, eq=False)
class Gradients:
    """The gradients that one recorder knows. `taken` are leaves: (tensor, its tracer, the gradient
    that it had).

    `read` are those whose gradient was read or changed, which the trace depends on: (tensor, the
    gradient). A function that was called `follows` if it turns gradients on where they are off, and
    some result of it requires grad. `has_freed`: a backward has run that frees its graph.
    """

    recorder: Recorder
    taken: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = field(
        default_factory=list
    )
    read: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)
    follows: bool = False
    _fed: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _met: set[int] = field(default_factory=set)
    has_freed: bool = False

    def take(self, tensor: torch.Tensor, tracer: torch.Tensor) -> None:
        """Close over a leaf's `.grad` with it."""
        with internals.no_torch_function():
            if is_wrapped(tensor) or not (internals.is_leaf(tensor) or tensor.retains_grad):
                return
            before = tensor.grad
        if before is not None:
            is_new = not self.recorder.knows(before)
            tracer.grad = self.recorder.lift(before)
            if is_new:
                self._fed[id(before)] = tensor, before
        self.taken.append((tensor, tracer, before))

    def look_at(self, tensor: torch.Tensor) -> None:
        """Record that the trace depends on the `.grad` of a tensor from outside, or of its tracer:
        on which tensor it is.
        """
        for given, tracer, before in self.taken:
            if tensor is tracer or tensor is given:
                self.read[id(given)] = given, before
                tensor = given
        if self.recorder.outer is not None:
            self.recorder.outer.gradients.look_at(tensor)
        elif id(tensor) not in self.read and not isinstance(tensor, internals.Tracer):
            with internals.no_torch_function():
                self.read[id(tensor)] = tensor, tensor.grad

    # ---- effects ----

    def met(self, grad: torch.Tensor) -> None:
        """Note that a tensor is reached by another way than as the gradient of a leaf."""
        self._met.add(id(grad))

    def is_fed(self, grad: torch.Tensor | None) -> bool:
        """Test whether the trace is right for other gradients of the same type, or for None."""
        if self.recorder.kept is None or self.recorder.kept.fed.has_tensor(grad):
            return False
        return grad is None or (id(grad) in self._fed and id(grad) not in self._met)

    def feeds(self) -> Iterator[tuple[Feed, torch.Tensor]]:
        """The places of gradients that are read in each call, with the gradients."""
        inputs = {id(tensor): place for place, tensor in enumerate(self.recorder.arguments)}
        for tensor, grad in self._fed.values():
            if self.is_fed(grad):
                yield Feed(inputs.get(id(tensor), tensor), GRAD), grad

    def assigned(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """The leaves that have another gradient than before, or none any more."""
        for tensor, tracer, before in self.taken:
            with internals.no_torch_function():
                after = tracer.grad if internals.is_leaf(tracer) else None
            known = None if before is None else self._tracer(before)
            if internals.is_leaf(tracer) and after is not known:
                self.look_at(tracer)
                yield tensor, after
            elif before is not None and self.is_changed(before):
                self.look_at(tracer)

    def _tracer(self, grad: torch.Tensor) -> torch.Tensor | None:
        return next(
            (tracer for tensor, tracer, _ in self.recorder.lifted() if tensor is grad), None
        )

    def check_hooks(self, nodes: Iterable[Any]) -> None:
        """Refuse a backward to tensors from outside that have hooks, which tracers do not have.

        Raises:
            UnsupportedCall: one of them has.
        """
        with internals.no_torch_function():
            hooked = [tracer for tensor, tracer, _ in self.taken if internals.has_hooks(tensor)]
        if not hooked:
            return
        reached = map(internals.leaf_of, internals.nodes_behind(nodes))
        if any(leaf is tracer for leaf in reached for tracer in hooked):
            source = self.recorder.where()
            what = (
                "the gradient of a tensor from outside has hooks, which a traced backward cannot"
                " run"
            )
            fix = (
                "Remove them, and change `.grad` after `backward()` in the traced function, or call"
                " the step without `jit`."
            )
            raise UnsupportedCall(what, source=source, fix=fix)

    def is_freed(self, result: Any) -> bool:
        """Test whether a backward from a result would read what another backward has freed.

        A node that saves no tensors, such as that of a sum, may run again. So may what stands for
        the history of a tensor from outside.
        """
        if not self.has_freed or not isinstance(result, internals.Tracer):
            return False
        root = internals.node_of(result)
        nodes = internals.nodes_behind([root]) | {root}
        return root is not None and any(
            internals.is_released(node)
            for node in nodes
            if not internals.is_result_from_outside(node)
        )

    def is_changed(self, grad: torch.Tensor) -> bool:
        """Test whether a gradient that was closed over has other values than it had."""
        of = self.recorder
        return any(
            tensor is grad and of.var_of(tracer) != before for tensor, tracer, before in of.lifted()
        )

    def forget(self) -> None:
        """Hold nothing any more."""
        self.taken.clear()
        self.read.clear()
        self._fed.clear()
        self._met.clear()
        del self.recorder
