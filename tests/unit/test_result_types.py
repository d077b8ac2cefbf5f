"""Types of results where the arguments have several dtypes: a trace says what eager PyTorch gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import thunder_fn as tfn
from thunder_fn.capture import pytree

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPS: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "addr": lambda x, y: torch.addr(x, y[0], y[0]),
    "atan2": torch.atan2,
    "bmm of casts": lambda x, y: x @ y.to(x.dtype),
    "cosine_similarity": F.cosine_similarity,
    "dist": torch.dist,
    "hstack": lambda x, y: torch.hstack((x, y)),
    "huber_loss": F.huber_loss,
    "huber_loss of each": lambda x, y: F.huber_loss(x, y, reduction="none"),
    "index_put": lambda x, y: x.index_put((torch.tensor([0]),), y[:1].to(x.dtype)),
    "kl_div": lambda x, y: F.kl_div(x, y, reduction="batchmean"),
    "l1_loss": F.l1_loss,
    "lerp": lambda x, y: torch.lerp(x, x, y.to(x.dtype)),
    "mse_loss": F.mse_loss,
    "pow": torch.pow,
    "smooth_l1_loss": F.smooth_l1_loss,
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y, reduction="none"),
    "where": lambda x, y: torch.where(x > 0, x, y),
}
NORMS: dict[str, Callable[..., Any]] = {
    "layer": lambda x, w: torch.native_layer_norm(x, [4], w, w, 1e-5),
    "group": lambda x, w: torch.native_group_norm(x, w, None, 4, 4, 1, 2, 1e-5),
    "batch": lambda x, w: torch.native_batch_norm(x, w, w, w * 0, w * 1, True, 0.1, 1e-5),
    "instance": lambda x, w: F.instance_norm(x.reshape(1, 4, 4), None, None, w, w),
}


def types_of(result: Any) -> list[Any]:
    return [(value.dtype, tuple(value.shape)) for value in pytree.flatten(result)[0]]


@pytest.mark.parametrize("name", (*OPS, *NORMS))
def test_types_are_eagers(name: str) -> None:
    f = OPS.get(name) or NORMS[name]
    shape = (4, 4) if name in OPS else (4,)
    for first, second in itertools.product(DTYPES, repeat=2):
        x, y = torch.ones(4, 4, dtype=first), torch.ones(shape, dtype=second)
        try:
            expected = types_of(f(x, y))
        except RuntimeError:
            continue  # PyTorch takes no such mixture
        found = [(var.type.dtype, tuple(var.type.shape)) for var in tfn.trace(f, x, y).outputs]
        assert found == expected, (name, first, second)


INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)


@pytest.mark.parametrize("shift", (lambda x, n: x << n, lambda x, n: x >> n), ids=("left", "right"))
@pytest.mark.parametrize("by", (3, torch.tensor(3), torch.tensor([3, 1]), torch.tensor([3, 1], dtype=torch.uint8)))
def test_shifts_of_integers(shift: Callable[..., Any], by: Any) -> None:
    """PyTorch's rule for tensors without memory refuses bools, which its kernels promote."""
    for dtype in INTEGERS:
        x = torch.tensor([1, 0], dtype=dtype)
        pairs = (tfn.jit(shift), shift(x, by)), (tfn.vmap(shift, (0, None)), torch.stack([shift(one, by) for one in x]))
        for h, expected in pairs:
            assert torch.equal(h(x, by), expected) and h(x, by).dtype == expected.dtype


@pytest.mark.parametrize("driver", [None, "gels"])
@pytest.mark.parametrize("a", [(4, 3), (1, 4, 3), (4, 4, 3), (2, 1, 4, 3), (1, 3, 4)], ids=str)
@pytest.mark.parametrize("b", [(4,), (4, 2), (1, 4, 2), (1, 4), (3, 3), (2, 1, 4), (1, 5, 4, 2)], ids=str)
def test_a_least_squares_problem_has_the_shapes_of_its_kernel(
    a: tuple[int, ...], b: tuple[int, ...], driver: str | None
) -> None:
    """The kernel broadcasts batch dims as many as those of the matrix, whatever the others are."""

    def solve(x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.linalg.lstsq(x, y, driver=driver)

    x, y = (torch.rand(shape, dtype=torch.float64) for shape in (a, b))
    try:
        wanted = solve(x, y)
    except RuntimeError:
        return
    assert [type.shape for type in tfn.trace(solve, x, y).output_types] == [tuple(one.shape) for one in wanted]
