"""Nesting: a pure function from the recorder's tree of scopes to a nested trace.

Each scope becomes a composite. Its inputs are the variables that it uses and did not define; its
outputs are its results and whatever else later equations use. Equal bodies become one object.

A composite keeps the full name of the user's call where its arguments and results are those of the
call. So executors may claim it by signature. Otherwise it has the short name and takes the
variables that it reads: transforms call their own versions so.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from thunder_fn.capture.hooked import with_hooks
from thunder_fn.capture.recorded import Leaf, Scope, leaves_of
from thunder_fn.capture.recorder import Recorder
from thunder_fn.ir import ops
from thunder_fn.ir.symbols import made_by, symbols_in, symbols_of
from thunder_fn.ir.trace import (
    Atom,
    Equation,
    Literal,
    Source,
    TensorType,
    Trace,
    Var,
    all_args,
    canonical,
    map_arg,
    map_args,
    vars_in,
)

DEEPEST = 32
"""Calls inside of so many others are no composites: their equations stand in the innermost one
that is.
"""


@dataclass(frozen=True, slots=True)
class _Context:
    """The data of the walk over the scopes."""

    recorder: Recorder
    live: set[int]
    traffic: _Traffic
    bodies: dict[Trace, Trace]


def nest(recorder: Recorder, outputs: tuple[Atom, ...], name: str) -> Trace:
    """The trace of everything that was recorded and is needed for the outputs."""
    root, outputs = recorder.root, with_hooks(recorder, outputs)
    _drop_unread_states(recorder)
    _drop_unread_vectors(root, {atom.index for atom in outputs if isinstance(atom, Var)})
    symbols = set(symbols_in(outputs)) if recorder.symbolic else None
    live = _live(root, {atom.index for atom in outputs if isinstance(atom, Var)}, symbols)
    context = _Context(recorder, live, _traffic(root, live, outputs), {})
    equations = _equations(root, context)
    if len(equations) == 1 and equations[0].op == ops.composite(name):
        equations = _unfolded(equations[0], context)
    if recorder.outer is not None:
        equations = _seen_from(root.module, equations)
    return canonical(
        tuple(recorder.inputs), tuple(equations), outputs, tuple(recorder.constants), (), name
    )


def _seen_from(module: str, equations: list[Equation]) -> list[Equation]:
    """Name the modules in a body's equations as seen from the call of the body."""
    sources = (equation.source and equation.source.within(module) for equation in equations)
    return [
        equation if source is equation.source else dataclasses.replace(equation, source=source)
        for equation, source in zip(equations, sources, strict=True)
    ]


def _drop_unread_states(recorder: Recorder) -> None:
    """States of the random number generator that are never set back."""
    unread = {id(place) for _, _, place in recorder.states if not place.outputs}
    if unread:
        _drop(recorder.root, unread)


def _drop(scope: Scope, unwanted: set[int]) -> None:
    scope.items[:] = [item for item in scope.items if id(item) not in unwanted]
    for item in scope.items:
        if isinstance(item, Scope):
            _drop(item, unwanted)


VALUES_ONLY = {"aten._linalg_svd.default": "compute_uv", "aten._linalg_eigh.default": "compute_v"}
"""Factorisations that compute the values alone, if told to."""

VECTORS = {"torch.linalg.svd", "torch.svd", "torch.linalg.eigh", "torch.linalg.eig"}
"""Functions that compute vectors though nobody may read them; `svdvals`, `eigvalsh` and norms do
it for autograd.
"""


def _drop_unread_vectors(root: Scope, wanted: set[int]) -> None:
    """Replace `svdvals` and its like by the ops that eager runs if no gradient is asked: without
    vectors.
    """
    found = [
        (leaf, scope)
        for leaf, scope in leaves_of(root)
        if leaf.op.name in (*VALUES_ONLY, "aten.linalg_eig.default")
    ]
    if not found:
        return
    read = wanted | {var.index for leaf, _ in leaves_of(root) for var in leaf.operands}
    for leaf, scope in found:
        is_eig = leaf.op.name == "aten.linalg_eig.default"
        values = 0 if is_eig or "eigh" in leaf.op.name else 1
        vectors = [var for i, var in enumerate(leaf.outputs) if i != values]
        if (
            scope.kind != "function"
            or scope.name in VECTORS
            or any(var.index in read for var in vectors)
        ):
            continue
        if is_eig:
            leaf.op, leaf.outputs = ops.leaf(ops.aten._linalg_eigvals.default), leaf.outputs[:1]
            continue
        option = VALUES_ONLY[leaf.op.name]
        matrix, *options = leaf.args
        leaf.args = (matrix, *options[:1]) if option == "compute_v" else (matrix,)
        leaf.kwargs = (
            *((key, value) for key, value in leaf.kwargs if key not in (option, "full_matrices")),
            (option, Literal(False)),
        )
        leaf.outputs = tuple(
            var if i == values else _without_elements(var) for i, var in enumerate(leaf.outputs)
        )


def _without_elements(var: Var) -> Var:
    return (
        Var(var.index, dataclasses.replace(var.type, shape=(0,)))
        if isinstance(var.type, TensorType)
        else var
    )


def _live(root: Scope, wanted: set[int], symbols: set[Any] | None) -> set[int]:
    """Indices of the variables that are needed. Random ops count as needed: eager would have drawn
    their numbers.

    `symbols` are those that are needed, None where the recording has none.
    """
    for leaf, _ in reversed(list(leaves_of(root))):
        needed = any(var.index in wanted for var in leaf.outputs)
        needed = needed or (symbols is not None and not symbols.isdisjoint(made_by(leaf)))
        if needed or not leaf.outputs or ops.has_side_effect(leaf):
            wanted.update(var.index for var in leaf.outputs)
            wanted.update(var.index for var in leaf.operands)
            if symbols is not None:
                symbols.update(symbols_in((all_args(leaf), leaf.outputs)))
                symbols.update(*map(symbols_of, leaf.bodies))
    return wanted


@dataclass(slots=True)
class _Traffic:
    """The variables that cross the border of each scope: imports in order of use, exports in order
    of definition.
    """

    root: Scope
    imports: dict[Scope, dict[int, Var]] = field(default_factory=dict)
    exports: dict[Scope, dict[int, Var]] = field(default_factory=dict)
    home: dict[int, Scope] = field(default_factory=dict)
    """The scope in which each variable is defined; inputs are the root's."""

    def use(self, var: Var, scope: Scope) -> None:
        """Carry a variable out of the scopes that define it and into those that read it."""
        definition = self.home.get(var.index, self.root)
        while scope.depth > definition.depth or not _contains(scope, definition):
            self.imports.setdefault(scope, {}).setdefault(var.index, var)
            scope = _parent(scope)
        while definition is not scope:
            self.exports.setdefault(definition, {}).setdefault(var.index, var)
            definition = _parent(definition)


def _is_live(leaf: Leaf, live: set[int]) -> bool:
    return not leaf.outputs or any(var.index in live for var in leaf.outputs)


def _traffic(root: Scope, live: set[int], outputs: tuple[Atom, ...]) -> _Traffic:
    traffic = _Traffic(root)
    for leaf, scope in leaves_of(root):
        if _is_live(leaf, live):
            for var in leaf.operands:
                traffic.use(var, scope)
            traffic.home.update((var.index, scope) for var in leaf.outputs)
    for var in vars_in(outputs):
        traffic.use(var, root)
    for scope in _scopes_in(
        root
    ):  # a call is written with all its arguments, those too that nothing in it reads
        if _is_call(scope, traffic, live):
            for var in _arguments(scope):
                traffic.use(var, _parent(scope))
    return traffic


def _is_call(scope: Scope, traffic: _Traffic, live: set[int]) -> bool:
    imports, exports = traffic.imports.get(scope, {}), traffic.exports.get(scope, {})
    is_live = any(index in live for index in imports | exports)
    return is_live and _is_faithful(scope, imports, exports, live)


def _scopes_in(scope: Scope) -> Iterator[Scope]:
    for item in scope.items:
        if isinstance(item, Scope):
            yield item
            yield from _scopes_in(item)


def _arguments(scope: Scope) -> list[Var]:
    return vars_in((scope.args or (), tuple(value for _, value in scope.kwargs or ())))


def _parent(scope: Scope) -> Scope:
    assert scope.parent is not None, "the root contains every scope"
    return scope.parent


def _contains(outer: Scope, inner: Scope) -> bool:
    while inner.depth > outer.depth:
        inner = _parent(inner)
    return inner is outer


def _equations(scope: Scope, context: _Context) -> list[Equation]:
    equations: list[Equation] = []
    for item in scope.items:
        if isinstance(item, Scope):
            equations.extend(_composite(item, context))
        elif _is_live(item, context.live):
            source = _in_module(item.source, scope.module)
            equations.append(
                Equation(item.op, item.args, item.kwargs, item.outputs, item.bodies, source)
            )
    return equations


def _in_module(source: Source | None, module: str) -> Source | None:
    return (
        dataclasses.replace(source, inside=module, around=None, first=None)
        if source and module
        else source
    )


def _composite(scope: Scope, context: _Context) -> list[Equation]:
    """Return the scope as one equation, or its only equation if its name says nothing new."""
    equations = _equations(scope, context)
    if not equations:
        return []
    if context.recorder.symbolic and any(map(made_by, equations)):
        return equations  # the symbols that they make are known to all that follows
    imports = context.traffic.imports.get(scope, {})
    exports = context.traffic.exports.get(scope, {})
    if scope.depth > DEEPEST:
        return equations
    faithful, casts = _is_faithful(scope, imports, exports, context.live), dict[int, Equation]()
    if scope.is_cast and faithful:
        casts, equations = _casts_of_arguments(equations, imports, exports)
        faithful = not any(equation.op == TO_COPY for equation in _within(equations))
    before = list(casts.values())
    given = lambda var: casts[var.index].outputs[0] if var.index in casts else var
    if len(equations) == 1 and _says_nothing(scope, equations[0]):
        return [*before, *equations]
    results = scope.results if faithful and scope.results is not None else ()
    outputs = (*results, *(var for var in exports.values() if var not in results))
    if len(equations) == 1 and scope.kind == "function" and equations[0].op.kind == "composite":
        equations = _unfolded(equations[0], context)
    args, kwargs = (
        (scope.args or (), scope.kwargs or ()) if faithful else (tuple(imports.values()), ())
    )
    args = tuple(map_arg(given, arg) for arg in args)
    kwargs = tuple((key, map_arg(given, arg)) for key, arg in kwargs)
    operands = tuple(vars_in((args, tuple(value for _, value in kwargs))))
    body = _close(scope, operands, equations, outputs, context)
    source = _in_module(scope.source, scope.module)
    op = ops.composite(scope.name)
    op = op if faithful else ops.composite(ops.short_name(op))
    return [*before, Equation(op, args, kwargs, outputs, (body,), source)]


TO_COPY = ops.leaf(ops.aten._to_copy.default)


def _casts_of_arguments(
    equations: list[Equation], imports: dict[int, Var], exports: dict[int, Var]
) -> tuple[dict[int, Equation], list[Equation]]:
    """The casts that stand for arguments of a call under autocast, and its other equations, which
    read the casts.

    An argument is handed over cast if the call reads it in no other way. So a `linear` of autocast
    is a `linear` of lower precision, which executors know by its name.
    """
    readers: dict[int, list[Equation]] = {}
    for equation in equations:
        for var in set(equation.operands):
            readers.setdefault(var.index, []).append(equation)
    casts: dict[int, Equation] = {}
    same: dict[int, Var] = {}
    for index in filter(readers.__contains__, imports):
        first, *rest = readers[index]
        if first.op != TO_COPY or [key for key, _ in first.kwargs] != ["dtype"]:
            continue
        alike = all(
            (one.op, one.args, one.kwargs) == (first.op, first.args, first.kwargs) for one in rest
        )
        made = [equation.outputs[0].index for equation in readers[index]]
        if alike and exports.keys().isdisjoint(made):
            casts[index] = first
            same.update((var, first.outputs[0]) for var in made)
    left = (
        [one for one in equations if not one.outputs or one.outputs[0].index not in same]
        if same
        else equations
    )
    return casts, [_reading(equation, same) for equation in left]


def _reading(equation: Equation, names: dict[int, Var]) -> Equation:
    """Return the equation with some of its operands replaced."""
    if not any(var.index in names for var in equation.operands):
        return equation
    return equation.reading(lambda var: names.get(var.index, var))


def _within(equations: Iterable[Equation]) -> Iterator[Equation]:
    """The equations and those of their bodies."""
    for equation in equations:
        yield equation
        for body in equation.bodies:
            yield from _within(body.equations)


def _says_nothing(scope: Scope, equation: Equation) -> bool:
    """Test for a torch function that is one ATen op: `torch.mul` is `aten.mul`."""
    if scope.kind != "function" or equation.op.kind != "leaf":
        return False
    short = scope.name.rsplit(".", 1)[-1]
    return (
        not scope.name.startswith("torch.nn.functional.")
        or equation.op.name.split(".")[1].lstrip("_") == short
    )


def _is_faithful(
    scope: Scope, imports: dict[int, Var], exports: dict[int, Var], live: set[int]
) -> bool:
    """Test whether the equation can be written as the user's call: same arguments, and its outputs
    are the call's results.
    """
    if scope.args is None or scope.results is None:
        return False
    given = {var.index for var in _arguments(scope)}
    results = {var.index for var in scope.results}
    return (
        set(imports) <= given
        and given <= live
        and results <= live
        and not results & given
        and set(exports) <= results
        and len(results) == len(scope.results)
    )


def _unfolded(equation: Equation, context: _Context) -> list[Equation]:
    """The body's equations in place of a composite: `F.layer_norm` need not hold
    `torch.layer_norm`.
    """
    body = equation.body
    names = {
        inner.index: outer for inner, outer in zip(body.inputs, equation.operands, strict=True)
    }
    for inner, outer in zip(body.outputs, equation.outputs, strict=True):
        if not isinstance(inner, Var) or inner.index in names:
            return [equation]
        names[inner.index] = outer

    def rename(var: Var) -> Var:
        if var.index not in names:
            names[var.index] = context.recorder.fresh(var.type)
        return names[var.index]

    return [
        Equation(
            inner.op,
            *map_args(rename, inner),
            tuple(map(rename, inner.outputs)),
            inner.bodies,
            inner.source.called_from(equation.source) if inner.source else equation.source,
        )
        for inner in body.equations
    ]


def _close(
    scope: Scope,
    operands: tuple[Var, ...],
    equations: list[Equation],
    outputs: tuple[Var, ...],
    context: _Context,
) -> Trace:
    """The body: one input for each operand; where an operand repeats, the first is the one that
    is used.
    """
    seen: set[int] = set()
    inputs: list[Var] = []
    for var in operands:
        inputs.append(context.recorder.fresh(var.type) if var.index in seen else var)
        seen.add(var.index)
    equations = _seen_from(scope.module, equations)
    body = canonical(
        tuple(inputs), tuple(equations), outputs, (), (), scope.name.rsplit(".", 1)[-1]
    )
    return context.bodies.setdefault(body, _alive_as(body))


_alive: weakref.WeakValueDictionary[tuple[int, int], Trace] = weakref.WeakValueDictionary()


def _alive_as(body: Trace) -> Trace:
    """Return an equal body of an earlier capture that is still alive, or this one. So memos find
    the next capture of a model fast.
    """
    key = (hash(body), body.origin)
    known = _alive.get(key)
    if known is not None and known == body:
        return known
    _alive[key] = body
    return body
