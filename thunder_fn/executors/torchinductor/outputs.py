"""Layouts of a region's outputs in memory: as eager's, view for view.

    v1 = aten.exp.default(v0)                  what Inductor is asked for: v1
    v2, v3 = aten.split.Tensor(v1, 32, 1)
    return (v2, v3)                            return (reinterpret_tensor(v1, ...),
                                                       reinterpret_tensor(v1, ...))

Readers of an output are compiled for the strides that eager gives it. Inductor is free to make two
slices of an intermediate dense. It may hand out one tensor for a value and its clone, or an input
for a value that is equal to it. So it is asked only for what lies in memory of its own; views of
that, and of inputs, are made of it. Outputs that Inductor lays out otherwise than eager are copied
into eager's layout.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from thunder_fn.ir.constraints import number_of
from thunder_fn.ir.equations import bound
from thunder_fn.ir.trace import Dim, TensorType, Trace, Var, as_dim, canonical
from thunder_fn.torch_internals import extent, storage_id

Sizes = tuple[Dim, ...]


class RegionError(Exception):
    """A region cannot be compiled: the reason, and the fix."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a tensor. The offset is from the first element of the viewed tensor."""

    sizes: Sizes
    strides: Sizes
    dtype: torch.dtype
    device: str
    offset: Dim = 0


@dataclass(frozen=True, slots=True)
class Output:
    """An output: all or a view of an input, or of what the code computes, by place. No layout:
    it is no tensor.
    """

    place: int
    is_input: bool
    layout: Layout | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The tensors that the code computes, each in memory of its own; their layouts; and the
    region's outputs in terms of these.
    """

    region: Trace
    layouts: tuple[Layout | None, ...]
    outputs: tuple[Output, ...]

    @property
    def inputs_shown(self) -> frozenset[int]:
        """The inputs, by place, that outputs share memory with."""
        return frozenset(output.place for output in self.outputs if output.is_input)


def plan_outputs(region: Trace, values: Sequence[Any]) -> Plan:
    """Find the tensor that each output is a view of.

    Args:
        region: without constants.
        values: what eager gives for each variable, on tensors without values.

    Raises:
        RegionError: a view reaches beyond what it is a view of.
    """
    first: dict[int, int] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            first.setdefault(storage_id(value), index)
    count = len(region.inputs)
    made, outputs = dict[Any, int](), list[Output]()
    for atom in region.outputs:
        value = values[atom.index] if isinstance(atom, Var) else None
        if not isinstance(value, torch.Tensor):
            outputs.append(Output(made.setdefault(atom, len(made)), False, None))
            continue
        base = first[storage_id(value)]
        is_input = base < count
        place = base if is_input else made.setdefault(_variable(region, base), len(made))
        outputs.append(Output(place, is_input, _layout(value, values[base])))
    atoms = tuple(made)
    own = (values[atom.index] if isinstance(atom, Var) else None for atom in atoms)
    layouts = tuple(
        _layout(value, value) if isinstance(value, torch.Tensor) else None for value in own
    )
    asked = canonical(region.inputs, region.equations, atoms, (), region.constraints, region.name)
    return Plan(asked, layouts, tuple(outputs))


def _variable(region: Trace, index: int) -> Var:
    return next(var for var in bound(region.equations) if var.index == index)


def _layout(value: torch.Tensor, base: torch.Tensor) -> Layout:
    """The layout of a value, relative to a tensor that begins its storage or is an input."""
    sizes, strides = (tuple(map(as_dim, found)) for found in (value.shape, value.stride()))
    begin: Any = base.storage_offset() * base.itemsize // value.itemsize
    offset = as_dim(value.storage_offset() - begin)
    numbers = (*sizes, *strides, offset, *map(as_dim, (*base.shape, *base.stride())))
    is_known = all(isinstance(number, int) for number in numbers) and value.numel() > 0
    if is_known and (offset < 0 or offset * value.itemsize + _bytes(value) > _bytes(base)):
        raise RegionError("a view of memory beyond the tensor that it is taken of")
    return Layout(sizes, strides, value.dtype, value.device.type, offset)


def _bytes(value: torch.Tensor) -> int:
    return extent(value.shape, value.stride()) * value.itemsize


# ---- the text ----


def returned(
    body: Sequence[ast.stmt],
    inputs: Sequence[str],
    plan: Plan,
    strides: Sequence[Sizes | None],
    donated: Collection[int],
    symbols: Mapping[str, str],
) -> list[ast.stmt]:
    """The body of Inductor's function, which returns what the plan asks for, with the region's
    outputs in its place.

    Args:
        strides: of each tensor that the code computes, as Inductor lays it out.
        donated: inputs, by place, whose memory may hold what is computed.
        symbols: the parameters that are symbols' values, by the symbols' names.

    Raises:
        RegionError: the body does not end with `return (...)`.
    """
    *front, last = body
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Tuple):
        raise RegionError("Inductor's function does not end with `return (...)`")
    homes = _Homes(front)
    taken = {name for place, name in enumerate(inputs) if place not in donated}
    lines, made = list[str](), list[_Made]()
    for number, (value, layout, found) in enumerate(
        zip(last.value.elts, plan.layouts, strides, strict=True)
    ):
        home = homes.of(value)
        if layout is None or found is None:
            made.append(_Made(ast.unparse(value), None))
        elif home in taken or not _is_alike(layout, found):
            lines.append(
                f"out{number} = empty_strided_{layout.device}({_where(layout)}, {layout.dtype})"
            )
            lines.append(f"out{number}.copy_({ast.unparse(value)})")
            made.append(_Made(f"out{number}", layout))
        else:
            made.append(_Made.of(value, replace(layout, strides=found), home in inputs))
        taken.add(home or "")
    given = [
        _Made(name, _layout_of_input(var))
        for name, var in zip(inputs, plan.region.inputs, strict=False)
    ]
    shown, results = set[str](), list[str]()
    for output in plan.outputs:
        base = (given if output.is_input else made)[output.place]
        results.append(base.text(output.layout, not output.is_input and base.name not in shown))
        shown.add(base.name)
    text = "\n".join((*lines, f"return ({''.join(f'{result}, ' for result in results)})"))
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    bound = [
        f"{symbol} = {name}"
        for symbol, name in symbols.items()
        if symbol in used - homes.names.keys()
    ]
    kept = {name for name in inputs if name in used | set(symbols.values())}
    front = [statement for statement in front if not _deletes(statement, kept)]
    return [*front, *ast.parse("\n".join((*bound, text))).body]


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor of the text; the beginning of the planned tensor in it, and its layout if it is
    just that.
    """

    name: str
    layout: Layout | None
    begin: str = "0"
    is_all: bool = True

    @staticmethod
    def of(value: ast.expr, layout: Layout, is_given: bool) -> _Made:
        """Return an output as Inductor is to return it: a tensor, or a view of one that need not
        be made twice.
        """
        match value:
            case ast.Call(
                func=ast.Name(id="reinterpret_tensor"), args=[ast.Name(id=name), _, _, begin]
            ):
                return _Made(name, layout, ast.unparse(begin), is_all=False)
            case _:
                return _Made(ast.unparse(value), layout, is_all=not is_given)

    def text(self, wanted: Layout | None, is_first: bool) -> str:
        """An output with a layout: the tensor itself where it is that and nobody has it, else a
        view of it.
        """
        if (
            wanted is None
            or self.layout is None
            or (wanted == self.layout and self.is_all and is_first)
        ):
            return self.name
        if wanted.dtype == self.layout.dtype:
            begin = str(wanted.offset) if self.begin == "0" else f"{self.begin} + {wanted.offset}"
            return f"reinterpret_tensor({self.name}, {_where(wanted)}, {begin})"
        size, other = self.layout.dtype.itemsize, wanted.dtype.itemsize
        begin = (
            f"({self.name}.storage_offset() + {self.begin}) * {size} // {other} + {wanted.offset}"
        )
        empty = f"torch.empty(0, dtype={wanted.dtype}, device={wanted.device!r})"
        return f"{empty}.set_({self.name}.untyped_storage(), {begin}, {_where(wanted)})"


def _layout_of_input(var: Var) -> Layout | None:
    return (
        Layout((), (), var.type.dtype, var.type.device.type)
        if isinstance(var.type, TensorType)
        else None
    )


def _deletes(statement: ast.stmt, names: Collection[str]) -> bool:
    match statement:
        case ast.Delete(targets=[ast.Name(id=name)]):
            return name in names
        case _:
            return False


def _is_alike(layout: Layout, strides: Sizes) -> bool:
    """Test whether a tensor with these strides has its elements where the layout says."""
    return all(
        size == 1 or mine == its or _is_zero(mine, its)
        for size, mine, its in zip(layout.sizes, layout.strides, strides, strict=True)
    )


def _is_zero(mine: Dim, its: Dim) -> bool:
    """Test whether two expressions are equal for all values."""
    first, second = map(number_of, (mine, its))
    return sympy.simplify(first - second) == 0


class _Homes:
    """The memory that values lie in, by the name of the allocation or argument."""

    def __init__(self, statements: Sequence[ast.stmt]) -> None:
        self.names: dict[str, str] = {}
        for statement in statements:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.names[name] = self.of(value) or name
                case _:
                    pass

    def of(self, value: ast.expr) -> str | None:
        """The name; None for a computed value, which has memory of its own."""
        match value:
            case ast.Name(id=name):
                return self.names.get(name, name)
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[source, *_]):
                return self.of(source)
            case _:
                return None


def _where(layout: Layout) -> str:
    return f"{_text(layout.sizes)}, {_text(layout.strides)}"


def _text(dims: Sizes) -> str:
    return f"({''.join(f'{dim}, ' for dim in dims)})"
