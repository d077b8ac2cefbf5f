"""jit of calls that pass a tensor, or its memory, more than once: what eager does, or an error."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thunder_fn import grad
from thunder_fn.errors import AliasedMutation
from thunder_fn.jitted import cache_info, explain_misses, jit, last_prologue_traces, last_traces

BODIES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "reads": lambda a, b, c: (a * b + c, a is b, b is c),
    "writes": lambda a, b, c: (a.add_(1), b * 2, c)[1:],
    "writes two": lambda a, b, c: (a.mul_(2), b.sub_(c), a + b)[2],
    "writes and returns": lambda a, b, c: (b.add_(c), b, a)[1:],
    "decides": lambda a, b, c: a + 1 if a is c else b.neg_() * a,
}


def arguments(chosen: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Some of two tensors and a view of the first."""
    a, b = torch.arange(3.0), torch.arange(3.0) + 5
    view = a[:]
    return tuple((a, b, view)[place] for place in chosen)


@pytest.mark.parametrize("name", BODIES)
def test_any_arguments_may_be_one_tensor(name: str) -> None:
    """Law: jit(f) of any arguments, some the same, gives and writes what f does, or is an AliasedMutation."""
    jitted, refused = jit(BODIES[name]), 0
    for chosen in itertools.product(range(3), repeat=3):
        mine, its = arguments(chosen), arguments(chosen)
        expected = BODIES[name](*its)
        try:
            found = jitted(*mine)
        except AliasedMutation:
            refused += 1
            assert {0, 2} <= set(chosen), "only views of one memory are refused"
            continue
        assert len(found) == len(expected)
        for one, two in zip((*found, *mine), (*expected, *its), strict=True):
            assert torch.equal(one, two) if isinstance(one, Tensor) else one is two
    assert (refused > 0) == (name != "reads")
    assert cache_info(jitted).misses <= 5, "a program for each way in which three arguments can be the same"


def test_a_tensor_in_several_places_of_a_tree() -> None:
    def f(tree: Any) -> Any:
        tree["a"].add_(1)
        return tree["b"][0] * tree["c"], tree["a"] is tree["c"]

    jitted, x, y = jit(f), torch.ones(2), torch.ones(2)
    for tree in ({"a": x, "b": [y], "c": x}, {"a": x, "b": [x], "c": y}, {"a": x, "b": [x], "c": x}):
        twin = {name: value.clone() for name, value in (("x", x), ("y", y))}
        same = {id(x): twin["x"], id(y): twin["y"]}
        its = {"a": same[id(tree["a"])], "b": [same[id(tree["b"][0])]], "c": same[id(tree["c"])]}
        (value, flag), (expected, its_flag) = jitted(tree), f(its)
        assert torch.equal(value, expected) and flag is its_flag
        assert torch.equal(x, twin["x"]) and torch.equal(y, twin["y"])
    assert len(last_traces(jitted)[0].inputs) == 1
    assert "'b': [args[0]['a']], 'c': args[0]['a']" in str(last_prologue_traces(jitted)[0])
    assert str(explain_misses(jitted)[-1]) == (
        "args[0]['c']: it was Tensor of 1 dims, float32 on cpu, and is args[0]['a'] now"
    )


def test_sizes_that_change_beside_a_tensor_passed_twice() -> None:
    jitted = jit(lambda a, b, c: (a * 2 if a is b else a * 3) + c.sum())
    for size in (2, 3, 4, 5, 6):
        x, c = torch.randn(size), torch.randn(size + 1)
        assert torch.equal(jitted(x, x, c), x * 2 + c.sum())
        assert torch.equal(jitted(x, x.clone(), c), x * 3 + c.sum())
    assert cache_info(jitted).misses == 4, "two kinds of calls, each once more for all sizes"


def test_gradients_of_a_tensor_passed_twice() -> None:
    f = lambda a, b: (a.sin() * b + (a * b).exp()).sum()
    x, y = (torch.randn(3).requires_grad_() for _ in range(2))
    for args in ((x, x), (x, y), (y, y)):
        expected = torch.autograd.grad(f(*args), args)
        assert all(map(torch.equal, torch.autograd.grad(jit(f)(*args), args), expected))
    d = x.detach()
    for transformed in (grad(jit(f), argnums=(0, 1)), jit(grad(f, argnums=(0, 1)))):
        both = torch.func.grad(f, argnums=(0, 1))(d, d)
        assert all(map(torch.allclose, transformed(d, d), both)), "a transform takes them for two arguments"


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, bool, bool]:
        self.seen.add_(1)
        return x * self.weight, x is self.weight, x is self.seen


def test_a_module_called_with_its_own_tensors() -> None:
    mine, its = Scaled(), Scaled()
    jitted = jit(mine)
    for name in ("weight", "seen", None, "weight", "seen"):
        given = [torch.ones(2) if name is None else getattr(module, name) for module in (mine, its)]
        (found, *flags), (expected, *its_flags) = jitted(given[0]), its(given[1])
        assert torch.equal(found, expected) and flags == its_flags and torch.equal(mine.seen, its.seen)
        found.sum().backward()
        expected.sum().backward()
        assert torch.equal(mine.weight.grad, its.weight.grad)  # type: ignore[arg-type]


def test_attention_of_one_tensor_projects_once() -> None:
    """PyTorch's attention asks whether query, key and value are one tensor, and rounds otherwise if they are not."""
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 3, 8)
    jitted = jit(attention)
    for args in ((x, x, x), (x, x.clone(), x), (x, x, x)):
        assert torch.equal(jitted(*args)[0], attention(*args)[0])


def test_closed_over_tensors_that_are_passed_too() -> None:
    weight = torch.ones(2)

    def f(x: Tensor) -> Tensor:
        x.add_(1)
        return weight * 2

    jitted = jit(f)
    assert jitted(torch.ones(2)).tolist() == [2, 2]
    with pytest.raises(AliasedMutation, match="a closed-over tensor"):
        jitted(weight)
    assert weight.tolist() == [1, 1]


RETURNED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x[1:],
    "a transpose": lambda x: x.t(),
    "a flat view": lambda x: x.view(-1),
    "columns": lambda x: x[:, ::2],
    "the last row": lambda x: x[-1],
    "itself": lambda x: x.real,
}


@pytest.mark.parametrize("options", ({}, {"cache": "symbolic values"}, {"dynamic": False}), ids=str)
@pytest.mark.parametrize("kind", RETURNED)
def test_a_result_is_a_view_of_a_written_argument_of_any_size(kind: str, options: dict[str, Any]) -> None:
    """A write to the result after the call changes the argument, as in eager mode."""

    def f(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return RETURNED[kind](x)

    jitted = jit(f, **options)
    for size, part in itertools.product((3, 4, 5, 2), (slice(None), slice(1, None))):
        for requires_grad in (False, True):
            wholes = (torch.arange(size * 3.0 + 3).reshape(size + 1, 3).requires_grad_(requires_grad) for _ in range(2))
            mine, its = ((whole * 1)[part][:size] for whole in wholes)
            found, known = jitted(mine), f(its)
            found.mul_(2)
            known.mul_(2)
            assert torch.equal(found, known) and found.stride() == known.stride()
            assert torch.equal(mine, its)


@pytest.mark.parametrize("options", ({}, {"cache": "symbolic values"}), ids=str)
def test_an_unused_argument_that_shares_memory_with_a_written_one(options: dict[str, Any]) -> None:
    """The backward needs its sizes at most, and so does not mind that it was changed."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.exp_()
        return y * 1

    def gradient(call: Callable[..., torch.Tensor]) -> torch.Tensor:
        leaf = torch.arange(6.0).reshape(2, 3).requires_grad_()
        x = leaf * 1
        call(x, x.t()).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert torch.equal(gradient(jit(f, **options)), gradient(f))
