"""Rewrites: quantisation and adapters as three traces, on functions, jitted functions and modules."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.errors import RewriteError
from thunder_fn.interpreters.lora import Lora
from thunder_fn.interpreters.quantize.step import Quantize
from thunder_fn.interpreters.rewriting.filters import matrices
from thunder_fn.interpreters.rewriting.rewrite import Rewrite, compose, identity, rewrite
from thunder_fn.parameters import SCHEMES, Prepared, RewrittenModule, Scheme

INT8 = Quantize(SCHEMES["int8"], matrices)


class Net(nn.Module):
    """Tied weights, an embedding, a norm with running statistics, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.hidden = nn.Linear(8, 12)
        self.norm = nn.BatchNorm1d(12)
        self.conv = nn.Conv1d(1, 2, 3)
        self.back = nn.Linear(12, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        h = self.norm(F.gelu(self.hidden(self.embedding(indices))))
        return self.head(self.back(h + self.conv(h[:, None]).mean()))


def net() -> tuple[Net, dict[str, torch.Tensor], torch.Tensor, Any]:
    torch.manual_seed(0)
    module = Net().eval()
    params = {name: value.detach() for name, value in module.named_parameters()}
    return module, params, torch.randint(0, 10, (6,)), lambda p, i: torch.func.functional_call(module, p, (i,))


def checked(done: Rewrite) -> Rewrite:
    for trace in (done.compute, done.prepare, done.restore):
        tfn.check(trace)
    return done


# ---- schemes ----


@pytest.mark.parametrize("name", SCHEMES)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_a_scheme_keeps_its_bound(name: str, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 70), min_size=2, max_size=3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    w = torch.randn(shape, generator=generator) * 10.0 ** data.draw(st.integers(-8, 6))
    w = (w * (torch.rand(shape, generator=generator) > data.draw(st.floats(0, 1)))).to(dtype)
    scheme = SCHEMES[name]
    back = scheme.decode(scheme.encode(w), tuple(w.shape), dtype)
    assert back.dtype == dtype
    assert bool(((back.double() - w.double()).abs() <= scheme.bound(w).double()).all())


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "fp8_tensor"])
@given(rows=st.integers(1, 40), columns=st.integers(1, 70), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=10, deadline=None)
def test_what_was_decoded_is_stored_as_it_was(name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Saving and loading again and again does not wear weights down."""
    scheme, w = SCHEMES[name], torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)
    round_trip = lambda w: scheme.decode(scheme.encode(w), (rows, columns), dtype)
    once = round_trip(w)
    off, step = (round_trip(once).double() - once.double()).abs(), scheme.bound(once).double()
    assert bool((off <= step * (0.1 if dtype == torch.float32 else 0.5)).all())


ADVERSARIAL: dict[str, Any] = {
    "zeros": lambda w, info: w * 0,
    "all the same": lambda w, info: w * 0 - 7.25,
    "one outlier": lambda w, info: w.index_fill(1, torch.tensor(3), info.max / 1000),
    "far from zero": lambda w, info: w * 1e-3 + 100,
    "the greatest": lambda w, info: w.sign() * info.max,
    "next to zero": lambda w, info: w * info.tiny,
    "below normal": lambda w, info: w * (info.tiny * info.eps),
    "rows of any size": lambda w, info: w * torch.logspace(-6, 4, w.shape[0]).unsqueeze(1),
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("kind", ADVERSARIAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bounds_hold_for_weights_that_are_hard_to_store(name: str, kind: str, dtype: torch.dtype) -> None:
    """Finite bounds hold; sums and differences of the greatest numbers are not finite, and then nothing plausible
    comes back.
    """
    scheme, info = SCHEMES[name], torch.finfo(dtype)
    for shape in ((16, 128), (7, 13)):
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        w = ADVERSARIAL[kind](drawn, info).clamp(-info.max, info.max).to(dtype)
        back, bound = scheme.decode(scheme.encode(w), shape, dtype), scheme.bound(w).double()
        assert bool(((back.double() - w.double()).abs() <= bound)[bound.isfinite()].all())
        assert bool(back[~bound.isfinite()].isnan().all())
        assert bool(bound.isfinite().all()) or kind == "the greatest"


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_stored_as_none(name: str, value: float) -> None:
    w = torch.randn(16, 128)
    w[3, 5] = value
    scheme = SCHEMES[name]
    assert not scheme.decode(scheme.encode(w), (16, 128), w.dtype)[3, 5].isfinite()
    layer = torch.nn.Linear(128, 16)
    layer.weight.data.copy_(w)
    quantised = tfn.quantize(tfn.jit(layer), name)
    if name == "int8_static":
        quantised.calibrate([(torch.ones(2, 128),)])
    assert not quantised(torch.ones(2, 128))[:, 3].isfinite().any()


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scheme_takes_its_bits(name: str, dtype: torch.dtype) -> None:
    w = torch.randn(512, 1024, dtype=dtype)
    stored = sum(part.numel() * part.element_size() for part in SCHEMES[name].encode(w).values())
    bits = SCHEMES[name].bits
    assert bits is not None and stored * 8 / w.numel() <= bits * 1.01
    assert bits <= 1.05 * (4 if name in ("int4", "nf4") else 8)


# ---- rewrites of traces ----


@pytest.mark.parametrize("name", SCHEMES)
def test_compute_on_prepared_is_the_original_on_restored(name: str) -> None:
    _, params, indices, f = net()
    trace = tfn.trace(f, params, indices)
    names = sorted(params)
    done = checked(rewrite(trace, names, Quantize(SCHEMES[name], matrices)))
    new = tfn.evaluate(done.prepare, [params[n] for n in names])
    new = [
        torch.tensor(0.05) if name.endswith("input_scale") else value
        for name, value in zip(done.names, new, strict=True)
    ]
    old = dict(zip(names, tfn.evaluate(done.restore, new), strict=True))
    (result,) = tfn.evaluate(done.compute, [*new, indices])
    tolerance = {"int8_dynamic": 0.05, "int8_static": 0.3, "fp8_dynamic": 0.2}.get(name, 1e-5)
    torch.testing.assert_close(result, f(old, indices), rtol=tolerance, atol=tolerance)


def test_identity_and_associativity() -> None:
    trace = tfn.trace(lambda w, x: F.linear(x, w), torch.randn(4, 6), torch.randn(2, 6))
    nothing = identity(trace, ["w"])
    first = rewrite(trace, ["w"], Lora(2, 2.0, matrices))
    second = rewrite(first.compute, first.names, INT8)
    third = rewrite(second.compute, second.names, lambda name, type: None)
    assert compose(first, nothing) == first and compose(identity(first.compute, first.names), first) == first
    assert compose(third, compose(second, first)) == compose(compose(third, second), first)
    assert first.then(INT8) == compose(second, first)
    assert compose(second, first).names == ("w.values", "w.scales", "w.lora_a", "w.lora_b")


def test_a_linear_layer_works_on_the_codes() -> None:
    trace = tfn.trace(lambda w, x: F.linear(x, w), torch.randn(4, 6), torch.randn(2, 6))
    (call,) = rewrite(trace, ["w"], INT8).compute.equations
    assert call.op.name == "quantized.int8_linear"


def test_an_embedding_looks_codes_up() -> None:
    trace = tfn.trace(lambda w, i: F.embedding(i, w, padding_idx=1), torch.randn(9, 6), torch.tensor([1, 8]))
    names = [equation.op.name for equation in rewrite(trace, ["w"], INT8).compute.equations]
    assert names == ["int8_embedding"]


def test_what_has_no_rule_sees_the_decoded_weight() -> None:
    trace = tfn.trace(lambda w, x: torch.sin(w) + F.linear(x, w).sum(), torch.randn(4, 6), torch.randn(2, 6))
    names = [equation.op.name for equation in rewrite(trace, ["w"], INT8).compute.equations]
    assert names.count("int8_decode") == 1 and "quantized.int8_linear" in names


def test_equal_layers_are_rewritten_once() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(6)))
    params = dict(sorted(model.named_parameters()))
    trace = tfn.trace(lambda p, x: torch.func.functional_call(model, p, (x,)), params, torch.randn(2, 4))
    done = rewrite(trace, list(params), INT8)
    (outer,) = done.compute.equations
    assert len({equation.body for equation in outer.body.equations}) == 1


def test_composing_what_does_not_fit() -> None:
    trace = tfn.trace(lambda w, x: F.linear(x, w), torch.randn(4, 6), torch.randn(2, 6))
    first = rewrite(trace, ["w"], INT8)
    with pytest.raises(RewriteError) as error:
        compose(first, first)
    assert message_of(error.value) == (
        "cannot compose: the first rewrite makes (i8[4, 6], f32[4]), the second takes (f32[4, 6])"
    )


# ---- functions ----

TRANSFORMS = {
    "int8": lambda f: tfn.quantize(f, "int8"),
    "lora": lambda f: tfn.lora(f, 2),
    "quantize(lora)": lambda f: tfn.quantize(tfn.lora(f, 2), "nf4"),
    "lora(quantize)": lambda f: tfn.lora(tfn.quantize(f, "nf4"), 2),
    "filtered": lambda f: tfn.quantize(f, "int4", filter="hidden.*"),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_functions_and_jitted_functions(name: str) -> None:
    _, params, indices, f = net()
    q, jitted = TRANSFORMS[name](f), TRANSFORMS[name](tfn.jit(f))
    new = q.prepare(params)
    checked(q.rewrite(params, indices))
    result = q(new, indices)
    torch.testing.assert_close(result, f(new.restore(), indices), rtol=1e-5, atol=1e-5)
    again = jitted.prepare(params).replaced(new)
    for _ in range(2):
        assert torch.equal(jitted(again, indices), result)
    assert tfn.cache_info(jitted.jitted).misses == 1
    assert {key: value.shape for key, value in new.restore().items()} == {k: v.shape for k, v in params.items()}


def test_both_orders_of_lora_and_quantize_are_one_program() -> None:
    _, params, indices, f = net()
    first = TRANSFORMS["quantize(lora)"](f).rewrite(params, indices)
    assert first == TRANSFORMS["lora(quantize)"](f).rewrite(params, indices)


def test_gradients_of_adapters_are_those_of_the_merged_weight() -> None:
    w, x = torch.randn(4, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    q = tfn.lora(lambda p, x: torch.sin(F.linear(x, p["w"])).sum(), rank=2, alpha=3.0)
    new = q.prepare({"w": w})
    new = new.replaced({"w.lora_b": torch.randn(4, 2, dtype=torch.float64)})
    adapters, frozen = new.partition(lambda name: "lora" in name)
    got = tfn.grad(lambda adapters: q(new.replaced(adapters, frozen), x))(adapters)
    a, b = (adapters[f"w.lora_{k}"].clone().requires_grad_() for k in "ab")
    torch.sin(F.linear(x, w + 1.5 * b @ a)).sum().backward()
    torch.testing.assert_close(got, {"w.lora_a": a.grad, "w.lora_b": b.grad})


def test_vmap_and_jvp_of_a_quantised_function() -> None:
    q = tfn.quantize(lambda p, x: F.linear(x, p["w"]), "int8")
    new, xs = q.prepare({"w": torch.randn(4, 6)}), torch.randn(5, 2, 6)
    loop = torch.stack([q(new, x) for x in xs])
    torch.testing.assert_close(tfn.vmap(lambda x: q(new, x))(xs), loop)
    out, tangent = tfn.jvp(lambda x: q(new, x), (xs[0],), (xs[1],))
    torch.testing.assert_close((out, tangent), (loop[0], loop[1]))


def test_training_aware_of_rounding() -> None:
    w, x = torch.randn(4, 6), torch.randn(3, 6)
    q = tfn.quantize(lambda p, x: F.linear(x, p["w"]).square().sum(), "int8", training=True)
    new = q.prepare({"w": w})
    assert torch.equal(new["w"], w) and torch.equal(new.restore()["w"], w)
    seen = SCHEMES["int8"].decode(SCHEMES["int8"].encode(w), (4, 6), torch.float32).requires_grad_()
    F.linear(x, seen).square().sum().backward()
    torch.testing.assert_close(tfn.grad(q)(new, x)["w"], seen.grad)


def test_a_scheme_of_the_user() -> None:
    half = Scheme(
        "half",
        encode=lambda w: {"values": w.half()},
        decode=lambda parts, shape, dtype: parts["values"].to(dtype),
        bound=lambda w: w.abs() * 2.0**-10 + 2.0**-24,
    )
    q = tfn.quantize(lambda p, x: F.linear(x, p), half)
    new = q.prepare(torch.ones(2, 3))
    assert repr(new) == "Prepared(.values: f16[2, 3])"
    assert torch.equal(q(new, torch.ones(1, 3)), torch.full((1, 2), 3.0))


# ---- modules ----


@pytest.mark.parametrize("name", TRANSFORMS)
def test_modules(name: str) -> None:
    module, _, indices, f = net()
    new = TRANSFORMS[name](module)
    assert isinstance(new, RewrittenModule) and not new.training
    torch.testing.assert_close(new(indices), f(new.parts().restore(), indices), rtol=1e-5, atol=1e-5)
    state, original = new.state_dict(), module.state_dict()
    assert {k: (v.shape, v.dtype) for k, v in state.items()} == {k: (v.shape, v.dtype) for k, v in original.items()}
    before = new(indices)
    new.load_state_dict(original)
    if "lora" not in name:
        assert torch.equal(new(indices), before)
    copied = copy.deepcopy(new)
    assert torch.equal(copied(indices), new(indices))


def test_a_module_trains_its_adapters_only() -> None:
    module, _, indices, _ = net()
    new = tfn.lora(tfn.quantize(module, "nf4"), 4).train()
    optimizer = torch.optim.Adam([p for p in new.parameters() if p.requires_grad], lr=0.05)
    losses, codes = [], {k: v.clone() for k, v in new.parts().items() if "lora" not in k}
    for _ in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(new(indices), indices)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.equal(value, codes[name]) for name, value in new.parts().items() if name in codes)
    assert not torch.equal(new.state_dict()["norm.running_mean"], module.state_dict()["norm.running_mean"])


# ---- errors ----


def test_an_unknown_scheme() -> None:
    with pytest.raises(RewriteError) as error:
        tfn.quantize(lambda p: p, "int3")
    assert message_of(error.value) == (
        "quantize: unknown scheme 'int3'; did you mean 'int8'?\n"
        "There are int8, int8_dynamic, int8_static, int4, nf4, fp8, fp8_tensor, fp8_dynamic; or pass a `Scheme` of your own."
    )


def test_parameters_that_are_not_prepared() -> None:
    def model(p: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, p["w"])

    q = tfn.quantize(model, "int8")
    with pytest.raises(RewriteError) as error:
        q({"w": torch.ones(2, 3)}, torch.ones(1, 3))
    assert message_of(error.value) == (
        "model was rewritten and takes prepared parameters, given a dict\n"
        "Prepare them once: `new = q.prepare(params)`, then call `q(new, ...)`."
    )
    other = tfn.quantize(model, "int4").prepare({"w": torch.ones(2, 3)})
    with pytest.raises(RewriteError, match="parameters that another transform prepared"):
        q(other, torch.ones(1, 3))


def test_a_parameter_that_is_written_to() -> None:
    def step(p: Any) -> torch.Tensor:
        p["w"].add_(1)
        return p["w"].sum()

    q = tfn.quantize(step, "int8")
    with pytest.raises(RewriteError, match=r"changes its parameter 'w' in place"):
        q(q.prepare({"w": torch.ones(2, 3)}))


def test_parts_of_no_such_name() -> None:
    new = tfn.quantize(lambda p: p, "int8").prepare({"w": torch.ones(2, 3)})
    with pytest.raises(RewriteError, match=r"there is no part 'v'; the parts are w.values, w.scales"):
        new.replaced({"v": torch.ones(1)})


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_prepared_parameters_pickle(scheme: str) -> None:
    new = tfn.quantize(lambda p: p, scheme, filter="w").prepare({"w": torch.randn(2, 3)})
    back: Prepared = pickle.loads(pickle.dumps(new))
    assert torch.equal(back.restore()["w"], new.restore()["w"])
