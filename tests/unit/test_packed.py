"""Packed sequences in jitted functions and modules: eager's numbers, from one program for all lengths."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

import thunder_fn as tfn
from thunder_fn.capture import pytree

LENGTHS = ((7, 5, 2), (4, 4, 1), (6, 6, 6))


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.flatten(tree)[0] if isinstance(leaf, Tensor)]


def check(module: nn.Module, calls: list[tuple[Any, ...]]) -> int:
    """Results, gradients and random numbers are eager's, but for how a processor rounds products in memory of another
    alignment; the number of traces.
    """
    twin, jitted = copy.deepcopy(module), tfn.jit(module)
    for args in calls:
        found, expected = [], []
        for run, results in ((jitted, found), (twin, expected)):
            torch.manual_seed(1)
            results += tensors_of(run(*args))
            run.zero_grad()
            sum(value.sin().sum() for value in results if value.requires_grad).backward()  # type: ignore[union-attr]
            results += [parameter.grad for parameter in run.parameters()]
        torch.testing.assert_close(found, expected)
    return tfn.cache_info(jitted).misses


def packed(lengths: tuple[int, ...], *, is_sorted: bool = True) -> rnn.PackedSequence:
    given = list(lengths) if is_sorted else list(lengths)[::-1]
    return rnn.pack_padded_sequence(torch.randn(7, 3, 4), given, enforce_sorted=is_sorted)


CELLS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 5),
    "deep LSTM": lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True, dropout=0.3),
    "projected LSTM": lambda: nn.LSTM(4, 5, num_layers=2, proj_size=2),
    "GRU": lambda: nn.GRU(4, 5, num_layers=2, bias=False),
    "RNN": lambda: nn.RNN(4, 5, nonlinearity="relu", bidirectional=True),
}


@pytest.mark.parametrize(("name", "is_sorted"), [*zip(CELLS, (True, False, True, False, False), strict=True)])
def test_modules_of_packed_sequences(name: str, is_sorted: bool) -> None:
    module = CELLS[name]()
    calls = [(packed(lengths, is_sorted=is_sorted),) for lengths in LENGTHS]
    assert check(module, calls) <= 2, "one for the first lengths, one for all"
    assert type(tfn.jit(module)(*calls[0])[0]) is rnn.PackedSequence


class Encoder(nn.Module):
    """Words in, a label and the hidden states out."""

    def __init__(self, *, is_sorted: bool, total: int | None) -> None:
        super().__init__()
        self.words, self.states, self.head = nn.Embedding(10, 4), nn.GRU(4, 5, batch_first=True), nn.Linear(5, 2)
        self.is_sorted, self.total = is_sorted, total

    def forward(self, words: Tensor, lengths: Any) -> tuple[Tensor, ...]:
        x = rnn.pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=self.is_sorted)
        outputs, last = self.states(x)
        padded, found = rnn.pad_packed_sequence(outputs, batch_first=True, padding_value=0.5, total_length=self.total)
        is_there = torch.arange(padded.shape[1]) < found.unsqueeze(1)
        return self.head(last[-1]), padded * is_there.unsqueeze(2), found


@pytest.mark.parametrize(("is_sorted", "total"), ((True, None), (False, 8)))
def test_packing_inside(is_sorted: bool, total: int | None) -> None:
    given = [list(lengths) if is_sorted else list(lengths)[::-1] for lengths in LENGTHS]
    module, words = Encoder(is_sorted=is_sorted, total=total), torch.randint(0, 10, (3, 7))
    assert check(module, [(words, torch.tensor(lengths)) for lengths in given]) == 1, "lengths are data"
    assert check(module, [(words, lengths) for lengths in given[:2]]) == 2, "numbers that have changed are symbols"


def test_what_eager_refuses() -> None:
    pack = tfn.jit(lambda x, lengths: rnn.pack_padded_sequence(x, lengths).data)
    for lengths, text in (
        ([2, 5, 7], "must be sorted in decreasing order"),
        ([5, 5, 0], "has to be greater than 0"),
        ([8, 5, 1], "u0 <= 7 does not hold"),
    ):
        with pytest.raises(RuntimeError, match=text):
            pack(torch.randn(7, 3, 4), torch.tensor(lengths))
    with pytest.raises(RuntimeError, match=r"Expected hidden size|does not hold"):
        tfn.jit(nn.GRU(4, 5))(packed(LENGTHS[0]), torch.zeros(1, 2, 5))


@pytest.mark.parametrize("cell", (nn.LSTM, nn.GRU))
def test_derivatives_of_every_order(cell: Any) -> None:
    module, sequence = cell(2, 3).double(), rnn.pack_padded_sequence(torch.randn(4, 2, 2).double(), [4, 1])

    def f(x: Tensor) -> Tensor:
        return module(sequence._replace(data=x))[0].data.sin().sum()

    def eager(x: Tensor) -> Tensor:
        return module(rnn.PackedSequence(x, *sequence[1:]))[0].data.sin().sum()

    def derivatives(g: Callable[..., Tensor]) -> list[Tensor]:
        x = sequence.data.clone().requires_grad_()
        first = torch.autograd.grad(g(x), x, create_graph=True)[0]
        second = torch.autograd.grad(first.sin().sum(), x, create_graph=True)[0]
        return [first, second, torch.autograd.grad(second.sin().sum(), x)[0]]

    for found, expected in zip(derivatives(tfn.jit(f)), derivatives(eager), strict=True):
        torch.testing.assert_close(found, expected)
    tangent = torch.randn_like(sequence.data)
    expected = torch.autograd.functional.jvp(eager, sequence.data, tangent)[1]
    torch.testing.assert_close(tfn.jvp(f, (sequence.data,), (tangent,))[1], expected)


def test_a_result_whose_size_is_found_beside_another() -> None:
    """Pieces of a backward give each other gradients of sizes that are found in data."""

    def f(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        y = x[mask].sin()
        return y.sum(), y[:1] * 2, y.exp()

    jitted = tfn.jit(f)
    for mask in ([True, False, True], [True, True, True], [False, False, True]):
        x = torch.randn(3).requires_grad_()
        for found, expected in zip(jitted(x, torch.tensor(mask)), f(x, torch.tensor(mask)), strict=True):
            pair = [torch.autograd.grad(one.sum(), x, retain_graph=True)[0] for one in (found, expected)]
            assert torch.equal(found, expected) and torch.equal(*pair)
