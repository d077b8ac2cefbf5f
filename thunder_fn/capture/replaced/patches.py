"""Replacements in PyTorch while a thread captures. In other threads, every replacement does what
it replaces.

Streams and events are refused by name: a capture runs no kernel, so there is nothing to order or to
time. The program then runs on the stream of its caller. Work that eager code would put on another
stream would lose its order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.history import Inputs
from thunder_fn.capture.outside import frames
from thunder_fn.capture.recorder import Recorder, current
from thunder_fn.capture.replaced import keys as _keys  # noqa: F401  # pyright: ignore[reportUnusedImport]
from thunder_fn.capture.replaced.lookasides import divert, original_of
from thunder_fn.capture.replaced.refusals import script_error
from thunder_fn.capture.replaced.seeds import FUNCTIONS as SEEDS, generator_class
from thunder_fn.capture.scopes import in_scope, lift_call, user_source
from thunder_fn.errors import UnsupportedCall, kind_of, with_article
from thunder_fn.ir import hooks
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.trace import Source

Tensor = torch.Tensor


def _definition(function: Any) -> Source | None:
    """The definition of a function, as the source of calls from no user line."""
    code = getattr(function, "__code__", None)
    return Source(code.co_filename, code.co_firstlineno, code.co_name) if code is not None else None


# ---- modules ----


def _scoped_calls(original: Callable[..., Any]) -> Callable[..., Any]:
    """`nn.Module.__call__` that makes calls scopes, in captures."""

    def __call__(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        recorder = current()
        if recorder is None:
            return original(self, *args, **kwargs)
        watching = hooks.pause()
        try:
            _refuse_backward_hooks(self)
            path = module_path(recorder, self)
            recorder.modules.watch(self, path)
            recorder.source = user_source(recorder) or _definition(type(self).forward)
        finally:
            hooks.resume(watching)
        return in_scope(
            recorder,
            type(self).__name__,
            "module",
            lambda: original(self, *args, **kwargs),
            module=path,
        )

    return __call__


def _refuse_backward_hooks(module: torch.nn.Module) -> None:
    """Hooks of autograd's backward would not run: differentiation here is of the trace."""
    if internals.has_backward_hooks(module):
        raise UnsupportedCall(
            f"{kind_of(module)} has backward hooks, which autograd runs and a trace does not have",
            source=user_source(),
            fix="Remove them, or write what they do to the gradient with `custom_vjp`.",
        )


def _closed_scripts(original: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a function or method of TorchScript, which reads constants and attributes in C++.

    In a capture it is given them and the arguments from outside, tensors as tracers, and the
    program depends on all of them.
    """

    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        recorder = current()
        if recorder is None:
            return original(self, *args, **kwargs)
        args, kwargs = lift_call(recorder, args, kwargs)
        given = internals.bound_script(self, args, kwargs)
        if given is None:
            return original(self, *args, **kwargs)
        what = f"`{self.name}` of TorchScript"
        try:
            function, asked = internals.closed_script(self)
        except internals.NotClosed:
            written = f"{what}, which writes to attributes or calls a method of an interface,"
            raise script_error(f"{written} was called", user_source()) from None
        find = functools.partial(internals.script_state, asked)
        recorder.properties.look_at_process(f"{what} ({id(self)})", find)
        leaves, structure = pytree.flatten([ask() for ask in asked])
        traced = [recorder.lift(one) if isinstance(one, Tensor) else one for one in leaves]
        return internals.called_script(function, (*given, *pytree.unflatten(structure, traced)))

    return __call__


def _lifted_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the preparation of inputs by `autograd.Function.apply`: in captures closed-over tensors
    become tracers there.
    """

    def unwrap_dead_wrappers(args: tuple[Any, ...]) -> tuple[Any, ...]:
        recorder = current()
        if recorder is None:
            return original(args)
        function = sys._getframe(1).f_locals.get("cls")  # pyright: ignore[reportPrivateUsage]
        lifted = Inputs(original(lift_call(recorder, args, {})[0]))
        if function is not None and function.__module__ == internals.CUSTOM_OPS:
            recorder.history.enter_custom_op(lifted)
        elif function is not None and not function.__module__.startswith("thunder_fn."):
            recorder.history.enter_function(function.__qualname__, lifted)
        return lifted

    return unwrap_dead_wrappers


def _lifted_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch.func's wrapping of a tensor in a level: in captures a closed-over tensor
    becomes a tracer before.
    """

    def wrap(tensor: Tensor, *args: Any) -> Any:
        recorder = current()
        return original(tensor if recorder is None else recorder.lift(tensor), *args)

    return wrap


def _flattening(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """`nn.RNNBase.flatten_parameters`: tracers have no memory that could lie side by side."""

    def flatten_parameters(self: Any) -> None:
        if current() is None:
            original(self)

    return flatten_parameters


def _variable(original: Callable[..., Any]) -> Callable[..., Any]:
    """Call `torch.autograd.Variable(x)` as `x.detach()`, which it is, and which modes see."""

    def __call__(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if current() is None or not isinstance(data, Tensor):
            return original(cls, *(() if data is None else (data,)), *args, **kwargs)
        requires_grad = args[0] if args else kwargs.get("requires_grad")
        return data.detach().requires_grad_(bool(requires_grad))

    return __call__


def module_path(recorder: Recorder, module: torch.nn.Module) -> str:
    """The path of the module in the outermost module that is being called."""
    if module not in recorder.module_paths:
        recorder.module_paths.update(
            {
                child: path
                for path, child in module.named_modules()
                if child not in recorder.module_paths
            }
        )
    return recorder.module_paths[module]


def _refused(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is an error in captures."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if current() is None or _is_no_stream(name, *args, **kwargs):
            return original(*args, **kwargs)
        raise UnsupportedCall(
            f"`{name}` was called while tracing, but a program runs on the stream of its caller",
            source=user_source(),
            fix="Use streams and events around the call of the traced function.",
        )

    return call


def _is_no_stream(name: str, first: Any = None, *_: Any, **__: Any) -> bool:
    """Test for `with torch.cuda.stream(None)`, which does nothing."""
    if name == "torch.cuda.set_stream":
        return first is None
    return name == "torch.cuda.stream" and getattr(first, "stream", first) is None


STREAMS = {name: partial(_refused, name) for name in internals.STREAM_FUNCTIONS}
"""Replacements in captures of functions and methods of these names."""


_calls = internals.calls_patch(
    _scoped_calls,
    _lifted_inputs,
    _lifted_first,
    SEEDS,
    STREAMS,
    {
        "Generator": generator_class,
        "flatten_parameters": _flattening,
        "Variable": _variable,
        "script": _closed_scripts,
    },
)


def module_scopes() -> AbstractContextManager[None]:
    """Make calls of modules scopes, in captures; other threads see no difference. Undone with
    the last capture.
    """
    return _calls.applied()


# ---- optimizers ----


_counts_in_tensors: ContextVar[bool] = ContextVar("thunder_fn_counts_in_tensors", default=False)


def counting_in_tensors() -> AbstractContextManager[None]:
    """Let optimizers that are made inside count their steps in tensors of unknown values."""
    return setting(_counts_in_tensors, True)


def _is_made_inside(optimizer: torch.optim.Optimizer) -> bool:
    """Test for an optimizer of tracers, which ends with the traced function."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    return all(isinstance(param, internals.Tracer) for param in params)


def _begin_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Begin a step. An optimizer from outside is refused where it would keep tracers as its
    state.
    """
    recorder = current()
    if recorder is None:
        return
    if _is_made_inside(optimizer):
        if not _counts_in_tensors.get():
            recorder.begin_step()
        return
    if recorder.kept is not None:
        recorder.kept.begin(optimizer)
        return
    name = type(optimizer).__name__
    raise UnsupportedCall(
        f"the step of {with_article(name)} that was made outside the traced function would"
        " store traced tensors in its state",
        source=user_source(),
        fix=(
            f"Use `functional_optimizer(torch.optim.{name}, ...)`, which takes the state and"
            " returns it."
        ),
    )


def _end_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """End a step."""
    recorder = current()
    if recorder is not None:
        recorder.end_step()


def _zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    """`Optimizer.zero_grad` in a capture, which knows what the optimizer holds."""
    recorder = current()
    original = original_of(internals.higher_order_function("zero_grad"))
    if recorder is None or recorder.kept is None or _is_made_inside(optimizer):
        original(optimizer, set_to_none)
        return
    recorder.kept.begin(optimizer, is_step=False)
    original(optimizer, set_to_none)
    recorder.end_step()


def _scaled_step(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    optimizer_state: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`GradScaler.step` in a capture: the optimizer steps unless a gradient is not finite."""
    recorder = current()
    if recorder is None or recorder.kept is None:
        original = original_of(internals.higher_order_function("scaler step"))
        return original(scaler, optimizer, optimizer_state, *args, **kwargs)
    infinite = optimizer_state["found_inf_per_device"].values()
    found = torch.stack([one.reshape(()) for one in infinite])
    return recorder.kept.skip(optimizer, found.sum() != 0, lambda: optimizer.step(*args, **kwargs))


class _Positive:
    """A count of averaged models that Python takes for positive."""

    def __init__(self, count: Tensor) -> None:
        self.count = count

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]

    def __gt__(self, other: int) -> bool:
        return True

    def __iadd__(self, other: int) -> Tensor:
        self.count += other
        return self.count

    def to(self, device: torch.device) -> Tensor:
        """Return the count itself, for the averaging function."""
        return self.count.to(device)


def _update_average(averaged: Any, model: torch.nn.Module) -> None:
    """`AveragedModel.update_parameters` in a capture: the program averages in each call, and takes
    the copy instead where the count says that it is the first.
    """
    original = original_of(internals.higher_order_function("averaged model"))
    if current() is None:
        original(averaged, model)
        return
    count: Tensor = averaged.n_averaged
    is_first, buffers = count == 0, averaged._buffers
    if (watch := frames.observer()) is not None:  # before the stand-in takes its place
        watch.before.setdefault(("key", id(buffers), "n_averaged"), (buffers, count))
    buffers["n_averaged"] = _Positive(count)
    try:
        original(averaged, model)
    finally:
        buffers["n_averaged"] = count
    pairs = [(averaged.module.parameters(), model.parameters())]
    pairs += [(averaged.module.buffers(), model.buffers())] * averaged.use_buffers
    for mine, theirs in (pair for both in pairs for pair in zip(*both, strict=False)):
        old, new = mine.detach(), theirs.detach().to(mine.device)
        old.copy_(torch.where(is_first, new, old))


divert("averaged model", _update_average)
divert("scaler step", _scaled_step)
divert("zero_grad", _zero_grad)
register_optimizer_step_pre_hook(_begin_step)
register_optimizer_step_post_hook(_end_step)
