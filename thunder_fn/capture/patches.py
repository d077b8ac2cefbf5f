"""What is replaced in PyTorch while a thread captures. In other threads, every replacement does what it replaces."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thunder_fn import torch_internals as internals
from thunder_fn.capture.recorder import Inputs, Recorder, current
from thunder_fn.capture.scopes import in_scope, lift_call, user_source
from thunder_fn.errors import UnsupportedCall, located
from thunder_fn.trace import Source

Tensor = torch.Tensor


def _definition(function: Any) -> Source | None:
    """Where a function is defined: the source of what is called from no user line."""
    code = getattr(function, "__code__", None)
    return Source(code.co_filename, code.co_firstlineno, code.co_name) if code is not None else None


# ---- modules ----


def _scoped_calls(original: Callable[..., Any]) -> Callable[..., Any]:
    """`nn.Module.__call__` that makes calls scopes, in captures."""

    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = current()
        if recorder is None:
            return original(self, *args, **kwargs)
        path = module_path(recorder, self)
        recorder.modules.watch(self, path)
        recorder.source = user_source(recorder) or _definition(type(self).forward)
        return in_scope(recorder, type(self).__name__, "module", lambda: original(self, *args, **kwargs), module=path)

    return __call__


def _lifted_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """What `autograd.Function.apply` does to its inputs; in captures closed-over tensors become tracers there."""

    def unwrap_dead_wrappers(args: tuple[Any, ...]) -> tuple[Any, ...]:
        recorder = current()
        if recorder is None:
            return original(args)
        function = sys._getframe(1).f_locals.get("cls")
        lifted = Inputs(original(lift_call(recorder, args, {})[0]))
        if function is not None and not function.__module__.startswith(("torch.", "thunder_fn.")):
            recorder.enter_function(function.__qualname__, lifted)
        return lifted

    return unwrap_dead_wrappers


def module_path(recorder: Recorder, module: torch.nn.Module) -> str:
    """Where the module sits in the outermost module that is being called."""
    if module not in recorder.module_paths:
        recorder.module_paths.update(
            {child: path for path, child in module.named_modules() if child not in recorder.module_paths}
        )
    return recorder.module_paths[module]


# ---- the state of the random number generator, which a trace neither reads nor sets ----


def _tagged_state(original: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`torch.get_rng_state` that remembers how many random ops had been recorded."""

    def get_rng_state() -> Tensor:
        recorder, state = current(), original()
        if recorder is not None:
            recorder.states.append((state, recorder.draws))
        return state

    return get_rng_state


def _unchanged_state(original: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """`torch.set_rng_state`, which a capture allows where it changes nothing."""

    def set_rng_state(new_state: Tensor) -> None:
        recorder = current()
        if recorder is None:
            original(new_state)
        elif not any(new_state is state and recorder.draws == draws for state, draws in recorder.states):
            raise _seed_error("set_rng_state")

    return set_rng_state


def _refused(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.manual_seed` and `torch.seed`, which a capture refuses."""

    @functools.wraps(original)
    def seed(*args: Any, **kwargs: Any) -> Any:
        if current() is not None:
            raise _seed_error(original.__name__)
        return original(*args, **kwargs)

    return seed


def _seed_error(name: str) -> UnsupportedCall:
    return UnsupportedCall(
        located(
            f"`torch.{name}` was called while tracing, but a trace draws its random numbers when it runs",
            source=user_source(),
            fix="Seed outside the traced function; keep random ops out of what `torch.utils.checkpoint` runs.",
        )
    )


_RANDOM = {
    "get_rng_state": _tagged_state,
    "set_rng_state": _unchanged_state,
    "manual_seed": _refused,
    "seed": _refused,
}
_calls = internals.calls_patch(_scoped_calls, _lifted_inputs, _RANDOM)


def module_scopes() -> AbstractContextManager[None]:
    """Calls of modules become scopes, in captures; other threads see no difference. Undone with the last capture."""
    return _calls.applied()


# ---- optimizers ----


def _refuse_outside_state(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer from outside would keep tracers as its state."""
    recorder = current()
    if recorder is None:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if all(isinstance(param, internals.Tracer) for param in params):
        return
    name = type(optimizer).__name__
    raise UnsupportedCall(
        located(
            f"the step of a {name} that was made outside the traced function would store traced tensors in its state",
            source=user_source(),
            fix=f"Use `functional_optimizer(torch.optim.{name}, ...)`, which takes the state and returns it.",
        )
    )


register_optimizer_step_pre_hook(_refuse_outside_state)
