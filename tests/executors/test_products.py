"""Our own kernel for matrix products, rows added in place, and residuals that fused backwards compute again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.executors import inductor
from thunder_fn.executors.torchinductor import codegen, native, products
from thunder_fn.executors.torchinductor.adding_rows import AddedRows, is_added_rows
from thunder_fn.executors.torchinductor.codegen import Kernel
from thunder_fn.executors.torchinductor.products import SOURCE, TYPES, arguments_of
from thunder_fn.interpreters.grad import forward_backward
from thunder_fn.torch_internals.inductor import Dense, ProductCall


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernel as a function of numbers."""
    kernel = Kernel(TYPES, SOURCE, alone=True)
    places = native.build([kernel], tmp_path_factory.mktemp("product"))
    return native.load(places[kernel.key].read_bytes(), places[kernel.key].stem)[kernel.key]


def dense(tensor: torch.Tensor) -> Dense:
    return Dense(tuple(tensor.shape), tensor.stride())


SIZES = (16, 17, 31, 48, 63, 64, 96, 130, 500)


@pytest.mark.parametrize("seed", range(12))
def test_products_of_all_layouts_and_sizes(product: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pick = lambda choices: choices[int(torch.randint(len(choices), (), generator=generator))]
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    for threads in (1, 2, 3):
        rows, cols, depth = pick(SIZES), pick(SIZES), pick((*SIZES, 8, 385, 800))
        left = pick((normal(rows, depth), normal(depth, rows).t(), normal(rows, depth + 3)[:, :depth]))
        right = pick((normal(depth, cols), normal(cols, depth).t(), normal(cols, depth + 5)[:, :depth].t()))
        start = pick((None, normal(cols), normal(1, cols), normal(rows, cols), normal(rows, cols + 1)[:, :cols]))
        around = torch.full((rows + 2, cols + 2), 7.0)
        out = around[1:-1, 1:-1]
        call = ProductCall(None if start is None else dense(start), dense(left), dense(right), dense(out))
        numbers = arguments_of(call, threads)
        assert numbers is not None
        product(left, right, out if start is None else start, out, *numbers)
        plain = left @ right if start is None else torch.addmm(start, left, right)
        exact = left.double() @ right.double() + (0 if start is None else start.double())
        assert (out - exact).norm() <= 2.5 * (plain - exact).norm() + 1e-6
        around[1:-1, 1:-1] = 7.0
        assert torch.equal(around, torch.full_like(around, 7.0)), "nothing is written around the result"


@pytest.mark.parametrize("rows", (1, 2, 3, 4))
def test_a_few_rows_by_the_weights_of_a_layer(product: Any, rows: int) -> None:
    for threads, cols, depth in ((1, 16, 64), (2, 19, 65), (3, 401, 1000), (2, 700, 190)):
        left, start = torch.randn(rows, depth + 3)[:, :depth], torch.randn(cols)
        right = torch.randn(cols, depth + 2)[:, :depth].t()
        for given in (None, start, torch.randn(rows, cols)):
            around = torch.full((rows + 2, cols + 2), 7.0)
            out = around[1:-1, 1:-1]
            numbers = arguments_of(
                ProductCall(None if given is None else dense(given), dense(left), dense(right), dense(out)), threads
            )
            assert numbers is not None
            product(left, right, out if given is None else given, out, *numbers)
            plain = left @ right if given is None else torch.addmm(given, left, right)
            exact = left.double() @ right.double() + (0 if given is None else given.double())
            assert (out - exact).norm() <= 2.5 * (plain - exact).norm() + 1e-6
            around[1:-1, 1:-1] = 7.0
            assert torch.equal(around, torch.full_like(around, 7.0)), "nothing is written around the result"


def test_a_large_product_is_a_region_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_faster_here", lambda: True)
    monkeypatch.setattr(codegen, "is_faster_here", lambda: True)
    x, w = torch.randn(1, 64), torch.randn(16400, 64)
    f = tfn.jit(lambda x, w: x @ w.t(), executors=[inductor()])
    torch.testing.assert_close(f(x, w), x @ w.t())
    assert "by inductor" in str(tfn.last_traces(f)[-1])
    small = tfn.jit(lambda x, w: x @ w.t(), executors=[inductor()])
    small(x, w[:100])
    assert "by inductor" not in str(tfn.last_traces(small)[-1])


@pytest.mark.parametrize(
    ("f", "count"),
    [(lambda x, w: (x @ w).t().contiguous(), 2), (lambda x, w, b: torch.addmm(b, x, w).t().contiguous(), 3)],
    ids=["mm", "addmm"],
)
def test_a_product_of_symbolic_sizes_is_no_region_of_its_own(
    f: Callable[..., Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "is_faster_here", lambda: True)
    g = tfn.jit(f, executors=[inductor()])
    for rows in (3, 5, 6):
        args = [torch.randn(*shape, requires_grad=True) for shape in ((rows, 4), (4, 8), (8,))][:count]
        gradients = [torch.autograd.grad(one(*args).sum(), args) for one in (g, f)]
        torch.testing.assert_close(*gradients)


def test_infinities_and_nans_stay_where_they_are(product: Any) -> None:
    left, right = torch.ones(16, 16), torch.ones(16, 32)
    left[3, 2], right[5, 7] = float("inf"), float("nan")
    out = torch.empty(16, 32)
    numbers = arguments_of(ProductCall(None, dense(left), dense(right), dense(out)), 1)
    product(left, right, out, out, *(numbers or ()))
    torch.testing.assert_close(out, left @ right, equal_nan=True)


def test_what_the_kernel_does_not_compute_is_left_to_the_blas() -> None:
    plain = lambda rows, cols: Dense((rows, cols), (cols, 1))
    call = lambda start, left, right, out: arguments_of(ProductCall(start, left, right, out), 2)
    assert call(None, plain(32, 16), plain(16, 32), plain(32, 32)) == (32, 32, 16, 16, 1, 32, 1, -1, 32, 2)
    assert call(None, plain(4, 16), plain(16, 32), plain(4, 32)) is None  # so few rows are a matter of memory
    assert call(None, Dense((32, 16), (64, 2)), plain(16, 32), plain(32, 32)) is None
    assert call(None, plain(32, 16), plain(16, 32), Dense((32, 32), (1, 32))) is None
    assert call(Dense((32,), (0,)), plain(32, 16), plain(16, 32), plain(32, 32)) is None
    assert call(Dense((32, 1), (1, 1)), plain(32, 16), plain(16, 32), plain(32, 32)) is None


def test_a_region_multiplies_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "is_faster_here", lambda: True)
    x, w, b = torch.randn(40, 24), torch.randn(32, 24), torch.randn(32)
    f = lambda x, w, b: torch.relu(F.linear(x, w, b)) * 3
    found = tfn.jit(f, executors=[inductor()])(x, w, b)
    torch.testing.assert_close(found, f(x, w, b))


class Tied(torch.nn.Module):
    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 24, padding_idx=padding)
        self.head = torch.nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(ids))).logsumexp(-1).sum()


@pytest.mark.parametrize("padding", (None, 3))
def test_a_tied_embedding_has_eager_gradients(padding: int | None) -> None:
    model, ids = Tied(padding), torch.randint(0, 9, (4, 10))
    ids[0, :3] = 3
    expected = torch.autograd.grad(model(ids), model.embedding.weight)
    jitted = tfn.jit(model, executors=[inductor()])
    for _ in range(2):
        loss = jitted(ids)
        for keep in (True, False):  # what a graph keeps is not written to
            found = torch.autograd.grad(loss, model.embedding.weight, retain_graph=keep)
            torch.testing.assert_close(found, expected)


def test_rows_are_added_in_memory_that_nobody_else_sees() -> None:
    def f(gradient: torch.Tensor, ids: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        return known + torch.ops.aten.embedding_dense_backward(gradient, ids, 7, -1, False)

    gradient, ids = torch.randn(3, 4), torch.tensor([1, 5, 1])
    region = tfn.trace(f, gradient, ids, torch.randn(7, 4))
    assert is_added_rows(region)
    run = AddedRows(region)
    for holds in ("nobody", "a name", "a view", "autograd"):
        known = torch.randn(7, 4)
        expected, before, place = f(gradient, ids, known), known.clone(), known.data_ptr()
        kept: Any = {"nobody": None, "a name": known, "a view": known[:2]}.get(holds)
        if holds == "autograd":
            kept = known * torch.ones(7, 4, requires_grad=True)  # which saves `known`
        box: list[Any] = [gradient, ids, known]
        del known
        (result,) = run.take(box)
        torch.testing.assert_close(result, expected)
        assert box == [] and (result.data_ptr() == place) == (holds == "nobody")
        if holds == "a name":
            assert torch.equal(kept, before)
        kept = None


def test_a_fused_backward_keeps_what_it_cannot_compute_cheaply() -> None:
    """Of a GELU that is written out its input stays, which a product gives, and its result, which a product reads."""

    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        h = x @ w
        return ((0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * h**3)))) @ v).sum()

    trace = tfn.trace(f, torch.randn(5, 6), torch.randn(6, 7), torch.randn(7, 3))
    kinds = lambda split: sorted(residual.kind for residual in split.residuals)
    plain, fused = (forward_backward(trace, (True,) * 3, (True,), fused=flag) for flag in (False, True))
    assert kinds(plain).count("extra") > kinds(fused).count("extra")
    extras = fused.forward.outputs[1:]
    made = {equation.outputs[0]: equation.op.name for equation in fused.forward.equations}
    roots = {made[made_by] for made_by in extras if made_by in made}
    assert "aten.tanh.default" not in roots and "aten.pow.Tensor_Scalar" not in roots and "aten.mm.default" in roots
