"""Layers that lie on top of each other in one weight: each is stored by itself, and computes on what it is stored as."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from tests.rounding import assert_rounded_alike
from thunder_fn.errors import RewriteError
from thunder_fn.parameters import SCHEMES, evaluate_ranks, simulated

LAYERS, WIDTH = 3, 32


def looped(params: Any, x: torch.Tensor) -> torch.Tensor:
    step = lambda c, own: (F.linear(c, own["w"], own["b"]).tanh(), None)
    return tfn.scan(step, x, params)[0]


def unrolled(params: Any, x: torch.Tensor) -> torch.Tensor:
    for w, b in zip(params["w"], params["b"], strict=True):
        x = F.linear(x, w, b).tanh()
    return x + F.linear(x, params["w"][-1])


def apart(params: Any, x: torch.Tensor) -> torch.Tensor:
    """The loop, of weights that are parameters of their own."""
    for at in range(LAYERS):
        x = F.linear(x, params[f"w{at}"], params["b"][at]).tanh()
    return x


def problem(dtype: torch.dtype = torch.float32) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Layers of very different sizes, which have no scale in common."""
    torch.manual_seed(0)
    w = torch.randn(LAYERS, WIDTH, WIDTH) * torch.tensor([0.02, 0.2, 2.0]).reshape(-1, 1, 1)
    w[:, 0] *= 8
    return {"w": w.to(dtype), "b": torch.randn(LAYERS, WIDTH, dtype=dtype)}, torch.randn(2, WIDTH, dtype=dtype)


def as_bytes(part: torch.Tensor) -> torch.Tensor:
    return part.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_stored_of_a_layer_is_that_of_the_layer_alone(scheme: str, dtype: torch.dtype) -> None:
    params, _ = problem(dtype)
    new = tfn.quantize(looped, scheme, stacked="*").prepare(params)
    for at in range(LAYERS):
        alone = tfn.quantize(looped, scheme).prepare({"w": params["w"][at]})
        assert all(torch.equal(as_bytes(new[f"w.{name[2:]}"][at]), as_bytes(part)) for name, part in alone.items())
        assert torch.equal(new.restore()["w"][at], alone.restore()["w"])


@pytest.mark.parametrize("f", [looped, unrolled])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_of_a_stack_compute_on_codes(scheme: str, f: Any) -> None:
    """Layers of a stack compute as layers with parameters of their own do: values and gradients, rounded activations
    included.
    """
    params, x = problem()
    q = tfn.quantize(f, scheme, stacked="*")
    text = str(q.rewrite(params, x).compute)
    assert f"= {scheme.removesuffix('_tensor')}_linear(" in text and "_decode(" not in text
    last = lambda p, x: (y := apart(p, x)) + F.linear(y, p[f"w{LAYERS - 1}"])
    one = tfn.quantize(apart if f is looped else last, scheme, filter="w*")
    new, other = q.prepare(params), one.prepare({"b": params["b"], **{f"w{i}": w for i, w in enumerate(params["w"])}})
    if scheme == "int8_static":
        new, other = q.calibrate(new, [(x,)]), one.calibrate(other, [(x,)])
        assert new["w.input_scale"].isfinite().all()
    leaf = x.clone().requires_grad_()
    found, expected = q(new, leaf), one(other, leaf)
    torch.testing.assert_close(found, expected)
    pulled = [torch.autograd.grad(y.square().sum(), leaf)[0] for y in (found, expected)]
    torch.testing.assert_close(*pulled, rtol=1e-4, atol=1e-4)


def test_what_a_step_needs_whole_is_decoded_in_the_step() -> None:
    params, x = problem()
    q = tfn.quantize(lambda p, x: tfn.scan(lambda c, w: (w.sin() @ c, w.sum()), x, p["w"]), "nf4", stacked="*")
    new, found = q.prepare(params), q.rewrite(params, x.t()).compute
    assert [equation.op.name for equation in found.equations] == ["scan"]
    torch.testing.assert_close(q(new, x.t()), q.fn(new.restore(), x.t()))


def test_stacks_beside_what_all_steps_share() -> None:
    """A step is given its layer, and a whole weight that is stored in codes, too; ops along other dims see the values."""
    params, x = problem()
    params |= {name: torch.randn(WIDTH, WIDTH) / 6 for name in ("s", "t")}

    def f(params: Any, x: torch.Tensor) -> Any:
        step = lambda c, w: (F.linear(F.linear(F.linear(c, w), params["s"]), params["t"]).sin(), c.sum())
        last, sums = tfn.scan(step, x, params["w"], reverse=True)
        w = params["w"]
        return last, sums, w[1], w.select(1, 2), w.unbind(-1)[0], w.unbind(-3)[0], w[:, :, 3:5]

    q = tfn.quantize(f, "int8", stacked="w")
    new = q.prepare(params)
    found, expected = q(new, x), f(new.restore(), x)
    largest = F.linear(x, params["w"][-1]).abs().max()  # what the first step takes the sine of
    assert_rounded_alike(found[:2], expected[:2], terms=x.numel(), depth=3 * LAYERS + 1, scale=float(largest))
    for part, whole in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(part, whole, rtol=0, atol=0)
    (scan,) = (one for one in q.rewrite(params, x).compute.equations if one.op.name == "scan")
    assert str(scan.body).count("= int8_linear(") == 3


def test_adapters_of_layers_on_codes() -> None:
    """QLoRA of a stack: values, gradients and what is merged are those of the layers."""
    params, x = problem()
    layers = tfn.lora(tfn.quantize(looped, "int8", stacked="*"), rank=2, stacked="*")
    new = layers.prepare(params)
    assert new["w.lora_a"].shape == (LAYERS, 2, WIDTH)
    drawn = {name: torch.randn_like(part) / 8 for name, part in new.items() if "lora" in name}
    new = new.replaced(drawn)
    found = tfn.grad(lambda own: layers(new.replaced(own), x).square().mean())(drawn)
    whole = new.restore()
    expected = tfn.grad(lambda w: looped({**whole, "w": w}, x).square().mean())(whole["w"])
    torch.testing.assert_close(layers(new, x), looped(whole, x))
    torch.testing.assert_close(found["w.lora_a"], drawn["w.lora_b"].mT @ expected)
    torch.testing.assert_close(found["w.lora_b"], expected @ drawn["w.lora_a"].mT)
    merged, _ = new.merge()
    off = (merged.restore()["w"] - whole["w"]).abs().amax((1, 2))
    assert bool((off <= whole["w"].abs().amax((1, 2)) / 127).all())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_codes_of_layers_on_ranks(ranks: int) -> None:
    params, x = problem()
    plain = tfn.quantize(looped, "nf4", stacked="*")
    every = [tfn.fsdp(plain, group) for group in simulated(ranks)]
    shards = [list(f.prepare(params).values()) for f in every]
    found = evaluate_ranks(every[0].rewrite(params, x).compute, [[*shard, x] for shard in shards])
    for (y,) in found:
        torch.testing.assert_close(y, plain(plain.prepare(params), x))


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        params, _ = problem()
        self.w, self.b = nn.Parameter(params["w"]), nn.Parameter(params["b"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return looped({"w": self.w, "b": self.b}, x)


def test_modules_and_training_aware_of_rounding() -> None:
    module, (_, x) = Stacked(), problem()
    q = tfn.quantize(tfn.jit(module), "int4", stacked="*")
    torch.testing.assert_close(q(x), q.restored()(x))
    assert {name: value.shape for name, value in q.state_dict().items()} == {
        name: value.shape for name, value in module.state_dict().items()
    }
    aware = tfn.quantize(module, "int4", stacked="*", training=True)
    torch.testing.assert_close(aware(x), q(x))
    aware(x).sum().backward()
    assert aware.parts()["w"].grad.shape == module.w.shape


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(RewriteError, match="the filter 'v' matches no parameter"):
        tfn.quantize(looped, stacked="v").prepare(problem()[0])
