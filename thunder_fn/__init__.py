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
    own rules        custom_vjp, custom_jvp, custom_vmap, composite
    modules          functional_call, functionalize, stack_module_state, functional_optimizer
    parameters       quantize, lora, fsdp, ddp, tensor_parallel
    leave Python     save, load, export
    many devices     pipeline, context_parallel, expert_parallel, plan
Look at what became of them:
    traces           trace, eval_shape, evaluate, check, simplify, clear_caches
    calls            last_traces, last_backward_traces, last_prologue_traces, cache_info,
                     explain_misses, explain_claims
    modules          random (keys), debug, inspect (reports), errors; to import: extend, executors,
                     recipes, testing, benchmarks

`help(thunder_fn.jit)` says more of one of them; the tutorials begin with `tutorials/01_traces.py`.
"""

import importlib
import sys
from typing import TYPE_CHECKING

import thunder_fn.ir as ir
from thunder_fn import debug, errors, random
from thunder_fn.api import (
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    saved_residuals,
    stop_gradient,
    trace,
    value_and_grad,
    vjp,
    vmap,
)
from thunder_fn.api.associative_scan import associative_scan
from thunder_fn.api.autocast import autocast, autocast_policy
from thunder_fn.api.checkpoint import checkpoint
from thunder_fn.api.eval_shape import eval_shape
from thunder_fn.api.functional import functional_call, functionalize, stack_module_state
from thunder_fn.api.map import map
from thunder_fn.capture import composite
from thunder_fn.capture.outside.values import constant
from thunder_fn.capture.replaced.lookasides import Lookaside
from thunder_fn.interpreters.checkpoint.policies import checkpoint_policies
from thunder_fn.interpreters.clean import simplify
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir.check import check
from thunder_fn.ir.memos import clear_caches
from thunder_fn.jitted import (
    cache_info,
    explain_claims,
    explain_misses,
    jit,
    last_backward_traces,
    last_prologue_traces,
    last_traces,
)
from thunder_fn.jitted.transforms import Transform
from thunder_fn.structured import replaced as _replaced  # noqa: F401  # pyright: ignore[reportUnusedImport]
from thunder_fn.structured.checkpoint_name import checkpoint_name
from thunder_fn.structured.cond import cond, switch
from thunder_fn.structured.custom_jvp import custom_jvp
from thunder_fn.structured.custom_vjp import custom_vjp
from thunder_fn.structured.custom_vmap import custom_vmap
from thunder_fn.structured.fori_loop import fori_loop
from thunder_fn.structured.loop_functions import scan
from thunder_fn.structured.roll import roll, unroll
from thunder_fn.structured.while_loop import while_loop
from thunder_fn.version import __version__ as __version__

if TYPE_CHECKING:  # names of `_LAZY`
    from thunder_fn import inspect
    from thunder_fn.optim import functional_optimizer
    from thunder_fn.parameters import (
        context_parallel,
        ddp,
        expert_parallel,
        fsdp,
        lora,
        pipeline,
        quantize,
        tensor_parallel,
    )
    from thunder_fn.planning import plan
    from thunder_fn.portable import export, load, save
    from thunder_fn.recipes import Recipe, compile

__all__ = [
    "Lookaside",
    "Recipe",
    "Transform",
    "associative_scan",
    "autocast",
    "autocast_policy",
    "cache_info",
    "check",
    "clear_caches",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_policies",
    "compile",
    "composite",
    "cond",
    "constant",
    "context_parallel",
    "custom_jvp",
    "custom_vjp",
    "custom_vmap",
    "ddp",
    "debug",
    "errors",
    "eval_shape",
    "evaluate",
    "expert_parallel",
    "export",
    "explain_claims",
    "explain_misses",
    "fori_loop",
    "fsdp",
    "functional_call",
    "functional_optimizer",
    "functionalize",
    "grad",
    "grad_and_value",
    "hessian",
    "inspect",
    "ir",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "last_backward_traces",
    "last_prologue_traces",
    "last_traces",
    "linearize",
    "load",
    "lora",
    "map",
    "pipeline",
    "plan",
    "quantize",
    "random",
    "roll",
    "save",
    "saved_residuals",
    "scan",
    "simplify",
    "stack_module_state",
    "stop_gradient",
    "switch",
    "tensor_parallel",
    "trace",
    "unroll",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]

_SUBMODULES = (
    "benchmarks",
    "distributed",
    "executors",
    "extend",
    "inspect",
    "interpreters",
    "parameters",
    "planning",
    "recipes",
    "testing",
)
_LAZY = {
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
}
"""Submodules, and names of theirs, that are imported when they are first asked for: `tfn.extend`
needs no import of its own, and `import thunder_fn` does not wait for what few programs use.
"""

_FORMER = {
    "trace": "ir.trace",
    "rules": "ir.rules",
    "ops": "ir.ops",
    "jit": "jitted",
}
"""Former names of modules, which transforms and executors of users import; see `rewrites.py`."""
for _old, _new in _FORMER.items():
    sys.modules.setdefault(f"{__name__}.{_old}", importlib.import_module(f"{__name__}.{_new}"))


def __getattr__(name: str) -> object:
    """Import what `_SUBMODULES` and `_LAZY` list when it is first asked for."""
    name = _FORMER.get(name, name)
    if name in (*_SUBMODULES, *_FORMER.values(), "rewrites"):
        return importlib.import_module(f"{__name__}.{name}")
    for module, names in _LAZY.items():
        if name in names:
            globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES})
