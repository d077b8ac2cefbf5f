"""Values that a program can store outside in each call."""

from __future__ import annotations

import enum
import functools
import re
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.comparisons import PLAIN
from thunder_fn.capture.fed import Fed
from thunder_fn.capture.made import is_made_anew
from thunder_fn.capture.objects import is_a
from thunder_fn.capture.outside import frames
from thunder_fn.capture.outside.edges import look
from thunder_fn.capture.outside.kinds import is_lasting
from thunder_fn.capture.places import Stays
from thunder_fn.capture.stored import has_tracers, holds_numbers, leaves_in, reaches_tracer
from thunder_fn.errors import UnsupportedCall, kind_of, with_article

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

FIXED = (*PLAIN, enum.Enum, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
"""Types of values that are stored as they are."""
_VALUES = (numpy.generic, range, slice, Stays)
"""Types of plain values in addition to those of `PLAIN`."""
_DEEP = 4
"""Steps from a function to what it closes over, which are looked at."""


@dataclass(slots=True, eq=False)
class Storable:
    """Questions about values that a function stores outside while it is traced."""

    recorder: Recorder
    fed: Fed
    stepped: str = ""
    """The class of the first object of PyTorch that the function uses, if any."""

    def is_storable(self, value: Any) -> bool:
        """Test for what a program can store in each call: plain data, containers and objects of it
        that the function makes, and objects that were there before the call.
        """
        return self.was_there(value) or all(
            type(leaf) in PLAIN
            or is_a(leaf, _VALUES)
            or self.was_there(leaf)
            or is_made_anew(leaf)
            or self.is_steady(leaf)
            for leaf in leaves_in(value)
        )

    def is_steady(self, value: Any, depth: int = _DEEP) -> bool:
        """Test for what the function makes and nobody can change, such as a function that closes
        over numbers: one is as good as another.
        """
        if type(value) in PLAIN or is_a(value, (*_VALUES, re.Pattern)):
            return True
        if is_a(value, tuple):
            parts: Iterable[Any] = value
        elif type(value) is types.FunctionType:
            cells = (look("cell", cell, None) for cell in value.__closure__ or ())
            keywords = (value.__kwdefaults__ or {}).values()
            parts = *cells, *(value.__defaults__ or ()), *keywords, *vars(value).values()
        elif type(value) is types.MethodType:
            parts = value.__func__, value.__self__
        elif type(value) in (types.BuiltinMethodType, types.MethodWrapperType):
            parts = (value.__self__,)
        elif type(value) is functools.partial:
            parts = value.func, *value.args, *value.keywords.values(), *vars(value).values()
        else:
            return self.was_there(value)
        return depth > 0 and all(self.is_steady(part, depth - 1) for part in parts)

    def was_there(self, value: Any) -> bool:
        """Test for an object or tensor from outside, without anything of the trace in it."""
        if is_a(value, torch.Tensor):
            return not is_a(value, internals.Tracer) and self.recorder.is_from_outside(value)
        if has_tracers(value) or holds_numbers(value) or self.is_given(value):
            return False
        watch = frames.observer()
        if is_a(value, types.BuiltinFunctionType):
            return not reaches_tracer(value)
        return (watch is not None and watch.was_outside(value)) or is_lasting(value)

    def is_given(self, value: Any) -> bool:
        """Test for a container that is another one in the next call: it was read from a place that
        is fed, or the function has made it of what is fed.
        """
        tensors = (leaf for leaf in leaves_in(value) if is_a(leaf, torch.Tensor))
        return self.fed.has_container(value) or any(map(self.fed.has_tensor, tensors))

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Test for a tensor from outside that is the same in each call of the program."""
        is_input = self.recorder.is_given(tensor) or self.fed.has_tensor(tensor)
        return self.recorder.is_from_outside(tensor) and not is_input

    def holds_given(self, value: Any) -> bool:
        """Test for a tensor in a value that may be another one in the next call."""
        tensors = (leaf for leaf in leaves_in(value) if is_a(leaf, torch.Tensor))
        return any(not self.is_fixed(one) for one in tensors)

    def check_reach(self, holder: Any, key: Any, value: Any) -> None:
        """Refuse an object that leads to tensors of the trace, as a function that closes over
        them.
        """
        is_plain = type(value) in PLAIN or is_a(value, torch.Tensor)
        if not is_plain and not self.was_there(value) and reaches_tracer(value):
            raise self.refused(holder, key, value)

    def refused(self, holder: Any, key: Any, value: Any) -> UnsupportedCall:
        """Make the error for a value that no program can store."""
        who, fix = "the function", "Return it, and store it outside of the jitted function."
        if self.stepped:
            who = f"a step of {with_article(self.stepped)} from outside"
            fix = "Call the step outside of the jitted function."
        where = f"under {key!r}" if type(key) in (str, int) else f"in {kind_of(holder)}"
        what = (
            f"{who} stores {kind_of(value)} {where}, which a program cannot make anew in each call"
        )
        return UnsupportedCall(what, source=None, fix=fix)
