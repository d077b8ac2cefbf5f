"""check_errors: a function that returns the first error beside its result, in place of raising."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

from thunder_fn.api.calling import Transformed, transformed
from thunder_fn.api.captures import Plan, planned
from thunder_fn.capture import Captured
from thunder_fn.capture.apply import write_back
from thunder_fn.errors import UnknownOption, located
from thunder_fn.interpreters.check_errors import (
    KINDS,
    FoundError,
    Kind,
    check_errors as checked_trace,
)
from thunder_fn.jitted import Jitted

P = ParamSpec("P")
R = TypeVar("R")

__all__ = ["CheckErrors", "FoundError", "check_errors"]


@dataclass(frozen=True)
class CheckErrors(Transformed):
    """A function that returns the first error beside its result. See `check_errors`."""

    fn: Callable[..., Any]
    errors: tuple[Kind, ...]

    @property
    def __name__(self) -> str:
        return f"check_errors_{getattr(self.fn, '__name__', type(self.fn).__name__)}"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return planned(
            self, args, kwargs, lambda capture: self._plan(capture(self.fn, args, kwargs))
        )

    def _plan(self, captured: Captured) -> Plan:
        new, checks = checked_trace(captured.trace, self.errors)

        def arrange(inputs: Sequence[Any], outputs: tuple[Any, ...]) -> Any:
            *results, code = outputs
            result = captured.result(write_back(captured, inputs, tuple(results)))
            return FoundError(code, checks), result

        return Plan(self.__name__, captured, new, arrange)


@overload
def check_errors(
    f: Jitted[P, R], errors: Iterable[str] = KINDS
) -> Jitted[P, tuple[FoundError, R]]: ...
@overload
def check_errors(
    f: Callable[P, R], errors: Iterable[str] = KINDS
) -> Callable[P, tuple[FoundError, R]]: ...
def check_errors(f: Callable[..., Any], errors: Iterable[str] = KINDS) -> Any:
    """Return the first error of a call beside its result, in place of raising.

    Law: ``error, result = check_errors(f)(*args)``: the result is ``f(*args)`` if no check fails,
        else ``error.get()`` names the first that fails, with the user's line.

    The errors are values of the program, so they work under `jit`, in loops and branches, and for
    each example of a `vmap`. A program goes on after an error; its result means nothing then.

    Args:
        f: any PyTorch callable. Of custom derivatives only the results are checked.
        errors: the kinds that are checked. "nan": an op gives NaN. "bounds": an index is outside
            of what it indexes. "asserts": `tfn.debug.check` or an assertion of PyTorch fails.

    Returns:
        A function with the arguments of f that returns a `FoundError` and the result of f. Its
            `get()` is the text or None, its `throw()` raises. The result for a jitted function is
            jitted.

    Raises:
        UnknownOption: there is no such kind.
        CheckFailed: by `throw()`, where a check failed.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> f = tfn.jit(tfn.vmap(tfn.check_errors(torch.log)))
        >>> error, _ = f(torch.tensor([1.0, -1.0]))
        >>> print(error.get().splitlines()[0])
        aten.log.default gives NaN, in example 1; 1 of 2 examples fail

    Source: jax.experimental.checkify.
    """
    names: tuple[Any, ...] = (errors,) if isinstance(errors, str) else tuple(errors)
    for name in names:
        if name not in KINDS:
            raise UnknownOption(
                located(
                    f"check_errors: unknown kind of errors {name!r}",
                    fix=f"There are {', '.join(KINDS)}.",
                )
            )
    chosen: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind in names)
    return transformed(f, lambda fn: CheckErrors(fn, chosen))
