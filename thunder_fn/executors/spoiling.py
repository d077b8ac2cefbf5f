"""A mode in which memory that is read before it is written, or written outside of its bounds,
shows.

    THUNDER_FN_CHECK=1 python -m pytest tests/executors

In it, programs and compiled code that are made

- fill what they allocate with NaN, or with a number that is no likely result, before they use it;
- lay canaries around what compiled code allocates, and look at them after each call;
- fill what a program or a region was given, and did not return, once it is done;
- run three times on equal inputs, and must repeat, where they have no side effects. A first run may
  be on other code than those behind it, so that its last digits may differ;
- look at the layouts of what each compiled region gets and gives.

Tests run in it every night. It is read when code is made, so the mode costs nothing where it is
off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.generators import generators_of, random_state
from thunder_fn.errors import VerificationError
from thunder_fn.ir import ops
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.trace import Trace

Run = Callable[..., tuple[Any, ...]]

SWITCH = "THUNDER_FN_CHECK"
MAGIC = 0x5A
"""The bytes of integers that nobody wrote, and of canaries."""
_GUARD = 64
"""Elements before and behind a buffer that nobody may write to."""
_BUFFERS: ContextVar[list[torch.Tensor] | None] = ContextVar("thunder_fn_buffers", default=None)
"""The whole of each buffer that the running region has allocated."""


def is_on() -> bool:
    """Test whether the mode is on for code made from now on."""
    return os.environ.get(SWITCH) == "1"


def spoil(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with NaN, or with a number that is no likely result."""
    with torch.no_grad():
        if internals.is_inexact(tensor):
            return tensor.fill_(float("nan"))
        return tensor.fill_(True if tensor.dtype is torch.bool else MAGIC)


# ---- compiled code ----


def guarded(
    run: Run, places: Collection[int], strides: Sequence[Any], results: Sequence[Any]
) -> Run:
    """A compiled function whose allocations are spoiled and guarded.

    Args:
        run: the function `region` of its own module; what allocates in that is replaced.
        places: the inputs that it is given to write to.
        strides: of the inputs that are tensors of known layout, None elsewhere.
        results: strides of the outputs, in the same way; empty where they are not known.
    """
    context = run.__globals__
    context["torch"] = _Torch()
    for name in ("empty_strided_cpu", "empty_strided_cpu_pinned"):
        if name in context:
            context[name] = fresh

    def checked(*inputs: Any) -> tuple[Any, ...]:
        _check_layouts("is given", inputs[: len(strides)], strides)
        buffers = list[torch.Tensor]()
        with setting(_BUFFERS, buffers):
            outputs = run(*inputs)
        for whole in buffers:
            _check_canaries(whole)
        if outputs is not None:
            spoil_given([inputs[place] for place in places], outputs)
            _check_layouts("gives", outputs, results or (None,) * len(outputs))
        return outputs

    return checked


def fresh(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of nothing, with canaries around it."""
    size = internals.extent(shape, strides)
    whole = torch.full(((size + 2 * _GUARD) * dtype.itemsize,), MAGIC, dtype=torch.uint8).view(
        dtype
    )
    buffers = _BUFFERS.get()
    if buffers is not None:
        buffers.append(whole)
    return spoil(whole[_GUARD : _GUARD + size]).as_strided(tuple(shape), tuple(strides))


class _Torch:
    """The module `torch` as compiled code sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: Any, *, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        """Spoiled and guarded."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return fresh(shape, torch.empty(shape, device="meta").stride(), dtype)

    def empty_strided(
        self, shape: Any, strides: Any, *, dtype: torch.dtype, device: Any = "cpu"
    ) -> torch.Tensor:
        """Spoiled and guarded."""
        return fresh(shape, strides, dtype)


def _check_canaries(whole: torch.Tensor) -> None:
    data = whole.view(torch.uint8)
    margin = _GUARD * whole.itemsize
    if not bool((data[:margin] == MAGIC).all() and (data[-margin:] == MAGIC).all()):
        raise VerificationError(
            f"{SWITCH}: a compiled region wrote outside of a buffer of {whole.dtype}"
        )


def _check_layouts(what: str, values: Sequence[Any], layouts: Sequence[Any]) -> None:
    for place, (value, layout) in enumerate(zip(values, layouts, strict=True)):
        if layout is None or not isinstance(value, torch.Tensor) or value.numel() < 2:
            continue
        if any(
            size > 1 and a != b
            for size, a, b in zip(value.shape, value.stride(), layout, strict=True)
        ):
            raise VerificationError(
                f"{SWITCH}: a compiled region {what} a tensor with strides {value.stride()} at"
                f" place {place}, where {tuple(layout)} was meant"
            )


# ---- programs ----


def spoil_given(given: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Fill given memory that is not that of an output."""
    places = {
        value.untyped_storage().data_ptr() for value in outputs if isinstance(value, torch.Tensor)
    }
    for value in given:
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in places:
            spoil(value.detach())


def repeated(run: Run, trace: Trace, donated: Sequence[int]) -> Run:
    """A program that must give the same three times, and whose donated inputs are filled when it
    is done.
    """
    if has_effects(trace):
        return run

    def thrice(*inputs: Any) -> tuple[Any, ...]:
        if any(isinstance(value, torch.Tensor) and not _is_plain(value) for value in inputs):
            return run(*inputs)
        restore = random_state(generators_of(trace))
        others = list[list[Any]]()
        for _ in range(2):
            outputs = run(*map(_copy, inputs))
            others.append([_bits(value) for value in outputs])
            restore()
        outputs = run(*inputs)
        own = [_bits(value) for value in outputs]
        for place, (third, first, second) in enumerate(zip(own, *others, strict=True)):
            if not _is_same(third, second) or not _is_near(third, first):
                raise VerificationError(
                    f"{SWITCH}: output {place} of the program {trace.name} changes from run to run"
                )
        spoil_given([inputs[place] for place in donated], outputs)
        return outputs

    return thrice


def has_effects(trace: Trace) -> bool:
    """Test whether something in the trace does more than compute its results, or may."""
    return any(
        ops.is_effectful(equation.op)
        or ops.is_collective(equation.op)
        or (equation.op.kind == "leaf" and not equation.op.name.startswith(("aten.", "prims.")))
        or "::" in equation.op.name
        or any(map(has_effects, equation.bodies))
        for equation in trace.equations
    )


def _is_plain(value: torch.Tensor) -> bool:
    return (
        type(value) is torch.Tensor
        and not value.requires_grad
        and value.device.type == "cpu"
        and _has_data(value)
    )


def _has_data(value: torch.Tensor) -> bool:
    try:
        return value.layout == torch.strided and value.untyped_storage().data_ptr() >= 0
    except (RuntimeError, NotImplementedError):
        return False


def _copy(value: Any) -> Any:
    """A tensor that lies alike in memory of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage().clone()
    return torch.empty(0, dtype=value.dtype).set_(
        storage, value.storage_offset(), value.shape, value.stride()
    )


def _bits(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_near(one: Any, other: Any) -> bool:
    """Test whether one code may compute what the other does."""
    if not isinstance(one, torch.Tensor) or not internals.is_inexact(one):
        return True
    return torch.allclose(one, other, rtol=0.1, atol=0.1 * _largest(other), equal_nan=True)


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other or bool(one == other or one != one)
    return one.shape == other.shape and bool(
        ((one == other) | ((one != one) & (other != other))).all()
    )


def _largest(value: torch.Tensor) -> float:
    found = value[value.abs() < float("inf")].abs()
    return float(found.max()) if found.numel() else 0.0
