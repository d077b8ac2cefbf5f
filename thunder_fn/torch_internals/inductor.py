"""Inductor without Dynamo and AOTAutograd: an FX graph in, the text of a wrapper and of its kernels
out.

Inductor is imported when it is first used: that takes seconds.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor

from thunder_fn.ir.trace import Expr
from thunder_fn.torch_internals import (
    FakeTensorMode,
    Numbers,
    detect_fake_mode,
    isolated,
    symbolic_dispatch,
)

_LOCK = threading.RLock()
"""Inductor keeps state of a compilation in globals: one at a time."""

_CONFIG: dict[str, Any] = {
    "graph_partition": False,  # one plain function
    "size_asserts": False,  # a program knows its inputs' layouts
    "alignment_asserts": False,
    "fallback_random": True,
    "cpp_wrapper": False,
    "freezing": False,
    "fx_graph_cache": False,
    "cpp.dynamic_threads": False,
    "cpp.vec_isa_ok": (
        True
    ),  # the processor's abilities come from PyTorch, not from compiling programs
}

_KEEPS_PEAK = "combo_kernel_peak_memory_pct_threshold"
"""The option that releases have whose combined kernels keep the peak of memory as it is."""

MOST_UNSPLIT = 1024
"""The most elements of a sum that is one kernel on a GPU."""

_ON_GPU: dict[str, Any] = {
    "combo_kernels": True,  # kernels side by side are one launch
    "combo_kernel_max_num_nodes": 64,
}


TRITON_HEAD = """
import triton
import triton.language as tl
from torch._inductor.runtime.triton_helpers import libdevice
"""
"""The imports of a module with Triton kernels, and of the device's functions as Inductor finds
them.
"""

REINTERPRET = "import torch\nreinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor\n"
"""The lines of Inductor's modules that name the maker of a view."""


@dataclass(frozen=True, slots=True)
class WrapperCode:
    """Inductor's output: a module with kernels and a function `call(args)`, and its matrix products
    by the buffers they fill.
    """

    text: str
    constants: dict[str, torch.Tensor]
    products: Mapping[str, ProductCall]
    strides: tuple[tuple[Any, ...] | None, ...]
    """The strides of each output, as ints and expressions; None for what is no tensor."""


@dataclass(frozen=True, slots=True)
class Dense:
    """The layout of a tensor of float32 on the CPU."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProductCall:
    """`mm(left, right, out=out)` or `addmm(start, left, right, out=out)`."""

    start: Dense | None
    left: Dense
    right: Dense
    out: Dense


def strided_fakes(
    layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]],
) -> list[Any]:
    """Fake tensors, in one mode, of (shape, strides, dtype, device)."""
    mode = FakeTensorMode()
    with isolated(), mode:
        return [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device in layouts
        ]


def symbolic_fakes(layouts: Sequence[Any]) -> tuple[list[Any], Numbers]:
    """Inputs, in one mode, of (sizes, strides, dtype, device) with expressions in them, and
    numbers; what knows of these.
    """
    numbers = Numbers()
    mode = FakeTensorMode(shape_env=numbers)
    size: Callable[[Any], Any] = lambda dim: numbers.number(dim) if isinstance(dim, Expr) else dim
    fakes: list[Any] = []
    with isolated(), mode:
        for layout in layouts:
            if isinstance(layout, Expr):
                fakes.append(numbers.number(layout))
                continue
            shape, strides, dtype, device = layout
            fakes.append(
                torch.empty_strided(
                    tuple(map(size, shape)), tuple(map(size, strides)), dtype=dtype, device=device
                )
            )
    return fakes, numbers


def wrapper_code(
    graph: Callable[..., Any],
    fakes: Sequence[Any],
    threads: int,
    strides: Sequence[tuple[Any, ...] | None],
    improve: Callable[[torch.fx.Graph], None] = lambda graph: None,
    donated: Collection[int] = (),
) -> WrapperCode:
    """Lower a graph of functional ATen calls to Inductor's code for inputs like these fakes.
    Compiles nothing.

    Args:
        graph: a graph module, or a function that calls ATen.
        strides: those that eager gives the outputs, which Inductor keeps where it can.
        improve: changes the graph after it was decomposed.
        donated: inputs, by place, whose memory the code may write results to.
    """
    with warnings.catch_warnings(
        action="ignore"
    ):  # PyTorch's own deprecations are no user's business
        from torch._inductor.graph import GraphLowering
        from torch._inductor.ir import (
            DonatedBuffer,
            InputBuffer,
            MutationLayoutSHOULDREMOVE,
            TensorBox,
        )
        from torch._inductor.virtualized import V

    class Lowering(GraphLowering):
        """Knows of donated inputs, which PyTorch's lowering has in backwards only."""

        def placeholder(self, target: str, args: Any, kwargs: Any) -> Any:
            result: Any = super().placeholder(target, args, kwargs)
            name = self.graph_input_names[-1]
            if self.placeholder_idx in donated and isinstance(
                self.graph_inputs_original.get(name), InputBuffer
            ):
                box: Any = TensorBox.create(DonatedBuffer(name=name, layout=result.get_layout()))
                self.graph_inputs[name], self.graph_inputs_original[name] = box, box.data.data
                return box
            return result

        def register_buffer(self, buffer: Any, *, set_name: bool = False) -> str:
            if isinstance(buffer.layout, MutationLayoutSHOULDREMOVE):
                buffer.layout.target = _pinned(buffer.layout.target)
            return super().register_buffer(buffer, set_name=set_name)

        def _update_scheduler(self) -> None:
            self.scheduler = _scheduler()(self.operations)

    with _LOCK, warnings.catch_warnings(action="ignore"), _compiling(fakes, threads) as mode:
        graph_module = _decomposed(graph, fakes, mode)
        improve(graph_module.graph)
        _passes(graph_module, fakes, strides)
        lowering = Lowering(
            graph_module, example_inputs=list(fakes), shape_env=mode.shape_env, is_inference=True
        )
        lowering.freeze_runtime_asserts()
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
            lowering.run(*fakes)
            text: Any = lowering.codegen()[0]
    found = tuple(map(_strides, lowering.graph_outputs))
    return WrapperCode(text.value, dict(lowering.constants), _products(lowering.operations), found)


def _pinned(target: Any) -> Any:
    """The memory that a scatter writes to, whatever its box holds later.

    An op in place gives a box other memory (`mutate_to`). PyTorch 2.13 lets an earlier scatter
    follow the box, and runs it after the op; torch.compile is wrong alike:

        def f(x, i):
            y = torch.zeros(4, 3).scatter_add(0, i, x)
            return y.index_put((y > 1,), torch.tensor(5.0))

        args = torch.ones(2, 3), torch.tensor([[0, 1, 2], [0, 1, 2]])
        torch.testing.assert_close(torch.compile(f)(*args), f(*args))  # fails on the CPU
    """
    from torch._inductor.ir import BaseView, MutableBox

    if isinstance(target, MutableBox):
        return type(target)(_pinned(target.data))
    if isinstance(target, BaseView):
        return dataclasses.replace(target, data=_pinned(target.data))
    return target


@functools.cache
def _scheduler() -> Any:
    """PyTorch's scheduler, which keeps in mind what a scatter overwrites.

    A scatter writes into a copy of its target, and readers of the result depend on that write.
    PyTorch 2.13 forgets this for a kernel whose loops it rewrites to be like another kernel's
    (`recompute_size_and_body`). It may run it before the scatter; torch.compile is wrong alike:

        def f(x, e, z, i, s):
            y = x * (e * e).sum(1, keepdim=True)
            return y + z.index_add(0, i, s), y

        args = (torch.randn(4, 1, 8), torch.randn(4, 3, 8), torch.zeros(4, 1, 8),
                torch.tensor([0, 1, 2, 3, 0, 2]), torch.randn(6, 1, 8))
        torch.testing.assert_close(torch.compile(f)(*args), f(*args))  # fails on the CPU
    """
    from torch._inductor.scheduler import Scheduler, SchedulerNode

    class Node(SchedulerNode):
        def recompute_size_and_body(self, *args: Any, **kwargs: Any) -> None:
            super().recompute_size_and_body(*args, **kwargs)
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    class Ordered(Scheduler):
        def create_scheduler_node(self, node: Any) -> Any:
            found = super().create_scheduler_node(node)
            return Node(self, node) if type(found) is SchedulerNode else found

    return Ordered


def _products(operations: Sequence[Any]) -> dict[str, ProductCall]:
    """Matrix products of float32 on the CPU, of sizes that are known."""
    from torch._inductor.ir import ExternKernelOut

    found = dict[str, ProductCall]()
    for operation in operations:
        name = getattr(operation, "python_kernel_name", None)
        if not isinstance(operation, ExternKernelOut) or name not in (
            "extern_kernels.mm",
            "extern_kernels.addmm",
        ):
            continue
        layouts = [_dense(value) for value in (*operation.inputs, operation)]
        if None not in layouts and all(
            operation.kwargs.get(key, 1) == 1 for key in ("alpha", "beta")
        ):
            *start, left, right, out = layouts
            found[operation.get_name()] = ProductCall(start[0] if start else None, left, right, out)  # type: ignore[arg-type]
    return found


def _dense(value: Any) -> Dense | None:
    """The layout of a value of Inductor's, None if it is not of float32 on the CPU or not known."""
    numbers = (*value.get_size(), *value.get_stride())
    if value.get_dtype() != torch.float32 or value.get_device().type != "cpu":
        return None
    if not all(map(_is_number, numbers)):
        return None
    count = len(value.get_size())
    return Dense(tuple(map(int, numbers[:count])), tuple(map(int, numbers[count:])))


def _is_number(value: Any) -> bool:
    return bool(getattr(value, "is_Integer", isinstance(value, int)))


def _decomposed(
    graph: Callable[..., Any], fakes: Sequence[Any], mode: FakeTensorMode
) -> torch.fx.GraphModule:
    """The graph in the ops that Inductor lowers."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(graph, decomposition_table=select_decomp_table(), _allow_non_fake_inputs=True)
    with mode:
        return traced(*fakes)


def _strides(value: Any) -> tuple[Any, ...] | None:
    """The strides that Inductor decided on for one of its values."""
    found = value.maybe_get_stride() if hasattr(value, "maybe_get_stride") else None
    return (
        None
        if found is None
        else tuple(int(one) if _is_number(one) else Expr(one) for one in found)
    )


def _passes(
    graph_module: torch.fx.GraphModule,
    fakes: Sequence[Any],
    strides: Sequence[tuple[Any, ...] | None],
) -> None:
    """Inductor's passes after autograd, told of the layout that eager gives every output: a
    decomposition may differ.
    """
    from torch._inductor import compile_fx

    compile_fx.view_to_reshape(graph_module)
    compile_fx.fake_tensor_prop(graph_module, list(fakes), force_allow_non_fake_inputs=True)
    output = graph_module.graph.find_nodes(op="output")[0]
    output.meta["original_output_strides"] = list(strides)
    output.meta["user_visible_output_idxs"] = [
        index for index, node in enumerate(output.args[0]) if isinstance(node, torch.fx.Node)
    ]
    compile_fx._recursive_post_grad_passes(graph_module, is_inference=True)


@contextlib.contextmanager
def _compiling(fakes: Sequence[Any], threads: int) -> Generator[FakeTensorMode]:
    """The global state that Inductor works in."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.debug import DebugContext
    from torch._inductor.virtualized import V

    mode = (
        next((fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)), None)
        or FakeTensorMode()
    )
    on_gpu = any(map(_is_on_gpu, fakes))
    with (
        isolated(),
        torch.no_grad(),
        torch._C._DisableAutocast(),
        symbolic_dispatch() if mode.shape_env is not None else contextlib.nullcontext(),
        _configured(threads, on_gpu=on_gpu),
        DebugContext(),
        V.set_fake_mode(mode),
        _few_splits() if on_gpu else contextlib.nullcontext(),
        tracing(TracingContext(mode)),
    ):
        yield mode


def _few_splits() -> Any:
    """Leave sums over few elements in one kernel. Inductor splits a sum of 256 rows in two, which
    takes a second launch to add them.
    """
    from torch._inductor.virtualized import V

    chosen = type(V.choices)
    if not hasattr(chosen, "reduction_split_factor"):
        return contextlib.nullcontext()

    class Choices(chosen):
        @staticmethod
        def reduction_split_factor(
            device: Any, reduction_numel_hint: int, *args: Any, **kwargs: Any
        ) -> int:
            if reduction_numel_hint <= MOST_UNSPLIT:
                return 1
            found = chosen.reduction_split_factor
            return found(device, reduction_numel_hint, *args, **kwargs)

    return V.set_choices_handler(Choices())


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def _configured(threads: int, *, on_gpu: bool = False) -> Any:
    """Inductor's options as they are used here; those that this release does not know are left
    out.
    """
    from torch._inductor import config

    options = _CONFIG | (_ON_GPU if on_gpu and _has(config, _KEEPS_PEAK) else {})
    return config.patch(
        {key: value for key, value in options.items() if _has(config, key)}
        | {"cpp.threads": threads}
    )


def _has(config: Any, key: str) -> bool:
    for name in key.split("."):
        if not hasattr(config, name):
            return False
        config = getattr(config, name)
    return True


@functools.cache
def compiles_for(device: str) -> bool:
    """Test whether Inductor has a compiler for a type of device: for CUDA that is Triton."""
    if device != "cuda":
        return device == "cpu"
    from torch.utils._triton import has_triton

    return torch.cuda.is_available() and has_triton()


def inductor_backend() -> Callable[..., Any]:
    """The function with which `torch.compile` compiles graphs."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx


def load_source(text: str) -> Any:
    """A module of this text in a file: Triton reads the source of its kernels there. Generated
    code imports it.
    """
    from torch._inductor.codecache import PyCodeCache

    return PyCodeCache.load(text)


def extern_kernel(name: str) -> Any:
    """The function that Inductor's wrappers call as `extern_kernels.<name>`."""
    from torch._inductor.select_algorithm import extern_kernels

    return getattr(extern_kernels, name)


def build_command(source: Path, target: Path) -> str:
    """The command line that compiles a file of kernels to a shared library for this machine,
    with Inductor's options.
    """
    from torch._inductor import cpp_builder, cpu_vec_isa

    with _LOCK, _configured(torch.get_num_threads()):
        options = cpp_builder.CppTorchDeviceOptions(
            vec_isa=cpu_vec_isa.pick_vec_isa(),
            device_type="cpu",
            include_pytorch=False,
            shared=True,
        )
        builder = cpp_builder.CppBuilder(
            name=target.stem,
            sources=str(source),
            BuildOption=options,
            output_dir=str(target.parent),
        )
        return builder.get_command_line()


def compilers() -> tuple[str, ...]:
    """The C++ compilers that Inductor tries, in order."""
    from torch._inductor import config

    given = config.cpp.cxx
    return tuple(
        name
        for name in (given if isinstance(given, (list, tuple)) else (given,))
        if isinstance(name, str)
    )


def data_pointer_function() -> int:
    """The address of a C function that gives the data pointer of a tensor as a PyObject."""
    return torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr


@functools.cache
def gemm_address(dtype: torch.dtype) -> int:
    """The address of the BLAS function `sgemm_` or `dgemm_` that PyTorch's own products call; 0
    where it has none.
    """
    try:
        library = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))))
        function = getattr(library, {torch.float32: "sgemm_", torch.float64: "dgemm_"}[dtype])
    except (StopIteration, OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def processor_name() -> str:
    """The processor's name for itself; Intel where this release of PyTorch does not tell."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return str(capabilities.get("cpu_name", "Intel"))


def cpu_capability() -> str:
    """The instruction set that kernels for this machine may use, as PyTorch names it."""
    return torch.backends.cpu.get_cpu_capability()


def multiplies_integers() -> bool:
    """Test whether the processor multiplies and adds bytes in vectors of 64 (AVX-512 VNNI), and
    PyTorch may use these.
    """
    return cpu_capability() == "AVX512" and torch.cpu._is_vnni_supported()


@contextlib.contextmanager
def fakes_of(values: Sequence[Any]) -> Generator[list[Any]]:
    """Fake tensors with the layouts of these values; inside, ops on them run on no data."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with isolated(), torch.no_grad(), torch._C._DisableAutocast(), mode:
        yield [
            (
                torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
                if isinstance(value, torch.Tensor)
                else value
            )
            for value in values
        ]


@contextlib.contextmanager
def running(fakes: Sequence[Any], numbers: Numbers | None) -> Generator[None]:
    """Run ops inside on no data for tensors of `strided_fakes` or `symbolic_fakes`; ops that
    make tensors make such.
    """
    modes = (fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor))
    mode = next(modes, None) or FakeTensorMode(shape_env=numbers)
    composed = contextlib.nullcontext() if numbers is None else symbolic_dispatch()
    with isolated(), torch.no_grad(), torch._C._DisableAutocast(), composed, mode:
        yield


def are_fake(values: Sequence[Any]) -> bool:
    """Test whether the values are tensors without values, or none at all inside `fakes_of`."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return (
        all(isinstance(tensor, FakeTensor) for tensor in tensors)
        and detect_fake_mode(tensors) is not None
    )


def list_backends() -> list[str]:
    """The names of the registered backends of torch.compile, those for debugging included."""
    return sorted(torch.compiler.list_backends(exclude_tags=()))


def lookup_backend(name: str) -> Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]:
    """A registered backend of torch.compile: a function of a graph and of its inputs."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)  # type: ignore[return-value]
