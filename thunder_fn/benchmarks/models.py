"""The models that benchmarks measure, as plain PyTorch, and the same in JAX."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(batch, length, 3, self.heads, -1)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A small decoder-only transformer."""

    def __init__(
        self, layers: int, width: int = 128, heads: int = 4, vocabulary: int = 96, context: int = 64
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt_loss(model: GPT) -> Any:
    """The loss as a function of parameters, tokens and targets."""

    def loss(
        params: dict[str, torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        logits = torch.func.functional_call(model, params, (tokens,))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return loss


def params_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters, detached, by name."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def jax_gpt_loss(heads: int) -> Any:
    """Compute the loss in jax.numpy, on the same parameters."""
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    def norm(p: Any, name: str, x: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) / jnp.sqrt(variance + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(p: Any, name: str, x: Any) -> Any:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def block(p: Any, name: str, x: Any) -> Any:
        batch, length, width = x.shape
        qkv = linear(p, f"{name}.qkv", norm(p, f"{name}.norm1", x)).reshape(
            batch, length, 3, heads, width // heads
        )
        q, k, v = jnp.transpose(qkv, (2, 0, 3, 1, 4))
        scores = q @ jnp.swapaxes(k, -1, -2) / math.sqrt(width // heads)
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        y = jnp.swapaxes(jax.nn.softmax(scores, -1) @ v, 1, 2).reshape(batch, length, width)
        x = x + linear(p, f"{name}.out", y)
        return x + linear(
            p,
            f"{name}.down",
            jax.nn.gelu(linear(p, f"{name}.up", norm(p, f"{name}.norm2", x)), approximate=False),
        )

    def loss(p: Any, tokens: Any, targets: Any) -> Any:
        x = p["tokens.weight"][tokens] + p["positions.weight"][: tokens.shape[1]]
        layers = 1 + max(int(key.split(".")[1]) for key in p if key.startswith("blocks."))
        for index in range(layers):
            x = block(p, f"blocks.{index}", x)
        logits = linear(p, "head", norm(p, "norm", x))
        return -jnp.take_along_axis(jax.nn.log_softmax(logits, -1), targets[..., None], -1).mean()

    return loss
