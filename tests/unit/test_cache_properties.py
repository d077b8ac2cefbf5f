"""Everything that code can read of a tensor or of PyTorch's process is looked at in a call, the same in all calls, or refused."""

from __future__ import annotations

import contextlib
import pathlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import thunder_fn
from thunder_fn import errors, torch_internals as internals
from thunder_fn.api import grad, vmap
from thunder_fn.jitted import cache_info, jit
from thunder_fn.structured.cond import cond

Tensor = torch.Tensor

# ---- a row for everything that tensors have ----

IN_THE_TYPE = """
device dim dtype element_size get_device is_complex is_conj is_contiguous is_cpu is_cuda is_distributed
is_floating_point is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_neg is_nested is_quantized is_signed is_sparse
is_sparse_csr is_vulkan is_xla is_xpu itemsize layout nbytes ndim ndimension nelement numel requires_grad shape size
stride dim_order type name volatile _is_zerotensor __dlpack_device__ __sizeof__ __class__ __array_priority__ names
has_names
"""
"""Properties that follow from class, dtype, shape, strides, device, bits and requires_grad, which every call is
checked for.
"""

WHERE_READ = """
storage_offset is_leaf grad_fn _grad_fn grad _grad output_nr retains_grad is_pinned is_shared is_inference _is_view
_base grad_dtype _backward_hooks _post_accumulate_grad_hooks
"""
"""Properties that are looked at in calls of programs whose function asked for them. So are attributes that Python
code set.
"""

REFUSED = """
data_ptr const_data_ptr untyped_storage storage _typed_storage storage_type share_memory_ is_set_to _version _cdata
numpy __array__ __dlpack__ __reduce__ __reduce_ex__ to_sparse_coo __cuda_array_interface__ is_coalesced
_nnz _dimI _dimV q_scale q_zero_point q_per_channel_axis qscheme
"""
"""Properties that are an error while tracing, in eager mode too for what strided tensors do not have."""

ALL_ATTRIBUTES = "__dict__ __dir__"
"""All of what Python code set, or their names."""

VALUES = """
__bool__ __contains__ __float__ __int__ __index__ __complex__ __long__ __nonzero__ allclose equal is_nonzero
is_same_size item tolist _is_all_true _is_any_true apply_ map_ map2_ __repr__ __str__ __format__
"""
"""Numbers and texts made of values, which are symbols or errors; a text shows the type instead."""

COMPUTED = """
H T __add__ __and__ __deepcopy__ __delitem__ __div__ __eq__ __floordiv__ __ge__ __getitem__ __gt__ __iadd__ __idiv__
__ifloordiv__ __imod__ __imul__ __invert__ __ipow__ __isub__ __iter__ __itruediv__ __le__ __len__ __lshift__ __lt__
__mod__ __mul__ __ne__ __neg__ __or__ __pos__ __pow__ __radd__ __rdiv__ __reversed__ __rfloordiv__ __rlshift__
__rmatmul__ __rmod__ __rmul__ __ror__ __rpow__ __rrshift__ __rshift__ __rsub__ __rtruediv__ __rxor__ __setitem__
__sub__ __truediv__ __xor__ as_subclass bfloat16 bool byte cdouble cfloat char cpu cuda data double float half int ipu
imag mH mT real long mtia new new_tensor short split xpu eig lstsq lu solve symeig reinforce backward record_stream
retain_grad register_hook register_post_accumulate_grad_hook sparse_dim dense_dim align_as align_to refine_names
rename rename_ unflatten
"""
"""Written in terms of ops, or of hooks, which have tests of their own."""

MACHINERY = """
__slotnames__ __annotations__ __firstlineno__ __static_attributes__ __array_wrap__ __delattr__
__dlpack_c_exchange_api__ __doc__ __getattribute__
__getstate__ __hash__ __init__ __init_subclass__ __module__ __new__ __setattr__ __setstate__ __subclasshook__
__torch_dispatch__ __torch_function__ __weakref__ _clear_non_serializable_cached_data _dtensor__new__ _fix_weakref
_has_symbolic_sizes_strides _make_subclass _make_wrapper_subclass _make_dtensor _python_dispatch _reduce_ex_internal
_rev_view_func_unsafe _view_func _view_func_unsafe module_load _make_subclass _update_names _use_count _addmm_activation
"""
"""Of Python's objects and of PyTorch's implementation: nothing that a program would compute with."""


def rows() -> dict[str, str]:
    tables = (IN_THE_TYPE, WHERE_READ, ALL_ATTRIBUTES, REFUSED, VALUES, COMPUTED, MACHINERY)
    return {name: table for table in tables for name in table.split()}


def is_op(name: str) -> bool:
    """Some overload computes a tensor."""
    for one in (name, name.strip("_"), f"_{name}"):
        packet = getattr(torch.ops.aten, one, None)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
            if any("Tensor" in str(result.type) for schema in schemas for result in schema.returns):
                return True
    return False


def test_every_attribute_of_tensors_has_a_row() -> None:
    known = rows()
    missing = [name for name in dir(Tensor) if name not in known and not is_op(name)]
    assert not missing, f"say of each whether calls are checked for it, and how: {missing}"


# ---- tensors that differ in what no type says ----


class Mine(torch.Tensor):
    """A class without a dispatch of its own."""

    scale = 3.0


def inputs() -> dict[str, Tensor]:
    base = torch.arange(1.0, 7.0)
    tagged = base[:3].clone()
    tagged.tag = 1  # type: ignore[attr-defined]
    with torch.inference_mode():
        inference = base[:3].clone()
    retained = base[:3].clone().requires_grad_() * 2
    retained.retain_grad()
    graded = base[:3].clone().requires_grad_()
    graded.grad = torch.ones(3)
    return {
        "plain": base[:3].clone(),
        "moved": base[3:],
        "view": base[:3],
        "strided": base[::2],
        "parameter": nn.Parameter(base[:3].clone()),
        "buffer": nn.Buffer(base[:3].clone()),
        "tagged": tagged,
        "mine": base[:3].clone().as_subclass(Mine),
        "inference": inference,
        "shared": base[:3].clone().share_memory_(),
        "requires grad": base[:3].clone().requires_grad_(),
        "with a gradient": graded,
        "no leaf": base[:3].clone().requires_grad_() * 2,
        "retained": retained,
        "second of three": (base.clone().requires_grad_() * 2).split(2)[1],
        "double": base[:3].double(),
        "negative": torch.complex(base[:3], base[:3]).conj().imag,
    }


def probe(x: Tensor, name: str) -> Any:
    if name == "grad_dtype" and not x.is_leaf:
        return "refused by eager"
    value = getattr(x, name, "absent")
    if name in ("grad_fn", "_grad_fn"):
        return value and value.name()
    if callable(value) and name != "__class__":
        value = value()
    return "a tensor" if isinstance(value, Tensor) else str(value)


SAME_EVERYWHERE = [
    name for name in f"{IN_THE_TYPE} {WHERE_READ}".split() if name not in ("_base", "size", "stride", "shape")
]

READS: dict[str, Callable[[Tensor], Any]] = {
    "every property": lambda x: [probe(x, name) for name in SAME_EVERYWHERE],
    "of a view": lambda x: [x[1:].storage_offset(), x[1:].is_inference(), x[1:]._is_view(), x[1:].is_leaf],
    "of a result": lambda x: [(x * 2)._is_view(), (x * 2).is_inference(), (x * 2).is_leaf, (x * 2).storage_offset()],
    "base": lambda x: [x._base is None, x[1:]._base is x],
    "kind": lambda x: [
        isinstance(x, nn.Parameter),
        isinstance(x, nn.Buffer),
        isinstance(x, Mine),
        x.__class__.__name__,
    ],
    "attributes": lambda x: [hasattr(x, "tag"), getattr(x, "tag", 0), getattr(x, "scale", 1.0), hasattr(x, "other")],
    "layout": lambda x: [str(x.size()), x.stride(), x.shape[0]],
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("read", READS)
def test_what_is_read_is_what_is_found(read: str) -> None:
    f: Callable[..., Any] = lambda x: (x * 2, *READS[read](x))
    g, given = jit(f), inputs()
    if read == "of a result":
        del given["mine"]  # eager's results of a subclass are aliases of what the ops gave
    for name, x in (*given.items(), *given.items()):
        try:
            mine = g(x)
        except errors.ThunderError:
            assert read == "base", name
            continue
        its = f(x)
        assert mine[1:] == its[1:], (name, mine[1:], its[1:])
        torch.testing.assert_close(mine[0].detach(), its[0].detach())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_refused_is_an_error_of_ours_or_of_eager() -> None:
    x = torch.ones(3)
    for name in REFUSED.split():
        if not hasattr(x, name) and name != "__cuda_array_interface__":
            continue
        args = (x,) if name == "is_set_to" else (2,) if name == "__reduce_ex__" else ()

        def f(x: Tensor, name: str = name, args: Any = args) -> Any:
            value = getattr(x, name)
            return (value(*args) if callable(value) else value) and x

        try:
            jit(f)(x)
        except errors.ThunderError:
            continue
        raise AssertionError(f"{name} is answered while tracing")


def test_reads_in_transforms_and_bodies() -> None:
    """A question inside is answered as for a function that runs once for all, or it is an error."""
    given = inputs()
    loss = lambda x: (x * (2.0 if x.is_leaf else 3.0)).sum()
    asks: list[Callable[[Tensor], Any]] = [
        lambda x: grad(lambda y: (y * (2.0 if x.storage_offset() else 3.0)).sum())(x),
        lambda x: vmap(lambda y: y * (2.0 if getattr(x, "tag", 0) else 3.0))(x),
        lambda x: cond(x.sum() > 0, lambda y: y * (2.0 if y.is_leaf else 3.0), lambda y: y * 1, (x,)),
        lambda x: vmap(lambda y: y * (2.0 if y.is_pinned() else 3.0))(x),
        lambda x: jit(lambda y: y * (2.0 if y[1:].storage_offset() == 1 else 3.0))(x),
        lambda x: jit(lambda y: y * (2.0 if isinstance(y, nn.Parameter) else 3.0))(x),
        lambda x: torch.utils.checkpoint.checkpoint(lambda y: y * (2.0 if y.is_leaf else 3.0), x, use_reentrant=False),
        loss,
    ]
    for number, f in enumerate(asks):
        g = jit(f)
        for name in ("plain", "moved", "tagged", "parameter", "no leaf", "plain"):
            with contextlib.suppress(errors.ThunderError):
                torch.testing.assert_close(g(given[name]).detach(), f(given[name]).detach(), msg=f"{number} {name}")


def test_what_is_differentiated_is_not_the_argument() -> None:
    """It has a history, as under torch.func, though the argument has none."""
    f = lambda x: (x * (2.0 if (x * x).grad_fn is not None and x.requires_grad else 3.0)).sum()
    for g in (grad(f), jit(grad(f))):
        torch.testing.assert_close(g(torch.ones(3)), torch.func.grad(f)(torch.ones(3)))


OF_AUTOGRAD = ("is_leaf", "requires_grad", "grad_fn", "output_nr", "retains_grad", "_base", "dtype", "shape")
DIFFERENTIATE: tuple[Callable[..., Any], ...] = (
    lambda T, f, x: T.grad(f)(x),
    lambda T, f, x: T.vjp(f, x)[0],
    lambda T, f, x: T.jacrev(f)(x),
    lambda T, f, x: T.hessian(f)(x),
    lambda T, f, x: T.grad(lambda x: T.grad(f)(x * 2).sum())(x),
    lambda T, f, x: T.vmap(T.grad(f))(x[None]),
)


@pytest.mark.parametrize("transform", DIFFERENTIATE)
def test_what_autograd_knows_inside_a_transform(transform: Callable[..., Any]) -> None:
    """An argument that is differentiated is a leaf, as under torch.func, and the base of its views."""
    closed, x = torch.ones(3), torch.arange(1.0, 4)

    def asked(T: Any, wrap: Callable[..., Any]) -> set[Any]:
        found = set[Any]()

        def f(x: Tensor) -> Tensor:
            y = x * 1
            for number, one in enumerate((x, y, y.mul_(2), x.detach(), closed)):
                values = [number, *(getattr(one, name) for name in OF_AUTOGRAD)]
                known = (bool, int, torch.dtype, torch.Size)
                found.add(tuple(value if isinstance(value, known) else value is None for value in values))
            return (x * x).sum()

        wrap(lambda x: transform(T, f, x))(x)
        return found

    assert asked(thunder_fn, lambda g: g) == asked(thunder_fn, jit) == asked(torch.func, lambda g: g)


def test_a_module_that_reads_is_traced_for_each_answer() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (
                x * self.weight * (2.0 if x.storage_offset() else 3.0) * (5.0 if hasattr(self.weight, "tag") else 7.0)
            )

    plain, given = Reading(), inputs()
    compiled = jit(plain)
    for moved in (False, True):
        if moved:
            plain.weight.data = torch.ones(4)[1:]
        for name in ("plain", "moved", "plain"):
            torch.testing.assert_close(compiled(given[name]), plain(given[name]))


ONLY_LOOKED_AT = {
    "expand_as": lambda x, c: x[:1].expand_as(c) * 2,
    "ones_like": lambda x, c: torch.ones_like(c) * x.sum(),
    "iter": lambda x, c: x * len(list(iter(c))),
    "inside": lambda x, c: vmap(lambda u: u * torch.zeros_like(c).cos().sum())(x),
    "computes": lambda x, c: x.sum() * c,
}
"""Functions of an argument and a tensor from outside that, but for the last, compute with its type only."""
RETYPED: tuple[Callable[[Tensor], Any], ...] = (
    lambda c: c.t_(),
    lambda c: c.resize_(5, 3),
    lambda c: setattr(c, "data", torch.ones(4, 5, dtype=torch.float64)),
)
OUTSIDE = torch.ones(2, 3)


@pytest.mark.parametrize("read", ONLY_LOOKED_AT)
@pytest.mark.parametrize("transform", [jit, lambda f: vmap(f)])
def test_the_type_of_a_tensor_from_outside_is_looked_at(read: str, transform: Any) -> None:
    """A trace that did not compute with a tensor was not guarded by its type; an eager transform of a global never was."""
    x, of = torch.arange(3.0), ONLY_LOOKED_AT[read]

    def f(x: Tensor) -> Tensor:
        return of(x, OUTSIDE)

    OUTSIDE.data = torch.ones(2, 3)
    given, want = (x, f) if transform is jit else (x[None], lambda x: f(x[0])[None])
    g = transform(f)
    for change in (lambda c: None, *RETYPED):
        change(OUTSIDE)
        found, expected = g(given), want(given)
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_what_nobody_reads_is_not_looked_at() -> None:
    f = jit(lambda x: x * 2)
    for name in ("plain", "moved", "tagged", "shared", "view"):
        f(inputs()[name])
    assert cache_info(f).misses == 1


# ---- the process ----

IN_EVERY_CALL = """
are_deterministic_algorithms_enabled get_default_dtype get_deterministic_debug_mode
is_deterministic_algorithms_warn_only_enabled is_grad_enabled is_autocast_enabled is_autocast_cpu_enabled
is_autocast_ipu_enabled is_autocast_xla_enabled get_default_device
"""
WHERE_ASKED = """
get_num_threads get_num_interop_threads is_anomaly_enabled is_anomaly_check_nan_enabled is_inference_mode_enabled
is_warn_always_enabled is_autocast_cache_enabled get_autocast_dtype get_autocast_cpu_dtype get_autocast_gpu_dtype
get_autocast_ipu_dtype get_autocast_xla_dtype get_float32_matmul_precision
"""
OF_THE_BUILD = "has_lapack has_mkl has_openmp has_spectral is_vulkan_available get_file_path get_device_module"
OF_TENSORS = """
get_device is_complex is_conj is_distributed is_floating_point is_inference is_neg is_nonzero is_same_size is_signed
is_storage is_tensor
"""
STATE_OF_RANDOM = "initial_seed seed manual_seed get_rng_state"


def test_every_getter_of_torch_has_a_row() -> None:
    known = " ".join((IN_EVERY_CALL, WHERE_ASKED, OF_THE_BUILD, OF_TENSORS, STATE_OF_RANDOM)).split()
    getters = [name for name in dir(torch) if name.startswith(("get_", "is_", "are_", "has_")) or name.endswith("seed")]
    assert not [name for name in getters if name not in known]


BACKENDS = """
_coreml _nnapi cpu cuda cudnn cusparselt kleidiai mha miopen mkl mkldnn mps nnpack openmp opt_einsum python_native
quantized xeon xnnpack
"""


def test_every_backend_has_a_row() -> None:
    """Their flags are read through `ContextProp` or `torch._C`, which captures look at."""
    assert {one.name for one in pkgutil.iter_modules(torch.backends.__path__)} <= set(BACKENDS.split())


OF_AUTOGRAD_MODULE = "is_multithreading_enabled is_view_replay_enabled _profiler_enabled"
CONSTANT_OR_OF_TENSORS = """
_get_accelerator _get_cpu_capability _get_sequence_nr _get_dispatch_mode _is_checkpoint_valid _is_ck_sdpa_available
_is_flash_attention_available _is_kineto_stopped has_torch_function is_tensor_like
"""


def test_every_getter_of_autograd_and_of_backends_has_a_row() -> None:
    asks = re.compile(r"_?(get|is|has|are)_|_?profiler_enabled")
    getters = [name for name in dir(torch.autograd) if asks.match(name)]
    assert not [name for name in getters if name not in f"{OF_AUTOGRAD_MODULE} {CONSTANT_OR_OF_TENSORS}".split()]
    known = {*internals.patches.STATE, *IN_EVERY_CALL.split(), *WHERE_ASKED.split(), *CONSTANT_OR_OF_TENSORS.split()}
    known |= {"_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only"}  # in every call
    found, root = set[str](), pathlib.Path(torch.__file__).parent
    for path in (root / "__init__.py", *root.glob("backends/**/*.py"), *root.glob("sparse/*.py")):
        found |= set(re.findall(r"_C\.(_?(?:get|is|has|are|check)_\w+)\(", path.read_text()))
    assert found <= known


_PROFILERS: list[Any] = []


def profiling(on: bool) -> None:
    while _PROFILERS:
        _PROFILERS.pop().__exit__(None, None, None)
    if on:
        _PROFILERS.append(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]).__enter__())


@contextlib.contextmanager
def changed(get: Callable[[], Any], put: Callable[[Any], Any], *values: Any) -> Iterator[Iterator[Any]]:
    """Go through values of a setting; afterwards it is what it was."""
    before = get()
    try:
        yield (value for value in values * 2 if put(value) or True)
    finally:
        put(before)


def _flag(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any, Any]] = {
    "threads": (lambda: torch.get_num_threads(), torch.set_num_threads, 1, 2),
    "precision": (lambda: torch.get_float32_matmul_precision(), torch.set_float32_matmul_precision, "high", "medium"),
    "mkldnn": (*_flag(torch.backends.mkldnn, "enabled"), True, False),
    "benchmark": (*_flag(torch.backends.cudnn, "benchmark"), True, False),
    "tf32": (*_flag(torch.backends.cuda.matmul, "allow_tf32"), True, False),
    "anomaly": (lambda: torch.is_anomaly_enabled(), lambda on: torch.set_anomaly_enabled(on), True, False),
    "nan": (
        lambda: torch.is_anomaly_check_nan_enabled(),
        lambda on: torch.set_anomaly_enabled(torch.is_anomaly_enabled(), on),
        True,
        False,
    ),
    "cast cache": (lambda: torch.is_autocast_cache_enabled(), torch.set_autocast_cache_enabled, True, False),
    "warnings": (lambda: torch.is_warn_always_enabled(), torch.set_warn_always, True, False),
    "attention": (
        lambda: torch.backends.mha.get_fastpath_enabled(),
        torch.backends.mha.set_fastpath_enabled,
        True,
        False,
    ),
    "deterministic": (lambda: torch.get_deterministic_debug_mode(), torch.set_deterministic_debug_mode, 0, 1),
    "fill": (*_flag(torch.utils.deterministic, "fill_uninitialized_memory"), True, False),
    "flash": (lambda: torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.enable_flash_sdp, True, False),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
        True,
        False,
    ),
    "cast to": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda dtype: torch.set_autocast_dtype("cpu", dtype),
        torch.float16,
        torch.bfloat16,
    ),
    "threads by name": (torch.get_num_threads, torch.set_num_threads, 1, 2),
    "anomaly by name": (torch.is_anomaly_enabled, lambda on: torch.set_anomaly_enabled(on), True, False),
    "threads of backwards": (
        lambda: torch.autograd.is_multithreading_enabled(),
        torch.autograd.set_multithreading_enabled,
        False,
        True,
    ),
    "replayed views": (
        lambda: torch.autograd.is_view_replay_enabled(),
        lambda on: torch._C._set_view_replay_enabled(on),
        True,
        False,
    ),
    "profiler": (lambda: torch.autograd._profiler_enabled(), profiling, True, False),
    "profiler by name": (torch.autograd._profiler_enabled, profiling, True, False),
    "kind of profiler": (lambda: torch._C._autograd._profiler_type().value != 0, profiling, True, False),
    "flag of the profiler": (lambda: torch.autograd.profiler._is_profiler_enabled, profiling, True, False),
    "checks of sparse tensors": (
        lambda: torch.sparse.check_sparse_tensor_invariants.is_enabled(),
        lambda on: torch._C._set_check_sparse_tensor_invariants(on),
        True,
        False,
    ),
    "dtype": (lambda: torch.get_default_dtype(), torch.set_default_dtype, torch.float64, torch.float32),
    "gradients": (lambda: torch.is_grad_enabled(), torch.set_grad_enabled, False, True),
    "device": (lambda: torch.get_default_device().type, torch.set_default_device, "meta", "cpu"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_state_that_a_function_asks_for_is_looked_at(setting: str) -> None:
    get, put, *values = SETTINGS[setting]
    f: Callable[[Tensor], Any] = lambda x: (x + 1, get())
    g, x = jit(f), torch.ones(2)
    before = torch._GLOBAL_DEVICE_CONTEXT.__dict__.get("device_context")
    with changed(get, put, *values) as each:
        for _ in each:
            assert g(x)[1] == f(x)[1]
    if before is None and setting == "device":
        torch.set_default_device(None)


@pytest.mark.parametrize("around", (contextlib.nullcontext, torch.no_grad, torch.inference_mode))
def test_inference_mode_inside(around: Callable[[], Any]) -> None:
    def f(x: Tensor) -> Any:
        w = x * 2
        with torch.inference_mode():
            inside = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), (w * 2).is_inference()
            x[1:].mul_(3)
            y, z = x.sin(), x.detach()[0]
            with torch.inference_mode(False):
                inside += torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        with torch.no_grad(), torch.inference_mode(False):
            inside += (torch.is_grad_enabled(),)
        after = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        viewed = torch.inference_mode()(lambda x: x.view(-1)[:2] * 2)(x)
        return x, w * w, y, z, viewed, inside, after

    def run(f: Callable[[Tensor], Any]) -> Any:
        with around():
            x = torch.ones(3, requires_grad=True) * 1
            *tensors, inside, after = f(x)
        return [(tensor.tolist(), tensor.requires_grad) for tensor in tensors], inside, after

    assert run(jit(f)) == run(f)


def test_inference_mode_is_what_it_is_around() -> None:
    f: Callable[[Tensor], Any] = lambda x: (x * 2, torch.is_inference_mode_enabled(), (x * 2).is_inference())
    g, x = jit(f), torch.ones(2)
    for mode in (contextlib.nullcontext, torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert g(x)[1:] == f(x)[1:]


def test_the_dtype_of_a_bare_autocast_region_is_that_of_the_call() -> None:
    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return x @ x

    g, x = jit(f), torch.ones(2, 2)
    with changed(
        lambda: torch.get_autocast_dtype("cpu"),
        lambda dtype: torch.set_autocast_dtype("cpu", dtype),
        torch.bfloat16,
        torch.float16,
    ) as each:
        for _ in each:
            assert g(x).dtype is f(x).dtype


@pytest.mark.parametrize(
    "read",
    [
        lambda x: vars(x).get("scale", 1.0),
        lambda x: x.__dict__.get("scale", 1.0),
        lambda x: 1.0 + ("scale" in dir(x)),
        lambda x: 1.0 + len(vars(x)),
        lambda x: 1.0 + len(vars(x * 2)),
    ],
)
def test_all_attributes_of_a_tensor_at_once(read: Callable[[Tensor], float]) -> None:
    """A tracer shows those of the tensor that it stands for, and a call with others is traced anew."""
    f = lambda x: x * read(x)
    jitted, inputs = jit(f), [torch.ones(2) for _ in range(3)]
    inputs[1].scale, inputs[2].scale = 2.0, 3.0  # type: ignore[attr-defined]
    for x in (*inputs, *inputs):
        assert torch.equal(jitted(x), f(x))
    assert torch.equal(grad(lambda x: f(x).sum())(inputs[0]), torch.full((2,), read(inputs[0])))
