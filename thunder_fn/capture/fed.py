"""The places outside whose values are inputs of a trace, while the function is traced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.numbers.arguments import is_number
from thunder_fn.capture.places import (
    Entry,
    Feed,
    Part,
    Path,
    Step,
    held_at,
    put,
)
from thunder_fn.capture.renewed import Parts, parts_of, state_in
from thunder_fn.ir.symbols import number_symbol
from thunder_fn.ir.trace import Expr

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

_FIRST = 1000
"""The number of the first symbol of a feed. Those of arguments come before."""


class MustFeed(BaseException):
    """Signal that a capture has to begin again, with the numbers of these places as inputs."""

    def __init__(self, places: frozenset[Entry]) -> None:
        super().__init__(places)
        self.found = {"places": places}


@dataclass(slots=True, eq=False)
class Fed:
    """The inputs of one trace that its program reads from places outside in each call.

    Args:
        wanted: places whose numbers have to be fed, from a capture before this one.
    """

    recorder: Recorder
    wanted: frozenset[Entry] = frozenset()
    numbers: list[Feed] = field(default_factory=list[Feed])
    tensors: list[tuple[Feed, torch.Tensor]] = field(
        default_factory=list[tuple[Feed, torch.Tensor]]
    )
    given: dict[Entry, Any] = field(default_factory=dict[Entry, Any])
    """The values in the places while the function runs: tensors, and symbols for numbers."""
    states: dict[Entry, Parts] = field(default_factory=dict[Entry, Parts])
    """The containers of tensors in such places."""
    items: dict[int, tuple[torch.Tensor, Any]] = field(
        default_factory=dict[int, tuple[torch.Tensor, Any]]
    )

    def feed(self, container: Any, key: Any, value: Any) -> None:
        """Make inputs of the trace of what a place holds: a tensor, a number, the numbers of a
        tuple or list, or the tensors of a container.
        """
        place = id(container), key
        if isinstance(value, torch.Tensor) and not self.has_tensor(value):
            self.tensors.append((Feed(container, key), value))
            self.given[place] = value
        state = state_in(value)
        if state is not None and not any(map(self.has_tensor, state.tensors)):
            self.tensors += [
                (Feed(container, key, path=path), leaf)
                for path, leaf in state
                if isinstance(leaf, torch.Tensor)
            ]
            self._feed_state(container, key, state)
        if type(value) in (tuple, list) and all(map(is_number, value)):
            parts = enumerate(value)
            kind: Any = type(value)
            symbols = kind(self._symbol(container, key, (Step(i),), part) for i, part in parts)
            self.given[place] = kind(symbols)
            put(container, key, symbols)
        elif is_number(value):
            self.given[place] = symbol = self._symbol(container, key, (), value)
            put(container, key, symbol)

    def _feed_state(self, container: Any, key: Any, state: Parts) -> None:
        """Note a container whose parts are inputs of the trace. One with numbers that are, too, is
        another one while the function runs.
        """
        place = id(container), key
        numbers = {
            path: self._symbol(container, key, path, leaf)
            for path, leaf in state
            if (id(container), Part(key, path)) in self.wanted
        }
        if numbers:
            put(container, key, state.with_numbers(numbers))
        self.given[place] = held_at(container, key)
        self.states[place] = parts_of(self.given[place])

    def has_tensor(self, value: Any) -> bool:
        """Test whether a tensor is an input of the trace, read from its place in each call."""
        return any(tensor is value for _, tensor in self.tensors)

    def has_container(self, value: Any) -> bool:
        """Test for a container that was read from a place that is fed."""
        return any(value is one for state in self.states.values() for one in state.containers)

    def _symbol(
        self, container: Any, key: Any, path: Path, value: Any, *, is_item: bool = False
    ) -> Any:
        symbol = number_symbol(_FIRST + len(self.numbers), value)
        self.numbers.append(Feed(container, key, symbol, path, is_item))
        return self.recorder.number(Expr(symbol))

    def feed_item(self, container: Any, key: Any, tensor: torch.Tensor) -> None:
        """Make the number in a tensor an input of the trace."""
        with internals.isolated(), internals.no_torch_function():
            number = tensor.item()
        if is_number(number):
            symbol = self._symbol(container, key, (), number, is_item=True)
            self.items[id(tensor)] = tensor, symbol

    def item(self, tensor: torch.Tensor) -> Any:
        """The number in a tensor that was there before the call, if it is fed; else None."""
        known = self.items.get(id(tensor))
        return None if known is None else known[1]


def is_scalar(value: Any) -> bool:
    """Test for a tensor whose number a symbol can stand for."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex()
