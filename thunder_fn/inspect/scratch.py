"""Scratch memory, allocated and given back while something runs: by PyTorch's kernels, by loops,
by compiled code.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.executors import Claimed, claim
from thunder_fn.executors.base import FusionExecutor
from thunder_fn.executors.loops import private_carries
from thunder_fn.executors.reuse import overwritten, plan_reuse
from thunder_fn.executors.running import CheckedRegion
from thunder_fn.executors.taking import donating
from thunder_fn.executors.torch_executor import lower
from thunder_fn.interpreters.checkpoint.cost import bytes_of, live_bytes
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import ops
from thunder_fn.ir.equations import last_uses
from thunder_fn.ir.symbols import hint_of
from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace, Type, map_arg, type_of_value
from thunder_fn.structured.cond import COND, SWITCH
from thunder_fn.structured.shared.scan_parts import SCAN, Loop
from thunder_fn.structured.shared.while_parts import WHILE, While


def scratch_of(equation: Equation, *, has_lists: bool = True) -> int:
    """The bytes that an equation needs while it runs, beside its results, as far as that is known.

    Args:
        has_lists: a scan keeps what its steps give in lists, and stacks them in the end; compiled
            ones do not.
    """
    match equation.op.kind:
        case "leaf":
            args = tuple(_plain(map_arg(lambda var: var.type, arg)) for arg in equation.args)
            return kernel_scratch(equation.op.name, args, equation.output_types)
        case "structured":
            return _inner_peak(equation, has_lists)
        case "composite":
            return 0


def _inner_peak(equation: Equation, has_lists: bool) -> int:
    """The bytes that a step of a loop needs beside its carries, or the branch of a choice beside
    its results.
    """
    if equation.op == SCAN:
        loop = Loop.of(equation)
        kept = (
            sum(bytes_of(var.type) for var in equation.outputs[loop.num_carry :])
            if has_lists
            else 0
        )
        return kept + peak_of(equation.body, loop.num_consts, loop.num_carry)
    if equation.op == WHILE:
        test, body = equation.bodies
        num_consts = While.of(equation).num_consts
        return max(peak_of(test), peak_of(body, num_consts, len(equation.outputs)))
    inside = max(map(peak_of, equation.bodies), default=0)
    results = (
        sum(bytes_of(var.type) for var in equation.outputs) if equation.op in (COND, SWITCH) else 0
    )
    return max(0, inside - results)


def _plain(arg: Any) -> Any:
    return arg.value if isinstance(arg, Literal) else arg


def on_tensors(name: str, args: tuple[Any, ...], results: Sequence[torch.Tensor]) -> int:
    """Compute `kernel_scratch` of a call with tensors, whose layout is known: images that are
    channels last are not copied.
    """
    if name in _CONVOLUTIONS and all(map(_is_channels_last, args[:2])):
        weight, times = _CONVOLUTIONS[name]
        return times * args[weight].nbytes
    types = tuple(type_of_value(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
    return kernel_scratch(name, types, list(map(type_of_value, results)))


_CONVOLUTIONS = {"aten.convolution.default": (1, 1), "aten.convolution_backward.default": (2, 2)}
"""The position of the weight, and how often oneDNN makes it anew for images that are channels
last.
"""


def _is_channels_last(image: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return image.dim() in formats and image.is_contiguous(memory_format=formats[image.dim()])


def kernel_scratch(name: str, args: tuple[Any, ...], results: Sequence[Type]) -> int:
    """The bytes that PyTorch's CPU kernels allocate beside their results, and give back; zero where
    nothing is known.

    oneDNN computes convolutions in layouts of its own: operands and results are there twice for a
    while.

    Args:
        args: types in place of tensors.
    """
    if not args or not isinstance(args[0], TensorType) or args[0].device.type != "cpu":
        return 0
    match name:
        case "aten.native_batch_norm_backward.default":
            return bytes_of(results[0])  # the gradient is made twice
        case "aten.convolution.default":
            copies, result = _reordered(args[0]) + bytes_of(args[1]), bytes_of(results[0])
            return copies + result if args[6] else max(copies, result)
        case "aten.convolution_backward.default":
            copies = bytes_of(args[0]) + _reordered(args[1])
            return copies + bytes_of(results[0]) if args[7] else copies
        case "aten.mkldnn_rnn_layer.default" | "aten.mkldnn_rnn_layer_backward.default":
            return _lstm_scratch(*args[:3])
        case _:
            return 0


def _lstm_scratch(x: TensorType, w: TensorType, r: TensorType) -> int:
    """oneDNN's copies of an LSTM layer's weights and the gates of all steps, whose rows it pads,
    and a workspace.
    """
    steps, batch, width, gates, hidden = map(hint_of, (*x.shape, w.shape[0], r.shape[1]))
    row = math.ceil(gates / 16) * 16
    row += 16 if row % 256 == 0 else 0
    return x.dtype.itemsize * (gates + row * (width + hidden + steps * batch)) + 12_856


def _reordered(type: Type) -> int:
    """The bytes of oneDNN's copy of an image; none for a few channels, which it reads as they
    are.
    """
    is_blocked = (
        isinstance(type, TensorType) and len(type.shape) > 1 and type.shape[1] not in range(1, 8)
    )
    return bytes_of(type) if is_blocked else 0


def peak_of(trace: Trace, num_consts: int = 0, num_carry: int = 0) -> int:
    """The most bytes that live at a time of what a trace computes, by the torch executor.

    Args:
        num_consts, num_carry: of a loop's step, which may run in the memory of its carries.
    """
    trace = claim(dce(trace), below_autograd=True).trace
    carries = private_carries(trace, num_consts, num_carry)
    in_place, last = plan_reuse(trace, carries).in_place, last_uses(trace)
    buffers: dict[int, int] = {}  # of variables; what has none lies in memory of the caller
    spans = list[list[int]]()  # of buffers: born, freed after, bytes
    for position, equation in enumerate(trace.equations):
        shares = position in in_place or ops.is_view(equation.op)
        homes = overwritten(equation) if position in in_place else equation.operands[:1]
        for place, var in enumerate(equation.outputs):
            if not shares:
                buffers[var.index] = len(spans)
                spans.append([position, position, bytes_of(var.type)])
            elif homes and (home := homes[min(place, len(homes) - 1)].index) in buffers:
                buffers[var.index] = buffers[home]
            if var.index in buffers:
                span = spans[buffers[var.index]]
                span[1] = max(span[1], last[var.index])
    live = live_bytes(((born, end, size) for born, end, size in spans), len(trace.equations))
    inside = (scratch_of(e) if e.op.kind == "structured" else 0 for e in trace.equations)
    return max(map(operator.add, live, inside), default=0)


def taken_on_fakes(
    mode: Any, claimed: Claimed, equation: Equation, inputs: Sequence[Any], given: tuple[int, ...]
) -> tuple[tuple[Any, ...], int] | None:
    """The results of an executor for an equation, on tensors without values, and its allocations
    beside them.

    It may write to the inputs that are `given`, by place. None if nobody knows without running it.
    """
    run = dry_run_of(claimed, equation, given)
    if run is None or not all(isinstance(value, torch.Tensor) for value in inputs):
        return None
    try:
        results, peak = internals.footprint(mode, run, inputs, on_tensors)
        kept = {internals.storage_id(value): value.untyped_storage().nbytes() for value in results}
        known = {internals.storage_id(value) for value in inputs}
        return results, max(
            0, peak - sum(size for storage, size in kept.items() if storage not in known)
        )
    except Exception:  # noqa: BLE001  # it takes values, or what compiles it does not take the region
        return None


# ---- executors on tensors without values ----


@runtime_checkable
class HasDryRun(Protocol):
    """A compiled region that can say what it allocates.

    Law: on tensors without values `dry_run` allocates, keeps and frees the same memory as a call on
        tensors with values.
    """

    def dry_run(self, *inputs: Any) -> tuple[Any, ...]:
        """The outputs, tensors without values like the inputs."""
        ...


def dry_run_of(
    claimed: Claimed, equation: Equation, given: tuple[int, ...] = ()
) -> Callable[..., tuple[Any, ...]] | None:
    """The function that runs a claimed equation on tensors without values.

    It may write to the operands that it is `given`, by place.

    None for code that is not PyTorch calls to the last, such as an operator's `fn`: its effect is
    unknown.
    """
    claim = claimed.claim_of(equation)
    region = claim.closed_region
    if (
        claim.numbers
        or equation.kwargs
        or region is None
        or not isinstance(claim.executor, FusionExecutor)
    ):
        return None
    run = claim.executor.known(region)
    if run is None:  # it could not be compiled
        return _on_torch(region)
    run = donating(run.run if isinstance(run, CheckedRegion) else run, given)
    if isinstance(run, HasDryRun):
        return run.dry_run
    is_ours = isinstance(run, types.FunctionType) and run.__code__.co_filename.startswith(
        "<thunder_fn"
    )
    return run if is_ours else None


def _on_torch(region: Trace) -> Callable[..., tuple[Any, ...]]:
    return lower(region).run
