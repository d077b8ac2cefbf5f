"""The nodes that a jitted call leaves in autograd's graph: what can be asked of eager code's graph can be asked of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given

from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.simplify import inline
from thunder_fn.jitted.autograd.bridge import bridge
from thunder_fn.jitted.autograd.pieces import pieces_of
from thunder_fn.testing.laws.comparing import close, holds, random_like, run, tolerance
from thunder_fn.testing.laws.reverse import split
from thunder_fn.testing.strategies import Case, cases

Values = tuple[Any, ...]


@given(cases())
def test_pieces_are_the_backward(case: Case) -> None:
    """One after the other, and what they give added up, they compute what the backward does."""
    for trace in (case.trace, inline(case.trace)):
        whole, cotangents = split(trace), random_like(trace)
        outputs = run(whole.forward, case.inputs)
        residuals = whole.residual_values(case.inputs, outputs)
        expected = run(whole.backward, (*residuals, *cotangents))
        pieces = pieces_of(whole)
        edges: dict[int, torch.Tensor] = dict(enumerate(cotangents))
        gradients: dict[int, torch.Tensor] = {}
        for piece in pieces.pieces:
            taken = (edges[edge] if edge in edges else zeros(pieces.edges[edge]) for edge in piece.takes)
            values = run(piece.trace, (*(residuals[number] for number in piece.residuals), *taken))
            for target, value in zip(piece.gives, values, strict=True):
                into = edges if target.kind == "edge" else gradients
                into[target.index] = into[target.index] + value if target.index in into else value
        for place, at in enumerate(whole.gradients):
            holds((at is None) == (place not in gradients), f"gradient {place} is there or is not", trace=trace)
            if at is not None:
                close(
                    (gradients[place],), (expected[at],), tolerance(trace), f"gradient {place} in pieces", trace=trace
                )


def zeros(type: Any) -> torch.Tensor:
    return torch.zeros(type.shape, dtype=type.dtype)


@given(cases())
def test_results_have_the_gradients_of_eager_code(case: Case) -> None:
    """Of each result alone, by inputs and by the other results: the same ones are None, and the others are equal."""
    trace = inline(case.trace)
    leaves = tuple(x.clone().requires_grad_(x.dtype.is_floating_point) for x in case.inputs)
    bridged = bridge(trace, leaves)
    if bridged is None:
        return
    ours, eager = drawn(lambda: bridged(*leaves)), drawn(lambda: evaluate(trace, leaves))
    is_flat = not any(equation.bodies for equation in trace.equations)
    for position in bridged.active_places:
        others = tuple(place for place in bridged.active_places if place != position) if is_flat else ()
        found, expected = (gradients(results, position, leaves, others) for results in (ours, eager))
        for a, b in zip(found, expected, strict=True):
            if b is not None and a is None:
                holds(not b.any(), f"a gradient of result {position} is None", trace=trace)
            elif b is not None:
                close((a,), (b,), tolerance(trace), f"a gradient of result {position}", trace=trace)


def drawn(f: Callable[[], Values]) -> Values:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return tuple(f())


def gradients(results: Values, position: int, leaves: Values, others: tuple[int, ...]) -> Values:
    wanted = (*(leaf for leaf in leaves if leaf.requires_grad), *(results[place] for place in others))
    output = results[position]
    if not output.requires_grad:
        return (None,) * len(wanted)
    return torch.autograd.grad(output, wanted, torch.ones_like(output), retain_graph=True, allow_unused=True)
