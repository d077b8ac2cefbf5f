"""Record the calls of `thunder_fn/testing/samples.json`: `python -m tests.ops.recorded` (a minute of one core)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_fn.ir.trace import short_dtype
from thunder_fn.testing.samples import DTYPES, FILE, OWNED, samples, tensor_of
from thunder_fn.testing.schemas import calls_of_samples, is_callable

MOST_CALLS = 4
"""The number of calls of an op that are kept at most."""

MOST_ELEMENTS = 300
"""The number of elements of a tensor of a call at most."""

UNFIT = ("empty", "sparse", "strided", "lift_fresh")
"""Parts of names of ops whose results are no values, or no dense tensors."""


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
    found: dict[str, list[Any]] = {}

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    found = {name: chosen(calls) for name, calls in sorted(recorded().items()) if is_callable(name, any_arguments=True)}
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
