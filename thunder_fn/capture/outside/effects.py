"""Calls that a trace does not repeat: effects on the world, and answers that change by themselves.

A trace may stand for later runs of its function only if the function makes no such call. What is
not known to be harmless counts as an effect.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from thunder_fn.capture.objects import is_a
from thunder_fn.capture.outside.kinds import is_python
from thunder_fn.capture.outside.reads import module_of

_MODULES = frozenset(
    [
        "_abc",
        "_collections",
        "_collections_abc",
        "_functools",
        "_operator",
        "_sre",
        "_struct",
        "_weakref",
        "abc",
        "builtins",
        "cmath",
        "collections",
        "contextlib",
        "copy",
        "dataclasses",
        "enum",
        "functools",
        "inspect",
        "itertools",
        "keyword",
        "math",
        "numbers",
        "numpy",
        "operator",
        "optree",
        "re",
        "string",
        "thunder_fn",
        "torch",
        "types",
        "typing",
        "typing_extensions",
        "weakref",
    ]
)
"""Packages whose functions only compute, or are recorded."""
_STATEFUL = (
    "numpy._core.memmap",
    "numpy.core.memmap",
    "numpy.lib._datasource",
    "numpy.lib._npyio_impl",
    "numpy.lib.npyio",
    "numpy.random",
    "torch.backends",
    "torch.cuda",
    "torch.hub",
    "torch.profiler",
    "torch.random",
    "torch.serialization",
    "torch.utils.data",
    "torch.utils.tensorboard",
)
"""Parts of them that do more."""
_STATEFUL_NAMES = frozenset(
    [
        "__import__",
        "breakpoint",
        "delattr",
        "delitem",
        "eval",
        "exec",
        "globals",
        "iadd",
        "iand",
        "iconcat",
        "imul",
        "initial_seed",
        "input",
        "ior",
        "isub",
        "ixor",
        "load",
        "manual_seed",
        "open",
        "print",
        "save",
        "seed",
        "setattr",
        "setitem",
        "vars",
    ]
)
_CONTAINERS = (list, dict, set, deque, bytearray)
CHANGES = frozenset(
    [
        "add",
        "append",
        "appendleft",
        "clear",
        "difference_update",
        "discard",
        "extend",
        "extendleft",
        "fill",
        "insert",
        "intersection_update",
        "itemset",
        "move_to_end",
        "partition",
        "pop",
        "popitem",
        "popleft",
        "put",
        "remove",
        "resize",
        "reverse",
        "rotate",
        "setdefault",
        "setfield",
        "setflags",
        "sort",
        "symmetric_difference_update",
        "update",
    ]
)
"""Methods that change a container or an array."""
APPEND = frozenset(("add", "append", "extend", "setdefault", "update"))
"""Methods that add to a container, which keeps all other items, in order."""
PREPEND = frozenset(("appendleft", "extendleft", "insert"))
"""Methods that may put items in front of others."""
_HANDLES = frozenset(("_thread", "_contextvars"))


@dataclass(slots=True)
class Effects:
    """The effects of a run that a trace does not repeat, in words, and the containers that methods
    of C change.
    """

    found: list[str] = field(default_factory=list[str])
    changed: list[Any] = field(default_factory=list[Any])

    def called(self, function: Any) -> None:
        """Note a call of a function of C."""
        if (container := changed_by(function)) is not None:
            self.changed.append(container)
        elif is_effect(function):
            self.found.append(function.__name__)


def changed_by(function: Any) -> Any:
    """The container that a call of this C method changes; None for other functions."""
    owner = getattr(function, "__self__", None)
    is_array = module_of(type(owner)) == "numpy"
    is_change = (is_array or is_a(owner, _CONTAINERS)) and function.__name__ in CHANGES
    return owner if is_change else None


def is_effect(function: Any) -> bool:
    """Test whether calling a function of C may do more than compute. A change of a container is
    another question.
    """
    owner, name = getattr(function, "__self__", None), function.__name__
    if owner is None or is_a(owner, types.ModuleType):
        module = getattr(function, "__module__", None) or getattr(owner, "__name__", "")
    else:
        cls = owner if is_a(owner, type) else type(owner)
        kinds: tuple[Any, ...] = cls, type(cls)
        bases = (base for kind in kinds for base in kind.__mro__)
        of_c = (base for base in bases if not is_python(base.__dict__.get(name, is_python)))
        module = module_of(next(of_c, cls))
        if module in _HANDLES:
            return name == "set"
    return is_stateful(module, name)


@functools.lru_cache(maxsize=4096)
def is_stateful(module: str, name: str) -> bool:
    """Test whether a function of a library may do more than compute, by where it is defined."""
    return (
        module.partition(".")[0] not in _MODULES
        or module.startswith(_STATEFUL)
        or name in _STATEFUL_NAMES
        or name.startswith(("set_", "use_"))
    )
