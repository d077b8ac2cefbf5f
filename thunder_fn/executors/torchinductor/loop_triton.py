"""Loops of small steps on a GPU: one Triton kernel that runs all steps.

    @triton.jit
    def kernel(a0, a1, a2, o0, y0):
        w = tl.load(a0 + ...)                       # consts, once
        c0 = tl.load(a1 + ...)                      # the first carry
        for i in range(100):
            x0 = tl.load(a2 + i * 64 + ...)         # a slice of the xs
            v3 = tl.sum(c0[:, :, None] * w[None, :, :], 1)
            ...
            tl.store(y0 + i * 64 + ..., v5)
            c0 = v5
        tl.store(o0 + ..., c0)

One block of threads holds everything that a step computes, so nothing waits for a launch. A
while_loop is `while more:` around the same lines, so the CPU does not wait for its condition. A
tensor is a Triton block whose sizes are rounded up to powers of two. Its padding has arbitrary
values, and is replaced in front of sums, other reductions and products. Numbers of 16 bits are
computed with as float32, and rounded after each op, as eager PyTorch does.

Source: Philippe Tillet et al., "Triton: an intermediate language and compiler for tiled neural
network computations", 2019; persistent RNNs: Gregory Diamos et al., ICML 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from thunder_fn.executors.torchinductor.codegen import Code, Job, RegionError, Strides
from thunder_fn.executors.torchinductor.loop_plan import (
    Plan,
    contiguous_strides,
    end_lines,
    header_line,
    return_line,
    tensor_type,
)
from thunder_fn.extend.regions import Loop, While
from thunder_fn.ir.trace import Arg, Equation, Literal, TensorType, Trace, Var, static_shape
from thunder_fn.torch_internals import last_offset
from thunder_fn.torch_internals.inductor import TRITON_HEAD

Shape = tuple[int, ...]

MOST_ELEMENTS = 4096
"""The most elements of a tensor in a small step, padding included."""

MOST_AT_ONCE = 1 << 17
"""The most elements of all tensors of a small step together. One block of threads holds some of
them at a time, in registers and shared memory.
"""

MOST_PRODUCTS = 1 << 14
"""The most pairs of a matrix product that the hardware's units do not take."""

MOST_DIMS = 3

FEW = 1 << 13
"""The elements that are the work of four warps."""


class NotTriton(RegionError):
    """The loop's steps are not small, or have an op that is not known here."""


def suits(loop: Trace) -> bool:
    """Test whether one kernel can run all steps of a loop, if its operands are contiguous."""
    strides = tuple(contiguous_strides(static_shape(tensor_type(var))) for var in loop.inputs)
    try:
        in_triton(Job(loop, strides, 1))
    except RegionError:
        return False
    return True


def in_triton(job: Job) -> Code:
    """The code of a loop on a GPU.

    Raises:
        NotTriton: its steps are not small, or have an op that is not known here.
        RegionError: its carries have another layout after each step.
    """
    plan = Plan.of(job)
    writer = _Kernel(plan, job)
    source = writer.source()
    names = [f"o{i}" for i in range(plan.num_carry)]
    ys = [f"y{i}" for i in range(len(plan.equation.outputs) - plan.num_carry)]
    lines = ["import torch", f"kernel = load_source({source!r}).kernel", header_line(plan)]
    lines += [
        f"    {name} = {_empty(var)}"
        for name, var in zip((*names, *ys), plan.equation.outputs, strict=True)
    ]
    given = ", ".join(dict.fromkeys((*map(str, plan.equation.operands), *names, *ys)))
    lines.append(f"    with torch.cuda.device({writer.device.index or 0}):")
    lines.append(f"        kernel[(1,)]({given}, num_warps={writer.warps}, num_stages=1)")
    lines += end_lines(plan, names)
    lines.append(return_line(plan, [*names, *ys]))
    text = "from thunder_fn.torch_internals.inductor import load_source\n" + "\n".join(lines)
    return Code(f"{text}\n", (), ())


def _empty(var: Var) -> str:
    type = tensor_type(var)
    shape = static_shape(type)
    return (
        f"torch.empty_strided({shape}, {contiguous_strides(shape)}, dtype={type.dtype},"
        f" device={str(type.device)!r})"
    )


# ---- values ----


@dataclass(frozen=True, slots=True)
class _Value:
    """A value in the kernel: an expression, its shape without padding, its dtype."""

    text: str
    shape: Shape
    dtype: torch.dtype

    @property
    def block(self) -> Shape:
        """The shape with padding."""
        return padded(self.shape)

    def aligned(self, dims: int) -> str:
        """The expression with dims of size 1 in front, so that it has `dims` of them."""
        if not self.shape or len(self.shape) == dims:
            return self.text
        index = ["None"] * (dims - len(self.shape)) + [":"] * len(self.shape)
        return f"{self.text}[{', '.join(index)}]"


def padded(shape: Sequence[int]) -> Shape:
    """The shape of a block that holds a tensor of this shape."""
    return tuple(1 << (size - 1).bit_length() for size in shape)


TYPES = {
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.bool: "tl.int1",
}
HALVES = (torch.bfloat16, torch.float16)


def computed_in(dtype: torch.dtype) -> str:
    """The type in which numbers of a dtype are computed with."""
    if dtype not in TYPES:
        raise NotTriton(f"{dtype} is not computed with here")
    return "tl.float32" if dtype in HALVES else TYPES[dtype]


def _arange(place: int, dims: int, size: int) -> str:
    """The positions along a dim, as a block of so many dims."""
    index = ", ".join(":" if i == place else "None" for i in range(dims))
    return f"tl.arange(0, {size})[{index}]" if dims > 1 else f"tl.arange(0, {size})"


def _offsets(shape: Shape, strides: Strides) -> str:
    terms = [
        f"{_arange(place, len(shape), size)} * {stride}"
        for place, (size, stride) in enumerate(zip(padded(shape), strides, strict=True))
    ]
    return " + ".join(terms) or "0"


def _inside(shape: Shape, dims: Sequence[int] | None = None) -> str:
    """A mask of the elements that are no padding along some dims; empty if there is no padding."""
    tests = [
        f"({_arange(place, len(shape), size)} < {own})"
        for place, (own, size) in enumerate(zip(shape, padded(shape), strict=True))
        if own != size and (dims is None or place in dims)
    ]
    return " & ".join(tests)


# ---- the kernel ----


@dataclass
class _Kernel:
    """The writer of one kernel."""

    plan: Plan
    job: Job
    lines: list[str] = field(default_factory=list[str])
    values: dict[int, _Value] = field(default_factory=dict[int, "_Value"])
    prefix: str = "b"
    elements: int = 0

    def __post_init__(self) -> None:
        self.body = self.plan.equation.bodies[-1]
        types = [tensor_type(var) for var in (*self.body.inputs, *self.plan.equation.outputs)]
        self.device = types[0].device
        has_constants = any(body.constants for body in self.plan.equation.bodies)
        if any(type.device != self.device for type in types) or has_constants:
            raise NotTriton("a step uses other devices, or tensors from outside")

    @property
    def warps(self) -> int:
        """The number of warps for the work."""
        return 4 if self.elements <= FEW else 8

    def source(self) -> str:
        """The text of a module that has the kernel."""
        plan, operands = self.plan, self.plan.equation.operands
        strides = [self.job.static_strides[var.index] for var in operands]
        before, first_x = self.body.inputs, plan.num_consts + plan.num_carry
        for var, operand, own in zip(before[:first_x], operands, strides, strict=False):
            self.load(var, str(operand), own)
        carry = before[plan.num_consts : first_x]
        self.lines += [f"c{i} = {self.values[var.index].text}" for i, var in enumerate(carry)]
        for i, var in enumerate(carry):
            self.bind(var, f"c{i}")
        fixed = self.hoisted(before[: plan.num_consts])
        begin = self.scan_step if plan.is_scan else self.while_step
        first = begin(strides[first_x:])
        for equation in self.body.equations:
            if equation not in fixed:
                self.equation(equation)
        self.end_of_step(carry)
        self.lines[first:] = [f"    {line}" for line in self.lines[first:]]
        for i, var in enumerate(carry):
            type = tensor_type(var)
            self.store(f"o{i}", _Value(f"c{i}", static_shape(type), type.dtype))
        names = [*map(str, operands), *(f"o{i}" for i in range(plan.num_carry))]
        names += [f"y{i}" for i in range(len(plan.equation.outputs) - plan.num_carry)]
        lines = "\n".join(f"    {line}" for line in self.lines)
        return (
            f"{TRITON_HEAD}\n@triton.jit\ndef kernel({', '.join(dict.fromkeys(names))}):\n{lines}\n"
        )

    def scan_step(self, strides: Sequence[Strides]) -> int:
        """Begin a step of a scan, with its slices. Returns the number of its first line."""
        loop = Loop.of(self.plan.equation)
        self.lines.append(f"for i in range({loop.steps}):")
        first = len(self.lines)
        self.lines.append(f"t = {loop.steps - 1} - i" if loop.reverse else "t = i")
        _, _, xs = loop.parts(self.body.inputs)
        for var, operand, own in zip(xs, self.plan.xs, strides, strict=True):
            self.load(var, f"{operand} + t * {own[0]}", own[1:])
            _check_reach(operand, own)
        return first

    def while_step(self, _: Sequence[Strides]) -> int:
        """Begin a step of a while_loop. Returns the number of its first line."""
        if While.of(self.plan.equation).max_steps is not None:
            self.lines.append("steps = tl.full((), 0, tl.int32)")
        self.ask("p")
        self.lines.append("while more:")
        return len(self.lines)

    def ask(self, prefix: str) -> None:
        """Write the condition on the carries `c0`, `c1`, ..."""
        step, self.values = self.values, dict[int, _Value]()
        step_prefix, self.prefix = self.prefix, prefix
        condition, max_steps = self.plan.equation.bodies[0], While.of(self.plan.equation).max_steps
        for var, own in zip(condition.inputs, self.body.inputs, strict=True):
            self.values[var.index] = step[own.index]
        for equation in condition.equations:
            self.equation(equation)
        more = self.read(condition.outputs[0])
        if more.shape:
            raise NotTriton("a condition that is no single bool")
        bound = "" if max_steps is None else f" & (steps < {max_steps})"
        self.lines.append(f"more = {more.text}{bound}")
        self.values, self.prefix = step, step_prefix

    def hoisted(self, consts: Sequence[Var]) -> list[Equation]:
        """Write the equations that compute the same in each step; return them."""
        known = {var.index for var in consts}
        found = list[Equation]()
        for equation in self.body.equations:
            if all(var.index in known for var in equation.operands):
                self.equation(equation)
                known.update(var.index for var in equation.outputs)
                found.append(equation)
        return found

    def end_of_step(self, carry: Sequence[Var]) -> None:
        """Store the step's results, and go on with its carries."""
        num_carry = len(carry)
        outputs = [self.read(atom) for atom in self.body.outputs]
        for var in self.plan.equation.outputs[num_carry:]:
            _check_reach(var, contiguous_strides(static_shape(tensor_type(var))))
        for i, value in enumerate(outputs[num_carry:]):
            self.store(f"y{i} + t * {math.prod(value.shape)}", value)
        for i, (value, var) in enumerate(zip(outputs, carry, strict=False)):
            if value.dtype != tensor_type(var).dtype or value.shape != static_shape(
                tensor_type(var)
            ):
                raise NotTriton("a carry changes its type")
            self.lines.append(f"n{i} = {self.full(value)}")
        self.lines += [f"c{i} = n{i}" for i in range(num_carry)]
        if not self.plan.is_scan:
            if While.of(self.plan.equation).max_steps is not None:
                self.lines.append("steps += 1")
            self.ask("q")

    def full(self, value: _Value) -> str:
        """The value as a block of all its elements."""
        if not value.shape:
            return value.text
        return f"tl.broadcast_to({value.text}, {_tuple(value.block)})"

    def load(self, var: Var, pointer: str, strides: Strides) -> None:
        type = tensor_type(var)
        shape = static_shape(type)
        mask = _inside(shape)
        given = f", mask={mask}, other=0" if mask else ""
        text = f"tl.load({pointer} + {_offsets(shape, strides)}{given})"
        self.bind(var, self.named(var, f"{text}.to({computed_in(type.dtype)})"))

    def store(self, pointer: str, value: _Value) -> None:
        mask = _inside(value.shape)
        given = f", mask={mask}" if mask else ""
        offsets = _offsets(value.shape, contiguous_strides(value.shape))
        self.lines.append(f"tl.store({pointer} + {offsets}, {self.full(value)}{given})")

    def named(self, var: Var, text: str) -> str:
        self.lines.append(f"{self.prefix}{var.index} = {text}")
        return f"{self.prefix}{var.index}"

    def bind(self, var: Var, text: str) -> None:
        type = tensor_type(var)
        shape = static_shape(type)
        size = math.prod(padded(shape))
        self.elements += size
        if len(shape) > MOST_DIMS or size > MOST_ELEMENTS or self.elements > MOST_AT_ONCE:
            raise NotTriton("a step that is not small")
        computed_in(type.dtype)
        self.values[var.index] = _Value(text, shape, type.dtype)

    def read(self, arg: Any) -> _Value:
        if not isinstance(arg, Var):
            raise NotTriton("a tensor is needed, and a number is there")
        return self.values[arg.index]

    def equation(self, equation: Equation) -> None:
        """Write one equation."""
        write = OPS.get(equation.op.name.rpartition(".")[0])
        if equation.op.kind != "leaf" or write is None or len(equation.outputs) != 1:
            raise NotTriton(f"{equation.op.name} is not known here")
        (result,) = equation.outputs
        text = write(_Call(self, equation))
        dtype = tensor_type(result).dtype
        computed = computed_in(dtype)
        if dtype in HALVES:
            text = f"({text}).to({TYPES[dtype]}).to(tl.float32)"
        elif not dtype.is_floating_point:
            text = f"({text}).to({computed})"
        self.bind(result, self.named(result, text))


def _tuple(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))},)"


def _check_reach(var: Var, strides: Strides) -> None:
    shape = static_shape(tensor_type(var))
    if last_offset(shape, strides) >= 1 << 31:
        raise NotTriton("offsets do not fit into 32 bits")


# ---- ops ----


@dataclass(frozen=True, slots=True)
class _Call:
    """An equation as an op's writer sees it."""

    kernel: _Kernel
    equation: Equation

    @property
    def type(self) -> TensorType:
        return tensor_type(self.equation.outputs[0])

    @property
    def shape(self) -> Shape:
        return static_shape(self.type)

    def value(self, place: int) -> _Value:
        """An operand."""
        return self.kernel.read(self.equation.args[place])

    def literal(self, place: int, default: Any = None) -> Any:
        """An argument that is no tensor."""
        args = self.equation.args
        return _python(args[place]) if place < len(args) else default

    def plain(self, *allowed: str) -> None:
        """Check that there are no other keywords."""
        if any(key not in allowed for key, _ in self.equation.kwargs):
            raise NotTriton(f"{self.equation.op.name} with these keywords is not known here")

    def keyword(self, name: str, default: Any) -> Any:
        return next((_python(arg) for key, arg in self.equation.kwargs if key == name), default)

    def operand(self, arg: Arg, dtype: torch.dtype | None = None) -> str:
        """An operand of a pointwise op as a block or a number, in the result's dtype or this."""
        wanted = dtype or self.type.dtype
        if isinstance(arg, Var):
            value = self.kernel.read(arg)
            text = value.aligned(len(self.shape))
            same = computed_in(value.dtype) == computed_in(wanted)
            return text if same else f"{text}.to({computed_in(wanted)})"
        return _number(_python(arg), wanted)


def _python(arg: Any) -> Any:
    if isinstance(arg, Var):
        raise NotTriton("a number is needed, and a tensor is there")
    if isinstance(arg, tuple):
        return tuple(map(_python, arg))
    return arg.value if isinstance(arg, Literal) else arg


def _number(value: Any, dtype: torch.dtype) -> str:
    is_bool = isinstance(value, bool)
    if not isinstance(value, (int, float)) or is_bool != (dtype == torch.bool):
        raise NotTriton(f"the number {value!r} is not known here")
    if not dtype.is_floating_point:
        if value != int(value):
            raise NotTriton(f"the number {value!r} among integers")
        return repr(int(value))
    return repr(float(value)) if math.isfinite(value) else f'float("{value}")'


def _pointwise(form: str) -> Callable[[_Call], str]:
    """An op of each element: a form with the operands as `{0}`, `{1}`, ..."""

    def write(call: _Call) -> str:
        call.plain()
        if len(call.equation.args) != form_arguments(form):
            raise NotTriton(f"{call.equation.op.name} with these arguments is not known here")
        dtype = call.type.dtype
        if dtype == torch.bool or (".0" in form and not dtype.is_floating_point):
            raise NotTriton(f"{call.equation.op.name} of {dtype} is not known here")
        return form.format(*(f"({call.operand(arg)})" for arg in call.equation.args))

    return write


@cache
def form_arguments(form: str) -> int:
    """The number of operands in a form."""
    return max(place for place in range(4) if f"{{{place}}}" in form) + 1


def _added(sign: str) -> Callable[[_Call], str]:
    def write(call: _Call) -> str:
        call.plain("alpha")
        if call.type.dtype == torch.bool:
            raise NotTriton("a sum of bools")
        left, right = (call.operand(arg) for arg in call.equation.args[:2])
        alpha = call.keyword("alpha", 1)
        times = "" if alpha == 1 else f" * {_number(alpha, call.type.dtype)}"
        return f"{left} {sign} {right}{times}"

    return write


def _compared(sign: str) -> Callable[[_Call], str]:
    def write(call: _Call) -> str:
        dtype = _common_dtype(call)
        left, right = (call.operand(arg, dtype) for arg in call.equation.args)
        return f"{left} {sign} {right}"

    return write


def _common_dtype(call: _Call) -> torch.dtype:
    """The dtype in which PyTorch compares."""
    like = [
        _python(arg)
        if not isinstance(arg, Var)
        else torch.empty(
            (1,) * len(call.kernel.read(arg).shape),
            dtype=call.kernel.read(arg).dtype,
            device="meta",
        )
        for arg in call.equation.args
    ]
    return torch.result_type(*like)


def _logical(form: str) -> Callable[[_Call], str]:
    """An op of truth values; of integers only if they are bools."""

    def write(call: _Call) -> str:
        values = [call.kernel.read(arg) for arg in call.equation.args]
        is_logical = "logical" in call.equation.op.name
        if not is_logical and any(value.dtype != torch.bool for value in values):
            raise NotTriton("bits of integers")
        texts = (f"({value.aligned(len(call.shape))})" for value in values)
        return form.format(*(f"({text} != 0)" for text in texts))

    return write


def _is_nan(call: _Call) -> str:
    text = call.value(0).text
    return f"{text} != {text}"


def _clamped(places: tuple[int | None, int | None]) -> Callable[[_Call], str]:
    """A clamp whose bounds are at these places. NaN stays, as it is neither below nor above."""

    def write(call: _Call) -> str:
        call.plain("min", "max")
        given = dict(call.equation.kwargs)
        text = call.operand(call.equation.args[0])
        for sign, name, place in (("<", "min", places[0]), (">", "max", places[1])):
            bound = given.get(name, Literal(None))
            if place is not None and place < len(call.equation.args):
                bound = call.equation.args[place]
            if bound != Literal(None):
                limit = call.operand(bound)
                text = f"tl.where(({text}) {sign} {limit}, {limit}, {text})"
        return text

    return write


def _where(call: _Call) -> str:
    condition = call.value(0)
    left, right = (call.operand(arg) for arg in call.equation.args[1:])
    return f"tl.where({condition.aligned(len(call.shape))}, {left}, {right})"


def _power(call: _Call) -> str:
    forms = {1: "{0}", 2: "{0} * {0}", 3: "{0} * {0} * {0}", 0.5: "libdevice.sqrt({0})"}
    exponent = call.literal(1)
    if exponent not in forms:
        raise NotTriton("a power that is not known here")
    return forms[exponent].format(f"({call.operand(call.equation.args[0])})")


def _same(call: _Call) -> str:
    return call.value(0).text


def _cast(call: _Call) -> str:
    call.plain("dtype", "device", "memory_format")
    return f"{call.value(0).text}.to({computed_in(call.type.dtype)})"


def _full(value: int | None = None, place: int = 1) -> Callable[[_Call], str]:
    """A block of one number, which is an argument if it is not given."""

    def write(call: _Call) -> str:
        dtype = call.type.dtype
        number = call.literal(place) if value is None else value
        given = str(int(bool(number))) if dtype == torch.bool else _number(number, dtype)
        shape = _tuple(padded(call.shape)) if call.shape else "()"
        return f"tl.full({shape}, {given}, {computed_in(dtype)})"

    return write


def _transposed(call: _Call) -> str:
    value, dims = call.value(0), len(call.shape)
    order = list(range(dims))
    name = call.equation.op.name
    if name.startswith("aten.permute"):
        order = [dim % dims for dim in call.literal(1)]
    elif dims > 1:
        a, b = (0, 1) if name.startswith("aten.t.") else (call.literal(1), call.literal(2))
        order[a], order[b] = order[b], order[a]
    return f"tl.permute({value.text}, {_tuple(order)})" if dims > 1 else value.text


def _reshaped(call: _Call) -> str:
    """The same elements in the same order: without padding, or with the same sizes but for ones."""
    value = call.value(0)
    own, wanted = ([size for size in shape if size != 1] for shape in (value.shape, call.shape))
    has_padding = value.block != value.shape or padded(call.shape) != call.shape
    if not call.shape or not value.shape or (own != wanted and has_padding):
        raise NotTriton("a reshape of a block with padding")
    return f"tl.reshape({call.kernel.full(value)}, {_tuple(padded(call.shape))})"


def _expanded(call: _Call) -> str:
    value = call.value(0)
    if not call.shape:
        return value.text
    text = value.aligned(len(call.shape))
    return f"tl.broadcast_to({text}, {_tuple(padded(call.shape))})"


def _reduced(write: Callable[[_Call, _Value, list[int]], str]) -> Callable[[_Call], str]:
    """A reduction over the dims that the arguments give, all if there are none."""

    def written(call: _Call) -> str:
        call.plain("dtype")
        value, place = call.value(0), 1
        if call.equation.op.name.startswith("aten.linalg_vector_norm"):
            place = 2
        dims, given = len(value.shape), call.literal(place)
        given = (given,) if isinstance(given, int) else given
        reduced = sorted({dim % dims for dim in given} if given else range(dims))
        if not dims:
            raise NotTriton("a reduction of a number")
        text = write(call, value, reduced)
        if call.literal(place + 1, default=False) and len(reduced) < dims:
            index = ["None" if dim in reduced else ":" for dim in range(dims)]
            text = f"({text})[{', '.join(index)}]"
        elif len(call.shape) not in (0, dims - len(reduced)):
            raise NotTriton("a reduction that keeps all dims")
        return text

    return written


def _folded(function: str, text: str, dims: Sequence[int]) -> str:
    for dim in reversed(dims):
        text = f"tl.{function}({text}, {dim})"
    return text


def _in_result(call: _Call, value: _Value) -> str:
    return f"{call.kernel.full(value)}.to({computed_in(call.type.dtype)})"


def _sum(call: _Call, value: _Value, dims: list[int]) -> str:
    text = _without_padding(_in_result(call, value), value.shape, dims, "0")
    return _folded("sum", text, dims)


def _mean(call: _Call, value: _Value, dims: list[int]) -> str:
    return f"({_sum(call, value, dims)}) / {math.prod(value.shape[dim] for dim in dims)}.0"


def _norm(call: _Call, value: _Value, dims: list[int]) -> str:
    if call.literal(1, 2) != 2:
        raise NotTriton("a norm that is not Euclid's")
    text = _without_padding(_in_result(call, value), value.shape, dims, "0")
    return f"libdevice.sqrt({_folded('sum', f'({text}) * ({text})', dims)})"


def _extreme(function: str) -> Callable[[_Call, _Value, list[int]], str]:
    """The greatest or least element, NaN if there is one."""

    def write(call: _Call, value: _Value, dims: list[int]) -> str:
        if not value.dtype.is_floating_point:
            raise NotTriton("the greatest or least of integers")
        fill = 'float("-inf")' if function == "max" else 'float("inf")'
        text = _without_padding(call.kernel.full(value), value.shape, dims, fill)
        is_nan = _folded("max", f"({text} != {text}).to(tl.int32)", dims)
        return f'tl.where({is_nan} != 0, float("nan"), {_folded(function, text, dims)})'

    return write


def _some(function: str) -> Callable[[_Call, _Value, list[int]], str]:
    def write(call: _Call, value: _Value, dims: list[int]) -> str:
        text = f"({call.kernel.full(value)} != 0).to(tl.int32)"
        text = _without_padding(text, value.shape, dims, "0" if function == "max" else "1")
        return f"{_folded(function, text, dims)} != 0"

    return write


def _product(call: _Call, left: _Value, right: _Value) -> str:
    """A matrix product, by the hardware's units or as a sum of products."""
    _check_factors(left, right)
    (m, k), n = left.block, right.block[1]
    a, b = (_factor(call, value, dim) for value, dim in ((left, 1), (right, 0)))
    if min(m, k, n) >= 16:
        if left.dtype in HALVES:
            a, b = (f"{text}.to({TYPES[left.dtype]})" for text in (a, b))
        return f'tl.dot({a}, {b}, input_precision="ieee")'
    if m * k * n > MOST_PRODUCTS:
        raise NotTriton("a product that is not small")
    return f"tl.sum(({a})[:, :, None] * ({b})[None, :, :], 1)"


def _check_factors(left: _Value, right: _Value) -> None:
    if left.dtype != right.dtype or not left.dtype.is_floating_point:
        raise NotTriton("a product of two dtypes, or of integers")


def _factor(call: _Call, value: _Value, dim: int) -> str:
    return _without_padding(call.kernel.full(value), value.shape, (dim,), "0.0")


def _without_padding(text: str, shape: Shape, dims: Sequence[int], fill: str) -> str:
    mask = _inside(shape, dims)
    return f"tl.where({mask}, {text}, {fill})" if mask else text


def _matrix_by_vector(call: _Call) -> str:
    """mv, and dot, where both are vectors."""
    call.plain()
    left, right = call.value(0), call.value(1)
    _check_factors(left, right)
    a, last = _factor(call, left, len(left.shape) - 1), len(left.shape) - 1
    b = _factor(call, right, 0)
    return f"tl.sum(({a}) * ({b}){'[None, :]' if last else ''}, {last})"


def _mm(call: _Call) -> str:
    call.plain()
    return _product(call, call.value(0), call.value(1))


def _addmm(call: _Call) -> str:
    call.plain()
    product = _product(call, call.value(1), call.value(2))
    return f"{call.operand(call.equation.args[0])} + {product}"


_FORMS = {
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "rsub": "{1} - {0}",
    "neg": "-{0}",
    "reciprocal": "1.0 / {0}",
    "square": "{0} * {0}",
    "abs": "tl.abs({0})",
    "relu": "tl.where({0} < 0.0, 0.0, {0})",
    "sigmoid": "1.0 / (1.0 + libdevice.exp(-{0}))",
    "silu": "{0} / (1.0 + libdevice.exp(-{0}))",
    "maximum": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "minimum": "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "tanh_backward": "{0} * (1.0 - {1} * {1})",
    "sigmoid_backward": "{0} * (1.0 - {1}) * {1}",
    "threshold_backward": "tl.where({1} <= {2}, 0.0, {0})",
}
"""The texts of pointwise ops that are an expression of their operands."""


def _known_ops() -> Iterator[tuple[str, Callable[[_Call], str]]]:
    """The ops that steps may have, and their writers."""
    functions = ("tanh", "exp", "expm1", "log", "log1p", "sin", "cos", "sqrt", "rsqrt", "erf")
    forms = _FORMS | {name: f"libdevice.{name}({{0}})" for name in functions}
    yield from ((name, _pointwise(form)) for name, form in forms.items())
    yield from (("add", _added("+")), ("sub", _added("-")))
    signs = {"gt": ">", "lt": "<", "ge": ">=", "le": "<=", "eq": "==", "ne": "!="}
    yield from ((name, _compared(sign)) for name, sign in signs.items())
    logical = {"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "{0} == 0"}
    for kind in ("logical", "bitwise"):
        yield from ((f"{kind}_{name}", _logical(form)) for name, form in logical.items())
    yield from (("clamp", _clamped((1, 2))), ("clamp_min", _clamped((1, None))))
    yield from (("clamp_max", _clamped((None, 1))), ("isnan", _is_nan))
    yield from (("where", _where), ("pow", _power), ("_to_copy", _cast))
    yield from ((name, _same) for name in ("detach", "alias", "clone"))
    yield from ((name, _transposed) for name in ("t", "transpose", "permute"))
    yield from (
        (name, _reshaped) for name in ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze")
    )
    yield from (("expand", _expanded), ("mm", _mm), ("addmm", _addmm))
    yield from (("mv", _matrix_by_vector), ("dot", _matrix_by_vector))
    yield from (("full", _full()), ("full_like", _full()), ("scalar_tensor", _full(place=0)))
    yield from (("zeros_like", _full(0)), ("ones_like", _full(1)))
    yield from (("zeros", _full(0)), ("ones", _full(1)))
    reductions = {"sum": _sum, "mean": _mean, "linalg_vector_norm": _norm}
    reductions |= {"any": _some("max"), "all": _some("min")}
    for name, form in (("max", _extreme("max")), ("min", _extreme("min"))):
        reductions |= {name: form, f"a{name}": form}
    yield from ((name, _reduced(form)) for name, form in reductions.items())


OPS = {f"aten.{name}": write for name, write in _known_ops()}
