"""Results that share memory, or are constants of a function used inside: what eager gives, in every call."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.capture import pytree
from thunder_fn.errors import AliasedMutation, UnsupportedCall

Tensor = torch.Tensor


def written(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    alias = y.detach()
    y.mul_(3.0)
    return alias, y


def written_through_the_alias(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    alias = y.detach()
    alias.mul_(3.0)
    return alias, y


def in_a_branch(x: Tensor) -> Any:
    return tfn.cond(x.sum() > 0, written, lambda x: (x.detach() * 3, x * 5), (x,))


def in_a_checkpoint(x: Tensor) -> Any:
    return tfn.checkpoint(written)(x)


@pytest.mark.parametrize(
    ("f", "known"),
    [
        (written, written),
        (written_through_the_alias, written_through_the_alias),
        (in_a_branch, written),
        (in_a_checkpoint, written),
    ],
)
def test_a_detached_alias_of_what_is_written_to_has_no_gradient(f: Callable[..., Any], known: Any) -> None:
    def run(h: Callable[..., Any]) -> Any:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        alias, y = h(x)
        return alias.requires_grad, alias.tolist(), torch.autograd.grad((alias * 5 + y).sum(), x)[0].tolist()

    assert run(tfn.jit(f)) == run(known)
    alias, y = tfn.jit(f)(torch.ones(2))
    assert alias is not y


@pytest.mark.parametrize("written", ["view", "part of the view", "view of the view", "other view", "base"])
@pytest.mark.parametrize("shown", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("base", [torch.int64, torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("wraps", [lambda f: f, tfn.grad], ids=["leaf", "tfn.grad"])
def test_views_of_another_dtype_have_histories_of_their_own(wraps: Any, base: Any, shown: Any, written: str) -> None:
    """Law: what is written to one of two tensors that share memory so has a gradient by that one alone."""

    def f(x: Tensor, jit: Any) -> Any:
        def loss(x: Tensor) -> Tensor:
            memory = torch.zeros(2, 4, dtype=base)
            view = memory[1].view(shown)
            one = {
                "view": view,
                "part of the view": view[:1],
                "view of the view": view.view(1, -1),
                "other view": memory[1].view(shown),
                "base": memory[1],
            }[written]
            one.add_(1)
            one.mul_(x) if one.is_floating_point() or one.is_complex() else one.mul_(2)
            view.mul_(x)
            memory[0] = 3
            return sum((abs(t) * x).double().sum() for t in (view, one, memory.view(shown), memory))

        return jit(wraps(loss))(x)

    def run(jit: Any) -> Any:
        x = torch.tensor(1.5, requires_grad=True)
        y = f(x, jit)
        return y.tolist(), torch.autograd.grad(y, x)[0].tolist()

    assert run(tfn.jit) == pytest.approx(run(lambda f: f), nan_ok=True)


def test_a_variable_is_detached() -> None:
    """PyTorch's old class has no history, which no torch function says: the gradient went through it."""

    def f(x: Tensor) -> Tensor:
        leaf = torch.autograd.Variable(x * 2, requires_grad=True)
        (inner,) = torch.autograd.grad((leaf**3).sum(), leaf, create_graph=True)
        return (torch.autograd.Variable(x) * x * inner * leaf).sum()

    x = torch.arange(1.0, 4, requires_grad=True)
    (want,) = torch.autograd.grad(f(x), x)
    assert torch.equal(torch.autograd.grad(tfn.jit(f)(x), x)[0], want)
    assert torch.equal(tfn.grad(f)(x.detach()), want)


def of_another_rank(x: Tensor) -> Any:
    out = x * 1
    torch.sin(x[0], out=out)
    return out, out.dim(), len(out), out * 2, [row * 2 for row in out]


def of_nothing(x: Tensor) -> Any:
    out = torch.empty(0, dtype=x.dtype)
    torch.add(x, x, out=out)
    row = out[0]
    row.mul_(3)
    return out, out.shape[0], row


def of_two(x: Tensor) -> Any:
    out = torch.empty(0, dtype=x.dtype), torch.empty(0, dtype=torch.int64)
    torch.max(x, 0, out=out)
    return *out, out[0].dim(), out[1] + 1


def of_two_ranks(x: Tensor) -> Any:
    out = x.sum(), torch.tensor([1])
    torch.sort(x, out=out)
    return *out, *(one.dim() for one in out), [row * 2 for row in out[0]], out[1] + 1


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("f", [of_another_rank, of_nothing, of_two, of_two_ranks])
@pytest.mark.parametrize("cache", ["constant values", "symbolic values"])
def test_out_of_another_size_is_resized(f: Callable[..., Any], cache: str) -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    torch.testing.assert_close(tfn.jit(f, cache=cache)(x), f(x))


VIEWS: list[Callable[[Tensor], Tensor]] = [torch.conj, lambda x: x.conj().imag, lambda x: x[None], lambda x: x[1:]]
VIEWS.extend([lambda x: x.view(-1), lambda x: x.t(), lambda x: x.unsqueeze(-1), lambda x: x.resize_(1, 2)])


@pytest.mark.parametrize("view", VIEWS)
def test_out_that_is_a_view_keeps_its_size(view: Callable[[Tensor], Tensor]) -> None:
    def f(x: Tensor) -> Tensor:
        out = view(x * 1)
        torch.sum(x, 0, out=out)
        return out

    with pytest.raises(UnsupportedCall, match="is a view of the shape"):
        tfn.jit(f)(torch.ones(2, 3, dtype=torch.complex64))


RESIZED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a row": lambda y, x: (y[1:], torch.mul(x, 2, out=y)),
    "another shape": lambda y, x: (y.view(3, 1), torch.sum(x, 1, out=y)),
    "an alias": lambda y, x: (y.detach(), torch.sum(x, 1, out=y)),
    "the alias itself": lambda y, x: (y, torch.sum(x, 1, out=y.detach())),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", RESIZED)
def test_out_that_others_show_keeps_its_size(name: str) -> None:
    """Eager PyTorch resizes the memory that they have."""
    with pytest.raises(UnsupportedCall, match="another tensor shows its memory"):
        tfn.jit(lambda x: RESIZED[name](torch.zeros(3), x))(torch.ones(2, 3))


@pytest.mark.parametrize("view", [lambda y: y[1], lambda y: y[torch.tensor(1)], torch.unbind, lambda y: y.split(2)])
def test_out_that_a_view_shows_to_the_end_keeps_its_size(view: Callable[[Tensor], Any]) -> None:
    """The view, which the new size has no place for, is alive when the capture ends."""

    def f(x: Tensor) -> Any:
        out = x * 1
        held = view(out)
        torch.sum(x, 0, out=out)
        return out, held

    with pytest.raises(UnsupportedCall, match="another tensor shows its memory"):
        tfn.jit(f)(torch.arange(3.0))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("make", (lambda x: x.sum(), lambda x: x[:1].sin()))
def test_out_that_has_a_history_keeps_its_size(make: Callable[[Tensor], Tensor]) -> None:
    """Eager PyTorch differentiates by the old shape, so that it raises or sums; a program had no gradient."""

    def f(x: Tensor) -> Tensor:
        out = make(x)
        with torch.no_grad():
            torch.cos(x, out=out)
        return out

    for g in (tfn.jit(f), lambda x: tfn.trace(f, x), tfn.grad(lambda x: f(x).sum())):
        with pytest.raises(UnsupportedCall, match="its history is of the old shape"):
            g(torch.ones(3, requires_grad=True))
    assert torch.equal(tfn.jit(f)(torch.zeros(3)), torch.ones(3))


def test_the_memory_of_a_tensor_from_outside_is_not_set() -> None:
    outside = torch.ones(2)

    def f(x: Tensor) -> Tensor:
        outside.set_(x)  # pyright: ignore[reportArgumentType]
        return outside * 2

    with pytest.raises(UnsupportedCall, match="`set_` of a tensor from outside"):
        tfn.jit(f)(torch.ones(2))


@pytest.mark.parametrize("inner", [tfn.jit, tfn.checkpoint])
@pytest.mark.parametrize("outer", [lambda g: g, tfn.jit, tfn.checkpoint])
def test_the_memory_of_a_tensor_of_a_function_around_is_not_set(outer: Any, inner: Any) -> None:
    """Torch functions do not show `set_`: the function inside set the other's tensor, and nobody saw it."""

    def f(x: Tensor, target: Tensor) -> Any:
        def g(y: Tensor) -> Any:
            return inner(lambda z: (y.set_(z + 1), z)[1])(x), y * 1

        return outer(g)(target * 1)

    def given(x: Tensor, source: Tensor) -> Any:
        return outer(lambda y: inner(lambda z: (z * 2).set_(y))(x))(source)

    for h in (f, given):
        with pytest.raises(UnsupportedCall, match="`set_` of a tensor from outside"):
            tfn.jit(h)(torch.ones(2), torch.ones(2, 1))


def test_out_is_a_write_that_aliases_see() -> None:
    def f(x: Tensor) -> Any:
        y = x.clone()
        alias, row = y.detach(), y.detach()[1:]
        torch.add(x, 1, out=y)
        torch.maximum(x, alias * 2, out=y)
        return alias, row, y

    x = torch.tensor([-2.0, 3.0])
    torch.testing.assert_close(tfn.jit(f)(x), f(x))


def made() -> Tensor:
    return torch.tensor([1.0, 2.0])


INSIDE: dict[str, Callable[[Tensor], Any]] = {
    "vmap": lambda x: tfn.vmap(lambda a: (a * 2, made()), out_dims=(0, None))(x),
    "cond": lambda x: tfn.cond(x.sum() > 0, lambda x: made(), lambda x: made() * 2, (x,)),
    "jit": lambda x: tfn.jit(lambda x: (made(), x * 2))(x),
    "checkpoint": lambda x: tfn.checkpoint(lambda x: (made(), x * 2))(x),
    "grad": lambda x: tfn.value_and_grad(lambda x: ((x * made()).sum(), made()), has_aux=True)(x),
    "jvp": lambda x: tfn.jvp(lambda x: (x * 1, made()), (x,), (x,)),
    "scan": lambda x: tfn.scan(lambda c, x: (c + made(), made()), x, None, length=2),
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_a_function_used_inside_makes_is_new_in_every_call(name: str) -> None:
    """A write to a result writes to no constant of the program; traces of it compare by content."""
    f, x = INSIDE[name], torch.ones(2)
    jitted, first = tfn.jit(f), pytree.flatten(f(x))[0]
    for _ in range(2):
        found = pytree.flatten(jitted(x))[0]
        torch.testing.assert_close(found, first)
        with torch.no_grad():
            for tensor in found:
                if tensor.is_contiguous():  # an expanded one cannot be written to
                    tensor.add_(10)
    traced = tfn.trace(f, x)
    assert tfn.trace(f, x) == traced
    assert pickle.loads(pickle.dumps(traced)) == traced


def test_a_default_dtype_set_inside_says_what_ints_promote_to() -> None:
    def f(x: Tensor) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            made = torch.ones(3), torch.tensor([0.5])
            divided = x / 2, x + 0.5, x.sin(), 1 / x, x / x, x > 0.5, x.sum(), (x > 1) * 0.5, x * 1j
            return *made, *divided, torch.where(x > 1, 1.5, 2.5), tfn.vmap(lambda a: a / 3)(x), x.float() / 2
        finally:
            torch.set_default_dtype(before)

    x = torch.tensor([1, 2, 3])
    known = f(x)
    torch.testing.assert_close(tfn.jit(f)(x), known, rtol=0, atol=0)
    torch.testing.assert_close(tfn.evaluate(tfn.trace(f, x), [x]), known, rtol=0, atol=0)


def test_the_median_of_a_number_that_is_repeated() -> None:
    """PyTorch's kernel reads beyond an expanded tensor, which `torch.vmap` makes of this."""
    x = torch.tensor([1.5, -2.0, 3.0])
    for f in (lambda a: a.expand(3, 4).median(), lambda a: a.expand(3, 4).nanmedian()):
        torch.testing.assert_close(tfn.jit(tfn.vmap(f))(x), x)


def test_a_copy_of_a_tensor_is_a_leaf_with_its_memory() -> None:
    def f(x: Tensor) -> Any:
        y = x * 2
        copied, other = copy.copy(x), copy.copy(y)
        with torch.no_grad():
            other.add_(1)
        return (copied * 3).sum() + (other * y).sum() + x.sum()

    def run(h: Callable[..., Any]) -> Any:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        value = h(x)
        return value.item(), torch.autograd.grad(value, x)[0].tolist()

    assert run(tfn.jit(f)) == run(f)
    assert tfn.grad(f)(torch.tensor([1.0, 2.0])).tolist() == run(f)[1]


def test_interpolation_of_a_batch_of_nothing() -> None:
    def f(x: Tensor) -> Any:
        modes = ("nearest", "nearest-exact", "bilinear")
        return [torch.nn.functional.interpolate(x, scale_factor=2, mode=mode) for mode in modes]

    x = torch.zeros(0, 2, 3, 3, requires_grad=True)
    found, known = tfn.jit(f)(x), f(x)
    torch.testing.assert_close(found, known)
    assert torch.autograd.grad([one.sum() for one in found], x)[0].shape == x.shape


def test_expanded_tensors_are_not_written_to() -> None:
    """Eager mode raises too, but for `fill_` and a few more; functionalization adds up what is written to each copy."""
    x = torch.arange(4.0).reshape(1, 4)
    for write in (
        lambda y: y.fill_(2.0),
        lambda y: y.add_(1),
        lambda y: y.copy_(torch.ones(3, 4)),
        lambda y: y.tril_(),
    ):
        with pytest.raises(RuntimeError, match="writes to an expanded tensor, several of whose elements share memory"):
            tfn.trace(lambda x, write=write: write(x.expand(3, 4)), x)

    def row(x: torch.Tensor) -> torch.Tensor:
        x.expand(3, 4)[0] = 3.0
        x.expand(1, 4).add_(1)
        return x

    assert torch.equal(tfn.jit(row)(x.clone()), row(x.clone()))


DETACHED: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x.detach_(),
    "product": lambda x: (x.detach_() * 2, x),
    "write": lambda x: x.detach_().mul_(2),
    "views": lambda x: (x.detach_()[1:], x.conj(), x[0]),
}


@pytest.mark.parametrize("given", ("real", "conjugate", "negative"))
@pytest.mark.parametrize("name", DETACHED)
def test_an_argument_with_a_bit_is_detached_in_place(given: str, name: str) -> None:
    def found(h: Callable[[Tensor], Any]) -> list[Any]:
        x = GIVEN[given]().detach()
        ys = h(x)
        known = [x, *(ys if isinstance(ys, tuple) else (ys,))]
        return [*known, *((y.is_conj(), y.is_neg(), y is x, y.data_ptr() == x.data_ptr()) for y in known)]

    for a, b in zip(found(tfn.jit(DETACHED[name])), found(DETACHED[name]), strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, (a, b)


def test_a_view_with_a_bit_is_not_detached_in_place() -> None:
    for h in (inner := lambda x: x.conj().detach_(), tfn.jit(inner)):
        with pytest.raises(RuntimeError, match="Can't detach views in-place"):
            h(GIVEN["complex"]())


TURNS: dict[str, Callable[[Tensor], Any]] = {
    "dim that comes and goes": lambda x: x.unsqueeze_(0).squeeze_(0),
    "turned": lambda x: x.t_(),
    "turned twice": lambda x: x.t_().t_(),
    "turned and read": lambda x: (x.transpose_(0, 1).sin(), x.t())[1],
    "turned and computed with": lambda x: x.transpose_(0, 1).sin() + 1,
}


@pytest.mark.parametrize("is_followed", (True, False), ids=("followed", "plain"))
@pytest.mark.parametrize("name", TURNS)
def test_an_argument_whose_elements_overlap_is_turned_in_place(name: str, is_followed: bool) -> None:
    """No value is written, so eager PyTorch allows it. One jitted function serves arguments of each layout."""
    f, leaf = TURNS[name], torch.arange(9.0)
    layouts = ((1, 0), (0, 0), (1, 1), (1, 2), (3, 1), (1, 3))
    jitted = tfn.jit(f)

    def found(h: Callable[[Tensor], Any], strides: tuple[int, int]) -> list[Any]:
        base = leaf.clone().requires_grad_(is_followed)
        x = (base * 1).as_strided((3, 3), strides)
        known = [x, h(x)]
        loss = sum((y.square().sum() for y in known), base.sum())
        grads = torch.autograd.grad(loss, base) if is_followed else ()
        return [*known, *grads, x.stride(), known[1] is x, known[1].data_ptr() == x.data_ptr()]

    for strides in (*layouts, *layouts):
        for a, b in zip(found(jitted, strides), found(f, strides), strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, (strides, a, b)


@pytest.mark.parametrize("options", ({}, {"cache": "symbolic values"}, {"dynamic": False}), ids=str)
def test_writes_to_arguments_whose_elements_overlap(options: dict[str, Any]) -> None:
    """Every (size, stride) of two dims: written as eager does, or refused, whatever sizes and strides came before."""

    def f(x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1

    jitted = tfn.jit(f, **options)
    for size in ((2, 3), (3, 3), (3, 2)):
        for stride in ((1, 1), (1, 2), (2, 1), (3, 1), (1, 3), (2, 3), (4, 2), (2, 4)):
            places = {i * stride[0] + j * stride[1] for i in range(size[0]) for j in range(size[1])}
            mine, its = (torch.arange(20.0) for _ in range(2))
            if len(places) < size[0] * size[1]:
                with pytest.raises(RuntimeError, match="several of whose elements share memory"):
                    jitted(mine.as_strided(size, stride))
                continue
            found, known = jitted(mine.as_strided(size, stride)), f(its.as_strided(size, stride))
            assert torch.equal(found, known) and torch.equal(mine, its), (size, stride)


C = torch.complex(torch.arange(6.0), torch.arange(6.0).cos()).reshape(2, 3)
UNDER_BITS: dict[str, Callable[[Tensor], Tensor]] = {
    "conjugate": lambda z: z.conj(),
    "a conjugate's row": lambda z: z.conj()[1:],
    "a conjugate's transpose": lambda z: z.mH,
    "a conjugate's conjugate": lambda z: z.conj().conj(),
    "a conjugate's imaginary part": lambda z: z.conj().imag,
    "a negative view": lambda z: torch._neg_view(z.conj()),  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    "negative view of another dtype": lambda z: torch.ops.aten._neg_view(z.resolve_conj().view(torch.float32)),
    "conjugate view of another dtype": lambda z: z.resolve_conj().view(torch.int64).view(torch.complex64).conj(),
}
WRITTEN: dict[str, Callable[[Tensor], Any]] = {
    "by a number": lambda y: y.mul_(2.5),
    "a copy": lambda y: y.copy_(torch.ones(y.shape)),
    "an element": lambda y: y.__setitem__((0, 0), 3.0),
    "in place conjugate": lambda y: y.conj_physical_(),
    "out": lambda y: torch.add(y, y, out=y),
}


@pytest.mark.parametrize("given", [lambda: C.clone(), lambda: C.clone().conj()], ids=["plain", "conjugate argument"])
@pytest.mark.parametrize("kind", UNDER_BITS)
def test_what_is_read_after_a_write_through_a_conjugate_or_negative_view(
    kind: str, given: Callable[[], Tensor]
) -> None:
    def f(z: Tensor, write: Callable[[Tensor], Any]) -> Any:
        found: list[Any] = []
        for x in (z, z * 1):
            y = UNDER_BITS[kind](x)
            write(y)
            found += [y * 1, x.imag * 1, x.real * 1, x.conj() * 1, x.conj().imag * 1, x.is_conj(), x._conj().is_conj()]
            found += [torch.view_as_real(x.resolve_conj()) * 1, y.is_conj(), y.is_neg()]
        return found

    for write in WRITTEN.values():
        mine, its = given(), given()
        torch.testing.assert_close(tfn.jit(f)(mine, write), f(its, write))
        torch.testing.assert_close(mine, its)


READ_AND_WRITTEN: dict[str, Callable[..., Any]] = {
    "rows further down": lambda x, read: x[1:].add_(read(x)[:-1]),
    "columns": lambda x, read: x[:, :2].mul_(read(x)[:, 2:]),
    "every other column": lambda x, read: x[:, ::2].copy_(read(x)[:, 1::2]),
    "itself": lambda x, read: x.mul_(read(x)),
    "its first column": lambda x, read: x.sub_(read(x)[:, :1]),
    "its transpose": lambda x, read: x.t()[:3].copy_(read(x)[:, :3]),
    "its sum": lambda x, read: torch.sum(read(x)[:, :1], 1, keepdim=True, out=x[:, :1]),
    "its mean to itself": lambda x, read: torch.mean(read(x)[0, 0], 0, out=x[0, 0]),
    "its running sum": lambda x, read: torch.cumsum(read(x), 0, out=x),
    "its square": lambda x, read: torch.mm(read(x)[:3, :3], read(x)[:3, :3], out=x[:3, :3]),
    "a product of it": lambda x, read: x[:3, :3].addmm_(read(x)[:3, :3], read(x)[:3, 1:]),
    "a softmax of other rows": lambda x, read: torch.softmax(read(x)[:-1], 0, out=x[1:]),
    "a choice": lambda x, read: torch.where(read(x) > 0, read(x), -read(x), out=x),
    "a row by its number": lambda x, read: x.__setitem__(0, read(x)[1]),
    "other rows, beside each other": lambda x, read: torch.cat([read(x)[2:], read(x)[1:2]], out=x[:2]),
}


BY_PROCESSOR = ("its square", "a product of it")
"""Products of matrices, whose kernels read their operands first on some processors."""


def _after_a_write(write: Callable[..., Any]) -> Callable[..., Any]:
    """The same where gradients are off, and views of what was written to have no history."""

    def f(x: Tensor, read: Callable[[Tensor], Tensor]) -> None:
        with torch.no_grad():
            x += 1.25
            write(x, read)

    return f


@pytest.mark.parametrize("how", ("itself", "symbolic values", "detach", "no_grad"))
@pytest.mark.parametrize("kind", READ_AND_WRITTEN)
def test_a_write_that_reads_its_memory_elsewhere(kind: str, how: str) -> None:
    """Refuse a trace if eager PyTorch reads what it has written, or raises."""
    write, read = READ_AND_WRITTEN[kind], torch.detach if how == "detach" else lambda x: x
    write = _after_a_write(write) if how == "no_grad" else write
    options: dict[str, Any] = {"cache": how} if how.startswith("symbolic") else {}
    mine, its, known = (torch.arange(12.0).reshape(3, 4).cos() for _ in range(3))
    jitted = tfn.jit(lambda x: write(x, read), **options)
    write(known, torch.clone)
    try:
        write(its, read)
    except RuntimeError:
        its.fill_(torch.nan)
    try:
        jitted(mine)
    except AliasedMutation:
        assert kind in BY_PROCESSOR or not torch.equal(its, known)
    else:
        torch.testing.assert_close(mine, its)


def _real() -> Tensor:
    return torch.arange(12.0, dtype=torch.float64).view(4, 3)


GIVEN: dict[str, Callable[[], Tensor]] = {
    "real": _real,
    "with an offset": lambda: _real()[1:],
    "complex": lambda: torch.complex(_real(), _real().cos()),
    "conjugate": lambda: torch.complex(_real(), _real().cos()).mH,
    "negative": lambda: torch.complex(_real(), _real().cos()).conj().imag[1:],
    "with gaps": lambda: torch.cat((_real(), _real()), 1)[:, ::2],
    "with elements in common": lambda: _real().as_strided((4, 3), (1, 2)),
    "expanded": lambda: _real()[:, :1].expand(4, 3),
}
SHOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[1:].t(),
    "conj": lambda x: x.conj(),
    "imaginary part": lambda x: x.conj().imag[1:] if x.is_complex() else x[1:],
    "pairs": lambda x: (
        torch.view_as_complex(x.view(-1, 2)) if not x.is_complex() and (x.stride(), x.numel()) == ((3, 1), 12) else x[0]
    ),
    "negative view": lambda x: torch._neg_view(x)[0],  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    "strides": lambda x: x.as_strided((2, 2), (2 * x.stride(1), x.stride(1)), x.storage_offset()).t(),
    "strides of a row": lambda x: x[1].as_strided((2, 2), (x.stride(1), x.stride(1))),
    "detached": lambda x: x.conj().detach()[1:],
    "a row by a constant": lambda x: x[torch.tensor(-1), None],
    "rows from a constant on": lambda x: torch.narrow(x, 0, torch.tensor(1), 1),
}


@pytest.mark.parametrize(
    ("is_followed", "options"), ((True, {}), (False, {"cache": "symbolic values"})), ids=("followed", "symbolic")
)
@pytest.mark.parametrize("given", GIVEN)
def test_a_view_of_an_argument_shows_its_memory(given: str, is_followed: bool, options: dict[str, Any]) -> None:
    """Write to each view, also to those that a trace takes by a copy: with bits, and `as_strided`."""
    is_left = {"conjugate": "strides", "negative": "strides", "with elements in common": "strides of a row"}.get(
        given, " "
    )
    views = [view for name, view in SHOWN.items() if not name.startswith(is_left)]

    def f(x: Tensor) -> list[Tensor]:
        return [y for y in (view(x) for view in views) for _ in range(2)]

    def found(h: Callable[[Tensor], list[Tensor]]) -> list[Any]:
        x = GIVEN[given]().requires_grad_(is_followed)
        ys, known = h(x), list[Any]()
        for y, again in zip(ys[::2], ys[1::2], strict=True):
            known += [y.is_conj(), y.is_neg(), y.stride(), y.storage_offset(), y.requires_grad, again is y]
        wanted = [(y * y).real for y in ys if y.requires_grad]
        if wanted:
            (first,) = torch.autograd.grad([one.sum() for one in wanted], x, create_graph=True)
            known += [first.detach(), torch.autograd.grad(first.abs().square().sum(), x)[0]]
        for at, y in enumerate(ys):
            y.detach()[(0,) * y.dim()].mul_(0.5).add_(at)
            known += [one.detach().clone() for one in (x, *ys)]
        return known

    for at, (a, b) in enumerate(zip(found(tfn.jit(f, **options)), found(f), strict=True)):
        assert torch.allclose(a, b) if isinstance(a, Tensor) else a == b, (at, a, b)


@pytest.mark.parametrize("given", ("real", "with gaps", "with elements in common", "expanded"))
def test_a_backward_reads_what_a_view_of_an_argument_was(given: str) -> None:
    """The argument is written after the call. Eager PyTorch refuses that, so that its square is one of a copy."""

    def found(h: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        x = GIVEN[given]().requires_grad_()
        y, z = h(x)
        for part in x.detach().unbind(1):
            part.mul_(0)
        assert not y.any()
        return torch.autograd.grad(z.sum(), x)[0]

    view = lambda x: x.as_strided((2,), (2 * x.stride(1),))
    have = found(tfn.jit(lambda x: (view(x), view(x) * view(x))))
    assert torch.equal(have, found(lambda x: (view(x), (view(x) * 1).square())))


@pytest.mark.parametrize("is_followed", (True, False), ids=("followed", "plain"))
@pytest.mark.parametrize("rows", (3, 30_000))
def test_a_view_of_a_result_shows_its_memory(rows: int, is_followed: bool) -> None:
    """Autograd follows some programs itself and others by a node: a result that a trace takes by a copy lay elsewhere."""

    def found(h: Callable[[Tensor], Any]) -> list[Any]:
        x = torch.linspace(-1, 1, 4 * rows, dtype=torch.float64).reshape(rows, 4).requires_grad_(is_followed)
        ys = h(x)
        ys[0].data.mul_(3)
        ys[1].data.mul_(2)
        known = [*ys, *(y.requires_grad for y in ys)]
        loss = [(y * y.conj()).real.sum() for y in ys if y.requires_grad]
        return [*known, *(torch.autograd.grad(sum(loss, x.sum()), x) if loss else ())]

    for view, of in itertools.product(SHOWN.values(), (lambda y: y, lambda y: y.data)):
        f = lambda x, view=view, of=of: (lambda y: [of(y), view(y)])(x.sin())
        g = lambda x, f=f: f(x)[::-1]
        for h in (f, g):
            for a, b in zip(found(tfn.jit(h)), found(h), strict=True):
                assert torch.allclose(a, b) if isinstance(a, Tensor) else a == b, (view, a, b)


def written_and_viewed(x: Tensor) -> Any:
    before = x.squeeze()
    x.mul_(2)
    x[0] = 1.5
    return before, x, x[1:], x.detach(), x.data[:1].t(), x.unbind(1)[1]


@pytest.mark.parametrize("options", ({}, {"cache": "symbolic values"}), ids=str)
def test_views_of_a_written_argument_with_gaps_or_bits(options: dict[str, Any]) -> None:
    whole = torch.complex(_real(), _real().cos())
    jitted = tfn.jit(written_and_viewed, **options)
    for view in (lambda z: z.imag, lambda z: z.mH, lambda z: z.conj().imag, lambda z: z[::2], lambda z: z.real.t()[1:]):
        mine, its = (view(whole.clone()) for _ in range(2))
        for at, (a, b) in enumerate(zip(jitted(mine), written_and_viewed(its), strict=True)):
            for one in (a, b):
                one.mul_(0.5).add_(at)
            assert torch.equal(a, b) and torch.equal(mine, its), at


def test_a_view_of_a_closed_over_tensor_shows_its_memory() -> None:
    outside = torch.complex(torch.ones(3), torch.ones(3))
    found = tfn.jit(lambda x: (outside.conj(), x + 1))(torch.ones(2))[0]
    found.zero_()
    assert not outside.any()


def _of_row(write: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
    def f(x: Tensor, i: Tensor) -> Any:
        w = x * 1
        found = write(w, i)
        return w, [] if found is None else found

    return f


def _both(w: Tensor, i: Tensor) -> Any:
    row, other = w[i], w[i - 1]
    w[i] = 7.0
    w[i - 1].add_(row)
    row.mul_(2)
    return row, other


def _in_a_choice(w: Tensor, i: Tensor) -> Any:
    row = w[i]
    row.mul_(2)
    return tfn.cond(w.sum() > 0, lambda w: w * 2, lambda w: w * 3, (w,)), row


def _without_gradients(w: Tensor, i: Tensor) -> Any:
    with torch.no_grad():
        w[i].mul_(3)
    return w * w


SELECTED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "in place": lambda w, i: w[i].mul_(10),
    "a part of it": lambda w, i: w[i, 1:].add_(3),
    "a view of it": lambda w, i: w[i].unsqueeze(0).t()[1:].zero_(),
    "its row": lambda w, i: w[i][i - 1].fill_(4),
    "an alias": lambda w, i: w[i].detach().fill_(3),
    "out": lambda w, i: torch.add(w[0], 1, out=w[i]),
    "a number that data says": lambda w, i: w[i.item()].neg_(),  # type: ignore[index]
    "narrow": lambda w, i: w.narrow(0, i, 1).mul_(2),
    "both": _both,
    "a choice": _in_a_choice,
    "no_grad": _without_gradients,
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", SELECTED)
def test_a_row_by_a_tensor_is_a_view(name: str) -> None:
    """Eager PyTorch reads a scalar index and takes a view; a trace gathers, and writes back."""
    f, i, results = _of_row(SELECTED[name]), torch.tensor(1), []
    for h in (f, tfn.jit(f)):
        x = torch.arange(1.0, 10.0, dtype=torch.float64).reshape(3, 3)
        x.requires_grad_(name != "out")
        found = pytree.flatten(h(x, i))[0]
        loss = [(one * one).sum() for one in found if one.requires_grad]
        results.append([*found, *(torch.autograd.grad(loss, x) if loss else ())])
    torch.testing.assert_close(results[1], results[0])


def test_a_row_by_a_tensor_is_a_view_under_torch_func() -> None:
    def row(x: Tensor) -> Tensor:
        y = x * 1
        y[torch.tensor(1)].mul_(5)
        y[torch.tensor(0)] += 2
        return y

    def f(x: Tensor) -> Any:
        grad = torch.func.grad(lambda x: (row(x) ** 2).sum())
        return torch.func.vmap(row)(x), grad(x), torch.func.jvp(row, (x,), (x,)), torch.func.vmap(grad)(x)

    x = torch.arange(6.0).reshape(3, 2)
    torch.testing.assert_close(tfn.jit(f)(x), f(x))


def test_a_row_that_python_writes_back_is_written_once() -> None:
    def f(x: Tensor, i: Tensor) -> Tensor:
        x[i] += 1
        return x

    assert str(tfn.trace(f, torch.ones(3, 2), torch.tensor(1))).count("index_put") == 1


@pytest.mark.parametrize("f", (lambda x: x.cos_(), lambda x: x.mul_(2)[1:].t(), lambda x: x.neg_()[..., 0]))
def test_results_of_nested_vmaps_in_place_show_the_argument_at_any_batch_dim(f: Callable[[Tensor], Tensor]) -> None:
    for inner, outer in itertools.product(range(3), range(4)):
        mine, its = (torch.arange(120.0).reshape(2, 3, 4, 5).contiguous() for _ in range(2))
        a, b = (v(v(f, inner), outer)(x) for v, x in ((tfn.vmap, mine), (torch.func.vmap, its)))
        assert torch.equal(a, b) and a.stride() == b.stride(), (inner, outer)
        for one in (a, b):
            one.add_(1)
        assert torch.equal(mine, its), (inner, outer)


PAIRED: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "conj": lambda x: x.conj(),
    "negative": torch._neg_view,
    "imaginary part of the conjugate": lambda x: x.conj()[1:].imag,
    "real part": lambda x: x.real[:3],
    "pairs": lambda x: torch.view_as_real(x)[2:],
    "complex of pairs": lambda x: torch.view_as_complex(torch.view_as_real(x)[1:]).conj(),
    "rows": lambda x: x.conj()[:3],
    "overlapping": lambda x: x.as_strided((3, 2), (1, 1)),
    "expanded": lambda x: torch._neg_view(x)[1].expand(2),
    "detached": lambda x: x.detach()[1:],
    "every second": lambda x: x.conj()[::2].imag,
}


def _poked(results: Sequence[Tensor]) -> list[Tensor]:
    """Everything after each result was written to: it shows who shares memory with whom."""
    for one in results:
        with torch.no_grad():
            (one if 0 not in one.stride() else one[:1]).mul_(0.5).add_(1)
    return [one.detach().resolve_conj().resolve_neg().clone() for one in results]


def _source(is_followed: bool) -> Tensor:
    x = torch.arange(8, dtype=torch.float64).view(4, 2)
    return torch.view_as_complex(x).requires_grad_(is_followed)


def _pairs(*steps: int) -> Iterator[tuple[str, str]]:
    names = list(PAIRED)
    yield from ((name, names[(i + step) % len(names)]) for step in steps for i, name in enumerate(names))


@pytest.mark.parametrize(
    ("is_followed", "options", "steps"),
    [(False, {}, (1, 3, 4)), (True, {}, (2, 5, 6)), (True, {"cache": "symbolic values"}, (8,))],
)
def test_two_views_of_one_value_as_results(is_followed: bool, options: dict[str, Any], steps: tuple[int, ...]) -> None:
    """Both show one memory after the call, though none of the two may hold the other."""
    for a, b in itertools.islice(_pairs(*steps), 0, None, 3 if options else 1):

        def f(x: Tensor, a: str = a, b: str = b) -> Any:
            y = x * 2
            return PAIRED[a](y), PAIRED[b](y)

        jitted, found = tfn.jit(f, **options), list[Any]()
        for g in (f, jitted):
            x = _source(is_followed)
            values = [one for one in g(x) if one.requires_grad]
            losses = [one.abs().square().sum() for one in values]
            grads = [torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in losses]
            found.append([grads, _poked(g(_source(is_followed)))])
        torch.testing.assert_close(found[1], found[0], msg=lambda text, a=a, b=b: f"{a} and {b}: {text}")
        if not is_followed or {"overlapping", "expanded", "detached"} & {a, b}:
            continue
        grads = []
        for g in (f, jitted):  # a write with a history, which the other has too
            x = _source(is_followed)
            one, other = g(x)
            try:
                one.mul_(3)
                grads.append(torch.autograd.grad(other.abs().square().sum(), x)[0])
            except RuntimeError as error:
                assert g is jitted and "created inside a custom Function" in str(error)
        torch.testing.assert_close(grads[-1], grads[0], msg=lambda text, a=a, b=b: f"{a} and {b}: {text}")


NESTED: dict[str, Callable[[Any, Any], Callable[[Tensor], Any]]] = {
    "jit": lambda T, g: T.jit(g),
    "checkpoint": lambda T, g: T.checkpoint(g),
    "PyTorch's checkpoint": lambda T, g: lambda x: torch.utils.checkpoint.checkpoint(g, x, use_reentrant=False),
    "vjp": lambda T, g: lambda x: T.vjp(g, x)[0],
    "jvp": lambda T, g: lambda x: T.jvp(g, (x,), (x,))[1],
    "vmap": lambda T, g: lambda x: T.vmap(g)(torch.stack([x, x * 2])),
    "aux": lambda T, g: lambda x: T.vjp(lambda x: (x.sum().abs(), g(x)), x, has_aux=True)[2],
}
PYTORCH = SimpleNamespace(
    jit=lambda g: g, checkpoint=lambda g: g, vjp=torch.func.vjp, jvp=torch.func.jvp, vmap=torch.func.vmap
)


@pytest.mark.parametrize("around", [lambda f: f, tfn.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("name", NESTED)
def test_two_views_of_one_value_as_results_of_a_function_inside(name: str, around: Callable[[Any], Any]) -> None:
    """A write to one is read from the other, or it is refused."""
    pairs = [("itself", "real part"), ("conj", "every second"), ("overlapping", "itself"), ("itself", "itself")]
    for a, b in [*pairs, ("rows", "itself"), ("conj", "rows"), ("rows", "overlapping")]:

        def g(x: Tensor, a: str = a, b: str = b) -> Any:
            y = x * 2
            return PAIRED[a](y), PAIRED[b](y)

        def f(x: Tensor, T: Any) -> Any:
            one, other = NESTED[name](T, g)(x)
            one.add_(1)
            return one * 1, other * 1

        try:
            want = f(_source(False), PYTORCH)
        except RuntimeError:
            assert name == "vmap" and "every second" in (a, b)  # which torch.func does not batch
            continue
        try:
            have = around(lambda x: f(x, tfn))(_source(False))
        except (AliasedMutation, RuntimeError) as error:
            assert "memory" in str(error)
            assert around is tfn.jit or a == "overlapping"
        else:
            torch.testing.assert_close(have, want, msg=lambda text, a=a, b=b: f"{a} and {b}: {text}")


STORED: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: (x, x),
    "itself, written by a detach": lambda x: (x, x.detach()[:1].fill_(0.25), x)[::2],
    "itself, written without gradients": lambda x: (x, torch.no_grad()(lambda: x.mul_(2))(), x * 1)[::2],
    "a view of it": lambda x: (x.view(-1)[1:], x.detach().mul_(2), x * 1)[::2],
    "what it returns": lambda x: (y := x * 2, y),
    "a view of what it returns": lambda x: ((y := x * 2)[1:].as_strided((2,), (1,)), y),
    "a part that meets a result": lambda x: ((y := x * 2)[:2], torch._neg_view(y)[1:]),
}


@pytest.mark.parametrize("is_followed", [False, True])
@pytest.mark.parametrize("name", STORED)
def test_what_a_function_keeps_is_the_tensor_that_it_kept(name: str, is_followed: bool) -> None:
    """An entry of a dict outside is the very argument, or lies where a result lies."""
    kept: dict[str, Tensor] = {}

    def f(x: Tensor) -> Tensor:
        kept["entry"], result = STORED[name](x)
        return result

    found = []
    for g in (f, tfn.jit(f)):
        for _ in range(2):
            x = torch.arange(3.0).requires_grad_(is_followed)
            result, entry = g(x), kept["entry"]
            facts = entry is x, result is x, result is entry, entry.is_leaf, entry.requires_grad
            found.append((facts, [one.tolist() for one in _poked([x, result, entry])]))
    assert found[:2] == found[2:]


@pytest.mark.parametrize(
    "inner", [tfn.jit, tfn.checkpoint, lambda g: lambda x: torch.utils.checkpoint.checkpoint(g, x, use_reentrant=False)]
)
@pytest.mark.parametrize(
    "make", [lambda x: x.detach().clone().requires_grad_(), lambda x: torch.nn.Parameter(x.detach() * 2)]
)
def test_a_leaf_that_a_function_inside_makes_is_one_outside(make: Callable[[Tensor], Tensor], inner: Any) -> None:
    """Inside of a capture it did not require grad, so that code which asks took the other branch."""

    def f(x: Tensor, around: Any) -> Any:
        one, other = around(lambda x: (v := make(x), v))(x)
        (grad,) = torch.autograd.grad((one * other).sum(), one)
        return one, grad, one is other, one.requires_grad and one.is_leaf

    x = torch.arange(3.0, requires_grad=True)
    mine, its = tfn.jit(lambda x: f(x, inner))(x), f(x, lambda g: g)
    torch.testing.assert_close(mine, its)
    assert mine[0].requires_grad and mine[0].is_leaf and type(mine[0]) is type(its[0])


REPEATED: dict[str, Callable[[Tensor], Tensor]] = {
    "expand": lambda x: x.expand(3),
    "a row of an expand": lambda x: x.expand(1, 3)[0],
    "a part of an expand": lambda x: x.expand(3)[1:],
    "a row of an unfold": lambda x: x.unfold(0, 3, 1)[0],
}


@pytest.mark.parametrize("is_followed", [False, True])
@pytest.mark.parametrize("name", REPEATED)
def test_a_second_write_where_gradients_are_off_by_a_view_of_repeated_elements(name: str, is_followed: bool) -> None:
    def f(x: Tensor) -> Any:
        with torch.no_grad():
            early = REPEATED[name](x)
            x.clamp_(1)
            early.mul_(2)
            shown = early.add_(1) * 1
        return x * x, shown

    a, b = (torch.tensor([-1.0, 0.5, 3.0], requires_grad=is_followed) for _ in range(2))
    mine, its = a * 1, b * 1
    found, known = tfn.jit(f)(mine), f(its)
    torch.testing.assert_close((mine, *found), (its, *known), check_stride=False)
    if is_followed:
        torch.testing.assert_close(torch.autograd.grad(found[0].sum(), a), torch.autograd.grad(known[0].sum(), b))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "half": lambda x: x[:, :2],
    "column": lambda x: x[:, 1],
    "rows": lambda x: x[1:],
    "turned": lambda x: x.t(),
    "flat part": lambda x: x.view(-1)[3:],
    "expanded": lambda x: x.expand(2, 4, 3)[0],
    "steps": lambda x: x[::2, 1:],
}
RESIZES: dict[str, Callable[[Tensor], Tensor]] = {
    "smaller": lambda v: v.resize_(2, 2),
    "flat": lambda v: v.resize_([3]),
    "by a method of ATen": lambda v: torch.ops.aten.resize_(v, [1, 3]),
    "as another": lambda v: v.resize_as_(torch.ones(2, 2)),
    "larger, in its memory": lambda v: v.resize_(v.numel() + 1),
    "as it is": lambda v: v.resize_(v.shape),
    "in a format": lambda v: v.resize_(2, 2, memory_format=torch.contiguous_format),
    "as it is, in a format": lambda v: v.resize_(v.shape, memory_format=torch.contiguous_format),
}


@pytest.mark.parametrize("of", ("argument", "own"))
@pytest.mark.parametrize("resize", RESIZES)
@pytest.mark.parametrize("view", VIEWS)
def test_views_that_are_resized_and_written_to(view: str, resize: str, of: str) -> None:
    """A resized view shows the same memory from its first element on, whatever its strides were."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        base = x if of == "argument" else x * 1
        v = RESIZES[resize](VIEWS[view](base))
        read = v * 2
        v[0] = -1.0
        return read, v, base * 1

    given = [torch.arange(12.0).view(4, 3) + 1 for _ in "ab"]
    try:
        expected = f(given[0])
    except RuntimeError:  # no room
        return
    if given[0].untyped_storage().nbytes() > 48 or expected[1].untyped_storage().nbytes() > 48:
        with pytest.raises(tfn.errors.UnsupportedCall, match="resize_"):
            tfn.jit(f)(given[1])
        return
    for found, wanted in zip((*tfn.jit(f)(given[1]), given[1]), (*expected, given[0]), strict=True):
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()


WRITTEN_LATER: dict[str, Callable[[Tensor], Any]] = {
    "part": lambda q: q[1:],
    "beside others": lambda q: (q[1:], q + 1, (q * 2)[0]),
    "two that overlap": lambda q: (q[1:], q[:2]),
    "same": lambda q: (q.t(), q.t()),
    "diagonal": lambda q: q.diagonal(),
    "another layout": lambda q: q.reshape(9)[2:].unsqueeze(-1),
    "strides": lambda q: q.as_strided((2, 2), (1, 1)),
    "beside a loop": lambda q: (q[1:], tfn.scan(lambda c, r: (c + r, r), q[0], q)[1]),
    "of a written one": lambda q: (q.mul_(2), q[1:])[1],
    "detached": lambda q: (q.detach()[0], q * 3),
}
GIVEN_LATER: dict[str, Callable[[Tensor], Tensor]] = {
    "result": lambda q: q.clone(),
    "view": lambda q: q.clone()[:],
    "transpose": lambda q: q.clone().t(),
}


@pytest.mark.parametrize("given", GIVEN_LATER)
@pytest.mark.parametrize("view", WRITTEN_LATER)
def test_views_of_a_differentiated_argument_may_be_written_to(view: str, given: str) -> None:
    """Autograd lets nobody write to a view that a node written in Python returns: it is a view of the argument instead."""

    def found(h: Callable[[Tensor], Any]) -> list[Tensor]:
        x = torch.linspace(-1, 1.4, 9, dtype=torch.float64).reshape(3, 3).requires_grad_()
        q = GIVEN_LATER[given](x)
        out = h(q)
        ys = out if isinstance(out, tuple) else (out,)
        for at, y in enumerate(ys):
            y.mul_(2 + at)
        (first,) = torch.autograd.grad(sum((y * y.conj()).real.sum() for y in (*ys, q * q)), x, create_graph=True)
        return [*ys, q, first, torch.autograd.grad(first.square().sum(), x)[0]]

    jitted = tfn.jit(WRITTEN_LATER[view])
    for _ in range(2):
        for a, b in zip(found(jitted), found(WRITTEN_LATER[view]), strict=True):
            assert torch.allclose(a, b), (a, b)
