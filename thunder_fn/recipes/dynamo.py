"""The backend "thunder_fn" of `torch.compile`: each graph that Dynamo finds becomes a jitted
function.

Dynamo runs the bytecode, breaks graphs where it must and guards what it baked in. Its graphs
consist of torch functions. So they are traced as any function is, composites included, and get the
transforms and executors that were asked for.

A model or function whose recipe wants no frontend is captured directly, as one trace. It may be no
single trace, because it decides on values, draws Python's random numbers or makes calls that no
trace can have. Then it goes through Dynamo from then on, with a warning.

Dynamo can take over within the same call, because a capture that fails has changed no tensor and
drawn no random number. Graphs enter through capture rather than `from_fx`: they consist of torch
functions and so keep their composites.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import current
from thunder_fn.capture.failures import source_of
from thunder_fn.capture.outside.frames import Irreversible, observer
from thunder_fn.capture.replaced import host_random
from thunder_fn.capture.replaced.lookasides import diverted_in_parts, is_by_name
from thunder_fn.errors import (
    CaptureError,
    CustomRuleError,
    GraphBreakWarning,
    MissingRule,
    RecipeError,
    ThunderError,
    TracedFunctionError,
    UnsupportedCall,
    callable_name,
)
from thunder_fn.jitted import Jitted, Options, jit
from thunder_fn.jitted.modules.module import (
    COUNT_OUTSIDE,
    PATIENCE,
    ModuleJit,
    OnReads,
    TracedForward,
    jit_of,
    with_forward,
)
from thunder_fn.jitted.modules.state import Layout
from thunder_fn.parameters import RewrittenModule

Compiled = Callable[..., Any]
_UNTRACED = (CaptureError, CustomRuleError, MissingRule)
"""Errors of code that is no single trace, or has no derivative as one."""


def backend(**options: Any) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Compiled]:
    """A backend for `torch.compile` with options of `jit`.

    Law: ``torch.compile(f, backend=backend())(*xs)`` is ``f(*xs)``.

    Raises:
        UnknownOption: jit has no such option.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> mine = tfn.recipes.backend(executors=["torch"])
        >>> torch.compile(torch.nn.ReLU(), backend=mine)(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
    """
    return _Backend(Options().changed(options))


@dataclass(frozen=True)
class _Backend:
    """The backend that Dynamo hands its graphs to. Those of equal options are equal, so that models
    of one class share programs.
    """

    options: Options
    __name__: ClassVar[str] = "thunder_fn"

    def __call__(
        self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Compiled:
        places = _floats_of(graph_module, example_inputs)
        jitted = _Part(graph_module.forward, self.options)
        if not places:
            return jitted
        return lambda *given: jitted(
            *(one.item() if place in places else one for place, one in enumerate(given))
        )


class _Part(Jitted):
    """A graph that Dynamo found. One that cannot be traced runs as it is, with a warning."""

    runs_eagerly: bool = False

    def call_slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that no call path serves."""
        if not self.runs_eagerly:
            put_back = internals.state_kept()
            try:
                return super().call_slowly(args, kwargs)
            except TracedFunctionError:
                put_back()  # a `with` of the user's is two calls in a graph
                raise
            except _UNTRACED as error:
                what = "a part of a compiled function runs as it is, by PyTorch:\n  "
                text = what + "\n  ".join(str(error).splitlines())
                warnings.warn(text, GraphBreakWarning, stacklevel=3)
                object.__setattr__(self, "runs_eagerly", True)
        return self.fn(*args, **kwargs)


def _floats_of(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> frozenset[int]:
    """Make inputs floats of which the graph reads nothing but the number, and say which they are.

    Dynamo passes Python's floats as tensors, once they have changed. `jit` takes them for floats.
    """
    found: set[int] = set()
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for place, (given, value) in enumerate(zip(placeholders, example_inputs, strict=True)):
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        if (
            is_float
            and given.users
            and all((one.op, one.target) == ("call_method", "item") for one in given.users)
        ):
            found.add(place)
            for read in tuple(given.users):
                read.replace_all_uses_with(given)
                graph_module.graph.erase_node(read)
    if found:
        graph_module.recompile()
    return frozenset(found)


@dataclass(frozen=True, eq=False)
class DynamoForward:
    """A module's `forward`, compiled by Dynamo with our backend. Pickled and copied by its
    options.
    """

    module: torch.nn.Module
    options: Options
    made: dict[Any, Compiled] = field(default_factory=dict[Any, Compiled], repr=False)
    """Dynamo's function for each `forward` that was assigned to the module; under None for that
    of its class.
    """

    @property
    def again(self) -> Callable[[torch.nn.Module], DynamoForward]:
        """The function that compiles another module alike."""
        return functools.partial(DynamoForward, options=self.options)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        assigned = self.module.__dict__.get("forward")
        if assigned not in self.made:
            self.made[assigned] = _compiled(self.module.forward, self.options)
        return self.made[assigned](*args, **kwargs)


def _compiled(f: Compiled, options: Options) -> Compiled:
    """Compile a function through Dynamo."""
    compiled: Compiled = torch.compile(f, backend=_Backend(options))
    in_python = [one for one in options.lookasides if isinstance(one.fn, types.FunctionType)]
    diverted = (
        functools.partial(diverted_in_parts, in_python) if in_python else contextlib.nullcontext
    )

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with internals.in_dynamo(), diverted():
                return compiled(*args, **kwargs)
        except internals.TooManyPrograms as error:
            what = (
                f"{error}, and a call of this function needs another one: models of one class run"
                " the same code, each with programs of its own, and so do arguments of other kinds"
            )
            fix = (
                "Delete models that are no longer used, or all programs with"
                " `torch.compiler.reset()`."
            )
            raise RecipeError(what, source=source_of(f), fix=fix) from error

    return call


@contextmanager
def _unchanging(f: Compiled) -> Generator[None]:
    """Refuse numbers that Python draws inside: in a trace they would be constants. Refuse to draw
    from iterators from outside, and to start threads, before it happens: the parts do so again.
    """
    before, watch = host_random.state(), observer()
    if watch is not None:
        watch.irreversible = Irreversible.REFUSED
    if (recorder := current()) is not None:
        recorder.texts.is_wary = True
    yield
    generator = host_random.drawn_since(before) or (
        None if watch is None else watch.moved_generator()
    )
    if generator is not None:
        what = f"numbers were drawn from `{generator}`, which would be constants of a trace"
        fix = "Draw them with PyTorch, such as `torch.rand(())`, or outside the traced function."
        raise UnsupportedCall(what, source=source_of(f), fix=fix)


class _UnchangingForward(TracedForward):
    """A module's `forward` that draws no numbers in Python."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        with _unchanging(self.module.forward):
            return super().__call__(*args, **kwargs)


def _breaks(error: ThunderError, options: Options) -> bool:
    """Test whether a capture failed because the code is no single trace, so that Dynamo may be
    asked.
    """
    raised_itself = isinstance(error, TracedFunctionError)
    return not (
        raised_itself
        or current() is not None
        or _numbers_arguments(options)
        or _out_of_reach(options)
    )


@dataclass(slots=True, eq=False)
class BreakingJit(ModuleJit):
    """A jitted module that goes through Dynamo from the first call on in which it is found to be no
    single trace.

    By then no tensor has been changed and no random number drawn, and Python's objects are as they
    were.
    """

    broken: DynamoForward | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.broken is None:
            try:
                return ModuleJit.__call__(self, *args, **kwargs)
            except _UNTRACED as error:
                if not _breaks(error, self.options):
                    raise
                self.broken = self._in_parts(error)
        return self.broken(*args, **kwargs)

    def _in_parts(self, error: ThunderError) -> DynamoForward:
        """Say why the module is no single trace, and take Dynamo's function."""
        name = type(self.module).__name__
        warnings.warn(_says_why(name, error), GraphBreakWarning, stacklevel=3)
        return DynamoForward(self.module, self.options)

    def counts(self, name: str) -> None:
        """Note that the traced code changed a plain attribute that it had read; if that goes on,
        Dynamo takes over.
        """
        if self.counting == PATIENCE and not _numbers_arguments(self.options):
            what = f"{type(self.module).__name__} changes its attribute {name!r} in each call"
            error = UnsupportedCall(what, source=source_of(self.module.forward), fix=COUNT_OUTSIDE)
            self.broken = self._in_parts(error)

    def traced(self, on_reads: OnReads, layout: Layout) -> TracedForward:
        """The function that is traced."""
        return _UnchangingForward(self.module, on_reads, layout)


class BreakingFunction(Jitted):
    """A jitted function that asks Dynamo for the calls that no program serves, once one of them was
    found to be no single trace.

    As with a module, nothing has been changed by then.
    """

    in_parts: Compiled | None = None
    """Dynamo's function, once Dynamo was asked."""

    @property
    def traced(self) -> Compiled:
        """The function that is traced."""

        @functools.wraps(self.fn)
        def function(*args: Any, **kwargs: Any) -> Any:
            with _unchanging(self.fn):
                return self.fn(*args, **kwargs)

        function.__name__ = self.name
        return function

    @property
    def name(self) -> str:
        """The name of the function."""
        return callable_name(self.fn)

    def call_slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that no call path serves."""
        if (in_parts := self.in_parts) is None:
            try:
                return super().call_slowly(args, kwargs)
            except _UNTRACED as error:
                if not _breaks(error, self.options):
                    raise
                warnings.warn(_says_why(self.name, error), GraphBreakWarning, stacklevel=3)
            in_parts = _compiled(self.fn, self.options)
            object.__setattr__(self, "in_parts", in_parts)
        return in_parts(*args, **kwargs)


def _says_why(name: str, error: Exception) -> str:
    what = f"{name} is no single trace, and goes through Dynamo, in parts:\n  "
    fix = (
        'Say `frontend="dynamo"` to have it so without this warning, or `frontend="direct"` to have'
        " this as an error."
    )
    return what + "\n  ".join(str(error).splitlines()) + f"\n{fix}"


def with_breaks(model: Compiled, options: dict[str, Any]) -> Any:
    """`jit` of a model or function, which may turn out to be no single trace."""
    jitted: Any = jit(model, **options)
    if isinstance(jitted, Jitted):
        return BreakingFunction(jitted.fn, jitted.options)
    inner = jit_of(jitted)
    return with_forward(inner.module, functools.partial(BreakingJit, options=inner.options))


def _numbers_arguments(options: Options) -> bool:
    """Test for options about the arguments of the function, which those of Dynamo's graphs are
    not.
    """
    static = options.static_argnums or options.static_argnames
    return bool(static or options.donate_argnums or isinstance(options.dynamic, tuple))


def _out_of_reach(options: Options) -> str | None:
    """A lookaside that Dynamo cannot follow: it knows builtins by identity, and generators only
    as they run.
    """
    for one in options.lookasides:
        if isinstance(one.fn, types.BuiltinFunctionType) and is_by_name(one.fn):
            return f"a lookaside of the builtin {one.fn.__name__}"
        if is_by_name(one.fn):
            return f"a lookaside of a {type(one.fn).__name__}"
        if inspect.isgeneratorfunction(one.replace_with):
            return f"a generator function in the place of {getattr(one.fn, '__name__', one.fn)}"
    return None


def through_dynamo(model: Compiled, options: dict[str, Any]) -> Any:
    """A function or module whose graphs are found by Dynamo; a module stays one of its class, on
    the same state.

    Raises:
        RecipeError: parameters are stored in another way, an option counts arguments, or a
            lookaside cannot be followed.
    """
    given = Options().changed(options)
    if isinstance(model, RewrittenModule):
        what = (
            "the frontend 'dynamo' cannot trace what a rewrite such as quantize or fsdp made: it is"
            " captured directly"
        )
        raise RecipeError(what, fix='Leave `frontend="dynamo"` out, or that recipe.')
    if _numbers_arguments(given):
        what = (
            "static and donated arguments and marks in dynamic are of a function's arguments, not"
            " of its graphs'"
        )
        raise RecipeError(
            f"the frontend 'dynamo': {what}", fix="Leave them out: Dynamo finds out what is static."
        )
    if (lookaside := _out_of_reach(given)) is not None:
        fix = "Give a Python function of yours and another that returns what it computes."
        raise RecipeError(f"the frontend 'dynamo' does not follow {lookaside}", fix=fix)
    if isinstance(model, torch.nn.Module):
        return with_forward(model, functools.partial(DynamoForward, options=given))
    return _compiled(model, given)


def thunder_fn(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
) -> Compiled:
    """The backend that `torch.compile(f, backend="thunder_fn", options={...})` calls. The
    options are those of `jit`.
    """
    return backend(**(options or {}))(graph_module, example_inputs)
