"""A run of a program as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Three tracks: how the program was made, step by step; what runs, modules around their equations; the
bytes that live.

Source: the Trace Event Format of the Chromium project.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from thunder_fn.capture import pytree
from thunder_fn.derived.leaf_vjp import alone
from thunder_fn.errors import spelled
from thunder_fn.inspect.chains import Chain, chain
from thunder_fn.inspect.costs import cost_of
from thunder_fn.inspect.flat import Leaf
from thunder_fn.interpreters.evaluate import evaluate

MAKING, RUNNING = 1, 2


@spelled()
def chrome_trace(path: str | Path, f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Path:
    """Write how `f(*args, **kwargs)` is made and run, as Perfetto opens it.

    The captured trace is run twice, equation by equation, without gradients; the second run is
    timed. Composites are slices around their equations, and a counter has the bytes of the results
    that live.

    Law: each equation of the unfolded trace is one slice, in the order of the trace.

    Returns:
        The path.

    Errors as in `chain`.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = chrome_trace(f"{folder}/trace.json", torch.sin, torch.ones(2))
        ...     "aten.sin.default" in path.read_text()
        True
    """
    found = chain(f, *args, **kwargs)
    tensors = pytree.tensors_in((args, kwargs))
    if isinstance(f, torch.nn.Module) and len(tensors) < len(found.trace.inputs):
        known = {**dict(f.named_parameters()), **dict(f.named_buffers())}
        tensors += [known[name] for name in found.arguments[len(tensors) :]]
    events = [*_names(found), *_making(found), *_running(found, tensors)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return Path(path)


def _names(found: Chain) -> Iterator[dict[str, Any]]:
    for process, name in ((MAKING, f"making {found.name}"), (RUNNING, f"running {found.name}")):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 1, "args": {"name": name}}


def _slice(name: str, start: float, seconds: float, process: int, **args: Any) -> dict[str, Any]:
    event = {
        "ph": "X",
        "name": name,
        "ts": start * 1e6,
        "dur": seconds * 1e6,
        "pid": process,
        "tid": 1,
    }
    return {**event, "cat": "thunder_fn", "args": args}


def _making(found: Chain) -> Iterator[dict[str, Any]]:
    at = 0.0
    for step in found.steps:
        yield _slice(step.name, at, step.seconds, MAKING, equations=len(step.flat.leaves))
        at += step.seconds


def _running(found: Chain, tensors: Sequence[Any]) -> Iterator[dict[str, Any]]:
    step = next((one for one in found.steps if one.trace is found.trace), None)
    flat = step.flat if step is not None else found.programs[0].flat
    values: dict[int, Any] = dict(zip(flat.roots, tensors, strict=False))
    values.update(flat.constants)
    last = {
        value: position
        for position, leaf in enumerate(flat.leaves)
        for value in leaf.operands
        if isinstance(value, int)
    }
    last |= {value: len(flat.leaves) for value in flat.outputs if isinstance(value, int)}
    with torch.no_grad():
        _timed(flat.leaves, dict(values), last)
        times, live = _timed(flat.leaves, dict(values), last)
    yield from _frames(flat.leaves, times)
    for (start, seconds), count in zip(times, live, strict=True):
        yield {
            "ph": "C",
            "name": "live bytes",
            "ts": (start + seconds) * 1e6,
            "pid": RUNNING,
            "args": {"bytes": count},
        }


def _timed(
    leaves: Sequence[Leaf], values: dict[int, Any], last: dict[int, int]
) -> tuple[list[tuple[float, float]], list[int]]:
    """The start and duration of each equation in seconds, and the bytes that lived then."""
    times, live = list[tuple[float, float]](), list[int]()
    held = set(values)
    total, now = 0, 0.0
    for position, leaf in enumerate(leaves):
        operands = [values[one] if isinstance(one, int) else one.value for one in leaf.operands]
        single = alone(leaf.equation)
        start = time.perf_counter()
        results = evaluate(single, operands)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        times.append((now, seconds))
        now += seconds
        values.update(zip(leaf.outputs, results, strict=True))
        total += sum(_bytes(value) for value in results)
        live.append(total)
        for value in {
            *leaf.outputs,
            *(one for one in leaf.operands if isinstance(one, int)),
        } - held:
            if last.get(value, position) == position and value in values:
                total -= _bytes(values.pop(value))
    return times, live


def _bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def _frames(
    leaves: Sequence[Leaf], times: Sequence[tuple[float, float]]
) -> Iterator[dict[str, Any]]:
    """A slice for each equation, and one for each composite around those that follow each other
    in it.
    """
    open_frames: list[tuple[int, str, float, str]] = []
    end = 0.0
    for leaf, (start, seconds) in zip(leaves, times, strict=True):
        depth = 0
        while (
            depth < min(len(open_frames), len(leaf.within))
            and open_frames[depth][0] == leaf.path[depth]
        ):
            depth += 1
        yield from _closed(open_frames[depth:], end)
        del open_frames[depth:]
        for position, op in zip(leaf.path[depth:-1], leaf.within[depth:], strict=True):
            open_frames.append((position, op.name, start, leaf.module))
        cost = cost_of(leaf.equation)
        types = ", ".join(str(var.type) for var in leaf.equation.outputs)
        more = {
            "types": types,
            "module": leaf.module,
            "line": str(leaf.source or ""),
            "flops": cost.flops,
        }
        yield _slice(leaf.equation.op.name, start, seconds, RUNNING, **more, bytes=cost.num_bytes)
        end = start + seconds
    yield from _closed(open_frames, end)


def _closed(frames: Sequence[tuple[int, str, float, str]], end: float) -> Iterator[dict[str, Any]]:
    for _, name, start, module in reversed(frames):
        yield _slice(name, start, end - start, RUNNING, module=module)
