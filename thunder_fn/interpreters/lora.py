"""lora: beside a frozen weight, an adapter of low rank that is trained.

Source: LoRA (arXiv:2106.09685).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from thunder_fn.interpreters.quantize.scheme import Parts
from thunder_fn.interpreters.rewriting.filters import ADAPTERS, NOTHING, Filter, in_stacks
from thunder_fn.interpreters.rewriting.part_calls import LINEAR, Calls
from thunder_fn.interpreters.rewriting.representation import Representation
from thunder_fn.interpreters.rewriting.tracing import traced
from thunder_fn.ir.memos import memo
from thunder_fn.ir.trace import TensorType, static_shape


@dataclass(frozen=True)
class Lora:
    """The step of `lora`: beside a matrix w, `lora_b @ lora_a` of low rank, scaled by alpha /
    rank.
    """

    rank: int
    alpha: float
    chosen: Filter
    stacked: Filter = NOTHING
    of_weights: ClassVar[bool] = True
    beside: ClassVar[bool] = True
    """True: its parts are beside the weight, which is stored as it was."""
    most_dims: ClassVar[int] = 2

    def __call__(self, name: str, type: TensorType) -> Representation | None:
        return in_stacks(self, name, type)

    def of_layer(self, name: str, type: TensorType) -> Representation | None:
        """A matrix, or one of a stack."""
        shape = static_shape(type)
        if len(shape) != 2 or not type.dtype.is_floating_point or not self.chosen(name, shape):
            return None
        return adapted(self.rank, self.alpha / self.rank, type)


@memo(4096)
def adapted(rank: int, scale: float, type: TensorType) -> Representation:
    """A matrix with an adapter, which begins at zero: its second factor is zero, its first is
    drawn.
    """
    rows, columns = static_shape(type)

    def encode(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        drawn = torch.rand(rank, columns, dtype=w.dtype, device=w.device)
        return w, (2 * drawn - 1) / columns**0.5, w.new_zeros(rows, rank)

    def decode(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return w + torch.matmul(b, a) * scale

    def linear(given: dict[str, torch.Tensor], parts: Parts) -> torch.Tensor:
        x = given["input"]
        own, a, b = (parts[suffix].to(x.dtype) for suffix in ("", *ADAPTERS))
        low = torch.nn.functional.linear(x, a)
        return (
            torch.nn.functional.linear(x, own, given.get("bias"))
            + torch.nn.functional.linear(low, b) * scale
        )

    suffixes, encoded = ("", *ADAPTERS), traced(encode, type)
    parts = tuple(part for part in encoded.output_types if isinstance(part, TensorType))
    rule = Calls(((LINEAR, linear),), suffixes, parts)
    return Representation(
        "lora", type, suffixes, encoded, traced(decode, *parts), rule=rule, in_bodies=True
    )
