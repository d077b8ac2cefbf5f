"""`x[i]` with a scalar tensor i, and other results that lie in the memory of x in eager mode.

Eager PyTorch reads the number and takes a view. A trace has no number to read, so it gathers a
copy. If the copy is written to, its new value is put back into x. If x is written to, the copy is
gathered again before it is next read. `x[i] += 1` does both by itself, and nothing is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.supported import is_wrapped
from thunder_fn.errors import AliasedMutation
from thunder_fn.ir.trace import Var

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

Tensor = torch.Tensor


@dataclass(slots=True, eq=False)
class _Selection:
    """A copy, and the view of x that it is of; the variables that both had when they last agreed.

    `take` makes the copy again, `put` writes its value to the view. `index`: as the user wrote it.
    `written`: the gradient mode in which the copy was written to, if x does not have that yet.
    `level`: of the torch.func transform inside which it was made. `history`: the copy's node of
    autograd's graph when both last agreed; a write by `detach()` or `.data` leaves it.
    """

    copy: Callable[[], Tensor | None]
    view: Tensor
    take: Callable[[], Tensor]
    put: Callable[[Tensor], Any]
    index: Any
    of_copy: Var | None
    of_view: Var | None
    level: int
    history: Any = None
    kept: Tensor | None = None
    written: bool | None = None
    is_stale: bool = False


class Selections:
    """The selections of a recorder whose copies live."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._all: list[_Selection] = []
        self._seen = 0
        self._pending = False

    def add(
        self,
        view: Tensor,
        take: Callable[[], Tensor],
        put: Callable[[Tensor], Any],
        index: Any = None,
    ) -> Tensor:
        """The copy that `take` makes of the view, which follows it as the view follows the copy."""
        copy = take()
        if all(internals.is_living_tracer(internals.innermost(one)) for one in (copy, view)):
            level = internals.torch_func_level()
            reference, known = internals.weak_tensor(copy), (self._var_of(copy), self._var_of(view))
            history = _history(copy)
            self._all.append(_Selection(reference, view, take, put, index, *known, level, history))
        return copy

    def keep(self, tensor: Tensor) -> None:
        """Keep a copy, since an alias of it shares its memory and nothing else of it."""
        for one in self._all:
            copy = one.copy()
            if copy is not None and _have_one_memory(copy, tensor):
                one.kept = copy

    def before(self, args: Any, kwargs: Any, index: Any = None) -> None:
        """Bring up to date what a function is about to read. `index`: it is `x[index] = value`."""
        if not self._pending:
            return
        for one in self._all:
            copy = one.copy()
            is_put = one.written is not None and index is not None and args[2] is copy
            if is_put and _is_same(one.index, index):
                one.of_copy, one.of_view, one.written = self._var_of(args[2]), None, None
        self._write_back()
        leaves = pytree.flatten((args, kwargs))[0]
        read = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for one in self._all:
            copy = one.copy()
            if (
                one.is_stale
                and copy is not None
                and any(_have_one_memory(copy, leaf) for leaf in read)
            ):
                self._gather(one, copy)

    def after(self) -> None:
        """Look what a function has written to. Python itself writes the result of `x[i] += 1`."""
        if not self._all or self._seen == self._recorder.history.writes:
            return
        self._seen = self._recorder.history.writes
        level = internals.torch_func_level()
        living = (one for one in self._all if one.copy() is not None)
        self._all = [one for one in living if one.level <= level]
        self._look()
        if level:  # it may end without a further function
            self._write_back()

    def settle(self) -> None:
        """Bring everything up to date, before others than torch functions read it."""
        if self._pending:
            self._write_back()
            for one in self._all:
                copy = one.copy()
                if one.is_stale and copy is not None and not one.level:
                    self._gather(one, copy)
            self._pending = False

    def forget(self) -> None:
        """Forget everything at the end of the capture."""
        self._all.clear()
        del self._recorder

    def _var_of(self, tensor: Tensor) -> Var | None:
        return self._recorder.var_of(internals.innermost(tensor))

    def _look(self) -> None:
        var_of = self._var_of
        for one in self._all:
            copy = one.copy()
            if copy is None:
                continue
            new_copy, new_view = var_of(copy), var_of(one.view)
            if one.of_view is None:  # `x[i] = copy` was written
                one.of_copy, one.of_view, one.history = new_copy, new_view, _history(copy)
            elif new_copy != one.of_copy:
                one.of_copy, one.kept = new_copy, copy
                one.written = torch.is_grad_enabled() and _history(copy) is not one.history
            elif new_view != one.of_view:
                one.of_view, one.is_stale = new_view, True
            self._pending = self._pending or one.is_stale or one.written is not None

    def _write_back(self) -> None:
        """Put copies that were written to back; a copy may be of a copy."""
        while (
            one := next((one for one in self._all if one.written is not None), None)
        ) is not None:
            copy, mode = one.copy(), one.written
            one.written = None
            if copy is None:
                continue
            with torch.set_grad_enabled(bool(mode)):
                one.put(copy)
            one.of_view = None
            self._look()
            one.kept = None

    def _gather(self, one: _Selection, copy: Tensor) -> None:
        if one.level:
            what = "`x[i]` with a tensor i is read after x was written to, inside torch.func"
            fix = "Read `x[i]` again after the write, or clone it before."
            raise AliasedMutation(what, source=self._recorder.source, fix=fix)
        copy.copy_(one.take())
        one.is_stale = False
        one.of_view = None
        self._look()


def _history(copy: Tensor) -> Any:
    """The node of autograd's graph behind a copy, of its base if it is a view. Inside torch.func
    each answer differs: there every write counts as one with a history.
    """
    if is_wrapped(copy):
        return object()
    base = internals.base_of(copy)
    return internals.node_of(copy if base is None else base)


def _have_one_memory(copy: Tensor, other: Tensor) -> bool:
    tracers = [*map(internals.innermost, (copy, other))]
    return all(map(internals.is_living_tracer, tracers)) and internals.have_one_memory(
        tracers[0], tracers[1]
    )


def _is_same(index: Any, other: Any) -> bool:
    """Test whether two indices are one, by the objects that they consist of."""
    parts, others = (pytree.as_tuple(one) for one in (index, other))
    return len(parts) == len(others) and all(
        a is b or (isinstance(a, (int, slice)) and type(a) is type(b) and a == b)
        for a, b in zip(parts, others, strict=True)
    )
