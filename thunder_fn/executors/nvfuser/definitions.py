"""From a region to an nvFuser definition, and how a program calls it.

A definition is written for the dtypes, sizes, strides and devices of its inputs, and is kept with the kernels that
nvFuser compiles for it: `Definitions` has those of all programs, equal ones once, and forgets what was not called for
longest.

Outputs lie in memory as eager's do. Views at a region's end (`peeled`) are PyTorch's, so that what shares memory in
eager shares it here, and nothing else does; the rest gets eager's strides.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from thunder_fn import ops, torch_internals as internals, torch_internals_inductor as inductor_internals
from thunder_fn.derive import alone, decomposition
from thunder_fn.errors import RegionWarning, located
from thunder_fn.executors.compiled.codegen import Strides, closed_region
from thunder_fn.executors.nvfuser.writer import EMITTERS, Library, Operand, Writer
from thunder_fn.executors.tidy import drop_dead
from thunder_fn.executors.torch_executor import lower
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.simplify import inline_into
from thunder_fn.trace import Atom, Equation, TensorType, Trace, TraceBuilder, Var, canonical, static_shape

Run = Callable[..., tuple[Any, ...]]


# ---- the region as nvFuser's ops ----


def decomposed(trace: Trace) -> Trace:
    """The trace with PyTorch's decompositions in place of ops that nothing writes, and of theirs in turn."""
    if all(equation.op.name in EMITTERS for equation in trace.equations):
        return trace
    builder = TraceBuilder(trace.name)
    env: dict[int, Atom] = {var.index: builder.input(var.type) for var in trace.inputs}
    for constant in trace.constants:
        env[constant.var.index] = builder.constant(constant.tensor, constant.var.type, owned=constant.owned)
    for equation in trace.equations:
        parts = None if equation.op.name in EMITTERS else decomposition(alone(equation))
        if parts is None:
            results = builder.copy(equation, lambda var: env[var.index])
        else:
            results = inline_into(builder, decomposed(parts), tuple(env[var.index] for var in equation.operands))
        env.update((var.index, atom) for var, atom in zip(equation.outputs, results, strict=True))
    outputs = tuple(env[atom.index] if isinstance(atom, Var) else atom for atom in trace.outputs)
    return builder.build(outputs)


def peeled(region: Trace) -> tuple[Trace, Trace]:
    """A region in two: what computes, and the views at its end, which take the region's inputs and then what was computed.

    Law: ``evaluate(views, (*xs, *evaluate(kernel, xs)))`` is ``evaluate(region, xs)``.
    """
    wanted = {atom.index for atom in region.outputs if isinstance(atom, Var)}
    late = list[Equation]()
    for equation in reversed(region.equations):
        if ops.is_view(equation.op) and any(var.index in wanted for var in equation.outputs):
            late.insert(0, equation)
            wanted |= {var.index for var in equation.operands}
    made = {var.index for equation in late for var in equation.outputs} | {var.index for var in region.inputs}
    read = [var for equation in late for var in equation.operands]
    read += [atom for atom in region.outputs if isinstance(atom, Var)]
    bases = tuple({var.index: var for var in read if var.index not in made}.values())
    kernel, _ = drop_dead(canonical(region.inputs, region.equations, bases, name=region.name))
    return kernel, canonical((*region.inputs, *bases), tuple(late), region.outputs, name=region.name)


# ---- definitions ----


@dataclass(frozen=True, slots=True)
class Definition:
    """A closed definition: which inputs it takes, and the strides that its outputs are to have."""

    fusion: Any
    used: tuple[int, ...]
    strides: tuple[Strides, ...]
    device: torch.device | None

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        options = {} if self.device is None else {"device": self.device}
        outputs = self.fusion.execute([inputs[position] for position in self.used], **options)
        taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        return [_settled(tensor, strides, taken) for tensor, strides in zip(outputs, self.strides, strict=True)]


def _settled(tensor: torch.Tensor, strides: Strides, taken: set[int]) -> torch.Tensor:
    """The tensor in memory of its own, with these strides: nvFuser may return an input's memory, or other strides."""
    place, shape = tensor.untyped_storage().data_ptr(), tensor.shape
    lies_so = all(size == 1 or a == b for size, a, b in zip(shape, tensor.stride(), strides, strict=True))
    if place in taken or not lies_so:
        tensor = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    elif tensor.stride() != strides:
        tensor = tensor.as_strided(shape, strides)
    taken.add(tensor.untyped_storage().data_ptr())
    return tensor


def define(library: Library, region: Trace, strides: Sequence[Strides], device: str) -> Definition:
    """Write a region of ops that have emitters.

    Args:
        region: without constants, every output computed in it.
        strides: of its inputs.
        device: the type of device that nvFuser works on; a tensor without dims may be on the CPU beside.
    """
    read = {var.index for equation in region.equations for var in equation.operands}
    used = tuple(position for position, var in enumerate(region.inputs) if var.index in read)
    fusion, env = library.FusionDefinition(), dict[int, Any]()
    with fusion:
        writer = Writer(fusion, library.DataType)
        for position in used:
            var = region.inputs[position]
            env[var.index] = _input(library, fusion, writer, var.type, strides[position], device)
        for equation in region.equations:
            results = writer.equation(equation, lambda var: env[var.index])
            env.update((var.index, val) for var, val in zip(equation.outputs, results, strict=True))
        given, eager = {id(env[region.inputs[position].index]) for position in used}, output_strides(region, strides)
        for atom, wanted in zip(region.outputs, eager, strict=True):
            assert isinstance(atom, Var), "what is no variable is not computed"
            fusion.add_output(_output(library, writer, Operand(env[atom.index], _tensor(atom.type)), wanted, given))
    first = _tensor(region.output_types[0]).device
    on_device = any(_tensor(region.inputs[position].type).device.type == device for position in used)
    return Definition(fusion, used, eager, None if on_device else first)


def _tensor(type: Any) -> TensorType:
    assert isinstance(type, TensorType), "regions take and give tensors"
    return type


def _input(library: Library, fusion: Any, writer: Writer, type: Any, strides: Strides, device: str) -> Any:
    shape = static_shape(_tensor(type))
    contiguity, order = library.compute_tensor_descriptor(shape, strides)
    return fusion.define_tensor(
        shape=list(shape),
        contiguity=contiguity,
        dtype=writer.dtype(type.dtype),
        is_cpu=type.device.type == "cpu" and device != "cpu",
        stride_order=order,
    )


def _output(library: Library, writer: Writer, x: Operand, strides: Strides, given: set[int]) -> Any:
    """What leaves the definition: no input as it is, and in the order of eager's strides."""
    val = writer.ops.set(x.val) if id(x.val) in given else x.val
    _, order = library.compute_tensor_descriptor(x.shape, strides)
    return writer.ops.stride_order(val, order) if list(order) != list(range(x.rank))[::-1] else val


def output_strides(region: Trace, strides: Sequence[Strides]) -> tuple[Strides, ...]:
    """The strides that eager gives the region's outputs."""
    types = [_tensor(var.type) for var in region.inputs]
    with inductor_internals.fakes_of(()):
        fakes = [
            torch.empty_strided(static_shape(type), given, dtype=type.dtype, device=type.device)
            for type, given in zip(types, strides, strict=True)
        ]
        return tuple(value.stride() for value in evaluate(region, fakes))


# ---- the cache, and calls ----


class Kept:
    """A definition that is kept. It has worked once it was called, since nvFuser compiles at the first call."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.works: bool | None = None


class Definitions:
    """Definitions by region and strides: so many, those that were called last. Safe to use from many threads."""

    def __init__(self, size: int = 1024) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Trace, tuple[Strides, ...]], Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, region: Trace, strides: tuple[Strides, ...], make: Callable[[], Definition]) -> Kept:
        """What is kept for the key; made if nothing is."""
        key = region, strides
        with self._lock:
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = Kept(make())
                if len(self._known) > self.size:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            return known


class Region:
    """A region as a program calls it: defined when it is first called with inputs of some strides."""

    def __init__(self, library: Library, definitions: Definitions, trace: Trace, device: str) -> None:
        self.library, self.definitions, self.trace, self.device = library, definitions, trace, device
        closed, self.constants = closed_region(trace)
        kernel, views = peeled(closed)
        self.kernel, self.views = decomposed(kernel), lower(views, below_autograd=True).run

    @cached_property
    def on_torch(self) -> Run:
        """The region as the torch executor runs it."""
        return lower(self.trace, below_autograd=True).run

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        if internals.inside_torch_func():
            return self.on_torch(*inputs)
        given = (*inputs, *self.constants)
        strides = tuple(tensor.stride() for tensor in given)
        kept = self.definitions.find(self.kernel, strides, lambda: self.define(strides))
        if kept.works is False:
            return self.on_torch(*inputs)
        try:
            results = kept.definition(given)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if kept.works:
                raise
            kept.works = False
            self.warn(error)
            return self.on_torch(*inputs)
        kept.works = True
        return self.views(*given, *results)

    def define(self, strides: tuple[Strides, ...]) -> Definition:
        """The kernel, for inputs with these strides."""
        return define(self.library, self.kernel, strides, self.device)

    def warn(self, error: RuntimeError) -> None:
        """Say that nvFuser could not compile the region."""
        source = next((equation.source for equation in self.trace.equations if equation.source is not None), None)
        what = f"nvfuser: {self.trace.name} could not be compiled and runs on the torch executor: {error}"
        fix = "The results are right, but slower. Leave the nvfuser executor out to run without this warning."
        warnings.warn(located(what, source=source, fix=fix), RegionWarning, stacklevel=3)
