"""Fake tensors, and the fake tensor mode that reports every op below autograd and
functionalization.
"""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import inspect
import math
import sys
import threading
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import disable_functional_mode
from torch.utils._pytree import tree_leaves, tree_map

from thunder_fn.errors import InvalidTrace
from thunder_fn.ir.trace import Dim, Expr, TensorType
from thunder_fn.torch_internals.calls import aten, runnable
from thunder_fn.torch_internals.known_results import (
    Layout,
    answer,
    fake_of_layout,
    layout_of,
    question,
    remember,
)
from thunder_fn.torch_internals.modes import (
    FAKE,
    current_gpu,
    get_dispatch_mode,
    isolated,
    never_compiled,
    no_torch_function,
    only_memory,
)
from thunder_fn.torch_internals.numbers import Numbers, OnDecision, unknown
from thunder_fn.torch_internals.patches import formulas_outside_dynamo
from thunder_fn.torch_internals.tensors import extent

DATA_DEPENDENT_VALUE = DataDependentOutputException

DATA_DEPENDENT_SHAPE = DynamicOutputShapeException

INTERNAL_ERRORS = (UnsupportedFakeTensorException, UnsupportedOperatorException)
"""Exceptions of PyTorch where an op has no rule for tensors without memory."""

OnOp = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]

OnQuestion = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""A function that answers a question about values, or returns NotImplemented."""

_BASES = {
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
    aten.unfold_backward.default,
}
"""Ops that compute the value of a base from that of a view of it. They keep its layout."""

Place = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""The dtype of a tensor, its shape, its strides, and its offset in memory."""

DEVICE = torch.ops.prim.device.default
"""A question that PyTorch asks of every tensor that it wraps."""


def _ignore_op(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    pass


_IS_ANY_TRUE, NUMBER_OF = aten._is_any_true.default, aten._local_scalar_dense.default
_looks_for_nan: Callable[[], bool] = torch.is_anomaly_check_nan_enabled


class _NoTraceback:
    """Stand-in for `traceback`: the stack is as deep as captures are nested, and nobody reads
    it.
    """

    @staticmethod
    def extract_stack() -> None:
        return None


class _Settings:
    """Dynamo's settings of fake tensors before it is imported, which takes half a second."""

    fake_tensor_cache_enabled = True
    fake_tensor_cache_crosscheck_enabled = False
    _custom_ops_profile = None

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo.config"), name)


class _Torch:
    """Stand-in for `torch` in functions of PyTorch: its Dynamo has settings without being
    imported.
    """

    @property
    def _dynamo(self) -> Any:
        return sys.modules.get("torch._dynamo", types.SimpleNamespace(config=_Settings()))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _import(name: str, *rest: Any) -> Any:
    """Import a module for a function of PyTorch: `import torch.x` gives the stand-in."""
    if name == "torch._dynamo.config":
        return _Torch()
    module = __import__(name, *rest)
    return _Torch() if module is torch else module


def _without_dynamo(made: Any, **names: Any) -> Any:
    """A function of PyTorch that reads Dynamo's settings without importing it. It says `names` for
    others.
    """
    own = {"torch": _Torch(), "__builtins__": {**vars(builtins), "__import__": _import}}
    names = {**made.__globals__, **own, **names}
    new = types.FunctionType(
        made.__code__, names, made.__name__, made.__defaults__, made.__closure__
    )
    new.__kwdefaults__ = made.__kwdefaults__
    return new


_make_mode = _without_dynamo(FakeTensorMode.__init__, traceback=_NoTraceback)
_answer_of_fakes: Any = inspect.unwrap(FakeTensorMode.__torch_dispatch__)
"""FakeTensorMode on one op, without the wrapper that keeps Dynamo out (`never_compiled`)."""


class RecordingMode(FakeTensorMode):
    """FakeTensorMode that calls `on_op(overload, args, kwargs, result)` for every op that reaches
    it.

    It sits where FakeTensorMode always sits, at the bottom of the dispatcher's modes. So it sees
    functional ops, after differentiation, batching and autocast.
    """

    supports_higher_order_operators = True
    _should_skip_dynamo = never_compiled
    _dispatch_impl = _without_dynamo(FakeTensorMode._dispatch_impl)

    def __init__(
        self,
        on_op: OnOp = _ignore_op,
        on_decision: OnDecision | None = None,
        on_question: OnQuestion | None = None,
    ) -> None:
        _make_mode(self, allow_non_fake_inputs=True)
        formulas_outside_dynamo()
        self._on_question = on_question
        self._on_decision, self._shared = on_decision, False
        self._on_op = on_op
        self._silent = 0
        self._found_nan: Any = None
        """The question of anomaly mode whether a gradient has a NaN: no, since it has no values."""
        self.thread = threading.get_ident()
        self.elsewhere: Callable[[Any], Exception] | None = None
        """The error for an op on its tensors in another thread."""
        self.write: Callable[[Any, Callable[[torch.Tensor], str]], str | None] | None = None
        """The text of the value of a tracer; None where it has none."""
        self._assumption: tuple[bool, str | None] | None = None
        self.places: list[Place] = []
        """The places in memory of tensors that an op changes in place at the moment."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: C901 - a branch for each kind of question
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        kwargs = kwargs or {}
        if func in WITH_LOG_SUMS:
            args, kwargs = asking_log_sums(args, kwargs)
        if func is _IS_ANY_TRUE and _looks_for_nan():
            with self.silent():
                self._found_nan = _answer_of_fakes(self, func, types, args, kwargs)
            return self._found_nan
        if func is NUMBER_OF and args[0] is self._found_nan:
            return False
        if self._silent:
            return _answer_of_fakes(self, func, types, args, kwargs)
        if func is aten._to_copy.default and not isinstance(args[0], torch.Tensor):
            with self:  # a symbol that C++ code takes for a tensor
                return aten.scalar_tensor(args[0], dtype=kwargs.get("dtype"))
        if self._assumption is not None and func in QUESTIONS:
            return self._assume(QUESTIONS[func], args, kwargs, *self._assumption)
        if func in QUESTIONS and self._on_question is not None:
            known = self._on_question(func, args, kwargs)
            if known is not NotImplemented:
                return known
        with self.silent():
            result = self._result_of(func, types, args, kwargs)
        if self.places:
            result = self._in_place(func, result)
        if result is not NotImplemented:
            self._on_op(func, args, kwargs, result)
        return result

    def _result_of(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Compute an op's result, from memory where it has been asked before.

        A value that was written to may lie otherwise than the tensor that it is the value of, so a
        view of it may copy. TracerMode asks the tensor whether eager PyTorch has the view.
        """
        if (
            kwargs.get("generator") is not None
        ):  # nothing is drawn, and PyTorch's rules do not know it
            kwargs = {**kwargs, "generator": None}
        device = kwargs.get("device")
        if device is not None and device.type == "cuda" and device.index is None:
            # PyTorch remembers the result by "cuda" alone
            kwargs = {**kwargs, "device": torch.device("cuda", current_gpu())}
        asked = question(func, args, kwargs) if self.shape_env is None else None
        if asked is not None and (known := answer(self, asked)) is not None:
            return known
        rule = FAKE_RESULTS.get(func)
        try:
            result = NotImplemented if rule is None else self._result(rule, args, kwargs)
            if result is NotImplemented:
                result = _answer_of_fakes(self, func, types, args, kwargs)
        except (AssertionError, ValueError) as error:
            if func is not aten.view.default:
                raise _eager_error(func, args, kwargs) or error from None
            dense = aten.clone.default(args[0], memory_format=torch.contiguous_format)
            result = _answer_of_fakes(self, func, types, (dense, *args[1:]), kwargs)
        if asked is not None:
            remember(asked, result)
        return result

    def _in_place(self, func: Any, result: Any) -> Any:
        """The results of an op that computes new values of tensors, each with the strides and the
        offset of the tensor: views of it by address are taken of the value.
        """
        if func.is_view or func in _BASES:
            return result
        if isinstance(result, (tuple, list)) and len(result) == len(self.places):
            pairs = zip(result, self.places, strict=True)
            return type(result)([self._laid(one, [place]) for one, place in pairs])
        return self._laid(result, self.places)

    def _laid(self, value: Any, places: Sequence[Place]) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        fitting = {place for place in places if place[:2] == (value.dtype, tuple(value.shape))}
        if len(fitting) != 1:
            return value
        ((_, shape, strides, offset),) = fitting
        if (tuple(value.stride()), value.storage_offset()) == (strides, offset):
            return value
        with only_memory():
            size = offset + extent(shape, strides)
            memory = torch.empty(size, dtype=value.dtype, device="meta")
            return FakeTensor(self, memory.as_strided(shape, strides, offset), value.device)

    def forget(self) -> None:
        """Drop what refers to the recorder, and with it every cycle."""
        self._on_op, self._on_question, self.write = _ignore_op, None, None
        if self._on_decision is not None and self.shape_env is not None and not self._shared:
            self.shape_env.on_decision = self.shape_env.on_assertion = None
            self.shape_env.value_of = unknown
        self._on_decision = None

    def share_numbers(self, outer: RecordingMode) -> None:
        """Compute with the symbols of the capture around this one."""
        self.shape_env, self._shared = outer.shape_env, outer.shape_env is not None

    def allow_data_dependent_sizes(
        self,
        on_assertion: Callable[[Expr], None],
        value_of: Callable[[Any], Any],
        *,
        is_rule: bool,
    ) -> None:
        """Unbacked sizes and numbers of PyTorch are symbols from now on; told of what is demanded
        of them. `value_of` gives the number for which one stands, if it is known.

        In a rule they count as two or more, as PyTorch itself takes them where nothing depends on
        it.
        """
        self.numbers.on_assertion, self.numbers.least_size = on_assertion, 2 if is_rule else 0
        self.numbers.value_of = value_of

    @property
    def numbers(self) -> Numbers:
        """The ShapeEnv of the symbols. Most captures have no symbols, and no such thing."""
        if not isinstance(self.shape_env, Numbers):
            self.shape_env = Numbers(self._on_decision)
        return self.shape_env

    def size(self, dim: Dim) -> Any:
        """A size as PyTorch computes with it."""
        return self.numbers.number(dim) if isinstance(dim, Expr) else dim

    def _result(self, rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self:
            return rule(*args, **kwargs)

    def _assume(
        self,
        question: Callable[..., Any],
        args: Any,
        kwargs: Any,
        answer: bool,
        message: str | None,
    ) -> bool:
        """Answer a question about values, and record an assertion that the answer is right."""
        if message is not None:
            with self:
                condition = question(*args, **kwargs)
                aten._assert_async.msg(
                    condition if answer else aten.logical_not(condition), message
                )
        return answer

    @contextlib.contextmanager
    def assuming(self, answer: bool, message: str | None = None) -> Generator[None]:
        """Assume inside that a tensor of which PyTorch asks whether it is true is so, or is not;
        without a message unchecked.

        For functions that look at values only to check them, so that one answer means that all is
        well.
        """
        before, self._assumption = self._assumption, (answer, message)
        try:
            yield
        finally:
            self._assumption = before

    @contextlib.contextmanager
    def changing(self, places: list[Place]) -> Generator[None]:
        """Enter around an op that changes tensors of these places in memory."""
        before, self.places = self.places, places
        try:
            yield
        finally:
            self.places = before

    @contextlib.contextmanager
    def silent(self) -> Generator[None]:
        """Report no ops inside."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1


def place_of(tensor: torch.Tensor) -> Place | None:
    """The place of a tensor in memory; None if its numbers are symbols."""
    with no_torch_function():
        numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        if not all(type(number) is int for number in numbers):
            return None
        offset = int(tensor.storage_offset())
        return tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset


def running_number(expr: Expr) -> Any:
    """An expression as PyTorch computes with it in the capture that this thread is in.

    Raises:
        InvalidTrace: no capture is running, so that the expression has no value.
    """
    mode = get_dispatch_mode(FAKE)
    if not isinstance(mode, RecordingMode):
        raise InvalidTrace(f"{expr} has no value here: nothing binds its symbols")
    return mode.size(expr)


WITH_LOG_SUMS = (
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
"""Kernels that give the log-sum-exp if they are asked for it, by their fifth argument."""


def asking_log_sums(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of such a kernel, asking for what its backward reads: a trace may be
    differentiated later.
    """
    if "compute_log_sumexp" in kwargs:
        return args, {**kwargs, "compute_log_sumexp": True}
    return (*args[:4], True, *args[5:]), kwargs


QUESTIONS: dict[Any, Callable[..., Any]] = {
    aten.equal.default: lambda a, b: aten.all(aten.eq(a, b)),
    aten.allclose.default: lambda *args, **kwargs: aten.all(aten.isclose(*args, **kwargs)),
    aten._local_scalar_dense.default: lambda a: aten.ne(a, 0),
}
"""Ops with which PyTorch asks whether something is true, and the answer as a tensor."""


def _eager_error(func: Any, args: Any, kwargs: Any) -> Exception | None:
    """The error of an op on small tensors of these types, in the class and the words of eager
    mode: rules for fake tensors have their own. None where it has none.
    """

    def real(leaf: Any) -> Any:
        is_fake = isinstance(leaf, torch.Tensor)
        return torch.zeros(tuple(leaf.shape), dtype=leaf.dtype) if is_fake else leaf

    leaves = tree_leaves((args, kwargs))
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    is_static = all(type(size) is int for shape in shapes for size in shape)
    others = (torch.SymInt, torch.SymFloat, torch.device, torch.Generator)
    if not is_static or any(isinstance(leaf, others) for leaf in leaves):
        return None
    if sum(map(math.prod, shapes)) > _SMALL:
        return None
    with only_memory():
        try:
            func(*tree_map(real, args), **tree_map(real, kwargs))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return error.with_traceback(None)
    return None


_SMALL = 1 << 16
"""The number of elements up to which an op is run for its error."""


def _lstsq(
    a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> Any:
    """Residuals are computed for more equations than unknowns, by gels always, by gelsd and
    gelss if the rank is full.
    """
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
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    batch = len(target_lengths)
    longest = max(target_lengths, default=0)
    alpha = log_probs.new_empty([batch, log_probs.shape[0], 2 * longest + 1])
    return log_probs.new_empty([batch] if log_probs.dim() == 3 else []), alpha


def _ctc_loss_of_tensors(
    log_probs: FakeTensor, targets: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Compute the loss as above, where data says how long the longest target is."""
    numbers = log_probs.fake_mode.shape_env
    if numbers is None or not numbers.allow_dynamic_output_shape_ops:
        return NotImplemented
    lengths = args[0]
    alpha = log_probs.new_empty(
        [lengths.numel(), log_probs.shape[0], numbers.create_unbacked_symint()]
    )
    return log_probs.new_empty([lengths.numel()] if log_probs.dim() == 3 else []), alpha


def _ctc_loss_backward(
    grad: torch.Tensor, log_probs: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    return torch.empty_like(log_probs)


def _cdist_backward(
    grad: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor, p: float, cdist: torch.Tensor
) -> Any:
    """One gradient for each pair of batches, which autograd sums; without any pair or number,
    zeros like x1.
    """
    batches = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    is_empty = any(
        isinstance(size, int) and size == 0 for size in (*batches, *x1.shape[-2:], x2.shape[-2])
    )
    return x1.new_empty(x1.shape if is_empty else [*batches, *x1.shape[-2:]])


def _rnn_layer(*args: Any) -> Any:
    """Run with the workspace that its backward needs, whose size oneDNN decides: PyTorch says
    that it is empty.
    """
    asked = tuple(
        (tuple(arg.shape), arg.dtype) if isinstance(arg, torch.Tensor) else _frozen(arg)
        for arg in args
    )
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


def _bincount(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    """Sums of weights are floats: PyTorch 2.11 says that they are counts."""
    if weights is None:
        return NotImplemented
    dtype = weights.dtype if weights.dtype is torch.float32 else torch.float64
    return torch.empty_like(aten.bincount(x, None, minlength), dtype=dtype)


def _attention(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The logarithms are of the precision that is computed in: PyTorch 2.11 says float32 of
    float64 too.
    """
    out, logs = aten._scaled_dot_product_flash_attention_for_cpu(q, *args, **kwargs)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, (
        logs if logs.dtype == dtype else torch.empty_strided(logs.shape, logs.stride(), dtype=dtype)
    )


def _loss_backward(
    grad: torch.Tensor, input: torch.Tensor, target: torch.Tensor, *args: Any
) -> Any:
    """Differentiate a loss of no elements: PyTorch divides by their number in Python."""
    shape = torch.broadcast_shapes(input.shape, target.shape)
    is_empty = any(isinstance(size, int) and size == 0 for size in shape)
    return (
        input.new_empty(shape, dtype=torch.result_type(input, target))
        if is_empty
        else NotImplemented
    )


def _nearest(x: torch.Tensor, output_size: Any, *scales: Any, **named: Any) -> Any:
    """Interpolate a batch of nothing, which PyTorch's Python code takes for an error."""
    if type(x.shape[0]) is not int or x.shape[0] != 0:
        return NotImplemented
    return x.new_empty([*x.shape[:2], *output_size])


def _group_norm_backward(  # noqa: PLR0913 - PyTorch's signature
    cotangent: torch.Tensor,
    x: torch.Tensor,
    mean: Any,
    rstd: Any,
    weight: Any,
    n: Any,
    channels: Any,
    rest: Any,
    *others: Any,
) -> Any:
    """Differentiate a norm of no elements: PyTorch's formula divides by their number."""
    if type(rest) is not int or type(channels) is not int or rest * channels:
        return NotImplemented
    _, mask = others
    parts = torch.empty_like(x), x.new_empty((channels,)), x.new_empty((channels,))
    return tuple(part if wanted else None for part, wanted in zip(parts, mask, strict=True))


def _fused_step(func: OpOverload) -> Callable[..., Any]:
    """A step of an optimizer on lists of tensors, which returns a new list for each of the
    first.
    """
    count = len(func._schema.returns)
    return lambda *args, **kwargs: tuple(
        [torch.empty_like(tensor) for tensor in tensors] for tensors in args[:count]
    )


def _of_first(func: OpOverload) -> Callable[..., Any]:
    """An op of the dtype of its first argument, where PyTorch's rule promotes."""

    def result(x: torch.Tensor, other: Any, *args: Any, **kwargs: Any) -> Any:
        if x.dtype == other.dtype:
            return NotImplemented
        found = func(x, other, *args, **kwargs)
        return found if found.dtype == x.dtype else torch.empty_like(found, dtype=x.dtype)

    return result


def _norm(func: OpOverload) -> Callable[..., Any]:
    """A norm of small floats by parameters of float32: the CPU has its statistics in those."""

    def result(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        is_mixed = x.dtype in (torch.float16, torch.bfloat16) and any(
            isinstance(one, torch.Tensor) and one.dtype == torch.float32 for one in given
        )
        if not is_mixed or x.device.type != "cpu":
            return NotImplemented
        out, *statistics = func(x, *args, **kwargs)
        found = (torch.empty_like(one, dtype=torch.float32) for one in statistics[:2])
        return (out, *found, *statistics[2:])

    return result


def _on_one_device(func: OpOverload) -> Callable[..., Any]:
    """An op whose kernels take no number of the CPU beside tensors of a GPU, as PyTorch's rule
    does.
    """

    def result(*args: Any, **kwargs: Any) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        devices = list(dict.fromkeys(str(one.device) for one in given))
        if len(devices) > 1:
            raise RuntimeError(
                f"{func.name()}: expected all tensors to be on the same device, but found"
                f" {' and '.join(devices)}. Numbers of the CPU count too: move them, or pass"
                " Python's."
            )
        return NotImplemented

    return result


def _lstm_cell(a: Any, _: Any, cx: Any, *biases: Any) -> Any:
    """PyTorch asks for the device of a bias that is not there."""
    return cx.new_empty(cx.shape), cx.new_empty(cx.shape), a.new_empty(a.shape)


def _gru_cell(a: Any, _: Any, hx: Any, *biases: Any) -> Any:
    """PyTorch has no shapes for it."""
    rows, size = hx.shape
    return hx.new_empty(rows, size), a.new_empty(rows, 5 * size)


def _gru_cell_backward(grad: Any, _: Any, has_bias: bool) -> Any:
    rows, size = grad.shape
    gates = [grad.new_empty(rows, 3 * size) for _ in range(2)]
    biases = [grad.new_empty(3 * size) if has_bias else None for _ in range(2)]
    return *gates, grad.new_empty(rows, size), *biases


FAKE_RESULTS: dict[Any, Callable[..., Any]] = {
    **{
        func: _of_first(func)
        for func in (
            aten.huber_loss.default,
            aten.soft_margin_loss.default,
            aten.normal.Tensor_Tensor,
        )
    },
    **{
        func: _norm(func)
        for func in (
            aten.native_layer_norm.default,
            aten.native_group_norm.default,
            aten.native_batch_norm.default,
            aten._native_batch_norm_legit.default,
            aten._native_batch_norm_legit.no_stats,
            aten._native_batch_norm_legit_functional.default,
            aten._batch_norm_with_update.default,
            aten._batch_norm_with_update_functional.default,
            aten._batch_norm_no_update.default,
        )
    },
    **{
        func: _on_one_device(func)
        for func in (
            aten.clamp.Tensor,
            aten.clamp_max.Tensor,
            aten.clamp_min.Tensor,
            aten.stack.default,
            aten.cat.default,
            aten.gcd.default,
            aten.lcm.default,
            aten.igamma.default,
            aten.igammac.default,
            aten.logaddexp.default,
            aten.logaddexp2.default,
            aten.nextafter.default,
        )
    },
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.mse_loss_backward.default: _loss_backward,
    aten.huber_loss_backward.default: _loss_backward,
    aten.smooth_l1_loss_backward.default: _loss_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten.bincount.default: _bincount,
    aten.mkldnn_rnn_layer.default: _rnn_layer,
    aten._cdist_backward.default: _cdist_backward,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss_of_tensors,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten.linalg_lstsq.default: _lstsq,
    **{
        getattr(aten, f"{name}{dims}d").default: _nearest
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for dims in (1, 2, 3)
    },
    **{
        getattr(getattr(aten, name), overload): _fused_step(getattr(getattr(aten, name), overload))
        for name in ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
        for overload in getattr(aten, name).overloads()
        if not overload.endswith("out")
    },
}
"""Results of ops that PyTorch says depend on data and whose shape does not, or whose type it
says wrongly.
"""


def call_on_fakes(overload: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Call an op on fake tensors, in their mode."""
    rule = FAKE_RESULTS.get(overload)
    result = NotImplemented if rule is None else rule(*args, **kwargs)
    return overload(*args, **kwargs) if result is NotImplemented else result


@contextlib.contextmanager
def only_mode(mode: RecordingMode) -> Generator[None]:
    """Make tensors inside fake tensors of mode and of no torch.func level, and report nothing."""
    outside = temporarily_clear_interpreter_stack()
    with outside, torch._C.DisableTorchFunction(), disable_functional_mode(), mode.silent(), mode:
        yield


def fake_like(mode: RecordingMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of mode with the dtype, sizes, strides and device of `tensor`, unrelated to
    it otherwise.
    """
    with no_torch_function():
        shape, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
    with only_memory():
        is_found = (
            isinstance(offset, torch.SymInt) and not offset.node.has_hint()
        )  # in data, as a size before it is
        if is_found or not offset:
            elem = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
        else:
            size = offset + extent(shape, stride)
            memory = torch.empty(size, dtype=tensor.dtype, device="meta")
            elem = torch.as_strided(memory, shape, stride, offset)
        return FakeTensor(mode, elem, tensor.device)


def symbolic_like(
    mode: RecordingMode, tensor: torch.Tensor, shape: Sequence[Dim], stride: Sequence[Dim]
) -> torch.Tensor:
    """A fake tensor of mode with these sizes and strides."""
    sizes, steps = tuple(map(mode.size, shape)), tuple(map(mode.size, stride))
    with only_mode(mode):
        return torch.empty_strided(sizes, steps, dtype=tensor.dtype, device=tensor.device)


def fake_of_type(
    mode: RecordingMode,
    type: TensorType,
    *,
    is_transposed: bool = False,
    strides: Sequence[Dim] | None = None,
) -> torch.Tensor:
    """A contiguous fake tensor of mode, or the transpose of a contiguous matrix, or one of these
    strides.
    """
    shape = tuple(map(mode.size, type.shape))
    given = tuple(map(mode.size, strides or ()))
    steps: tuple[Any, ...] = (1, shape[0]) if is_transposed else given
    with only_memory():
        if steps:
            elem = torch.empty_strided(shape, steps, dtype=type.dtype, device="meta")
        else:
            elem = torch.empty(shape, dtype=type.dtype, device="meta")
        return FakeTensor(mode, elem, type.device)


def fake_as(mode: RecordingMode, fake: torch.Tensor) -> torch.Tensor:
    """Make a fake tensor of mode with this one's type and strides."""
    with only_memory():
        elem = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
        return FakeTensor(mode, elem, fake.device)


def fake_mode() -> RecordingMode:
    """A fake tensor mode that records nothing: for functions that are asked about types."""
    return RecordingMode()


def fake_in(mode: RecordingMode, type: TensorType) -> torch.Tensor:
    """A contiguous fake tensor of such a mode."""
    with isolated(), no_torch_function(), mode:
        return torch.empty(tuple(map(mode.size, type.shape)), dtype=type.dtype, device=type.device)


def class_of(tensor: torch.Tensor) -> type:
    """The class of a tensor; a fake tensor's is that of the tensor that it stands for."""
    cls = type(tensor)
    return torch.Tensor if cls is FakeTensor else cls


def allocations(run: Callable[[], object]) -> list[int]:
    """The bytes that PyTorch's allocator hands out while something runs, in order; returned ones
    are negative.
    """
    with torch.autograd.profiler.profile(profile_memory=True) as profiled:
        run()
    results: Any = profiled
    found = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]


def layouts_on_fakes(
    mode: RecordingMode, op: Any, args: Any, kwargs: Any
) -> tuple[Layout | None, ...]:
    """The layouts of an op's results, given layouts for tensors. There are none where PyTorch's
    rule takes values.
    """
    of: Callable[[Any], Any] = lambda arg: (
        fake_of_layout(mode, arg)
        if type(arg) is Layout
        else list(map(of, arg))
        if type(arg) is list
        else arg
    )
    try:
        with mode, torch.no_grad():
            result = op(*map(of, args), **{name: of(arg) for name, arg in kwargs.items()})
    except Exception:  # noqa: BLE001  # data-dependent, or an op without a fake implementation
        return ()
    found = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(map(layout_of, found))
