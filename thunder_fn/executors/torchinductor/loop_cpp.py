"""Loops in C++: scan and while_loop around a step that Inductor compiled.

    for (int64_t n = 0; n < 512; ++n) {
        const int64_t i = n;
        const uint8_t* in2 = x0 + i * 4096;
        uint8_t* buf0 = y0 + i * 4096;
        multiply<float>(...);
        step::k0::kernel((float*)(buf0));
        in1 = buf0;
    }

Inductor writes the step as Python that calls kernels and matrix products (`codegen.py`). That text
is translated here, statement by statement. Buffers become offsets into one piece of memory, or
places in the outputs. Kernels are called with pointers, and matrix products go to the BLAS that
PyTorch brings. A step of a loop allocates nothing and copies nothing that its kernels do not. A
step that calls something else is refused.

Inductor's own C++ wrapper is not used: it would allocate and dispatch in each step. The loop
releases the GIL and looks for Ctrl-C.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from thunder_fn.executors.torchinductor.codegen import Code, Kernel, Strides
from thunder_fn.executors.torchinductor.cpp_text import INCLUDE, cpp
from thunder_fn.executors.torchinductor.loop_plan import (
    Plan,
    Rows,
    contiguous_strides,
    end_lines,
    header_line,
    is_contiguous,
    return_line,
    tensor_type,
)
from thunder_fn.extend.regions import Loop, While
from thunder_fn.ir.trace import Var, static_shape
from thunder_fn.torch_internals import extent, inductor as internals

ALIGNMENT = 64
SMALL = 2**18
"""The most multiplications of a matrix product that is written out."""
LONG = 256
"""Rows that make a sum's product long enough to take no notice of its beginning and end."""


class NotCpp(Exception):
    """A step that is more than kernels and matrix products."""


_C_TYPES = {torch.float32: "float", torch.float64: "double"}


@dataclass(frozen=True, slots=True)
class View:
    """The place of a step's tensor: a buffer, and its layout there."""

    base: str
    shape: tuple[int, ...]
    strides: Strides
    dtype: torch.dtype
    offset: int = 0

    @property
    def pointer(self) -> str:
        """The address of its first element."""
        return f"{self.base} + {self.offset * self.dtype.itemsize}" if self.offset else self.base


def in_cpp(plan: Plan, codes: Sequence[Code]) -> Code:
    """A loop in C++ around kernels and matrix products.

    Raises:
        NotCpp: a step has something else in it.
    """
    if any(code.constants for code in codes):
        raise NotCpp("tensors of its own")
    writer = _CppWriter(plan, codes)
    source = writer.source()
    arguments = [
        *map(str, plan.equation.operands[: plan.num_consts]),
        *(f"c{i}" for i in plan.kept),
    ]
    arguments += list(map(str, plan.xs))
    outputs = [f"o{i}" for i in range(len(plan.equation.outputs))]
    lines = [
        "import torch",
        "from thunder_fn.torch_internals.inductor import gemm_address",
        header_line(plan),
    ]
    lines += [f"    c{i} = {plan.carry[i]}.contiguous()" for i in plan.kept]
    for name, var in zip(outputs, plan.equation.outputs, strict=True):
        type = tensor_type(var)
        lines.append(
            f"    {name} = torch.empty({static_shape(type)}, dtype={type.dtype}, device='cpu')"
        )
    lines += [f"    o{i}.copy_({plan.carry[i]})" for i, _ in plan.sums]
    lines.append(
        f"    scratch = torch.empty({max(writer.size, 1)}, dtype=torch.uint8, device='cpu')"
    )
    gemm = f"gemm_address({next(iter(writer.gemms))})" if writer.gemms else "0"
    lines.append(f"    loop({', '.join([*arguments, *outputs, 'scratch'])}, {gemm})")
    lines += end_lines(plan, outputs[: plan.num_carry])
    lines.append(return_line(plan, outputs))
    types = ("const uint8_t*",) * len(arguments) + ("uint8_t*",) * (len(outputs) + 1) + ("int64_t",)
    return Code("\n".join(lines) + "\n", (("loop", Kernel(types, source)),), ())


class _CppWriter:
    """The writer of a loop: it gathers the memory of its buffers, and its matrix products."""

    def __init__(self, plan: Plan, codes: Sequence[Code]) -> None:
        self.plan, self.codes = plan, codes
        self.size = 0
        self.gemms: set[torch.dtype] = set()
        self.kernels: list[str] = []
        self.homes: dict[int, tuple[str, int]] = {}
        self.packed: dict[View, View] = {}
        widest = [left.shape[0] for _, products in plan.sums for left, _ in products]
        self.block = max(2, LONG // min(widest)) if widest else 1

    def source(self) -> str:
        plan, lines = self.plan, list[str]()
        first_x = plan.num_consts + len(plan.kept)
        if plan.is_scan:
            loop = Loop.of(plan.equation)
            lines.append(f"for (int64_t n = 0; n < {loop.steps}; ++n) {{")
            lines.append(f"const int64_t i = {f'{loop.steps - 1} - n' if loop.reverse else 'n'};")
            for number, (var, stride) in enumerate(zip(plan.xs, plan.x_strides, strict=True)):
                size = stride * tensor_type(var).dtype.itemsize
                lines.append(f"const uint8_t* in{first_x + number} = x{number} + i * {size};")
        else:
            steps = While.of(plan.equation).max_steps
            lines.append(f"for (int64_t n = 0; {'' if steps is None else f'n < {steps}'}; ++n) {{")
            lines.append("{")
            lines += _Statements(self, 0, self.scratch).lines()
            lines += ["if (!*reinterpret_cast<const bool*>(result0)) break;", "}"]
        body = _Statements(self, len(plan.steps) - 1, self.placed)
        lines += body.lines()
        for place, number in zip(plan.body.places, self.numbers, strict=False):
            size = _slice(plan.equation.outputs[number])
            if number >= plan.num_carry and self.homes.get(place) != (f"y{number}", size):
                lines.append(f"std::memcpy(y{number} + i * {size}, result{place}, {size});")
        lines += self.sums()
        lines += [
            f"in{plan.num_consts + at} = result{plan.body.places[at]};"
            for at in range(len(plan.kept))
        ]
        lines += ["if (running.interrupted(n)) return;", "}"]
        for at, number in enumerate(plan.kept):
            type = tensor_type(plan.carry[number])
            size = _bytes(static_shape(type), type.dtype)
            lines.append(f"std::memcpy(y{number}, in{plan.num_consts + at}, {size});")
        front = cpp(Path(__file__).parent, "loop.h")
        return "\n".join([front, *self.kernels, self.header(), *self.packing(), *lines, "}"])

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the loop's results that a step gives, in its order."""
        return (*self.plan.kept, *range(self.plan.num_carry, len(self.plan.equation.outputs)))

    def sums(self) -> Iterator[str]:
        """Write the products of the rows at the end of a block of steps."""
        plan = self.plan
        if not plan.sums:
            return
        loop = Loop.of(plan.equation)
        yield (
            f"if ({'i' if loop.reverse else '(i + 1)'} % {self.block} == 0 || n =="
            f" {loop.steps - 1}) {{"
        )
        yield f"const int64_t first = i - i % {self.block};"
        yield (
            f"const int64_t steps = std::min<int64_t>({self.block},"
            f" {loop.steps if loop.reverse else 'i + 1'} - first);"
        )
        for number, products in plan.sums:
            dtype = tensor_type(plan.carry[number]).dtype
            c = self.gemm_type(dtype)
            for left, right in products:
                (k, m), (_, n) = left.shape, right.shape
                a, b = (f"(const {c}*)({self.rows(rows, dtype)})" for rows in (left, right))
                yield (
                    f"multiply<{c}>(gemm, {m}, {n}, steps * {k}, 1, {a}, 1, {m}, {b}, {n}, 1, 1,"
                    f" ({c}*)(y{number}), {n});"
                )
        yield "}"

    def rows(self, rows: Rows, dtype: torch.dtype) -> str:
        """The address of the first row of a block of steps."""
        size = _bytes(rows.shape, dtype)
        if rows.of == "x":
            return f"x{rows.number} + first * {size}"
        home, slot = self.homes[self.plan.body.places[rows.number]]
        if slot != size:
            raise NotCpp("rows that are a part of a buffer")
        return f"{home} + first * {size}" if home.startswith("y") else home

    def gemm_type(self, dtype: torch.dtype) -> str:
        """The type that BLAS calls it, of which a loop has one."""
        if (
            dtype not in _C_TYPES
            or not internals.gemm_address(dtype)
            or {dtype} | self.gemms != {dtype}
        ):
            raise NotCpp(f"products of {dtype}")
        self.gemms.add(dtype)
        return _C_TYPES[dtype]

    def in_rows(self, view: View) -> View:
        """A matrix that is the same in each step, copied in front of the loop so that its rows
        lie together.
        """
        if view not in self.packed:
            base = self.scratch(None, _bytes(view.shape, view.dtype))
            self.packed[view] = View(base, view.shape, contiguous_strides(view.shape), view.dtype)
        return self.packed[view]

    def packing(self) -> Iterator[str]:
        """The copies in front of the loop."""
        for view, packed in self.packed.items():
            (m, n), (s0, s1), c = view.shape, view.strides, _C_TYPES[view.dtype]
            yield (
                f"fill<{c}>((const {c}*)({view.pointer}), {s0}, {s1}, ({c}*)({packed.base}), {n},"
                f" {m}, {n});"
            )

    def header(self) -> str:
        plan = self.plan
        names = [f"const uint8_t* in{i}" for i in range(plan.num_consts + len(plan.kept))] + [
            f"const uint8_t* x{i}" for i in range(len(plan.xs))
        ]
        names += [f"uint8_t* y{i}" for i in range(len(plan.equation.outputs))]
        return (
            f'extern "C" void kernel({", ".join([*names, "uint8_t* scratch", "int64_t gemm"])})'
            " {\nRunning running;"
        )

    def placed(self, result: int | None, size: int) -> str:
        """The place of a buffer.

        Results lie in their slice of the stack, unless they are a part of the buffer only. Rows of
        sums lie one after the other, carries in turns, others in the scratch memory.
        """
        if result is None:
            return self.scratch(None, size)
        plan = self.plan
        for place, number in zip(plan.body.places, self.numbers, strict=False):
            if (
                place == result
                and number >= plan.num_carry
                and _slice(plan.equation.outputs[number]) == size
            ):
                self.homes[result] = f"y{number}", size
                return f"y{number} + i * {size}"
        if result in plan.body.places[len(self.numbers) :]:
            start = self.scratch(None, size * self.block)
            self.homes[result] = start, size
            return f"{start} + i % {self.block} * {size}"
        first, second = self.scratch(None, size), self.scratch(None, size)
        return f"(n & 1 ? {first} : {second})"

    def scratch(self, result: int | None, size: int) -> str:
        """Reserve bytes of scratch memory."""
        start = self.size
        self.size += -(-size // ALIGNMENT) * ALIGNMENT
        return f"scratch + {start}"


def _slice(var: Var) -> int:
    """The number of bytes of a step's part of a stacked output."""
    type = tensor_type(var)
    return _bytes(static_shape(type)[1:], type.dtype)


def _bytes(shape: Sequence[int], dtype: torch.dtype, strides: Strides | None = None) -> int:
    strides = contiguous_strides(shape) if strides is None else strides
    return extent(shape, strides) * dtype.itemsize


class _Statements:
    """The statements of one step in C++."""

    def __init__(
        self, writer: _CppWriter, number: int, place: Callable[[int | None, int], str]
    ) -> None:
        self.writer, self.number, self.place = writer, number, place
        self.code, self.step = writer.codes[number], writer.plan.steps[number]
        self.views: dict[str, View] = {}
        self.bases: dict[str, int] = {}
        self.fixed = {f"in{number}" for number in range(writer.plan.num_consts)}
        self.found: list[str] = []

    def lines(self) -> list[str]:
        module = ast.parse(self.code.text)
        function = next(
            node
            for node in module.body
            if isinstance(node, ast.FunctionDef) and node.name == "region"
        )
        for name, kernel in self.code.kernels:
            source = kernel.source.replace(INCLUDE, "").replace('extern "C"', "static", 1)
            self.writer.kernels.append(
                f"namespace step{self.number} {{ namespace {name} {{\n{source}\n}} }}"
            )
        inputs = zip(function.args.args, self.step.trace.inputs, self.step.strides, strict=True)
        for position, (argument, var, strides) in enumerate(inputs):
            type = tensor_type(var)
            self.views[argument.arg] = View(
                f"in{position}", static_shape(type), strides, type.dtype
            )
        for statement in function.body:
            self.statement(statement)
        return [*self.buffers(), *self.found]

    def buffers(self) -> Iterator[str]:
        """The places of the buffers; a result's buffer lies among the results."""
        results = {view.base: position for position, view in enumerate(self.results)}
        if len(results) < len(self.results) or not results.keys() <= self.bases.keys():
            raise NotCpp("results that share memory")
        for base, size in self.bases.items():
            yield f"uint8_t* {base} = {self.place(results.get(base), size)};"
        for position, view in enumerate(self.results):
            if view.offset or not is_contiguous(view.shape, view.strides):
                raise NotCpp("a result that is a view")
            self.found.append(f"uint8_t* result{position} = {view.base};")

    def statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Delete():
                pass
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Name(id="empty_strided_cpu"), args=args),
            ):
                shape = ast.literal_eval(args[0])
                strides = ast.literal_eval(args[1])
                dtype = _dtype(args[2])
                base = f"s{self.number}_{name}"
                self.bases[base] = _bytes(shape, dtype, strides)
                self.views[name] = View(base, shape, strides, dtype)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.views[name] = self.view(value)
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=args, keywords=[])):
                self.found.append(self.kernel(name, args))
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) as call
            ):
                self.found.append(self.product(name, call))
            case ast.Return(value=ast.Tuple(elts=elements)):
                self.results = [self.view(element) for element in elements]
            case _:
                raise NotCpp(ast.unparse(statement))

    def view(self, node: ast.expr) -> View:
        match node:
            case ast.Name(id=name) if name in self.views:
                return self.views[name]
            case ast.Call(
                func=ast.Name(id="reinterpret_tensor"), args=[source, shape, strides, offset]
            ):
                base = self.view(source)
                return replace(
                    base,
                    shape=ast.literal_eval(shape),
                    strides=ast.literal_eval(strides),
                    offset=base.offset + ast.literal_eval(offset),
                )
            case _:
                raise NotCpp(ast.unparse(node))

    def kernel(self, name: str, args: Sequence[ast.expr]) -> str:
        kernel = dict(self.code.kernels).get(name)
        if kernel is None:
            raise NotCpp(name)
        parts = [
            f"({type})({self.view(arg).pointer})"
            for type, arg in zip(kernel.types, args, strict=True)
        ]
        return f"step{self.number}::{name}::kernel({', '.join(parts)});"

    def product(self, name: str, call: ast.Call) -> str:
        """`torch.mm(a, b, out=c)` or `torch.addmm(d, a, b, alpha=, beta=, out=c)`."""
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        if name not in ("mm", "addmm") or "out" not in options:
            raise NotCpp(name)
        *front, a, b = map(self.view, call.args)
        out = self.view(options["out"])
        c = self.writer.gemm_type(out.dtype)
        if not all(map(_is_matrix, (a, b, out))) or _leading(out)[1] != 1:
            raise NotCpp("a matrix of another layout")
        alpha, beta = (
            ast.literal_eval(options[key]) if key in options else 1 for key in ("alpha", "beta")
        )
        (m, k), n = a.shape, b.shape[1]
        lines = list[str]()
        if front:
            (start,) = front
            s0, s1 = _broadcast_strides(start, (m, n))
            lines.append(
                f"fill<{c}>((const {c}*)({start.pointer}), {s0}, {s1}, ({c}*)({out.pointer}),"
                f" {_rows(out)}, {m}, {n});"
            )
        (a0, a1), (b0, b1) = _leading(a), _leading(b)
        beta = float(beta) if front else 0.0
        is_small = (
            a1 == 1
            and m * n * k <= SMALL
            and n % (64 // out.dtype.itemsize) == 0
            and beta in (0.0, 1.0)
        )
        if is_small and b1 != 1 and b.base in self.fixed:
            b = self.writer.in_rows(b)
            b0, b1 = _leading(b)
        if is_small and b1 == 1:
            left, right = f"(const {c}*)({a.pointer}), {a0}", f"(const {c}*)({b.pointer}), {b0}"
            options = (
                f"{'true' if beta else 'false'}, {float(alpha)}, ({c}*)({out.pointer}),"
                f" {_rows(out)}"
            )
            lines.append(f"multiply_small<{c}, {m}, {n}, {k}>({left}, {right}, {options});")
            return "\n".join(lines)
        lines.append(
            f"multiply<{c}>(gemm, {m}, {n}, {k}, {float(alpha)}, (const {c}*)({a.pointer}), {a0},"
            f" {a1}, (const {c}*)({b.pointer}), {b0}, {b1}, {beta}, ({c}*)({out.pointer}),"
            f" {_rows(out)});"
        )
        return "\n".join(lines)


def _is_matrix(view: View) -> bool:
    """Test for a layout that BLAS takes: rows or columns that lie together."""
    if len(view.shape) != 2 or 0 in view.shape or max(view.shape) >= 2**31:
        return False
    return _leading(view) is not None


def _leading(view: View) -> Any:
    """The strides as BLAS takes them, of which one is one; dims of size 1 have the stride that
    fits.
    """
    (m, n), (s0, s1) = view.shape, view.strides
    row, column = (s0 if m > 1 else n), (s1 if n > 1 else m)
    if (s1 == 1 or n == 1) and row >= n:
        return row, 1
    return (1, column) if (s0 == 1 or m == 1) and column >= m else None


def _rows(view: View) -> int:
    return _leading(view)[0]


def _broadcast_strides(view: View, shape: tuple[int, int]) -> tuple[int, int]:
    """The strides with which it is read as a matrix of this shape."""
    sizes, strides = (1, 1, *view.shape)[-2:], (0, 0, *view.strides)[-2:]
    if any(size not in (1, want) for size, want in zip(sizes, shape, strict=True)):
        raise NotCpp("a sum of other shape")
    return (0 if sizes[0] == 1 else strides[0]), (0 if sizes[1] == 1 else strides[1])


def _dtype(node: ast.expr) -> torch.dtype:
    if isinstance(node, ast.Attribute) and isinstance(
        dtype := getattr(torch, node.attr, None), torch.dtype
    ):
        return dtype
    raise NotCpp(ast.unparse(node))
