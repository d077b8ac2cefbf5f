"""The `.grad` of leaves from outside: which tensors they are while a function is traced, and
whether anybody looked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.supported import is_wrapped

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder


@dataclass(slots=True, eq=False)
class Gradients:
    """The gradients that one recorder knows. `taken` are leaves: (tensor, its tracer, the gradient
    that it had).

    `read` are those whose gradient was read or changed, which the trace depends on: (tensor, the
    gradient). A function that was called `follows` if it turns gradients on where they are off, and
    some result of it requires grad.
    """

    recorder: Recorder
    taken: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = field(
        default_factory=list
    )
    read: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)
    follows: bool = False

    def take(self, tensor: torch.Tensor, tracer: torch.Tensor) -> None:
        """Close over a leaf's `.grad` with it."""
        with internals.no_torch_function():
            if is_wrapped(tensor) or not (tensor.is_leaf or tensor.retains_grad):
                return
            before = tensor.grad
        if before is not None:
            tracer.grad = self.recorder.lift(before)
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
        del self.recorder
