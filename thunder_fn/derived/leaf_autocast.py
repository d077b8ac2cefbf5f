"""PyTorch's autocast policy of an op, asked from PyTorch.

Its dispatcher knows which ops have an autocast rule on a device, leaves and functions such as
`torch.matmul` alike. Running the op under `torch.autocast` on tracers shows the rule: the arguments
that are cast, and their new dtypes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal as Choice, TypeAlias

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.nesting import TO_COPY, nest
from thunder_fn.capture.recorded import Leaf
from thunder_fn.capture.recorder import Recorder
from thunder_fn.capture.replaced.lookasides import diverted
from thunder_fn.capture.replaced.patches import module_scopes
from thunder_fn.capture.scopes import ScopeMode
from thunder_fn.derived.attempts import kept_rules
from thunder_fn.derived.leaf_vjp import alone, call_leaf
from thunder_fn.ir import ops
from thunder_fn.ir.trace import (
    Equation,
    Literal,
    TensorType,
    Trace,
    Type,
    Var,
    map_args,
    python_args,
)

Answer: TypeAlias = Choice["lower", "float32", "promote"] | None
"""The policy for an op's floating arguments: the lower precision, float32, the widest among
them, or nothing.
"""

LOWER = torch.bfloat16


KERNELS: dict[str, Answer] = {
    **dict.fromkeys(("dot", "mv", "convolution"), "lower"),
    **dict.fromkeys(
        (
            *(
                "_scaled_dot_product_flash_attention_for_cpu",
                "_scaled_dot_product_efficient_attention",
            ),
            *(
                "_scaled_dot_product_cudnn_attention",
                "_scaled_dot_product_fused_attention_overrideable",
            ),
        ),
        "lower",
    ),
    **dict.fromkeys(
        ("_linalg_svd", "_linalg_eigh", "_linalg_eigvals", "_linalg_solve_ex", "_linalg_det"),
        "float32",
    ),
    **dict.fromkeys(
        ("_linalg_slogdet", "_cdist_forward", "_fft_r2c", "_fft_c2r", "linalg_solve_triangular"),
        "float32",
    ),
}
"""Kernels without a rule of their own: functions that have one (matmul, conv2d, linalg.svd) are
captured as these.
"""


@dataclass(frozen=True, slots=True)
class Layer:
    """A composite of ours that autocast takes for one op in lower precision, as it takes `linear`.

    Args:
        function: what it does.
        casts: the parameters that are cast; others, such as scales, are part of how a weight is
            stored.
    """

    function: Callable[..., Any]
    casts: tuple[str, ...]


LAYERS: dict[str, Layer] = {}
"""The layers that autocast lowers, by the names of the composites."""


def cast_operands(equation: Equation) -> tuple[bool, ...]:
    """Tell for each operand whether an answer about the equation applies to it."""
    layer = LAYERS.get(equation.op.name)
    if layer is None:
        return (True,) * len(equation.operands)
    names = inspect.signature(layer.function).parameters
    given = (*zip(names, equation.args, strict=False), *equation.kwargs)
    return tuple(name in layer.casts for name, arg in given if isinstance(arg, Var))


def is_eligible(type: Type, device: torch.device) -> bool:
    """Test for a tensor that autocast casts: floating, on its device, and not in double
    precision.
    """
    return (
        isinstance(type, TensorType)
        and type.dtype.is_floating_point
        and type.dtype.itemsize <= 4
        and type.device.type == device.type
    )


def device_of(equation: Equation) -> torch.device | None:
    """The device on which the equation runs: a CPU tensor beside others is a number for them."""
    devices = [var.type.device for var in equation.operands if isinstance(var.type, TensorType)]
    return next(
        (device for device in devices if device.type != "cpu"), devices[0] if devices else None
    )


def autocast_policy(equation: Equation) -> Answer:
    """Answer for an equation as `torch.autocast` does on the device of its operands.

    It is asked about leaves, about calls of torch functions and about `LAYERS`; of other composites
    it knows nothing.

    Law: ``autocast(f, dtype, policy=autocast_policy)`` is ``autocast(f, dtype)``.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> f = tfn.autocast(lambda x, w: x @ w, torch.bfloat16, policy=autocast_policy)
        >>> f(torch.ones(1, 2), torch.ones(2, 1)).dtype
        torch.bfloat16
    """
    device = device_of(equation)
    if device is None or not any(is_eligible(var.type, device) for var in equation.operands):
        return None
    if equation.op.name in LAYERS:
        return "lower"
    name = aten_name(equation)
    if name not in internals.autocast_ops(device.type):
        return KERNELS.get(name)
    return _observed(alone(equation), device)


def policy_on_meta(equation: Equation) -> Answer:
    """Answer for tensors without values as `autocast_policy` does for those of a GPU.

    Law: for operands on other devices it is `autocast_policy`.
    """

    def on_gpu(var: Var) -> Var:
        if isinstance(var.type, TensorType) and var.type.device.type == "meta":
            return replace(var, type=replace(var.type, device=torch.device("cuda")))
        return var

    args, kwargs = map_args(on_gpu, equation)
    return autocast_policy(replace(equation, args=args, kwargs=kwargs))


def aten_name(equation: Equation) -> str:
    """The name of the ATen op behind a leaf or a call: `linalg_norm` of `torch.linalg.norm`."""
    if equation.op.kind == "leaf":
        namespace, name, _ = equation.op.name.split(".")
        return name if namespace == "aten" else ""
    if not ops.is_call(equation.op):
        return ""
    name = (
        equation.op.name.removeprefix("torch.")
        .removeprefix("nn.functional.")
        .removeprefix("Tensor.")
    )
    return name.removeprefix("__r").strip("_").replace(".", "_")


@kept_rules(16384)
def _observed(single: Trace, device: torch.device) -> Answer:
    """The casts of an op that has a rule: of float32 arguments, and of those in lower precision."""
    if LOWER in _casts(single, device, torch.float32):
        return "lower"
    return "float32" if torch.float32 in _casts(single, device, LOWER) else "promote"


def _casts(single: Trace, device: torch.device, given: torch.dtype) -> set[Any]:
    """The dtypes to which arguments of one dtype are cast."""
    (equation,) = single.equations
    recorder = Recorder(track_no_grad=False)
    with recorder.running(), internals.autocast_on(LOWER, (device.type,)):
        tracers = {
            var.index: recorder.input_of_type(
                TensorType(given, var.type.shape, var.type.device)
                if is_eligible(var.type, device)
                else var.type
            )
            for var in single.inputs
            if isinstance(var.type, TensorType)
        }
        inputs = {var.index for var in recorder.inputs}
        with contextlib.suppress(RuntimeError, TypeError, NotImplementedError, ValueError):
            call_of(equation)(lambda var: tracers.get(var.index))
        leaves = [
            item for item in recorder.root.items if isinstance(item, Leaf) and item.op == TO_COPY
        ]
        casts = [
            leaf
            for leaf in leaves
            if isinstance(leaf.args[0], Var) and leaf.args[0].index in inputs
        ]
        return {
            value.value
            for leaf in casts
            for key, value in leaf.kwargs
            if key == "dtype" and isinstance(value, Literal)
        }


def call_of(equation: Equation) -> Callable[[Callable[[Var], Any]], Any]:
    """The op of a leaf, the torch function of a call, or a layer, as a function of how to read
    variables.
    """
    if equation.op.kind == "leaf":
        return functools.partial(call_leaf, equation)
    layer = LAYERS.get(equation.op.name)
    function: Any = (
        layer.function
        if layer
        else functools.reduce(getattr, equation.op.name.split(".")[1:], torch)
    )

    def call(read: Callable[[Var], Any]) -> Any:
        args, kwargs = python_args(equation, read)
        return function(*args, **kwargs)

    return call


@kept_rules(4096)
def body_of_call(single: Trace) -> Trace | None:
    """Capture the torch function of a call on its operands' types; None where it refuses them."""
    (equation,) = single.equations
    recorder = Recorder(track_no_grad=False)
    with recorder.running(module_scopes(), diverted(), ScopeMode(recorder).alone()):
        tracers = {
            var.index: recorder.input_of_type(var.type)
            for var in single.inputs
            if isinstance(var.type, TensorType)
        }
        try:
            found = pytree.flatten(call_of(equation)(lambda var: tracers[var.index]))[0]
        except (RuntimeError, TypeError, NotImplementedError, ValueError):
            return None
        outputs = [recorder.var_of(leaf) for leaf in found if isinstance(leaf, torch.Tensor)]
    known = tuple(var for var in outputs if var is not None)
    if len(known) != len(equation.outputs):
        return None
    return nest(recorder, known, equation.op.name).renamed(ops.short_name(equation.op))
