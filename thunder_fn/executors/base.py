"""Executors, and their answers when they are asked for an equation.

Claiming (`claims.py`) walks from the outermost composite inwards and asks the executors in the
order in which the user gave them. An executor answers an equation with one of

    Run(name, run)       it computes the equation: `run(*args, **kwargs)` gives a tuple of outputs
    Instead(trace)       a trace over its operands replaces the equation; claiming goes on inside
    Fuse()               the equation may be part of a region, which is compiled as one
    Refused(reason)      it is left to the next executor, and unfolded where nobody takes it

Answers are functions of the equation alone. Registering on an executor changes its answers from
then on. `frozen` is the executor as it is now, the value that programs are made with.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal as Choice, Protocol, TypeAlias, TypeVar, get_args, runtime_checkable

from thunder_fn.errors import ExecutorError, callable_name, kind_of
from thunder_fn.executors.matching import Key, fake_call, keys_of, located_in
from thunder_fn.executors.running import CheckedRegion
from thunder_fn.ir import ops
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.text import shown
from thunder_fn.ir.trace import Equation, Trace

Numerics = Choice["bitwise", "reassociating", "precision-changing"]
NUMERICS: tuple[Numerics, ...] = get_args(Numerics)
"""Distances of results from those of `evaluate`, from nearest to farthest: none, by the order of
additions and multiplications, by the precision of intermediates.
"""

RunFunction: TypeAlias = Callable[..., tuple[Any, ...]]
Checker: TypeAlias = Callable[..., bool | str]
"""It says whether an executor takes a call. A text is a no as well, and the reason: the call is
what the executor is for, but not on this machine, say. Nobody is warned of a plain no.
"""
SAID_NO = "said no"
E = TypeVar("E", bound="Executor")


@dataclass(frozen=True, slots=True)
class Run:
    """The executor computes the equation. `name` is what the program calls it."""

    name: str
    run: RunFunction


@dataclass(frozen=True, slots=True)
class Instead:
    """The equation is what this trace computes from its operands. `rule` is not applied again
    inside.
    """

    trace: Trace
    rule: object


@dataclass(frozen=True, slots=True)
class Fuse:
    """The equation may be part of a region."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The executor does not take the equation."""

    reason: str


Answer: TypeAlias = Run | Instead | Fuse | Refused
FUSE = Fuse()
NOT_REGISTERED = Refused("not registered")


def is_within(numerics: Numerics, limit: Numerics) -> bool:
    """Test whether a label may be used under this limit."""
    return NUMERICS.index(numerics) <= NUMERICS.index(limit)


def check_numerics(value: Any, where: str) -> Numerics:
    """The label.

    Raises:
        ExecutorError: there is no such label.
    """
    if value not in NUMERICS:
        raise ExecutorError(
            f"{where}: numerics is one of {', '.join(map(repr, NUMERICS))}, given {value!r}"
        )
    return value


class Watcher(Protocol):
    """An object made with an executor's registrations, which is made anew when they change."""

    def clear(self) -> None:
        """Forget everything made."""
        ...


@runtime_checkable
class HasExecutors(Protocol):
    """Options that say which executors run a function."""

    executors: tuple[Executor, ...]

    def executors_of(self, trace: Trace) -> tuple[Executor, ...]:
        """The executors that may be used for a trace, as they are now."""
        ...


_watcher: ContextVar[Watcher | None] = ContextVar("thunder_fn_executor_watcher", default=None)


def watched_by(watcher: Watcher) -> AbstractContextManager[None]:
    """Executors whose registrations are read inside tell this one when they change."""
    return setting(_watcher, watcher)


class Executor:
    """A value that runs equations, regions or whole programs.

    Args:
        name: an identifier; no two executors of one program have the same.
        version: for people, and for caches of what was compiled.
        numerics: how far its results may be from those of `evaluate`.

    Example:
        >>> import thunder_fn as tfn
        >>> class Fast(tfn.extend.Executor):  # `answer` takes equations, `finish` whole programs
        ...     note = "multiplies faster"
        >>> Fast("fast", version="0.1", numerics="bitwise")
        <executor fast 0.1, bitwise>
    """

    after: tuple[str, ...] = ()
    """Names of executors that are asked before this one, if they are used."""
    before: tuple[str, ...] = ()
    """Names of executors that are asked after this one, if they are used."""
    conflicts: tuple[str, ...] = ()
    """Names of executors that it cannot be used with."""
    note = ""
    """A few words on what it runs, for those who ask a recipe."""
    again: Callable[[], Executor] | None = None
    """A function of a module, or a partial of one, that gives this executor or its like where it is
    unpickled. Without it, an executor is pickled by the name under which it is registered.
    """
    only_gpu = False
    """It runs whole programs on a GPU. Numbers on the CPU are computed in front, in each call."""

    def __init__(
        self, name: str, *, version: str = "", numerics: Numerics = "reassociating"
    ) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise ExecutorError(f"an executor's name is an identifier, given {name!r}")
        self.name, self.version = name, str(version)
        self.numerics: Numerics = check_numerics(numerics, f"the executor {name}")
        self.rules: Mapping[Key, Any] = MappingProxyType({})
        self.is_frozen = False
        self.identity = object()
        self._lock = threading.Lock()
        self._watchers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._value: Executor | None = None

    def __repr__(self) -> str:
        return (
            f"<executor {self.name}{f' {self.version}' if self.version else ''}, {self.numerics}>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by name: an executor holds functions and, maybe, compiled code."""
        from thunder_fn.executors.registry import get_executor, list_executors

        if self.name not in list_executors() or get_executor(self.name) is not self:
            if self.again is not None:
                return self.again, ()
            raise ExecutorError(
                f"the executor {self.name} is pickled by its name, but is not registered under it\n"
                "Call `register_executor` first, here and where it is unpickled."
            )
        return get_executor, (self.name,)

    @property
    def claims(self) -> bool:
        """Tell whether the executor may take something; others only run whole programs."""
        return type(self).answer is not Executor.answer

    def answer(self, equation: Equation) -> Answer:
        """Answer for the equation. Pure."""
        return NOT_REGISTERED

    def numerics_of(self, meaning: Trace) -> Numerics:
        """The label for these results: the executor's own, or a nearer one where it knows
        better.
        """
        return self.numerics

    def declines(self, trace: Trace) -> str | None:
        """The reason why the executor is not asked about a program of this trace; None if it
        is.
        """
        return None

    def finish(self, program: Any) -> Any:
        """Return the whole program as the executor runs it: the given one, or
        `dataclasses.replace(program, run=function)`.

        An executor that runs parts only returns the program as it is.
        """
        return program

    def frozen(self: E) -> E:
        """The executor as it is now: the same value until something is registered."""
        if self.is_frozen:
            return self
        with self._lock:
            watcher = _watcher.get()
            if watcher is not None:
                self._watchers.add(watcher)
            if self._value is None:
                value = _copy(self)
                value.is_frozen = True
                self._value = value
            return self._value  # type: ignore[return-value]

    def register(self, rules: Mapping[Key, Any]) -> None:
        """Enter rules, in place of those of the same keys; functions that were made with the old
        ones are traced again.
        """
        if self.is_frozen:
            raise ExecutorError(
                f"the executor {self.name} is frozen in a program; register on the original"
            )
        with self._lock:
            self.rules = MappingProxyType({**self.rules, **rules})
            self._value = None
            watchers = tuple(self._watchers)
            self._watchers.clear()
        for watcher in watchers:
            watcher.clear()

    def rule_for(self, equation: Equation) -> Any:
        """Return the registration for the equation's op, most specific key first; None if
        nothing is registered.
        """
        op = equation.op
        found = self.rules.get(op.name)
        if found is None and op.kind == "leaf":
            found = self.rules.get(op.name.rpartition(".")[0])
        return found


def _copy(executor: E) -> E:
    new = object.__new__(type(executor))
    new.__dict__.update(executor.__dict__)
    return new


def ask_checker(checker: Checker | None, equation: Equation, where: str) -> str | None:
    """Return a checker's reason to refuse an equation, None if it accepts. It sees tensors without
    values, numbers as they are.

    Raises:
        ExecutorError: the checker raised.
    """
    if checker is None:
        return None
    name = callable_name(checker)
    call = fake_call(equation)
    mismatch = call.mismatch(checker)
    if mismatch is not None:
        return f"the checker {name} cannot be called with these arguments: {mismatch}"
    try:
        answer = call.apply(checker)
        accepted = bool(answer)
    except Exception as error:
        raise ExecutorError(
            located_in(
                f"{where}: the checker {name} raised {type(error).__name__}: {error}",
                equation,
                "A checker sees types only: return False for calls that the executor cannot run.",
            )
        ) from error
    if isinstance(answer, str):
        return answer or f"the checker {name} {SAID_NO}"
    return None if accepted else f"the checker {name} {SAID_NO}"


class FusionExecutor(Executor):
    """An executor that compiles regions: connected or not, but without a way out of the region and
    back in.

    Args:
        name, version, numerics: as of every executor.
        fuse: makes a region, a closed trace, a function of its inputs that returns its outputs as a
            tuple. Subclasses have it as a method instead. A method `dry_run` of that function,
            which does on tensors without values what the call does to memory, tells
            `inspect.memory` what the region allocates inside. A method `donating` of a tuple of
            places gives the same function for inputs at these places that nobody reads again. It
            may write to them.
        min_size: regions of fewer ops are left to the next executor.
        min_shared: composites of at least this many ops that occur more than once are regions of
            their own, so that equal ones are compiled once.
        takes_symbols: regions may have sizes and numbers that are symbols. Symbols that no input's
            type binds are further inputs, behind the others.
        fuel: the most regions to compile, in the order in which programs are made; the rest run on
            the torch executor. See `executors.bisect`.
        allocates: what an equation of a region makes lies in memory of its own, if it is a result,
            as it would in PyTorch. Programs then give such results away as soon as nobody reads
            them, see `donating` above.

    Law: ``fuse(region)(*xs)`` is ``evaluate(region, xs)``, as exactly as `numerics` says.

    Raises:
        ExecutorError: there is no `fuse`, or fuel is no number of regions. When a program runs: the
            function that `fuse` made returns something else than tensors of the types of the
            region's outputs.

    Example:
        >>> import torch
        >>> from thunder_fn import evaluate, jit
        >>> ex = FusionExecutor("slow", fuse=lambda region: lambda *xs: evaluate(region, xs))
        >>> ex.register_supported(torch.sin)
        >>> ex.register_supported(torch.mul)
        >>> jit(lambda x: x.sin() * 2, executors=[ex])(torch.zeros(2))
        tensor([0., 0.])
    """

    is_checked = True
    """The types of results are looked at whenever a region runs. Compilers of this package see
    to them themselves.
    """

    def __init__(  # noqa: PLR0913 - options, by keyword
        self,
        name: str,
        *,
        version: str = "",
        numerics: Numerics = "reassociating",
        fuse: Callable[[Trace], RunFunction] | None = None,
        min_size: int = 2,
        min_shared: int = 12,
        takes_symbols: bool = False,
        allocates: bool = False,
        fuel: int | None = None,
    ) -> None:
        super().__init__(name, version=version, numerics=numerics)
        if fuse is not None:
            self.fuse = fuse  # type: ignore[method-assign]
        elif type(self).fuse is FusionExecutor.fuse:
            raise ExecutorError(
                f"the fusion executor {name} has no `fuse`; pass `fuse=`, or define it in a"
                " subclass"
            )
        self.min_size, self.min_shared, self.takes_symbols = min_size, min_shared, takes_symbols
        self.allocates = allocates
        if fuel is not None and (not isinstance(fuel, int) or fuel < 0):
            raise ExecutorError(f"{name}: fuel is a number of regions, given {fuel!r}")
        self.fuel = fuel
        self.taken: list[Trace] = []
        """The regions so far, in order."""
        self._programs: dict[Trace, RunFunction] = {}

    def register_supported(self, op: Any, *, checker: Checker | None = None) -> None:
        """Regions may have this op: an ATen op, a torch function, a composite, or the name of one.

        Args:
            checker: takes the op's arguments, tensors without values among them, and says whether
                this call may. A text is a no, and the reason.
        """
        _check_callable(checker, f"{self.name}.register_supported")
        self.register(dict.fromkeys(keys_of(op, f"{self.name}.register_supported"), (checker,)))

    def supports(self, equation: Equation) -> str | None:
        """Return the reason why the equation may not join a region, None if it may. Registered ops
        may; subclasses know more.
        """
        rule = self.rule_for(equation)
        if rule is None:
            return NOT_REGISTERED.reason
        return ask_checker(rule[0], equation, self.name)

    def answer(self, equation: Equation) -> Answer:
        """Fuse, or why not."""
        reason = self.supports(equation)
        return (
            FUSE
            if reason is None
            else NOT_REGISTERED
            if reason == NOT_REGISTERED.reason
            else Refused(reason)
        )

    def apart(self, trace: Trace) -> tuple[tuple[int, ...], ...]:
        """Equations of a flat trace, by position, that are regions of their own, whatever is
        around them.
        """
        return ()

    def joins(self, region: Trace) -> bool:
        """Test whether the region and others of the same ops, side by side, are better one
        region.
        """
        return False

    def unrolls(self, leaves: Sequence[Equation]) -> int:
        """Give the number of steps of a loop of these ops that are best one region; 1 if each is
        best alone.
        """
        return 1

    def runs_whole(self, loop: Trace) -> bool:
        """Test whether all steps of a loop are best one region, as `fuse_loop` makes it."""
        return False

    def is_worth(self, region: Trace) -> bool:
        """Test whether the region has enough ops that compute something to be compiled."""
        return (
            sum(size_of(equation) for equation in region.equations if not ops.is_view(equation.op))
            >= self.min_size
        )

    def fuse(self, region: Trace) -> RunFunction:
        """A function of the region's inputs that returns its outputs as a tuple."""
        raise NotImplementedError

    def fuse_loop(self, loop: Trace) -> RunFunction | None:
        """A function for a loop every op of whose body this executor takes; None if it compiles
        steps only.
        """
        return None

    def known(self, region: Trace) -> RunFunction | None:
        """Return the earlier result of `compiled` for the region; None if it could not be
        compiled.
        """
        return self._programs.get(region)

    def compiled(self, region: Trace) -> RunFunction:
        """`fuse(region)`, made once for equal regions, while there is fuel."""
        known = self._programs.get(region)
        if known is None:
            known = self._programs.setdefault(region, self._made(region))
        return known

    def _made(self, region: Trace) -> RunFunction:
        from thunder_fn.executors.torch_executor import lower

        if not self.has_fuel(region):
            return lower(region, below_autograd=True).run
        run = self.fuse(region)
        return (
            CheckedRegion(f"{self.name}: the region {region.name}", run, region)
            if self.is_checked
            else run
        )

    def has_fuel(self, region: Trace) -> bool:
        """Test whether the region is one of those that are compiled. It counts as one from here
        on.
        """
        self.taken.append(region)
        return self.fuel is None or len(self.taken) <= self.fuel


def any_fuses(executors: Iterable[Executor]) -> bool:
    """Test whether one of the executors compiles regions."""
    return any(isinstance(executor, FusionExecutor) for executor in executors)


def _check_callable(value: Any, where: str) -> None:
    if value is not None and not callable(value):
        raise ExecutorError(
            f"{where}: expected a function, given {kind_of(value)}: {shown(value, 60)}"
        )


def size_of(equation: Equation) -> int:
    """Count the ops of an equation, those in its bodies included."""
    return (
        sum(size_of(inner) for body in equation.bodies for inner in body.equations)
        if equation.bodies
        else 1
    )
