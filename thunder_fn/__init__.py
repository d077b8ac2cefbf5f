"""thunder_fn: a pure functional trace-transformation toolkit for PyTorch.

A PyTorch program becomes an immutable trace. Transforms such as grad are pure functions from trace to trace, which
compose in any order. Executors turn a trace into a program that runs.

Functions in, functions out:
    run              jit, compile, constant, Recipe, Lookaside, Transform
    differentiate    grad, value_and_grad, grad_and_value, vjp, jvp, linearize, jacrev, jacfwd, hessian, stop_gradient
    batch and cast   vmap, autocast, autocast_policy
    control flow     cond, switch, scan, map, fori_loop, while_loop, associative_scan, roll, unroll
    memory           checkpoint, checkpoint_name, checkpoint_policies, saved_residuals
    own rules        custom_vjp, custom_jvp, custom_vmap, composite
    modules          functional_call, functionalize, stack_module_state, functional_optimizer
    parameters       quantize, lora, fsdp, ddp, tensor_parallel
Look at what became of them:
    traces           trace, eval_shape, evaluate, check, simplify
    calls            last_traces, last_backward_traces, last_prologue_traces, cache_info, explain_misses, explain_claims
    modules          inspect (pages and reports), errors; to import: extend, executors, recipes, testing, benchmarks

`help(thunder_fn.jit)` says more of one of them; the tutorials begin with `tutorials/01_traces.py`.
"""

from thunder_fn import errors as errors, inspect as inspect
from thunder_fn.api import (
    grad as grad,
    grad_and_value as grad_and_value,
    hessian as hessian,
    jacfwd as jacfwd,
    jacrev as jacrev,
    jvp as jvp,
    linearize as linearize,
    saved_residuals as saved_residuals,
    stop_gradient as stop_gradient,
    trace as trace,
    value_and_grad as value_and_grad,
    vjp as vjp,
    vmap as vmap,
)
from thunder_fn.api.associative_scan import associative_scan as associative_scan
from thunder_fn.api.autocast import autocast as autocast, autocast_policy as autocast_policy
from thunder_fn.api.checkpoint import checkpoint as checkpoint
from thunder_fn.api.eval_shape import eval_shape as eval_shape
from thunder_fn.api.functional import (
    functional_call as functional_call,
    functionalize as functionalize,
    stack_module_state as stack_module_state,
)
from thunder_fn.api.map import map as map
from thunder_fn.capture import composite as composite
from thunder_fn.capture.lookasides import Lookaside as Lookaside
from thunder_fn.capture.outside import constant as constant
from thunder_fn.check import check as check
from thunder_fn.interpreters.clean import simplify as simplify
from thunder_fn.interpreters.evaluate import evaluate as evaluate
from thunder_fn.jit import (
    cache_info as cache_info,
    explain_claims as explain_claims,
    explain_misses as explain_misses,
    jit as jit,
    last_backward_traces as last_backward_traces,
    last_prologue_traces as last_prologue_traces,
    last_traces as last_traces,
)
from thunder_fn.jit.transforms import Transform as Transform
from thunder_fn.optim import functional_optimizer as functional_optimizer
from thunder_fn.recipes import Recipe as Recipe, compile as compile
from thunder_fn.rewrites import (
    ddp as ddp,
    fsdp as fsdp,
    lora as lora,
    quantize as quantize,
    tensor_parallel as tensor_parallel,
)
from thunder_fn.structured import (
    batch_norm as _batch_norm,  # noqa: F401  # pyright: ignore[reportUnusedImport]  # lookasides
    exported as _exported,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    flex_attention as _flex_attention,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    recurrent as _recurrent,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    transformer_encoder as _transformer_encoder,  # noqa: F401  # pyright: ignore[reportUnusedImport]
)
from thunder_fn.structured.checkpoint_name import checkpoint_name as checkpoint_name
from thunder_fn.structured.cond import cond as cond, switch as switch
from thunder_fn.structured.custom_jvp import custom_jvp as custom_jvp
from thunder_fn.structured.custom_vjp import custom_vjp as custom_vjp
from thunder_fn.structured.custom_vmap import custom_vmap as custom_vmap
from thunder_fn.structured.loops import fori_loop as fori_loop, scan as scan
from thunder_fn.structured.policies import checkpoint_policies as checkpoint_policies
from thunder_fn.structured.roll import roll as roll, unroll as unroll
from thunder_fn.structured.while_loop import while_loop as while_loop
