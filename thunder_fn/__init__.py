"""thunder_fn: a pure functional trace-transformation toolkit for PyTorch.

A PyTorch program becomes an immutable trace; grad and the rest are pure functions from trace to trace that compose in
any order; executors turn a trace into a program that runs.
"""

from thunder_fn import errors as errors
from thunder_fn.api import grad as grad
from thunder_fn.api import grad_and_value as grad_and_value
from thunder_fn.api import hessian as hessian
from thunder_fn.api import jacfwd as jacfwd
from thunder_fn.api import jacrev as jacrev
from thunder_fn.api import jvp as jvp
from thunder_fn.api import linearize as linearize
from thunder_fn.api import saved_residuals as saved_residuals
from thunder_fn.api import stop_gradient as stop_gradient
from thunder_fn.api import trace as trace
from thunder_fn.api import value_and_grad as value_and_grad
from thunder_fn.api import vjp as vjp
from thunder_fn.api import vmap as vmap
from thunder_fn.capture import composite as composite
from thunder_fn.check import check as check
from thunder_fn.interpreters.evaluate import evaluate as evaluate
from thunder_fn.jit import cache_info as cache_info
from thunder_fn.jit import jit as jit
from thunder_fn.jit import last_backward_traces as last_backward_traces
from thunder_fn.jit import last_prologue_traces as last_prologue_traces
from thunder_fn.jit import last_traces as last_traces
from thunder_fn.optim import functional_optimizer as functional_optimizer
from thunder_fn.structured.checkpoint import checkpoint as checkpoint
from thunder_fn.structured.checkpoint_name import checkpoint_name as checkpoint_name
from thunder_fn.structured.policies import checkpoint_policies as checkpoint_policies
