"""Sizes and numbers that are found in data: symbols that an equation binds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import errors
from thunder_fn.capture import capture, pytree
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.simplify import cse, dce
from thunder_fn.ir.check import check
from thunder_fn.jitted import cache_info, jit

Tensor = torch.Tensor
INPUTS = [
    torch.tensor(values) for values in ([1.0, -2, 3, 0, 4], [-1.0, -2, -3, 0, -5], [2.0, -1, -1, -3, 0], [1.0] * 5)
]


def same(mine: Any, its: Any) -> None:
    torch.testing.assert_close(mine, its)
    for a, b in zip(pytree.flatten(mine)[0], pytree.flatten(its)[0], strict=True):
        assert type(a) is type(b)


def _filled(x: Tensor) -> Tensor:
    x = x.clone()
    x[x > 0] = 7
    return x


def _checked(x: Tensor) -> Tensor:
    count = x[x > 0].shape[0]
    torch._check(count <= 9)
    return x.new_zeros(9)[:count] + x[x > 0]


def _routed(x: Tensor) -> Tensor:
    """Some rows go through a layer, as a mixture of experts sends them."""
    rows = x.outer(x.exp())
    chosen = (rows[:, 0] > 0).nonzero()[:, 0]
    return torch.zeros_like(rows).index_add(0, chosen, torch.nn.functional.gelu(rows[chosen]))


def _chosen(x: Tensor) -> Any:
    return tfn.cond(x.sum() > 0, lambda x: (x[x > 0], x.sum()), lambda x: (x[x < 0].exp(), x.max()), (x,))


def _chosen_alike(x: Tensor) -> Tensor:
    """Both results have the size of one mask, in each branch, so that they can be added up."""

    def of(mask: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        places = mask.nonzero()[:, 0]
        return lambda x: (x[places], (x * 2)[places])

    a, b = tfn.cond(x.sum() > 0, of(x > 0), of(x < 0), (x,))
    return (a.sin() * b).sum()


def _chosen_of_three(x: Tensor) -> Tensor:
    branches = [lambda x: x[x > 0], lambda x: torch.cat([x[x < 0], x[:1]]), lambda x: x.exp()]
    return tfn.switch((x > 0).sum() % 3, branches, (x,))


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0] * 2,
    "two masks": lambda x: torch.cat([x[x > 0], x[x < 0]]) * x[x > 0].shape[0],
    "masked_select": lambda x: torch.masked_select(x, x > 0).exp(),
    "set": _filled,
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "item": lambda x: x * (x.max().item() * 2 + 1) - 3,
    "item as a size": lambda x: torch.arange(x.argmax().item() + 1),
    "item as an index": lambda x: x[: x.argmax().item()],
    "results": lambda x: (x.argmax().item(), x.sum().item() + 1, x[x > 0].shape[0]),
    "torch._check": _checked,
    "repeat_interleave": lambda x: torch.repeat_interleave(x, (x > 0) + 1),
    "rows": _routed,
    "cond": lambda x: tfn.cond(x.sum() > 0, lambda x: x[x > 0].sum(), lambda x: x[x < 0].sum(), (x,)),
    "cond of sizes": _chosen,
    "cond of equal sizes": _chosen_alike,
    "cond of numbers": lambda x: (
        tfn.cond(x.sum() > 0, lambda x: (x > 0).sum().item(), lambda x: x.argmax().item(), (x,)) * x
    ),
    "cond in cond": lambda x: tfn.cond(
        x[0] > 0, lambda x: tfn.cond(x[0] > 1, lambda x: x[x > 0], torch.exp, (x,)), lambda x: x[x < 0], (x,)
    ),
    "switch": _chosen_of_three,
    "grad(cond)": tfn.grad(
        lambda x: tfn.cond(x.sum() > 0, lambda x: (x[x > 0] ** 2).sum(), lambda x: x[x < 0].exp().sum(), (x,))
    ),
    "grad(cond of sizes)": tfn.grad(lambda x: _chosen(x)[0].sin().sum() * _chosen(x)[1]),
    "grad(cond of equal sizes)": tfn.grad(_chosen_alike),
    "grad(switch)": tfn.grad(lambda x: _chosen_of_three(x).sin().sum()),
    "jvp(switch)": lambda x: tfn.jvp(_chosen_of_three, (x,), (x.cos(),)),
    "hessian(switch)": tfn.hessian(lambda x: _chosen_of_three(x).pow(3).sum()),
    "vmap(cond of sizes)": lambda x: tfn.vmap(
        lambda row: tfn.cond(x.sum() > 0, lambda row: row[x > 0], lambda row: row[x < 0], (row,))
    )(x.outer(x)),
    "scan over what is found": lambda x: tfn.scan(lambda c, y: (c + y, c * y), torch.zeros(()), x[x > 0]),
    "grad(map)": tfn.grad(lambda x: tfn.map(lambda row: row[row > 0].exp().sum(), torch.stack([x, -x])).sum()),
    "fori_loop": lambda x: tfn.fori_loop(0, (x > 0).sum().item(), lambda i, y: y * 2 + i, x),
    "vmap over what is found": lambda x: tfn.vmap(lambda row: row.softmax(0))(x.outer(x)[x > 0]),
    "jacrev": lambda x: tfn.jacrev(lambda x: x[x > 0].sin())(x),
    "flag": lambda x: ((x > 0).any().item(), x * (x > 0).all().item()),
    "index": lambda x: x[(x > 0).sum().item() - 1],
    "minimum": tfn.grad(lambda x: x[: torch.sym_min((x > 0).sum().item(), 3)].exp().sum()),
    "jvp(slice)": lambda x: tfn.jvp(lambda x: x[(x > 0).sum().item() // 3 :].exp(), (x,), (x,)),
    "map": lambda x: tfn.map(lambda row: row[row > 0].sum(), torch.stack([x, -x])),
    "jit": lambda x: jit(lambda x: x[x > 0] * 2)(x).sum(),
    "grad": tfn.grad(lambda x: (x[x > 0] ** 2).sum() + (x[x < 0] ** 3).sum() * x[x < 0].shape[0]),
    "grad(masked_select)": tfn.grad(lambda x: torch.masked_select(x, x > 0).exp().sum()),
    "grad(nonzero)": tfn.grad(lambda x: x[x.nonzero()[:, 0]].exp().sum()),
    "grad(checkpoint)": tfn.grad(lambda x: checkpoint(lambda x: (x[x > 0] ** 2).sum(), x, use_reentrant=False)),
    "jvp": lambda x: tfn.jvp(lambda x: x[x > 0] ** 3, (x,), (x,)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_program_for_all_data(name: str) -> None:
    f = PROGRAMS[name]
    g = jit(f)
    for x in INPUTS:
        same(g(x), f(x))
    assert cache_info(g).misses == 1
    if name in ("jvp(slice)", "item as an index") and torch.__version__ < "2.12":
        pytest.skip("PyTorch 2.11 demands of a slice that it ends at the length, which `check` takes for a constraint")
    trace = capture(f, (INPUTS[0],)).trace
    for other in (trace, dce(trace), cse(trace)):
        check(other)
        for x in INPUTS:
            torch.testing.assert_close(evaluate(other, (x,)), evaluate(trace, (x,)))


def test_autograd() -> None:
    f: Callable[[Tensor], Tensor] = lambda x: (x[x > 0] * x[x > 0].shape[0]).sum() * 3 + x[x < 0].exp().sum()
    g = jit(f)
    for x in INPUTS:
        grads = [torch.autograd.grad(run(leaf), leaf)[0] for run in (f, g) for leaf in [x.clone().requires_grad_()]]
        same(*grads)


DECISIONS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "if": (lambda x: x if x.nonzero().shape[0] > 2 else -x, "whether u0 > 2, where u0 is"),
    "if item": (lambda x: x if x.sum().item() > 2 else -x, "whether zuf0 > 2.0, where zuf0 is"),
    "range": (lambda x: [x for _ in range(x.argmax().item())], "for the value of u0, where u0 is"),
    "text": (lambda x: f"{x.argmax().item()}", "for the value of u0, where u0 is"),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_python_cannot_decide(name: str) -> None:
    f, what = DECISIONS[name]
    with pytest.raises(errors.DataDependentBranch) as caught:
        jit(f)(INPUTS[0])
    number = (
        " An item is a number already: leave `int()` and `float()` out, and write `math.trunc` for the int of a float."
        " To print it, write `tfn.debug.print`."
    )
    line = f"{f.__code__.co_filename}:{f.__code__.co_firstlineno} in <lambda>"
    assert message_of(caught.value) == (
        f"Python asked {what} found in a tensor's values, which are not known while tracing\nfrom:         {line}\n"
        "Write `torch.cond` or `torch.where` for a decision, and `fori_loop` or `while_loop` for a loop; "
        "or say what holds with `torch._check`." + (number if "the value of" in what else "")
    )


def test_what_is_checked_is_checked_in_every_call() -> None:
    def f(x: Tensor) -> Tensor:
        torch._check(x.argmax().item() < 3)
        return x * 2

    g = jit(f)
    same(g(INPUTS[1].flip(0)), f(INPUTS[1].flip(0)))
    with pytest.raises(RuntimeError, match=r"u0 < 3 does not hold.*\nfrom: .*test_data_sizes.py:\d+ in f"):
        g(INPUTS[0])


def test_second_derivatives_of_norms_do_not_take_statistics_for_constants() -> None:
    """PyTorch's forward formula of layer_norm's backward wants sizes that are numbers; its parts take means for constants."""
    x, v = torch.tensor([1.0, -2, 3, 0.5, 4]).double(), torch.tensor([0.5, 1, -1, 2, 0.3]).double()
    f = lambda x: torch.nn.functional.layer_norm(x.outer(x.sin())[x > 0], (5,)).sin().sum()
    expected = torch.autograd.functional.hessian(f, x) @ v
    for product in (lambda x: tfn.jvp(tfn.grad(f), (x,), (v,))[1], lambda x: tfn.vjp(tfn.grad(f), x)[1](v)[0]):
        torch.testing.assert_close(jit(product)(x), expected)


def test_choices_that_differ_between_examples_have_no_size() -> None:
    one = lambda x: tfn.cond(x.sum() > 0, lambda x: torch.ones((x > 0).sum().item()), lambda x: x, (x,))
    with pytest.raises(errors.VmapError, match=r"vmap: cond has a result whose size .* differs between examples"):
        tfn.vmap(one)(torch.stack(INPUTS))


def test_branches_have_to_agree_in_what_is_not_found_in_data() -> None:
    with pytest.raises(errors.TraceTypeError, match=r"out: f32\[u\d\] from <lambda>, f64\[u\d\] from <lambda>"):
        jit(lambda x: tfn.cond(x.sum() > 0, lambda x: x[x > 0], lambda x: x[x < 0].double(), (x,)))(INPUTS[0])
    with pytest.raises(errors.TraceTypeError, match=r"out: f32\[2\] from <lambda>, f32\[3\] from <lambda>"):
        jit(lambda x: tfn.cond(x.sum() > 0, lambda x: x[:2], lambda x: x[:3], (x,)))(INPUTS[0])


def test_vmap_has_one_size_for_all_examples() -> None:
    with pytest.raises(errors.VmapError, match=r"vmap: aten.index.Tensor has a result whose size .* differs between"):
        tfn.vmap(lambda x: x[x > 0])(torch.stack(INPUTS))


def _changed(x: Tensor, mask: Tensor) -> Tensor:
    x = x.clone()
    x[..., mask] *= 3
    return x


OF_ONE_MASK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda x, mask: x[mask].sin(),
    "masked_select": lambda x, mask: torch.masked_select(x, mask).exp(),
    "masked_scatter": lambda x, mask: torch.zeros_like(x).masked_scatter(mask, x[mask] * 2),
    "write": _changed,
    "write one": lambda x, mask: x.clone().index_put((mask,), x.sum()),
    "accumulate": lambda x, mask: x.index_put((mask,), x[mask] * 3, accumulate=True),
    "nonzero": lambda x, mask: x[mask.nonzero()[:, 0]].cumsum(0),
    "with an index": lambda x, mask: x.outer(x)[mask, 2],
    "size": lambda x, mask: x * mask.sum().item() + x[mask].shape[0],
    "bincount": lambda x, mask: torch.bincount(mask.long(), x.detach()) * x.sum(),
    "repeat_interleave": lambda x, mask: torch.repeat_interleave(x, mask + 1) ** 2,
}


@pytest.mark.filterwarnings("error::thunder_fn.derived.leaf_vmap.LoopWarning")
@pytest.mark.parametrize("name", OF_ONE_MASK)
def test_examples_that_share_a_mask_have_one_size(name: str) -> None:
    f = OF_ONE_MASK[name]
    xs = torch.stack(INPUTS).double().cos()
    loss: Callable[[Tensor, Tensor], Tensor] = lambda x, mask: f(x, mask).sin().sum()
    batches = tfn.vmap(f, (0, None)), jit(tfn.vmap(f, (0, None)))
    gradients = tfn.vmap(tfn.grad(loss), (0, None)), tfn.grad(lambda xs, m: tfn.vmap(loss, (0, None))(xs, m).sum())
    tangents = tfn.vmap(lambda x, mask: tfn.jvp(lambda x: loss(x, mask), (x,), (x,))[1], (0, None))
    for count in (0, 1, 3):
        mask = torch.arange(5) % 5 < count
        for batch in batches:
            same(batch(xs, mask), torch.stack([f(x, mask) for x in xs]))
        want = torch.stack([torch.func.grad(loss)(x, mask) for x in xs])
        for gradient in gradients:
            torch.testing.assert_close(gradient(xs, mask), want)
        torch.testing.assert_close(tangents(xs, mask), (want * xs).sum(1))


def test_a_mask_that_all_examples_of_an_inner_batch_share() -> None:
    """The outer vmap has a mask for each example, and then there is no one size."""
    rows = tfn.vmap(lambda x, mask: torch.masked_select(x, mask), (0, None))
    xs = torch.stack(INPUTS)
    same(tfn.vmap(rows, (0, None))(xs[None], xs[0] > 0), xs[None][..., xs[0] > 0])
    with pytest.raises(errors.VmapError, match=r"vmap: aten.nonzero.default has a result whose size .* differs"):
        tfn.vmap(rows, (None, 0))(xs, xs > 0)


def test_composites_stay_around_what_only_uses_such_sizes() -> None:
    trace = capture(lambda x: torch.nn.functional.layer_norm(x[x > 0][:, None], (1,)), (INPUTS[0],)).trace
    assert any("layer_norm" in equation.op.name and equation.bodies for equation in trace.equations)


def test_static_programs_are_traced_once() -> None:
    calls: list[int] = []

    def f(x: Tensor) -> Tensor:
        calls.append(1)
        return x + 1

    with warnings.catch_warnings():
        jit(f)(INPUTS[0])
    assert len(calls) == 1


def test_the_pullback_takes_a_cotangent_of_the_size_that_was_found() -> None:
    x = INPUTS[0]
    y, pullback = tfn.vjp(lambda x: x[x > 0].sin(), x)
    same(pullback(y), torch.func.vjp(lambda x: x[x > 0].sin(), x)[1](y))
    with pytest.raises(errors.CotangentError, match=r"cotangent is f32\[9\], but out is f32\[\d\]"):
        pullback(torch.ones(9))


def test_tolist_gives_numbers_found_in_data() -> None:
    def halves(x: Tensor) -> Any:
        positive, rest = torch.stack([(x > 0).sum(), (x <= 0).sum()]).tolist()
        return x.sort(descending=True)[0].split([positive, rest]), positive, x[:2].tolist()

    f = jit(halves)
    for x in INPUTS:
        same(f(x), halves(x))
    assert cache_info(f).misses == 1


def test_gradients_where_there_is_room_for_one() -> None:
    """A rule takes sizes found in data for two or more, also where there is one place only."""
    f = lambda x: x[x[:, 0] > 0].sin().sum()
    g = jit(tfn.grad(f), cache="symbolic values")
    for rows in (3, 1, 0, 5):
        x = torch.linspace(-1, 2, rows * 2).view(rows, 2)
        for sign in (1, -1):
            same(g(x * sign), torch.func.grad(f)(x * sign))


def _number(x: torch.Tensor) -> torch.Tensor:
    n = x.max().long().item()
    return (x**3).sum() * n


def _mean_of(pick: Any) -> Any:
    def f(x: torch.Tensor) -> torch.Tensor:
        chosen = x[pick(x)]
        return (chosen**3).sum() / chosen.shape[0]

    return f


@pytest.mark.parametrize(
    "f",
    [
        _mean_of(lambda x: torch.nonzero(x > 0).squeeze(1)),
        _mean_of(lambda x: torch.tensor([True, False, True, True])),
        _number,
    ],
)
def test_what_is_found_in_data_keeps_its_name_in_nested_transforms(f: Any) -> None:
    x, v = torch.tensor([1.0, -2.0, 3.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    expected = torch.autograd.functional.hessian(f, x)
    for made in (tfn.hessian(f), tfn.jit(tfn.hessian(f)), tfn.hessian(tfn.jit(f)), tfn.jacfwd(tfn.jacrev(f))):
        torch.testing.assert_close(made(x), expected)
    torch.testing.assert_close(tfn.linearize(f, x)[1](v), torch.autograd.functional.jvp(f, x, v)[1])
    torch.testing.assert_close(tfn.linearize(tfn.grad(f), x)[1](v), expected @ v)
    again = tfn.checkpoint(f)
    torch.testing.assert_close(tfn.grad(again)(x), torch.autograd.functional.vjp(f, x)[1])
    torch.testing.assert_close(tfn.jit(tfn.hessian(again))(x), expected)


def test_packed_sequences() -> None:
    """A named tuple that looks at what it is made of, of sizes that lengths decide."""
    rnn = torch.nn.utils.rnn
    x, jitted = torch.randn(7, 3, 4), jit(lambda x, lengths: rnn.pack_padded_sequence(x.sin(), lengths))
    for lengths in (torch.tensor([7, 5, 2]), torch.tensor([4, 4, 1])):
        expected, packed = rnn.pack_padded_sequence(x.sin(), lengths), jitted(x, lengths)
        assert type(packed) is rnn.PackedSequence
        assert torch.equal(packed.data, expected.data)
        assert torch.equal(packed.batch_sizes, expected.batch_sizes)
        twice = jit(lambda packed: packed._replace(data=2 * packed.data))(packed)
        assert torch.equal(twice.data, 2 * expected.data)
    assert cache_info(jitted).misses == 1
    assert jit(lambda x: torch.zeros(2, rnn.pack_padded_sequence(x, lengths).batch_sizes[0]))(x).shape == (2, 3)


@pytest.mark.filterwarnings("ignore:std:UserWarning")
def test_a_divisor_that_is_found_to_be_zero() -> None:
    """PyTorch's formula for the gradient of std divides by one less than the number of rows, as C++ divides."""
    x, f = torch.randn(4, 3), jit(tfn.grad(lambda x, mask: x[mask].std(0).sum()))
    for mask in (torch.tensor([True, False, True, True]), torch.tensor([True, False, False, False])):
        leaf = x.clone().requires_grad_()
        leaf[mask].std(0).sum().backward()
        torch.testing.assert_close(f(x, mask), leaf.grad, equal_nan=True)
    assert cache_info(f).misses == 1


def test_a_size_found_in_data_that_may_not_fit_is_refused_by_name() -> None:
    c = torch.tensor(2.0)
    with pytest.raises(errors.DataDependentShape, match=r"`addcdiv` needs to know the size u0.*\n.*\n.*torch\._check"):
        jit(lambda x: torch.addcdiv(c.unique(), c, x))(torch.ones(2, 3))

    def told(x: torch.Tensor) -> torch.Tensor:
        v = c.unique()
        torch._check(v.shape[0] == 1)
        return torch.addcdiv(v, c, x)

    assert torch.equal(jit(told)(torch.ones(2, 3)), told(torch.ones(2, 3)))


def _put(x: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = value
    return x


MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda x, mask: x.exp()[mask],
    "masked_select": lambda x, mask: x.exp().masked_select(mask),
    "index_put": lambda x, mask: _put(x.exp(), x.sum(), mask),
    "index_put of another dtype": lambda x, mask: _put(x.float().exp(), x.sum(), mask),
    "masked_fill": lambda x, mask: x.exp().masked_fill(mask, x.sum()),
    "sum": lambda x, mask: x.exp()[mask].sum().sum(-1, keepdim=True).reshape(()),
}


@pytest.mark.parametrize("shape", ((4,), (0,), (2, 0), (0, 3), (2, 1, 3)), ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_masks_of_any_shape_have_gradients(name: str, shape: tuple[int, ...]) -> None:
    x = torch.linspace(-1, 2, max(math.prod(shape), 1), dtype=torch.float64)[: math.prod(shape)].reshape(shape)
    f = MASKED[name]
    found = []
    for run in (f, jit(f)):
        leaf = x.clone().requires_grad_()
        y = run(leaf, x > 0)
        found.append((y, *torch.autograd.grad(y.sum(), leaf)))
    torch.testing.assert_close(found[1], found[0])


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda x: x.sum() @ torch.ones(7, 2),
    "matmul of a scalar": lambda x: torch.matmul(torch.ones(7, 2), x.sum()),
    "matmul of other sizes": lambda x: torch.ones(2, 3) @ torch.ones(7, 2),
    "einsum": lambda x: torch.einsum("ij,jk->ik", torch.ones(2, 3), torch.ones(7, 2)),
    "cat": lambda x: torch.cat([torch.ones(2, 3), torch.ones(7, 2)]),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_beside_found_sizes_are_of_eagers_class(name: str) -> None:
    """The function catches them, as eager's."""

    def f(x: Tensor) -> Tensor:
        found = x[x > 0]
        try:
            return found + WRONG[name](x).sum()
        except RuntimeError:
            return found * 2

    for x in INPUTS:
        same(jit(f)(x), f(x))


@pytest.mark.parametrize("options", [{}, {"cache": "symbolic values"}, {"executors": ["inductor"]}])
def test_a_size_that_the_body_of_a_loop_finds(options: Any) -> None:
    """The loop takes a symbolic number of steps, and each finds the same elements."""
    f = lambda xs, y: tfn.scan(lambda c, x: (c + x, y.unique() * x), xs[0], xs)
    g = jit(lambda xs, y: (f(xs, y), tfn.grad(lambda xs: f(xs, y)[1].square().sum())(xs)), **options)
    for n, values in ((3, [1.0, 2.0, 1.0]), (4, [5.0, 1.0, 2.0]), (2, [3.0, 3.0, 3.0])):
        xs, y = torch.linspace(1, 2, n), torch.tensor(values)
        (carry, stack), grads = g(xs, y)
        found = torch.tensor(sorted(set(values)))
        torch.testing.assert_close(carry, xs[0] + xs.sum())
        torch.testing.assert_close(stack, xs[:, None] * found)
        torch.testing.assert_close(grads, 2 * xs * found.square().sum())


# ---- sizes that are 1 in some calls ----


SQUEEZED: dict[str, Callable[[Tensor], Tensor]] = {
    "rank": lambda x: (x > 0).nonzero().squeeze().dim() * x,
    "all dims": lambda x: x[(x > 0).nonzero().squeeze()],
    "one dim": lambda x: x.masked_select(x > 0).squeeze(0)[..., None] * torch.arange(2.0),
    "a tuple": lambda x: x[x > 0][:, None].squeeze((0, 1)).sin().sum(-1),
    "by name": lambda x: torch.squeeze(x[x > 0][:, None], dim=(-2, -1)).exp(),
    "in place": lambda x: (x[x > 0] * 2).squeeze_()[None].exp(),
    "mean": lambda x: x.outer(x)[(x > 0).nonzero().squeeze()].mean(0),
    "index_select": lambda x: x[:, None].index_select(0, (x > 0).nonzero()[:, 0]).squeeze().sum(-1).exp(),
    "of ATen": lambda x: torch.ops.aten.squeeze.dim(x[x > 0], 0)[None].exp(),
}
ITERATED: dict[str, Callable[[Tensor], Any]] = {
    "for": lambda x: sum((x[i] * x for i in (x > 0).nonzero()[:, 0]), x),
    "unbind": lambda x: sum(x[x > 0].unbind(0), x.new_zeros(())).exp() * x,
    "unpacked": lambda x: torch.stack([x[:1].sum(), *x[x > 0]]).exp(),
    "reversed": lambda x: torch.stack([x[0], *reversed(x[x > 0])]).softmax(0),
    "of columns": lambda x: torch.stack([x, *x.outer(x)[:, x > 0].unbind(1)]).sin(),
    "rows": lambda x: torch.stack([x, *x.outer(x)[x > 0]]).prod(0),
    "a loop that writes": lambda x: _with_rows_set(x),
}


def _with_rows_set(x: Tensor) -> Tensor:
    y = x.clone()
    for i in (x > 0).nonzero()[:, 0]:
        y[i] = y[i - 1] * 2
    return y


def _asked(x: Tensor) -> Tensor:
    torch._check(x[x > 0].shape[0] != 1)
    return x * 2


DATA = [torch.tensor(values) for values in ([1.0, 2, -3], [-1.0, 2, -3], [-1.0, -2, -3])]
DERIVED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "value": (lambda f: f, lambda f: f),
    "grad": (lambda f: tfn.grad(lambda x: f(x).sum()), lambda f: torch.func.grad(lambda x: f(x).sum())),
    "hessian": (tfn.hessian, torch.func.hessian),
}


@pytest.mark.parametrize("derived", DERIVED)
@pytest.mark.parametrize("name", [*SQUEEZED, *ITERATED])
def test_a_size_of_one_is_eagers_or_an_error(name: str, derived: str) -> None:
    f = (SQUEEZED | ITERATED)[name]
    mine, its = (of(f) for of in DERIVED[derived])
    jitted = jit(mine)
    for x in DATA:
        expected = its(x)
        torch.testing.assert_close(mine(x), expected, equal_nan=True)
        try:
            found = jitted(x)
        except (errors.DataDependentBranch, RuntimeError) as error:
            assert name in ITERATED or derived == "hessian" or (x > 0).sum() == 1, error
            assert " 1" in str(error) or "is found in a tensor's values" in str(error)
        else:
            torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("name", ["rank", "one dim", "a tuple"])
def test_compile_runs_what_depends_on_a_size_of_one(name: str) -> None:
    compiled = tfn.compile(SQUEEZED[name], executors=["torch"])
    for x in DATA:
        with warnings.catch_warnings(action="ignore"):
            same(compiled(x), SQUEEZED[name](x))


DEMANDING: dict[str, Callable[[Tensor], Any]] = {
    "grad": tfn.grad(lambda x: _asked(x).sum()),
    "hessian": tfn.hessian(lambda x: _asked(x).sum()),
    "checkpoint": tfn.checkpoint(_asked),
    "jvp": lambda x: tfn.jvp(_asked, (x,), (x,)),
    "cond": lambda x: tfn.cond(x[1] < 9, _asked, torch.sin, (x,)),
}


@pytest.mark.parametrize("name", DEMANDING)
def test_transforms_keep_what_is_demanded_of_sizes(name: str) -> None:
    for g in (DEMANDING[name], jit(DEMANDING[name])):
        g(DATA[0])
        with pytest.raises(RuntimeError, match=r"!= 1|Expected cond"):
            g(DATA[1])
        g(DATA[2])
