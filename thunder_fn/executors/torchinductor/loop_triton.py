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

One block of threads holds everything that a step computes, so nothing waits for a launch. A tensor
is a Triton block whose sizes are rounded up to powers of two. Its padding has arbitrary values, and
is set to zero in front of sums and products. Numbers of 16 bits are computed with as float32, and
rounded after each op, as eager PyTorch does.

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
from thunder_fn.extend.regions import SCAN, Loop
from thunder_fn.ir.trace import Arg, Equation, Literal, TensorType, Trace, Var, static_shape
from thunder_fn.torch_internals import last_offset
from thunder_fn.torch_internals.inductor import TRITON_HEAD

Shape = tuple[int, ...]

MOST_ELEMENTS = 4096
"""A step is small if no tensor of it has more elements than that, padding included."""

MOST_AT_ONCE = 1 << 17
"""All tensors of a step together. One block of threads holds some of them at a time, in registers
and shared memory.
"""

MOST_PRODUCTS = 1 << 14
"""A matrix product that the hardware's units do not take multiplies so many pairs at once."""

MOST_DIMS = 3

FEW = 1 << 13
"""So many elements are the work of four warps."""


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
    """The code of a scan on a GPU.

    Raises:
        NotTriton: its steps are not small, or have an op that is not known here.
        RegionError: its carries have another layout after each step.
    """
    if job.region.equations[0].op != SCAN:
        raise NotTriton("a while_loop reads its condition on the CPU")
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
    elements: int = 0

    def __post_init__(self) -> None:
        self.body = self.plan.equation.body
        self.loop = Loop.of(self.plan.equation)
        types = [tensor_type(var) for var in (*self.body.inputs, *self.plan.equation.outputs)]
        self.device = types[0].device
        if any(type.device != self.device for type in types) or self.body.constants:
            raise NotTriton("a step uses other devices, or tensors from outside")

    @property
    def warps(self) -> int:
        """The number of warps for the work."""
        return 4 if self.elements <= FEW else 8

    def source(self) -> str:
        """The text of a module that has the kernel."""
        consts, carry, xs = self.loop.parts(self.body.inputs)
        operands = self.plan.equation.operands
        strides = [self.job.static_strides[var.index] for var in operands]
        first_x = len(consts) + len(carry)
        for var, operand, own in zip((*consts, *carry), operands, strides, strict=False):
            self.load(var, str(operand), own)
        self.lines += [f"c{i} = {self.values[var.index].text}" for i, var in enumerate(carry)]
        for i, var in enumerate(carry):
            self.bind(var, f"c{i}")
        fixed = self.hoisted(consts)
        self.lines.append(f"for i in range({self.loop.steps}):")
        first = len(self.lines)
        self.lines.append(f"t = {self.loop.steps - 1} - i" if self.loop.reverse else "t = i")
        for var, operand, own in zip(xs, operands[first_x:], strides[first_x:], strict=True):
            self.load(var, f"{operand} + t * {own[0]}", own[1:])
            _check_reach(operand, own)
        for equation in self.body.equations:
            if equation not in fixed:
                self.equation(equation)
        self.end_of_step(len(carry))
        inside = self.lines[first:]
        self.lines[first:] = [f"    {line}" for line in inside]
        for i, var in enumerate(carry):
            type = tensor_type(var)
            self.store(f"o{i}", _Value(f"c{i}", static_shape(type), type.dtype))
        names = [*map(str, operands), *(f"o{i}" for i in range(len(carry)))]
        names += [f"y{i}" for i in range(len(self.plan.equation.outputs) - len(carry))]
        lines = "\n".join(f"    {line}" for line in self.lines)
        return (
            f"{TRITON_HEAD}\n@triton.jit\ndef kernel({', '.join(dict.fromkeys(names))}):\n{lines}\n"
        )

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

    def end_of_step(self, num_carry: int) -> None:
        """Store the step's results, and go on with its carries."""
        outputs = [self.read(atom) for atom in self.body.outputs]
        for var in self.plan.equation.outputs[num_carry:]:
            _check_reach(var, contiguous_strides(static_shape(tensor_type(var))))
        for i, value in enumerate(outputs[num_carry:]):
            self.store(f"y{i} + t * {math.prod(value.shape)}", value)
        carry = zip(outputs, self.loop.parts(self.body.inputs)[1], strict=False)
        for i, (value, var) in enumerate(carry):
            if value.dtype != tensor_type(var).dtype or value.shape != static_shape(
                tensor_type(var)
            ):
                raise NotTriton("a carry changes its type")
            self.lines.append(f"n{i} = {self.full(value)}")
        self.lines += [f"c{i} = n{i}" for i in range(num_carry)]

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
        self.lines.append(f"b{var.index} = {text}")
        return f"b{var.index}"

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
        if dtype in HALVES:
            text = f"({text}).to({TYPES[dtype]}).to(tl.float32)"
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

    def operand(self, arg: Arg) -> str:
        """An operand of a pointwise op, as a block or a number."""
        if isinstance(arg, Var):
            value = self.kernel.read(arg)
            text = value.aligned(len(self.shape))
            wanted = self.type.dtype if self.type.dtype != torch.bool else value.dtype
            same = computed_in(value.dtype) == computed_in(wanted)
            return text if same else f"{text}.to({computed_in(wanted)})"
        return _number(_python(arg))


def _python(arg: Any) -> Any:
    if isinstance(arg, Var):
        raise NotTriton("a number is needed, and a tensor is there")
    if isinstance(arg, tuple):
        return tuple(map(_python, arg))
    return arg.value if isinstance(arg, Literal) else arg


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise NotTriton(f"the number {value!r} is not known here")
    return repr(float(value)) if math.isfinite(value) else f'float("{value}")'


def _pointwise(form: str) -> Callable[[_Call], str]:
    """An op of each element: a form with the operands as `{0}`, `{1}`, ..."""

    def write(call: _Call) -> str:
        call.plain()
        if len(call.equation.args) != form_arguments(form):
            raise NotTriton(f"{call.equation.op.name} with these arguments is not known here")
        return form.format(*(f"({call.operand(arg)})" for arg in call.equation.args))

    return write


@cache
def form_arguments(form: str) -> int:
    """The number of operands in a form."""
    return max(place for place in range(4) if f"{{{place}}}" in form) + 1


def _added(sign: str) -> Callable[[_Call], str]:
    def write(call: _Call) -> str:
        call.plain("alpha")
        left, right = (call.operand(arg) for arg in call.equation.args[:2])
        alpha = call.keyword("alpha", 1)
        return (
            f"{left} {sign} {right}" if alpha == 1 else f"{left} {sign} {right} * {_number(alpha)}"
        )

    return write


def _compared(sign: str) -> Callable[[_Call], str]:
    def write(call: _Call) -> str:
        left, right = call.equation.args
        values = [call.kernel.read(arg) for arg in (left, right) if isinstance(arg, Var)]
        if len({value.dtype for value in values}) > 1:
            raise NotTriton("a comparison of two dtypes")
        return f"{call.operand(left)} {sign} {call.operand(right)}"

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
    if call.type.dtype == torch.bool:
        raise NotTriton("a cast to bool")
    return f"{call.value(0).text}.to({computed_in(call.type.dtype)})"


def _full(value: float | None) -> Callable[[_Call], str]:
    def write(call: _Call) -> str:
        given = _number(call.literal(1) if value is None else value)
        if not call.shape:
            raise NotTriton("a number that is made from nothing")
        return f"tl.full({_tuple(padded(call.shape))}, {given}, {computed_in(call.type.dtype)})"

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


def _reduced(*, is_mean: bool) -> Callable[[_Call], str]:
    def write(call: _Call) -> str:
        call.plain()
        value = call.value(0)
        dims = len(value.shape)
        given = call.literal(1) if len(call.equation.args) > 1 else None
        given = (given,) if isinstance(given, int) else given
        reduced = sorted({dim % dims for dim in given} if given else range(dims))
        if not dims or value.dtype != call.type.dtype:
            raise NotTriton("a sum that changes the dtype, or of a number")
        mask, text = _inside(value.shape, reduced), call.kernel.full(value)
        text = f"tl.where({mask}, {text}, 0.0)" if mask else text
        for dim in reversed(reduced):
            text = f"tl.sum({text}, {dim})"
        if call.literal(2, default=False) and len(reduced) < dims:
            index = ["None" if dim in reduced else ":" for dim in range(dims)]
            text = f"({text})[{', '.join(index)}]"
        elif len(call.shape) not in (0, dims - len(reduced)):
            raise NotTriton("a sum that keeps all dims")
        if is_mean:
            text = f"({text}) / {math.prod(value.shape[dim] for dim in reduced)}.0"
        return text

    return write


def _product(call: _Call, left: _Value, right: _Value) -> str:
    """A matrix product, by the hardware's units or as a sum of products."""
    if left.dtype != right.dtype or left.dtype == torch.bool:
        raise NotTriton("a product of two dtypes")
    (m, k), n = left.block, right.block[1]
    a, b = (_without_padding(call, value, dim) for value, dim in ((left, 1), (right, 0)))
    if min(m, k, n) >= 16:
        if left.dtype in HALVES:
            a, b = (f"{text}.to({TYPES[left.dtype]})" for text in (a, b))
        return f'tl.dot({a}, {b}, input_precision="ieee")'
    if m * k * n > MOST_PRODUCTS:
        raise NotTriton("a product that is not small")
    return f"tl.sum(({a})[:, :, None] * ({b})[None, :, :], 1)"


def _without_padding(call: _Call, value: _Value, dim: int) -> str:
    mask, text = _inside(value.shape, (dim,)), call.kernel.full(value)
    return f"tl.where({mask}, {text}, 0.0)" if mask else text


def _mm(call: _Call) -> str:
    call.plain()
    return _product(call, call.value(0), call.value(1))


def _addmm(call: _Call) -> str:
    call.plain()
    product = _product(call, call.value(1), call.value(2))
    return f"{call.operand(call.equation.args[0])} + {product}"


def _known_ops() -> Iterator[tuple[str, Callable[[_Call], str]]]:
    """The ops that steps may have, and their writers."""
    forms = {
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
    for name in ("tanh", "exp", "expm1", "log", "log1p", "sin", "cos", "sqrt", "rsqrt", "erf"):
        forms[name] = f"libdevice.{name}({{0}})"
    yield from ((name, _pointwise(form)) for name, form in forms.items())
    yield from (("add", _added("+")), ("sub", _added("-")))
    signs = {"gt": ">", "lt": "<", "ge": ">=", "le": "<=", "eq": "==", "ne": "!="}
    yield from ((name, _compared(sign)) for name, sign in signs.items())
    yield from (("where", _where), ("pow", _power), ("_to_copy", _cast))
    yield from ((name, _same) for name in ("detach", "alias", "clone"))
    yield from ((name, _transposed) for name in ("t", "transpose", "permute"))
    yield from (
        (name, _reshaped) for name in ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze")
    )
    yield from (("expand", _expanded), ("mm", _mm), ("addmm", _addmm))
    yield from (("full", _full(None)), ("zeros_like", _full(0.0)), ("ones_like", _full(1.0)))
    yield from (("zeros", _full(0.0)), ("ones", _full(1.0)))
    yield from (("sum", _reduced(is_mean=False)), ("mean", _reduced(is_mean=True)))


OPS = {f"aten.{name}": write for name, write in _known_ops()}
