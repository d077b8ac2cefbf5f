"""Models of transformers through `compile(model, "auto")`: trained, decoded and saved as eager PyTorch does it.

Results, losses, gradients and parameters are compared bitwise, in float32 and bfloat16, over five steps of AdamW. (AdamW
makes a step of full length of a gradient that is rounding noise, such as that of a key's bias, so nothing less would do.)
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
import pickle
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.models.test_models import GROUPED, IDS, SIZES, SMALL, build
from tests.unit.capturing import same
from thunder_fn import cache_info, recipes
from thunder_fn.benchmarks.published import SMALLER, capture_seconds
from thunder_fn.recipes import huggingface
from thunder_fn.recipes.huggingface import HuggingFace

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("by_nodes")

FAMILIES = {
    "BertForMaskedLM": "hf-bert",
    "GPT2LMHeadModel": "hf-gpt2",
    "LlamaForCausalLM": "hf-llama",
    "Qwen2ForCausalLM": "hf-qwen",
    "MistralForCausalLM": "hf-mistral",
    "GemmaForCausalLM": "hf-gemma",
    "MixtralForCausalLM": "hf-mixtral",
    "T5ForConditionalGeneration": "hf-t5",
    "ViTForImageClassification": "hf-vit",
    "MambaForCausalLM": "hf-mamba",
    "OPTForCausalLM": "hf-transformers",
}
DECODERS = [name for name in FAMILIES if name.endswith(("CausalLM", "LMHeadModel", "Generation")) and "OPT" not in name]

CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
"""The argument for keys and values, which transformers 5.24 renamed."""
FILLS_IN = {"ViTForImageClassification": "its first loss sets `config.problem_type`, which it reads"}
COUNTS_IN_PYTHON = {
    "MistralForCausalLM": "its sliding cache keeps the length as an int, which is a symbol once it has changed"
}


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about what is asked for, and run on PyTorch's ops."""
    monkeypatch.setattr(recipes.recipe, "machine_executors", lambda: ())


def with_labels(name: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """A model and a batch. No mask: eager drops one that masks nothing, after a look at its values."""
    model, inputs = build(name)
    inputs.pop("attention_mask", None)
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    labels = inputs["input_ids"] if "input_ids" in inputs else torch.tensor([0, 1])
    return model.to(dtype), {**inputs, "labels": labels}


def steps(model: Any, inputs: dict[str, Any], count: int) -> list[torch.Tensor]:
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-3), list[torch.Tensor]()
    for step in range(count):
        torch.manual_seed(step)
        result = model(**inputs)
        result.loss.backward()
        seen += [result.logits.detach(), result.loss.detach()]
        seen += [param.grad for param in model.parameters() if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(value.clone() for value in model.state_dict().values())]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("f32", "bf16"))
@pytest.mark.parametrize("name", FAMILIES)
def test_five_steps_are_eager_s(name: str, dtype: torch.dtype) -> None:
    model, inputs = with_labels(name, dtype)
    model.train()
    recipe = recipes.for_model(model)
    assert recipe is not None and recipe.name == FAMILIES[name] and issubclass(recipe, HuggingFace)
    compiled = tfn.compile(copy.deepcopy(model), recipe(as_eager=True), executors="torch")
    mine, its = steps(compiled, inputs, 5), steps(model, inputs, 5)
    assert len(mine) == len(its) and all(same(found, known) for found, known in zip(mine, its, strict=True))
    assert cache_info(compiled).misses == 1 + (name in FILLS_IN)


@pytest.mark.parametrize("name", DECODERS)
def test_generate_with_one_program_for_every_token(name: str) -> None:
    model, inputs = build(name)
    ids = inputs["input_ids"][:, :5]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    known = model.generate(ids, cache_implementation="static", **options)
    compiled = tfn.compile(copy.deepcopy(model), "auto")
    assert torch.equal(compiled.generate(ids, **options), known)
    programs = 3 if name in COUNTS_IN_PYTHON else 2  # for the prompt, and for all tokens
    assert cache_info(compiled)[:2] == (6 - programs, programs)
    assert torch.equal(compiled.generate(ids, **options), known)
    assert cache_info(compiled)[:2] == (12 - programs, programs)
    assert compiled.generation_config.cache_implementation is None, "the user's model is what it was"


def test_generate_takes_what_the_call_says() -> None:
    model, inputs = build("LlamaForCausalLM")
    ids, compiled = inputs["input_ids"][:, :5], tfn.compile(copy.deepcopy(model), "auto")
    plain = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    known = model.generate(ids, **plain)
    config = transformers.GenerationConfig(**plain)
    cache = transformers.DynamicCache(config=model.config)
    again = pickle.loads(pickle.dumps(compiled))
    for found in (
        compiled.generate(ids, config),
        compiled.generate(ids, generation_config=config),
        compiled.generate(ids, **{CACHE: cache}, **plain),
        compiled.generate(ids, use_cache=False, **plain),
        copy.deepcopy(compiled).generate(ids, **plain),
        again.generate(ids, **plain),
    ):
        assert torch.equal(found, known)
    assert config.cache_implementation is None
    assert type(again).generate is not type(model).generate


class PeftModel(torch.nn.Module):
    """A stand-in for PEFT's model, which hands `generate` on to the model beneath it."""

    __module__ = "peft.peft_model"

    def __init__(self, model: Any, is_prompt_learning: bool) -> None:
        super().__init__()
        self.base_model, self.generation_config = model, model.generation_config
        self.active_peft_config = types.SimpleNamespace(is_prompt_learning=is_prompt_learning)

    def get_base_model(self) -> Any:
        return self.base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)


@pytest.mark.parametrize("prompts", (False, True))
def test_generate_of_a_model_with_adapters(prompts: bool) -> None:
    """The model beneath runs compiled, on keys and values of fixed size unless the adapters are prompts; it is left as it was."""
    model = PeftModel(build("LlamaForCausalLM")[0], prompts).eval()
    compiled, plain = tfn.compile(model, "auto"), {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(compiled.generate(IDS, **plain), model.generate(IDS, **plain))
    beneath = huggingface._beneath[compiled]
    assert cache_info(beneath).hits == 2 - prompts and "generate" not in vars(model.base_model)
    model.base_model = build("LlamaForCausalLM")[0].eval()
    torch.nn.init.normal_(model.base_model.lm_head.weight)
    assert torch.equal(compiled.generate(IDS, **plain), model.generate(IDS, **plain))
    assert huggingface._beneath[compiled] is not beneath


def test_drafted_tokens() -> None:
    """Tokens that are drafted and refused are taken back from the cache, which one of fixed size cannot do."""
    model, draft = build("LlamaForCausalLM")[0], build("GPT2LMHeadModel")[0]
    ids, compiled = IDS[:1, :5], tfn.compile(copy.deepcopy(model), "auto")
    plain = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for drafts in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 2}):
        assert torch.equal(compiled.generate(ids, **plain, **drafts), model.generate(ids, **plain))
    config = transformers.GenerationConfig(**plain, prompt_lookup_num_tokens=2)
    assert torch.equal(compiled.generate(ids, config), model.generate(ids, **plain))


def test_beams_on_a_sliding_cache() -> None:
    """The batch grows after the prompt has been seen with another one, and the cache counts in Python."""
    config = transformers.Gemma2Config(**GROUPED, head_dim=8, sliding_window=4)
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(config).eval()
    compiled = tfn.compile(copy.deepcopy(model), "auto")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for beams, programs in ((1, 3), (2, 5), (2, 5)):
        known = model.generate(IDS[:, :5], num_beams=beams, cache_implementation="static", **options)
        assert torch.equal(compiled.generate(IDS[:, :5], num_beams=beams, **options), known)
        assert cache_info(compiled).misses == programs


def test_a_cache_that_is_passed_is_filled() -> None:
    model, _ = build("LlamaForCausalLM")
    compiled = tfn.compile(copy.deepcopy(model), "auto")
    mine, its = (transformers.DynamicCache(config=model.config) for _ in range(2))
    for part in IDS.split(4, dim=1):
        with torch.no_grad():
            found, known = compiled(input_ids=part, **{CACHE: mine}), model(input_ids=part, **{CACHE: its})
        assert same(found.logits, known.logits)
    assert mine.get_seq_length() == its.get_seq_length() == 8
    assert same(mine.layers[1].keys, its.layers[1].keys)


def test_state_is_saved_under_the_user_s_names(tmp_path: Path) -> None:
    model, inputs = build("BertForMaskedLM")
    compiled = tfn.compile(copy.deepcopy(model), "auto")
    expected = model(**inputs).logits
    assert list(compiled.state_dict()) == list(model.state_dict())
    compiled.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert type(again) is type(model) and same(again(**inputs).logits, expected)
    assert same(tfn.compile(again, "auto")(**inputs).logits, expected)
    other = type(model)(model.config).eval()
    tfn.compile(other, "auto").load_state_dict(compiled.state_dict())
    assert same(other(**inputs).logits, expected)


def test_loss_falls_on_real_text() -> None:
    text = "".join(inspect.getsource(module) for module in (ast, json))
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, **SIZES, "vocab_size": 128, "resid_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0))
    compiled = tfn.compile(model, "auto").train()
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    tokens = torch.tensor([min(ord(letter), 127) for letter in text[: 30 * 8 * 32]]).reshape(30, 8, 32)
    losses = list[float]()
    for batch in tokens:
        loss = compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] - 1 and cache_info(compiled).misses == 1


class Seed:
    """The seed's recipe, as its author wrote it, but for the names of our classes."""

    class CompileHFBert(tfn.Recipe):
        def __init__(self) -> None:
            super().__init__()

        def validate(self, model: Any) -> None:
            if not isinstance(model, transformers.BertForSequenceClassification):
                raise ValueError("The model must be a BertForSequenceClassification")

        def setup_lookasides(self) -> Any:
            warning = transformers.modeling_utils.PreTrainedModel.warn_if_padding_and_no_attention_mask
            return [
                tfn.Lookaside(fn=warning, replace_with=lambda *args: None),
                tfn.Lookaside(fn=torch.compiler.is_compiling, replace_with=lambda *args: True),
            ]

    class QuantizedHFBert(tfn.Recipe):
        def __init__(self, quantize: bool = False) -> None:
            super().__init__()
            self.bert_recipe = Seed.CompileHFBert()
            if quantize:
                self.quant_recipe = recipes.get("quantize_nf4")()
            self.quantize = quantize

        def setup_lookasides(self) -> Any:
            return self.bert_recipe.setup_lookasides()

        def setup_transforms(self) -> Any:
            return self.quant_recipe.setup_transforms() if self.quantize else ()


def test_encoders_get_the_mask_that_compiled_transformers_forget() -> None:
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 1, "local_radius": 4}
    model = transformers.LongT5ForConditionalGeneration(transformers.LongT5Config(**sizes, **SIZES)).eval()
    compiled = tfn.compile(copy.deepcopy(model), "auto", executors="torch")
    mine, its = (each(input_ids=IDS, decoder_input_ids=IDS) for each in (compiled, model))
    assert same(mine.logits, its.logits)


def test_the_seed_s_recipes() -> None:
    torch.manual_seed(0)
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL)).eval()
    expected = bert(IDS).logits
    assert same(tfn.compile(bert)(IDS).logits, expected)
    assert same(tfn.compile(bert, recipe=Seed.CompileHFBert())(IDS).logits, expected)
    quantized = tfn.compile(bert, recipe=Seed.QuantizedHFBert(quantize=True))(IDS).logits
    assert 0 < (quantized - expected).abs().max() < 0.2
    both = tfn.compile(bert, recipe=[Seed.CompileHFBert(), recipes.get("quantize_nf4")()])
    assert same(both(IDS).logits, quantized)
    with pytest.raises(ValueError, match="The model must be a BertForSequenceClassification"):
        tfn.compile(build("GPT2LMHeadModel")[0], Seed.CompileHFBert())


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.LlamaConfig(**GROUPED, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    arguments = [str(tmp_path), "--recipe", "hf-llama", "--report", str(tmp_path / "out"), "--no-torch-compile"]
    assert recipes.command.main(arguments) == 0
    text = capsys.readouterr().out
    assert "recipe     Llama(as_eager=False)" in text and "2. static_cache" in text
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["ops"]["aten.mm.default"] == 15 and set(found["seconds"]) == {"thunder_fn", "eager"}


def test_images_for_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their size is that of a part of the configuration, or any; what cannot be built is said in one line."""
    sizes = {"hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4, "depths": [1] * 4, "decoder_hidden_size": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    clip = transformers.CLIPConfig(vision_config={**vision, "image_size": 32, "patch_size": 16}, text_config=vision)
    segformer = transformers.SegformerConfig(**sizes, num_encoder_blocks=4)
    shapes = ((clip, "CLIPForImageClassification", 32), (segformer, "SegformerForImageClassification", 224))
    for config, cls, size in shapes:
        made = getattr(transformers, cls)(config)
        assert recipes.command.example_inputs(made)["pixel_values"].shape == (2, 3, size, size)
    transformers.ReformerConfig(architectures=["ReformerModelWithLMHead"]).save_pretrained(tmp_path)
    assert recipes.command.main([str(tmp_path)]) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("thunder_fn compile")]
    assert "make sure that `is_decoder=True`" in line


@pytest.mark.parametrize("name", SMALLER)
def test_published_sizes_are_captured_on_the_meta_device(name: str) -> None:
    """No weight is computed; `benchmarks models --only capture` prints the seconds, of the largest ones too."""
    assert capture_seconds(name) > 0
