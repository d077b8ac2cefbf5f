"""Print values and call Python from inside a program, as in JAX.

    def f(x):
        y = x.sin()
        tfn.debug.print("y = {}, of {n}", y, n=x.shape[0])
        return y.sum()

Python's own `print` runs once, while a function is traced. These run whenever the program does: an
equation with an effect, which no transform drops, repeats or moves past another one. Under `grad`
it runs once, on the primal; under `jvp` too. Under `vmap` it runs for each example if the examples
differ in what it is given, else once. In a `scan` or a branch it runs for each step, and where the
branch is taken.

Effects run in the order in which the function makes them.

Source: jax.debug.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn.callbacks import LIBRARY, batch, examples, function_of, number_of, split_arguments
from thunder_fn.capture import pytree
from thunder_fn.capture.generators import is_again
from thunder_fn.capture.scopes import user_source
from thunder_fn.errors import CheckFailed, UnsupportedInput, kind_of, located, spelled
from thunder_fn.spellings import no_such_name

__all__ = ["callback", "check", "print"]

Tensor = torch.Tensor


@dataclass(frozen=True)
class _Printed:
    """A function of tensors that prints them, in the place of the tensors of a call of `print`."""

    text: str
    spec: Any
    statics: tuple[Any, ...]

    def __call__(self, *values: Tensor) -> None:
        leaves = pytree.filled(self.statics, map(_shown, values))
        args, kwargs = pytree.unflatten(self.spec, leaves)
        try:
            text = self.text.format(*args, **kwargs)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            what = f"debug.print: {self.text!r} does not fit its arguments: {error}"
            raise UnsupportedInput(what, fix='Write `debug.print("{} {y}", x, y=y)`.') from error
        sys.stdout.write(f"{text}\n")


@dataclass(frozen=True)
class _Called:
    """A function of tensors that calls another one on a structure of them."""

    function: Callable[..., Any]
    spec: Any
    statics: tuple[Any, ...]

    def __call__(self, *values: Tensor) -> None:
        args, kwargs = pytree.unflatten(self.spec, pytree.filled(self.statics, values))
        self.function(*args, **kwargs)


def _shown(value: Tensor) -> Any:
    return value.item() if value.dim() == 0 else value


def _run(
    function: int, values: Sequence[Tensor], sizes: Sequence[int], batched: Sequence[int]
) -> None:
    """Call a function for each example."""
    if is_again():
        return
    for given in examples(values, sizes, batched):
        function_of(function)(*given)


def _batched(
    info: Any, in_dims: Any, function: int, values: Any, sizes: Any, batched: Any
) -> tuple[None, None]:
    given = batch(info.batch_size, in_dims[1], values, sizes, batched)
    torch.ops.thunder_fn.debug(function, *given)
    return None, None


LIBRARY.define("debug(int function, Tensor[] values, SymInt[] sizes, int[] batched) -> ()")
LIBRARY.impl("debug", _run, "CompositeExplicitAutograd")
torch.library.register_fake(
    "thunder_fn::debug", lambda function, values, sizes, batched: None, lib=LIBRARY
)
torch.library.register_vmap("thunder_fn::debug", _batched, lib=LIBRARY)
torch.fx.has_side_effect(torch.ops.thunder_fn.debug.default)  # passes of FX keep it, too


# ---- for users ----


def _call(name: str, make: Callable[[Any, tuple[Any, ...]], Any], args: Any, kwargs: Any) -> None:
    values, spec, statics = split_arguments(args, kwargs)
    number = number_of(f"debug.{name}", make(spec, statics))
    torch.ops.thunder_fn.debug(number, values, [], [])


def print(text: str, *args: Any, **kwargs: Any) -> None:
    """Print values whenever the program runs: ``text.format(*args, **kwargs)``.

    Law: the results of the program are those without it.

    Args:
        text: the format. A tensor without dims is formatted as its number.
        args, kwargs: pytrees of tensors and plain values.

    Raises:
        UnsupportedInput: text is no string, or a plain value has no hash.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> f = tfn.jit(lambda x: tfn.debug.print("x = {:.1f}", x) or x * 2)
        >>> _ = f(torch.tensor(1.0)), f(torch.tensor(2.0))
        x = 1.0
        x = 2.0

    Source: jax.debug.print.
    """
    if not isinstance(text, str):
        what = f"debug.print: expected a format, given {kind_of(text)}"
        raise UnsupportedInput(what, source=user_source(), fix='Write `debug.print("{}", x)`.')
    _call("print", lambda spec, statics: _Printed(text, spec, statics), args, kwargs)


@spelled(
    ordered="Leave it out: effects run in the order in which the function makes them.",
    partitioned="Leave it out: each process calls its own function.",
)
def callback(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call a Python function on values whenever the program runs. Its result is dropped.

    The function is kept for as long as the process runs. A trace with it cannot be used in another
    process.

    Law: the results of the program are those without it.

    Args:
        function: called on tensors that require no grad, and on the plain values among the
            arguments.
        args, kwargs: pytrees of tensors and plain values.

    Raises:
        UnsupportedInput: a plain value has no hash.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> seen = []
        >>> f = tfn.jit(lambda x: tfn.debug.callback(seen.append, x) or x * 2)
        >>> _ = f(torch.tensor(1.0)), f(torch.tensor(2.0))
        >>> seen
        [tensor(1.), tensor(2.)]

    Source: jax.debug.callback.
    """
    if not callable(function):
        what = f"debug.callback: expected a function, given {kind_of(function)}"
        raise UnsupportedInput(what, source=user_source())
    _call("callback", lambda spec, statics: _Called(function, spec, statics), args, kwargs)


@spelled()
def check(condition: Tensor | bool, message: str) -> None:
    """Raise an error whenever a condition does not hold in a run of the program.

    `check_errors` returns the error beside the result instead.

    Law: where the condition holds, the results of the program are those without it.

    Args:
        condition: a bool, or a tensor, all of whose elements have to be true.
        message: the text of the error.

    Raises:
        CheckFailed: the condition is a bool and False.
        UnsupportedInput: the message is no string.
        RuntimeError: by PyTorch, when the program runs: some element is false.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> f = lambda x: tfn.debug.check(x > 0, "x has to be positive") or x.log()
        >>> error, _ = tfn.jit(tfn.check_errors(f))(torch.tensor([1.0, -1.0]))
        >>> print(error.get().splitlines()[0])
        x has to be positive

    Source: jax.experimental.checkify.check.
    """
    if not isinstance(message, str):
        what = f"debug.check: expected a message, given {kind_of(message)}"
        raise UnsupportedInput(
            what, source=user_source(), fix='Write `debug.check(x > 0, "text")`.'
        )
    if isinstance(condition, Tensor):
        holds = condition if condition.dim() == 0 else condition.all()
        torch.ops.aten._assert_async.msg(holds, message)
    elif not condition:
        raise CheckFailed(located(message, source=user_source()))


def __getattr__(name: str) -> object:
    raise no_such_name(__name__, name)
