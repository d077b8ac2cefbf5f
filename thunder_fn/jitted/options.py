"""The options of jit, checked when a function is jitted and not when it is called."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal as Choice, TypedDict

from thunder_fn.capture.replaced.lookasides import Lookaside, same_function
from thunder_fn.errors import (
    OF_F,
    ArgnumError,
    JitError,
    UnknownOption,
    callable_name,
    kind_of,
    located,
    misspelled,
)
from thunder_fn.executors.base import Executor, Numerics, check_numerics, is_within
from thunder_fn.executors.grad_transforms import GradTransforms
from thunder_fn.executors.of_traces import with_executors_of
from thunder_fn.executors.operator_executor import OperatorExecutor
from thunder_fn.executors.registry import resolve_executors
from thunder_fn.executors.verify import RAISING, VERIFIER
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.text import shown
from thunder_fn.ir.trace import Trace
from thunder_fn.jitted.marks import Marks, read_marks
from thunder_fn.jitted.transforms import Transform, as_transform, in_order

CACHES = ("constant values", "symbolic values", "same input", "no caching")
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


_limit: ContextVar[Numerics] = ContextVar("thunder_fn_numerics", default="precision-changing")


def calls_within(numerics: Numerics) -> AbstractContextManager[None]:
    """Jitted functions that are called inside keep within this limit too, whatever they were
    jitted with.
    """
    return setting(_limit, numerics)


class Config(TypedDict, total=False):
    """The options of `jit` that a recipe may set.

    Example:
        >>> from thunder_fn.recipes import Config
        >>> Config(numerics="bitwise")
        {'numerics': 'bitwise'}
    """

    cache: Choice["constant values", "symbolic values", "same input", "no caching"]
    numerics: Numerics
    verify: bool | Choice["errors"]
    dynamic: bool | Mapping[int | str, Any]
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    donate_argnums: int | Sequence[int]


Rewrite = Transform | Callable[..., Any]


class JitOptions(Config, total=False):
    """The options of `jit`, as its callers write them."""

    executors: Sequence[Executor | str] | Executor | str
    transforms: Sequence[Rewrite] | Rewrite
    lookasides: Sequence[Lookaside] | Lookaside


@dataclass(frozen=True, slots=True)
class Options:
    """The options that jit was given. See `jit` for their meaning."""

    executors: tuple[Executor, ...] = ()
    transforms: tuple[Transform, ...] = ()
    lookasides: tuple[Lookaside, ...] = ()
    numerics: Numerics = "precision-changing"
    verify: bool | Choice["errors"] = False
    cache: str = "constant values"
    dynamic: bool | Marks = True
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()

    @property
    def is_dynamic(self) -> bool:
        """Test whether a program may serve calls with other sizes and numbers."""
        return self.cache == "symbolic values" or (
            self.cache == "constant values" and self.dynamic is not False
        )

    def executors_of(self, trace: Trace) -> tuple[Executor, ...]:
        """The executors of a program of this trace, those that it brings among them, as they are
        now.
        """
        return self._allowed(with_executors_of(self.executors, trace))

    def chosen_executors(self) -> tuple[Executor, ...]:
        """The executors as they are now, without those whose results may be farther off than
        `numerics` allows.
        """
        return self._allowed(self.executors)

    def _allowed(self, executors: Iterable[Executor]) -> tuple[Executor, ...]:
        allowed = (
            executor for executor in executors if is_within(executor.numerics, self.numerics)
        )
        chosen = tuple(executor.frozen() for executor in allowed)
        if not self.verify:
            return chosen
        return ((RAISING if self.verify == "errors" else VERIFIER).frozen(), *chosen)

    def rewrite(self) -> GradTransforms | None:
        """The grad transforms of the executors; None if no executors were given, so that those
        around apply.
        """
        if not self.executors:
            return None
        return GradTransforms(
            tuple(one for one in self.chosen_executors() if isinstance(one, OperatorExecutor))
        )

    def changed(self, given: Mapping[str, Any]) -> Options:
        """Replace some options; transforms and lookasides are added after those that are there.

        Raises:
            UnknownOption: there is no such option, executor or cache mode; names the nearest one.
        """
        names = [field.name for field in dataclasses.fields(Options)]
        for name in given:
            if name not in names:
                raise (
                    misspelled("jit", name, ELSEWHERE[name])
                    if name in ELSEWHERE
                    else UnknownOption(unknown("jit", "option", name, names))
                )
        values = {name: _READERS[name](value) for name, value in given.items()}
        for name in ("transforms", "lookasides"):
            if name in values:
                values[name] = (*getattr(self, name), *values[name])
        new = dataclasses.replace(self, **values)
        new = dataclasses.replace(
            new, transforms=in_order(new.transforms), executors=in_order(new.executors, "executor")
        )
        new.check_transforms()
        new.check_donated()
        return new

    def of_arguments(self, f: Callable[..., Any]) -> Options:
        """Adapt the options to a function, whose arguments are static by position and by name,
        however they were given.

        Raises:
            ArgnumError: it has no such argument, or one is both static and donated.
        """
        check_argnums(self, f)
        nums, names = set(self.static_argnums), set(self.static_argnames)
        if not nums and not names:
            return self
        positional = [parameter for parameter in _parameters(f) if parameter.kind in POSITIONAL]
        count = len(positional)
        given = {num % count for num in nums if -count <= num < count}
        for position, parameter in enumerate(positional):
            if parameter.kind is not parameter.POSITIONAL_ONLY and (
                position in given or parameter.name in names
            ):
                names.add(parameter.name)
                if position not in given:
                    nums.add(position)
        new = dataclasses.replace(
            self, static_argnums=tuple(sorted(nums)), static_argnames=tuple(sorted(names))
        )
        new.check_donated()
        return new

    def check_donated(self) -> None:
        """Raise if an argument is both static and donated."""
        both = set(self.static_argnums) & set(self.donate_argnums)
        if both:
            raise ArgnumError(
                f"jit: argument {min(both)} is both static and donated; only tensors can be donated"
            )

    def as_called(self) -> Options:
        """The options of a function that is called while another one is traced: results are no
        farther off than it allows.

        Raises:
            JitError: a transform may change results farther.
        """
        limit = _limit.get()
        if is_within(self.numerics, limit):
            return self
        limited = dataclasses.replace(self, numerics=limit)
        limited.check_transforms()
        return limited

    def check_transforms(self) -> None:
        """Raise if a transform may change results farther than `numerics` allows."""
        for transform in self.transforms:
            if not is_within(transform.numerics, self.numerics):
                what = (
                    f"jit: the transform {transform.name!r} is {transform.numerics}, and"
                    f" numerics={self.numerics!r}"
                )
                raise JitError(what, fix="Leave it out, or allow what it does with `numerics=`.")


ELSEWHERE = {
    "backend": 'Write `executors=["inductor"]` for the compiler of `torch.compile`.',
    "fullgraph": (
        "Leave it out: a jitted function is one graph. `tfn.compile` runs in pieces what cannot be"
        " traced."
    ),
    "mode": 'Write `executors=["inductor"]` or `executors=["cudagraphs", "inductor"]`.',
    "options": 'Write `executors=["inductor"]`.',
    "donate_argnames": "donate_argnums",
    "keep_unused": "Leave it out: arguments that nothing reads cost nothing.",
    "inline": (
        "Leave it out: a jitted function that is called in another one is part of its program."
    ),
    "device": "Move the arguments to the device.",
    "in_shardings": "Write `tfn.fsdp`, `tfn.ddp` or `tfn.tensor_parallel`.",
    "out_shardings": "Write `tfn.fsdp`, `tfn.ddp` or `tfn.tensor_parallel`.",
    "abstracted_axes": (
        "Leave it out: sizes that change become symbols. `dynamic=` names those that do."
    ),
    "compiler_options": 'Write `executors=["inductor"]`, and set the options of inductor itself.',
    "disable": "Leave it out: call the function itself.",
    **dict.fromkeys(OF_F, "f"),
}
"""Options of `torch.compile` and `jax.jit`, and how they are written here."""


def check_argnums(options: Options, f: Callable[..., Any]) -> None:
    """Raise if an argnum points past the positional parameters of f, or a name is none of them."""
    parameters = _parameters(f)
    if not parameters or any(
        parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters
    ):
        return
    names = [parameter.name for parameter in parameters]
    catches = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    marked = (
        [key for key, _ in options.dynamic if isinstance(key, str)]
        if isinstance(options.dynamic, tuple)
        else []
    )
    for what, given in (("dynamic", marked), ("static_argnames", options.static_argnames)):
        for name in given:
            if name not in names and not catches:
                raise ArgnumError(unknown("jit", f"argument in {what}", name, names))
    count = sum(parameter.kind in POSITIONAL for parameter in parameters)
    for name in ("static_argnums", "donate_argnums"):
        for argnum in getattr(options, name):
            if not -count <= argnum < count:
                function = callable_name(f)
                raise ArgnumError(
                    f"jit: {name} has {argnum}, but {function} takes {count} positional arguments"
                )


def _parameters(f: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """The parameters of a function; none of one that does not say."""
    try:
        return tuple(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        return ()


def unknown(what: str, kind: str, given: Any, known: Iterable[str]) -> str:
    """The message for a name that `what` does not know: the nearest one, if it is near, and all."""
    choices = list(known)
    near = difflib.get_close_matches(str(given), choices, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return located(
        f"{what}: unknown {kind} {given!r}{hint}", fix=f"There are {', '.join(choices)}."
    )


def _several(value: Any, name: str, is_one: bool) -> tuple[Any, ...]:
    if is_one:
        return (value,)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise JitError(f"jit: {name} is a sequence, `()` for none, given {kind_of(value)}")
    return tuple(value)


def _read_transforms(value: Any) -> tuple[Transform, ...]:
    given = _several(value, "transforms", callable(value))
    for transform in given:
        if not callable(transform):
            raise JitError(
                f"jit: a transform is a function from Trace to Trace, given {kind_of(transform)}"
            )
        if isinstance(transform, Transform) and transform.on != "trace":
            fix = "Apply it to the model, or give it to a recipe and call `compile`."
            raise JitError(f"jit: {transform.name!r} transforms models, not traces", fix=fix)
    return tuple(map(as_transform, given))


def _read_lookasides(value: Any) -> tuple[Lookaside, ...]:
    given = _several(value, "lookasides", isinstance(value, Lookaside))
    seen = dict[Any, Lookaside]()
    for lookaside in given:
        if not isinstance(lookaside, Lookaside):
            raise JitError(
                f"jit: a lookaside is a `Lookaside(fn, replace_with)`, given {kind_of(lookaside)}"
            )
        other = seen.setdefault(lookaside.fn, lookaside).replace_with
        if same_function(other) != same_function(lookaside.replace_with):
            both = " and ".join(
                getattr(one, "__qualname__", repr(one)) for one in (other, lookaside.replace_with)
            )
            name = getattr(lookaside.fn, "__qualname__", repr(lookaside.fn))
            raise JitError(
                f"jit: two lookasides divert {name}, to {both}", fix="Leave one of them out."
            )
    return given


def _read_cache(value: Any) -> str:
    if value not in CACHES:
        raise UnknownOption(unknown("jit", "cache mode", value, CACHES))
    return value


def _read_verify(value: Any) -> bool | Choice["errors"]:
    if not isinstance(value, bool) and value != "errors":
        raise JitError(f'jit: verify is True, False or "errors", given {shown(value, 60)}')
    return value


def _read_dynamic(value: Any) -> Any:
    if isinstance(value, Mapping):
        return read_marks(value)
    if not isinstance(value, bool):
        raise JitError(f"jit: dynamic is True or False, given {shown(value, 60)}")
    return value


def _read_argnums(value: Any) -> tuple[int, ...]:
    given: tuple[Any, ...] = tuple(value) if isinstance(value, Iterable) else (value,)
    for argnum in given:
        if not isinstance(argnum, int) or isinstance(argnum, bool):
            raise ArgnumError(f"jit: an argnum is an int, given {argnum!r}")
    return tuple(sorted(set(given)))


def _read_argnames(value: Any) -> tuple[str, ...]:
    given = _several(value, "static_argnames", isinstance(value, str))
    for name in given:
        if not isinstance(name, str):
            raise ArgnumError(f"jit: static_argnames has names of arguments, given {name!r}")
    return tuple(sorted(set(given)))


_READERS: dict[str, Callable[[Any], Any]] = {
    "executors": resolve_executors,
    "transforms": _read_transforms,
    "lookasides": _read_lookasides,
    "verify": _read_verify,
    "numerics": lambda value: check_numerics(value, "jit"),
    "cache": _read_cache,
    "dynamic": _read_dynamic,
    "static_argnums": _read_argnums,
    "static_argnames": _read_argnames,
    "donate_argnums": _read_argnums,
}
