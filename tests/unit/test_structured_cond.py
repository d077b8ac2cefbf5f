"""cond and switch: error texts, and Python outside a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thunder_fn as tfn
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
    lines = str(info.value).splitlines()
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
    result = tfn.cond(torch.tensor(3), lambda x: (ran.append("true"), x)[1], lambda x: ran.append("false"), (X,))
    assert result is X and ran == ["true"]
    assert tfn.switch(7, [torch.sin, lambda x: "last"], (X,)) == "last"
    with pytest.raises(TraceTypeError, match="at least one branch"):
        tfn.switch(0, [], (X,))


def test_what_chooses_is_one_integer() -> None:
    assert text_of(lambda x: tfn.cond(x > 0, torch.sin, torch.cos, (x,))) == [
        "cond: the choice must be a scalar, not a tensor of shape (2,)",
        "Reduce it with `.all()` or `.any()`, or choose for each example: `vmap`, or `torch.where`.",
    ]
    assert text_of(lambda x: tfn.switch(x.sum(), (torch.sin, torch.cos), (x,))) == [
        "switch: the index must be an integer, not f32[]",
        "Convert it by `.to(torch.int64)`.",
    ]
    with pytest.raises(TraceTypeError, match="must be an integer"):
        tfn.switch(torch.tensor(0.5), (torch.sin, torch.cos), (X,))


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
        what, where, fix = str(error.value).split("\n")
        assert what == (
            f"{op}: examples of torch.func.vmap decide differently, and outside of a trace {op} is Python's own"
        )
        assert "test_structured_cond.py" in where
        assert fix == "Batch it with `thunder_fn.vmap`, which has a rule for it."


def test_an_eager_choice_is_a_scalar_too() -> None:
    with pytest.raises(TraceTypeError, match=r"^cond: the choice must be a scalar, not a tensor of shape \(2,\)"):
        tfn.cond(torch.ones(2), torch.sin, torch.cos, (torch.ones(2),))
