"""Ops: their schemas, kernels and decompositions, and C functions that call them."""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_fn.torch_internals.modes import below_autograd, isolated, never_compiled

aten = torch.ops.aten


def custom_op_name(op: Any) -> str | None:
    """The name of the overload of an op that `torch.library.custom_op` made; None for anything
    else.
    """
    return str(op._opoverload) if isinstance(op, torch.library.CustomOpDef) else None


@functools.cache
def load_forward_decompositions() -> None:
    """Import PyTorch's decompositions for forward AD, which it scripts with a function that it
    deprecates.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def decomposition_of(overload: OpOverload) -> Callable[..., Any] | None:
    """PyTorch's decomposition of an op: from its Python tables, or the C++ one of a composite
    op.
    """
    from torch._decomp import decomposition_table

    if overload in decomposition_table:
        return decomposition_table[overload]
    if torch._C._dispatch_has_kernel_for_dispatch_key(
        overload.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    ):
        return overload.decompose
    return None


def runnable(overload: OpOverload) -> Callable[..., Any]:
    """The overload as a program calls it. A kernel that saves what its backward needs is asked
    to save it, and one that refuses layouts gets one that it takes.
    """
    if overload in _ONE_LAYOUT:
        return functools.partial(_in_one_layout, overload, _ONE_LAYOUT[overload])
    if overload is torch.ops.aten.slice_scatter.default:
        return _scatter_slice
    if overload is not torch.ops.aten.mkldnn_rnn_layer.default:
        return overload

    def save_workspace(*args: Any) -> Any:
        if torch.is_grad_enabled():
            return overload(*args)
        with below_autograd(), torch.enable_grad():
            return overload(*args)

    return save_workspace


def _scatter_slice(
    x: torch.Tensor,
    src: torch.Tensor,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> torch.Tensor:
    """Call slice_scatter. functorch's rule overflows for the end of `x[::2]`, the largest int."""
    end = x.shape[dim] if end == _END else end
    return torch.ops.aten.slice_scatter.default(x, src, dim, start, end, step)


_END = 2**63 - 1
_ONE_LAYOUT = {
    torch.ops.aten.native_group_norm.default: (0,),
    torch.ops.aten.native_group_norm_backward.default: (1, 0),
}
"""Kernels that refuse a layout which they would compute as another one, and the operands that
have to have it.
"""

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _in_one_layout(overload: OpOverload, positions: tuple[int, ...], *args: Any) -> Any:
    """The call with operands that are contiguous, or in the order of channels last if the first
    one is.
    """
    first = args[positions[0]]
    if all(args[position].is_contiguous() for position in positions) or _is_stand_in(first):
        return overload(*args)
    format = _CHANNELS_LAST.get(first.dim(), torch.contiguous_format)
    if first.is_contiguous() or not first.is_contiguous(memory_format=format):
        format = torch.contiguous_format
    given = list(args)
    for position in positions:
        given[position] = _in_format(args[position], format)
    return overload(*given)


def _is_stand_in(x: torch.Tensor) -> bool:
    """Test for a tensor that is not plain: nobody asks for its strides."""
    return type(x) not in (
        torch.Tensor,
        torch.nn.Parameter,
    ) or torch._C._functorch.is_functorch_wrapped_tensor(x)


def _in_format(x: torch.Tensor, format: torch.memory_format) -> torch.Tensor:
    """x with the very strides of a format, where sizes of one have some too."""
    if format == torch.contiguous_format:
        return x.contiguous()
    strides = torch._prims_common.make_channels_last_strides_for(x.shape)
    return x if x.stride() == tuple(strides) else x.clone(memory_format=format)


_C_MODULES = (
    ("torch", torch._C._VariableFunctions),
    ("torch._C._nn", torch._C._nn),
    ("torch.special", torch._C._special),
    ("torch.linalg", torch._C._linalg),
    ("torch.fft", torch._C._fft),
    ("torch.Tensor", torch._C.TensorBase),
)


def c_functions(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """PyTorch's C-bound functions of this name, with where they are from. They are called faster
    than overloads.
    """
    for label, module in _C_MODULES:
        function = getattr(module, name, None)
        if function is not None and type(function).__name__ in (
            "builtin_function_or_method",
            "method_descriptor",
        ):
            yield label, function


def has_kernel(name: str, device: str) -> bool:
    """Test whether the op, `aten::add` say, runs on this type of device."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device)
    return key is None or torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def is_decomposed(overload: OpOverload) -> bool:
    """Test whether the op has no kernel: PyTorch runs it as other ops, and may return an input
    as it is.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        overload.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )


def is_pytorchs_own(overload: OpOverload) -> bool:
    """Test whether the op is PyTorch's, and no custom op of a user or library."""
    return overload.namespace in ("aten", "prim", "prims")


def is_known_to_autograd(overload: OpOverload) -> bool:
    """Test whether somebody told autograd what to do with the op: a formula, none, or to look at
    the ops that it consists of.
    """
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key)
        for key in ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
    )


def schema_of(overload: OpOverload) -> Any:
    """The op's schema: `arguments`, each with `name`, `type`, `kwarg_only` and `alias_info`,
    `returns`, `is_mutable`.
    """
    return overload._schema


def has_own_functionalization(overload: OpOverload) -> bool:
    """Test whether the op itself has a pure form."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "Functionalize")


def argument_names(overload: OpOverload) -> list[str]:
    """The names of the op's arguments."""
    return [argument.name for argument in schema_of(overload).arguments]


def named_arguments(
    overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by the names in the op's schema."""
    return {**dict(zip(argument_names(overload), args, strict=False)), **kwargs}


_NAMES_OF_SELF = ("input", "x", "a", "x1")
"""The names by which PyTorch's functions take the `self` of a schema: its own, and NumPy's."""


@functools.cache
def _signatures(function: Any) -> tuple[tuple[str, ...], ...]:
    """The names of the arguments of each overload of a function of C or an operator, but those that
    some overload takes by name only.
    """
    if isinstance(function, OpOverload):
        overloads = [function]
    else:
        name = getattr(function, "__name__", "")
        packet = getattr(torch.ops.aten, name, None)
        is_of_c = any(function is one for _, one in c_functions(name))
        if packet is None or not (is_of_c or packet is function):
            return ()
        overloads = [getattr(packet, one) for one in packet.overloads()]
    found = [schema_of(overload).arguments for overload in overloads]
    by_name = {one.name for each in found for one in each if one.kwarg_only}
    return tuple(tuple(one.name for one in each if one.name not in by_name) for each in found)


def in_order(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give arguments by position that a call of PyTorch's function gives by name, up to the first
    one that it leaves out.
    """
    found = _signatures(function) if kwargs else ()
    if not found:
        return args, kwargs
    named = {"self" if name in _NAMES_OF_SELF else name: name for name in kwargs}
    named.update({name: name for name in kwargs})
    names = max(found, key=lambda one: len(named.keys() & one))
    moved = [*itertools.takewhile(named.__contains__, names[len(args) :])]
    given = [named[name] for name in moved]
    rest = {name: value for name, value in kwargs.items() if name not in given}
    return (*args, *(kwargs[name] for name in given)), rest


class _FirstOp(Exception):
    """Carries the first op that a call dispatches out of it, before any kernel runs."""


class _FirstOpMode(TorchDispatchMode):
    _should_skip_dynamo = never_compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _FirstOp(func, tuple(args), dict(kwargs or {}))


def first_op(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The overload and the arguments with which a call first reaches the dispatcher, None if it
    fails before.
    """
    with isolated(), torch._C.DisableTorchFunction(), torch.no_grad(), _FirstOpMode():
        try:
            function(*args, **kwargs)
        except _FirstOp as found:
            return found.args[0], found.args[1], found.args[2]
        except (TypeError, RuntimeError, ValueError, IndexError, NotImplementedError):
            return None
    return None
