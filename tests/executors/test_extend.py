"""extend: operators, execution transforms, grad transforms; what lightning-thunder's notebook shows, cell by cell."""

from __future__ import annotations

import copy
import operator
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import evaluate, grad, jit
from thunder_fn.errors import ExecutorError, MissingRule, UnknownOption
from thunder_fn.executors.torchinductor import inductor
from thunder_fn.extend import (
    OperatorExecutor,
    deregister_executor,
    get_executor,
    get_grad,
    list_executors,
    put_grad,
    put_grads,
    register_executor,
)
from thunder_fn.ir.check import check
from thunder_fn.recipes.captured import GRAPHS
from thunder_fn.recipes.recipe import machine_executors

A, B = torch.tensor([[0.5, -1.0], [2.0, 3.0]]), torch.tensor([[1.5, 0.25], [-2.0, 1.0]])


def multimul_impl(a: Any, b: Any, c: Any, d: Any) -> tuple[Any, Any]:
    return np.multiply(a, b), np.multiply(c, d)


def multimul_like(a: Any, b: Any, c: Any, d: Any) -> tuple[Any, Any]:
    return a * b, c * d


def cpu_only(a: Any, b: Any) -> bool:
    return all(x.device.type == "cpu" for x in (a, b) if isinstance(x, Tensor))


class Example:
    """The notebook's executor, with counts of the calls of its fn."""

    def __init__(self, name: str = "myex") -> None:
        self.calls = 0

        def fn(*args: Any) -> Any:
            self.calls += 1
            return multimul_impl(*args)

        self.ex = OperatorExecutor(name, version="0.1", numerics="bitwise")
        self.multimul = self.ex.register_operator("multimul", like=multimul_like, fn=fn)

    def mul_to_multimul(self, a: Any, b: Any) -> Any:
        result, _ = self.multimul(a, b, 0, 0)
        return result

    def mul_to_contiguous_multimul(self, a: Any, b: Any) -> Any:
        result, _ = self.multimul(a.contiguous(), b.contiguous(), 0, 0)
        return result

    def mul_grad(self, a: Any, b: Any) -> Any:
        fwd = a * b
        g = get_grad(fwd)
        a_grad, b_grad = self.multimul(b, g, a, g)
        put_grads((a, b), (a_grad, b_grad))
        return fwd


def program(f: Callable[..., Any]) -> str:
    return str(tfn.last_traces(f)[-1])


def mul(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def total(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


# ---- the notebook ----


def test_an_operator_runs_its_fn(golden: Callable[[str, str], None]) -> None:
    e = Example()
    f = jit(lambda a, b, c, d: e.multimul(a, b, c, d), executors=[e.ex])
    first, second = f(A, B, A.clone(), B.clone())  # as four tensors: one that comes twice is one input
    assert torch.equal(first, A * B) and torch.equal(second, A * B) and e.calls == 1
    golden("extend/multimul", f"{tfn.last_traces(f)[0]}\n{program(f)}")


def test_it_is_differentiable_through_like(golden: Callable[[str, str], None]) -> None:
    e = Example()
    f = jit(lambda a, b, c, d: sum(x.sum() for x in e.multimul(a, b, c, d)), executors=[e.ex])
    g = grad(f, argnums=(0, 1, 2, 3))
    for found, wanted in zip(g(A, B, A.clone(), B.clone()), (B, A, B, A), strict=True):
        assert torch.equal(found, wanted)
    golden("extend/multimul_grad", program(g))


def test_an_execution_transform(golden: Callable[[str, str], None]) -> None:
    e = Example()
    e.ex.register_implementation(torch.mul, checker=cpu_only, execution_transform=e.mul_to_multimul)
    f = jit(mul, executors=[e.ex])
    assert torch.equal(f(A, B), A * B) and e.calls == 1
    golden("extend/mul", program(f))
    g = grad(jit(total, executors=[e.ex]), argnums=(0, 1))
    assert all(torch.equal(x, y) for x, y in zip(g(A, B), (B, A), strict=True))
    assert program(g).count("multimul(") - program(g).count("def multimul(") == 2
    golden("extend/mul_grad", program(g))


def test_a_grad_transform_leaves_one_multimul(golden: Callable[[str, str], None]) -> None:
    e = Example()
    g = grad(jit(total, executors=[e.ex]), argnums=(0, 1))
    g(A, B)
    assert "multimul" not in program(g)
    e.ex.register_implementation(
        torch.mul, checker=cpu_only, execution_transform=e.mul_to_multimul, grad_transform=e.mul_grad
    )
    assert all(torch.equal(x, y) for x, y in zip(g(A, B), (B, A), strict=True)), "traced again"
    assert program(g).count("= multimul(") == 1 and " mul(" not in program(g)
    golden("extend/mul_one_multimul", program(g))


def test_an_execution_transform_may_use_other_ops(golden: Callable[[str, str], None]) -> None:
    e = Example()
    e.ex.register_implementation(torch.mul, checker=cpu_only, execution_transform=e.mul_to_contiguous_multimul)
    f = jit(mul, executors=[e.ex])
    assert torch.equal(f(A.t(), B), A.t() * B)
    assert program(f).count("= contiguous(") == 2
    golden("extend/mul_contiguous", program(f))


@pytest.mark.filterwarnings("ignore:.*takes nothing of:thunder_fn.errors.RegionWarning")
def test_composites_are_claimed_whole_or_by_their_parts() -> None:
    ex = OperatorExecutor("xent")
    seen: list[str] = []

    def fused(logits: Tensor, labels: Tensor, reduction: str = "mean", **options: Any) -> Tensor:
        seen.append(reduction)
        return torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)

    def like(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
        picked = torch.log_softmax(logits, -1).gather(-1, labels[:, None])
        return -picked.mean() if reduction == "mean" else -picked.sum()

    op = ex.register_operator("fused_cross_entropy", like=like, fn=fused)
    ex.register_implementation(
        torch.nn.functional.cross_entropy,
        checker=lambda logits, labels, reduction="mean": reduction in ("mean", "sum"),
        execution_transform=lambda logits, labels, reduction="mean": op(logits, labels, reduction),
    )
    logits, labels = torch.randn(4, 5), torch.tensor([0, 1, 4, 2])
    for reduction, taken in (("mean", 1), ("sum", 1), ("none", 0)):
        f = jit(lambda x, y, r=reduction: torch.nn.functional.cross_entropy(x, y, reduction=r), executors=[ex])
        wanted = torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)
        torch.testing.assert_close(f(logits, labels), wanted)
        assert program(f).count("= fused_cross_entropy(") == taken
    assert seen == ["mean", "sum"]


# ---- where executors apply ----


def test_executors_apply_where_they_are_given() -> None:
    first, second = Example("first"), Example("second")
    second.ex.register_implementation(torch.mul, execution_transform=second.mul_to_multimul)
    f = lambda a, b: first.multimul(a, b, a, b)[0] + a * b
    plain, ours, theirs = jit(f), jit(f, executors=[first.ex]), jit(f, executors=[second.ex])
    both = jit(f, executors=[second.ex, first.ex])
    for _ in range(2):
        for g in (plain, ours, theirs, both):
            assert torch.equal(g(A, B), 2 * A * B)
    assert "multimul(" not in program(plain)
    assert program(ours).count("by first") == 1 and " mul(" in program(ours)
    assert program(theirs).count("by second") == 2, "first's operator is unfolded, and its products are claimed"
    assert program(both).count("by first") == 1 and program(both).count("by second") == 1


def test_executors_reach_every_transform() -> None:
    e = Example()
    e.ex.register_implementation(torch.mul, execution_transform=e.mul_to_multimul, grad_transform=e.mul_grad)
    x, y = torch.randn(3, 2, 2), torch.randn(3, 2, 2)
    f = jit(total, executors=[e.ex])
    with_grad = tfn.vmap(grad(f))
    torch.testing.assert_close(with_grad(x, y), y)
    assert "= multimul(" in program(with_grad)
    torch.testing.assert_close(tfn.jvp(f, (A, B), (B, A)), ((A * B).sum(), (B * B + A * A).sum()))
    torch.testing.assert_close(tfn.hessian(f, argnums=(0, 1))(A, B)[0][1], torch.eye(4).reshape(2, 2, 2, 2))
    loop = jit(lambda x: tfn.fori_loop(0, 3, lambda i, z: z * 2, x).sum(), executors=[e.ex])
    before = e.calls
    torch.testing.assert_close(loop(A), (A * 8).sum())
    assert e.calls == before + 3, "bodies of loops run on the executors too"
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    f(a, b).backward()
    assert torch.equal(a.grad, B) and torch.equal(b.grad, A)  # type: ignore[arg-type]
    assert str(tfn.last_backward_traces(f)[-1]).count("= multimul(") == 1


def test_two_functions_in_many_threads() -> None:
    first, second = Example("first"), Example("second")
    for e in (first, second):
        e.ex.register_implementation(torch.mul, execution_transform=e.mul_to_multimul, grad_transform=e.mul_grad)
    failures: list[str] = []

    def work(e: Example, number: int) -> None:
        x = torch.full((2, 2), float(number))
        for size in range(1, 4):
            y = x.repeat(size, 1)
            g = grad(jit(total, executors=[e.ex]), argnums=(0, 1))
            found = g(y, 2 * y)
            name = e.ex.name
            if not (torch.equal(found[0], 2 * y) and torch.equal(found[1], y)):
                failures.append("wrong gradients")
            if program(g).count(f"by {name}") != 1 or program(g).count(" by ") != 1:
                failures.append(program(g))

    threads = [threading.Thread(target=work, args=((first, second)[i % 2], i)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ---- operators with rules of their own ----


def test_an_operator_with_meta() -> None:
    ex = OperatorExecutor("ex")
    seen: list[type] = []

    def meta(a: Tensor, n: int) -> Tensor:
        seen.append(type(a))
        return a.new_empty((n, *a.shape))

    stack = ex.register_operator("stack", meta=meta, fn=lambda a, n: torch.from_numpy(np.stack([a.numpy()] * n)))
    f = lambda a: stack(a, 3) + 1
    wanted = torch.stack([A] * 3) + 1
    for g in (f, jit(f), jit(f, executors=[ex])):
        assert torch.equal(g(A), wanted)
    assert all(issubclass(cls, torch._subclasses.FakeTensor) for cls in seen)
    trace = tfn.trace(f, A)
    check(trace)
    assert torch.equal(evaluate(trace, (A,))[0], wanted)
    with pytest.warns(UserWarning, match=r"^vmap: stack has no batching rule, so it runs in a loop over 2 examples$"):
        assert torch.equal(tfn.vmap(f)(torch.stack([A, B])), torch.stack([f(A), f(B)]))
    text = (
        "vjp: stack has no derivative: only the types of its results are known\n"
        f"from:         {__file__}:{f.__code__.co_firstlineno} in <lambda>\n"
        "Register it with `like=`, with a `grad_transform=` for reverse mode, or with `jvp=`, which serves both."
    )
    with pytest.raises(MissingRule) as caught:
        grad(lambda a: f(a).sum())(A)
    assert message_of(caught.value) == text
    with pytest.raises(MissingRule, match=r"^jvp: stack has no derivative"):
        tfn.jvp(f, (A,), (B,))
    with pytest.raises(MissingRule, match=r"^vjp: stack has no derivative"):
        jit(f, executors=[ex])(A.clone().requires_grad_())
    with pytest.raises(MissingRule, match=r"^autograd: stack has no derivative"):
        f(A.clone().requires_grad_())


def test_an_operator_brings_its_rules() -> None:
    ex = OperatorExecutor("ex")

    def cube_grad(a: Tensor) -> Tensor:
        out = cube(a)
        put_grad(a, get_grad(out) * 3 * square(a))
        return out

    def cube_jvp(primals: Any, tangents: Any) -> Any:
        (a,), (t,) = primals, tangents
        return cube(a), 3 * square(a) * t

    def cube_vmap(size: int, in_batched: Any, a: Tensor) -> Any:
        return cube(a), True

    square = ex.register_operator("square", like=lambda a: a * a, fn=lambda a: torch.from_numpy(np.square(a.numpy())))
    cube = ex.register_operator(
        "cube",
        meta=torch.empty_like,
        fn=lambda a: torch.from_numpy(a.numpy() ** 3),
        grad_transform=cube_grad,
        jvp=cube_jvp,
        vmap=cube_vmap,
    )
    x = torch.tensor([1.0, 2.0])
    for f in (lambda x: cube(x).sum(), jit(lambda x: cube(x).sum(), executors=[ex])):
        torch.testing.assert_close(grad(f)(x), 3 * x**2)
        torch.testing.assert_close(tfn.jvp(f, (x,), (x,))[1], (3 * x**3).sum())
        torch.testing.assert_close(tfn.vmap(f)(x[:, None]), x**3)
        torch.testing.assert_close(tfn.vmap(grad(f))(x[:, None]), 3 * x[:, None] ** 2)
    y = x.clone().requires_grad_()
    cube(y).sum().backward()
    torch.testing.assert_close(y.grad, 3 * x**2)
    g = grad(jit(lambda x: cube(x).sum(), executors=[ex]))
    g(x)
    assert "= square(" in program(g) and "= cube(" not in program(g), "the forward is not needed"
    forward_over_reverse = tfn.jvp(grad(lambda x: cube(x).sum()), (x,), (torch.ones(2),))[1]
    torch.testing.assert_close(forward_over_reverse, 6 * x)


def test_numbers_lists_keywords_and_static_results() -> None:
    ex = OperatorExecutor("ex")
    given: list[Any] = []

    def like(xs: Any, *, scale: float = 1.0, shift: Any = None) -> dict[str, Any]:
        out = (xs[0] + xs[1]) * scale
        return {"sum": out if shift is None else out + shift, "count": len(xs)}

    def fn(xs: Any, **options: Any) -> Any:
        given.append((xs, options))
        return like(xs, **options)

    op = ex.register_operator("add_all", like=like, fn=fn)
    f = jit(lambda a, b: op([a, b], scale=2.0, shift=b), executors=[ex])
    result = f(A, B)
    assert result["count"] == 2 and torch.equal(result["sum"], (A + B) * 2 + B)
    assert type(given[0][0]) is tuple and given[0][1]["scale"] == 2.0
    with pytest.raises(ExecutorError, match=r"^add_all: an object cannot be part of a trace; pass tensors, numbers"):
        jit(lambda a, b: op([a, b], shift=object()), executors=[ex])(A, B)


def test_inside_torch_func_and_autograd() -> None:
    e = Example()
    f = lambda a, b: e.multimul(a, b, a, a)[0].sum()
    assert torch.equal(torch.func.grad(f)(A, B), B)
    assert torch.equal(jit(lambda a, b: torch.func.grad(f)(a, b), executors=[e.ex])(A, B), B)
    assert torch.equal(torch.func.vmap(lambda a: e.multimul(a, a, 1, 1)[0])(A), A * A)

    def step(a: Tensor, b: Tensor) -> Tensor:
        a = a.detach().requires_grad_()
        return torch.autograd.grad(f(a, b), a)[0]

    assert torch.equal(jit(step, executors=[e.ex])(A, B), B)


def test_operators_are_whole() -> None:
    """dce keeps an operator of which one result is used, and a user's fn may use autograd itself."""
    ex = OperatorExecutor("ex")

    def fn(a: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            a = a.clone().requires_grad_()
            (g,) = torch.autograd.grad((a * a).sum(), a)
        return g, a.detach()

    op = ex.register_operator("both", like=lambda a: (a * 2, a * 1), fn=fn)
    f = jit(lambda a: op(a)[0].sin().sin().sin().sin().sin().sin().sin().sin().sin().sin().sin().sin(), executors=[ex])
    wanted = A * 2
    for _ in range(12):
        wanted = wanted.sin()
    a = A.clone().requires_grad_()
    for x in (A, a):
        assert torch.equal(f(x), wanted)
        assert "= both(" in program(f)


def test_traces_with_operators_pickle() -> None:
    e = Example("pickled")
    f = lambda a, b: e.multimul(a, b, a, b)
    trace = tfn.trace(f, A, B)
    assert pickle.loads(pickle.dumps(trace)) == trace
    with pytest.raises(ExecutorError, match=r"^the executor pickled is pickled by its name, but is not registered"):
        pickle.dumps(e.ex)
    register_executor(e.ex)
    try:
        assert pickle.loads(pickle.dumps(e.ex)) is e.ex
        assert pickle.loads(pickle.dumps(e.multimul)) is e.multimul
    finally:
        deregister_executor(e.ex)


@pytest.mark.parametrize("copied", [lambda one: pickle.loads(pickle.dumps(one)), copy.copy, copy.deepcopy])
def test_what_compile_makes_is_pickled_and_copied_with_the_executors_of_a_machine(copied: Callable[[Any], Any]) -> None:
    module = torch.nn.Linear(2, 2)
    for frontend in (None, "dynamo"):
        found = copied(tfn.compile(module, frontend=frontend))
        assert isinstance(found, torch.nn.Linear) and torch.equal(found(A), module(A))
    assert torch.equal(copied(tfn.compile(torch.sin))(A), torch.sin(A))
    for executor in (*machine_executors(), GRAPHS):
        assert copied(executor).name == executor.name
    assert copied(inductor(tiered=True, fuel=3)).fuel == 3


def test_the_executors_of_a_machine_are_the_same_where_they_are_unpickled() -> None:
    for executor in (*machine_executors(), GRAPHS):
        assert pickle.loads(pickle.dumps(executor)) is executor


@pytest.mark.filterwarnings("ignore:.*takes nothing of:thunder_fn.errors.RegionWarning")
def test_custom_ops_of_torch_library_need_no_registration() -> None:
    @torch.library.custom_op("thunder_fn_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return torch.from_numpy(np.multiply(x.detach().numpy(), 2))

    twice.register_fake(lambda x: torch.empty_like(x))
    twice.register_autograd(lambda ctx, g: g * 2, setup_context=lambda ctx, inputs, output: None)
    twice.register_vmap(lambda info, in_dims, x: (twice(x), in_dims[0]))
    ex = OperatorExecutor("ex")
    fast = ex.register_operator("fast_twice", like=lambda x: x * 2, fn=lambda x: x + x)
    ex.register_implementation(twice, execution_transform=fast)
    f = lambda x: twice(x).sum()
    for g in (f, jit(f), jit(f, executors=[ex])):
        assert torch.equal(g(A), (A * 2).sum())
        assert torch.equal(grad(g)(A), torch.full((2, 2), 2.0))
        assert torch.equal(tfn.vmap(g)(A), (A * 2).sum(1))
        assert torch.equal(tfn.vmap(grad(g))(A), torch.full((2, 2), 2.0))
    h = jit(f, executors=[ex])
    h(A)
    assert "= fast_twice(" in program(h)


# ---- names ----


def test_the_registry() -> None:
    e = Example("named")
    assert "torch" in list_executors() and "named" not in list_executors()
    register_executor(e.ex)
    try:
        assert register_executor(e.ex) is e.ex and get_executor("named") is e.ex and "named" in list_executors()
        f = jit(lambda a, b: e.multimul(a, b, a, b), executors=["named"])
        f(A, B)
        assert "by named" in program(f)
        with pytest.raises(ExecutorError) as caught:
            register_executor(OperatorExecutor("named"))
        assert message_of(caught.value) == (
            "register_executor: another executor is registered as 'named'\n"
            "Call `deregister_executor('named')` first, or give this one another name."
        )
    finally:
        deregister_executor("named")
    f(A + 1, B)
    with pytest.raises(UnknownOption, match=r"^get_executor: unknown executor 'named'; did you mean '"):
        get_executor("named")
    with pytest.raises(UnknownOption, match=r"^deregister_executor: unknown executor 'named'"):
        deregister_executor("named")
    first, second = OperatorExecutor("named"), OperatorExecutor("named")
    register_executor(first)
    misuse(
        lambda: deregister_executor(second),
        "deregister_executor: the executor that is registered as 'named' is another one",
    )
    deregister_executor(first)
    with pytest.raises(ExecutorError, match=r"(?m)^deregister_executor: 'torch' comes with thunder_fn$"):
        deregister_executor("torch")
    with pytest.raises(ExecutorError, match=r"(?m)^register_executor: expected an executor, given a str$"):
        register_executor("named")  # type: ignore[arg-type]


# ---- misuse ----


def misuse(run: Callable[[], Any], text: str) -> None:
    with pytest.raises(ExecutorError) as caught:
        run()
    assert message_of(caught.value) == text


def test_registering_an_operator_wrongly() -> None:
    ex = Example().ex
    fn = multimul_impl
    misuse(
        lambda: ex.register_operator("multimul", like=multimul_like, fn=fn),
        "myex.register_operator: multimul is registered already\nGive the new operator another name, or make a new executor.",
    )
    misuse(
        lambda: ex.register_operator("other", fn=fn),
        "myex.register_operator: other needs one of like= and meta=, given neither",
    )
    misuse(
        lambda: ex.register_operator("other", like=fn, meta=fn, fn=fn),
        "myex.register_operator: other needs one of like= and meta=, given both",
    )
    misuse(
        lambda: ex.register_operator("a b", like=fn, fn=fn),
        "myex.register_operator: an operator's name is an identifier, given 'a b'",
    )
    misuse(
        lambda: ex.register_operator("other", like=fn, fn=3),  # type: ignore[arg-type]
        "myex.register_operator: fn of other is not a function: 3",
    )


def test_registering_an_implementation_wrongly() -> None:
    e = Example()
    misuse(
        lambda: e.ex.register_implementation(torch.mul),
        "myex.register_implementation: nothing to do for torch.mul\n"
        "Give an operator, an execution_transform or a grad_transform.",
    )
    misuse(
        lambda: e.ex.register_implementation(torch.mul, execution_transform=3),  # type: ignore[arg-type]
        "myex.register_implementation: execution_transform is not a function: 3",
    )
    with pytest.raises(
        ExecutorError,
        match=r"^myex.register_implementation: test_reg.* is not an op of a trace\nfrom: .*\nGive an ATen",
    ):
        e.ex.register_implementation(lambda a: a, execution_transform=torch.sin)
    with pytest.raises(
        ExecutorError, match=r"(?m)^the executor myex is frozen in a program; register on the original$"
    ):
        e.ex.frozen().register_implementation(torch.mul, execution_transform=torch.sin)


def test_what_meta_and_like_return() -> None:
    ex = OperatorExecutor("ex")
    nothing = ex.register_operator("nothing", like=lambda a: 3, fn=lambda a: 3)
    text = ex.register_operator("text", meta=lambda a: object(), fn=lambda a: a)
    broken = ex.register_operator("broken", meta=lambda a: a.foo, fn=lambda a: a)
    outside = torch.ones(2, 2)
    reads = ex.register_operator("reads", like=lambda a: a + outside, fn=lambda a: a + outside)
    line = lambda f: f"\nfrom:         {__file__}:{f.__code__.co_firstlineno} in <lambda>"
    f1, f2, f3, f4 = (lambda a: nothing(a)), (lambda a: text(a)), (lambda a: broken(a)), (lambda a: reads(a))
    misuse(lambda: jit(f1)(A), f"nothing: like returned no tensor{line(f1)}")
    misuse(
        lambda: jit(f2)(A),
        f"text: meta returned an object; it returns tensors, such as `torch.empty_like(a)`, and numbers{line(f2)}",
    )
    with pytest.raises(
        ExecutorError, match=r"^broken: meta raised AttributeError: 'FakeTensor' object has no attribute 'foo'"
    ):
        jit(f3)(A)
    misuse(
        lambda: jit(f4)(A),
        f"reads: like reads a tensor from outside, which transforms could not see; pass it as an argument{line(f4)}",
    )


def test_fn_returns_something_else() -> None:
    ex = OperatorExecutor("ex")
    wide = ex.register_operator("wide", like=lambda a: a * 1, fn=lambda a: a.double())
    few = ex.register_operator("few", like=lambda a: (a * 1, a * 2), fn=lambda a: a)
    raises = ex.register_operator("raises", like=lambda a: a * 1, fn=lambda a: a.foo)
    f, g = (lambda a: wide(a.sin())), (lambda a: few(a)[0])
    fix = "fn has to return tensors of the dtypes and shapes that `like` or `meta` says."
    misuse(
        lambda: jit(f, executors=[ex])(A),
        "wide: fn returned (f64[2, 2]), but the operator's results are (f32[2, 2])\n"
        f"from:         {__file__}:{f.__code__.co_firstlineno} in <lambda>\n{fix}",
    )
    misuse(
        lambda: jit(g, executors=[ex])(A),
        "few: fn returned (f32[2, 2]), but the operator's results are (f32[2, 2], f32[2, 2])\n"
        f"from:         {__file__}:{g.__code__.co_firstlineno} in <lambda>\n{fix}",
    )
    writes = ex.register_operator("writes", like=lambda a, b: b * 2, fn=lambda a, b: b.mul_(2))
    w, b = (lambda a, b: writes(a, b)), B.clone()
    misuse(
        lambda: jit(w, executors=[ex])(A, b),
        "writes: fn wrote to tensor 1 of its arguments, which others may read\n"
        f"from:         {__file__}:{w.__code__.co_firstlineno} in <lambda>\n"
        "fn has to be pure: write to a copy (`x = x.clone()`) and return it.",
    )
    h = lambda a: raises(a)
    with pytest.raises(AttributeError) as caught:
        jit(h, executors=[ex])(A)
    assert caught.value.__notes__ == [
        f"while raises ran its fn\nfrom:         {__file__}:{h.__code__.co_firstlineno} in <lambda>"
    ]


def test_wrong_execution_transforms() -> None:
    ex = OperatorExecutor("ex")
    ex.register_implementation(torch.mul, execution_transform=lambda a, b: (a, b))
    with pytest.raises(ExecutorError) as caught:
        jit(mul, executors=[ex])(A, B)
    lines = message_of(caught.value).splitlines()
    assert lines[:2] == [
        "the execution transform <lambda> returned (f32[2, 2], f32[2, 2]), but the op gives (f32[2, 2])",
        "in equation:  v2: f32[2, 2] = aten.mul.Tensor(v0, v1)",
    ]
    assert lines[2].endswith(f"{mul.__code__.co_firstlineno + 1} in mul")
    ex.register_implementation(torch.aminmax, execution_transform=lambda x, **_: {"min": x.min(), "max": x.max()})
    with pytest.raises(ExecutorError, match=r"returned a dict, but results of aten.aminmax.default come in an order"):
        jit(lambda x: torch.aminmax(x), executors=[ex])(A)


def test_wrong_grad_transforms() -> None:
    def check_text(transform: Callable[..., Any], text: str) -> None:
        ex = OperatorExecutor("ex")
        ex.register_implementation(torch.mul, grad_transform=transform)
        with pytest.raises(ExecutorError) as caught:
            grad(jit(total, executors=[ex]))(A, B)
        assert message_of(caught.value).splitlines()[0] == text
        assert "in total" in message_of(caught.value)

    def wide(a: Tensor, b: Tensor) -> Tensor:
        out = a * b
        put_grad(a, get_grad(out).double())
        return out

    def foreign(a: Tensor, b: Tensor) -> Tensor:
        out = a * b
        put_grad(out, get_grad(out))
        return out

    def lost(a: Tensor, b: Tensor) -> Tensor:
        put_grad(a, get_grad(a.sin()))
        return a * b

    def unequal(a: Tensor, b: Tensor) -> Tensor:
        out = a * b
        put_grads((a, b), (get_grad(out),))
        return out

    def other(a: Tensor, b: Tensor) -> Tensor:
        return a * b, a  # type: ignore[return-value]

    def silent(a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def constant(a: Tensor, b: Tensor) -> Tensor:
        put_grads((a, b), (b, a))
        return a * b

    lost_text = "the gradient through result 0 would be lost: the grad transform does not ask for it"
    check_text(silent, f"ex: silent: {lost_text}")
    check_text(constant, f"ex: constant: {lost_text}")
    check_text(wide, "ex: wide: the gradient of argument 0 is f64[2, 2], but the argument is f32[2, 2]")
    check_text(foreign, "ex: foreign: put_grad was given a tensor that is no argument: f32[2, 2]")
    check_text(lost, "ex: lost: get_grad was asked for the gradient of an f32[2, 2] that is not returned")
    check_text(unequal, "ex: unequal: put_grads got 2 arguments and 1 gradients")
    check_text(other, "ex: other: the grad transform returned (f32[2, 2], f32[2, 2]), but the op gives (f32[2, 2])")
    misuse(lambda: get_grad(A), "get_grad was called outside a grad transform\nRegister one: `grad_transform=`.")


def test_a_grad_transform_says_what_it_is_asked_for() -> None:
    """A gradient that a transform says nothing about would be zero: it is an error where it is wanted, and only there."""

    def first_only(a: Tensor, b: Tensor) -> Tensor:
        out = a * b
        put_grad(a, b * get_grad(out))
        return out

    ex = OperatorExecutor("ex")
    ex.register_implementation(torch.mul, grad_transform=first_only)
    f = jit(total, executors=[ex])
    assert torch.equal(grad(f)(A, B), B)
    for wanted in (lambda: grad(f, argnums=(0, 1))(A, B), lambda: tfn.vmap(grad(f, argnums=1))(A, B)):
        with pytest.raises(ExecutorError) as caught:
            wanted()
        assert message_of(caught.value).startswith(
            "ex: first_only: the grad transform gives no gradient for argument 1, an f32[2"
        )
        assert message_of(caught.value).endswith("Call `put_grad` for it; with None if the gradient is zero.")

    def with_zero(a: Tensor, b: Tensor) -> Tensor:
        out = a * b
        put_grads((a, b), (b * get_grad(out), None))
        return out

    ex.register_implementation(torch.mul, grad_transform=with_zero)
    found = grad(f, argnums=(0, 1))(A, B)
    assert torch.equal(found[0], B) and not found[1].any()


def test_a_grad_transform_of_several_results() -> None:
    def same(x: Tensor) -> tuple[Tensor, Tensor]:
        out = x * 3
        put_grad(x, get_grad(out) * 3)
        return out, out

    def first_of(x: Tensor) -> tuple[Tensor, Tensor]:
        out = x * 3
        put_grad(x, get_grad(out) * 3)
        return out, x * 3

    ex = OperatorExecutor("ex")
    two = lambda x: (x * 3, x * 3)
    whole = ex.register_operator("whole", like=two, fn=two, grad_transform=same)
    part = ex.register_operator("part", like=two, fn=two, grad_transform=first_of)
    weighted = lambda op: jit(lambda x: (op(x)[0] + 5 * op(x)[1]).sum(), executors=[ex])
    assert torch.equal(grad(weighted(whole))(A), torch.full((2, 2), 18.0)), "one tensor that is two results"
    assert torch.equal(grad(jit(lambda x: part(x)[0].sum(), executors=[ex]))(A), torch.full((2, 2), 3.0))
    with pytest.raises(ExecutorError, match=r"^part: the gradient through result 1 would be lost: the grad transform"):
        grad(weighted(part))(A)


def test_rules_of_an_operator_take_what_is_passed_by_name_by_position() -> None:
    ex = OperatorExecutor("ex")
    scaled = ex.register_operator(
        "scaled",
        meta=lambda x, s=1.0: torch.empty_like(x),
        fn=lambda x, s=1.0: x * s,
        jvp=lambda primals, tangents: (scaled(*primals), tangents[0] * (primals[1] if len(primals) > 1 else 1)),
        vmap=lambda size, batched, *args: (scaled(*args), True),
    )
    for f, factor in ((lambda x: scaled(x), 1), (lambda x: scaled(x, s=2.0), 2), (lambda x: scaled(s=3.0, x=x), 3)):
        g = jit(f, executors=[ex])
        assert torch.equal(tfn.jvp(g, (A,), (B,))[1], B * factor)
        assert torch.equal(tfn.vmap(g)(A), A * factor)
        assert torch.equal(tfn.vmap(grad(lambda x, g=g: g(x).sum()))(A), torch.full((2, 2), float(factor)))


@pytest.mark.parametrize(
    "spelling",
    [torch.mul, Tensor.mul, Tensor.__mul__, operator.mul, torch.ops.aten.mul, "torch.mul", "aten.mul.Tensor"],
)
def test_spellings_of_an_op(spelling: Any) -> None:
    e = Example()
    e.ex.register_implementation(spelling, execution_transform=e.mul_to_multimul)
    f = jit(lambda a, b: a * b + torch.mul(a, b) + a.mul(b), executors=[e.ex])
    assert torch.equal(f(A, B), 3 * A * B)
    assert e.calls == 3


@pytest.mark.filterwarnings("ignore:.*takes nothing of:thunder_fn.errors.RegionWarning")
def test_an_implementation_of_a_composite_is_for_its_calls_and_not_for_what_transforms_make_of_them() -> None:
    """The forward that a backward needs residuals of has other results, and the same function of the user's is in it."""

    @tfn.composite
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(torch.sin(x)) * x.sum()

    executor = OperatorExecutor("mine", version="1")
    operator = executor.register_operator("scaled", like=scaled, fn=lambda x: torch.exp(torch.sin(x)) * x.sum())
    executor.register_implementation(scaled, operator)
    x = torch.randn(3)
    called = tfn.jit(scaled, executors=[executor])
    torch.testing.assert_close(called(x), scaled(x))
    assert "by mine" in str(tfn.last_traces(called)[-1])
    wanted = torch.func.grad(lambda x: scaled(x).sum())(x)
    torch.testing.assert_close(tfn.jit(tfn.grad(lambda x: scaled(x).sum()), executors=[executor])(x), wanted)
    leaf = x.clone().requires_grad_()
    called(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, wanted)


def test_results_whose_sizes_change_between_calls() -> None:
    ex = OperatorExecutor("sized")
    double = ex.register_operator("double", like=lambda x, y: torch.cat((x, y)), fn=lambda x, y: torch.cat((x, y)))
    f = tfn.jit(lambda x, y: double(x, y).sum(0), executors=[ex], cache="symbolic values")
    for sizes in ((2, 3), (5, 4), (7, 9)):
        x, y = (torch.randn(size, 2) for size in sizes)
        assert torch.equal(f(x, y), torch.cat((x, y)).sum(0))
    assert tfn.cache_info(f).misses == 1
    wrong = ex.register_operator("wrong", like=lambda x: x + 1, fn=lambda x: (x + 1)[:2])
    short = tfn.jit(lambda x: wrong(x), executors=[ex], cache="symbolic values")
    with pytest.raises(ExecutorError, match=r"wrong: fn returned \(f32\[2, 2\]\), but .* are \(f32\[3, 2\]\)"):
        short(torch.randn(3, 2))


def test_an_implementation_serves_the_forward_of_a_training_step() -> None:
    """The backward of a layer needs its input and its weight, so its forward is the call as the user wrote it."""
    calls = list[int]()

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        calls.append(x.dim())
        return torch.nn.functional.linear(x, w, b)

    ex = OperatorExecutor("layers")
    mine = ex.register_operator("mine", like=torch.nn.functional.linear, fn=fn)
    ex.register_implementation(torch.nn.functional.linear, execution_transform=lambda *args: mine(*args))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    for x in (torch.randn(5, 4), torch.randn(3, 5, 4)):
        calls.clear()
        jit(model, executors=[ex])(x).sum().backward()
        assert calls == [x.dim(), x.dim()]
