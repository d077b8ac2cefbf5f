"""Emitters of ops that work element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from thunder_fn.executors.nvfuser.writer import (
    EMITTERS,
    Emitter,
    Number,
    Operand,
    Refused,
    Writer,
    computed_in,
    emits,
    number,
    promoted,
)
from thunder_fn.ir.trace import TensorType

Value = Operand | Number

# ---- of one tensor ----

# fmt: off
_FLOATS = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "erfinv",
    "exp", "exp2", "expm1", "frac", "lgamma", "log", "log10", "log1p", "log2", "reciprocal",
    "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh",
)
# fmt: on
_NUMBERS = ["abs", "neg", "sign", "relu"]
_ROUNDING = ["ceil", "floor", "round", "trunc"]
_QUESTIONS = ["isinf", "isnan", "isneginf", "isposinf", "signbit"]


def _values(w: Writer, out: TensorType, dtype: torch.dtype, *operands: Value) -> tuple[Any, ...]:
    return tuple(w.value(x, dtype, out) for x in operands)


def _pointwise(name: str, computed: Callable[[TensorType, Any], torch.dtype]) -> Emitter:
    """Emit nvFuser's op of this name on operands in the dtype that it is computed in."""

    def emit(w: Writer, out: TensorType, *operands: Value) -> Any:
        return getattr(w.ops, name)(*_values(w, out, computed(out, operands), *operands))

    return emit


def _arithmetic(out: TensorType, _: Any) -> torch.dtype:
    if out.dtype is torch.bool:
        raise Refused("on booleans it is no arithmetic")
    return computed_in(out.dtype)


def _of_floats(out: TensorType, operands: tuple[Operand]) -> torch.dtype:
    if not operands[0].dtype.is_floating_point:
        raise Refused("nvFuser asks that of floats only")
    return computed_in(operands[0].dtype)


def _comparison(out: TensorType, operands: tuple[Value, ...]) -> torch.dtype:
    dtype = promoted(operands)
    return torch.int32 if dtype is torch.bool else dtype


def _logical(out: TensorType, _: Any) -> torch.dtype:
    return torch.bool


def _bitwise(out: TensorType, _: Any) -> torch.dtype:
    return out.dtype


def _rounding(name: str) -> Emitter:
    def emit(w: Writer, out: TensorType, x: Operand) -> Any:
        if not out.dtype.is_floating_point:
            return w.ops.set(x.val)
        return getattr(w.ops, name)(w.value(x, computed_in(out.dtype)))

    return emit


EMITTERS.update({f"aten.{name}.default": _rounding(name) for name in _ROUNDING})
for _name in (*_FLOATS, *_NUMBERS):
    EMITTERS[f"aten.{_name}.default"] = _pointwise(_name, _arithmetic)
for _name in _QUESTIONS:
    EMITTERS[f"aten.{_name}.default"] = _pointwise(_name, _of_floats)
for _name in ("logical_not", "logical_and", "logical_or"):
    EMITTERS[f"aten.{_name}.default"] = _pointwise(_name, _logical)
EMITTERS["aten.bitwise_not.default"] = _pointwise("bitwise_not", _bitwise)


@emits("aten.clone.default", "aten.contiguous.default")
def _clone(w: Writer, out: TensorType, x: Operand, *, memory_format: Any = None) -> Any:
    return w.ops.set(x.val)  # layouts are settled where results leave the region


@emits("aten.alias.default", "aten.detach.default", "aten.lift_fresh_copy.default")
def _same(w: Writer, out: TensorType, x: Operand) -> Any:
    return x.val


@emits("aten._to_copy.default")
def _to_copy(w: Writer, out: TensorType, x: Operand, **options: Any) -> Any:
    if out.device != x.type.device:
        raise Refused("it moves a tensor to another device")
    return w.value(x, out.dtype)


@emits("prims.convert_element_type.default")
def _convert(w: Writer, out: TensorType, x: Operand, dtype: torch.dtype) -> Any:
    return w.value(x, dtype)


@emits("aten.copy.default")
def _copy(
    w: Writer, out: TensorType, x: Operand, source: Operand, non_blocking: bool = False
) -> Any:
    return w.value(source, out.dtype, out)


# ---- of two ----

EMITTERS["aten.logical_xor.default"] = _pointwise("ne", _logical)
for _name in ("atan2", "maximum", "minimum", "gcd", "nextafter"):
    EMITTERS[f"aten.{_name}.default"] = _pointwise(_name, _arithmetic)
for _computed, _names in (
    (_arithmetic, ("mul", "fmod", "remainder")),
    (_comparison, ("eq", "ne", "lt", "le", "gt", "ge")),
    (_bitwise, ("bitwise_and", "bitwise_or", "bitwise_xor")),
):
    for _name in _names:
        for _form in ("Tensor", "Scalar"):
            EMITTERS[f"aten.{_name}.{_form}"] = _pointwise(_name, _computed)


def _sum(name: str) -> Emitter:
    def emit(w: Writer, out: TensorType, a: Value, b: Value, *, alpha: Number = 1) -> Any:
        dtype = _arithmetic(out, (a, b))
        a, b = _values(w, out, dtype, a, b)
        if alpha == 1:
            return getattr(w.ops, name)(a, b)
        factor: Any = number(alpha, dtype)
        return getattr(w.ops, name)(
            a, b * factor if isinstance(b, Number) else w.ops.mul(b, factor)
        )

    return emit


for _name in ("add", "sub"):
    EMITTERS.update({f"aten.{_name}.{form}": _sum(_name) for form in ("Tensor", "Scalar")})


@emits("aten.div.Tensor", "aten.div.Scalar")
def _div(w: Writer, out: TensorType, a: Value, b: Value) -> Any:
    return w.ops.div(*_values(w, out, computed_in(out.dtype), a, b))


@emits("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def _div_mode(w: Writer, out: TensorType, a: Value, b: Value, *, rounding_mode: str | None) -> Any:
    if out.dtype.is_floating_point and rounding_mode == "floor":
        raise Refused("the floor of a quotient of floats is rounded otherwise")
    a, b = _values(w, out, computed_in(out.dtype), a, b)
    if not out.dtype.is_floating_point:
        return w.ops.div(w.ops.sub(a, w.ops.remainder(a, b)) if rounding_mode == "floor" else a, b)
    return w.ops.div(a, b) if rounding_mode is None else w.ops.trunc(w.ops.div(a, b))


@emits("aten.floor_divide.default")
def _floor_divide(w: Writer, out: TensorType, a: Value, b: Value) -> Any:
    return _div_mode(w, out, a, b, rounding_mode="floor")


@emits("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def _pow(w: Writer, out: TensorType, a: Value, b: Value) -> Any:
    x, exponent = _values(w, out, _arithmetic(out, (a, b)), a, b)
    match exponent:
        case int() | float() if exponent == 2:
            return w.ops.mul(x, x)
        case float() if exponent == 0.5:
            return w.ops.sqrt(x)
        case float() if exponent == -0.5:
            return w.ops.rsqrt(x)
        case int() if exponent < 0:
            raise Refused("an integer to a negative power")
        case torch.SymInt():
            raise Refused("an integer to a power that is a symbol")
        case _:
            return w.ops.pow(x, exponent)


# ---- of three, and choices ----


@emits("aten.where.self")
def _where(w: Writer, out: TensorType, condition: Operand, a: Operand, b: Operand) -> Any:
    a, b = _values(w, out, computed_in(out.dtype), a, b)
    return w.ops.where(w.value(condition, torch.bool, out), a, b)


@emits("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(w: Writer, out: TensorType, x: Operand, mask: Operand, value: Value) -> Any:
    x, value = _values(w, out, computed_in(out.dtype), x, value)
    return w.ops.where(w.value(mask, torch.bool, out), value, x)


@emits("aten.clamp.default", "aten.clamp.Tensor")
def _clamp(
    w: Writer, out: TensorType, x: Operand, low: Value | None = None, high: Value | None = None
) -> Any:
    """`clamp` of nvFuser is not said to keep NaN, `maximum` and `minimum` are."""
    if out.dtype is torch.bool or any(
        isinstance(bound, float) and math.isnan(bound) for bound in (low, high)
    ):
        raise Refused("bounds that are no numbers")
    dtype = computed_in(out.dtype)
    val = w.value(x, dtype, out)
    if low is not None:
        val = w.ops.maximum(val, w.value(low, dtype, out))
    return val if high is None else w.ops.minimum(val, w.value(high, dtype, out))


@emits("aten.clamp_min.default", "aten.clamp_min.Tensor")
def _clamp_min(w: Writer, out: TensorType, x: Operand, low: Value) -> Any:
    return _clamp(w, out, x, low)


@emits("aten.clamp_max.default", "aten.clamp_max.Tensor")
def _clamp_max(w: Writer, out: TensorType, x: Operand, high: Value) -> Any:
    return _clamp(w, out, x, None, high)
