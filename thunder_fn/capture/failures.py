"""Failures of capture, and the errors that report them."""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import linecache
import re
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.kept import KINDS
from thunder_fn.capture.modules import holds_tracer
from thunder_fn.capture.outside import frames
from thunder_fn.capture.outside.kinds import is_plain_class
from thunder_fn.capture.places import tensor_at
from thunder_fn.capture.recorder import Recorder, current
from thunder_fn.capture.replaced.refusals import (
    DATA_DEPENDENT,
    data_dependent_error,
    no_fake_error,
    script_error,
)
from thunder_fn.capture.scopes import ScopeMode, user_source
from thunder_fn.capture.stored import reaches_tracer
from thunder_fn.capture.supported import check_supported
from thunder_fn.errors import (
    AliasedMutation,
    DataDependentBranch,
    DataDependentShape,
    DataDependentValue,
    ThunderError,
    TracedFunctionError,
    UnsupportedCall,
    UnsupportedInput,
    UnsupportedOutput,
    escaped,
    kind_of,
    located,
    with_article,
)
from thunder_fn.ir.equations import operands_in
from thunder_fn.ir.trace import Source, Trace, Var, type_of_value
from thunder_fn.lines import is_internal

# ---- arguments and results ----


def check_argument(leaf: Any, path: Callable[[], str]) -> None:
    """Raise for an argument that has no type in a trace and should not be baked in."""
    if isinstance(leaf, torch.Tensor):
        if not internals.is_plain(leaf):
            check_supported(leaf, path)
        return
    if isinstance(leaf, np.ndarray):
        text = f"{path()} is a numpy.ndarray, which cannot be traced"
        fix = "Convert it with `torch.from_numpy`; a tensor becomes an input of the trace."
        raise UnsupportedInput(text, source=user_source(), fix=fix)


def check_static_output(leaf: Any, f: Callable[..., Any], name: str) -> None:
    """Raise for a result that is no tensor and would be wrong as a constant."""
    kinds = {
        "a generator": (inspect.isgenerator, "Return a list."),
        "a coroutine": (inspect.isawaitable, "Trace a function that is not async."),
        "an async generator": (inspect.isasyncgen, "Trace a function that is not async."),
        "an iterator": (lambda value: isinstance(value, Iterator), "Return a list."),
    }
    for kind, (is_kind, fix) in kinds.items():
        if is_kind(leaf):
            leaf.close() if hasattr(leaf, "close") else None
            raise UnsupportedOutput(
                f"{name} returned {kind}, whose code has not run", source=source_of(f), fix=fix
            )
    if (watch := frames.observer()) is not None and watch.is_outside(leaf):
        return  # what is stored in it is stored there in each call
    cls, is_code = type(leaf).__name__, isinstance(leaf, _CODE)
    is_ones_own = watch is None and is_plain_class(type(leaf))  # such as a cache of a model
    held = getattr(leaf, "__dict__", None)
    if holds_tracer(held) if is_ones_own else reaches_tracer(leaf):
        text = f"{name} returned {kind_of(leaf)} that holds traced tensors" + (
            "" if is_code else f", but {cls} is not a pytree"
        )
        fix = (
            "Return the tensors, and make of them what is called outside of the traced function."
            if is_code
            else "Return the tensors, or register the class with"
            " `torch.utils._pytree.register_pytree_node`."
        )
        raise UnsupportedOutput(text, source=source_of(f), fix=fix)


_CODE = (
    *(types.FunctionType, types.MethodType, types.BuiltinMethodType, types.MethodWrapperType),
    functools.partial,
)


# ---- memory that is reached twice ----


def check_aliases(
    trace: Trace,
    tensors: Sequence[torch.Tensor],
    targets: Sequence[int | torch.Tensor],
    source: Source | None,
    name: str,
) -> None:
    """Raise if a tensor that is changed in place shares memory with another that the trace uses."""
    if not targets:
        return
    used = {var.index for var in operands_in(trace.equations)}
    used |= {atom.index for atom in trace.outputs if isinstance(atom, Var)}
    known: list[tuple[str, int | None, torch.Tensor]] = [
        (f"tensor argument {i}", i, tensor) for i, tensor in enumerate(tensors) if i in used
    ]
    known += [
        ("a closed-over tensor", None, constant.tensor)
        for constant in trace.constants
        if not constant.owned
    ]
    for target in targets:
        tensor = tensor_at(target, tensors)
        for other, position, alias in known:
            own = target if isinstance(target, int) else None
            if (position != own or alias is not tensor) and _have_one_memory(tensor, alias):
                what = (
                    f"tensor argument {target}"
                    if isinstance(target, int)
                    else "a closed-over tensor"
                )
                raise AliasedMutation(
                    f"{name} changes {what} ({trace_type(tensor)}) in place, "
                    f"and {other} ({trace_type(alias)}) shares its memory",
                    source=source,
                    fix=(
                        "Pass a clone of one of them, or compute a new tensor instead of"
                        " changing this one."
                    ),
                )


def _have_one_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Test whether tensors share memory, or tracers of a capture around, as its function has it."""
    recorder = current()
    if not isinstance(a, internals.Tracer) or not isinstance(b, internals.Tracer):
        return internals.shares_memory(a, b)
    while recorder is not None and not recorder.owns(a):
        recorder = recorder.outer
    places = [internals.memory_id(one) for one in (a, b)]
    if places[0] == places[1]:
        return internals.shares_memory(a, b, lambda one: places[0])
    return recorder is not None and places[1] in recorder.history.linked(places[0])


def trace_type(tensor: torch.Tensor) -> str:
    """The type of a tensor as a trace prints it."""
    with internals.no_torch_function():
        return str(type_of_value(tensor))


_OPTIMIZERS = torch.optim.__file__.rpartition("/")[0]

# ---- exceptions inside the traced function ----

_INTERNAL = re.compile(
    r"FakeTensor|FunctionalTensor|[Ff]unctional tensor|fake tensor|ProxyT|data pointer of"
    r" [Tt]ensor|torch\.compile/|"
    r'different device "meta"|functionaliz|wrapper subclass|does not have storage|Python'
    r" dispatcher|shape_env|"
    r"EffectType|INTERNAL ASSERT FAILED|already associated to a python object"
)


_SIZE_IN_DATA = re.compile(r"(?<=[\[ ,(])u\d+(?=[\]\s,)])")


def _size_error(error: Exception, size: str, recorder: Recorder) -> DataDependentShape:
    """The error of an op that takes a size found in data for another size than it may be."""
    called = f"`{getattr(recorder.function, '__name__', recorder.function)}`"
    text = (
        f"{called} needs to know the size {size}, which is found in a tensor's values and not"
        f" known while tracing ({error})"
    )
    fix = (
        "Say what holds with `torch._check`, such as `torch._check(x.shape[0] == 1)`, or use an op"
        " with a fixed shape."
    )
    return DataDependentShape(text, source=raised_at(error), fix=fix)


def is_complete(error: Exception) -> bool:
    """Test for an error of ours that says everything."""
    return isinstance(error, ThunderError) and _optimizer_error(error) is None


def failure(error: Exception, name: str, recorder: Recorder) -> Exception:
    """The error that tells the user about an exception inside the traced function."""
    if (found := _optimizer_error(error)) is not None:
        return found
    if isinstance(error, DATA_DEPENDENT):
        return data_dependent_error(recorder.function, error, raised_at(error))
    if isinstance(error, internals.SymbolicTracing):
        text = "PyTorch's own tracer (`make_fx`) cannot run inside a traced function"
        fix = "Use thunder_fn's transforms, which compose; `thunder_fn.trace` inside gives a trace."
        return UnsupportedCall(text, source=raised_at(error), fix=fix)
    if (place := internals.failed_in_script(error)) is not None:
        return _script_failure(error, name, Source(*place))
    if not _raised_by_user(error) and (size := _SIZE_IN_DATA.search(str(error))):
        return _size_error(error, size[0], recorder)
    if isinstance(error, internals.INTERNAL_ERRORS) or (
        not _raised_by_user(error) and _INTERNAL.search(str(error))
    ):
        op = recorder.function
        if isinstance(op, internals.OpOverload) and not internals.is_pytorchs_own(op):
            return no_fake_error(op, raised_at(error))
        text = (
            f"{name} calls {_called(error, op)}, which needs a tensor's memory or values and"
            " cannot be traced"
        )
        fix = (
            "Do this step outside the traced function, or make it a custom op with"
            " `torch.library.custom_op`."
        )
        return UnsupportedCall(text, source=raised_at(error), fix=fix)
    return traced_function_error(error, name)


_RUNS = ScopeMode.__torch_function__.__code__
"""The code that runs torch functions."""


def _called(error: Exception, function: Any) -> str:
    """The name of what was called where PyTorch raised: that of the torch function that runs. A
    function of C that modes do not see, such as `as_subclass`, has its name in the user's text.
    """
    tb = error.__traceback__
    if any(frame.f_code is _RUNS for frame, _ in traceback.walk_tb(tb)):
        return f"`{getattr(function, '__name__', function)}`" if function else "something"
    last = [one for one in traceback.extract_tb(tb) if not is_internal(one.filename)][-1:]
    for one in last:
        line = linecache.getline(one.filename, one.lineno or 0).encode()
        written = line[one.colno : one.end_colno] if one.end_lineno == one.lineno else b""
        with suppress(SyntaxError):
            match ast.parse(written.decode(), mode="eval").body:
                case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                    return f"`{name}`"
                case _:
                    pass
    return "a function of C"


def _script_failure(error: Exception, name: str, source: Source) -> Exception:
    """The error for TorchScript. Its cause is what an op raised; C++ has an exception of its own
    for a `raise` in the script.
    """
    cause = error.__cause__
    if isinstance(cause, DATA_DEPENDENT) or "GuardOnDataDependent" in str(error):
        return script_error(
            f"{name} calls code of `torch.jit` that needs the values in a traced tensor", source
        )
    if isinstance(cause, ThunderError):
        return cause
    if cause is not None:
        error = type(error)(f"{str(error).rstrip()} {cause}")
    return traced_function_error(error, name)


def _optimizer_error(error: Exception) -> Exception | None:
    """The error for a step of PyTorch's that decides by values in tensors; None for others."""
    owner = _optimizer_that_asked(error)
    kinds = (*DATA_DEPENDENT, DataDependentBranch, DataDependentValue)
    if not owner or not isinstance(error, kinds):
        return None
    text = (
        f"the step of {with_article(owner)} asks for values in tensors to decide how to go on,"
        " which are not known while tracing"
    )
    fix = (
        "Jit the function that computes the loss and its gradients, and call the step outside;"
        " `tfn.compile` runs such code as it is."
    )
    return DataDependentValue(text, source=raised_at(error), fix=fix)


def _optimizer_that_asked(error: Exception) -> str:
    """The class of the optimizer or schedule of PyTorch's whose code raised; empty if it is none.

    A closure that it calls is the user's code.
    """
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file.startswith(_OPTIMIZERS):  # asking for the locals of a frame keeps them alive
            owner = frame.f_locals.get("self")
            found = type(owner).__name__ if isinstance(owner, KINDS) else found
        elif not is_internal(file):
            found = ""
    return found


def _raised_by_user(error: Exception) -> bool:
    """Test whether the exception comes from a `raise` in the user's code."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    if step is None or is_internal(step.tb_frame.f_code.co_filename):
        return False
    return step.tb_frame.f_code.co_code[step.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def traced_function_error(error: Exception, name: str) -> Exception:
    """The user's exception as a TracedFunctionError that is also an instance of its own type."""
    text = located(
        f"{escaped(name)} raised {type(error).__name__} while it was traced: {error}",
        source=raised_at(error) or user_source(),
    )
    base = type(error)
    try:
        cls = type(base.__name__, (TracedFunctionError, base), {"__module__": base.__module__})
        new = cls.__new__(cls, *error.args)
        builtin = next(kind for kind in base.__mro__ if kind.__module__ == builtins.__name__)
        builtin.__init__(new, *error.args)
        for attribute in set(dir(builtin)) - set(dir(BaseException)):
            with suppress(AttributeError, TypeError):  # it cannot be set, or holds nothing
                if not callable(value := getattr(error, attribute)):
                    setattr(new, attribute, value)
        notes = [*getattr(error, "__notes__", ()), *new.__notes__]
        new.__dict__.update({**error.__dict__, "__notes__": notes})
    except Exception:  # noqa: BLE001 - the exception's class may do what it likes
        new = TracedFunctionError(text)
    new.message = text
    return new


def source_of(f: Callable[..., Any]) -> Source | None:
    """Find the source of a function, a module or what they wrap; the call's own place if that is
    not known.
    """
    f = inspect.unwrap(getattr(f, "func", f))
    function = (
        getattr(type(f), "forward", None)
        if isinstance(f, torch.nn.Module)
        else getattr(f, "__func__", f)
    )
    code = getattr(function, "__code__", None)
    if code is None or is_internal(code.co_filename):
        return user_source()
    return Source(code.co_filename, code.co_firstlineno, code.co_name)


def raised_at(error: BaseException) -> Source | None:
    """The innermost of the user's lines that an exception came through."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if not is_internal(code.co_filename):
            found = Source(code.co_filename, line, code.co_name)
    return found
