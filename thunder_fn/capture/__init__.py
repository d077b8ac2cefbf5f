"""Capture: a PyTorch callable becomes a trace.

Direct tracing, as JAX does it: run the function once on tracers and record. In-place code and views come out pure;
closed-over tensors become constants; what the function mutates becomes extra outputs. Capture nests and is
thread-safe: everything it keeps lives in one Recorder, found through a context variable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn.capture import pytree
from thunder_fn.capture.nest import nest
from thunder_fn.capture.recorder import Recorder, current, is_wrapped
from thunder_fn.capture.scopes import ScopeMode, composite, is_internal, module_scopes, user_source
from thunder_fn.errors import CaptureError, ThunderError, TracedFunctionError, UnsupportedOutput, located
from thunder_fn.trace import Atom, Source, Trace, Var

__all__ = ["TENSOR", "Captured", "Write", "capture", "composite", "current", "pytree"]


class _TensorLeaf:
    """Stands for a tensor among the leaves of a pytree whose other leaves are static values."""

    def __repr__(self) -> str:
        return "TENSOR"

    def __reduce__(self) -> str:
        return "TENSOR"


TENSOR = _TensorLeaf()


@dataclass(frozen=True, slots=True)
class Write:
    """Something that the function mutates: an input of the trace by index, or a closed-over tensor."""

    target: int | torch.Tensor


@dataclass(frozen=True, slots=True)
class Captured:
    """A function as a trace, with what is needed to call it as the function is called.

    The trace has one input for each tensor leaf of `(args, kwargs)`. Its outputs are the tensor leaves of the result,
    then one new value for each write.
    """

    trace: Trace
    in_spec: pytree.PyTreeSpec
    in_leaves: tuple[Any, ...]
    out_spec: pytree.PyTreeSpec
    out_leaves: tuple[Any, ...]
    writes: tuple[Write, ...] = ()

    @property
    def num_results(self) -> int:
        """How many of the trace's outputs belong to the result."""
        return len(self.trace.outputs) - len(self.writes)

    def result(self, outputs: tuple[Any, ...]) -> Any:
        """The function's result from the first outputs of the trace."""
        values = iter(outputs)
        return pytree.unflatten(self.out_spec, [next(values) if leaf is TENSOR else leaf for leaf in self.out_leaves])


def capture(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, track_no_grad: bool = True
) -> Captured:
    """Run f once on tracers and record what it does.

    Law: evaluating the trace on the tensors of `(args, kwargs)` gives the tensors of `f(*args, **kwargs)`.

    Args:
        f: any PyTorch callable. Non-tensor leaves of its arguments are baked in.
        track_no_grad: keep `no_grad` and `detach` as stops for gradients.

    Raises:
        CaptureError: f cannot be traced; the subclass says why.
        TracedFunctionError: f raised. The error is an instance of the original type too.
    """
    leaves, in_spec = pytree.flatten((args, kwargs or {}))
    recorder = Recorder(track_no_grad=track_no_grad)
    name = getattr(f, "__name__", type(f).__name__)
    with recorder.running(module_scopes(), ScopeMode(recorder)):
        tracers = {i: recorder.input(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        inputs = list(recorder.inputs)
        new_args, new_kwargs = pytree.unflatten(in_spec, [tracers.get(i, leaf) for i, leaf in enumerate(leaves)])
        result = _run(f, new_args, new_kwargs, name)
        out_leaves, out_spec = pytree.flatten(result)
        outputs = [_output(recorder, leaf, name) for leaf in out_leaves if isinstance(leaf, torch.Tensor)]
        writes, written = _writes(recorder, leaves, tracers, inputs)
    statics = tuple(TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in out_leaves)
    in_statics = tuple(TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    del result, out_leaves, tracers, new_args, new_kwargs
    recorder.poison()
    trace = nest(recorder, (*outputs, *written), _identifier(name))
    return Captured(trace, in_spec, in_statics, out_spec, statics, writes)


def _identifier(name: str) -> str:
    return name if name.isidentifier() else "program"


def _run(f: Callable[..., Any], args: Any, kwargs: Any, name: str) -> Any:
    try:
        return f(*args, **kwargs)
    except ThunderError:
        raise
    except Exception as error:
        raise traced_function_error(error, name) from error


def traced_function_error(error: Exception, name: str) -> Exception:
    """The user's exception as a TracedFunctionError that is also an instance of its own type."""
    text = located(f"{name} raised {type(error).__name__} while it was traced: {error}", source=_raised_at(error))
    base = type(error)
    try:
        cls = type(base.__name__, (TracedFunctionError, base), {"__module__": base.__module__})
        new = cls.__new__(cls, text)
        Exception.__init__(new, text)
    except TypeError:
        return TracedFunctionError(text)
    return new


def _raised_at(error: Exception) -> Source | None:
    found = None
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if not is_internal(code.co_filename):
            found = Source(code.co_filename, step.tb_lineno, code.co_name)
        step = step.tb_next
    return found


def _output(recorder: Recorder, leaf: torch.Tensor, name: str) -> Atom:
    if is_wrapped(leaf):
        raise UnsupportedOutput(
            located(
                f"{name} returned a tensor that belongs to a torch.func transform which has ended",
                fix="Return the value from the transformed function instead of storing it.",
            )
        )
    var = recorder.var_of(recorder.lift(leaf))
    if var is None:
        raise CaptureError(f"{name} returned a tensor that is unknown to its capture")
    return recorder.stop(var)


def _writes(
    recorder: Recorder, leaves: list[Any], tracers: dict[int, torch.Tensor], inputs: list[Var]
) -> tuple[tuple[Write, ...], tuple[Var, ...]]:
    """What was mutated, and the new values."""
    found: list[tuple[Write, Var]] = []
    for position, (index, tracer) in enumerate(tracers.items()):
        found += _written(recorder, leaves[index], tracer, inputs[position], position)
    for tensor, tracer, var in recorder.lifted():
        found += _written(recorder, tensor, tracer, var, tensor)
    return tuple(write for write, _ in found), tuple(var for _, var in found)


def _written(
    recorder: Recorder, tensor: torch.Tensor, tracer: torch.Tensor, before: Var, target: int | torch.Tensor
) -> list[tuple[Write, Var]]:
    after = recorder.var_of(tracer)
    if after is None or after == before:
        return []
    if after.type != before.type:
        raise CaptureError(
            located(
                f"the function changes a {before.type} argument in place to {after.type}",
                source=user_source(),
                fix="A mutated tensor keeps its dtype and shape; return the new tensor instead.",
            )
        )
    return [(Write(target), after)]
