"""One chart of saved results: the time of each peer as a part of eager PyTorch's.

    python -m thunder_fn benchmarks --chart FILE.svg

The rows are one case of each kind, chosen once and for good, so the chart shows where a peer is
ahead too.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
OURS, EAGER, COMPILED, JAX = "thunder_fn", "eager PyTorch", "torch.compile", "jax.jit"
COLOURS = {OURS: "#3949ab", EAGER: "#b0b0b8", COMPILED: "#e07a1f", JAX: "#2e8b57"}
GPU_STEP = "gpu__GPT_2_124M_step__"

ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("call of sin(a) * b + 1, 2 x 2", ("call__sin_a____b___1__2x2__inductor_executor",)),
    ("per-example gradients of a CNN", ("transforms__per_sample_gradients__CNN__batch_64",)),
    ("Hessian-vector product", ("transforms__Hessian_vector_product",)),
    (
        "gradient of a tanh RNN, 512 steps",
        ("control_flow__tanh_RNN__512_steps_of_16x64__gradient_per_step",),
    ),
    (
        "force field, gradient of a loss on forces",
        ("compiled__force_field__MLP_energy_of_64_atoms__gradient_of_a_loss_on_forces",),
    ),
    (
        "GPT of 4 layers, train step",
        ("compiled__GPT_4_layers__width_256__context_128__batch_8__AdamW",),
    ),
    ("GPT-2 small of transformers, train step", ("models__GPT_2_small__train_step__steady_step",)),
    ("Llama of 4 layers, decoding", ("models__Llama_of_4_layers__decoding__steady_step",)),
    (
        "GPT-2 small in bfloat16, train step",
        tuple(f"{GPU_STEP}{peer}" for peer in ("eager", "thunder_fn", "torch_compile")),
    ),
)
"""Label, and the saved results that have its figures."""

WIDTH, LEFT, BAR, GAP, TOP = 500, 12, 13, 18, 78
"""Labels stand above the bars, so that a phone shows them in a size that can be read."""
UNIT = 245
"""Pixels of eager's bar."""


@dataclass(frozen=True)
class Row:
    """A case: the time of each peer as a part of eager's, and the machine and date of the
    measurement.
    """

    label: str
    ratios: dict[str, float]
    measured: str


def read(folder: Path = RESULTS) -> tuple[Row, ...]:
    """The rows of the chart from saved results."""
    return tuple(
        _row(label, [json.loads((folder / f"{file}.json").read_text()) for file in files])
        for label, files in ROWS
    )


def _row(label: str, results: list[dict[str, Any]]) -> Row:
    seconds: dict[str, float] = {}
    for result in results:
        for peer, value in result["seconds"].items():
            seconds[_peer(peer)] = (
                value  # the executor that compiles comes after the one that does not
            )
    machine = results[0]["machine"]
    threads = "" if "NVIDIA" in machine["device"] else f", threads: {machine['threads']}"
    measured = f"{machine['device']}{threads}, torch {machine['torch']}, {machine['date']}"
    return Row(
        label,
        {peer: seconds[peer] / seconds[EAGER] for peer in COLOURS if peer in seconds},
        measured,
    )


def _peer(name: str) -> str:
    if name.startswith(OURS):
        return OURS if name != "thunder_fn, torch executor" else name
    if name.startswith(COMPILED):
        return COMPILED
    return JAX if name.startswith("jax") else EAGER if "eager" in name else name


def svg(rows: tuple[Row, ...]) -> str:
    """The chart as text of an SVG file, readable on light and on dark pages."""
    y, parts = TOP, list[str]()
    for row in rows:
        parts.append(_text(LEFT, y + 10, row.label, size=13, weight="600"))
        parts.append(_text(LEFT, y + 24, row.measured, colour="#666"))
        y += 30
        for peer, ratio in row.ratios.items():
            length = min(ratio * UNIT, WIDTH - LEFT - 120)
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 2}"'
                f' fill="{COLOURS[peer]}"/>'
            )
            parts.append(
                _text(
                    LEFT + length + 5,
                    y + 10,
                    f"{ratio:.2f}{', not to scale' if length < ratio * UNIT else ''}",
                )
            )
            y += BAR
        y += GAP
    legend, x = list[str](), LEFT
    for peer, colour in COLOURS.items():
        legend.append(f'<rect x="{x}" y="46" width="12" height="12" fill="{colour}"/>')
        legend.append(_text(x + 17, 56, peer, size=12))
        x += 119
    title = "Time as a part of eager PyTorch's (shorter is faster)"
    notes = (
        "The RNN of torch.compile is 16 unrolled steps; times are a step's.",
        "Where a peer has no bar it was not measured.",
    )
    frame = f'<rect width="{WIDTH}" height="{y + 30}" rx="6" fill="#ffffff"/>'
    body = [
        _text(LEFT, 28, title, size=15, weight="600"),
        *legend,
        *parts,
        *(_text(LEFT, y + 4 + 15 * k, note, colour="#666") for k, note in enumerate(notes)),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {y + 30}"'
        ' role="img" font-family="sans-serif">'
    )
    return "\n".join([head, f"<title>{html.escape(title)}</title>", frame, *body, "</svg>", ""])


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 11,
    weight: str = "400",
    colour: str = "#1c1c22",
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(text)}</text>'
