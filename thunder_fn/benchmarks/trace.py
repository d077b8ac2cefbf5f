"""The time to capture a GPT and to differentiate the trace, by depth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import thunder_fn as tfn
from thunder_fn.benchmarks.harness import OURS, Result, once, single
from thunder_fn.benchmarks.models import GPT, gpt_loss, jax_gpt_loss, params_of


def run(quick: bool = False) -> Iterator[Result]:
    """Capture, then capture with gradient, for 2, 6, 12 and 24 layers; the process is warm, the models are new."""
    tokens = torch.randint(0, 96, (8, 64))
    _first(GPT(1), tokens)
    for layers in (2, 6) if quick else (2, 6, 12, 24):
        model = GPT(layers)
        loss, params = gpt_loss(model), params_of(model)
        capture = once(lambda: tfn.trace(loss, params, tokens, tokens))
        both = once(lambda: tfn.trace(tfn.grad(loss), params, tokens, tokens))
        seconds = {OURS: both, f"{OURS}, capture only": capture}
        seconds |= _jax(layers, params, tokens)
        note = f"the gradient part takes {max(both - capture, 0) * 1e3:.1f} ms"
        target = "capture plus gradient under 1.5 s" if layers == 12 else ""
        yield single(f"trace: GPT of {layers} layers, capture and gradient", seconds, target, (note,))


def _first(model: GPT, tokens: torch.Tensor) -> None:
    """Pay for imports and first uses of PyTorch's machinery."""
    tfn.trace(tfn.grad(gpt_loss(model)), params_of(model), tokens, tokens)


def _jax(layers: int, params: dict[str, Any], tokens: torch.Tensor) -> dict[str, float]:
    try:
        import jax  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    converted = jax.tree.map(lambda tensor: tensor.numpy(), (params, tokens, tokens))
    return {"jax.make_jaxpr of jax.grad": once(lambda: jax.make_jaxpr(jax.grad(jax_gpt_loss(4)))(*converted))}
