"""Conjugate and negative bits, and ops that read memory, where something else than the value lies.

The oracle is eager PyTorch: its values, and their differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import thunder_fn as tfn
from thunder_fn.capture import capture
from thunder_fn.errors import ThunderError
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.grad import vjp

aten: Any = torch.ops.aten
empty: Any = torch.empty
MEMORY = torch.randn(3, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "conj": lambda m: m.conj(),
    "neg": lambda m: aten._neg_view(m),
    "neg and conj": lambda m: aten._neg_view(m).conj(),
    "imag of conj": lambda m: m.conj().imag,
    "real pairs": lambda m: torch.view_as_real(m),
    "neg of real": lambda m: aten._neg_view(m.real),
    "slice of conj": lambda m: m.conj()[1:, 1:3],
    "transposed": lambda m: m.t().conj(),
}
"""The views of its memory that a tensor may be."""


def _written(x: Tensor) -> Tensor:
    x.mul_(3)
    return x.as_strided((2,), (1,)) * 1


def _written_through(x: Tensor) -> Tensor:
    x.conj().as_strided((2,), (1,)).mul_(3)
    return x * 1


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "as_strided": lambda x: torch.as_strided(x, (2, 2), (1, 2)),
    "from an offset": lambda x: x.as_strided((2,), (1,), 5),
    "as_strided_copy": lambda x: torch.as_strided_copy(x, (2, 2), (1, 2)),
    "of a conjugate": lambda x: x.conj().as_strided((3,), (1,)),
    "of a negative": lambda x: aten._neg_view(x).as_strided((3,), (1,)),
    "of resolved": lambda x: x.resolve_conj().resolve_neg().as_strided((2,), (1,)),
    "of the imaginary part": lambda x: x.imag.as_strided((2,), (2,)),
    "scatter": lambda x: torch.as_strided_scatter(x, x.reshape(-1)[:2] * 3, (2,), (1,)),
    "pairs": lambda x: torch.view_as_real(x.resolve_conj().resolve_neg()).as_strided((2,), (1,)),
    "physical": lambda x: aten._conj_physical(x).conj_physical(),
    "both bits": lambda x: aten._neg_view(x).conj() * 1,
    "set": lambda x: empty(0, dtype=x.dtype).set_(x) * 1,
    "set with bits": lambda x: aten._neg_view(empty(0, dtype=x.dtype)).set_(x * 1) * 1,
    "written": _written,
    "written through": _written_through,
}
WRITE = ("written", "written through")
NO_DERIVATIVE = ("set", "set with bits", *WRITE)


def real(x: Tensor) -> Tensor:
    """The numbers of a tensor in a row of real ones."""
    x = x.detach().resolve_conj().resolve_neg().clone()
    return (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)


def complex_again(numbers: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_complex(numbers.view(*like.shape, 2)) if like.is_complex() else numbers.view(like.shape)


def agree(found: Callable[[], Any], *expected: Tensor) -> str:
    """Test whether all is eager's; a clear error of ours is no wrong number."""
    try:
        results = found()
    except ThunderError:
        return "refused"
    for a, b in zip(results, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(real(a), real(b), rtol=1e-9, atol=1e-9)
    return "same"


def values(view: Callable[[Tensor], Tensor], f: Callable[[Tensor], Tensor]) -> Iterator[Callable[[], Any]]:
    """Programs of f on what a view shows, given as an argument, closed over, and taken inside; what is written is a result."""

    def outside(run: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        memory = MEMORY.clone()
        x = view(memory)
        return run(memory, x), x

    yield lambda: outside(lambda memory, x: tfn.jit(f)(x))
    yield lambda: outside(lambda memory, x: tfn.jit(lambda one: f(x) * one)(torch.ones(())))
    yield lambda: outside(lambda memory, x: tfn.jit(lambda memory: f(view(memory)))(memory))
    yield lambda: (tfn.jit(lambda memory: f(view(memory * 1)))(MEMORY), outside(lambda memory, x: f(x))[1])


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("reader", READERS)
def test_values(view: str, reader: str) -> None:
    f, x = READERS[reader], VIEWS[view](MEMORY.clone())
    try:
        expected = f(x)
    except RuntimeError:
        return
    for run in values(VIEWS[view], f):
        agree(run, expected, x)


@pytest.mark.parametrize("view", ["conj", "imag of conj", "neg of real", "slice of conj", "transposed"])
@pytest.mark.parametrize("reader", [name for name in READERS if name not in NO_DERIVATIVE])
def test_derivatives(view: str, reader: str) -> None:
    """Readers are linear over the reals: eager's Jacobian is differences of its values."""
    f, take = READERS[reader], lambda: VIEWS[view](MEMORY.clone())
    x = take()
    try:
        y = f(x)
    except RuntimeError:
        return
    columns = []
    for row in torch.eye(real(x).numel(), dtype=torch.float64):
        moved = take()
        moved.add_(complex_again(row, moved))
        columns.append(real(f(moved)) - real(y))
    jacobian, generator = torch.stack(columns, 1), torch.Generator().manual_seed(2)
    ct, v = (torch.randn(one.shape, dtype=one.dtype, generator=generator) for one in (y, x))
    gradient = complex_again(jacobian.T @ real(ct), x)
    tangent = complex_again(jacobian @ real(v), y)

    def of_trace() -> Any:
        return evaluate(vjp(capture(f, (take(),)).trace, (True,), (True,)), [take(), ct])

    def of_autograd() -> Any:
        leaf = take().detach().requires_grad_()
        return torch.autograd.grad(tfn.jit(f)(leaf), leaf, ct)

    agree(of_trace, y, gradient)
    agree(of_autograd, gradient)
    agree(lambda: tfn.jit(lambda x: tfn.vjp(f, x)[1](ct))(take()), gradient)
    agree(lambda: tfn.jit(lambda x: tfn.jvp(f, (x,), (v,)))(take()), y, tangent)
    if x.is_contiguous() and "offset" not in reader:
        batch = torch.stack([MEMORY, 2 * MEMORY])
        rows = torch.stack([f(VIEWS[view](one.clone())) for one in batch])
        agree(lambda: [tfn.vmap(f)(VIEWS[view](batch.clone()))], rows)
        agree(lambda: [tfn.vmap(lambda memory: f(VIEWS[view](memory)))(batch)], rows)


def test_what_is_not_refused() -> None:
    """The laws above pass over errors of ours."""
    for name in ("conj", "neg", "neg and conj", "transposed"):
        for reader in ("as_strided", "of a conjugate", "of a negative", "of resolved", "both bits", "set", "written"):
            x = VIEWS[name](MEMORY.clone())
            expected = READERS[reader](x)
            for place, run in enumerate(values(VIEWS[name], READERS[reader])):
                if (place, reader) == (1, "set"):  # of a tensor that is closed over
                    continue
                assert agree(run, expected, x) == "same", (name, reader)
