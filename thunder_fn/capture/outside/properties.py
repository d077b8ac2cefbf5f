"""Properties of tensors that are no part of a type: a traced function that reads one is traced for
what it found.

Types, strides and `requires_grad` are looked at in every call, so reading them costs nothing
(`CONSTANT`). Other properties, such as `is_leaf`, the storage offset or attributes, are looked at
only in calls of programs whose function asked for them. A read is a condition of the trace
(`Read`). Questions that cannot be answered while tracing are refused.

`tests/unit/test_cache_properties.py` has a row for everything that PyTorch's tensors have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.objects import ABSENT
from thunder_fn.capture.outside.reads import seen
from thunder_fn.capture.supported import is_wrapped
from thunder_fn.errors import UnsupportedCall

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Read:
    """A property that the traced function read, and its value. The property is that of an input, by
    index, of a closed-over tensor, or (None) of the process. `find` reads it again, for comparison
    with `found`.
    """

    tensor: int | Tensor | None
    name: str
    find: Callable[..., Any]
    found: Any


def _type(tensor: Tensor) -> Any:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.requires_grad


GPU = "current_gpu"
"""The name of the CUDA device that "cuda" stands for. With several, each trace depends on it."""

FOUND = internals.PROPERTIES
"""The function that reads each property for comparison."""

PROPERTIES = tuple(name for name in (*FOUND, "_base") if hasattr(Tensor, name))
"""The properties that are looked at where a function asks for them."""

OF_LEAVES: dict[str, Callable[[Tensor], Any]] = {
    "is_leaf": lambda tensor: True,
    "grad_fn": lambda tensor: None,
    "output_nr": lambda tensor: 0,
    "grad_dtype": lambda tensor: tensor.dtype,
    "_is_view": lambda tensor: False,
    "_base": lambda tensor: None,
}
"""The answers about what a transform differentiates: a leaf, as under torch.func."""

OF_MEMORY = frozenset(("storage_offset", "is_pinned", "is_shared", "is_inference"))
"""Properties that views have from the tensor whose memory they show."""


@dataclass(slots=True, eq=False)
class Properties:
    """The properties that one recorder has read. `given` maps tracers to the tensors from outside.
    It says whether the tracer is the very tensor to the function, as it is not to what a transform
    calls. `differentiated` are tracers, by id, that a transform differentiates. `found` are the
    reads.
    """

    recorder: Recorder
    given: dict[int, tuple[Tensor, Tensor, bool]] = field(default_factory=dict)
    found: dict[tuple[int, str], tuple[Tensor, str, Callable[[Tensor], Any], Any]] = field(
        default_factory=dict
    )
    found_in_process: dict[str, tuple[Callable[[], Any], Any]] = field(default_factory=dict)
    differentiated: set[int] = field(default_factory=set[int])

    def take(self, tensor: Tensor, tracer: Tensor, *, is_same: bool) -> None:
        """Note that a tracer stands for a tensor from outside."""
        self.given[id(tracer)] = tracer, tensor, is_same
        if is_same and tensor.__class__ is not Tensor:
            internals.set_class(tracer, internals.tracers_of(tensor.__class__))

    def outside_of(self, tracer: Tensor) -> tuple[Tensor, bool] | None:
        """Return the tensor from outside that a tracer stands for, and whether the tracer is that
        very tensor to the function.
        """
        known = self.given.get(id(tracer))
        return None if known is None else known[1:]

    def owner_of(self, tracer: Tensor) -> Tensor | None:
        """The tracer of a tensor from outside whose memory a tracer shows, itself or detached."""
        places = self.recorder.history.linked(internals.memory_id(tracer))
        given = (own for own, _, _ in self.given.values())
        return next((own for own in given if internals.memory_id(own) in places), None)

    def look_at(self, tensor: Tensor, name: str, find: Callable[[Tensor], Any]) -> Any:
        """Read a property of a tensor from outside, on which the trace depends from now on.

        Nothing can depend on values that were computed around this capture.
        """
        known = self.given.get(id(tensor))
        outer, tensor = self.recorder.outer, tensor if known is None else known[1]
        if outer is not None:
            return outer.properties.look_at(tensor, name, find)
        if isinstance(tensor, internals.Tracer):
            with internals.outside_torch_func():
                natural: Callable[[], Any] = lambda: find(tensor)
                return (
                    _of_memory(self.recorder, name, tensor, natural)
                    if name in OF_MEMORY
                    else natural()
                )
        if (id(tensor), name) not in self.found:
            with internals.isolated(), internals.no_torch_function():
                self.found[id(tensor), name] = tensor, name, find, find(tensor)
        return self.found[id(tensor), name][-1]

    def look_at_process(self, name: str, find: Callable[[], Any], *around: Any) -> Any:
        """Read a part of the process's state, on which the trace depends from now on. `around` is
        its value around the capture, where the capture changes it.
        """
        if self.recorder.outer is not None:
            return self.recorder.outer.properties.look_at_process(name, find, *around)
        now = find() or around[0] if around else find()
        self.found_in_process.setdefault(name, (find, around[0] if around else now))
        return now

    def reads(self, positions: dict[int, int]) -> tuple[Read, ...]:
        """The reads so far. `positions` are those of the inputs, by their ids."""
        if self.recorder.outer is not None:
            return ()
        for tensor, name, *_ in list(self.found.values()):
            if name == "type" and (id(tensor) in positions or self.recorder.knows(tensor)):
                del self.found[
                    id(tensor), name
                ]  # calls are checked for it anyway: the trace computes with it
        of_tensors = (
            Read(positions.get(id(one[0]), one[0]), *one[1:]) for one in self.found.values()
        )
        if internals.has_several_gpus():
            around = self.recorder.call.answers[GPU]
            self.found_in_process.setdefault(GPU, (internals.current_gpu, around))
        of_process = (
            Read(None, name, find, found) for name, (find, found) in self.found_in_process.items()
        )
        return *of_tensors, *of_process

    def forget(self) -> None:
        """Let go of everything."""
        self.given.clear()
        self.found.clear()
        self.found_in_process.clear()
        del self.recorder


# ---- answers ----


def answer(recorder: Recorder, name: str, tensor: Tensor, natural: Callable[[], Any]) -> Any:
    """Answer the function's question about a property of a tensor; `natural` is the tracer's own
    answer.
    """
    recorder = _owner(recorder, tensor)
    properties = recorder.properties
    if not isinstance(tensor, internals.Tracer):
        return _of_foreign(recorder, name, tensor, natural)
    if name in OF_MEMORY:
        return _of_memory(recorder, name, tensor, natural)
    known = properties.outside_of(tensor)
    if name in OF_LEAVES and _is_differentiated(recorder, tensor):
        return OF_LEAVES[name](tensor)
    if name in ("_is_view", "_base") and known is None and _is_inference(recorder, tensor):
        return False if name == "_is_view" else None
    _check_not_parted(recorder, name, tensor, known)
    if known is None or tensor.is_own_view:
        return natural() if name != "_base" else _base(recorder, tensor, natural())
    outside, is_same = known
    if name == "_base":
        return _base(recorder, tensor, None)
    if not is_same and recorder.inside:
        return (
            natural()
        )  # of what a transform calls, autograd knows another tensor than of its argument
    found = properties.look_at(outside, name, FOUND[name])
    result = natural()
    if not is_same:
        return _agreed(
            recorder, name, found, result if name != "grad_fn" else FOUND["grad_fn"](tensor), result
        )
    return ANSWERS.get(name, _as_found)(recorder, outside, found, result)


def _of_foreign(recorder: Recorder, name: str, tensor: Tensor, natural: Callable[[], Any]) -> Any:
    """Answer for a tensor that is no tracer: one from outside, or one of a torch.func transform."""
    if is_wrapped(tensor):
        return _of_wrapped(recorder, name, tensor, natural)
    if not internals.is_below_tracers(tensor, recorder.mode):
        if name == "_base":
            return _base_outside(recorder, tensor, natural())
        recorder.properties.look_at(tensor, name, FOUND[name])
    return natural()


def _check_not_parted(recorder: Recorder, name: str, tensor: Tensor, known: Any) -> None:
    """Refuse to answer for a result of a function inside that shares memory with its argument."""
    if name in ("_is_view", "_base") and known is None and recorder.history.is_parted(tensor):
        what = f"`{name}` of what shares memory with the argument of a function inside"
        _refuse(recorder, what, "Ask outside of the traced function.")


def check_type(recorder: Recorder, tensor: Any) -> None:
    """Note that the function asks for a part of the type of a tensor from outside, with which it
    may never compute.
    """
    if not isinstance(tensor, Tensor) or isinstance(tensor, internals.Tracer) or is_wrapped(tensor):
        return
    if not internals.is_below_tracers(tensor, recorder.mode):
        recorder.properties.look_at(tensor, "type", _type)


def types_of(tensors: Iterable[Tensor]) -> Iterator[Read]:
    """The types of tensors from outside that a trace depends on, though it does not compute with
    them, such as `c` in `x.expand_as(c)`.
    """
    with internals.isolated(), internals.no_torch_function():
        for tensor in tensors:
            yield Read(tensor, "type", _type, _type(tensor))


def _as_found(recorder: Recorder, tensor: Tensor, found: Any, natural: Any) -> Any:
    return found


def _node(recorder: Recorder, tensor: Tensor, found: Any, natural: Any) -> Any:
    if (
        natural is None
        or not internals.is_result_from_outside(natural)
        or isinstance(tensor, internals.Tracer)
    ):
        return natural
    with internals.outside_torch_func():
        return tensor.grad_fn


def _hooks(recorder: Recorder, tensor: Tensor, found: Any, natural: Any) -> Any:
    return (
        natural
        if found
        else _refuse(recorder, "the hooks of a tensor from outside", "Ask outside of the function.")
    )


ANSWERS: dict[str, Callable[[Recorder, Tensor, Any, Any], Any]] = {
    "is_leaf": lambda recorder, tensor, found, natural: natural,
    "output_nr": lambda recorder, tensor, found, natural: natural if natural else found,
    "retains_grad": lambda recorder, tensor, found, natural: natural or found,
    "grad_fn": _node,
    "_backward_hooks": _hooks,
    "_post_accumulate_grad_hooks": _hooks,
}
"""The answer for each property, made from the finding about the tensor and the tracer's own
answer.
"""


def _owner(recorder: Recorder, tensor: Tensor) -> Recorder:
    """The recorder around that made a tracer."""
    while (
        isinstance(tensor, internals.Tracer)
        and recorder.outer is not None
        and not recorder.owns(tensor)
    ):
        recorder = recorder.outer
    return recorder


def _of_memory(recorder: Recorder, name: str, tensor: Tensor, natural: Callable[[], Any]) -> Any:
    own = recorder.properties.owner_of(tensor)
    known = None if own is None else recorder.properties.outside_of(own)
    if own is None or known is None:
        return (
            natural()
            if name == "storage_offset"
            else name == "is_inference" and is_inference_mode(recorder)
        )
    outside, is_same = known
    found = recorder.properties.look_at(outside, name, FOUND[name])
    if name != "storage_offset":
        return found
    with internals.no_torch_function():
        begins = own.storage_offset()
    return (
        natural() - begins + found if is_same else _agreed(recorder, name, found, begins, natural())
    )


def address_in(recorder: Recorder, tensor: Tensor, address: int) -> int:
    """Guard where a tensor from outside begins in its memory, and return the address in the memory
    of its tracer.
    """
    own = recorder.properties.owner_of(tensor)
    known = None if own is None else recorder.properties.outside_of(own)
    if own is None or known is None:
        return address
    begins = recorder.properties.look_at(known[0], "storage_offset", FOUND["storage_offset"])
    with internals.no_torch_function():
        return address - begins + own.storage_offset()


def _of_wrapped(recorder: Recorder, name: str, tensor: Tensor, natural: Callable[[], Any]) -> Any:
    """Answer inside a transform of torch.func."""
    inner = internals.innermost(tensor)
    if name in OF_MEMORY and isinstance(inner, internals.Tracer) and recorder.owns(inner):
        return _of_memory(recorder, name, inner, natural)
    return natural()


def _base(recorder: Recorder, tensor: Tensor, natural: Tensor | None) -> Tensor | None:
    base = tensor if natural is None else natural
    known = recorder.properties.outside_of(base)
    return natural if known is None else _base_outside(recorder, known[0], natural)


def _base_outside(recorder: Recorder, tensor: Tensor, natural: Tensor | None) -> Tensor | None:
    if recorder.properties.look_at(tensor, "_is_view", FOUND["_is_view"]):
        _refuse(recorder, "the `_base` of a view from outside", "Pass the base as an argument.")
    return natural


def _is_differentiated(recorder: Recorder, tensor: Tensor) -> bool:
    """Test for an argument that a transform differentiates, which nothing has changed in place."""
    if id(tensor) not in recorder.properties.differentiated:
        return False
    return internals.is_result_from_outside(internals.node_of(tensor))


def _agreed(recorder: Recorder, name: str, found: Any, here: Any, result: Any) -> Any:
    """Answer inside a transform or a body, where the tensor asked about is not the one outside."""
    if found != here:
        _refuse(
            recorder,
            f"`{name}`, inside of a transform or a body, where it is not what it is outside",
            "Ask outside of it.",
        )
    return result


def is_inference_mode(recorder: Recorder) -> bool:
    """Test for inference mode, of the function's own or around it."""
    name = "is_inference_mode_enabled"
    if recorder.call.inference:
        return recorder.call.inference[-1]
    return recorder.properties.look_at_process(
        name, torch.is_inference_mode_enabled, recorder.call.answers[name]
    )


def _is_inference(recorder: Recorder, tensor: Tensor) -> bool:
    """Test for inference mode or a tensor made in it: nobody keeps track of views there."""
    own = recorder.properties.owner_of(tensor)
    return (
        is_inference_mode(recorder)
        if own is None
        else _of_memory(recorder, "is_inference", own, bool)
    )


def _refuse(recorder: Recorder, what: str, fix: str) -> Any:
    source = recorder.where()
    raise UnsupportedCall(
        f"the function reads {what}, which a trace does not have", source=source, fix=fix
    )


# ---- attributes that Python code gave a tensor ----


def attribute(recorder: Recorder, tracer: Tensor, name: str) -> Any:
    """An attribute that the tracer does not have: the one of the tensor from outside that it stands
    for.

    Raises:
        AttributeError: there is none.
    """
    recorder = _owner(recorder, tracer)
    if name == "__dict__":
        return _attributes(recorder, tracer)
    known = recorder.properties.outside_of(tracer)
    if known is None or name.startswith("__"):
        raise AttributeError(f"'Tensor' object has no attribute {name!r}")
    outside, is_same = known
    find = Attribute(name)
    if recorder.properties.look_at(outside, name, find) != seen(ABSENT):
        if is_same:
            return _held(recorder, outside, name)
        _refuse(
            recorder,
            f"the attribute `{name}` of a tensor inside of a transform or a body",
            "Read it outside of it.",
        )
    cls = _class_of(recorder, outside)
    for base in cls.__mro__:
        if name in base.__dict__:
            value = base.__dict__[name]
            return value.__get__(tracer, cls) if hasattr(value, "__get__") else value
    raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")


def _attributes(recorder: Recorder, tracer: Tensor) -> Mapping[str, Any]:
    """All attributes of the tensor that a tracer stands for, and those that were set since."""
    own = {name: internals.attributes(tracer)[name] for name in internals.attributes_set(tracer)}
    known = recorder.properties.outside_of(tracer)
    if known is None:
        return MappingProxyType(own)
    names = recorder.properties.look_at(known[0], "__dict__", _names)
    given = {name: attribute(recorder, tracer, name) for name in names if name not in own}
    return MappingProxyType(given | own)


def _names(tensor: Tensor) -> tuple[str, ...]:
    return tuple(internals.attributes_set(tensor))


def _class_of(recorder: Recorder, tensor: Tensor) -> type:
    """The class of the tensor that the outermost tracer stands for."""
    while isinstance(tensor, internals.Tracer) and recorder.outer is not None:
        recorder = recorder.outer
        known = recorder.properties.outside_of(tensor)
        if known is None:
            return Tensor
        tensor = known[0]
    return type(tensor)


def _held(recorder: Recorder, tensor: Tensor, name: str) -> Any:
    return (
        getattr(tensor, name)
        if isinstance(tensor, internals.Tracer)
        else internals.attributes(tensor).get(name, ABSENT)
    )


@dataclass(frozen=True, slots=True)
class Attribute:
    """The state of an attribute in a tensor's `__dict__`, as later calls compare it."""

    name: str

    def __call__(self, tensor: Tensor) -> Any:
        return seen(internals.attributes(tensor).get(self.name, ABSENT))
