"""Laws of reverse mode, with PyTorch as the independent judge."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_fn.interpreters import grad as reverse
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir.trace import Atom, TensorType, Trace, TraceBuilder, Var
from thunder_fn.ir.walking import inline_into
from thunder_fn.testing.drawn_programs import random_tensor
from thunder_fn.testing.laws.comparing import (
    Inputs,
    Values,
    agree,
    chosen,
    close,
    draws,
    holds,
    is_tame,
    random_like,
    run,
    same_bits,
    state_after,
    tolerance,
    wanted_inputs,
    wanted_outputs,
)
from thunder_fn.testing.laws.interpreters import pull, split
from thunder_fn.testing.laws.losses import add_inner, emit, scalarised

aten = torch.ops.aten


# ---- laws of reverse mode ----


def partial(trace: Trace, inputs: Inputs) -> tuple[Callable[..., Values], Inputs]:
    """The trace as a function of its differentiable inputs to its differentiable outputs, and
    those inputs.
    """
    mask = wanted_inputs(trace)

    def f(*active: torch.Tensor) -> Values:
        supply = iter(active)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            values = evaluate(
                trace,
                [next(supply) if wanted else x for x, wanted in zip(inputs, mask, strict=True)],
            )
        return chosen(values, wanted_outputs(trace))

    return f, chosen(inputs, mask)


def inner(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """The real inner product of two lists of tensors."""
    pairs = zip(a, b, strict=True)
    return functools.reduce(
        float.__add__, (float((x.conj() * y).real.double().sum().detach()) for x, y in pairs), 0.0
    )


def norm(values: Sequence[torch.Tensor]) -> float:
    """The length of a list of tensors."""
    return inner(values, values) ** 0.5


def jvp_by_pytorch(f: Callable[..., Values], primals: Inputs, tangents: Inputs) -> Values:
    """PyTorch's forward mode; where an op has none, its reverse mode twice."""
    try:
        return torch.func.jvp(f, primals, tangents)[1]
    except (NotImplementedError, RuntimeError):
        return torch.autograd.functional.jvp(f, primals, tangents)[1]


def law_vjp_is_adjoint_of_jvp(trace: Trace, inputs: Inputs) -> None:
    """For a tangent v and a cotangent ct, ``<ct, jvp(v)> == <vjp(ct), v>``, with PyTorch's jvp
    of evaluate.
    """
    f, primals = partial(trace, inputs)
    cotangents = random_like(trace)
    if not primals or not cotangents:
        return
    generator = torch.Generator().manual_seed(2)
    tangents = tuple(random_tensor(TensorType(x.dtype, tuple(x.shape)), generator) for x in primals)
    pushed = jvp_by_pytorch(f, primals, tangents)
    pulled = run(pull(trace), (*inputs, *cotangents))[len(trace.outputs) :]
    if not is_tame((*pushed, *pulled, *f(*primals))):
        return
    left, right = inner(cotangents, pushed), inner(pulled, tangents)
    scale = 1 + norm(cotangents) * norm(pushed) + norm(pulled) * norm(tangents)
    what = f"<ct, jvp(v)> is {left}, but <vjp(ct), v> is {right}"
    holds(abs(left - right) <= tolerance(trace) * scale, what, trace=trace, vjp=pull(trace))


def autograd(
    f: Callable[..., Values], primals: Inputs, cotangents: Sequence[torch.Tensor]
) -> Inputs:
    """PyTorch's gradients of a function; zeros where it does not depend on an input."""
    leaves = tuple(x.detach().clone().requires_grad_() for x in primals)
    pairs = [(y, ct) for y, ct in zip(f(*leaves), cotangents, strict=True) if y.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(x) for x in primals)
    ys, cts = zip(*pairs, strict=True)
    grads: tuple[Any, ...] = torch.autograd.grad(ys, leaves, cts, allow_unused=True)
    return tuple(
        torch.zeros_like(x) if grad is None else grad
        for x, grad in zip(primals, grads, strict=True)
    )


def law_vjp_is_autograd(trace: Trace, inputs: Inputs) -> None:
    """The values are evaluate's, bitwise, and the gradients those of torch.autograd over
    evaluate.
    """
    new, cotangents = pull(trace), random_like(trace)
    f, primals = partial(trace, inputs)
    found = run(new, (*inputs, *cotangents))
    count = len(trace.outputs)
    agree(
        found[:count], run(trace, inputs), "the values beside the gradients", trace=trace, vjp=new
    )
    want = autograd(f, primals, cotangents) if primals else ()
    close(found[count:], want, tolerance(trace), "the gradients", trace=trace, vjp=new)


def law_split_is_vjp(trace: Trace, inputs: Inputs) -> None:
    """Forward, then backward on its residuals, gives what vjp gives; an unwanted gradient
    changes no other.
    """
    whole, cotangents, count = split(trace), random_like(trace), len(trace.outputs)
    outputs = run(whole.forward, inputs)
    same = torch.equal(state_after(whole.forward, inputs), state_after(trace, inputs))
    holds(
        same, "the forward draws more or fewer random numbers", trace=trace, forward=whole.forward
    )
    holds(
        not draws(whole.backward),
        "the backward draws random numbers",
        trace=trace,
        backward=whole.backward,
    )
    places = {"input": inputs, "output": outputs, "extra": outputs[count:]}
    residuals = tuple(places[r.kind][r.index] for r in whole.residuals)
    found = run(whole.backward, (*residuals, *cotangents))
    want = run(pull(trace), (*inputs, *cotangents))[count:]
    for position, (place, tensor) in enumerate(zip(whole.gradients, want, strict=True)):
        have = torch.zeros_like(tensor) if place is None else found[place]
        holds(
            same_bits(have, tensor),
            f"gradient {position} of the split differs from vjp's",
            trace=trace,
        )
    for position in (i for i, wanted in enumerate(wanted_inputs(trace)) if wanted):
        only = tuple(i == position for i in range(len(inputs)))
        alone = run(reverse.vjp(trace, only, wanted_outputs(trace)), (*inputs, *cotangents))[count:]
        rank = wanted_inputs(trace)[:position].count(True)
        close(
            alone,
            want[rank : rank + 1],
            tolerance(trace),
            f"the gradient of input {position} alone",
            trace=trace,
        )


def law_fused_split_keeps_gradients(trace: Trace, inputs: Inputs) -> None:
    """A fused backward computes again the very bits that it would have been given, and it is
    given no more.
    """
    plain, fused = split(trace), split(trace, fused=True)
    cotangents, count = random_like(trace), len(trace.outputs)
    found, given = list[Values](), list[int]()
    for one in (plain, fused):
        outputs = run(one.forward, inputs)
        residuals = one.residual_values(inputs, outputs)
        found.append((*outputs[:count], *run(one.backward, (*residuals, *cotangents))))
        given.append(sum(value.nbytes for value in residuals if isinstance(value, torch.Tensor)))
    agree(
        found[1],
        found[0],
        "the values and gradients of the fused split",
        trace=trace,
        backward=fused.backward,
    )
    holds(given[1] <= given[0], f"{given[1]} bytes of residuals, {given[0]} unfused", trace=trace)
    holds(
        not draws(fused.backward),
        "the fused backward draws random numbers",
        backward=fused.backward,
    )


def law_unused_inputs_get_zeros(trace: Trace, inputs: Inputs) -> None:
    """Further inputs that nothing reads get gradients of zeros, and the others keep theirs."""
    extra = TensorType(torch.float64, (2,))
    builder = TraceBuilder(trace.name)
    arguments = builder.take(trace.input_types)
    builder.input(extra)
    wider = builder.build(inline_into(builder, trace, arguments))
    cotangents, count = random_like(trace), len(trace.outputs)
    found = run(pull(wider), (*inputs, torch.ones(2, dtype=torch.float64), *cotangents))[count:]
    want = run(pull(trace), (*inputs, *cotangents))[count:]
    agree(
        found,
        (*want, torch.zeros(2, dtype=torch.float64)),
        "with an unused input the gradients",
        trace=wider,
    )


def law_stop_gradient_stops(trace: Trace, inputs: Inputs) -> None:
    """Behind a detach of every input all gradients are zeros; behind a detach of one, its own."""
    cotangents, count = random_like(trace), len(trace.outputs)
    positions = [i for i, wanted in enumerate(wanted_inputs(trace)) if wanted]
    for stopped in positions:
        builder = TraceBuilder(trace.name)
        arguments: list[Atom] = list(builder.take(trace.input_types))
        arguments[stopped] = emit(builder, aten.detach.default, arguments[stopped])
        new = builder.build(inline_into(builder, trace, tuple(arguments)))
        found = run(pull(new), (*inputs, *cotangents))[count:]
        rank = positions.index(stopped)
        agree(
            (found[rank],),
            (torch.zeros_like(inputs[stopped]),),
            "behind a detach the gradient",
            trace=new,
        )


# ---- second order ----


# ---- second order ----


def directional(trace: Trace, wanted: tuple[bool, ...]) -> Trace:
    """The derivative of a scalar trace along directions: a trace of the inputs, then a direction
    for each wanted.
    """
    gradient = reverse.grad_and_value(trace, wanted)
    builder = TraceBuilder("directional")
    inputs = builder.take(trace.input_types)
    directions = tuple(builder.input(var.type) for var in chosen(trace.inputs, wanted))
    found = inline_into(builder, gradient, inputs)
    total: Var | None = None
    for direction, atom in zip(directions, found, strict=False):
        if isinstance(atom, Var):
            total = add_inner(builder, total, atom, direction)
    if total is None:
        total = emit(builder, aten.full.default, (), 0.0, dtype=torch.float64)
    return builder.build((total,))


def law_second_order_is_symmetric(trace: Trace, inputs: Inputs) -> None:
    """For a loss and directions u and v, ``u H v == v H u``, and ``H v`` is torch.autograd's,
    where it has one.
    """
    loss = scalarised(trace)
    wanted = wanted_inputs(loss)
    if not any(wanted):
        return
    slope = directional(loss, wanted)
    hessian = reverse.grad_and_value(slope, (*wanted, *(False for wish in wanted if wish)))
    primals, count = chosen(inputs, wanted), wanted.count(True)
    generator = torch.Generator().manual_seed(3)
    u, v = (
        tuple(random_tensor(TensorType(x.dtype, tuple(x.shape)), generator) for x in primals)
        for _ in range(2)
    )
    hu, hv = (run(hessian, (*inputs, *direction))[:count] for direction in (u, v))
    f, _ = partial(loss, inputs)
    want = hessian_product_by_autograd(lambda *xs: f(*xs)[0], primals, v)
    if not is_tame((*hu, *hv, *(want or ()), *run(trace, inputs))):
        return
    if want is not None:
        close(hv, want, 10 * tolerance(trace), "the Hessian's product with a vector", trace=trace)
    left, right = inner(u, hv), inner(v, hu)
    scale = 1 + norm(u) * norm(hv) + norm(v) * norm(hu)
    holds(
        abs(left - right) <= 10 * tolerance(trace) * scale,
        f"u H v is {left}, but v H u is {right}",
        trace=trace,
    )


def hessian_product_by_autograd(
    f: Callable[..., torch.Tensor], primals: Inputs, v: Inputs
) -> Inputs | None:
    """PyTorch's Hessian-vector product, by its reverse mode twice; None where it lacks a third
    derivative.

    A backward that is written out in a custom rule has a derivative in PyTorch, but not always a
    second one.
    """
    zeros = tuple(torch.zeros_like(x) for x in primals)
    leaves = tuple(x.detach().clone().requires_grad_() for x in primals)
    value = f(*leaves)
    if not value.requires_grad:
        return zeros
    grads: tuple[Any, ...] = torch.autograd.grad(
        value, leaves, create_graph=True, allow_unused=True
    )
    pairs = [
        (grad, direction)
        for grad, direction in zip(grads, v, strict=True)
        if grad is not None and grad.requires_grad
    ]
    if not pairs:
        return zeros
    ys, cts = zip(*pairs, strict=True)
    try:
        found: tuple[Any, ...] = torch.autograd.grad(ys, leaves, cts, allow_unused=True)
    except RuntimeError as error:
        if not re.fullmatch("derivative for .* is not implemented", str(error)):
            raise
        return None
    return tuple(zero if grad is None else grad for zero, grad in zip(zeros, found, strict=True))
