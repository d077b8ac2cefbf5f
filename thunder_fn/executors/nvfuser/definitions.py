"""nvFuser definitions of regions, and the calls that programs make of them.

A definition is written for the dtypes, sizes, strides and devices of its inputs, and is kept with
the kernels that nvFuser compiles for it. `Definitions` has those of all programs, equal ones once,
and forgets what was not called for longest.

Outputs lie in memory as eager's do. Views at a region's end (`peeled`) are PyTorch's, so that
tensors share memory here exactly if they do in eager. The rest gets eager's strides.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.errors import RegionWarning, located
from thunder_fn.executors.nvfuser.writer import EMITTERS, Library, Writer
from thunder_fn.executors.torchinductor.codegen import Strides, closed_region
from thunder_fn.extend.regions import alone, decomposition, drop_dead, evaluate, lower
from thunder_fn.ir import ops
from thunder_fn.ir.symbols import hint_of
from thunder_fn.ir.trace import (
    Atom,
    Dim,
    Equation,
    Expr,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
    cut,
    static_shape,
)
from thunder_fn.ir.walking import inline_into, put, rewritten
from thunder_fn.torch_internals import Numbers, inductor as inductor_internals

Run = Callable[..., tuple[Any, ...]]


# ---- the region as nvFuser's ops ----


def decomposed(trace: Trace) -> Trace:
    """The trace with PyTorch's decompositions in place of ops that nothing writes, and of theirs
    in turn.
    """
    if all(equation.op.name in EMITTERS for equation in trace.equations):
        return trace
    return rewritten(trace, _decompose)


def _decompose(
    builder: TraceBuilder, equation: Equation, operands: tuple[Atom, ...]
) -> tuple[Atom, ...]:
    parts = None if equation.op.name in EMITTERS else decomposition(alone(equation))
    return (
        put(builder, equation, operands)
        if parts is None
        else inline_into(builder, decomposed(parts), operands)
    )


def peeled(region: Trace) -> tuple[Trace, Trace]:
    """A region in two: the computation, and the views at its end, which take the region's inputs
    and then the computed values.

    Law: ``evaluate(views, (*xs, *evaluate(kernel, xs)))`` is ``evaluate(region, xs)``.
    """
    wanted = {atom.index for atom in region.outputs if isinstance(atom, Var)}
    late = list[Equation]()
    for equation in reversed(region.equations):
        if ops.is_view(equation.op) and any(var.index in wanted for var in equation.outputs):
            late.insert(0, equation)
            wanted |= {var.index for var in equation.operands}
    made = {var.index for equation in late for var in equation.outputs} | {
        var.index for var in region.inputs
    }
    read = [var for equation in late for var in equation.operands]
    read += [atom for atom in region.outputs if isinstance(atom, Var)]
    bases = tuple({var.index: var for var in read if var.index not in made}.values())
    kernel, _ = drop_dead(cut(region, outputs=bases))
    return kernel, cut(region, inputs=(*region.inputs, *bases), equations=late)


# ---- definitions ----


@dataclass(frozen=True, slots=True)
class Definition:
    """A closed definition: the inputs and the symbolic numbers that it takes, and the strides
    that its outputs are to have.
    """

    fusion: Any
    used: tuple[int, ...]
    scalars: tuple[Expr, ...]
    strides: tuple[tuple[Dim, ...], ...]
    device: torch.device | None

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert not self.scalars, "a definition with symbols is called through `Sized`"
        return self.run(inputs, (), cast("tuple[Strides, ...]", self.strides))

    def run(
        self, inputs: Sequence[Any], scalars: Sequence[Any], output_strides: Sequence[Strides]
    ) -> list[torch.Tensor]:
        """Compute the results for these inputs and these values of the symbolic numbers."""
        options = {} if self.device is None else {"device": self.device}
        outputs = self.fusion.execute(
            [*(inputs[position] for position in self.used), *scalars], **options
        )
        taken = {inputs[position].untyped_storage().data_ptr() for position in self.used}
        return [
            _settled(tensor, strides, taken)
            for tensor, strides in zip(outputs, output_strides, strict=True)
        ]


def _settled(tensor: torch.Tensor, strides: Strides, taken: set[int]) -> torch.Tensor:
    """The tensor in memory of its own, with these strides: nvFuser may return an input's memory,
    or other strides.
    """
    place, shape = tensor.untyped_storage().data_ptr(), tensor.shape
    lies_so = all(
        size == 1 or a == b for size, a, b in zip(shape, tensor.stride(), strides, strict=True)
    )
    if place in taken or not lies_so:
        tensor = torch.empty_strided(
            shape, strides, dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    elif tensor.stride() != strides:
        tensor = tensor.as_strided(shape, strides)
    taken.add(tensor.untyped_storage().data_ptr())
    return tensor


def define(
    library: Library,
    region: Trace,
    strides: Sequence[tuple[Dim, ...]],
    device: str,
    eager: Sequence[tuple[Dim, ...]],
    numbers: Numbers | None = None,
) -> Definition:
    """Write a region of ops that have emitters.

    Args:
        region: without constants, every output computed in it.
        strides: of its inputs.
        device: the type of device that nvFuser works on; a tensor without dims may be on the CPU
            beside.
        eager: the strides that eager gives the region's outputs.
        numbers: what knows of the region's symbols, and is told of what is decided about them.
    """
    read = {var.index for equation in region.equations for var in equation.operands}
    used = tuple(position for position, var in enumerate(region.inputs) if var.index in read)
    fusion, env = library.FusionDefinition(), dict[int, Any]()
    with fusion:
        writer = Writer(fusion, library.DataType, numbers)
        for position in used:
            var = region.inputs[position]
            env[var.index] = _input(library, fusion, writer, var.type, strides[position], device)
        for equation in region.equations:
            results = writer.equation(equation, lambda var: env[var.index])
            env.update((var.index, val) for var, val in zip(equation.outputs, results, strict=True))
        given = {id(env[region.inputs[position].index]) for position in used}
        for atom, wanted in zip(region.outputs, eager, strict=True):
            assert isinstance(atom, Var), "what is no variable is not computed"
            fusion.add_output(
                _output(library, writer, env[atom.index], _tensor(atom.type), wanted, given)
            )
    first = _tensor(region.output_types[0]).device
    on_device = any(
        _tensor(region.inputs[position].type).device.type == device for position in used
    )
    return Definition(
        fusion, used, tuple(writer.scalars), tuple(eager), None if on_device else first
    )


def _tensor(type: Any) -> TensorType:
    assert isinstance(type, TensorType), "regions take and give tensors"
    return type


def _input(
    library: Library, fusion: Any, writer: Writer, type: Any, strides: tuple[Dim, ...], device: str
) -> Any:
    """An input of the definition. A layout that it states for sizes that are symbols holds for
    all of them.
    """
    contiguity, order = library.compute_tensor_descriptor(
        hint_of(_tensor(type).shape), hint_of(strides)
    )
    val = fusion.define_tensor(
        shape=[-1 if isinstance(size, Expr) else size for size in type.shape],
        contiguity=contiguity,
        dtype=writer.dtype(type.dtype),
        is_cpu=type.device.type == "cpu" and device != "cpu",
        stride_order=order,
    )
    for dim, size in enumerate(type.shape):
        if isinstance(size, Expr):
            writer.know(size, val.size(dim))
    return val


def _output(
    library: Library,
    writer: Writer,
    val: Any,
    type: TensorType,
    strides: tuple[Dim, ...],
    given: set[int],
) -> Any:
    """An operand as it leaves the definition: no input as it is, and in the order of eager's
    strides.
    """
    val = writer.ops.set(val) if id(val) in given else val
    _, order = library.compute_tensor_descriptor(hint_of(type.shape), hint_of(strides))
    return (
        writer.ops.stride_order(val, order)
        if list(order) != list(range(len(type.shape)))[::-1]
        else val
    )


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
    """A definition that is kept. It has worked once it was called, since nvFuser compiles at the
    first call.
    """

    def __init__(self, definition: Callable[..., Any]) -> None:
        self.definition = definition
        self.works: bool | None = None

    def __call__(self, warn: Callable[[RuntimeError], None], *given: Any) -> Any:
        """Run the definition; None where nvFuser could not compile it, which is said once."""
        if self.works is False:
            return None
        try:
            results = self.definition(*given)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.works:
                raise
            self.works = False
            warn(error)
            return None
        self.works = self.works or results is not None
        return results


class Definitions:
    """The definitions that were called last, by region and layout. Safe to use from many
    threads.
    """

    def __init__(self, size: int = 1024) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Trace, tuple[Any, ...]], Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def find(
        self, region: Trace, layout: tuple[Any, ...], make: Callable[[], Callable[..., Any]]
    ) -> Kept:
        """Return the definition for the key, made if there is none."""
        key = region, layout
        with self._lock:
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = Kept(make())
                if len(self._known) > self.size:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            return known


class Region:
    """A region as a program calls it: defined when it is first called with inputs of some
    strides.
    """

    def __init__(
        self, library: Library, definitions: Definitions, trace: Trace, device: str
    ) -> None:
        self.library = library
        self.definitions = definitions
        self.trace = trace
        self.device = device
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
        results = kept(self.warn, given)
        return self.on_torch(*inputs) if results is None else self.views(*given, *results)

    def define(self, strides: tuple[Strides, ...]) -> Definition:
        """The kernel, for inputs with these strides."""
        return define(
            self.library, self.kernel, strides, self.device, output_strides(self.kernel, strides)
        )

    def warn(self, error: RuntimeError) -> None:
        """Say that nvFuser could not compile the region."""
        source = next(
            (equation.source for equation in self.trace.equations if equation.source is not None),
            None,
        )
        what = (
            f"nvfuser: {self.trace.name} could not be compiled and runs on the torch executor:"
            f" {error}"
        )
        fix = (
            "The results are right, but slower. Leave the nvfuser executor out to run without this"
            " warning."
        )
        warnings.warn(located(what, source=source, fix=fix), RegionWarning, stacklevel=4)
