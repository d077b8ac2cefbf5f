"""An assembly as text: the steps of `compile` with a model, in order and with reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thunder_fn.executors import TORCH, Executor
from thunder_fn.executors.base import is_within
from thunder_fn.jitted import Options
from thunder_fn.jitted.transforms import HasTraits, reason

if TYPE_CHECKING:
    from thunder_fn.recipes.recipe import Assembly

OPEN = "direct, or dynamo for what is no single trace"


def explain(assembly: Assembly) -> str:
    """An assembly as text."""
    lines = [
        f"recipe     {' + '.join(map(repr, assembly.recipes)) or 'Recipe()'}",
        f"frontend   {assembly.frontend or OPEN}",
    ]
    lines += _listed(
        "transforms",
        assembly.transforms,
        assembly.origins,
        lambda one: f"on the {one.on}, {one.numerics}",
    )
    numerics = dict(assembly.config).get("numerics", Options().numerics)
    chosen = [one for one in assembly.executors if is_within(one.numerics, numerics)]
    lines += _listed("executors", chosen, assembly.origins, _described)
    left_out = [one for one in assembly.executors if one not in chosen]
    lines += [
        f"  without {one.name}, which is {one.numerics}, as numerics={numerics!r}"
        for one in left_out
    ]
    lines += (
        [] if TORCH in assembly.executors else ["  then PyTorch's own ops, for whatever is left"]
    )
    lines += [
        f"lookaside  {name_of(one.fn)} -> {name_of(one.replace_with)}"
        for one in assembly.lookasides
    ]
    lines += [f"option     {name}={value!r}" for name, value in assembly.config]
    return "\n".join(lines)


def _described(executor: Executor) -> str:
    return f"{executor.numerics}, {executor.note}" if executor.note else executor.numerics


def _listed(
    what: str, things: Sequence[Any], origins: Mapping[Any, str], describe: Callable[[Any], str]
) -> list[str]:
    lines = [f"{what:<10} {'none' if not things else ''}".rstrip()]
    for number, one in enumerate(things, 1):
        why = [
            text
            for before in things[: number - 1]
            if (text := reason(_traits(before), _traits(one)))
        ]
        origin = origins.get(id(one), "what the machine has")
        lines.append(
            f"  {number}. {one.name} ({describe(one)}), from"
            f" {origin}{''.join(f'; {text}' for text in why)}"
        )
    return lines


def _traits(value: Any) -> HasTraits:
    return value


def name_of(fn: Any) -> str:
    """A function by its module and name."""
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', repr(fn))}".removeprefix(
        "."
    )
