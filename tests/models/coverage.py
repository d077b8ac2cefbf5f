"""`python -m tests.models.coverage`: which architectures of transformers train, out of all that can be built small.

Each architecture's configuration is made as small as its parameters allow, with random weights. Those on which eager
PyTorch itself runs a training step with generic inputs count; an architecture trains if the jitted model's loss and all
gradients are those of eager PyTorch: in float64 where float32 is chaotic. Not part of the test suite: it takes an hour.

`coverage.md` beside this file is what `--out records.jsonl --table tests/models/coverage.md` has written.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib
import importlib.metadata
import json
import logging
import multiprocessing
import queue as queue_module
import random
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.models.tiny import build, gradients


def train(name: str, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """One architecture: whether it was built, whether it trains, and how far it is off. Tells when it is built."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    try:
        made = build(name)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        made = f"transformers cannot say which models there are: {type(error).__name__}: {error}"[:200]
    if isinstance(made, str):
        return {"name": name, "built": False, "why": made}
    model, inputs = made
    found: dict[str, Any] = {"name": name, "built": True, "model": type(model).__name__, "trains": False}
    tell(found)
    exact = copy.deepcopy(model).double()
    found = compared(found, model, inputs, 1e-3)
    if not found["trains"] and "error" in found:
        wide = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
        again = compared({**found, "in": "float64"}, exact, wide, 1e-6)
        found = again if again["trains"] else found
    return found


def compared(found: dict[str, Any], model: Any, inputs: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """The record with how far loss, gradients and buffers are off after a step."""
    import thunder_fn as tfn

    found = {key: value for key, value in found.items() if key != "why"}
    reference = copy.deepcopy(model)
    start = time.perf_counter()
    try:
        loss, mine = gradients(tfn.compile(model, "auto", executors="torch"), inputs)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return {**found, "why": f"{type(error).__name__}: {error}"[:600]}
    found["seconds"] = round(time.perf_counter() - start, 2)
    expected, its = gradients(reference, inputs)
    if (missing := [key for key, grad in its.items() if (grad is None) != (mine[key] is None)]) != []:
        return {**found, "why": f"{missing[0]} has {'a' if mine[missing[0]] is not None else 'no'} gradient"}
    errors = {
        "loss": float((loss - expected).abs()) / max(float(expected.abs()), 1e-6),
        **_errors(mine, its),
        **_errors(dict(model.named_buffers()), dict(reference.named_buffers())),
    }
    where = max(errors, key=lambda key: float("inf") if errors[key] != errors[key] else errors[key])
    found.update(error=errors[where], trains=bool(errors[where] < tolerance))
    return found if found["trains"] else {**found, "why": f"{where} is off by {errors[where]:.1e}"}


def _errors(mine: dict[str, Any], its: dict[str, Any]) -> dict[str, float]:
    """The distance of tensors, as parts of the largest number among them."""
    floating = {key: it for key, it in its.items() if it is not None and it.numel() and it.is_floating_point()}
    scale = max((float(it.abs().max()) for it in floating.values()), default=0.0)
    return {key: float((mine[key] - it).abs().max()) / max(scale, 1e-12) for key, it in floating.items()}


def _worker(name: str, queue: Any) -> None:
    queue.put(train(name, queue.put))


def guarded(name: str, seconds: float) -> dict[str, Any]:
    """One architecture in a process of its own, for so many seconds."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_worker, args=(name, queue))
    process.start()
    found: dict[str, Any] = {"name": name, "built": False}
    try:
        found = queue.get(timeout=seconds)
        return queue.get(timeout=seconds) if found.get("trains") is False and "why" not in found else found
    except queue_module.Empty:
        return {**found, "why": f"not done after {seconds:.0f} seconds"}
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Run over all architectures, or over those that are named, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, help="a file with one JSON object per architecture, added to")
    parser.add_argument("--seconds", type=float, default=120.0, help="for each architecture")
    parser.add_argument("--table", type=Path, help="a file for the table")
    options = parser.parse_args()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    importlib.import_module("thunder_fn")  # once, before processes are forked
    done = (
        [json.loads(line) for line in options.out.read_text().splitlines()]
        if options.out and options.out.exists()
        else []
    )
    known = {entry["name"] for entry in done}
    names = options.names or sorted(CONFIG_MAPPING.keys())
    random.Random(0).shuffle(names)  # so that a run that is cut short is a sample
    for name in names:
        if name in known:
            continue
        entry = guarded(name, options.seconds)
        done.append(entry)
        print(json.dumps(entry), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(entry) + "\n")
    text = table(done)
    print(f"\n{text}")
    if options.table:
        options.table.write_text(text)


AS_COMPILED = (
    "transformers computes something else when it is told that it is compiled; eager PyTorch that is told so, too"
)
CHAOTIC = "float32 is chaotic: eager's own gradients are farther from float64's than ours are from eager's"
REASONS = {
    **dict.fromkeys(("paligemma", "colpali", "phi4_multimodal_vision"), AS_COMPILED),
    "d_fine": CHAOTIC,
}
"""Findings about those that do not train."""


def table(done: list[dict[str, Any]]) -> str:
    """Report the findings: the share that trains, a reason for each of the rest, and why others were not built."""
    built = sorted((entry for entry in done if entry["built"]), key=lambda entry: entry["name"])
    trains = [entry for entry in built if entry["trains"]]
    versions = f"transformers {importlib.metadata.version('transformers')}, torch {torch.__version__}"
    lines = [
        "# Architectures of transformers that train\n",
        f"`python -m tests.models.coverage`, {datetime.date.today()}, {versions}.\n",
        f"{len(trains)} of {len(built)} architectures train ({100 * len(trains) / max(len(built), 1):.1f} %);",
        f"{len(done) - len(built)} of {len(done)} could not be built small with generic inputs.\n",
        "## Those that do not train\n",
        *(f"- {entry['name']}: {REASONS.get(entry['name'], _line(entry))}" for entry in built if not entry["trains"]),
        "\n## Those that train\n",
        textwrap.fill(", ".join(entry["name"] for entry in trains), 120),
        "\n## Those that were not built\n",
        *(f"- {entry['name']}: {_line(entry)}" for entry in sorted(done, key=_name) if not entry["built"]),
    ]
    return "\n".join(lines) + "\n"


def _name(entry: dict[str, Any]) -> str:
    return entry["name"]


def _line(entry: dict[str, Any]) -> str:
    """Give the reason in one line."""
    return " ".join(entry.get("why", "").split())[:200]


if __name__ == "__main__":
    main()
