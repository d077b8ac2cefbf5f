"""Calls of PyTorch's ops with arguments that fit together, from PyTorch's own samples (op_db).

A schema does not say that a convolution's input and weight have as many channels, or that an index
is below a size. So for each op some recorded calls are kept in `samples.json`, chosen so that each
argument has other values than its default. `python -m tests.ops.recorded` writes the file.

    Call   ::= [[Value, ...], {name: Value, ...}]
    Value  ::= {"t": "f64", "n": [2, 3]}           a tensor that a program takes
             | {"t": "i64", "v": [[0, 1]]}         one that it owns: indices, masks
             | {"d": "float64"} | {"device": "cpu"} | a list of values | a literal

Source: op_db, the samples with which PyTorch tests its own ops.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from thunder_fn.ir.trace import TensorType, short_dtype

FILE = Path(__file__).parent / "samples.json"
OWNED = (torch.int64, torch.bool)
"""Dtypes of tensors whose values have to fit: a program owns them."""

DTYPES = {
    short_dtype(dtype): dtype
    for dtype in (*OWNED, torch.float64, torch.float32, torch.complex128, torch.uint8, torch.int32)
}


@cache
def samples() -> Mapping[str, Sequence[Any]]:
    """The recorded calls by the name of the overload."""
    found: dict[str, Sequence[Any]] = json.loads(FILE.read_text())
    return found


def tensor_of(value: Any) -> TensorType | torch.Tensor | None:
    """The type of a tensor that a program takes, or the tensor that it owns, or None."""
    if not isinstance(value, dict) or "t" not in value:
        return None
    dtype = DTYPES[value["t"]]
    if "v" in value:
        return torch.tensor(value["v"], dtype=dtype)
    return TensorType(dtype, tuple(value["n"]))


def types_of(call: Any) -> tuple[TensorType, ...]:
    """The types of the tensors that a program with this call takes."""
    args, kwargs = call
    found = map(tensor_of, _leaves([args, *kwargs.values()]))
    return tuple(value for value in found if isinstance(value, TensorType))


def literal_of(value: Any) -> Any:
    """The value of an argument that is no tensor."""
    if isinstance(value, dict):
        return getattr(torch, value["d"]) if "d" in value else torch.device(value["device"])
    return value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
