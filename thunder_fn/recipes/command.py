"""`python -m thunder_fn compile MODEL`: what a recipe makes of a model, with its ops, claims, memory and time.

MODEL is a folder or JSON file with a configuration of transformers, for which a model with random weights is made, or
`module:function`, a function that returns `(model, kwargs)`.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from thunder_fn.commands import UserError, output_folder, users_code
from thunder_fn.errors import ThunderError, kind_of
from thunder_fn.inspect.scratch import peak_of
from thunder_fn.interpreters.simplify import dce, inline
from thunder_fn.jit import explain_claims, last_traces
from thunder_fn.recipes.entry import chosen, compile
from thunder_fn.trace import Trace

ROUNDS = 5


def main(argv: Sequence[str]) -> int:
    """Parse the command line, compile, run, and write the report.

    Exit code 2 if there is no such model or recipe, 1 if the model cannot be compiled.
    """
    parser = argparse.ArgumentParser(
        prog="python -m thunder_fn compile",
        description="What a recipe makes of a model, with its ops, claims, memory and time. "
        + (__doc__ or "").partition("\n\n")[2],
    )
    parser.add_argument("model", metavar="MODEL", help="a configuration of transformers, or module:function")
    parser.add_argument(
        "--recipe", action="append", help="a recipe's name, or auto (the default); several are added up"
    )
    parser.add_argument(
        "--report", type=output_folder, metavar="FOLDER", help="write report.txt, report.json and trace.py there"
    )
    parser.add_argument("--train", action="store_true", help="time forward and backward, not forward alone")
    parser.add_argument("--torch-compile", action="store_true", help="time torch.compile, too, which takes a while")
    options = parser.parse_args(argv)
    recipe = options.recipe or ["auto"]
    try:
        model, inputs = load(options.model)
        chosen(model, recipe)
    except UserError as error:
        return _failed(error, 1)
    except (ThunderError, ValueError, OSError) as error:
        return _failed(error, 2)
    try:
        found = report(model, inputs, recipe, options.train, options.torch_compile)
    except (ThunderError, ValueError) as error:
        return _failed(error, 1)
    print(found["text"])
    if options.report is not None:
        (options.report / "report.txt").write_text(found.pop("text") + "\n")
        (options.report / "trace.py").write_text(found.pop("trace") + "\n")
        (options.report / "report.json").write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _failed(error: Exception, code: int) -> int:
    print(f"thunder_fn compile: {error}", file=sys.stderr)
    return code


def load(name: str) -> tuple[Any, dict[str, Any]]:
    """A model with random weights, and example inputs for it.

    Raises:
        ValueError: there is no such model.
        UserError: the user's code raises.
    """
    if Path(name).exists():
        return _from_config(name)
    function = _function(name)
    with users_code():
        made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict)):
        raise ValueError(f"{name} must return (model, kwargs), but it returned {kind_of(made)}")
    return made


def _function(name: str) -> Callable[[], Any]:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{name} is neither a file nor module:function")
    sys.path.insert(0, "")
    if not module or importlib.util.find_spec(module.partition(".")[0]) is None:
        raise ValueError(f"{name}: there is no module {module!r}")
    with users_code():
        found = importlib.import_module(module)
    function = getattr(found, attribute, None)
    if not callable(function):
        raise ValueError(f"{name}: {module} has no function {attribute!r}")
    return function


def _from_config(name: str) -> tuple[Any, dict[str, Any]]:
    try:
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(f"{name} is a configuration of transformers, which is not installed: {error}") from error
    config = transformers.AutoConfig.from_pretrained(name)
    architectures = config.architectures or []
    torch.manual_seed(0)
    made: Any = (
        getattr(transformers, architectures[0])(config) if architectures else transformers.AutoModel.from_config(config)
    )
    return made.eval(), example_inputs(made)


def example_inputs(model: Any, batch: int = 2, length: int = 32) -> dict[str, Any]:
    """Random inputs for a model of transformers."""
    config, name = model.config, model.main_input_name
    if name == "pixel_values":
        size = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size,) * 2
        return {name: torch.randn(batch, config.num_channels, *size)}
    ids = torch.randint(config.get_text_config().vocab_size, (batch, length))
    extra = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
    return {"input_ids": ids, **extra}


def report(
    model: Any, inputs: dict[str, Any], recipe: Sequence[str], train: bool, torch_compile: bool
) -> dict[str, Any]:
    """What is applied, the ops, the claims, memory and time, as values and as text."""
    start = time.perf_counter()
    compiled = compile(model, recipe)
    step = (lambda f: _train_step(f, inputs)) if train else (lambda f: lambda: _no_grad(f, inputs))
    run = step(compiled)
    run()
    first = time.perf_counter() - start
    trace = last_traces(compiled)[0]
    assert isinstance(trace, Trace), "the first stage is what was captured"
    seconds = {"thunder_fn": _seconds(run), "eager": _seconds(step(model))}
    if torch_compile:
        seconds["torch.compile"] = _seconds(step(torch.compile(model)))
    flat = dce(inline(trace))
    ops = collections.Counter(equation.op.name for equation in flat.equations)
    found: dict[str, Any] = {
        "recipe": chosen(model, recipe).explain(model),
        "first_call_seconds": first,
        "seconds": seconds,
        "ops": dict(ops.most_common()),
        "parameter_bytes": sum(tensor.nbytes for tensor in model.parameters()),
        "forward_peak_bytes": peak_of(trace),
        "claims": str(_claims(compiled, inputs)),
        "trace": str(trace),
    }
    return {**found, "text": _text(found)}


def _claims(compiled: Any, inputs: dict[str, Any]) -> Any:
    with torch.no_grad():
        return explain_claims(compiled, **inputs)


def _train_step(f: Callable[..., Any], inputs: dict[str, Any]) -> Callable[[], None]:
    def step() -> None:
        result = f(**inputs)
        values = result.values() if isinstance(result, dict) else [result]
        loss: Any = sum(value.float().pow(2).mean() for value in values if isinstance(value, torch.Tensor))
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
    ops = ", ".join(f"{count} {name.removeprefix('aten.')}" for name, count in list(found["ops"].items())[:12])
    times = ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in found["seconds"].items())
    return "\n".join(
        [
            found["recipe"],
            f"ops        {sum(found['ops'].values())}: {ops}",
            f"memory     {found['parameter_bytes'] / 2**20:.1f} MiB of parameters, at most "
            f"{found['forward_peak_bytes'] / 2**20:.1f} MiB of results at a time",
            f"time       first call {found['first_call_seconds']:.2f} s; then {times}",
            "claims",
            found["claims"],
        ]
    )
