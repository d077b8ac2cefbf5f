"""Ops that may write over an operand in its own place: eager PyTorch's numbers are those of the op that writes elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import thunder_fn as tfn
from tests.ops.samples import op_db
from thunder_fn import jit
from thunder_fn.ir import facts

NAMES = sorted({name.removeprefix("aten.").rstrip("_") for name in facts.READS_BEFORE_WRITES})
FIRST = [name.removeprefix("aten.") for name in facts.COPIES_FIRST]
OPS = [
    op
    for op in op_db
    if op.name in (*NAMES, *FIRST) and op.supports_out and torch.float64 in op.supported_dtypes("cpu")
]
SIZE = 17
LAYOUTS = {"rows": lambda x: x.clone(), "columns": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x.clone()}


def squares(x: Any) -> Any:
    """Make all sizes one, so that every operand may be in the place of the result."""
    return x.new_ones((SIZE,) * x.dim()).cumsum(-1).to(x.dtype) if isinstance(x, torch.Tensor) and x.dim() else x


@pytest.mark.filterwarnings("ignore")  # PyTorch's samples warn of themselves
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_operand_that_is_written_over_is_read_before(op: Any, layout: str) -> None:
    for sample in list(op.sample_inputs("cpu", torch.float64))[:10]:
        given, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        same = op.name not in ("cholesky", "renorm", "cumsum", "cumprod")
        for leaves in (given, list(map(squares, given))) if same else (given,):
            for place in range(1 if op.name in FIRST else len(leaves)):
                written_over(op, leaves, spec, place, LAYOUTS[layout])


def written_over(op: Any, given: list[Any], spec: Any, place: int, layout: Any) -> None:
    """Compare the op whose result is written over one of its operands with the one whose result is new."""
    first, args, kwargs = tree_unflatten(given, spec)
    wanted, leaf = op.op(first, *args, **kwargs), given[place]
    if not isinstance(wanted, torch.Tensor) or not isinstance(leaf, torch.Tensor):
        return
    if (leaf.shape, leaf.dtype) != (wanted.shape, wanted.dtype):
        return
    others = [layout(x) if isinstance(x, torch.Tensor) else x for x in given]
    first, args, kwargs = tree_unflatten(others, spec)
    torch.testing.assert_close(op.op(first, *args, **kwargs, out=others[place]), wanted, equal_nan=True)


@pytest.mark.parametrize("name", FIRST)
def test_a_product_is_added_over_its_first_operand_and_over_no_other(name: str) -> None:
    op, sizes = getattr(torch, name), {"addmm": (3, 3), "addmv": (3,), "baddbmm": (2, 3, 3)}[name]

    def over(place: int) -> Any:
        def f(x: torch.Tensor) -> torch.Tensor:
            given = [x, (torch.stack([x, x + 1, x + 2]) if x.dim() == 1 else x + 1), x + 2]
            op(*given, beta=0.5, alpha=2, out=given[place])
            return given[place]

        return f

    x = torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = over(0)(x.clone())
    torch.testing.assert_close(jit(over(0))(x.clone()), wanted)
    torch.testing.assert_close(tfn.vmap(lambda x: over(0)(x.clone()))(x[None]), wanted[None])
    with pytest.raises(tfn.errors.AliasedMutation, match="reads at another place"):
        jit(over(2))(x.clone())


@pytest.mark.parametrize(
    "name",
    ("copysign_", "heaviside_", "gcd_", "lcm_", "eq_", "ne_", "gt_", "ge_", "lt_", "le_", "atan2_", "mul_"),
)
@pytest.mark.parametrize("of", (lambda x: x, lambda x: x[1:], lambda x: x.t()), ids=("whole", "part", "transposed"))
def test_a_pointwise_op_writes_over_what_it_reads_in_its_own_place(name: str, of: Any) -> None:
    """PyTorch tags some of these ops as pointwise in their out-of-place form only, and they were refused."""
    x = torch.tensor(
        [[4, -6, 0], [9, 3, -1], [2, 5, 8]], dtype=torch.long if name in ("gcd_", "lcm_") else torch.float64
    )

    def f(x: torch.Tensor) -> torch.Tensor:
        getattr(of(x), name)(of(x))
        return x

    assert torch.equal(jit(f)(x.clone()), f(x.clone()))


@pytest.mark.parametrize("given", ({"min": 0.0}, {"max": 0.5}), ids=str)
def test_an_out_of_another_shape_is_refused_where_the_operand_is_given_by_name(given: dict[str, float]) -> None:
    """An `out=` given by place was refused; given by name it was PyTorch's error about shapes."""
    f = lambda x, y: (torch.clamp(input=x, **given, out=y.view(-1)), y * 2)[1]
    with pytest.raises(tfn.errors.UnsupportedCall, match="`out=` is a view"):
        jit(f)(torch.ones(3, 3), torch.ones(2, 3, 3))
