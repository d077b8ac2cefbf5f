"""Hooks on tensors: equations of the identity, whose derivative calls the hook.

A hook gets the whole gradient of a tensor, from uses before it is registered too. So its equation
is recorded apart. When the trace is made, it goes to the first use of the tensor, and all uses take
its result. Of two hooks the first that was registered is called first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from thunder_fn.capture.recorded import Leaf, Scope, leaves_of
from thunder_fn.errors import UnsupportedCall
from thunder_fn.ir.equations import bound, operands_in
from thunder_fn.ir.trace import Arg, Atom, Source, Var, map_arg, map_args, vars_in

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Hooked:
    """A variable with a hook, and the identity of it that was recorded, with its result. A hook
    that was removed is not `is_there`.
    """

    var: Var
    items: tuple[Leaf | Scope, ...]
    result: Var
    is_there: Callable[[], bool]
    source: Source | None


def with_hooks(recorder: Recorder, outputs: tuple[Atom, ...]) -> tuple[Atom, ...]:
    """Put the equations of hooks where they belong; return the outputs with their results.

    Raises:
        UnsupportedCall: a hook reads a tensor that is computed after the first use of its tensor.
    """
    for hooked in recorder.hooked:
        if hooked.is_there():
            outputs = _with_hook(recorder, hooked, outputs)
    return outputs


def _with_hook(recorder: Recorder, hooked: Hooked, outputs: tuple[Atom, ...]) -> tuple[Atom, ...]:
    own = [leaf for item in hooked.items for leaf in _leaves(item)]
    made = {var.index for var in bound(own)}
    insertion = _Insertion(hooked, {var.index for var in operands_in(own)} - made)
    insertion.walk(recorder.root)
    if not insertion.is_done:
        recorder.root.items += hooked.items
    return tuple(map_arg(insertion.renamed, atom) for atom in outputs)


@dataclass(slots=True)
class _Insertion:
    """A walk that puts a hook's equations before the first use of its variable, and renames the
    uses. `read` are the variables that the equations use.
    """

    hooked: Hooked
    read: set[int]
    is_done: bool = False

    def renamed(self, var: Var) -> Var:
        """The variable that takes the place of one."""
        return self.hooked.result if var.index == self.hooked.var.index else var

    def walk(self, scope: Scope) -> None:
        """Walk over what is in a scope, in order."""
        place = 0
        while place < len(scope.items):
            item = scope.items[place]
            if not self.is_done and self._is_first(item):
                scope.items[place:place] = self.hooked.items
                self.is_done, place = True, place + len(self.hooked.items)
            if isinstance(item, Scope):
                self._walk_inside(item)
            elif self.is_done:
                self._check(item)
                args, kwargs = map_args(self.renamed, item)
                if (args, kwargs) != (item.args, item.kwargs):
                    scope.items[place] = dataclasses.replace(item, args=args, kwargs=kwargs)
            place += 1

    def _is_first(self, item: Leaf | Scope) -> bool:
        """Test for the first use. A scope that binds the variable too has the place inside."""
        var, leaves = self.hooked.var.index, list(_leaves(item))
        if any(one.index == var for one in bound(leaves)):
            return False
        called = () if isinstance(item, Leaf) else vars_in(_arguments(item))
        return any(one.index == var for one in (*called, *operands_in(leaves)))

    def _walk_inside(self, scope: Scope) -> None:
        if self.is_done:
            rename = partial(map_arg, self.renamed)
            if scope.args is not None:
                scope.args = tuple(map(rename, scope.args))
            if scope.kwargs is not None:
                scope.kwargs = tuple((key, rename(value)) for key, value in scope.kwargs)
        self.walk(scope)
        if self.is_done and scope.results is not None:
            scope.results = tuple(map(self.renamed, scope.results))

    def _check(self, leaf: Leaf) -> None:
        if not self.read.isdisjoint(var.index for var in leaf.outputs):
            raise UnsupportedCall(
                "a hook on a tensor reads another one that is computed after the first use of the"
                " tensor",
                source=self.hooked.source,
                fix="Compute what it reads before the tensor is used.",
            )


def _leaves(item: Leaf | Scope) -> Iterator[Leaf]:
    if isinstance(item, Leaf):
        yield item
    else:
        yield from (leaf for leaf, _ in leaves_of(item))


def _arguments(scope: Scope) -> tuple[Arg, ...]:
    """The arguments of the call that a scope is."""
    return (*(scope.args or ()), *(value for _, value in scope.kwargs or ()))
