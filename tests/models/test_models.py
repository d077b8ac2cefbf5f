"""Models of Hugging Face's transformers, small and with random weights: captured as they are, equal to eager.

Logits are compared bitwise, gradients with autograd's. Eager runs with gradients on, as the capture does: PyTorch picks
other kernels without.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.func import functional_call

import thunder_fn as tfn
from tests.unit.capturing import call_captured, same
from thunder_fn.api import captures
from thunder_fn.capture import capture
from thunder_fn.ir.check import check

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("by_nodes")
logging.getLogger("transformers").setLevel(logging.ERROR)

IDS = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 64, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, **SIZES}
GROUPED = {**SMALL, "num_key_value_heads": 2}
ENCODER_DECODER = {
    **{
        f"{part}_{name}": size
        for part in ("encoder", "decoder")
        for name, size in (("layers", 1), ("attention_heads", 4))
    },
    "d_model": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
TEXT: dict[str, Any] = {"input_ids": IDS}
MASKED: dict[str, Any] = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
PAIR: dict[str, Any] = {"input_ids": IDS, "decoder_input_ids": IDS.flip(1)}

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "BertForMaskedLM": ("BertConfig", SMALL, MASKED),
    "RobertaForMaskedLM": ("RobertaConfig", SMALL, MASKED),
    "DistilBertForMaskedLM": (
        "DistilBertConfig",
        {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, **SIZES},
        TEXT,
    ),
    "ElectraForMaskedLM": ("ElectraConfig", {**SMALL, "embedding_size": 32}, TEXT),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, **SIZES}, MASKED),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SMALL, TEXT),
    "OPTForCausalLM": ("OPTConfig", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}, TEXT),
    "FalconForCausalLM": ("FalconConfig", SMALL, TEXT),
    "PhiForCausalLM": ("PhiConfig", SMALL, TEXT),
    "LlamaForCausalLM": ("LlamaConfig", GROUPED, MASKED),
    "MistralForCausalLM": ("MistralConfig", {**GROUPED, "sliding_window": 4}, TEXT),
    "MixtralForCausalLM": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}, TEXT),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED, TEXT),
    "GemmaForCausalLM": ("GemmaConfig", {**GROUPED, "head_dim": 8}, TEXT),
    "Gemma2ForCausalLM": ("Gemma2Config", {**GROUPED, "head_dim": 8}, TEXT),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, **SIZES},
        PAIR,
    ),
    "BartForConditionalGeneration": ("BartConfig", {**ENCODER_DECODER, **SIZES}, PAIR),
    "ViTForImageClassification": ("ViTConfig", {**SMALL, "image_size": 16, "patch_size": 8}, {"pixel_values": IMAGE}),
    "ResNetForImageClassification": (
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5},
        {"pixel_values": IMAGE},
    ),
    "MambaForCausalLM": ("MambaConfig", {**SMALL, "state_size": 4, "time_step_rank": 4}, TEXT),
}
OTHER_WAY = {"MambaForCausalLM": "while it is compiled, transformers computes the scan in another order"}


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """A model in eval mode and its inputs."""
    config, options, inputs = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**options)).eval(), copy.deepcopy(inputs)


def logits(model: Any, params: Any = None) -> Callable[..., Any]:
    """The model as a function to its logits."""
    if params is None:
        return lambda **inputs: model(**inputs).logits
    return lambda params, **inputs: functional_call(model, params, (), inputs).logits


@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str) -> None:
    model, inputs = build(name)
    expected = model(**inputs)
    captured = capture(model, (), inputs)
    check(captured.trace)
    assert not captured.writes
    result = call_captured(captured, (), inputs)
    assert type(result) is type(expected)
    if name in OTHER_WAY:
        torch.testing.assert_close(result.logits, expected.logits)
    else:
        assert same(result.logits, expected.logits)


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str) -> None:
    model, inputs = build(name)
    f = logits(model, params=True)
    params = {key: param.detach().clone() for key, param in model.named_parameters()}
    found = tfn.grad(lambda params: f(params, **inputs).pow(2).mean())(params)
    model(**inputs).logits.pow(2).mean().backward()
    scale = max(param.grad.abs().max() for param in model.parameters() if param.grad is not None)
    for key, param in model.named_parameters():
        expected = torch.zeros_like(param) if param.grad is None else param.grad
        torch.testing.assert_close(found[key], expected, rtol=1e-4, atol=float(scale) * 1e-6)


CAPTURED_ANEW = {
    "BartForConditionalGeneration": "its config makes a copy of itself, whose attributes it deletes by `delattr`",
    "MambaForCausalLM": "makes modules, and looks for a package",
}


def changes(model: Any) -> Iterator[Any]:
    """Change a model in ways that its gradient depends on, one after the other."""
    yield "nothing"
    yield [buffer.mul_(2) for buffer in model.buffers() if buffer.is_floating_point()]
    if not any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules()):  # it writes its statistics
        yield model.train()
    yield model.eval()
    norm = next((module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)), model)
    yield setattr(norm, "eps", 0.5)
    yield next(model.children()).register_forward_pre_hook(lambda module, args: None)
    yield next(one for one in model.modules() if isinstance(one, torch.nn.Linear)).register_forward_hook(
        lambda module, args, out: out * 2
    )


@pytest.mark.parametrize("name", [name for name in MODELS if name not in CAPTURED_ANEW])
def test_gradients_are_captured_while_something_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call in Python runs what the first one left; one after a change is right."""
    model, inputs = build(name)
    params = {key: param.detach().clone() for key, param in model.named_parameters()}
    count, original = 0, captures.capture

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += captures.current() is None
        return original(*args, **options)

    def loss(params: Any, inputs: Any) -> torch.Tensor:
        return functional_call(model, params, (), inputs).logits.pow(2).mean()

    monkeypatch.setattr(captures, "capture", counting)
    for change in changes(model):
        for more in range(2):
            torch.manual_seed(0)
            found = tfn.grad(loss)(params, inputs)
            captured = count if more == 0 else captured  # noqa: F821
        assert count == captured, change
        torch.manual_seed(0)
        expected = torch.func.grad(loss)(params, inputs)
        scale = max(grad.abs().max() for grad in expected.values())
        for key, grad in expected.items():
            torch.testing.assert_close(found[key], grad, rtol=1e-4, atol=float(scale) * 1e-6)


@pytest.mark.parametrize("name", ("LlamaForCausalLM", "ViTForImageClassification", "BartForConditionalGeneration"))
def test_meta_device(name: str) -> None:
    model, inputs = build(name)
    real = capture(model, (), inputs).trace
    meta = capture(model.to("meta"), (), {key: value.to("meta") for key, value in inputs.items()}).trace
    assert [str(type).removeprefix("meta ") for type in meta.output_types] == [str(type) for type in real.output_types]


def test_dropout_is_that_of_eager() -> None:
    model, inputs = build("GPT2LMHeadModel")
    model.train()
    captured = capture(model, (), inputs)
    torch.manual_seed(1)
    expected = model(**inputs).logits
    torch.manual_seed(1)
    assert same(call_captured(captured, (), inputs).logits, expected)


def test_layers_have_one_body() -> None:
    model, inputs = build("LlamaForCausalLM")
    text = str(capture(model, (), inputs).trace)
    assert text.count("LlamaDecoderLayer(") == 3  # two calls, one definition


def test_a_backward_written_by_hand() -> None:
    """Bloom's GELU is a torch.autograd.Function."""
    config = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=64)
    model = transformers.BloomForCausalLM(config)
    params = {key: param.detach() for key, param in model.named_parameters()}
    found = tfn.grad(lambda params: logits(model, params)(params, **TEXT).pow(2).mean())(params)
    logits(model, dict(model.named_parameters()))(dict(model.named_parameters()), **TEXT).pow(2).mean().backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(found[name], param.grad)
