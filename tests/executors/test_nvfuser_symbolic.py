"""nvFuser's definitions of regions with symbols: written once for all sizes, and right at each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.executors import nvfuser_stand_in as stand_in
from tests.executors.test_inductor_symbolic import SIZES, arguments, layers, loss
from thunder_fn.executors.nvfuser import NvFuser
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Trace
from thunder_fn.jitted import cache_info, jit

Tensor = torch.Tensor


class Eager(NvFuser):
    """Takes regions of any size, so that single ops are translated."""

    def is_worth(self, region: Trace) -> bool:
        return any(not ops.is_view(equation.op) for equation in region.equations)


def symbolic(f: Callable[..., Any]) -> Any:
    return jit(f, cache="symbolic values", executors=[Eager(library=stand_in, device="cpu")])  # type: ignore[arg-type]


@pytest.fixture
def counts() -> Callable[[], tuple[int, int]]:
    """The numbers of definitions written and called since the test began."""
    kind = stand_in.FusionDefinition
    made, executed = kind.made, kind.executed
    return lambda: (kind.made - made, kind.executed - executed)


@pytest.mark.parametrize("f", [layers, tfn.grad_and_value(loss, argnums=(0, 1, 2))], ids=["value", "gradient"])
def test_regions_are_defined_once_for_all_sizes(f: Callable[..., Any], counts: Callable[[], tuple[int, int]]) -> None:
    torch.manual_seed(0)
    g = symbolic(f)
    eager = layers if f is layers else torch.func.grad_and_value(loss, argnums=(0, 1, 2))
    for sizes in SIZES:
        for n in (3, -1):
            args = arguments(*sizes, n)
            torch.testing.assert_close(g(*args), eager(*args), rtol=1e-9, atol=1e-9)
        if sizes == SIZES[0]:
            made, executed = counts()
    assert cache_info(g).misses == 1 and counts() == (made, executed * len(SIZES)) and made > 0


def _halves(x: Tensor) -> Tensor:
    first, second = x.split((x.shape[0] // 2, x.shape[0] - x.shape[0] // 2))
    return torch.cat([second * 2, first.exp()])


OPS: dict[str, Callable[[Tensor], Any]] = {
    "reshape": lambda x: (x.reshape(-1) * 2).reshape(x.shape[1], -1),
    "expand": lambda x: x.sin().sum(0, keepdim=True).expand(x.shape[0], -1) * x,
    "slices": lambda x: x[1:, : x.shape[1] - 1].exp() + x[:-1, 1:],
    "split": _halves,
    "select": lambda x: x[-1] * x[0].cos(),
    "pad": lambda x: torch.nn.functional.pad(x.sin(), (1, 2)) * 2,
    "full": lambda x: torch.zeros_like(x).add(x.numel()) + torch.full((x.shape[1],), 3.0, dtype=x.dtype),
    "mean": lambda x: (x - x.mean(1, keepdim=True)) / x.var(1, keepdim=True) * x.mean(),
    "number": lambda x: x * x.shape[0] + x.numel() // 3,
    "arange": lambda x: torch.arange(x.shape[0]) * 2 + 1,
    "transposed": lambda x: x.t().sin() + x.t(),
    "grad": tfn.grad(lambda x: x[1:, 0].exp().sum() + x[:, : x.shape[1] - 1].softmax(1).square().sum()),
}


@pytest.mark.parametrize("name", OPS)
def test_one_definition_for_all_sizes(name: str, counts: Callable[[], tuple[int, int]]) -> None:
    torch.manual_seed(0)
    f, made = OPS[name], 0
    g = symbolic(f)
    for shape in ((5, 7), (4, 3), (9, 8), (6, 11)):
        x = torch.randn(shape, dtype=torch.float64)
        found, expected = g(x), f(x)
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()
        made = made or counts()[0]
    assert cache_info(g).misses == 1 and counts()[0] == made > 0


def test_each_layout_is_defined_once(counts: Callable[[], tuple[int, int]]) -> None:
    torch.manual_seed(0)
    f = lambda x: (x.sin() + 1).cos() * x.shape[0]
    g = symbolic(f)
    for rows, columns in ((4, 3), (6, 5), (2, 9), (8, 8)):
        whole = torch.randn(rows * 2, columns + 3, dtype=torch.float64)
        plain = torch.randn(rows, columns, dtype=torch.float64)
        for x in (plain, plain.t(), whole[::2, 3:], plain[:1].expand(rows, columns)):
            torch.testing.assert_close(g(x), f(x))
            assert g(x).stride() == f(x).stride()
    assert counts() == (4, 32)


def test_strides_in_another_order_run_on_torch(counts: Callable[[], tuple[int, int]]) -> None:
    """A definition knows in which order dims lie in memory; strides that no size explains may come in any."""
    f = lambda x: (x.sin() + 1) * x.shape[0]
    g = symbolic(f)
    for strides in ((100, 10), (200, 10), (10, 100)):
        x = torch.randn(1000).as_strided((3, 4), strides)
        torch.testing.assert_close(g(x), f(x))
        assert g(x).stride() == f(x).stride()
    assert counts() == (1, 4)


def test_sizes_of_one_are_other_programs(counts: Callable[[], tuple[int, int]]) -> None:
    """nvFuser would take a dim of size 1 for one to broadcast."""
    f = lambda x: (x[1:].sin() + 1) * 2
    g = symbolic(f)
    for rows in (5, 3, 2, 4, 1):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(g(x), f(x))
    assert cache_info(g).misses == 3 and counts() == (2, 4)


def test_the_stand_in_refuses_definitions_for_one_size_only() -> None:
    with stand_in.FusionDefinition() as fusion:
        x = fusion.define_tensor([-1, 3], [True, True], stand_in.DataType.Float, stride_order=[1, 0])
        n = fusion.define_scalar(dtype=stand_in.DataType.Int)
        fusion.add_output(fusion.ops.add(x, fusion.ops.broadcast_in_dim(x, [x.size(0), 3], [0, 1])))
        fusion.add_output(fusion.ops.full([n], 1.0, stand_in.DataType.Float))
        with pytest.raises(Exception, match=r"Could not (guard|extract)"):
            bool(x.size(0).meta > 5)
    doubled, ones = fusion.execute([torch.ones(4, 3), 2])
    assert torch.equal(doubled, torch.full((4, 3), 2.0)) and torch.equal(ones, torch.ones(2))
    for wrong in ([torch.ones(1, 3), 2], [torch.ones(4, 2), 2]):
        with pytest.raises(RuntimeError, match="expected"):
            fusion.execute(wrong)
