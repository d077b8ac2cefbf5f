"""jit: a function is traced when it is called with a new kind of arguments, and runs as a program
from then on.

`call.py` takes a call apart, `prologue.py` says which calls a program serves, `guards.py` lowers
that, `program.py` makes the program, `families.py` finds one among many sizes. `outside.py` guards
what was read from outside. `modules/` jits modules, `autograd/` is the bridge to `loss.backward()`.
A warm call costs two microseconds: add nothing to `callpath.py` and `guards.py` that is not
measured.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Protocol, overload

import torch
from typing_extensions import ParamSpec, TypeVar, Unpack

from thunder_fn import torch_internals as internals
from thunder_fn.capture import current
from thunder_fn.capture.apply import before_writes, close_over, write_back
from thunder_fn.errors import JitError, kind_of, spelled
from thunder_fn.executors import Program
from thunder_fn.executors.base import watched_by
from thunder_fn.executors.running import tell_line
from thunder_fn.ir.notebook import ShownList
from thunder_fn.ir.text import shown
from thunder_fn.ir.trace import Trace
from thunder_fn.jitted import dynamic
from thunder_fn.jitted.cache import Cache, CacheInfo, CallPath, sketch
from thunder_fn.jitted.call import Call, call_key, read_call
from thunder_fn.jitted.callpath import MISS
from thunder_fn.jitted.claim_report import ClaimReport, explain
from thunder_fn.jitted.dynamic import Miss, RetraceWarning
from thunder_fn.jitted.families import family_key
from thunder_fn.jitted.guards import call_path
from thunder_fn.jitted.modules.containers import Filling, finish
from thunder_fn.jitted.options import JitOptions, Options, check_argnums
from thunder_fn.jitted.program import Entry, build, capture_call, is_followed
from thunder_fn.spellings import no_such_name
from thunder_fn.structured import replaced as _replaced  # noqa: F401  # pyright: ignore[reportUnusedImport]  # lookasides
from thunder_fn.structured.call import bind_call

if TYPE_CHECKING:
    from thunder_fn.capture.captured import Captured
    from thunder_fn.capture.recorder import Recorder
    from thunder_fn.inspect.lowered import Lowered

P = ParamSpec("P", default=...)
R = TypeVar("R", default=Any)
Q = ParamSpec("Q")
M = TypeVar("M", bound=torch.nn.Module)

__all__ = [
    "CacheInfo",
    "Jitted",
    "Options",
    "ClaimReport",
    "Miss",
    "RetraceWarning",
    "cache_info",
    "explain_claims",
    "explain_misses",
    "jit",
    "last_backward_traces",
    "last_prologue_traces",
    "last_traces",
]


@dataclass(frozen=True, eq=False)
class Jitted(Generic[P, R]):
    """A function with the options that it is jitted with. Made by `jit`."""

    fn: Callable[P, R]
    options: Options = field(default_factory=Options)
    programs: Cache = field(default_factory=Cache, repr=False)

    def __post_init__(self) -> None:
        check_argnums(self.options, self.fn)
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(self.fn, name):
                object.__setattr__(self, name, getattr(self.fn, name))
        object.__setattr__(self, "__wrapped__", self.fn)

    @internals.skipped_by_dynamo
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if current() is not None:
            return call_inside_capture(self, args, kwargs)
        try:
            programs = self.programs
            paths = programs.paths
            if paths and not programs.wanders:
                result = paths[0].call(args, kwargs)
                if result is not MISS:
                    return result
            if len(paths) > 1:
                near = programs.near.get(sketch(args, kwargs))
                if near is not None:
                    result = near.call(args, kwargs)
                    if result is not MISS:
                        programs.turn_to(near)
                        return result
            for path in paths:
                result = path.call(args, kwargs)
                if result is not MISS:
                    programs.prefer(path)
                    return result
            return self.call_slowly(args, kwargs)
        except Exception as error:
            tell_line(error)
            raise

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Jitted[P, R]: ...
    @overload
    def __get__(
        self: Jitted[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> Jitted[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"jit({getattr(self.fn, '__qualname__', repr(self.fn))})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle a decorated function of a module by its name, as Python does functions."""
        name = getattr(self.fn, "__qualname__", "")
        found: Any = sys.modules.get(getattr(self.fn, "__module__", ""))
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (type(self), (self.fn, self.options))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_such_name("thunder_fn:Jitted", name)

    @property
    def traced(self) -> Callable[..., Any]:
        """The function that is traced."""
        return self.fn

    def call_slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that no call path serves."""
        return _call_slowly(self, args, kwargs)

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Make the programs of a call ahead of time. Nothing is run.

        Args:
            args, kwargs: as of the call, or `TensorType`s in the place of tensors.

        Returns:
            An object with `text()`, `cost()`, `memory()` and `compile()`, which gives a function
                that never traces.

        Raises:
            CaptureError: f cannot be traced.

        Example:
            >>> import torch
            >>> from thunder_fn.ir.trace import TensorType
            >>> lowered = jit(lambda x: x @ x).lower(TensorType(torch.float32, (64, 64)))
            >>> lowered.cost().total.flops == 2 * 64**3, lowered.memory().peak
            (True, 16384)
            >>> lowered.compile()(torch.eye(64)).shape
            torch.Size([64, 64])

        Source: `jax.jit(f).lower`.
        """
        from thunder_fn.inspect.lowered import lower

        return lower(self, args, kwargs)

    def with_function(self, fn: Callable[..., Any]) -> Jitted:
        """Jit another function with the same options."""
        return Jitted(fn, self.options)


class Jit(Protocol):
    """`jit` with its options given: a decorator."""

    @overload
    def __call__(self, f: M, /) -> M: ...
    @overload
    def __call__(self, f: Callable[P, R], /) -> Jitted[P, R]: ...


@overload
def jit(f: M, **options: Unpack[JitOptions]) -> M:
    """A module of the same class on the same state."""


@overload
def jit(f: Callable[P, R], **options: Unpack[JitOptions]) -> Jitted[P, R]:
    """A jitted function."""


@overload
def jit(**options: Unpack[JitOptions]) -> Jit:
    """A decorator."""


def jit(f: Callable[..., Any] | None = None, **options: Unpack[JitOptions]) -> Any:
    """Trace a function when it first sees arguments of a kind; run the program from then on.

    Law: ``jit(f)(*args)`` is ``f(*args)``, and ``jit(jit(f))`` is ``jit(f)``.

    The kind of a tensor is its class, dtype, shape, strides, device and `requires_grad`, and
    whether it is passed twice. Plain values count by type and value. Other objects, such as the
    `self` of a method, count by identity, and what f reads of them is guarded. A size or number
    that changes between calls becomes a symbol of the program.

    Tensors that f closes over are used by reference. If another value that f reads from outside
    changes, such as a global number or a module's `training`, f is traced again, and both programs
    are kept. `constant(value)` bakes a value in.

    Side effects on Python's own objects, such as `print` or a log, happen once, while tracing.
    A tensor that f stores outside is stored in each call. Lists and dicts among the arguments get
    what f puts into them or takes out. Other containers, such as dataclasses, are copies in f; it
    is an error to change one.

    `jit(f).lower(*args)` makes the programs of a call ahead of time. It has `text()`, `cost()`,
    `memory()` and `compile()`.

    Args:
        f: any PyTorch callable. If omitted, return a decorator: `@jit(static_argnums=1)`.
        executors: what runs the program, in order of priority: values such as
            `OperatorExecutor("mine")` or names of registered ones. The torch executor runs the
            rest.
        numerics: how far results may be from eager's: `"bitwise"`, `"reassociating"` (sums and
            products in another order) or `"precision-changing"`, which allows all. Executors with
            a weaker label are left out, and such transforms are refused. This holds for jitted
            functions that f calls, too.
        verify: run every program beside `evaluate`, and raise a VerificationError that names the
            first equation whose executor is farther off than its label says. "errors": raise a
            CheckFailed that names the first op that gives NaN, or that is given an index outside.
            Both are slow.
        transforms: functions from Trace to Trace, applied in order to what was traced.
        lookasides: `Lookaside(fn, replace_with)`: while f is traced, calls of `fn` go to
            `replace_with`.
        cache: `"constant values"` traces for the sizes and numbers at hand. When some of them
            change, it traces once more, for all values of these. `"symbolic values"` traces for all
            sizes and numbers at once. Decisions of f that depend on them are checked, and f is
            traced again if one differs. `"same input"` checks nothing after the first call: the
            caller promises that all arguments are alike. `"no caching"` traces every call.
        dynamic: False traces `"constant values"` anew for every size and number. A dict has an
            answer for each argument, by position or name: `{"x": {0: (2, 512), 1: True}, "n":
            False}`. Here the first dim of x is a symbol with bounds from the first call on, the
            second one without, and n is never a symbol. A program uses its bounds, so `x.shape[0] <
            1000` is no decision. A call outside the bounds gets a program of its own.
        static_argnums: arguments that are baked in, by hash and equality. They can be any hashable
            value. If f names its arguments, they are static when they are passed by name, too.
        static_argnames: the same by name, keyword-only arguments among them.
        donate_argnums: positional arguments whose tensors the program may overwrite. They cannot be
            used afterwards.

    Raises:
        UnknownOption: jit has no such option, executor or cache mode.
        ArgnumError: an argnum points at no argument.

    When called, the result raises:
        CaptureError: f cannot be traced. Nothing is cached then.
        UnsupportedInput: an argument is neither a tensor nor a value that can be baked in.
        UnhashableStatic: a static argument has no hash.
        DonatedTensorError: a donated tensor is used again, or passed twice.
        AliasedMutation: f changes a tensor in place that shares memory with another argument.

    Example:
        >>> import torch
        >>> f = jit(lambda x: torch.sin(x) * 2)
        >>> f(torch.zeros(2))
        tensor([0., 0.])
        >>> cache_info(f).misses
        1
    """
    if f is None:
        Options().changed(options)
        return functools.partial(jit, **options)
    if isinstance(f, Jitted):
        return Jitted(f.fn, f.options.changed(options).of_arguments(f.fn)) if options else f
    if isinstance(f, torch.nn.Module):
        return _modules().jit_module(f, options)
    if not callable(f):
        raise JitError(
            f"jit: expected a function, given {kind_of(f)}: {shown(f, 60)}",
            fix="Jit the function, then call the result: `jit(f)(x)`.",
        )
    return Jitted(f, Options().changed(options).of_arguments(f))


def _modules() -> Any:
    """The module that jits modules, which is built from the one that jits functions."""
    from thunder_fn.jitted.modules import module

    return module


def call_inside_capture(jitted: Jitted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a jitted function that is called while another is traced as one `call` equation.

    Its transforms have been applied to the body, which it owns, and its executors will run it.
    """
    recorder = current()
    assert recorder is not None, "the caller has looked"
    options = jitted.options.as_called()
    call = read_call(options, args, kwargs)
    begun = lambda captured: _record_call(recorder, options, call, captured, captured.trace)
    captured, traces = capture_call(jitted.fn, options, call, on_raise=begun)
    return _record_call(recorder, options, call, captured, traces[-1])


def _record_call(
    recorder: Recorder, options: Options, call: Call, captured: Captured, trace: Trace
) -> Any:
    """Record a call of this trace, and make the changes of the function that it was captured of."""
    body, closures = close_over(trace)
    inputs = call.values
    recorder.gradients.follows |= captured.follows
    with torch.set_grad_enabled(torch.is_grad_enabled() or is_followed(captured)):
        operands = before_writes(captured, inputs)
        values, strides = (*operands, *closures), captured.strides
        outputs = bind_call(recorder, body, values, body.name, options, strides)
    result = captured.result(write_back(captured, inputs, outputs))
    return finish(result, call.args, call.kwargs) if type(result) is Filling else result


def _call_slowly(jitted: Jitted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve a call that no call path serves: look up or build its program, and make a path for
    calls like it.
    """
    if internals.inside_torch_func() or internals.is_script_traced():
        return jitted.fn(*args, **kwargs)
    cache, call = jitted.programs, read_call(jitted.options, args, kwargs)
    if any(
        isinstance(leaf, (torch.fx.Proxy, internals.FakeTensor)) for leaf in call.leaves
    ):  # others trace the function, as it is written
        return jitted.fn(*args, **kwargs)
    key, generation = call_key(call), cache.generation
    if jitted.options.cache == "no caching":
        entry = build(jitted.traced, jitted.options, call)
        cache.count_miss()
        cache.prefer(CallPath(_never, entry))
        return _execute(entry, call)
    known = cache.get(key)
    if not known and jitted.options.is_dynamic:
        known = dynamic.find(cache, call, key)
    entry = next((one for one in known if one.serves(call)), None)
    if entry is None:
        with watched_by(cache):
            entry = dynamic.build_for(jitted.traced, jitted.options, cache, call, key, known)
    else:
        cache.count_hit()
    cache.prefer(_path(jitted, entry, call, key), sketch(args, kwargs))
    if cache.generation != generation:  # an executor's registrations changed meanwhile
        cache.clear()
    return _execute(entry, call)


def _never(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return MISS


def _path(jitted: Jitted, entry: Entry, call: Call, key: Any) -> CallPath:
    """The call path for calls like this one: the one that was made before, if it is in use or
    near.
    """
    kind = id(entry), key if entry.symbolic is None else family_key(call, key)
    cache, where = jitted.programs, (kind, torch.get_num_threads())
    known = cache.get_path(where)
    if known is not None and known.entry is entry:
        return known
    trusting = jitted.options.cache == "same input"
    return cache.put_path(
        where, CallPath(call_path(entry, call, cache.count_hit, trusting=trusting), entry)
    )


def _execute(entry: Entry, call: Call) -> Any:
    """Run the program, unless arguments share memory that it writes to.

    Function modes see the function when it is traced, so what they do is part of the program.
    """
    if entry.clash is not None:
        tensors = call.values
        if entry.clash(*tensors):
            entry.check_clash(tensors)
    with internals.without_function_modes():
        result = entry.execute(*entry.arguments(call))
    return finish(result, call.args, call.kwargs) if entry.fills else result


# ---- looking inside ----


def _jitted_of(f: Any) -> Jitted | None:
    """Find the jitted function behind a result of `jit` or a transform of it; None for a module
    that has not been called.

    A function that keeps its own, as rewritten functions and modules do, has it as the attribute
    `jitted`.
    """
    if _modules().is_jitted(f):
        return _modules().latest_of(f)
    inner = f if isinstance(f, Jitted) else getattr(f, "jitted", None)
    if not isinstance(inner, Jitted):
        raise JitError(f"expected a jitted function or module, given {kind_of(f)}: {shown(f, 60)}")
    return inner


def _last(f: Any) -> Entry:
    inner = _jitted_of(f)
    paths = inner.programs.paths if inner is not None else ()
    if not paths:
        raise JitError(f"{f!r} has not been called yet, so there is nothing to show")
    return paths[0].entry


def last_traces(f: Callable[..., Any]) -> list[Trace | Program]:
    """The traces of the latest call of a jitted function: as traced, after each transform, the
    program.

    Law: the last one is the program that ran; each trace before it computes the same, as
        exactly as the labels of the transforms and executors after it say.

    Raises:
        JitError: f is no jitted function, or it has not been called yet.

    Example:
        >>> f = jit(lambda x: x * 2)
        >>> f(torch.ones(2))
        tensor([2., 2.])
        >>> print(last_traces(f)[0], end="")
        def program(v0):
            # v0: f32[2]
            v1 = aten.mul.Tensor(v0, 2)  # f32[2]
            return (v1,)
    """
    return list(_last(f).stages)


def last_prologue_traces(f: Callable[..., Any]) -> list[Trace]:
    """The checks of the latest call's arguments, as a trace.

    Law: a call that fails one of the checks is served by another program.

    Raises:
        JitError: f is no jitted function, or it has not been called yet.

    Example:
        >>> f = jit(lambda x: x * 2)
        >>> f(torch.ones(2))
        tensor([2., 2.])
        >>> len(last_prologue_traces(f))
        1
    """
    return [_last(f).prologue]


def last_backward_traces(f: Callable[..., Any]) -> list[Trace | Program]:
    """The backward of the latest call, and its programs, one for each node of autograd's graph;
    empty without a gradient.

    Law: together the programs compute the gradients that `.backward()` accumulates.

    Raises:
        JitError: f is no jitted function, or it has not been called yet.

    Example:
        >>> f = jit(lambda x: x * 2)
        >>> f(torch.ones(2, requires_grad=True)).sum().backward()
        >>> len(last_backward_traces(f)) > 0
        True
    """
    bridge = _last(f).bridge
    return (
        []
        if bridge is None
        else [bridge.split.backward, *(node.program for node in reversed(bridge.nodes))]
    )


def explain_misses(f: Callable[..., Any]) -> list[Miss]:
    """Explain why a jitted function was traced again, the latest time last: the condition that
    failed, and the line that asked for it.

    Law: there is one answer for each miss after the first, as long as the cache keeps it.

    Raises:
        JitError: f is no jitted function.

    Example:
        >>> import torch
        >>> f = jit(lambda x, n: x * 2 if n > 5 else x, cache="symbolic values")
        >>> _ = f(torch.ones(2), 6), f(torch.ones(2), 7), f(torch.ones(2), 1)
        >>> [miss.what for miss in explain_misses(f)]
        ['s1 > 5 (s1 is args[1])']
    """
    inner = _jitted_of(f)
    return ShownList(inner.programs.misses if inner is not None else ())


def cache_info(f: Callable[..., Any]) -> CacheInfo:
    """Hits, misses, size and greatest size of a jitted function's cache.

    Law: a call that runs a program adds one to the hits, or to the misses if it made the program.

    Raises:
        JitError: f is no jitted function.

    Example:
        >>> f = jit(lambda x: x * 2)
        >>> f(torch.ones(2)), f(torch.zeros(2))
        (tensor([2., 2.]), tensor([0., 0.]))
        >>> cache_info(f).hits, cache_info(f).misses
        (1, 1)
    """
    if _modules().is_jitted(f):
        return _modules().jit_of(f).info()
    inner = _jitted_of(f)
    assert inner is not None, "a jitted module was answered above"
    return inner.programs.info()


@spelled()
def explain_claims(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> ClaimReport:
    """Report which executor takes which part of `f(*args, **kwargs)`, and why those that were asked
    before do not.

    Nothing is run. If an argument requires a gradient, the backward is part of the report.

    Law: a call with these arguments is claimed in this way.

    Errors as in `jit`.

    Example:
        >>> import torch
        >>> from thunder_fn.executors import FusionExecutor
        >>> ex = FusionExecutor("slow", fuse=lambda region: region.python_callable())
        >>> ex.register_supported(torch.sin)
        >>> jitted = jit(lambda x: x.sin().sin().cos(), executors=[ex])
        >>> report = explain_claims(jitted, torch.ones(2))
        >>> [(claim.op, claim.taken_by) for claim in report.forward]
        [('aten.sin.default', 'slow'), ('aten.cos.default', 'torch')]
    """
    jitted = f if isinstance(f, Jitted) else jit(f)
    if isinstance(jitted, torch.nn.Module):
        jitted, kwargs = _modules().as_function(jitted, kwargs)
    return explain(jitted.fn, jitted.options, args, kwargs)
