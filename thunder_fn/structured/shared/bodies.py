"""Bodies: from the user's Python functions to closed traces, and back to their results."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import EVERY_LEAF, Captured, capture, current, pytree
from thunder_fn.capture.numbers.arithmetic import is_found_in_data
from thunder_fn.capture.numbers.python_numbers import running
from thunder_fn.capture.scopes import check_unchanged, user_source
from thunder_fn.derived.activity import activity
from thunder_fn.errors import (
    CaptureError,
    InvalidTrace,
    TracedFunctionError,
    TraceTypeError,
    callable_name,
    kind_of,
)
from thunder_fn.interpreters.autocast import ending_in
from thunder_fn.ir import ops
from thunder_fn.ir.constraints import equations_between
from thunder_fn.ir.memos import kept
from thunder_fn.ir.rules import Mask, chosen
from thunder_fn.ir.symbols import Substitution, finders, mentions
from thunder_fn.ir.trace import (
    Atom,
    Equation,
    Literal,
    Source,
    TensorType,
    Trace,
    Type,
    Var,
    cut,
    num_vars,
    type_of_value,
)
from thunder_fn.structured.shared.side_effects import without_side_effects


@dataclass(frozen=True, slots=True)
class Bodies:
    """Functions on the same operands as closed bodies: each takes the operands, then all
    closed-over tensors of any.
    """

    captured: tuple[Captured, ...]
    bodies: tuple[Trace, ...]
    closures: tuple[torch.Tensor, ...]


def capture_bodies(
    op: str,
    functions: Sequence[Callable[..., Any]],
    args: Sequence[tuple[Any, ...]],
    *,
    writes: bool = False,
    runs_once: bool = False,
) -> Bodies:
    """Capture functions, each on its arguments, as bodies with shared closures.

    One function on the same arguments is captured once, so conditions nested in both branches take
    linear work.

    Args:
        writes: a function may write to tensors from outside, and store tensors there: the new
            values are outputs, for `write_back`.
        runs_once: the functions run once, on these arguments, so that a capture around tells them
            the values that it knows.

    Raises:
        CaptureError: a function writes to a tensor from outside, and may not. A number depends on
            a side effect in Python.
    """

    def capture_in(order: Sequence[int]) -> tuple[Captured, ...]:
        known: dict[tuple[int, int], Captured] = {}
        keys = [(id(one), id(given)) for one, given in zip(functions, args, strict=True)]
        for i in order:
            if keys[i] not in known:
                known[keys[i]] = _captured(op, functions[i], args[i], writes, runs_once)
        return tuple(known[key] for key in keys)

    is_apart = not runs_once and current() is not None
    captured = (
        without_side_effects(op, functions, capture_in)
        if is_apart
        else capture_in(range(len(functions)))
    )
    for function, one in zip(functions, captured, strict=True):
        if not writes:
            check_no_writes(op, function, one)
    return Bodies(captured, *close_bodies(captured))


def _captured(
    op: str, function: Callable[..., Any], arguments: tuple[Any, ...], writes: bool, runs_once: bool
) -> Captured:
    held = _held()
    try:
        known = EVERY_LEAF if runs_once else None
        captured = capture(function, arguments, known=known, stores=writes)
        if runs_once or held.changed is None:
            return captured
        what = f"{op}: {callable_name(function)} changes a list or dict among the arguments"
        what = f"{what}, but a body runs as often as values say"
        raise CaptureError(what, source=user_source(), fix=PUT_IT)
    except TracedFunctionError as error:
        if writes or not internals.is_write_to_leaf(error.__cause__):
            raise
        what = f"{op}: {callable_name(function)} writes in place to a leaf that requires grad"
        what = f"{what}, but a body computes new values only"
        raise CaptureError(what, source=user_source(), fix=RETURN_IT) from error


def _held() -> pytree.Contents:
    """The content of the containers among the arguments of the traced function."""
    recorder = current()
    return pytree.Contents(() if recorder is None else pytree.nodes_in(recorder.filled))


def call_on_own(f: Callable[..., Any], given: Any, args: Any, kwargs: Any) -> Any:
    """Call f with the containers of the caller that hold no tensors; the others are copies.

    Args:
        given: the caller's `(args, kwargs)`, perhaps with marks for tensors.

    Raises:
        UnsupportedCall: f changes a copy.
    """
    args, kwargs = pytree.with_own_parts(given, (args, kwargs))
    own = {*map(id, pytree.nodes_in(given))}
    copies = [node for node in pytree.nodes_in((args, kwargs)) if id(node) not in own]
    held = pytree.Contents(copies)
    result = f(*args, **kwargs)
    check_unchanged(held, callable_name(f), RETURN_WHAT)
    return result


PUT_IT = "Return the value from the body, and put it into the list or dict after the call."
RETURN_WHAT = "Return what it puts there, and change the container after the call."
RETURN_IT = "Return the new value, or write to a copy made inside the body (`x = x.clone()`)."


def close_bodies(
    captured: Sequence[Captured],
) -> tuple[tuple[Trace, ...], tuple[torch.Tensor, ...]]:
    """The traces with one more input for each tensor that any of them closes over, and those
    tensors.
    """
    closures: dict[int, torch.Tensor] = {}
    recorder = current()
    for one in captured:
        if recorder is not None:
            recorder.know_made(one.trace.constants)
        closures.update((id(constant.tensor), constant.tensor) for constant in one.trace.constants)
    return tuple(_closed(one.trace, closures) for one in captured), tuple(closures.values())


def agreed(bodies: Bodies, types: Sequence[Type], others: Sequence[Type]) -> Bodies:
    """The bodies where types that have to be equal are: sizes that are equal for the moment's
    numbers, are from now on.
    """
    recorder = current()
    if recorder is None or not recorder.symbolic:
        return bodies
    count = min(len(types), len(others))
    for constraint in equations_between(types[:count], others[:count]) or ():
        bool(running(constraint))
    settled = Substitution(recorder.mode.numbers.simplified).trace
    captured = tuple(replace(one, trace=settled(one.trace)) for one in bodies.captured)
    return Bodies(captured, tuple(map(settled, bodies.bodies)), bodies.closures)


def check_no_writes(op: str, function: Callable[..., Any], captured: Captured) -> None:
    """Raise if a function writes to a tensor from outside."""
    if not captured.writes:
        return
    new_values = captured.trace.outputs[captured.num_results :]
    sources = [made_at(captured.trace, value) for value in new_values]
    source = next((found for found in sources if found is not None), None) or user_source()
    fix = RETURN_IT
    if not all(isinstance(write.target, int) for write in captured.writes):
        fix += (
            "\nA module that updates buffers can be in `.eval()`, or be called by"
            " `torch.func.functional_call` on copies."
        )
    names = (
        f"argument {write.target}" if isinstance(write.target, int) else "a tensor from outside"
        for write in captured.writes
    )
    pairs = zip(names, new_values, strict=True)
    targets = ", ".join(f"{one} ({value.type})" for one, value in pairs if isinstance(value, Var))
    what = (
        f"{op}: {callable_name(function)} writes in place to {targets}, but a body computes new"
        " values only"
    )
    raise CaptureError(what, source=source, fix=fix)


def made_at(trace: Trace, value: Atom) -> Source | None:
    """The user's line that an output of a trace was computed in, as deep in composites as it
    was.
    """
    equation = next((equation for equation in trace.equations if value in equation.outputs), None)
    if equation is None or equation.op.kind != "composite":
        return equation and equation.source
    inner = made_at(equation.body, equation.body.outputs[equation.outputs.index(value)])
    return inner or equation.source


def as_before_autocast(before: Any, after: Any) -> Any:
    """Return a value in the dtype of a tensor or a type, if autocast is on and has changed its
    floating dtype.
    """
    if not internals.is_autocast_on() or not isinstance(after, torch.Tensor):
        return after
    dtypes = (getattr(before, "dtype", None), after.dtype)
    is_changed = dtypes[0] != dtypes[1] and all(dtype in _CASTABLE for dtype in dtypes)
    return after.to(dtypes[0]) if is_changed else after


_CASTABLE = {torch.float32, torch.bfloat16, torch.float16}
"""The dtypes that autocast takes for each other."""


def next_carry(before: Any, after: Any) -> Any:
    """Return a carry with the lists and tuples of the one before it, and with its dtypes where
    autocast changed them.
    """
    after = pytree.like(before, after)
    if not internals.is_autocast_on():
        return after
    leaves, spec = pytree.flatten(before)
    new, new_spec = pytree.flatten(after)
    return (
        pytree.unflatten(spec, list(map(as_before_autocast, leaves, new)))
        if spec == new_spec
        else after
    )


def widened(bodies: Bodies) -> Bodies:
    """Return branches whose results autocast left in different floating dtypes, cast to the
    widest.
    """
    columns = list(zip(*(body.output_types for body in bodies.bodies), strict=False))
    if not internals.is_autocast_on() or len({len(body.outputs) for body in bodies.bodies}) > 1:
        return bodies
    dtypes = [{type.dtype for type in column if isinstance(type, TensorType)} for column in columns]
    casts = [reduce(torch.promote_types, found) if found <= _CASTABLE else None for found in dtypes]

    def cast(trace: Trace) -> Trace:
        types = zip(trace.output_types, casts, strict=True)
        return ending_in(
            trace,
            tuple(
                replace(type, dtype=dtype) if isinstance(type, TensorType) and dtype else type
                for type, dtype in types
            ),
        )

    captured = tuple(replace(one, trace=cast(one.trace)) for one in bodies.captured)
    return Bodies(captured, tuple(map(cast, bodies.bodies)), bodies.closures)


def body_activity(body: Trace, active: Mask) -> Mask:
    """Tell which outputs of a body are active."""
    flags = activity(body, active)
    return tuple(isinstance(atom, Var) and flags[atom.index] for atom in body.outputs)


def reduced(
    equation: Equation, bodies: Sequence[Trace], reads: Mask, wanted: Mask, **literals: Any
) -> tuple[Equation, tuple[Var, ...]]:
    """An equation cut down to some of its operands and outputs, and those operands: the end of a
    dce rule.

    Args:
        bodies: cut down to the outputs that stay. Their inputs are the last operands.
        reads: the operands that stay.
        wanted: the outputs that stay.
        literals: new values of keyword arguments.
    """
    is_same = all(new is old for new, old in zip(bodies, equation.bodies, strict=True))
    if is_same and all(reads) and all(wanted):
        return equation, equation.operands
    operands, outputs = chosen(equation.operands, reads), chosen(equation.outputs, wanted)
    kwargs = tuple(
        (key, Literal(literals[key]) if key in literals else arg) for key, arg in equation.kwargs
    )
    small = tuple(
        cut(body, inputs=chosen(body.inputs, reads[len(reads) - len(body.inputs) :]))
        for body in bodies
    )
    return Equation(equation.op, operands, kwargs, outputs, small, equation.source), operands


def _closed(trace: Trace, closures: dict[int, torch.Tensor]) -> Trace:
    """The trace with one more input for each closure, in their order."""
    own = {id(constant.tensor): constant.var for constant in trace.constants}
    bound = num_vars(trace)
    extra: list[Var] = []
    for index, (key, tensor) in enumerate(closures.items()):
        extra.append(own.get(key) or Var(bound + index, type_of_value(tensor)))
    return cut(trace, inputs=(*trace.inputs, *extra), constants=())


def own_memory(tree: Any) -> Any:
    """Copy the tensors of a result: a choice or a loop returns no memory of what it is given, and
    contiguous tensors, as in a trace.
    """
    dense = {"memory_format": torch.contiguous_format}
    return pytree.tree_map(
        lambda leaf: leaf.clone(**dense) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def types_of_tensors(tree: Any) -> tuple[Type, ...]:
    """The types of the tensors of a pytree."""
    return tuple(map(type_of_value, pytree.tensors_in(tree)))


# ---- what rules of loops ask of bodies ----


def tensor_type(type: Type) -> TensorType:
    """The type, which is a tensor's: only tensors are carried, stacked and differentiated."""
    if not isinstance(type, TensorType):
        raise InvalidTrace(f"a loop carries and stacks tensors, not {type}")
    return type


@kept(4096)
def invariant_atoms(trace: Trace, fixed: Mask) -> Mask:
    """Tell for each variable by index whether it is the same in every step if these inputs are.

    Random numbers never are, and values computed with an unbacked number of a step count as
    different each time.
    """
    flags = [*fixed, *(True for _ in trace.constants)]
    found = finders(trace)
    for equation in trace.equations:
        operands = tuple(flags[var.index] for var in equation.operands)
        if ops.has_side_effect(equation) or mentions(equation, found):
            flags += [False] * len(equation.outputs)
        elif equation.op.kind == "composite":
            inner = invariant_atoms(equation.body, operands)
            flags += [
                not isinstance(atom, Var) or inner[atom.index] for atom in equation.body.outputs
            ]
        else:
            flags += [all(operands)] * len(equation.outputs)
    return tuple(flags)


def described_function(function: Callable[..., Any]) -> str:
    """The name and line of a user's function, for errors; those of the wrapped function, if it
    is a wrapper.
    """
    function = inspect.unwrap(function)
    code, name = getattr(function, "__code__", None), callable_name(function)
    return f"{name} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})" if code else name


def standing_for(
    function: Callable[..., Any],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: errors speak of the user's function where the decorated one is captured in
    its place.
    """
    return lambda wrapper: functools.update_wrapper(wrapper, function, updated=())


SPELLINGS = {
    "cond": (
        "`thunder_fn.cond(pred, true_fn, false_fn, (x, y))`, as `torch.cond(pred, true_fn,"
        " false_fn, (x, y))`"
    ),
    "switch": (
        "`thunder_fn.switch(index, (f, g), (x, y))`; PyTorch has `torch.cond(pred, f, g, (x, y))`"
        " for two branches"
    ),
    "while_loop": (
        "`thunder_fn.while_loop(cond_fn, body_fn, (x, y))`, as `torch.while_loop(cond_fn, body_fn,"
        " (x, y))`"
    ),
    "scan": "`thunder_fn.scan(lambda carry, x: (carry + x, carry), init, xs)`",
    "fori_loop": "`thunder_fn.fori_loop(lo, hi, lambda i, value: value + i, init)`",
}
"""The right way to write an op here and in PyTorch, for its errors."""


def misuse(
    op: str, what: str, fix: str = "", *, function: Callable[..., Any] | None = None
) -> TraceTypeError:
    """Return the error of an op that is given something else than it takes; it shows the
    spellings of the op.
    """
    what = (
        f"{op}: {what}"
        if function is None
        else f"{op}: {what}\nfunction:     {described_function(function)}"
    )
    return TraceTypeError(what, source=user_source(), fix=f"{fix}\nWrite {SPELLINGS[op]}.".lstrip())


def described(value: Any) -> str:
    """Name a value for an error: "the tensor f32[2]", "the int 3", "None", "a list"."""
    if isinstance(value, torch.Tensor):
        return f"the tensor {type_of_value(value)}"
    if isinstance(value, (bool, int, float, complex, str)):
        return f"the {type(value).__name__} {value!r:.60}"
    return kind_of(value)


def predicate(op: str, value: Any, name: str, function: Callable[..., Any] | None = None) -> Any:
    """Return a predicate as a bool, or as a scalar tensor of bools; a symbolic bool that data
    decides is such a tensor.

    Raises:
        TraceTypeError: it is neither a bool nor a tensor of one bool.
    """
    return _scalar(op, value, name, (bool, torch.SymBool), function)


def index(op: str, value: Any, name: str) -> Any:
    """Return an index as an int, or as a scalar tensor of integers. Otherwise as `predicate`."""
    return _scalar(op, value, name, (int, torch.SymInt), None)


def _scalar(
    op: str, value: Any, name: str, kinds: tuple[type, type], function: Callable[..., Any] | None
) -> Any:
    """A number of these kinds, or a scalar tensor of such; an error otherwise."""
    is_bool = kinds[0] is bool
    wanted = "a bool or a tensor of one bool" if is_bool else "an int or a tensor of one integer"
    wrong = functools.partial(
        misuse, op, f"the {name} must be {wanted}, not {described(value)}", function=function
    )
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            reduced = "Reduce it with `.all()` or `.any()`, or choose" if is_bool else "Choose"
            raise wrong(f"{reduced} for each example: `vmap`, or `torch.where`.")
        if (
            (value.dtype is torch.bool) != is_bool
            or value.is_floating_point()
            or value.is_complex()
        ):
            raise wrong("Compare it: `x != 0`." if is_bool else "Convert it by `.to(torch.int64)`.")
        return value.reshape(()) if value.ndim else value
    if not isinstance(value, kinds) or (
        isinstance(value, bool) != is_bool and not isinstance(value, kinds[1])
    ):
        raise wrong()
    if is_found_in_data(value):
        return torch.full((), value, dtype=torch.bool if is_bool else torch.int64)
    return value


def check_functions(op: str, **functions: Any) -> None:
    """Raise if one of the functions of an op cannot be called."""
    for name, function in functions.items():
        if not callable(function):
            raise misuse(op, f"{name} must be a function, not {described(function)}")


def check_takes(op: str, what: str, count: int, *functions: Callable[..., Any]) -> None:
    """Raise if a user's function of an op does not take `count` values, which are `what`."""
    for function in functions:
        if (told := misfit(function, what, count)) is not None:
            raise misuse(op, told)


def misfit(function: Callable[..., Any], what: str, count: int) -> str | None:
    """Say why a user's function does not take `count` values, which are `what`."""
    code = getattr(function, "__code__", None)
    if code is not None and code.co_argcount == count and not code.co_kwonlyargcount:
        return None  # the usual case; a signature takes some microseconds
    try:
        inspect.signature(function, follow_wrapped=False).bind(*range(count))
    except ValueError:  # a builtin without a signature
        return None
    except TypeError as error:
        return f"{described_function(function)} is called with {what}, but: {error}"
    return None


def operand_tuple(op: str, name: str, operands: Any) -> tuple[Any, ...]:
    """Return the operands of an op, given as a tuple or a list.

    Raises:
        TraceTypeError: they are no tuple or list. The rows of a bare tensor are no operands.
    """
    if not isinstance(operands, (tuple, list)):
        one = "Put a single operand into a tuple: `(x,)`."
        raise misuse(
            op, f"{name} must be a tuple or a list of operands, not {described(operands)}", one
        )
    return tuple(operands)


def is_kept_open(choice: Any) -> bool:
    """Test whether `make_fx` or `torch.export` records this choice or size without its value.

    Deciding on the value of the example would bake it in. PyTorch's own ops keep it open.
    """
    if current() is not None:
        return False
    if isinstance(choice, torch.Tensor):
        return internals.is_kept_for_later()
    return isinstance(choice, (torch.SymBool, torch.SymInt))


def decided(op: str, choice: Any, kind: type[int]) -> int:
    """Convert an eager predicate or index to a bool or an int."""
    try:
        return kind(choice)
    except RuntimeError as error:
        if not isinstance(choice, torch.Tensor) or not internals.is_functorch_wrapped(choice):
            raise
        what = (
            f"{op}: examples of torch.func.vmap decide differently, and outside of a trace {op} is"
            " Python's own"
        )
        fix = "Batch it with `thunder_fn.vmap`, which has a rule for it."
        raise TraceTypeError(what, source=user_source(), fix=fix) from error
