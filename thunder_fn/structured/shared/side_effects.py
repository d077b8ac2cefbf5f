"""Side effects of bodies in Python: the body of a loop is traced once, whatever the number of
steps, and every branch of a choice is traced.

A body that changes Python objects is traced again, from where the first run has left them; the
branches of a choice in the other order. If the traces differ, a number depends on the side effect.
A memo that is filled once, or a write of the same value, leaves them equal.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from thunder_fn.capture import Captured
from thunder_fn.capture.objects import ABSENT, dict_of, is_a
from thunder_fn.capture.outside.edges import Edge, is_same, look, now
from thunder_fn.capture.outside.frames import Observer, observed_by, observer
from thunder_fn.capture.outside.kinds import SYMBOLIC, is_of_trace
from thunder_fn.capture.outside.moments import Moment
from thunder_fn.capture.outside.reads import seen
from thunder_fn.capture.outside.watch import Watch
from thunder_fn.capture.replaced import host_random
from thunder_fn.capture.scopes import user_source
from thunder_fn.errors import ThunderError, UnsupportedCall, callable_name
from thunder_fn.ir.trace import Op

_SAYS = ("print", "write", "writelines", "flush", "warn", "warn_explicit")
"""Calls of C that change no number."""
_SAYS_IN = ("logging.", "warnings.")
_FIX = (
    "Pass the value as an operand or carry, and return the new one. Objects of Python can be"
    " changed around the call."
)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A place that a body changes, as an edge has it, and its text. If it `is_filled`, it held
    nothing before, as an entry of a memo.
    """

    kind: str
    holder: Any
    key: Any
    path: str
    is_filled: bool = False

    @property
    def entry(self) -> tuple[str, int, Any]:
        """The key of its edge."""
        return self.kind, id(self.holder), self.key


class BodyWatch(Watch):
    """The observer of the bodies of one equation. The observer around it hears of their frames
    too.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        around: Observer | None = None,
        given: Sequence[Any] = (),
    ) -> None:
        super().__init__(functions[0], hears_calls=True)
        self.around = around
        for one in (*functions[1:], *given):
            self.reach(one, callable_name(one))

    def started(self, frame: types.FrameType) -> None:
        """Look at a frame that begins. What it adds to a counter or a list is not added in each
        call: a run of the body stands for any number of them.
        """
        if self.around is not None:
            self.around.started(frame)
        super().started(frame)
        if self.around is not None:
            self.around.added -= self.added
            self.around.changing.update((one, set()) for one in self.changing)

    def ended(self, frame: types.FrameType, value: Any) -> None:
        """Look at a frame that ends."""
        if self.around is not None:
            self.around.ended(frame, value)
        super().ended(frame, value)

    @property
    def first_moment(self) -> Moment:
        """The moment before the bodies ran: a place may have held a number of the trace around."""
        places = {**self.counted, **self.before}.items()
        numbers = {place: old for place, (_, old) in places if is_a(old, SYMBOLIC)}
        return replace(super().first_moment, values=numbers)

    def thread_started(self, name: str) -> None:
        """Note that a thread is started."""
        super().thread_started(name)
        if self.around is not None:
            self.around.thread_started(name)

    def called(self, function: Any, by: types.FrameType | None = None) -> None:
        """Note a call of C, or of what answers anew."""
        super().called(function, by)
        if self.around is not None:
            self.around.called(function, by)

    def called_library(self, module: str, name: str) -> None:
        """Note a call of a library."""
        super().called_library(module, name)
        if self.around is not None and self.around.hears_calls:
            self.around.called_library(module, name)

    def called_custom_op(self, op: Op) -> None:
        """Guard the definition of a custom op."""
        super().called_custom_op(op)
        if self.around is not None:
            self.around.called_custom_op(op)

    def stopped(self) -> None:
        """Note that the body has returned."""
        super().stopped()
        if self.around is not None:
            self.around.stopped()

    @property
    def only_says(self) -> bool:
        """Test whether all that the bodies do to Python objects is to print and to log."""
        found = self.effects.found
        self.effects.found = [
            one for one in found if one not in _SAYS and not one.startswith(_SAYS_IN)
        ]
        return self.is_repeatable

    def changes(self) -> Iterator[Place]:
        """Find the places that hold something else than when the bodies began."""
        for (kind, identity, key), (holder, old) in {**self.counted, **self.before}.items():
            if kind == "content" and identity in self.contents:  # its snapshot tells more
                continue
            new = look(kind, holder, key)
            is_known = is_same(new, old, kind) or seen(new) == seen(old)
            if not is_known and not is_of_trace(new):
                is_filled = old is ABSENT or old is None
                yield Place(kind, holder, key, self.text_of(holder, key), is_filled)
        for one in self.contents.values():
            if not one.is_unchanged and seen(one.container) != seen(one.before):
                is_filled = is_a(one.container, dict) and _has_all(one.container, one.before)
                yield Place(
                    "content", one.container, None, self.text_of(one.container, None), is_filled
                )
        for edge in self.edges.values():
            if not is_same(new := now(edge), edge.value, edge.kind) and not is_of_trace(new):
                is_filled = edge.value is ABSENT or edge.kind == "content"
                yield Place(edge.kind, edge.holder, edge.key, edge.path, is_filled)
        for value, path, progress in self.drawn.values():
            if progress is None or self.has_drawn(value, progress):
                yield Place("iterator", value, None, path)

    def text_of(self, holder: Any, key: Any) -> str:
        """The text of a place, for a message."""
        path = self.path(holder, "")
        if is_a(holder, types.CellType):
            names = (edge.path for edge in self.edges.values() if edge.holder is holder)
            return next(names, "a variable of the function around it")
        if not path:
            owners = (path for one, path in self.outside.values() if dict_of(one) is holder)
            path = next(owners, "")
            return f"{path}.{key}" if path else f"{key}"
        return path if key is None else f"{path}.{key}" if is_a(key, str) else f"{path}[{key!r}]"


def _has_all(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Test whether a dict has every entry that it had."""
    return all(now.get(key, ABSENT) is value for key, value in before.items())


def without_side_effects(
    op: str,
    functions: Sequence[Callable[..., Any]],
    capture: Callable[[Sequence[int]], tuple[Captured, ...]],
    *,
    is_rule: bool = False,
    given: Sequence[Any] = (),
) -> tuple[Captured, ...]:
    """Capture bodies whose numbers depend on no side effect in Python.

    Args:
        capture: captures the functions in the order of these positions.
        is_rule: the functions are a rule, which runs where a derivative asks for it. They leave
            Python's objects as they were.
        given: the functions and objects among the arguments.

    Raises:
        UnsupportedCall: a number depends on how often, or in which order, the bodies run.
    """
    around, before = observer(), host_random.state()
    known = frozenset[Any]() if around is None else frozenset(around.edges)
    first, call = BodyWatch(functions, around, given), _Call(op, functions, is_rule)
    with observed_by(first):
        found = capture(range(len(functions)))
    if (generator := host_random.drawn_since(before)) is not None:
        raise call.refusal(f"draws from `{generator}`", "Draw tensors, as by `torch.rand`.")
    changes = list(first.changes())
    if not changes and first.only_says:
        return found
    second = BodyWatch(functions, given=given)
    _check_independent(call, changes, (first, second), found, capture)
    if is_rule:
        return found
    lasting = changes if call.is_choice else second.changes()
    for place in lasting:
        is_memo = call.is_choice and place.is_filled and place.entry in first.edges
        if not isinstance(around, Watch) or not around.knows(place.entry, place.holder):
            raise call.refusal(f"changes {place.path}, which is no longer what eager code has")
        if not is_memo or place.entry in known:
            error = call.refusal(f"changes {place.path}, which the function reads")
            around.unsettled.setdefault(place.entry, (place.holder, error))
    if not call.is_choice:
        second.put_back()
    return found


@contextmanager
def reads_of(
    function: Callable[..., Any], given: Sequence[Any]
) -> Generator[list[tuple[Edge, Any]]]:
    """Capture a function inside; find what it reads from outside, and the present values."""
    around, found = observer(), list[tuple[Edge, Any]]()
    if around is None:
        yield found
        return
    watch = BodyWatch((function,), around, given)
    with observed_by(watch):
        yield found
    found += [(edge, now(edge)) for edge in watch.edges.values()]


def _check_independent(
    call: _Call,
    changes: Sequence[Place],
    watches: tuple[BodyWatch, BodyWatch],
    found: Sequence[Captured],
    capture: Callable[[Sequence[int]], tuple[Captured, ...]],
) -> None:
    """Capture the bodies again, from where the first run has left Python's objects, and raise
    unless the traces are equal. A rule leaves the objects as they were.
    """
    order, (first, second) = range(len(call.functions)), watches
    if call.is_choice:
        first.put_back()
    try:
        with observed_by(second):
            again = capture(order[::-1] if call.is_choice else order)
        is_settled = all(map(_is_equal, found, again))
    except ThunderError as error:
        raise call.dependent(changes, first) from error
    finally:
        if call.is_rule:
            first.put_back()
    if not is_settled:
        raise call.dependent(changes, first)


def _is_equal(one: Captured, other: Captured) -> bool:
    return one.trace == other.trace and one.trace.constants == other.trace.constants


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The equation and its functions, as errors name them."""

    op: str
    functions: Sequence[Callable[..., Any]]
    is_rule: bool = False

    @property
    def is_choice(self) -> bool:
        """Test for branches, one of which runs."""
        return self.op in ("cond", "switch")

    def dependent(self, changes: Sequence[Place], watch: BodyWatch) -> UnsupportedCall:
        """The error for bodies whose second run gives another trace."""
        names = list(dict.fromkeys(place.path for place in changes))
        names = names or [f"objects by `{one}`" for one in dict.fromkeys(watch.effects.found)]
        what = ", ".join(names[:3]) or "Python objects"
        return self.refusal(f"changes {what}, and computes with the change")

    def refusal(self, what: str, fix: str = _FIX) -> UnsupportedCall:
        """The error, which says why one run of the functions does not tell what others do."""
        names = " or ".join(dict.fromkeys(map(callable_name, self.functions)))
        why = "it is traced once, for all of its runs"
        if self.is_choice or self.is_rule:
            why = "only one branch runs" if self.is_choice else "a rule runs where it is asked for"
        text = f"{self.op}: {names} {what}, but {why}"
        return UnsupportedCall(text, source=user_source(), fix=fix)
