"""A GPU: wrong numbers, then speed, each part in a process of its own, since a lost context ends
one.

    python -m thunder_fn benchmarks gpu --json FOLDER

The files of `tests/gpu` run first, where pytest is installed. Attention of every order on each
kernel is compared with float64, and random numbers with eager's. Train steps of GPT-2 small in
bfloat16 run under each executor beside eager and the modes of torch.compile. Then come the
decoding of a Llama with a static cache, loops, quantised layers and the host's part of a call.
Times are medians between CUDA events. Else it needs the checkout, torch and optree only.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import thunder_fn as tfn
from thunder_fn.benchmarks.harness import OURS, Result, in_process, single
from thunder_fn.executors.torchinductor import wait

SECONDS = 540
"""A part that takes longer is ended: a lent machine runs commands of ten minutes."""

TESTS = Path(__file__).parents[2] / "tests" / "gpu"

Found = dict[str, Any]
"""The times of peers in seconds (`seconds`), and notes."""


def run(quick: bool) -> Iterator[Result]:
    """Run each part in a process of its own. Without a GPU, measure nothing."""
    if not torch.cuda.is_available():
        yield single("gpu", {}, notes=("there is no CUDA device: nothing was measured",))
        return
    for part in PARTS:
        found: Found
        try:
            found = in_process("gpu", part, *(["--quick"] if quick else []), seconds=SECONDS)
        except RuntimeError as error:
            found = {"notes": [str(error)[-300:]]}
        except subprocess.TimeoutExpired:
            found = {"notes": [f"took more than {SECONDS} seconds"]}
        yield single(f"gpu: {part}", found.get("seconds", {}), notes=tuple(found["notes"]))


def milliseconds(f: Callable[[], object], count: int = 20) -> float:
    """The median of the times between calls on the GPU."""
    for _ in range(5):
        f()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        f()
        event.record()
    torch.cuda.synchronize()
    times = sorted(before.elapsed_time(after) for before, after in itertools.pairwise(events))
    return times[len(times) // 2]


def distance(a: Tensor, b: Tensor) -> float:
    """The relative distance of two tensors."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


# ---- attention ----


def _loss(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q.sin(), q.cos(), is_causal=True).sin().sum()


def _scanned(q: Tensor) -> Tensor:
    return tfn.scan(lambda c, _: (c * 0.9, _loss(c * 0.9)), q, None, length=3)[1].sum()


def _looped(q: Tensor) -> Tensor:
    return _loss(q * 0.9) + _loss(q * 0.9 * 0.9) + _loss(q * 0.9 * 0.9 * 0.9)


def _forward(jvp: Any, f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda q: jvp(f, (q,), (q.cos(),))[1]


WAYS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "grad": lambda api: api.grad(_loss),
    "jvp": lambda api: _forward(api.jvp, _loss),
    "grad of grad": lambda api: api.grad(lambda q: (api.grad(_loss)(q) * q.cos()).sum()),
    "jvp of grad": lambda api: _forward(api.jvp, api.grad(_loss)),
    "grad in a scan": lambda api: api.grad(_scanned if api is tfn else _looped),
}


def attention(kernel: SDPBackend, quick: bool) -> Found:
    """Errors of each derivative beside float64, and times beside the kernel's forward."""
    dtype = torch.float32 if kernel is SDPBackend.EFFICIENT_ATTENTION else torch.bfloat16
    notes, seconds = [f"{dtype}"], dict[str, float]()
    for requires_grad in (False, True):
        q = torch.randn(2, 4, 77, 64, device="cuda").to(dtype).requires_grad_(requires_grad)
        for name, way in WAYS.items():
            with sdpa_kernel(SDPBackend.MATH):
                wanted = way(torch.func)(q.detach().double().cpu())
            with sdpa_kernel(kernel):
                error = distance(tfn.jit(way(tfn))(q), wanted)
                many = tfn.jit(tfn.vmap(way(tfn)))(
                    torch.stack([q.detach()] * 2).requires_grad_(requires_grad)
                )
            batched = distance(many, torch.stack([wanted] * 2))
            notes.append(
                f"{name}, requires_grad={requires_grad}: error {error:.1e}, of a batch"
                f" {batched:.1e}"
            )
    q = torch.randn(4, 16, 256 if quick else 2048, 64, device="cuda").to(dtype)
    with sdpa_kernel(kernel):
        seconds["forward, eager"] = milliseconds(lambda: _loss(q)) / 1e3
        for name in ("grad", "jvp", "grad of grad"):
            f = tfn.jit(WAYS[name](tfn))
            seconds[name] = milliseconds(lambda f=f: f(q)) / 1e3
    return {"seconds": seconds, "notes": notes}


# ---- train steps ----


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then two layers."""
        batch, length, width = x.shape
        qkv = self.qkv(self.ln1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """GPT-2, whose head is its embedding."""

    def __init__(self, width: int, heads: int, layers: int, words: int = 50304) -> None:
        super().__init__()
        self.words, self.places, self.ln = (
            nn.Embedding(words, width),
            nn.Embedding(1024, width),
            nn.LayerNorm(width),
        )
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of the next token."""
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        scores = F.linear(self.ln(x), self.words.weight)
        return F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda m: m,
    "jit": tfn.jit,
    "jit, triton": lambda m: tfn.jit(m, executors=["triton"]),
    "jit, inductor": lambda m: tfn.jit(m, executors=["inductor"]),
    "jit, inductor, cudagraphs": lambda m: tfn.jit(m, executors=["inductor", "cudagraphs"]),
    OURS: tfn.compile,
    "torch.compile": torch.compile,
    "torch.compile, reduce-overhead": lambda m: torch.compile(m, mode="reduce-overhead"),
    "torch.compile, max-autotune": lambda m: torch.compile(m, mode="max-autotune"),
}


def step(name: str, quick: bool) -> Found:
    """GPT-2 small in bfloat16 with fused AdamW: the time of a step, of the first one, the peak,
    the loss.
    """
    width, heads, layers, batch, length = (64, 4, 2, 1, 32) if quick else (768, 12, 12, 16, 1024)
    torch.manual_seed(0)
    model = GPT(width, heads, layers).to("cuda", torch.bfloat16)
    tokens = torch.randint(0, 50304, (batch, length), device="cuda")
    compiled = WRAPPERS[name](model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    losses = list[Tensor]()

    def run() -> None:
        loss = compiled(tokens)
        loss.backward()
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        losses.append(loss.detach().clone())

    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    if name == OURS:  # background compilation is to be done
        wait()
        run()
        run()
    torch.cuda.reset_peak_memory_stats()
    steady = milliseconds(run, 3 if quick else 20) / 1e3
    peak = torch.cuda.max_memory_allocated() / 2**30
    note = (
        f"first step {first:.1f} s, peak {peak:.2f} GiB, losses {losses[0].item():.4f} and"
        f" {losses[19].item():.4f}"
    )
    return {"seconds": {name: steady}, "notes": [note]}


# ---- decoding ----


class Layer(nn.Module):
    """A layer of a Llama that decodes one token, with a cache of static size."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, place: Tensor, angles: Tensor, cache: Tensor) -> Tensor:
        """Write the token's key and value into the cache, and attend to what is in it."""
        y = self.norm1(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        q = _turned(q.view(-1, self.heads, 1, self.size), angles)
        k, v = (
            _turned(k.view(-1, self.groups, 1, self.size), angles),
            v.view(k.shape[0], -1, 1, self.size),
        )
        cache.index_copy_(3, place, torch.stack((k, v)))
        mask = torch.arange(cache.shape[3], device=x.device) <= place
        mixed = F.scaled_dot_product_attention(
            q, *cache.unbind(), attn_mask=mask[None], enable_gqa=True
        )
        x = x + self.out(mixed.reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Llama(nn.Module):
    """A Llama of the size of Llama 3.2 1B, whose head is its embedding."""

    def __init__(
        self, width: int, heads: int, groups: int, inner: int, layers: int, words: int
    ) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(words, width), nn.RMSNorm(width)
        self.layers = nn.ModuleList(Layer(width, heads, groups, inner) for _ in range(layers))
        self.pairs = width // heads // 2

    def forward(self, token: Tensor, place: Tensor, caches: list[Tensor]) -> Tensor:
        """The scores of the next token."""
        powers = torch.arange(self.pairs, device=token.device) / self.pairs
        x, angles = self.words(token), place * 500000.0**-powers
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, place, angles, cache)
        return F.linear(self.norm(x), self.words.weight)


DECODERS = ("eager", OURS, "torch.compile, reduce-overhead")


def decoding(quick: bool) -> Found:
    """The time of a token, and how far the scores of the tenth are from eager's."""
    sizes, length = (
        ((64, 4, 2, 128, 2, 512), 32) if quick else ((2048, 32, 8, 8192, 16, 128256), 1024)
    )
    torch.manual_seed(0)
    model = Llama(*sizes).to("cuda", torch.bfloat16).requires_grad_(False)
    seconds, tenth, (width, heads, groups, *_) = dict[str, float](), list[Tensor](), sizes
    for name in DECODERS:
        run = WRAPPERS[name](model)
        caches = [
            torch.zeros(2, 1, groups, length, width // heads, dtype=torch.bfloat16, device="cuda")
            for _ in model.layers
        ]
        token, place = (torch.zeros(1, dtype=torch.long, device="cuda") for _ in range(2))

        def step() -> Tensor:
            scores = run(token, place, caches)
            token.copy_((scores.argmax(-1) + place) % sizes[-1])  # else a random Llama repeats one
            place.add_(1)
            return scores

        with torch.no_grad():
            for _ in range(5):
                step()
            wait()
            tenth.append([step().clone() for _ in range(5)][-1])
            seconds[name] = milliseconds(step, 3 if quick else 100) / 1e3
    notes = [
        f"{name}: error {distance(scores, tenth[0]):.1e}"
        for name, scores in zip(DECODERS, tenth, strict=True)
    ]
    return {"seconds": seconds, "notes": notes}


# ---- the rest ----


def loops(quick: bool) -> Found:
    """The gradient of a recurrent network by `scan`, for each step."""
    steps = 16 if quick else 512
    w, h, xs = torch.randn(64, 64) / 8, torch.zeros(16, 64), torch.randn(steps, 16, 64)
    seconds, notes = dict[str, float](), list[str]()

    def f(w: Tensor, h: Tensor, xs: Tensor) -> Tensor:
        return tfn.scan(lambda h, x: (torch.tanh(x + h @ w), None), h, xs)[0].sum()

    wanted = tfn.grad(f)(w.double(), h.double(), xs.double())
    for name in ([], ["inductor"], ["cudagraphs"]):
        jitted, args = tfn.jit(tfn.grad(f), executors=name), [x.cuda() for x in (w, h, xs)]
        notes.append(f"{name}: error {distance(jitted(*args), wanted):.1e}")
        seconds[", ".join(["a step, jit", *name])] = (
            milliseconds(lambda j=jitted, a=args: j(*a), 5) / 1e3 / steps
        )
    return {"seconds": seconds, "notes": notes}


def random_numbers(quick: bool) -> Found:
    """Dropout draws eager's numbers, recorded or not."""
    x, notes = torch.ones(4096, device="cuda"), list[str]()
    for name in ([], ["inductor"], ["cudagraphs"]):
        jitted = tfn.jit(lambda x: F.dropout(x, 0.5), executors=name)
        torch.manual_seed(0)
        mine = [jitted(x) for _ in range(3)]
        torch.manual_seed(0)
        theirs = [F.dropout(x, 0.5) for _ in range(3)]
        notes.append(
            f"{name}: equal to eager's"
            f" {[torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)]}"
        )
    return {"seconds": {}, "notes": notes}


def layers(quick: bool) -> Found:
    """Quantised linear layers of 4096 x 4096 beside bfloat16."""
    size = 256 if quick else 4096
    model = nn.Linear(size, size, bias=False).to("cuda", torch.bfloat16).requires_grad_(False)
    seconds, notes = dict[str, float](), list[str]()
    for rows in (1, size):
        x = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            seconds[f"{rows} rows, bfloat16"] = milliseconds(lambda x=x: model(x)) / 1e3
            for scheme in ("int8", "int8_dynamic", "int4", "nf4", "fp8_dynamic"):
                quantized = tfn.jit(tfn.quantize(model, scheme))
                notes.append(f"{scheme}, {rows} rows: error {distance(quantized(x), model(x)):.1e}")
                seconds[f"{rows} rows, {scheme}"] = (
                    milliseconds(lambda q=quantized, x=x: q(x)) / 1e3
                )
                if rows == 1:
                    moved = sum(
                        one.nbytes for one in (*quantized.parameters(), *quantized.buffers())
                    )
                    rate = moved / seconds[f"{rows} rows, {scheme}"] / 1e12
                    notes.append(f"{scheme}, {rows} rows: {rate:.2f} TB/s of the weights")
    return {"seconds": seconds, "notes": notes}


def calls(quick: bool) -> Found:
    """The host's part of a call on tensors of four numbers, launches queued."""
    f = lambda a, b: a.sin() * b + 1
    a = torch.ones(2, 2, device="cuda")
    b = torch.ones(2, 2, device="cuda")
    count = 1000
    seconds = dict[str, float]()
    peers = {"eager": f, OURS: tfn.jit(f), "jit, inductor": tfn.jit(f, executors=["inductor"])}
    for name, peer in {**peers, "torch.compile": torch.compile(f)}.items():
        peer(a, b)
        times = list[float]()
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                peer(a, b)
            times.append((time.perf_counter() - start) / count)
        seconds[name] = min(times)
    return {"seconds": seconds, "notes": []}


def tests(name: str, quick: bool) -> Found:
    """A file of `tests/gpu`."""
    if importlib.util.find_spec("pytest") is None:
        return {"notes": ["not run: pytest is not installed"]}
    chosen = ["-x", "-k", "test_explain_says_so or test_regions"] if quick else []
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", str(TESTS / name), *chosen]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=TESTS.parents[1], check=False
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"notes": [*failed, *done.stdout.splitlines()[-1:]]}


PARTS: dict[str, Callable[[bool], Found]] = {
    **{
        f"tests, {file.name}": lambda quick, name=file.name: tests(name, quick)
        for file in sorted(TESTS.glob("test_*.py"))
    },
    **{
        f"attention, {kernel.name}": lambda quick, kernel=kernel: attention(kernel, quick)
        for kernel in (
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
        )
    },
    "random numbers": random_numbers,
    **{f"GPT-2 124M step, {name}": lambda quick, name=name: step(name, quick) for name in WRAPPERS},
    "decode of a 1B Llama": decoding,
    "scan": loops,
    "quantised layers": layers,
    "calls": calls,
}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]]("--quick" in sys.argv)))
