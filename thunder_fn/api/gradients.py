"""grad and its relatives: the gradient of a scalar function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Concatenate, Literal as Choice, overload

import torch
from typing_extensions import ParamSpec, TypeVar

from thunder_fn.api.calling import Transformed, described, transformed, write_back
from thunder_fn.api.captures import Plan, planned
from thunder_fn.capture import EVERY_LEAF, Captured, current, pytree
from thunder_fn.capture.failures import check_argument, source_of
from thunder_fn.capture.rewriting import is_to_be_fused
from thunder_fn.capture.scopes import user_source
from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.errors import (
    ArgnumError,
    NonScalarLoss,
    NotDifferentiable,
    is_int,
    kind_of,
    spelled,
)
from thunder_fn.interpreters import grad as reverse
from thunder_fn.ir.text import shown
from thunder_fn.ir.trace import TensorType, cut, type_of_value
from thunder_fn.jitted import Jitted

P = ParamSpec("P", default=...)
R = TypeVar("R", default=Any)
A = TypeVar("A", bound=Any, default=Any)


Argnums = int | tuple[int, ...]


def _swapped(f: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    def value_first(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        first, second = f(*args, **kwargs)
        return second, first

    return value_first


@dataclass(frozen=True)
class Grad(Transformed):
    """The gradient of a function with respect to some of its positional arguments. See `grad`."""

    fn: Callable[..., Any]
    argnums: Argnums = 0
    has_aux: bool = False
    returns: str = "grad"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return planned(self, args, kwargs, lambda capture: self._plan(capture, args, kwargs))

    def by_torch(self) -> Callable[..., Any]:
        """The same function by torch.func."""
        if self.returns == "grad":
            return torch.func.grad(self.fn, self.argnums, self.has_aux)
        both = torch.func.grad_and_value(self.fn, self.argnums, self.has_aux)
        return both if self.returns == "grad_and_value" else _swapped(both)

    def _plan(
        self, capture: Callable[..., Captured], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Plan:
        argnums = check_argnums(self.argnums, args, self.__name__)
        wrt = differentiated_leaves(args, argnums, self.__name__)
        captured = capture(
            self.fn,
            args,
            kwargs,
            inside="grad",
            differentiated=leaves_of(args, wrt),
            known=EVERY_LEAF,
        )
        check_loss(captured, self.has_aux, self.fn, self.__name__)
        wanted, fused = input_mask(captured, args, wrt), is_to_be_fused()
        new = reverse.grad_and_value(captured.trace, wanted, fused=fused)
        count, specs = sum(wanted), {i: pytree.flatten(args[i])[1] for i in argnums}
        own = self.without_function
        if captured.is_kept and self.returns == "grad" and not self.has_aux:
            new = cut(new, outputs=new.outputs[:count])
            only = lambda _, grads: group_gradients(grads, specs, argnums, own.argnums)
            return Plan(self.__name__, captured, new, only)
        is_inside = current() is not None
        reached = reverse.is_reached(captured.trace, wanted, fused=fused) if is_inside else ()

        def arrange(inputs: Sequence[Any], outputs: tuple[Any, ...]) -> Any:
            found = outputs[:count]
            if is_inside:  # a zero belongs to each example of its argument, as to torch.func
                primals = [value for value, flag in zip(inputs, wanted, strict=False) if flag]
                found = tuple(
                    value if flag else torch.zeros_like(primal)
                    for value, flag, primal in zip(found, reached, primals, strict=True)
                )
            grads = group_gradients(found, specs, argnums, own.argnums)
            results = write_back(captured, inputs, outputs[count:])
            return own._arrange(grads, captured.result(results))

        return Plan(self.__name__, captured, new, arrange)

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


_SPELLED = spelled(
    holomorphic="Gradients of complex numbers follow PyTorch's convention, and need no option.",
    allow_int="Leave integer arguments out of `argnums`.",
    argnames="Pass the argument by position, and name it in `argnums`.",
    argnum="argnums",
    wrt="argnums",
    aux="has_aux",
    reduce_axes="Leave it out: batch dims have no names.",
    in_axes="Write `vmap(grad(f), in_dims=...)` for gradients of each example.",
    create_graph="Leave it out: the gradient of a gradient is `grad(grad(f))`.",
    retain_graph="Leave it out: there is no graph to keep.",
)


@overload
def grad(
    f: Jitted[Concatenate[A, P], Any], argnums: Choice[0] = 0, has_aux: Choice[False] = False
) -> Jitted[Concatenate[A, P], A]: ...
@overload
def grad(f: Jitted[P, Any], argnums: Argnums = 0, has_aux: bool = False) -> Jitted[P, Any]: ...
@overload
def grad(
    f: Callable[Concatenate[A, P], Any], argnums: Choice[0] = 0, has_aux: Choice[False] = False
) -> Callable[Concatenate[A, P], A]: ...
@overload
def grad(f: Callable[P, Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[P, Any]: ...
@_SPELLED
def grad(f: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Any:
    """Differentiate a scalar function: return a function that computes its gradient.

    Law: ``<grad(f)(x), v>`` is the derivative of f at x along v, for every v. Complex inputs follow
        PyTorch's convention (the conjugate of JAX's).

    Args:
        f: returns one real scalar tensor, or `(scalar, aux)` with has_aux.
        argnums: the positional arguments to differentiate, an int or a tuple of ints, negative from
            the end. Each is a pytree of floating or complex tensors.
        has_aux: f returns something else besides the scalar.

    Returns:
        A function with the arguments of f that returns the gradients, in the structure of the
            argument (a tuple of them for a tuple of argnums), or `(gradients, aux)`. An argument
            that the result does not depend on has gradients of zeros, and so has one that it
            depends on by integers or booleans alone. The gradient of a jitted function is jitted.

    Raises:
        NonScalarLoss: f returned something other than one real scalar.
        ArgnumError: there is no such argument.
        NotDifferentiable: an argument to differentiate has an integer or boolean tensor, or no
            tensor.

    Example:
        >>> grad(lambda x: (x ** 3).sum())(torch.tensor([1.0, 2.0]))
        tensor([ 3., 12.])

    Source: torch.func.grad for the signature; autodidax for the idea.
    """
    return transformed(f, lambda fn: Grad(fn, frozen_argnums(argnums), has_aux))


@overload
def grad_and_value(
    f: Jitted[Concatenate[A, P], R], argnums: Choice[0] = 0, has_aux: Choice[False] = False
) -> Jitted[Concatenate[A, P], tuple[A, R]]: ...
@overload
def grad_and_value(
    f: Jitted[P, Any], argnums: Argnums = 0, has_aux: bool = False
) -> Jitted[P, Any]: ...
@overload
def grad_and_value(
    f: Callable[Concatenate[A, P], R], argnums: Choice[0] = 0, has_aux: Choice[False] = False
) -> Callable[Concatenate[A, P], tuple[A, R]]: ...
@overload
def grad_and_value(
    f: Callable[P, Any], argnums: Argnums = 0, has_aux: bool = False
) -> Callable[P, Any]: ...
@_SPELLED
def grad_and_value(f: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Any:
    """Differentiate like `grad`, and return `(gradients, value)` or `(gradients, (value, aux))`, in
    torch.func's order.

    Law: ``grad_and_value(f)(x) == (grad(f)(x), f(x))``. Arguments and errors as in `grad`.

    Example:
        >>> grad_and_value(lambda x: x ** 3)(torch.tensor(2.0))
        (tensor(12.), tensor(8.))
    """
    return transformed(f, lambda fn: Grad(fn, frozen_argnums(argnums), has_aux, "grad_and_value"))


@overload
def value_and_grad(
    f: Jitted[Concatenate[A, P], R], argnums: Choice[0] = 0, has_aux: Choice[False] = False
) -> Jitted[Concatenate[A, P], tuple[R, A]]: ...
@overload
def value_and_grad(
    f: Jitted[P, Any], argnums: Argnums = 0, has_aux: bool = False
) -> Jitted[P, Any]: ...
@overload
def value_and_grad(
    f: Callable[Concatenate[A, P], R], argnums: Choice[0] = 0, has_aux: Choice[False] = False
) -> Callable[Concatenate[A, P], tuple[R, A]]: ...
@overload
def value_and_grad(
    f: Callable[P, Any], argnums: Argnums = 0, has_aux: bool = False
) -> Callable[P, Any]: ...
@_SPELLED
def value_and_grad(f: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Any:
    """Differentiate like `grad`, and return `(value, gradients)` or `((value, aux), gradients)`,
    in JAX's order.

    Law: ``value_and_grad(f)(x) == (f(x), grad(f)(x))``. Arguments and errors as in `grad`.

    Example:
        >>> value_and_grad(lambda x: x ** 3)(torch.tensor(2.0))
        (tensor(8.), tensor(12.))
    """
    return transformed(f, lambda fn: Grad(fn, frozen_argnums(argnums), has_aux, "value_and_grad"))


def frozen_argnums(argnums: Any) -> Argnums:
    """Argument numbers as the user gave them, a list as a tuple.

    Raises:
        ArgnumError: they are neither an int nor a non-empty sequence of ints.
    """
    if isinstance(argnums, bool) or not isinstance(argnums, (int, tuple, list)):
        raise ArgnumError(
            f"argnums must be int or Tuple[int, ...], given {shown(argnums, 60)}",
            fix="Give the positions of arguments. Arguments go to the result: `grad(f)(x)`.",
        )
    if isinstance(argnums, int):
        return argnums
    if not argnums:
        raise ArgnumError(f"argnums must be non-empty, given {argnums!r}")
    if any(not is_int(number) for number in argnums):
        raise ArgnumError(f"argnums elements must be int, given {argnums!r}")
    return tuple(argnums)


def check_argnums(argnums: Argnums, args: tuple[Any, ...], name: str) -> tuple[int, ...]:
    """The argnums as a tuple of non-negative positions."""
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise ArgnumError(
                f"{name}: got argnum={number}, but only {len(args)} positional inputs",
                source=user_source(),
                fix="Pass the argument by position; keyword arguments are not differentiated.",
            )
    positions = tuple(number % len(args) for number in numbers)
    if len(set(positions)) != len(positions):
        raise ArgnumError(f"{name}: argnums elements must be unique, given argnums={argnums}")
    return positions


def _fix_of_argument(leaf: Any) -> str:
    """The fix for an argument that has no gradient."""
    if isinstance(leaf, torch.nn.Module):
        return (
            "Differentiate by a dict of its parameters, and call it by"
            " `functional_call(module, params, args)`."
        )
    if isinstance(leaf, Iterator):
        return "Pass a dict, `dict(module.named_parameters())`, or a list."
    return (
        "Cast it to a floating dtype, pass numbers as tensors, or leave the argument out of"
        " argnums."
    )


def differentiated_leaves(args: tuple[Any, ...], argnums: tuple[int, ...], name: str) -> set[int]:
    """Check the leaves of the arguments to differentiate; the positions of those arguments."""
    for number in argnums:
        leaves = pytree.flatten(args[number])[0]
        for path, leaf in zip(pytree.paths(args[number], f"args[{number}]"), leaves, strict=True):
            check_argument(leaf, lambda path=path: path)
            if not isinstance(leaf, torch.Tensor) or not is_differentiable(type_of_value(leaf)):
                what = str(type_of_value(leaf)) if isinstance(leaf, torch.Tensor) else kind_of(leaf)
                raise NotDifferentiable(
                    f"{name}: {path} is {what}, and only floating and complex tensors have"
                    " gradients",
                    source=user_source(),
                    fix=_fix_of_argument(leaf),
                )
        if not leaves:
            text = (
                f"{name}: args[{number}] has no tensor to differentiate: it is"
                f" {shown(args[number], 40)}"
            )
            raise NotDifferentiable(
                text, source=user_source(), fix="Leave the argument out of argnums."
            )
    return set(argnums)


def leaves_of(args: tuple[Any, ...], positions: set[int]) -> list[int]:
    """The leaves of the arguments at these positions, by their number among all leaves."""
    owners = [position for position, arg in enumerate(args) for _ in pytree.flatten(arg)[0]]
    return [number for number, position in enumerate(owners) if position in positions]


def input_mask(captured: Captured, args: tuple[Any, ...], wrt: set[int]) -> tuple[bool, ...]:
    """Tell for each input of the trace whether it belongs to a differentiated argument."""
    flags = [number in wrt for number, arg in enumerate(args) for _ in pytree.tensors_in(arg)]
    return (*flags, *(False,) * (len(captured.trace.inputs) - len(flags)))


def group_gradients(
    found: Sequence[Any],
    specs: Mapping[int, pytree.PyTreeSpec],
    argnums: tuple[int, ...],
    asked: Argnums,
) -> Any:
    """Gradients, which come in the order of the inputs, in the structures of the arguments and
    the order of argnums.
    """
    supply = iter(found)
    trees = {
        number: pytree.unflatten(specs[number], [*islice(supply, specs[number].num_leaves)])
        for number in sorted(argnums)
    }
    return (
        trees[argnums[0]] if isinstance(asked, int) else tuple(trees[number] for number in argnums)
    )


def _fix_of_loss(result: Any) -> str:
    """The fix for a loss that is no scalar tensor."""
    if result is None:
        return "Return the loss. A gradient needs no `backward()`: `grad` returns it."
    if isinstance(result, (bool, int, float, complex)):
        return "Return the tensor itself, without `.item()` or `float()`."
    if isinstance(result, tuple):
        return "Return the loss alone, or `(loss, aux)` with `has_aux=True`."
    return "Reduce it with `.sum()` or `.mean()`; for several outputs use `vjp` or `jacrev`."


def check_loss(captured: Captured, has_aux: bool, f: Callable[..., Any], name: str) -> None:
    """Check that the function returned one scalar tensor that is not complex, and aux if it was to.

    Integers and booleans have gradients of zeros, as in torch.func.
    """
    result = captured.result(captured.trace.output_types[: captured.num_results])
    if has_aux:
        if not isinstance(result, tuple) or len(result) != 2:
            what = described(result)
            text = (
                f"{name}: grad_and_value(f)(*args): output of function f should be a tuple:"
                f" (output, aux) if has_aux is True, not {what}"
            )
            raise NonScalarLoss(
                text, source=source_of(f), fix="Return the loss first, then anything else."
            )
        result = result[0]
    if not isinstance(result, TensorType) or result.shape != ():
        raise NonScalarLoss(
            f"{name}: Expected f(*args) to return a scalar Tensor, but it returned"
            f" {described(result)}",
            source=source_of(f),
            fix=_fix_of_loss(result),
        )
    if result.dtype.is_complex:
        raise NonScalarLoss(
            f"{name}: grad can be implicitly created only for real scalar outputs, but it returned"
            f" {result}",
            source=source_of(f),
            fix="Take `.real` or `abs()` of it first.",
        )
