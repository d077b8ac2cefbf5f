"""cond and switch: error texts, and Python outside a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.errors import CaptureError, TraceTypeError

Tensor = torch.Tensor
X = torch.tensor([0.5, -1.5])


def wide(x: Tensor) -> Any:
    return {"h": x.double(), "n": 1, "same": x}


def narrow(x: Tensor) -> Any:
    return {"h": x, "n": 2, "same": x.sin()}


def text_of(f: Any, error: type[Exception] = TraceTypeError) -> list[str]:
    with pytest.raises(error) as info:
        tfn.jit(f)(X)
    lines = message_of(info.value).splitlines()
    (source,) = [line for line in lines if line.startswith("from: ")]
    assert "test_structured_cond.py:" in source
    return [line for line in lines if line != source]


def test_branches_that_differ() -> None:
    lines = (wide.__code__.co_firstlineno, narrow.__code__.co_firstlineno)
    assert text_of(lambda x: tfn.cond(x.sum() > 0, wide, narrow, (x,))) == [
        "cond: the branches must return equal types, but",
        "  out['h']: f64[2] from wide, f32[2] from narrow",
        "  out['n']: the value 1 from wide, the value 2 from narrow",
        f"branches:     wide (test_structured_cond.py:{lines[0]}) and narrow (test_structured_cond.py:{lines[1]})",
        "Cast or reshape one branch's result, e.g. `.to(torch.float32)`, so that both have the same type.",
    ]
    assert text_of(lambda x: tfn.switch(x.sum().long(), (wide, wide, torch.sin), (x,)))[0] == (
        "switch: the branches must return the same structure, "
        "but wide() is a dict with the keys 'h', 'n', 'same', and sin() is a leaf"
    )
    numbers = text_of(lambda x: tfn.cond(x.sum() > 0, lambda x: (x, 1), lambda x: (x, 2), (x,)))
    assert numbers[-1] == "Return equal numbers, or tensors such as `torch.tensor(1)`."


def test_writes_to_tensors_from_outside() -> None:
    seen = torch.zeros(2)

    def count(x: Tensor) -> Tensor:
        seen.add_(1)
        return x

    assert text_of(lambda x: tfn.cond(x.sum() > 0, count, torch.sin, (x,)), CaptureError) == [
        "cond: count writes in place to a tensor from outside (f32[2]), but a body computes new values only",
        "Return the new value, or write to a copy made inside the body (`x = x.clone()`).",
        "A module that updates buffers can be in `.eval()`, or be called by `torch.func.functional_call` on copies.",
    ]


def test_outside_a_trace_it_is_pythons_if() -> None:
    ran = []
    result = tfn.cond(torch.tensor([True]), lambda x: (ran.append("true"), x)[1], lambda x: ran.append("false"), (X,))
    assert torch.equal(result, X) and result is not X and ran == ["true"]
    assert tfn.switch(7, [torch.sin, lambda x: "last"], (X,)) == "last"
    with pytest.raises(TraceTypeError, match="at least one branch"):
        tfn.switch(0, [], (X,))


COND = "Write `thunder_fn.cond(pred, true_fn, false_fn, (x, y))`, as `torch.cond(pred, true_fn, false_fn, (x, y))`."
SWITCH = (
    "Write `thunder_fn.switch(index, (f, g), (x, y))`; PyTorch has `torch.cond(pred, f, g, (x, y))` for two branches."
)


def test_what_chooses_is_one_bool_or_integer() -> None:
    assert text_of(lambda x: tfn.cond(x > 0, torch.sin, torch.cos, (x,))) == [
        "cond: the predicate must be a bool or a tensor of one bool, not the tensor bool[2]",
        "Reduce it with `.all()` or `.any()`, or choose for each example: `vmap`, or `torch.where`.",
        COND,
    ]
    assert text_of(lambda x: tfn.switch(x.sum(), (torch.sin, torch.cos), (x,))) == [
        "switch: the index must be an int or a tensor of one integer, not the tensor f32[]",
        "Convert it by `.to(torch.int64)`.",
        SWITCH,
    ]
    assert text_of(lambda x: tfn.cond(x.sum(), torch.sin, torch.cos, (x,)))[1:] == ["Compare it: `x != 0`.", COND]


NO_BOOLS = [
    *(None, "yes", "", [], [True], (1, 2), (), print, 0.5, 0, 1, 1j, {}, float("nan"), torch.bool, slice(0)),
    *(torch.tensor(1), torch.tensor(0.5), torch.tensor(1j), torch.ones(2, dtype=torch.bool)),
    *(torch.ones(0, dtype=torch.bool), torch.ones(1, 2, dtype=torch.bool)),
]


@pytest.mark.parametrize("wrap", [lambda f: f, tfn.jit, tfn.vmap, lambda f: tfn.jit(tfn.vmap(f))])
def test_nothing_else_is_a_predicate(wrap: Any) -> None:
    """Whatever Python or a tensor would be taken for as a truth is an error of ours that shows the right spelling."""
    x = torch.randn(3, 2)
    for bad in NO_BOOLS:
        with pytest.raises(TraceTypeError, match="the predicate must be a bool or a tensor of one bool") as info:
            wrap(lambda x, bad=bad: tfn.cond(bad, torch.sin, torch.cos, (x,)))(x)
        assert COND in message_of(info.value)
        condition = lambda x, bad=bad: bad
        with pytest.raises(TraceTypeError, match="the condition must be a bool or a tensor of one bool") as info:
            wrap(lambda x, condition=condition: tfn.while_loop(condition, lambda x: (x + 1,), (x,)))(x)
        assert "`torch.while_loop(cond_fn, body_fn, (x, y))`" in message_of(info.value)
    for bad in (None, "0", [], True, 0.5, torch.tensor(True), torch.tensor(0.0), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(TraceTypeError, match="the index must be an int or a tensor of one integer") as info:
            wrap(lambda x, bad=bad: tfn.switch(bad, (torch.sin, torch.cos), (x,)))(x)
        assert SWITCH in message_of(info.value)


@pytest.mark.parametrize("wrap", [lambda f: f, tfn.jit, tfn.vmap])
def test_nothing_else_is_a_function_or_a_tuple_of_operands(wrap: Any) -> None:
    """The rows of a bare tensor are no operands."""
    x, flag = torch.randn(3, 1, 2), torch.tensor(True)
    for bad in (x, {"x": x}, 3, None, (a for a in (x,)), "x"):
        for call, spelling in (
            (lambda x, bad=bad: tfn.cond(flag, torch.sin, torch.cos, bad), COND),
            (lambda x, bad=bad: tfn.switch(flag.long(), (torch.sin, torch.cos), bad), SWITCH),
            (lambda x, bad=bad: tfn.while_loop(lambda x: x.sum() > 9, torch.sin, bad), "torch.while_loop"),
        ):
            with pytest.raises(TraceTypeError, match="must be a tuple or a list of operands") as info:
                wrap(call)(x)
            assert spelling in message_of(info.value)
    for bad in (None, x, 3, (torch.sin,)):
        for call in (
            lambda x, bad=bad: tfn.cond(flag, torch.sin, bad, (x,)),
            lambda x, bad=bad: tfn.cond(flag, bad, torch.sin, (x,)),
            lambda x, bad=bad: tfn.switch(0, (torch.sin, bad), (x,)),
            lambda x, bad=bad: tfn.switch(0, bad if not isinstance(bad, tuple) else torch.sin, (x,)),
            lambda x, bad=bad: tfn.while_loop(bad, torch.sin, (x,)),
            lambda x, bad=bad: tfn.while_loop(lambda x: x.sum() > 9, bad, (x,)),
        ):
            with pytest.raises(TraceTypeError, match="function"):
                wrap(call)(x)


@pytest.mark.parametrize("wrap", [lambda f: f, tfn.jit])
def test_bools_that_data_decides(wrap: Any) -> None:
    """A number found in data chooses as the tensor that it is found in does."""

    def f(x: Tensor) -> Any:
        first = tfn.cond(x.sum().item() > 0, torch.sin, torch.cos, [x])
        second = tfn.switch(x[x > 0].shape[0], torch.nn.ModuleList((torch.nn.ReLU(), torch.nn.Tanh())), (x,))
        third = tfn.while_loop(lambda x: x.sum().item() < 9, lambda x: (x.abs() + 1,), (x,))[0]
        return first, second, third

    g = wrap(f)
    for x in (torch.tensor([1.0, 2.0]), torch.tensor([-1.0, -2.0])):
        positive = x.sum() > 0
        loop = x
        while loop.sum() < 9:
            loop = loop.abs() + 1
        want = (x.sin() if positive else x.cos()), (x.tanh() if positive else x.relu()), loop
        torch.testing.assert_close(g(x), want)


@pytest.mark.parametrize("f", [torch.linalg.inv, torch.linalg.cholesky, lambda x: torch.linalg.solve(x, x[0])])
def test_vmap_of_branches_that_raise(f: Any) -> None:
    """An example raises for the values of the branch that it takes, and for no others."""
    good = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    xs, takes = torch.stack([good, torch.zeros_like(good)]), torch.tensor([True, False])
    g = lambda take, x: tfn.cond(take, lambda x: f(x).sum(), lambda x: x.cos().sum(), (x,))
    want = torch.stack([torch.func.grad(lambda x: f(x).sum())(good), torch.func.grad(lambda x: x.cos().sum())(xs[1])])
    torch.testing.assert_close(tfn.vmap(g)(takes, xs), torch.stack([f(good).sum(), xs[1].cos().sum()]))
    torch.testing.assert_close(tfn.vmap(tfn.grad(g, 1))(takes, xs), want)
    torch.testing.assert_close(tfn.grad(lambda xs: tfn.vmap(g)(takes, xs).sum())(xs), want)
    with pytest.raises(torch.linalg.LinAlgError):
        tfn.vmap(g)(torch.tensor([True, True]), xs)


def test_vmap_as_a_loop() -> None:
    """Each example runs the branch that it takes; the other is not run at all."""
    w = torch.tensor([[1.0, 2.0], [0.5, -1.0]])
    xs = torch.tensor([[0.5, 1.5], [-1.0, 0.2], [2.0, 0.1]])

    def f(x: Tensor, batched: str) -> Any:
        choice = tfn.cond(x[0] > 0, lambda x: x @ w, lambda x: x.sin(), (x,), batched=batched)
        return tfn.switch((x[0] * 2).long(), (torch.cos, lambda x: x, torch.exp), (choice,), batched=batched)

    loop, select = (lambda x, by=by: f(x, by) for by in ("loop", "select"))
    close = torch.testing.assert_close
    for transform in (
        tfn.vmap,
        lambda g: tfn.vmap(tfn.grad(lambda x: g(x).sum())),
        lambda g: tfn.grad(lambda xs: tfn.vmap(g)(xs).sum()),
        lambda g: tfn.jit(tfn.vmap(g)),
        lambda g: tfn.vmap(tfn.jacfwd(g)),
    ):
        close(transform(loop)(xs), transform(select)(xs))
    close(tfn.vmap(tfn.vmap(loop))(xs[None].repeat(2, 1, 1)), tfn.vmap(tfn.vmap(select))(xs[None].repeat(2, 1, 1)))
    text = str(tfn.trace(tfn.vmap(loop), xs))
    assert text.count("scan(") >= 2 and "cond(" in text and "aten.where" not in text
    with pytest.raises(TraceTypeError, match="cond: batched is 'select' or 'loop', given 'both'"):
        tfn.cond(True, torch.sin, torch.cos, (X,), batched="both")


def test_what_all_branches_pass_through_is_no_choice() -> None:
    """It stays as it is under vmap: what all examples share has no batch dim, as in JAX."""
    w, xs = torch.randn(2), torch.randn(3, 2)

    def f(x: Tensor, w: Tensor) -> Any:
        first = tfn.cond(x.sum() > 0, lambda x, w: (w, x, x.sin()), lambda x, w: (w, x, w), (x, w))
        second = tfn.switch((x.sum() > 0).long(), [lambda x, w: (w, x), lambda x, w: (x, w)], (x, w))
        return first, second

    for wrap in (lambda f: f, tfn.jit):
        (same, own, chosen), swapped = wrap(tfn.vmap(f, (0, None), ((None, 0, 0), 0)))(xs, w)
        rows = [f(x, w) for x in xs]
        assert torch.equal(same, w) and torch.equal(own, xs)
        assert torch.equal(chosen, torch.stack([first[2] for first, _ in rows]))
        for index in (0, 1):
            assert torch.equal(swapped[index], torch.stack([second[index] for _, second in rows]))
    assert "aten.where" not in str(
        tfn.trace(tfn.vmap(lambda x: tfn.cond(x.sum() > 0, lambda x: x, lambda x: x, (x,))), xs)
    )


@pytest.mark.parametrize("wrap", [lambda f: f, tfn.jit], ids=["eager", "jit"])
def test_decisions_under_the_vmap_of_torch_func(wrap: Any) -> None:
    """Outside of a trace a choice is Python's own, and torch.func's vmap has no rule for that."""
    x, y = torch.tensor([1.0, -1.0]), torch.tensor([3.0, 4.0])
    steps = lambda x, y: tfn.while_loop(lambda y: y < x, lambda y: (y + 1,), (y,))[0]
    for f, op in (
        (lambda x, y: tfn.cond(x > 0, torch.sin, torch.cos, (y,)), "cond"),
        (lambda x, y: tfn.switch(x.to(torch.int64), [torch.sin, torch.cos], (y,)), "switch"),
        (steps, "while_loop"),
    ):
        torch.testing.assert_close(tfn.vmap(wrap(f))(x, y), torch.stack([f(x[0], y[0]), f(x[1], y[1])]))
        with pytest.raises(TraceTypeError) as error:
            torch.func.vmap(wrap(f))(x, y)
        what, where, fix = message_of(error.value).split("\n")
        assert what == (
            f"{op}: examples of torch.func.vmap decide differently, and outside of a trace {op} is Python's own"
        )
        assert "test_structured_cond.py" in where
        assert fix == "Batch it with `thunder_fn.vmap`, which has a rule for it."


def test_an_eager_choice_is_a_scalar_too() -> None:
    with pytest.raises(TraceTypeError, match=r"^cond: the predicate must be a bool .*, not the tensor f32\[2\]"):
        tfn.cond(torch.ones(2), torch.sin, torch.cos, (torch.ones(2),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_torch_cond_asks_any_tensor_of_one_element(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    f = lambda p, x: torch.cond(p, lambda x: x.sin(), lambda x: x.cos(), (x,))
    jitted, x = tfn.jit(f), torch.tensor([0.5, 1.0])
    for value in (0, 1, 2):
        pred = torch.full(shape, value, dtype=dtype)
        torch.testing.assert_close(jitted(pred, x), f(pred, x))
