"""check_errors: the first error beside the result, under every transform, loop and branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import thunder_fn as tfn
from tests.unit.test_side_by_side import on_device
from thunder_fn.errors import CheckFailed, JitError, UnknownOption
from thunder_fn.interpreters.check_errors import KINDS, check_errors

X = torch.tensor([1.0, -1.0])
LOG = "aten.log.default gives NaN"


def told(error: Any) -> str:
    """The text of an error that is there."""
    found = error.get()
    assert found is not None
    return found


def positive(x: Tensor) -> Tensor:
    tfn.debug.check(x > 0, "not positive")
    return x + 1


def loop(xs: Tensor) -> Any:
    return tfn.scan(lambda c, x: (c / x - c / x, positive(x + 2)), torch.ones(()), xs)


def counted(x: Tensor, steps: int | None = None) -> Any:
    return tfn.while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, (x - 1).log()), (torch.tensor(0), x), max_steps=steps
    )


def asked(x: Tensor, steps: int | None) -> Any:
    return tfn.while_loop(lambda x: x.log() < 9, lambda x: (x - 1,), (x,), max_steps=steps)


def chosen(x: Tensor) -> Tensor:
    return tfn.cond(x.sum() > 0, torch.log, lambda x: positive(x).sqrt(), (x,))


def beside(act: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """A function whose result does not read what `act` returns."""

    def f(x: Tensor) -> Tensor:
        act(x)
        return x * 2

    return f


def asserted(x: Tensor, *_: Any) -> tuple[()]:
    """Nothing is returned."""
    tfn.debug.check(x > 0, "not positive")
    return ()


def nothing(x: Tensor) -> tuple[()]:
    return ()


# structured ops whose results, if there are any, nobody reads
WITHOUT_RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "cond": lambda x: tfn.cond(x.sum() < 9, asserted, nothing, (x,)),
    "switch": lambda x: tfn.switch(x.sum().long() * 0 + 1, [nothing, asserted], (x,)),
    "scan": lambda x: tfn.scan(lambda c, row: ((), asserted(row)), (), x),
    "scan with a carry": lambda x: tfn.scan(lambda c, row: (c + 1, asserted(row)), x.sum(), x),
    "while_loop": lambda x: tfn.while_loop(
        lambda i: i < 2, lambda i: (asserted(x[i]), (i + 1,))[1], (torch.tensor(0),)
    ),
    "map": lambda x: tfn.map(asserted, x),
    "checkpoint": lambda x: tfn.checkpoint(asserted)(x),
    "vmap": lambda x: tfn.vmap(asserted)(x),
    "jit": lambda x: tfn.jit(asserted)(x),
    "cond in a scan": lambda x: tfn.scan(lambda c, r: ((), tfn.cond(r < 9, asserted, nothing, (r,))), (), x),
    "scan in a checkpoint": lambda x: tfn.checkpoint(lambda x: tfn.scan(lambda c, r: ((), asserted(r)), (), x)[1])(x),
    "custom_vjp": lambda x: tfn.custom_vjp(lambda x: (asserted(x), x + 1)[1])(x),
    "scan in a custom_jvp": lambda x: tfn.custom_jvp(
        lambda x: (tfn.scan(lambda c, r: ((), asserted(r)), (), x), x + 1)[1]
    )(x),
}


@pytest.mark.parametrize("around", ["", "jit", "grad", "vmap"])
@pytest.mark.parametrize("name", WITHOUT_RESULTS)
def test_errors_in_bodies_without_results_are_found(name: str, around: str) -> None:
    f = beside(WITHOUT_RESULTS[name])
    checked: dict[str, Callable[[Tensor], Any]] = {
        "": tfn.check_errors(f),
        "jit": tfn.jit(tfn.check_errors(f)),
        "grad": tfn.check_errors(tfn.grad(lambda x: f(x).sum())),
        "vmap": lambda x: tfn.vmap(tfn.check_errors(f))(x[None]),
    }
    for x, is_wrong in ((X, True), (X.abs(), False)):
        error, result = checked[around](x)
        assert (error.get() or "").startswith("not positive" if is_wrong else "") and bool(error.get()) == is_wrong
        assert torch.equal(result.reshape(-1), torch.full((2,), 2.0) if around == "grad" else x * 2)


# function, argument, the text of the error
PROGRAMS: dict[str, tuple[Callable[[Tensor], Any], Tensor, str | None]] = {
    "no error": (torch.exp, X, None),
    "nan": (torch.log, X, LOG),
    "first of two": (lambda x: (x.log(), x.sqrt()), X, LOG),
    "nan that a mask hides": (lambda x: torch.where(x > 0, x.log(), 0.0), X, LOG),
    "passed through": (lambda x: x.t().clone(), X * torch.nan, None),
    "integers": (lambda x: x.int() + 1, X, None),
    "assertion": (positive, X, "not positive"),
    "assertion that holds": (positive, X + 2, None),
    "carry of a scan": (lambda x: loop(x)[0], torch.tensor([1.0, 0.0]), "aten.div.Tensor gives NaN"),
    "in a scan": (loop, torch.tensor([1.0, -3.0, 0.0]), "not positive"),
    "no error in a scan": (loop, X, None),
    "in a while_loop": (counted, X + 2, LOG),
    "no step": (lambda x: counted(x, 0), X, None),
    "condition of the last step": (lambda x: asked(x, None), X.sum() + 2.5, LOG),
    "condition that max_steps leaves out": (lambda x: asked(x, 3), X.sum() + 2.5, None),
    "condition before max_steps": (lambda x: asked(x, 4), X.sum() + 2.5, LOG),
    "branch": (chosen, X + 1e-3, LOG),
    "other branch": (chosen, -X - 1e-3, "not positive"),
    "gradient": (tfn.grad(lambda x: torch.where(x > 0, x.sqrt(), 0.0).sum()), X * 0, "aten.div.Tensor gives NaN"),
    "tangent": (lambda x: tfn.jvp(torch.sqrt, (x,), (x,))[1], X * 0, "aten.div.Tensor gives NaN"),
    "checkpoint": (tfn.grad(tfn.checkpoint(lambda x: x.log().sin().sum())), X, LOG),
    "jitted inside": (tfn.jit(torch.log), X, LOG),
    "batched inside": (tfn.vmap(torch.log), X, LOG),
    "layer": (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Softmax(0)).double(), X.double(), None),
    "custom rule": (tfn.custom_vjp(torch.log), X, "custom_vjp gives NaN"),
}


@pytest.mark.parametrize("is_jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_error_is_named(name: str, is_jitted: bool) -> None:
    f, x, text = PROGRAMS[name]
    checked = tfn.check_errors(f)
    error, result = (tfn.jit(checked) if is_jitted else checked)(x)
    found = error.get()
    assert (found and found.split("\n")[0]) == text
    if text is None:
        torch.testing.assert_close(result, f(x), equal_nan=True)
        error.throw()
    else:
        with pytest.raises(CheckFailed, match=text):
            error.throw()


def test_examples_are_named() -> None:
    error, _ = tfn.jit(tfn.vmap(tfn.check_errors(torch.log)))(torch.tensor([1.0, -1.0, 2.0, -3.0]))
    assert error.code.tolist() == [0, 1, 0, 1]
    assert told(error).startswith(f"{LOG}, in example 1; 2 of 4 examples fail\nfrom: ")
    nested = tfn.vmap(tfn.vmap(tfn.check_errors(chosen), in_dims=1), in_dims=0)
    error, _ = nested(torch.tensor([1.0, 2.0, 3.0, -4.0]).reshape(2, 1, 2))
    assert told(error).startswith("not positive, in example (1, 1); 1 of 4 examples fail")


def test_the_users_line_is_named() -> None:
    error, _ = tfn.check_errors(tfn.vmap(lambda x: loop(x)))(torch.tensor([[1.0, -3.0]]))
    assert "test_check_errors.py" in told(error) and told(error).endswith("in positive")


def test_kinds_are_chosen() -> None:
    both = lambda x: positive(x).sub(1).log()
    for kinds, text in ((("nan",), LOG), ("asserts", "not positive")):
        if kinds == ("nan",):  # then an assertion is one of the program
            with pytest.raises(RuntimeError, match="not positive"):
                tfn.check_errors(both, kinds)(X)
            assert told(tfn.check_errors(torch.log, kinds)(X)[0]).startswith(text)
        else:
            assert told(tfn.check_errors(both, kinds)(X)[0]).startswith(text)
    with pytest.raises(UnknownOption, match=r"unknown kind of errors 'div'\nfrom: .*\nThere are nan, bounds, asserts"):
        tfn.check_errors(torch.log, ["div"])


def test_errors_are_auxiliary_results_of_gradients() -> None:
    def loss(x: Tensor) -> tuple[Tensor, Any]:
        error, value = tfn.check_errors(lambda x: (x.log() ** 2).sum())(x)
        return value, error

    grad, error = tfn.jit(tfn.grad(loss, has_aux=True))(X + 2)
    torch.testing.assert_close(grad, 2 * (X + 2).log() / (X + 2))
    assert error.get() is None
    assert told(tfn.grad(loss, has_aux=True)(X)[1]).startswith(LOG)


def test_programs_raise_the_first_error() -> None:
    """Forward, backward, and with an executor that takes all."""
    f = tfn.jit(lambda x: torch.where(x > 0, x.sqrt(), 0.0).sum(), verify="errors")
    x = torch.zeros(2, requires_grad=True)
    loss = f(x)
    with pytest.raises(CheckFailed, match=r"aten\.div\.Tensor gives NaN"):
        loss.backward()
    with pytest.raises(CheckFailed, match=r"aten\.sqrt\.default gives NaN\nfrom: .*test_check_errors\.py"):
        tfn.jit(lambda x: loop(x.sqrt()), verify="errors", executors=["inductor"])(X)
    y = torch.ones(2)
    torch.testing.assert_close(tfn.jit(lambda y: y.add_(1).log(), verify="errors")(y), torch.full((2,), 2.0).log())
    assert y.tolist() == [2, 2]
    with pytest.raises(JitError, match="verify is True, False or \"errors\", given 'error'"):
        tfn.jit(torch.sin, verify="error")  # type: ignore[call-overload]


def test_symbolic_sizes_are_bounds() -> None:
    f = tfn.jit(tfn.check_errors(lambda x, i: x[i]), dynamic=True)
    for size in (3, 4, 5):
        error, result = f(torch.arange(float(size)), torch.tensor([0, size - 1, -size]))
        assert error.get() is None and result.tolist() == [0, size - 1, 0]
        assert f(torch.ones(size), torch.tensor([0, size, 0]))[0].get() is not None


def test_codes_are_on_the_gpu() -> None:
    def f(x: Tensor, n: Tensor) -> Tensor:
        tfn.debug.check(n > 0, "no steps")
        return tfn.scan(lambda c, row: (c / row, c.log()), x[0], x)[1] / n

    plain = on_device(tfn.trace(f, torch.ones(3, 2), torch.ones(())), "cuda:0")
    new, checks = check_errors(plain, KINDS)
    tfn.check(new)
    assert [one.text for one in checks[-2:]] == ["no steps", "aten.div.Tensor gives NaN"]
    assert str(new.output_types[-1]) == "cuda:0 i64[]"


# ---- bounds: PyTorch raises exactly where a place is outside ----

W = torch.randn(4, 3)


def written(x: Tensor, i: Tensor) -> Tensor:
    x[i] = 1.0
    return x


BOUNDS: dict[str, Callable[[Tensor], Any]] = {
    "index": lambda i: W[i],
    "index of a dim": lambda i: W[:, i],
    "index_put": lambda i: W.index_put((i,), torch.ones(3)),
    "index_put, accumulated": lambda i: W.index_put((i,), torch.ones(3), accumulate=True),
    "written": lambda i: written(W.clone(), i),
    "index_select": lambda i: W.index_select(0, i),
    "index_add": lambda i: W.index_add(1, i, torch.ones(4, 1)),
    "index_copy": lambda i: W.index_copy(0, i, torch.ones(1, 3)),
    "index_fill": lambda i: W.index_fill(0, i, 1.0),
    "index_reduce": lambda i: W.index_reduce(0, i, torch.ones(1, 3), "amax"),
    "gather": lambda i: W.gather(-1, i[None]),
    "scatter": lambda i: W.scatter(1, i[None], torch.ones(1, 1)),
    "scatter of a number": lambda i: W.scatter(0, i[None], 2.0),
    "scatter_add": lambda i: W.scatter_add(0, i[None], torch.ones(1, 1)),
    "scatter_reduce": lambda i: W.scatter_reduce(0, i[None], torch.ones(1, 1), "prod"),
    "take": lambda i: W.take(i),
    "put": lambda i: W.put(i, torch.ones(1)),
    "take_along_dim": lambda i: W.take_along_dim(i[None], 0),
    "embedding": lambda i: F.embedding(i, W),
    "gradient of embedding": lambda i: tfn.grad(lambda w: F.embedding(i, w).sin().sum())(W),
    "embedding_bag": lambda i: F.embedding_bag(i[None], W),
    "nll_loss": lambda i: F.nll_loss(W[:1].log_softmax(1), i),
    "nll_loss with ignored": lambda i: F.nll_loss(W[:2].log_softmax(1), torch.cat([i, i * 0]), ignore_index=-1),
    "cross_entropy": lambda i: F.cross_entropy(W[:1], i),
    "gradient of cross_entropy": lambda i: tfn.grad(lambda w: F.cross_entropy(w[:1], i))(W),
    "nll_loss of images": lambda i: F.nll_loss(W.reshape(1, 4, 1, 3), i.expand(1, 1, 3)),
    "cond": lambda i: tfn.cond(i.sum() > -9, lambda: W[i], lambda: W[:1], ()),
    "scan": lambda i: tfn.scan(lambda c, j: (c, W[j]), torch.ones(()), i)[1],
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_are_those_of_pytorch(name: str) -> None:
    f = BOUNDS[name]
    checked = tfn.check_errors(f, "bounds")
    for place in (-13, -12, -5, -4, -3, -2, -1, 0, 2, 3, 4, 11, 12):
        index = torch.tensor([place])
        try:
            wanted, raises = f(index), False
        except (IndexError, RuntimeError):
            wanted, raises = None, True
        error, result = checked(index)
        assert (error.get() is not None) == raises, place
        if not raises:
            torch.testing.assert_close(result, wanted)
