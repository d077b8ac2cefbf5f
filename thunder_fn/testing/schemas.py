"""Steps for any functional op of PyTorch: every argument is drawn from the op's schema.

A step whose name is that of an overload, such as `Step("aten.sub.Tensor", (0, 1, 2))`, calls the
overload. Each argument of the schema takes one pick. Pick 0 is the default, or the newest variable
of a fitting type; the others are further values. So every argument of an op is reached by one pick,
and a failure shrinks to the arguments that matter.

`Step("aten.convolution.default#1")` makes a recorded call (see `samples.py`), whose arguments fit
together. Each of its tensors takes one pick.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, islice, product, zip_longest
from typing import Any

import torch

from thunder_fn.errors import is_int
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Equation, TensorType, TraceBuilder, Var, python_args
from thunder_fn.testing.drawn_programs import (
    RULES_OF_OVERLOADS,
    Draft,
    Program,
    Rule,
    Skip,
    Step,
    build,
    dtype_of,
    shape_of,
)
from thunder_fn.testing.samples import literal_of, samples, tensor_of, types_of
from thunder_fn.testing.suits import broadcast
from thunder_fn.torch_internals import OpOverload, schema_of
from thunder_fn.torch_internals.patches import no_meta_log

DTYPES = (
    *(torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128),
    *(torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.int8),
)
NUMBERS = (2, 0.5, -3, 0, 1, True, -1, 3, -2, -0.5)
OPERANDS = (2, 0.5, 0, 1, 0.0, 1.0, -1, True, -3)
"""The numbers that take the place of a tensor."""

INTEGERS = (1, 0, -1, 2, 3, -2)
TEXTS = ("none", "tanh", "floor", "trunc", "sum", "mean", "ij", "reflect")
"""The texts that arguments of PyTorch's ops take, `None` aside."""

MOST_PICKS = 12
"""The number of values, with the default, that an argument is given at most."""


UNCHECKED = ("aten._native_batch_norm_legit.no_stats",)
"""Ops whose kernels end the process for arguments that their schemas allow: only recorded calls."""


@cache
def is_callable(name: str, any_arguments: bool = False) -> bool:
    """Test for the name of an overload that a step can call: functional, of tensors, literals."""
    if name.count(".") != 2:
        return False
    try:
        overload = ops.overload_named(name)
    except (ops.InvalidTrace, RuntimeError):
        return False
    schema = schema_of(overload)
    returns = [str(value.type) for value in schema.returns]
    return (
        not schema.is_mutable
        and bool(returns)
        and all(kind in ("Tensor", "List[Tensor]") for kind in returns)
        and (
            any_arguments
            or name in samples()
            or all(_is_known(argument) for argument in schema.arguments)
        )
    )


def _is_known(argument: Any) -> bool:
    kind = _kind(argument)
    return (
        argument.has_default_value()
        or kind.startswith("Optional")
        or kind in _VALUES
        or _is_tensors(argument)
    )


def _kind(argument: Any) -> str:
    """The type of an argument as the schema's text has it: `int[]`, `Scalar?`, `ScalarType`."""
    return str(argument.real_type).replace("SymInt", "int")


def _is_tensors(argument: Any) -> bool:
    return "Tensor" in _kind(argument)


@cache
def rule_of_overload(name: str) -> Rule:
    """The rule of a step that calls the overload of this name, or makes one of its samples."""
    name, _, place = name.partition("#")
    if not is_callable(name):
        raise KeyError(f"{name} is no step, and no functional op of tensors")
    overload = ops.overload_named(name)

    def rule(draft: Draft, _: Step) -> None:
        args, kwargs = (
            _sampled(draft, overload, samples()[name][int(place)])
            if place
            else _arguments(draft, overload)
        )
        with no_meta_log():
            made = draft.leaf(overload, *args, **kwargs)
        if not made:
            raise Skip

    return rule


RULES_OF_OVERLOADS.append(rule_of_overload)


def _sampled(draft: Draft, overload: OpOverload, call: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a recorded call, its tensors among the variables of their types. By one more
    pick, an argument has its default.
    """
    used = list[Var]()

    def value_of(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(value_of, value))
        found = tensor_of(value)
        if isinstance(found, torch.Tensor):
            return draft.builder.constant(found, owned=True)
        if found is None:
            return literal_of(value)
        suiting = [var for var in reversed(draft.env) if var.type == found]
        suiting.sort(key=used.count)
        used.append(suiting[draft.number(len(suiting))] if suiting else draft.of_type(found))
        return used[-1]

    args, kwargs = call
    given = [value_of(arg) for arg in args], {key: value_of(arg) for key, arg in kwargs.items()}
    found = [given, *_changed(overload, *given)]
    return found[draft.number(len(found))]


def _changed(
    overload: OpOverload, args: list[Any], kwargs: dict[str, Any]
) -> list[tuple[list[Any], dict[str, Any]]]:
    """The calls with one value at its default, then those with up to three other values."""
    schema = schema_of(overload).arguments[: len(args)]
    others = {n: found for n, arg in enumerate(args) if (found := _others_of(schema[n], arg))}
    several = (
        ([values.get(place, arg) for place, arg in enumerate(args)], kwargs)
        for count in (1, 2, 3)
        for places in combinations(others, count)
        for chosen in product(*map(others.__getitem__, places))
        for values in [dict(zip(places, chosen, strict=True))]
    )
    return [*_plainer(overload, args, kwargs), *islice(several, MOST_CHANGED_CALLS)]


def _others_of(argument: Any, value: Any) -> tuple[Any, ...]:
    """Small integers, which may be an index that the call leaves out; no optional tensor."""
    if _kind(argument) == "int" and is_int(value):
        return tuple(one for one in (1, 0) if one != value)
    return (None,) if _kind(argument) == "Optional[Tensor]" and value is not None else ()


def _plainer(
    overload: OpOverload, args: list[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """The calls with the default in the place of one other value."""
    for place, argument in enumerate(schema_of(overload).arguments):
        if argument.name in kwargs:
            yield args, {key: value for key, value in kwargs.items() if key != argument.name}
        elif place < len(args) and _may_be_default(argument, args[place]):
            yield [*args[:place], argument.default_value, *args[place + 1 :]], kwargs


def _may_be_default(argument: Any, value: Any) -> bool:
    """Test for an argument that is no tensor, and has another value than its default."""
    has_default = argument.has_default_value() and not _is_tensors(argument)
    return has_default and not _same(value, argument.default_value)


MOST_PLAINER, MOST_CHANGED_CALLS = 8, 60


def plainer_calls_of_samples(name: str) -> Iterator[Program]:
    """The recorded calls of an op with one argument at its default, what several arguments of a
    call do together hides what one does, and some with other values.
    """
    overload = ops.overload_named(name)
    plainer, others = list[Program](), list[Program]()
    for place, call in enumerate(samples().get(name, ())):
        types, few = types_of(call), len(list(_plainer(overload, *call)))
        for pick, _ in enumerate(_changed(overload, *call), 1):
            program = Program(types, (Step(f"{name}#{place}", (*(0,) * len(types), pick)),))
            (plainer if pick <= few else others).append(program)
    random.Random(name).shuffle(others)
    for programs in (plainer, others):
        yield from islice((one for one in programs if build(one).equations), MOST_PLAINER)


def calls_of_samples(name: str) -> Iterator[tuple[int, Program]]:
    """The programs that make the recorded calls of an op, each with its place."""
    for place, call in enumerate(samples().get(name, ())):
        program = Program(types_of(call), (Step(f"{name}#{place}"),))
        if build(program).equations:
            yield place, program


def num_picks(name: str) -> int:
    """The number of picks of a step that calls this overload: one for each argument."""
    return len(_schema_arguments(name))


@cache
def num_values(name: str) -> tuple[int, ...]:
    """The number of picks that are worth trying for each argument of an overload."""
    draft = _draft_of_one()
    numbers = number_places(name.partition("#")[0])
    return tuple(
        (MOST_PICKS if place in numbers else 3)
        if _is_tensors(argument)
        else min(len(_values(argument, draft)), MOST_PICKS)
        for place, argument in enumerate(_schema_arguments(name))
    )


def _draft_of_one() -> Draft:
    """A draft with one variable."""
    draft = Draft(TraceBuilder("values"), [])
    draft.env.extend(draft.builder.take((TensorType(torch.float64, (2, 2, 2)),)))
    return draft


@cache
def number_places(name: str) -> tuple[int, ...]:
    """The places of tensors, after the first, where a call takes a number, too: a capture of
    `x + 1` has one there.
    """
    return tuple(place for place in tensor_places(name)[1:] if _takes_number(name, place))


def _takes_number(name: str, place: int) -> bool:
    draft, overload = _draft_of_one(), ops.overload_named(name)
    values: list[Any] = [
        draft.env[0] if _kind(argument) == "Tensor" else next(iter(_values(argument, draft)), None)
        for argument in _schema_arguments(name)
    ]
    values[place] = OPERANDS[0]
    args, kwargs = _written(overload, values)
    try:
        draft.leaf(overload, *args, **kwargs)
    except Skip:
        return False
    return True


@cache
def dtype_picks(name: str) -> dict[torch.dtype, tuple[int, ...]]:
    """The picks with which a step that calls this overload asks for each dtype; none if it takes no
    dtype.
    """
    for place, argument in enumerate(_schema_arguments(name)):
        if argument.name == "dtype":
            values = enumerate(_values(argument, Draft(TraceBuilder("values"), [])))
            return {v: (*(0,) * place, i) for i, v in values if isinstance(v, torch.dtype)}
    return {}


def tensor_places(name: str) -> tuple[int, ...]:
    """The places of the picks of a step that choose a variable."""
    return tuple(
        place
        for place, argument in enumerate(_schema_arguments(name))
        if _kind(argument) == "Tensor"
    )


def _schema_arguments(name: str) -> Sequence[Any]:
    return schema_of(ops.overload_named(name.partition("#")[0])).arguments


def _arguments(draft: Draft, overload: OpOverload) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, drawn."""
    used, numbers = list[Var](), number_places(str(overload))
    return _written(
        overload,
        [
            _tensors(draft, argument, used, OPERANDS if place in numbers else ())
            if _is_tensors(argument)
            else _pick(draft, argument)
            for place, argument in enumerate(schema_of(overload).arguments)
        ],
    )


def _written(overload: OpOverload, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with these values; defaults at the end and in keywords are left out,
    as in captures.
    """
    args, kwargs, required = list[Any](), dict[str, Any](), 0
    for argument, value in zip(schema_of(overload).arguments, values, strict=True):
        is_default = argument.has_default_value() and _same(value, argument.default_value)
        if not argument.kwarg_only:
            args.append(value)
            required = required if is_default else len(args)
        elif not is_default:
            kwargs[argument.name] = value
    return args[:required], kwargs


def relatives(draft: Draft, equation: Equation) -> list[tuple[list[Any], dict[str, Any]]]:
    """The arguments of the calls that differ from a leaf's in one that is no tensor: another value,
    or the same number in another type.
    """
    overload = ops.overload(equation.op)
    given, options = python_args(equation, lambda var: var)
    schema = schema_of(overload).arguments
    places = zip_longest(schema, given[: len(schema)], fillvalue=_ABSENT)
    values = [
        options.get(argument.name, argument.default_value) if value is _ABSENT else value
        for argument, value in places
    ]
    near = Draft(draft.builder, list(equation.operands))
    found: list[list[Any]] = []
    for place, argument in enumerate(schema):
        if not _is_tensors(argument) or isinstance(values[place], int | float):
            now = tuple(values[place]) if isinstance(values[place], list) else values[place]
            others = (*_in_other_types(argument, now), *_values(argument, near))
            found.append(
                [
                    _written(overload, [*values[:place], other, *values[place + 1 :]])
                    for other in others
                    if not _same(other, now)
                ]
            )
    return in_turn(found)


_ABSENT: Any = object()


def _in_other_types(argument: Any, value: Any) -> tuple[Any, ...]:
    """A number, where the schema takes any: 1, 1.0 and True are equal, and make other dtypes."""
    if _kind(argument) not in ("number", "Tensor") or not isinstance(value, int | float):
        return ()
    return tuple(kind(value) for kind in (float, int, bool) if kind(value) == value)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def _tensors(draft: Draft, argument: Any, used: list[Var], numbers: Sequence[Any]) -> Any:
    """A variable, one of these numbers, a list of variables, or None where the schema allows
    it.
    """
    kind = _kind(argument)
    if kind == "Tensor":
        return _variable(draft, used, numbers)
    if kind == "Optional[Tensor]":
        found = draft.number(1 + len(draft.env))
        return None if found == 0 else _nearest(draft, used)[(found - 1) % len(draft.env)]
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        count = (2, 1, 3)[draft.number(3)]
        for _ in range(count):
            used.append(_nearest(draft, used)[0])
        return used[-count:]
    return _skip()


def _skip() -> Any:
    raise Skip


def _variable(draft: Draft, used: list[Var], numbers: Sequence[Any]) -> Any:
    """A variable; numbers come after the two nearest ones, and the newest variable after them."""
    nearest = _nearest(draft, used)
    found = [*nearest[:2], *numbers, draft.env[-1], *nearest[2:]]
    value = found[draft.number(len(found))]
    if isinstance(value, Var):
        used.append(value)
    return value


def _nearest(draft: Draft, used: list[Var]) -> list[Var]:
    """The variables: those that suit the first one of the call before others, new ones first."""
    newest = list(reversed(draft.env))
    if not used:
        found = newest
    else:
        first = used[0]
        found = sorted(newest, key=lambda var: (_distance(var, first), used.count(var)))
    return found or _skip()


def _distance(var: Var, first: Var) -> int:
    """0 for the same type, 1 if the shapes broadcast in one dtype, 2 for another dtype, 3 else."""
    if var.type == first.type:
        return 0
    fits = broadcast(shape_of(var), shape_of(first)) is not None
    return (1 if dtype_of(var) == dtype_of(first) else 2) if fits else 3


def _pick(draft: Draft, argument: Any) -> Any:
    """A literal: the default first, if there is one."""
    values = _values(argument, draft)
    return values[draft.number(len(values))]


def _values(argument: Any, draft: Draft) -> list[Any]:
    """The values of an argument, the default first, each once."""
    found = [argument.default_value] if argument.has_default_value() else []
    if argument.name in _OF_MEMORY:
        return found
    if not found and _kind(argument).startswith("Optional"):
        found.append(None)
    for value in _of_kind(argument, draft):
        if not any(_same(value, known) for known in found):
            found.append(value)
    return found


_SHAPES = ("size", "shape")
"""Arguments that are sizes: one of 0 would hide every value."""

_OF_MEMORY = ("pin_memory", "non_blocking", "layout")
"""Arguments about where values lie: a trace says nothing of that."""

_VALUES: dict[str, Sequence[Any]] = {
    "number": NUMBERS,
    "Tensor": OPERANDS,
    "float": (0.5, 2.0, 1e-5, 0.0),
    "int": INTEGERS,
    "bool": (False, True),
    "str": TEXTS,
    "ScalarType": DTYPES,
    "Device": (torch.device("cpu"),),
    "MemoryFormat": (torch.contiguous_format, torch.preserve_format),
    "List[int]": ((0,), (-1,), (1,), (0, 1), (), (-2,), (0, -1), (2, 3), (-2, -1)),
    "List[bool]": ((True, True), (True, False), (True, True, True)),
    "List[float]": ((0.5, 2.0),),
    "List[number]": ((2, 0.5),),
}
"""The literals of each kind of argument, the plainest first."""


def _of_kind(argument: Any, draft: Draft) -> Iterator[Any]:
    kind = _kind(argument)
    inner = kind.removeprefix("Optional[").removesuffix("]") if "Optional[" in kind else kind
    if inner == "List[int]" and draft.env:
        shape = tuple(shape_of(draft.env[-1]))
        dims = tuple(range(len(shape)))
        turned, swapped = (*dims[1:], *dims[:1]), (*dims[1:2], *dims[:1], *dims[2:])
        if argument.name in _SHAPES:
            yield from (shape, (0,), (-1, *shape[1:]), (2, *shape), (*shape[:-1], -1))
        # dims come before what depends on the rank: a pick means the same of each operand
        yield from (*_VALUES[inner], turned, swapped, shape)
    else:
        yield from _VALUES.get(inner, ())


# ---- which calls there are ----


def in_turn(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """The first items of all lists, then the second ones, and so on."""
    longest = max(map(len, lists), default=0)
    return [items[place] for place in range(longest) for items in lists if place < len(items)]


@cache
def takes(name: str, types: tuple[TensorType, ...], picks: tuple[int, ...]) -> object:
    """Return the arguments of the call that a step makes of such inputs, or None."""
    made = build(Program(types, (Step(name, picks),))).equations
    return (made[-1].args, made[-1].kwargs) if made and made[-1].op.name == name else None
