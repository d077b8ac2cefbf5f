"""checkpoint: same bits, fewer residuals, under every transform."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import checkpoint, checkpoint_name, checkpoint_policies as policies, torch_internals as internals
from thunder_fn.errors import CheckpointError
from thunder_fn.interpreters.checkpoint.cost import bytes_of
from thunder_fn.interpreters.grad import forward_backward, grad_and_value
from thunder_fn.interpreters.jvp import jvp
from thunder_fn.interpreters.simplify import cse, dce
from thunder_fn.interpreters.vmap import vmap
from thunder_fn.ir.check import check
from thunder_fn.ir.ops import is_random
from thunder_fn.ir.trace import Trace, Var, subtraces
from thunder_fn.structured.checkpoint import torch_checkpoint
from thunder_fn.structured.cond import cond

Tensor = torch.Tensor
F = torch.nn.functional


def mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    hidden = checkpoint_name(F.gelu(x @ w), "hidden")
    return F.layer_norm((hidden @ v).sin(), (4,)) + x


def noisy(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    hidden = F.dropout(F.gelu(x @ w), 0.5)
    mask = torch.rand_like(hidden) > 0.3
    return (torch.where(mask, hidden, 0) @ v).tanh() * x


def branching(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return cond(x.sum() > 0, lambda x, w: (x @ w).sin(), lambda x, w: (x @ w).exp(), (x, w)) @ v


def nested(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return checkpoint(mlp)(x.exp(), w, v).cos() * x


FUNCTIONS = [mlp, noisy, branching, nested]
POLICIES: dict[str, Any] = {
    "default": None,
    "nothing": policies.nothing_saveable,
    "everything": policies.everything_saveable,
    "matmuls": policies.matmuls_saveable,
    "names": policies.save_only_these_names("hidden"),
    "offload": policies.offload_only_these_names("hidden"),
    "budget 0": policies.budget(0),
    "budget 200": policies.budget(200),
    "budget": policies.budget(10**6),
    "composite": lambda equation: equation.op.name == "torch.nn.functional.gelu",
    "all": lambda equation: True,
}


def arguments(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(3, 4, dtype=dtype), torch.randn(4, 8, dtype=dtype), torch.randn(8, 4, dtype=dtype)


def loss(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: f(*args).square().sum()


def seeded(f: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(1)
    return f(*args)


def same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def close(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def residual_bytes(trace: Trace) -> int:
    """Bytes that the forward leaves besides its outputs, which a checkpoint's forward has besides its own."""
    split = forward_backward(trace, (True,) * len(trace.inputs), (True,))
    check(split.forward)
    check(split.backward)
    values = split.residual_values(split.forward.inputs, split.forward.outputs)
    kept = [var for var in values if isinstance(var, Var) and var not in split.forward.inputs]
    return sum(bytes_of(var.type) for var in kept)


def names_in(trace: Trace) -> list[str]:
    return [equation.op.name for part in subtraces(trace) for equation in part.equations]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_values_and_gradients_are_the_same_bits(f: Callable[..., Tensor], policy: str) -> None:
    args = arguments()
    wrapped = checkpoint(f, POLICIES[policy])
    same([seeded(wrapped, *args)], [seeded(f, *args)])
    expected = seeded(tfn.grad(loss(f), argnums=(0, 1, 2)), *args)
    same(seeded(tfn.grad(loss(wrapped), argnums=(0, 1, 2)), *args), expected)
    program = tfn.trace(loss(wrapped), *args)
    check(program)
    gradient = grad_and_value(program, (True,) * 3)
    check(gradient)
    same(seeded(tfn.evaluate, cse(dce(gradient)), args)[:3], expected)
    if policy in ("default", "nothing", "everything", "budget 0", "budget"):
        assert residual_bytes(program) <= residual_bytes(tfn.trace(loss(f), *args))


@pytest.mark.parametrize("policy", ["default", "names", "budget 200"])
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_under_every_transform(f: Callable[..., Tensor], policy: str) -> None:
    args = arguments()
    wrapped, tangents = checkpoint(f, POLICIES[policy]), tuple(map(torch.randn_like, args))
    close(seeded(tfn.jvp, wrapped, args, tangents), seeded(tfn.jvp, f, args, tangents))
    second = [tfn.grad(lambda *xs, g=g: tfn.grad(loss(g))(*xs).sin().sum(), argnums=(0, 1, 2)) for g in (wrapped, f)]
    close(seeded(second[0], *args), seeded(second[1], *args))
    batch = tuple(torch.stack([arg, 2 * arg]) for arg in args)
    many = [tfn.vmap(tfn.grad(loss(g), argnums=(0, 1, 2)), randomness="same") for g in (wrapped, f)]
    close(seeded(many[0], *batch), seeded(many[1], *batch))
    summed = [tfn.grad(lambda *xs, g=g: tfn.vmap(loss(g), randomness="same")(*xs).sum()) for g in (wrapped, f)]
    close([seeded(summed[0], *batch)], [seeded(summed[1], *batch)])
    program = tfn.trace(loss(wrapped), *args)
    check(jvp(program, (True,) * 3))
    check(vmap(program, (0, 0, 0), 2, "same")[0])
    check(grad_and_value(vmap_sum(program), (True,) * 3))


def vmap_sum(program: Trace) -> Trace:
    batched, _ = vmap(program, (0, 0, 0), 2, "same")
    return tfn.trace(
        lambda *xs: batched.python_callable()(*xs)[0].sum(),
        *(torch.zeros(v.type.shape, dtype=v.type.dtype) for v in batched.inputs),
    )  # type: ignore[union-attr]


def test_linearize() -> None:
    args = arguments()
    tangents = tuple(map(torch.randn_like, args))
    value, linear = tfn.linearize(checkpoint(mlp), *args)
    close([value, linear(*tangents)], tfn.jvp(mlp, args, tangents))


def test_against_pytorch() -> None:
    args = arguments()
    expected = torch.func.grad(loss(mlp), argnums=(0, 1, 2))(*args)
    close(tfn.grad(loss(checkpoint(mlp)), argnums=(0, 1, 2))(*args), expected)
    close([tfn.hessian(loss(checkpoint(mlp)))(*args)], [torch.func.hessian(loss(mlp))(*args)])


def test_the_equation_survives_and_recomputes_in_the_backward() -> None:
    program = tfn.trace(loss(checkpoint(mlp)), *arguments())
    assert [equation.op.name for equation in program.equations].count("checkpoint") == 1
    gradient = dce(cse(grad_and_value(program, (True,) * 3)))
    forward, backward = (equation for equation in gradient.equations if equation.op.name == "checkpoint")
    assert forward.body == program.equations[0].body, "nothing is kept"
    assert names_in(backward.body).count("aten.gelu.default") == 1
    assert set(gradient.inputs) <= set(backward.operands)


def test_random_numbers_are_never_drawn_again() -> None:
    gradient = grad_and_value(tfn.trace(loss(checkpoint(noisy)), *arguments()), (True,) * 3)
    _, backward = (equation for equation in gradient.equations if equation.op.name == "checkpoint")
    assert not any(is_random(equation.op) for part in subtraces(backward.body) for equation in part.equations)


def test_what_random_numbers_need_is_kept_in_the_fewest_bytes() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.where(torch.rand_like(x) > 0.5, x.exp(), x.sin())

    program = tfn.trace(loss(checkpoint(f)), torch.randn(64))
    assert residual_bytes(program) == 64 + 4 * 64, "the mask, of one byte each, and the result, which the square reads"


def test_offloaded_values_go_to_the_cpu_and_back() -> None:
    program = tfn.trace(loss(checkpoint(mlp, POLICIES["offload"])), *arguments())
    split = forward_backward(program, (True,) * 3, (True,))
    assert names_in(split.forward).count("aten._to_copy.default") == 1
    assert names_in(split.backward).count("aten._to_copy.default") == 1


def test_offloaded_values_are_on_the_device_where_they_are_needed_only() -> None:
    """A copy follows what makes its value, and comes before its first reader. Random numbers keep their order."""

    def deep(x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.nn.functional.dropout(tfn.checkpoint_name(x.sin(), "hidden")).cos()
        return x.sum()

    x, offloaded = torch.randn(4), checkpoint(deep, POLICIES["offload"])
    torch.manual_seed(0)
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(deep(leaf), leaf)
    torch.manual_seed(0)
    torch.testing.assert_close(tfn.grad(offloaded)(x), wanted)
    split = forward_backward(tfn.trace(lambda x: offloaded(x), x), (True,), (True,))
    forward, backward = names_in(split.forward), names_in(split.backward)
    copy = "aten._to_copy.default"
    places = [at for at, name in enumerate(forward) if name == copy]
    assert len(places) == 3 and all("checkpoint_name" in forward[at - 1] for at in places)
    places = [at for at, name in enumerate(backward) if name == copy]
    assert len(places) == 3 and "aten.mul.Tensor" in backward[places[0] : places[1]]


def test_a_budget_is_met_and_more_bytes_mean_less_work() -> None:
    def deep(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        for _ in range(4):
            x = mlp(x, w, v)
        return x

    args, work = arguments(torch.float32), []
    least = residual_bytes(tfn.trace(loss(checkpoint(deep)), *args))
    for budget_bytes in (0, 200, 400, 800, 10**6):
        program = tfn.trace(loss(checkpoint(deep, policies.budget(budget_bytes))), *args)
        assert residual_bytes(program) <= least + budget_bytes
        work.append(names_in(forward_backward(program, (True,) * 3, (True,)).backward).count("aten.mm.default"))
    assert work == sorted(work, reverse=True) and work[0] > work[-1]


def test_saved_residuals() -> None:
    x, w, v = arguments(torch.float32)
    found = tfn.saved_residuals(
        lambda p, v: loss(checkpoint(mlp, POLICIES["names"]))(p["x"], p["w"], v), {"x": x, "w": w}, v
    )
    assert [(str(r.type), r.num_bytes, r.reason) for r in found] == [
        ("f32[3, 4]", 48, "output of aten.add.Tensor"),
        ("f32[3, 4]", 48, "argument args[0]['x']"),
        ("f32[4, 8]", 128, "argument args[0]['w']"),
        ("f32[8, 4]", 128, "argument args[1]"),
        ("f32[3, 8]", 96, "named 'hidden'"),
    ]
    assert found[-1].source is not None and found[-1].source.function == "mlp"
    assert str(found[-1]).startswith("          96 B  f32[3, 8]  named 'hidden' at ")


def test_offloaded_residuals_have_their_names_and_lines() -> None:
    args = arguments(torch.float32)
    found = {
        policy: [
            (r.reason, r.num_bytes, r.source.function)
            for r in tfn.saved_residuals(loss(checkpoint(mlp, POLICIES[policy])), *args)
            if r.source is not None and not r.reason.startswith("argument")
        ]
        for policy in ("names", "offload")
    }
    assert ("named 'hidden'", 96, "mlp") in found["offload"]
    assert found["offload"] == found["names"]


def test_names_given_outside_of_the_function_that_makes_a_value() -> None:
    f = checkpoint(
        lambda x: checkpoint_name(torch.nn.functional.gelu(x), "gelu").sin().sum(),
        policies.save_only_these_names("gelu"),
    )
    assert "named 'gelu'" in [residual.reason for residual in tfn.saved_residuals(f, torch.ones(3))]


def attention(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Linear layers, whose weights are transposed; heads, which are views of one product; a mask that is closed over."""
    q, k, v = torch.nn.functional.linear(x, p["qkv"]).unflatten(-1, (3, 2, 4)).unbind(-3)
    rows = (q.transpose(0, 1) @ k.permute(1, 2, 0)).masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -1e9)
    mixed = (rows.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1).flatten(1)
    return torch.tanh(checkpoint_name(torch.nn.functional.linear(mixed, p["out"]), "hidden"))


@pytest.mark.parametrize("policy", [None, *POLICIES], ids=str)
def test_own_bytes_are_what_a_pullback_keeps(policy: str | None) -> None:
    p, x = {"qkv": torch.randn(24, 8), "out": torch.randn(8, 8)}, torch.randn(3, 8)
    f = attention if policy is None else checkpoint(attention, POLICIES[policy])
    predicted = sum(one.own_bytes for one in tfn.saved_residuals(f, p, x))
    kept: list[Any] = [tfn.vjp(f, p, x)]
    kept.clear()
    allocated = sum(internals.allocations(lambda: kept.append(tfn.vjp(f, p, x))))
    assert allocated == predicted + kept[0][0].nbytes


def test_modules_and_buffers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU()).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected = tfn.grad(lambda x: model(x).sin().sum())(x)
    after = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    same([tfn.grad(lambda x: checkpoint(model)(x).sin().sum())(x)], [expected])
    same(model.state_dict().values(), after.values())


def test_parameters_and_autograd_inside() -> None:
    model = torch.nn.Linear(4, 4).double()

    def step(x: Tensor) -> Any:
        return torch.autograd.grad(checkpoint(model)(x).sin().sum(), tuple(model.parameters()))

    x = torch.randn(8, 4, dtype=torch.float64)
    program = tfn.trace(step, x)
    check(program)
    assert "checkpoint" in names_in(program)
    close(tfn.evaluate(program, [x]), torch.autograd.grad(model(x).sin().sum(), tuple(model.parameters())))


def test_pytorchs_checkpoint() -> None:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    def saves_mm(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        known = op == torch.ops.aten.mm.default
        return (
            torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
            if known
            else torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
        )

    args = arguments()
    for options in ({}, {"context_fn": lambda: create_selective_checkpoint_contexts(saves_mm)}):
        f = lambda *xs, options=options: torch_checkpoint(loss(mlp), *xs, use_reentrant=False, **options)
        program = tfn.trace(f, *args)
        check(program)
        assert [equation.op.name for equation in program.equations] == ["checkpoint"]
        products = names_in(forward_backward(program, (True,) * 3, (True,)).backward).count("aten.mm.default")
        assert products == (4 if options else 6)
        close(tfn.grad(f, argnums=(0, 1, 2))(*args), torch.func.grad(loss(mlp), argnums=(0, 1, 2))(*args))


SELECTIVE: dict[str, tuple[Callable[..., Any], int]] = {
    "counts, every other product": (lambda seen, op, *args: seen.append(op) or len(seen) % 2 == 0, 5),
    "asks about sizes": (lambda seen, op, a, b: a.shape == (3, 4) and b.dtype is torch.float64, 5),
    "offloads": (lambda seen, op, *args: torch.utils.checkpoint.CheckpointPolicy.MUST_CPU_OFFLOAD, 4),
}


@pytest.mark.parametrize("name", SELECTIVE)
def test_policies_of_pytorch_see_tensors_results_and_each_op_once(name: str) -> None:
    answer, products = SELECTIVE[name]

    def contexts() -> Any:
        seen: list[Any] = []

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            assert context.op_output is None or isinstance(context.op_output, (Tensor, tuple))
            return op == torch.ops.aten.mm.default and answer(seen, op, *args)

        return torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)

    args = arguments()
    f = lambda *xs: torch_checkpoint(loss(mlp), *xs, use_reentrant=False, context_fn=contexts)
    program = tfn.trace(f, *args)
    for wanted in ((True,) * 3, (True, False, True), (True,) * 3):
        backward = names_in(forward_backward(program, wanted, (True,)).backward)
        if all(wanted):
            assert backward.count("aten.mm.default") == products
            assert ("aten._to_copy.default" in backward) == (name == "offloads")
    close(tfn.grad(f, argnums=(0, 1, 2))(*args), torch.func.grad(loss(mlp), argnums=(0, 1, 2))(*args))


def test_a_policy_of_pytorch_that_answers_nonsense() -> None:
    def maybe(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return "perhaps"

    contexts = lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(maybe)
    with pytest.raises(CheckpointError, match=r"^checkpoint: the policy maybe answered 'perhaps'\nin equation: "):
        tfn.grad(lambda x: torch_checkpoint(torch.sin, x, use_reentrant=False, context_fn=contexts).sum())(
            torch.ones(2)
        )


def test_other_contexts_of_pytorch_are_entered_once() -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def noting(name: str, inner: Any) -> Any:
        entered.append(name)
        with inner:
            yield

    def contexts() -> Any:
        return noting("forward", torch.autocast("cpu", torch.bfloat16)), noting("again", contextlib.nullcontext())

    x, w = torch.randn(2, 3, 3)
    f = lambda x: torch_checkpoint(lambda x: (x @ w).sin(), x, use_reentrant=False, context_fn=contexts).float().sum()
    with torch.autocast("cpu", torch.bfloat16):
        want = torch.func.grad(lambda x: (x @ w).sin().float().sum())(x)
    same([tfn.grad(f)(x)], [want])
    assert entered == ["forward"]


def test_eager_calls_compute_again_under_autograd() -> None:
    x, w, v = (arg.requires_grad_() for arg in arguments())
    count = []

    def counted(*xs: Tensor) -> Tensor:
        count.append(1)
        return mlp(*xs)

    found = torch.autograd.grad(loss(checkpoint(counted))(x, w, v), (x, w, v))
    assert len(count) == 2
    same(found, torch.autograd.grad(loss(mlp)(x, w, v), (x, w, v)))
    close([torch.func.grad(loss(checkpoint(mlp)))(x, w, v)], found[:1])


def test_inside_a_branch() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return cond(x.sum() > 0, checkpoint(mlp), lambda x, w, v: x, (x, w, v))

    x, w, v = arguments()
    for point in (x.abs(), -x.abs()):
        plain = mlp if point.sum() > 0 else (lambda x, w, v: x)
        close([tfn.grad(loss(f))(point, w, v)], [torch.func.grad(loss(plain))(point, w, v)])


def test_work_is_shared_by_equal_bodies() -> None:
    def stack(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        for _ in range(6):
            x = checkpoint(mlp)(x, w, v)
        return x

    gradient = grad_and_value(tfn.trace(loss(stack), *arguments()), (True,) * 3)
    bodies = [equation.body for equation in gradient.equations if equation.op.name == "checkpoint"]
    assert len(bodies) == 12 and len(set(bodies)) <= 3


NONSENSE = [
    (lambda: checkpoint(3), "checkpoint: expected a function, given an int: 3"),  # type: ignore[arg-type]
    (
        lambda: checkpoint(mlp, 3),
        "checkpoint: a policy is a function of an equation or one of `checkpoint_policies`, not 3\n"
        "Arguments go to the function that checkpoint returns: `checkpoint(f)(x)`.",
    ),
    (lambda: policies.budget(-1), "checkpoint_policies.budget: a number of bytes, not -1"),
    (lambda: policies.save_only_these_names(1), "checkpoint_policies: names are strings, not 1"),  # type: ignore[arg-type]
    (lambda: checkpoint_name(1, "x"), "checkpoint_name: names a tensor, not an int"),  # type: ignore[arg-type]
    (lambda: checkpoint_name(torch.ones(1), 1), "checkpoint_name: the name is a string, not 1"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "text"), NONSENSE)
def test_nonsense_is_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(CheckpointError) as error:
        call()
    assert message_of(error.value) == text


def test_a_policy_that_answers_nonsense() -> None:
    def maybe(equation: Any) -> str:
        return "maybe"

    with pytest.raises(CheckpointError) as error:
        tfn.grad(lambda x: checkpoint(torch.sin, maybe)(x).sum())(torch.ones(3))
    lines = message_of(error.value).split("\n")
    assert lines[0] == "checkpoint: the policy maybe answered 'maybe'"
    assert lines[1] == "in equation:  v1: f32[3] = aten.sin.default(v0)"
    assert lines[2].startswith("from:         ") and "test_checkpoint.py" in lines[2]
    assert lines[3] == 'Answer True or "save", False or "recompute", or "offload".'


def test_no_program_merges_what_is_computed_again_with_what_was_there() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: x.sin().exp().tanh())(x).sum()

    x = torch.randn(3)
    trace = tfn.trace(tfn.grad_and_value(f), x)
    step = tfn.jit(tfn.grad_and_value(f))
    torch.testing.assert_close(step(x), tfn.evaluate(trace, (x,)))
    assert str(tfn.last_traces(step)[-1]).count("= sin(") == 2
    module = trace.to_fx()
    assert all(map(torch.equal, module(x), tfn.evaluate(trace, (x,))))
    assert module.code.count("barrier.default(v0, ") == 2 and module.code.count("aten.sin.default(barrier_default") == 2
    leaf = x.clone().requires_grad_()
    module(leaf)[1].backward()
    torch.testing.assert_close(leaf.grad, step(x)[0])


# ---- linearize ----

KEPT = {
    "nothing": (None, 2),
    "everything": (tfn.checkpoint_policies.everything_saveable, 4),
    "matmuls": (tfn.checkpoint_policies.matmuls_saveable, 3),
    "names": (tfn.checkpoint_policies.save_only_these_names("h"), 3),
    "budget": (tfn.checkpoint_policies.budget(10**6), 4),
}


@pytest.mark.parametrize("name", KEPT)
def test_linearize_keeps_what_the_policy_says(name: str) -> None:
    policy, count = KEPT[name]
    torch.manual_seed(0)
    x, w = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    v = (torch.ones_like(x), torch.ones_like(w))

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return tfn.checkpoint_name((x @ w).sin(), "h").exp()

    output, linear = tfn.linearize(tfn.checkpoint(f, policy), x, w)
    assert torch.equal(output, f(x, w))
    torch.testing.assert_close(linear(*v), tfn.jvp(f, (x, w), v)[1])
    assert len(linear.residuals) == count


def test_linearize_of_a_checkpoint_draws_once() -> None:
    x = torch.ones(50)
    f = tfn.checkpoint(lambda x: torch.nn.functional.dropout(x, 0.5))
    torch.manual_seed(0)
    output, linear = tfn.linearize(f, x)
    assert torch.equal(linear(x), output)


def eigenvalues(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eigvals(x).pow(2).sum().real


@pytest.mark.parametrize("f", [eigenvalues, lambda x: torch.linalg.solve(x, x.exp()), torch.linalg.inv])
@pytest.mark.parametrize("wrap", [tfn.checkpoint, tfn.jit])
def test_linearize_of_ops_that_check_their_tangents(f: Any, wrap: Any) -> None:
    """A check that reads a tangent belongs to the second half and keeps nothing out of the first."""
    x = torch.tensor([[3.0, 1.0], [0.2, 2.0]], dtype=torch.float64)
    output, linear = tfn.linearize(wrap(f), x)
    torch.testing.assert_close(output, f(x))
    torch.testing.assert_close(linear(x.cos()), torch.autograd.functional.jvp(f, x, x.cos())[1])


def weighted_by_noise(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.rand_like(x)).sum()


@pytest.mark.parametrize(
    ("f", "does"), [(eigenvalues, "checks values, or has another effect"), (weighted_by_noise, "draws random numbers")]
)
def test_linearize_of_a_choice_that_has_effects(f: Any, does: str) -> None:
    x = torch.eye(2, dtype=torch.float64) + 1
    with pytest.raises(tfn.errors.MissingRule, match=f"cond {does}, and cannot be run in two halves") as found:
        tfn.linearize(lambda x: tfn.cond(x.sum() > 0, f, f, (x,)), x)
    assert ("random" in str(found.value)) == (f is weighted_by_noise)


def test_attention_without_dropout_is_computed_again() -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    x = torch.rand(1, 1, 4, 8)
    kept = tfn.saved_residuals(checkpoint(lambda x: attend(x, x, x).sum()), x)
    assert [residual.reason for residual in kept] == ["argument args[0]"]
    dropped = tfn.saved_residuals(checkpoint(lambda x: attend(x, x, x, dropout_p=0.5).sum()), x)
    assert len(dropped) > 1


def test_eager_calls_write_once_or_not_at_all() -> None:
    """The backward runs the function again. It may have written to what it made itself, and to what it does not read."""
    state, x = torch.ones(3), torch.arange(3.0, requires_grad=True)

    def inside(x: Tensor) -> Tensor:
        y, z = x * 2, torch.tensor([1.0, 2.0, 3.0])
        y[0] = 0
        return (y.add_(1) * z.mul_(2)).sin()

    def outside(x: Tensor) -> Tensor:
        state.view(-1).mul_(2)
        return (x * state).sin()

    same(torch.autograd.grad(checkpoint(inside)(x).sum(), x), torch.autograd.grad(inside(x).sum(), x))
    y = checkpoint(outside)(x).sum()
    with pytest.raises(CheckpointError, match=r"writes in place to f32\[3\] from outside, and reads it"):
        y.backward()


def test_eager_calls_update_statistics_once() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 1)
    )
    x, average, found = torch.randn(8, 4), torch.zeros(1), list[list[Tensor]]()

    def f(x: Tensor) -> Tensor:
        y = model(model[1](x))
        average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y

    before = {key: value.clone() for key, value in model.state_dict().items()}
    for wrap in (lambda f: f, checkpoint, lambda f: checkpoint(lambda x: checkpoint(f)(x) * 1)):
        model.load_state_dict(before)
        average.zero_()
        torch.manual_seed(1)
        for _ in range(2):
            wrap(f)(x).sum().backward()
        found.append([average.clone(), *(value.clone() for value in model.state_dict().values())])
        found[-1] += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
    same(found[1], found[0])
    same(found[2], found[0])


def test_eager_calls_of_torch_func_are_refused() -> None:
    f = lambda x: torch.func.vjp(torch.sin, x.detach())[1](x.detach())[0] * x
    with pytest.raises(CheckpointError, match=r"calls a transform of torch\.func, outside of a trace"):
        checkpoint(f)(torch.ones(3, requires_grad=True))
