"""The common part of all transforms: capture the function, apply the new trace, write back its
mutations.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from thunder_fn import torch_internals as internals
from thunder_fn.capture import TENSOR, Captured, current
from thunder_fn.capture.apply import tensors_of, write_back
from thunder_fn.capture.scopes import user_source
from thunder_fn.capture.watching import made
from thunder_fn.errors import (
    GradError,
    JitError,
    NotDifferentiable,
    TraceTypeError,
    UnknownOption,
    callable_name,
    kind_of,
    located,
)
from thunder_fn.executors import Program, lower
from thunder_fn.executors.base import Numerics, is_within
from thunder_fn.executors.running import tell_line
from thunder_fn.ir.memos import memo
from thunder_fn.ir.text import shown
from thunder_fn.ir.trace import TensorType, Trace, as_dim, cut
from thunder_fn.jitted import Jitted
from thunder_fn.structured.shared.bind import apply
from thunder_fn.structured.shared.bodies import own_memory

T = TypeVar("T", bound="Transformed")

__all__ = [
    "Transformed",
    "apply",
    "run",
    "check_output",
    "described",
    "kind_of_tensor",
    "main_only",
    "main_output",
    "tensors_of",
    "transformed",
    "type_of_kind",
    "unwritten",
    "write_back",
]


@memo(256, derives=False)
def _lowered(trace: Trace) -> Program:
    return lower(trace, below_autograd=True)


def run(name: str, new: Trace, inputs: Sequence[Any], captured: Captured) -> tuple[Any, ...]:
    """Apply a trace that was made of a captured one. Where later calls run it again, it is lowered,
    unless autograd follows: a program does without the rules that autograd needs.

    Function modes have seen the function when it was captured, so what they do is in the trace.
    """
    if current() is None and internals.count_function_modes():
        with internals.without_function_modes():
            return run(name, new, inputs, captured)
    tensors = (one for one in inputs if isinstance(one, Tensor))  # the others are strides
    is_followed = internals.any_followed(tensors)
    is_eager = captured.is_kept and current() is None and not internals.is_intercepted()
    if is_followed and captured.writes and current() is None:
        new, inputs = _before_writes(captured, new, inputs)
    if not is_eager or is_followed:
        return apply(name, new, inputs, captured.trace)
    made(name, new, captured.trace)
    try:
        return _lowered(new).run(*map(internals.plain, inputs))
    except Exception as error:
        tell_line(error)
        raise


def _before_writes(
    captured: Captured, new: Trace, inputs: Sequence[Any]
) -> tuple[Trace, Sequence[Any]]:
    """A trace and its inputs, with copies of the tensors that the function writes: autograd reads
    what they held before.
    """
    targets = (write.target for write in captured.writes)
    written = {id(inputs[one] if isinstance(one, int) else one) for one in targets}
    constants = tuple(
        replace(constant, tensor=constant.tensor.clone())
        if id(constant.tensor) in written
        else constant
        for constant in new.constants
    )
    given = [one.clone() if id(one) in written else one for one in inputs]
    return cut(new, constants=constants), given


def unwritten(
    captured: Captured, trace: Trace, residuals: Sequence[Any]
) -> tuple[Trace, tuple[Any, ...]]:
    """A trace that runs later and its residuals, as they are before the function's writes."""
    if not captured.writes:
        return trace, tuple(residuals)
    constants = tuple(
        constant if constant.owned else replace(constant, tensor=constant.tensor.clone())
        for constant in trace.constants
    )
    return cut(trace, constants=constants), tuple(own_memory(list(residuals)))


_OPTIONS = (
    "argnums",
    "has_aux",
    "in_dims",
    "in_axes",
    "out_dims",
    "out_axes",
    "randomness",
    "chunk_size",
)
"""Options of transforms, which are given when a transform is made."""


def with_checked_keywords(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a transformed function that refuses options of the transform which the function
    does not take.
    """

    @functools.wraps(call)
    def checked(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name in _OPTIONS and not _takes(self.fn, name):
                kind, own = type(self).__name__.lower(), getattr(self.fn, "__name__", "f")
                what = (
                    f"{self.__name__}: {own} takes no argument {name!r}, which is an option of"
                    f" {kind}"
                )
                raise UnknownOption(
                    located(what, source=user_source(), fix=f"Write `{kind}(f, {name}=...)(x)`.")
                )
        return call(self, *args, **kwargs)

    return checked


def _takes(fn: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


@dataclass(frozen=True)
class Named:
    """The name of a function, without what the function keeps alive."""

    __name__: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{self.__name__} is a name only")


def _by_dynamo(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if internals.is_dynamo_compiling() and internals.is_one_graph():
            return self.by_torch()(*args, **kwargs)
        return call(self, *args, **kwargs)

    vars(__call__).pop("_torchdynamo_disable", None)  # a mark of the call that is wrapped
    return __call__


class Transformed:
    """Base of transformed functions: the name and the wrapped function of the original.

    Dynamo leaves their calls alone, since it could only read how they capture. Where it has to
    compile all in one graph, it takes torch.func's transform in the place of ours.
    """

    fn: Callable[..., Any]
    is_forward: ClassVar[bool] = False
    """The transform is forward mode."""

    def __init_subclass__(cls) -> None:
        call = internals.outside_dynamo(with_checked_keywords(cls.__call__))
        cls.__call__ = call if cls.by_torch is Transformed.by_torch else _by_dynamo(call)

    def by_torch(self) -> Callable[..., Any]:
        """The same function by torch.func."""
        raise NotImplementedError

    @property
    def __name__(self) -> str:
        kind: str = type(self).__qualname__.lower()
        return f"{kind}_{getattr(self.fn, '__name__', type(self.fn).__name__)}"

    @property
    def without_function(self: T) -> T:
        """The options of the transform, with something of the function's name in its place."""
        name = callable_name(self.fn)
        return replace(self, fn=Named(name))  # type: ignore[type-var]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn


def transformed(
    f: Callable[..., Any], make: Callable[[Callable[..., Any]], Any], numerics: Numerics = "bitwise"
) -> Any:
    """A transform of a jitted function is a jitted function with the same options.

    So is a transform of a function that jits itself when it is called, as a rewritten one does.
    Such a function has `unjitted()`, and the options are in its `jitted`.

    `numerics` says how far the transform takes results of the same function; those that make
    another function, as grad does, mean what they compute.
    """
    if not callable(f):
        raise GradError(
            f"expected a function to transform, given {kind_of(f)}: {shown(f, 60)}",
            fix="Transform a function, then call the result: `grad(f)(x)`.",
        )
    unjitted = getattr(f, "unjitted", None)
    jitted = f if isinstance(f, Jitted) else getattr(f, "jitted", None)
    if not isinstance(jitted, Jitted) or (unjitted is None and f is not jitted):
        return make(f)
    new = make(jitted.fn if unjitted is None else unjitted())
    if not is_within(numerics, jitted.options.numerics):
        kind = type(new).__name__.lower()
        what = (
            f"{kind}: it is {numerics}, and the function was jitted with"
            f" numerics={jitted.options.numerics!r}"
        )
        fix = f"Write `jit({kind}(f), ...)`: then results are those of `{kind}(f)` to that degree."
        raise JitError(located(what, fix=fix))
    return jitted.with_function(new)


def described(result: Any) -> str:
    """A result in the words of an error: its type, None, or the kind of Python value."""
    return str(result) if isinstance(result, TensorType) else kind_of(result)


def kind_of_tensor(value: Any) -> tuple[Any, ...]:
    """The dtype, the sizes and the device of a tensor; none of another value.

    In a result of a capture the sizes are leaves, so that one that is a symbol is a number in each
    call. To compare it with another one asks whether they are equal.
    """
    return (value.dtype, tuple(value.shape), value.device) if isinstance(value, Tensor) else ()


def type_of_kind(kind: tuple[Any, ...]) -> TensorType:
    """The type of tensors of a kind."""
    dtype, shape, device = kind
    return TensorType(dtype, tuple(map(as_dim, shape)), device)


def call_arguments(name: str, args: Any) -> tuple[Any, ...]:
    """Return the arguments of a call, given as one tuple or list.

    Raises:
        TraceTypeError: they are no tuple or list. The rows of a bare tensor are no arguments.
    """
    if isinstance(args, (tuple, list)):
        return tuple(args)
    what = f"{name}: expected the arguments of a call as one tuple, given {kind_of(args)}"
    raise TraceTypeError(what, fix=f"Write `{name}(f, (x, y))`; a single argument is `(x,)`.")


def main_only(captured: Captured) -> Captured:
    """The capture as if the function had returned the first of its two results only."""
    first = captured.out_spec.children()[0]
    leaves = captured.out_leaves[: first.num_leaves]
    known = captured.trace, captured.in_spec, captured.in_leaves, first, leaves, captured.writes
    return Captured(*known, is_kept=captured.is_kept)


def check_output(captured: Captured, main: Sequence[bool], name: str) -> None:
    """Raise for a function whose output has no tensor."""
    if any(main):
        return
    if not captured.out_spec.num_leaves:
        raise NotDifferentiable(
            f"{name}: Expected f to be a function that has non-empty output, given"
            f" {captured.result(())!r}"
        )
    kinds = sorted({kind_of(leaf) for leaf in captured.out_leaves if leaf is not TENSOR})
    given = ", ".join(kinds)
    raise NotDifferentiable(
        f"{name}: expected f(*primals) to return only tensors, given {given}; return other values"
        " as aux"
    )


def main_output(captured: Captured, has_aux: bool, name: str) -> tuple[bool, ...]:
    """Tell for each output of the trace whether it is part of the output proper, neither aux nor
    a write.
    """
    extra = (False,) * (len(captured.trace.outputs) - captured.num_results)
    if not has_aux:
        return (True,) * captured.num_results + extra
    marks = captured.result(tuple(range(captured.num_results)))
    if not isinstance(marks, tuple) or len(marks) != 2:
        raise GradError(
            f"{name}: output of function f should be a tuple: (output, aux) if has_aux is True, not"
            f" {kind_of(marks)}"
        )
    count = sum(leaf is TENSOR for leaf in main_only(captured).out_leaves)
    return tuple(index < count for index in range(captured.num_results)) + extra
