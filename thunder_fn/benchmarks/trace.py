"""The time to capture a GPT and to differentiate the trace, by depth.

Work should grow with distinct code. The layers of a GPT are one body, so the gradient of 12 layers,
from scratch, should cost about what that of 2 layers does. Capture, which runs the function, grows
with depth.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

import thunder_fn as tfn
from thunder_fn.benchmarks.harness import OURS, Result, once, single
from thunder_fn.benchmarks.models import GPT, gpt_loss, jax_gpt_loss, params_of
from thunder_fn.derived import activity as activity, leaf_vjp as derive
from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.interpreters import grad as vjp, simplify
from thunder_fn.ir.trace import Trace

MEMOS: tuple[Any, ...] = (
    *(derive.vjp_rule, derive.differentiable_outputs, simplify.dce_to, simplify.inline),
    *(activity.activity, vjp.forward_backward, vjp.vjp, vjp.grad_and_value),
)
CAPTURE = "capture"
GRADIENT = "gradient of the trace, nothing known"
KNOWN = "gradient of the trace, one layer known"


def run(quick: bool = False) -> Iterator[Result]:
    """GPTs of 2, 6, 12 and 24 layers, a new model each time; PyTorch's own machinery is warm."""
    tokens = torch.randint(0, 96, (8, 64))
    depths, rounds = ((2, 3), 1) if quick else ((2, 6, 12, 24), 7)
    one_layer = _captured(1, tokens)
    tfn.trace(tfn.grad(gpt_loss(GPT(1))), params_of(GPT(1)), tokens, tokens)
    samples = {depth: [_round(depth, tokens, one_layer) for _ in range(rounds)] for depth in depths}
    found = {
        depth: {
            name: statistics.median(s[name] for s in samples[depth]) for name in samples[depth][0]
        }
        for depth in depths
    }
    for depth, seconds in found.items():
        notes = (
            (
                f"{OURS} is the trace of the gradient function from scratch: capture and gradient,"
                " no rule known"
            ),
            *(
                f"{name}: {seconds[name] / found[2][name]:.2f} x that of 2 layers"
                for name in (GRADIENT, KNOWN)
            ),
            (
                f"medians of {rounds}, each on a new model, the garbage collector off while the"
                " clock runs"
            ),
        )
        target = (
            "capture plus gradient under 1.5 s, the gradient part at most 1.3 x that of 2 layers"
        )
        yield single(
            f"trace: GPT of {depth} layers",
            seconds,
            target if depth == 12 else "",
            notes,
            (CAPTURE, GRADIENT, KNOWN),
        )


def _round(depth: int, tokens: torch.Tensor, one_layer: Trace) -> dict[str, float]:
    model = GPT(depth)
    loss, params = gpt_loss(model), params_of(model)
    both = _from_scratch(lambda: tfn.trace(tfn.grad(loss), params, tokens, tokens))
    capture = once(lambda: tfn.trace(loss, params, tokens, tokens))
    trace = tfn.trace(loss, params, tokens, tokens)
    gradient = _from_scratch(lambda: _differentiate(trace))
    known = _from_scratch(lambda: _differentiate(trace), lambda: _differentiate(one_layer))
    return {OURS: both, CAPTURE: capture, GRADIENT: gradient, KNOWN: known} | _jax(params, tokens)


def _from_scratch(f: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Seconds for one call, where reverse mode knows no more than `before` taught it."""
    for memo in MEMOS:
        memo.cache_clear()
    before()
    return once(f)


def _differentiate(trace: Trace) -> Trace:
    return vjp.grad_and_value(trace, tuple(map(is_differentiable, trace.input_types)))


def _captured(depth: int, tokens: torch.Tensor) -> Trace:
    model = GPT(depth)
    return tfn.trace(gpt_loss(model), params_of(model), tokens, tokens)


def _jax(params: dict[str, Any], tokens: torch.Tensor) -> dict[str, float]:
    try:
        import jax  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    converted = jax.tree.map(lambda tensor: tensor.numpy(), (params, tokens, tokens))
    return {
        "jax.make_jaxpr of jax.grad": once(
            lambda: jax.make_jaxpr(jax.grad(jax_gpt_loss(4)))(*converted)
        )
    }
