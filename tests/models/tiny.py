"""Small models of every architecture of transformers, with inputs on which eager PyTorch runs a training step.

Nothing is written for one architecture: a configuration is made small by the names of its numbers, classes are those that
take the configuration, and inputs follow from the names that `forward` takes. Several of each are tried.
"""

from __future__ import annotations

import importlib
import inspect
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
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
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"), 48),
    **dict.fromkeys(("ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "max_seq_len"), 64),
    "head_dim": 8,
    "d_kv": 8,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "state_size": 4,
    "num_labels": 3,
}
FEW: dict[str, Any] = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
AT_MOST = dict.fromkeys(
    ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "n_group", "topk_group"), 2
)
"""Experts and groups of experts that a token takes: no more than `FEW` has."""
DEPTH = re.compile(r"(num|n|encoder|decoder)_(\w+_)?(layers?|blocks)|layers|depth|num_layers\w*")
WIDTH = re.compile(
    r"(?!image|patch|vocab|max|kernel|window|pad|batch|block|chunk)\w*"
    r"(size|dim|dims|width|channels|rank|sizes|d_model|d_ff|d_kv|n_embd)"
)
COUNTS = re.compile(
    r"num_(\w+_)?channels|in_channels|\w*(vocab|image|patch|window|kernel|stride|state|conv_\w*kernel)_size"
)
LARGEST = 40_000_000
"""Parameters of a model that counts as small."""


def _default(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001 - some configurations refuse to answer for all layers at once
        return None


HEADS = re.compile(r"(\w+_)?(num|n)_(\w+_)?heads?|\w*attention_heads")


def small_configs(cls: Any) -> Iterator[Any]:
    """Configurations, the smallest first: with what can be small small, its parts too; then shallow only; then the default."""
    default = cls()
    for level in LEVELS:
        try:
            yield cls(**_options(default, level))
        except Exception:  # noqa: BLE001 - configurations check themselves in many ways
            continue
    yield default


@dataclass(frozen=True)
class Level:
    """The way to make a configuration small: numbers by name, a divisor of widths and one of heads, and the number of
    layers.
    """

    table: dict[str, Any]
    widths: int = 1
    heads: int = 1
    depth: int | None = 2


LEVELS = (
    Level({**SMALL, **FEW}),
    Level({name: size for name, size in {**SMALL, **FEW}.items() if "head" not in name}),
    Level(FEW, widths=16),
    Level(FEW, widths=8),
    Level(FEW, widths=8, heads=8),
    Level(FEW, widths=4, heads=4),
    Level({**SMALL, **FEW}, depth=8),
    Level({**SMALL, **FEW}, depth=None),
    Level(FEW, widths=4),
    Level(FEW),
    Level({}),
)


def _options(default: Any, level: Level) -> dict[str, Any]:
    """Numbers by name: widths keep their ratios, in parts too."""
    options = dict[str, Any]()
    for name in [*vars(default), *getattr(default, "attribute_map", {})]:
        value = _default(default, name)
        divisor = level.heads if HEADS.fullmatch(name) else level.widths if _is_width(name, level) else 1
        if isinstance(value, int) and not isinstance(value, bool):
            if DEPTH.fullmatch(name) and level.depth is not None and value > level.depth:
                options[name] = level.depth
            elif name in level.table:
                options[name] = level.table[name]
            elif name in AT_MOST and "num_experts" in level.table:
                options[name] = min(value, AT_MOST[name])
            elif divisor > 1 and value % divisor == 0:
                options[name] = value // divisor
        elif name == "depths" and isinstance(value, (list, tuple)):
            options[name] = [1] * len(value)
        elif divisor > 1 and isinstance(value, (list, tuple)) and _divides(divisor, value):
            options[name] = [size // divisor for size in value]
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            part = type(value)(**_options(value, level))
            options[name] = {**part.to_dict(), "model_type": value.model_type}
    return options


def _is_width(name: str, level: Level) -> bool:
    keeps = COUNTS.fullmatch(name) or (level.heads > 1 and "head" in name)
    return WIDTH.fullmatch(name) is not None and not keeps


def _divides(divisor: int, values: Any) -> bool:
    return all(isinstance(value, int) and value % divisor == 0 for value in values)


def candidates(config: Any) -> list[Any]:
    """Classes of models for a configuration, those with a loss first, then whatever takes it."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    first = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION")
    names = [f"MODEL_FOR_{name}_MAPPING" for name in (*first, "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "CTC")]
    found = list[Any]()
    for mapping in [getattr(auto, name) for name in (*names, "MODEL_MAPPING")]:
        if type(config) in mapping:
            classes = mapping[type(config)]
            found += classes if isinstance(classes, tuple) else (classes,)
    package = type(config).__module__.rpartition(".")[0]
    name = type(config).__module__.rpartition(".")[2].replace("configuration_", "modeling_")
    try:
        module = importlib.import_module(f"{package}.{name}")
    except ImportError:
        return found
    for cls in vars(module).values():
        is_model = inspect.isclass(cls) and issubclass(cls, transformers.PreTrainedModel)
        if is_model and cls.config_class is type(config) and "forward" in vars(cls) and cls not in found:
            found.append(cls)
    return found


def inputs_for(model: Any) -> Iterator[dict[str, Any]]:
    """Generic inputs by the names that `forward` takes: text, pixels, sound, series, or several of them."""
    names = inspect.signature(model.forward).parameters
    required = {
        name
        for name, parameter in names.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    kinds = [list(kind(model, names)) for kind in (_text, _pixels, _sound, _series, _states)]
    single = [found for kind in kinds for found in kind]
    pairs = [{**a, **b} for a in kinds[0] for kind in kinds[1:] for b in kind]
    ready = [found for found in (*single, *pairs) if found and required <= set(found)]
    main = model.main_input_name
    yield from sorted(ready, key=lambda found: main not in found)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _text(model: Any, names: Any) -> Iterator[dict[str, Any]]:
    config = model.config
    sizes = [_default(part, "vocab_size") for part in (config, config.get_text_config())]
    vocabulary = min([size for size in sizes if isinstance(size, int)] + [99])
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (2, 8), generator=_generator())
    if "input_ids" in names:
        decoder = {"decoder_input_ids": ids} if "decoder_input_ids" in names else {}
        yield {"input_ids": ids, **decoder}
        if decoder:
            yield {"input_ids": ids}


def _pixels(model: Any, names: Any) -> Iterator[dict[str, Any]]:
    config = model.config
    parts = [part for part in (config, _default(config, "vision_config"), _default(config, "backbone_config")) if part]
    read = lambda name, other: next((value for part in parts if (value := _default(part, name)) is not None), other)
    size = read("image_size", 32)
    size = [*size.values()][:2] if isinstance(size, dict) else size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = read("num_channels", None) or read("in_channels", None) or read("in_chans", 3)
    frames = read("num_frames", 2)
    decoder = {"decoder_input_ids": torch.ones(2, 4, dtype=torch.int64)} if "decoder_input_ids" in names else {}
    for name in ("pixel_values", "pixel_values_videos"):
        if name in names:
            image = torch.randn(2, channels, height, width, generator=_generator())
            yield {name: image, **decoder}
            yield {name: torch.randn(2, frames, channels, height, width, generator=_generator()), **decoder}
            if frames > 2:
                yield {name: torch.randn(frames, channels, height, width, generator=_generator()), **decoder}
            if height < 224:
                yield {name: torch.randn(2, channels, 224, 224, generator=_generator()), **decoder}


def _sound(model: Any, names: Any) -> Iterator[dict[str, Any]]:
    config = model.config
    decoder = {"decoder_input_ids": torch.ones(2, 4, dtype=torch.int64)} if "decoder_input_ids" in names else {}
    if "input_values" in names:
        for shape in ((2, 4000), (2, 1, 4000), (2, 16000)):
            yield {"input_values": torch.randn(*shape, generator=_generator()), **decoder}
    if "input_features" in names:
        encoder = _default(config, "encoder_config") or _default(config, "audio_config") or config
        sizes = ("num_mel_bins", "input_dim", "feature_size", "feature_projection_input_dim", "input_feat_per_channel")
        mels = next((value for name in sizes if isinstance(value := _default(encoder, name), int)), 80)
        length = 2 * (_default(encoder, "max_source_positions") or 50)
        for shape in ((2, mels, length), (2, length, mels)):
            yield {"input_features": torch.randn(*shape, generator=_generator()), **decoder}


def _series(model: Any, names: Any) -> Iterator[dict[str, Any]]:
    if "past_values" in names:
        config = model.config
        length = _default(config, "context_length") or 32
        channels = _default(config, "num_input_channels") or 1
        yield {"past_values": torch.randn(2, length, channels, generator=_generator())}
        yield {"past_values": torch.randn(2, length, generator=_generator())}


def _states(model: Any, names: Any) -> Iterator[dict[str, Any]]:
    """The inputs of a part of a larger model."""
    config = model.config
    width = next((v for n in ("hidden_size", "d_model", "embed_dim") if isinstance(v := _default(config, n), int)), 32)
    patch, moments = _default(config, "patch_size") or 8, _default(config, "temporal_patch_size") or 1
    if "grid_thw" in names and isinstance(patch, int):
        values = (_default(config, "in_channels") or 3) * moments * patch**2
        for name in ("hidden_states", "pixel_values"):
            if name in names:
                patches = torch.randn(16, values, generator=_generator())
                yield {name: patches, "grid_thw": torch.tensor([[1, 4, 4]])}
    if "spatial_shapes" in names and isinstance(patch, int):
        patches, mask = torch.randn(2, 16, 3 * patch**2, generator=_generator()), torch.ones(2, 16, dtype=torch.int64)
        yield {
            "pixel_values": patches,
            "pixel_attention_mask": mask,
            "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
        }
    for name in ("hidden_states", "inputs_embeds", "inputs"):
        if name in names:
            yield {name: torch.randn(2, 8, width, generator=_generator())}


def loss_of(result: Any) -> torch.Tensor:
    """A scalar from whatever a model gives back. Weighted, since some models return vectors of length one."""
    values = list(result.values()) if isinstance(result, dict) else [result]
    tensors = [leaf for value in values for leaf in (value if isinstance(value, (list, tuple)) else [value])]
    floating = [leaf for leaf in tensors if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    weighted = (torch.linspace(0.5, 1.5, leaf.numel()).view(leaf.shape) * leaf.float().pow(2) for leaf in floating)
    return sum((terms.mean() for terms in weighted), torch.zeros(()))


def gradients(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss of a training step and all gradients."""
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):  # speech models mask with NumPy's generator
        seed(0)
    loss = loss_of(model(**inputs))
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters()}


def build(name: str) -> tuple[Any, dict[str, Any]] | str:  # noqa: C901 - a branch for each family
    """A small model on which eager PyTorch runs a step, and its inputs; or why there is none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        configs = list(small_configs(CONFIG_MAPPING[name]))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return f"no configuration: {type(error).__name__}: {error}"[:200]
    why, too_large = "", ""
    for config in configs:
        for cls in candidates(config):
            try:
                with torch.device("meta"):
                    size = sum(param.numel() for param in cls(config).parameters())
                if size > LARGEST:
                    too_large = f"does not get small: {size / 1e6:.0f} million parameters"
                    continue
                torch.manual_seed(0)
                model = cls(config).train()
                choices = list(inputs_for(model))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
                why = why or f"eager PyTorch cannot make it: {type(error).__name__}: {error}"[:200]
                continue
            if not choices:
                needs = ", ".join(inspect.signature(model.forward).parameters)
                why = why or f"no generic input for {cls.__name__}({needs})"[:200]
            for inputs in choices:
                try:
                    loss, found = gradients(model, inputs)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
                    why = f"eager PyTorch fails: {type(error).__name__}: {error}"[:200]
                    continue
                if not bool(loss.isfinite()):
                    why = "eager PyTorch fails: the loss is not finite"
                    continue
                if all(grad is None for grad in found.values()):
                    why = "eager PyTorch fails: no parameter has a gradient"
                    continue
                torch.manual_seed(0)
                return cls(config).train(), inputs  # buffers as they were
    return why or too_large or "no class of models takes the configuration"
