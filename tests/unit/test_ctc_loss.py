"""ctc_loss, whose lengths PyTorch writes into memory of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import thunder_fn as tfn

LENGTHS = [((10, 10), (4, 3)), ([10, 3], [4, 4]), ((10, 10), (0, 2))]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize(("inputs", "targets"), LENGTHS)
def test_it_is_eagers(inputs: Any, targets: Any, reduction: str, zero_infinity: bool) -> None:
    scores = torch.randn(10, 2, 5, dtype=torch.float64).log_softmax(-1)
    labels = torch.randint(1, 5, (2, 4))

    def loss(scores: Any, labels: Any, count: int = 2) -> Any:
        options: Any = {"reduction": reduction, "zero_infinity": zero_infinity}
        return F.ctc_loss(scores, labels, inputs[:count], targets[:count], **options)

    assert torch.equal(tfn.jit(loss)(scores, labels), loss(scores, labels))
    one = scores[:, 0], labels[0, : targets[0]], 1
    assert torch.equal(tfn.jit(loss)(*one), loss(*one))
    leaf = scores.clone().requires_grad_()
    loss(leaf, labels).sum().backward()
    gradient = tfn.jit(tfn.grad(lambda *args: loss(*args).sum()))(scores, labels)
    assert leaf.grad is not None
    torch.testing.assert_close(gradient, leaf.grad, equal_nan=True)


@pytest.mark.parametrize(("inputs", "targets"), LENGTHS)
@pytest.mark.parametrize("is_padded", [True, False])
def test_derivatives_that_pytorch_does_not_have(inputs: Any, targets: Any, is_padded: bool) -> None:
    """Beside finite differences of eager's gradient."""
    x, v = torch.randn(2, 10, 2, 5, dtype=torch.float64)
    rows = torch.randint(1, 5, (2, 4))
    labels = rows if is_padded else torch.cat([row[:length] for row, length in zip(rows, targets, strict=True)])

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(x.log_softmax(-1), labels, inputs, targets, reduction="sum", zero_infinity=True)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(loss(leaf), leaf)[0]

    step = 1e-5
    expected = (gradient(x + step * v) - gradient(x - step * v)) / (2 * step)
    torch.testing.assert_close(tfn.jvp(loss, (x,), (v,))[1], (gradient(x) * v).sum())
    for made in (tfn.grad(lambda x: (tfn.grad(loss)(x) * v).sum()), lambda x: tfn.jvp(tfn.grad(loss), (x,), (v,))[1]):
        torch.testing.assert_close(made(x), expected, rtol=1e-6, atol=1e-7)
    both = torch.stack([x, v])
    torch.testing.assert_close(tfn.vmap(tfn.grad(loss))(both), torch.stack([gradient(x), gradient(v)]))


@pytest.mark.parametrize("is_padded", [True, False])
def test_lengths_in_tensors(is_padded: bool) -> None:
    """One program for labels of one shape: the longest target is a size that is found in data."""
    scores, rows = torch.randn(10, 2, 5, dtype=torch.float64), torch.randint(1, 5, (2, 4))

    def loss(x: torch.Tensor, labels: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(x.log_softmax(-1), labels, inputs, targets, zero_infinity=True)

    jitted = tfn.jit(loss)
    for inputs, targets in (map(torch.tensor, lengths) for lengths in LENGTHS):
        labels = rows if is_padded else torch.randint(1, 5, (int(targets.sum()),))
        leaves = [scores.clone().requires_grad_() for _ in range(2)]
        for call, leaf in zip((loss, jitted), leaves, strict=True):
            call(leaf, labels, inputs, targets).backward()
        assert torch.equal(*(leaf.grad for leaf in leaves))  # type: ignore[arg-type]
    assert tfn.cache_info(jitted).misses == (1 if is_padded else 2)


@pytest.mark.parametrize("in_dims", [(0, None, None, None), (0, 0, 0, 0), (1, 0, None, 1), (None, None, 0, 0)])
@pytest.mark.parametrize("is_batch", [True, False])
def test_vmap_with_lengths_in_tensors(in_dims: tuple[int | None, ...], is_batch: bool) -> None:
    """The longest target differs between examples."""
    rows = torch.randint(1, 5, (3, 2, 4))
    whole = [torch.randn(3, 10, 2, 5).log_softmax(-1), rows, torch.randint(8, 11, (3, 2)), torch.randint(1, 5, (3, 2))]
    whole = whole if is_batch else [whole[0][:, :, 0], rows[:, 0], whole[2][:, :1], torch.tensor([[4], [4], [4]])]
    in_dims = in_dims if is_batch else tuple(dim and min(dim, 1) for dim in in_dims)

    def loss(*args: Any) -> torch.Tensor:
        return F.ctc_loss(*args, reduction="sum", zero_infinity=True)

    given = [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(whole, in_dims, strict=True)]
    examples = [[x[0] if dim is None else x[i] for x, dim in zip(whole, in_dims, strict=True)] for i in range(3)]
    for mine, theirs in ((loss, loss), (tfn.grad(loss), torch.func.grad(loss))):
        expected = torch.stack([theirs(*one) for one in examples])
        torch.testing.assert_close(tfn.vmap(mine, in_dims)(*given), expected)
        torch.testing.assert_close(tfn.jit(tfn.vmap(mine, in_dims))(*given), expected)


def test_vmap_of_targets_one_after_another_is_refused() -> None:
    loss = lambda x: F.ctc_loss(x, torch.ones(4).long(), torch.tensor([10, 10]), torch.tensor([2, 2]))
    with pytest.raises(tfn.errors.VmapError, match="depends on data"):
        tfn.vmap(loss)(torch.randn(3, 10, 2, 5))
