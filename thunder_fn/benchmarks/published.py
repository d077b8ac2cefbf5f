"""Models of published sizes, and how long it takes to capture them on the meta device."""

from __future__ import annotations

import time
from typing import Any

import torch

import thunder_fn as tfn

_GROUPED = {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
_LLAMA_405B = {
    "hidden_size": 16384,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
}
_QWEN3 = {
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
}
_EXPERTS = {
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
}
_GEMMA = {
    "hidden_size": 4608,
    "num_hidden_layers": 46,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
}
_OPT = {"hidden_size": 12288, "num_hidden_layers": 96, "num_attention_heads": 96, "ffn_dim": 49152}
_T5 = {"d_model": 1024, "d_ff": 65536, "d_kv": 128, "num_heads": 128, "num_layers": 24}

SMALLER: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT base": ("BertForMaskedLM", "BertConfig", {}),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {}),
    "Llama 2 7B": ("LlamaForCausalLM", "LlamaConfig", {}),
    "Mixtral 8x7B": ("MixtralForCausalLM", "MixtralConfig", {}),
}
"""Class of the model, class of its configuration, and the values that differ from its defaults."""

CAPTURED: dict[str, tuple[str, str, dict[str, Any]]] = {
    **SMALLER,
    "BigBird base": ("BigBirdForMaskedLM", "BigBirdConfig", {}),
    "Longformer base": ("LongformerForMaskedLM", "LongformerConfig", {}),
    "T5 11B": ("T5ForConditionalGeneration", "T5Config", _T5),
    "Gemma 2 27B": ("Gemma2ForCausalLM", "Gemma2Config", {**_GEMMA, "intermediate_size": 36864}),
    "OPT 175B": ("OPTForCausalLM", "OPTConfig", {**_OPT, "word_embed_proj_dim": 12288}),
    "Qwen 2.5 72B": ("Qwen2ForCausalLM", "Qwen2Config", {**_GROUPED, "intermediate_size": 29568}),
    "Llama 3 70B": ("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "intermediate_size": 28672}),
    "Llama 3.1 405B": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_LLAMA_405B, "intermediate_size": 53248},
    ),
    "DeepSeek V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {}),
    "Qwen 3 235B": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_QWEN3, **_EXPERTS}),
    "Mamba 2.8B": (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 2560, "num_hidden_layers": 64},
    ),
    "Mamba 2, 64 layers": ("Mamba2ForCausalLM", "Mamba2Config", {}),
    "Jamba": ("JambaForCausalLM", "JambaConfig", {}),
    "Zamba 2 7B": ("Zamba2ForCausalLM", "Zamba2Config", {}),
}


def capture_seconds(name: str) -> float:
    """Seconds to capture a model of published size on the meta device, from nothing."""
    import transformers  # pyright: ignore[reportMissingImports]

    cls, config, options = CAPTURED[name]
    with torch.device("meta"):
        model = getattr(transformers, cls)(getattr(transformers, config)(**options)).eval()
        ids = torch.zeros(1, 128, dtype=torch.int64)
    inputs = {
        "input_ids": ids,
        **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}),
    }
    start = time.perf_counter()
    tfn.trace(model, **inputs)
    return time.perf_counter() - start
