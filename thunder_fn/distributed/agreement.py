"""Ranks that share parameters begin with the same ones: the parameters of each are compared,
through the store, before they are cut.

Otherwise a matrix would be put together of rows from different matrices, or replicas would never be
equal, without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.distributed.groups import SIMULATED, Group
from thunder_fn.distributed.heartbeat import other_than, text_on_ranks
from thunder_fn.errors import DistributedError, located
from thunder_fn.ir.ops import is_random
from thunder_fn.ir.trace import Trace

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 2**20
GENERATOR = "the state of torch's generator"


def check_same(steps: Sequence[Any], given: Mapping[str, torch.Tensor], prepare: Trace) -> None:
    """Check that all ranks of the steps' groups prepare the same parameters by the same steps.

    Args:
        steps: whose groups are asked.
        given: what is prepared. Values without data, on the meta device or in a trace, are not
            compared.
        prepare: what is computed of them; where it draws random numbers, all ranks draw the same.

    Raises:
        DistributedError: they do not, says the rank that comes later; names the first parameter
            that differs.
    """
    groups = [group for step in steps if isinstance(group := getattr(step, "group", None), Group)]
    groups = [group for group in groups if group.size > 1 and not group.name.startswith(SIMULATED)]
    if not groups or not all(
        internals.is_plain(x) and not internals.is_functorch_wrapped(x) for x in given.values()
    ):
        return
    lines = [
        ", then ".join(map(_step_text, steps)),
        *(f"{name}: {_digest(value)}" for name, value in given.items()),
    ]
    if any(is_random(equation.op) for equation in prepare.equations):
        lines += _generators(given.values())
    for group in groups:
        other = other_than(group.name, "\n".join(lines))
        if other is not None:
            raise DistributedError(_difference(other[0], other[1].split("\n"), lines))


def _generators(given: Iterable[torch.Tensor]) -> list[str]:
    """The states of the generators that may be drawn from: the CPU's, and those of the devices of
    what is given.
    """
    lines = [f"{GENERATOR}: {_bits(torch.get_rng_state())}"]
    for device in sorted({x.device for x in given if not x.is_meta and not x.is_cpu}, key=str):
        state = torch.get_device_module(device).get_rng_state(device)
        lines.append(f"{GENERATOR} for {device.type}: {_bits(state)}")
    return lines


def _difference(rank: int, theirs: list[str], mine: list[str]) -> str:
    pairs = [(a, b) for a, b in zip(theirs, mine, strict=False) if a != b] or [("", "")]
    their_line, line = pairs[0]
    name, _, _ = line.partition(": ")
    if line == mine[0]:
        what = f"rank {rank} prepares parameters by {their_line}, this rank by {line}"
        fix = "All ranks call the same transforms with the same options, in the same order."
    elif len(theirs) != len(mine) or their_line.rpartition(" ")[0] != line.rpartition(" ")[0]:
        what = (
            f"rank {rank} has other parameters: {their_line or len(theirs)} where this rank has"
            f" {line or len(mine)}"
        )
        fix = "All ranks make the same model."
    else:
        what = f"{name} is not the same on rank {rank} and on this rank"
        fix = (
            "Call `torch.manual_seed(0)` on all ranks before the model is made and rewritten, or"
            " load the same checkpoint."
        )
    return located(what, fix=fix)


def _step_text(step: Any) -> str:
    """A step and its options, those that are written alike in all processes."""
    named = ((item.name, getattr(step, item.name)) for item in fields(step) if item.repr)
    shown = (
        (name, getattr(value, "name", value))
        for name, value in named
        if not isinstance(value, Group)
    )
    plain = (
        f"{name}={value}"
        for name, value in shown
        if isinstance(value, str | int | float | torch.dtype | None)
    )
    return f"{type(step).__name__.lower()}({', '.join(plain)})"


def _digest(value: torch.Tensor) -> str:
    """The type, and a number that tensors of other bits hardly have."""
    return f"{text_on_ranks(value)} {0 if value.is_meta else _bits(value)}"


def _bits(value: torch.Tensor) -> int:
    flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    chunks = flat.view(BITS[flat.dtype.itemsize]).split(CHUNK)
    return int(_by_place(torch.stack([_by_place(chunk) for chunk in chunks])))


def _by_place(numbers: torch.Tensor) -> torch.Tensor:
    """The sum of numbers, each times the cube of an odd one of its own: the same numbers in
    another order have another.
    """
    odd = 2 * torch.arange(numbers.numel(), device=numbers.device) + 1
    return (numbers * (odd * odd * odd)).sum()
