"""Launches of programs on the simulated GPU, as JSON: `NULLGPU_VALUES=0 nullgpu python -m tests.gpu.launches NAME ...`."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn import executors

WIDTH, HEADS, LAYERS, WORDS, LENGTH = 128, 4, 4, 512, 128
STEPS = 100
WEIGHTS, BOTH = ("int8", "fp8", "int4", "nf4"), ("int8_dynamic", "fp8_dynamic")
LIBRARY = ctypes.CDLL(None)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(attended.reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.words.weight).view(-1, WORDS), wanted.view(-1))


def of_module(compiled: Callable[[nn.Module], Any]) -> Callable[[], Any]:
    """A module's forward and backward, then the optimizer of PyTorch."""
    model, tokens = GPT().to("cuda", torch.bfloat16), torch.zeros(2, LENGTH, dtype=torch.long, device="cuda")
    run, optimizer = compiled(model), torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        run(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def of_codes(rows: int, *schemes: str) -> Callable[[], Any]:
    """Layers on codes, one of each scheme."""
    x = torch.randn(rows, 256, dtype=torch.bfloat16, device="cuda")
    layer = nn.Linear(256, 256, dtype=torch.bfloat16, device="cuda")
    runs = [tfn.quantize(tfn.jit(layer), scheme) for scheme in schemes]

    def step() -> None:
        with torch.no_grad():
            for run in runs:
                run(x)

    return step


def of_function(compiled: Callable[..., Any], **options: Any) -> Callable[[], Any]:
    """The whole step as one function."""
    model, tokens = GPT().to("cuda", torch.bfloat16), torch.zeros(2, LENGTH, dtype=torch.long, device="cuda")
    adamw = tfn.functional_optimizer(torch.optim.AdamW, lr=1e-3, **options)
    params = {name: value.detach() for name, value in model.named_parameters()}
    box = [params, adamw.init(params)]

    def train(params: Any, state: Any, tokens: Tensor) -> tuple[Any, Any, Tensor]:
        loss = lambda params: torch.func.functional_call(model, params, (tokens, tokens))
        grads, value = tfn.grad_and_value(loss)(params)
        return *adamw.update(params, grads, state), value

    run = compiled(train, donate_argnums=(0, 1))

    def step() -> None:
        box[0], box[1], _ = run(box[0], box[1], tokens)

    return step


def of_scan(f: Callable[..., Any], *size: int) -> Callable[[], Any]:
    """100 steps, which are small unless their size is given."""
    run = tfn.jit(f, executors=["inductor"])
    size = size or (4, 16)
    carry, xs = torch.zeros(size, device="cuda"), torch.randn(STEPS, *size, device="cuda")
    weight = torch.randn(size[-1], size[-1], device="cuda")
    return lambda: run(carry, xs, weight)


def of_while() -> Callable[[], Any]:
    """Newton's method, whose condition is on the GPU."""
    x = torch.ones(64, device="cuda")
    more, body = lambda y: (y * y - x).abs().max() > 1e-4, lambda y: (y + x / y) * 0.5
    run = tfn.jit(lambda x: tfn.while_loop(more, body, (x,)), executors=["inductor"])
    return lambda: run(x)


def averaged(carry: Tensor, xs: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return tfn.scan(lambda c, x: ((new := c * 0.9 + x.sin()), new.cos()), carry, xs)


def recurrent(carry: Tensor, xs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return tfn.scan(lambda c, x: ((new := (c @ weight + x).tanh()), new), carry, xs)


def gradient(f: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    return tfn.grad(lambda *args: f(*args)[1].square().sum(), argnums=(0, 1, 2))


PROGRAMS: dict[str, Callable[[], Callable[[], Any]]] = {
    "module": lambda: of_module(tfn.compile),
    "module without graphs": lambda: of_module(partial(tfn.jit, executors=[executors.inductor(tiered=True)])),
    "module by torch.compile": lambda: of_module(torch.compile),
    "whole step": lambda: of_function(tfn.compile),
    "whole step by PyTorch's kernels": lambda: of_function(tfn.jit),
    "whole step as a graph": lambda: of_function(partial(tfn.jit, executors=["inductor", "cudagraphs"])),
    "scan": lambda: of_scan(averaged),
    "gradient of scan": lambda: of_scan(gradient(averaged)),
    "scan of large steps": lambda: of_scan(averaged, 64, 512),
    "RNN": lambda: of_scan(recurrent),
    "gradient of an RNN": lambda: of_scan(gradient(recurrent)),
    "while_loop": of_while,
    "codes, one row": lambda: of_codes(1, *WEIGHTS),
    "codes, many rows": lambda: of_codes(100, *WEIGHTS),
    "codes of activations, one row": lambda: of_codes(1, *BOTH),
    "codes of activations, many rows": lambda: of_codes(100, *BOTH),
}


def launches(step: Callable[[], Any]) -> int:
    """The launches of a step, once everything is compiled."""
    for _ in range(2):
        step()
    executors.wait()
    for _ in range(2):
        step()
    before = LIBRARY.nullcuda_launches()
    step()
    return LIBRARY.nullcuda_launches() - before


if __name__ == "__main__":
    LIBRARY.nullcuda_launches.restype = ctypes.c_long
    CachingAutotuner.bench = lambda *_args, **_options: 1.0  # times on a simulated GPU say nothing
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    print(json.dumps({name: launches(PROGRAMS[name]()) for name in sys.argv[1:]}))
