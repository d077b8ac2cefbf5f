"""The types of a choice's results, where branches find unbacked sizes and numbers.

    v5: f32[u2] = cond(v4, v0)      true gives f32[u0], false f32[u1]

A size that is unbacked in one branch at least is a size of its own for the equation, which binds
it. Results whose sizes are the same ones in every branch share it, so that sums in a branch may go
on behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from thunder_fn.capture import TENSOR, pytree
from thunder_fn.capture.recorder import Recorder
from thunder_fn.capture.scopes import user_source
from thunder_fn.errors import TraceTypeError, callable_name
from thunder_fn.ir.constraints import is_hinted
from thunder_fn.ir.symbols import made_by, symbols_of
from thunder_fn.ir.trace import Dim, Equation, Expr, NumberType, Op, TensorType, Trace, Type
from thunder_fn.structured.shared.bodies import Bodies, described_function

Sizes = tuple[Dim | None, ...]
"""One size in each branch; None for a number that no symbol says."""


Name = Callable[[Sizes, Type], Expr]
"""A function that names a size, or number, of a result of this type."""


def types_of_choice(bodies: Sequence[Trace], name: Name) -> tuple[Type, ...]:
    """The branches' result types, with names for the unbacked sizes and numbers of a branch."""
    has_name = _has_name(bodies)
    columns = zip(*(body.output_types for body in bodies), strict=True)
    return tuple(
        _with_sizes(
            column[0],
            [name(sizes, column[0]) if has_name(sizes) else sizes[0] for sizes in _sizes(column)],
        )
        for column in columns
    )


def agree(column: Sequence[Type], bodies: Sequence[Trace]) -> bool:
    """Test whether the results of the branches in one place can be results of a choice: they differ
    in unbacked sizes and numbers only.
    """
    has_name, first = _has_name(bodies), column[0]
    if any(_kind(type) != _kind(first) for type in column):
        return False
    return all(len(set(sizes)) == 1 or has_name(sizes) for sizes in _sizes(column))


def _kind(type: Type) -> object:
    """A type without its sizes. The choice between two flags is no number that a symbol could
    be.
    """
    match type:
        case TensorType():
            return type.dtype, type.device, len(type.shape)
        case NumberType() if type.kind in (int, float):
            return type.kind
        case _:
            return type


def _has_name(bodies: Sequence[Trace]) -> Callable[[Sizes], bool]:
    """Test whether sizes, one per body, get a symbol of the choice's own: a body finds one in data,
    or data says which holds.
    """
    outer = [symbols_of(body) for body in bodies]

    def has_name(sizes: Sizes) -> bool:
        found = [size for size in sizes if isinstance(size, Expr) and not is_hinted(size)]
        pairs = zip(sizes, outer, strict=True)
        is_inner = any(
            isinstance(size, Expr) and not size.value.free_symbols <= known for size, known in pairs
        )
        return is_inner or (len(set(sizes)) > 1 and bool(found))

    return has_name


def _sizes(column: Sequence[Type]) -> Iterator[Sizes]:
    """The sizes of one result in all branches, dim by dim; of a number the number."""
    if isinstance(column[0], TensorType):
        yield from zip(
            *(type.shape for type in column if isinstance(type, TensorType)), strict=True
        )
    elif isinstance(column[0], NumberType):
        yield tuple(type.value for type in column if isinstance(type, NumberType))


def _with_sizes(type: Type, sizes: Sequence[Dim | None]) -> Type:
    match type:
        case TensorType():
            return replace(type, shape=tuple(size for size in sizes if size is not None))
        case NumberType():
            return NumberType(type.kind, sizes[0] if isinstance(sizes[0], Expr) else None)
        case _:
            return type


# ---- what the user's branches give ----


def check_branches(op: Op, functions: Sequence[Callable[..., Any]], bodies: Bodies) -> None:
    """Check that the branches return the same structure with the same types and equal static
    values.
    """
    for function, other in zip(functions[1:], bodies.captured[1:], strict=True):
        wrong = _difference(functions[0], function, bodies.captured[0], other)
        if wrong is not None:
            names = f"{described_function(functions[0])} and {described_function(function)}"
            what = f"{op}: the branches must return {wrong[0]}\nbranches:     {names}"
            raise TraceTypeError(what, source=user_source(), fix=wrong[1])


def _difference(
    function: Callable[..., Any], other_function: Callable[..., Any], first: Any, other: Any
) -> tuple[str, str] | None:
    """Name the thing that two branches must return alike, and the fix; None if they do."""
    names = callable_name(function), callable_name(other_function)
    difference = pytree.difference(first.out_spec, other.out_spec, *(f"{one}()" for one in names))
    if difference is not None:
        fix = "Return the same tuples, lists and dicts from both; None stands for nothing."
        return f"the same structure, but {difference}", fix
    paths = pytree.paths(first.result(tuple(range(first.num_results))), "out")
    both = first.trace, other.trace
    different = [
        f"  {path}: {mine} from {names[0]}, {theirs} from {names[1]}"
        for path, mine, theirs in zip(paths, _leaf_types(first), _leaf_types(other), strict=True)
        if mine != theirs
        and (isinstance(mine, str) or isinstance(theirs, str) or not agree((mine, theirs), both))
    ]
    if not different:
        return None
    fix = "Return equal numbers, or tensors such as `torch.tensor(1)`."
    if not all("the value" in line for line in different):
        fix = (
            "Cast or reshape one branch's result, e.g. `.to(torch.float32)`, so that both have the"
            " same type."
        )
    return "equal types, but\n" + "\n".join(different), fix


def _leaf_types(captured: Any) -> list[Type | str]:
    texts = (leaf if leaf is TENSOR else f"the value {leaf!r}" for leaf in captured.out_leaves)
    return pytree.filled(texts, captured.trace.output_types)


# ---- names ----


def new_names(recorder: Recorder) -> Name:
    """Symbols of the capture at hand: one for all that are equal in every branch."""
    known: dict[Sizes, Expr] = {}

    def name(sizes: Sizes, type: Type) -> Expr:
        if sizes not in known:
            numbers = recorder.mode.numbers
            known[sizes] = (
                numbers.found(type.kind) if isinstance(type, NumberType) else numbers.found_size()
            )
        return known[sizes]

    return name


def names_in(equation: Equation, bodies: Sequence[Trace]) -> Name:
    """The equation's names, where new branches give its results first. A batch dim may stand
    before a result's dims.
    """
    known: dict[Sizes, Expr] = {}
    columns = zip(*(body.output_types for body in bodies), strict=True)
    for var, column in zip(equation.outputs, columns, strict=False):
        if _rank(var.type) <= _rank(column[0]):
            pairs = zip(
                reversed(list(_sizes((var.type,)))), reversed(list(_sizes(column))), strict=False
            )
            known.update((sizes, size) for (size,), sizes in pairs if isinstance(size, Expr))
    return lambda sizes, _: known[sizes]


def _rank(type: Type) -> int:
    return len(type.shape) if isinstance(type, TensorType) else 0


def check_names(equation: Equation) -> None:
    """Raise where a size that the equation binds is not one size in each branch.

    Raises:
        TraceTypeError: two results of a branch have different sizes under one name.
    """
    made = made_by(equation)
    known: dict[object, Sizes] = {}
    columns = zip(*(body.output_types for body in equation.bodies), strict=True)
    for var, column in zip(equation.outputs, columns, strict=True):
        for (size,), sizes in zip(_sizes((var.type,)), _sizes(column), strict=True):
            if (
                isinstance(size, Expr)
                and size.value in made
                and known.setdefault(size.value, sizes) != sizes
            ):
                what = (
                    f"{equation.op}: {size} would be {_text(known[size.value])} and {_text(sizes)}"
                    " in the branches"
                )
                raise TraceTypeError(what, source=equation.source)


def _text(sizes: Sizes) -> str:
    return " or ".join(map(str, sizes))
