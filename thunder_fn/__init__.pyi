"""The names of the package as type checkers see them. Python finds them by `_NAMES`."""

from thunder_fn import (
    debug as debug,
    errors as errors,
    inspect as inspect,
    ir as ir,
    random as random,
)
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
from thunder_fn.api.found_errors import check_errors as check_errors
from thunder_fn.api.functional import (
    functional_call as functional_call,
    functionalize as functionalize,
    stack_module_state as stack_module_state,
)
from thunder_fn.api.map import map as map
from thunder_fn.callbacks import pure_callback as pure_callback
from thunder_fn.capture import composite as composite
from thunder_fn.capture.outside.edges import constant as constant
from thunder_fn.capture.replaced.lookasides import Lookaside as Lookaside
from thunder_fn.interpreters.checkpoint.policies import checkpoint_policies as checkpoint_policies
from thunder_fn.interpreters.clean import simplify as simplify
from thunder_fn.interpreters.evaluate import evaluate as evaluate
from thunder_fn.ir.check import check as check
from thunder_fn.ir.memos import clear_caches as clear_caches
from thunder_fn.jitted import (
    cache_info as cache_info,
    explain_claims as explain_claims,
    explain_misses as explain_misses,
    jit as jit,
    last_backward_traces as last_backward_traces,
    last_prologue_traces as last_prologue_traces,
    last_traces as last_traces,
)
from thunder_fn.jitted.transforms import Transform as Transform
from thunder_fn.optim import functional_optimizer as functional_optimizer
from thunder_fn.parameters import (
    context_parallel as context_parallel,
    ddp as ddp,
    expert_parallel as expert_parallel,
    fsdp as fsdp,
    lora as lora,
    pipeline as pipeline,
    quantize as quantize,
    tensor_parallel as tensor_parallel,
)
from thunder_fn.planning import plan as plan
from thunder_fn.portable import export as export, load as load, save as save
from thunder_fn.recipes import Recipe as Recipe, compile as compile
from thunder_fn.structured.checkpoint_name import checkpoint_name as checkpoint_name
from thunder_fn.structured.cond import cond as cond, switch as switch
from thunder_fn.structured.custom_jvp import custom_jvp as custom_jvp
from thunder_fn.structured.custom_vjp import custom_vjp as custom_vjp
from thunder_fn.structured.custom_vmap import custom_vmap as custom_vmap
from thunder_fn.structured.fori_loop import fori_loop as fori_loop
from thunder_fn.structured.loop_functions import scan as scan
from thunder_fn.structured.roll import roll as roll, unroll as unroll
from thunder_fn.structured.while_loop import while_loop as while_loop
from thunder_fn.version import __version__ as __version__
