"""Every keyword and name of JAX, torch.func and torch.compile works here, or says what to write.

The lists are the public signatures of jax 0.8 and torch 2.13, written down once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import errors

X, KEY = torch.ones(3), tfn.random.key(0)
OF_F = "fun func fn function"


def loss(x: torch.Tensor) -> torch.Tensor:
    return (x**2).sum()


def step(carry: Any, x: Any) -> Any:
    return carry, x


def of(transform: Callable[..., Any], *args: Any, first: Any = loss) -> Callable[..., Any]:
    """A call with the function in first place, unless a keyword is for it."""
    return lambda **options: transform(*(() if set(options) & {*OF_F.split(), "f"} else (first, *args)), **options)


def defined(kind: Any, name: str, *rules: Any) -> Callable[..., Any]:
    return lambda **options: getattr(kind(loss), name)(*(() if set(options) & {"jvp", "fwd"} else rules), **options)


VALUES: dict[str, Any] = {
    **dict.fromkeys(OF_F.split(), loss),
    **dict.fromkeys(("f", "body_fun", "true_fun", "false_fun", "cond_fun", "jvp", "fwd", "bwd"), loss),
    **dict.fromkeys(("has_aux", "strict", "reverse", "tie_weights", "disable", "fullgraph"), False),
    **dict.fromkeys(("argnums", "dim", "in_dims", "out_dims", "static_argnums", "donate_argnums"), 0),
    **dict.fromkeys(("randomness",), "same"),
    **dict.fromkeys(("static_argnames",), "x"),
    **dict.fromkeys(("chunk_size", "batch_size", "unroll", "num"), 1),
    **dict.fromkeys(("minval", "maxval", "p"), 0.5),
    **dict.fromkeys(("nondiff_argnums",), (0,)),
    **dict.fromkeys(("shape",), (2,)),
    "length": 3,
    "data": 2,
    "dynamic": True,
    "combine_mode": "pointwise",
    "remove": "mutations",
    "kwargs": {},
}

DERIVATIVE = f"{OF_F} argnums has_aux holomorphic allow_int"
CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "jit": (
        of(tfn.jit),
        f"{OF_F} in_shardings out_shardings static_argnums static_argnames donate_argnums donate_argnames keep_unused"
        " device backend inline abstracted_axes compiler_options fullgraph dynamic mode options disable",
    ),
    "compile": (of(tfn.compile, first=torch.sin), "fullgraph dynamic backend mode options disable"),
    "vmap": (
        of(tfn.vmap),
        f"{OF_F} in_axes out_axes axis_name axis_size spmd_axis_name sum_match in_dims out_dims randomness chunk_size",
    ),
    "grad": (of(tfn.grad), f"{DERIVATIVE} reduce_axes"),
    "value_and_grad": (of(tfn.value_and_grad), f"{DERIVATIVE} reduce_axes aux"),
    "grad_and_value": (of(tfn.grad_and_value), DERIVATIVE),
    "jacfwd": (of(tfn.jacfwd), f"{DERIVATIVE} randomness chunk_size"),
    "jacrev": (of(tfn.jacrev), f"{DERIVATIVE} randomness chunk_size"),
    "hessian": (of(tfn.hessian), f"{DERIVATIVE} randomness chunk_size"),
    "jvp": (of(tfn.jvp, (X,), (X,)), f"{OF_F} has_aux strict"),
    "vjp": (of(tfn.vjp, X), f"{OF_F} has_aux reduce_axes primals strict"),
    "linearize": (of(tfn.linearize, X), f"{OF_F} has_aux primals"),
    "checkpoint": (
        of(tfn.checkpoint),
        f"{OF_F} prevent_cse policy static_argnums concrete use_reentrant context_fn determinism_check debug"
        " preserve_rng_state early_stop",
    ),
    "custom_jvp": (of(tfn.custom_jvp), f"{OF_F} nondiff_argnums nondiff_argnames"),
    "custom_vjp": (of(tfn.custom_vjp), f"{OF_F} nondiff_argnums nondiff_argnames"),
    "custom_jvp.defjvp": (defined(tfn.custom_jvp, "defjvp", step), "jvp symbolic_zeros"),
    "custom_vjp.defvjp": (defined(tfn.custom_vjp, "defvjp", loss, step), "symbolic_zeros optimize_remat"),
    "functionalize": (of(tfn.functionalize), f"{OF_F} remove"),
    "map": (of(tfn.map, X), f"{OF_F} batch_size axis chunk_size in_axes"),
    "scan": (of(tfn.scan, X, X, first=step), "f length reverse unroll _split_transpose axis dim"),
    "cond": (lambda **options: tfn.cond(True, loss, loss, (X,), **options), "true_fun false_fun operand linear"),
    "switch": (lambda **options: tfn.switch(0, [loss], (X,), **options), "operand linear"),
    "while_loop": (
        lambda **options: tfn.while_loop(lambda x: x.sum() < 0, lambda x: (x,), (X,), **options),
        "cond_fun body_fun init_val",
    ),
    "fori_loop": (
        lambda **options: tfn.fori_loop(0, 1, lambda i, x: x, X, **options),
        "lower upper body_fun init_val unroll",
    ),
    "associative_scan": (
        lambda **options: tfn.associative_scan(torch.add, X, **options),
        "fn elems reverse axis dim combine_mode",
    ),
    "pure_callback": (
        lambda **options: tfn.pure_callback(torch.sin, X, X, **options),
        "callback result_shape_dtypes sharding vmap_method vectorized",
    ),
    "debug.callback": (lambda **options: tfn.debug.callback(loss, X, **options), "ordered partitioned"),
    "functional_call": (
        lambda **options: tfn.functional_call(torch.nn.Identity(), {}, (X,), **options),
        "kwargs tie_weights strict",
    ),
    "export": (lambda **options: tfn.export(loss, (X,), **options), "kwargs dynamic_shapes strict"),
    "random.key": (lambda **options: tfn.random.key(0, **options), "impl"),
    "random.split": (lambda **options: tfn.random.split(KEY, **options), "num shape"),
    "random.fold_in": (lambda **options: tfn.random.fold_in(KEY, **options), "data"),
    "random.uniform": (lambda **options: tfn.random.uniform(KEY, **options), "shape minval maxval"),
    "random.randint": (lambda **options: tfn.random.randint(KEY, (2,), 0, 3, **options), "minval maxval"),
    "random.bernoulli": (lambda **options: tfn.random.bernoulli(KEY, **options), "p shape mode"),
    "random.categorical": (
        lambda **options: tfn.random.categorical(KEY, X, **options),
        "axis shape replace mode",
    ),
    "random.permutation": (lambda **options: tfn.random.permutation(KEY, X, **options), "axis independent"),
}


@pytest.mark.parametrize("function", CALLS)
def test_a_keyword_works_or_says_what_to_write(function: str) -> None:
    call, keywords = CALLS[function]
    for keyword in keywords.split():
        try:
            call(**{keyword: VALUES.get(keyword)})
        except errors.UnknownOption as error:
            first, *_, fix = message_of(error).splitlines()
            assert function.rsplit(".", 1)[-1] in first and repr(keyword) in first and fix != first


@pytest.mark.parametrize(
    ("function", "keyword", "fix"),
    [
        ("vmap", "in_axis", "in_dims"),
        ("grad", "argnum", "argnums"),
        ("jacrev", "chunksize", "chunk_size"),
    ],
)
def test_a_slip_of_the_pen_is_the_nearest_keyword(function: str, keyword: str, fix: str) -> None:
    with pytest.raises(errors.UnknownOption, match=f"Write `{fix}=` for it"):
        getattr(tfn, function)(loss, **{keyword: 0})


def test_a_keyword_that_is_like_no_other_is_pythons_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        tfn.vmap(loss, colour=1)  # type: ignore[call-arg]


NAMES: dict[str, str] = {
    "thunder_fn": (
        "Array Device ShapeDtypeStruct block_until_ready checking_leaks checkpoint check_tracer_leaks clear_caches"
        " closure_convert copy_to_host_async custom_batching custom_derivatives custom_gradient custom_jvp custom_vjp"
        " debug debug_infs debug_nans default_backend default_device default_matmul_precision default_prng_impl devices"
        " disable_jit distributed dlpack dtypes device_count device_get device_put device_put_replicated"
        " device_put_sharded effects_barrier enable_checks enable_x64 ensure_compile_time_eval errors eval_shape export"
        " ffi float0 fwd_and_bwd grad hessian host_count image jacfwd jacobian jacrev jit jvp lax legacy_prng_key"
        " linear_transpose linearize live_arrays local_device_count local_devices log_compiles"
        " make_array_from_callback make_jaxpr make_mesh named_call named_scope nn no_tracing numpy pmap"
        " print_environment_info process_count process_index profiler pure_callback random ref_new remat sharding"
        " shard_map tree tree_map tree_util typeof value_and_grad vjp vmap config"
        " allow_in_graph assume_constant_result compile disable is_compiling is_dynamo_compiling is_exporting"
        " list_backends reset set_stance cudagraph_mark_step_begin wrap_numpy substitute_in_graph"
        " save_cache_artifacts load_cache_artifacts nested_compile_region optimize explain mark_dynamic mark_static"
        " graph_break keep_tensor_guards_unsafe skip_guard_on_inbuilt_nn_modules_unsafe set_enable_guard_collectives"
    ),
    "thunder_fn.random": (
        "PRNGKey ball bernoulli beta binomial bits categorical cauchy chisquare choice clone dirichlet"
        " double_sided_maxwell exponential f fold_in gamma generalized_normal geometric gumbel key key_data key_impl"
        " laplace loggamma logistic lognormal maxwell multinomial multivariate_normal normal orthogonal pareto"
        " permutation poisson rademacher randint rayleigh split t triangular truncated_normal uniform wald weibull_min"
        " wrap_key_data"
    ),
    "thunder_fn.debug": "print callback breakpoint inspect_array_sharding visualize_array_sharding log",
    "thunder_fn.checkpoint_policies": (
        "everything_saveable nothing_saveable dots_saveable checkpoint_dots dots_with_no_batch_dims_saveable"
        " checkpoint_dots_with_no_batch_dims offload_dot_with_no_batch_dims save_anything_except_these_names"
        " save_any_names_but_these save_only_these_names save_from_both_policies save_and_offload_only_these_names"
    ),
    "thunder_fn.custom_jvp": "defjvp defjvps",
    "jit(f)": "lower trace eval_shape clear_cache as_text cost_analysis memory_analysis",
    "jit(f).lower(x)": (
        "as_text compile compiler_ir cost_analysis out_info args_info in_tree in_avals donate_argnums out_tree"
    ),
    "jit(f).lower(x).compile()": "as_text cost_analysis memory_analysis runtime_executable",
}
OWNERS: dict[str, Callable[[], Any]] = {
    "thunder_fn": lambda: tfn,
    "thunder_fn.custom_jvp": lambda: tfn.custom_jvp(loss),
    "jit(f)": lambda: tfn.jit(loss),
    "jit(f).lower(x)": lambda: tfn.jit(loss).lower(X),
    "jit(f).lower(x).compile()": lambda: tfn.jit(loss).lower(X).compile(),
}


@pytest.mark.parametrize("module", NAMES)
def test_a_name_is_here_or_says_what_to_write(module: str) -> None:
    make = OWNERS.get(module)
    owner = operator.attrgetter(module.removeprefix("thunder_fn."))(tfn) if make is None else make()
    for name in NAMES[module].split():
        try:
            getattr(owner, name)
        except AttributeError as error:
            first, fix = str(error).split("\n", 1)
            assert repr(name) in first and fix


UNIFORM = tfn.random.uniform(KEY, (4096,))
FORMULAS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.distributions.Distribution]] = {
    "laplace": (lambda u: -(2 * u - 1).sign() * torch.log1p(-(2 * u - 1).abs()), torch.distributions.Laplace(0.0, 1.0)),
    "cauchy": (lambda u: torch.tan(torch.pi * (u - 0.5)), torch.distributions.Cauchy(0.0, 1.0)),
    "exponential": (lambda u: -torch.log1p(-u), torch.distributions.Exponential(1.0)),
    "gumbel": (lambda u: -torch.log(-torch.log(u)), torch.distributions.Gumbel(0.0, 1.0)),
    "weibull_min": (lambda u: (-torch.log1p(-u)) ** (1 / 3) * 2, torch.distributions.Weibull(2.0, 3.0)),
    "pareto": (lambda u: (1 - u) ** (-1 / 3), torch.distributions.Pareto(1.0, 3.0)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_that_are_told_have_the_distribution(name: str) -> None:
    """Kolmogorov and Smirnov's distance of 4096 draws; 1.95 / sqrt(n) is exceeded once in a thousand."""
    formula, known = FORMULAS[name]
    found = known.cdf(formula(UNIFORM)).sort().values
    assert (found - torch.arange(4096) / 4096).abs().max() < 1.95 / 64
