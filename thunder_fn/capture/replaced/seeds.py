"""The states of random number generators as equations.

`torch.manual_seed(42)` inside a traced function seeds the generator when the trace runs, at that
place among the random ops. `get_rng_state` and `set_rng_state` are recorded where a state is set
back after numbers have been drawn, as `torch.random.fork_rng` does it. If none have been drawn
there is nothing to set back.

A `torch.Generator` that is made inside, or is an argument, is a `TracedGenerator` there. Making and
seeding it are equations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.generators import STATE_METHODS, TracedState, state_error
from thunder_fn.capture.recorded import Leaf
from thunder_fn.capture.recorder import Recorder, current
from thunder_fn.capture.replaced.lookasides import divert, original_of
from thunder_fn.capture.scopes import user_source
from thunder_fn.errors import UnsupportedCall
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Arg, Literal, TensorType

_Generator = torch.Generator
_library = torch.library.Library("thunder_fn", "FRAGMENT")
_library.define("manual_seed(int seed, *, Device? device=None) -> ()")
_library.define(
    "get_rng_state(*, Device? device=None) -> Tensor", tags=[torch.Tag.nondeterministic_seeded]
)
_library.define("set_rng_state(Tensor state, *, Device? device=None) -> ()")
_library.define("seed_generator(Generator generator, int seed) -> ()")
_library.impl(
    "seed_generator",
    lambda generator, seed: _Generator.manual_seed(generator, seed) and None,
    "CompositeExplicitAutograd",
)
torch.library.register_fake(
    "thunder_fn::seed_generator", lambda generator, seed: None, lib=_library
)


def _seed_now(seed: int, *, device: torch.device | None = None) -> None:
    """Seed all devices, or one."""
    if device is None:
        torch.manual_seed(seed)
    else:
        torch.cuda.default_generators[device.index].manual_seed(seed)


def _state_now(*, device: torch.device | None = None) -> torch.Tensor:
    return torch.get_rng_state() if device is None else torch.cuda.get_rng_state(device)


def _set_now(state: torch.Tensor, *, device: torch.device | None = None) -> None:
    if device is None:
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


SIZE = torch.get_rng_state().numel()
GPU_SIZE = 16
"""Bytes of the state of a CUDA device: the seed and the offset."""


def _size(device: torch.device | None) -> int:
    return GPU_SIZE if device is not None and device.type == "cuda" else SIZE


def state_type(device: torch.device | None = None) -> TensorType:
    """The type of the state of the CPU's generator, or of a CUDA device's."""
    return TensorType(torch.uint8, (_size(device),))


def of_device(device: torch.device | None) -> tuple[tuple[str, Arg], ...]:
    """The keyword argument of the ops below for a CUDA device; none for the CPU."""
    is_gpu = device is not None and device.type == "cuda"
    return (("device", Literal(device)),) if is_gpu else ()


for _name, _now in (
    ("manual_seed", _seed_now),
    ("get_rng_state", _state_now),
    ("set_rng_state", _set_now),
):
    _library.impl(_name, _now, "CompositeExplicitAutograd")
for _name in ("manual_seed", "set_rng_state"):
    torch.library.register_fake(
        f"thunder_fn::{_name}", lambda value, *, device=None: None, lib=_library
    )
torch.library.register_fake(
    "thunder_fn::get_rng_state",
    lambda *, device=None: torch.empty(_size(device), dtype=torch.uint8),
    lib=_library,
)


MANUAL_SEED = ops.leaf(torch.ops.thunder_fn.manual_seed.default)
GET_STATE = ops.leaf(torch.ops.thunder_fn.get_rng_state.default)
SET_STATE = ops.leaf(torch.ops.thunder_fn.set_rng_state.default)
SEED_GENERATOR = ops.leaf(torch.ops.thunder_fn.seed_generator.default)


class TracedGenerator(_Generator):
    """A generator inside a capture: the stand-in of an argument, or one that was made there, which
    is its own.

    When the capture has ended it is a plain generator.
    """

    real: torch.Generator
    initial: int

    def __new__(cls, device: Any = None, real: torch.Generator | None = None) -> TracedGenerator:
        new: Any = super().__new__
        made = new(cls, "cpu" if device is None else device)
        made.real = made if real is None else real
        made.initial = _Generator.initial_seed(made)
        return made

    def __init__(self, device: Any = None, real: torch.Generator | None = None) -> None:
        """Take what `__new__` has taken."""

    def manual_seed(self, seed: int) -> TracedGenerator:
        """Add the equation that seeds it."""
        recorder = current()
        if recorder is None:
            super().manual_seed(seed)
        else:
            recorder.emit(SEED_GENERATOR, (Literal(self.real), Literal(int(seed))), (), ())
            recorder.draws += 1
        return self

    def __reduce__(self) -> Any:
        plain = _Generator(self.device)
        plain.set_state(_Generator.get_state(self))
        return plain.__reduce__()


def _refusing(name: str) -> Callable[..., Any]:
    original: Any = getattr(_Generator, name)

    def method(self: TracedGenerator, *args: Any) -> Any:
        if current() is None:
            return original(self, *args)
        raise state_error(f"`{name}` of a generator was called", user_source())

    return method


for _name in STATE_METHODS - {"manual_seed"}:
    setattr(TracedGenerator, _name, _refusing(_name))


def stand_in(recorder: Recorder, generator: torch.Generator) -> torch.Generator:
    """The stand-in of a generator that is an argument."""
    if isinstance(generator, TracedGenerator) and recorder.outer is not None:
        return generator
    traced = TracedGenerator(generator.device, generator)
    recorder.call.generators.know(traced, generator)
    return traced


class _Class(type(_Generator)):
    """The class of the class that takes the place of `torch.Generator`: what is a generator
    stays one.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Generator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Generator)


@functools.cache
def generator_class(original: Any) -> Any:
    """A class that makes generators; inside captures, one whose making is an equation."""

    class Generator(original, metaclass=_Class):
        def __new__(cls, device: Any = None) -> Any:
            recorder = current()
            if recorder is None:
                return original("cpu" if device is None else device)
            made = TracedGenerator(device)
            recorder.call.generators.know(made, made)
            return made.manual_seed(made.initial)

    return Generator


def _get(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.get_rng_state`; the equation is added if the state is set back later."""

    def get_rng_state(*device: Any, **named: Any) -> torch.Tensor:
        recorder, state = current(), original(*device, **named)
        if recorder is not None:
            state = state.as_subclass(TracedState)
            place = Leaf(GET_STATE, (), of_device(_meant(*device, **named)), (), recorder.source)
            recorder.scope.items.append(place)
            recorder.states.append((state, recorder.draws, place))
        return state

    return get_rng_state


def _get_of_gpu(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.cuda.get_rng_state`."""
    get = _get(original)
    return lambda device="cuda": get(device)


def _set(original: Callable[..., None]) -> Callable[..., None]:
    """`torch.set_rng_state` and `torch.cuda.set_rng_state`, to a state that this capture has asked
    for.
    """

    def set_rng_state(new_state: torch.Tensor, *device: Any, **named: Any) -> None:
        recorder = current()
        if recorder is None:
            return original(new_state, *device, **named)
        for state, draws, place in recorder.states:
            if new_state is state:
                to = of_device(_meant(*device, **named))
                if recorder.draws != draws or to != place.kwargs:
                    place.outputs = place.outputs or (recorder.fresh(_type_of_state(place)),)
                    recorder.emit(SET_STATE, place.outputs, (), to)
                    recorder.draws += 1
                return None
        raise _refusal("set_rng_state")

    return set_rng_state


def _set_of_gpu(original: Callable[..., None]) -> Callable[..., None]:
    """`torch.cuda.set_rng_state`."""
    put = _set(original)
    return lambda new_state, device="cuda": put(new_state, device)


def _meant(device: Any = None) -> torch.device | None:
    """The device that a function of `torch.cuda` was given; None for those of the CPU."""
    if device is None:
        return None
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return place if place.index is not None else torch.device("cuda", internals.current_gpu())


def _type_of_state(place: Leaf) -> TensorType:
    devices = [arg.value for _, arg in place.kwargs if isinstance(arg, Literal)]
    return state_type(*devices)


def _seed(original: Callable[[int], Any]) -> Callable[[int], Any]:
    """`torch.manual_seed` to a number."""

    def manual_seed(seed: int) -> Any:
        recorder = current()
        if recorder is None:
            return original(seed)
        _emit_seed(recorder, seed)
        return torch.default_generator

    return manual_seed


def _seed_of_gpus(
    count: Callable[[], Sequence[int]], original: Callable[[int], None]
) -> Callable[[int], None]:
    """`torch.cuda.manual_seed` and `torch.cuda.manual_seed_all`."""

    def manual_seed(seed: int) -> None:
        recorder = current()
        if recorder is None:
            return original(seed)
        for index in count():
            _emit_seed(recorder, seed, torch.device("cuda", index))
        return None

    return manual_seed


def _emit_seed(recorder: Recorder, seed: int, device: torch.device | None = None) -> None:
    recorder.emit(MANUAL_SEED, (Literal(int(seed)),), (), of_device(device))
    recorder.draws += 1


def _refused(name: str, original: Callable[[], int]) -> Callable[[], int]:
    """`torch.seed`, whose number nobody knows, and `torch.initial_seed`, which is another one in
    another call.
    """

    def seed() -> int:
        if current() is not None:
            raise _refusal(name)
        return original()

    return seed


def _refusal(name: str) -> UnsupportedCall:
    return UnsupportedCall(
        f"`torch.{name}` was called while tracing, but a trace draws its random numbers when it"
        " runs",
        source=user_source(),
        fix=(
            "Use `torch.manual_seed`, set back a state from `torch.get_rng_state`, or seed"
            " outside the function."
        ),
    )


_OF_CPU: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "get_rng_state": _get,
    "set_rng_state": _set,
    "manual_seed": _seed,
    "seed": functools.partial(_refused, "seed"),
    "initial_seed": functools.partial(_refused, "initial_seed"),
}
"""Replacements in captures of functions of `torch.random`, whatever name they are called by."""


def _original(name: str) -> Callable[..., Any]:
    function = getattr(torch.random, name)
    return lambda *args, **kwargs: original_of(function)(*args, **kwargs)


for _name, _make in _OF_CPU.items():
    divert(f"random {_name}", _make(_original(_name)))

FUNCTIONS = {
    "cuda.get_rng_state": _get_of_gpu,
    "cuda.set_rng_state": _set_of_gpu,
    "cuda.manual_seed": functools.partial(_seed_of_gpus, lambda: [internals.current_gpu()]),
    "cuda.manual_seed_all": functools.partial(
        _seed_of_gpus, lambda: range(torch.cuda.device_count())
    ),
    "cuda.seed": functools.partial(_refused, "cuda.seed"),
    "cuda.seed_all": functools.partial(_refused, "cuda.seed_all"),
    "cuda.initial_seed": functools.partial(_refused, "cuda.initial_seed"),
}
"""Replacements in captures of the functions of `torch.cuda` of these names."""
