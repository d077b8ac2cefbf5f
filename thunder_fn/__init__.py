"""thunder_fn: a pure functional trace-transformation toolkit for PyTorch.

A PyTorch program becomes an immutable trace. Transforms such as grad are pure functions from trace
to trace, which compose in any order. Executors turn a trace into a program that runs.

Functions in, functions out:
    run              jit, compile, constant, Recipe, Lookaside, Transform
    differentiate    grad, value_and_grad, grad_and_value, vjp, jvp, linearize, jacrev, jacfwd,
                     hessian, stop_gradient
    batch and cast   vmap, autocast, autocast_policy
    control flow     cond, switch, scan, map, fori_loop, while_loop, associative_scan, roll, unroll
    memory           checkpoint, checkpoint_name, checkpoint_policies, saved_residuals
    find errors      check_errors
    own rules        custom_vjp, custom_jvp, custom_vmap, composite, pure_callback
    modules          functional_call, functionalize, stack_module_state, functional_optimizer
    parameters       quantize, lora, fsdp, ddp, tensor_parallel
    leave Python     save, load, export
    many devices     pipeline, context_parallel, expert_parallel, plan
Look inside:
    traces           trace, eval_shape, evaluate, check, simplify, clear_caches
    calls            last_traces, last_backward_traces, last_prologue_traces, cache_info,
                     explain_misses, explain_claims
    modules          random (keys), debug, inspect (reports), errors; to import: extend, executors,
                     recipes, testing, benchmarks

`help(thunder_fn.jit)` says more; the tutorials begin with `tutorials/01_traces.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from thunder_fn.garbage import no_collections
from thunder_fn.version import __version__ as __version__

_SUBMODULES = (
    "benchmarks",
    "debug",
    "distributed",
    "errors",
    "executors",
    "extend",
    "inspect",
    "interpreters",
    "ir",
    "parameters",
    "planning",
    "random",
    "recipes",
    "rewrites",
    "testing",
)
_NAMES = {
    "api": (
        "grad",
        "grad_and_value",
        "hessian",
        "jacfwd",
        "jacrev",
        "jvp",
        "linearize",
        "saved_residuals",
        "stop_gradient",
        "trace",
        "value_and_grad",
        "vjp",
        "vmap",
    ),
    "api.associative_scan": ("associative_scan",),
    "api.autocast": ("autocast", "autocast_policy"),
    "api.checkpoint": ("checkpoint",),
    "api.eval_shape": ("eval_shape",),
    "api.found_errors": ("check_errors",),
    "callbacks": ("pure_callback",),
    "api.functional": ("functional_call", "functionalize", "stack_module_state"),
    "api.map": ("map",),
    "capture": ("composite",),
    "capture.outside.edges": ("constant",),
    "capture.replaced.lookasides": ("Lookaside",),
    "interpreters.checkpoint.policies": ("checkpoint_policies",),
    "interpreters.clean": ("simplify",),
    "interpreters.evaluate": ("evaluate",),
    "ir.check": ("check",),
    "ir.memos": ("clear_caches",),
    "jitted": (
        "cache_info",
        "explain_claims",
        "explain_misses",
        "jit",
        "last_backward_traces",
        "last_prologue_traces",
        "last_traces",
    ),
    "jitted.transforms": ("Transform",),
    "optim": ("functional_optimizer",),
    "parameters": (
        "context_parallel",
        "ddp",
        "expert_parallel",
        "fsdp",
        "lora",
        "pipeline",
        "quantize",
        "tensor_parallel",
    ),
    "planning": ("plan",),
    "portable": ("export", "load", "save"),
    "recipes": ("Recipe", "compile"),
    "structured.checkpoint_name": ("checkpoint_name",),
    "structured.cond": ("cond", "switch"),
    "structured.custom_jvp": ("custom_jvp",),
    "structured.custom_vjp": ("custom_vjp",),
    "structured.custom_vmap": ("custom_vmap",),
    "structured.fori_loop": ("fori_loop",),
    "structured.loop_functions": ("scan",),
    "structured.roll": ("roll", "unroll"),
    "structured.while_loop": ("while_loop",),
}
"""Submodules to show, and names of modules. Each is imported when it is first asked for, so
`import thunder_fn` takes no time, and `tfn.extend` needs no import of its own. Type checkers read
the same names in `__init__.pyi`.
"""
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]  # the stub lists them
    *(name for names in _NAMES.values() for name in names),
    *("debug", "errors", "inspect", "ir", "random"),
]

_CORE = (
    "api",
    *(module for module in _NAMES if module.startswith(("api.", "structured."))),
    "capture.outside.edges",
    "debug",
    "random",
)
"""The modules that load with the first name, whichever it is: all rules of ops, and all functions
that capture replaces.
"""

_FORMER = {"trace": "ir.trace", "rules": "ir.rules", "ops": "ir.ops", "jit": "jitted"}
"""Former names of modules, which transforms and executors of users import; see `rewrites.py`."""


class _Former(ModuleType):
    """A module under its former name, imported when something of it is first asked for."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # `inspect` and `warnings` look at all modules there are
            raise AttributeError(name)
        _, _, own = self.__name__.rpartition(".")
        return getattr(_module(_FORMER[own]), name)


for _old in _FORMER:
    sys.modules.setdefault(f"{__name__}.{_old}", _Former(f"{__name__}.{_old}"))


def _module(name: str) -> ModuleType:
    """Import one of our modules. Python's collector waits, because what modules make stays."""
    with no_collections():
        return importlib.import_module(f"{__name__}.{name}")


def _loaded(module: str, name: str) -> object:
    """A name of a module, after the core is there; it is not asked for again."""
    with no_collections():
        for part in _CORE:
            loaded = _module(part)  # a function that is watched sees no name before it is bound
            globals().update((one, getattr(loaded, one)) for one in _NAMES.get(part, ()))
        for old, new in _FORMER.items():
            sys.modules[f"{__name__}.{old}"] = _module(new)
        globals()[name] = value = getattr(_module(module), name)
    return value


def __getattr__(name: str) -> object:
    """Import what is not there yet: a name of `_NAMES`, or a submodule."""
    for module, names in _NAMES.items():
        if name in names:
            return _loaded(module, name)
    name = _FORMER.get(name, name)
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        from thunder_fn.spellings import no_such_name

        raise no_such_name(__name__, name)
    return _module(name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES})
