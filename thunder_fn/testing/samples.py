"""Calls of PyTorch's ops with arguments that fit together, from PyTorch's own samples (op_db).

A schema does not say that a convolution's input and weight have as many channels, or that an index
is below a size. So for each op some recorded calls are kept in `samples.json`, chosen so that each
argument has other values than its default. `python -m thunder_fn.testing.samples` writes the file.

    Call   ::= [[Value, ...], {name: Value, ...}]
    Value  ::= {"t": "f64", "n": [2, 3]}           a tensor that a program takes
             | {"t": "i64", "v": [[0, 1]]}         one that it owns: indices, masks
             | {"d": "float64"} | {"device": "cpu"} | a list of values | a literal

Source: `torch.testing._internal.common_methods_invocations`, whose samples PyTorch tests its own
ops with.
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
MOST_CALLS = 4
"""The number of calls of an op that are kept at most."""

MOST_ELEMENTS = 300
"""The number of elements of a tensor of a call at most."""

UNFIT = ("empty", "sparse", "strided", "lift_fresh")
"""Parts of names of ops whose results are no values, or no dense tensors."""

OWNED = (torch.int64, torch.bool)
"""Dtypes of tensors whose values have to fit: a program owns them."""

DTYPES = {
    short_dtype(dtype): dtype
    for dtype in (*OWNED, torch.float64, torch.float32, torch.complex128, torch.uint8, torch.int32)
}


@cache
def samples() -> Mapping[str, Sequence[Any]]:
    """The recorded calls by the name of the overload."""
    found: dict[str, Sequence[Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
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


# ---- recording ----


def written(value: Any) -> Any:
    """A value of a call as data, or TypeError."""
    if isinstance(value, torch.Tensor):
        name = short_dtype(value.dtype)
        if not 0 < value.numel() <= MOST_ELEMENTS or name not in DTYPES:
            raise TypeError  # in an empty tensor no difference would show
        own = {"v": value.tolist()} if value.dtype in OWNED else {"n": list(value.shape)}
        return {"t": name, **own}
    if isinstance(value, torch.dtype):
        return {"d": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "cpu"}
    if isinstance(value, (list, tuple)):
        return list(map(written, value))
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError


def recorded(most_samples: int = 60) -> dict[str, list[Any]]:
    """Every call that the samples of op_db make, as data."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.utils._python_dispatch import TorchDispatchMode

    found: dict[str, list[Any]] = {}

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            try:
                call = [list(map(written, args)), {k: written(v) for k, v in kwargs.items()}]
            except TypeError:
                return func(*args, **kwargs)
            calls = found.setdefault(str(func), [])
            if call not in calls[-50:] and not any(word in str(func) for word in UNFIT):
                calls.append(call)
            return func(*args, **kwargs)

    for op in op_db:
        dtype = torch.float64 if torch.float64 in op.dtypes else torch.float32
        try:
            for sample, _ in zip(op.sample_inputs("cpu", dtype), range(most_samples), strict=False):
                with Recording():
                    op(sample.input, *sample.args, **sample.kwargs)
        except Exception:  # noqa: BLE001 - a sample that this machine has no library for
            continue
    return found


def chosen(calls: Sequence[Any], most: int = 2 * MOST_CALLS) -> list[Any]:
    """The few calls that show most values of arguments, small ones first."""
    kept, seen = list[Any](), set[str]()
    left = sorted(calls, key=lambda call: len(json.dumps(call)))
    while left and len(kept) < most:
        best = max(left, key=lambda call: (len(_features(call) - seen), -left.index(call)))
        if not _features(best) - seen:
            break
        left.remove(best)
        kept.append(best)
        seen |= _features(best)
    return kept


def _features(call: Any) -> set[str]:
    args, kwargs = call
    named = [*enumerate(args), *kwargs.items()]
    return {f"{key}={_feature(value)}" for key, value in named}


def _feature(value: Any) -> str:
    if isinstance(value, dict) and "t" in value:
        tensor = tensor_of(value)
        assert tensor is not None
        return f"{value['t']} of rank {len(tensor.shape)}"
    return str([_feature(item) for item in value] if isinstance(value, list) else value)[:60]


def write() -> None:
    """Record the samples of op_db, and keep some that can be drawn."""
    from thunder_fn.testing.schemas import calls_of_samples, is_callable

    found = {
        name: chosen(calls)
        for name, calls in sorted(recorded().items())
        if is_callable(name, any_arguments=True)
    }
    _write(found)
    _write(
        {
            name: [calls[place] for place in fitting[:MOST_CALLS]]
            for name, calls in found.items()
            if is_callable(name) and (fitting := [place for place, _ in calls_of_samples(name)])
        }
    )


def _write(found: Mapping[str, Sequence[Any]]) -> None:
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(calls)}" for name, calls in found.items())
    FILE.write_text("{\n" + lines + "\n}\n")
    samples.cache_clear()


if __name__ == "__main__":
    write()
