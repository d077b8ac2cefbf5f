"""Functions in, functions out: signatures, pytrees and misuse of grad, value_and_grad and vjp."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thunder_fn as tfn
from tests.messages import message_of
from tests.unit.capturing import assert_same
from thunder_fn import errors

X, Y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
WHOLE = torch.ones(3, dtype=torch.int64)


def product(x: Any, y: Any, *, scale: float = 1.0) -> Any:
    return (x * y * scale).sum()


def here(f: Any) -> str:
    """The name of a function in an error."""
    return f"{f.__code__.co_filename}:{f.__code__.co_firstlineno} in {f.__code__.co_name}"


# ---- torch.func's signatures, on what it accepts ----

CALLS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "one": (lambda func: func.grad(product), (X, Y)),
    "second": (lambda func: func.grad(product, argnums=1), (X, Y)),
    "last": (lambda func: func.grad(product, argnums=-1), (X, Y)),
    "both": (lambda func: func.grad(product, argnums=(1, 0)), (X, Y)),
    "one in a tuple": (lambda func: func.grad(product, argnums=(0,)), (X, Y)),
    "pytree": (lambda func: func.grad(lambda p: (p["a"][0] ** 2 * p["b"]).sum()), ({"a": [X], "b": Y},)),
    "aux": (lambda func: func.grad(lambda x: ((x**2).sum(), {"y": x * 2}), has_aux=True), (X,)),
    "value": (lambda func: func.grad_and_value(product), (X, Y)),
    "value and aux": (lambda func: func.grad_and_value(lambda x: ((x**3).sum(), x), has_aux=True), (X,)),
    "unused": (lambda func: func.grad(lambda x, y: y.sum(), argnums=0), (X, Y)),
    "twice": (lambda func: func.grad(lambda x: func.grad(lambda y: (y**4).sum())(x).sum()), (X,)),
    "thrice": (
        lambda func: func.grad(lambda x: func.grad(lambda y: func.grad(lambda z: (z**4).sum())(y).sum())(x).sum()),
        (X,),
    ),
    "complex": (lambda func: func.grad(lambda z: (z * z.conj()).real.sum()), (torch.complex(X, Y),)),
    "vjp": (lambda func: lambda x: (found := func.vjp(torch.sin, x))[1](found[0]), (X,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_torch_func(name: str) -> None:
    make, args = CALLS[name]
    found, expected = make(tfn)(*args), make(torch.func)(*args)
    assert type(found) is type(expected)
    assert_same(found, expected)


def test_keywords_are_passed_on() -> None:
    assert torch.equal(tfn.grad(product)(X, Y, scale=2.0), 2 * Y)


def test_value_and_grad_is_in_the_order_of_jax() -> None:
    value, gradient = tfn.value_and_grad(product)(X, Y)
    assert (value, gradient.tolist()) == (torch.tensor(32.0), Y.tolist())
    (value, aux), gradient = tfn.value_and_grad(lambda x: (x.sum(), "aux"), has_aux=True)(X)
    assert (value, aux, gradient.tolist()) == (torch.tensor(6.0), "aux", [1.0, 1.0, 1.0])


def test_vjp_with_aux() -> None:
    value, pullback, aux = tfn.vjp(lambda x, y: (x * y, {"sum": x + y}), X, Y, has_aux=True)
    assert torch.equal(value, X * Y)
    assert torch.equal(aux["sum"], X + Y)
    assert_same(pullback(torch.ones(3)), (Y, X))


def test_integer_primals_of_vjp_have_zero_cotangents() -> None:
    _, pullback = tfn.vjp(lambda x, n: x * n, X, WHOLE)
    assert_same(pullback(torch.ones(3)), (torch.ones(3), torch.zeros(3, dtype=torch.int64)))


def test_mutations_are_written_back_once() -> None:
    module, count = nn.BatchNorm1d(3), torch.zeros(())
    data = torch.randn(4, 3)
    expected = nn.BatchNorm1d(3)
    expected(data)
    tfn.grad(lambda x: (count.add_(1), module(x).pow(2).sum())[1])(data)
    assert_same(list(module.buffers()), list(expected.buffers()))
    assert count == 1


def test_stop_gradient() -> None:
    assert torch.equal(tfn.grad(lambda x: (x * tfn.stop_gradient(x)).sum())(X), X)
    assert torch.equal(tfn.grad(lambda x: tfn.stop_gradient({"a": x**2})["a"].sum())(X), torch.zeros(3))


# ---- misuse ----

NOT_SCALAR = "grad_f: Expected f(*args) to return a scalar Tensor, but it returned {what}\nfrom:         {here}\n{fix}"


@pytest.mark.parametrize(
    ("value", "what", "fix"),
    (
        (
            lambda x: x * 2,
            "f32[3]",
            "Reduce it with `.sum()` or `.mean()`; for several outputs use `vjp` or `jacrev`.",
        ),
        (lambda x: 3.0, "a float", "Return the tensor itself, without `.item()` or `float()`."),
        (lambda x: None, "None", "Return the loss. A gradient needs no `backward()`: `grad` returns it."),
        (lambda x: (x.sum(),), "a tuple", "Return the loss alone, or `(loss, aux)` with `has_aux=True`."),
    ),
    ids=("vector", "number", "none", "tuple"),
)
def test_loss_is_a_scalar(value: Any, what: str, fix: str) -> None:
    def f(x: Any) -> Any:
        return value(x)

    with pytest.raises(errors.NonScalarLoss) as info:
        tfn.grad(f)(X)
    assert message_of(info.value) == NOT_SCALAR.format(what=what, here=here(f), fix=fix)
    with pytest.raises(errors.NonScalarLoss, match="a scalar Tensor"):
        tfn.grad(lambda x: (value(x), 1), has_aux=True)(X)


def test_loss_is_real() -> None:
    def f(x: Any) -> Any:
        return (x * 2j).sum()

    with pytest.raises(errors.NonScalarLoss) as info:
        tfn.grad(f)(X)
    assert message_of(info.value) == (
        "grad_f: grad can be implicitly created only for real scalar outputs, but it returned c64[]\n"
        f"from:         {here(f)}\nTake `.real` or `abs()` of it first."
    )


def test_aux_is_there() -> None:
    def f(x: Any) -> Any:
        return x.sum()

    with pytest.raises(errors.NonScalarLoss) as info:
        tfn.grad(f, has_aux=True)(X)
    assert message_of(info.value) == (
        "grad_f: grad_and_value(f)(*args): output of function f should be a tuple: (output, aux) if has_aux is True, not f32[]\n"
        f"from:         {here(f)}\n"
        "Return the loss first, then anything else."
    )


@pytest.mark.parametrize("argnums", (True, 1.0, "x", None, (), (0, True), [0.0]))
def test_argnums_are_ints(argnums: Any) -> None:
    with pytest.raises(
        errors.ArgnumError, match=r"^argnums (must be int or Tuple|must be non-empty|elements must be int)"
    ):
        tfn.grad(product, argnums=argnums)


@pytest.mark.parametrize("argnums", (2, -3, (0, 2)))
def test_argnums_point_at_arguments(argnums: Any) -> None:
    f = lambda: tfn.grad(product, argnums=argnums)(X, Y)
    with pytest.raises(errors.ArgnumError) as info:
        f()
    number = argnums if isinstance(argnums, int) else 2
    assert message_of(info.value) == (
        f"grad_product: got argnum={number}, but only 2 positional inputs\n"
        f"from:         {here(f)}\n"
        "Pass the argument by position; keyword arguments are not differentiated."
    )


@pytest.mark.parametrize("argnums", ((0, 0), (1, -1)))
def test_argnums_differ(argnums: Any) -> None:
    with pytest.raises(errors.ArgnumError) as info:
        tfn.grad(product, argnums=argnums)(X, Y)
    assert message_of(info.value) == f"grad_product: argnums elements must be unique, given argnums={argnums}"


@pytest.mark.parametrize(
    ("value", "text"),
    (
        (WHOLE, "args[0] is i64[3]"),
        ({"a": [X, X > 1]}, "args[0]['a'][1] is bool[3]"),
        (2.0, "args[0] is a float"),
        ((X, "a"), "args[0][1] is a str"),
    ),
    ids=("integers", "booleans", "number", "string"),
)
def test_only_floating_tensors_are_differentiated(value: Any, text: str) -> None:
    f = lambda: tfn.grad(lambda x: torch.ones(()))(value)
    with pytest.raises(errors.NotDifferentiable) as info:
        f()
    assert message_of(info.value) == (
        f"grad_<lambda>: {text}, and only floating and complex tensors have gradients\n"
        f"from:         {here(f)}\n"
        "Cast it to a floating dtype, pass numbers as tensors, or leave the argument out of argnums."
    )


@pytest.mark.parametrize("value", (None, {}, [None]))
def test_an_argument_without_tensors_is_not_differentiated(value: Any) -> None:
    f = lambda: tfn.grad(lambda x: torch.ones(()))(value)
    with pytest.raises(errors.NotDifferentiable) as info:
        f()
    assert message_of(info.value) == (
        f"grad_<lambda>: args[0] has no tensor to differentiate: it is {value!r}\n"
        f"from:         {here(f)}\n"
        "Leave the argument out of argnums."
    )


def test_sparse_tensors_are_differentiated_as_by_torch_func() -> None:
    f = lambda x: (x * 2).sum()
    found = tfn.grad(f)(X.to_sparse())
    assert torch.equal(found.to_dense(), torch.func.grad(f)(X.to_sparse()).to_dense())


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_are_batched_and_not_differentiated() -> None:
    """PyTorch says of some transforms that NestedTensorImpl has no strides, and to file an issue."""
    nested = torch.nested.nested_tensor([X, X])
    assert all(map(torch.equal, tfn.vmap(torch.sin)(nested).unbind(), [X.sin()] * 2))
    with pytest.raises(errors.UnsupportedInput, match=r"^args\[0\] is a nested tensor") as info:
        tfn.grad(lambda x: x.sum())(nested)
    assert info.value.__context__ is None or info.value.__suppress_context__


@pytest.mark.parametrize(
    ("cotangent", "text"),
    (
        (torch.ones(2), "cotangent is f32[2], but out is f32[3]"),
        (X.double(), "cotangent is f64[3], but out is f32[3]"),
        (1.0, "cotangent is a float, but out is f32[3]"),
        (
            (X,),
            "Expected pytree structure of the cotangent to be that of the output, "
            "but cotangent is a tuple of 1, and out is a leaf",
        ),
    ),
    ids=("shape", "dtype", "number", "structure"),
)
def test_cotangents_are_like_the_output(cotangent: Any, text: str) -> None:
    with pytest.raises(errors.CotangentError) as info:
        tfn.vjp(torch.sin, X)[1](cotangent)
    assert message_of(info.value) == f"vjp_sin: {text}"


def test_vjp_takes_tensors() -> None:
    with pytest.raises(
        errors.NotDifferentiable, match=r"^vjp: primals\[0\]\['a'\] is a float; pass numbers as tensors"
    ):
        tfn.vjp(torch.sin, {"a": 3.0})


def test_only_functions_are_transformed() -> None:
    with pytest.raises(errors.GradError, match=r"(?m)^expected a function to transform, given an int: 3$"):
        tfn.grad(3)


# ---- memory ----


@pytest.mark.parametrize(
    "use",
    [
        lambda f: tfn.grad(lambda x: f(x).sum())(X),
        lambda f: tfn.grad(tfn.grad(lambda x: f(x).sum()))(X[0]),
        lambda f: tfn.vjp(f, X)[1](X),
        lambda f: tfn.jvp(f, (X,), (X,)),
        lambda f: tfn.linearize(f, X)[1](X),
        lambda f: tfn.vmap(f)(X),
        lambda f: tfn.jit(f)(X),
        lambda f: tfn.simplify(tfn.trace(f, X)),
    ],
    ids=["grad", "grad of grad", "vjp", "jvp", "linearize", "vmap", "jit", "simplify"],
)
def test_closed_over_tensors_live_no_longer_than_their_functions(use: Callable[[Any], Any]) -> None:
    """Memos remember bodies, never what a function closes over; and it takes no garbage collection."""

    def closing_over(weight: torch.Tensor) -> Any:
        return lambda x: (x * weight[0]).sin()

    use(closing_over(torch.randn(2)))  # what PyTorch keeps of a first call
    weight = torch.randn(2)
    reference = weakref.ref(weight)
    gc.disable()
    try:
        use(closing_over(weight))
        del weight
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("transform", ["jacrev", "jacfwd"])
@pytest.mark.parametrize(
    ("f", "x", "where"),
    [
        (lambda z: z**2, torch.complex(X, Y), f"args[0] is c64[{len(X)}]"),
        (lambda z: z.real, torch.complex(X, Y), f"args[0] is c64[{len(X)}]"),
        (lambda x: x * 1j, X, f"out is c64[{len(X)}]"),
    ],
    ids=("complex to complex", "complex to real", "real to complex"),
)
def test_a_jacobian_is_of_real_numbers(transform: str, f: Any, x: torch.Tensor, where: str) -> None:
    """The two modes found different halves of what is no one matrix; torch.func refuses it too."""
    with pytest.raises(RuntimeError, match="complex"):
        getattr(torch.func, transform)(f)(x)
    with pytest.raises(errors.NotDifferentiable) as error:
        getattr(tfn, transform)(f)(x)
    what, source, fix = message_of(error.value).split("\n")
    values = "outputs" if where.startswith("out") else "inputs"
    assert what == f"{transform}: Expected all {values} to be real, but {where}"
    assert "test_api.py" in source
    assert fix == (
        "Take it of real numbers, with `torch.view_as_real` and `torch.view_as_complex`; or use `vjp` or `jvp`."
    )


@pytest.mark.parametrize("number", [1j, 2 - 0.5j, 3.0])
def test_gradients_through_complex_numbers(number: complex) -> None:
    """A complex number beside a tensor is conjugated by PyTorch's formulas, in forward and in reverse mode."""
    z = torch.complex(X, Y)
    for f in (
        lambda z: z * number,
        lambda z: number - z,
        lambda z: z / number,
        lambda z: number / z,
        lambda z: z**number,
    ):
        loss = lambda z, f=f: (f(z) * (1 + 2j)).real.sum()
        torch.testing.assert_close(tfn.grad(loss)(z), torch.func.grad(loss)(z))
        torch.testing.assert_close(tfn.jvp(f, (z,), (z + 1,)), torch.func.jvp(f, (z,), (z + 1,)))
        leaf = z.clone().requires_grad_()
        (found,) = torch.autograd.grad(tfn.jit(loss)(leaf), leaf)
        torch.testing.assert_close(found, torch.func.grad(loss)(z))


@pytest.mark.parametrize(
    "loss", ["mse_loss", "huber_loss", "smooth_l1_loss", "l1_loss", "binary_cross_entropy_with_logits"]
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_gradient_of_a_loss_of_nothing(loss: str, reduction: str) -> None:
    """A mask may leave no example of a batch: PyTorch's formulas divide by the number of elements in Python."""
    x = torch.ones(0, 3, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        return getattr(nn.functional, loss)(x, x.detach() + 1, reduction=reduction).sum()

    ours, theirs = tfn.jit(f)(x), f(x)
    assert_same(ours.detach(), theirs.detach())
    assert_same(torch.autograd.grad(ours, x)[0], torch.autograd.grad(theirs, x)[0])
    assert_same(tfn.grad(f)(x.detach()), torch.zeros(0, 3))


def test_former_names_of_modules_still_import() -> None:
    """Transforms and executors of users say `from thunder_fn.trace import TraceBuilder`."""
    for old, new in {"trace": "ir.trace", "rules": "ir.rules", "ops": "ir.ops", "rewrites": "parameters"}.items():
        assert importlib.import_module(f"thunder_fn.{old}") is importlib.import_module(f"thunder_fn.{new}")
    from thunder_fn import ops

    assert ops is importlib.import_module("thunder_fn.ir.ops")
