"""Functions in, functions out: the transforms as users call them, pytrees around the interpreters.

A transformed function is a frozen value that says what it is; calling it captures the function on the arguments,
transforms the trace and applies it. Under `jit` that happens once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn import ops
from thunder_fn.capture import TENSOR, Captured, capture, current, pytree
from thunder_fn.capture.apply import apply_inside
from thunder_fn.capture.scopes import user_source
from thunder_fn.derive import Split, is_differentiable
from thunder_fn.errors import ArgnumError, CotangentError, GradError, NonScalarLoss, NotDifferentiable, located
from thunder_fn.interpreters import vjp as reverse
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.jit import Jitted, jit
from thunder_fn.trace import TensorType, Trace, type_of_value

Argnums = int | tuple[int, ...]


def trace(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Trace:
    """The trace of `f(*args, **kwargs)`, closed and with its composites nested.

    Law: ``evaluate(trace(f, *xs), xs)`` gives the tensors of ``f(*xs)``, bitwise.

    Args:
        f: any PyTorch callable: a function, a module, a jitted or transformed function.
        args, kwargs: pytrees. Tensors become inputs, one for each leaf in order; other leaves are baked in.

    Raises:
        CaptureError: f cannot be traced; the subclass and the text say why.

    Example:
        >>> print(trace(lambda x: x * 2, torch.ones(3)))
    """
    return capture(f, args, kwargs).trace


def apply(name: str, new: Trace, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run a transformed trace on tensors, or record it where a capture is going on."""
    recorder = current()
    if recorder is None:
        return evaluate(new, inputs)
    return apply_inside(recorder, new, inputs, ops.composite(name))


def tensors_of(captured: Captured, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensor leaves of a call, which are the inputs of its trace."""
    leaves, _ = pytree.flatten((args, kwargs))
    return [leaf for leaf, known in zip(leaves, captured.in_leaves, strict=True) if known is TENSOR]


def write_back(captured: Captured, inputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Give mutated tensors their new values."""
    with torch.no_grad():
        for write, value in zip(captured.writes, values, strict=True):
            target = inputs[write.target] if isinstance(write.target, int) else write.target
            target.copy_(value)


class _Transformed:
    """What transformed functions share: the name and the wrapped function of the original."""

    fn: Callable[..., Any]

    @property
    def __name__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__.lower()}_{getattr(self.fn, '__name__', type(self.fn).__name__)}"

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn


@dataclass(frozen=True)
class Grad(_Transformed):
    """The gradient of a function with respect to some of its positional arguments. See `grad`."""

    fn: Callable[..., Any]
    argnums: Argnums = 0
    has_aux: bool = False
    returns: str = "grad"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        argnums = check_argnums(self.argnums, args, self.__name__)
        wrt = differentiated_leaves(args, argnums, self.__name__)
        captured = capture(self.fn, args, kwargs)
        check_loss(captured, self.has_aux, self.__name__)
        inputs = tensors_of(captured, args, kwargs)
        # tensor inputs are numbered as the tensor leaves of (args, kwargs)
        wanted = input_mask(captured, args, kwargs, wrt)
        new = reverse.grad_and_value(captured.trace, wanted)
        outputs = apply(self.__name__, new, inputs)
        count = sum(wanted)
        write_back(captured, inputs, outputs[count + captured.num_results :])
        grads = group_gradients(outputs[:count], args, argnums, self.argnums)
        return self._arrange(grads, captured.result(outputs[count:]))

    def _arrange(self, grads: Any, result: Any) -> Any:
        value, aux = result if self.has_aux else (result, None)
        match self.returns, self.has_aux:
            case "grad", False:
                return grads
            case "grad", True:
                return grads, aux
            case "grad_and_value", False:
                return grads, value
            case "grad_and_value", True:
                return grads, (value, aux)
            case "value_and_grad", False:
                return value, grads
            case _:
                return (value, aux), grads


def _transformed(f: Callable[..., Any], make: Callable[[Callable[..., Any]], Any]) -> Any:
    """A transform of a jitted function is a jitted function with the same options."""
    if not callable(f):
        raise GradError(f"expected a function to transform, given a {type(f).__name__}: {f!r:.60}")
    if isinstance(f, Jitted):
        return f.with_function(make(f.fn))
    return make(f)


def grad(f: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Any:
    """The gradient of a scalar function.

    Law: ``<grad(f)(x), v>`` is the derivative of f at x along v, for every v. Complex inputs follow PyTorch's
    convention (the conjugate of JAX's).

    Args:
        f: returns one real scalar tensor, or `(scalar, aux)` with has_aux.
        argnums: the positional arguments to differentiate, an int or a tuple of ints, negative from the end.
            Each is a pytree of floating or complex tensors.
        has_aux: f returns something else besides the scalar.

    Returns:
        A function with the arguments of f that returns the gradients, in the structure of the argument (a tuple of
        them for a tuple of argnums), or `(gradients, aux)`. An argument that the result does not depend on has
        gradients of zeros. The gradient of a jitted function is jitted.

    Raises:
        NonScalarLoss: f returned something other than one real scalar.
        ArgnumError: there is no such argument.
        NotDifferentiable: an argument to differentiate has an integer or boolean tensor, or no tensor.

    Example:
        >>> grad(lambda x: (x ** 3).sum())(torch.tensor([1.0, 2.0]))
        tensor([ 3., 12.])

    Source: torch.func.grad for the signature; autodidax for the idea.
    """
    return _transformed(f, lambda fn: Grad(fn, _frozen(argnums), has_aux))


def grad_and_value(f: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Any:
    """As `grad`, returning `(gradients, value)` or `(gradients, (value, aux))`, in torch.func's order."""
    return _transformed(f, lambda fn: Grad(fn, _frozen(argnums), has_aux, "grad_and_value"))


def value_and_grad(f: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Any:
    """As `grad`, returning `(value, gradients)` or `((value, aux), gradients)`, in JAX's order."""
    return _transformed(f, lambda fn: Grad(fn, _frozen(argnums), has_aux, "value_and_grad"))


def _frozen(argnums: Any) -> Argnums:
    if isinstance(argnums, bool) or not isinstance(argnums, (int, tuple, list)):
        raise ArgnumError(f"argnums is an int or a tuple of ints, given {argnums!r}")
    if isinstance(argnums, int):
        return argnums
    if not argnums or any(isinstance(number, bool) or not isinstance(number, int) for number in argnums):
        raise ArgnumError(f"argnums is an int or a non-empty tuple of ints, given {argnums!r}")
    return tuple(argnums)


def check_argnums(argnums: Argnums, args: tuple[Any, ...], name: str) -> tuple[int, ...]:
    """The argnums as a tuple of non-negative positions."""
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise ArgnumError(
                located(
                    f"{name}: argnums={argnums} asks for argument {number}, but the call has {len(args)} positional arguments",
                    source=user_source(),
                    fix="Pass the argument by position; keyword arguments are not differentiated.",
                )
            )
    positions = tuple(number % len(args) for number in numbers)
    if len(set(positions)) != len(positions):
        raise ArgnumError(f"{name}: argnums={argnums} names an argument twice")
    return positions


def differentiated_leaves(args: tuple[Any, ...], argnums: tuple[int, ...], name: str) -> set[int]:
    """Check the leaves of the arguments to differentiate; the positions of those arguments."""
    for number in argnums:
        for path, leaf in zip(pytree.paths(args[number], f"args[{number}]"), pytree.flatten(args[number])[0], strict=True):
            if not isinstance(leaf, torch.Tensor) or not is_differentiable(type_of_value(leaf)):
                what = str(type_of_value(leaf)) if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
                raise NotDifferentiable(
                    located(
                        f"{name}: {path} is {what}, and only floating and complex tensors have gradients",
                        source=user_source(),
                        fix="Cast it to a floating dtype, pass numbers as tensors, or leave the argument out of argnums.",
                    )
                )
    return set(argnums)


def input_mask(captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any], wrt: set[int]) -> tuple[bool, ...]:
    """For each input of the trace: does it belong to an argument that is differentiated?"""
    flags: list[bool] = []
    for number, arg in enumerate(args):
        flags += [number in wrt for leaf in pytree.flatten(arg)[0] if isinstance(leaf, torch.Tensor)]
    flags += [False for leaf in pytree.flatten(kwargs)[0] if isinstance(leaf, torch.Tensor)]
    return tuple(flags)


def group_gradients(found: Sequence[Any], args: tuple[Any, ...], argnums: tuple[int, ...], asked: Argnums) -> Any:
    """Gradients, which come in the order of the inputs, in the structure of the arguments and the order of argnums."""
    supply = iter(found)
    trees: dict[int, Any] = {}
    for number in sorted(argnums):
        leaves, spec = pytree.flatten(args[number])
        trees[number] = pytree.unflatten(spec, [next(supply) for _ in leaves])
    return trees[argnums[0]] if isinstance(asked, int) else tuple(trees[number] for number in argnums)


def check_loss(captured: Captured, has_aux: bool, name: str) -> None:
    """The function returned one real scalar tensor, and aux if it was to."""
    result = captured.result(captured.trace.output_types[: captured.num_results])
    if has_aux:
        if not isinstance(result, tuple) or len(result) != 2:
            raise NonScalarLoss(f"{name}: with has_aux=True the function returns (loss, aux), not {_described(result)}")
        result = result[0]
    if not isinstance(result, TensorType) or result.shape != ():
        raise NonScalarLoss(
            located(
                f"{name}: the function must return one scalar tensor, but it returned {_described(result)}",
                fix="Reduce it with `.sum()` or `.mean()`; for several outputs use `vjp` or `jacrev`.",
            )
        )
    if not result.dtype.is_floating_point:
        fix = "Take `.real` or `abs()` of it first." if result.dtype.is_complex else "Return the loss before it is rounded or compared."
        raise NonScalarLoss(located(f"{name}: the function must return a real number, but it returned {result}", fix=fix))


def _described(result: Any) -> str:
    return str(result) if isinstance(result, TensorType) else f"a {type(result).__name__}"


# ---- vjp ----


@dataclass(frozen=True)
class Pullback:
    """What `vjp` returns: a linear function from a cotangent of the output to cotangents of the primals."""

    split: Split
    residuals: tuple[torch.Tensor, ...]
    captured: Captured
    wanted_outputs: tuple[bool, ...]
    primals: tuple[torch.Tensor, ...]
    in_spec: pytree.PyTreeSpec
    name: str

    def __call__(self, cotangents: Any) -> tuple[Any, ...]:
        given = self._check(cotangents)
        found = apply(f"{self.name}_backward", self.split.backward, (*self.residuals, *given))
        wanted = iter(self.split.gradients)
        leaves: list[torch.Tensor] = []
        for primal in self.primals:
            place = next(wanted) if is_differentiable(type_of_value(primal)) else None
            leaves.append(torch.zeros_like(primal) if place is None else found[place])
        return pytree.unflatten(self.in_spec, leaves)

    def _check(self, cotangents: Any) -> list[Any]:
        leaves, spec = pytree.flatten(cotangents)
        if spec != self.captured.out_spec:
            raise CotangentError(
                f"{self.name}: the cotangent has the structure {spec}, but the output has {self.captured.out_spec}"
            )
        tensors = [leaf for leaf, known in zip(leaves, self.captured.out_leaves, strict=True) if known is TENSOR]
        given: list[Any] = []
        types = self.captured.trace.output_types
        for index, (value, wanted) in enumerate(zip(tensors, self.wanted_outputs, strict=False)):
            if not wanted:
                continue
            have = type_of_value(value) if isinstance(value, torch.Tensor) else type(value).__name__
            if have != types[index]:
                raise CotangentError(f"{self.name}: the cotangent of output {index} is {have}, but the output is {types[index]}")
            given.append(value)
        return given


def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Evaluate f and prepare its vector-Jacobian product.

    Law: ``<ct, jvp(f)(x; v)> == <pullback(ct), v>`` for all v and ct.

    Args:
        f: any function of the primals; with has_aux it returns `(output, aux)`.
        primals: pytrees of tensors, one for each argument of f.

    Returns:
        `(output, pullback)` or `(output, pullback, aux)`. `pullback(cotangent)` takes the structure of the output and
        returns a tuple with one cotangent for each primal.

    Raises:
        CotangentError: the cotangent differs from the output in structure, shape or dtype.

    Example:
        >>> y, pullback = vjp(torch.sin, torch.zeros(2))
        >>> pullback(torch.ones(2))
        (tensor([1., 1.]),)

    Source: torch.func.vjp for the signature.
    """
    name = getattr(f, "__name__", type(f).__name__)
    leaves, in_spec = pytree.flatten(primals)
    for path, leaf in zip(pytree.paths(primals, "primals"), leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise NotDifferentiable(f"vjp: {path} is a {type(leaf).__name__}; pass numbers as tensors")
    captured = capture(f, primals)
    main = main_output(captured, has_aux, "vjp")
    types = captured.trace.output_types
    wanted_outputs = tuple(flag and is_differentiable(type) for flag, type in zip(main, types, strict=True))
    wanted_inputs = tuple(is_differentiable(var.type) for var in captured.trace.inputs)
    split = reverse.split_vjp(captured.trace, wanted_inputs, wanted_outputs)
    outputs = apply(f"{name}_forward", split.forward, leaves)
    count = len(captured.trace.outputs)
    places = {"input": leaves, "output": outputs, "extra": outputs[count:]}
    residuals = tuple(places[residual.kind][residual.index] for residual in split.residuals)
    write_back(captured, leaves, outputs[captured.num_results : count])
    result = captured.result(outputs)
    shown = main_only(captured) if has_aux else captured
    pullback = Pullback(split, residuals, shown, wanted_outputs, tuple(leaves), in_spec, f"vjp_{name}")
    return (result[0], pullback, result[1]) if has_aux else (result, pullback)


def main_output(captured: Captured, has_aux: bool, name: str) -> tuple[bool, ...]:
    """For each output of the trace: is it part of the output proper, neither aux nor a write?"""
    extra = (False,) * (len(captured.trace.outputs) - captured.num_results)
    if not has_aux:
        return (True,) * captured.num_results + extra
    marks = captured.result(tuple(range(captured.num_results)))
    if not isinstance(marks, tuple) or len(marks) != 2:
        raise GradError(f"{name}: with has_aux=True the function returns (output, aux), not a {type(marks).__name__}")
    count = sum(leaf is TENSOR for leaf in main_only(captured).out_leaves)
    return tuple(index < count for index in range(captured.num_results)) + extra


def main_only(captured: Captured) -> Captured:
    """The capture as if the function had returned the first of its two results only."""
    first = captured.out_spec.children()[0]
    leaves = captured.out_leaves[: first.num_leaves]
    return Captured(captured.trace, captured.in_spec, captured.in_leaves, first, leaves, captured.writes)


def stop_gradient(tree: Any) -> Any:
    """The same values, constant for every derivative.

    Law: ``grad(lambda x: f(stop_gradient(x)))`` is zero.
    """
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree)


__all__ = [
    "Grad",
    "Pullback",
    "grad",
    "grad_and_value",
    "jit",
    "stop_gradient",
    "trace",
    "value_and_grad",
    "vjp",
]

