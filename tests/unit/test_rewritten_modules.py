"""Rewritten modules as modules: moved, nested, loaded, changed by further steps; and what weights may look like."""

from __future__ import annotations

import copy
import io
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
from thunder_fn.parameters import SCHEMES


class Tied(nn.Module):
    """An embedding whose weight is the head's too, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8, padding_idx=0)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        h = self.embedding(indices)
        return self.head(h + self.conv(h.transpose(1, 2)).transpose(1, 2))


LAYERS: dict[str, tuple[Any, Any]] = {
    "odd Linear": (lambda: nn.Linear(7, 5), lambda: torch.randn(3, 7)),
    "Linear of one": (lambda: nn.Linear(1, 1, bias=False), lambda: torch.randn(2, 1)),
    "Linear of no rows": (lambda: nn.Linear(4, 3), lambda: torch.randn(0, 4)),
    "Conv2d, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), lambda: torch.randn(2, 4, 6, 6)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), lambda: torch.randn(2, 3, 5, 5)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(11, 6), lambda: torch.tensor([[0, 1], [10, 3]])),
    "LSTM": (lambda: nn.LSTM(4, 5), lambda: torch.randn(2, 3, 4)),
    "tied": (Tied, lambda: torch.tensor([[1, 2, 0], [3, 11, 4]])),
}


@pytest.mark.parametrize("layer", LAYERS)
@given(scheme=st.sampled_from(sorted(SCHEMES)), half=st.booleans())
@settings(max_examples=4, deadline=None)
def test_layers(layer: str, scheme: str, half: bool) -> None:
    make, inputs = LAYERS[layer]
    torch.manual_seed(0)
    module, x = make().eval(), inputs()
    if half:
        module, x = module.bfloat16(), x.bfloat16() if x.dtype.is_floating_point else x
    q = tfn.quantize(module, scheme)
    assert any(name.endswith(".values") for name in q.parts())
    if scheme == "int8_static":
        q.calibrate([(x,)])
    first = lambda out: out[0] if isinstance(out, tuple) else out
    with torch.no_grad():
        got, expected = first(q(x)), first(q.restored()(x))
    tolerance = {"int8_dynamic": 0.06, "int8_static": 0.1, "fp8_dynamic": 0.2}.get(scheme, 0.03 if half else 1e-4)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    described = lambda state: {name: (value.shape, value.dtype) for name, value in state.items()}
    assert described(q.state_dict()) == described(module.state_dict())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_without_elements_stay(scheme: str) -> None:
    q = tfn.quantize(lambda p, x: F.linear(x, p), scheme)
    for shape in ((0, 4), (4, 0)):
        new = q.prepare(torch.ones(shape))
        assert list(new) == [""] and q(new, torch.ones(2, shape[1])).shape == (2, shape[0])


def test_representations_made_under_autocast_know_nothing_of_it() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        done = tfn.lora(lambda p, x: F.linear(x, p) + p.sum(), 3).rewrite(torch.ones(5, 9), torch.ones(2, 9))
    assert "bf16" not in str(done.restore)


@pytest.mark.parametrize(
    ("filter", "named"), [(None, "there is"), (["weight"], "the filter 'weight' chooses")], ids=["all", "by name"]
)
def test_codes_are_not_quantised_again(filter: Any, named: str) -> None:
    q = tfn.quantize(nn.Linear(128, 4), "int4")
    with pytest.raises(RewriteError) as error:
        tfn.quantize(q, "int8", filter=filter)
    assert message_of(error.value) == (
        f"quantize: {named} no weight that is not stored as codes already (weight.scales_and_zeros, weight.values, ...)\n"
        "A weight is quantised once, and has its adapter before that. To store it in another way, begin with `restored()` or the "
        "parameters."
    )


def test_what_one_scheme_leaves_another_takes() -> None:
    module = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4))
    q = tfn.quantize(tfn.quantize(module, "int4", filter="0.weight"), "int8")
    assert {"0.weight.scales_and_zeros", "1.weight.scales"} <= set(q.parts())


def test_a_second_adapter() -> None:
    with pytest.raises(RewriteError) as error:
        tfn.lora(tfn.lora(nn.Linear(3, 4), 2), 2)
    assert message_of(error.value) == (
        "a step makes a part 'weight.lora_a', which there is already; a weight is changed once in this way"
    )


def test_a_filter_that_matches_nothing() -> None:
    with pytest.raises(RewriteError) as error:
        tfn.quantize(nn.Linear(3, 4), "int8", filter=["weight", "layer.*"])
    assert message_of(error.value) == (
        "quantize: the filter 'layer.*' matches no parameter of two or more dims\nThere are weight."
    )


# ---- moving, nesting, loading ----


def test_to_another_dtype() -> None:
    x = torch.randn(3, 64)
    q = tfn.quantize(nn.Linear(64, 16), "int8")
    before = q(x)
    assert q.to(torch.bfloat16) is q
    after = q(x.bfloat16())
    assert after.dtype == q.state_dict()["weight"].dtype == torch.bfloat16
    assert q.parts()["weight.scales"].dtype == torch.bfloat16  # as PyTorch's kernel reads them
    torch.testing.assert_close(after.float(), before, rtol=0.02, atol=0.02)


def test_inside_another_module() -> None:
    outer = nn.Sequential(tfn.quantize(Tied(), "int8"), nn.ReLU())
    state = {name: value * 2 for name, value in outer.state_dict().items()}
    assert list(state) == ["0." + name for name in Tied().state_dict()]
    outer.load_state_dict(state)
    torch.testing.assert_close(outer.state_dict(), state, rtol=0.01, atol=0.01)
    with pytest.raises(RuntimeError, match=r'Missing key.*"0.conv.weight"'):
        outer.load_state_dict({name: value for name, value in state.items() if name != "0.conv.weight"})


def test_a_part_that_was_rewritten_by_itself() -> None:
    """Its state would not be there under the names of the whole."""
    model = nn.Sequential(nn.Linear(4, 4), tfn.quantize(nn.Linear(4, 4)))
    for rewrite in (tfn.quantize, tfn.lora, lambda m: tfn.quantize(tfn.jit(m))):
        with pytest.raises(
            RewriteError, match=r"the module '1' of the Sequential was rewritten by itself(.|\n)*filter='1\.\*'"
        ):
            rewrite(model)
    one = tfn.quantize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "int8", filter="1.*")
    assert list(tfn.quantize(one, "nf4").state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_loading_another_shape() -> None:
    with pytest.raises(RewriteError) as error:
        tfn.quantize(nn.Linear(3, 4), "int8").load_state_dict({"weight": torch.ones(1, 3), "bias": torch.ones(4)})
    assert message_of(error.value) == (
        "load_state_dict: missing [], unknown []\n  weight: expected shape (4, 3), given (1, 3)"
    )


def test_frozen_parameters_stay_frozen() -> None:
    module = nn.Linear(3, 4).requires_grad_(False)
    assert not any(p.requires_grad for p in tfn.quantize(module, "int8", training=True).parameters())


# ---- adapters ----


@pytest.mark.parametrize("scheme", [None, "int8"])
@given(rows=st.integers(1, 70), columns=st.integers(1, 70), rank=st.integers(1, 9), half=st.booleans())
@settings(max_examples=6, deadline=None)
def test_merging_and_unmerging(scheme: str | None, rows: int, columns: int, rank: int, half: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if half else torch.float32
    module, x = nn.Linear(columns, rows, dtype=dtype), torch.randn(2, columns, dtype=dtype)
    q = tfn.lora(module if scheme is None else tfn.quantize(module, scheme), rank, alpha=3.0)
    for name, value in q.parts().items():
        if name.endswith("lora_b"):
            value.data.normal_(std=0.1)
    before, parts = q(x), {name: value.clone() for name, value in q.parts().items()}
    weights = q.state_dict()
    adapters = q.merge()
    exact = 0.03 if half else 1e-5
    tolerance = {"rtol": exact, "atol": exact} if scheme is None else {"rtol": 0.1, "atol": 0.1}
    assert not q.parts()["weight.lora_b"].any()
    torch.testing.assert_close(q(x), before, **tolerance)
    torch.testing.assert_close(q.state_dict(), weights, **tolerance)
    q.unmerge(adapters)
    torch.testing.assert_close(q(x), before, **tolerance)
    if scheme is None:
        torch.testing.assert_close(dict(q.parts()), parts, **tolerance)


def test_trained_adapters_stay_when_a_later_step_is_added() -> None:
    q = tfn.lora(nn.Linear(6, 4), 2)
    for value in q.parameters():
        value.data.normal_()
    same = q.rewritten(lambda name, type: None)
    assert all(torch.equal(value, q.parts()[name]) for name, value in same.parts().items())


# ---- static calibration ----


def test_calibration_finds_the_greatest_activation() -> None:
    f = lambda p, x: F.linear(torch.relu(F.linear(x, p["a"])), p["b"]) + torch.sin(p["c"]).sum()
    params = {name: torch.randn(6, 6) for name in "abc"}
    samples = [torch.randn(3, 6) for _ in range(3)]
    q = tfn.quantize(f, "int8_static")
    new = q.prepare(params)
    assert q(new, samples[0]).isnan().all()  # rather than numbers that look right
    new = q.calibrate(new, [(x,) for x in samples])
    seen = torch.cat(samples)
    torch.testing.assert_close(new["a.input_scale"], seen.abs().amax() / 127)
    weight = new.restore()["a"]
    codes = torch.round(seen / new["a.input_scale"]) * new["a.input_scale"]
    torch.testing.assert_close(
        new["b.input_scale"], torch.relu(F.linear(codes, weight)).amax() / 127, rtol=0.02, atol=0
    )
    assert new["c.input_scale"].isnan()  # no linear layer has it
    torch.testing.assert_close(q(new, samples[0]), f(new.restore(), samples[0]), rtol=0.1, atol=0.2)


def test_calibrating_what_has_no_steps() -> None:
    q = tfn.quantize(nn.Linear(3, 4), "int8")
    with pytest.raises(RewriteError) as error:
        q.calibrate([(torch.ones(1, 3),)])
    assert message_of(error.value) == (
        "calibrate: no parameter is stored with a step for activations\n"
        'Quantise with a scheme that has one, such as "int8_static".'
    )
    with pytest.raises(RewriteError, match="no sample inputs were given"):
        tfn.quantize(nn.Linear(3, 4), "int8_static").calibrate([])


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_any_scheme_moves_between_dtypes(scheme: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    before, after = dtypes
    q = tfn.lora(tfn.quantize(tfn.jit(nn.Linear(64, 32).to(before)), scheme), 2)
    with torch.no_grad():
        q.parts()["weight.lora_b"].normal_()
    weight, adapter = q.state_dict()["weight"].float(), q.parts()["weight.lora_b"]
    q.to(after)
    assert q.parts()["weight.lora_b"] is adapter and adapter.dtype == after
    torch.testing.assert_close(q.state_dict()["weight"].float(), weight, rtol=0.03, atol=0.03)
    assert q(torch.randn(3, 64, dtype=after)).dtype == after


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_copies(scheme: str) -> None:
    q, x = tfn.quantize(tfn.jit(nn.Linear(64, 32)), scheme), torch.randn(3, 64)
    if scheme == "int8_static":
        q.calibrate([(x,)])
    y = q(x)
    torch.save(q, file := io.BytesIO())
    file.seek(0)
    for other in (copy.deepcopy(q), torch.load(file, weights_only=False), pickle.loads(pickle.dumps(q))):
        torch.testing.assert_close(other(x), y, rtol=0, atol=0)


class Twice(nn.Module):
    """A module that is there under two names, one of its tensors in a place of another module, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again, self.other = self.first, nn.Linear(4, 4)
        self.other.weight = self.first.weight
        self.scale = self.same = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.again(self.first(x)) * self.scale + self.same)


def test_a_module_that_is_there_twice_keeps_no_tensor_of_a_call() -> None:
    """`torch.func.functional_call` alone would keep one."""
    module, x = Twice(), torch.randn(2, 4)
    for q in (tfn.quantize(module, "int8"), tfn.quantize(tfn.jit(module), "int8")):
        y = q(x)
        torch.testing.assert_close(copy.deepcopy(q)(x), y, rtol=0, atol=0)
        assert list(q.state_dict()) == list(module.state_dict())
        torch.testing.assert_close(q.restored()(x), y)


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_an_adapter_leaves_codes_as_they_are(scheme: str) -> None:
    q, x = tfn.quantize(tfn.jit(nn.Linear(64, 32)), scheme), torch.randn(3, 64)
    if scheme == "int8_static":
        q.calibrate([(x,)])
    adapted = tfn.lora(q, 2)
    assert all(torch.equal(value, adapted.parts()[name]) for name, value in q.parts().items())
    torch.testing.assert_close(adapted(x), q(x))


@pytest.mark.parametrize("scheme", ["int8", "int4", "nf4"])
def test_trained_adapters_stay_beside_weights_that_are_quantised(scheme: str) -> None:
    adapted, x = tfn.lora(nn.Linear(64, 32), 2), torch.randn(3, 64)
    weight = adapted.parts()["weight"].detach().clone()
    with torch.no_grad():
        adapted.parts()["weight.lora_b"].normal_()
    q = tfn.quantize(adapted, scheme)
    for name in ("weight.lora_a", "weight.lora_b"):
        assert torch.equal(q.parts()[name], adapted.parts()[name])
    base = SCHEMES[scheme].decode(SCHEMES[scheme].encode(weight), (32, 64), torch.float32)
    low = q.parts()["weight.lora_b"] @ q.parts()["weight.lora_a"]
    torch.testing.assert_close(q(x), F.linear(x, base + low, adapted.parts()["bias"]), rtol=1e-3, atol=1e-3)


def test_steps_of_activations_stay_with_other_weights() -> None:
    q, x = tfn.lora(tfn.quantize(nn.Linear(64, 32), "int8_static"), 2), torch.randn(3, 64)
    q.calibrate([(x,)])
    step = q.parts()["weight.input_scale"].clone()
    q.load_state_dict(nn.Linear(64, 32).state_dict())
    q.unmerge(q.merge())
    assert torch.equal(q.parts()["weight.input_scale"], step) and not step.isnan()


class Counting(nn.Module):
    """A module whose call depends on more than its arguments: parameters, a buffer that it changes, modes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        return self.norm(self.fc(x)) * times


def test_warm_calls_see_what_changes() -> None:
    q, reference = (tfn.quantize(wrap(Counting()), "int8") for wrap in (tfn.jit, lambda module: module))
    reference.load_state_dict(q.state_dict())
    x = torch.randn(5, 4)

    def agree(*args: int) -> None:
        for _ in range(3):
            torch.testing.assert_close(q(x, *args), reference(x, *args))

    agree()
    agree(3)
    for module in (q, reference):
        module.eval()
    agree()
    for module in (q, reference):
        module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()})
    agree()
    for module in (q, reference):
        module.double()
    x = x.double()
    agree()
    torch.testing.assert_close(q.state_dict(), reference.state_dict())
    swapped = {name: value * 3 for name, value in q.named_parameters()}
    with_others = torch.func.functional_call(q, swapped, (x,))
    torch.testing.assert_close(with_others, torch.func.functional_call(reference, swapped, (x,)))
    agree()
    with q.accumulate(), reference.accumulate():
        agree()


def test_arguments_keep_their_numbers() -> None:
    q = tfn.quantize(tfn.jit(Counting().eval(), static_argnums=1), "int8")
    x = torch.randn(5, 4)
    torch.testing.assert_close(q(x, 3), q(x, 1) * 3)
    assert not any(map(q(x, 2).equal, (q(x, 1), q(x, 3))))


class Bag(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.layer = torch.nn.EmbeddingBag(8, 4), torch.nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.layer(self.bag(indices)[None])


@pytest.mark.parametrize("jitted", [False, True])
def test_adapters_of_layers_for_which_pytorch_has_ops_without_derivatives(jitted: bool) -> None:
    module, indices = Bag().eval(), torch.arange(6).reshape(2, 3)
    adapted = tfn.lora(tfn.jit(module) if jitted else module, 2)
    torch.testing.assert_close(adapted(indices), module(indices))
    adapted(indices).square().mean().backward()
    module(indices).square().mean().backward()
    weight = dict(adapted.named_parameters())["bag/weight/lora_b"]
    assert weight.grad is not None
    factor = adapted.parts()["bag.weight.lora_a"].detach()
    torch.testing.assert_close(weight.grad, module.bag.weight.grad @ factor.t())


def test_a_step_on_what_was_rewritten_and_jitted() -> None:
    params, x = {"w": torch.randn(4, 8)}, torch.randn(3, 8)
    f = tfn.lora(tfn.jit(tfn.quantize(lambda p, x: torch.nn.functional.linear(x, p["w"]), "int8")), 2)
    g = tfn.lora(tfn.quantize(tfn.jit(lambda p, x: torch.nn.functional.linear(x, p["w"])), "int8"), 2)
    assert f.steps == g.steps
    torch.testing.assert_close(f(f.prepare(params), x), g(g.prepare(params), x))
