"""Names that users of JAX, optax, torch.func and torch.compile look for, and what to write here."""

from __future__ import annotations

import sys

_TREES = "Write `torch.utils._pytree.tree_map` and its relatives; every transform takes pytrees."
_MESH = "Write `tfn.fsdp`, `tfn.ddp` or `tfn.tensor_parallel`, in the processes of `torchrun`."
_LAX = "`scan`, `cond`, `switch`, `while_loop`, `fori_loop` and `map` are names of `tfn` itself."
_STEP = "Write `tfn.functional_optimizer(torch.optim.{}, lr=...)`, which has `init` and `update`."
_OPTIMIZERS = {
    spelling: _STEP.format(name)
    for name in ("Adam", "AdamW", "SGD")
    for spelling in (name, name.lower())
}
_DYNAMO = "Write `torch.compiler.{}`: thunder_fn has no such switch of its own."

ELSEWHERE: dict[str, dict[str, str]] = {
    "thunder_fn": {
        "make_jaxpr": "Write `tfn.trace(f, x)`.",
        "make_fx": "Write `tfn.trace(f, x)`; `.to_fx()` of it is a graph of torch.fx.",
        "remat": "Write `tfn.checkpoint(f)`.",
        "ad_checkpoint": "Write `tfn.checkpoint(f)` and `tfn.checkpoint_name(x, name)`.",
        "pmap": _MESH,
        "shard_map": _MESH,
        "lax": _LAX,
        "numpy": "Write torch's functions: programs are PyTorch's.",
        "nn": "Write `torch.nn`: `tfn.jit(module)` is a module.",
        "tree": _TREES,
        "tree_map": _TREES,
        "tree_util": _TREES,
        "device_put": "Write `x.to(device)`.",
        "device_get": "Write `x.cpu()`.",
        "block_until_ready": "Write `torch.cuda.synchronize()`.",
        "disable_jit": "Call the function itself: `tfn.jit(f)` leaves f as it is.",
        "ShapeDtypeStruct": "`tfn.eval_shape` takes `tfn.ir.TensorType(dtype, shape)`.",
        "checkify": "Write `tfn.check_errors(f)`, which returns `(error, result)`.",
        "io_callback": "Write `tfn.debug.callback`.",
        "named_call": "Write `tfn.composite`.",
        "named_scope": "Write `tfn.composite`.",
        "custom_gradient": "Write `tfn.custom_vjp`.",
        "closure_convert": "Closures over tensors are found, and their gradients arrive.",
        "linear_transpose": "Write `tfn.vjp(f, x)[1]`: the vjp of a linear function.",
        "jacobian": "Write `tfn.jacrev(f)` or `tfn.jacfwd(f)`.",
        "hvp": "Write `tfn.jvp(tfn.grad(f), (x,), (v,))[1]`.",
        "vhp": "Write `tfn.vjp(tfn.grad(f), x)[1](v)`.",
        "make_functional": "Write `tfn.functional_call(module, params, args)`.",
        "make_functional_with_buffers": "Write `tfn.functional_call(m, (params, buffers), args)`.",
        "combine_state_for_ensemble": "Write `tfn.stack_module_state(modules)`.",
        "chunk_vmap": "Write `tfn.vmap(f, chunk_size=...)`.",
        "reset": "Write `tfn.clear_caches()`.",
        "disable": _DYNAMO.format("disable"),
        "is_compiling": _DYNAMO.format("is_compiling"),
        "apply_updates": _STEP.format("Adam"),
        **_OPTIMIZERS,
    },
    "thunder_fn.random": {
        "PRNGKey": "Write `tfn.random.key(seed)`.",
        "choice": "Write `tfn.random.randint` or `tfn.random.permutation`, and index with it.",
        "shuffle": "Write `tfn.random.permutation(key, x)`.",
        "gaussian": "Write `tfn.random.normal`.",
        "gumbel": "Write `-torch.log(-torch.log(tfn.random.uniform(key, shape)))`.",
        "exponential": "Write `-torch.log1p(-tfn.random.uniform(key, shape))`.",
    },
    "thunder_fn.optim": {
        **_OPTIMIZERS,
        "apply_updates": _STEP.format("Adam"),
    },
}
"""For each module the names that it does not have, and what to do instead."""


def no_such_name(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module does not have."""
    what = f"module {module!r} has no attribute {name!r}"
    fix = ELSEWHERE.get(module, {}).get(name)
    if fix is None:  # Python itself suggests a name that is spelled nearly so
        return AttributeError(what, name=name, obj=sys.modules.get(module))
    return AttributeError(f"{what}\n{fix}")
