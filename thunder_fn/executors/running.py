"""Calls of operators' functions: results are the promised ones, or the error says who broke the
promise.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.distributed.heartbeat import run_collective
from thunder_fn.errors import ExecutorError, ThunderError, has_note, kind_of, located
from thunder_fn.executors.taking import donating
from thunder_fn.ir.pretty import format_equation
from thunder_fn.ir.symbols import Substitution, bind, replaced
from thunder_fn.ir.trace import (
    Arg,
    Equation,
    Expr,
    Source,
    TensorType,
    Trace,
    Type,
    Var,
    type_of_value,
)

LINES = "_lines"
"""The key, in the context of a program, of the `Line` of each line that runs an equation."""


class Line:
    """The equation that a line of a program runs, and the types of its results; None where
    symbols are among their sizes.
    """

    __slots__ = ("equation", "types")

    def __init__(self, equation: Equation) -> None:
        types = equation.output_types
        self.equation, self.types = equation, types if all(map(_is_static, types)) else None


@dataclass(frozen=True, slots=True)
class Runner:
    """A run of `fn` as a line of a program does it: without autograd, its results checked against
    the line's equation.
    """

    name: str
    fn: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        line: Line = frame.f_globals[LINES][frame.f_lineno]
        types = line.types if line.types is not None else _types_for(line.equation, args, kwargs)
        return self.run(args, kwargs, types, line.equation.source)

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        types: Sequence[Type],
        source: Source | None = None,
    ) -> tuple[Any, ...]:
        """The tensors that fn returns.

        Raises:
            ExecutorError: they are not of these types, or fn wrote to an argument.
            Exception: what fn raises, with a note that names the user's line.
        """
        given = list[torch.Tensor]()
        plain = [_plain(arg, given) for arg in args]
        named = {key: _plain(value, given) for key, value in kwargs.items()}
        before = _versions(given)
        try:
            result = internals.call_as_usual(self.fn, plain, named)
        except Exception as error:
            if not has_note(error):
                error.add_note(located(f"while {self.name} ran its fn", source=source))
            raise
        if (after := _versions(given)) != before:
            pairs = enumerate(zip(before, after, strict=True))
            written = next(i for i, pair in pairs if pair[0] != pair[1])
            what = f"fn wrote to tensor {written} of its arguments, which others may read"
            fix = "fn has to be pure: write to a copy (`x = x.clone()`) and return it."
            raise ExecutorError(f"{self.name}: {what}", source=source, fix=fix)
        if isinstance(result, torch.Tensor) and len(types) == 1 and _fits(result, types[0]):
            return (result,)
        tensors = tensors_in(result, len(types))
        if len(tensors) != len(types) or not all(map(_fits, tensors, types)):
            found, wanted = ", ".join(map(_told, tensors)), ", ".join(map(str, types))
            what = f"fn returned ({found}), but the operator's results are ({wanted})"
            fix = "fn has to return tensors of the dtypes and shapes that `like` or `meta` says."
            raise ExecutorError(f"{self.name}: {what}", source=source, fix=fix)
        return tuple(tensors)


@dataclass(frozen=True, slots=True)
class CheckedRegion:
    """A run of an executor's function for a region; it returns what the region says, or the error
    names the user's line.
    """

    name: str
    run: Callable[..., Any]
    region: Trace

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        source = next(
            (equation.source for equation in self.region.equations if equation.source), None
        )
        try:
            results = self.run(*inputs)
        except Exception as error:
            if not has_note(error):
                error.add_note(located(f"while it ran: {self.name}", source=source))
            raise
        types = self.region.output_types
        if (
            isinstance(results, tuple | list)
            and len(results) == len(types)
            and all(map(_is, results, types))
        ):
            return tuple(results)
        found = (
            f"({', '.join(map(_told, results))})"
            if isinstance(results, tuple | list)
            else _told(results)
        )
        what = f"{self.name} returned {found}, but its outputs are ({', '.join(map(str, types))})"
        fix = (
            "Let the function that `fuse` makes return a tuple of tensors of the region's dtypes"
            " and shapes."
        )
        raise ExecutorError(what, source=source, fix=fix)

    def donating(self, places: tuple[int, ...]) -> CheckedRegion:
        """The function that may write its results over these inputs."""
        return replace(self, run=donating(self.run, places))


def returning_first(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the first argument, which `run` writes to and does not return."""

    def writing(first: Any, /, *args: Any, **kwargs: Any) -> Any:
        run(first, *args, **kwargs)
        return first

    return writing


@dataclass(frozen=True, slots=True)
class Watched:
    """A run of a collective as a line of a program does it; where it fails, the error names the
    equation and the ranks.
    """

    run: Callable[..., Any]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        line: Line = frame.f_globals[LINES][frame.f_lineno]
        equation = line.equation
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        run = lambda: self.run(*args, **kwargs)
        return run_collective(run, equation, tensors, lambda: format_equation(equation))


def tell_line(error: Exception) -> None:
    """Add the equation and the user's line to an error that an op raised in a program."""
    if isinstance(error, ThunderError) or has_note(error):
        return
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_code.co_filename.startswith("<thunder_fn "):
            line: Line | None = frame.f_globals.get(LINES, {}).get(number)
            if line is not None:
                text, source = format_equation(line.equation), line.equation.source
                error.add_note(located("while the program ran", equation=text, source=source))
                return


def tensors_in(result: Any, count: int) -> list[torch.Tensor]:
    """The tensors of a result; arrays count as tensors where there are too few."""
    leaves = [result] if isinstance(result, torch.Tensor) else pytree.flatten(result)[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(tensors) < count:
        arrays = [
            leaf for leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray | np.generic)
        ]
        tensors = [torch.as_tensor(leaf) for leaf in arrays] if len(arrays) == count else tensors
    return tensors


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Arguments of fn: tensors that require no gradient. They are added to those that are there."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.detach() if value.requires_grad else value
    return tuple([_plain(item, tensors) for item in value]) if isinstance(value, tuple) else value


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The number of writes to each tensor so far; inference tensors do not count."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _is_static(type: Type) -> bool:
    return not isinstance(type, TensorType) or all(isinstance(dim, int) for dim in type.shape)


def _types_for(
    equation: Equation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Type, ...]:
    """The types of the results of a call, with numbers in the place of the symbols that its
    operands know.
    """
    known = dict[int, tuple[Var, Any]]()

    def match(arg: Arg, value: Any) -> None:
        if isinstance(arg, Var):
            known[arg.index] = (arg, value)
        elif isinstance(arg, tuple):
            for one, item in zip(arg, value, strict=True):
                match(one, item)

    match(equation.args, args)
    match(
        tuple(arg for _, arg in equation.kwargs), tuple(kwargs[key] for key, _ in equation.kwargs)
    )
    values = bind([var for var, _ in known.values()], [value for _, value in known.values()])
    change = Substitution(lambda expr: replaced(expr, values))
    return tuple(change.type(var.type) for var in equation.outputs)


def _fits(value: torch.Tensor, type: Type) -> bool:
    if not isinstance(type, TensorType) or value.dtype != type.dtype or value.device != type.device:
        return False
    if value.shape == type.shape:
        return True
    sizes = zip(value.shape, type.shape, strict=False)
    return value.dim() == len(type.shape) and all(
        isinstance(dim, Expr) or size == dim for size, dim in sizes
    )


def _is(value: Any, type: Type) -> bool:
    """Test that a result of a region is of its type; anything but a tensor passes."""
    return not isinstance(type, TensorType) or (
        isinstance(value, torch.Tensor) and _fits(value, type)
    )


def _told(value: Any) -> str:
    return str(type_of_value(value)) if isinstance(value, torch.Tensor) else kind_of(value)
