"""Scopes: torch functions, module calls and `@composite` functions as the recorder sees them
begin and end.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from thunder_fn import torch_internals as internals
from thunder_fn.capture import outs, pytree
from thunder_fn.capture.numbers.known_values import CUSTOM_RULE
from thunder_fn.capture.numbers.python_numbers import as_python
from thunder_fn.capture.numbers.scalars import with_tensor_scalars
from thunder_fn.capture.outside import frames
from thunder_fn.capture.outside.edges import Constant
from thunder_fn.capture.outside.kinds import may_run_users
from thunder_fn.capture.outside.levels import UNFOLLOWED, is_followed
from thunder_fn.capture.outside.properties import PROPERTIES, answer, check_type, is_inference_mode
from thunder_fn.capture.recorded import Scope
from thunder_fn.capture.recorder import Recorder, current
from thunder_fn.capture.replaced.cast_inside import CAST_INSIDE
from thunder_fn.capture.replaced.indexing import getitem, setitem
from thunder_fn.capture.replaced.lookasides import original_of, replacement
from thunder_fn.capture.replaced.number_calls import asks_length
from thunder_fn.capture.replaced.refusals import (
    BRANCHES,
    DATA_DEPENDENT,
    PYTHON_NUMBERS,
    data_dependent_error,
    listing_error,
    memory_error,
    needs_memory,
)
from thunder_fn.capture.replaced.stand_ins import HAS_NUMBERS, REWRITTEN
from thunder_fn.capture.supported import LITERALS, is_wrapped
from thunder_fn.errors import CustomRuleError, ThunderError, UnsupportedCall, kind_of, with_article
from thunder_fn.ir import hooks
from thunder_fn.ir.nesting import make_room
from thunder_fn.ir.trace import Arg, Expr, Literal, Source, Var, as_dim, type_of_value
from thunder_fn.lines import user_frame

P = ParamSpec("P")
R = TypeVar("R")

_ALL_LEVELS = ("thunder_fn.", "torch.autograd")

Tensor = torch.Tensor
_DATA: Any = Tensor.data
_PROPERTIES = (
    "shape dtype device ndim layout requires_grad itemsize nbytes is_cuda is_cpu is_meta is_sparse"
    " is_nested"
)
_QUERIES = (
    "size dim ndimension stride numel nelement is_contiguous is_floating_point is_complex is_signed"
)
METADATA: frozenset[Any] = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(getattr(Tensor, name) for name in _QUERIES.split()),
        *(Tensor.get_device, Tensor.element_size, Tensor.__len__, Tensor.is_conj, Tensor.is_neg),
        Tensor.__dir__,
        *(torch.is_floating_point, torch.is_complex, torch.is_tensor, torch.numel, torch.is_conj),
    }
)
_REQUIRES_GRAD: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_REGISTERS: frozenset[Any] = frozenset(
    (
        *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
        Tensor.grad_fn.__get__,  # type: ignore[attr-defined]
    )
)
"""Functions by which a function of the user's becomes a hook."""
GRADS: frozenset[Any] = frozenset(one.__get__ for one in internals.GRADS)
READ: dict[Any, str] = {
    **{
        getattr(Tensor, name).__get__: name
        for name in PROPERTIES
        if not callable(getattr(Tensor, name, None))
    },
    **{getattr(Tensor, name): name for name in PROPERTIES if callable(getattr(Tensor, name, None))},
    **dict.fromkeys((one.__get__ for one in internals.GRAD_FNS), "grad_fn"),
    torch.is_inference: "is_inference",
}
"""Functions that read a property of a tensor which no call is checked for, unless somebody reads
it.
"""
DETACHES = {
    *(Tensor.detach, torch.detach, _DATA.__get__),
    *(torch.ops.aten.detach, torch.ops.aten.detach.default),
}

_WORDS = (
    "add sub mul div rdiv floordiv remainder mod pow matmul and or xor lshift rshift eq ne lt le gt"
    " ge floor_divide bitwise_and bitwise_or bitwise_xor"
)
_OPERATORS = {
    getattr(Tensor, name)
    for word in _WORDS.split()
    for name in (word, f"{word}_", f"__{word}__", f"__r{word}__", f"__i{word}__")
    if hasattr(Tensor, name)
}
"""The functions behind Python's operators, which turn a TypeError into NotImplemented. Python goes
on after that: it adds out of place for `x += y`, and compares identities for `x == y`.
"""


UNSCOPED = {
    "__getitem__",
    "__setitem__",
    "__get__",
    "__set__",
    "requires_grad_",
    "retain_grad",
    "backward",
    "clone",
}
"""Functions that are no composites."""


def _recorder() -> Recorder:
    recorder = current()
    assert recorder is not None, "torch functions are seen by a recorder's mode only"
    return recorder


def _set_data(x: Tensor, value: Tensor) -> None:
    """`x.data = value`: from now on both have the same memory."""
    if value is x:  # as in `module.to(y)`, where nothing has to move
        return
    if x.dtype != value.dtype or x.shape != value.shape:
        raise UnsupportedCall(
            f"`.data` of {with_article(type_of_value(x))} was set to"
            f" {with_article(type_of_value(value))}",
            source=user_source(),
            fix="A traced tensor keeps its dtype and shape; make a new tensor instead.",
        )
    if internals.bits_between(x, value):
        raise UnsupportedCall(
            "`.data` was set to a tensor with another conjugate or negative bit",
            source=user_source(),
            fix=(
                "A traced tensor keeps its bits; call `resolve_conj().resolve_neg()` on the new"
                " value."
            ),
        )
    recorder = _recorder()
    if recorder.inside and any(x is tracer for tracer in recorder.given):
        raise UnsupportedCall(
            f"`.data` of a tensor from outside is set inside {recorder.inside}, where it only"
            " stands for the caller's tensor",
            source=user_source(),
            fix="Compute with the new value under a name of its own.",
        )
    recorder.history.set_data(x, value)


def _detach_in_place(x: Tensor) -> Tensor:
    """`x.detach_()`: views of x keep their history. At a level of torch.func autograd alone is
    concerned. An argument with a conjugate or negative bit is a view inside, and none outside.
    PyTorch does nothing in inference mode.
    """
    if not is_wrapped(x) and is_inference_mode(_recorder()):
        return x
    has_bits = not is_wrapped(x) and (x.is_conj() or x.is_neg())
    is_view_here = has_bits and _recorder().history.is_given(x)
    if not is_wrapped(x) and not has_bits:
        _recorder().history.leave(x)
    if getattr(x, "is_own_view", False) or is_view_here:
        with nullcontext() if has_bits else _recorder().detaches():
            internals.become(x, torch.detach(x))
        return x
    Tensor.detach_(x)
    if not is_wrapped(x):
        _recorder().history.detach(x)
    return x


def _set_flag(call: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _recorder().flags.set(x, lambda: call(x, *args, **kwargs))


_SETS_FLAG = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_ATEN_DETACH = torch.ops.aten.detach_
F = torch.nn.functional
CHECKS: dict[Any, tuple[bool, str | None]] = {
    **dict.fromkeys(
        (torch.istft, Tensor.istft), (False, "istft: the window overlap-add has a minimum of zero")
    ),
    F.gaussian_nll_loss: (False, "gaussian_nll_loss: var has negative entry/entries"),
}
"""Functions that look at values only to check them: the answer with which they go on, and what
another means.
"""

INSTEAD: dict[Any, Callable[..., Any]] = {
    **REWRITTEN,
    **CAST_INSIDE,
    _DATA.__set__: _set_data,
    **dict.fromkeys((Tensor.detach_, torch.detach_), _detach_in_place),
    **{call: functools.partial(_set_flag, call) for call in _SETS_FLAG},
    **dict.fromkeys((_ATEN_DETACH, _ATEN_DETACH.default), _detach_in_place),
    Tensor.__getitem__: getitem,
    Tensor.__setitem__: setitem,
    internals.IS_ALL_TRUE: lambda x: True,  # the arguments of distributions are not validated
}
"""Functions that eager PyTorch writes in terms of memory or values, which tracers do not have."""


NUMBERS = {*HAS_NUMBERS, *(getattr(Tensor, name) for name in PYTHON_NUMBERS - {"__contains__"})}
"""Methods that give Python's numbers of one tensor."""
SHOWN = (Tensor.__repr__, Tensor.__format__)
ARRAYS = (Tensor.numpy, Tensor.__array__)


def _known_array(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """The values of a tracer in the call that is traced, as a NumPy array that cannot be written
    to; None where they are unknown, or their derivative would be lost: no custom rule has it.
    """
    tracer = args[0]
    if recorder.inside != CUSTOM_RULE and internals.is_inexact(tracer):
        return None
    value = recorder.values.value(tracer)
    if value is None:
        return None
    with recorder.suspended():
        array = func(value, *args[1:], **kwargs)
    array.setflags(write=False)  # eager mode would write to the tensor
    return array


def _note_length(recorder: Recorder, tensor: torch.Tensor) -> None:
    """Note the function that takes a symbolic size for a number by `len(x)`."""
    is_symbolic = tensor.dim() > 0 and isinstance(as_dim(tensor.shape[0]), Expr)
    code = asks_length() if is_symbolic and recorder.lengths is not None else None
    if code is not None:
        recorder.lengths = {**(recorder.lengths or {}), code: None}


def _shown(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> str:
    """The text of a tensor from outside: its values, unless the function has written to it. They
    are those of the trace.
    """
    watch, frame = frames.observer(), user_frame()
    is_written = recorder.is_written(args[0])
    own = recorder.lift(args[0]) if is_written else None
    if frame is not None and (own is None or recorder.values.value(own) is None):
        recorder.texts.ask(frame.f_code.co_filename)
    if own is not None:
        return getattr(own, func.__name__)(*args[1:], **kwargs)
    if watch is not None and frame is not None:
        said = Constant("the text of a tensor", frame.f_code.co_filename, frame.f_lineno)
        watch.constants.setdefault(str(said), said)
    recorder.properties.look_at_process("print_options", internals.print_options)
    with internals.only_memory():
        return func(*args, **kwargs)


class ScopeMode(TorchFunctionMode):
    """Lifts the tensors that a torch function is called with, and makes the call a scope."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        recorder.where = functools.partial(user_source, recorder)
        self._running: list[Any] = []

    @contextmanager
    def alone(self) -> Generator[None]:
        """Enter it in the place of those of captures around this one, which have nothing to see
        inside.
        """
        with internals.without_function_modes(ScopeMode), self:
            yield

    def _answered_by(self, func: Any, args: Any, kwargs: dict[str, Any], types_: Any) -> Any:
        """Ask classes that are like tensors, and see what they call. PyTorch asks them without the
        mode, so that they would compute on what no recorder has seen.
        """
        with self:
            for kind in _likes(types_):
                result = kind.__torch_function__(func, types_, args, kwargs)
                if result is not NotImplemented:
                    return result
        return func(*args, **kwargs)

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _ordered(func, args, kwargs or {})
        recorder = self.recorder
        if recorder.inside and func in UNFOLLOWED and self._is_unfollowed(args[0]):
            return UNFOLLOWED[func]
        is_passed, likes = func in METADATA and replacement(func) is None, _likes(types_)
        recorder.call.runs_users |= func in _REGISTERS
        is_running = bool(self._running) and self._running[-1] is func
        if likes or is_passed or is_running or current() is not recorder:
            answered = self._answered_by if likes else self._passed
            return answered(func, args, kwargs, types_ if likes else is_passed)
        if func in READ and replacement(func) is None:
            one = recorder.counterpart(args[0])
            return answer(recorder, READ[func], one, lambda: func(one, *args[1:], **kwargs))
        watching = _pause(recorder, args, kwargs)
        try:
            if (
                func in SHOWN
                and not isinstance(args[0], internals.Tracer)
                and not is_wrapped(args[0])
            ):
                return _shown(recorder, func, args, kwargs)
            given, (args, kwargs) = args, lift_call(recorder, args, kwargs)
            instead = replacement(func)
            selections = recorder.selections
            selections.before(args, kwargs, args[1] if func is Tensor.__setitem__ else None)
            if instead is None:
                result = self._scoped(func, args, kwargs)
                selections.after()
                if func in (Tensor.item, Tensor.tolist):
                    return as_python(result)
                return _as_given(result, given, args)
            with self:
                return instead(*args, **kwargs)
        except ThunderError as error:
            if func in _OPERATORS and isinstance(error, TypeError):
                recorder.late_error = recorder.late_error or error
            raise
        finally:
            hooks.resume(watching)

    def _passed(self, func: Any, args: Any, kwargs: Any, is_metadata: bool) -> Any:
        """The answer of a function that is not recorded."""
        recorder = self.recorder
        if is_metadata and not internals.is_living_tracer(args[0]) and current() is recorder:
            check_type(recorder, args[0])
            if func is not Tensor.__dir__:  # its own attributes, which a tracer does not have
                args = (recorder.counterpart(args[0]), *args[1:])
        if func is Tensor.__len__ and recorder.lengths is not None:
            _note_length(recorder, args[0])
        if func == _REQUIRES_GRAD and (flag := recorder.flags.answer(args[0])) is not None:
            return flag
        result = func(*args, **kwargs)
        return as_python(result) if recorder.symbolic and func in METADATA else result

    def _is_unfollowed(self, tensor: Tensor) -> bool:
        """Test for a question about a tensor that its level does not follow. Our code and that of
        autograd go through all levels, so their questions do not count.
        """
        frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
        asker = frame.f_globals.get("__name__", "")
        is_asked = current() is self.recorder and not asker.startswith(_ALL_LEVELS)
        is_own = is_asked and internals.is_living_tracer(tensor)
        return is_own and not is_followed(self.recorder, tensor)

    def _scoped(self, func: Any, args: Any, kwargs: Any) -> Any:
        recorder = self.recorder
        outermost = recorder.scope.kind != "function"
        if outermost:
            recorder.source, recorder.function = user_source(recorder), func
        name = function_name(func)
        try:
            if name is None:
                return self._run(func, args, kwargs)
            return in_scope(
                recorder, name, "function", lambda: self._run(func, args, kwargs), args, kwargs
            )
        except DATA_DEPENDENT as error:
            raise data_dependent_error(func, error, recorder.source) from None

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in CHECKS:
            with self.recorder.mode.assuming(*CHECKS[func]):
                return self._call(func, args, kwargs)
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        recorder = self.recorder
        if func in NUMBERS and (value := recorder.values.value(args[0])) is not None:
            with recorder.suspended():
                return func(value)
        if func in HAS_NUMBERS and not HAS_NUMBERS[func](*args):
            is_long = func is Tensor.tolist and not args[0].is_complex()
            raise (
                listing_error(recorder.source, args[0].numel())
                if is_long
                else data_dependent_error(func, None, recorder.source)
            )
        if needs_memory(func):
            array = _known_array(recorder, func, args, kwargs) if func in ARRAYS else None
            if array is None:
                raise memory_error(func, recorder.source)
            return array
        if recorder.steps:
            kwargs = _with_numbers(kwargs)
        instead = INSTEAD.get(func) or with_tensor_scalars(func, kwargs)
        if instead is not None:
            args, kwargs = internals.in_order(func, args, kwargs)
            return instead(*args, **kwargs)
        if func in GRADS:
            recorder.gradients.look_at(args[0])
        if isinstance(kwargs.get("out"), (Tensor, tuple, list)):
            return outs.write(recorder, self._called, func, args, kwargs)
        if func in DETACHES:
            with recorder.detaches():
                return func(*args, **kwargs)
        return self._called(func, args, kwargs)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(func, types.FunctionType):
            try:
                return func(*args, **kwargs)
            except AssertionError as error:  # of PyTorch's Python code for symbolic sizes
                with self.recorder.suspended():
                    known = internals.eager_error(func, args, kwargs)
                raise known or error from None
        self._running.append(func)
        try:
            with self:
                return internals.without_torch_function_checks(original_of(func))(*args, **kwargs)
        finally:
            self._running.pop()


def _pause(recorder: Recorder, args: Any, kwargs: Any) -> Any:
    """Mark the start of machinery, unless PyTorch may call code of the user's in it: a method of
    an argument, a mode, or a hook.
    """
    watching = hooks.pause()
    if watching is None:
        return None
    given = (*args, *kwargs.values(), *internals.function_modes(), *internals.dispatch_modes())
    return (
        hooks.resume(watching)
        if recorder.call.runs_users or any(map(may_run_users, given))
        else watching
    )


def _with_numbers(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments with numbers for tensors where eager mode reads these, as a tensor `lr`."""
    return {
        key: as_python(value.item())
        if key in ("alpha", "value") and isinstance(value, Tensor)
        else value
        for key, value in kwargs.items()
    }


def lift_call(recorder: Recorder, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The call with tracers in place of tensors from outside."""
    return tuple(_lift(recorder, arg) for arg in args), {
        key: _lift(recorder, value) for key, value in kwargs.items()
    }


def _lift(recorder: Recorder, value: Any) -> Any:
    """Lift a tensor, or those in a container; one without is the caller's, who sees changes."""
    if isinstance(value, Tensor):
        return recorder.lift(value)
    if type(value) in (list, tuple, dict) and value:
        items = value.values() if type(value) is dict else value
        lifted = [_lift(recorder, item) for item in items]
        if all(map(operator.is_, lifted, items)):
            return value
        return dict(zip(value, lifted, strict=True)) if type(value) is dict else type(value)(lifted)
    return value


def _as_given(result: Any, given: Any, lifted: Any) -> Any:
    """The user's own tensor where a call returns its argument: after `self.state += x` the
    attribute is the same object.
    """
    if (
        not lifted
        or result is not lifted[0]
        or result is given[0]
        or not isinstance(result, Tensor)
    ):
        return result
    own = given[0]
    with internals.no_torch_function():
        is_as_before = (own.shape, own.stride(), own.requires_grad) == (
            result.shape,
            result.stride(),
            result.requires_grad,
        )
    return own if is_as_before else result


def in_scope(
    recorder: Recorder,
    name: str,
    kind: str,
    run: Callable[[], R],
    args: Any = None,
    kwargs: Any = None,
    module: str = "",
) -> R:
    """Run inside a new scope, which keeps the call as the user wrote it."""
    outer = recorder.scope
    scope = Scope(name, kind, outer, outer.depth + 1, recorder.source, module or outer.module)
    make_room(recorder.level + scope.depth)
    if args is not None:
        scope.args, scope.kwargs = encode_call(recorder, args, kwargs or {})
        scope.is_cast = internals.is_autocast_on()
    with recorder.open(scope):
        result = run()
        if scope.args is not None:  # inside: a view may be made again when it is asked for
            scope.results = encode_results(recorder, result)
    return result


def encode_call(
    recorder: Recorder, args: Any, kwargs: Any
) -> tuple[tuple[Arg, ...] | None, tuple[tuple[str, Arg], ...] | None]:
    """The call's arguments with variables and literals in place of values; None if that cannot
    be.
    """
    try:
        return tuple(_encode(recorder, arg) for arg in args), tuple(
            (key, _encode(recorder, value)) for key, value in kwargs.items()
        )
    except _NotEncodable:
        return None, None


def encode_results(recorder: Recorder, result: Any) -> tuple[Var, ...] | None:
    """The variables of the call's results; None if one has none."""
    try:
        leaves = pytree.flatten(result)[0]
        return tuple(
            var
            for leaf in leaves
            if isinstance(leaf, Tensor) and isinstance(var := _encode(recorder, leaf), Var)
        )
    except _NotEncodable:
        return None


class _NotEncodable(Exception):
    pass


def _encode(recorder: Recorder, value: Any) -> Arg:
    if isinstance(value, Tensor):
        var = recorder.var_of(value)
        if var is None:
            raise _NotEncodable
        return var
    if isinstance(value, (list, tuple)):
        return tuple(_encode(recorder, item) for item in value)
    value = (
        recorder.call.generators.used(value)
        if isinstance(value, torch.Generator)
        else as_dim(value)
    )
    if isinstance(value, LITERALS):
        return Literal(value)
    raise _NotEncodable


@functools.cache
def function_name(func: Any) -> str | None:
    """The name of a torch function's composite, None for those that are no scope of their own.

    A method has the name of the function that does the same: `Tensor.matmul` and `@` are
    `torch.matmul`. Reflected ones, whose arguments come the other way around, keep theirs.
    """
    short = getattr(func, "__name__", "")
    if isinstance(func, internals.OpOverload | internals.OpOverloadPacket):
        return None
    if short in UNSCOPED or short in BRANCHES or func in DETACHES or not short:
        return None
    name = resolve_name(func) or getattr(func, "__qualname__", short)
    if not name.startswith("torch.Tensor."):
        return name if name.startswith("torch.") else None
    plain = short.strip("_")
    return f"torch.{plain}" if hasattr(torch, plain) else name


def user_source(recorder: Recorder | None = None) -> Source | None:
    """The innermost frame that belongs neither to PyTorch nor to this package."""
    frame = user_frame()
    if frame is None:
        return None
    module = recorder.scope.module if recorder is not None else ""
    return Source(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, module)


def check_unchanged(held: pytree.Contents, who: str, fix: str) -> None:
    """Check that a function has not changed containers of which it has copies.

    Raises:
        UnsupportedCall: it has.
    """
    if (node := held.changed) is not None:
        what = f"{who} changes {kind_of(node)} among its arguments, which it has a copy of"
        raise UnsupportedCall(what, source=user_source(), fix=fix)


# ---- the user's own composites ----


def composite(f: Callable[P, R]) -> Callable[P, R]:
    """Make a function one equation of the trace, with the function's own equations as its body.

    Law: ``trace(composite(f), x)`` evaluates as ``trace(f, x)``.

    Raises:
        CustomRuleError: f is no function.

    Example:
        >>> @composite
        ... def double(x):
        ...     return x + x
    """
    if not hasattr(f, "__qualname__"):
        raise CustomRuleError(
            f"composite: expected a function, given {kind_of(f)}",
            fix="Write a function around what it calls.",
        )
    return named_composite(f, f"{f.__module__}.{f.__qualname__.rsplit('<locals>.', 1)[-1]}")


def named_composite(f: Callable[P, R], name: str) -> Callable[P, R]:
    """Make a composite under a name. A dotted name, as `quantized.int8_linear`, is that of calls as
    written: a transformed call, which has other results, has the last part for a name.
    """

    @functools.wraps(f)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        recorder = current()
        if recorder is None:
            return f(*args, **kwargs)
        recorder.source = user_source(recorder)
        new_args, new_kwargs = lift_call(recorder, args, kwargs)
        call: Callable[..., R] = f
        return in_scope(
            recorder, name, "composite", lambda: call(*new_args, **new_kwargs), new_args, new_kwargs
        )

    wrapper.__composite__ = name  # type: ignore[attr-defined]
    return wrapper


def _ordered(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a getter, which may be given by name, and those of other functions."""
    is_by_name = not args and (func in METADATA or func in READ)
    return internals.in_order(func, args, kwargs) if is_by_name else (args, kwargs)


def _likes(types_: Iterable[type]) -> list[Any]:
    """The classes that are like tensors, and are none."""
    return [kind for kind in types_ if not issubclass(kind, torch.Tensor)]
