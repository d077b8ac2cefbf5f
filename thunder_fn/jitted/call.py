"""A call as jit sees it: its static and donated arguments, its leaves, and the key under which
its program is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.kept import KINDS
from thunder_fn.errors import DonatedTensorError, UnhashableStatic, kind_of
from thunder_fn.ir.trace import Literal
from thunder_fn.jitted.memory import DonatedTensor
from thunder_fn.jitted.options import Options
from thunder_fn.jitted.prologue import Key, Repeated, argument_name, leaf_key

OBJECTS = (torch.nn.Module, *KINDS)
"""Classes whose objects are static arguments without being named so: modules, and objects that
step them.
"""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call: the static ones by position or name, and the leaves and structure of
    the others.

    A tensor is a leaf once; where it is passed again, `leaves` say so. `orders` are the keys of
    dicts, as `orders_of` has them.
    """

    count: int
    statics: tuple[tuple[int | str, Any], ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[Any, ...]
    spec: pytree.PyTreeSpec
    orders: tuple[Any, ...]
    donated: tuple[int, ...]

    @property
    def structure(self) -> tuple[pytree.PyTreeSpec, tuple[Any, ...]]:
        """The structure of the arguments: equal for two calls whose arguments are built alike."""
        return self.spec, self.orders

    @property
    def tensors(self) -> tuple[tuple[int, torch.Tensor], ...]:
        """The tensor leaves, by position."""
        return tuple(
            (i, leaf) for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)
        )

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """The tensor leaves."""
        return tuple(tensor for _, tensor in self.tensors)


def read_call(options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Take a call apart.

    Raises:
        UnhashableStatic: a static argument has no hash; says which.
        DonatedTensorError: a tensor was donated before, or is donated and passed a second time.
    """
    count = len(args)
    static = {argnum % count for argnum in options.static_argnums if -count <= argnum < count}
    static |= {i for i, arg in enumerate(args) if issubclass(type(arg), OBJECTS)}
    dynamic = tuple(arg for i, arg in enumerate(args) if i not in static)
    named = [name for name in options.static_argnames if name in kwargs]
    named += [n for n, arg in kwargs.items() if issubclass(type(arg), OBJECTS) and n not in named]
    statics = (*((i, args[i]) for i in sorted(static)), *((name, kwargs[name]) for name in named))
    for place, value in statics:
        _check_hashable(place, value)
    if named:
        kwargs = {name: value for name, value in kwargs.items() if name not in named}
    leaves, spec = pytree.flatten((dynamic, kwargs))
    given = {argnum % count for argnum in options.donate_argnums if -count <= argnum < count}
    donated = tuple(_donated_leaves(spec, [i in given for i in range(count) if i not in static]))
    _check_donation(
        leaves, [i for i in donated if isinstance(leaves[i], torch.Tensor)], (dynamic, kwargs)
    )
    tree = dynamic, kwargs
    return Call(
        count,
        statics,
        dynamic,
        kwargs,
        _each_once(leaves, tree),
        spec,
        pytree.orders_of(tree),
        donated,
    )


def _each_once(leaves: Sequence[Any], tree: Any) -> tuple[Any, ...]:
    """The leaves, with a `Repeated` for a tensor that is there already."""
    first: dict[int, int] = {}
    same = [
        first.setdefault(id(leaf), i) if isinstance(leaf, torch.Tensor) else i
        for i, leaf in enumerate(leaves)
    ]
    pairs = enumerate(zip(leaves, same, strict=True))
    return tuple(
        leaf if i == at else Repeated(argument_name(tree, at), at) for i, (leaf, at) in pairs
    )


def _check_hashable(place: int | str, value: Any) -> None:
    try:
        hash(value)
    except Exception as error:  # noqa: BLE001  the user's `__hash__`
        raise UnhashableStatic(
            f"jit: static argument {place!r} is {kind_of(value)}, which has no hash: {error}",
            fix=(
                "Make it a tuple or a frozen dataclass, or leave it out of static_argnums and"
                " static_argnames."
            ),
        ) from None


def _donated_leaves(spec: pytree.PyTreeSpec, flags: Sequence[bool]) -> Iterator[int]:
    start = 0
    for argument, donated in zip(spec.children()[0].children(), flags, strict=True):
        if donated:
            yield from range(start, start + argument.num_leaves)
        start += argument.num_leaves


def _check_donation(leaves: Sequence[Any], donated: Sequence[int], tree: Any) -> None:
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, DonatedTensor):
            what = (
                f"jit: {argument_name(tree, position)} was donated to an earlier call and its"
                " memory is taken"
            )
            fix = "Pass the result of that call, or leave the argument out of donate_argnums."
            raise DonatedTensorError(what, fix=fix)
    places: dict[int, list[int]] = {}
    for position, leaf in enumerate(leaves):
        places.setdefault(id(leaf), []).append(position)
    for position in donated:
        other = next((i for i in places[id(leaves[position])] if i != position), None)
        if other is not None:
            raise DonatedTensorError(
                f"jit: {argument_name(tree, position)} is donated, but it is"
                f" {argument_name(tree, other)} as well",
                fix="Donate a tensor once, or pass a clone.",
            )


def call_key(call: Call) -> Key:
    """The key of the program that serves a call: structure, metadata and values of leaves,
    statics, and global state.
    """
    tree = (call.args, call.kwargs)
    leaves = tuple(leaf_key(leaf, i, tree) for i, leaf in enumerate(call.leaves))
    statics = tuple((place, type(value), Literal(value)) for place, value in call.statics)
    return call.count, call.structure, leaves, statics, internals.global_state()
