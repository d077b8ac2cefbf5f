"""The `ctx` of a `torch.autograd.Function` inside a traced function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder_fn.ir.rules import Mask


class Context:
    """The `ctx` of `forward`, `setup_context` and `backward`."""

    def __init__(self, needs_input_grad: Mask, seen: set[str]) -> None:
        self._needs = needs_input_grad
        self._seen = seen
        self._saved: tuple[Any, ...] = ()
        self._saved_for_forward: tuple[Any, ...] | None = None
        self._constant: tuple[Any, ...] = ()
        self.dirty: tuple[Any, ...] = ()
        self._materialize = True

    @property
    def needs_input_grad(self) -> Mask:
        """Tell for each argument whether it requires grad. A rule made of that holds for the
        same question only.
        """
        self._seen.add("needs")
        return self._needs

    @needs_input_grad.setter
    def needs_input_grad(self, value: Mask) -> None:
        """Set it, as PyTorch lets its users do."""
        self._needs = value

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The tensors that `save_for_backward` was given."""
        return self._saved

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors for `backward`."""
        self._saved = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Keep tensors for `jvp`."""
        self._saved_for_forward = tensors

    def all_saved(self) -> tuple[Any, ...]:
        """The tensors that are saved for either direction."""
        return (*self._saved, *(self._saved_for_forward or ()))

    def turn_forward(self) -> None:
        """Take the saved tensors for `jvp` from now on."""
        self._saved = self._saved if self._saved_for_forward is None else self._saved_for_forward

    def mark_non_differentiable(self, *outputs: Any) -> None:
        """Mark outputs that have no gradient."""
        self._constant = outputs

    def mark_dirty(self, *inputs: Any) -> None:
        """Inputs that were changed in place."""
        self.dirty = inputs

    def set_materialize_grads(self, value: bool) -> None:
        """Choose whether `backward` and `jvp` get zeros or None for outputs without a cotangent and
        tensors without a tangent.
        """
        self._materialize = value
        if not value:
            self._seen.add("absent")

    @property
    def materializes(self) -> bool:
        """Tell whether absent cotangents and tangents are zeros."""
        return self._materialize

    def constants_among(self, outputs: Sequence[Any]) -> tuple[bool, ...]:
        """The outputs without a gradient."""
        return tuple(any(output is constant for constant in self._constant) for output in outputs)
