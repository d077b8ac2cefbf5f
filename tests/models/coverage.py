"""`python -m tests.models.coverage`: which architectures of transformers train, out of all that can be built small.

Each architecture's configuration is made as small as its parameters allow, with random weights. Those on which eager
PyTorch itself runs a training step with generic inputs count; an architecture trains if the jitted model's loss and all
gradients are those of eager PyTorch. Not part of the test suite: it takes half an hour.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import logging
import multiprocessing
import queue as queue_module
import random
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size"), 32
    ),
    **dict.fromkeys(
        ("decoder_hidden_size", "cross_attention_hidden_size", "projection_dim", "hidden_dim", "emb_dim"), 32
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"), 48),
    **dict.fromkeys(("ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    "vocab_size": 99,
    "head_dim": 8,
    "d_kv": 8,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "state_size": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "num_labels": 3,
}
LARGEST = 20_000_000
"""Parameters of a model that counts as small."""


def small_config(cls: Any) -> Any:
    """A configuration with what can be small small, its parts too."""
    default = cls()
    options = {name: value for name, value in SMALL.items() if isinstance(getattr(default, name, None), int)}
    for name, part in (getattr(cls, "sub_configs", None) or {}).items():
        if inspect.isclass(part) and hasattr(part, "to_dict") and part.__name__ != "AutoConfig":
            options[name] = small_config(part).to_dict()
    for attempt in (options, {key: value for key, value in options.items() if "head" not in key}, {}):
        try:
            return cls(**attempt)
        except Exception:  # noqa: BLE001 - configurations check themselves in many ways
            continue
    return default


def candidates(config: Any) -> Iterator[Any]:
    """Classes of models for a configuration, those with a loss first."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    mappings = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_MASKED_LM_MAPPING,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING,
        auto.MODEL_MAPPING,
    )
    for mapping in mappings:
        if type(config) in mapping:
            found = mapping[type(config)]
            yield from found if isinstance(found, tuple) else (found,)
    del transformers


def inputs_for(model: Any) -> dict[str, Any]:
    """Generic inputs by the names that `forward` takes."""
    config, names = model.config, inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)
    text = config.get_text_config()
    vocabulary = min(getattr(text, "vocab_size", None) or 99, 99)
    ids = torch.randint(3, vocabulary, (2, 8), generator=generator)
    found: dict[str, Any] = {}
    if "input_ids" in names and model.main_input_name != "pixel_values":
        found["input_ids"] = ids
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        found["decoder_input_ids"] = ids
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 32)
        size = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(config, "num_channels", 3)
        found["pixel_values"] = torch.randn(2, channels, *size, generator=generator)
    if model.main_input_name == "input_values":
        found["input_values"] = torch.randn(2, 4000, generator=generator)
    if model.main_input_name == "input_features":
        mel = getattr(config, "num_mel_bins", getattr(config, "feature_size", 80))
        found["input_features"] = torch.randn(
            2, mel, 2 * getattr(config, "max_source_positions", 50), generator=generator
        )
    return found


def loss_of(result: Any) -> torch.Tensor:
    """A scalar from whatever a model gives back."""
    values = list(result.values()) if isinstance(result, dict) else [result]
    tensors = [leaf for value in values for leaf in (value if isinstance(value, (list, tuple)) else [value])]
    floating = [leaf for leaf in tensors if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return sum((leaf.float().pow(2).mean() for leaf in floating), torch.zeros(()))


def gradients(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss of a training step and all gradients."""
    torch.manual_seed(0)
    numpy.random.seed(0)  # speech models mask with it
    loss = loss_of(model(**inputs))
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters()}


def build(name: str) -> tuple[Any, dict[str, Any]] | str:
    """A small model on which eager PyTorch runs a step, and its inputs; or why there is none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = small_config(CONFIG_MAPPING[name])
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return f"no configuration: {type(error).__name__}: {error}"[:200]
    why = "no model class"
    for cls in candidates(config):
        try:
            with torch.device("meta"):
                size = sum(param.numel() for param in cls(config).parameters())
            if size > LARGEST:
                why = f"does not get small: {size / 1e6:.0f} million parameters"
                continue
            torch.manual_seed(0)
            model = cls(config).train()
            inputs = inputs_for(model)
            if not inputs:
                why = f"no generic input for {model.main_input_name}"
                continue
            gradients(model, inputs)
            model.zero_grad()
            return model, inputs
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            why = f"eager PyTorch fails: {type(error).__name__}: {error}"[:200]
    return why


def train(name: str, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """One architecture: whether it was built, whether it trains, and how far it is off. Tells when it is built."""
    import thunder_fn as tfn

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    made = build(name)
    if isinstance(made, str):
        return {"name": name, "built": False, "why": made}
    model, inputs = made
    found: dict[str, Any] = {"name": name, "built": True, "model": type(model).__name__, "trains": False}
    tell(found)
    reference = copy.deepcopy(model)
    start = time.perf_counter()
    try:
        loss, mine = gradients(tfn.compile(model, "auto", executors="torch"), inputs)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return {**found, "why": f"{type(error).__name__}: {error}"[:600]}
    found["seconds"] = round(time.perf_counter() - start, 2)
    expected, its = gradients(reference, inputs)
    scale = max((float(grad.abs().max()) for grad in its.values() if grad is not None and grad.numel()), default=0.0)
    worst, where = 0.0, "loss"
    worst = float((loss - expected).abs()) / max(float(expected.abs()), 1e-6)
    for key, grad in its.items():
        if (grad is None) != (mine[key] is None):
            return {**found, "why": f"{key} has {'a' if grad is None else 'no'} gradient"}
        if grad is not None and grad.numel():
            error = float((mine[key] - grad).abs().max()) / max(scale, 1e-12)
            worst, where = max((worst, where), (error, key))
    found.update(error=worst, trains=bool(worst < 1e-3))
    return found if found["trains"] else {**found, "why": f"{where} is off by {worst:.1e}"}


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
    options = parser.parse_args()
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    import thunder_fn

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
    built = [entry for entry in done if entry["built"]]
    trains = [entry for entry in built if entry["trains"]]
    print(f"\n{len(trains)} of {len(built)} architectures train ({100 * len(trains) / max(len(built), 1):.1f} %)")
    print(f"{len(done) - len(built)} of {len(done)} could not be built small with generic inputs")
    for entry in built:
        if not entry["trains"]:
            print(f"  {entry['name']}: {entry['why']}")
    del transformers, thunder_fn


if __name__ == "__main__":
    main()
