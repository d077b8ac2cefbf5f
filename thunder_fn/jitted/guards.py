"""The prologue as it runs: a call path that checks a call and executes its program, or gives MISS.

    def call(args, kwargs):
        if len(args) != 2: return MISS
        l0, l1, = args
        if len(kwargs) != 0: return MISS
        if not (tensors_match(l0, l1) and state_matches() and not function_modes()): return MISS
        count_hit()
        return execute(l0, l1)

Law: a call path answers exactly the calls whose key and number of threads are those of the call
that it was made from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.numbers.arguments import Symbolic, is_number
from thunder_fn.ir.memos import memo
from thunder_fn.ir.trace import Literal, Trace
from thunder_fn.jitted.call import Call
from thunder_fn.jitted.callpath import (
    MISS,
    Leaf,
    Namespace,
    is_plain,
    skeleton,
    static_check,
    take_apart,
)
from thunder_fn.jitted.modules.containers import finish
from thunder_fn.jitted.outside import FAILURES
from thunder_fn.jitted.program import Entry
from thunder_fn.jitted.prologue import Repeated


def call_path(
    entry: Entry, call: Call, count_hit: Callable[[], Any], *, trusting: bool = False
) -> Callable[..., Any]:
    """A function of `(args, kwargs)` that gives the result of a call like this one, or MISS.

    `trusting` leaves out every check of leaves: the caller of the jitted function promises that
    they hold.
    """
    names = Namespace(
        MISS=MISS, is_number=is_number, Literal=Literal, execute=entry.execute, count_hit=count_hit
    )
    lines = ["def call(args, kwargs):", *_unpack(call, names)]
    if not trusting:
        lines += [
            f"    if not ({condition}): return MISS"
            for condition in _conditions(entry, call, names)
        ]
        lines += _outside(entry, names)
    extra = entry.symbolic.inputs if entry.symbolic is not None else ()
    tensors = ", ".join(
        (*(f"l{position}" for position, _ in call.tensors), *(str(symbol) for symbol, _ in extra))
    )
    if entry.symbolic is not None:
        lines += _symbols(entry, entry.symbolic, names)
    if entry.clash is not None:
        lines.append(f"    if {names.bind(entry.clash, 'clash')}({tensors}): return MISS")
    result = f"execute({tensors})"
    if entry.fills:
        given = "given, named"
        lines.insert(1, "    given, named = args, kwargs")
        result = f"{names.bind(finish, 'finish')}({result}, {given})"
    lines += ["    count_hit()", f"    return {result}", ""]
    return names.function("call", lines)


def _outside(entry: Entry, names: Namespace) -> Iterator[str]:
    """Lines that return MISS where a read from outside has changed."""
    if entry.outside is None:
        return
    conditions = " and ".join(f"({condition})" for condition in entry.outside.conditions(names))
    if not entry.outside.may_fail:
        yield f"    if not ({conditions}): return MISS"
        return
    yield "    try:"
    yield f"        if not ({conditions}): return MISS"
    yield f"    except {FAILURES}: return MISS"


@memo(4096, derives=False)
def has_attention(trace: Trace) -> bool:
    """Test whether some equation is attention, whose kernel was chosen when it was traced."""
    return any(
        "dot_product_attention" in one.op.name or any(map(has_attention, one.bodies))
        for one in trace.equations
    )


def _unpack(call: Call, names: Namespace) -> Iterator[str]:
    structure_args, structure_kwargs = skeleton(call.spec)
    statics = dict(call.statics)
    dynamic = [i for i in range(call.count) if i not in statics]
    named = {name: f"s{i}" for i, name in enumerate(statics) if isinstance(name, str)}
    plain = is_plain((structure_args, structure_kwargs))
    targets = [f"a{i}" for i in range(call.count)]
    if plain:
        leaves = {
            i: part.index
            for i, part in zip(dynamic, structure_args, strict=True)
            if isinstance(part, Leaf)
        }
        targets = [f"l{leaves[i]}" if i in leaves else target for i, target in enumerate(targets)]
    yield f"    if len(args) != {call.count}: return MISS"
    if targets:
        yield f"    {', '.join(targets)}, = args"
    if named:
        yield "    kwargs = dict(kwargs)"
        for name, target in named.items():
            yield f"    {target} = kwargs.pop({names.literal(name)}, MISS)"
    for place, value in call.statics:
        target = named[place] if isinstance(place, str) else targets[place]
        yield f"    if not ({static_check(target, value, names)}): return MISS"
    if plain:
        for i, part in zip(dynamic, structure_args, strict=True):
            if part is None:
                yield f"    if {targets[i]} is not None: return MISS"
            elif not isinstance(part, Leaf):
                yield from take_apart(part, targets[i], names, checked=False)
        yield from take_apart(structure_kwargs, "kwargs", names)
    else:
        yield from _flatten(call, [targets[i] for i in dynamic], names)


def _flatten(call: Call, targets: list[str], names: Namespace) -> Iterator[str]:
    """Lines that flatten the arguments with the pytree library, which knows custom nodes."""
    given = "".join(f"{target}, " for target in targets)
    yield f"    leaves, spec = {names.bind(pytree.flatten, 'flatten')}((({given}), kwargs))"
    yield f"    if spec != {names.bind(call.spec, 'spec')}: return MISS"
    if any(call.orders):
        orders = f"{names.bind(pytree.orders_of, 'orders_of')}((({given}), kwargs))"
        yield f"    if {orders} != {names.bind(call.orders, 'orders')}: return MISS"
    if call.leaves:
        yield f"    {', '.join(f'l{i}' for i in range(len(call.leaves)))}, = leaves"


def _symbols(entry: Entry, symbolic: Symbolic, names: Namespace) -> Iterator[str]:
    """Lines that read the symbols and return MISS where the program is for other numbers."""
    for symbol, (index, dim) in symbolic.places.items():
        if dim is None:
            yield f"    {symbol} = l{index}"
        else:
            yield (
                f"    {symbol} = l{index}.{f'shape[{dim}]' if dim >= 0 else f'stride({-1 - dim})'}"
            )
    conditions = [
        f"{symbol} > 1" for symbol, (_, dim) in symbolic.places.items() if dim is not None
    ]
    for index, layout in symbolic.layouts.items():
        conditions.append(f"l{index}.stride() == ({', '.join(map(str, layout.stride))},)")
    conditions += [str(decision.relation) for decision in entry.decisions]
    names.values["math"] = math
    yield f"    if not ({' and '.join(f'({condition})' for condition in conditions)}): return MISS"


def _conditions(entry: Entry, call: Call, names: Namespace) -> Iterator[str]:
    """Static leaves, repeated tensors, then what C++ checks."""
    dynamic = (
        frozenset(entry.symbolic.places.values()) if entry.symbolic is not None else frozenset()
    )
    for position, leaf in enumerate(call.leaves):
        if (position, None) in dynamic:
            yield f"type(l{position}) is {type(leaf).__name__}"
            yield f"is_number(l{position})"
        elif isinstance(leaf, Repeated):
            yield f"l{position} is l{leaf.position}"
        elif not isinstance(leaf, torch.Tensor):
            yield static_check(f"l{position}", leaf, names)
    if internals.count_function_modes():
        yield (  # a call under a torch function mode is looked up by its key, which knows the modes
            "False"
        )
    yield from _tensor_checks(entry, call, names)
    yield f"{names.bind(internals.global_state_guard(), 'state_matches')}()"
    yield f"not {names.bind(internals.count_function_modes, 'function_modes')}()"
    captured = entry.stages[0]
    if isinstance(captured, Trace) and has_attention(captured):
        names.values.update(
            kernels=internals.attention_kernels(), attention_kernels=internals.attention_kernels
        )
        yield "attention_kernels() == kernels"
    given = ", ".join(f"l{position}" for position, _ in call.tensors)
    for match, name in ((entry.grads_match, "grads_match"), (entry.reads_match, "reads_match")):
        if match is not None:
            yield f"{names.bind(match, name)}({given})"
    if entry.constants:
        yield f"{names.bind(entry.is_current, 'constants_match')}()"


def _tensor_checks(entry: Entry, call: Call, names: Namespace) -> Iterator[str]:
    """The condition on all tensors, which PyTorch checks in C++."""
    if not call.tensors:
        return
    layouts = entry.symbolic.layouts if entry.symbolic is not None else {}
    loose = [layouts.get(position) for position, _ in call.tensors]
    guard = names.bind(internals.tensor_guard(call.values, loose), "tensors_match")
    yield f"{guard}({', '.join(f'l{position}' for position, _ in call.tensors)})"
