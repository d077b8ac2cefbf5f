"""A GPU: wrong numbers, then speed, each part in a process of its own, since a lost context ends
one.

    python -m thunder_fn benchmarks gpu --json FOLDER

Attention of every order on each kernel is compared with float64, and random numbers with eager's.
Train steps of GPT-2 small in bfloat16 run under each executor beside eager and the modes of
torch.compile. Then come loops, quantised layers and the host's part of a call. Times are medians
between CUDA events. It needs the checkout, torch and optree only.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import thunder_fn as tfn
from thunder_fn.benchmarks.harness import OURS, Result, single
from thunder_fn.executors.torchinductor import wait

SECONDS = 540
"""A part that takes longer is ended: a lent machine runs commands of ten minutes."""

Found = dict[str, Any]
"""The times of peers in seconds (`seconds`), and notes."""


def run(quick: bool) -> Iterator[Result]:
    """Run each part in a process of its own. Without a GPU, measure nothing."""
    if not torch.cuda.is_available():
        yield single("gpu", {}, notes=("there is no CUDA device: nothing was measured",))
        return
    for part in PARTS:
        command = [
            sys.executable,
            "-m",
            "thunder_fn.benchmarks.gpu",
            part,
            *(["--quick"] if quick else []),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            found: Found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
            ended = f"ended with code {done.returncode}: {done.stderr[-300:]}"
        except subprocess.TimeoutExpired:
            found, ended = {}, f"took more than {SECONDS} seconds"
        notes = tuple(found.get("notes", [])) if found else (ended,)
        yield single(f"gpu: {part}", found.get("seconds", {}), notes=notes)


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


PARTS: dict[str, Callable[[bool], Found]] = {
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
    "scan": loops,
    "quantised layers": layers,
    "calls": calls,
}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]]("--quick" in sys.argv)))
