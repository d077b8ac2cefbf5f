"""PyTorch's operator database as cases: an operator, a dtype and one sample of its arguments.

A case is what the sweep and the tests run. Samples are drawn with a fixed seed, so a case's name finds it again.
"""

from __future__ import annotations

import random
import unittest.mock
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch

with unittest.mock.patch("torch.backends.disable_global_flags"):  # for the whole process, when this is imported
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

DTYPES = (torch.float32, torch.float64, torch.complex64)
SEED = 1234
"""PyTorch's own seed of samples."""
KINDS = ("plain", "noncontiguous", "conjugated", "inplace")

OPS: dict[str, OpInfo] = {op.formatted_name: op for op in op_db}


def as_strided_scatter(
    x: torch.Tensor, src: torch.Tensor, size: Any, stride: Any, storage_offset: int = 0
) -> torch.Tensor:
    """`torch.as_strided_scatter` by indices into what the tensor holds, whose derivative autograd knows."""
    element = torch.full((x.untyped_storage().nbytes() // x.itemsize,), -1)  # of x, for each place in its memory
    element.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(torch.arange(x.numel()).view(x.shape))
    places = element.as_strided(size, stride, storage_offset).reshape(-1)
    held = places >= 0
    return x.reshape(-1).scatter(0, places[held], src.reshape(-1)[held]).reshape(x.shape)


RIGHT: dict[str, Any] = {"as_strided_scatter": as_strided_scatter}
"""Operators whose derivative in PyTorch fails `gradcheck`, as functions that pass it."""


@dataclass(frozen=True)
class Case:
    """One call of an operator: `function(*args, **kwargs)`."""

    name: str
    dtype: torch.dtype
    number: int
    kind: str
    sample: SampleInput

    @property
    def op(self) -> OpInfo:
        return OPS[self.name]

    def __str__(self) -> str:
        return f"{self.name}[{str(self.dtype).removeprefix('torch.')}-{self.number}-{self.kind}]"

    def function(self, *args: Any, **kwargs: Any) -> Any:
        """The operator, and then what makes its result unique (the absolute value of singular vectors, say)."""
        if self.kind == "inplace":
            inplace = self.op.inplace_variant
            result = inplace(args[0].clone(), *args[1:], **kwargs)
        else:
            result = self.op.op(*args, **kwargs)
        return self.sample.output_process_fn_grad(result)

    def oracle(self, *args: Any, **kwargs: Any) -> Any:
        """The same function for autograd to differentiate: composed otherwise where PyTorch's formula is wrong."""
        if self.name not in RIGHT:
            return self.function(*args, **kwargs)
        return self.sample.output_process_fn_grad(RIGHT[self.name](*args, **kwargs))

    @property
    def args(self) -> tuple[Any, ...]:
        return (self.sample.input, *self.sample.args)

    @property
    def kwargs(self) -> dict[str, Any]:
        return self.sample.kwargs


def seed(number: int = 0) -> None:
    """Seed every generator that samples and operators draw from."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def _samples(op: OpInfo, dtype: torch.dtype, requires_grad: bool, number: int, device: str) -> Iterator[SampleInput]:
    """What `op.sample_inputs` gives, which looks through the stack for each sample: two thirds of a sweep's time."""
    found = iter(op.sample_inputs_func(op, device, dtype, requires_grad))
    while True:
        if number == 0:
            seed(SEED)
        try:
            yield next(found)
        except StopIteration:
            return


def cases(
    name: str,
    dtype: torch.dtype,
    limit: int | None,
    *,
    requires_grad: bool = False,
    kinds: tuple[str, ...] = KINDS,
    number: int = 0,
    device: str = "cpu",
) -> Iterator[Case]:
    """The cases of an operator, spread evenly over its samples: `limit` plain ones, a third as many of each other kind.

    `number` other than 0 gives samples with other numbers in them.
    """
    op = OPS[name]
    seed(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(enumerate(_samples(op, dtype, requires_grad, number, device)))
        for number, sample in spread(samples, limit):
            yield Case(name, dtype, number, "plain", sample)
        for kind in kinds:
            if kind == "plain" or (kind == "conjugated" and not dtype.is_complex):
                continue
            if kind == "inplace" and op.inplace_variant is None:
                continue
            for number, sample in spread(samples, limit and -(-limit // 3)):
                variant = _variant(sample, kind)
                if variant is not None:
                    yield Case(name, dtype, number, kind, variant)


def spread(items: list[Any], limit: int | None) -> list[Any]:
    """At most `limit` of the items, evenly, the first and the last among them."""
    if limit is None or len(items) <= limit:
        return items
    if limit == 1:
        return items[:1]
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def _variant(sample: SampleInput, kind: str) -> SampleInput | None:
    match kind:
        case "noncontiguous":
            strided = all(
                t.layout is torch.strided for t in (sample.input, *sample.args) if isinstance(t, torch.Tensor)
            )
            return sample.noncontiguous() if strided else None
        case "conjugated":
            return sample.transform(_lazily_conjugated)
        case _:
            broadcasts = sample.broadcasts_input or not isinstance(sample.input, torch.Tensor)
            return None if broadcasts else sample


def _lazily_conjugated(value: Any) -> Any:
    """The same numbers behind a conjugate bit or, where they are real, a negative bit."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    if value.is_complex():
        return value.detach().conj().resolve_conj().conj().requires_grad_(value.requires_grad)
    return value
