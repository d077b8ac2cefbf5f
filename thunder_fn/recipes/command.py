"""`python -m thunder_fn compile MODEL`: the report of a recipe on a model, with its ops, claims,
memory and time.

MODEL is a folder or JSON file with a configuration of transformers, for which a model with random
weights is made. Or it is FILE:FUNCTION, a function that returns `(model, kwargs)`.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from thunder_fn.commands import UserError, failed, output_folder, users_code
from thunder_fn.errors import CaptureError, ThunderError
from thunder_fn.executors.torchinductor import wait
from thunder_fn.extras import extra
from thunder_fn.inspect.command import function_at
from thunder_fn.inspect.scratch import peak_of
from thunder_fn.inspect.tables import bytes_text, seconds_text
from thunder_fn.interpreters.simplify import dce, inline
from thunder_fn.ir.trace import Trace
from thunder_fn.jitted import Options, explain_claims
from thunder_fn.jitted.claim_report import ClaimReport, decisions_of
from thunder_fn.jitted.program import close_over
from thunder_fn.jitted.transforms import Transform
from thunder_fn.recipes.entry import chosen, compile

ROUNDS = 5
COPIES = 4
"""The free memory that a run needs, in sizes of the model's parameters: gradients and
intermediates. A larger model is only captured.
"""
SAMPLES = 16_000
"""The number of samples of sound: a second."""
GIVE_A_FUNCTION = "Write a function that returns (model, kwargs), and give it as FILE:FUNCTION."
IMAGE = 224
"""Height and width of an image for a model that says none."""


def main(argv: Sequence[str]) -> int:
    """Parse the command line, compile, run, and write the report.

    Exit code 2 if there is no such model or recipe, 1 if the model cannot be compiled.
    """
    parser = argparse.ArgumentParser(
        prog="python -m thunder_fn compile",
        description="Report the ops, claims, memory and time of a model under a recipe. "
        + (__doc__ or "").partition("\n\n")[2],
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a configuration of transformers, or FILE:FUNCTION"
    )
    parser.add_argument(
        "--recipe",
        action="append",
        help="a recipe's name, or auto (the default); several are added up",
    )
    parser.add_argument(
        "--report",
        type=output_folder,
        metavar="FOLDER",
        help="write report.txt, report.json and trace.py there",
    )
    parser.add_argument(
        "--train", action="store_true", help="time forward and backward, not forward alone"
    )
    parser.add_argument(
        "--torch-compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time torch.compile, too, which takes a while (the default)",
    )
    options = parser.parse_args(argv)
    recipe = options.recipe or ["auto"]
    try:
        model, inputs = load(options.model)
        chosen(model, recipe)
    except UserError as error:
        return failed("compile", error, 1)
    except (ThunderError, ValueError, OSError) as error:
        return failed("compile", error, 2)
    try:
        found = report(model, inputs, recipe, options.train, options.torch_compile)
    except (ThunderError, ValueError) as error:
        return failed("compile", error, 1)
    print(found["text"])
    if options.report is not None:
        (options.report / "report.txt").write_text(found.pop("text") + "\n")
        (options.report / "trace.py").write_text(found.pop("trace") + "\n")
        (options.report / "report.json").write_text(json.dumps(found, indent=2) + "\n")
    return 0


def load(name: str) -> tuple[Any, dict[str, Any]]:
    """A model with random weights, and example inputs for it.

    Raises:
        InspectError: there is no such file, module or function.
        ValueError: it returns something else, or the configuration is none.
        UserError: the user's code raises.
    """
    if Path(name).exists():
        return _from_config(name)
    function = function_at(name)
    with users_code():
        made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict)):
        raise ValueError(f"{name} must return (model, kwargs), where kwargs is a dict")
    return made


def _from_config(name: str) -> tuple[Any, dict[str, Any]]:
    transformers = extra("transformers", f"{name}, a configuration of a model,")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        architectures = config.architectures or []
        if architectures and not hasattr(transformers, architectures[0]):
            raise ValueError(f"this release of transformers has no {architectures[0]}")
        cls = (
            getattr(transformers, architectures[0])
            if architectures
            else transformers.AutoModel.from_config
        )
        with torch.device("meta"):
            made: Any = cls(config)
        if bytes_of(made) <= memory() // COPIES:
            torch.manual_seed(0)
            made = cls(config)
    except Exception as error:
        raise ValueError(f"{name}: {' '.join(str(error).split())}") from error
    try:
        inputs = example_inputs(made)
    except AttributeError as error:  # the configuration does not say how large they are
        raise ValueError(f"{name}: {error}\n{GIVE_A_FUNCTION}") from error
    return made.eval(), {key: value.to(made.device) for key, value in inputs.items()}


def bytes_of(model: torch.nn.Module) -> int:
    """The bytes of the parameters."""
    return sum(tensor.nbytes for tensor in model.parameters())


def memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def example_inputs(model: Any, batch: int = 2, length: int = 32) -> dict[str, Any]:
    """Random inputs for a model of transformers: text, images or sound, by the name of its main
    input.

    Raises:
        ValueError: it takes something else.
    """
    config, name = model.config, model.main_input_name
    ids = lambda: torch.randint(config.get_text_config().vocab_size, (batch, length))
    match name:
        case "input_ids":
            found = ids()
        case "pixel_values":
            size = _of_images(config, "image_size", IMAGE)
            channels = _of_images(config, "num_channels", 3)
            found = torch.randn(
                batch, channels, *(size if isinstance(size, list | tuple) else (size, size))
            )
        case "input_values":
            found = torch.randn(batch, SAMPLES)
        case "input_features" if hasattr(config, "num_mel_bins"):
            frames = 2 * getattr(config, "max_source_positions", length)
            found = torch.randn(batch, config.num_mel_bins, frames)
        case _:
            what = f"no example of {name!r} is known, which a {type(model).__name__} takes"
            raise ValueError(f"{what}\n{GIVE_A_FUNCTION}")
    return {name: found, **({"decoder_input_ids": ids()} if config.is_encoder_decoder else {})}


def _of_images(config: Any, name: str, otherwise: int) -> Any:
    """A number of a configuration, or of its part for images; some models take images of any
    size, and say none.
    """
    parts = (
        config,
        *(getattr(config, part, None) for part in ("vision_config", "backbone_config")),
    )
    return next(
        (value for part in parts if (value := getattr(part, name, None)) is not None), otherwise
    )


def report(
    model: Any, inputs: dict[str, Any], recipe: Sequence[str], train: bool, torch_compile: bool
) -> dict[str, Any]:
    """Report the parts of the recipe, the ops, the claims, memory and time, as values and as
    text.
    """
    seen = list[Trace]()
    options = Options().changed(chosen(model, recipe).assemble(model).options)
    start = time.perf_counter()
    compiled = compile(
        model,
        recipe,
        transforms=Transform(lambda trace: seen.append(trace) or trace, name="reported"),
    )
    step = (lambda f: _train_step(f, inputs)) if train else (lambda f: lambda: _no_grad(f, inputs))
    run = step(compiled)
    run()
    first = time.perf_counter() - start
    traces = list(dict.fromkeys(seen))
    seconds = {} if _is_meta(model) else _times(run, step, model, torch_compile)
    ops = collections.Counter(
        equation.op.name for trace in traces for equation in dce(inline(trace)).equations
    )
    found: dict[str, Any] = {
        "recipe": chosen(model, recipe).explain(model),
        "first_call_seconds": first,
        "seconds": seconds,
        "graphs": len(traces),
        "ops": dict(ops.most_common()),
        "parameter_bytes": bytes_of(model) if isinstance(model, torch.nn.Module) else 0,
        "forward_peak_bytes": max(map(peak_of, traces)),
        "claims": "\n".join(map(str, _claims(compiled, options, traces, inputs, train))),
        "trace": "\n\n".join(map(str, traces)),
    }
    return {**found, "text": _text(found)}


def _times(
    run: Callable[[], None],
    step: Callable[[Any], Callable[[], None]],
    model: Any,
    torch_compile: bool,
) -> Any:
    """Seconds of a step once all is compiled; None for torch.compile if it fails."""
    wait()
    times: dict[str, float | None] = {"thunder_fn": _seconds(run), "eager": _seconds(step(model))}
    if torch_compile:
        try:
            times["torch.compile"] = _seconds(step(torch.compile(model)))
        except Exception:  # noqa: BLE001 - whatever it is, it is not about what was asked
            times["torch.compile"] = None
    return times


def _is_meta(model: Any) -> bool:
    return isinstance(model, torch.nn.Module) and any(
        tensor.is_meta for tensor in model.parameters()
    )


def _claims(
    compiled: Any, options: Options, traces: Sequence[Trace], inputs: dict[str, Any], train: bool
) -> Iterator[ClaimReport]:
    """The claims of executors on the model, or on each graph where it is no single trace."""
    try:
        with torch.set_grad_enabled(train):
            yield explain_claims(compiled, **inputs)
    except CaptureError:
        for trace in traces:
            yield ClaimReport(
                trace.name, decisions_of(close_over(trace)[0], options.executors_of(trace))
            )


def _train_step(f: Callable[..., Any], inputs: dict[str, Any]) -> Callable[[], None]:
    def step() -> None:
        result = f(**inputs)
        values = result.values() if isinstance(result, dict) else [result]
        loss: Any = sum(
            value.float().pow(2).mean() for value in values if isinstance(value, torch.Tensor)
        )
        loss.backward()

    return step


def _no_grad(f: Callable[..., Any], inputs: dict[str, Any]) -> None:
    with torch.no_grad():
        f(**inputs)


def _seconds(run: Callable[[], None]) -> float:
    run()
    times = list[float]()
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _text(found: dict[str, Any]) -> str:
    ops = ", ".join(
        f"{count} {name.removeprefix('aten.')}" for name, count in list(found["ops"].items())[:12]
    )
    shown = lambda value: "fails" if value is None else seconds_text(value)
    times = ", ".join(f"{name} {shown(value)}" for name, value in found["seconds"].items()) or (
        f"nothing is run, on the meta device: the machine has {memory() / 2**30:.1f} GiB of memory"
    )
    in_graphs = f" (in {found['graphs']} graphs)" if found["graphs"] > 1 else ""
    return "\n".join(
        [
            found["recipe"],
            f"ops        {sum(found['ops'].values())}: {ops}{in_graphs}",
            (
                f"memory     {bytes_text(found['parameter_bytes'])} of parameters, at most "
                f"{bytes_text(found['forward_peak_bytes'])} of results at a time"
            ),
            f"time       first call {found['first_call_seconds']:.2f} s; then {times}",
            found["claims"],
        ]
    )
