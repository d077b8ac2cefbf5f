"""Calling a trace: on tensors it is evaluated, inside a capture it becomes one equation.

A transform that is called inside a traced function (`grad(f)(x)` under `jit`) captures f on its
own, transforms the trace and applies it here. The trace becomes the body of a composite. If
autograd follows the operands, the composite is one node of its graph, with the rules of its body.
If a torch.func transform must see every op, the trace is replayed op by op.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import TENSOR, Captured, Shared, pytree
from thunder_fn.capture.aliases import at_call
from thunder_fn.capture.captured import Write
from thunder_fn.capture.layouts import strides_of_outputs
from thunder_fn.capture.places import tensor_at
from thunder_fn.capture.recorded import Leaf
from thunder_fn.capture.recorder import Recorder, current
from thunder_fn.capture.scopes import in_scope, user_source
from thunder_fn.capture.supported import is_wrapped
from thunder_fn.capture.under_autograd import SplitRule, bind_followed
from thunder_fn.errors import CaptureError, UnsupportedInput
from thunder_fn.ir import ops
from thunder_fn.ir.equations import makers, needed
from thunder_fn.ir.memory import is_view_step, view_path
from thunder_fn.ir.rules import EVALUATE
from thunder_fn.ir.symbols import (
    bind,
    made_by,
    specialize,
    specialize_atom,
    specialize_equation,
)
from thunder_fn.ir.trace import (
    Arg,
    Atom,
    Dim,
    Equation,
    Expr,
    Op,
    Source,
    TensorType,
    Trace,
    Type,
    Var,
    as_dim,
    as_kwargs,
    cut,
    map_args,
    python_arg,
    python_args,
)

Strides = tuple[tuple[Dim, ...] | None, ...]
"""The strides of results, None for those that are contiguous; fewer than results."""


def without_values(tree: Any) -> Any:
    """Replace each `TensorType` in a tree of arguments by a tensor without values.

    Raises:
        UnsupportedInput: a size is symbolic.
    """
    mode = internals.fake_mode()

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, TensorType):
            return leaf
        if not all(isinstance(size, int) for size in leaf.shape):
            what = f"{leaf} has a symbolic size, where only numbers are known"
            raise UnsupportedInput(what, source=user_source(), fix="Write a number for each size.")
        return internals.fake_in(mode, leaf)

    return pytree.tree_map(of, tree)


def apply_inside(
    recorder: Recorder, trace: Trace, inputs: Sequence[Any], op: Op, split: SplitRule | None = None
) -> tuple[Any, ...]:
    """Apply a trace to tracers and tensors inside a capture. `split` is the vjp rule of
    composites.
    """
    results = bind_trace(recorder, trace, inputs, op, split)
    if results is None:
        recorder.source = user_source(recorder)
        return in_scope(recorder, op.name, "composite", lambda: replay(recorder, trace, inputs))
    return results


def bind_trace(
    recorder: Recorder, trace: Trace, inputs: Sequence[Any], op: Op, split: SplitRule | None = None
) -> tuple[Any, ...] | None:
    """Record the trace as one equation. Return None if it has to be replayed, as one with unbacked
    sizes has.
    """
    if any(map(made_by, trace.equations)):
        return None
    closed, extra = close_over(trace)
    values = (*inputs, *extra)
    args = operands_of(recorder, values)
    if args is None and (split is None or not can_bind(recorder, values)):
        return None
    named = specialize(closed, _names(closed.inputs, values))
    strides = strides_of_outputs(named, [recorder.lift(value) for value in values])
    if args is None:
        known = (named,), named.output_types, split, split
        return bind_structured(recorder, op, values, *known, strides=strides)
    types = named.output_types
    return _of_level(bind_equation(recorder, op, args, (named,), types, strides=strides))


def _names(variables: Sequence[Var], values: Sequence[Any]) -> dict[Any, Any]:
    """Map the symbols in the types of variables to the sizes that they have in this capture, given
    the variables' values: of unbacked sizes, and of a trace that another capture has made.
    """
    types = (var.type for var in variables if isinstance(var.type, TensorType))
    if not any(isinstance(size, Expr) for type in types for size in type.shape):
        return {}
    named = ((symbol, as_dim(size)) for symbol, size in bind(variables, values).items())
    return {symbol: size for symbol, size in named if size != Expr(symbol)}


def copy_trace(recorder: Recorder, trace: Trace, inputs: Sequence[Any]) -> tuple[Any, ...] | None:
    """Record the trace's equations as they are, without running an op. Return None if it has to be
    replayed.
    """
    closed, extra = close_over(trace)
    operands = operands_of(recorder, (*inputs, *extra))
    if operands is None:
        return None
    recorder.decisions.require(trace)
    env = {var.index: operand for var, operand in zip(closed.inputs, operands, strict=True)}
    read: Callable[[Var], Var] = lambda var: env[var.index]
    for equation in closed.equations:
        outputs = tuple(recorder.fresh(var.type) for var in equation.outputs)
        args, kwargs = map_args(read, equation)
        recorder.append(Leaf(equation.op, args, kwargs, outputs, equation.source, equation.bodies))
        env.update((var.index, new) for var, new in zip(equation.outputs, outputs, strict=True))
    known: dict[int, Any] = dict(enumerate((*inputs, *extra)))
    for atom in closed.outputs:
        if isinstance(atom, Var) and atom.index not in known:
            known[atom.index] = recorder.tracer_of(env[atom.index])
    return tuple(
        known[atom.index] if isinstance(atom, Var) else atom.value for atom in closed.outputs
    )


def operands_of(recorder: Recorder, values: Sequence[Any]) -> tuple[Var, ...] | None:
    """The variables of tensors, None if one of them has levels of autograd or torch.func on it."""
    tracers = [recorder.lift(value) for value in values]
    return (
        _variables(recorder, tracers)
        if all(_is_plain(recorder, tracer) for tracer in tracers)
        else None
    )


def _variables(recorder: Recorder, tracers: Sequence[torch.Tensor]) -> tuple[Var, ...]:
    return tuple(
        recorder.history.read(var)
        for tracer in tracers
        if (var := recorder.var_of(tracer)) is not None
    )


def bind_equation(
    recorder: Recorder,
    op: Op,
    args: tuple[Arg, ...],
    bodies: tuple[Trace, ...],
    types: tuple[Type, ...],
    kwargs: tuple[tuple[str, Arg], ...] = (),
    strides: Strides = (),
) -> tuple[Any, ...]:
    """Record an equation; its results are new tracers. They are contiguous but for those with other
    strides.
    """
    outputs = tuple(recorder.fresh(type) for type in types)
    source = user_source(recorder)
    for body in bodies:
        recorder.decisions.require(body)
    if recorder.states and any(map(ops.has_effects, bodies)):
        recorder.draws += 1
    recorder.append(Leaf(op, args, kwargs, outputs, source, bodies))
    laid_out = itertools.zip_longest(outputs, strides[: len(outputs)])
    return tuple(recorder.tracer_of(var, steps) for var, steps in laid_out)


def _of_level(results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Wrap results for the torch.func transform that runs, which may write to them."""
    if not internals.torch_func_level():
        return results
    alias = torch.ops.aten.alias.default
    return tuple(alias(one) if isinstance(one, torch.Tensor) else one for one in results)


def bind_structured(  # noqa: PLR0913 - one place for what an equation is made of
    recorder: Recorder,
    op: Op,
    values: Sequence[Any],
    bodies: tuple[Trace, ...],
    types: tuple[Type, ...],
    split: SplitRule | None,
    of_bodies: SplitRule | None,
    *,
    strides: Strides = (),
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Record a structured equation on tensors, or a composite, whose vjp rule is given;
    `of_bodies` is any composite's. `strides` are those of `bind_equation`.
    """
    literals = as_kwargs(kwargs)
    tracers = [recorder.lift(value) for value in values]
    if not all(_is_own(recorder, tracer) for tracer in tracers):
        raise CaptureError(
            f"{op} was called inside a torch.func transform, where it is opaque",
            source=user_source(recorder),
            fix="Use thunder_fn's own grad, vjp, jvp and vmap inside the traced function.",
        )

    def bind() -> tuple[Any, ...]:
        args = _variables(recorder, tracers)
        return bind_equation(recorder, op, args, bodies, types, literals, strides)

    def apply(half: Trace, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return apply_inside(recorder, half, inputs, ops.composite(half.name), of_bodies)

    if all(_is_plain(recorder, tracer) for tracer in tracers):
        return _of_level(bind())
    followed = _cut_off(bodies[0], tracers) if op.kind == "composite" else tracers
    return _of_level(bind_followed(recorder, followed, bind, apply, split))


def _cut_off(body: Trace, tracers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Detach the tracers that a body does not read. A backward that frees the graph behind the
    body's results then leaves the graphs of these tracers alone.
    """
    wanted = {atom.index for atom in body.outputs if isinstance(atom, Var)}
    needed(body.equations, wanted)
    with internals.no_torch_function():
        return [
            tracer if var.index in wanted else torch.ops.aten.detach.default(tracer)
            for var, tracer in zip(body.inputs, tracers, strict=True)
        ]


def can_bind(recorder: Recorder, values: Sequence[Any]) -> bool:
    """Test whether a structured equation can be recorded on these tensors: no torch.func transform
    is at work on them.
    """
    return all(_is_own(recorder, recorder.lift(value)) for value in values)


def _is_own(recorder: Recorder, tensor: torch.Tensor) -> bool:
    return (
        not is_wrapped(tensor)
        and isinstance(tensor, internals.FunctionalTensor)
        and recorder.owns(tensor)
    )


def _is_plain(recorder: Recorder, tensor: torch.Tensor) -> bool:
    return _is_own(recorder, tensor) and not (tensor.requires_grad and torch.is_grad_enabled())


def close_over(trace: Trace) -> tuple[Trace, tuple[torch.Tensor, ...]]:
    """The trace with its constants as further inputs, and those tensors."""
    if not trace.constants:
        return trace, ()
    if (recorder := current()) is not None:
        recorder.know_made(trace.constants)
    inputs = (*trace.inputs, *(constant.var for constant in trace.constants))
    closed = cut(trace, inputs=inputs, constants=())
    return closed, tuple(constant.tensor for constant in trace.constants)


def replay(recorder: Recorder, trace: Trace, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run a trace op by op inside a capture, with its composites as scopes."""
    own = recorder.source
    call = Source(
        *((own.file, own.line, own.function) if own else ("", 0, "")), recorder.scope.module
    )
    recorder.decisions.require(trace)
    with internals.autocast_off():
        results = _replay(recorder, trace, inputs, call)
    recorder.source = own
    return results


def _replay(
    recorder: Recorder, trace: Trace, inputs: Sequence[Any], call: Source
) -> tuple[Any, ...]:
    recorder.know_made(trace.constants)
    env: list[Any] = [*inputs, *(recorder.lift(constant.tensor) for constant in trace.constants)]
    read: Callable[[Var], Any] = lambda var: env[var.index]
    found = _names(trace.inputs, inputs)  # and of those that the trace itself finds
    for equation in trace.equations:
        source = equation.source.called_from(call) if equation.source else call
        recorder.source = source if source.file else None
        results = _replay_equation(recorder, specialize_equation(equation, found), env)
        made = made_by(equation)
        if made:
            names = bind(equation.outputs, results)
            found.update((symbol, names[symbol]) for symbol in made)
        env.extend(results)
    return tuple(python_arg(specialize_atom(atom, found), read) for atom in trace.outputs)


def _replay_equation(
    recorder: Recorder, equation: Equation, env: list[Any] | dict[int, Any]
) -> tuple[Any, ...]:
    read: Callable[[Var], Any] = lambda var: env[var.index]
    args, kwargs = python_args(equation, read)
    match equation.op.kind:
        case "leaf" if equation.op == ops.NO_GRAD:
            tracers = [recorder.lift(value) for value in args]
            if not all(_is_own(recorder, tracer) for tracer in tracers):
                return (torch.ops.aten.detach.default(*args),)
            return bind_equation(
                recorder,
                ops.NO_GRAD,
                _variables(recorder, tracers),
                (),
                (equation.outputs[0].type,),
            )
        case "leaf":
            return ops.run(equation.op, args, kwargs)
        case "composite":
            body, operands = equation.body, [env[var.index] for var in equation.operands]
            kind = "function" if ops.is_call(equation.op) else "composite"
            source = recorder.source or Source("", 0, "")
            run: Callable[[], tuple[Any, ...]] = lambda: _replay(recorder, body, operands, source)
            return in_scope(recorder, equation.op.name, kind, run, args, kwargs, source.module)
        case "structured":
            return tuple(EVALUATE.of(equation)(equation.bodies, *args, **kwargs))


# ---- calls ----


def tensors_of(captured: Captured, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensor leaves of a call, which are the inputs of its trace."""
    leaves, _ = pytree.flatten((args, kwargs))
    return [leaf for leaf, known in zip(leaves, captured.in_leaves, strict=True) if known is TENSOR]


def restride(target: torch.Tensor, strides: tuple[int, ...]) -> None:
    """Make a tensor its own view with its dims in the order of these strides, as `t_()` does;
    its memory stays as it is.
    """
    shape, own = tuple(target.shape), sorted(target.stride(), reverse=True)
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    new = tuple(own[order.index(dim)] for dim in range(len(strides)))
    is_permuted = sorted(zip(shape, new, strict=True)) == sorted(
        zip(shape, target.stride(), strict=True)
    )
    if is_permuted and new != tuple(target.stride()):
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and not (target.requires_grad and internals.is_leaf(target))
        ):
            target.as_strided_(shape, new, target.storage_offset())


def write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Give a mutated tensor its new value, which may be a view of it, and its history.

    A leaf that requires grad was changed where gradients were off.
    """
    if value is not target and internals.storage_id(value) == internals.storage_id(target):
        if value.stride() == target.stride() and value.storage_offset() == target.storage_offset():
            return
        value = value.clone()
    if target.requires_grad and internals.is_leaf(target):
        with torch.no_grad():
            target.copy_(value)
    else:
        target.copy_(value)


def write_data(target: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor its new value by `.data`, of which autograd knows nothing: a graph that has
    saved the tensor takes the new value.
    """
    with torch.no_grad():
        write(target if is_wrapped(target) else target.data, value)


def rebind(target: torch.Tensor, value: torch.Tensor, *others: Any) -> None:
    """Give a tensor the memory of its new value; of a program, whose memory may be used again, if
    one of its other arguments and results lies there.
    """
    memory = internals.storage_id(value)
    tensors = (one for one in others if isinstance(one, torch.Tensor))
    is_free = not others or any(internals.storage_id(one) == memory for one in tensors)
    target.data = value.detach() if is_free else value.detach().clone()


def write_to_result(target: torch.Tensor, value: torch.Tensor) -> None:
    """Give a mutated tensor its new value, which has no gradient.

    Raises:
        RuntimeError: it is a leaf that requires grad, as PyTorch has it.
    """
    if internals.is_leaf(target) and target.requires_grad and torch.is_grad_enabled():
        what = "a leaf Variable that requires grad is being used in an in-place operation."
        raise RuntimeError(what)
    write(target, value)


def _change(one: Write, target: torch.Tensor, value: torch.Tensor) -> None:
    """Give a mutated tensor its new layout and value."""
    recorder = current()
    if one.strides is not None:
        restride(target, one.strides)
    if one.rebinds or one.has_values:
        put = rebind if one.rebinds else write if one.is_counted else write_data
        put(target if recorder is None else recorder.lift(target), value)


def before_writes(captured: Captured, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The operands of a call of the function, after which `write_back` changes the inputs: copies
    of those that it changes inside torch.func, where a derivative reads the operands.
    """
    changed = {one.target for one in captured.writes if isinstance(one.target, int)}
    if not any(map(is_wrapped, inputs)):
        return list(inputs)
    return [value.clone() if i in changed else value for i, value in enumerate(inputs)]


def write_back(
    captured: Captured, inputs: Sequence[torch.Tensor], outputs: Sequence[Any]
) -> tuple[Any, ...]:
    """Give mutated tensors their new values.

    Args:
        outputs: the results of the function, then a new value for each write.

    Returns:
        The results. One that shares memory with an input, a closed-over tensor or another result in
            eager mode does so here.
    """
    count, recorder = captured.num_results, current()
    shows = captured.aliases or captured.joints or captured.shared or captured.own_leaves
    if not (captured.writes or captured.effects or shows):
        return tuple(outputs[:count])
    first = count + len(captured.writes)
    for one, value in zip(captured.writes, outputs[count:first], strict=True):
        _change(one, tensor_at(one.target, inputs), value)
    results, placed = list(outputs), set[int]()
    for alias in captured.aliases:
        target = tensor_at(alias.source, inputs)
        if alias.is_written and recorder is None and not is_wrapped(target):
            results[alias.result] = alias.in_place_of(target, results[alias.result])
            placed.add(alias.result)
    join(captured, captured.trace, inputs, results)
    for shared in captured.shared:
        source = tensor_at(shared.source, inputs)
        if shared.is_same:
            results[shared.result] = source
        elif recorder is None and captured.writes and shared.result not in placed:
            found = view_of_written(captured, captured.trace, shared, source)
            results[shared.result] = results[shared.result] if found is None else found
        elif recorder is not None:
            results[shared.result] = view_again(
                recorder, captured, captured.trace, shared, (source, source), results[shared.result]
            )
    _make_leaves(recorder, captured, results)
    for effect in captured.effects:
        effect.apply(results[first : first + effect.count], inputs)
        first += effect.count
    return tuple(results[:count])


def _make_leaves(recorder: Recorder | None, captured: Captured, results: list[Any]) -> None:
    """Make leaves of autograd inside a capture of the results that the function made require
    grad.
    """
    made = dict[int, torch.Tensor]()  # one for results that are one tensor
    for place, is_parameter in () if recorder is None else captured.own_leaves:
        value = results[place]
        if is_wrapped(value):
            continue
        if id(value) not in made:
            leaf = value.detach()
            made[id(value)] = torch.nn.Parameter(leaf) if is_parameter else leaf.requires_grad_()
        results[place] = made[id(value)]


def join(
    captured: Captured,
    trace: Trace,
    inputs: Sequence[Any],
    results: list[Any],
    size: Dim | None = None,
    at: Sequence[int] | None = None,
) -> None:
    """Lay results of a function into one memory if they have elements in common in eager mode.

    The results may also be what a transform of the function's trace gives for each of them.

    Args:
        results: one for each, None for one that does not exist.
        size: of the batch dim in front, if they have one.
        at: the output of the trace that each of them is; its own position, if left out.
    """
    recorder = current()
    for joint in captured.joints:
        values = [results[place] for place in joint.results]
        if any(value is None or is_wrapped(value) for value in values):
            continue
        if recorder is not None:
            places = [place if at is None else at[place] for place in joint.results]
            values = joined(recorder, trace, places, values)
        elif len(set(map(internals.storage_id, values))) > 1:
            known = at_call(joint, captured.trace.inputs, *inputs) if joint.is_symbolic else joint
            values = (known if size is None else known.batched(size)).of(*values)
        for place, value in zip(joint.results, values, strict=True):
            results[place] = value


def joined(
    recorder: Recorder, trace: Trace, places: Sequence[int], values: Sequence[Any]
) -> list[Any]:
    """Take results of a trace, at these places, as views of the first of which the trace takes them
    by views. Neither of two can be changed while both live, if they have elements in common in
    eager mode and not here.
    """
    found, is_shown = [recorder.lift(value) for value in values], recorder.history.is_shown
    known, atoms = makers(trace.equations), [trace.outputs[place] for place in places]
    ways = [[view_path(known, atom, root, is_view_step) for atom in atoms] for root in atoms]
    reached = [
        [way for way in row if way and way[0] == root]
        for row, root in zip(ways, atoms, strict=True)
    ]
    first = max(range(len(atoms)), key=lambda i: len(reached[i]))
    for place, way in enumerate(ways[first]):
        if way in reached[first] and way and not is_shown(found[first], found[place]):
            value = _along(recorder, way[1], found[first])
            found[place] = value if is_shown(found[first], value) else found[place]
    for one, other in itertools.combinations(found, 2):
        if not recorder.history.is_shown(one, other):
            recorder.history.part(one, other, trace.name, are_results=True)
    return found


def view_again(
    recorder: Recorder,
    captured: Captured,
    trace: Trace,
    shared: Shared,
    tensors: tuple[torch.Tensor, torch.Tensor],
    result: Any,
) -> Any:
    """Take a result of a captured function, or of a transform of it, as the view of a tensor that
    it is in eager mode.

    It is taken of the tensor again where the trace takes it by views. Elsewhere neither can be
    changed while both live.

    Args:
        tensors: what it is a view of, and the same as the trace has its new value, if it writes
            one.
    """
    source, value = map(recorder.lift, tensors)
    if is_wrapped(source) or is_wrapped(result):
        return result
    written = _value_written(captured, trace, shared.source)
    known = makers(trace.equations)
    way = view_path(known, trace.outputs[shared.result], written)
    if way is not None and (way[0] == written or way[0].index not in known):
        value = _along(recorder, way[1], value if way[0] == written else source)
        if recorder.history.is_shown(source, value):
            return value
    part(recorder, source, result, captured.trace.name)
    return result


def _value_written(captured: Captured, trace: Trace, target: int | torch.Tensor) -> Atom | None:
    """The new value of a tensor that the trace writes to; None if it does not."""
    new = zip(captured.writes, trace.outputs[captured.num_results :], strict=False)
    return next((value for one, value in new if one.target is target), None)


def view_of_written(
    captured: Captured, trace: Trace, shared: Shared, target: torch.Tensor
) -> torch.Tensor | None:
    """Take a result that is a view of a tensor that the function has changed. Return None if the
    trace does not take it as such a view of the new value.

    An `Alias` says the same for contiguous tensors alone, in which each place is known.
    """
    written = _value_written(captured, trace, shared.source)
    is_changed = isinstance(written, Var) and not is_wrapped(target)
    atom = trace.outputs[shared.result]
    way = view_path(makers(trace.equations), atom, written, is_view_step) if is_changed else None
    if way is None or way[0] != written:
        return None
    value = target
    try:
        for equation, index in way[1]:
            named = specialize_equation(equation, _names(equation.operands, [value]))
            args, kwargs = python_args(named, lambda _, value=value: value)
            value = ops.run(equation.op, args, kwargs)[index]
    except RuntimeError:  # the memory is laid out in another way than the new value
        return None
    return value if internals.storage_id(value) == internals.storage_id(target) else None


def with_memory(
    recorder: Recorder, trace: Trace, inputs: Sequence[Any], run: Callable[[Trace], Sequence[Any]]
) -> tuple[Any, ...]:
    """Record a trace by `run`. Results that show memory of an input, or of one another, do so as
    outside of a capture.

    Values of which several results are views are computed as further outputs of the trace, and
    those views taken of them.
    """
    made, ways = makers(trace.equations), dict[int, tuple[Var, list[tuple[Equation, int]]]]()
    for place, atom in enumerate(trace.outputs):
        if isinstance(atom, Var) and (way := view_path(made, atom)) is not None:
            ways[place] = way
    counts = collections.Counter(root for root, _ in ways.values())
    roots = [root for root, count in counts.items() if count > 1 and root.index in made]
    found = list(run(cut(trace, outputs=(*trace.outputs, *roots)) if roots else trace))
    count = len(trace.outputs)
    known = dict(zip(trace.inputs, inputs, strict=True)) | dict(
        zip(roots, found[count:], strict=True)
    )
    for place, (root, steps) in ways.items():
        if root in known and isinstance(found[place], torch.Tensor):
            source = recorder.lift(known[root])
            if is_wrapped(source) or is_wrapped(found[place]):
                continue
            value = _along(recorder, steps, source)
            if recorder.history.is_shown(source, value):
                found[place] = value
    return tuple(found[:count])


def view_of_input(
    recorder: Recorder, trace: Trace, place: int, source: torch.Tensor
) -> torch.Tensor | None:
    """Take an output of a trace, which is a view of an input, as a view of a tensor in its place.
    Return None if the trace does not take it by views, whether autograd follows these or not.
    """
    atom, source = trace.outputs[place], recorder.lift(source)
    way = view_path(makers(trace.equations), atom, None, is_view_step)
    if way is None or way[0] not in trace.inputs or is_wrapped(source):
        return None
    view = _along(recorder, way[1], source)
    return view if recorder.history.is_shown(source, view) else None


def shows_inputs(trace: Trace) -> tuple[bool, ...]:
    """Tell for each output whether it is an input or a view of one."""
    known = makers(trace.equations)
    ways = (view_path(known, atom) for atom in trace.outputs)
    return tuple(way is not None and way[0] in trace.inputs for way in ways)


def _along(recorder: Recorder, steps: Sequence[tuple[Equation, int]], value: Any) -> Any:
    """Apply views to a tensor, one after the other."""
    for equation, index in steps:
        env = {equation.operands[0].index: value}
        value = _replay_equation(
            recorder, specialize_equation(equation, _names(equation.operands, [value])), env
        )[index]
    return value


def part(
    recorder: Recorder,
    source: torch.Tensor,
    result: torch.Tensor,
    name: str,
    *,
    is_linked: bool = False,
) -> None:
    """Forbid writes to a result and to its source, because they share memory in eager mode but not
    here; or because autograd does not follow them, if the two are linked.
    """
    tracers = [recorder.lift(source), recorder.lift(result)]
    if not any(map(is_wrapped, tracers)):
        recorder.history.part(tracers[0], tracers[1], name, is_linked=is_linked)
