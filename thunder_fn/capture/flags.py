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
    return [(tensors[one] if isinstance(one, int) else one, flag) for one, flag in flags]


@dataclass(slots=True, eq=False)
class Flags:
    """The flags that one recorder knows: of tracers as they were `given`, by identity, each with
    its first variable.

    `early` are tracers that required no grad until the function said so, before anything was
    computed from them, and `late` those for which it said so afterwards. `off` are those that
    require no grad any more, with their variables, and what is computed with instead: a constant
    for autograd. `begun` are the tensors from outside that require grad from the beginning because
    the function will say so; until it does (`unsaid`), they answer that they do not.
    """

    recorder: Recorder
    given: dict[int, tuple[bool, Var]] = field(default_factory=dict)
    early: set[int] = field(default_factory=set[int])
    late: set[int] = field(default_factory=set[int])
    off: dict[int, tuple[torch.Tensor, Var, Atom]] = field(default_factory=dict)
    begun: dict[int, torch.Tensor] = field(default_factory=dict)
    unsaid: set[int] = field(default_factory=set[int])

    def take(self, tensor: torch.Tensor, tracer: torch.Tensor, var: Var) -> None:
        """Note the flag of a tensor from outside."""
        self.given[id(tracer)] = tracer.requires_grad, var
        if id(tensor) in self.begun:
            self.unsaid.add(id(tracer))

    def set(self, tracer: torch.Tensor, call: Callable[[], Any]) -> Any:
        """Call a function of PyTorch that sets the flag of a tracer."""
        self.unsaid.discard(id(tracer))
        before = tracer.requires_grad
        result = call()
        if tracer.requires_grad != before and id(tracer) in self.given:
            self._turn_on(tracer) if tracer.requires_grad else self._turn_off(tracer)
        return result

    def is_unsaid(self, tensor: torch.Tensor) -> bool:
        """Test for a tensor that requires grad only because the function will say so."""
        outer = self.recorder.outer
        return (
            id(tensor) in self.unsaid
            or id(tensor) in self.begun
            or (outer is not None and outer.flags.is_unsaid(tensor))
        )

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
            (tensor, True)
            for tensor, tracer in pairs
            if id(tracer) in self.early and id(tensor) not in self.begun
        ]
        if early and can_set:
            raise MustBegin([*((tensor, True) for tensor in self.begun.values()), *early])
        return found

    def forget(self) -> None:
        """Let go of everything."""
        self.given.clear()
        self.early.clear()
        self.late.clear()
        self.off.clear()
        self.unsaid.clear()
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
