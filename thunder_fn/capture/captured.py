"""The findings of a capture: a trace, and the data that a call like the function's needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn.capture import pytree
from thunder_fn.capture.aliases import Alias, Joint
from thunder_fn.capture.flags import Flag
from thunder_fn.capture.kept_state import KeptState
from thunder_fn.capture.outside.properties import Read
from thunder_fn.capture.places import Effect, Feed, Update
from thunder_fn.capture.pytree import TENSOR
from thunder_fn.capture.recorded import Decision
from thunder_fn.ir.trace import Dim, Trace

_ZEROS: dict[type, Any] = {bool: 0, int: 0, float: 0.0, complex: 0j}
"""The tangents of numbers."""


@dataclass(frozen=True, slots=True)
class Write:
    """A mutation by the function: of an input of the trace, by index, or of a closed-over tensor.

    `strides`: the tensor is its own view from then on, as after `t_()`, with other strides in the
        same memory.
    `rebinds`: the tensor gets other memory, as by `x.data = y`, and its own keeps its content.
    `has_values`: values are written to memory. Those of a tensor whose elements overlap never are.
    `is_counted`: autograd's version counter knows of it. It does not know of one by `x.data`.
    """

    target: int | torch.Tensor
    strides: tuple[int, ...] | None = None
    rebinds: bool = False
    has_values: bool = True
    is_counted: bool = True

    @property
    def is_in_place(self) -> bool:
        """Test for values that a program may write to the memory itself, by ops that count."""
        return self.has_values and self.is_counted


@dataclass(frozen=True, slots=True)
class Shared:
    """An output, by position, that shares memory with an input of the trace, by index, or with a
    closed-over tensor.

    `is_same`: it is that tensor; else it may be a view.
    """

    result: int
    source: int | torch.Tensor
    is_same: bool


@dataclass(frozen=True, slots=True)
class GradRead:
    """The function looked at the `.grad` of an input of the trace, by index, or of a closed-over
    tensor: this one, or None.

    `is_fed`: the trace is right for any gradient of this type, since its value is read in each
        call.
    """

    tensor: int | torch.Tensor
    grad: torch.Tensor | None
    is_fed: bool = False


@dataclass(frozen=True, slots=True)
class Captured:
    """A function as a trace, with the data that a call like the function's needs.

    The trace has one input for each tensor leaf of `(args, kwargs)`, then one for each number or
    stride that is a symbol. Its outputs are the leaves of the result that are tensors or depend on
    symbols, then one new value for each write. `decisions` are the decisions about symbols, in
    order. `own_leaves` are results that the function made leaves that require grad: positions among
    the outputs, and whether they are Parameters. The trace is right for as long as the gradients in
    `grads` are the very tensors that they were, and `reads` find what they found. `retained` are
    results whose gradient is to be kept (`retain_grad`), by position. `follows`: gradients are off
    around the function, on inside of it, and some result requires grad.

    `flags` say which tensors require grad when the trace begins: the function sets them first.

    With effects, the inputs end with one for each of `feeds`, and the outputs with those of the
    `effects`. `kept` guards the objects that they belong to. `freed` are results, by position,
    whose graph `backward()` has freed. `anew` are leaves of the result, by place, that the function
    makes in each call. `repeated` are nodes of the result that occurred before, by number, each
    with its first place. `strides` are those of the results of a function inside another one, None
    for contiguous ones.

    `is_told`: Python was told values of the call, so that the trace serves no other.
    `is_kept`: later calls use the capture again. Then tensors from outside are the last inputs.
    """

    trace: Trace
    in_spec: pytree.PyTreeSpec
    in_leaves: tuple[Any, ...]
    out_spec: pytree.PyTreeSpec
    out_leaves: tuple[Any, ...]
    writes: tuple[Write, ...] = ()
    decisions: tuple[Decision, ...] = ()
    own_leaves: tuple[tuple[int, bool], ...] = ()
    grads: tuple[GradRead, ...] = ()
    retained: tuple[int, ...] = ()
    follows: bool = False
    reads: tuple[Read, ...] = ()
    aliases: tuple[Alias, ...] = ()
    joints: tuple[Joint, ...] = ()
    shared: tuple[Shared, ...] = ()
    feeds: tuple[Feed, ...] = ()
    effects: tuple[Effect | Update, ...] = ()
    kept: tuple[KeptState, ...] = ()
    flags: tuple[Flag, ...] = ()
    freed: tuple[int, ...] = ()
    anew: tuple[int, ...] = ()
    repeated: tuple[tuple[int, int], ...] = ()
    strides: tuple[tuple[Dim, ...] | None, ...] = ()
    is_told: bool = False
    is_kept: bool = False

    @property
    def num_results(self) -> int:
        """The number of the trace's outputs that belong to the result."""
        return len(self.trace.outputs) - len(self.writes) - self.num_effects

    def targets_among(self, count: int) -> list[int | torch.Tensor]:
        """The tensors whose memory is written to, but for the gradients that are fed: of the
        `count` tensors of a call, or closed over.
        """
        targets = (write.target for write in self.writes if not write.rebinds)
        return [one for one in targets if not isinstance(one, int) or one < count]

    def source_of(self, result: int) -> int | torch.Tensor | None:
        """The input or closed-over tensor that a result, by position, is; None for another one."""
        same = (one.source for one in self.shared if one.is_same and one.result == result)
        return next(same, None)

    @property
    def num_effects(self) -> int:
        """The number of the trace's outputs that are stored in places outside."""
        return sum(effect.count for effect in self.effects)

    def result(self, outputs: tuple[Any, ...]) -> Any:
        """Build the function's result from the first outputs of the trace."""
        leaves = pytree.filled(self.out_leaves, outputs)
        return pytree.unflatten(self.out_spec, leaves, self.repeated)

    @property
    def marks(self) -> Any:
        """The function's result with `TENSOR` in the place of each tensor."""
        return pytree.unflatten(self.out_spec, self.out_leaves)

    def tangent(self, outputs: tuple[Any, ...]) -> Any:
        """Build the result's tangent from those of its tensors; that of a Python number is zero."""
        zeros = (_ZEROS.get(type(leaf), leaf) for leaf in self.out_leaves)
        return pytree.unflatten(self.out_spec, pytree.filled(zeros, outputs))

    def paths(self, root: str = "out") -> list[str]:
        """The path of each tensor of the result, such as `out['w']`."""
        paths = pytree.paths_of(self.out_spec, root)
        return [path for path, leaf in zip(paths, self.out_leaves, strict=True) if leaf is TENSOR]
