"""Fake tensors, and the fake tensor mode that reports every op below autograd and
functionalization.
"""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import disable_functional_mode
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_fn.errors import InvalidTrace
from thunder_fn.ir.trace import Dim, Expr, TensorType
from thunder_fn.torch_internals.calls import aten
from thunder_fn.torch_internals.fake_results import (
    FAKE_RESULTS,
    QUESTIONS,
    WITH_LOG_SUMS,
    asking_log_sums,
    eager_error,
)
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
from thunder_fn.torch_internals.without_dynamo import without_dynamo

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

REFUSED_BITS = {
    aten.view_as_real.default: (torch.Tensor.is_conj,),
    aten.view.dtype: (torch.Tensor.is_conj, torch.Tensor.is_neg),
}
"""Views that a tensor with a conjugate or negative bit does not have."""

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


_make_mode = without_dynamo(FakeTensorMode.__init__, traceback=_NoTraceback)
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
    _dispatch_impl = without_dynamo(FakeTensorMode._dispatch_impl)

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
        if func in REFUSED_BITS and any(ask(args[0]) for ask in REFUSED_BITS[func]):
            with self:  # a view that is made again, after a write through a view with such a bit
                args = (args[0].resolve_conj().resolve_neg(), *args[1:])
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
        asked = question(func, args, kwargs)
        if asked is not None and (known := answer(self, asked)) is not None:
            return known
        rule = FAKE_RESULTS.get(func)
        try:
            result = NotImplemented if rule is None else self._result(rule, args, kwargs)
            if result is NotImplemented:
                result = _answer_of_fakes(self, func, types, args, kwargs)
        except (AssertionError, ValueError) as error:
            if func is not aten.view.default:
                raise eager_error(func, args, kwargs) or error from None
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
        self.cache_enabled = self.shape_env is None

    def allow_data_dependent_sizes(
        self, on_assertion: Callable[[Expr], None], value_of: Callable[[Any], Any], *, is_rule: bool
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
        """The ShapeEnv of the symbols. Most captures have no symbols, and no such thing.

        PyTorch's cache of results is off then. The cache of symbolic results belongs to the
        ShapeEnv, and each question for a rule has its own. So filling it costs more than it saves.
        """
        if not isinstance(self.shape_env, Numbers):
            self.shape_env = Numbers(self._on_decision)
            self.cache_enabled = False
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
        # in data, as a size before it is
        is_found = isinstance(offset, torch.SymInt) and not offset.node.has_hint()
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
    """Make a fake tensor of mode with this one's type, strides and memory."""
    with only_memory():
        elem = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
        place = fake.storage_offset(), fake.shape, fake.stride()
        elem.set_(fake.untyped_storage(), *place)  # pyright: ignore[reportArgumentType]
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


# ---- what a function allocates ----


# pyright: reportPrivateUsage=false


Scratch = Callable[[str, tuple[Any, ...], Sequence[torch.Tensor]], int]
"""The bytes that a kernel needs while it runs, by its name, its arguments and its results."""


class _Footprint(TorchDispatchMode):
    """A count of the bytes of storages that are alive; those of `given` tensors are their
    owner's.
    """

    def __init__(self, given: Iterable[torch.Tensor], scratch: Scratch) -> None:
        super().__init__()
        self.given = {_storage(tensor) for tensor in given}
        self.scratch = scratch
        self.tensors, self.sizes = Counter[int](), dict[int, int]()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [
            one
            for one in (result if isinstance(result, tuple | list) else (result,))
            if _is_tensor(one)
        ]
        for tensor in found:
            self.note(tensor)
        self.peak = max(self.peak, self.live + self.scratch(str(func), tuple(args), found))
        return result

    def note(self, tensor: torch.Tensor) -> None:
        """Keep the tensor's storage alive until the tensor dies."""
        storage = _storage(tensor)
        if storage in self.given:
            return
        if not self.tensors[storage]:
            self.sizes[storage] = int(tensor.untyped_storage().nbytes())
            self.live += self.sizes[storage]
        self.tensors[storage] += 1
        weakref.finalize(tensor, self.release, storage)

    def release(self, storage: int) -> None:
        """Note that one of the storage's tensors is dead."""
        self.tensors[storage] -= 1
        if not self.tensors[storage]:
            self.live -= self.sizes.pop(storage)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def footprint(
    mode: RecordingMode, run: Callable[..., Any], inputs: Sequence[torch.Tensor], scratch: Scratch
) -> tuple[tuple[Any, ...], int]:
    """Run a function on fakes of the mode. Returns its results, and the most bytes that it holds
    at a time.
    """
    with only_mode(mode), torch.no_grad(), _Footprint(inputs, scratch) as found:
        return tuple(run(*inputs)), found.peak
