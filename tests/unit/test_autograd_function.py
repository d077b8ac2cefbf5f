"""torch.autograd.Function inside traced functions, against PyTorch's own use of the same classes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._inductor import test_operators
from torch.autograd.function import once_differentiable

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.errors import CustomRuleError, DataDependentBranch, GraphBreakWarning, MissingRule, UnsupportedCall
from thunder_fn.interpreters.grad import grad_and_value
from thunder_fn.ir.check import check

Tensor = torch.Tensor
Function = torch.autograd.Function


class Scaled(Function):
    """Old style, a Python value and a tensor as attributes, ten times the true gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float, w: Tensor) -> Tensor:
        ctx.k, ctx.double = k, x * 2
        ctx.save_for_backward(w, None)
        return x * k * w

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        w, nothing = ctx.saved_tensors
        assert nothing is None and any(ctx.needs_input_grad) and not ctx.needs_input_grad[1]
        return 10 * ct * ctx.k * w, None, ct * ctx.double / 2 * ctx.k


class Normal(Function):
    """New style, two outputs of which one has no gradient, an output that is saved."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Any:
        y = (x * w).exp()
        return y, x.sign(), y > 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[0])
        ctx.mark_non_differentiable(output[1], output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, ct: Any, *others: Any) -> Any:
        x, w, y = ctx.saved_tensors
        return 3 * ct * y * w, ct * y * x


class Cube(Function):
    """A batching rule of its own, which is visible in the values."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return ct * 30 * ctx.saved_tensors[0] ** 2

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        assert info.batch_size == 2 and in_dims == (0,)
        return Cube.apply(x) + 100, 0


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return Scaled.apply(x, 3.0, w).sin().sum()


def normal(x: Tensor, w: Tensor) -> Tensor:
    y, sign, large = Normal.apply(x, w)
    return (y * sign * torch.where(large, 1.0, 2.0)).sum()


def close(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def point() -> tuple[Tensor, Tensor]:
    return torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)


def gradients(f: Any, *args: Tensor) -> tuple[Tensor, ...]:
    inputs = [arg.clone().requires_grad_() for arg in args]
    return torch.autograd.grad(f(*inputs), inputs)


@pytest.mark.parametrize("f", (scaled, normal), ids=("old style", "new style"))
def test_gradients(f: Any) -> None:
    args = point()
    program = tfn.trace(f, *args)
    check(program)
    check(grad_and_value(program, (True, True)))
    close(tfn.evaluate(program, args), [f(*args)])
    close(tfn.grad(f, argnums=(0, 1))(*args), gradients(f, *args))

    def penalty(x: Tensor, w: Tensor) -> Tensor:
        return torch.autograd.grad(f(x, w), x, create_graph=True)[0].square().sum()

    close(tfn.grad(lambda *xs: tfn.grad(f)(*xs).square().sum(), argnums=(0, 1))(*args), gradients(penalty, *args))
    batch = torch.stack([args[0], 2 * args[0]])
    expected = torch.stack([gradients(f, row, args[1])[0] for row in batch])
    close([tfn.vmap(tfn.grad(f), (0, None))(batch, args[1])], [expected])
    summed = tfn.grad(lambda w: tfn.vmap(f, (0, None))(batch, w).sum())(args[1])
    close([summed], [sum(gradients(f, row, args[1])[1] for row in batch)])


@pytest.mark.parametrize("f", (scaled, normal), ids=("old style", "new style"))
def test_forward_mode_has_the_derivative_of_backward(f: Any) -> None:
    """Several times the true derivative is what these classes say; PyTorch has no forward mode for them."""
    primals, tangents = point(), point()
    expected = sum((g * t).sum() for g, t in zip(gradients(f, *primals), tangents, strict=True))
    push = lambda *xs: tfn.jvp(f, xs[:2], xs[2:])[1]
    close([push(*primals, *tangents), tfn.jit(push)(*primals, *tangents)], [expected, expected])
    batch = [torch.stack([x, x]) for x in (*primals, *tangents)]
    close([tfn.vmap(push)(*batch), tfn.jacfwd(f)(*primals)], [torch.stack([expected] * 2), gradients(f, *primals)[0]])


def test_a_batching_rule_of_its_own() -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    close([tfn.vmap(Cube.apply)(x)], [x**3 + 100])
    close([tfn.grad(lambda x: tfn.vmap(Cube.apply)(x).sum())(x)], [30 * x**2])
    close([tfn.grad(lambda x: Cube.apply(x).sum())(x)], [30 * x**2])


def test_autograd_inside_and_torch_func_inside() -> None:
    x, w = (arg.requires_grad_() for arg in point())
    for g in (
        lambda x, w: torch.autograd.grad(scaled(x, w), (x, w)),
        lambda x, w: torch.autograd.grad(normal(x, w), (x, w)),
        lambda x, w: torch.func.grad(normal, argnums=(0, 1))(x, w),
    ):
        program = tfn.trace(g, x, w)
        check(program)
        close(tfn.evaluate(program, (x, w)), g(x, w))


def test_gradients_are_cast_and_summed() -> None:
    class Wide(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, ct: Tensor) -> Any:
            x, y = ctx.saved_tensors
            return (ct * y).double(), ct * x

    x, y = torch.randn(3), torch.randn(2, 3)
    found = tfn.grad(lambda x, y: Wide.apply(x, y).sum(), argnums=(0, 1))(x, y)
    close(found, [y.sum(0), x.expand(2, 3)])


def test_needs_input_grad_is_false_for_what_has_no_gradient() -> None:
    seen: list[tuple[bool, ...]] = []

    class Take(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, index: Tensor, scale: float) -> Tensor:
            seen.append(ctx.needs_input_grad)
            ctx.save_for_backward(index)
            ctx.sizes = x.shape
            return x[index] * scale

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            seen.append(ctx.needs_input_grad)
            (index,) = ctx.saved_tensors
            return g.new_zeros(ctx.sizes).index_add(0, index, g * 2.0), None, None

    x, index = torch.ones(3), torch.tensor([2, 2, 0])
    torch.testing.assert_close(tfn.grad(lambda x: Take.apply(x, index, 2.0).sum())(x), torch.tensor([2.0, 0.0, 4.0]))
    assert set(seen) == {(True, False, False)}


def test_once_differentiable_has_no_second_derivative() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 3 * g * ctx.saved_tensors[0] ** 2

    x = torch.tensor([1.0, 2.0])
    cube = tfn.grad(lambda x: Cube.apply(x).sum())
    for f in (cube, tfn.jit(cube), tfn.vmap(cube)):
        torch.testing.assert_close(f(x), 3 * x**2)
    for second in (tfn.grad(lambda x: cube(x).sum()), tfn.jacrev(cube), tfn.jit(tfn.jacrev(cube))):
        with pytest.raises(MissingRule) as error:
            second(x)
        assert re.sub("\nfrom: .*", "", str(error.value)) == (
            "the backward of the autograd function Cube is marked as once_differentiable, so it has no derivative\n"
            "Take the mark away, if backward is made of ops that have derivatives."
        )
    with pytest.raises(MissingRule, match="is marked as once_differentiable"):
        tfn.jvp(cube, (x,), (x,))


def test_backward_gets_one_cotangent_for_each_output() -> None:
    class Several(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            return x * 2, None, 5, x.long(), [x]

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Tensor:
            g, none, number, of_ints, of_list = cotangents
            assert none is None and number is None and of_list is None and of_ints.shape == x.shape
            return g * 2

    x = torch.ones(3)
    torch.testing.assert_close(tfn.grad(lambda x: (Several.apply(x)[0] * x).sum())(x), torch.full((3,), 4.0))


def test_what_differentiates_a_jvp_uses_the_rule() -> None:
    """Rounding with a straight-through derivative: the op itself has none."""

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Any:
            return x.round(), x.cos()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_forward(inputs[0], output[1])

        @staticmethod
        def backward(ctx: Any, g: Tensor, _: Tensor) -> Tensor:
            return g

        @staticmethod
        def jvp(ctx: Any, t: Tensor) -> Any:
            assert len(ctx.saved_tensors) == 2
            return t, None

    f = lambda x: (Round.apply(x * 3)[0] * x.sin()).sum()
    x = torch.tensor([0.3, -1.1, 2.7], dtype=torch.float64)
    rounded = (x * 3).round()
    gradient = 3 * x.sin() + rounded * x.cos()
    second = 6 * x.cos() - rounded * x.sin()
    torch.testing.assert_close(tfn.jvp(f, (x,), (torch.ones_like(x),))[1], gradient.sum())
    for hessian in (tfn.jacfwd(tfn.jacfwd(f)), tfn.jacrev(tfn.jacfwd(f)), tfn.jacfwd(tfn.jacrev(f)), tfn.hessian(f)):
        torch.testing.assert_close(hessian(x), second.diag())
        torch.testing.assert_close(tfn.vmap(hessian)(x.expand(2, 3)), second.diag().expand(2, 3, 3))


def test_nothing_is_left_behind() -> None:
    before = Function.apply.__func__.__code__
    tfn.trace(scaled, *point())
    assert Function.apply.__func__.__code__ is before
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    close(torch.autograd.grad(Cube.apply(x).sum(), x), [30 * x.detach() ** 2])


def test_too_few_gradients() -> None:
    class Short(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            return x * y

        @staticmethod
        def backward(ctx: Any, ct: Tensor) -> Tensor:
            return ct

    with pytest.raises(CustomRuleError) as error:
        tfn.grad(lambda x: Short.apply(x, x).sum())(torch.ones(3))
    assert message_of(error.value) == (
        "Short.backward must return one gradient for each argument of forward, 2 of them, but it returned 1"
    )


class Cubed(torch.autograd.Function):
    """Its two derivatives say which was asked."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, power: int) -> torch.Tensor:
        return x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return cotangents[0] * 5 * ctx.saved_tensors[0], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0] * 7 * ctx.saved_tensors[0]


def test_jvp_is_the_class_s_own() -> None:
    x, v = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    f = lambda x: Cubed.apply(x, 3)
    for found in (tfn.jvp(f, (x,), (v,)), tfn.jit(lambda x, v: tfn.jvp(f, (x,), (v,)))(x, v)):
        assert torch.equal(found[0], x**3) and torch.equal(found[1], 7 * x * v)
    batched = tfn.vmap(lambda x, v: tfn.jvp(f, (x,), (v,))[1])(x, v)
    assert torch.equal(batched, 7 * x * v)
    assert torch.equal(tfn.jvp(tfn.vmap(f), (x,), (v,))[1], 7 * x * v)


def test_generated_batching_rules_keep_gradients() -> None:
    x = torch.tensor([1.0, 2.0])
    f = lambda x: torch.func.vmap(lambda x: Cubed.apply(x, 3))(x).sum()
    for grad in (tfn.grad(f), tfn.jit(tfn.grad(f)), tfn.grad(tfn.jit(f))):
        assert torch.equal(grad(x), 5 * x)


def test_jvp_returns_a_tangent_for_each_output() -> None:
    class Wrong(Cubed):
        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            return tangents[0], tangents[0]

    x = torch.ones(2)
    with pytest.raises(
        CustomRuleError, match=r"^Wrong.jvp must return one tangent for each output, 1 of them, but it returned 2"
    ):
        tfn.jvp(lambda x: Wrong.apply(x, 3), (x,), (x,))


class Exponential(Function):
    """Changes its input in place; 5 times the true gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Any:
        total = x.sum()
        return x.exp_(), total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_dirty(inputs[0])
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, ct: Tensor, ct_of_total: Tensor) -> Any:
        return 5 * (ct * ctx.saved_tensors[0] + ct_of_total)


@pytest.mark.parametrize("returned", [True, False], ids=["its result", "its input"])
def test_inputs_that_change_in_place(returned: bool) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        z, total = Exponential.apply(y)
        return ((z if returned else y) * x).sum() + total

    def gradient(x: Tensor) -> Tensor:
        return (2 * x).exp() + 5 * 2 * (x * (2 * x).exp() + 1)

    x = torch.tensor([0.5, -0.3], dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    f(leaf).backward()
    torch.testing.assert_close(leaf.grad, gradient(x))
    torch.testing.assert_close(tfn.jit(f)(x), f(x))
    torch.testing.assert_close(tfn.grad(f)(x), gradient(x))
    torch.testing.assert_close(
        tfn.vmap(tfn.grad(f))(torch.stack([x, 2 * x])), torch.stack([gradient(x), gradient(2 * x)])
    )
    hessian = torch.autograd.functional.hessian(f, x)  # the rule is that of the saved result, too
    for second in (tfn.jacfwd(tfn.grad(f)), tfn.jacrev(tfn.grad(f))):
        torch.testing.assert_close(second(x), hessian)
    jitted = x.clone().requires_grad_()
    tfn.jit(f)(jitted).backward()
    torch.testing.assert_close(jitted.grad, gradient(x))


def test_arguments_that_change_in_place_are_written() -> None:
    x = torch.zeros(2)
    found = tfn.jit(lambda x: Exponential.apply(x)[0] * 2)(x)
    assert found.tolist() == [2, 2] and x.tolist() == [1, 1]


# ---- what a rule is told ----


def test_needs_input_grad_is_that_of_the_call() -> None:
    class Product(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx: Any, ct: Tensor) -> Any:
            x, y = ctx.saved_tensors
            factor = 1 if ctx.needs_input_grad[1] else 10
            return factor * ct * y, ct * x if ctx.needs_input_grad[1] else None

    x, y = point()
    for f in (
        lambda x: Product.apply(x, y).sum(),
        lambda x: Product.apply(x, x).sum(),
        lambda x: Product.apply(y, x).sum(),
    ):
        expected = gradients(f, x)
        leaf = x.clone().requires_grad_()
        close([tfn.grad(f)(x)], expected)
        close([tfn.vmap(tfn.grad(f))(x.expand(2, 3))[0]], expected)
        close(torch.autograd.grad(tfn.jit(f)(leaf), leaf), expected)
        close([tfn.evaluate(grad_and_value(tfn.trace(f, x), (True,)), (x,))[0]], expected)


class Absent(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx: Any, a: Any, b: Any) -> Any:
        (x,) = ctx.saved_tensors
        if a is None:
            return 7 * b * x
        return a * x if b is None else a * 0 + 100


@pytest.mark.parametrize("place", (0, 1))
def test_absent_cotangents_are_none(place: int) -> None:
    x, _ = point()
    f = lambda x: Absent.apply(x * 3)[place].sum()
    expected = gradients(f, x)
    close([tfn.grad(f)(x)], expected)
    close([tfn.vmap(tfn.grad(f))(x.expand(2, 3))[0]], expected)
    for whole in (
        tfn.jit(lambda x: Absent.apply(x * 3)),
        lambda x: [y[0] for y in tfn.vmap(lambda x: Absent.apply(x * 3))(x[None])],
    ):
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(whole(leaf)[place].sum(), leaf, create_graph=True)
        close([found], expected)
        again = gradients(lambda x: torch.autograd.grad(f(x), x, create_graph=True)[0].sin().sum(), x)
        close(torch.autograd.grad(found.sin().sum(), leaf), again)
    both = lambda x: sum(y.sum() for y in Absent.apply(x * 3))
    close([tfn.grad(both)(x)], gradients(both, x))


def test_outputs_without_a_gradient_do_not_require_grad() -> None:
    class Marked(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            y = x * 2
            ctx.mark_non_differentiable(y)
            return x * 1, y

        @staticmethod
        def backward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            return a

    x = torch.randn(2, 3, requires_grad=True)
    for call in (Marked.apply, tfn.jit(Marked.apply), tfn.vmap(Marked.apply)):
        assert [y.requires_grad for y in call(x)] == [True, False]


def test_a_batching_rule_is_told_the_dims_of_the_call() -> None:
    told: list[Any] = []

    class Told(Function):
        @staticmethod
        def forward(x: Tensor, y: Any) -> Tensor:
            return x * 1

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor, y: Any) -> Any:
            told.append((in_dims, tuple(x.shape), info.batch_size))
            return x * 1, in_dims[0]

    x, y = torch.randn(2, 3), torch.randn(3, 2, 2)
    for in_dims, args in (((1, None), (x, 2.0)), ((1, 0), (x, y)), ((-1, None), (x, y)), ((1, 2), (x[:, :2], y))):
        for transform in (torch.func.vmap, tfn.vmap):
            told.clear()
            found = transform(Told.apply, in_dims)(*args)
            close([found], [args[0].movedim(1, 0)])
            expected = tuple(
                None if dim is None else dim % 2 if place == 0 else dim for place, dim in enumerate(in_dims)
            )
            assert told[-1] == (expected, tuple(args[0].shape), args[0].shape[1])


def test_an_argument_that_is_a_result_cannot_be_saved() -> None:
    """PyTorch refuses it with a context of `setup_context`, in the same words."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(x: Any) -> Any:
            return x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    f: Any = lambda x: Same.apply(x.clone()).sum()  # pyright: ignore[reportUnknownMemberType]
    for transform in (torch.func.grad, tfn.grad, tfn.jit):
        with pytest.raises(RuntimeError, match="returned as-is as output is being saved for"):
            transform(f)(torch.ones(3, requires_grad=True))


def test_jvp_may_change_the_tangent_of_what_forward_changes() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(x: Any) -> Any:
            return x.mul_(2)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.mark_dirty(inputs[0])

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            return tangents[0].mul_(2)

    f: Any = lambda x: Doubled.apply(x.clone())  # pyright: ignore[reportUnknownMemberType]
    x, t = torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(tfn.jvp(f, (x,), (t,)), torch.func.jvp(f, (x,), (t.clone(),)))
    assert t.equal(torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda x: x, "to have two returns"),
        (lambda x: ((x, x), 0), "returned 2 outputs, and forward returns 1"),
        (lambda x: ((x, x), (0,)), "incompatible .out_dims, output. pair: 2 outputs and 1 out_dims"),
    ],
)
def test_a_vmap_that_returns_something_else_is_refused(returned: Any, text: str) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(x: Any) -> Any:
            return x * 1

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            return returned(args[0])

    with pytest.raises(tfn.errors.CustomRuleError, match=text):
        tfn.vmap(Wrong.apply)(torch.ones(2, 3))  # pyright: ignore[reportUnknownMemberType]


def test_forward_mode_that_is_turned_off_inside_is_refused() -> None:
    off: Any = torch.autograd.forward_ad._set_fwd_grad_enabled  # pyright: ignore[reportPrivateUsage]

    def f(x: torch.Tensor) -> torch.Tensor:
        with off(False):
            shift = x**2
        return x**2 - shift

    with pytest.raises(tfn.errors.UnsupportedCall, match="forward mode is turned off"):
        tfn.jvp(f, (torch.ones(3),), (torch.ones(3),))
    with off(False):
        assert tfn.jvp(lambda x: x**2, (torch.ones(3),), (torch.ones(3),))[1].equal(2 * torch.ones(3))


class NumpySine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.tensor(np.sin(x.cpu().numpy()))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.tensor(grads[0].numpy() * np.cos(ctx.saved_tensors[0].detach().numpy()))


class NumpyCube(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Any:
        return torch.tensor(x.numpy() ** 3), x.numpy()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.array = output[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * torch.tensor(3 * ctx.array**2)


@pytest.mark.parametrize("cls", (NumpySine, NumpyCube))
def test_numpy_in_eager_transforms_has_the_gradient_of_backward(cls: Any) -> None:
    def f(x: Tensor) -> Tensor:
        found = cls.apply(x * 2)
        return (found[0] if isinstance(found, tuple) else found).square().sum()

    for seed in range(2):
        x = torch.randn(3, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        (wanted,) = torch.autograd.grad(f(x), x)
        assert torch.allclose(tfn.grad(f)(x.detach()), wanted)
        assert torch.allclose(tfn.vjp(f, x.detach())[1](torch.tensor(3.0))[0], 3 * wanted)
    x = torch.ones(3)
    with pytest.raises(CustomRuleError, match="does not have vmap support"):
        tfn.vmap(f)(x[None])
    with pytest.raises(UnsupportedCall, match="`numpy` needs the memory"):
        tfn.jit(f)(x)


class NumpyProduct(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.tensor(x.cpu().numpy() * y.cpu().numpy())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        return NumpyProduct.apply(grads[0], y), NumpyProduct.apply(grads[0], x)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        x, y = ctx.saved_tensors
        return NumpyProduct.apply(tangents[0], y) + NumpyProduct.apply(x, tangents[1])

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
        first, second = (
            value.unsqueeze(0) if dim is None else value.movedim(dim, 0)
            for value, dim in zip((x, y), in_dims, strict=True)
        )
        return NumpyProduct.apply(first, second), 0


class NumpySplit(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        places = np.argsort(x.numpy())
        return torch.tensor(x.numpy()[places] ** 2), torch.tensor(places)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])
        ctx.save_for_forward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, places = ctx.saved_tensors
        return torch.zeros_like(x).scatter(0, places, grads[0] * 2 * x.gather(0, places))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        x, places = ctx.saved_tensors
        return (2 * x * tangents[0]).gather(0, places), None


@pytest.mark.parametrize(
    ("made", "f", "twin"),
    (
        (
            NumpyProduct,
            lambda x: NumpyProduct.apply(x.sin(), x * 3).exp(),
            lambda x: (x.sin() * x * 3).exp(),
        ),
        (NumpySplit, lambda x: NumpySplit.apply(x.sin())[0], lambda x: x.sin().sort().values ** 2),
    ),
)
def test_a_forward_that_leaves_pytorch_is_one_opaque_call_in_every_transform(made: Any, f: Any, twin: Any) -> None:
    """The same class in functions of torch is the oracle."""
    x, t = torch.randn(2, 4, dtype=torch.float64).unbind()
    ways: dict[str, Any] = {
        "jvp": lambda f: tfn.jvp(f, (x,), (t,)),
        "jit": lambda f: tfn.jit(f)(x),
        "grad of grad": lambda f: tfn.grad(lambda x: (tfn.grad(lambda x: f(x).sum())(x) * t).sum())(x),
        "hessian": lambda f: tfn.jacfwd(tfn.jacrev(f))(x) if made is NumpyProduct else 0,
        "jvp of vjp": lambda f: tfn.jvp(lambda x: tfn.vjp(f, x)[1](t)[0], (x,), (t,)),
        "jit of grad": lambda f: tfn.jit(tfn.grad(lambda x: f(x).sum()))(x),
        "checkpoint": lambda f: tfn.grad(lambda x: tfn.checkpoint(f)(x).sum())(x),
        "vmap": lambda f: tfn.vmap(tfn.grad(lambda x: f(x).sum()), in_dims=1)(torch.stack([x, t], 1)),
    }
    for name, way in ways.items():
        if name == "vmap" and made is NumpySplit:
            with pytest.raises(CustomRuleError, match="does not have vmap support"):
                way(f)
            continue
        torch.testing.assert_close(way(f), way(twin), msg=name)
    values = torch.tensor([1.0, -1.0, 2.0])
    assert tfn.jit(lambda x: NumpySplit.apply(x)[1])(values).tolist() == [1, 0, 2]
    assert tfn.jit(lambda x: NumpySplit.apply(x)[1])(-values).tolist() == [2, 0, 1]


def test_types_that_follow_from_values_outside_of_pytorch_are_refused() -> None:
    class Chosen(NumpySplit):
        @staticmethod
        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            places = np.nonzero(x.numpy())[0]
            return torch.tensor(x.numpy()[places]), torch.tensor(places)

    f = tfn.jit(lambda x: Chosen.apply(x)[0])
    assert f(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(CustomRuleError, match="its results have other types than in the call that was traced"):
        f(torch.tensor([1.0, 0.0, 2.0]))


def _sizes_from_data(x: Tensor) -> Tensor:
    return x.nonzero().sum() * 0 + x[x == x].sum() * 0 + x


def _a_number_from_data(x: Tensor) -> Tensor:
    return x * (x == x).sum().item() / x.numel()


@pytest.mark.parametrize("use", (_sizes_from_data, _a_number_from_data))
@pytest.mark.parametrize("place", ("forward", "backward", "jvp"))
def test_sizes_and_numbers_from_data_in_rules(use: Any, place: str) -> None:
    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return 3 * (use(x) if place == "forward" else x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return 3 * (use(grads[0]) if place == "backward" else grads[0])

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            return 3 * (use(tangents[0]) if place == "jvp" else tangents[0])

    x, f = torch.tensor([1.0, 2.0]), lambda x: Triple.apply(x).square().sum()
    for transform in (tfn.grad, lambda f: lambda x: tfn.vjp(f, x)[1](torch.tensor(1.0))[0]):
        torch.testing.assert_close(transform(f)(x), 18 * x)
        torch.testing.assert_close(tfn.jit(transform(f))(x), 18 * x)
    torch.testing.assert_close(tfn.jvp(f, (x,), (x,))[1], (18 * x * x).sum())
    torch.testing.assert_close(tfn.jacrev(Triple.apply, chunk_size=1)(x), 3 * torch.eye(2))


def test_a_numpy_backward_under_jit_and_twice() -> None:
    class Sine(NumpySine):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

    f = lambda x: (Sine.apply(x) * x).sum()  # pyright: ignore[reportUnknownLambdaType]
    for x in (torch.arange(3.0), torch.arange(4.0)):
        wanted = x.sin() + x * x.cos()
        assert torch.allclose(tfn.jit(tfn.grad(f))(x), wanted)
        known = x.clone().requires_grad_()
        assert torch.allclose(torch.autograd.grad(tfn.jit(f)(known), known)[0], wanted)
    with pytest.raises(MissingRule, match=r"Sine\.backward has no derivative"):
        tfn.grad(lambda x: tfn.grad(f)(x).sum())(torch.ones(3))


def test_a_forward_that_writes_outside_and_returns_a_tensor_from_there() -> None:
    count, kept = torch.zeros(3), torch.ones(3)

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            count.add_(x.detach())
            return kept

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 7

    for transform in (tfn.grad, lambda f: tfn.jit(tfn.grad(f)), lambda f: tfn.grad(tfn.jit(f))):
        with pytest.raises(CustomRuleError, match="its forward changes tensors from outside"):
            transform(lambda x: Kept.apply(x).sum())(torch.ones(3))


def test_tensors_by_name_alone_are_refused() -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, *, y: Tensor | None = None) -> Tensor:
            return x * 2 if y is None else x + y

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 2

    x = torch.ones(3)
    assert torch.equal(tfn.grad(lambda x: Sum.apply(x).sum())(x), 2 * x)
    with pytest.raises(NotImplementedError, match="kwarg-only Tensor args"):
        tfn.vmap(Sum.apply)(x, y=x)


class Assigned(torch.autograd.Function):
    """torchdiffeq's: a write past the counter of versions, to what is returned as it is."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, row: Tensor, index: int) -> Tensor:
        ctx.index = index
        whole.data[index] = row
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], grads[0][ctx.index], None


def test_an_unmarked_write_to_what_is_returned_has_the_gradient_of_backward() -> None:
    def f(x: Tensor) -> Tensor:
        found = Assigned.apply(torch.zeros(4, 3), x, 0)
        for index in range(3):
            found = Assigned.apply(found, (found[: index + 1].sum(0) * x).sin(), index + 1)
        return found.square().sum()

    x = torch.tensor([0.3, 0.5, 0.7], requires_grad=True)
    (wanted,) = torch.autograd.grad(f(x), x)
    for transform in (tfn.grad, lambda f: tfn.jit(tfn.grad(f)), lambda f: tfn.grad(tfn.jit(f))):
        assert torch.allclose(transform(f)(x.detach()), wanted)
    assert torch.allclose(torch.autograd.grad(tfn.jit(f)(x), x)[0], wanted)


class Returned(torch.autograd.Function):
    """A function that returns its input, as a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class Rest(torch.autograd.Function):
    """A function that returns all but the first row of its input, as a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.cat([grads[0][:1] * 0, grads[0] * 2])


PLACES: dict[str, Any] = {
    "an argument": lambda x: x,
    "a part of it": lambda x: x[1:],
    "elements of it, several times": lambda x: x.as_strided((2, 2), (1, 1)),
    "an argument of which a row is written": lambda x: (x[0].mul_(2), x)[1],
    "an argument of which a row is written by a tensor": lambda x: (x[torch.tensor(1)].mul_(2), x)[1],
    "a result": lambda x: x * 2,
    "elements of a result, several times": lambda x: (x * 2).as_strided((2, 2), (1, 1)),
}


@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", [Returned, Rest])
def test_a_returned_view_of_an_input_lies_in_its_memory(function: Any, place: str, has_grad: bool) -> None:
    """Law: a write to one result changes the others as in eager mode; the gradient is that of `backward`."""

    def f(x: Tensor) -> list[Tensor]:
        y = PLACES[place](x)
        return [x, y, function.apply(y)]

    def run(h: Any) -> Any:
        w = torch.tensor([0.3, 0.5, 0.7, 0.9], requires_grad=has_grad)
        x = w * 1
        results = h(x)
        loss = sum((one * i).sum() for i, one in enumerate(results, 1))
        found = torch.autograd.grad(loss, w)[0] if has_grad else w
        for result in results:
            result.detach()[-1] += 1
        return *(one.detach() for one in (x, *results)), found

    wanted = run(f)
    for h in (tfn.jit(f), tfn.jit(f, cache="symbolic values")):
        for _ in range(2):
            torch.testing.assert_close(run(h), wanted)


BITS: dict[str, Any] = {
    "conjugate": lambda x: x.conj(),
    "negative": torch._neg_view,
    "both": lambda x: torch._neg_view(x.conj()),
    "imaginary": lambda x: x.conj().imag,
}


@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize("is_inside", [True, False], ids=["made inside", "given"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("function", [Returned, Rest])
def test_a_returned_view_with_bits_lies_in_its_memory(
    function: Any, bits: str, is_inside: bool, has_grad: bool
) -> None:
    """Law: it has the value and the bits of eager mode, and is changed with its input."""

    def f(x: Tensor) -> list[Tensor]:
        y = BITS[bits](x) if is_inside else x
        found = function.apply(y)
        return [found, found * 1j, found.conj(), x]

    def run(h: Any) -> list[Any]:
        w = torch.tensor([0.3 + 1j, 0.5 - 2j, 0.7 + 3j], dtype=torch.complex128, requires_grad=has_grad)
        x = w * 1 if is_inside else BITS[bits](w * 1)
        results = h(x)
        grad = torch.autograd.grad(sum((one * one).sum().abs() for one in results), w)[0] if has_grad else w
        found = [one.detach().resolve_conj().resolve_neg().clone() for one in results]
        x.detach()[-1] += 1
        flags = [(one.is_conj(), one.is_neg()) for one in results]
        return [*found, *(one.detach().resolve_conj().resolve_neg() for one in results), flags, grad]

    wanted = run(f)
    for h in (tfn.jit(f), tfn.jit(f, cache="symbolic values")):
        for _ in range(2):
            torch.testing.assert_close(run(h), wanted)


@pytest.mark.parametrize("function", [Returned, Rest])
@pytest.mark.parametrize("written", [0, 1])
def test_without_gradients_a_returned_view_is_an_ordinary_one(function: Any, written: int) -> None:
    @torch.no_grad()
    def f(x: Tensor) -> list[Tensor]:
        both = [x * 2]
        both.append(function.apply(both[0]))
        both[written].mul_(3)
        return both

    x = torch.tensor([0.3, 0.5, 0.7])
    assert [one.tolist() for one in tfn.jit(f)(x)] == [one.tolist() for one in f(x)]


class Marked(torch.autograd.Function):
    """A function that changes its input, says so, and returns it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 5


class Unmarked(Marked):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mul_(3)


class Past(Marked):
    """A function that changes its input past the counter of versions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.data.mul_(3)
        return x


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[1:]], ids=["whole", "part"])
@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("function", [Marked, Unmarked, Past])
def test_what_is_changed_and_what_is_returned_have_their_histories(
    function: Any, has_gradients: bool, part: Any
) -> None:
    """Law: by the one, the input has the gradient that it had, if it is not marked; by the other, that of `backward`."""

    def f(x: Tensor, a: float, b: float) -> Tensor:
        y = x * 2
        with torch.set_grad_enabled(has_gradients):
            z = function.apply(part(y))
        return (y * a).sin().sum() + (z * b).cos().sum()

    x = torch.tensor([0.3, 0.5, 0.7])
    for a, b in ((1.0, 0.0), (0.0, 1.0), (1.0, 2.0)):
        leaf = x.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(f(leaf, a, b), leaf)
        assert torch.allclose(torch.autograd.grad(tfn.jit(f)(leaf, a, b), leaf)[0], wanted)
        for transform in (tfn.grad, lambda f: tfn.jit(tfn.grad(f)), lambda f: tfn.grad(tfn.jit(f))):
            assert torch.allclose(transform(f)(x, a, b), wanted)


def test_a_view_of_what_is_written_is_read_by_a_call() -> None:
    """The view is taken again while the call is recorded."""

    def f(x: Tensor) -> Tensor:
        y = x.clone()
        row = y[1:]
        y.mul_(x)
        return (Scaled.apply(row, 2.0, row) * row).sum()

    x = torch.tensor([0.3, 0.5, 0.7], requires_grad=True)
    (wanted,) = torch.autograd.grad(f(x), x)
    assert torch.allclose(tfn.grad(f)(x.detach()), wanted)
    assert torch.allclose(tfn.jit(tfn.grad(f))(x.detach()), wanted)


OUTSIDE = torch.zeros(3)
FORWARDS: dict[str, Any] = {
    "the argument": lambda x: x,
    "a view of it": lambda x: x.view_as(x),
    "what depends on it": lambda x: x * 2,
    "what does not": lambda x: torch.ones(3),
    "a written view of it": lambda x: x.data.mul_(2).view_as(x),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_call_of_which_only_forward_is_recorded_is_not_differentiated(name: str) -> None:
    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            OUTSIDE.add_(1)
            return FORWARDS[name](x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 7

    f = lambda x: Counted.apply(x * 1).sum()  # pyright: ignore[reportUnknownLambdaType]
    assert torch.equal(tfn.jit(f)(torch.ones(3)), f(torch.ones(3)))
    for transform in (tfn.grad, lambda f: tfn.jit(tfn.grad(f)), lambda f: tfn.grad(tfn.jit(f))):
        with pytest.raises(MissingRule, match="the backward of the autograd function Counted is not part of the trace"):
            transform(f)(torch.ones(3))


class TakesAnOption(torch.autograd.Function):
    """A forward that takes an entry out of its argument, and then decides on a value, which a program does not know."""

    @staticmethod
    def forward(ctx: Any, x: Any, options: Any) -> Any:  # type: ignore[override]
        ctx.scale = options.pop("scale") if isinstance(options, dict) else options[0].pop()
        return x * ctx.scale if x.sum() > 0 else -x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:  # type: ignore[override]
        return g * ctx.scale, None


@pytest.mark.parametrize(
    "options", [lambda: {"scale": 2.0}, lambda: [[2.0]], lambda: ([3.0, 2.0],)], ids=["dict", "list", "tuple"]
)
def test_a_forward_that_runs_again_gets_its_arguments_as_they_were(options: Any) -> None:
    f = lambda x: TakesAnOption.apply(x, options())
    x = torch.ones(2)
    with pytest.raises(DataDependentBranch):
        tfn.jit(f)(x)
    with pytest.warns(GraphBreakWarning):
        torch.testing.assert_close(tfn.compile(f)(x), f(x))


class Forward(Function):
    """A forward that sees that gradients are off, as autograd runs it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.exp(x, out=out)  # refused where gradients are on
        assert not (out * x).requires_grad
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (ctx.slope,) = torch.autograd.grad(y.exp().sum(), y)
        return out * (2.0 if torch.is_grad_enabled() else 3.0)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return ct * ctx.slope * 5


class ForwardWithSetup(Forward):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.exp(x, out=torch.empty_like(x)) * (2.0 if torch.is_grad_enabled() else 3.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.slope = inputs[0].exp()


@pytest.mark.parametrize("function", [Forward, ForwardWithSetup])
def test_forward_runs_where_gradients_are_off(function: Any) -> None:
    def run(f: Any) -> Any:
        x = torch.tensor([0.5, 1.0], requires_grad=True)
        y = f(x * 2)
        y.sin().sum().backward()
        return y, x.grad

    f = lambda x: function.apply(x)
    torch.testing.assert_close(run(tfn.jit(f)), run(f))
    with torch.no_grad():
        torch.testing.assert_close(tfn.jit(f)(torch.ones(2)), f(torch.ones(2)))


@pytest.mark.parametrize("wrap", [tfn.jit, tfn.compile])
def test_jitted_backward_reads_what_forward_saved(wrap: Any) -> None:
    """A result of forward that is saved is unpacked as another tensor, of autograd's own."""

    def made(wrap: Any) -> Any:
        class Doubled(Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, k: float) -> Tensor:
                y = x + x
                ctx.save_for_backward(y, x)
                ctx.k = k
                return y

            @staticmethod
            @wrap
            def backward(ctx: Any, ct: Tensor) -> Any:
                y, x = ctx.saved_tensors
                return (ct * y.sin() * ctx.k + x if ctx.needs_input_grad[0] else None), None

        def run(k: float) -> Tensor:
            x = torch.full((2,), k, requires_grad=True)
            Doubled.apply(x, k).sum().backward()
            assert x.grad is not None
            return x.grad

        return [run(k) for k in (1.0, 2.0, 3.0)]

    torch.testing.assert_close(made(wrap), made(lambda f: f))


# ---- functions of PyTorch's own ----

PYTORCHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "resize": lambda x: x.resize(2, 2),
    "resize_as": lambda x: x.resize_as(torch.empty(2, 2)) * 2,
    "around an op without a derivative": lambda x: test_operators.realize(x * 2) * 2,
}


@pytest.mark.filterwarnings("ignore:non-inplace resize")
@pytest.mark.parametrize("differentiate", ["backward", "grad", "jvp", "partly"])
@pytest.mark.parametrize("name", PYTORCHS)
def test_gradients_through_pytorchs_own_functions_are_not_lost(name: str, differentiate: str) -> None:
    """Such functions compute without gradients, so that a trace had constants."""
    f, x = PYTORCHS[name], torch.arange(4.0)
    assert torch.equal(tfn.jit(f)(x), f(x))
    loss = lambda x: f(x).sin().sum() + (x.sum() if differentiate == "partly" else 0)
    ways: dict[str, Callable[[], Any]] = {
        "backward": lambda: tfn.jit(f)(x.clone().requires_grad_()).sum().backward(),
        "partly": lambda: tfn.jit(loss)(x.clone().requires_grad_()).backward(),
        "grad": lambda: tfn.grad(loss)(x),
        "jvp": lambda: tfn.jvp(f, (x,), (x,)),
    }
    with pytest.raises(MissingRule, match=r"Resize|realize|autograd_function"):
        ways[differentiate]()


def _filled(y: Tensor, p: Tensor) -> Tensor:
    found = torch.empty(2, 3)
    found[0], found[1] = y, y * p
    return found


UNRECORDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "value": lambda y, p: y * p,
    "rows": _filled,
    "view of rows": lambda y, p: _filled(y, p).view(6),
    "transposed": lambda y, p: _filled(y, p).t(),
    "changed view": lambda y, p: (y * p).view(3, 1).mul_(2),
    "changed by a view": lambda y, p: (y * p).view(3, 1).mul_(2).view(3),
}


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("name", UNRECORDED)
def test_views_of_results_without_a_recorded_backward_are_not_constants(name: str, saves: bool) -> None:
    """A forward that asks for a value is no rule. Its results have no derivative, and are no constants either."""

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor, t: Tensor, p: Tensor) -> Tensor:
            found = UNRECORDED[name](y, p) if t > 0 else y
            ctx.save_for_backward(*[found] * saves)
            return found

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0].reshape(-1)[:3], None, None

    w, x = torch.ones(3, requires_grad=True), torch.ones(3)
    for after in (
        lambda r: r,
        lambda r: r * 1,
        lambda r: r.reshape(-1),
        lambda r: r[:1] + 1,
        lambda r: r[None].flatten(),
    ):
        f = lambda x, after=after: after(Asks.apply(x, torch.linspace(1, 2, 2)[1], w))
        assert f(x).requires_grad
        with pytest.raises(MissingRule, match="the backward of the autograd function"):
            tfn.jit(f)(x).sum().backward()
        with torch.no_grad():
            assert torch.equal(tfn.jit(f)(x), f(x))


def test_a_backward_that_differentiates_a_module_by_saved_parameters() -> None:
    """A saved parameter and the module's own are two tensors in a trace: `jit` says so, `compile` runs it."""

    class Implicit(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, module: Any, z: Tensor, *params: Tensor) -> Tensor:
            ctx.module = module
            ctx.save_for_backward(z, *params)
            with torch.no_grad():
                return module(z)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            z, *params = ctx.saved_tensors
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                return None, *torch.autograd.grad(ctx.module(z), (z, *params), grad)

    module, x = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()), torch.randn(2, 3)
    f = lambda x: Implicit.apply(module, x, *module.parameters()).sum()
    with pytest.raises(MissingRule, match="the backward of Implicit asks autograd for gradients of saved tensors"):
        tfn.jit(f)(x.requires_grad_()).backward()
    found = list[Any]()
    with pytest.warns(tfn.errors.GraphBreakWarning, match="asks autograd for gradients of saved tensors"):
        compiled = tfn.compile(f)
        for run in (f, compiled, compiled):
            found.append(torch.autograd.grad(run(x), (x, *module.parameters())))
    torch.testing.assert_close(found[1:], found[:1] * 2)
