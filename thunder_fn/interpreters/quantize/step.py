"""quantize: weights stored as codes of a scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from thunder_fn.errors import RewriteError, kind_of, with_article
from thunder_fn.interpreters.quantize.scheme import Scheme, Shape
from thunder_fn.interpreters.rewriting.filters import NOTHING, Filter, in_stacks
from thunder_fn.interpreters.rewriting.part_calls import EMBEDDING, LINEAR, Calls
from thunder_fn.interpreters.rewriting.representation import Representation
from thunder_fn.interpreters.rewriting.tracing import traced
from thunder_fn.ir.memos import memo
from thunder_fn.ir.trace import TensorType, static_shape


@dataclass(frozen=True)
class Quantize:
    """The step of `quantize`: codes in place of the weights that a filter chooses.

    With `training`, the weights stay as they are and computations see them rounded; gradients pass
    straight through.
    """

    scheme: Scheme
    chosen: Filter
    training: bool = False
    stacked: Filter = NOTHING
    of_weights: ClassVar[bool] = True

    def __call__(self, name: str, type: TensorType) -> Representation | None:
        return in_stacks(self, name, type)

    def of_layer(self, name: str, type: TensorType) -> Representation | None:
        """A weight, or one of a stack."""
        shape = static_shape(type)
        is_weight = (
            type.dtype.is_floating_point and type.dtype.itemsize > 1 and shape and 0 not in shape
        )
        if not is_weight or not self.chosen(name, shape):
            return None
        return rounded(self.scheme, type) if self.training else quantised(self.scheme, type)


@memo(4096)
def quantised(scheme: Scheme, type: TensorType) -> Representation:
    """A weight of this type in a scheme."""
    shape, dtype, names = static_shape(type), type.dtype, list[str]()

    def encode(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = _named(scheme, scheme.encode(w))
        names.extend(parts)
        return tuple(parts.values())

    encoded = traced(encode, type)
    suffixes = tuple(names)
    if len(encoded.outputs) > len(names):
        what = f"quantize: encode of the scheme {scheme.name} changes the weight in place"
        raise RewriteError(what, fix="Compute the parts from it, or from a copy.")
    parts = tuple(part for part in encoded.output_types if isinstance(part, TensorType))
    decoded = traced(
        lambda *xs: scheme.decode(dict(zip(suffixes, xs, strict=True)), shape, dtype), *parts
    )
    if decoded.output_types != (type,):
        given = ", ".join(map(str, decoded.output_types)) or "no tensor"
        raise RewriteError(
            f"quantize: the scheme {scheme.name} decodes the parts of {with_article(type)} to"
            f" {given}"
        )
    rule = Calls(_calls(scheme, shape, dtype), suffixes, parts)
    return Representation(
        scheme.name, type, suffixes, encoded, decoded, rule=rule, codes=True, in_bodies=True
    )


def _named(scheme: Scheme, parts: Any) -> Mapping[str, torch.Tensor]:
    """The parts that a scheme encodes a weight to.

    Raises:
        RewriteError: they are no tensors by name.
    """
    is_named = isinstance(parts, Mapping) and all(isinstance(name, str) for name in parts)
    if is_named and parts and all(isinstance(part, torch.Tensor) for part in parts.values()):
        return parts
    given = kind_of(parts)
    if is_named:
        given = ", ".join(f"{key!r}: {kind_of(part)}" for key, part in parts.items())
    what = f"quantize: encode of the scheme {scheme.name} gives tensors by name, such as"
    raise RewriteError(f"{what} {{'values': ...}}, given {given or 'none'}")


def _calls(scheme: Scheme, shape: Shape, dtype: torch.dtype) -> tuple[tuple[str, Any], ...]:
    linear, embedding = scheme.linear, scheme.embedding
    calls: list[tuple[str, Any]] = []
    if linear is not None and len(shape) == 2:
        calls.append(
            (LINEAR, lambda given, parts: linear(given["input"], parts, given.get("bias"), shape))
        )
    if embedding is not None and len(shape) == 2:
        calls.append((EMBEDDING, lambda given, parts: embedding(given["input"], parts, dtype)))
    return tuple(calls)


@memo(4096)
def rounded(scheme: Scheme, type: TensorType) -> Representation:
    """A weight that computations see as the scheme would store it, for training that takes
    rounding into account.
    """
    shape, dtype = static_shape(type), type.dtype

    def decode(w: torch.Tensor) -> torch.Tensor:
        return w + (scheme.decode(scheme.encode(w), shape, dtype) - w).detach()

    same = traced(lambda w: w, type)
    return Representation(
        f"{scheme.name}_training", type, ("",), same, traced(decode, type), restore=same
    )
