"""Python functions in programs: their registry, and `pure_callback`.

The arguments of an op are data, so a program holds the number of a function. Under `vmap` the op
gets the sizes of the batch dims, outermost first, and a flag for each of them and each value: those
that have the dim. It calls the function for each example.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn.capture import pytree
from thunder_fn.capture.scopes import user_source
from thunder_fn.errors import MissingRule, TraceTypeError, UnsupportedInput, kind_of, spelled
from thunder_fn.ir.trace import TensorType, type_of_value

Tensor = torch.Tensor
LIBRARY = torch.library.Library("thunder_fn", "FRAGMENT")

# ---- the registry ----

_lock = threading.Lock()
_numbers: dict[Any, int] = {}
_functions: list[Any] = []


def number_of(name: str, function: Any) -> int:
    """Return the number of a function; equal ones have the same.

    Raises:
        UnsupportedInput: it has no hash, because of a plain value among its arguments.
    """
    try:
        with _lock:
            if function not in _numbers:
                _numbers[function] = len(_functions)
                _functions.append(function)
            return _numbers[function]
    except TypeError as error:
        fix = "Pass tensors, numbers and strings."
        raise UnsupportedInput(f"{name}: {error}", source=user_source(), fix=fix) from None


def function_of(number: int) -> Any:
    """Return the function that has a number."""
    return _functions[number]


def split_arguments(args: Any, kwargs: Any) -> tuple[list[Tensor], Any, tuple[Any, ...]]:
    """Return the tensors among arguments, their structure, and what else is in it."""
    leaves, spec = pytree.flatten((args, kwargs))
    leaves = [
        torch.as_tensor(leaf) if isinstance(leaf, (torch.SymInt, torch.SymFloat)) else leaf
        for leaf in leaves
    ]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], spec, pytree.statics(leaves)


# ---- examples ----


def examples(
    values: Sequence[Tensor], sizes: Sequence[int], batched: Sequence[int]
) -> Iterator[tuple[Tensor, ...]]:
    """The values of each example, which require no grad."""
    starts = range(0, len(batched), max(len(values), 1))
    flags = [batched[start : start + len(values)] for start in starts]
    for place in itertools.product(*map(range, sizes)):
        chosen = [
            tuple(i for i, flag in zip(place, flags, strict=False) if flag[n])
            for n in range(len(values))
        ]
        yield tuple(value.detach()[at] for value, at in zip(values, chosen, strict=True))


def batch(
    size: Any, in_dims: Sequence[int | None], values: Sequence[Tensor], sizes: Any, batched: Any
) -> tuple[list[Tensor], list[Any], list[int]]:
    """The values with the batch dim in front, and the sizes and flags with those of the dim."""
    moved = [
        value if dim is None else value.movedim(dim, 0)
        for value, dim in zip(values, in_dims, strict=True)
    ]
    return moved, [size, *sizes], [*(int(dim is not None) for dim in in_dims), *batched]


# ---- pure_callback ----


@dataclass(frozen=True)
class _Pure:
    """A function from tensors to tensors of known dtypes, devices and numbers of dims."""

    function: Callable[..., Any]
    spec: Any
    statics: tuple[Any, ...]
    results: tuple[tuple[torch.dtype, torch.device, int], ...]

    def empty(self, batch: Sequence[Any], sizes: Sequence[Any]) -> list[Tensor]:
        """Results that nobody has written; `sizes` are those of one after the other."""
        supply = iter(sizes)
        return [
            torch.empty((*batch, *itertools.islice(supply, rank)), dtype=dtype, device=device)
            for dtype, device, rank in self.results
        ]

    def call(self, values: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Write the results of one call."""
        args, kwargs = pytree.unflatten(self.spec, pytree.filled(self.statics, values))
        found, _ = pytree.flatten(self.function(*args, **kwargs))
        tensors = [torch.as_tensor(leaf) for leaf in found]
        given, told = ([(x.dtype, x.shape) for x in each] for each in (tensors, results))
        if given != told:
            have, wanted = (
                ", ".join(str(type_of_value(x)) for x in each) for each in (tensors, results)
            )
            what = f"pure_callback: the function returned ({have}), and ({wanted}) was announced"
            raise TraceTypeError(what, fix="Convert its results, or announce their types.")
        for tensor, result in zip(tensors, results, strict=True):
            result.copy_(tensor.detach())


def _run(
    function: int,
    values: Sequence[Tensor],
    shapes: Sequence[int],
    sizes: Sequence[int],
    batched: Sequence[int],
) -> list[Tensor]:
    pure: _Pure = function_of(function)
    results = pure.empty(sizes, shapes)
    places = itertools.product(*map(range, sizes))
    for place, given in zip(places, examples(values, sizes, batched), strict=True):
        pure.call(given, [result[place] for result in results])
    return results


def _batched(
    info: Any, in_dims: Any, function: int, values: Any, shapes: Any, sizes: Any, batched: Any
) -> tuple[Any, Any]:
    given = batch(info.batch_size, in_dims[1], values, sizes, batched)
    results = _op(function, given[0], shapes, *given[1:])
    return results, [0] * len(results)


def _no_derivative(ctx: Any, *cotangents: Any) -> Any:
    raise MissingRule(
        "pure_callback: a Python function has no derivative of its own",
        fix="Put `custom_vjp` or `custom_jvp` around it, or `stop_gradient` around its arguments.",
    )


LIBRARY.define(
    "pure_callback(int function, Tensor[] values, SymInt[] shapes, SymInt[] sizes, int[] batched)"
    " -> Tensor[]"
)
LIBRARY.impl("pure_callback", _run, "CompositeExplicitAutograd")
torch.library.register_fake(
    "thunder_fn::pure_callback",
    lambda function, values, shapes, sizes, batched: function_of(function).empty(sizes, shapes),
    lib=LIBRARY,
)
torch.library.register_vmap("thunder_fn::pure_callback", _batched, lib=LIBRARY)
torch.library.register_autograd("thunder_fn::pure_callback", _no_derivative, lib=LIBRARY)
_op = torch.ops.thunder_fn.pure_callback


@spelled(
    vmap_method="Leave it out: `custom_vmap` around the call gives it a batched form.",
    vectorized="Leave it out: `custom_vmap` around the call gives it a batched form.",
    sharding="Leave it out: each process calls its own function.",
    callback="The function stands first: `pure_callback(f, result, x)`.",
    result_shape_dtypes="The types of the results stand second: `pure_callback(f, result, x)`.",
)
def pure_callback(function: Callable[..., Any], result: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a Python function on values when the program runs, and use its result there.

    The function may use NumPy or any other library. It is called when its result is needed, so it
    should do nothing else. Under `vmap` it is called for each example. It has no derivative:
    `custom_vjp` or `custom_jvp` around the call gives it one, and `custom_vmap` a batched form.

    Law: the result is ``function(*args, **kwargs)``.

    Args:
        function: called on tensors that require no grad, and on the plain values among the
            arguments. It returns tensors, NumPy arrays or numbers. It is kept for as long as the
            process runs.
        result: a pytree of the tensors that it returns: their `TensorType`s, or tensors like them.
        args, kwargs: pytrees of tensors and plain values.

    Raises:
        UnsupportedInput: `function` is no function, a plain value has no hash, or `result` has
            something else than types and tensors.
        TraceTypeError: when the program runs: the function returns other types.

    Example:
        >>> import numpy, torch, thunder_fn as tfn
        >>> f = tfn.jit(lambda x: tfn.pure_callback(lambda x: numpy.sinc(x.numpy()), x, x) + 1)
        >>> f(torch.zeros(2))
        tensor([2., 2.])

    Source: jax.pure_callback.
    """
    if not callable(function):
        what = f"pure_callback: expected a function, given {kind_of(function)}"
        raise UnsupportedInput(what, source=user_source())
    types, structure = pytree.flatten(result)
    for one in types:
        if not isinstance(one, (Tensor, TensorType)):
            what = f"pure_callback: the result has {kind_of(one)} in it"
            fix = "Pass the types of its results, `TensorType(dtype, shape)`, or tensors like them."
            raise UnsupportedInput(what, source=user_source(), fix=fix)
    values, spec, statics = split_arguments(args, kwargs)
    layouts = tuple((one.dtype, one.device, len(one.shape)) for one in types)
    number = number_of("pure_callback", _Pure(function, spec, statics, layouts))
    shapes = [size for one in types for size in one.shape]
    return pytree.unflatten(structure, _op(number, values, shapes, [], []))
