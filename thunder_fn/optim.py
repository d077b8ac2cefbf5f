"""`torch.optim` optimizers as functions: state in, state out.

The optimizer's own code runs on copies of the parameters; under capture it is functionalised like any in-place code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from thunder_fn.capture import pytree
from thunder_fn.capture.lookasides import divert
from thunder_fn.errors import OptimizerError

State = dict[str, Any]

IMPLEMENTATIONS = ("foreach", "fused")
"""Options that choose how PyTorch computes the same step. A trace has the plain ops, and its executor chooses."""


@dataclass(frozen=True)
class FunctionalOptimizer:
    """An optimizer class with its options, as two functions. See `functional_optimizer`."""

    make: Callable[..., torch.optim.Optimizer]
    options: tuple[tuple[str, Any], ...]

    def init(self, params: Any) -> State:
        """The state before the first step: what the optimizer holds when it has just been made."""
        leaves = [leaf.detach().clone() for leaf in pytree.flatten(params)[0]]
        optimizer = self._made(leaves)
        return _stored([dict(optimizer.state[leaf]) if leaf in optimizer.state else {} for leaf in leaves])

    def update(self, params: Any, grads: Any, state: State, **changed: Any) -> tuple[Any, State]:
        """One step: the new parameters, in the structure of the old, and the new state.

        `changed` are options that are other than they were when this value was made, as a schedule's `lr`. A tensor of
        rank 0 for one is an input like any other: the step is not traced again when its value changes.

        Raises:
            OptimizerError: the optimizer has no such option.
        """
        leaves, spec = pytree.flatten(params)
        with torch.no_grad():
            new = [leaf.clone() for leaf in leaves]
            for leaf, gradient in zip(new, spec.flatten_up_to(grads), strict=True):
                leaf.grad = gradient
            optimizer = self._made(new, changed)
            for leaf, entry in zip(new, state["params"], strict=True):
                optimizer.state[leaf] = _working(entry, state["step"])
            optimizer.step()
            return pytree.unflatten(spec, new), _stored([dict(optimizer.state[leaf]) for leaf in new])

    def _made(
        self, leaves: list[torch.Tensor], changed: Mapping[str, Any] = MappingProxyType({})
    ) -> torch.optim.Optimizer:
        """The optimizer. It checks numbers when it is made; tensors among its options are set afterwards."""
        tensors = {key: value for key, value in self.options if isinstance(value, torch.Tensor)}
        optimizer = self.make(leaves, **{key: value for key, value in self.options if key not in tensors})
        for group in optimizer.param_groups:
            plain = {key: False for key in IMPLEMENTATIONS if key in group}
            group.update(plain | _known({**tensors, **changed}, group, optimizer))
        return optimizer


def _working(entry: dict[str, Any], step: torch.Tensor | None) -> dict[str, Any]:
    """A parameter's state to work on. The step count becomes float64, which is what eager PyTorch computes with."""
    copy = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in entry.items()}
    return copy if step is None else {"step": step.double(), **copy}


def _stored(entries: list[dict[str, Any]]) -> State:
    """The states of all parameters. They step together, so one count is kept for all."""
    counts = [entry.pop("step") for entry in entries if isinstance(entry.get("step"), torch.Tensor)]
    return {"step": counts[0].float() if counts else None, "params": entries}


def functional_optimizer(make: Callable[..., torch.optim.Optimizer], **options: Any) -> FunctionalOptimizer:
    """A `torch.optim` optimizer as a pair of pure functions.

    Law: ``update`` gives the parameters and the state that the optimizer's own ``step`` gives on the same gradients.

    Args:
        make: an optimizer class, such as `torch.optim.AdamW`.
        options: its keyword arguments.

    Returns:
        A value with `init(params) -> state` and `update(params, grads, state) -> (params, state)`. Most optimizers of
        PyTorch make their state in the first step, so the state before it is empty and a jitted step is traced twice.

    Example:
        >>> sgd = functional_optimizer(torch.optim.SGD, lr=0.1)
        >>> params, state = {"w": torch.ones(2)}, sgd.init({"w": torch.ones(2)})
        >>> sgd.update(params, {"w": torch.ones(2)}, state)[0]["w"]
        tensor([0.9000, 0.9000])
    """
    return FunctionalOptimizer(make, tuple(sorted(options.items())))


def _known(changed: dict[str, Any], group: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    known = sorted(set(group) - {"params"})
    for key in changed:
        if key not in known:
            name = type(optimizer).__name__
            raise OptimizerError(f"{name} has no option {key!r}; those that can change are {', '.join(known)}")
    return changed


divert("optimizer scalar dtype", lambda is_fused=None: torch.float64)
