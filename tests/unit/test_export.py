"""Exported programs of PyTorch's: values at several sizes, sizes that are refused, and what has no equal."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree

import thunder_fn as tfn
from thunder_fn.errors import PortableError

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
W = torch.randn(3, 3)
MODEL = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
PARAMS = {name: value.detach() for name, value in MODEL.named_parameters()}


def root(a: torch.Tensor) -> torch.Tensor:
    """Newton's iteration, as many steps as it takes."""
    x, n = torch.ones(()), torch.zeros((), dtype=torch.int64)
    step = lambda x, n: (x - (x * x - a) / (2 * x), n + 1)
    return tfn.while_loop(lambda x, n: ((x * x - a).abs() > 1e-6) & (n < 50), step, (x, n))[0]


def last(x: torch.Tensor) -> torch.Tensor:
    return tfn.scan(lambda c, row: ((c @ W + row).tanh(), c.sum()), torch.zeros(3), x, reverse=True)[1].sum()


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(MODEL, params, (x,)).square().mean()


def bounded(x: torch.Tensor) -> torch.Tensor:
    carry = (x, torch.tensor(0))
    return tfn.while_loop(lambda x, n: n < 4, lambda x, n: (x * x.sin(), n + 1), carry, max_steps=6)[0].sum()


def chosen(i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return tfn.switch(i, [lambda x: x @ W, torch.cos, lambda x: x], (x,))


Case = tuple[Callable[..., Any], tuple[Any, ...], Any, list[tuple[Any, ...]]]
ROWS = {"x": {0: (2, 64)}}
CASES: dict[str, Case] = {
    "vmap of a while_loop": (tfn.vmap(root), (torch.rand(5) + 1,), {"a": {0: (2, 64)}}, [(torch.rand(9) + 1,)]),
    "grad of a scan": (tfn.grad(last), (torch.randn(6, 3),), ROWS, [(torch.randn(9, 3),)]),
    "switch": (
        chosen,
        (torch.tensor(1), torch.randn(4, 3)),
        ROWS,
        [(torch.tensor(i), torch.randn(5, 3)) for i in (-1, 0, 2, 7)],
    ),
    "training": (tfn.value_and_grad(loss), (PARAMS, torch.randn(4, 64)), ROWS, [(PARAMS, torch.randn(7, 64))]),
    "sizes of data": (lambda x: x[x > 0].sin().sum(), (torch.randn(4),), ROWS, [(torch.randn(6),)]),
}
SLOW: dict[str, Case] = {
    "grad of a while_loop": (tfn.grad(bounded), (torch.randn(4),), None, []),
    "codes": (tfn.quantize(MODEL).forward, (torch.randn(4, 64),), None, []),
    "module": (MODEL, (torch.randn(4, 64),), None, []),
    "hessian": (tfn.hessian(lambda x: (x.sin() ** 2).sum()), (torch.randn(4),), None, []),
}


@pytest.mark.parametrize("name", [*CASES, *(SLOW if THOROUGH else ())])
def test_an_exported_program_is_the_function(name: str) -> None:
    f, args, dynamic, others = (CASES | SLOW)[name]
    module = tfn.export(f, args, dynamic=dynamic).module()
    for values in (args, *others):
        found, expected = _pytree.tree_leaves(module(*values)), _pytree.tree_leaves(f(*values))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_sizes_for_which_the_program_is_not_right_are_refused() -> None:
    """The ranges that were asked for, decisions of the function, and size 1, which broadcasts."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 2 == 0 and x.shape[0] > 4 else x

    module = tfn.export(f, (torch.ones(8),), dynamic={"x": {0: (2, 20)}}).module()
    for size in range(25):
        if size % 2 == 0 and 4 < size <= 20:
            assert torch.equal(module(torch.ones(size)), f(torch.ones(size)))
        else:
            with pytest.raises((RuntimeError, AssertionError)):
                module(torch.ones(size))


def test_arguments_are_written_to() -> None:
    f = lambda state, x: {"y": state["n"].add_(x).sin(), "n": 3}
    module, state = tfn.export(f, ({"n": torch.zeros(2)}, torch.ones(2))).module(), {"n": torch.zeros(2)}
    found = module(state, torch.ones(2))
    assert found["n"] == 3 and torch.equal(found["y"], torch.ones(2).sin()) and torch.equal(state["n"], torch.ones(2))


@tfn.custom_vjp
def loud(x: torch.Tensor) -> torch.Tensor:
    return x * 2


loud.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * 100,))


def test_no_gradient_where_the_function_has_its_own() -> None:
    """A rule cannot go along, and PyTorch's formula would be another derivative."""
    x = torch.ones(2, requires_grad=True)
    plain = tfn.export(lambda x: x * 2, (torch.ones(2),)).module()
    plain(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]
    assert not tfn.export(lambda x: loud(x), (torch.ones(2),)).module()(x).requires_grad


def test_what_has_no_equal_is_named() -> None:
    f = tfn.grad(lambda x: tfn.while_loop(lambda x: x.sum() < 9, lambda x: (x * x.exp(),), (x,))[0].sum())
    with pytest.raises(PortableError, match=r"carry_at has no equal in PyTorch\nin equation: .*\nfrom: .*test_export"):
        tfn.export(f, (torch.ones(2),))


def test_a_loaded_function_is_exported(tmp_path: Path) -> None:
    tfn.save(tfn.jit(tfn.grad(last), dynamic=ROWS).lower(torch.randn(4, 3)), tmp_path / "f")
    f, x = tfn.load(tmp_path / "f"), torch.randn(7, 3)
    module = tfn.export(f, (torch.randn(4, 3),)).module()  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(module(x), tfn.grad(last)(x))


def test_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    f = tfn.vmap(tfn.grad(lambda x: MODEL(x).square().sum()))
    program = torch.onnx.export(tfn.export(f, (torch.randn(4, 64),), dynamic=ROWS), dynamo=True, verbose=False)
    assert program is not None
    program.save(tmp_path / "f.onnx")
    session, x = runtime.InferenceSession(tmp_path / "f.onnx"), torch.randn(7, 64)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), f(x))


KEYED: dict[str, Any] = {
    "bits": lambda key: tfn.random.bits(key, (3,)),
    "normal": lambda key: tfn.random.normal(key, (2, 3)),
    "split": lambda key: tfn.random.split(key, 3),
    "fold_in": lambda key: tfn.random.fold_in(key, 7),
    "permutation": lambda key: tfn.random.permutation(key, 5),
    "batched": lambda key: tfn.vmap(lambda k: tfn.random.uniform(k, (2,)))(tfn.random.split(key, 4)),
    "loop": lambda key: tfn.scan(lambda k, i: (tfn.random.fold_in(k, i), tfn.random.bits(k)), key, torch.arange(3))[1],
}


@pytest.mark.parametrize("name", KEYED)
def test_random_numbers_are_integer_arithmetic(name: str) -> None:
    key = tfn.random.key(3)
    program = tfn.export(KEYED[name], (key,))
    assert not any("thunder_fn" in str(node.target) for node in program.graph.nodes)
    for given in (key, tfn.random.key(4)):
        assert torch.equal(program.module()(given), KEYED[name](given))
