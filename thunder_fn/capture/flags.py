"""`requires_grad` of tensors from outside, as a traced function sets it.

A flag that is set before anything is computed from the tensor holds from the beginning of the
program (`MustBegin`). Any other is stored at its end, as an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.places import tensor_at
from thunder_fn.capture.recorded import leaves_of
from thunder_fn.errors import UnsupportedCall, with_article
from thunder_fn.ir.splitting import dependent
from thunder_fn.ir.trace import Atom, Source, Trace, Type, Var, cut

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

Flag = tuple[int | torch.Tensor, bool]
"""An input of the trace, by index, or a closed-over tensor, and whether it requires grad."""


class MustBegin(BaseException):
    """Signal that a capture has to begin again, with these flags set on tensors from outside."""

    def __init__(self, flags: Sequence[tuple[torch.Tensor, bool]]) -> None:
        super().__init__(flags)
        self.found = {"flags": tuple(flags)}


@contextmanager
def required(
    flags: Iterable[tuple[torch.Tensor, bool]], unless: tuple[type[Exception], ...] = ()
) -> Generator[None]:
    """Set flags on tensors, and give them the old ones back at the end, `unless` an error of these
    classes is raised.
    """
    before = [(tensor, tensor.requires_grad) for tensor, _ in flags]
    try:
        for tensor, flag in flags:
            tensor.requires_grad_(flag)
        yield
    except unless:
        before.clear()
        raise
    finally:
        for tensor, flag in before:
            tensor.requires_grad_(flag)


def tensors_of(
    flags: Sequence[Flag], tensors: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, bool]]:
    """The tensors of a call, or closed over, that the flags are about."""
    return [(tensor_at(one, tensors), flag) for one, flag in flags]


@dataclass(slots=True, eq=False)
class Flags:
    """The flags that one recorder knows: of tracers as they were `given`, by identity, each with
    its first variable.

    `early` and `late` are tracers that required no grad until the function said so. It said so
    before anything was computed from the `early` ones, and afterwards for the `late` ones. `off`
    are those that require no grad any more, with their variables, and what is computed with
    instead: a constant for autograd. `begun` are the tensors from outside that require grad from
    the beginning because the function will say so. `said` has the flags that it has set. Both are
    by identity.
    """

    recorder: Recorder
    given: dict[int, tuple[bool, Var]] = field(default_factory=dict)
    early: set[int] = field(default_factory=set[int])
    late: set[int] = field(default_factory=set[int])
    off: dict[int, tuple[torch.Tensor, Var, Atom]] = field(default_factory=dict)
    begun: dict[int, torch.Tensor] = field(default_factory=dict)
    said: dict[int, bool] = field(default_factory=dict[int, bool])

    def take(self, tracer: torch.Tensor, var: Var) -> None:
        """Note the flag of a tensor from outside."""
        with internals.no_torch_function():
            self.given[id(tracer)] = tracer.requires_grad, var

    def set(self, tracer: torch.Tensor, call: Callable[[], Any]) -> Any:
        """Call a function of PyTorch that sets the flag of a tracer."""
        is_silent = self.answer(tracer) is False
        with internals.no_torch_function():
            before = tracer.requires_grad
            result = call()
            now = tracer.requires_grad
        if id(tracer) in self.given:
            self.said[id(self.recorder.outside_of(tracer))] = now
            if now and (not before or is_silent):
                self._turn_on(tracer)
            elif before and not now:
                self._turn_off(tracer)
        return result

    def answer(self, tensor: torch.Tensor) -> bool | None:
        """The flag that a tensor from outside has now, if its tracer has another: that of one which
        `begun` before the function says so, and of a view, which requires grad when its base does.
        """
        outside, outer = self.recorder.outside_of(tensor), self.recorder.outer
        if (self.begun or self.said) and id(outside) not in self.said:
            places = [id(one) for one in (outside, internals.base_of(outside))]
            if any(self.said.get(one) for one in places):
                return True
            if any(one in self.begun for one in places):
                return False
        return None if outer is None else outer.flags.answer(outside)

    def _turn_off(self, tracer: torch.Tensor) -> None:
        var = self.recorder.var_of(tracer)
        if var is not None:
            constant = self.recorder.stopped(var)
            self.off[id(tracer)] = tracer, var, constant
            self._compute_with(tracer, constant)

    def _turn_on(self, tracer: torch.Tensor) -> None:
        var = self.recorder.var_of(tracer)
        _, before, constant = self.off.pop(id(tracer), (tracer, None, None))
        if before is not None and var == constant:
            self._compute_with(tracer, before)
        elif before is None and not self._is_used(tracer):
            self.early.add(id(tracer))
        else:
            self.late.add(id(tracer))

    def _is_used(self, tracer: torch.Tensor) -> bool:
        first = self.given[id(tracer)][1]
        leaves = (leaf for leaf, _ in leaves_of(self.recorder.root))
        return self.recorder.var_of(tracer) != first or any(first in one.operands for one in leaves)

    def _compute_with(self, tracer: torch.Tensor, atom: Atom) -> None:
        assert isinstance(atom, Var), "a tensor from outside is no literal"
        self.recorder.know(internals.inner_fake(tracer), atom)

    def put_back(self) -> None:
        """Let tracers stand for their variables again, at the end."""
        for tracer, var, constant in self.off.values():
            if self.recorder.var_of(tracer) == constant:
                self._compute_with(tracer, var)

    def settle(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], source: Source | None
    ) -> list[tuple[torch.Tensor, bool]]:
        """Find the flags that the program stores at its end: of leaves. A tensor that is
        differentiated is no leaf; one that was written to has the history of the write.

        Raises:
            MustBegin: some hold from the beginning.
            UnsupportedCall: the flags of the function's tensors cannot be set.
        """
        with internals.no_torch_function():
            found = [
                (tensor, tracer.requires_grad)
                for tensor, tracer in pairs
                if internals.is_leaf(tracer) and tracer.requires_grad != self.given[id(tracer)][0]
            ]
        can_set = self.recorder.kept is not None and self.recorder.outer is None
        if found and not can_set:
            fix = (
                "Do it outside of the function; inside, take `x.detach().requires_grad_()`, which"
                " is another tensor."
            )
            what = _setting(self.recorder.type_of(found[0][0]), found[0][1])
            raise UnsupportedCall(what, source=source, fix=fix)
        early = [
            tensor
            for tensor, tracer in pairs
            if id(tracer) in self.early and id(tensor) not in self.begun
        ]
        if early and can_set:
            self._check_views(early, pairs, source)
            raise MustBegin([(tensor, True) for tensor in (*self.begun.values(), *early)])
        return found

    def _check_views(
        self,
        early: Sequence[torch.Tensor],
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        source: Source | None,
    ) -> None:
        """Refuse writes to views from outside of tensors that are to require grad: eager PyTorch
        gives a view the history of its base if it is read after a write.
        """
        for view, tracer in pairs:
            base = next((one for one in early if one is internals.base_of(view)), None)
            if base is not None and self.recorder.var_of(tracer) != self.given[id(tracer)][1]:
                what = f"{_setting(self.recorder.type_of(base), True)}, and writes to a view of it"
                fix = "Do one of these outside of the function, or write to a view that it makes."
                raise UnsupportedCall(what, source=source, fix=fix)

    def forget(self) -> None:
        """Let go of everything."""
        self.given.clear()
        self.early.clear()
        self.late.clear()
        self.off.clear()
        self.said.clear()
        self.begun = {}
        del self.recorder


def check_late(
    trace: Trace,
    late: Iterable[int | torch.Tensor],
    results: Sequence[int],
    source: Source | None,
) -> None:
    """Refuse results that may require grad and depend on a tensor that requires grad only after a
    use: the program has one history of it.

    Raises:
        UnsupportedCall: one of these results does.
    """
    inputs = (*trace.inputs, *(constant.var for constant in trace.constants))
    places = {id(one.tensor): place for place, one in enumerate(trace.constants, len(trace.inputs))}
    whole = cut(trace, inputs=inputs, constants=())
    for one in late:
        place = one if isinstance(one, int) else places.get(id(one))
        if place is None:
            continue
        found = dependent(whole, tuple(i == place for i in range(len(inputs))))
        outputs = (trace.outputs[result] for result in results)
        if any(isinstance(atom, Var) and atom.index in found for atom in outputs):
            what = (
                f"{_setting(inputs[place].type, True)} after it was used, and returns or stores"
                " what depends on it and may require grad"
            )
            fix = "Set it before the tensor is used, or detach the result."
            raise UnsupportedCall(what, source=source, fix=fix)


def _setting(type: Type, flag: bool) -> str:
    return (
        f"the function sets requires_grad to {flag}, by Tensor.requires_grad_(), on"
        f" {with_article(type)} from outside"
    )
