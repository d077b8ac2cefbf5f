"""The main job: train a character-level GPT on Python's own source, with one jitted train step.

    python -m thunder_fn demo [--steps N] [--seed N] [--out FOLDER]

The loss, its gradient and the optimizer's step are one trace, parameters and optimizer state in and
out, donated. For the first steps the same model trains eagerly beside it on the same batches, so
that the two can be compared.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.ir.trace import Trace

LAYERS, WIDTH, HEADS, CONTEXT = 4, 128, 4, 64
BATCH, LEARNING_RATE, WEIGHT_DECAY = 16, 2e-3, 0.1
DEFAULT_STEPS, COMPARED_STEPS, WARM_UP_STEPS = 700, 60, 5
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))

Params = dict[str, Tensor]


# ---- the text ----


def read_text() -> Tensor:
    """The top-level modules of the standard library in the order of their names, as indices into
    ALPHABET.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise SystemExit(
            f"demo: {folder} holds no .py files to train on; install Python's standard library as"
            " source"
        )
    codes = torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
    ).long()
    indices = torch.where(codes == ord("\n"), 0, codes - 31)
    return indices[(codes == ord("\n")) | ((codes >= 32) & (codes < 127))]


def draw_batches(text: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Batches of CONTEXT + 1 characters from random places, i64[size, CONTEXT + 1]."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (size, 1), generator=generator)
        yield text[starts + torch.arange(CONTEXT + 1)]


# ---- the model: plain PyTorch ----


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.project_in = nn.Linear(WIDTH, 3 * WIDTH)
        self.project_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            self.project_in(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project_out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Characters i64[batch, length] to logits f32[batch, length, len(ALPHABET)]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(len(ALPHABET), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET), bias=False)
        for layer in (self.embed, self.position, self.head):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def cross_entropy(logits: Tensor, batch: Tensor) -> Tensor:
    """The mean loss in nats of predicting each next character."""
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


# ---- two ways to train it ----


@dataclass(frozen=True, slots=True)
class Functions:
    """The demo's model as functions of its parameters."""

    loss: Callable[[Params, Tensor], Tensor]
    train_step: Callable[[Params, Any, Tensor], tuple[Params, Any, Tensor]]
    init: Callable[[Params], Any]
    next_character: Callable[[Params, Tensor], Tensor]


def functions_of(model: nn.Module) -> Functions:
    """The loss, one train step and one step of sampling: pure functions, ready to be jitted."""
    optimizer = tfn.functional_optimizer(
        torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
    )

    def loss(params: Params, batch: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, params, (batch[:, :-1],)), batch)

    def train_step(params: Params, state: Any, batch: Tensor) -> tuple[Params, Any, Tensor]:
        grads, value = tfn.grad_and_value(loss)(params, batch)
        params, state = optimizer.update(params, grads, state)
        return params, state, value

    def next_character(params: Params, window: Tensor) -> Tensor:
        logits = functional_call(model, params, (window,))[:, -1]
        return torch.multinomial(torch.softmax(logits / 0.8, -1), 1)

    return Functions(loss, train_step, optimizer.init, next_character)


def eager_steps(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Train as PyTorch users write it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def step(batch: Tensor) -> Tensor:
        loss = cross_entropy(model(batch[:, :-1]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class Timed:
    """A train step that keeps its losses, in nats per character, and the seconds that each call
    took.
    """

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        self.step = step
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def run(self, batch: Tensor) -> None:
        """Run one step."""
        start = time.perf_counter()
        self.losses.append(self.step(batch).item())
        self.seconds.append(time.perf_counter() - start)


@dataclass(frozen=True, slots=True)
class Run:
    """A finished training run and the parameters that it found."""

    params: Params
    jitted: Timed
    eager: Timed


def train(
    model: GPT, eager_model: GPT, functions: Functions, batches: Iterator[Tensor], steps: int
) -> Run:
    """Train with the jitted step; for the first steps the eager one too, the two in turn, on the
    same batch.
    """
    params = {name: value.detach().clone() for name, value in model.named_parameters()}
    state = functions.init(params)
    jitted_step = tfn.jit(functions.train_step, donate_argnums=(0, 1))

    def step(batch: Tensor) -> Tensor:
        nonlocal params, state
        params, state, loss = jitted_step(params, state, batch)
        return loss

    jitted, eager = Timed(step), Timed(eager_steps(eager_model))
    with progress(steps) as report:
        for index, batch in zip(range(steps), batches, strict=False):
            both = (jitted, eager) if index % 2 else (eager, jitted)
            for way in both if index < COMPARED_STEPS else (jitted,):
                way.run(batch)
            report(jitted.losses[-1], BATCH * CONTEXT / statistics.median(jitted.seconds[-20:]))
    return Run(params, jitted, eager)


def bits_per_character(
    loss: Callable[[Params, Tensor], Tensor], params: Params, text: Tensor
) -> float:
    """The loss on 16 fixed batches of a text, in bits."""
    batches = draw_batches(text, BATCH, seed=0)
    return statistics.fmean(loss(params, next(batches)).item() for _ in range(16)) / math.log(2)


def sample(
    next_character: Callable[[Params, Tensor], Tensor], params: Params, prompt: Tensor, count: int
) -> str:
    """Characters that the model writes after a prompt of CONTEXT characters."""
    window, written = prompt[None], []
    for _ in range(count):
        character = next_character(params, window)
        window = torch.cat([window[:, 1:], character], 1)
        written.append(int(character))
    return as_text(written)


def as_text(indices: Sequence[int]) -> str:
    """The characters at the given indices of ALPHABET."""
    return "".join(ALPHABET[index] for index in indices)


# ---- what a person sees ----


@contextmanager
def progress(steps: int) -> Generator[Callable[[float, float], None]]:
    """A progress bar with loss and tokens per second; every 50th step as a line where rich is
    missing.
    """
    try:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        print("(no progress bar: `pip install rich` brings one)")
        yield print_steps(steps)
        return
    numbers = TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s")
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        numbers,
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=steps, loss=math.nan, speed=0.0)
        yield lambda loss, speed: bar.update(task, advance=1, loss=loss, speed=speed)


def print_steps(steps: int) -> Callable[[float, float], None]:
    """Report progress in lines."""
    done = 0

    def report(loss: float, speed: float) -> None:
        nonlocal done
        done += 1
        if done % 50 == 0 or done == steps:
            print(f"step {done}/{steps}  loss {loss:.3f}  {speed:,.0f} tokens/s", flush=True)

    return report


HIDDEN = re.compile(r" {9}|    # v\d+: ")
VARIABLES = re.compile(r"\b(v\d+), (?:v\d+, ){3,}(v\d+)")


def head(trace: Trace, lines: int = 36, columns: int = 118) -> str:
    """The first lines of a printed trace down to its bodies' own equations, long lists of
    variables cut short.
    """
    text = str(trace).splitlines()
    outline = [VARIABLES.sub(r"\1, ..., \2", line) for line in text if not HIDDEN.match(line)]
    shown = [
        line if len(line) <= columns else line[: columns - 3] + "..." for line in outline[:lines]
    ]
    return "\n".join(
        [*shown, f"    ({len(text)} lines in all; types of inputs and deeper bodies left out)"]
    )


def save_curve(run: Run, path: Path) -> bool:
    """Draw the losses of both runs; False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(
        [loss / math.log(2) for loss in run.jitted.losses],
        linewidth=1,
        label="thunder_fn.jit, one train step",
    )
    axes.plot(
        [loss / math.log(2) for loss in run.eager.losses],
        "k--",
        label=f"eager, first {COMPARED_STEPS} steps",
    )
    axes.set(
        xlabel="step",
        ylabel="training loss (bits per character)",
        title="GPT on Python's standard library",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def report_speed(run: Run) -> bool:
    """Print both medians and their ratio; False if the first losses of the two runs disagree."""
    compared = slice(min(WARM_UP_STEPS, len(run.eager.seconds) - 1), COMPARED_STEPS)
    jitted, eager = (statistics.median(way.seconds[compared]) for way in (run.jitted, run.eager))
    print(f"first call (capture, gradient, optimizer): {run.jitted.seconds[0]:.2f} s")
    print(
        f"median step: {jitted * 1e3:.1f} ms jitted, {eager * 1e3:.1f} ms eager;"
        f" {eager / jitted:.2f} x eager's speed"
    )
    pairs = list(zip(run.jitted.losses, run.eager.losses, strict=False))[:10]
    agree = all(math.isclose(a, b, rel_tol=1e-3) for a, b in pairs)
    gap = max(abs(a - b) for a, b in pairs)
    print(
        f"first {len(pairs)} losses: {'equal' if agree else 'DIFFERENT'} within 0.1 % (largest gap"
        f" {gap:.1e})"
    )
    return agree


# ---- the command ----


def main(argv: Sequence[str]) -> int:
    """Run the demo. Exit code 1 if jitted and eager losses disagree or a full run fails to halve
    the bits.
    """
    options = parse(argv)
    try:
        return demo(options.steps, options.seed, options.out)
    except KeyboardInterrupt:
        print("\ndemo: stopped", file=sys.stderr)
        return 130


def demo(steps: int, seed: int, out: Path) -> int:
    """Train, measure, sample, print and draw."""
    started = time.perf_counter()
    text = read_text()
    training, validation = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    torch.manual_seed(seed)
    model, eager_model = GPT(), GPT()
    eager_model.load_state_dict(model.state_dict())
    functions = functions_of(model)
    params = {name: value.detach() for name, value in model.named_parameters()}
    size = sum(value.numel() for value in params.values())
    print(
        f"text: {len(text):,} characters of Python's standard library; model: GPT with {size:,}"
        " parameters, ",
        end="",
    )
    print(
        f"{LAYERS} layers, width {WIDTH}, context {CONTEXT}; {steps} steps of {BATCH} x {CONTEXT}"
        " characters"
    )

    batch = next(draw_batches(training, BATCH, seed))
    for title, trace in (
        ("the forward trace", tfn.trace(functions.loss, params, batch)),
        ("the gradient's trace", tfn.trace(tfn.grad(functions.loss), params, batch)),
    ):
        print(f"\n== {title}\n{head(trace)}")

    print("\n== training")
    loss = tfn.jit(functions.loss)
    before = bits_per_character(loss, params, validation)
    run = train(model, eager_model, functions, draw_batches(training, BATCH, seed), steps)
    after = bits_per_character(loss, run.params, validation)

    print("\n== 200 characters written by the model")
    torch.manual_seed(seed)
    print(sample(tfn.jit(functions.next_character), run.params, validation[:CONTEXT], 200))

    print("\n== summary")
    halved = after <= before / 2
    print(f"validation bits per character: {before:.3f} before, {after:.3f} after", end=" ")
    print("(halved)" if halved else "(not halved)")
    agree = report_speed(run)
    curve = out / "loss.png"
    print(
        f"loss curve: {curve}"
        if save_curve(run, curve)
        else "no loss curve: `pip install matplotlib` draws one"
    )
    print(f"total: {time.perf_counter() - started:.0f} s")
    return 0 if agree and (halved or steps < DEFAULT_STEPS) else 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, checked; the folder for the output exists."""
    parser = argparse.ArgumentParser(
        prog="python -m thunder_fn demo", description="Train a small GPT with thunder_fn."
    )
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, help="how long to train (default %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, batches and samples (default %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo_out"),
        help="folder for loss.png (default %(default)s)",
    )
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, not {options.steps}")
    if not 0 <= options.seed < 2**63:
        parser.error(f"--seed must be from 0 to 2**63 - 1, not {options.seed}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror}")
    return options
