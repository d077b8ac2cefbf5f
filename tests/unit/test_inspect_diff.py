"""Unfolding traces, comparing them, and the chain of traces that jit makes."""

from __future__ import annotations

import json
from typing import Any

import torch
from hypothesis import given, settings
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn import inspect
from thunder_fn.benchmarks.models import GPT, gpt_loss, params_of
from thunder_fn.derived.leaf_vjp import alone
from thunder_fn.executors import FusionExecutor
from thunder_fn.inspect.encode import Run, encode
from thunder_fn.inspect.flat import Flat, flatten
from thunder_fn.inspect.memory_use import memories_of, memory_of
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.simplify import inline
from thunder_fn.testing.laws.comparing import same_bits
from thunder_fn.testing.strategies import Case, cases


def run(flat: Flat, inputs: Any) -> list[Any]:
    """A flat trace, leaf by leaf."""
    values: dict[int, Any] = {**flat.constants, **dict(zip(flat.roots, inputs, strict=False))}
    for leaf in flat.leaves:
        operands = [values[one] if isinstance(one, int) else one.value for one in leaf.operands]
        values.update(zip(leaf.outputs, evaluate(alone(leaf.equation), operands), strict=True))
    return [values[one] if isinstance(one, int) else one.value for one in flat.outputs]


@given(case=cases())
def test_leaves_compute_what_the_trace_does(case: Case) -> None:
    torch.manual_seed(3)
    want = evaluate(case.trace, case.inputs)
    torch.manual_seed(3)
    have = run(flatten(case.trace), case.inputs)
    assert len(have) == len(want) and all(map(same_bits, have, want))


@given(case=cases())
def test_a_trace_differs_from_itself_in_nothing(case: Case) -> None:
    assert inspect.diff(case.trace, case.trace).is_empty
    assert inspect.diff(case.trace, inline(case.trace)).is_empty


@given(first=cases(), second=cases())
def test_every_leaf_is_matched_added_or_removed(first: Case, second: Case) -> None:
    found = inspect.diff(first.trace, second.trace)
    matched = [at for at in found.matches if at is not None]
    assert len(set(matched)) == len(matched)
    assert sorted((*matched, *found.removed)) == list(range(len(found.before.leaves)))
    assert [at is None for at in found.matches] == [status == "added" for status in found.status]
    assert found.counts["removed"] == len(found.removed)


@settings(max_examples=15)
@given(case=cases())
def test_every_trace_can_be_looked_at(case: Case) -> None:
    def f(*xs: torch.Tensor) -> tuple[Any, ...]:
        return evaluate(case.trace, xs)

    found = inspect.chain(f, *case.inputs)
    live = memory_of(found)
    assert min(live.live, default=0) >= 0 and str(found) and str(live) and str(inspect.cost(f, *case.inputs))
    data = encode([Run(found.name, found, memories_of(found))])
    assert len(data["steps"]) == len(found.steps) and json.dumps(data)


def affine(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (F.linear(x, w).tanh() * 2).sum()


def test_text_of_a_difference() -> None:
    x = torch.ones(2)
    before = tfn.trace(lambda x: (x.sin() * 2).cos(), x)
    after = tfn.trace(lambda x: (x.sin() * 3).cos() + 1, x)
    assert str(inspect.diff(before, after)) == "\n".join(
        [
            "program -> program: 1 added, 0 removed, 1 changed, 2 same",
            "  v1: f32[2] = aten.sin.default(v0)",
            "~ v2: f32[2] = aten.mul.Tensor(v1, 3)  (arguments (2) to (3))",
            "  v3: f32[2] = aten.cos.default(v2)",
            "+ v4: f32[2] = aten.add.Tensor(v3, 1)",
        ]
    )


def names(found: inspect.Chain) -> list[str]:
    return [step.name for step in found.steps]


def test_chain_of_a_gradient_inside_a_step() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return w - 0.1 * tfn.grad(affine)(w, x)

    found = inspect.chain(step, torch.ones(3, 2), torch.ones(4, 2))
    assert names(found) == ["capture affine", "grad_affine", "capture step", "program"]
    grad, whole = found.diff(1), found.diff(2)
    assert found.diff(0) is None and grad is not None and whole is not None
    assert grad.counts["removed"] == grad.counts["changed"] == 0 < grad.counts["added"]
    pairs = zip(whole.after.leaves, whole.status, strict=True)
    assert [leaf.equation.op.name for leaf, status in pairs if status == "added"] == [
        "aten.mul.Tensor",
        "aten.sub.Tensor",
    ]
    assert found.arguments == ("args[0]", "args[1]")
    assert all(step.seconds >= 0 for step in found.steps)


def test_chain_of_transforms_in_a_row() -> None:
    found = inspect.chain(tfn.vmap(tfn.grad(lambda x: (x.sin() * x).sum())), torch.ones(3, 4))
    assert names(found) == ["capture program", "grad_<lambda>", "vmap_grad_<lambda>", "program"]


def test_chain_under_autograd_has_both_halves() -> None:
    model = torch.nn.Linear(2, 3)
    found = inspect.chain(model, torch.ones(4, 2))
    assert names(found) == ["capture Linear", "forward", "forward program", "backward", "backward program"]
    assert found.arguments == ("args[0]", "weight", "bias")
    assert [step.program is not None for step in found.steps] == [False, False, True, False, True]
    assert found.split is not None and found.diff(3) is None
    saved = {found.steps[1].flat.types[mine] for mine, _ in found.saved}
    assert saved == {found.steps[3].flat.types[its] for _, its in found.saved}


def test_chain_has_jits_transforms_and_executors() -> None:
    slow = FusionExecutor("slow", fuse=lambda region: lambda *xs: evaluate(region, xs))
    slow.register_supported(torch.sin)

    def wasteful(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sin() + x.sin().sin()

    found = inspect.chain(tfn.jit(wasteful, transforms=[tfn.simplify], executors=[slow]), torch.ones(2))
    assert names(found) == ["capture wasteful", "simplify", "program"]
    simplified = found.diff(1)
    assert simplified is not None and simplified.counts["removed"] == 2
    assert [equation.op.name for equation in found.steps[2].trace.equations] == [
        "slow::slow_fusion_0",
        "aten.add.Tensor",
    ]


def test_chain_names_executors_that_were_not_asked() -> None:
    found = inspect.chain(tfn.jit(torch.sin, executors=["inductor"], numerics="bitwise"), torch.ones(2))
    assert found.left_out == (("inductor", "its results are precision-changing, and numerics='bitwise'"),)


def test_chain_is_told_what_closes_over_tensors() -> None:
    w = torch.ones(2, 2)
    found = inspect.chain(lambda x: (x @ w).sin(), torch.ones(2, 2))
    lowered = found.diff(1)
    assert lowered is not None and lowered.is_empty


def test_lowering_of_many_equal_layers_changes_little() -> None:
    """Layers share bodies and lines; what a tidied transpose changes is what reads it, and nothing downstream. A linear
    layer is one equation for up to four.
    """
    model, tokens = GPT(4, 16, context=8), torch.randint(0, 96, (2, 8))
    found = inspect.chain(tfn.grad(gpt_loss(model)), params_of(model), tokens, tokens)
    lowered = found.diff(len(found.steps) - 1)
    linears = 4 * 4 + 1
    assert lowered is not None and lowered.counts["added"] == linears
    assert lowered.counts["changed"] <= lowered.counts["removed"] < lowered.counts["same"] + 4 * linears
    assert {f"blocks.{layer}.{part}" for layer in range(4) for part in ("qkv", "out", "up", "down")} <= set(
        found.modules(-1)
    )


def test_modules_of_equal_layers_are_their_own() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with torch.no_grad():
        found = inspect.chain(model, torch.ones(1, 2))
    assert names(found) == ["capture Sequential", "program"]
    for position in range(2):
        assert set(found.modules(position)) == {"0", "1"}
