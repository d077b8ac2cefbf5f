"""Modules of equations, where equal layers share their bodies.

The oracle: layers of different widths share nothing, so each body there has the paths of its own call. A model of equal
layers has to name the same modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thunder_fn as tfn
from thunder_fn import inspect
from thunder_fn.executors import FusionExecutor, lower
from thunder_fn.extend import OperatorExecutor
from thunder_fn.inspect.flat import flatten
from thunder_fn.interpreters.simplify import inline
from thunder_fn.ir.trace import Source, Trace
from thunder_fn.parameters import simulated


class Inner(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).sin())


class Outer(nn.Module):
    """Everything is in a module of this one, so paths in its body have more in common than the call's own path."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inner = Inner(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Recurrent(Outer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tfn.scan(lambda c, a: (self.inner(c) + a, None), x[0], x)[0].expand_as(x)


class Recomputed(Outer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tfn.checkpoint(self.inner)(x)


class Chosen(Outer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, self.inner, torch.cos, (x,))


class Stack(nn.Module):
    def __init__(self, kind: type[Outer], widths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem, self.layers = Inner(4, 12), nn.ModuleList(kind(4, width) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


X = torch.ones(3, 4)
EQUAL, OTHER = (6, 6, 6), (6, 8, 10)


def all_modules(trace: Trace) -> list[str]:
    """The modules of all equations, those in bodies seen from their calls."""

    def walk(trace: Trace, call: Source | None) -> None:
        for equation in trace.equations:
            source = equation.source.called_from(call) if equation.source else call
            found.append(source.module if source else "")
            for body in equation.bodies:
                walk(body, source)

    found = list[str]()
    walk(trace, None)
    return found


def forward(model: nn.Module) -> Trace:
    return tfn.trace(model, X)


def gradient(model: nn.Module) -> Trace:
    params = {name: value.detach() for name, value in model.named_parameters()}
    return tfn.trace(tfn.grad(lambda params: tfn.functional_call(model, params, (X,)).sum()), params)


def batched(model: nn.Module) -> Trace:
    return tfn.trace(tfn.vmap(model), X[None])


def program(model: nn.Module) -> Trace:
    return lower(forward(model)).trace


def fused(model: nn.Module) -> Trace:
    """Equal layers are parts of their own there."""
    fuser = FusionExecutor("fuser", fuse=lambda region: region.python_callable(), min_shared=2, min_size=1)
    fuser.register_supported(torch.sin)
    return lower(forward(model), executors=[fuser]).trace


def sharded(model: nn.Module) -> Trace:
    """The gradient under ZeRO-3: blocks are checkpoints around calls, with gathers in them."""
    params = {name: value.detach() for name, value in model.named_parameters()}
    own = tfn.fsdp(lambda params: tfn.functional_call(model, params, (X,)).sum(), simulated(2)[0])
    return tfn.trace(tfn.grad(own), own.prepare(params))


def adapted(model: nn.Module) -> Trace:
    params = {name: value.detach() for name, value in model.named_parameters()}
    own = tfn.lora(lambda params: tfn.functional_call(model, params, (X,)).sum(), rank=1)
    return tfn.trace(tfn.grad(own), own.prepare(params))


def trained(model: nn.Module) -> list[str]:
    """The forward and the backward program of a jitted module."""
    found = inspect.chain(tfn.jit(model), X)
    return [module for position in range(len(found.steps)) for module in found.modules(position)]


VIEWS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda model: all_modules(forward(model)),
    "leaves": lambda model: [leaf.module for leaf in flatten(forward(model)).leaves],
    "inline": lambda model: all_modules(inline(forward(model))),
    "gradient": lambda model: all_modules(inline(gradient(model))),
    "vmap": lambda model: all_modules(inline(batched(model))),
    "program": lambda model: all_modules(program(model)),
    "sharded": lambda model: all_modules(inline(sharded(model))),
    "sharded program": lambda model: all_modules(lower(sharded(model)).trace),
    "adapted": lambda model: all_modules(inline(adapted(model))),
    "trained": trained,
    "fused": lambda model: all_modules(fused(model)),
    "text": lambda model: [
        line for line in lower(forward(model)).text.splitlines() if "# " in line and "(layers" in line
    ],
    "residuals": lambda model: [one.source and one.source.module for one in inspect.residuals(model, X).residuals],
}


@pytest.mark.parametrize(
    ("view", "kind"),
    [(view, kind) for view in VIEWS for kind in (Outer, Recomputed)]
    + [(view, kind) for view in ("forward", "inline", "gradient", "program") for kind in (Recurrent, Chosen)],
)
def test_equal_layers_are_told_apart(view: str, kind: type[Outer]) -> None:
    equal, other = (VIEWS[view](Stack(kind, widths)) for widths in (EQUAL, OTHER))
    assert equal == other and any("layers.1" in str(one) for one in equal)
    known = {name for name, _ in Stack(kind, EQUAL).named_modules()}
    assert view == "text" or {one or "" for one in equal} <= known
    if view in ("forward", "inline", "gradient", "vmap", "program", "fused"):
        assert {"stem.up", "layers.0.inner.up", "layers.2.inner.down"} <= set(equal)


def test_claims_of_equal_layers_are_counted_as_those_of_others() -> None:
    def counts(widths: tuple[int, ...]) -> Counter[tuple[str, str | None, str]]:
        fuser = FusionExecutor(
            "fuser", fuse=lambda region: region.python_callable(), min_shared=100
        )  # nothing is a part of its own
        fuser.register_supported(torch.sin)
        found = Counter[tuple[str, str | None, str]]()
        for one in tfn.explain_claims(tfn.jit(Stack(Outer, widths), executors=[fuser]), X.clone()).forward:
            found[one.op, one.taken_by, str(one.refusals)] += one.times
        return found

    equal, other = counts(EQUAL), counts(OTHER)
    assert equal["aten.sin.default", "fuser", "()"] == other["aten.sin.default", "fuser", "()"] == 0
    assert equal == other


def test_paths_are_no_part_of_what_makes_sources_equal() -> None:
    """Memos tell bodies apart by sources, and must not by where they were captured."""
    one = Source("f.py", 1, "f", "up", "layers.0")
    assert one == Source("f.py", 1, "f", "up", "layers.1") and str(one) == "f.py:1 in f (layers.0.up)"
    trace = tfn.trace(Stack(Recomputed, EQUAL), X)
    bodies = [equation.bodies[0] for equation in trace.equations if equation.bodies][1:]
    assert len({body.origin for body in bodies}) == 1


opaque = OperatorExecutor("paths").register_operator("opaque", meta=torch.empty_like, fn=torch.sin)


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return opaque(x)  # has no derivative


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Broken()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tfn.scan(lambda c, a: (c + self.cell(a), None), x[0], x)[0]


def test_an_error_inside_a_loop_names_the_module() -> None:
    model = nn.Sequential(nn.Sequential(Wrapped()))
    with pytest.raises(tfn.errors.MissingRule, match=r"in forward \(0\.0\.cell\)"):
        tfn.grad(lambda x: model(x).sum())(torch.ones(2, 3))


def test_an_error_while_a_loops_body_is_traced_names_the_module() -> None:
    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    class Looping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Asking()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return tfn.scan(lambda c, a: (c + self.cell(a), None), x[0], x)[0]

    with pytest.raises(tfn.errors.DataDependentBranch, match=r"in forward \(0\.cell\)"):
        tfn.trace(nn.Sequential(Looping()), torch.ones(2, 3))
