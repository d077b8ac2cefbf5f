"""Public functions that take traces, runs or names say what is wrong with others; see also `WITHOUT_ERRORS` of test_docs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import errors, ir, parameters, testing

X = torch.ones(2)
SINE = tfn.trace(torch.sin, X)
(EQUATION,) = SINE.equations


def builder() -> ir.TraceBuilder:
    return ir.TraceBuilder("made")


@pytest.mark.parametrize("function", [tfn.simplify, tfn.roll, tfn.unroll, tfn.check])
def test_a_function_is_no_trace(function: Callable[[Any], Any]) -> None:
    with pytest.raises(errors.TraceTypeError) as info:
        function(torch.sin)
    assert message_of(info.value) == (
        f"{function.__name__}: expected a trace, given a builtin_function_or_method\n"
        "`thunder_fn.trace(f, *args)` makes the trace of a function."
    )
    with pytest.raises(errors.TraceTypeError, match=r"(?m): expected a trace, given an int$"):
        function(3)


PREPARED = tfn.lora(lambda params: params["w"].sum(), rank=1).prepare({"w": torch.ones(1)})
LINEAR, SGD = torch.nn.Linear(2, 1), tfn.functional_optimizer(torch.optim.SGD, lr=0.1)
WRONG: dict[str, tuple[type[Exception], Callable[[], object]]] = {
    "evaluate: expected a trace, given an int": (errors.TraceTypeError, lambda: tfn.evaluate(3, ())),  # type: ignore[arg-type]
    "diff: expected a trace, given an int": (errors.TraceTypeError, lambda: tfn.inspect.diff(SINE, 3)),  # type: ignore[arg-type]
    "cut without `outputs`: expected a trace, given a TraceBuilder": (
        errors.TraceTypeError,
        lambda: ir.cut(builder()),
    ),
    "sin takes 1 inputs, given 0": (errors.TraceTypeError, lambda: ir.inline_into(builder(), SINE, ())),
    "put: the equation reads 1 operands, given 2\nin equation:  v1: f32[2] = aten.sin.default(v0)": (
        errors.TraceTypeError,
        lambda: ir.put(builder(), EQUATION, SINE.inputs * 2),
    ),
    "the step must return 1 values, given 0\nin equation:  v1: f32[2] = aten.sin.default(v0)": (
        errors.TraceTypeError,
        lambda: ir.rewritten(SINE, lambda builder, equation, operands: ()),
    ),
    "compare: expected a chain or a measurement, given a Trace": (
        errors.InspectError,
        lambda: tfn.inspect.compare(SINE, SINE),  # type: ignore[arg-type]
    ),
    "export: expected the arguments of a call as one tuple, given a Tensor\nWrite `export(f, (x, y))`": (
        errors.TraceTypeError,
        lambda: tfn.export(torch.sin, X),  # type: ignore[arg-type]
    ),
    "plan: expected the arguments of a call as one tuple, given a Tensor\nWrite `plan(f, (x, y))`": (
        errors.TraceTypeError,
        lambda: tfn.plan(torch.sin, X),  # type: ignore[arg-type]
    ),
    "there is no machine 'H1'\nName one of H100 SXM,": (
        errors.InspectError,
        lambda: tfn.inspect.machine_named("H1"),
    ),
    "global_norm: expected the gradients of prepared parameters, given a list": (
        errors.RewriteError,
        lambda: parameters.clip_by_global_norm([X], 1.0),  # type: ignore[arg-type]
    ),
    "global_norm: the type of norm is positive, given 0": (
        errors.RewriteError,
        lambda: parameters.global_norm(PREPARED, 0),
    ),
    "identity: 2 names, 'w', 'w', for the first of 1 inputs of sin": (
        errors.RewriteError,
        lambda: parameters.identity(SINE, ["w", "w"]),
    ),
    "simulated: the number of ranks is an int from 1 on, given 0": (
        errors.RewriteError,
        lambda: parameters.simulated(0),
    ),
    "simulated_mesh: data: the number of ranks is an int from 1 on, given True": (
        errors.RewriteError,
        lambda: parameters.simulated_mesh(data=True),
    ),
    "check_laws: there is no law 'vmap is loop'; did you mean 'vmap is a loop'?": (
        errors.UnknownOption,
        lambda: testing.check_laws(["vmap is loop"], SINE, (X,)),
    ),
    "programs: there is no family 'loops'\n`families` is a collection of unary,": (
        errors.UnknownOption,
        lambda: testing.traces(families=["loops"]),
    ),
    "composite: expected a function, given a ReLU": (
        errors.CustomRuleError,
        lambda: tfn.composite(torch.nn.ReLU()),
    ),
    f"expected a function to transform, given a Tensor: {X}\nTransform a function, then call the result": (
        errors.GradError,
        lambda: tfn.vmap(X),  # type: ignore[arg-type]
    ),
    f"expected a function to trace, given a Tensor: {X}\nPass a function, then its arguments": (
        errors.UnsupportedInput,
        lambda: tfn.trace(X),  # type: ignore[arg-type]
    ),
    f"argnums must be int or Tuple[int, ...], given {X}\nGive the positions of arguments. Arguments go to": (
        errors.ArgnumError,
        lambda: tfn.grad(torch.sum, X),  # type: ignore[call-overload]
    ),
    "grad_<lambda>: args[0] is a Linear, and only floating and complex tensors have gradients\nDifferentiate by": (
        errors.NotDifferentiable,
        lambda: tfn.grad(lambda m: m(X).sum())(LINEAR),
    ),
    "grad_<lambda>: args[0] is a generator, and only floating and complex tensors have gradients\nPass a dict": (
        errors.NotDifferentiable,
        lambda: tfn.grad(lambda p: p)(LINEAR.parameters()),
    ),
    "cond: takes 4 positional arguments (pred, true_fn, false_fn, operands), given 5\nPut the operands into a": (
        errors.UnknownOption,
        lambda: tfn.cond(X.sum() > 0, torch.add, torch.mul, X, X),  # type: ignore[call-arg]
    ),
    "scan: takes 3 positional arguments (combine_fn, init, xs), given 4\nWrite options by name: dim, ": (
        errors.UnknownOption,
        lambda: tfn.scan(lambda c, x: (c, x), X, None, 3),  # type: ignore[call-arg]
    ),
    "functional_optimizer: takes 1 positional argument (make), given 2\nName the options": (
        errors.UnknownOption,
        lambda: tfn.functional_optimizer(torch.optim.SGD, 0.1),  # type: ignore[call-arg]
    ),
    "functional_optimizer: unknown option 'learning_rate', which is called `lr` here": (
        errors.UnknownOption,
        lambda: tfn.functional_optimizer(torch.optim.SGD, learning_rate=0.1),
    ),
    "init: expected a pytree of tensors, but there is a generator in it\nWrite `init(dict(": (
        errors.OptimizerError,
        lambda: SGD.init(LINEAR.parameters()),
    ),
    "update: grads['w'] is f32[3], but params['w'] is f32[2]\nWrite `update(params, grads, state)`.": (
        errors.OptimizerError,
        lambda: SGD.update({"w": X}, {"w": torch.ones(3)}, SGD.init({"w": X})),
    ),
    "update: grads is f64[2], but params is f32[2]": (
        errors.OptimizerError,
        lambda: SGD.update(X, X.double(), SGD.init(X)),
    ),
    "update: grads is a float, but params is f32[2]": (
        errors.OptimizerError,
        lambda: SGD.update(X, 0.5, SGD.init(X)),
    ),
    "checkpoint: a policy is a function of an equation or one of `checkpoint_policies`, not 'all'\nThere are nothing": (
        errors.CheckpointError,
        lambda: tfn.checkpoint(torch.sin, "all"),
    ),
    "sin: expected 1 input, given 2\nPass them as one tuple: `evaluate(trace, (x, y))`.": (
        errors.TraceTypeError,
        lambda: tfn.evaluate(SINE, X),  # type: ignore[arg-type]
    ),
    "jit: the argument args[0] is a ndarray, neither a tensor nor a value to bake in\nConvert it: `torch.as_tensor(x)`.": (
        errors.UnsupportedInput,
        lambda: tfn.jit(torch.sin)(X.numpy()),
    ),
    "debug.print: '{y}' does not fit its arguments: 'y'\nWrite `debug.print": (
        errors.UnsupportedInput,
        lambda: tfn.debug.print("{y}", x=X),
    ),
    "random.normal: expected a shape, given 'a'\nWrite a tuple": (
        errors.TraceTypeError,
        lambda: tfn.random.normal(tfn.random.key(0), "a"),  # type: ignore[arg-type]
    ),
    "random.bits: expected a shape, given (-1,)": (
        errors.TraceTypeError,
        lambda: tfn.random.bits(tfn.random.key(0), (-1,)),
    ),
    "random.fold_in: expected an int or a tensor, given 'a'": (
        errors.TraceTypeError,
        lambda: tfn.random.fold_in(tfn.random.key(0), "a"),  # type: ignore[arg-type]
    ),
    "random.bernoulli: expected a number or a tensor, given 'a'": (
        errors.TraceTypeError,
        lambda: tfn.random.bernoulli(tfn.random.key(0), "a"),  # type: ignore[arg-type]
    ),
    "random.categorical: expected a tensor of logits, given 3.0": (
        errors.TraceTypeError,
        lambda: tfn.random.categorical(tfn.random.key(0), 3.0),  # type: ignore[arg-type]
    ),
    "random.permutation: expected an int or a tensor, given -2": (
        errors.TraceTypeError,
        lambda: tfn.random.permutation(tfn.random.key(0), -2),
    ),
    "custom_vjp: expected a function, given an int": (
        errors.CustomRuleError,
        lambda: tfn.custom_vjp(3),  # type: ignore[arg-type]
    ),
    "custom_jvp: expected a tuple of ints for nondiff_argnums, given 'x'": (
        errors.CustomRuleError,
        lambda: tfn.custom_jvp(torch.sin, nondiff_argnums="x"),  # type: ignore[arg-type]
    ),
    "custom_vjp: expected a function, given None": (
        errors.CustomRuleError,
        lambda: tfn.custom_vjp(torch.sin).defvjp(torch.sin, None),  # type: ignore[arg-type]
    ),
    "custom_jvp: expected a function, given a float": (
        errors.CustomRuleError,
        lambda: tfn.custom_jvp(torch.sin).defjvp(1.0),  # type: ignore[arg-type]
    ),
    "custom_vmap: expected a function, given a float": (
        errors.CustomRuleError,
        lambda: tfn.custom_vmap(torch.sin).def_vmap(1.0),  # type: ignore[arg-type]
    ),
    "custom_vjp: <lambda> (test_public_errors.py:<line>) is called with argument 0, the residuals and the cotangent, but:": (
        errors.CustomRuleError,
        lambda: tfn.custom_vjp(torch.mul, nondiff_argnums=(0,)).defvjp(torch.mul, lambda kept, ct: ct),
    ),
    "custom_jvp: <lambda> (test_public_errors.py:<line>) is called with the primals and the tangents, but: too many": (
        errors.CustomRuleError,
        lambda: tfn.custom_jvp(torch.sin).defjvp(lambda x: x),
    ),
    "Recipe takes no arguments, given 'executors'\nWrite a class": (
        errors.RecipeError,
        lambda: tfn.Recipe(executors=[]),  # type: ignore[call-arg]
    ),
    "fori_loop: the carry must keep its types, but\n  carry: f32[2] becomes f32[1]": (
        errors.TraceTypeError,
        lambda: tfn.fori_loop(0, 3, lambda i, x: x[:1], X),
    ),
    "cost: expected a machine, given a str\nWrite `machine=tfn.inspect.machine_named": (
        errors.InspectError,
        lambda: tfn.inspect.cost(torch.sin, X, machine="H1"),  # type: ignore[arg-type]
    ),
    "show: expected a machine, given a str": (
        errors.InspectError,
        lambda: tfn.inspect.show(torch.sin, X, machine="H1"),  # type: ignore[arg-type]
    ),
    "random.split: expected a number of keys, given -1": (
        errors.TraceTypeError,
        lambda: tfn.random.split(tfn.random.key(0), -1),
    ),
}


@pytest.mark.parametrize(("f", "args"), [(lambda x, y: x, (X,)), (torch.sin, ((X,),))])
@pytest.mark.parametrize("transform", [tfn.jit, lambda f: lambda *args: tfn.vjp(f, *args)], ids=["jit", "vjp"])
def test_a_function_that_does_not_take_its_arguments(transform: Any, f: Any, args: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"raised TypeError while it was traced: .*\nfrom:         {re.escape(__file__)}:"
    ):
        transform(f)(*args)


@pytest.mark.parametrize("text", WRONG)
def test_wrong_arguments(text: str) -> None:
    kind, call = WRONG[text]
    with pytest.raises(kind) as error:
        call()
    without_line = re.sub(rf"\nfrom:         {re.escape(__file__)}:.*", "", str(error.value))
    without_line = re.sub(r"\.py:\d+\)", ".py:<line>)", without_line)
    assert without_line.startswith(text) and without_line != str(error.value)


def test_finish_returns_a_program() -> None:
    class Plain(tfn.extend.Executor):
        def finish(self, program: Any) -> Any:
            return program.run

    f = tfn.jit(torch.sin, executors=[Plain("plain")])
    with pytest.raises(errors.ExecutorError) as info:
        f(X)
    first, *_, last = message_of(info.value).splitlines()
    assert first.startswith("the executor plain: `finish` must return a program, given a function: <function sin")
    assert last == "Return `dataclasses.replace(program, run=function)`, or the program as it is."


def test_an_answer_is_one_of_four() -> None:
    class Wrong(tfn.extend.Executor):
        def answer(self, equation: Any) -> Any:
            return 3

    with pytest.raises(errors.ExecutorError) as info:
        tfn.jit(torch.sin, executors=[Wrong("wrong")])(X)
    what = "the executor wrong: `answer` must return a Run, an Instead, a Fuse or a Refused, given an int\nfrom: "
    assert str(info.value).startswith(what)


LINES: dict[str, Callable[[], Any]] = {
    "vmap's out_dims": lambda: tfn.vmap(lambda x: x, out_dims=3)(X),
    "vmap's in_dims": lambda: tfn.vmap(torch.sin, in_dims=5)(X),
    "vmap's randomness": lambda: tfn.vmap(lambda x: x + torch.rand(()))(X),
    "jvp's tangents": lambda: tfn.jvp(torch.sin, (X,), (torch.ones(7),)),
    "a custom rule": lambda: tfn.grad(lambda x: tfn.custom_vjp(torch.sin)(x).sum())(X),
    "a scan over a list": lambda: tfn.scan(lambda c, x: (c, x), X, [1, "a"]),
    "an optimizer's state": lambda: tfn.functional_optimizer(torch.optim.SGD, lr=0.1).update(X, X, 3),
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("around", [lambda f: f, lambda f: tfn.jit(f)], ids=["eager", "jit"])
def test_every_error_has_the_users_line(around: Any, name: str) -> None:
    with pytest.raises(errors.ThunderError, match=rf"\nfrom:         {re.escape(__file__)}:\d+ in "):
        around(LINES[name])()
