"""`benchmarks models`: models of transformers at their published sizes, with random weights, by one
call of `compile`.

Each peer works in a process of its own with empty caches. The figures are seconds from the model to
the end of the first step, and seconds of a step once everything is compiled. A second process on
these caches, whose heap hands back whatever is freed, measures the peak of a step's memory above
what it held before. A training step is forward and backward; decoding is greedy, on a static cache,
by `generate`. Capture is timed on the meta device. A peer that takes longer than `PATIENCE_SECONDS`
is left out, and told so.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import thunder_fn as tfn
from thunder_fn.benchmarks.checkpoint import process_peak
from thunder_fn.benchmarks.harness import (
    FREEING_HEAP,
    OURS,
    Memory,
    Result,
    empty_caches,
    in_process,
    machine,
    single,
)
from thunder_fn.benchmarks.published import CAPTURED, SMALLER, capture_seconds


@dataclasses.dataclass(frozen=True)
class Model:
    """A class of transformers and the options of its configuration; `small` are those that make it
    small.

    `batch` and `length` are the sizes of the input; where `tokens` is not 0, so many are decoded
    after it.
    """

    cls: str
    config: str
    options: dict[str, Any]
    small: dict[str, Any]
    batch: int
    length: int
    tokens: int = 0

    def build(self, quick: bool) -> Any:
        """The model with random weights, without dropout, so that peers compute the same."""
        import transformers  # pyright: ignore[reportMissingImports]

        made = getattr(transformers, self.config)(
            **{**self.options, **(self.small if quick else {})}
        )
        for name in vars(made):
            if "dropout" in name or name.endswith("pdrop"):
                setattr(made, name, 0.0)
        torch.manual_seed(0)
        return getattr(transformers, self.cls)(made)

    def inputs(self, config: Any, quick: bool) -> dict[str, torch.Tensor]:
        """A batch with labels, or a prompt."""
        if self.config == "ViTConfig":
            shape = self.batch, config.num_channels, config.image_size, config.image_size
            return {"pixel_values": torch.randn(shape), "labels": torch.arange(self.batch) % 2}
        ids = torch.randint(
            config.vocab_size, (self.batch, min(self.length, 8) if quick else self.length)
        )
        if self.tokens:
            return {"input_ids": ids}
        return {
            "input_ids": ids,
            "labels": torch.arange(self.batch) % 2 if "Classification" in self.cls else ids,
        }


_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 96,
}
_LLAMA = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1376,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_MIXTRAL = {
    **_LLAMA,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "num_local_experts": 4,
}
MODELS = {
    "BERT-base, sequence classification": Model(
        "BertForSequenceClassification", "BertConfig", {}, _SMALL, 4, 64
    ),
    "GPT-2 small": Model(
        "GPT2LMHeadModel", "GPT2Config", {}, {"n_embd": 32, "n_layer": 2, "n_head": 4}, 2, 64
    ),
    "Llama of 4 layers": Model("LlamaForCausalLM", "LlamaConfig", _LLAMA, _GROUPED, 2, 64),
    "Llama of 4 layers, decoding": Model(
        "LlamaForCausalLM", "LlamaConfig", _LLAMA, _GROUPED, 1, 16, tokens=32
    ),
    "ViT-small": Model(
        "ViTForImageClassification",
        "ViTConfig",
        {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
        {**_SMALL, "image_size": 32},
        2,
        0,
    ),
    "Mixtral-tiny": Model("MixtralForCausalLM", "MixtralConfig", _MIXTRAL, _GROUPED, 2, 64),
}
QUICK = {
    "BERT-base, sequence classification": ("eager", "torch.compile"),
    "Llama of 4 layers, decoding": ("eager",),
}
"""Cases of --quick beside ours: the first compilation of a process with empty caches takes half
a minute.
"""

PATIENCE_SECONDS = 300
"""The seconds that a process is given."""


def cases(only: str, quick: bool = False) -> tuple[str, ...]:
    """The cases with a text in their name, in small or capital letters: captures, then models."""
    names = (
        *map("capture of {} on meta".format, SMALLER if quick else CAPTURED),
        *(QUICK if quick else MODELS),
    )
    return tuple(name for name in names if only.lower() in name.lower())


def run(quick: bool = False, only: str = "") -> Iterator[Result | Memory]:
    """Capture of published sizes; every model and peer, or two small ones with --quick; of these
    the `cases`.
    """
    names = cases(only, quick)
    for name in CAPTURED:
        if (what := f"capture of {name} on meta") in names:
            yield single(f"models: {what}", {OURS: capture_seconds(name)}, "under 5 s")
    for name in filter(MODELS.__contains__, names):
        peers = (OURS, *QUICK[name]) if quick else tuple(filter(_is_there, PEERS))
        measured = {peer: _fresh(name, peer, quick) for peer in peers}
        found = {peer: times for peer, times in measured.items() if times is not None}
        late = tuple(f"{peer}: over {PATIENCE_SECONDS} s" for peer in peers if peer not in found)
        what = f"models: {name}" if MODELS[name].tokens else f"models: {name}, train step"
        for column in ("first step", "steady step"):
            seconds = {peer: times[column] for peer, times in found.items()}
            yield single(f"{what}, {column}", seconds, "ahead of torch.compile", late)
        peaks = {peer: int(times["peak"]) for peer, times in found.items()}
        steady = {peer: times["steady step"] for peer, times in found.items()}
        yield Memory(
            f"{what}, peak memory", peaks, steady, "ahead of torch.compile", machine(), late
        )


def _is_there(peer: str) -> bool:
    return peer != "lightning-thunder" or importlib.util.find_spec("thunder") is not None


def _fresh(name: str, peer: str, quick: bool) -> dict[str, float] | None:
    """Measure in new processes that begin with empty caches; None if one of them is not done in
    time.
    """
    found: dict[str, float] = {}
    with empty_caches() as caches:
        for what, heap in (("time", {}), ("memory", FREEING_HEAP)):
            words, environment = (name, peer, str(int(quick)), what), {**caches, **heap}
            try:
                found |= in_process(
                    "pretrained", *words, environment=environment, seconds=PATIENCE_SECONDS
                )
            except subprocess.TimeoutExpired:
                return None
    return found


# ---- in a process of its own ----


def _compiled_by_torch(model: Any) -> Any:
    """The model itself, with a compiled forward, so that `generate` calls that."""
    model.forward = torch.compile(model.forward)
    return model


def _compiled_by_lightning(model: Any) -> Any:
    import thunder  # pyright: ignore[reportMissingImports]

    return thunder.jit(model)


PEERS: dict[str, Callable[[Any], Any]] = {
    OURS: lambda model: tfn.compile(model, "auto"),
    "eager": lambda model: model,
    "torch.compile": _compiled_by_torch,
    "lightning-thunder": _compiled_by_lightning,
}


def step_of(model: Any, inputs: dict[str, torch.Tensor], tokens: int) -> Callable[[], torch.Tensor]:
    """A step whose result tells whether peers did the same: the loss, or the tokens."""
    if tokens:
        options: Any = {
            "max_new_tokens": tokens,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        return lambda: model.generate(**inputs, **options, cache_implementation="static")

    def step() -> torch.Tensor:
        loss = model(**inputs).loss
        loss.backward()
        for param in model.parameters():
            param.grad = None
        return loss.detach()

    return step


def main(name: str, peer: str, quick: bool, what: str) -> None:
    """Measure the time or the memory of a peer on a model, and print it as JSON."""
    chosen = MODELS[name]
    model = chosen.build(quick).train(not chosen.tokens)
    inputs = chosen.inputs(copy.deepcopy(model.config), quick)
    start = time.perf_counter()
    step = step_of(PEERS[peer](model), inputs, chosen.tokens)
    step()
    first = time.perf_counter() - start
    for _ in range(2):
        step()
        _until_compiled(peer)
    if what == "memory":
        print(json.dumps({"peak": process_peak(step)[0]}))
    else:
        steady = statistics.median(_seconds(step) for _ in range(3 if quick else 7))
        print(json.dumps({"first step": first, "steady step": steady}))


def _until_compiled(peer: str) -> None:
    """Ours compiles in another process meanwhile."""
    if peer == OURS:
        from thunder_fn.executors.torchinductor import wait

        wait()


def _seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "1", sys.argv[4])
