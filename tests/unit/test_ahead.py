"""Types without values, and programs ahead of time: `eval_shape` and `jit(f).lower`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thunder_fn as tfn
from thunder_fn.errors import PortableError, TracedFunctionError, TraceTypeError, UnsupportedInput
from thunder_fn.ir.trace import Dim, Expr, TensorType, type_of_value

F32 = torch.float32


# ---- eval_shape ----


def results(x: torch.Tensor, w: dict[str, torch.Tensor], n: int) -> Any:
    return {"y": x @ w["a"], "rest": (x.sum(0).double(), n + 1, None, "name"), "size": x.shape[0]}


def test_types_are_those_of_the_results() -> None:
    args = torch.ones(3, 4), {"a": torch.ones(4, 2)}, 5
    given = TensorType(F32, (3, 4)), {"a": TensorType(F32, (4, 2))}, 5
    found = tfn.eval_shape(results, *given)
    y, (total, n, none, name) = found["y"], found["rest"]
    eager = results(*args)
    assert (y, total) == (type_of_value(eager["y"]), type_of_value(eager["rest"][0]))
    assert (n, none, name, found["size"]) == (6, None, "name", 3)
    assert found == tfn.eval_shape(results, *args)


@pytest.mark.parametrize("wrap", [lambda f: f, tfn.jit, tfn.grad, lambda f: tfn.vmap(tfn.grad(f)), tfn.hessian])
def test_transformed_functions_have_types(wrap: Any) -> None:
    f = wrap(lambda x: (x.sin() * x).sum())
    x = torch.rand(3, 4, dtype=torch.float64)
    assert tfn.eval_shape(f, type_of_value(x)) == type_of_value(f(x))


def test_nothing_is_computed_or_allocated() -> None:
    huge = TensorType(torch.float64, (1 << 20, 1 << 20))
    assert tfn.eval_shape(lambda x: (x @ x).sum(1), huge) == TensorType(torch.float64, (1 << 20,))


def test_nothing_changes() -> None:
    layer = nn.BatchNorm1d(3)
    x = torch.ones(4, 3)
    before = torch.get_rng_state()
    found = tfn.eval_shape(lambda y: nn.functional.dropout(layer(y.add_(1))), x)
    assert found == TensorType(F32, (4, 3))
    assert (x == 1).all() and layer.num_batches_tracked == 0 and (torch.get_rng_state() == before).all()


def test_types_for_other_devices_need_none() -> None:
    found = tfn.eval_shape(lambda x: x.cpu() + x.shape[0], TensorType(F32, (2,), torch.device("cuda", 0)))
    assert found == TensorType(F32, (2,))


def test_a_size_found_in_data_is_an_expression() -> None:
    (size,) = tfn.eval_shape(lambda x: x[x > 0], TensorType(F32, (4,))).shape
    assert isinstance(size, Expr)


def test_inside_a_traced_function() -> None:
    seen = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(tfn.eval_shape(lambda y: y @ y.t(), x))
        return x + 1

    assert (tfn.jit(f)(torch.ones(2, 3)) == 2).all()
    assert seen == [TensorType(F32, (2, 2))]


def test_errors_are_those_of_the_call() -> None:
    with pytest.raises(TracedFunctionError, match=r"reduction dim|mat1 and mat2") as info:
        tfn.eval_shape(torch.mm, TensorType(F32, (2, 3)), TensorType(F32, (2, 3)))
    assert isinstance(info.value, RuntimeError)
    size: Dim = next(iter(tfn.eval_shape(lambda x: x[x > 0], torch.ones(3)).shape))
    with pytest.raises(UnsupportedInput, match=r"f32\[u0\] has a symbolic size"):
        tfn.eval_shape(torch.sin, TensorType(F32, (size,)))


# ---- lower ----


def step(w: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return ((x @ w).relu() * scale).sum()


@pytest.mark.parametrize("of", [tuple, lambda args: tuple(map(type_of_value, args))])
def test_compiled_gives_what_the_function_gives(of: Any) -> None:
    args = torch.randn(4, 3), torch.randn(5, 4)
    for f in (step, tfn.grad(step), tfn.vmap(step, (None, 0))):
        lowered = tfn.jit(f).lower(*of(args))
        assert (lowered.compile()(*args) == f(*args)).all()
        assert "def program" in lowered.text() or "def " in lowered.text()
        assert lowered.memory().input_bytes == 4 * (12 + 20)
        assert lowered.cost().total.flops >= 2 * 5 * 4 * 3


def test_compiled_never_traces() -> None:
    times = []

    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        times.append(n)
        return x * n

    compiled = tfn.jit(f).lower(TensorType(F32, (3,)), 2).compile()
    assert (compiled(torch.ones(3), 2) == 2).all() and (compiled(torch.ones(3), 2) == 2).all()
    for args, what in (
        ((torch.ones(4), 2), r"args\[0\]\.shape\[0\]: it was 3, and is 4 now"),
        ((torch.ones(3), 3), r"args\[1\]: it was 2, and is 3 now"),
        ((torch.ones(3).double(), 2), r"args\[0\]: it was Tensor of 1 dims, float32 on cpu, and is .*float64"),
        (([torch.ones(3)], 2), "the structure of the arguments"),
    ):
        with pytest.raises(TraceTypeError, match=f"f was compiled for another call: {what}"):
            compiled(*args)
    with torch.no_grad(), pytest.raises(TypeError, match="grad mode"):
        compiled(torch.ones(3), 2)
    assert times == [2, 2]


def test_compiled_refuses_what_no_program_does() -> None:
    times = []
    compiled = tfn.jit(lambda x: times.append(object()) or x * 2).lower(TensorType(F32, (3,))).compile()
    with pytest.raises(TraceTypeError, match="the function itself changes times in each call, which no program can do"):
        compiled(torch.ones(3))


def test_compiled_for_a_range_of_sizes() -> None:
    jitted = tfn.jit(lambda x: x.sum() / x.shape[0], dynamic={0: {0: (2, 64)}})
    compiled = jitted.lower(TensorType(F32, (8,))).compile()
    assert [compiled(torch.ones(n)).item() for n in (2, 8, 64)] == [1, 1, 1]
    with pytest.raises(TraceTypeError, match="was compiled for another call"):
        compiled(torch.ones(65))


def test_compiled_keeps_static_arguments_and_the_jitted_cache_alone() -> None:
    jitted = tfn.jit(lambda x, n: x * n, static_argnums=1)
    compiled = jitted.lower(torch.ones(2), 3).compile()
    assert (compiled(torch.ones(2), 3) == 3).all()
    with pytest.raises(TraceTypeError):
        compiled(torch.ones(2), 4)
    assert tfn.cache_info(jitted).misses == 0


def test_compiled_has_gradients() -> None:
    w = torch.ones(2, 2, requires_grad=True)
    lowered = tfn.jit(lambda w, x: (x @ w).sin().sum()).lower(w, torch.ones(3, 2))
    assert len(lowered.chain.programs) == 2
    lowered.compile()(w, torch.ones(3, 2)).backward()
    (expected,) = torch.autograd.grad((torch.ones(3, 2) @ w).sin().sum(), w)
    assert (w.grad == expected).all()


def test_modules_are_lowered_too() -> None:
    model = tfn.jit(nn.Linear(4, 2))
    lowered = model.lower(TensorType(F32, (3, 4)))
    assert "linear" in lowered.text() or "addmm" in lowered.text()
    assert lowered.memory().peak > 0


def test_compiled_modules_have_the_tensors_of_the_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    jitted, x = tfn.jit(model), torch.randn(3, 4)
    for _ in range(2):
        compiled = jitted.lower(TensorType(F32, (3, 4))).compile()
        for _ in range(2):
            before = model[1].running_mean.clone()
            expected = copy.deepcopy(model)(x)
            found = compiled(x)
            assert (found == expected).all() and (model[1].running_mean != before).any() == model.training
            found.sum().backward()
            assert model[0].weight.grad is not None
            with torch.no_grad():
                model[2].weight.mul_(2)
                model[0].weight.grad = None
        with pytest.raises(TraceTypeError, match="Sequential was compiled for another call"):
            compiled(x.double())
        model.eval()
    tfn.save(jitted.lower(x), tmp_path / "model")
    assert (tfn.load(tmp_path / "model")(x) == model(x)).all()
    with pytest.raises(PortableError, match="changes a tensor that it closes over"):
        tfn.save(jitted.train().lower(x), tmp_path / "model")
