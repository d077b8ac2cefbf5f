"""Tracers: functional tensors that know their variable, and their memory."""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol, TypeGuard

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import _disable_current_modes

from thunder_fn.errors import UnsupportedCall
from thunder_fn.ir.trace import type_of_value
from thunder_fn.lines import is_internal
from thunder_fn.torch_internals.calls import aten
from thunder_fn.torch_internals.fakes import DEVICE, REFUSED_BITS, RecordingMode, place_of
from thunder_fn.torch_internals.functional import fake_in, functionalized
from thunder_fn.torch_internals.modes import (
    FAKE,
    FUNCTIONAL,
    PROXY,
    get_dispatch_mode,
    isolated,
    levels_outside,
    never_compiled,
    only_memory,
)
from thunder_fn.torch_internals.tensors import bits_between, extent, innermost, storage_id
from thunder_fn.torch_internals.traits import traits_of

_DETACH = torch.ops.aten.detach.default
_VIEW = torch.ops.aten.view.default
_VIEW_DTYPE = torch.ops.aten.view.dtype
_UNFOLD = torch.ops.aten.unfold.default
_SET = torch.ops.aten.set_.source_Tensor
_RESIZE = torch.ops.aten.resize_.default
_BITS = torch.ops.aten._conj.default, torch.ops.aten._neg_view.default


class _Kind(type(torch.Tensor)):
    """The metaclass of tracers. To user code, such a class equals the class of the tensors that it
    stands for, as in `type(x) == torch.Tensor` and `table[type(x)]`.
    """

    def __eq__(cls, other: object) -> bool:
        is_other = other is cls.outside_class  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        return cls is other or (is_other and not is_internal(sys._getframe(1).f_code.co_filename))  # pyright: ignore[reportPrivateUsage]

    def __hash__(cls) -> int:
        return hash(cls.outside_class)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]


class Tracer(FunctionalTensor, metaclass=_Kind):
    """A tensor without values, in a function that is being traced. It has a dtype, a shape and a
    device.

    `outside_class` is the class of the tensors that it stands for: that of a Parameter is one of
    `tracers_of`. `is_own_view`: it is a view of its old self, since its shape was changed in
    place. `viewed`: the tracer that it shows as another dtype, which autograd does not keep alive
    as the base of a view.
    """

    outside_class: ClassVar[type[torch.Tensor]] = torch.Tensor
    is_own_view = False
    viewed: Tracer | None = None

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]  # as PyTorch itself does

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        mode = fake_mode_of(self)
        if (
            isinstance(mode, RecordingMode)
            and mode.elsewhere is not None
            and mode.thread != threading.get_ident()
        ):
            raise mode.elsewhere(func)
        return super().__torch_dispatch__(func, _without_tracers(types), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        mode = get_dispatch_mode(FUNCTIONAL)
        if isinstance(mode, TracerMode) and mode.on_attribute is not None:
            return mode.on_attribute(self, name)
        raise AttributeError(f"'Tensor' object has no attribute {name!r}")

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """The class of the tensor that it stands for: `type(x) is ...` alone can tell that it is
        a tracer. Code that asks so is traced as a copy.
        """
        return type(self).outside_class

    @property
    def __dict__(self) -> Any:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        """The attributes of the tensor that it stands for, if a user asks. It is read as others
        are.
        """
        mode, frame = get_dispatch_mode(FUNCTIONAL), sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        is_asked = isinstance(mode, TracerMode) and not is_internal(frame.f_code.co_filename)
        if not is_asked or mode.on_attribute is None:
            return attributes(self)
        return mode.on_attribute(self, "__dict__")

    def __dir__(self) -> list[str]:
        """The names of its attributes, and of those of the tensor that it stands for."""
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        mode, names = get_dispatch_mode(FUNCTIONAL), dir(torch.Tensor)
        is_asked = isinstance(mode, TracerMode) and not is_internal(frame.f_code.co_filename)
        if not is_asked or mode.on_attribute is None:
            return [*names, *attributes(self)]
        return sorted({*names, *mode.on_attribute(self, "__dict__")})

    def __repr__(self, **options: Any) -> str:
        with torch._C.DisableTorchFunction():
            text = self._text_of_value(repr)
            return f"Tracer({type_of_value(self)}{'' if text is None else f', {text}'})"

    def __format__(self, spec: str) -> str:
        text = self._text_of_value(lambda value: format(value, spec))
        return repr(self) if text is None else text

    def _text_of_value(self, write: Callable[[torch.Tensor], str]) -> str | None:
        mode = fake_mode_of(self)
        return None if mode is None or mode.write is None else mode.write(self, write)

    def __copy__(self) -> torch.Tensor:
        """Copy to a leaf in the same memory without a history, as eager does."""
        return self.detach().requires_grad_(self.requires_grad)


Tracer.__name__, Tracer.__qualname__, Tracer.__module__ = "Tensor", "Tensor", "torch"


@functools.cache
def tracers_of(outside: type[torch.Tensor]) -> type[Tracer]:
    """The class of the tracers that stand for tensors of a class."""
    if outside is torch.Tensor:
        return Tracer
    named = {"__module__": outside.__module__, "__qualname__": outside.__qualname__}
    return _Kind(outside.__name__, (Tracer,), {**named, "outside_class": outside})


# a result that is a Parameter is one again
_OWN_ATTRIBUTES = ("elem", "is_own_view", "viewed", "_is_param")


def attributes_set(tracer: torch.Tensor) -> list[str]:
    """The attributes that the traced function has set on a tracer. Dynamo's marks of tensors
    mean nothing here.
    """
    return [
        name
        for name in attributes(tracer)
        if name not in _OWN_ATTRIBUTES and not name.startswith("_dynamo")
    ]


_SPECIAL_IN_FUNCTIONAL = (
    *(
        "__bool__",
        "tolist",
        "to",
        "cuda",
        "char",
        "cpu",
        "bfloat16",
        "byte",
        "double",
        "float",
        "bool",
        "half",
    ),
    *("int", "long", "to_dense", "layout"),
)

# Tracers have the methods of all tensors, which the capture sees as torch functions.
for _name in _SPECIAL_IN_FUNCTIONAL:
    setattr(Tracer, _name, getattr(torch.Tensor, _name))


def _with_tensor_for_number(name: str) -> Callable[..., Any]:
    """A method that takes a tensor that requires grad for a number, which PyTorch's parser
    refuses: it would read the value.
    """
    original = getattr(torch.Tensor, name)

    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        numbers = (kwargs.get("value"), kwargs.get("alpha"))
        if any(isinstance(number, Tracer) and number.requires_grad for number in numbers):
            return torch.overrides.handle_torch_function(original, (self,), self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return method


for _name in ("add", "sub", "addcdiv", "addcmul"):
    setattr(Tracer, _name, _with_tensor_for_number(_name))
    setattr(Tracer, f"{_name}_", _with_tensor_for_number(f"{_name}_"))


def _without_tracers(types: Any) -> tuple[type, ...]:
    return tuple(FunctionalTensor if issubclass(kind, Tracer) else kind for kind in types)


def _ignore_tensor(tensor: torch.Tensor) -> None:
    pass


class SymbolicTracing(Exception):
    """`make_fx` runs inside a capture. It would see the insides of tracers, and return wrong
    results.
    """


_library = torch.library.Library("thunder_fn", "FRAGMENT")
_library.define(
    "normal_one_by_one(Tensor like, float mean, float std, *, Generator? generator=None) -> Tensor",
    tags=[torch.Tag.nondeterministic_seeded],
)


def _normal_one_by_one(
    like: torch.Tensor, mean: float, std: float, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Normal numbers as PyTorch draws them for a tensor with gaps: one after the other, not in
    blocks.
    """
    with_gaps = like.new_empty((*like.shape, 2)).select(-1, 0)
    return with_gaps.normal_(mean, std, generator=generator).contiguous()


_library.impl("normal_one_by_one", _normal_one_by_one, "CompositeExplicitAutograd")
torch.library.register_fake(
    "thunder_fn::normal_one_by_one",
    lambda like, mean, std, *, generator=None: like.new_empty(like.shape),
    lib=_library,
)


@functools.cache
def _draws_in_place(func: Any) -> bool:
    """Test for an op that fills a tensor with random numbers in the order of its memory; `rrelu`
    takes the order of the dims.
    """
    if func is aten.rrelu_with_noise_.default:
        return False
    return (
        torch.Tag.nondeterministic_seeded in func.tags
        and func._schema.is_mutable
        and func._schema.name.endswith("_")
    )


def is_strided_draw(func: Any, args: Any) -> bool:
    """Test whether random numbers are written into a tensor whose memory is not filled from its
    first dim to its last.
    """
    if not isinstance(func, OpOverload) or not _draws_in_place(func) or args[0].is_contiguous():
        return False
    return _is_one_by_one(func, args[0]) or _memory_order(args[0]) != list(range(args[0].dim()))


def _is_one_by_one(func: Any, target: torch.Tensor) -> bool:
    """Test whether PyTorch draws one by one: it draws in blocks for contiguous tensors on the
    CPU.
    """
    return func is aten.normal_.default and target.device.type == "cpu"


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """The dims from the outermost in memory to the innermost."""
    return sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))


def _draw_in_memory_order(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Draw in the order of memory, as eager does: strides are no part of a trace, so that order
    becomes an equation.
    """
    target, *rest = args
    order = _memory_order(target)
    if _is_one_by_one(func, target):
        mean, std = (
            *rest,
            *(kwargs.get(key, value) for key, value in (("mean", 0.0), ("std", 1.0))[len(rest) :]),
        )
        given = (
            {"generator": kwargs.get("generator")} if kwargs.get("generator") is not None else {}
        )
        drawn = torch.ops.thunder_fn.normal_one_by_one.default(
            target.permute(order), mean, std, **given
        )
        return target.copy_(drawn.permute([order.index(dim) for dim in range(target.dim())]))
    rest = [
        item.expand_as(target).permute(order) if isinstance(item, torch.Tensor) else item
        for item in rest
    ]
    func(target.permute(order), *rest, **kwargs)
    return target


class WritesAndReads(Protocol):
    """A listener for ops that change tensors in place and for tensors that share memory."""

    def check(
        self,
        func: Any,
        tensors: list[torch.Tensor],
        others: list[torch.Tensor],
        args: Any,
        kwargs: Any,
    ) -> None:
        """Hear of an op that is about to change tensors in place, and refuse it."""
        ...

    def changing(
        self, tensors: list[torch.Tensor], others: list[torch.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Hear of an op that changes tensors in place: those, and the op's others."""
        ...

    def bring_up_to_date(self, tensors: Iterable[torch.Tensor]) -> None:
        """Hear of tensors before an op reads them where gradients are off."""
        ...

    def viewed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of which a view is taken in place of this one, where gradients are off."""
        ...

    def is_given(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tracer stands for an argument or for a tensor from outside."""
        ...

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a tracer of this capture, and of none around it."""
        ...

    def reinterpreted(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of which a view of another dtype is taken in place of this one."""
        ...

    def detached(self, source: torch.Tensor, alias: torch.Tensor) -> None:
        """Hear of `alias = source.detach()`."""
        ...


def _as_number(compare: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def compared(x: torch.Tensor, other: Any) -> torch.Tensor:
        result = compare(x, other).to(x.dtype)
        if not (x.requires_grad or (isinstance(other, torch.Tensor) and other.requires_grad)):
            return x.copy_(result)
        always = torch.ones((), dtype=torch.bool, device=x.device)
        return x.copy_(torch.where(always, result, x + other))

    return compared


def _stepped(packet: Any) -> Callable[..., None]:
    """A fused step of an optimizer by the op that returns new tensors. Gradients change if they
    are scaled.
    """

    def step(*args: Any, lr: Any, **kwargs: Any) -> None:
        func = packet.tensor_lr if isinstance(lr, torch.Tensor) else packet.default
        results = func(*args, lr=lr, **kwargs)
        is_scaled = kwargs.get("grad_scale") is not None
        for place, (old, new) in enumerate(zip(args, results, strict=False)):
            if place != 1 or is_scaled:
                for tensor, value in zip(old, new, strict=True):
                    tensor.copy_(value)

    return step


_FUSED = ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
FUSED_FUNCTIONS: tuple[Callable[..., None], ...] = tuple(
    getattr(torch, f"{name}_") for name in _FUSED
)
"""Functions of torch that step an optimizer by one kernel."""
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
OUT_OF_PLACE: dict[Any, Callable[..., Any]] = {
    aten.polygamma_.default: lambda x, n: x.copy_(aten.polygamma.default(n, x)),
    **{
        getattr(getattr(aten, f"{name}_"), overload): _as_number(
            getattr(getattr(aten, name), overload)
        )
        for name in _COMPARISONS
        for overload in ("Scalar", "Tensor")
    },
    **{
        getattr(getattr(aten, f"{name}_"), overload): _stepped(getattr(aten, name))
        for name in _FUSED
        for overload in getattr(aten, f"{name}_").overloads()
    },
}
"""In-place ops that functionalization does not know, and comparisons, whose results have a
gradient to autograd: zero. It takes the empty lists of fused steps for tensors of others.
"""


_WITHOUT_GENERATOR: dict[Any, Callable[..., Any]] = {
    getattr(aten, f"{name}_").default: getattr(aten, name).default
    for name in ("cauchy", "exponential", "geometric", "log_normal")
}
"""In-place ops whose rules for types know no generator; functionalization asks them."""


def changed_tensors(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tracers among the arguments that an op changes in place, `out=` among them, and the
    other ones.
    """
    written = traits_of(func).written
    if not written:
        return [], []
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for key, arg in (*enumerate(args), *kwargs.items()):
        items = arg if isinstance(arg, (list, tuple)) else (arg,)
        found[0 if key in written else 1].extend(item for item in items if isinstance(item, Tracer))
    return found


def _unfold_by_views(tensor: torch.Tensor, dim: int, size: int, step: int) -> torch.Tensor | None:
    """An `unfold` that leaves elements out, by views that write to no others; None where PyTorch's
    own does.

    A write by PyTorch through an `unfold` makes zeros of the elements that it leaves out.
    """
    if not tensor.dim() or step < size:
        return None
    dim = dim % tensor.dim()
    length = tensor.shape[dim]
    count = (length - size) // step + 1
    if type(length) is int and count * step == length == count * size:
        return None
    if step == size or count * step <= length:
        split = tensor.narrow(dim, 0, count * step).unflatten(dim, (count, step))
        return split.narrow(dim + 1, 0, size).movedim(dim + 1, -1)
    if count == 1:
        return tensor.narrow(dim, 0, size).unsqueeze(dim).movedim(dim + 1, -1)
    shape = [*tensor.shape[:dim], count, *tensor.shape[dim + 1 :], size]
    strides = [
        *tensor.stride()[:dim],
        step * tensor.stride(dim),
        *tensor.stride()[dim + 1 :],
        tensor.stride(dim),
    ]
    return tensor.as_strided(shape, strides)


def _check_view(tensor: torch.Tensor, size: Sequence[Any]) -> None:
    """Raise as eager does where the strides of a tensor do not allow a view; those of its value
    may be others.
    """
    if tensor.is_contiguous() or not all(
        type(item) is int for item in (*tensor.shape, *tensor.stride(), *size)
    ):
        return
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta").view(
            size
        )


def on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a function on tensors without values, of the sizes of this call; None where
    that cannot be told. Sizes found in data are unknown, and count as 2.
    """

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        sizes = [
            size if type(size) is int else size.node.hint if size.node.has_hint() else 2
            for size in tensor.shape
        ]
        return torch.empty(sizes, dtype=tensor.dtype, device="meta")

    kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
    with torch._C.DisableTorchFunction(), _disable_current_modes(), contextlib.suppress(Exception):
        given = torch_pytree.tree_map_only(torch.Tensor, stand_in, (args, kwargs))
        args, kwargs = given
        leaves = torch_pytree.tree_leaves(given)
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return func(*args, **kwargs)
        with FakeTensorMode():  # which draws no random numbers
            return func(*args, **kwargs)
    return None


def _in_place(func: Any, changed: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Let the new values of changed tensors lie as these do in memory. An op that changes the
    layout says itself how they lie.
    """
    mode = fake_mode_of(changed[0])
    if not isinstance(mode, RecordingMode) or torch.Tag.inplace_view in func.tags:
        return contextlib.nullcontext()
    places = map(place_of, changed)
    return mode.changing([place for place in places if place is not None])


_of_functional: Any = inspect.unwrap(FunctionalTensorMode.__torch_dispatch__)
"""FunctionalTensorMode on one op, without the wrapper that keeps Dynamo out (`never_compiled`)."""


class TracerMode(FunctionalTensorMode):
    """FunctionalTensorMode whose tensors are tracers; `on_new` is told of each.

    `on_higher_order` is called instead of PyTorch's ops that take functions. `pure_call` gives what
    to call instead of an op that changes tensors in place and that functionalization does not know.
    `on_attribute` gives an attribute that a tracer does not have.
    """

    supports_higher_order_operators = True
    _should_skip_dynamo = never_compiled

    def __init__(
        self,
        on_new: Callable[[torch.Tensor], None],
        on_higher_order: Callable[[Any, Any, Any], Any] | None = None,
        history: WritesAndReads | None = None,
        pure_call: Callable[[OpOverload], Callable[..., Any] | None] = lambda func: None,
        on_attribute: Callable[[torch.Tensor, str], Any] | None = None,
    ) -> None:
        super().__init__()
        self.on_attribute = on_attribute
        self.pure_call = pure_call
        self.on_new = on_new
        self.on_higher_order = on_higher_order
        self.history = history
        self.under_bits: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if get_dispatch_mode(PROXY) is not None:
            raise SymbolicTracing
        if func in OUT_OF_PLACE:
            with self:
                return OUT_OF_PLACE[func](*args, **(kwargs or {}))
        if self.history is None:
            return self._dispatch(func, types, args, kwargs or {})
        changed, others = changed_tensors(func, args, kwargs or {})
        if changed and func is not _SET:  # which changes no values
            self.history.check(func, changed, others, args, kwargs or {})
            views = self._at_once(changed)
            with self.history.changing(changed, others), _in_place(func, changed):
                result = self._change(func, types, views, args, kwargs or {})
                if self.under_bits:
                    self._settle(changed)
                return result
        if func in REFUSED_BITS and isinstance(args[0], Tracer):
            args = (self._reinterpreted(func, *args), *args[1:])
        if not torch.is_grad_enabled():
            leaves = torch_pytree.tree_leaves((args, kwargs))
            self.history.bring_up_to_date(leaf for leaf in leaves if isinstance(leaf, Tracer))
            if isinstance(func, OpOverload) and func.is_view and isinstance(args[0], Tracer):
                args = (self.history.viewed(args[0]), *args[1:])
        return self._noted(func, args, self._dispatch(func, types, args, kwargs or {}))

    def _reinterpreted(self, func: Any, tensor: Tracer, *dtype: torch.dtype) -> torch.Tensor:
        """The tensor of which a view of another dtype is taken. Below, a view that is made again
        after a write may be one of a tensor with bits that PyTorch refuses.
        """
        is_same = dtype == (tensor.dtype,)
        if not is_same and any(has_bit(tensor) for has_bit in REFUSED_BITS[func]):
            what = f"`{func}` of a conjugate or negative view was called"
            raise RuntimeError(f"{what}. Write `x.resolve_conj().resolve_neg()` for `x`.")
        if func is _VIEW_DTYPE and self.history is not None:
            return self.history.reinterpreted(tensor)
        return tensor

    def _at_once(self, changed: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pair each view through an `expand` or `unfold` with another one of the same elements.
        PyTorch adds up differences, which rounds, and is NaN beside infinities.
        """
        history, self.history = self.history, None  # which notes views that the function takes
        try:
            with self:
                pairs = [(tensor, _at_once(tensor)) for tensor in changed]
        finally:
            self.history = history
        return [(tensor, view) for tensor, view in pairs if view is not tensor]

    def _change(self, func: Any, types: Any, views: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that changes tensors, on the views in their places."""
        if not views:
            return self._dispatch(func, types, args, kwargs)
        there = {id(tensor): view for tensor, view in views}
        back = {id(view): tensor for tensor, view in views}
        args, kwargs = torch_pytree.tree_map(lambda one: there.get(id(one), one), (args, kwargs))
        result = self._dispatch(func, types, args, kwargs)
        return torch_pytree.tree_map(lambda one: back.get(id(one), one), result)

    def _noted(self, func: Any, args: Any, result: Any) -> Any:
        """The result of a view that autograd knows no base of: it keeps that itself."""
        if func is _VIEW_DTYPE and isinstance(result, Tracer):
            if self.history is not None:
                result = self.history.reinterpreted(result)
            result.viewed = args[0]
        if func is _DETACH and self.history is not None and isinstance(args[0], Tracer):
            result.viewed = args[0] if args[0].viewed is not None else None
            self.history.detached(args[0], result)
        return result

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(func, HigherOrderOperator) and self.on_higher_order is not None:
            return self.on_higher_order(func, args, kwargs)
        if func is _SET:
            args = self._args_of_set(*args)
        done = self._in_other_ops(func, args, kwargs)
        if done is not NotImplemented:
            return done
        traits = traits_of(func)
        if traits.has_effects:
            return self._run_effect(func, args, kwargs)
        pure = self.pure_call(func) if isinstance(func, OpOverload) else None
        if pure is not None:
            with self:
                return pure(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if traits.is_simple and all(issubclass(kind, Tracer) for kind in types):
                result = functionalized(Tracer, func, args, kwargs, traits)
            else:
                result = _of_functional(self, func, _without_tracers(types), args, kwargs)
        if type(result) is FakeTensor and not any(isinstance(arg, torch.Tensor) for arg in args):
            return functionalize(result, self)  # of two numbers, as in `torch.add(1, 2)`
        for item in result if isinstance(result, (list, tuple)) else (result,):
            if type(item) is FunctionalTensor or is_living_tracer(item):
                self.adopt(item)
        return result

    def _in_other_ops(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op in terms of others if functionalization has it wrong; else NotImplemented."""
        if is_strided_draw(func, args):
            with self:
                return _draw_in_memory_order(func, args, kwargs)
        if func in _WITHOUT_GENERATOR and kwargs.get("generator") is not None:
            with self:
                return args[0].copy_(_WITHOUT_GENERATOR[func](*args, **kwargs))
        if not args or type(args[0]) is not Tracer:
            return NotImplemented
        if func in _BITS:
            self.under_bits.append(memory_in(args[0]))
        if func is _RESIZE and [*args[0].shape] == [*args[1]] and not kwargs:
            return args[0]  # a view keeps its strides
        if func is _VIEW:
            _check_view(*args)
        if func is not _UNFOLD:
            return NotImplemented
        with self:
            found = _unfold_by_views(*args)
        return NotImplemented if found is None else found

    def _args_of_set(self, target: Any, *source: Any) -> tuple[Any, ...]:
        """Check a `set_`, and give its source the bits of the target: it takes memory, not bits.
        Where gradients are off, it takes no history either.

        It is the one op in place that torch functions do not show, so that tensors from outside
        come as they are.
        """
        history = self.history
        is_given = history is not None and history.is_given(target)
        tensors = [arg for arg in (target, *source) if isinstance(arg, torch.Tensor)]
        is_foreign = history is not None and not all(map(history.is_own, tensors))
        if is_given or is_foreign or any(type(tensor) is torch.Tensor for tensor in tensors):
            what = "`set_` of a tensor from outside was called, whose memory a trace does not have"
            fix = "Write `x.copy_(y)`, or return the new tensor."
            raise UnsupportedCall(what, fix=fix)
        if type(source[0]) is not Tracer:
            return (target, *source)
        memory = source[0]
        if history is not None and not torch.is_grad_enabled():
            memory = history.reinterpreted(memory)
        with self:
            for view in bits_between(memory, target):
                memory = view(memory)
        return target, memory

    def _settle(self, changed: list[torch.Tensor]) -> None:
        """Give memory without bits a value without them: a write through a conjugate or negative
        view leaves its bit there.
        """
        places = set(map(memory_id, changed))
        for memory in self.under_bits:
            if storage_id(memory) in places:
                value = read_memory(memory)
                if [memory.is_conj(), memory.is_neg()] == [False, False] and (
                    value.is_conj() or value.is_neg()
                ):
                    write_memory(memory, value.resolve_conj().resolve_neg())

    def _run_effect(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op with an effect as it is: the order of the equations is order enough."""
        args, kwargs = torch_pytree.tree_map_only(FunctionalTensor, inner_fake, (args, kwargs))
        result = func(*args, **kwargs)
        return torch_pytree.tree_map_only(
            torch.Tensor, lambda fake: functionalize(fake, self), result
        )

    def forget(self) -> None:
        """Drop what refers to the recorder, and with it every cycle."""
        self.on_new = _ignore_tensor
        self.on_higher_order = None
        self.on_attribute = None
        self.history = None
        self.under_bits = []

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a functional tensor a tracer."""
        if type(tensor) is FunctionalTensor:
            set_class(tensor, Tracer)
        self.on_new(tensor)
        return tensor


attributes: Callable[[torch.Tensor], dict[str, Any]] = torch.Tensor.__dict__["__dict__"].__get__
"""The attributes that Python code gave a tensor; a tracer's own among them."""
set_class: Callable[[torch.Tensor, type], None] = object.__dict__["__class__"].__set__
"""Make an object one of another class."""


def functionalize(fake: torch.Tensor, mode: TracerMode) -> torch.Tensor:
    """Wrap a fake tensor so that in-place code and views on it come out pure. It is of no
    torch.func level.
    """
    with temporarily_clear_interpreter_stack(), torch._C.DisableTorchFunction(), mode:
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


def memory_id(tracer: torch.Tensor) -> int:
    """A number that the views of a tracer share with it."""
    return storage_id(tracer.elem)  # type: ignore[attr-defined]


def is_whole(memory: torch.Tensor) -> bool:
    """Test for a functional tensor that is no view of the memory that it has."""
    return not torch._C._functionalization.get_view_meta_sequence(memory)


def laid_out_as(memories: Sequence[torch.Tensor], fake: torch.Tensor) -> list[torch.Tensor]:
    """Lay out the views of functional tensors as eager mode does: each one's of what the one
    before it gives, the first one's of memory with the layout of `fake`, without its bits.

    A write leaves a value in a layout of its own, which says nothing of memory.

    Returns:
        Tensors of PyTorch's device "meta", in one memory: that of `fake`, and one for each.
    """
    first = fake.storage_offset()
    with isolated(), torch._C.DisableTorchFunction():
        room = torch.empty(
            first + extent(fake.shape, fake.stride()), dtype=fake.dtype, device="meta"
        )
        value = room.as_strided(fake.shape, fake.stride(), first)
        found = [value]
        for memory in memories:
            steps = torch._C._functionalization.get_view_meta_sequence(memory)
            value = torch._C._functionalization.apply_view_meta_sequence(value, steps)
            found.append(value)
        return found


_OVERLAPPING = tuple(
    getattr(torch._C._functionalization, f"{name}_ViewMeta")
    for name in ("expand", "unfold", "as_strided")
)


def _at_once(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements by one view of the memory, if views lead there of which several elements
    may be one.
    """
    steps = torch._C._functionalization.get_view_meta_sequence(memory_in(tensor))
    *before, last = steps or (None,)
    if not any(isinstance(step, _OVERLAPPING) for step in before) and not isinstance(
        last, _OVERLAPPING[:2]
    ):
        return tensor
    base = base_of(tensor)
    if base is None or not have_one_memory(base, tensor) or not is_whole(memory_in(base)):
        what = "a part of an expanded or unfolded tensor is written to, whose memory is not known"
        raise UnsupportedCall(what, fix="Write to the tensor that has the memory, or to a clone.")
    *_, view = laid_out_as([memory_in(tensor)], inner_fake(base))
    if view.dtype != base.dtype:
        return tensor
    found = base.as_strided(view.shape, view.stride(), view.storage_offset())
    for bit in bits_between(found, tensor):
        found = bit(found)
    return found


def is_laid_out_anew(tracer: torch.Tensor) -> bool:
    """Test whether the value of a tracer lies otherwise in memory than its tensor: a write to a
    tensor with gaps leaves a value without.
    """
    with torch._C.DisableTorchFunction():
        inner = inner_fake(tracer)
        pairs = [(tracer.storage_offset(), inner.storage_offset())]
        sizes = zip(tracer.stride(), inner.stride(), tracer.shape, strict=True)
        pairs += [(one, other) for one, other, size in sizes if type(size) is not int or size > 1]
        return any(type(one) is int and type(other) is int and one != other for one, other in pairs)


def have_one_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Test for two tracers that share memory, as the traced function has it."""
    return storage_id(memory_in(a)) == storage_id(memory_in(b))


def give_memory(tracer: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Memory of its own for a tracer, with a fake tensor in it. Views of its old self do not
    follow.
    """
    with only_memory():
        tracer.elem = torch._to_functional_tensor(fake)  # type: ignore[attr-defined]
    return memory_in(tracer)


def is_own_view(tracer: torch.Tensor) -> bool:
    """Tell whether the shape of a tracer was changed in place."""
    return tracer.is_own_view  # type: ignore[attr-defined]


def become(tracer: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange two tracers from now on. Views keep to their old base."""
    torch._C._swap_tensor_impl(tracer, other)
    tracer.elem, other.elem = other.elem, tracer.elem  # type: ignore[attr-defined]
    tracer.is_own_view = True  # type: ignore[attr-defined]


def become_plain(tracer: torch.Tensor, value: torch.Tensor) -> None:
    """Make a tracer a plain tensor for good, with the memory of the value."""
    with torch._C.DisableTorchFunction():
        plain = value.data
    torch._C._swap_tensor_impl(tracer, plain)
    set_class(tracer, torch.Tensor)
    attributes(tracer).clear()


def write_memory(memory: torch.Tensor, fake: torch.Tensor) -> None:
    """Put another fake tensor into the memory; its views follow."""
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
        return fake_in(tensor)


def is_below_tracers(tensor: torch.Tensor, mode: RecordingMode) -> bool:
    """Test whether the tensor is what a tracer is made of: PyTorch's own machinery is at work, not
    the traced function.
    """
    if isinstance(tensor, FakeTensor):
        return tensor.fake_mode is mode
    return torch._is_functional_tensor(tensor) and not isinstance(tensor, FunctionalTensor)


def is_from_outside(wrapped: torch.Tensor) -> bool | None:
    """Test whether a torch.func wrapper was made by a transform around the capture; None where that
    cannot be told.

    Inside a capture the transforms are numbered anew, so a wrapper of a level that is not running
    is from outside.
    """
    functorch = torch._C._functorch
    if not levels_outside.get():
        return False
    inner = wrapped
    while functorch.is_functorch_wrapped_tensor(inner):
        inner = functorch.get_unwrapped(inner)
    if isinstance(inner, Tracer) and get_dispatch_mode(FAKE) is fake_mode_of(inner):
        return False
    return (
        True
        if functorch.maybe_get_level(wrapped) > functorch.get_dynamic_layer_stack_depth()
        else None
    )


_PLAIN_DISPATCH = {
    torch.Tensor.__torch_dispatch__,
    FakeTensor.__torch_dispatch__,
    Tracer.__torch_dispatch__,
}

_PLAIN_FUNCTION = {torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl}


def has_own_dispatch(tensor: torch.Tensor) -> bool:
    """Test whether the tensor's class changes PyTorch's functions or ops."""
    cls = type(tensor)
    if cls in (torch.Tensor, torch.nn.Parameter, FakeTensor) or issubclass(cls, Tracer):
        return False
    function = getattr(cls.__torch_function__, "__func__", cls.__torch_function__)
    return function not in _PLAIN_FUNCTION or cls.__torch_dispatch__ not in _PLAIN_DISPATCH


def fake_mode_of(tracer: torch.Tensor) -> Any:
    """The fake tensor mode that a functional tensor's inside belongs to, if any."""
    return getattr(torch._from_functional_tensor(tracer.elem), "fake_mode", None)  # type: ignore[attr-defined]


def is_living_tracer(value: Any) -> TypeGuard[Tracer]:
    """Test for a tracer whose capture runs: one that has escaped is of another class."""
    cls = type(value)
    return cls is Tracer or (type(cls) is _Kind and tracers_of(cls.outside_class) is cls)


def is_tracer(value: Any) -> bool:
    """Test for a tracer, perhaps inside the wrappers of torch.func."""
    if not isinstance(value, torch.Tensor):
        return False
    return isinstance(innermost(value), Tracer)
