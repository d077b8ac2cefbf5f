"""The history of a variable: the values from which autograd differentiates it, which ops below
autograd do not show.

Values flow from equation to equation, and gradients mostly flow back the same way. They do not
where code runs under `no_grad`, inside a `torch.autograd.Function`, or writes to memory that
another tensor has with a history of its own. There a variable is read through an equation that says
so: `detach`, `straight_through`, `no_grad_write` or `autograd_function`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.casts import check_casts
from thunder_fn.capture.overlaps import check_overlaps, overlaps
from thunder_fn.capture.replaced.autograd_functions import AUTOGRAD_FUNCTION
from thunder_fn.capture.supported import is_wrapped
from thunder_fn.errors import AliasedMutation
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Literal, Op, Source, Var

if TYPE_CHECKING:
    from thunder_fn.capture.recorded import Leaf
    from thunder_fn.capture.recorder import Recorder

Memory = torch.Tensor
"""The functional tensor inside a tracer. Views of a tracer share its storage."""


class Inputs(tuple[Any, ...]):
    """The inputs of a running `torch.autograd.Function`, which alone refers to them: they go
    when it ends.
    """

    ended: Callable[[], Any] | None = None

    def __del__(self) -> None:
        if self.ended is not None:
            self.ended()


class _Link(NamedTuple):
    """Two memories that have the same values, as long as the alias lives.

    `write` is the op that gives one of them what is written to the other. `between` are the aliases
    in whose memory the source lies.
    """

    source: Memory
    alias: weakref.ref[Memory]
    write: Op
    between: tuple[Memory, ...]


def _overlapping_error(source: Source | None) -> AliasedMutation:
    what = (
        "a tensor whose elements share memory (`expand`) was detached, and some of them are written"
        " to"
    )
    fix = "Write to the tensor that is expanded, or to a clone."
    return AliasedMutation(what, source=source, fix=fix)


class History:
    """The histories of a recorder's variables. Without `is_tracked` every variable's is the way its
    value came.

    Two tensors that share memory across a `detach` are two linked memories. A change of one is told
    to the other, whose values are new and whose history is not.
    """

    def __init__(self, recorder: Recorder, *, is_tracked: bool) -> None:
        self.recorder = recorder
        self.is_tracked = is_tracked
        self.base_grad = torch.is_grad_enabled()
        self._off: set[int] = set()
        self._stops: set[int] = set()
        self._before: dict[int, Var] = {}
        self._made_by: dict[int, tuple[str, tuple[Var, ...]]] = {}
        self._views: dict[int, Leaf] = {}
        self._functions: list[str] = []
        self._custom_ops = 0
        self._changing: list[Var | None] | None = None
        self._updating = False
        self.writes = 0
        self._written: set[int] = set()
        self._rebound: set[int] = set()
        self._kept: list[torch.Tensor] = []
        self._links: list[_Link] = []
        self._apart: list[tuple[set[int], list[Callable[[], bool]], str, str, bool]] = []
        self._left: list[tuple[int, Callable[[], bool]]] = []

    @property
    def is_following(self) -> bool:
        """Test whether autograd would follow records made now."""
        return torch.is_grad_enabled() or self._updating or self._custom_ops > 0

    # ---- what is recorded ----

    def bound(self, var: Var) -> None:
        """Note that a tensor made here stands for the variable."""
        if self.is_tracked and not self.is_following:
            self._off.add(var.index)
            if self._functions:
                self._made_by[var.index] = self._functions[-1], ()

    def made_by(self, tracer: torch.Tensor, name: str, given: Sequence[Var]) -> None:
        """Note that a tensor is a result of the call of a `torch.autograd.Function`, whose
        derivative is not recorded, on these.
        """
        var = self.recorder.known(internals.inner_fake(tracer))
        self._off.add(var.index)
        self._made_by[var.index] = name, tuple(given)
        self.recorder.scope.detached.pop(var.index, None)  # PyTorch has read what `ctx` saves

    def recorded(self, leaf: Leaf) -> None:
        """Note a recorded op. While tensors are changed in place, the first one of their types
        has their new values.
        """
        if not self.is_following and ops.is_view(leaf.op):
            self._views.update((var.index, leaf) for var in leaf.outputs)
        before = self._changing
        if before is not None and leaf.output_types == tuple(var and var.type for var in before):
            changes = zip(leaf.outputs, before, strict=True)
            self._before.update((new.index, old) for new, old in changes if old is not None)
            self._changing, self._updating = None, True

    def enter_function(self, name: str, inputs: Inputs) -> None:
        """Enter the call of a `torch.autograd.Function`. It ends when its inputs are let go."""
        if torch.is_grad_enabled():
            self._functions.append(name)
            inputs.ended = self._functions.pop

    def enter_custom_op(self, inputs: Inputs) -> None:
        """Enter the call of a custom op that brought its own derivative: autograd follows what
        it records.
        """
        if torch.is_grad_enabled():
            self._custom_ops += 1
            inputs.ended = self._end_custom_op

    def _end_custom_op(self) -> None:
        self._custom_ops -= 1

    # ---- what is read ----

    def read(self, var: Var) -> Var:
        """Return the variable with the history that grad sees here. One made where gradients are
        off and read where they are on is a constant.
        """
        if (
            var.index not in self._off
            or not self.is_following
            or not self.is_tracked
            or not self.base_grad
        ):
            return var
        recorder = self.recorder
        known = recorder.scope.detached.get(var.index)
        if known is None:
            before, function = self._before.get(var.index), self._made_by.get(var.index)
            if function is not None:
                op, args = AUTOGRAD_FUNCTION, (var, Literal(function[0]), function[1])
            elif before is not None and self._has_history(before):
                op, args = ops.NO_GRAD_WRITE, (var, self._followed(before))
            else:
                op, args = ops.NO_GRAD, (var,)
            (known,) = recorder.emit(op, args, (var.type,), ())
            recorder.scope.detached[var.index] = known
            if op == ops.NO_GRAD:
                self._stops.add(known.index)
        return known

    def is_stopped(self, var: Var) -> bool:
        """Test whether the variable is a constant here, or a view of one: made where gradients are
        off, not changed there.
        """
        before, viewed = self._before.get(var.index), self.recorder.viewed.get(var.index)
        return (
            var.index in self._stops
            or (self.read(var) != var and (before is None or not self._has_history(before)))
            or (viewed is not None and self.is_stopped(viewed))
        )

    def _has_history(self, var: Var) -> bool:
        """Test whether autograd follows the variable, or the value that its memory held before
        it was changed.
        """
        if var.index not in self._off:
            return True
        view, before = self._views.get(var.index), self._before.get(var.index)
        source = view.args[0] if view is not None else before
        return isinstance(source, Var) and self._has_history(source)

    def _followed(self, var: Var) -> Var:
        """Return the variable with the history of its memory, though the view was taken where
        gradients are off.
        """
        leaf = self._views.get(var.index)
        if leaf is None or not isinstance(leaf.args[0], Var):
            return self.read(var)
        viewed = self._followed(leaf.args[0])
        if viewed == leaf.args[0]:
            return var
        args = (viewed, *leaf.args[1:])
        again = self.recorder.emit(leaf.op, args, leaf.output_types, leaf.kwargs)
        return again[leaf.outputs.index(var)]

    # ---- what is changed in place ----

    def check(
        self,
        func: Any,
        tensors: list[torch.Tensor],
        others: list[torch.Tensor],
        args: Any,
        kwargs: Any,
    ) -> None:
        """Refuse a write whose result depends on the order in which the elements are written, or
        that eager mode does not cast as functionalization does.
        """
        recorder = self.recorder
        known = recorder.given, self.linked, self._laid_out
        check_overlaps(func, tensors, others, args, *known, recorder.source)
        check_casts(func, tensors, args, kwargs, recorder.source)

    def _laid_out(
        self, one: torch.Tensor, other: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Two tensors as they lie in one memory; None if they do not.

        Two memories that are linked as wholes, as those of a tensor and its `detach`, count as one.
        """
        memories = internals.memory_in(one), internals.memory_in(other)
        first, second = map(internals.storage_id, memories)
        if first == second:
            return one, other
        places = self.linked(first, only_wholes=True)
        if second not in places:
            return None
        aliases = (link.alias() for link in self._links)
        whole = next(
            alias
            for alias in aliases
            if alias is not None
            and internals.is_whole(alias)
            and internals.storage_id(alias) in places
        )
        lies = [internals.laid_out_as([memory], whole)[-1] for memory in memories]
        return lies[0], lies[1]

    @contextmanager
    def changing(self, tensors: list[torch.Tensor], others: list[torch.Tensor]) -> Generator[None]:
        """Enter around an op that changes tensors in place. Where gradients are off, the tensors
        keep their history.

        The first op recorded that has results of their types computes their new values; what comes
        after it brings views up to date.
        """
        var_of = self.recorder.var_of
        self.writes += 1
        self.check_not_parted(tensors)
        self._check_not_left(tensors)
        self.bring_up_to_date((*tensors, *others))
        whole: list[tuple[torch.Tensor, Var | None]] = []
        if not torch.is_grad_enabled():
            before = [var_of(tensor) for tensor in tensors]
            whole = [
                (base, var_of(base))
                for tensor in tensors
                if (base := internals.base_of(tensor)) is not None
            ]
            self._changing = before
        try:
            yield
            changed = [var_of(base) for base, _ in whole]
        finally:
            self._changing, self._updating = None, False
        for new, (_, old) in zip(changed, whole, strict=True):
            if new is not None and old is not None and new != old:
                self._off.add(new.index)
                self._before[new.index] = old
        for tensor in tensors:
            memory = internals.memory_in(tensor)
            self._written.add(internals.storage_id(memory))
            with self._following():
                self._tell(memory)

    def bring_up_to_date(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give views their new values, with their history, also where gradients are off."""
        if self._before or not torch.is_grad_enabled():
            with self._following():
                for tensor in tensors:
                    internals.inner_fake(tensor)

    @contextmanager
    def _following(self) -> Generator[None]:
        """Let autograd follow what is recorded inside, though gradients are off."""
        before, self._updating = self._updating, True
        try:
            yield
        finally:
            self._updating = before

    def viewed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the base for a view that is taken where gradients are off: such a view has no
        history.

        If the memory was changed before, PyTorch makes views of it again from its present value,
        and they would have a history.
        """
        memory = internals.memory_in(tensor)
        if internals.storage_id(memory) not in self._written:
            return tensor
        value = internals.inner_fake(tensor)
        var = self.recorder.known(value)
        if not self._has_history(var):
            return tensor
        alias = internals.functionalize(
            self._fake(self._stopped(var, ops.NO_GRAD), value), self.recorder.functional_mode
        )
        self._link(memory, internals.memory_in(alias), ops.NO_GRAD_WRITE)
        self._kept.append(alias)
        return alias

    def detached(self, source: torch.Tensor, alias: torch.Tensor) -> None:
        """Note `alias = source.detach()` of the function. Detaches by autograd itself are no new
        history.
        """
        if not self.recorder.detaching:
            return
        self.recorder.selections.keep(source)
        self._link(
            internals.memory_in(source), internals.give_memory(alias, internals.inner_fake(alias))
        )

    def reinterpreted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in place of this one, of which a view of another dtype is taken or
        which is such a view: to autograd the two have histories of their own.
        """
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        with self.recorder.detaches(), self.recorder.functional_mode:
            return torch.ops.aten.detach.default(tensor)

    def share(self, view: torch.Tensor, part: torch.Tensor) -> None:
        """Give `part` the memory of `view` and its history."""
        self._link(internals.memory_in(view), internals.memory_in(part))

    def detach(self, tracer: torch.Tensor) -> None:
        """Note `tracer.detach_()`: views that were taken before keep their history."""
        before, value = internals.memory_in(tracer), internals.inner_fake(tracer)
        fake = self._fake(self._stopped(self.recorder.known(value)), value)
        self._link(before, internals.give_memory(tracer, fake))

    def leave(self, tracer: torch.Tensor) -> None:
        """Note that `tracer.detach_()` is about to take a tracer out of its memory."""
        watch = internals.memory_watch(internals.memory_in(tracer))
        self._left.append((internals.memory_id(tracer), watch))

    def _check_not_left(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise if one of the tensors was detached in place and views of it that autograd follows
        live. In eager mode they lose their history with the write, though they require grad.
        """
        left = {memory for memory, is_alive in self._left if is_alive()}
        if left:
            left &= set[int]().union(*(self.linked(internals.memory_id(one)) for one in tensors))
        if not any(
            internals.memory_id(one) in left and one.requires_grad
            for one in (self.recorder.living() if left else ())
            if self.is_own(one) and not is_wrapped(one)
        ):
            return
        what = (
            "a tensor of which views were taken is detached in place (`detach_`), and then one of"
            " them is written to: autograd forgets how the views were computed"
        )
        fix = "Take the views after `detach_`, or write to a clone (`x = x.detach().clone()`)."
        raise AliasedMutation(what, source=self.recorder.source, fix=fix)

    def set_data(self, tracer: torch.Tensor, value: torch.Tensor) -> None:
        """Note `tracer.data = value`: the tracer gets the memory of the value and keeps its own
        history.
        """
        known = self.recorder.known
        with self._following():
            history = self.read(known(internals.inner_fake(tracer)))
        fake = self._with_history(internals.inner_fake(value), history)
        self._link(internals.memory_in(value), internals.give_memory(tracer, fake))
        self._rebound.add(id(tracer))

    def is_rebound(self, tracer: torch.Tensor) -> bool:
        """Tell whether a tracer from outside has been given other memory."""
        return id(tracer) in self._rebound

    def part(
        self,
        source: torch.Tensor,
        result: torch.Tensor,
        name: str,
        *,
        are_results: bool = False,
        is_linked: bool = False,
    ) -> None:
        """Forbid changes of a result and its source, or of two results, while both live. They share
        memory in eager mode, and not in the trace. If they are linked, forbid only changes that
        autograd would follow.
        """
        memories = [internals.memory_in(source), internals.memory_in(result)]
        ids = {internals.storage_id(memory) for memory in memories}
        other = "another one" if are_results else f"what {name} reads"
        watches = [internals.memory_watch(memory) for memory in memories]
        self._apart.append((ids, watches, name, other, is_linked))

    def check_not_parted(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise if one of the tensors shares memory with another in eager mode but not here. Raise
        also if autograd does not follow a change of both.
        """
        if not self._apart:
            return
        self._apart = [one for one in self._apart if all(is_alive() for is_alive in one[1])]
        for tensor in tensors:
            memories = self.linked(internals.memory_id(tensor))
            for ids, _, name, other, is_linked in self._apart:
                if ids & memories and not (is_linked and not torch.is_grad_enabled()):
                    what = (
                        f"a result of {name} shares memory with {other}, and one of them is changed"
                        " in place"
                    )
                    fix = f"Return a clone from {name}, or clone its result."
                    raise AliasedMutation(what, source=self.recorder.source, fix=fix)

    def is_parted(self, tensor: torch.Tensor) -> bool:
        """Test whether the tensor shares memory with another one in eager mode, and not here."""
        memory = internals.memory_id(tensor)
        return any(memory in ids for ids, *_ in self._apart)

    def is_shown(self, source: torch.Tensor, value: Any) -> bool:
        """Tell whether a value is a tracer that shows the memory of a source, or has its values."""
        if not isinstance(value, internals.Tracer):
            return False
        place = internals.memory_id(value)
        return place in self.linked(internals.memory_id(source))

    def is_given(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tracer stands for an argument or for a tensor from outside."""
        return any(tensor is one for one in self.recorder.given)

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a tracer of this capture, and of none around it."""
        return isinstance(tensor, internals.Tracer) and self.recorder.owns(tensor)

    def linked(self, memory: int, *, only_wholes: bool = False) -> set[int]:
        """The memories, by id, that have the same values as this one; or those alone of which no
        part is linked.
        """
        found, pending = set[int](), [memory]
        pairs = [
            (internals.storage_id(source), internals.storage_id(alias))
            for source, reference, *_ in self._links
            if (alias := reference()) is not None
            and not (only_wholes and not all(map(internals.is_whole, (source, alias))))
        ]
        while pending:
            one = pending.pop()
            found.add(one)
            pending += [
                b for pair in pairs for a, b in (pair, pair[::-1]) if a == one and b not in found
            ]
        return found

    def views_to(self, result: torch.Tensor, source: torch.Tensor) -> list[Memory] | None:
        """The memories whose views, one of another, lead to a result from the memory of a source,
        over the links between; None where a link leads to a part of a memory.
        """
        at = internals.storage_id
        goal = at(internals.memory_in(source))
        ways, seen = [[internals.memory_in(result)]], {at(internals.memory_in(result))}
        for way in ways:
            if at(way[0]) == goal:
                return way
            for link in self._links:
                alias = link.alias()
                for here, there in ((alias, link.source), (link.source, alias)):
                    if here is None or there is None or at(there) in seen:
                        continue
                    if at(here) == at(way[0]) and internals.is_whole(here):
                        seen.add(at(there))
                        ways.append([there, *way])
        return None

    def others(self, memory: Memory) -> bool:
        """Test whether another memory that lives has the same values."""
        self._links = [link for link in self._links if link.alias() is not None]
        own = internals.storage_id(memory)
        return self.linked(own) != {own}

    def _link(self, source: Memory, alias: Memory, write: Op = ops.STRAIGHT_THROUGH) -> None:
        """Link two memories, which have the same values from now on, as long as the alias lives."""
        self._links = [link for link in self._links if link.alias() is not None]
        place = internals.storage_id(source)
        others = (link.alias() for link in self._links)
        between = (one for one in others if one is not None and internals.storage_id(one) == place)
        self._links.append(_Link(source, weakref.ref(alias), write, tuple(between)))

    def _tell(self, changed: Memory) -> None:
        """Give the new values of a changed memory to the memories linked to it."""
        pending, told = [changed], set[int]()
        while pending:
            memory = internals.storage_id(pending.pop())
            told.add(memory)
            for source, reference, write, _ in self._links:
                alias = reference()
                for here, there in ((source, alias), (alias, source)):
                    if here is None or there is None or internals.storage_id(here) != memory:
                        continue
                    if internals.storage_id(there) not in told:
                        if here is alias and overlaps(here):
                            raise _overlapping_error(self.recorder.source)
                        history = self._followed(self.recorder.known(internals.read_memory(there)))
                        internals.write_memory(
                            there, self._with_history(internals.read_memory(here), history, write)
                        )
                        self._written.add(internals.storage_id(there))
                        pending.append(there)

    def _with_history(
        self, value: torch.Tensor, history: Var, write: Op = ops.STRAIGHT_THROUGH
    ) -> torch.Tensor:
        """Return a fake tensor of a value with the history of another variable."""
        args = self.recorder.known(value), history
        (var,) = self.recorder.emit(write, args, (args[0].type,), ())
        return self._fake(var, value)

    def _stopped(self, var: Var, op: Op = ops.STOP_GRADIENT) -> Var:
        (stopped,) = self.recorder.emit(op, (var,), (var.type,), ())
        return stopped

    def _fake(self, var: Var, like: torch.Tensor) -> torch.Tensor:
        fake = internals.fake_as(self.recorder.mode, like)
        self.recorder.know(fake, var)
        return fake

    def forget(self) -> None:
        """Forget everything at the end of the capture."""
        self._links.clear()
        self._kept.clear()
        self._apart.clear()
        self._left.clear()
        del self.recorder
