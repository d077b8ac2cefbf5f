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
_GRID = "Write `torch.distributed.device_mesh.init_device_mesh`, and pass the mesh."
_DEVICES = "Write `torch.cuda.device_count()`, or its like of another device."
_PROCESSES = "Write `torch.distributed.{}()`."
_GLOBAL = "Draw it by `torch.distributions.{}`, whose numbers come from the global generator."
_FROM_UNIFORM = "Write `{}` with `u = tfn.random.uniform(key, shape{})`."
_BY_FUNCTION = (
    'A policy is a function of an equation that answers "save", "recompute" or "offload":'
    " `lambda equation: equation.op.name == 'mm'`."
)
_DYNAMO = "Write `torch.compiler.{}`: thunder_fn has no such switch of its own."

_OF_COMPILED = {
    "as_text": "Write `tfn.jit(f).lower(x).text()`.",
    "cost_analysis": "Write `tfn.jit(f).lower(x).cost()`.",
    "memory_analysis": "Write `tfn.jit(f).lower(x).memory()`.",
    "runtime_executable": "Write `tfn.last_traces(f)`.",
}
_ARGUMENTS = "They are those that `lower` was called with."

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
        "Array": "Write `torch.Tensor`.",
        "Device": "Write `torch.device`.",
        "devices": _DEVICES,
        "local_devices": _DEVICES,
        "device_count": _DEVICES,
        "local_device_count": _DEVICES,
        "default_backend": "Write `torch.get_default_device()`.",
        "default_device": "Write `with torch.device(device):`.",
        "process_index": _PROCESSES.format("get_rank"),
        "process_count": _PROCESSES.format("get_world_size"),
        "host_count": _PROCESSES.format("get_world_size"),
        "device_put_replicated": _MESH,
        "device_put_sharded": _MESH,
        "make_mesh": _GRID,
        "sharding": _GRID,
        "make_array_from_callback": _MESH,
        "enable_x64": "Write the dtype: `torch.float64` needs no switch.",
        "config": "Options are arguments of `tfn.jit`; a dtype such as `torch.float64` is free.",
        "default_matmul_precision": "Write `torch.set_float32_matmul_precision`.",
        "default_prng_impl": "Leave it out: all numbers of `tfn.random` are Philox's.",
        "legacy_prng_key": "Leave it out: a key is a tensor.",
        "debug_nans": 'Write `tfn.jit(f, verify="errors")`, or `tfn.check_errors(f)`.',
        "debug_infs": "Write `tfn.debug.check(x.isfinite(), message)`.",
        "enable_checks": "Write `tfn.jit(f, verify=True)`.",
        "checking_leaks": "Leave it out: a tensor that leaves its function is an error.",
        "check_tracer_leaks": "Leave it out: a tensor that leaves its function is an error.",
        "effects_barrier": "Write `torch.cuda.synchronize()`.",
        "ensure_compile_time_eval": "Write `tfn.constant(value)`.",
        "fwd_and_bwd": "Write `tfn.vjp(f, x)`.",
        "float0": "Integers have no gradient: leave them out of `argnums`.",
        "typeof": "Write `tfn.ir.trace.type_of_value(x)`.",
        "log_compiles": "Write `tfn.explain_misses(f)`.",
        "no_tracing": "Write `tfn.explain_misses(f)` to see what was traced.",
        "custom_batching": "Write `tfn.custom_vmap`.",
        "custom_derivatives": "Write `tfn.custom_jvp`, `tfn.custom_vjp` or `tfn.linearize`.",
        "dlpack": "Write `torch.utils.dlpack`.",
        "dtypes": "Write `torch.finfo` and `torch.iinfo`.",
        "profiler": "Write `torch.profiler`.",
        "print_environment_info": "Write `python -m torch.utils.collect_env` in a shell.",
        "live_arrays": "Write `torch.cuda.memory_summary()`.",
        "copy_to_host_async": 'Write `x.to("cpu", non_blocking=True)`.',
        "ffi": "Write `torch.library.custom_op`, and `tfn.extend` for an executor of your own.",
        "image": "Write `torch.nn.functional.interpolate`.",
        "ref_new": "Write a tensor: in-place ops become pure ones.",
        "optimize": "Write `tfn.compile(model)`.",
        "allow_in_graph": "Write `torch.library.custom_op`.",
        "assume_constant_result": "Write `tfn.constant(value)`.",
        "substitute_in_graph": "Write `tfn.Lookaside`.",
        "list_backends": "Write `tfn.executors`.",
        "set_stance": "Call the function itself: `tfn.jit(f)` leaves f as it is.",
        "mark_dynamic": "Write `tfn.jit(f, dynamic=...)`.",
        "keep_tensor_guards_unsafe": "Leave it out: guards are kept.",
        "skip_guard_on_inbuilt_nn_modules_unsafe": "Leave it out: guards are kept.",
        "set_enable_guard_collectives": "Leave it out: ranks agree on what they compile.",
        "mark_static": "Write `tfn.jit(f, dynamic=...)`.",
        "nested_compile_region": "Leave it out: equal layers share one body.",
        "graph_break": "Write two functions: a jitted function is one graph.",
        "is_dynamo_compiling": _DYNAMO.format("is_dynamo_compiling"),
        "is_exporting": _DYNAMO.format("is_exporting"),
        "cudagraph_mark_step_begin": _DYNAMO.format("cudagraph_mark_step_begin"),
        "save_cache_artifacts": "Write `tfn.save(program, path)`.",
        "load_cache_artifacts": "Write `tfn.load(path)`.",
        "wrap_numpy": "Write `torch.from_numpy` and `tfn.pure_callback`.",
        **_OPTIMIZERS,
    },
    "thunder_fn:checkpoint_policies": {
        "dots_saveable": "Write `checkpoint_policies.matmuls_saveable`.",
        "checkpoint_dots": "Write `checkpoint_policies.matmuls_saveable`.",
        "dots_with_no_batch_dims_saveable": _BY_FUNCTION,
        "checkpoint_dots_with_no_batch_dims": _BY_FUNCTION,
        "offload_dot_with_no_batch_dims": _BY_FUNCTION,
        "save_anything_except_these_names": _BY_FUNCTION,
        "save_any_names_but_these": _BY_FUNCTION,
        "save_from_both_policies": "Write `lambda equation: one(equation) or other(equation)`.",
        "save_and_offload_only_these_names": _BY_FUNCTION,
    },
    "thunder_fn:custom_jvp": {
        "defjvps": "Write one rule for all arguments: `f.defjvp(rule)`.",
    },
    "thunder_fn:Jitted": {
        "trace": "Write `tfn.trace(f, x)`, or `tfn.jit(f).lower(x)`.",
        "eval_shape": "Write `tfn.eval_shape(f, x)`.",
        "clear_cache": "Write `tfn.clear_caches()`.",
        **_OF_COMPILED,
    },
    "thunder_fn:Lowered": {
        "as_text": "Write `text()`.",
        "compiler_ir": "Write `chain`, whose steps are traces.",
        "cost_analysis": "Write `cost()`.",
        "out_info": "Write `tfn.eval_shape(f, x)`.",
        "args_info": _ARGUMENTS,
        "in_tree": _ARGUMENTS,
        "in_avals": _ARGUMENTS,
        "donate_argnums": _ARGUMENTS,
        "out_tree": "Write `tfn.eval_shape(f, x)`.",
    },
    "thunder_fn.debug": {
        "breakpoint": "Write `tfn.debug.callback(lambda x: breakpoint(), x)`.",
        "log": "Write `tfn.debug.callback(logging.info, text)`.",
        "inspect_array_sharding": "Write `tfn.debug.print`, on each process.",
        "visualize_array_sharding": "Write `tfn.debug.print`, on each process.",
    },
    "thunder_fn.random": {
        "PRNGKey": "Write `tfn.random.key(seed)`.",
        "choice": "Write `tfn.random.randint` or `tfn.random.permutation`, and index with it.",
        "shuffle": "Write `tfn.random.permutation(key, x)`.",
        "gaussian": "Write `tfn.random.normal`.",
        "gumbel": "Write `-torch.log(-torch.log(tfn.random.uniform(key, shape)))`.",
        "exponential": "Write `-torch.log1p(-tfn.random.uniform(key, shape))`.",
        "laplace": _FROM_UNIFORM.format("-u.sign() * torch.log1p(-u.abs())", ", low=-1"),
        "logistic": _FROM_UNIFORM.format("torch.logit(u)", ""),
        "cauchy": _FROM_UNIFORM.format("torch.tan(torch.pi * (u - 0.5))", ""),
        "pareto": _FROM_UNIFORM.format("(1 - u) ** (-1 / b)", ""),
        "rayleigh": _FROM_UNIFORM.format("torch.sqrt(-2 * torch.log1p(-u)) * scale", ""),
        "weibull_min": _FROM_UNIFORM.format("(-torch.log1p(-u)) ** (1 / c) * scale", ""),
        "geometric": _FROM_UNIFORM.format("torch.floor(u.log() / math.log1p(-p)) + 1", ""),
        "triangular": "Invert its distribution function at `tfn.random.uniform(key, shape)`.",
        "lognormal": "Write `torch.exp(sigma * tfn.random.normal(key, shape))`.",
        "rademacher": "Write `2 * tfn.random.bernoulli(key, 0.5, shape).int() - 1`.",
        "truncated_normal": (
            "Write `torch.special.ndtri(u)` with u by `tfn.random.uniform` between"
            " `torch.special.ndtr` of the ends."
        ),
        "multivariate_normal": (
            "Write `mean + L @ tfn.random.normal(key, shape)`, where `L @ L.T` is the covariance."
        ),
        "orthogonal": "Write `torch.linalg.qr(tfn.random.normal(key, (n, n)))[0]`.",
        "ball": "Divide `tfn.random.normal` by its norm, and scale by `u ** (1 / d)`.",
        "maxwell": "Write `tfn.random.normal(key, (*shape, 3)).norm(dim=-1)`.",
        "double_sided_maxwell": "Write `maxwell` by `tfn.random.normal`, times a random sign.",
        "key_data": "A key is a tensor of two words itself.",
        "wrap_key_data": "A key is a tensor of two words itself.",
        "key_impl": "All numbers are Philox's.",
        "clone": "A key is a tensor: use it twice for the same numbers.",
        "beta": _GLOBAL.format("Beta"),
        "binomial": _GLOBAL.format("Binomial"),
        "chisquare": _GLOBAL.format("Chi2"),
        "dirichlet": _GLOBAL.format("Dirichlet"),
        "f": _GLOBAL.format("FisherSnedecor"),
        "gamma": _GLOBAL.format("Gamma"),
        "loggamma": _GLOBAL.format("Gamma"),
        "generalized_normal": _GLOBAL.format("Gamma"),
        "multinomial": _GLOBAL.format("Multinomial"),
        "poisson": _GLOBAL.format("Poisson"),
        "t": _GLOBAL.format("StudentT"),
        "wald": "Transform `tfn.random.normal` and `tfn.random.uniform` (Michael et al., 1976).",
    },
    "thunder_fn.optim": {
        **_OPTIMIZERS,
        "apply_updates": _STEP.format("Adam"),
    },
}
"""For each module, or `module:class`, the names that it does not have, and what to write."""


def no_such_name(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module, or a class as `module:class`, does not have."""
    of, _, kind = module.rpartition(":")
    what = f"{'class' if of else 'module'} {kind!r} has no attribute {name!r}"
    fix = ELSEWHERE.get(module, {}).get(name)
    if fix is None:  # Python itself suggests a name that is spelled nearly so
        return AttributeError(what, name=name, obj=sys.modules.get(module))
    return AttributeError(f"{what}\n{fix}")
