"""`torch.optim` optimizers as functions: state in, state out.

The optimizer's own code runs on copies of the parameters; under capture it is functionalised like any in-place code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from thunder_fn.capture import Captured, capture, current, pytree
from thunder_fn.capture.apply import copy_trace
from thunder_fn.capture.lookasides import divert
from thunder_fn.capture.recorder import Recorder
from thunder_fn.errors import OptimizerError
from thunder_fn.trace import Literal

State = dict[str, Any]

IMPLEMENTATIONS = ("foreach", "fused")
"""Options that choose how PyTorch computes the same step. A trace has the plain ops, and its executor chooses."""


_NAMES = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
    *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
EACH_ON_ITS_OWN = frozenset(getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name))
"""Optimizers that update each parameter from its own gradient and state: a step is traced once for equal types."""


class _StepsOfOne:
    """A function on one parameter, traced once for each kind of arguments and copied into the capture from then on."""

    def __init__(self, recorder: Recorder, function: Callable[..., Any]) -> None:
        self.recorder, self.function = recorder, function
        self.known: dict[Any, Captured] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, spec = pytree.flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        kinds = tuple(map(self.kind_of, leaves))
        captured = self.known.get((spec, kinds))
        if captured is None:
            captured = self.known[spec, kinds] = capture(self.function, args)
        results = None if captured.writes else copy_trace(self.recorder, captured.trace, tensors)
        return self.function(*args) if results is None else captured.result(results)

    def kind_of(self, leaf: Any) -> Any:
        """What a trace depends on of a leaf."""
        return (self.recorder.type_of(leaf), leaf.stride()) if isinstance(leaf, torch.Tensor) else Literal(leaf)


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
        gradients: list[Any] = spec.flatten_up_to(grads)
        entries = state["params"]
        with torch.no_grad():
            if self.make in EACH_ON_ITS_OWN and (recorder := current()) is not None and not recorder.symbolic:
                of_one = _StepsOfOne(recorder, lambda x, g, entry, *rest: self._step([x], [g], [entry], *rest))
                rest = state["step"], changed
                updated = [of_one(*one, *rest) for one in zip(leaves, gradients, entries, strict=True)]
                new, after = [leaf for (leaf,), _ in updated], [entry for _, (entry,) in updated]
            else:
                new, after = self._step(leaves, gradients, entries, state["step"], changed)
            return pytree.unflatten(spec, new), _stored(after)

    def _step(
        self,
        leaves: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        entries: Sequence[dict[str, Any]],
        step: torch.Tensor | None,
        changed: Mapping[str, Any],
    ) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        """New parameters, and what the optimizer holds of each then."""
        new = [leaf.clone() for leaf in leaves]
        for leaf, gradient in zip(new, gradients, strict=True):
            leaf.grad = gradient
        optimizer = self._made(new, changed)
        for leaf, entry in zip(new, entries, strict=True):
            optimizer.state[leaf] = _working(entry, step)
        optimizer.step()
        return new, [dict(optimizer.state[leaf]) for leaf in new]

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
