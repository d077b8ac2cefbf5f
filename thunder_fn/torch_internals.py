"""Every private PyTorch API that thunder_fn uses, behind names of our own.

A new PyTorch release should break this file and no other.
"""

# Private names are what this file is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.util
import json
import logging
import sys
import threading
import types
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import sympy
import torch
from sympy.printing.precedence import PRECEDENCE, precedence
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards, dict_version
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import detect_fake_mode
from torch._higher_order_ops.effects import has_effects
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, disable_functional_mode
from torch.autograd import forward_ad
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv, ValueRangesSLoc
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._sympy.functions import ToFloat
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges
from torch.utils._traceback import CapturedTraceback

from thunder_fn.errors import InvalidTrace
from thunder_fn.trace import Dim, Expr, TensorType, type_of_value

__all__ = [
    "DATA_DEPENDENT_SHAPE",
    "DATA_DEPENDENT_VALUE",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "RecordingMode",
    "Tracer",
    "TracerMode",
    "compiling",
    "detect_fake_mode",
    "fake_like",
    "fake_of_type",
    "functionalize",
    "only_mode",
    "inner_fake",
    "is_below_tracers",
    "isolated",
    "without_torch_function_checks",
]

DATA_DEPENDENT_VALUE = DataDependentOutputException
DATA_DEPENDENT_SHAPE = DynamicOutputShapeException
INTERNAL_ERRORS = (UnsupportedFakeTensorException, UnsupportedOperatorException)
"""What PyTorch raises where an op has no rule for tensors without memory."""

OnOp = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
OnDecision = Callable[[Expr, "bool | float"], None]


# ---- recording: a fake tensor mode that reports every op below autograd and functionalization ----


_DEVICE = torch.ops.prim.device.default
_DETACH = torch.ops.aten.detach.default
"""A question that PyTorch asks of every tensor that it wraps."""


def _ignore_op(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    pass


class RecordingMode(FakeTensorMode):
    """FakeTensorMode that calls `on_op(overload, args, kwargs, result)` for every op that reaches it.

    It sits where FakeTensorMode always sits, at the bottom of the dispatcher's modes, so what it sees is functional
    and differentiation, batching and autocast have already happened.
    """

    supports_higher_order_operators = True

    def __init__(self, on_op: OnOp = _ignore_op, on_decision: OnDecision | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._on_decision, self._shared = on_decision, False
        self._on_op = on_op
        self._silent = 0
        self._assumption: tuple[bool, str | None] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        kwargs = kwargs or {}
        if self._silent:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is aten._to_copy.default and not isinstance(args[0], torch.Tensor):
            with self:  # a symbol that C++ code takes for a tensor
                return aten.scalar_tensor(args[0], dtype=kwargs.get("dtype"))
        if self._assumption is not None and func in QUESTIONS:
            return self._assume(QUESTIONS[func], args, kwargs, *self._assumption)
        with self.silent():
            rule = FAKE_RESULTS.get(func)
            result = NotImplemented if rule is None else self._result(rule, args, kwargs)
            if result is NotImplemented:
                result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            self._on_op(func, args, kwargs, result)
        return result

    def forget(self) -> None:
        """Drop what refers to the recorder, and with it every cycle."""
        self._on_op = _ignore_op
        if self._on_decision is not None and self.shape_env is not None and not self._shared:
            self.shape_env.on_decision = self.shape_env.on_assertion = None
        self._on_decision = None

    def share_numbers(self, outer: RecordingMode) -> None:
        """Compute with the symbols of the capture around this one."""
        self.shape_env, self._shared = outer.shape_env, outer.shape_env is not None

    def allow_data_dependent_sizes(self, on_assertion: Callable[[Expr], None], *, is_rule: bool) -> None:
        """Sizes and numbers that PyTorch finds in data are symbols from now on; told of what is demanded of them.

        In a rule they count as two or more, as PyTorch itself takes them where nothing depends on it.
        """
        self.numbers.on_assertion, self.numbers.least_size = on_assertion, 2 if is_rule else 0

    @property
    def numbers(self) -> Numbers:
        """What is known of symbols. Most captures have none, and no such thing."""
        if not isinstance(self.shape_env, Numbers):
            self.shape_env = Numbers(self._on_decision)
        return self.shape_env

    def size(self, dim: Dim) -> Any:
        """A size as PyTorch computes with it."""
        return self.numbers.number(dim) if isinstance(dim, Expr) else dim

    def _result(self, rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self:
            return rule(*args, **kwargs)

    def _assume(self, question: Callable[..., Any], args: Any, kwargs: Any, answer: bool, message: str | None) -> bool:
        """Answer a question about values, and record an assertion that the answer is right."""
        if message is not None:
            with self:
                condition = question(*args, **kwargs)
                aten._assert_async.msg(condition if answer else aten.logical_not(condition), message)
        return answer

    @contextlib.contextmanager
    def assuming(self, answer: bool, message: str | None = None) -> Generator[None]:
        """Inside, when PyTorch asks whether a tensor holds true, it does or does not; without a message unchecked.

        For functions that look at values only to check them, so that one answer means that all is well.
        """
        before, self._assumption = self._assumption, (answer, message)
        try:
            yield
        finally:
            self._assumption = before

    @contextlib.contextmanager
    def silent(self) -> Generator[None]:
        """Ops inside are not reported."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1


# ---- symbolic numbers ----


class Numbers(ShapeEnv):
    """PyTorch's ShapeEnv over symbols of ours: it does the algebra, and tells of each decision that depends on hints.

    `on_decision(question, answer)` is told of `s0 > 5` and what the hints say, or of `s0` and the number that it is
    taken for from now on.
    """

    def __init__(self, on_decision: OnDecision | None = None) -> None:
        super().__init__(duck_shape=False)
        self.on_decision = on_decision
        self.on_assertion: Callable[[Expr], None] | None = None
        self.least_size = 0

    def guard_or_defer_runtime_assert(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, orig_expr: Any, msg: str, fx_node: Any = None
    ) -> bool:
        """What has to hold of sizes that depend on data."""
        before = self.num_deferred_runtime_asserts
        result = super().guard_or_defer_runtime_assert(orig_expr, msg, fx_node)
        if self.num_deferred_runtime_asserts > before and self.on_assertion is not None:
            self.on_assertion(Expr(orig_expr))
        return result

    def number(self, expr: Expr) -> Any:
        """An expression as PyTorch computes with it. Symbols become known when they are first seen."""
        for symbol in sorted(expr.value.free_symbols, key=str):
            self._know(symbol)
        kind: Any = {int: torch.SymInt, float: torch.SymFloat, bool: torch.SymBool}[expr.kind]
        return kind(SymNode(expr.value, self, expr.kind, None))

    def computed(self, value: Any, hint: float | None) -> Any:
        """A float that an expression over known symbols computes, and what it is for their hints."""
        return torch.SymFloat(SymNode(value, self, float, hint))

    def _know(self, symbol: Any) -> None:
        if symbol in self.var_to_range:
            return
        hint = getattr(symbol, "hint", None)
        if hint is None:
            self._know_made(symbol)
            limits = ValueRanges(self.least_size, int_oo) if symbol.is_integer else ValueRanges(-sympy.oo, sympy.oo)
        elif isinstance(hint, float):
            self.backed_var_to_val[symbol] = sympy.Float(hint)  # pyright: ignore[reportArgumentType]
            limits = _between(symbol.bounds, -sympy.oo, sympy.oo, sympy.Float)
        else:
            self.backed_var_to_val[symbol] = sympy.Integer(hint)
            limits = _between(symbol.bounds, 2 if symbol.is_positive else -int_oo, int_oo, sympy.Integer)
        self.var_to_range[symbol] = limits
        here = self._get_sloc()
        self.var_to_range_sloc[symbol] = ValueRangesSLoc(here, here)
        self.var_to_sources[symbol] = []

    def create_unbacked_symint(self, *args: Any, **kwargs: Any) -> Any:
        """A size that an op finds in data."""
        size = super().create_unbacked_symint(*args, **kwargs)
        if self.least_size:
            self.var_to_range[size.node.expr] = ValueRanges(self.least_size, int_oo)
        return size

    def _constrain_range_for_size(self, a: Any, min: int | None = None, max: int | None = None) -> None:
        """What bounds a size; a rule is derived as if it were two or more, whatever there is room for."""
        super()._constrain_range_for_size(a, min, None if max is not None and max < self.least_size else max)

    def _know_made(self, symbol: Any) -> None:
        """New symbols get other names than one that depends on data."""
        self.var_to_stack[symbol] = CapturedTraceback.extract()  # which an error shows
        if symbol.is_integer:
            self.unbacked_symint_counter = max(self.unbacked_symint_counter, int(symbol.name[1:]) + 1)
        else:
            self.unbacked_symfloat_counter = max(self.unbacked_symfloat_counter, int(symbol.name[3:]) + 1)

    def _evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(self.guards)
        result = super()._evaluate_expr(orig_expr, *args, **kwargs)
        if len(self.guards) > before and self.on_decision is not None:
            self.on_decision(Expr(orig_expr), as_number(result))
        return result

    @property
    def constraints(self) -> tuple[Expr, ...]:
        """What has been decided."""
        return tuple(dict.fromkeys(Expr(guard.expr) for guard in self.guards))

    def simplified(self, expr: Expr) -> Any:
        """The expression, or the number that it is known to be, by everything that has been decided."""
        value = self.simplify(expr.value)
        return Expr(value) if value.free_symbols else as_number(value)

    def holds(self, relation: Any) -> bool:
        """A relation follows from what has been decided."""
        return self._maybe_evaluate_static(relation) == sympy.true


def _between(bounds: Any, least: Any, greatest: Any, kind: Callable[[Any], Any]) -> Any:
    """The range of a symbol with these bounds."""
    low, high = (None if bound is None else kind(bound) for bound in bounds)
    return ValueRanges(least if low is None else max(low, least), greatest if high is None else high)


def as_number(value: Any) -> bool | int | float:
    """A Python number from sympy's."""
    if value in (sympy.true, sympy.false):
        return bool(value)
    return int(value) if value.is_integer else float(value)


def to_float(value: Any) -> Any:
    """The expression of an int as that of a float."""
    return ToFloat(value)


def running_number(expr: Expr) -> Any:
    """An expression as PyTorch computes with it in the capture that this thread is in.

    Raises:
        InvalidTrace: no capture is running, so that the expression has no value.
    """
    mode = _get_dispatch_mode(_FAKE)
    if not isinstance(mode, RecordingMode):
        raise InvalidTrace(f"{expr} has no value here: nothing binds its symbols")
    return mode.size(expr)


class ExpressionPrinter(PythonPrinter):
    """Prints expressions as Python that computes them from Python's numbers."""

    def _print_Add(self, expr: Any, order: Any = None) -> str:
        terms = ((term, self._print(term)) for term in expr.as_ordered_terms())
        first, *rest = (f"({text})" if precedence(term) < PRECEDENCE["Add"] else text for term, text in terms)
        return first + "".join(f" - {term[1:]}" if term.startswith("-") else f" + {term}" for term in rest)

    def _print_Mul(self, expr: Any) -> str:
        if expr.as_coeff_Mul()[0].is_negative:
            return f"-{self.parenthesize(-expr, PRECEDENCE['Mul'], strict=True)}"
        return super()._print_Mul(expr)

    def _print_Float(self, expr: Any) -> str:
        return repr(float(expr))

    def _print_FloatStepBase(self, expr: Any) -> str:
        return expr.text(self)

    def _print_ToFloat(self, expr: Any) -> str:
        return f"float({self._print(expr.args[0])})"

    def _helper_sqrt(self, expr: Any) -> str:
        return f"math.sqrt({self._print(expr)})"


@functools.lru_cache(maxsize=65536)
def expression_text(value: Any) -> str:
    """The expression as Python computes it from variables that are called as its symbols."""
    return ExpressionPrinter().doprint(value)


SYMBOLIC_MATH: dict[str, Callable[[Any], Any]] = {
    name: getattr(torch, f"_sym_{name}")
    for name in ("sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan")
}
"""Functions of Python's `math` that PyTorch knows for symbolic numbers."""

NEEDS_A_NUMBER = GuardOnDataDependentSymNode
"""What PyTorch raises where Python asks about a size that depends on data."""


aten = torch.ops.aten

QUESTIONS: dict[Any, Callable[..., Any]] = {
    aten.equal.default: lambda a, b: aten.all(aten.eq(a, b)),
    aten.allclose.default: lambda *args, **kwargs: aten.all(aten.isclose(*args, **kwargs)),
    aten._local_scalar_dense.default: lambda a: aten.ne(a, 0),
}
"""Ops with which PyTorch asks whether something is true, and the answer as a tensor."""


def _lstsq(a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """Residuals are computed for more equations than unknowns, by gels always, by gelsd and gelss if the rank is full."""
    driver = driver or ("gelsy" if a.device.type == "cpu" else "gels")
    (m, n), batch = a.shape[-2:], list(a.shape[:-2])
    if m > n and driver in ("gelsd", "gelss"):
        return NotImplemented
    is_vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and a.shape[:-1] == b.shape)
    columns = [] if is_vector else [b.shape[-1]]
    both = list(torch.broadcast_shapes(a.shape[:-2], b.shape[: -1 if is_vector else -2]))
    residuals = [*both, *(columns or [1])] if m > n and driver == "gels" else [0]
    real = a.dtype.to_real()
    return (
        b.new_empty([*both, n, *columns]),
        b.new_empty(residuals, dtype=real),
        a.new_empty([0] if driver == "gels" else batch, dtype=torch.int64),
        a.new_empty([*batch, min(m, n)] if driver in ("gelsd", "gelss") else [0], dtype=real),
    )


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, *args: Any, **kwargs: Any
) -> Any:
    batch = len(target_lengths)
    longest = max(target_lengths, default=0)
    alpha = log_probs.new_empty([batch, log_probs.shape[0], 2 * longest + 1])
    return log_probs.new_empty([batch] if log_probs.dim() == 3 else []), alpha


def _cdist_backward(grad: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor, p: float, cdist: torch.Tensor) -> Any:
    """One gradient for each pair of batches; autograd sums them."""
    return x1.new_empty([*torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2]), *x1.shape[-2:]])


def _rnn_layer(*args: Any) -> Any:
    """With the workspace that its backward needs, whose size oneDNN decides: PyTorch says that it is empty."""
    asked = tuple((tuple(arg.shape), arg.dtype) if isinstance(arg, torch.Tensor) else _frozen(arg) for arg in args)
    *results, workspace = torch._meta_registrations.mkldnn_rnn_layer(*args)
    return *results, workspace.new_empty(_workspace_bytes(asked))


def _frozen(arg: Any) -> Any:
    return tuple(arg) if isinstance(arg, list) else arg


@functools.lru_cache(maxsize=1024)
def _workspace_bytes(asked: tuple[Any, ...]) -> int:
    """Found by running the layer once on zeros, since nothing else knows."""
    with isolated(), no_torch_function():
        args = [torch.zeros(one[0], dtype=one[1]) if _is_type(one) else one for one in asked]
        return runnable(aten.mkldnn_rnn_layer.default)(*args)[-1].numel()


def _is_type(asked: Any) -> bool:
    return isinstance(asked, tuple) and len(asked) == 2 and isinstance(asked[1], torch.dtype)


FAKE_RESULTS: dict[Any, Callable[..., Any]] = {
    aten.mkldnn_rnn_layer.default: _rnn_layer,
    aten._cdist_backward.default: _cdist_backward,
    aten._ctc_loss.default: _ctc_loss,
    aten.linalg_lstsq.default: _lstsq,
}
"""Results of ops that PyTorch says depend on data and whose shape does not, or whose shape it says wrongly."""


def call_on_fakes(overload: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Call an op on fake tensors, in their mode."""
    rule = FAKE_RESULTS.get(overload)
    result = NotImplemented if rule is None else rule(*args, **kwargs)
    return overload(*args, **kwargs) if result is NotImplemented else result


@contextlib.contextmanager
def only_mode(mode: RecordingMode) -> Generator[None]:
    """Tensors made inside are fake tensors of mode and of no torch.func level, and nothing is reported."""
    outside = temporarily_clear_interpreter_stack()
    with outside, torch._C.DisableTorchFunction(), disable_functional_mode(), mode.silent(), mode:
        yield


def fake_like(mode: RecordingMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of mode with the dtype, sizes, strides and device of `tensor`, unrelated to it otherwise."""
    with no_torch_function():
        shape, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
    with _only_memory():
        if not offset:
            elem = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
        else:
            extent = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            memory = torch.empty(offset + extent, dtype=tensor.dtype, device="meta")
            elem = torch.as_strided(memory, shape, stride, offset)
        return FakeTensor(mode, elem, tensor.device)


def symbolic_like(
    mode: RecordingMode, tensor: torch.Tensor, shape: Sequence[Dim], stride: Sequence[Dim]
) -> torch.Tensor:
    """A fake tensor of mode with these sizes and strides."""
    sizes, steps = tuple(map(mode.size, shape)), tuple(map(mode.size, stride))
    with only_mode(mode):
        return torch.empty_strided(sizes, steps, dtype=tensor.dtype, device=tensor.device)


def fake_of_type(mode: RecordingMode, type: TensorType, *, is_transposed: bool = False) -> torch.Tensor:
    """A contiguous fake tensor of mode, or the transpose of a contiguous matrix."""
    shape = tuple(map(mode.size, type.shape))
    with _only_memory():
        if is_transposed:
            elem = torch.empty_strided(shape, (1, shape[0]), dtype=type.dtype, device="meta")
        else:
            elem = torch.empty(shape, dtype=type.dtype, device="meta")
        return FakeTensor(mode, elem, type.device)


def fake_as(mode: RecordingMode, fake: torch.Tensor) -> torch.Tensor:
    """Another fake tensor of mode, with this one's type and strides."""
    with _only_memory():
        elem = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
        return FakeTensor(mode, elem, fake.device)


def fake_mode() -> RecordingMode:
    """A fake tensor mode that records nothing: for functions that are asked about types."""
    return RecordingMode()


def fake_in(mode: RecordingMode, type: TensorType) -> torch.Tensor:
    """A contiguous fake tensor of such a mode."""
    with isolated(), no_torch_function(), mode:
        return torch.empty(tuple(map(mode.size, type.shape)), dtype=type.dtype, device=type.device)


@contextlib.contextmanager
def _only_memory() -> Generator[None]:
    """No mode and no torch.func level sees the tensors that are made inside."""
    outside = temporarily_clear_interpreter_stack()
    with outside, torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def custom_op_name(op: Any) -> str | None:
    """The name of the overload of an op that `torch.library.custom_op` made; None for anything else."""
    return str(op._opoverload) if isinstance(op, torch.library.CustomOpDef) else None


# ---- tracers: functional tensors that know what they are ----


class Tracer(FunctionalTensor):
    """A tensor without values, in a function that is being traced. It has a dtype, a shape and a device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]  # as PyTorch itself does

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return super().__torch_dispatch__(func, _without_tracers(types), args, kwargs)

    def __repr__(self, **options: Any) -> str:
        with torch._C.DisableTorchFunction():
            return f"Tracer({type_of_value(self)})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __copy__(self) -> torch.Tensor:
        return self.view(self.shape)


_SPECIAL_IN_FUNCTIONAL = (
    *("__bool__", "tolist", "to", "cuda", "char", "cpu", "bfloat16", "byte", "double", "float", "bool", "half"),
    *("int", "long", "to_dense", "layout"),
)
# Tracers have the methods of all tensors, which the capture sees as torch functions.
for _name in _SPECIAL_IN_FUNCTIONAL:
    setattr(Tracer, _name, getattr(torch.Tensor, _name))


def _without_tracers(types: Any) -> tuple[type, ...]:
    return tuple(FunctionalTensor if kind is Tracer else kind for kind in types)


def _ignore_tensor(tensor: torch.Tensor) -> None:
    pass


class SymbolicTracing(Exception):
    """`make_fx` runs inside a capture. What it would see are tracers' insides, and what it returns would be wrong."""


_get_dispatch_mode = torch._C._get_dispatch_mode
_PROXY, _FAKE = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE


@functools.cache
def _draws_in_place(func: Any) -> bool:
    return (
        torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable and func._schema.name.endswith("_")
    )


def is_strided_draw(func: Any, args: Any) -> bool:
    """Random numbers are written into a tensor whose dimensions are not in the order of its memory."""
    if not isinstance(func, OpOverload) or not _draws_in_place(func) or args[0].is_contiguous():
        return False
    return _memory_order(args[0]) != list(range(args[0].dim()))


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """The dims from the outermost in memory to the innermost."""
    return sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))


def _draw_in_memory_order(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """As eager fills it: strides are no part of a trace, so the order of the dimensions becomes an equation."""
    target, *rest = args
    order = _memory_order(target)
    rest = [item.expand_as(target).permute(order) if isinstance(item, torch.Tensor) else item for item in rest]
    func(target.permute(order), *rest, **kwargs)
    return target


class WritesAndReads(Protocol):
    """Who wants to know what ops change in place and which tensors share memory."""

    def changing(
        self, tensors: list[torch.Tensor], others: list[torch.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Around an op that changes tensors in place: those, and the op's others."""
        ...

    def bring_up_to_date(self, tensors: Iterable[torch.Tensor]) -> None:
        """Before an op reads tensors where gradients are off."""
        ...

    def viewed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of which a view is taken in place of this one, where gradients are off."""
        ...

    def detached(self, source: torch.Tensor, alias: torch.Tensor) -> None:
        """After `alias = source.detach()`."""
        ...


OUT_OF_PLACE: dict[Any, Callable[..., Any]] = {aten.polygamma_.default: lambda x, n: aten.polygamma.default(n, x)}
"""In-place ops that functionalization does not know."""


def changed_tensors(func: Any, args: tuple[Any, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tracers among the arguments that an op changes in place, and the other ones."""
    if not isinstance(func, OpOverload) or not func._schema.is_mutable:
        return [], []
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for known, arg in zip(func._schema.arguments, args, strict=False):
        items = arg if isinstance(arg, (list, tuple)) else (arg,)
        found[0 if known.is_write else 1].extend(item for item in items if isinstance(item, Tracer))
    return found


class TracerMode(FunctionalTensorMode):
    """FunctionalTensorMode whose tensors are tracers; `on_new` is told of each.

    `on_higher_order` is called instead of PyTorch's ops that take functions; `pure_call` gives what to call instead of an
    op that changes tensors in place and that functionalization does not know.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        on_new: Callable[[torch.Tensor], None],
        on_higher_order: Callable[[Any, Any, Any], Any] | None = None,
        history: WritesAndReads | None = None,
        pure_call: Callable[[OpOverload], Callable[..., Any] | None] = lambda func: None,
    ) -> None:
        super().__init__()
        self.pure_call = pure_call
        self.on_new = on_new
        self.on_higher_order = on_higher_order
        self.history = history

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if _get_dispatch_mode(_PROXY) is not None:
            raise SymbolicTracing
        if self.history is None:
            return self._dispatch(func, types, args, kwargs or {})
        changed, others = changed_tensors(func, args)
        if changed:
            with self.history.changing(changed, others):
                return self._dispatch(func, types, args, kwargs or {})
        if not torch.is_grad_enabled():
            leaves = torch_pytree.tree_leaves((args, kwargs))
            self.history.bring_up_to_date(leaf for leaf in leaves if isinstance(leaf, Tracer))
            if isinstance(func, OpOverload) and func.is_view and isinstance(args[0], Tracer):
                args = (self.history.viewed(args[0]), *args[1:])
        result = self._dispatch(func, types, args, kwargs or {})
        if func is _DETACH:
            self.history.detached(args[0], result)
        return result

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(func, HigherOrderOperator) and self.on_higher_order is not None:
            return self.on_higher_order(func, args, kwargs or {})
        if is_strided_draw(func, args):
            with self:
                return _draw_in_memory_order(func, args, kwargs or {})
        if has_effects(func):
            return self._run_effect(func, args, kwargs or {})
        if func in OUT_OF_PLACE:
            with self:
                return args[0].copy_(OUT_OF_PLACE[func](*args, **kwargs))
        pure = self.pure_call(func) if isinstance(func, OpOverload) else None
        if pure is not None:
            with self:
                return pure(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            result = super().__torch_dispatch__(func, _without_tracers(types), args, kwargs)  # pyright: ignore[reportArgumentType]
        if type(result) is FunctionalTensor:
            self.adopt(result)
        elif isinstance(result, (list, tuple)):
            for item in result:
                if type(item) is FunctionalTensor:
                    self.adopt(item)
        return result

    def _run_effect(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op with an effect as what it is: the order of the equations is order enough."""
        args, kwargs = torch_pytree.tree_map_only(FunctionalTensor, inner_fake, (args, kwargs))
        result = func(*args, **kwargs)
        return torch_pytree.tree_map_only(torch.Tensor, lambda fake: functionalize(fake, self), result)

    def forget(self) -> None:
        """Drop what refers to the recorder, and with it every cycle."""
        self.on_new = _ignore_tensor
        self.on_higher_order = None
        self.history = None

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a functional tensor a tracer."""
        tensor.__class__ = Tracer
        self.on_new(tensor)
        return tensor


def functionalize(fake: torch.Tensor, mode: TracerMode) -> torch.Tensor:
    """Wrap a fake tensor so that in-place code and views on it come out pure. It is of no torch.func level."""
    with temporarily_clear_interpreter_stack(), mode:
        return mode.adopt(FunctionalTensor.to_functional(fake))


def plain(value: Any) -> Any:
    """A tensor without a conjugate or negative bit: values in a trace have none."""
    if isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()):
        return value.resolve_conj().resolve_neg()
    return value


def base_of(tracer: torch.Tensor) -> torch.Tensor | None:
    """The tracer that autograd knows this one as a view of, if it is one."""
    with torch._C.DisableTorchFunction():
        return tracer._base


def memory_in(tracer: torch.Tensor) -> torch.Tensor:
    """The functional tensor in a tracer, which its views share."""
    return tracer.elem  # type: ignore[attr-defined]


def give_memory(tracer: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Memory of its own for a tracer, with a fake tensor in it. Views of what it was do not follow."""
    with _only_memory():
        tracer.elem = torch._to_functional_tensor(fake)  # type: ignore[attr-defined]
    return memory_in(tracer)


def write_memory(memory: torch.Tensor, fake: torch.Tensor) -> None:
    """Another fake tensor in the memory; its views follow."""
    with torch._C.DisableTorchFunction():
        torch._functionalize_replace(memory, fake)
        torch._functionalize_commit_update(memory)
        torch._functionalize_sync(memory)


def read_memory(memory: torch.Tensor) -> torch.Tensor:
    """The fake tensor in the memory, after pending view updates."""
    with torch._C.DisableTorchFunction():
        torch._sync(memory)
        return torch._from_functional_tensor(memory)


def inner_fake(tensor: torch.Tensor) -> torch.Tensor:
    """The up-to-date fake tensor inside a functional one; replays pending view updates."""
    with torch._C.DisableTorchFunction():
        torch._sync(tensor)
        return torch._from_functional_tensor(tensor.elem)  # type: ignore[attr-defined]


def is_below_tracers(tensor: torch.Tensor, mode: RecordingMode) -> bool:
    """The tensor is what a tracer is made of: PyTorch's own machinery is at work, not the traced function."""
    if isinstance(tensor, FakeTensor):
        return tensor.fake_mode is mode
    return torch._is_functional_tensor(tensor) and not isinstance(tensor, FunctionalTensor)


_levels_outside: ContextVar[int] = ContextVar("thunder_fn_levels_outside", default=0)


@contextlib.contextmanager
def isolated() -> Generator[None]:
    """No modes and no torch.func levels: a capture starts from nothing but the grad mode, whatever runs around it."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    token = _levels_outside.set(depth + _levels_outside.get())
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    if all(anomaly):  # looking for NaN takes values
        torch.set_anomaly_enabled(True, False)
    try:
        with (
            temporarily_clear_interpreter_stack(),
            _disable_current_modes(),
            torch.autograd.set_multithreading_enabled(False),
            outside_inference_mode(),
        ):
            yield
    finally:
        _levels_outside.reset(token)
        if all(anomaly):
            torch.set_anomaly_enabled(*anomaly)


@contextlib.contextmanager
def outside_inference_mode() -> Generator[None]:
    """Inference mode off, gradients on or off as they were: functional tensors look for memory in inference mode."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        yield


@contextlib.contextmanager
def outside_torch_func() -> Generator[None]:
    """What is done to a tensor inside is done to itself, not at the level of the torch.func transforms around."""
    with temporarily_clear_interpreter_stack(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def no_autocast_cache() -> Generator[None]:
    """Weights cast by autocast are cast anew, so that no cast made in one capture is used in another."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


# ---- torch.compiler.is_compiling() answers True in the threads that capture, and only there ----


class Patch:
    """Replaces attributes of PyTorch's while at least one thread needs it.

    `make` gives the replacements, each from what it replaces. With the last user, what was there comes back, unless
    somebody else has replaced it meanwhile.
    """

    def __init__(self, *replacements: tuple[Any, str, Callable[[Any], Any]]) -> None:
        self._replacements = replacements
        self._lock = threading.RLock()
        self._users = 0
        self._done: list[tuple[Any, str, Any, Any, bool]] = []

    @property
    def users(self) -> int:
        """How many need it now."""
        return self._users

    @contextlib.contextmanager
    def applied(self) -> Generator[None]:
        """The replacements are in place, for this user and all who come meanwhile."""
        with self._lock:
            if self._users == 0:
                for owner, name, make in self._replacements:
                    before, own = getattr(owner, name), name in vars(owner)
                    setattr(owner, name, make(before))
                    self._done.append((owner, name, before, getattr(owner, name), own))
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                while self._users == 0 and self._done:
                    owner, name, before, ours, own = self._done.pop()
                    if getattr(owner, name) is not ours:
                        continue
                    if own:
                        setattr(owner, name, before)
                    else:
                        delattr(owner, name)


class _Depth(threading.local):
    value = 0


_capturing = _Depth()


class _CompilingFlag:
    """Stands for `torch.compiler._is_compiling_flag`: true in threads that capture, elsewhere what it was."""

    def __init__(self, before: Any) -> None:
        self.before = False if isinstance(before, _CompilingFlag) else before

    def __bool__(self) -> bool:
        return _capturing.value > 0 or bool(self.before)

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    __ror__, __rand__ = __or__, __and__


def _compile_nothing(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What Dynamo does with its callback, made so that `torch.compile`d functions run as they are in threads that capture."""

    def callback_from_stance(callback: Any) -> Any:
        if not _capturing.value:
            return original(callback)
        count_frames = getattr(torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)
        if count_frames is not None:
            count_frames(-1)  # with fullgraph=True it asks afterwards whether something was compiled
        return None

    return callback_from_stance


def _no_meta_log(record: logging.LogRecord) -> bool:
    """While capturing, a wrong shape is an exception for the user and no news for the log."""
    return _capturing.value == 0 or not str(record.msg).startswith("failed while attempting to run meta")


logging.getLogger("torch._subclasses.fake_tensor").addFilter(_no_meta_log)

_compiling_flag = Patch((torch.compiler, "_is_compiling_flag", _CompilingFlag))
_dynamo: list[Patch] = []


@contextlib.contextmanager
def compiling() -> Generator[None]:
    """`torch.compiler.is_compiling()` is true in this thread, and `torch.compile`d functions run as they are.

    Libraries then skip their data-dependent checks.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None and not _dynamo:
        _dynamo.append(Patch((frames, "_callback_from_stance", _compile_nothing)))
    with _compiling_flag.applied(), _dynamo[0].applied() if _dynamo else contextlib.nullcontext():
        _capturing.value += 1
        try:
            yield
        finally:
            _capturing.value -= 1


def is_tensor_type(cls: type) -> bool:
    """The class in C that tensors have their methods from."""
    return cls is torch._C.TensorBase


def is_told_to_modes(fn: types.BuiltinFunctionType) -> bool:
    """A call of the function is told to every TorchFunctionMode."""
    owner = getattr(fn, "__self__", None)
    if owner is None or owner is torch._C._VariableFunctions:
        return fn.__module__ == "torch"
    return isinstance(owner, types.ModuleType) and owner.__name__.startswith("torch._C._")


class _FirstCall(torch.overrides.TorchFunctionMode):
    """Remembers the function of the first call, and calls nothing."""

    func: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.func = self.func or func
        return NotImplemented


def arrives_as(fn: Any) -> Any:
    """The function that modes are told of where `fn` is called: `x + y` arrives as `Tensor.add`."""
    if not isinstance(fn, types.MethodDescriptorType) or not fn.__name__.startswith("__"):
        return fn
    x = torch.zeros(())
    for args in ((x,), (x, x)):
        with _FirstCall() as first, contextlib.suppress(TypeError):
            fn(*args)
        if first.func is not None:
            return first.func
    return fn


def numbers_of_numpy() -> contextlib.AbstractContextManager[Any]:
    """What Dynamo compiles meanwhile draws `numpy.random`'s numbers from NumPy's generator, outside of graphs."""
    import torch._dynamo

    return torch._dynamo.config.patch(use_numpy_random_stream=True)


CUSTOM_OPS = "torch._library.autograd"
"""The module of the autograd functions that `torch.library.register_autograd` makes."""


def calls_patch(
    module_call: Callable[[Any], Any], function_inputs: Callable[[Any], Any], random: dict[str, Callable[[Any], Any]]
) -> Patch:
    """`nn.Module.__call__`, what `autograd.Function.apply` does to its inputs, and functions of `torch.random`, as ours."""
    utils = torch._functorch.utils
    generator = [(owner, name, make) for name, make in random.items() for owner in (torch, torch.random)]
    return Patch(
        (torch.nn.Module, "__call__", module_call), (utils, "unwrap_dead_wrappers", function_inputs), *generator
    )


# ---- torch functions written in Python ----

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _no_torch_function(*args: Any) -> bool:
    return False


def without_torch_function_checks(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a Python torch function that skips its own `has_torch_function` check.

    Run under a TorchFunctionMode, the copy's body is seen by the mode though the function itself has been already.
    The original is not touched.
    """
    code, names = function.__code__, function.__globals__
    if not any(name in names for name in _CHECKS):
        return function
    patched = {**names, **{name: _no_torch_function for name in _CHECKS if name in names}}
    copy = types.FunctionType(code, patched, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


IS_ALL_TRUE = torch._is_all_true
"""What `torch.distributions` asks to validate its arguments."""


def is_from_outside(wrapped: torch.Tensor) -> bool | None:
    """Whether a torch.func wrapper was made by a transform around the capture; None where that cannot be told.

    Inside a capture the transforms are numbered anew, so a wrapper of a level that is not running is from outside.
    """
    functorch = torch._C._functorch
    if not _levels_outside.get():
        return False
    inner = wrapped
    while functorch.is_functorch_wrapped_tensor(inner):
        inner = functorch.get_unwrapped(inner)
    if isinstance(inner, Tracer) and _get_dispatch_mode(_FAKE) is fake_mode_of(inner):
        return False
    return True if functorch.maybe_get_level(wrapped) > functorch.get_dynamic_layer_stack_depth() else None


no_torch_function = torch._C.DisableTorchFunction
"""Context: torch function modes and subclasses see nothing."""

symbolic_dispatch = torch._C._EnablePythonDispatcher
"""Context: ops that PyTorch composes of others are composed by Python code, which computes with symbolic numbers."""

no_autocast = torch._C._DisableAutocast
"""Context: autocast is off on every device."""


_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


def autocast_off() -> contextlib.AbstractContextManager[None]:
    """Inside, autocast is off, until somebody turns it on: a trace says which casts there are."""
    return _autocast_off() if torch._C._is_any_autocast_enabled() else _NOTHING


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


@contextlib.contextmanager
def _autocast_off() -> Generator[None]:
    devices = [device for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
    for device in devices:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in devices:
            torch.set_autocast_enabled(device, True)


def without_autocast(run: Callable[..., Any], take: Callable[[list[Any]], Any] | None = None) -> Callable[..., Any]:
    """The function with autocast off, and so its attribute `take`."""

    def run_without_autocast(*args: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return run(*args)
        with _autocast_off():
            return run(*args)

    if take is not None:
        run_without_autocast.take = without_autocast(take)  # type: ignore[attr-defined]
    return run_without_autocast


@functools.cache
def autocast_ops(device: str) -> frozenset[str]:
    """The names of the ATen ops for which autocast has a rule on a type of device."""
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU", "mps": "AutocastMPS"}.get(device)
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key) if key else []
    return frozenset(name.removeprefix("aten::").split(".")[0] for name in names if name.startswith("aten::"))


_PLAIN_DISPATCH = {torch.Tensor.__torch_dispatch__, FakeTensor.__torch_dispatch__, Tracer.__torch_dispatch__}
_PLAIN_FUNCTION = {torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl}


def has_own_dispatch(tensor: torch.Tensor) -> bool:
    """The tensor's class changes what PyTorch's functions or ops do."""
    cls = type(tensor)
    if cls in (torch.Tensor, torch.nn.Parameter, FakeTensor, Tracer):
        return False
    function = getattr(cls.__torch_function__, "__func__", cls.__torch_function__)
    return function not in _PLAIN_FUNCTION or cls.__torch_dispatch__ not in _PLAIN_DISPATCH


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """The tensor is one of torch.func's wrappers."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def fake_mode_of(tracer: torch.Tensor) -> Any:
    """The fake tensor mode that a functional tensor's inside belongs to, if any."""
    return getattr(torch._from_functional_tensor(tracer.elem), "fake_mode", None)  # type: ignore[attr-defined]


def is_tracer(value: Any) -> bool:
    """A tracer, perhaps inside the wrappers of torch.func."""
    if not isinstance(value, torch.Tensor):
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return isinstance(value, Tracer)


def has_type(tensor: torch.Tensor) -> bool:
    """The tensor is described by its dtype, shape and device."""
    return tensor.layout is torch.strided and tensor.dtype not in _QUANTIZED


_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def is_plain(tensor: torch.Tensor) -> bool:
    """A tensor of the common kind, for a quick look."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Two tensors have a storage in common, and ranges in it that overlap."""
    with no_torch_function():
        if storage_id(a) != storage_id(b) or not a.numel() or not b.numel():
            return False
        (low, high), (other_low, other_high) = _range(a), _range(b)
        return low < other_high and other_low < high


class _Result(torch.autograd.Function):
    """Makes a tensor the result of a computation that nobody follows."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        return None, None


def become_result(tensor: torch.Tensor) -> None:
    """The tensor requires a gradient and is no leaf: unlike leaves it may be changed in place."""
    with torch.enable_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        _Result.apply(torch.empty(0, requires_grad=True), tensor)


def storage_id(tensor: torch.Tensor) -> int:
    """The same number for tensors in the same memory."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata


def _range(tensor: torch.Tensor) -> tuple[Any, Any]:
    """The first byte in the storage, and the one after the last."""
    first = tensor.storage_offset() * tensor.itemsize
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (steps + 1) * tensor.itemsize


# ---- PyTorch's own higher-order functions ----

HIGHER_ORDER = {
    "cond": ("torch._higher_order_ops.cond", "cond"),
    "while_loop": ("torch._higher_order_ops.while_loop", "while_loop"),
    "scan": ("torch._higher_order_ops.scan", "scan"),
    "associative_scan": ("torch._higher_order_ops.associative_scan", "associative_scan"),
    "map": ("torch._higher_order_ops.map", "map"),
    "cond operator": ("torch._higher_order_ops.cond", "CondOp.__call__"),
    "while_loop operator": ("torch._higher_order_ops.while_loop", "WhileLoopOp.__call__"),
    "scan operator": ("torch._higher_order_ops.scan", "ScanOp.__call__"),
    "map operator": ("torch._higher_order_ops.map", "MapImpl.__call__"),
    "strict_mode operator": ("torch._higher_order_ops.strict_mode", "StrictMode.__call__"),
    "checkpoint": ("torch.utils.checkpoint", "checkpoint"),
    "autograd function": ("torch.autograd.function", "Function.apply.__func__"),
    "optimizer scalar dtype": ("torch.optim.optimizer", "_get_scalar_dtype"),
    "linearize": ("torch._functorch.eager_transforms", "linearize"),
    "flex_attention warning": ("torch.nn.attention.flex_attention", "_warn_once"),
    "flex_attention index": ("torch._dynamo._trace_wrapped_higher_order_op", "ModIndex.apply.__func__"),
    "flex_attention": ("torch._higher_order_ops.flex_attention", "FlexAttentionHOP.__call__"),
}
"""Where they are. A user may have imported them from elsewhere, but they are these objects."""


def higher_order_function(name: str) -> types.FunctionType | None:
    """One of these functions; None while nobody has imported its module, or where this PyTorch has none."""
    module, path = HIGHER_ORDER[name]
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, types.FunctionType) else None


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Tells when a module has been imported. First in `sys.meta_path`, it leaves finding to the others."""

    def __init__(self, modules: dict[str, list[str]], told: Callable[[str], object]) -> None:
        self.modules, self.told = modules, told

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        names = self.modules.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if names is not None else None
        if names is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            for name in names:
                self.told(name)

        spec.loader.exec_module = exec_module
        return spec


@contextlib.contextmanager
def on_import(names: Iterable[str], told: Callable[[str], object]) -> Generator[None]:
    """Inside, the import of a module with one of these higher-order functions is told."""
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(HIGHER_ORDER[name][0], []).append(name)
    watcher = _ImportWatcher(modules, told)
    sys.meta_path.insert(0, watcher)
    try:
        yield
    finally:
        sys.meta_path.remove(watcher)


FUNCTION_APPLY: Any = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
"""`torch.autograd.Function.apply`, as a function of the class and the arguments."""


def forward_pre_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """What runs before the module's forward."""
    return list(module._forward_pre_hooks.values())


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Autograd would run a hook of this module, or of all modules, in its backward."""
    everywhere = torch.nn.modules.module
    of_all = everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks
    return bool(of_all or module._backward_hooks or module._backward_pre_hooks)


def has_setup_context(cls: Any) -> bool:
    """An autograd function's `forward` takes no context."""
    return torch.autograd.function._is_setup_context_defined(cls.setup_context)


def vmap_info(size: int, randomness: str) -> Any:
    """What the `vmap` staticmethod of an autograd function is told."""
    from torch._functorch.autograd_function import VmapInfo

    return VmapInfo(size, randomness)


def math_attention(*args: Any) -> Any:
    """PyTorch's eager flex_attention: attention as its definition has it, the user's functions batched by vmap."""
    from torch._higher_order_ops.flex_attention import math_attention

    return math_attention(*args)


def pytorchs_scan(*args: Any, **kwargs: Any) -> Any:
    """PyTorch's own scan, to be measured beside ours."""
    from torch._higher_order_ops import scan

    return scan(*args, **kwargs)


# ---- decompositions ----


@functools.cache
def load_forward_decompositions() -> None:
    """Import PyTorch's decompositions for forward AD, which it scripts with a function that it deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def decomposition_of(overload: OpOverload) -> Callable[..., Any] | None:
    """PyTorch's decomposition of an op: from its Python tables, or the C++ one of a composite op."""
    from torch._decomp import decomposition_table

    if overload in decomposition_table:
        return decomposition_table[overload]
    if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), torch._C.DispatchKey.CompositeImplicitAutograd):
        return overload.decompose
    return None


# ---- calls: C functions for overloads, and running below autograd ----

below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context: ops skip autograd's part of the dispatcher. Half a microsecond to enter, a tenth saved on each op."""


def runnable(overload: OpOverload) -> Callable[..., Any]:
    """The overload as a program calls it: a kernel that saves what its backward needs is asked to save it, and one that refuses
    layouts gets one that it takes."""
    if overload in _ONE_LAYOUT:
        return functools.partial(_in_one_layout, overload, _ONE_LAYOUT[overload])
    if overload is not torch.ops.aten.mkldnn_rnn_layer.default:
        return overload

    def save_workspace(*args: Any) -> Any:
        if torch.is_grad_enabled():
            return overload(*args)
        with below_autograd(), torch.enable_grad():
            return overload(*args)

    return save_workspace


_ONE_LAYOUT = {
    torch.ops.aten.native_group_norm.default: (0,),
    torch.ops.aten.native_group_norm_backward.default: (1, 0),
}
"""Kernels that refuse a layout which they would compute as another one, and the operands that have to have it."""

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _in_one_layout(overload: OpOverload, positions: tuple[int, ...], *args: Any) -> Any:
    """The call with operands that are contiguous, or in the order of channels last if the first one is."""
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
    """Not a plain tensor: nobody asks for its strides."""
    return type(x) not in (torch.Tensor, torch.nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(x)


def _in_format(x: torch.Tensor, format: torch.memory_format) -> torch.Tensor:
    """x with the very strides of a format, where sizes of one have some too."""
    if format == torch.contiguous_format:
        return x.contiguous()
    strides = torch._prims_common.make_channels_last_strides_for(x.shape)
    return x if x.stride() == tuple(strides) else x.clone(memory_format=format)


def _keys_of_autograd() -> Any:
    outside = torch._C._dispatch_tls_local_exclude_set()
    with below_autograd():
        return torch._C._dispatch_tls_local_exclude_set() - outside


_AUTOGRAD_KEYS = _keys_of_autograd()


@contextlib.contextmanager
def autograd_as_usual() -> Generator[None]:
    """Inside `below_autograd`, code of users runs as it does outside: it may use autograd itself."""
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradOther):
        yield
        return
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded - _AUTOGRAD_KEYS):
        yield


_C_MODULES = (
    ("torch", torch._C._VariableFunctions),
    ("torch._C._nn", torch._C._nn),
    ("torch.special", torch._C._special),
    ("torch.linalg", torch._C._linalg),
    ("torch.fft", torch._C._fft),
    ("torch.Tensor", torch._C.TensorBase),
)


def c_functions(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """PyTorch's C-bound functions of this name, with where they are from. They are called faster than overloads."""
    for label, module in _C_MODULES:
        function = getattr(module, name, None)
        if function is not None and type(function).__name__ in ("builtin_function_or_method", "method_descriptor"):
            yield label, function


def has_kernel(name: str, device: str) -> bool:
    """The op, `aten::add` say, runs on this type of device."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device)
    return key is None or torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def is_decomposed(overload: OpOverload) -> bool:
    """The op has no kernel: PyTorch runs it as other ops, and may return an input as it is."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        overload.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )


def schema_of(overload: OpOverload) -> Any:
    """The op's schema: `arguments`, each with `name`, `type`, `kwarg_only` and `alias_info`, `returns`, `is_mutable`."""
    return overload._schema


def has_own_functionalization(overload: OpOverload) -> bool:
    """The op says itself what it is without changing anything in place."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "Functionalize")


def schema_arguments(overload: OpOverload) -> list[Any]:
    """The op's arguments."""
    return list(schema_of(overload).arguments)


class _FirstOp(Exception):
    """Carries the first op that a call dispatches out of it, before any kernel runs."""


class _FirstOpMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _FirstOp(func, tuple(args), dict(kwargs or {}))


def first_op(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The overload and the arguments with which a call first reaches the dispatcher, None if it fails before."""
    with isolated(), torch._C.DisableTorchFunction(), torch.no_grad(), _FirstOpMode():
        try:
            function(*args, **kwargs)
        except _FirstOp as found:
            return found.args[0], found.args[1], found.args[2]
        except (TypeError, RuntimeError, ValueError, IndexError, NotImplementedError):
            return None
    return None


# ---- guards ----


def tensor_guard(tensors: Sequence[torch.Tensor], layouts: Sequence[Any] = ()) -> Callable[..., bool]:
    """A C++ check that tensors are like these in class, dtype, sizes, strides, device and requires_grad.

    It holds no reference to them. It is False where one tensor is passed twice. Where a layout is given, with a `shape`
    that has symbols in it, these sizes are free, and so are the tensor's strides.
    """
    if not any(layouts):
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    sizes: Any = [
        [size if isinstance(size, int) else None for size in (tensor.shape if layout is None else layout.shape)]
        for tensor, layout in zip(tensors, layouts, strict=True)
    ]
    strides: Any = [
        list(tensor.stride()) if layout is None else [None] * tensor.dim()
        for tensor, layout in zip(tensors, layouts, strict=True)
    ]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def dict_guard(dicts: Sequence[dict[Any, Any]]) -> Callable[[], bool]:
    """A check that nobody has changed any of these dicts. To assign the value that is there already is no change."""
    filled, empty = [value for value in dicts if value], [value for value in dicts if not value]
    versions = [*map(dict_version, filled)]
    return lambda: not any(empty) and [*map(dict_version, filled)] == versions


GLOBAL_HOOKS: tuple[dict[Any, Any], ...] = tuple(
    value
    for name, value in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(value, dict)
)
"""The hooks that PyTorch runs for every module."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """A parameter of a lazy module that has not been called yet."""
    return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)


def global_state_guard() -> Callable[[], bool]:
    """A C++ check that grad mode, autocast, default dtype, determinism and thread count are as they are now."""
    return GlobalStateGuard().check


def global_state() -> tuple[str, tuple[Any, ...]]:
    """What changes the meaning of a PyTorch program: flags as text (all that the guard checks but threads), and modes."""
    flags = _flags(str(GlobalStateGuard().__getstate__()))
    modes = tuple((type(mode), str(getattr(mode, "device", id(mode)))) for mode in function_modes())
    return flags, modes


@functools.lru_cache(maxsize=256)
def _flags(state: str) -> str:
    known = json.loads(state)
    autocast = known.pop("autocast_state")
    parts = [f"{name}={value}" for name, value in sorted(known.items()) if name != "num_threads"]
    if any(autocast["enabled"]):
        parts.append(f"autocast={autocast}")
    return ", ".join(parts)


def function_modes() -> list[Any]:
    """The active torch function modes, such as that of `torch.set_default_device`."""
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many torch function modes are active."""


def is_batched(value: Any) -> bool:
    """A tensor of a vmap: torch.func's, or the older one behind `torch.autograd.grad(is_grads_batched=True)`."""
    functorch = torch._C._functorch
    return isinstance(value, torch.Tensor) and (
        functorch.is_legacy_batchedtensor(value) or functorch.is_functorch_wrapped_tensor(value)
    )


def inside_torch_func() -> bool:
    """A transform of torch.func is running, or a dual level of forward mode."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def version_probe(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without data whose `_version` is that of `tensor` for ever: a detached alias that let go of the memory."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe


def is_followed(tensor: torch.Tensor) -> bool:
    """Autograd, or a transform of torch.func at some level, records what is done with the tensor."""
    while not tensor.requires_grad:
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return True


def is_exclusive(tensor: torch.Tensor) -> bool:
    """No other tensor, array or view shares the tensor's memory, as far as PyTorch knows."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == 2 and storage.resizable()  # its own, and `storage` here


# ---- batching ----


@contextlib.contextmanager
def no_vmap_fallback() -> Generator[None]:
    """Ops without a batching rule raise instead of running in a loop that PyTorch hides."""
    before = torch._C._functorch._is_vmap_fallback_enabled()
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(before)


def default_store() -> Any:
    """The store through which the ranks of the default process group found each other."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def allocations(run: Callable[[], object]) -> list[int]:
    """The bytes that PyTorch's allocator hands out while something runs, in order; what it takes back is negative."""
    with torch.autograd.profiler.profile(profile_memory=True) as profiled:
        run()
    results: Any = profiled
    found = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]


def joint_mesh(meshes: Sequence[Any]) -> Any:
    """One DeviceMesh of the dims of several that were sliced from one, in this order and with their groups.

    None where they are not dims of one mesh.
    """
    from torch.distributed.device_mesh import DeviceMesh  # takes a while to import

    if len(meshes) == 1:
        return meshes[0]
    root = meshes[0]._get_root_mesh()
    names: list[str] = [(mesh.mesh_dim_names or ("",))[0] for mesh in meshes]
    if any(mesh._get_root_mesh() is not root for mesh in meshes) or not set(names) <= set(root.mesh_dim_names or ()):
        return None
    own = tuple(
        slice(None) if name in names else at
        for name, at in zip(root.mesh_dim_names, root.get_coordinate(), strict=True)
    )
    left = [name for name in root.mesh_dim_names if name in names]
    ranks = root.mesh[own].permute(*map(left.index, names)).contiguous()
    return DeviceMesh.from_group(
        [mesh.get_group() for mesh in meshes], root.device_type, ranks, mesh_dim_names=tuple(names)
    )
