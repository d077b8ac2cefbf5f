"""Generators of random numbers in traces: `torch.rand(3, generator=g)`.

A generator is state that the program reads and advances. An equation refers to the very object, as
a literal. So a program draws from it at the same places as eager code.

A capture draws nothing, so code that asks a generator for its state or sets it would see and do the
wrong thing. One that is made inside, or passed as an argument, is a `TracedGenerator` there, whose
`manual_seed` becomes an equation. The state of any other one is compared, and a change is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.errors import UnsupportedCall
from thunder_fn.ir.memos import memo
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.trace import Arg, Literal, Source, Trace, all_args, identity_of

_Generator = torch.Generator
_STATE = "seed manual_seed initial_seed get_state set_state get_offset set_offset clone_state"
STATE_METHODS = frozenset((*_STATE.split(), "graphsafe_get_state", "graphsafe_set_state"))
"""Methods of generators that read or write their state."""


def state_error(what: str, source: Source | None) -> UnsupportedCall:
    """The error for a generator whose state is asked for or set inside of a trace."""
    text = f"{what} while tracing, but a trace draws its random numbers when it runs"
    fix = (
        "Do it outside of the function, or pass the generator as an argument: then `manual_seed`"
        " works inside."
    )
    return UnsupportedCall(text, source=source, fix=fix)


class TracedState(torch.Tensor):
    """A state of a generator as `torch.get_rng_state` gives it inside a capture: it can be set
    back. When the trace runs it is another one.
    """


class Generators:
    """The generators of a capture: what each stands for, and the states of those from outside
    when they were first used.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Generator, torch.Generator]] = {}
        self._states: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def know(self, traced: torch.Generator, real: torch.Generator) -> None:
        """Let `traced` stand for `real`, whose state no code inside can see."""
        self._known[identity_of(traced)] = traced, real

    def used(self, given: torch.Generator) -> torch.Generator | None:
        """The generator that an equation refers to; None for the default one of its device."""
        known = self._known.get(identity_of(given))
        if known is not None:
            return None if is_default(known[1]) else known[1]
        if is_default(given):
            return None
        first = identity_of(given) not in self._states
        generator, state = self._states.setdefault(identity_of(given), (given, state_of(given)))
        if not first:
            _compare(generator, state)
        return generator

    def check(self) -> None:
        """Raise if the function changed the state of a generator from outside."""
        for generator, state in self._states.values():
            _compare(generator, state)


def _compare(generator: torch.Generator, state: torch.Tensor) -> None:
    with internals.only_memory():
        is_moved = not torch.equal(state_of(generator), state)
    if is_moved:
        raise state_error("the state of a generator from outside was set", None)


def state_of(generator: torch.Generator) -> torch.Tensor:
    """The state of a generator, whatever modes are on."""
    with internals.only_memory():
        return _Generator.get_state(generator)


def is_default(generator: torch.Generator) -> bool:
    """Test for the generator from which ops without one draw."""
    if generator.device.type == "cpu":
        defaults: Sequence[Any] = (torch.default_generator,)
    else:
        defaults = getattr(torch.get_device_module(generator.device), "default_generators", ())
    return identity_of(generator) in map(identity_of, defaults)


# ---- of programs ----


@memo(4096, derives=False)
def generators_of(trace: Trace) -> tuple[torch.Generator, ...]:
    """The generators from which a trace draws, default ones apart."""
    found: dict[int, torch.Generator] = {}
    for equation in trace.equations:
        args = all_args(equation)
        inner = (one for body in equation.bodies for one in generators_of(body))
        found.update(
            (identity_of(one), one)
            for one in (*(one for arg in args for one in _within(arg)), *inner)
        )
    return tuple(found.values())


def _within(arg: Arg) -> Iterator[torch.Generator]:
    if isinstance(arg, tuple):
        for item in arg:
            yield from _within(item)
    elif isinstance(arg, Literal) and isinstance(arg.value, torch.Generator):
        yield arg.value


def random_state(
    generators: Sequence[torch.Generator], devices: Sequence[torch.device] = ()
) -> Callable[[], None]:
    """Note the states of the CPU's default generator, of those of devices, and of others. The
    result sets them back.
    """
    cpu = torch.get_rng_state()
    states = [
        (module := torch.get_device_module(device), module.get_rng_state(device), device)
        for device in devices
    ]
    own = [(generator, _Generator.get_state(generator)) for generator in generators]

    def restore() -> None:
        torch.set_rng_state(cpu)
        for module, state, device in states:
            module.set_rng_state(state, device)
        for generator, state in own:
            _Generator.set_state(generator, state)

    return restore


_again: ContextVar[bool] = ContextVar("thunder_fn_again", default=False)


def is_again() -> bool:
    """Test whether this run computes something again, so that it has no effects."""
    return _again.get()


@contextmanager
def drawing_from(state: Callable[[], None], now: Callable[[], None]) -> Generator[None]:
    """Compute something again, drawing from the states of `state`; afterwards they are those of
    `now` again.
    """
    with setting(_again, True):
        state()
        try:
            yield
        finally:
            now()
