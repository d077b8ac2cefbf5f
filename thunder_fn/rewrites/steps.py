"""Steps of rewriting transforms, which decide for each parameter: quantisation, low-rank adapters."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch

from thunder_fn.derive_autocast import TO_COPY
from thunder_fn.errors import RewriteError, kind_of, located, with_article
from thunder_fn.interpreters.representation import Kept, Representation
from thunder_fn.ir import inline_into
from thunder_fn.rewrites.scheme import Parts, Scheme, Shape
from thunder_fn.rewrites.stacks import layer_type, stack_of
from thunder_fn.rewrites.tracing import traced
from thunder_fn.rules import memo
from thunder_fn.trace import Equation, Literal, TensorType, Trace, TraceBuilder, Var, static_shape

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
    patterns = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else ()
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise RewriteError(f"{what}: a filter is a pattern on names, some of them, or a function of (name, shape)")
    return Patterns(patterns)


def in_stacks(step: Any, name: str, type: TensorType) -> Representation | None:
    """Decide a weight by a step: each layer by itself, where layers lie on top of each other."""
    if not step.stacked(name, static_shape(type)):
        return step.of_layer(name, type)
    layer = step.of_layer(name, layer_type(type))
    return layer and stack_of(layer, type)


def read_stacked(given: Any, what: str) -> Filter:
    """Read the option like `read_filter`; left out, nothing is stacked."""
    return NOTHING if given in (None, ()) else read_filter(given, what)


@dataclass(frozen=True)
class Patterns:
    """A filter: weights of two or more dims whose names match one of the patterns."""

    patterns: tuple[str, ...]

    def __call__(self, name: str, shape: Shape) -> bool:
        return len(shape) >= 2 and any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)

    def check(
        self, names: Sequence[str], types: Sequence[TensorType], what: str, most_dims: int | None, least_dims: int = 2
    ) -> None:
        """Check that every pattern chooses something that has as many dims as a step takes.

        Raises:
            RewriteError: one does not, which would leave weights as they are without a word.
        """
        dims = [len(static_shape(type)) for type in types]
        weights = [name for name, n in zip(names, dims, strict=True) if least_dims <= n <= (most_dims or n)]
        for pattern in self.patterns:
            if not fnmatch.filter(weights, pattern):
                near = difflib.get_close_matches(pattern, weights, n=3, cutoff=0.0)
                dims_text = f"{'two' if least_dims == 2 else 'three'}{'' if most_dims == least_dims else ' or more'}"
                raise RewriteError(
                    located(
                        f"{what}: the filter {pattern!r} matches no parameter of {dims_text} dims",
                        fix=f"There are {', '.join(near)}." if near else "There are no such parameters.",
                    )
                )


NOTHING = Patterns(())


# ---- calls on parts ----


@dataclass(frozen=True)
class Calls:
    """The rule of a representation: torch functions that work on the parts as they are.

    `computes` has functions of the call's other tensors by name and of the parts by suffix, by the torch function's name.
    """

    computes: tuple[tuple[str, Callable[[dict[str, torch.Tensor], Parts], torch.Tensor]], ...]
    suffixes: tuple[str, ...]
    parts: tuple[TensorType, ...]

    def __call__(self, equation: Equation, kept: tuple[Representation | None, ...]) -> Trace | Kept | None:
        if equation.op == TO_COPY:
            return self.cast(equation, kept[0])
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
            return in_precision(compute(dict(zip(others, given, strict=True)), parts), precision)

        types = [var.type for var in equation.operands if isinstance(var.type, TensorType)]
        return traced(call, *types[:position], *self.parts, *types[position + 1 :])

    def cast(self, equation: Equation, kept: Representation | None) -> Kept | None:
        """The weight in another floating dtype, as autocast has it, is stored as it was."""
        type, options = equation.outputs[0].type, [key for key, _ in equation.kwargs]
        if kept is None or not isinstance(type, TensorType) or options != ["dtype"]:
            return None
        same = traced(lambda *parts: parts, *self.parts)
        return Kept(same, (recast(kept, type),)) if type.dtype.is_floating_point else None


@memo(4096)
def recast(kept: Representation, type: TensorType) -> Representation:
    """Recast the parts: the same ones, seen in another dtype."""
    builder = TraceBuilder("decode")
    seen = inline_into(builder, kept.decode, tuple(map(builder.input, kept.part_types)))
    decode = builder.build(builder.add(TO_COPY, seen, (type,), kwargs=(("dtype", Literal(type.dtype)),)))
    return replace(kept, type=type, decode=decode, of_results=True)


def in_precision(value: torch.Tensor, type: Any) -> torch.Tensor:
    """A floating tensor in the dtype of a type: under autocast a call's result has another dtype than its
    arguments.
    """
    return value.to(type.dtype) if value.dtype.is_floating_point and isinstance(type, TensorType) else value


_NAMES = {LINEAR: ("input", "weight", "bias"), EMBEDDING: ("weight", "input", "padding_idx")}


def operand_names(equation: Equation) -> tuple[str, ...] | None:
    """The parameter name of each operand of a linear layer or an embedding; None for a call with options of effect.

    Those are options that are not None or False. The place of an embedding's padding matters to the gradient of its
    weight only, and parts such as codes have none.
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

    With `training`, the weights stay as they are and computations see them rounded; gradients pass straight through.
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
        is_weight = type.dtype.is_floating_point and type.dtype.itemsize > 1 and shape and 0 not in shape
        if not is_weight or not self.chosen(name, shape):
            return None
        return rounded(self.scheme, type) if self.training else quantised(self.scheme, type)


@memo(4096)
def quantised(scheme: Scheme, type: TensorType) -> Representation:
    """A weight of this type in a scheme."""
    shape, dtype, names = static_shape(type), type.dtype, list[str]()

    def encode(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts: Any = scheme.encode(w)
        is_named = isinstance(parts, Mapping) and all(isinstance(name, str) for name in parts)
        if not is_named or not parts or not all(isinstance(part, torch.Tensor) for part in parts.values()):
            given = (
                ", ".join(f"{key!r}: {kind_of(part)}" for key, part in parts.items()) if is_named else kind_of(parts)
            )
            what = f"quantize: encode of the scheme {scheme.name} gives tensors by name, such as {{'values': ...}}"
            raise RewriteError(f"{what}, given {given or 'none'}")
        names.extend(parts)
        return tuple(parts.values())

    encoded = traced(encode, type)
    suffixes = tuple(names)
    if len(encoded.outputs) > len(names):
        what = f"quantize: encode of the scheme {scheme.name} changes the weight in place"
        raise RewriteError(located(what, fix="Compute the parts from it, or from a copy."))
    parts = tuple(part for part in encoded.output_types if isinstance(part, TensorType))
    decoded = traced(lambda *xs: scheme.decode(dict(zip(suffixes, xs, strict=True)), shape, dtype), *parts)
    if decoded.output_types != (type,):
        given = ", ".join(map(str, decoded.output_types)) or "no tensor"
        raise RewriteError(f"quantize: the scheme {scheme.name} decodes the parts of {with_article(type)} to {given}")
    rule = Calls(_calls(scheme, shape, dtype), suffixes, parts)
    return Representation(scheme.name, type, suffixes, encoded, decoded, rule=rule, codes=True, in_bodies=True)


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
    """A matrix with an adapter, which begins at zero: its second factor is zero, its first is drawn."""
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
        return torch.nn.functional.linear(x, own, given.get("bias")) + torch.nn.functional.linear(low, b) * scale

    suffixes, encoded = ("", *ADAPTERS), traced(encode, type)
    parts = tuple(part for part in encoded.output_types if isinstance(part, TensorType))
    rule = Calls(((LINEAR, linear),), suffixes, parts)
    return Representation("lora", type, suffixes, encoded, traced(decode, *parts), rule=rule, in_bodies=True)
