"""Dynamo, where it compiles code in parts for us.

Dynamo gives up on code by an error, loses classes of tensors, and runs code as it is without a
word. Code that eager mode runs has to run, and to compute the same.
"""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import torch

from thunder_fn.errors import GraphBreakWarning
from thunder_fn.torch_internals.patches import Patch, is_applied

PROGRAMS = 256
"""The number of programs of one code object that Dynamo keeps: models of one class run the same
code.
"""


class TooManyPrograms(Exception):
    """Dynamo keeps as many programs of one code object as it may, and is asked for another."""


_CAN_WAIT = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE


def _or_stays(is_generator: Callable[[types.CodeType], bool]) -> Callable[..., bool]:
    """Replace Dynamo's question for code that it leaves as it is.

    It makes graphs of coroutines and fails where one ends. A graph of a `__torch_function__` gets
    tensors of its class, and so calls it again, without end.
    """

    def stays(code: types.CodeType) -> bool:
        is_ours = bool(code.co_flags & _CAN_WAIT) or code.co_name == "__torch_function__"
        return is_generator(code) or (is_ours and is_applied(_patch()))

    return stays


def _with_class(register: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the class of a tensor that Dynamo makes an attribute of its graph, as it does with an
    optimizer's parameters: `isinstance` would be false of it.
    """
    from torch._dynamo.variables.builder import infer_subclass_type

    @functools.wraps(register)
    def registered(graph: Any, target: Any, *names: Any, **options: Any) -> Any:
        if isinstance(target, torch.Tensor) and (kind := infer_subclass_type(target)) is not None:
            options = {"subclass_type": kind, **options}
        return register(graph, target, *names, **options)

    return registered


def _or_as_it_is(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Run code as it is, with a warning, if Dynamo fails at it: eager mode may run it."""
    from torch._dynamo import exc
    from torch._dynamo.convert_frame import ConvertFrameReturn

    failures = (exc.InternalTorchDynamoError, exc.TorchRuntimeError)

    @functools.wraps(convert)
    def converted(converter: Any, frame: Any, *given: Any, **options: Any) -> Any:
        try:
            return convert(converter, frame, *given, **options)
        except failures as error:
            code = frame.f_code
            what = (
                f"{code.co_qualname} in {code.co_filename} runs as it is, by PyTorch; Dynamo said:"
            )
            text = f"{what}\n  {str(error).strip().splitlines()[0]}"
            warnings.warn(text, GraphBreakWarning, stacklevel=2)
            return ConvertFrameReturn(skip_reason="Dynamo failed")

    return converted


def _without(is_wrong: Callable[..., bool]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Leave to Python what Dynamo gets wrong, between parts."""
    from torch._dynamo.exc import unimplemented

    def replace(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def called(self: Any, *given: Any) -> Any:
            if is_wrong(self, *given):
                what = f"{method.__qualname__} of {type(self).__name__}"
                why = "Dynamo computes it otherwise than Python does."
                unimplemented(gb_type="Wrong in Dynamo", context=what, explanation=why, hints=[])
            return method(self, *given)

        return called

    return replace


def _is_bounded(self: Any, *_: Any) -> bool:
    return self.maxlen.as_python_constant() is not None


def _reordered(call_method: Callable[..., Any]) -> Callable[..., Any]:
    """Write a dict whose order changes back as a whole: entries that stay were left in place."""

    @functools.wraps(call_method)
    def called(self: Any, tx: Any, name: str, *given: Any) -> Any:
        if name == "move_to_end":
            self._base_vt.should_reconstruct_all = True
        return call_method(self, tx, name, *given)

    return called


def _reduced(subtract: Callable[..., Any]) -> Callable[..., Any]:
    """Write a set that loses elements back as a whole: they stayed in it."""

    @functools.wraps(subtract)
    def called(self: Any, *given: Any) -> Any:
        self.should_reconstruct_all = True
        return subtract(self, *given)

    return called


def _containers() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return replacements of methods by which Dynamo gets Python's containers wrong."""
    import torch._dynamo.variables as variables
    from torch._dynamo.variables import builder, dicts, lists, user_defined

    def takes_first(self: Any, tx: Any, name: str, *given: Any) -> bool:
        return name == "popitem" and any(given)

    def copies_bounded(self: Any, tx: Any, name: str, *given: Any) -> bool:
        return name == "copy" and _is_bounded(self)

    def is_bounded_outside(self: Any, value: Any) -> bool:
        return type(value) is deque and value.maxlen is not None

    found: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (builder.VariableBuilder, "_wrap", _without(is_bounded_outside)),
        (dicts.ConstDictVariable, "call_method", _without(takes_first)),
        (lists.DequeVariable, "call_method", _without(copies_bounded)),
        (lists.DequeVariable, "sq_repeat_impl", _without(_is_bounded)),
        (getattr(user_defined, "OrderedDictVariable", None), "call_method", _reordered),
        (getattr(variables, "SetVariable", None), "nb_inplace_subtract_impl", _reduced),
    ]
    return [one for one in found if hasattr(one[0], one[1])]  # PyTorch 2.11 has other classes


@functools.cache
def _patch() -> Patch:
    from torch._dynamo import convert_frame, output_graph

    return Patch(
        (convert_frame, "is_generator", _or_stays),
        (output_graph.OutputGraph, "register_attr_or_module", _with_class),
        (convert_frame.ConvertFrame, "__call__", _or_as_it_is),
        *_containers(),
    )


@contextlib.contextmanager
def in_dynamo() -> Generator[None]:
    """Let code that Dynamo compiles meanwhile draw `numpy.random`'s numbers from NumPy's generator,
    outside of graphs, and run as eager mode does what Dynamo cannot compile.

    Models of one class may be many: Dynamo's own limits are 8 and, of all that ever were, 256. If
    there are too many it would run the code as it is, and only log that. Its configuration is that
    of the thread.

    Raises:
        TooManyPrograms: there are `PROGRAMS` programs of the code already.
    """
    from torch._dynamo import config, exc

    limits: dict[str, Any] = {
        "recompile_limit": PROGRAMS,
        "accumulated_recompile_limit": sys.maxsize,
    }
    options = {"use_numpy_random_stream": True, "fail_on_recompile_limit_hit": True}
    with config.patch({**limits, **options}), _patch().applied():
        try:
            yield
        except exc.FailOnRecompileLimitHit as error:
            raise TooManyPrograms(f"Dynamo has {PROGRAMS} programs of one code object") from error
