"""Loops in C++: scan and while_loop around a step that Inductor compiled.

    for (int64_t n = 0; n < 512; ++n) {
        const int64_t i = n;
        const uint8_t* in2 = x0 + i * 4096;
        uint8_t* buf0 = y0 + i * 4096;
        multiply<float>(...);
        step::k0::kernel((float*)(buf0));
        in1 = buf0;
    }

Inductor writes the step as Python that calls kernels and matrix products (`codegen.py`). That text is translated here,
statement by statement: buffers become offsets into one piece of memory, or places in the outputs, kernels are called
with pointers, and matrix products go to the BLAS that PyTorch brings. A step of a loop allocates nothing and copies
nothing that its kernels do not. A step that calls something else is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_fn import torch_internals_inductor as internals
from thunder_fn.executors.compiled.codegen import Code, Kernel, Strides
from thunder_fn.executors.compiled.loop_plan import (
    Plan,
    contiguous_strides,
    end_lines,
    header_line,
    is_contiguous,
    return_line,
    tensor_type,
)
from thunder_fn.structured.loop import Loop
from thunder_fn.structured.while_parts import While
from thunder_fn.trace import Var, static_shape

ALIGNMENT = 64
SMALL = 2**18
"""Products of so many multiplications are written out."""
_INCLUDE = "#include <torch/csrc/inductor/cpp_prefix.h>"


class NotCpp(Exception):
    """A step that is more than kernels and matrix products."""


_C_TYPES = {torch.float32: "float", torch.float64: "double"}

_FRONT = f"""{_INCLUDE}
#include <cstring>

// While a loop runs, other threads may; now and then it looks whether its user wants it to end.
struct Running {{
    PyThreadState* state = PyEval_SaveThread();
    ~Running() {{ PyEval_RestoreThread(state); }}
    bool interrupted(int64_t n) {{
        if ((n & 0xffff) != 0xffff) return false;
        PyEval_RestoreThread(state);
        const bool found = PyErr_CheckSignals() != 0;
        state = PyEval_SaveThread();
        return found;
    }}
}};

template <typename T>
static void multiply(int64_t gemm, int64_t m, int64_t n, int64_t k, T alpha, const T* a, int64_t a0, int64_t a1,
                     const T* b, int64_t b0, int64_t b1, T beta, T* c, int64_t ldc) {{
    using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const T*, const T*, const int*,
                          const T*, const int*, const T*, T*, const int*);
    const bool at = a1 != 1, bt = b1 != 1;
    const int M = m, N = n, K = k, lda = at ? a1 : a0, ldb = bt ? b1 : b0, ld = ldc;
    reinterpret_cast<Gemm>(gemm)(bt ? "T" : "N", at ? "T" : "N", &N, &M, &K, &alpha, b, &ldb, a, &lda, &beta, c, &ld);
}}

template <typename T>
static void fill(const T* from, int64_t s0, int64_t s1, T* to, int64_t ld, int64_t m, int64_t n) {{
    if (from == to) return;
    for (int64_t i = 0; i < m; ++i) {{
        if (s1 == 1) std::memcpy(to + i * ld, from + i * s0, n * sizeof(T));
        else for (int64_t j = 0; j < n; ++j) to[i * ld + j] = from[i * s0 + j * s1];
    }}
}}

// Small products whose right side lies in rows: BLAS takes longer to begin than these take.
template <typename T, int64_t N, int64_t K, int64_t R, int64_t C>
static inline void block(const T* a, int64_t lda, const T* b, int64_t ldb, bool add, T alpha, T* c, int64_t ldc) {{
    using Vec = at::vec::Vectorized<T>;
    Vec sums[R][C];
    for (int64_t r = 0; r < R; ++r)
        for (int64_t j = 0; j < C; ++j) sums[r][j] = Vec(T(0));
    for (int64_t k = 0; k < K; ++k) {{
        Vec row[C];
        for (int64_t j = 0; j < C; ++j) row[j] = Vec::loadu(b + k * ldb + j * Vec::size());
        for (int64_t r = 0; r < R; ++r) {{
            const Vec x(a[r * lda + k]);
            for (int64_t j = 0; j < C; ++j) sums[r][j] = at::vec::fmadd(x, row[j], sums[r][j]);
        }}
    }}
    for (int64_t r = 0; r < R; ++r)
        for (int64_t j = 0; j < C; ++j) {{
            T* to = c + r * ldc + j * Vec::size();
            auto value = sums[r][j] * Vec(alpha);
            if (add) value = value + Vec::loadu(to);
            value.store(to);
        }}
}}

template <typename T, int64_t M, int64_t N, int64_t K>
static void multiply_small(const T* a, int64_t lda, const T* b, int64_t ldb, bool add, T alpha, T* c, int64_t ldc) {{
    constexpr int64_t V = at::vec::Vectorized<T>::size(), C = N % (2 * V) ? 1 : 2, R = 4;
    for (int64_t j = 0; j < N; j += C * V) {{
        int64_t i = 0;
        for (; i + R <= M; i += R) block<T, N, K, R, C>(a + i * lda, lda, b + j, ldb, add, alpha, c + i * ldc + j, ldc);
        for (; i < M; ++i) block<T, N, K, 1, C>(a + i * lda, lda, b + j, ldb, add, alpha, c + i * ldc + j, ldc);
    }}
}}
"""


@dataclass(frozen=True, slots=True)
class View:
    """Where a tensor of a step lies: a buffer, and its layout there."""

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
    arguments = [*map(str, plan.equation.operands[: plan.num_consts]), *(f"c{i}" for i in range(plan.num_carry))]
    arguments += list(map(str, plan.xs))
    outputs = [f"o{i}" for i in range(len(plan.equation.outputs))]
    lines = ["import torch", "from thunder_fn.torch_internals_inductor import gemm_address", header_line(plan)]
    lines += [f"    c{i} = {var}.contiguous()" for i, var in enumerate(plan.carry)]
    for name, var in zip(outputs, plan.equation.outputs, strict=True):
        type = tensor_type(var)
        lines.append(f"    {name} = torch.empty({static_shape(type)}, dtype={type.dtype}, device='cpu')")
    lines.append(f"    scratch = torch.empty({max(writer.size, 1)}, dtype=torch.uint8, device='cpu')")
    gemm = f"gemm_address({next(iter(writer.gemms))})" if writer.gemms else "0"
    lines.append(f"    loop({', '.join([*arguments, *outputs, 'scratch'])}, {gemm})")
    lines += end_lines(plan, outputs[: plan.num_carry])
    lines.append(return_line(plan, outputs))
    types = ("const uint8_t*",) * len(arguments) + ("uint8_t*",) * (len(outputs) + 1) + ("int64_t",)
    return Code("\n".join(lines) + "\n", (("loop", Kernel(types, source)),), ())


class _CppWriter:
    """Writes the loop: gathers how much memory its buffers take, and which matrix products it has."""

    def __init__(self, plan: Plan, codes: Sequence[Code]) -> None:
        self.plan, self.codes = plan, codes
        self.size = 0
        self.gemms: set[torch.dtype] = set()
        self.kernels: list[str] = []

    def source(self) -> str:
        plan, lines = self.plan, list[str]()
        if plan.is_scan:
            loop = Loop.of(plan.equation)
            lines.append(f"for (int64_t n = 0; n < {loop.steps}; ++n) {{")
            lines.append(f"const int64_t i = {f'{loop.steps - 1} - n' if loop.reverse else 'n'};")
            for number, (var, stride) in enumerate(zip(plan.xs, plan.x_strides, strict=True)):
                size = stride * tensor_type(var).dtype.itemsize
                lines.append(f"const uint8_t* in{plan.num_consts + plan.num_carry + number} = x{number} + i * {size};")
        else:
            steps = While.of(plan.equation).max_steps
            lines.append(f"for (int64_t n = 0; {'' if steps is None else f'n < {steps}'}; ++n) {{")
            lines.append("{")
            lines += _Statements(self, 0, self.scratch).lines()
            lines += ["if (!*reinterpret_cast<const bool*>(result0)) break;", "}"]
        body = _Statements(self, len(plan.steps) - 1, self.placed)
        lines += body.lines()
        results = [f"result{place}" for place in plan.body.places]
        for number, (name, var) in enumerate(zip(results, plan.equation.outputs, strict=True)):
            if number < plan.num_carry:
                lines.append(f"in{plan.num_consts + number} = {name};")
            elif self.owner(plan.body.places[number]) != number:
                lines.append(f"std::memcpy(y{number} + i * {_slice(var)}, {name}, {_slice(var)});")
        lines += ["if (running.interrupted(n)) return;", "}"]
        for number, var in enumerate(plan.carry):
            type = tensor_type(var)
            size = _bytes(static_shape(type), type.dtype)
            lines.append(f"std::memcpy(y{number}, in{plan.num_consts + number}, {size});")
        return "\n".join([_FRONT, *self.kernels, self.header(), *lines, "}"])

    def header(self) -> str:
        plan = self.plan
        names = [f"const uint8_t* in{i}" for i in range(plan.num_consts + plan.num_carry)] + [
            f"const uint8_t* x{i}" for i in range(len(plan.xs))
        ]
        names += [f"uint8_t* y{i}" for i in range(len(plan.equation.outputs))]
        return f'extern "C" void kernel({", ".join([*names, "uint8_t* scratch", "int64_t gemm"])}) {{\nRunning running;'

    def owner(self, place: int) -> int | None:
        """The stacked output whose memory a result of the step is computed in."""
        found = [n for n, at in enumerate(self.plan.body.places) if at == place and n >= self.plan.num_carry]
        return found[0] if found else None

    def placed(self, result: int | None, size: int) -> str:
        """Where a buffer lies: results in their slice of what is stacked, carries in turns, others in the scratch memory."""
        if result is None:
            return self.scratch(None, size)
        number = self.owner(result)
        if number is not None:
            return f"y{number} + i * {_slice(self.plan.equation.outputs[number])}"
        first, second = self.scratch(None, size), self.scratch(None, size)
        return f"(n & 1 ? {first} : {second})"

    def scratch(self, result: int | None, size: int) -> str:
        """So many bytes of scratch memory."""
        start = self.size
        self.size += -(-size // ALIGNMENT) * ALIGNMENT
        return f"scratch + {start}"


def _slice(var: Var) -> int:
    """How many bytes a step's part of a stacked output has."""
    type = tensor_type(var)
    return _bytes(static_shape(type)[1:], type.dtype)


def _bytes(shape: Sequence[int], dtype: torch.dtype, strides: Strides | None = None) -> int:
    if 0 in shape:
        return 0
    strides = contiguous_strides(shape) if strides is None else strides
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (last + 1) * dtype.itemsize


class _Statements:
    """The statements of one step in C++."""

    def __init__(self, writer: _CppWriter, number: int, place: Callable[[int | None, int], str]) -> None:
        self.writer, self.number, self.place = writer, number, place
        self.code, self.step = writer.codes[number], writer.plan.steps[number]
        self.views: dict[str, View] = {}
        self.bases: dict[str, int] = {}
        self.found: list[str] = []

    def lines(self) -> list[str]:
        module = ast.parse(self.code.text)
        function = next(node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "region")
        for name, kernel in self.code.kernels:
            source = kernel.source.replace(_INCLUDE, "").replace('extern "C"', "static", 1)
            self.writer.kernels.append(f"namespace step{self.number} {{ namespace {name} {{\n{source}\n}} }}")
        inputs = zip(function.args.args, self.step.trace.inputs, self.step.strides, strict=True)
        for position, (argument, var, strides) in enumerate(inputs):
            type = tensor_type(var)
            self.views[argument.arg] = View(f"in{position}", static_shape(type), strides, type.dtype)
        for statement in function.body:
            self.statement(statement)
        return [*self.buffers(), *self.found]

    def buffers(self) -> Iterator[str]:
        """Where the buffers lie; a result's lies where results do."""
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
                targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="empty_strided_cpu"), args=args)
            ):
                shape, strides, dtype = ast.literal_eval(args[0]), ast.literal_eval(args[1]), _dtype(args[2])
                base = f"s{self.number}_{name}"
                self.bases[base] = _bytes(shape, dtype, strides)
                self.views[name] = View(base, shape, strides, dtype)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.views[name] = self.view(value)
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=args, keywords=[])):
                self.found.append(self.kernel(name, args))
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) as call):
                self.found.append(self.product(name, call))
            case ast.Return(value=ast.Tuple(elts=elements)):
                self.results = [self.view(element) for element in elements]
            case _:
                raise NotCpp(ast.unparse(statement))

    def view(self, node: ast.expr) -> View:
        match node:
            case ast.Name(id=name) if name in self.views:
                return self.views[name]
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[source, shape, strides, offset]):
                base = self.view(source)
                return replace(
                    base,
                    shape=ast.literal_eval(shape),
                    strides=ast.literal_eval(strides),
                    offset=ast.literal_eval(offset),
                )
            case _:
                raise NotCpp(ast.unparse(node))

    def kernel(self, name: str, args: Sequence[ast.expr]) -> str:
        kernel = dict(self.code.kernels).get(name)
        if kernel is None:
            raise NotCpp(name)
        parts = [f"({type})({self.view(arg).pointer})" for type, arg in zip(kernel.types, args, strict=True)]
        return f"step{self.number}::{name}::kernel({', '.join(parts)});"

    def product(self, name: str, call: ast.Call) -> str:
        """`torch.mm(a, b, out=c)` or `torch.addmm(d, a, b, alpha=, beta=, out=c)`."""
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        if name not in ("mm", "addmm") or "out" not in options:
            raise NotCpp(name)
        *front, a, b = map(self.view, call.args)
        out = self.view(options["out"])
        if out.dtype not in _C_TYPES or not internals.gemm_address(out.dtype):
            raise NotCpp(f"products of {out.dtype}")
        self.writer.gemms.add(out.dtype)
        if len(self.writer.gemms) > 1 or not all(map(_is_matrix, (a, b, out))) or _leading(out)[1] != 1:
            raise NotCpp("a matrix of another layout")
        alpha, beta = (ast.literal_eval(options[key]) if key in options else 1 for key in ("alpha", "beta"))
        c, (m, k), n = _C_TYPES[out.dtype], a.shape, b.shape[1]
        lines = list[str]()
        if front:
            (start,) = front
            s0, s1 = _broadcast_strides(start, (m, n))
            lines.append(
                f"fill<{c}>((const {c}*)({start.pointer}), {s0}, {s1}, ({c}*)({out.pointer}), {_rows(out)}, {m}, {n});"
            )
        (a0, a1), (b0, b1) = _leading(a), _leading(b)
        beta = float(beta) if front else 0.0
        if a1 == b1 == 1 and m * n * k <= SMALL and n % (64 // out.dtype.itemsize) == 0 and beta in (0.0, 1.0):
            left, right = f"(const {c}*)({a.pointer}), {a0}", f"(const {c}*)({b.pointer}), {b0}"
            options = f"{'true' if beta else 'false'}, {float(alpha)}, ({c}*)({out.pointer}), {_rows(out)}"
            lines.append(f"multiply_small<{c}, {m}, {n}, {k}>({left}, {right}, {options});")
            return "\n".join(lines)
        lines.append(
            f"multiply<{c}>(gemm, {m}, {n}, {k}, {float(alpha)}, (const {c}*)({a.pointer}), {a0}, {a1}, "
            f"(const {c}*)({b.pointer}), {b0}, {b1}, {beta}, ({c}*)({out.pointer}), {_rows(out)});"
        )
        return "\n".join(lines)


def _is_matrix(view: View) -> bool:
    """A layout that BLAS takes: rows or columns that lie together."""
    if len(view.shape) != 2 or 0 in view.shape or max(view.shape) >= 2**31:
        return False
    return _leading(view) is not None


def _leading(view: View) -> Any:
    """Its strides as BLAS takes them, of which one is one; dims of size 1 have the stride that fits."""
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
    if isinstance(node, ast.Attribute) and isinstance(dtype := getattr(torch, node.attr, None), torch.dtype):
        return dtype
    raise NotCpp(ast.unparse(node))
