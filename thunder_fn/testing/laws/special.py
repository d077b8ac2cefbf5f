"""NaN and infinite numbers: a transform that is right for other numbers alone changes values.

`max(x, y)` as `where(x > y, x, y)` loses NaN, and `not x < y` is no `x >= y`. So a trace that
changes is run on such numbers, too. Where PyTorch says nothing of them nobody asks: in complex
arithmetic, and for integers that are made from floats.

Source: IEEE 754-2019, 6.1 and 6.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from thunder_fn.ir.trace import Equation, TensorType, Trace, every_equation
from thunder_fn.structured.shared.while_parts import WHILE
from thunder_fn.testing.laws.comparing import (
    TOO_LARGE,
    Inputs,
    LawBroken,
    Values,
    is_inexact,
    run,
    tolerance,
)

NAN, INF = float("nan"), float("inf")
ENDS = ((INF, NAN), (NAN, -INF))
"""The first and the last element of an input, those of the next one, and so on in turn."""


def keeps_special_values(trace: Trace, new: Trace, inputs: Inputs) -> None:
    """Check that a trace gives what another one gave, where inputs are not finite.

    Raises:
        LawBroken: it does not; `inputs` has the inputs.
    """
    if not _is_told(trace):
        return
    for spoilt in spoilt_inputs(inputs):
        try:
            want = run(trace, spoilt)
        except Exception:  # noqa: BLE001 - some ops refuse them
            continue
        if any(map(_is_large, want)):  # what is left of large numbers has few digits
            return
        _agree(run(new, spoilt), want, tolerance(trace), spoilt, new)


def spoilt_inputs(inputs: Inputs) -> Iterator[Inputs]:
    """The inputs with other numbers at the ends: of all floating ones, and of each of the first
    two alone.
    """
    floating = [place for place, x in enumerate(inputs) if _has_floats(x)]
    chosen = [floating, *([place] for place in floating[:2])]
    for turn, places in enumerate(chosen if len(floating) > 1 else (floating, floating)):
        if places:
            yield tuple(
                _spoilt(x, *ENDS[(place + turn) % 2]) if place in places else x
                for place, x in enumerate(inputs)
            )


def _has_floats(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() > 0


def _spoilt(x: torch.Tensor, first: float, last: float) -> torch.Tensor:
    flat = x.detach().clone(memory_format=torch.contiguous_format).view(-1)
    flat[-1], flat[0] = last, first
    return flat.view(x.shape)


def _is_told(trace: Trace) -> bool:
    return not any(map(_is_untold, every_equation(trace))) and not any(
        isinstance(type, TensorType) and type.dtype.is_complex for type in trace.input_types
    )


def _is_untold(equation: Equation) -> bool:
    """Test for complex numbers, integers made from floats, and loops that such numbers prolong."""
    given, made = (
        [type.dtype for type in types if isinstance(type, TensorType)]
        for types in (equation.operand_types, equation.output_types)
    )
    is_whole = any(not d.is_floating_point and d != torch.bool for d in made)
    if equation.op == WHILE or any(dtype.is_complex for dtype in made):
        return True
    return equation.op.kind == "leaf" and is_whole and any(d.is_floating_point for d in given)


def _is_large(x: Any) -> bool:
    """Test for finite numbers that are not of moderate size."""
    return _has_floats(x) and bool((x.isfinite() & (x.abs() >= TOO_LARGE)).any())


def _agree(have: Values, want: Values, rtol: float, inputs: Inputs, new: Trace) -> None:
    for place, (a, b) in enumerate(zip(have, want, strict=True)):
        if isinstance(b, torch.Tensor) and not _is_alike(a, b, rtol):
            raise _differs(place, a, b, inputs, new)


def _is_alike(a: torch.Tensor, b: torch.Tensor, rtol: float) -> bool:
    """Test for the same numbers where they are infinite or of moderate size. A mean of infinite
    ones is infinite or NaN, whichever way it is computed: these two count as alike.
    """
    if not is_inexact(b):
        return torch.equal(a, b)
    both = a.isinf() & b.isinf()
    if not torch.equal(a.isfinite(), b.isfinite()) or not torch.equal(a[both], b[both]):
        return False
    moderate = b.abs() < TOO_LARGE
    a, b = a[moderate], b[moderate]
    return torch.allclose(a, b, rtol=rtol, atol=rtol * max([1.0, *b.abs().tolist()]))


def _differs(
    place: int, have: torch.Tensor, want: torch.Tensor, inputs: Sequence[Any], new: Trace
) -> LawBroken:
    given = ", ".join(str(x.tolist() if isinstance(x, torch.Tensor) else x) for x in inputs)
    what = f"the transformed trace: of {given}, value {place} is\n{have}\nbut should be\n{want}"
    return LawBroken(what, made=new).on(inputs)
