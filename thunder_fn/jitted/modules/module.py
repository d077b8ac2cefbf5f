"""jit of a module: a module of the same class on the same state, whose `forward` is jitted.

The jitted module and the given one share their `__dict__`. So whatever an optimizer, a
`load_state_dict`, a hook or an assignment does to one, it does to the other. Parameters and buffers
enter the program as inputs. The module's own hooks run around the program, as they do around any
`forward`; those of its submodules are traced.

While the module is traced its real parameters stay in place and are recognised by identity, so
`isinstance(p, nn.Parameter)` holds. Code that changes the class of the jitted module, such as
`register_parametrization`, changes that of the given one too.
"""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import current, pytree
from thunder_fn.capture.failures import source_of
from thunder_fn.capture.modules import PLAIN, TRACING
from thunder_fn.capture.outside.reads import Attribute, Changed, Reads, tracked
from thunder_fn.capture.replaced.patches import module_path
from thunder_fn.errors import ThunderError, located
from thunder_fn.jitted import Jitted
from thunder_fn.jitted.cache import MAXSIZE, CacheInfo
from thunder_fn.jitted.dynamic import Miss, RetraceWarning
from thunder_fn.jitted.modules.containers import Made, fill, filled, held_in, with_marks
from thunder_fn.jitted.modules.forward import SLOT, Forward
from thunder_fn.jitted.modules.hooks import HookEffect, HooksOutside, check_unchanged, held_by_hooks
from thunder_fn.jitted.modules.state import (
    Layout,
    Reading,
    changed_attribute,
    matches,
    read,
    unchanged,
)
from thunder_fn.jitted.options import Options

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

STATE = "__state__"
"""The keyword under which a module's tensors are passed to its program."""

VARIANTS = 16
"""The number of states of a module (train, eval, ...) that have programs at a time."""

PATIENCE = 8
"""The number of calls in which a module may change a value that it reads, before a warning."""

COUNT_OUTSIDE = "Keep what changes in a buffer, which is a tensor, or outside of `forward`."
"""The fix that the warning proposes."""

OnReads = Callable[[Reads, str | None], None]
"""A listener for the attributes that a trace read, and for one of those that it changed after
that, if there is one.
"""


class _Changed(ThunderError):
    """The module changed during the call. The call begins again."""


class TracedForward:
    """A module's `forward` as a function of its tensors too: those that it uses are the inputs
    that were passed.
    """

    fills_arguments = True
    """True: the result says which containers it filled."""

    def __init__(
        self, module: torch.nn.Module, on_reads: OnReads, layout: Layout | None = None
    ) -> None:
        self.module, self.on_reads, self.layout = module, on_reads, layout
        self.__name__ = type(module).__name__
        self.__wrapped__ = module.forward

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        given, recorder = kwargs.pop(STATE), current()
        if recorder is None:
            return self.module.forward(*args, **kwargs)
        for child in self.module.modules():
            recorder.modules.watch(child, module_path(recorder, child))
        reading = read(self.module)
        if self.layout is not None and reading.layout != self.layout:
            raise _Changed("another thread changed the module between the call and its trace")
        for tensor, tracer in zip(reading.tensors, given, strict=True):
            recorder.identify(tensor, tracer)
        args, kwargs = _with_own(
            (args, kwargs), dict(zip(map(id, given), reading.tensors, strict=True))
        )
        places = {id(child): place for place, child in enumerate(self.module.modules())}
        containers = held_in((args, kwargs))
        held = held_by_hooks(self.module) if self.layout is not None else ()
        with tracked() as found:
            result = self.module.forward(*args, **kwargs)
            keeps = recorder.kept is not None and recorder.outer is None
            left, assigned = recorder.modules.take_assigned(places, found.written, keeps=keeps)
        check_unchanged(held)
        reads = _guarded(recorder, left, found.reads)
        plain = (
            one
            for one in assigned
            if isinstance(one.value, PLAIN) and Attribute(one.module, one.name) in reads
        )
        changed = (
            *(one.name for one in plain),
            *(one.name for one in reads.values() if isinstance(one, Changed)),
        )
        self.on_reads(reads, next(iter(changed), None))
        attributes = tuple(
            (places[id(one.module)], one.section, one.name, one.value) for one in assigned
        )
        states = tuple(map(pytree.attributes_of, pytree.objects_in((args, kwargs))))
        changes, (result, gives) = filled(containers), with_marks(result, containers)
        is_all = not states and not attributes and not changes and not gives
        return result if is_all else Assigning(result, changes, gives, states, attributes)


def _guarded(recorder: Recorder, left: Set[Attribute], reads: Reads) -> Reads:
    """The reads that the module guards itself. Those of attributes that are left to the state in
    Python, in which the function puts containers of tensors, are guarded there.
    """
    if recorder.kept is not None:
        recorder.kept.elsewhere.renewed += [
            (vars(one.module), one.name) for one in left & reads.keys()
        ]
    return {place: value for place, value in reads.items() if place not in left}


def _with_own(arguments: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """Replace, in the arguments, tensors of the module by those that the module holds."""
    own = any(id(leaf) in tensors for leaf in pytree.flatten(arguments)[0])
    return (
        pytree.tree_map(lambda leaf: tensors.get(id(leaf), leaf), arguments) if own else arguments
    )


@dataclass(frozen=True)
class Assigning(Made):
    """The result of a call that leaves something elsewhere too.

    `states` are the contents of objects among its arguments after it. `attributes` are the new
    values of attributes of the module and its submodules, plain ones too. Each comes with the
    submodule's number, the section of its `__dict__` and the name.
    """

    states: tuple[Any, ...]
    attributes: tuple[tuple[int, str, str, Any], ...]


@dataclass(slots=True, eq=False)
class Variant:
    """The programs for one state of a module. `reads` is replaced, never changed."""

    layout: Layout
    jitted: Jitted
    reads: Reads


@dataclass(frozen=True, slots=True, eq=False)
class Latest:
    """The programs and the tensors of the latest call, and the check that both are still right."""

    jitted: Jitted
    tensors: tuple[torch.Tensor, ...]
    holds: Callable[[], bool]


@dataclass(slots=True, eq=False)
class ModuleJit:
    """A module with the options that it is jitted with, and its programs."""

    module: torch.nn.Module
    options: Options
    variants: tuple[Variant, ...] = ()
    latest: Latest | None = None
    retired: tuple[CacheInfo, ...] = ()
    hooks: HooksOutside = field(default_factory=HooksOutside)
    counting: int = 0
    misses: deque[Miss] = field(default_factory=lambda: deque(maxlen=MAXSIZE))

    @internals.skipped_by_dynamo
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        latest = self.latest
        try:
            if latest is not None and current() is None and latest.holds():
                result = latest.jitted(*args, **kwargs, **{STATE: latest.tensors})
            else:
                result = self._call_slowly(args, kwargs)
        except _Changed:
            return self(*args, **kwargs)
        except HookEffect as effect:
            self.latest = None
            self.hooks.note(read(self.module).layout, effect)
            return self(*args, **kwargs)
        if type(result) is not Assigning:
            return result
        for value, state in zip(pytree.objects_in((args, kwargs)), result.states, strict=True):
            pytree.assign(value, state)
        if result.attributes:
            with TRACING:
                self._assign(result.attributes)
        return fill((args, kwargs), result)

    def _assign(self, attributes: tuple[tuple[int, str, str, Any], ...]) -> None:
        """Bind attributes as the traced code did."""
        modules, recorder = tuple(self.module.modules()), current()
        for place, section, name, value in attributes:
            module = modules[place]
            held = module.__dict__[section] if section else module.__dict__
            if (
                name in held
                and type(held[name]) is type(value)
                and isinstance(value, PLAIN)
                and held[name] == value
            ):
                continue  # so that the module's dicts are as they were
            if recorder is not None:
                recorder.modules.watch(module, module_path(recorder, module))
            held[name] = value

    def _call_slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with TRACING:
            reading = read(self.module)
            jitted = self._programs_for(reading)
        if jitted is None:
            return self.module.forward(*args, **kwargs)
        return jitted(*args, **kwargs, **{STATE: reading.tensors})

    def _programs_for(self, reading: Reading) -> Jitted | None:
        """The programs for a call of the module as it was read; None where the module runs as it
        is.
        """
        if not reading.is_ready or (reading.is_parametrized and internals.is_caching()):
            return None
        if current() is not None:
            return self.function()
        if self.hooks.keep_from_tracing(reading.layout):
            return None
        variant = self.variant_of(reading)
        if not reading.is_borrowed:
            self.latest = Latest(variant.jitted, reading.tensors, unchanged(reading, variant.reads))
        return variant.jitted

    @property
    def again(self) -> Callable[[torch.nn.Module], ModuleJit]:
        """The function that jits another module alike."""
        return functools.partial(type(self), options=self.options)

    def function(self) -> Jitted:
        """The module as a jitted function of its tensors too, which keeps nothing."""
        return Jitted(TracedForward(self.module, lambda reads, changed: None), self.options)

    def variant_of(self, reading: Reading) -> Variant:
        """The programs for the module as it was read. The latest ones are in front."""
        variants = self.variants
        known = (one for one in variants if one.layout == reading.layout and matches(one.reads))
        found = next(known, None) or self._new_variant(reading.layout)
        others = [one for one in variants if one is not found]
        self.retired += tuple(one.jitted.programs.info() for one in others[VARIANTS - 1 :])
        self.variants = (found, *others[: VARIANTS - 1])
        return found

    def _new_variant(self, layout: Layout) -> Variant:
        def on_reads(reads: Reads, changed: str | None) -> None:
            """Note that a capture depends on more than was checked so far."""
            variant.reads = {**variant.reads, **reads}
            self.latest = None
            if changed is not None:
                self.counting += 1
                self.counts(changed)

        variant = Variant(layout, Jitted(self.traced(on_reads, layout), self.options), {})
        variant.jitted.programs.misses = self.misses
        if self.variants:
            self.misses.append(Miss(self._change(self.variants[0], layout)))
        return variant

    def _change(self, before: Variant, layout: Layout) -> str:
        """The difference between the module and the latest variant."""
        if (
            layout == before.layout
            and (name := changed_attribute(self.module, before.reads)) is not None
        ):
            return f"{type(self.module).__name__}.{name} has changed"
        return (
            f"the parameters, buffers, parts or hooks of {type(self.module).__name__} have changed"
        )

    def counts(self, name: str) -> None:
        """Note that the traced code changed a plain attribute that it had read, so the next call
        is traced again.
        """
        if self.counting == PATIENCE:
            kind = type(self.module).__name__
            what = (
                f"jit: {kind} changes its attribute {name!r} in each call, and is traced again for"
                " each value"
            )
            warnings.warn(
                located(what, source=source_of(self.module.forward), fix=COUNT_OUTSIDE),
                RetraceWarning,
                2,
            )

    def traced(self, on_reads: OnReads, layout: Layout) -> TracedForward:
        """The function that is traced."""
        return TracedForward(self.module, on_reads, layout)

    def info(self) -> CacheInfo:
        """The figures of `cache_info`, over all variants."""
        parts = [*self.retired, *(one.jitted.programs.info() for one in self.variants)]
        live = parts[len(self.retired) :]
        hits, misses = sum(part.hits for part in parts), sum(part.misses for part in parts)
        return CacheInfo(hits, misses, sum(part.size for part in live), VARIANTS * MAXSIZE)


# ---- a class of its own for each class of modules ----


class _Slotted(torch.nn.Module):
    """A jitted module. All have one layout, so that one can become a module of another class."""

    __slots__ = (SLOT,)


def _get_class(self: torch.nn.Module) -> type[torch.nn.Module]:
    return type(jit_of(self).module)


def _set_class(self: torch.nn.Module, cls: type[torch.nn.Module]) -> None:
    jit_of(self).module.__class__ = cls
    _follow(self)


def _follow(self: torch.nn.Module) -> bool:
    """Take over a class that the module behind has got since, as from
    `register_parametrization`.
    """
    cls = _class_of(type(jit_of(self).module), methods_of(self))
    changed = type(self) is not cls
    if changed:
        object.__dict__["__class__"].__set__(self, cls)
    return changed


def _attribute_of(cls: type[torch.nn.Module]) -> Callable[..., Any]:
    def __getattr__(self: torch.nn.Module, name: str) -> Any:
        if name != SLOT and _follow(self):
            return getattr(self, name)
        return cls.__getattr__(self, name)

    return __getattr__


def _alike(self: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
    """Jit another module as this one is."""
    return with_forward(module, jit_of(self).again, methods_of(self))


def _replicate(self: torch.nn.Module) -> torch.nn.Module:
    return _alike(self, getattr(self, SLOT).module._replicate_for_data_parallel())


def _reduce(self: torch.nn.Module, protocol: Any = None) -> tuple[Any, ...]:
    inner = jit_of(self)
    return with_forward, (inner.module, inner.again, methods_of(self))


def _copy(self: torch.nn.Module) -> torch.nn.Module:
    return _alike(self, copy.copy(jit_of(self).module))


def _deepcopy(self: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    return _alike(self, copy.deepcopy(jit_of(self).module, memo))


Methods = tuple[tuple[str, Callable[..., Any]], ...]
"""Methods that a jitted module has and its class has not, or has others of, by name."""


def methods_of(module: torch.nn.Module) -> Methods:
    """The methods of a jitted module's own."""
    return type(module).__dict__.get("__own_methods__", ())


def _lower(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """The programs of a call ahead of time, as `jit(f).lower` gives them."""
    from thunder_fn.inspect.lowered import lower

    return lower(self, args, kwargs)


@functools.cache
def _class_of(cls: type[torch.nn.Module], methods: Methods = ()) -> type[torch.nn.Module]:
    """A subclass that looks like the class and whose `forward` is jitted."""
    namespace = {
        "__own_methods__": methods,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__slots__": (),
        "__class__": property(_get_class, _set_class),
        "__getattr__": _attribute_of(cls),
        "_replicate_for_data_parallel": _replicate,
        "__reduce_ex__": _reduce,
        "__copy__": _copy,
        "__deepcopy__": _deepcopy,
        "forward": Forward(cls.forward),
        **({} if hasattr(cls, "lower") else {"lower": _lower}),
        **dict(methods),
    }
    bases = (_Slotted,) if cls is torch.nn.Module else (cls, _Slotted)
    return types.new_class(cls.__name__, bases, exec_body=lambda body: body.update(namespace))


def jit_of(module: torch.nn.Module) -> ModuleJit:
    """The `ModuleJit` behind a jitted module."""
    return getattr(module, SLOT)


def is_jitted(module: Any) -> bool:
    """Test whether the module was made by `jit`."""
    return isinstance(module, torch.nn.Module) and hasattr(type(module), SLOT)


def as_function(module: torch.nn.Module, kwargs: dict[str, Any]) -> tuple[Jitted, dict[str, Any]]:
    """A jitted module as a jitted function, and the keyword arguments with which it is called."""
    inner = jit_of(module)
    return inner.function(), {**kwargs, STATE: read(inner.module).tensors}


def latest_of(module: torch.nn.Module) -> Jitted | None:
    """The programs of the latest call."""
    variants = jit_of(module).variants
    return variants[0].jitted if variants else None


class ScriptCall(torch.nn.Module):
    """The call of a TorchScript module, which has no Python code that could be traced. As in a
    module made by `torch.compile`, the module is the part `_orig_mod`.
    """

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        super().__init__()
        self._orig_mod = module
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self._orig_mod(*args, **kwargs)


def jit_module(module: torch.nn.Module, options: Mapping[str, Any]) -> Any:
    """A module of the same class, on the same state, with a jitted `forward`. See `jit`.

    Raises:
        UnknownOption, ArgnumError: as `jit` does.
    """
    if isinstance(module, torch.jit.ScriptModule):
        module = ScriptCall(module)
    if is_jitted(module):
        inner = jit_of(module)
        return jitted_module(inner.module, inner.options.changed(options)) if options else module
    return jitted_module(module, Options().changed(options))


def jitted_module(module: torch.nn.Module, options: Options) -> Any:
    """A module that shares its state with this one."""
    named = options.of_arguments(module.forward)
    return with_forward(module, functools.partial(ModuleJit, options=named))


def with_forward(
    module: torch.nn.Module, make: Callable[[torch.nn.Module], Any], methods: Methods = ()
) -> Any:
    """A module of the same class, on the same state, whose `forward` is what `make` makes of the
    module.

    `make` is pickled and copied: its result is made again for the copy. It has the attributes
    `module`, and `again`, which is `make`.
    """
    cls = _class_of(type(module), methods)
    wrapped = object.__new__(cls)  # a class may have a `__new__` of its own, as fx.GraphModule has
    object.__setattr__(wrapped, "__dict__", module.__dict__)
    object.__setattr__(wrapped, SLOT, make(module))
    return wrapped


def with_methods(module: torch.nn.Module, **methods: Callable[..., Any]) -> Any:
    """A jitted module on the same state with these methods too. The module that it was made from
    does not have them.
    """
    inner = jit_of(module)
    return with_forward(inner.module, inner.again, (*methods_of(module), *methods.items()))
