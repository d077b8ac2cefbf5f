"""What rewriting transforms decide for each parameter: quantisation, low-rank adapters."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import capture
from thunder_fn.errors import RewriteError, located, with_article
from thunder_fn.interpreters.rewrite import Representation
from thunder_fn.rewrites.scheme import Parts, Scheme, Shape
from thunder_fn.rules import memo
from thunder_fn.trace import Equation, Literal, TensorType, Trace, Var, static_shape

Filter = Callable[[str, Shape], bool]
LINEAR, EMBEDDING = "torch.nn.functional.linear", "aten.embedding.default"
ADAPTERS = ("lora_a", "lora_b")


def matrices(name: str, shape: Shape) -> bool:
    """The default filter: weights of two or more dims, adapters left alone."""
    return len(shape) >= 2 and not name.endswith(ADAPTERS)


def read_filter(given: Any, what: str) -> Filter:
    """A predicate on name and shape, or patterns on names such as `layers.*.weight`."""
    if given is None:
        return matrices
    if callable(given):
        return cast(Filter, given)
    patterns = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise RewriteError(f"{what}: a filter is a pattern on names, some of them, or a function of (name, shape)")
    return Patterns(patterns)


@dataclass(frozen=True)
class Patterns:
    """A filter: weights of two or more dims whose names match one of the patterns."""

    patterns: tuple[str, ...]

    def __call__(self, name: str, shape: Shape) -> bool:
        return len(shape) >= 2 and any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)

    def check(self, names: Sequence[str], types: Sequence[TensorType], what: str) -> None:
        """Every pattern chooses something.

        Raises:
            RewriteError: one does not, which would leave weights as they are without a word.
        """
        weights = [name for name, type in zip(names, types, strict=True) if len(static_shape(type)) >= 2]
        for pattern in self.patterns:
            if not fnmatch.filter(weights, pattern):
                near = difflib.get_close_matches(pattern, weights, n=3, cutoff=0.0)
                raise RewriteError(
                    located(
                        f"{what}: the filter {pattern!r} matches no parameter of two or more dims",
                        fix=f"There are {', '.join(near)}." if near else "There are no such parameters.",
                    )
                )


def example(type: TensorType) -> torch.Tensor:
    """A tensor of this type, to capture a function with."""
    with internals.isolated(), internals.no_torch_function():  # no part of a capture that may be going on
        return torch.empty(static_shape(type), dtype=type.dtype, device=type.device)


def traced(f: Callable[..., Any], *types: TensorType) -> Trace:
    """The trace of a function on tensors of these types, whatever autocast is around."""
    with internals.autocast_off():
        return capture(f, tuple(map(example, types))).trace


# ---- calls on parts ----


def traced_on_parts(f: Callable[..., Any], equation: Equation, kept: Sequence[Representation | None]) -> Trace:
    """The trace of a function of an equation's operands, where a represented one is handed over as its parts."""
    pairs = zip(equation.operands, kept, strict=True)
    types = (type for var, one in pairs for type in (one.part_types if one is not None else (var.type,)))
    return traced(f, *(type for type in types if isinstance(type, TensorType)))


@dataclass(frozen=True)
class Calls:
    """The rule of a representation: torch functions that work on the parts as they are.

    `computes` has functions of the call's other tensors by name and of the parts by suffix, by the torch function's name.
    """

    computes: tuple[tuple[str, Callable[[dict[str, torch.Tensor], Parts], torch.Tensor]], ...]
    suffixes: tuple[str, ...]
    parts: tuple[TensorType, ...]

    def __call__(self, equation: Equation, kept: tuple[Representation | None, ...]) -> Trace | None:
        compute = dict(self.computes).get(equation.op.name)
        named = operand_names(equation) if compute is not None else None
        places = [position for position, one in enumerate(kept) if one is not None]
        if compute is None or named is None or [named[position] for position in places] != ["weight"]:
            return None
        (position,) = places
        precision = equation.outputs[0].type
        end = position + len(self.parts)
        others = (*named[:position], *named[position + 1 :])

        def call(*values: torch.Tensor) -> torch.Tensor:
            parts = dict(zip(self.suffixes, values[position:end], strict=True))
            given = (in_precision(value, precision) for value in (*values[:position], *values[end:]))
            return compute(dict(zip(others, given, strict=True)), parts)

        types = [var.type for var in equation.operands if isinstance(var.type, TensorType)]
        return traced(call, *types[:position], *self.parts, *types[position + 1 :])


def in_precision(value: torch.Tensor, type: Any) -> torch.Tensor:
    """A floating tensor in the dtype of a type: under autocast a call's result has not the dtype of what it is given."""
    return value.to(type.dtype) if value.dtype.is_floating_point and isinstance(type, TensorType) else value


_NAMES = {LINEAR: ("input", "weight", "bias"), EMBEDDING: ("weight", "input", "padding_idx")}


def operand_names(equation: Equation) -> tuple[str, ...] | None:
    """The parameter name of each operand of a linear layer or an embedding; None for a call with options of effect.

    Those are options that are not None or False. Where an embedding's padding lies matters
    to the gradient of its weight only, and parts such as codes have none.
    """
    names = _NAMES[equation.op.name]
    given = dict(zip(names, equation.args, strict=False)) | dict(equation.kwargs)
    options = [*equation.args[len(names) :], *(value for key, value in given.items() if key not in names)]
    if any(not isinstance(value, Literal) or value.value not in (None, False) for value in options):
        return None
    called = {value.index: key for key, value in given.items() if isinstance(value, Var)}
    named = tuple(called.get(var.index, "") for var in equation.operands)
    return named if sorted(named) == sorted(called.values()) else None


# ---- quantisation ----


@dataclass(frozen=True)
class Quantize:
    """The step of `quantize`: codes in place of the weights that a filter chooses.

    With `training`, the weights stay what they are and computations see them rounded; gradients pass straight through.
    """

    scheme: Scheme
    chosen: Filter
    training: bool = False
    of_weights: ClassVar[bool] = True

    def __call__(self, name: str, type: TensorType) -> Representation | None:
        shape = static_shape(type)
        if not type.dtype.is_floating_point or 0 in shape or not self.chosen(name, shape):
            return None
        return rounded(self.scheme, type) if self.training else quantised(self.scheme, type)


@memo(4096)
def quantised(scheme: Scheme, type: TensorType) -> Representation:
    """A weight of this type in a scheme."""
    shape, dtype, names = static_shape(type), type.dtype, list[str]()

    def encode(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = scheme.encode(w)
        names.extend(parts)
        return tuple(parts.values())

    encoded = traced(encode, type)
    suffixes = tuple(names)
    parts = tuple(part for part in encoded.output_types if isinstance(part, TensorType))
    decoded = traced(lambda *xs: scheme.decode(dict(zip(suffixes, xs, strict=True)), shape, dtype), *parts)
    if decoded.output_types != (type,):
        given = ", ".join(map(str, decoded.output_types))
        raise RewriteError(f"quantize: the scheme {scheme.name} decodes the parts of {with_article(type)} to {given}")
    rule = Calls(_calls(scheme, shape, dtype), suffixes, parts)
    return Representation(scheme.name, type, suffixes, encoded, decoded, rule=rule, codes=True)


def _calls(scheme: Scheme, shape: Shape, dtype: torch.dtype) -> tuple[tuple[str, Any], ...]:
    linear, embedding = scheme.linear, scheme.embedding
    calls: list[tuple[str, Any]] = []
    if linear is not None and len(shape) == 2:
        calls.append((LINEAR, lambda given, parts: linear(given["input"], parts, given.get("bias"), shape)))
    if embedding is not None and len(shape) == 2:
        calls.append((EMBEDDING, lambda given, parts: embedding(given["input"], parts, dtype)))
    return tuple(calls)


@memo(4096)
def rounded(scheme: Scheme, type: TensorType) -> Representation:
    """A weight that computations see as the scheme would store it, for training that takes rounding into account."""
    shape, dtype = static_shape(type), type.dtype

    def decode(w: torch.Tensor) -> torch.Tensor:
        return w + (scheme.decode(scheme.encode(w), shape, dtype) - w).detach()

    same = traced(lambda w: w, type)
    return Representation(f"{scheme.name}_training", type, ("",), same, traced(decode, type), restore=same)


# ---- low-rank adapters ----


@dataclass(frozen=True)
class Lora:
    """The step of `lora`: beside a matrix w, `lora_b @ lora_a` of low rank, scaled by alpha / rank."""

    rank: int
    alpha: float
    chosen: Filter
    of_weights: ClassVar[bool] = True
    beside: ClassVar[bool] = True
    """Its parts are beside the weight, which is stored as it was."""

    def __call__(self, name: str, type: TensorType) -> Representation | None:
        shape = static_shape(type)
        if len(shape) != 2 or not type.dtype.is_floating_point or not self.chosen(name, shape):
            return None
        return adapted(self.rank, self.alpha / self.rank, type)


@memo(4096)
def adapted(rank: int, scale: float, type: TensorType) -> Representation:
    """A matrix with an adapter, which begins at zero: its second factor is zero, its first is drawn."""
    rows, columns = static_shape(type)

    def encode(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        drawn = torch.rand(rank, columns, dtype=w.dtype, device=w.device)
        return w, (2 * drawn - 1) / columns**0.5, w.new_zeros(rows, rank)

    def decode(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return w + torch.matmul(b, a) * scale

    def linear(given: dict[str, torch.Tensor], parts: Parts) -> torch.Tensor:
        x = given["input"]
        base = torch.nn.functional.linear(x, parts[""], given.get("bias"))
        low = torch.nn.functional.linear(x, parts["lora_a"])
        return base + torch.nn.functional.linear(low, parts["lora_b"]) * scale

    suffixes, encoded = ("", *ADAPTERS), traced(encode, type)
    parts = tuple(part for part in encoded.output_types if isinstance(part, TensorType))
    rule = Calls(((LINEAR, linear),), suffixes, parts)
    return Representation("lora", type, suffixes, encoded, traced(decode, *parts), rule=rule)
