"""PyTorch's own machinery inside a traced function: autograd, torch.func, autocast, custom ops, optimizers."""

from __future__ import annotations

import functools
import itertools
import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils._pytree as pytree
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import thunder_fn as tfn
from tests.messages import message_of
from tests.unit.capturing import agree, agree_made
from thunder_fn.capture import capture
from thunder_fn.errors import AliasedMutation, DataDependentShape, GraphBreakWarning, MissingRule, UnsupportedCall
from thunder_fn.ir.trace import subtraces

X = torch.arange(6.0).reshape(2, 3) / 4 + 0.5


def leaf(x: Any) -> Any:
    return x.detach().requires_grad_()


# ---- grad modes ----


def no_grad(x: Any) -> Any:
    with torch.no_grad():
        y = x.sin()
        with torch.enable_grad():
            z = y * x
    return y * z * x


def inference(x: Any) -> Any:
    with torch.inference_mode():
        y = x.sin()
    return y * x


def detached(x: Any) -> Any:
    y = x * 2
    y.detach_()
    z, w = x * 3, x * 4
    torch.ops.aten.detach_(z)
    torch.ops.aten.detach_.default(w)
    return x.detach() * x, x.data * x, y, z * x, w * x


def set_grad_enabled(x: Any) -> Any:
    with torch.set_grad_enabled(False):
        y = x * 2
    torch.set_grad_enabled(True)
    return y * x


# ---- autograd ----


def autograd_grad(x: Any) -> Any:
    y = leaf(x)
    (first,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
    return first, torch.autograd.grad(first.sum(), y)


def backward(x: Any) -> Any:
    y = leaf(x)
    (y**2).sum().backward()
    (y**3).sum().backward()
    return y.grad


def hooks(x: Any) -> Any:
    y = leaf(x)
    z = y * 2
    z.register_hook(lambda gradient: gradient * 10)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        w = z.sin()
    return torch.autograd.grad((w**2).sum(), y)


def forward_mode(x: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(x, x * 2).sin()).tangent


def autograd_functional(x: Any) -> Any:
    functional = torch.autograd.functional
    return functional.jacobian(torch.sin, x[0]), functional.hessian(lambda x: x.sin().sum(), x[0])


def parameters_inside(x: Any) -> Any:
    p, q = nn.Parameter(x * 1), nn.Parameter(torch.ones(3))
    return torch.autograd.grad((p * q).sum(), (p, q))


def checkpointed(x: Any) -> Any:
    y = leaf(x)
    z = checkpoint(lambda x: x.sin().cos(), y, use_reentrant=False)
    return z, torch.autograd.grad(z.sum(), y)


# ---- torch.func ----


def func_grad(x: Any) -> Any:
    value, pullback = torch.func.vjp(torch.sin, x)
    return torch.func.grad(lambda x: (x**3).sum())(x), value, pullback(x), torch.func.jvp(torch.sin, (x,), (x,))


def func_jacobians(x: Any) -> Any:
    return (
        torch.func.jacrev(torch.sin)(x),
        torch.func.jacfwd(torch.sin)(x),
        torch.func.hessian(lambda x: (x**3).sum())(x),
    )


def func_vmap(x: Any) -> Any:
    rows = torch.vmap(lambda row: row.sum() * row)(x)
    return (
        rows,
        torch.vmap(torch.func.grad(lambda row: (row**2).sum()))(x),
        torch.vmap(lambda a, b: a @ b, (0, None))(x, x[0]),
    )


def tfn_inside_func(x: Any) -> Any:
    cube = tfn.grad(lambda row: (row**3).sum())
    y = leaf(x)
    return (
        torch.vmap(cube)(x),
        torch.func.grad(lambda x: cube(x).sum())(x),
        torch.autograd.grad(cube(y).sum(), y),
        tfn.vjp(torch.sin, x)[1](x),
    )


def tfn_closes_over_func(x: Any) -> Any:
    return torch.vmap(lambda row: tfn.grad(lambda y: (y * row).sum() * y.sum())(torch.ones(3)))(x)


# ---- autocast ----


def autocast(x: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(x, x)
        with torch.autocast("cpu", enabled=False):
            z = F.linear(x, x)
        return y, z, x @ x.T, F.layer_norm(y, (2,))


# ---- others ----


def returns_a_partial(x: Any) -> Any:
    return functools.partial(torch.mul, torch.ones(3))(x)


def clip_gradients(x: Any) -> Any:
    p = nn.Parameter(x * 1)
    p.grad = x * 2
    return nn.utils.clip_grad_norm_([p], 1.0), p.grad


def profiled(x: Any) -> Any:
    with torch.profiler.record_function("a"):
        return x * 2


FUNCTIONS = (
    *(
        no_grad,
        inference,
        detached,
        set_grad_enabled,
        autograd_grad,
        backward,
        hooks,
        forward_mode,
        autograd_functional,
    ),
    *(parameters_inside, checkpointed, func_grad, func_jacobians, func_vmap, tfn_inside_func, tfn_closes_over_func),
    *(autocast, returns_a_partial, clip_gradients, profiled),
)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_inside(f: Any) -> None:
    agree(f, X)


def test_autocast_around() -> None:
    linear = nn.Linear(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = capture(linear, (X,))
    assert captured.trace.output_types[0] == capture(lambda x: x.bfloat16(), (X,)).trace.output_types[0]


def test_anomaly_mode_around() -> None:
    with torch.autograd.set_detect_anomaly(True):
        agree(autograd_grad, X)
        assert torch.is_anomaly_check_nan_enabled()


def test_gradients_of_closed_over_parameters() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        linear = nn.Linear(3, 2)
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        f = lambda x: (
            torch.autograd.grad(linear(x).sum(), list(linear.parameters())),
            checkpoint_sequential(model, 2, x, use_reentrant=False),
        )
        return f, ((X.clone(),), {}), []

    agree_made(make)


def test_accumulated_gradient_is_a_write() -> None:
    def make() -> Any:
        weight = torch.ones(3).requires_grad_()
        weight.grad = torch.ones(3)
        f = lambda x: ((x * weight).sum().backward(), x)[1]
        return f, ((X.clone(),), {}), [weight.grad]

    agree_made(make)


def test_gradient_that_comes_and_goes() -> None:
    weight = torch.ones(3).requires_grad_()

    def f(x: Any) -> Any:
        weight.grad = None
        (x * weight).sum().backward()
        gradient = weight.grad * 1
        weight.grad = None
        return gradient

    agree(f, X)


@pytest.mark.parametrize("options", ({"momentum": 0.9}, {"momentum": 0.9, "foreach": True}), ids=("loop", "foreach"))
def test_optimizer_made_inside(options: dict[str, Any]) -> None:
    def f(x: Any) -> Any:
        weight = leaf(x * 2)
        optimizer = torch.optim.SGD([weight], lr=0.1, **options)
        for _ in range(2):
            optimizer.zero_grad()
            (weight * x).pow(2).sum().backward()
            optimizer.step()
        return weight.detach()

    agree(f, X)


# ---- autograd functions ----


class Scaled(torch.autograd.Function):
    """A backward that is not the derivative of the forward."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, w = ctx.saved_tensors
        return gradient * w * 3, gradient * x * 5


class Exponential(torch.autograd.Function):
    """With setup_context, so that torch.func accepts it."""

    @staticmethod
    def forward(x: Any, n: int) -> Any:
        return x.exp() * n

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 3 * ctx.saved_tensors[0], None


scaled = Scaled.apply


def test_autograd_functions() -> None:
    weight = torch.ones(3).requires_grad_()

    def f(x: Any) -> Any:
        y = leaf(x)
        return (
            scaled(x, weight),
            torch.autograd.grad(scaled(x, weight).sum(), weight),
            torch.autograd.grad(Exponential.apply(y, 2).sum(), y),
            torch.func.grad(lambda y: Exponential.apply(y, 2).sum())(x),
        )

    agree(f, X)


def test_autograd_functions_without_gradients_are_transparent() -> None:
    def f(x: Any) -> Any:
        with torch.no_grad():
            weight = scaled(x, x).sum()
        return (weight * x).sum()

    assert torch.equal(tfn.grad(f)(X), (X * X).sum().expand(2, 3))
    assert torch.equal(tfn.vmap(lambda row: scaled(row, row) * 2)(X), X * X * 2)


def test_linearize_of_pytorch() -> None:
    """Eager's `linearize` traces with `make_fx`, and warns that it does."""

    def f(x: Any) -> Any:
        value, linear = torch.func.linearize(lambda x: x.sin() + torch.rand(3), x)
        return value, linear(x)

    torch.manual_seed(0)
    value, tangent = tfn.jit(f)(X)
    torch.manual_seed(0)
    assert torch.equal(value, X.sin() + torch.rand(3))
    assert torch.allclose(tangent, X * X.cos())


# ---- custom ops ----


@torch.library.custom_op("capture_test::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    """A custom op with a derivative."""
    return x.sin()


@sine.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


sine.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("capture_test::shift", mutates_args=("x",))
def shift(x: torch.Tensor, amount: float) -> None:
    """A custom op that changes its argument."""
    x.add_(amount)


def to_an_argument(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    ctx.x.detach().zero_()
    return gradient * 2


def to_a_result(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    ctx.y.data.add_(gradient)
    return gradient * 2


def to_its_own(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return ctx.x.clone().mul_(2).mul_(gradient)


def keep_all(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.x, ctx.y = *inputs, output


WRITING: dict[Any, Any] = {}
for _f in (to_an_argument, to_a_result, to_its_own):
    _op = torch.library.custom_op(
        f"capture_test::{_f.__name__}", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    _op.register_fake(torch.empty_like)
    _op.register_autograd(_f, setup_context=keep_all)
    WRITING[_f] = _op


@pytest.mark.parametrize("backward", WRITING, ids=lambda f: f.__name__)
def test_backward_of_a_custom_op_that_writes(backward: Any) -> None:
    """A write to a tensor that the backward did not make was lost."""

    def run(f: Any) -> Any:
        x = X.clone().requires_grad_()
        y = x * 1
        z = f(y)
        z.sin().sum().backward()
        return x.grad, y, z

    f = lambda y: WRITING[backward](y).view_as(y)
    if backward is to_its_own:
        torch.testing.assert_close(run(tfn.jit(f)), run(f))
        return
    with pytest.raises(MissingRule, match="writes in place to a tensor that it did not make"):
        run(tfn.jit(f))
    with pytest.warns(GraphBreakWarning):
        torch.testing.assert_close(run(tfn.compile(f)), run(f))


def test_custom_op_is_a_leaf() -> None:
    trace = agree(lambda x: (sine(x), torch.autograd.grad(sine(y := leaf(x)).sum(), y)), X)
    names = [equation.op.name for each in subtraces(trace) for equation in each.equations]
    assert "capture_test.sine.default" in names
    assert torch.equal(tfn.grad(lambda x: sine(x).sum())(X), X.cos())
    assert torch.allclose(tfn.jvp(sine, (X,), (X,))[1], X * X.cos())


@torch.library.custom_op("capture_test::spread", mutates_args=("outs", "rest"))
def spread(
    x: torch.Tensor, outs: list[torch.Tensor], rest: torch.Tensor | None = None, by: float = 2.0
) -> torch.Tensor:
    """A custom op that changes a list and an optional argument, and returns something new."""
    for out in outs:
        out.add_(x * by)
    if rest is not None:
        rest.sub_(x)
    return x * 3


@spread.register_fake
def _(x: torch.Tensor, outs: list[torch.Tensor], rest: Any = None, by: float = 2.0) -> torch.Tensor:
    return torch.empty_like(x)


LIBRARY = torch.library.Library("capture_test", "FRAGMENT")
LIBRARY.define("scale_(Tensor(a!) self, float by) -> Tensor(a!)")
LIBRARY.impl("scale_", lambda x, by: x.mul_(by), "CompositeExplicitAutograd")
LIBRARY.define("double.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
LIBRARY.impl("double.out", lambda x, out: out.copy_(x * 2), "CompositeExplicitAutograd")


LIBRARY.define("thrice(Tensor x) -> Tensor")
LIBRARY.impl("thrice", lambda x: x * 3, "CPU")
LIBRARY.impl("thrice", torch.empty_like, "Meta")
LIBRARY.define("thrice_for_all(Tensor x) -> Tensor")
LIBRARY.impl("thrice_for_all", lambda x: x * 3, "CompositeExplicitAutograd")
LIBRARY.define("mean(Tensor x) -> Tensor")
LIBRARY.impl("mean", lambda x: x.mean(0), "CompositeExplicitAutograd")
LIBRARY.impl("mean", torch.library.fallthrough_kernel, "Autograd")


@pytest.mark.parametrize("name", ["thrice", "thrice_for_all"])
@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f: tfn.grad(lambda x: f(x).sum())(X),
        lambda f: tfn.jvp(f, (X,), (X,)),
        lambda f: tfn.jit(f)(X.clone().requires_grad_()),
        lambda f: tfn.jit(tfn.hessian(lambda x: f(x).sum()))(X),
        lambda f: tfn.linearize(f, X)[1](X),
    ],
    ids=["grad", "jvp", "autograd", "hessian", "linearize"],
)
def test_custom_ops_without_a_registered_derivative_have_no_zero_one(name: str, differentiate: Any) -> None:
    op = getattr(torch.ops.capture_test, name)
    assert torch.equal(tfn.jit(lambda x: op(x) + x)(X), X * 4)
    assert torch.equal(tfn.grad(lambda x: (x * op(x.detach())).sum())(X), X * 3)
    with pytest.raises(MissingRule, match=r"no derivative|forward derivative"):
        differentiate(lambda x: op(x) + x.sin())


def _define_anew(factor: int) -> Any:
    """A custom op, as by a notebook's cell that runs once more. Some have another schema than before."""

    def write(x: torch.Tensor, ys: list[torch.Tensor]) -> None:
        for one in (x, *ys):
            one.mul_(factor)

    def write_more(x: torch.Tensor, ys: list[torch.Tensor], by: int = 1) -> None:
        for one in (x, *ys):
            one.mul_(factor + by)

    writing = write if factor < 4 else write_more
    return torch.library.custom_op("capture_test::anew_", writing, mutates_args=("x", "ys"))


def test_custom_ops_that_mutate_may_be_defined_anew() -> None:
    def f(x: Any, y: Any) -> Any:
        z = x * 2
        torch.ops.capture_test.anew_(z, [y])
        return z

    jitted = tfn.jit(f)
    for factor in (2, 3, 4, 5):
        kept = _define_anew(factor)
        ours, eagers = X.clone(), X.clone()
        assert torch.equal(jitted(X, ours), f(X, eagers)), kept
        assert torch.equal(ours, eagers)


def _mutating(results: int) -> Any:
    def write(x: torch.Tensor) -> Any:
        x.mul_(results + 2)
        return (None, x + 1, (x + 1, x.sum()))[results]

    kinds = (None, torch.Tensor, tuple[torch.Tensor, torch.Tensor])
    write.__annotations__ = {"x": torch.Tensor, "return": kinds[results]}
    return torch.library.custom_op("capture_test::anew_results_", write, mutates_args=("x",))


def test_custom_ops_that_mutate_may_be_defined_anew_with_other_results() -> None:
    def f(x: Any) -> Any:
        y = x + 1
        return y, torch.ops.capture_test.anew_results_(y)

    jitted = tfn.jit(f)
    for results in (0, 1, 2, 0, 2, 1):
        kept = _mutating(results)
        kept.register_fake(lambda x, results=results: (None, x + 1, (x + 1, x.sum()))[results])
        for g in (jitted, tfn.jit(f), tfn.jit(lambda x: f(x))):
            torch.testing.assert_close(g(X), f(X))


DEFINED_ANEW = """
import torch

import thunder_fn as tfn
from thunder_fn.errors import InvalidTrace
from thunder_fn.executors.torch_executor import lower

X = torch.ones(3, 4)


def one(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def same(x: torch.Tensor) -> torch.Tensor:
    return x * 8


def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 3, x.sum()


def several(x: torch.Tensor) -> list[torch.Tensor]:
    return [x * 4, x * 5, x * 6]


def scaled(x: torch.Tensor, by: float = 7.0) -> torch.Tensor:
    return x * by


def other(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    x.mul_(100)


def define(f):
    torch.library.custom_op("anew::r", f, mutates_args=()).register_fake(f)


def f(x):
    return torch.ops.anew.r(x)


def outcome(run):
    try:
        return run(X)
    except InvalidTrace as error:
        assert "anew.r.default" in str(error), error


def hold():
    "Programs of a trace with the op that is defined now."
    trace = tfn.trace(f, X)
    run = lower(trace).run
    run(X)
    return lambda x: run(x)[0], lambda x: tfn.evaluate(trace, (x,))[0]


define(one)
jitted = tfn.jit(f)
jitted(X)
for number, body in enumerate((same, two, several, scaled, one)):
    held = hold()
    torch._library.custom_ops.OPDEF_TO_LIB.pop("anew::r")._destroy()
    # this operator gets the memory of the one that is freed
    torch.library.custom_op(f"anew::other{number}", other, mutates_args=("x",))
    define(body)
    called, evaluated = map(outcome, held)
    if body is same:
        torch.testing.assert_close((called, evaluated), (f(X), f(X)))
    else:
        assert called is None
    for g in (jitted, tfn.jit(f), tfn.jit(lambda x: f(x))):
        torch.testing.assert_close(g(X), f(X))
    torch.testing.assert_close(tfn.jit(tfn.vmap(f))(X), torch.func.vmap(body)(X))
"""


def test_no_program_calls_an_operator_that_pytorch_has_freed() -> None:
    """In a process of its own, which a call of freed memory may end."""
    command = [sys.executable, "-W", "ignore", "-c", DEFINED_ANEW]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@torch.library.custom_op("capture_test::strided", mutates_args=())
def strided(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided((1,), (int(x.sum()),)).zero_()


@strided.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided((1,), (torch.library.get_ctx().new_dynamic_size(),))


def test_a_number_that_is_in_a_stride_only_is_refused_where_it_is_used() -> None:
    assert torch.equal(tfn.jit(lambda x: strided(x) + x)(X), X)
    for f in (lambda x: x * strided(x).stride(0), lambda x: strided(x).stride(0)):
        with pytest.raises(DataDependentShape, match="u0 depends on the values in a tensor and is only in a stride"):
            tfn.jit(f)(X)


SCHEMAS = ("Tensor x, Tensor(a!) out", "Tensor x, Tensor(a!)[] out", "Tensor x, Tensor(a!)? out")


@pytest.mark.parametrize("schemas", tuple(itertools.permutations(SCHEMAS)))
def test_an_op_that_writes_has_no_derivative_after_it_is_defined_anew(schemas: tuple[str, ...]) -> None:
    """The tensors of the latest schema count: the gradient was that of a function that writes nothing."""

    def f(x: Any, out: Any) -> None:
        torch.ops.capture_test.anew_out(x, out)

    for schema in (*schemas, schemas[0]):
        with torch.library._scoped_library("capture_test", "FRAGMENT") as library:
            library.define(f"anew_out({schema}) -> ()")
            library.impl("anew_out", lambda x, out: [one.copy_(x) for one in pytree.tree_leaves(out)] and None, "CPU")
            out = [X.clone()] if "[]" in schema else X.clone()
            with pytest.raises(MissingRule, match=r"capture_test\.anew_out\.default writes to its arguments"):
                tfn.jit(f)(X.clone().requires_grad_(), out)


def test_custom_ops_that_say_that_they_have_no_derivative() -> None:
    gradient = tfn.grad(lambda x: (x * torch.ops.capture_test.mean(x)).sum())(X)
    assert torch.equal(gradient, X.mean(0).expand_as(X))


def spreading(x: Any, a: Any, b: Any) -> Any:
    """Views, lists, optional and keyword arguments are changed; results alias arguments."""
    y = spread(x, [a, b[0]], rest=b[1], by=3.0) + spread(x, [a])
    z = torch.ops.capture_test.scale_(b[:, 1:], 5.0)
    e = torch.empty(3)
    torch.ops.capture_test.double.out(x, out=e)
    shift(e, 1.0)
    return y, z + 1, e


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="before PyTorch 2.13, eager raises IndexError for a changed argument that is left out",
)
def test_custom_ops_that_mutate() -> None:
    trace = agree(lambda x: spreading(x[0].clone(), x[1].clone(), x.clone()), X)
    assert pickle.loads(pickle.dumps(trace)) == trace
    ours, eagers = ([torch.ones(3), torch.ones(3), torch.ones(2, 3)] for _ in range(2))
    assert all(map(torch.equal, tfn.jit(spreading)(*ours), spreading(*eagers)))
    assert all(map(torch.equal, ours, eagers))


def test_custom_ops_that_mutate_have_no_derivative() -> None:
    with pytest.raises(MissingRule) as info:
        tfn.grad(lambda x: (shift(y := x.clone(), 2.0) or y).sum())(X)
    assert message_of(info.value).startswith(
        "capture_test.shift.default writes to its arguments, and PyTorch has no derivative for such custom ops"
    )


# ---- hooks on gradients that are computed after the function ----

SEEN: list[float] = []


def used_before(x: Any) -> Any:
    """Hooks get the gradient of all uses, in the order in which they are registered; one is removed."""
    y = x * 2
    z = y.sin()
    y.register_hook(lambda gradient: gradient * 10)
    y.register_hook(lambda gradient: gradient + 1)
    y.register_hook(lambda gradient: gradient * 0).remove()
    return (y * z).sum()


def of_an_argument(x: Any) -> Any:
    y = x.view_as(x)
    y.register_hook(lambda gradient: gradient.clamp(max=3))
    return (y * x.cos()).sum()


def closing_over_a_tracer(x: Any) -> Any:
    y, mask = x * 2, (x > 0.6).float()
    y.register_hook(lambda gradient: gradient * mask)
    return (y * y).sum()


def by_a_method(x: Any) -> Any:
    class Scaled:
        by = 2.0

        def hook(self, gradient: Any) -> Any:
            return gradient * self.by

    y = x * 2
    y.register_hook(Scaled().hook)
    return (y * y).sum()


def deciding_by_values(x: Any) -> Any:
    """A hook as pyro's `warn_if_nan`."""
    y = x * 2
    y.register_hook(lambda gradient: gradient * 2 if bool(gradient.detach().sum() > 0) else None)
    y.register_hook(lambda gradient: SEEN.append(float(gradient.detach().sum())))
    return (y * y).sum()


HOOKED = (used_before, of_an_argument, closing_over_a_tracer, by_a_method, deciding_by_values)


@pytest.mark.parametrize("f", HOOKED, ids=lambda f: f.__name__)
def test_hooks_on_gradients_that_come_later(f: Any) -> None:
    def outer(f: Any) -> Any:
        x = (X * 1).requires_grad_()
        return torch.autograd.grad(f(x * 1), x)

    SEEN.clear()
    expected, jitted = outer(f), tfn.jit(f)
    count = len(SEEN)
    torch.testing.assert_close([outer(jitted), outer(jitted)], [expected] * 2)
    assert len(SEEN) == 3 * count
    torch.testing.assert_close(tfn.grad(f)(X), torch.func.grad(f)(X))
    torch.testing.assert_close(tfn.jit(tfn.grad(f))(X), expected[0])
    torch.testing.assert_close(tfn.grad(lambda x: tfn.checkpoint(f)(x))(X), expected[0])
    if f in (used_before, closing_over_a_tracer):
        torch.testing.assert_close(tfn.vmap(tfn.grad(f))(X), torch.vmap(torch.func.grad(f))(X))
        expected = torch.func.jacrev(torch.func.jacrev(f))(X[0])
        for second in (tfn.hessian(f), tfn.jacrev(tfn.jacrev(f))):
            torch.testing.assert_close(second(X[0]), expected)


def test_hooks_of_a_scan_run_in_each_step() -> None:
    def step(c: Any, x: Any) -> Any:
        y = c * x
        y.register_hook(lambda gradient: gradient * 0.5)
        return y.sin(), y

    def loop(x: Any) -> Any:
        c = x
        for i in range(3):
            c, _ = step(c, X[0, i])
        return c

    expected = torch.func.grad(loop)(X[0, 1])
    torch.testing.assert_close(tfn.grad(lambda x: tfn.scan(step, x, X[0])[0])(X[0, 1]), expected)


def test_hooks_that_would_stay_and_those_that_read_later_tensors_are_refused() -> None:
    def stays(x: Any) -> Any:
        x.register_hook(lambda gradient: gradient * 10)
        return (x * x).sum()

    def reads(x: Any) -> Any:
        y = x * 2
        z = y * y
        y.register_hook(lambda gradient: gradient * z)
        return z.sum()

    torch.testing.assert_close(tfn.grad(stays)(X), torch.func.grad(stays)(X))
    with pytest.raises(UnsupportedCall, match="from outside the traced function, where the hook would stay"):
        tfn.jit(stays)(X.clone().requires_grad_())
    with pytest.raises(UnsupportedCall, match="reads another one that is computed after the first use"):
        tfn.grad(reads)(X)
    with pytest.raises(RuntimeError, match="cannot register a hook on a tensor that doesn't require grad"):
        tfn.jit(stays)(X)


def accumulating(x: Any) -> Any:
    x.register_post_accumulate_grad_hook(lambda x: SEEN.append(float(x.grad.sum())))
    return (x * x).sum()


def before_a_node(x: Any) -> Any:
    y = x.sin()
    y.grad_fn.register_prehook(lambda given: (given[0] * 5,))
    return y.sum()


def after_a_node(x: Any) -> Any:
    y = x.sin()
    y.grad_fn.register_hook(lambda found, given: (found[0] * 5,))
    return y.sum()


@pytest.mark.parametrize("f", [accumulating, before_a_node, after_a_node], ids=lambda f: f.__name__)
def test_other_hooks_that_a_later_backward_would_not_run_are_refused(f: Any) -> None:
    def gradient(f: Any) -> Any:
        SEEN.clear()
        x = X.clone().requires_grad_()
        f(x).backward()
        return x.grad, *map(torch.tensor, SEEN)

    with pytest.raises(UnsupportedCall, match=r"hook would stay|would not run it"):
        gradient(tfn.jit(f))
    with pytest.warns(GraphBreakWarning):
        torch.testing.assert_close(gradient(tfn.compile(f)), gradient(f))


def note(*args: Any) -> None:
    SEEN.append(float(len(args)))


def made(x: Any) -> Any:
    return (x * 2).detach().requires_grad_()


HOOKING: dict[str, Any] = {
    "accumulated": lambda y: (y.register_post_accumulate_grad_hook(note), y * 3)[1],
    "leaf": lambda y: (y.register_hook(note), y * 3)[1],
    "inner": lambda y: ((z := y * 3).register_hook(note), z * 1)[1],
    "result": lambda y: ((z := y * 3).register_hook(note), z)[1],
    "many": lambda y: (torch.autograd.graph.register_multi_grad_hook([y], note), y * 3)[1],
}


@pytest.mark.parametrize("beside", [0, 1])
@pytest.mark.parametrize("hooking", HOOKING)
def test_hooks_of_what_the_function_makes_require_grad_are_refused(hooking: str, beside: int) -> None:
    """They were lost where the backward runs outside. A backward inside runs them."""
    f = lambda x: (HOOKING[hooking](made(x)) + beside * x).sum()
    inside = lambda x: (HOOKING[hooking](y := made(x)).sum().backward(), y.grad + x)[1].sum()
    removed = lambda x: ((y := made(x)).register_hook(note).remove(), (y * 3 + x).sum())[1]

    def gradient(f: Any) -> Any:
        SEEN.clear()
        x = X.clone().requires_grad_()
        f(x).backward()
        return x.grad, SEEN[:]

    with pytest.raises(UnsupportedCall, match="a backward of a result outside would not run it"):
        gradient(tfn.jit(f))
    torch.testing.assert_close(tfn.grad(f)(X), torch.full_like(X, beside))
    for g in (inside, removed):
        torch.testing.assert_close(gradient(tfn.jit(g)), gradient(g))


def test_hooks_of_nodes_run_for_a_backward_inside() -> None:
    def f(x: Any) -> Any:
        y = leaf(x)
        z = y.sin()
        z.grad_fn.register_prehook(lambda given: (given[0] * 5,))
        z.grad_fn.register_hook(lambda found, given: (found[0] * 2,))
        return torch.autograd.grad(z.sum(), y)

    agree(f, X)


CHANGES_OF_SHAPE: list[tuple[str, tuple[Any, ...]]] = [
    ("t_", ()),
    ("transpose_", (0, 1)),
    ("swapaxes_", (0, 1)),
    ("unsqueeze_", (0,)),
    ("squeeze_", ()),
    ("as_strided_", ((3, 2), (1, 3))),
]


@pytest.mark.parametrize(("name", "args"), CHANGES_OF_SHAPE, ids=lambda x: x if isinstance(x, str) else "")
def test_detach_in_place_after_a_change_of_shape(name: str, args: Any) -> None:
    """The tensor went on to require grad. Views from before keep their history."""

    def f(x: Any) -> Any:
        y = x * 3
        getattr(y, name)(*args)
        row = y[0]
        y.detach_()
        return y, row * 2, (y.sum() * x).sin()

    def run(f: Any) -> Any:
        x = X.clone().requires_grad_()
        results = f(x)
        (slope,) = torch.autograd.grad([one.sum() for one in results if one.requires_grad], x, allow_unused=True)
        return [one.requires_grad for one in results], results, slope

    expected, found = run(f), run(tfn.jit(f))
    assert found[0] == expected[0] and not found[0][0]
    torch.testing.assert_close(found[1:], expected[1:])


WRITES: dict[str, Any] = {
    "itself": lambda y, row: y.mul_(2),
    "by a view": lambda y, row: y[:1].mul_(2),
    "by an alias": lambda y, row: y.detach().mul_(2),
    "without gradients": lambda y, row: torch.no_grad()(y.mul_)(2),
}


@pytest.mark.parametrize("shape", [("clone", ()), *CHANGES_OF_SHAPE], ids=lambda x: x[0])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_after_detach_in_place_beside_a_view(write: str, shape: Any) -> None:
    """Eager mode forgets the history of the view, and the trace kept it."""

    def beside(x: Any, ends: bool = False) -> Any:
        y = x * 3
        getattr(y, shape[0])(*shape[1])
        row = y[0]
        y.detach_()
        if ends:
            del row
        WRITES[write](y, None if ends else row)
        return ((y if ends else row) * 2).sum() + x.sum()

    def slope(f: Any) -> Any:
        x = X.clone().requires_grad_()
        return torch.autograd.grad(f(x), x)

    with pytest.raises(AliasedMutation, match="detached in place"):
        slope(tfn.jit(beside))
    torch.testing.assert_close(tfn.jit(beside)(X), beside(X))
    ends = lambda x: beside(x, True)
    torch.testing.assert_close(slope(tfn.jit(ends)), slope(ends))


def test_in_place_changes_of_shape_keep_views_and_gradients() -> None:
    def f(x: Any) -> Any:
        y = x * 1.0
        row, flat = y[0], y.view(-1)
        y.transpose_(1, 2).mul_(3.0)
        flat.add_(1.0)
        y.squeeze_(0)
        return (row * row).sum() + (y * 2).sum()

    x = torch.arange(6.0).view(1, 2, 3)
    expected = torch.autograd.functional.vjp(f, x)
    torch.testing.assert_close(tfn.grad(f)(x), expected[1])
    torch.testing.assert_close(torch.autograd.functional.vjp(tfn.jit(f), x), expected)


@pytest.mark.parametrize("wrap", [tfn.jit, lambda f: lambda x: tfn.vmap(f)(x[None])[0]])
def test_jacobians_of_autograd_by_forward_mode(wrap: Any) -> None:
    functional, x = torch.autograd.functional, torch.rand(2, 2, dtype=torch.float64)

    def curve(a: torch.Tensor, b: torch.Tensor) -> Any:
        return (a @ b.sin(), torch.ones(3) * 2, b.sum())

    def columns(x: torch.Tensor) -> Any:
        return functional.jacobian(curve, (x, x * 2), strategy="forward-mode", vectorize=True)[0]

    def hessian(x: torch.Tensor) -> Any:
        f = lambda x: (x.sin() @ x).square().sum()
        return functional.hessian(f, x, vectorize=True, outer_jacobian_strategy="forward-mode")

    for f in (lambda x: columns(x)[0], lambda x: columns(x)[1], hessian):
        torch.testing.assert_close(wrap(f)(x), f(x))
    with pytest.raises(NotImplementedError, match="vectorize=True"):
        wrap(lambda x: functional.jacobian(torch.sin, x, strategy="forward-mode"))(x)


# ---- TorchScript ----


class Scripted(torch.nn.Module):
    """What TorchScript reads of a module: tensors, lists of tensors, numbers, flags; with an update of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.rnn = torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.GRU(3, 3)
        self.scale, self.calls, self.sizes = 2.0, 0, [1, 2]

    def forward(self, x: torch.Tensor, power: int = 2) -> torch.Tensor:
        y = self.rnn(self.norm(self.lin(x)))[0] * self.scale
        return y.pow(power) + len(self.sizes) if self.training else y

    @torch.jit.export
    def counted(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.lin(x)

    @torch.jit.export
    def grown(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(3)
        return self.lin(x)

    @torch.jit.export
    def chosen(self, x: torch.Tensor) -> torch.Tensor:
        return x if bool(x.sum() > 0) else -x


class Around(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x, power=3))


@pytest.fixture
def scripted() -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        return torch.jit.script(Scripted())


def test_torchscript_has_pytorchs_derivatives(scripted: Any) -> None:
    x = torch.randn(4, 3)
    model = Around(scripted).eval()
    with warnings.catch_warnings(action="ignore"):
        frozen = torch.jit.freeze(torch.jit.script(Scripted().eval()))
        traced = torch.jit.trace(torch.nn.Linear(3, 3), x)
        function = torch.jit.script(_scripted)
    for f in (model, scripted, scripted.forward, lambda x: scripted(x, power=1) * 2, frozen, traced, function):
        expected = torch.autograd.functional.vjp(lambda x, f=f: f(x).square().sum(), x)[1]
        torch.testing.assert_close(tfn.jit(lambda x, f=f: f(x))(x), f(x))
        torch.testing.assert_close(tfn.grad(lambda x, f=f: f(x).square().sum())(x), expected)
    xs = torch.randn(2, 4, 3)
    torch.testing.assert_close(tfn.vmap(traced)(xs), torch.stack([*map(traced, xs)]))


@pytest.mark.parametrize("wrap", [tfn.jit, tfn.compile])
def test_a_torchscript_module_is_jitted(scripted: Any, wrap: Any) -> None:
    x, jitted = torch.randn(4, 3), wrap(scripted.eval())
    expected = torch.autograd.grad(scripted(x).square().sum(), [*scripted.parameters()])
    found = torch.autograd.grad(jitted(x).square().sum(), [*jitted.parameters()])
    torch.testing.assert_close(found, expected)
    jitted.train()
    assert scripted.training
    torch.testing.assert_close(jitted(x, power=1), scripted(x, power=1))


@pytest.mark.parametrize("wrap", [tfn.jit, lambda model: tfn.jit(lambda x: model(x))])
def test_torchscript_in_a_module_is_trained(scripted: Any, wrap: Any) -> None:
    """The weights and statistics of a script module are those of the module after steps of the program."""

    def train(model: Any, call: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for seed in range(3):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            call(x).square().sum().backward()
            optimizer.step()
        return [*model.parameters(), *model.buffers(), *(one.grad for one in model.parameters())]

    with warnings.catch_warnings(action="ignore"):
        eager, mine = Around(torch.jit.script(Scripted())), Around(scripted)
    eager.load_state_dict(mine.state_dict())
    torch.testing.assert_close(train(mine, wrap(mine)), train(eager, eager))


def test_a_program_depends_on_what_torchscript_reads(scripted: Any) -> None:
    x = torch.randn(4, 3)
    scripted.eval()
    f = tfn.jit(lambda x: scripted(x))
    f(x)

    weight = torch.nn.Parameter(scripted.lin.weight.detach() * 2)
    doubled = [one.detach() * 2 for one in scripted.rnn._flat_weights]
    for holder, name, value in (
        (scripted, "scale", 3.0),
        (scripted.lin, "weight", weight),
        (scripted.rnn, "_flat_weights", doubled),
    ):
        setattr(holder, name, value)
        torch.testing.assert_close(f(x), scripted(x))
        torch.testing.assert_close(tfn.vmap(scripted)(x[None]), scripted(x)[None])


def test_torchscript_that_changes_or_chooses_by_data_is_refused_by_name(scripted: Any) -> None:
    x = torch.ones(2, 3)
    for method in ("counted", "grown"):
        for wrap in (tfn.jit, lambda f: tfn.grad(lambda x: f(x).sum())):
            with pytest.raises(tfn.errors.UnsupportedCall, match=r"writes to attributes.* has compiled cannot be"):
                wrap(lambda x, method=method: getattr(scripted, method)(x))(x)
    with pytest.raises(tfn.errors.UnsupportedCall, match=r"code of `torch.jit` that needs the values in.*has compiled"):
        tfn.jit(scripted.chosen)(x)
    for value in (x, -x):
        torch.testing.assert_close(tfn.grad(lambda x: scripted.chosen(x).sum())(value), value)
    with pytest.raises(RuntimeError, match="missing value for argument"):
        tfn.jit(lambda x: scripted())(x)


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2


def _detached(x: torch.Tensor, n: int = 2) -> torch.Tensor:
    with torch.no_grad():
        y = x.cos()
    for i in range(n):
        y = y + x.sin().detach() * x * i
    return x * y if x.dim() < 3 else x


def _written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0] = 3.0
    return y.mul_(x).cumsum(0)


def _added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def _raising(x: torch.Tensor) -> torch.Tensor:
    if x.dim() > 1:
        raise ValueError("one dimension, please")
    return x


def _chosen(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    if bool(torch.all(k < 0)):
        return x.tanh() * k
    return x * k


def _script(function: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return torch.jit.script(function)


@pytest.mark.parametrize("function", [_scripted, _detached, _written])
def test_script_functions_have_torch_funcs_numbers_in_every_transform(function: Any) -> None:
    f, x = _script(function), torch.rand(3, dtype=torch.float64)
    mine, total = (lambda x: f(x).sin().sum()), lambda x: function(x).sin().sum()
    pair = torch.stack([x, x + 1])
    for found, expected in (
        (tfn.jit(f)(x), function(x)),
        (tfn.vmap(f)(pair), torch.stack([*map(function, pair)])),
        (tfn.jvp(f, (x,), (x + 1,)), torch.func.jvp(function, (x,), (x + 1,))),
        (tfn.grad(mine)(x), torch.func.grad(total)(x)),
        (tfn.jit(tfn.grad(mine))(x), torch.func.grad(total)(x)),
        (tfn.hessian(mine)(x), torch.func.hessian(total)(x)),
        (tfn.jit(tfn.jacrev(f))(x), torch.func.jacrev(function)(x)),
        (tfn.vmap(tfn.grad(mine))(pair), torch.stack([torch.func.grad(total)(one) for one in pair])),
    ):
        torch.testing.assert_close(found, expected)


def _doubled(xs: list[torch.Tensor], k: torch.Tensor) -> torch.Tensor:
    return torch.stack(xs).pow(2).sum(0) * k


GIVEN_TO_SCRIPTS: dict[str, tuple[Any, Any]] = {
    "positional": (lambda: _scripted, lambda f, p, x: f(p) * x),
    "keyword": (lambda: _scripted, lambda f, p, x: f(x=p) * x),
    "in a list": (lambda: _doubled, lambda f, p, x: f([p, x], x)),
    "beside a tracer": (lambda: _doubled, lambda f, p, x: f([x], p)),
    "to a module": (torch.nn.Tanh, lambda f, p, x: f(p) * x),
    "to a method": (torch.nn.Tanh, lambda f, p, x: f.forward(p) * x),
}


@pytest.mark.parametrize("wrap", [tfn.jit, functools.partial(tfn.compile, executors=["torch"])])
@pytest.mark.parametrize("given", GIVEN_TO_SCRIPTS)
def test_scripts_are_given_parameters_from_outside(given: str, wrap: Any) -> None:
    make, called = GIVEN_TO_SCRIPTS[given]

    def trained(wrap: Any) -> Any:
        script, p = _script(make()), torch.nn.Parameter(torch.tensor([0.2, 0.5, 0.3]))

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = called(script, p, x).sum()
            loss.backward()
            return loss.detach()

        step = wrap(step)
        return [(step(x), p.grad.clone()) for x in (torch.ones(3), torch.rand(1) + torch.arange(3.0))]

    torch.manual_seed(0)
    expected = trained(lambda f: f)
    torch.manual_seed(0)
    torch.testing.assert_close(trained(wrap), expected)


def test_a_module_of_torchscript_detaches() -> None:
    class Detaching(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.detach() * x + (x * 1).detach_() * x + x.data * x

    model, x = _script(Detaching()), torch.rand(3)
    torch.testing.assert_close(tfn.grad(lambda x: model(x).sum())(x), 3 * x)


def test_a_program_depends_on_the_constants_of_a_script_function() -> None:
    outside, x = torch.ones(3), torch.rand(3)
    with warnings.catch_warnings(action="ignore"):
        traced = torch.jit.trace(lambda x: outside.add_(1) * x * 2, x)
    for f in (tfn.jit(lambda x: traced(x)), tfn.jit(lambda x: traced(x * 1)), traced):
        outside.fill_(1)
        for count in (2, 3, 4):
            torch.testing.assert_close(f(x), x * count * 2)
            torch.testing.assert_close(outside, torch.full((3,), float(count)))
        outside.fill_(7)
        torch.testing.assert_close(f(x), x * 16)


def test_errors_of_script_functions_say_their_cause() -> None:
    x, k = torch.rand(3), torch.tensor(-1.0)
    raising, chosen, scripted = _script(_raising), _script(_chosen), _script(_added)
    for wrap in (tfn.jit, tfn.vmap, lambda f: tfn.grad(lambda x: f(x).sum())):
        with pytest.raises(torch.jit.Error, match="one dimension, please"):
            wrap(raising)(torch.rand(2, 3, 3))
    for wrap in (tfn.jit, lambda f: tfn.grad(lambda x: f(x).sum())):
        with pytest.raises(RuntimeError, match="Attempting to broadcast"):
            wrap(lambda x: scripted(x, torch.rand(4)))(x)
    torch.testing.assert_close(tfn.vmap(chosen, in_dims=(0, None))(x, k), chosen(x, k))
    torch.testing.assert_close(
        tfn.grad(lambda x: chosen(x, k).sum())(x), torch.func.grad(lambda x: chosen(x, k).sum())(x)
    )
    with pytest.raises(tfn.errors.UnsupportedCall, match=r"needs the values in a traced tensor.*(?s:.*) in _chosen"):
        tfn.jit(chosen)(x, k)


# ---- the text of a tensor from outside ----


@pytest.mark.parametrize("wrap", [tfn.grad, tfn.jit])
def test_a_tensor_from_outside_is_shown_with_its_values_until_it_is_written(wrap: Any) -> None:
    outside, texts = torch.tensor([1.0, 2.0]), list[str]()

    def f(x: torch.Tensor) -> torch.Tensor:
        texts.extend((repr(outside), f"{outside}", str(outside)))
        outside.add_(1)
        texts.append(repr(outside))
        return (x * outside).sum()

    if wrap is tfn.jit:  # the program would store a text without values
        with pytest.raises(tfn.errors.UnsupportedOutput, match="stores the text of a traced tensor"):
            wrap(f)(torch.ones(2))
    else:
        wrap(f)(torch.ones(2))
        assert texts == ["tensor([1., 2.])"] * 3 + ["Tracer(f32[2], tensor([2., 3.]))"]


@pytest.mark.parametrize("retains", [True, False])
def test_the_derivative_of_a_graph_that_a_backward_inside_has_freed(retains: bool) -> None:
    """It is refused, not zero; what the backward keeps has one."""

    def f(x: torch.Tensor) -> torch.Tensor:
        (y := x.sin()).sum().backward(retain_graph=retains)
        return y.sum()

    x = torch.ones(3)
    for transform in (tfn.grad(f), tfn.jit(tfn.grad(f))):
        if retains:
            torch.testing.assert_close(transform(x), x.cos())
            continue
        with pytest.raises(
            MissingRule, match=r"has freed what that reads\n(from: .*\n)?Write `backward\(retain_graph=True\)`"
        ):
            transform(x)
