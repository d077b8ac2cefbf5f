"""Patches of a capture, in the threads that capture and only there, and torch functions written
in Python.
"""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
    set_eval_frame,
)
from torch._decomp import global_decomposition_table

from thunder_fn.ir.scoped import setting
from thunder_fn.torch_internals.settings import STATE, UNKNOWN, setters


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One replacement of a patch: around all others, or inside of those that are outermost."""

    patch: Patch
    make: Callable[[Any], Any]


def _is_outermost(layer: _Layer) -> bool:
    return layer.patch.outermost


class _Place:
    """An attribute that patches replace: the original, and the replacements, each made of the one
    inside of it.

    A method, and a function of `math`, is the original in threads that no patch is applied in.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.original: Any = getattr(owner, name)
        is_open = isinstance(owner, (type, types.ModuleType))
        self.names: Mapping[str, Any] | None = vars(owner) if is_open else None
        """The attributes of a class or a module, as they are at any time."""
        self.own = [vars(owner)[name]] if name in vars(owner) else []
        self.shown: Any = self.original
        self.held: Any = self.held_now()
        self.free = self.held
        """The attribute as the owner holds it while nothing is replaced."""
        self.layers: tuple[_Layer, ...] = ()
        """The replacements, innermost first: a new tuple at each change, since threads read it."""
        self.is_left = False
        self.made: tuple[_Layer, Any, Any] | None = None
        """The last replacement that was alone here, as it is shown and as the owner is given it."""

    def held_now(self) -> Any:
        """The attribute as its owner holds it."""
        if self.names is not None:
            return self.names.get(self.name, self.original)
        return getattr(self.owner, self.name)

    def is_method(self) -> bool:
        """Test for a method, which stays replaced until it is next asked for."""
        return isinstance(self.held, _PerThread)

    def is_current(self) -> bool:
        """Test that nobody else has replaced it meanwhile. FX puts back what it has read."""
        now = self.held_now()
        return now is self.held or now is self.shown

    def here(self) -> Any:
        """The value in this thread."""
        patches = _here.patches
        for layer in self.layers:
            if layer.patch in patches:
                return self.shown
        if not self.layers:
            self.wake()
        return self.original

    def wake(self) -> None:
        """Put the original of a method back when it is first asked for outside of captures.

        A class looks through all classes below it when a method such as `__call__` is exchanged:
        a third of a millisecond for `nn.Module`. One capture after another exchanges it once.
        """
        with _lock:
            if not self.layers and self.held_now() is self.held and self.held is not self.free:
                self.restore()
                self.held, self.shown = self.free, self.original

    def add(self, layer: _Layer) -> None:
        """Add a replacement: around all, or around those that are not outermost."""
        layers = (*self.layers, layer)
        is_alone = len(layers) == 1
        self.layers = layers if is_alone else tuple(sorted(layers, key=_is_outermost))
        self.show()

    def remove(self, layer: _Layer) -> None:
        """Remove a replacement, wherever it is among them; the original comes back with the
        last.
        """
        self.layers = tuple(one for one in self.layers if one is not layer)
        if not self.is_current():
            self.is_left = not self.layers
        elif self.layers:
            self.show()
        elif layer.patch.outermost or self.held_now() is not self.held or not self.is_method():
            self.restore()
            self.held, self.shown = self.free, self.original

    def restore(self) -> None:
        """Put the original back."""
        if self.owner is math:
            _views.pop(self.name, None)
            if not _views:
                math.__class__ = types.ModuleType
        elif self.own:
            setattr(self.owner, self.name, self.own[0])
        else:
            delattr(self.owner, self.name)

    def show(self) -> None:
        """Put the replacements into the attribute."""
        value, given = self.replacements()
        self.shown = value
        if self.owner is math:
            _views[self.name] = self
            math.__class__ = _View
            return
        if self.held_now() is not given:
            setattr(self.owner, self.name, given)
        self.held = self.held_now()
        if value is given:
            self.shown = getattr(self.owner, self.name)

    def replacements(self) -> tuple[Any, Any]:
        """Return what threads that capture see, and what is put into the attribute for all."""
        is_alone = len(self.layers) == 1
        if is_alone and self.made is not None and self.made[0] is self.layers[0]:
            return self.made[1:]
        value = self.original
        for layer in self.layers:
            value = layer.make(value)
        is_method = isinstance(self.owner, type) and isinstance(value, types.FunctionType)
        given = _PerThread(self) if is_method else value
        if is_alone and not self.layers[0].patch.outermost:
            self.made = self.layers[0], value, given
        return value, given


class _Here(threading.local):
    """The patches that are applied in this thread, with the number of their uses."""

    def __init__(self) -> None:
        self.patches: dict[Patch, int] = {}


_here = _Here()


def replaced_here() -> int:
    """Return the number of patches that are applied in this thread: none outside of captures."""
    return len(_here.patches)


def is_applied(patch: Patch) -> bool:
    """Test whether a patch is applied in this thread."""
    return patch in _here.patches


class _PerThread:
    """A method that is replaced in some threads, and the original in all others.

    After the last capture it stays until the method is next asked for.
    """

    def __init__(self, place: _Place) -> None:
        self.place = place

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self.place.here().__get__(instance, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, as Python does with `__get__`, which it does not bind."""
        return self.place.here()(*args, **kwargs)


_views: dict[str, _Place] = {}
"""The functions of `math` that are replaced in some threads."""


class _View(types.ModuleType):
    """The class of `math` while some thread sees other functions in it."""

    def __getattribute__(self, name: str) -> Any:
        place = _views.get(name)
        return place.here() if place is not None else types.ModuleType.__getattribute__(self, name)


_lock = threading.RLock()
_places: dict[tuple[int, str], list[_Place]] = {}
"""Attributes that are replaced now. There are two for one attribute where somebody else has
replaced it in between.
"""
_free: dict[tuple[int, str], _Place] = {}
"""Places of PyTorch's that no patch needs now, as the last one left them. Those of a patch that is
outermost may be the user's, and are let go.
"""
_left: dict[tuple[int, str], deque[_Place]] = {}
"""Places whose last patch went while somebody else's value was there, who may put back our
replacement.
"""


def _place(owner: Any, name: str) -> _Place:
    key = id(owner), name
    for left in _left.get(key, ()):
        if left.is_current():
            left.restore()
    known = _places.setdefault(key, [])
    if not known or not known[-1].is_current():
        free = _free.pop(key, None)
        is_same = free is not None and free.owner is owner and free.held_now() is free.held
        known.append(free if free is not None and is_same else _Place(owner, name))
    return known[-1]


def _forget(place: _Place, last: Patch) -> None:
    """Let go of a place that no patch needs after the last one."""
    key = id(place.owner), place.name
    _places[key].remove(place)
    if not _places[key]:
        del _places[key]
    if place.is_left:
        _left.setdefault(key, deque(maxlen=8)).append(place)
    elif not last.outermost:
        _free[key] = place


def patched_places(original: Any) -> list[tuple[Any, str]]:
    """The attributes that are this object but for what patches have put there."""
    with _lock:
        left = [place for place in _free.values() if place.held is not place.free]
        return [
            (place.owner, place.name)
            for place in (*(known[0] for known in _places.values()), *left)
            if place.original is original
        ]


def unpatched(value: Any) -> Any:
    """The original behind a patch's replacement; anything else itself."""
    with _lock:
        found = (
            place.original for known in _places.values() for place in known if place.shown is value
        )
        return next(found, value)


class Patch:
    """Replaces attributes of PyTorch's while at least one thread needs it.

    Methods, and functions of `math`, are replaced in the threads that need it alone. Other
    functions of modules do in other threads what the original does.

    `make` gives the replacements, each from what it replaces. With the last user, the original
    comes back, unless somebody else has replaced it meanwhile. Patches of one attribute come and go
    in any order.

    Args:
        outermost: around what other patches put in the same place, whenever they are applied.
    """

    def __init__(
        self, *replacements: tuple[Any, str, Callable[[Any], Any]], outermost: bool = False
    ) -> None:
        self.outermost = outermost
        self._replacements = [
            (owner, name, _Layer(self, make)) for owner, name, make in replacements
        ]
        self._users = 0
        self._done: list[tuple[_Place, _Layer]] = []

    @property
    def users(self) -> int:
        """The number of captures that need it now."""
        return self._users

    @contextlib.contextmanager
    def applied(self) -> Generator[None]:
        """Put the replacements in place, for this user and all who come meanwhile."""
        here = _here.patches
        with _lock:
            if self._users == 0:
                self._install()
            self._users += 1
        here[self] = here.get(self, 0) + 1
        try:
            yield
        finally:
            here[self] -= 1
            if not here[self]:
                del here[self]
            with _lock:
                self._users -= 1
                if self._users == 0:
                    self._remove()

    def _install(self) -> None:
        for owner, name, layer in self._replacements:
            place = _place(owner, name)
            place.add(layer)
            self._done.append((place, layer))

    def _remove(self) -> None:
        while self._done:
            place, layer = self._done.pop()
            place.remove(layer)
            if not place.layers:
                _forget(place, self)


class _Depth(threading.local):
    value = 0
    is_eager = False
    """PyTorch's code takes its eager branches."""

    applied: contextlib.ExitStack | None = None
    """The patches of the outermost capture."""


_capturing = _Depth()


class _CompilingFlag:
    """Stand-in for `torch.compiler._is_compiling_flag`: true in threads that capture, elsewhere
    the old value.
    """

    def __init__(self, before: Any) -> None:
        self.before = False if isinstance(before, _CompilingFlag) else before

    def __bool__(self) -> bool:
        is_capturing = _capturing.value > 0 and not _capturing.is_eager
        return is_capturing or bool(self.before)

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
    """Replace Dynamo's setting of its callback, so that `torch.compile`d functions run as they are
    in threads that capture.
    """

    def callback_from_stance(callback: Any) -> Any:
        if not _capturing.value:
            return original(callback)
        count_frames = getattr(
            torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None
        )
        if count_frames is not None:
            # with fullgraph=True it asks afterwards whether something was compiled
            count_frames(-1)
        return None

    return callback_from_stance


_quiet: ContextVar[bool] = ContextVar("thunder_fn_no_meta_log", default=False)


def no_meta_log() -> contextlib.AbstractContextManager[None]:
    """Run without PyTorch's log of the calls that its meta functions refuse."""
    return setting(_quiet, True)


def _no_meta_log(record: logging.LogRecord) -> bool:
    """Keep a wrong shape, while capturing, an exception for the user and no news for the log."""
    return (_capturing.value == 0 and not _quiet.get()) or not str(record.msg).startswith(
        ("failed while attempting to run meta", "fake tensor raised")
    )


logging.getLogger("torch._subclasses.fake_tensor").addFilter(_no_meta_log)

_compiling_flag = Patch((torch.compiler, "_is_compiling_flag", _CompilingFlag))

_dynamo: list[Patch] = []


@contextlib.contextmanager
def eager_branches() -> Generator[None]:
    """`torch.compiler.is_compiling()` is false in this thread, as where nothing is captured;
    `torch.compile`d functions still run as they are.
    """
    before, _capturing.is_eager = _capturing.is_eager, True
    try:
        yield
    finally:
        _capturing.is_eager = before


@contextlib.contextmanager
def compiling() -> Generator[None]:
    """`torch.compiler.is_compiling()` is true in this thread, and `torch.compile`d functions run as
    they are.

    Libraries then skip their data-dependent checks.
    """
    with contextlib.ExitStack() as applied:
        applied.enter_context(_compiling_flag.applied())
        applied.enter_context(_first_compile.applied())
        _leave_uncompiled(applied)
        outer, _capturing.applied = _capturing.applied, _capturing.applied or applied
        is_eager, _capturing.is_eager = _capturing.is_eager, False
        _capturing.value += 1
        try:
            yield
        finally:
            _capturing.value -= 1
            _capturing.is_eager = is_eager
            _capturing.applied = outer


def _leave_uncompiled(applied: contextlib.ExitStack) -> None:
    """Let `torch.compile`d functions run as they are in this thread, if Dynamo is imported."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    is_whole = "_dynamo" in vars(torch)  # else another thread imports it at the moment
    if frames is not None and is_whole and not _dynamo:
        _dynamo.append(Patch((frames, "_callback_from_stance", _compile_nothing)))
    if _dynamo:
        applied.enter_context(_dynamo[0].applied())


def _after_dynamo(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `torch.compile` where nothing has imported Dynamo before the capture."""

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        if _capturing.applied is not None and not _dynamo:
            importlib.import_module("torch._dynamo")
            _leave_uncompiled(_capturing.applied)
        return original(*args, **kwargs)

    return compile


_first_compile = Patch((torch, "compile", _after_dynamo))


def is_tensor_type(cls: type) -> bool:
    """Test for the class in C that tensors have their methods from."""
    return cls is torch._C.TensorBase


def is_told_to_modes(fn: types.BuiltinFunctionType) -> bool:
    """Test whether a call of the function is told to every TorchFunctionMode."""
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


def is_dynamo_compiling() -> bool:
    """Test whether Dynamo is reading the bytecode that asks; it takes the answer for a constant."""
    return torch.compiler.is_dynamo_compiling()


def no_compilation() -> contextlib.AbstractContextManager[Any]:
    """Hold the lock under which Dynamo compiles: inside, no other thread does."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def constant_of_dynamo(fn: Any) -> Callable[[], Any]:
    """A function that Dynamo calls while it compiles, whose result it takes for a constant."""
    fn._dynamo_marked_constant = (
        True  # as `torch._dynamo.assume_constant_result`, without importing Dynamo
    )
    return fn


_SKIPPED = "thunder_fn traces what it calls by itself: leave `fullgraph=True` out"


def outside_dynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, of which Dynamo compiles nothing, neither its own code nor what it calls:
    `torch.compiler.disable`, which would import Dynamo.
    """

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        before = set_eval_frame(None)
        try:
            return fn(*args, **kwargs)
        finally:
            set_eval_frame(before)

    set_code_exec_strategy(
        called.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    )
    called._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]
    called._torchdynamo_disable_msg = _SKIPPED  # pyright: ignore[reportFunctionMemberAccess]
    return called


F = TypeVar("F", bound=Callable[..., Any])


def skipped_by_dynamo(fn: F) -> F:
    """Mark a function as one of which Dynamo compiles nothing. Unlike `outside_dynamo` it adds
    nothing to a call.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(fn.__code__, skip)  # pyright: ignore[reportFunctionMemberAccess]
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
    fn._torchdynamo_disable_msg = _SKIPPED  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
    return fn


def with_twin(twin: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """Keep Dynamo out of a function. Where it has to compile all in one graph, it takes the twin, a
    function of PyTorch's that it knows.
    """

    def decorate(fn: F) -> F:
        alone = outside_dynamo(fn)

        @functools.wraps(fn)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                return fn(*args, **kwargs)
            if twin is not None and is_one_graph():
                return twin(*args, **kwargs)
            return alone(*args, **kwargs)

        return called  # type: ignore[return-value]

    return decorate


@constant_of_dynamo
def is_one_graph() -> bool:
    """Test, at a call by Dynamo, whether it compiles with `fullgraph=True`."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return bool(InstructionTranslator.current_tx().one_graph)


@functools.cache
def formulas_outside_dynamo() -> None:
    """Keep Dynamo out of PyTorch's formulas in Python without importing it.

    PyTorch does so by a wrapper that makes `torch._dynamo.disable(formula)` at the first call. The
    import takes half a second, and no public name says what the wrapper is to call instead.
    """
    wrapper = torch._disable_dynamo(formulas_outside_dynamo).__code__
    left: list[Any] = [
        one for table in global_decomposition_table.values() for one in table.values()
    ]
    seen = set[Any]()
    while left:
        function = left.pop()
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        names = function.__code__.co_freevars
        inside = dict(
            zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)
        )
        if function.__code__ is wrapper and not hasattr(inside["fn"], "__dynamo_disable"):
            inside["fn"].__dynamo_disable = outside_dynamo(inside["fn"])
        left.extend(inside.values())


def is_op(fn: Any) -> bool:
    """Test for an operator of a library, all of its overloads or one, or what
    `torch.library.custom_op` makes.
    """
    return isinstance(
        fn,
        torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._library.custom_ops.CustomOpDef,
    )


def arrives_as(fn: Any) -> tuple[Any, ...]:
    """The functions that modes see where `fn` is called: `x + y` arrives as `Tensor.add`, an
    operator as one of its overloads.
    """
    if isinstance(fn, torch._library.custom_ops.CustomOpDef):
        fn = fn._opoverload
    if isinstance(fn, torch._ops.OpOverload):
        return (fn, fn.overloadpacket) if len(fn.overloadpacket.overloads()) == 1 else (fn,)
    if isinstance(fn, torch._ops.OpOverloadPacket):
        return (fn, *(getattr(fn, name) for name in fn.overloads()))
    if not isinstance(fn, types.MethodDescriptorType) or not fn.__name__.startswith("__"):
        return (fn,)
    x = torch.zeros(())
    for args in ((x,), (x, x)):
        with _FirstCall() as first, contextlib.suppress(TypeError):
            fn(*args)
        if first.func is not None:
            return (first.func,)
    return (fn,)


CUSTOM_OPS = "torch._library.autograd"
"""The module of the autograd functions that `torch.library.register_autograd` makes."""


STREAM_FUNCTIONS: dict[str, tuple[Any, str]] = {
    "torch.cuda.stream": (torch.cuda.StreamContext, "__enter__"),
    "torch.cuda.set_stream": (torch.cuda, "set_stream"),
    **{
        f"torch.cuda.{owner.__name__}.{name}": (owner, name)
        for owner, names in (
            (torch.cuda.Stream, "wait_event wait_stream record_event query __enter__"),
            (torch.cuda.Event, "record wait query elapsed_time"),
        )
        for name in names.split()
        if hasattr(owner, name)  # without CUDA there is less
    },
}
"""Functions that order work on streams or ask for it: where each is found."""


def calls_patch(
    module_call: Callable[[Any], Any],
    function_inputs: Callable[[Any], Any],
    wrapped: Callable[[Any], Any],
    random: dict[str, Callable[[Any], Any]],
    streams: dict[str, Callable[[Any], Any]],
    others: dict[str, Callable[[Any], Any]],
) -> Patch:
    """The replacements of a capture in calls: each is made of what it replaces.

    `module_call` is `nn.Module.__call__`, and `function_inputs` what `autograd.Function.apply` does
    to its inputs. `wrapped` is how torch.func's transforms wrap a tensor in a level. `random` are
    functions of `torch.cuda.random`, `streams` are `STREAM_FUNCTIONS`.
    `others` are the class `torch.Generator`, the calls of `torch.autograd.Variable` and of
    TorchScript, and `flatten_parameters`, which is what recurrent layers do to the memory of their
    weights.
    """
    utils = torch._functorch.utils
    levels = (
        (torch._functorch.predispatch, "_add_batch_dim_impl", wrapped),  # TensorDict calls it too
        (torch._functorch.eager_transforms, "_wrap_for_grad", wrapped),
    )
    generator = [
        (owner, name.removeprefix("cuda."), make)
        for name, make in random.items()
        for owner in (torch.cuda, torch.cuda.random)
    ]
    return Patch(
        (torch.nn.Module, "__call__", module_call),
        (utils, "unwrap_dead_wrappers", function_inputs),
        *levels,
        *generator,
        *((*STREAM_FUNCTIONS[name], make) for name, make in streams.items()),
        (torch, "Generator", others["Generator"]),
        (torch.nn.RNNBase, "flatten_parameters", others["flatten_parameters"]),
        (type(torch.autograd.Variable), "__call__", others["Variable"]),
        (torch._C.ScriptMethod, "__call__", others["script"]),
        (torch._C.ScriptFunction, "__call__", others["script"]),
    )


PROFILER = (torch._C._autograd._profiler_enabled, torch._C._autograd._profiler_type)
"""Functions that say whether PyTorch's profiler runs, and which one."""


def process_patch(
    of_torch: dict[str, Callable[[Any], Any]],
    flag: Callable[[str, Any], Callable[..., Any]],
    property_of_backends: Callable[[Any], Any],
    inference: dict[str, Callable[[Any], Any]],
    set_of_backends: Callable[[Any], Any],
    sets: Callable[[str, tuple[str, ...], Any], Callable[..., Any]],
    has_override: Callable[[Any], Callable[..., bool]],
) -> Patch:
    """Functions that say or set how PyTorch's process is configured, as ours. `sets` makes one that
    sets something, given its name and what it sets: nothing where no function tells that.
    `has_override` makes one that asks for classes like tensors, and for modes.
    """
    flags = [
        (torch._C, name, functools.partial(flag, name)) for name in STATE if hasattr(torch._C, name)
    ]
    functions = [
        (torch if hasattr(torch, name) else torch.autograd, name, make)
        for name, make in of_torch.items()
    ]
    fast = (
        torch.backends.mha,
        "get_fastpath_enabled",
        functools.partial(flag, "get_fastpath_enabled"),
    )
    regions = [(torch.inference_mode, name, make) for name, make in inference.items()]
    return Patch(
        *functions,
        *flags,
        fast,
        (torch.backends.ContextProp, "__get__", property_of_backends),
        (torch.backends.ContextProp, "__set__", set_of_backends),
        *((torch.overrides, name, has_override) for name in _CHECKS),
        *((*place, functools.partial(sets, place[1], ())) for place in UNKNOWN),
        *(
            (owner, name, functools.partial(sets, name, names))
            for (_, name), (owner, names) in setters().items()
        ),
        *regions,
    )


_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _no_torch_function(*args: Any) -> bool:
    return False


def has_own_torch_function(value: Any) -> bool:
    """Test for an object of a class like a tensor, which PyTorch's functions ask."""
    kind = value.__class__ if isinstance(value, torch.Tensor) else type(value)  # of a tracer, too
    found = getattr(kind, "__torch_function__", None)
    is_off = found is None or found is torch._C._disabled_torch_function_impl
    return kind is not torch.Tensor and not is_off


def without_torch_function_checks(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a Python torch function that skips its own `has_torch_function` check.

    Run under a TorchFunctionMode, the copy's body is seen by the mode though the function itself
    has been already. The original is not touched.
    """
    code, names = function.__code__, function.__globals__
    if not any(name in names for name in _CHECKS):
        return function
    patched = {**names, **{name: _no_torch_function for name in _CHECKS if name in names}}
    copy = types.FunctionType(
        code, patched, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
