"""Hooks of submodules: which a trace has, which it cannot have, and what they leave outside of it.

Forward hooks are traced with the module. One that records what it sees (`seen.append(output)`) or
counts does so in every call of eager code, and in a trace once, with tracers. So objects that hooks
can reach are looked at before and after a trace. If a hook changed one, it is put back, and the
module runs as it does without jit.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.failures import source_of
from thunder_fn.capture.places import Snapshot, snapshot
from thunder_fn.errors import HooksWarning, ThunderError, kind_of, located
from thunder_fn.jitted.modules.state import Layout

FIX = (
    "Until they are removed, the module runs as it does without jit. Hooks of the jitted module"
    " itself are no problem."
)
"""The fate of the module, and the fix, for the warning."""

_CONTAINERS = (list, dict, set, deque)
_DEPTH, _LONG = 4, 256


class HookEffect(ThunderError):
    """Signal that a hook changed objects outside of the trace. They are restored."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        super().__init__("a hook changes what is outside of the trace")
        self.hook = hook


@dataclass(frozen=True, slots=True)
class Held:
    """Objects that a hook could reach: containers and copies of them, and bound names with the way
    to bind them again.
    """

    hook: Callable[..., Any]
    contents: tuple[Snapshot, ...]
    bindings: tuple[tuple[Callable[[], Any], Callable[[Any], None], Any], ...]

    def is_unchanged(self) -> bool:
        """Test whether the containers hold the very things that they held, and the names are
        bound to them.
        """
        same = all(one.is_unchanged for one in self.contents)
        return same and all(read() is before for read, _, before in self.bindings)

    def restore(self) -> None:
        """Restore everything as it was."""
        for one in self.contents:
            one.restore()
        for read, write, before in self.bindings:
            if read() is not before:
                write(before)


def held_by_hooks(module: torch.nn.Module) -> tuple[Held, ...]:
    """Collect what the forward hooks of submodules, and those of all modules, can reach; a module's
    hooks are among that.
    """
    held: list[Held] = []
    for child in module.modules():
        own = [child.__dict__[name] for name in (*internals.HOOKS, *internals.HOOK_FLAGS)]
        hooks = (
            [hook for one in own for hook in one.values() if callable(hook)]
            if child is not module
            else []
        )
        held += map(_held, hooks)
        held += (Held(hook, tuple(map(snapshot, own)), ()) for hook in hooks[:1])
    return (
        *held,
        *(_held(hook) for one in internals.GLOBAL_HOOKS for hook in one.values() if callable(hook)),
    )


def check_unchanged(held: tuple[Held, ...]) -> None:
    """Check that nothing that hooks could reach was changed.

    Raises:
        HookEffect: something was, and is as it was now.
    """
    changed = next((one for one in held if not one.is_unchanged()), None)
    if changed is not None:
        for one in held:
            one.restore()
        raise HookEffect(changed.hook)


@dataclass(slots=True, eq=False)
class HooksOutside:
    """Findings about a module's hooks: those that change objects outside of a trace, and the
    warnings given.
    """

    effects: tuple[Any, ...] | None = None
    warned: bool = False

    def keep_from_tracing(self, layout: Layout) -> bool:
        """Tell whether the module has hooks that no trace has. Warns once of those that autograd
        runs.
        """
        if layout.hooks == self.effects:
            return True
        module, *children = layout.modules
        hooked = next((child for child in children if internals.has_backward_hooks(child)), None)
        if hooked is not None and not self.warned:
            self.warned = True
            path = next(path for path, child in module.named_modules() if child is hooked)
            what = (
                f"jit: {path!r} in {kind_of(module)} has backward hooks, which autograd runs where"
                " eager code is"
            )
            warnings.warn(located(what, fix=FIX), HooksWarning, stacklevel=6)
        return hooked is not None

    def note(self, layout: Layout, effect: HookEffect) -> None:
        """Remember hooks of which one has an effect, and say so."""
        self.effects = layout.hooks
        name = getattr(effect.hook, "__qualname__", type(effect.hook).__name__)
        what = (
            f"jit: {name}, a hook of a submodule of {kind_of(layout.modules[0])}, changes what is"
            " outside of the trace"
        )
        warnings.warn(
            located(what, source=source_of(effect.hook), fix=FIX), HooksWarning, stacklevel=5
        )


# ---- what a hook can reach ----


def _held(hook: Callable[..., Any]) -> Held:
    containers: dict[int, Any] = {}
    bindings: list[tuple[Callable[[], Any], Callable[[Any], None], Any]] = []
    _reach(hook, containers, bindings, _DEPTH)
    return Held(hook, tuple(map(snapshot, containers.values())), tuple(bindings))


def _reach(value: Any, containers: dict[int, Any], bindings: list[Any], depth: int) -> None:
    """Collect the containers that can be reached from a value, and the names that functions
    among them bind.
    """
    if (
        depth < 0
        or id(value) in containers
        or isinstance(value, (torch.Tensor, torch.nn.Module, type, types.ModuleType))
    ):
        return
    inner: Iterator[Any] = iter(())
    if isinstance(value, types.FunctionType):
        inner = _of_function(value, bindings)
    elif isinstance(value, types.MethodType):
        inner = iter((value.__self__, value.__func__))
    elif isinstance(value, functools.partial):
        inner = iter((value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, (*_CONTAINERS, tuple)):
        if isinstance(value, _CONTAINERS):
            containers[id(value)] = value
        if len(value) <= _LONG:
            inner = iter(tuple(value.values()) if isinstance(value, dict) else tuple(value))
    elif type(fields := getattr(value, "__dict__", None)) is dict:
        inner = iter((fields,))
    for item in inner:
        _reach(item, containers, bindings, depth - 1)


def _of_function(function: types.FunctionType, bindings: list[Any]) -> Iterator[Any]:
    """Yield the objects that a function closes over, its defaults, and the globals that it names.
    Note how to bind cells and globals again.
    """
    for cell in function.__closure__ or ():
        if cell != types.CellType():
            bindings.append(
                (
                    functools.partial(getattr, cell, "cell_contents"),
                    functools.partial(setattr, cell, "cell_contents"),
                    cell.cell_contents,
                )
            )
            yield cell.cell_contents
    outside = function.__globals__
    for name in function.__code__.co_names:
        if name in outside and not isinstance(
            outside[name], (types.FunctionType, types.ModuleType, type)
        ):
            bindings.append(
                (
                    functools.partial(outside.get, name),
                    functools.partial(outside.__setitem__, name),
                    outside[name],
                )
            )
            yield outside[name]
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
