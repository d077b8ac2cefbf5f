"""Recipes for Hugging Face's transformers: the needs of each family, as a third party would write
them.

transformers is imported when a recipe is used, never by `import thunder_fn`.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from unittest import mock
from weakref import WeakKeyDictionary

import torch

from thunder_fn.capture import pytree
from thunder_fn.capture.replaced.lookasides import Lookaside
from thunder_fn.errors import kind_of, with_article
from thunder_fn.jitted.modules.module import jit_of, with_forward, with_methods
from thunder_fn.jitted.transforms import Transform
from thunder_fn.recipes.recipe import Recipe
from thunder_fn.recipes.registry import register


def _in_transformers(path: str) -> Any:
    """A function or class of transformers, by module and name; None where this release has none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(f"transformers.{module}"), name, None)
    except ImportError:
        return None


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand-in for a warning that looks at values."""


def _take_caches_apart(model: Any) -> Any:
    """Caches of keys and values are arguments that models change."""
    names = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin")
    pytree.register_object(
        *filter(None, (_in_transformers(f"cache_utils.{name}") for name in names))
    )
    return model


DRAFTS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
"""Options of `generate` by which tokens are drafted and taken back, which keys and values of
fixed size cannot be.
"""


_SAY = frozenset(("cache_implementation", "past_key_values", "cache"))
"""Arguments of `generate` that say where keys and values are; the last is that of transformers
5.24.
"""


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` with keys and values of fixed size, unless the call or a configuration says
    otherwise.
    """
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")
    config = self.generation_config if given is None else given
    is_said = config.cache_implementation is not None or not _SAY.isdisjoint(kwargs)
    drafts = any(kwargs.get(name, getattr(config, name, None)) is not None for name in DRAFTS)
    if not is_said and not drafts and kwargs.get("use_cache", config.use_cache) is not False:
        if given is None:
            kwargs["cache_implementation"] = "static"
        else:
            config = copy.copy(config)
            config.cache_implementation = "static"
            if len(args) > 1:
                args = (args[0], config, *args[2:])
            else:
                kwargs["generation_config"] = config
    cls: Any = type(jit_of(self).module)
    return cls.generate(self, *args, **kwargs)


def _generating(compiled: Any, generate: Callable[..., Any]) -> Any:
    """The model with another `generate`, if it generates."""
    generates = getattr(compiled, "generation_config", None)
    return with_methods(compiled, generate=generate) if generates else compiled


def _generate_with_static_cache(compiled: Any) -> Any:
    """`generate` decodes with keys and values of fixed size, so that one program serves every
    token.
    """
    return _generating(compiled, _generate)


_beneath: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
"""The model by which compiled models with adapters generate."""


def _generate_beneath(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` of a model with adapters: the model beneath them, which generates, is compiled
    as this one is.
    """
    inner, base = jit_of(self), self.get_base_model()
    beneath = _beneath.get(self)
    if beneath is None or jit_of(beneath).module is not base:
        beneath = with_forward(base, inner.again)
        if (
            not self.active_peft_config.is_prompt_learning
        ):  # PEFT puts prompts into caches that grow
            beneath = _generate_with_static_cache(beneath)
        _beneath[self] = beneath
    cls: Any = type(inner.module)
    with mock.patch.object(base, "generate", beneath.generate):
        return cls.generate(self, *args, **kwargs)


def _generate_with_adapters(compiled: Any) -> Any:
    return _generating(compiled, _generate_beneath)


CACHES = Transform(_take_caches_apart, name="caches_as_arguments", on="model", idempotent=True)
STATIC = Transform(_generate_with_static_cache, name="static_cache", on="compiled", idempotent=True)
ADAPTED = Transform(
    _generate_with_adapters, name="adapted_generate", on="compiled", idempotent=True
)


@register
class HuggingFace(Recipe):
    """Every model of transformers.

    Args:
        as_eager: compute as transformers does when nothing is compiled, to the last bit, where it
            has another way for compilers.
    """

    name = "hf-transformers"
    models = ("transformers.PreTrainedModel",)
    ways: ClassVar[tuple[tuple[str, Callable[..., Any]], ...]] = ()
    """Functions of transformers that look whether they are compiled, and their forms in eager
    PyTorch.
    """

    def __init__(self, as_eager: bool = False) -> None:
        self.as_eager = as_eager

    def validate(self, model: Any) -> None:
        """Check that the model is of the family."""
        known = {
            f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(model).__mro__
        }
        if not known & set(self.models):
            wanted = " or ".join(self.models)
            raise ValueError(
                f"the recipe {self.name} is for {with_article(wanted)}, given {kind_of(model)}"
            )

    def setup_lookasides(self) -> Sequence[Lookaside]:
        """The warning about padding looks at values."""
        warning = _in_transformers("modeling_utils.PreTrainedModel")
        found = [(getattr(warning, "warn_if_padding_and_no_attention_mask", None), _nothing)]
        found += [(_in_transformers(path), way) for path, way in self.ways if self.as_eager]
        return tuple(Lookaside(fn, way) for fn, way in found if fn is not None)

    def setup_transforms(self) -> Sequence[Transform]:
        """Caches may be passed."""
        return (CACHES,)


class Decoder(HuggingFace):
    """Models that generate, token by token."""

    def setup_transforms(self) -> Sequence[Transform]:
        """One program for every token."""
        return (*super().setup_transforms(), STATIC)


def _family(
    cls: str, about: str, *prefixes: str, of: type[HuggingFace] = Decoder
) -> type[HuggingFace]:
    """A recipe that has nothing to add to `of` but the models it is for, whose base classes
    begin with the prefixes.
    """
    models = tuple(f"transformers.{prefix}PreTrainedModel" for prefix in prefixes or (cls,))
    body = {"__doc__": about, "__module__": __name__, "name": f"hf-{cls.lower()}", "models": models}
    return register(types.new_class(cls, (of,), exec_body=lambda namespace: namespace.update(body)))


Bert = _family("Bert", "BERT and its heads.", of=HuggingFace)
ViT = _family("ViT", "Vision transformers.", of=HuggingFace)
GPT2 = _family("GPT2", "GPT-2.")
Llama = _family("Llama", "Llama 2 and 3.")
Qwen = _family("Qwen", "Qwen 2 and 3.", "Qwen2", "Qwen3")
Mistral = _family("Mistral", "Mistral.")
Gemma = _family("Gemma", "Gemma 1, 2 and 3.", "Gemma", "Gemma2", "Gemma3")
Mixtral = _family("Mixtral", "Mixtures of experts.", "Mixtral", "Qwen2Moe")
T5 = _family("T5", "T5, encoder and decoder.")


@register
class Adapted(HuggingFace):
    """Models with adapters of PEFT, such as LoRA."""

    name = "hf-peft"
    models = ("peft.PeftModel",)

    def setup_transforms(self) -> Sequence[Transform]:
        """The model beneath the adapters generates."""
        return (*super().setup_transforms(), ADAPTED)


def _scan_in_order(*args: Any, **kwargs: Any) -> Any:
    """The selective scan one step after the other."""
    scan = _in_transformers("models.mamba.modeling_mamba.mamba_selective_scan")
    return scan(*args, **{**kwargs, "use_associative_scan": False})


@register
class Mamba(Decoder):
    """Mamba. As eager it scans in order; otherwise associatively, in a logarithm of the steps."""

    name = "hf-mamba"
    models = ("transformers.MambaPreTrainedModel",)
    ways = (("models.mamba.modeling_mamba.mamba_selective_scan", _scan_in_order),)


def _with_mask(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A stack of layers that is given the mask of ones which eager transformers makes where it is
    given none.

    If transformers takes itself for compiled, these encoders forget to make it, and fail.
    """

    signature = inspect.signature(fn)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        tokens = given.arguments.get("input_ids")
        of = given.arguments.get("inputs_embeds") if tokens is None else tokens
        if not self.is_decoder and of is not None and given.arguments.get("attention_mask") is None:
            given.arguments["attention_mask"] = torch.ones(of.shape[:2], device=of.device)
        return fn(*given.args, **given.kwargs)

    return forward


class MaskedEncoder(Decoder):
    """Families of encoders and decoders that take a mask, whose encoders are the class `stack`."""

    stack: ClassVar[str] = ""

    def setup_lookasides(self) -> Sequence[Lookaside]:
        """Encoders get their mask."""
        stack = _in_transformers(self.stack)
        found = () if stack is None else (Lookaside(stack.forward, _with_mask(stack.forward)),)
        return (*super().setup_lookasides(), *found)


@register
class SwitchTransformers(MaskedEncoder):
    """Switch transformers."""

    name = "hf-switch"
    models = ("transformers.SwitchTransformersPreTrainedModel",)
    stack = "models.switch_transformers.modeling_switch_transformers.SwitchTransformersStack"


@register
class LongT5(MaskedEncoder):
    """T5 of local attention."""

    name = "hf-longt5"
    models = ("transformers.LongT5PreTrainedModel",)
    stack = "models.longt5.modeling_longt5.LongT5Stack"
