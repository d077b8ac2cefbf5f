"""`torch.autograd.Function` inside a traced function: a custom_vjp equation whose rule is the
user's class.

The primal body is `forward`; bwd is `backward`. fwd is `forward` with what it leaves in the context
as residuals: saved tensors and tensors among the context's attributes; other attributes stay Python
values. Gradients are cast and summed to the type of their input, as PyTorch does. A class with a
`vmap` staticmethod is batched by it, others by batching all bodies. A class with a `jvp`
staticmethod is pushed forward by it. For others jvp is the transpose of `backward`, so that both
modes have one derivative; PyTorch refuses them.

A function that changes arguments in place, and says so (`mark_dirty`), becomes a custom_vjp of
copies of these. Their new values are then written to the arguments. A call that cannot be a
custom_vjp, because it changes more than it says, is left to PyTorch.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import TENSOR, Captured, current, pytree
from thunder_fn.capture.capturing import beginning
from thunder_fn.capture.numbers.python_numbers import running, running_shape, running_zeros
from thunder_fn.capture.recorder import Recorder
from thunder_fn.capture.replaced.autograd_functions import once
from thunder_fn.capture.replaced.lookasides import divert, original_of
from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.errors import CaptureError, CustomRuleError, MissingRule, UnsupportedCall
from thunder_fn.ir.rules import Mask, chosen
from thunder_fn.ir.symbols import symbols_in
from thunder_fn.ir.trace import Dim, Equation, Literal, TensorType, Trace, Type, Var, type_of_value
from thunder_fn.structured.autograd_context import Context
from thunder_fn.structured.custom_vjp import bind_call
from thunder_fn.structured.custom_vjp_rules import capture_vmap
from thunder_fn.structured.opaque import opaque_evaluate_rule
from thunder_fn.structured.shared import custom_calls as calls
from thunder_fn.structured.shared.custom_calls import Call


class ChangesInputs(CaptureError):
    """An autograd function changes its inputs in place: which tensors, and which outputs their
    new values are. `is_marked`: it says so to autograd, by `mark_dirty`. `is_counted`: autograd's
    version counters know of a change, as they do of all that are not by `.data`.
    """

    def __init__(
        self,
        places: tuple[tuple[int, int], ...],
        *,
        is_marked: bool = True,
        is_counted: bool = True,
    ) -> None:
        super().__init__("an autograd function changes its input in place")
        self.places, self.is_marked, self.is_counted = places, is_marked, is_counted


@dataclass(frozen=True)
class FunctionCall(Call):
    """A call of an autograd function. `function` is its class, whose arguments are those of
    `forward` without ctx.

    `copied` are the tensors that it changes in place, by number; it gets copies of them. `required`
    says which tensors require grad, and `given` which outputs have a cotangent, where its methods
    ask. `constant` are the outputs that it marks as non-differentiable. `dims` are the batch dims
    of the tensors for its own `vmap`, none for 0. `seen` is what its methods ask, found while they
    run.
    """

    copied: tuple[int, ...] = ()
    required: Mask = ()
    given: Mask = ()
    constant: Mask = ()
    dims: tuple[int | None, ...] = ()
    asks: frozenset[str] = frozenset()
    seen: set[str] = field(default_factory=set[str], compare=False)
    marked: list[bool] = field(default_factory=list[bool], compare=False)
    ignores_closures = True
    """True: a value that `forward` closes over is constant, as in PyTorch."""
    is_run_later = True

    @property
    def has_rule(self) -> bool:
        """True: it always has a rule."""
        return True

    @property
    def rules(self) -> Sequence[Callable[..., Any]]:
        """The user's functions of which the rule is made."""
        return self.function.forward, self.function.backward

    @property
    def backward_name(self) -> str:
        """The name of `backward` in traces."""
        return f"{self.name}_backward"

    @property
    def has_vmap(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Test whether the class has a batching rule of its own."""
        return _has_own_vmap(self)

    @property
    def has_jvp(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Test whether the class has a forward derivative of its own."""
        return self.function.jvp is not torch.autograd.Function.jvp

    @property
    def has_setup(self) -> bool:
        """Test whether `forward` takes no context, `setup_context` fills it."""
        return internals.has_setup_context(self.function)

    def __hash__(self) -> int:
        return super().__hash__()

    def floating(self, types: Sequence[Type]) -> Mask:
        """Tell for each argument whether it is a tensor that may have a gradient."""
        return tuple(map(is_differentiable, self.tree(types)))

    def context(self, types: Sequence[Type]) -> Context:
        """A context that says which arguments require grad."""
        required = self.required or (True,) * len(types)
        flags = [
            flag and is_differentiable(type) for flag, type in zip(required, types, strict=True)
        ]
        return Context(
            tuple(flag is True for flag in self.tree(flags, lambda leaf: None)), self.seen
        )

    def settled(self) -> FunctionCall:
        """Return the call with the question that its methods ask, and the outputs that it marks
        as constant.
        """
        asks = self.seen if len(self.marked) > 1 else self.seen - {"absent"}
        required = self.required if "needs" in asks else ()
        constant = tuple(self.marked)
        return replace(self, required=required, asks=frozenset(asks), constant=constant, own=None)

    def asked(self, wanted_inputs: Mask, wanted_outputs: Mask) -> FunctionCall:
        """Return the call with the wanted tensors among those that require grad, and the
        cotangents that there are.
        """
        call = self
        if "needs" in self.asks and self.required:
            required = tuple(a or b for a, b in zip(self.required, wanted_inputs, strict=False))
            call = call if required == self.required else replace(call, required=required)
        if "absent" in self.asks:
            given = tuple(wanted_outputs[: len(self.constant)])
            is_whole = all(a or b for a, b in zip(given, self.constant, strict=True))
            call = replace(call, given=() if is_whole else given)
        return self if call == self else call

    def run(self, tensors: Sequence[Any], *, on_own: bool = False) -> tuple[Any, Context]:
        """Run `forward`, and return its result and the context. It runs on the caller's own
        containers, or on copies.

        Raises:
            ChangesInputs: it has changed a tensor in place.
        """
        given = [
            tensor.clone() if index in self.copied else tensor
            for index, tensor in enumerate(tensors)
        ]
        context = self.context([type_of_value(tensor) for tensor in tensors])
        forward = functools.partial(self._run_on, context, given)
        output = self.call_on_own(forward, given) if on_own else forward(*self.args(given))
        if context.dirty and not self.copied:
            outputs = enumerate(pytree.as_tuple(output))
            changed = [
                index
                for index, tensor in enumerate(given)
                if any(tensor is x for x in context.dirty)
            ]
            raise ChangesInputs(
                tuple((i, k) for k, value in outputs for i in changed if value is given[i])
            )
        outputs = pytree.as_tuple(output)
        pairs = zip(outputs, context.constants_among(outputs), strict=True)
        self.marked[:] = [
            flag for value, flag in pairs for leaf in pytree.flatten(value)[0] if _is_tensor(leaf)
        ]
        return output, context

    def _run_on(self, context: Context, given: Sequence[Any], *args: Any) -> Any:
        """Run `forward` on arguments, with these tensors, and fill the context."""
        if not self.has_setup:
            return self.function.forward(context, *args)
        output = self._forward(given, args)
        self.function.setup_context(context, args, output)
        self._check_saved(context, given, output)
        return output

    def _forward(self, given: Sequence[Any], args: Sequence[Any]) -> Any:
        """Call a `forward` that takes no context; as an opaque op if it leaves PyTorch."""
        try:
            return self.function.forward(*args)
        except UnsupportedCall as error:
            recorder = current()
            types = [type_of_value(tensor) for tensor in given]
            if recorder is None or self.copied or any(map(_has_symbols, types)):
                raise
            _check_batched(recorder, self, error)  # what PyTorch refuses
            found = _example_of_result(self, recorder, types)
            if found is None:
                raise
        outputs = pytree.as_tuple(found)
        run = _OpaqueForward(self.name, tuple(map(type_of_value, outputs)), self)
        results = opaque_evaluate_rule((), *given, call=run)
        return results if isinstance(found, tuple) else results[0]

    def _check_saved(self, context: Context, given: Sequence[Any], output: Any) -> None:
        """Refuse, as PyTorch does, to save an argument that `forward` returns as it is."""
        outputs = pytree.as_tuple(output)
        as_is = [x for x in given if any(x is value for value in outputs)]
        if not context.dirty and any(x is one for x in as_is for one in context.all_saved()):
            what = (
                f"{self.name}: An input that has been returned as-is as output is being saved for"
                " backward or jvp"
            )
            fix = "Return and save a view of it, `x.view_as(x)`, or let `forward` take the context."
            raise CustomRuleError(what, fix=fix)

    def primal(self, *tensors: Any) -> Any:
        """`forward`; results without a gradient are cut off."""
        output, context = self.run(tensors, on_own=True)
        return _map_outputs(output, context, tensors)

    def captured(self, op: str, tensors: Sequence[Any]) -> Captured:
        """Capture `forward`, which runs where gradients are off, as autograd runs it."""
        with torch.no_grad():
            return super().captured(op, tensors)

    def push(self, tensors: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The tensors of the result, and for each its tangent by the class's `jvp` or None.

        The result is that of a call with this rule, so that what differentiates it in turn uses the
        rule.
        """
        run, types = self.start(), [type_of_value(tensor) for tensor in tensors]
        output, others, kept = run.again(tensors, forward=True)
        context = run.context(types, kept)
        given = [
            (
                torch.zeros_like(x)
                if t is None and context.materializes and is_differentiable(type)
                else t
            )
            for x, t, type in zip(tensors, tangents, types, strict=True)
        ]
        for place in self.copied:  # `jvp` changes the tangent of what `forward` changes
            tangent = given[place]
            given[place] = None if tangent is None else tangent.clone()
        found = self.function.jvp(context, *self.tree(given, lambda leaf: None))
        outputs = pytree.as_tuple(output)
        moved = pytree.as_tuple(found)
        if len(moved) != len(outputs):
            raise CustomRuleError(
                f"{self.name}.jvp must return one tangent for each output, {len(outputs)} of them,"
                f" but it returned {len(moved)}"
            )
        pairs = [
            (value, t)
            for value, t in zip(outputs, moved, strict=True)
            if isinstance(value, torch.Tensor)
        ]
        for index, (value, tangent) in enumerate(pairs):
            if tangent is not None:
                calls.check_like(tangent, type_of_value(value), f"out[{index}]", f"{self.name}.jvp")
        extra = others if isinstance(self, ExtendedCall) else ()
        return [*(value for value, _ in pairs), *extra], [
            *(tangent for _, tangent in pairs),
            *(None for _ in extra),
        ]

    def start(self) -> _Run:
        """A run of the rule."""
        return _Run(self)

    def vmap(
        self, size: Dim, randomness: str, batched: Mask, tensors: Sequence[Any]
    ) -> tuple[Any, Any]:
        """The class's own batching rule, on tensors whose batch dim is the first."""
        places = [
            (dim or 0) if flag else None
            for flag, dim in zip(batched, self.dims or (0,) * len(batched), strict=True)
        ]
        given = [
            x.movedim(0, place) if place else x for x, place in zip(tensors, places, strict=True)
        ]
        dims = self.tree(places, lambda leaf: None)
        return self.function.vmap(
            internals.vmap_info(running(size), randomness), dims, *self.args(given)
        )


_UNFOLLOWED = "One of the differentiated Tensors does not require grad"
"""PyTorch's words for a gradient of a tensor that autograd does not follow."""


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _map_outputs(output: Any, context: Context, given: Sequence[Any]) -> Any:
    """Cut off the results without a gradient. An argument as a result is a new tensor."""
    outputs = pytree.as_tuple(output)
    flags = zip(outputs, context.constants_among(outputs), strict=True)
    new = tuple(
        value.detach() if flag or any(value is one for one in given) else value
        for value, flag in flags
    )
    return new if isinstance(output, tuple) else new[0]


Place: TypeAlias = tuple[str, int]
"""The origin of a tensor in the context: ("argument", i), ("result", i) or ("other", i)."""


@dataclass(frozen=True)
class ExtendedCall(FunctionCall):
    """A call that also returns the tensors which `forward` leaves in the context besides its
    arguments and results.

    fwd is such a call, with the same rule. So a derivative of the backward goes through results as
    the rule says, and sees what else `forward` computed as constant, as in PyTorch. `notes` gets
    the rest of the context, which is that for `jvp` if it is for forward mode.
    """

    forward: bool = False
    notes: list[tuple[pytree.PyTreeSpec, tuple[Any, ...], list[Place]]] = field(
        default_factory=list, compare=False
    )

    def __hash__(self) -> int:
        return super().__hash__()

    @property
    def has_vmap(self) -> bool:
        """Test whether the class's own rule knows the results only."""
        return False

    def primal(self, *tensors: Any) -> Any:
        """`forward`, and tensors in the context."""
        output, context = self.run(tensors)
        if self.forward:
            context.turn_forward()
        outputs = pytree.as_tuple(output)
        own = ("_needs", "_seen", "dirty", "_constant", "_saved_for_forward")
        kept = {key: value for key, value in vars(context).items() if key not in own}
        leaves, spec = pytree.flatten(kept)
        others: list[torch.Tensor] = []
        places: list[Place] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                places.append(_place(leaf, tensors, outputs) or ("other", len(others)))
                others += [leaf.detach()] if places[-1][0] == "other" else []
        self.notes[:] = [(spec, pytree.statics(leaves), places)]
        return _map_outputs(output, context, tensors), others


def _place(leaf: torch.Tensor, tensors: Sequence[Any], outputs: Sequence[Any]) -> Place | None:
    for kind, values in (("argument", tensors), ("result", outputs)):
        for index, value in enumerate(values):
            if value is leaf:
                return kind, index
    return None


class _Run:
    """`forward` and then `backward` on what it left in the context."""

    def __init__(self, call: FunctionCall) -> None:
        self.call, self.name = call, call.name
        self.notes: tuple[pytree.PyTreeSpec, tuple[Any, ...], list[Place]] | None = None

    def again(
        self, tensors: Sequence[Any], *, forward: bool = False
    ) -> tuple[Any, Any, tuple[Any, ...]]:
        """`forward` again as a call with this rule: its result, further tensors in the context,
        and all in the context.
        """
        call, recorder = self.call, current()
        again = ExtendedCall(
            **{one.name: getattr(call, one.name) for one in fields(FunctionCall)}, forward=forward
        )
        if recorder is None:
            raise CustomRuleError(f"{self.name}: rules are captured inside a capture")
        output, others = bind_call(recorder, again, tensors)
        (self.notes,) = again.notes
        values = {
            "argument": tensors,
            "result": pytree.as_tuple(output),
            "other": others,
        }
        return output, others, tuple(values[kind][index] for kind, index in self.notes[2])

    def fwd(self, *tensors: Any) -> Any:
        """`forward` again, and the tensors in the context."""
        output, others, kept = self.again(tensors)
        return (output, others) if isinstance(self.call, ExtendedCall) else output, kept

    def context(self, types: Sequence[Type], kept: Sequence[Any]) -> Context:
        """The context that `forward` left, with these tensors in it."""
        if self.notes is None:
            raise CustomRuleError(f"{self.name}: backward runs after forward")
        context = self.call.context(types)
        spec, statics, _ = self.notes
        for key, value in pytree.unflatten(spec, pytree.filled(statics, kept)).items():
            setattr(context, key, value)
        return context

    def check_forward(self, primal: Captured, fwd: Captured) -> None:
        """Check that `forward`, run again, gave a result like the first."""
        calls.check_same_result(primal, fwd, f"{self.name}.forward, run again,")

    def bwd(
        self, primal: Captured, fwd: Captured, kept: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        """One gradient or None for each tensor of the arguments, from `backward`."""
        context = self.context(primal.trace.input_types, kept)
        output = primal.marks[0] if isinstance(self.call, ExtendedCall) else primal.marks
        given = _cotangents(
            output, iter(cotangents), iter(primal.trace.output_types), self._absent(context)
        )
        try:
            found = self._backward(context, given)
        except UnsupportedCall:
            if any(symbols_in(primal.trace.inputs)):
                raise
            return self._opaquely(primal, kept, given)
        except RuntimeError as error:
            if _UNFOLLOWED not in str(error):
                raise
            raise self._unfollowed() from error
        return self._gradients(primal, found)

    def _unfollowed(self) -> MissingRule:
        """Make the error for a backward that differentiates what a module computes from parameters
        that the context has, too. While it is traced these are other tensors.
        """
        what = (
            f"the backward of {self.name} asks autograd for gradients of saved tensors that it does"
            " not compute with, such as parameters of a module that it calls"
        )
        fix = "Call the module with the saved tensors, by `torch.func.functional_call`."
        return MissingRule(what, fix=fix)

    def _opaquely(
        self, primal: Captured, kept: Sequence[Any], given: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Compute the gradients by a `backward` that is called as an opaque op, since it leaves
        PyTorch.
        """
        types = primal.trace.input_types[: sum(self.call.is_tensor)]
        needs = tuple(map(is_differentiable, types))
        is_given = tuple(value is not None for value in given)

        def run(*operands: Any) -> tuple[torch.Tensor, ...]:
            values = iter(operands[len(kept) :])
            context = self.context(primal.trace.input_types, operands[: len(kept)])
            with torch.no_grad():
                cotangents = [next(values) if flag else None for flag in is_given]
                found = self._gradients(primal, self._backward(context, cotangents))
            pairs = zip(chosen(found, needs), chosen(types, needs), strict=True)
            return tuple(_zeros(type) if gradient is None else gradient for gradient, type in pairs)

        call = _OpaqueBackward(f"{self.name}.backward", chosen(types, needs), run)
        operands = (*kept, *(value for value in given if value is not None))
        results = iter(opaque_evaluate_rule((), *operands, call=call))
        return [next(results) if flag else None for flag in needs]

    def _absent(self, context: Context) -> Iterator[bool]:
        """Tell for each tensor of the result whether `backward` gets None instead of a
        cotangent.
        """
        if context.materializes:
            return itertools.repeat(False)
        given = self.call.given or itertools.repeat(True)
        return (
            is_constant or not flag
            for is_constant, flag in zip(self.call.marked, given, strict=False)
        )

    def _backward(self, context: Context, given: Sequence[Any]) -> Any:
        """Call `backward`; a `once_differentiable` one gives values that nobody can
        differentiate.
        """
        backward = self.call.function.backward
        if getattr(backward, "__code__", None) is not _ONCE:
            return backward(context, *given)
        found = inspect.unwrap(backward)(context, *given)
        return pytree.tree_map(lambda x: self._once(x, given) if _is_tensor(x) else x, found)

    def _once(self, gradient: torch.Tensor, given: Sequence[Any]) -> torch.Tensor:
        """Return a gradient that nobody can differentiate, nor with respect to the cotangents."""
        return once(gradient, self.name, [x for x in given if isinstance(x, torch.Tensor)])

    def _gradients(self, primal: Captured, gradients: Any) -> list[Any]:
        found = pytree.as_tuple(gradients)
        needs = self.call.floating(primal.trace.input_types)
        if len(found) < len(needs) or any(value is not None for value in found[len(needs) :]):
            raise CustomRuleError(
                f"{self.name}.backward must return one gradient for each argument of forward,"
                f" {len(needs)} of them, but it returned {len(found)}"
            )
        tree = tuple(value if need else None for value, need in zip(found, needs, strict=False))
        arguments = self.call.tree([TENSOR] * sum(self.call.is_tensor))
        where = f"{self.name}.backward"
        typed = self.call.typed_leaves(tree, arguments, primal.trace.input_types, where)
        return [_fitted(value, type, path, where) for value, type, path in typed]


@dataclass(frozen=True, eq=False)
class _OpaqueBackward:
    """A call of `backward` that nothing looks into."""

    name: str
    types: tuple[Type, ...]
    run: Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class _OpaqueForward:
    """A call of `forward` that nothing looks into."""

    name: str
    types: tuple[Type, ...]
    call: FunctionCall

    def run(self, *operands: Any) -> tuple[torch.Tensor, ...]:
        """Compute the result.

        Raises:
            CustomRuleError: the types of the result depend on values.
        """
        with torch.no_grad():
            found = self.call.function.forward(*self.call.args(operands))
        outputs = pytree.as_tuple(found)
        types = tuple(map(type_of_value, outputs))
        if types != self.types:
            told, given = (", ".join(map(str, some)) for some in (self.types, types))
            raise CustomRuleError(
                f"{self.name}.forward leaves PyTorch, and its results have other types than in the"
                f" call that was traced: {given} instead of {told}",
                fix="Let the types of the results follow from those of the arguments.",
            )
        return outputs

    def batched(
        self, types: tuple[Type, ...], flags: Mask, size: Dim, randomness: str
    ) -> tuple[Trace, Mask] | None:
        """The `vmap` of the class, if it has one."""
        if not _has_own_vmap(self.call):
            return None
        return capture_vmap(self.call, types, flags, size, randomness)


def _has_own_vmap(call: FunctionCall) -> bool:
    """Test whether the class has a batching rule, also for a call that returns more than its
    results.
    """
    return call.function.vmap is not torch.autograd.Function.vmap


def _has_symbols(type: Type) -> bool:
    return not isinstance(type, TensorType) or not all(isinstance(n, int) for n in type.shape)


def _example_of_result(
    call: FunctionCall, recorder: Recorder, types: Sequence[Type]
) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
    """Run `forward` outside of the capture on tensors of these types: ones, or zeros as indices.
    Return None if it raises, or gives something else than tensors.
    """
    with recorder.suspended(), torch.no_grad():
        examples = [_zeros(type) + is_differentiable(type) for type in types]
        try:
            found = call.function.forward(*call.args(examples))
        except Exception:  # noqa: BLE001 - on values that the user has never passed
            return None
    outputs = pytree.as_tuple(found)
    return found if outputs and all(map(_is_tensor, outputs)) else None


def _cotangents(
    output: Any, given: Iterator[Any], types: Iterator[Type], absent: Iterator[bool]
) -> list[Any]:
    """One for each output: zeros, or None, for what has none, and None for what is no tensor."""
    found: list[Any] = []
    for value in pytree.as_tuple(output):
        leaves = pytree.flatten(value)[0]
        inner = [_cotangent(given, next(types), next(absent)) for leaf in leaves if leaf is TENSOR]
        found.append(inner[0] if value is TENSOR else None)
    return found


def _cotangent(given: Iterator[Any], type: Type, is_absent: bool) -> Any:
    cotangent = next(given) if is_differentiable(type) else None
    if is_absent or cotangent is not None:
        return None if is_absent else cotangent
    return _zeros(type)


def _zeros(type: Type) -> torch.Tensor:
    assert isinstance(type, TensorType), "a tensor has such a type"
    return running_zeros(type)


_ONCE = torch.autograd.function.once_differentiable(lambda ctx: None).__code__
"""The code of every `backward` that is marked so."""


def _fitted(value: Any, type: Type, path: str, where: str) -> Any:
    """A gradient with its input's type, as PyTorch casts and sums it."""
    if value is None or not isinstance(type, TensorType) or not is_differentiable(type):
        return None
    if not isinstance(value, torch.Tensor):
        raise CustomRuleError(
            f"{where} returned {calls.described(value)} for {path}, which is {type}"
        )
    shape = running_shape(type)
    if tuple(value.shape) != shape and torch.broadcast_shapes(value.shape, shape) == value.shape:
        value = value.sum_to_size(shape)
    return calls.check_gradient(value.to(type.dtype), type, path, where)


def with_batch_dims(trace: Trace, dims: Sequence[int | None]) -> Trace:
    """The trace whose inputs are batched along these dims, which `vmap` of an autograd function
    called on an input is told.
    """
    if not any(dims):
        return trace
    known = {var.index: dim for var, dim in zip(trace.inputs, dims, strict=True)}
    equations = tuple(
        _with_dims(equation, [known.get(var.index) for var in equation.operands])
        for equation in trace.equations
    )
    return trace if equations == trace.equations else replace(trace, equations=equations)


def _with_dims(equation: Equation, dims: Sequence[int | None]) -> Equation:
    if equation.op.kind == "composite":
        body = with_batch_dims(equation.body, dims)
        return equation if body is equation.body else replace(equation, bodies=(body,))
    rule = dict(equation.kwargs).get("rule")
    call = rule.value if isinstance(rule, Literal) else None
    if not isinstance(call, FunctionCall) or not call.has_vmap or not any(dims):
        return equation
    told = Literal(replace(call, dims=tuple(dims[: sum(call.is_tensor)])))
    return replace(
        equation,
        kwargs=tuple((key, told if key == "rule" else arg) for key, arg in equation.kwargs),
    )


# ---- the lookaside ----


def is_internal(cls: Any) -> bool:
    """Test for a part of autograd's own machinery or of ours, whose derivative is what it records;
    not one that torch.vmap has batched.
    """
    internal = ("thunder_fn.", *internals.OF_AUTOGRAD)
    return cls.__module__.startswith(internal) and not cls.__name__.startswith("Vmapped")


def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`Function.apply` inside a capture."""
    recorder = current()
    original = functools.partial(original_of(internals.FUNCTION_APPLY), cls)
    if recorder is None or is_internal(cls) or internals.inside_torch_func():
        return original(*args, **kwargs)
    return _apply(recorder, cls, original, args, kwargs)


def _apply(
    recorder: Recorder, cls: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record a call as an equation. If it cannot be one, record what `original` does."""
    signature = inspect.signature(cls.forward) if internals.has_setup_context(cls) else None
    call, tensors = calls.make_call(FunctionCall, cls, signature, (), args, kwargs)
    with internals.no_torch_function():  # at any level: each asks for its own gradients
        call = replace(call, required=tuple(tensor.requires_grad for tensor in tensors))
    begin_again = beginning((args, kwargs))
    try:
        return bind_call(recorder, call, tensors)
    except CaptureError as error:
        begin_again()
        changes = error if isinstance(error, ChangesInputs) else _changes(call, tensors)
        if changes is not None and changes.places:
            return _apply_in_place(recorder, call, tensors, changes)
        _check_batched(recorder, call, error)
        found = [recorder.var_of(recorder.lift(x)) for x in tensors if internals.is_inexact(x)]
        result = original(*args, **kwargs)
        return _marked(recorder, call, [var for var in found if var is not None], result)


def _check_batched(recorder: Recorder, call: FunctionCall, error: CaptureError) -> None:
    """Refuse what PyTorch refuses under vmap, where `forward` cannot be captured and batched."""
    around: Recorder | None = recorder
    while around is not None and around.inside != "vmap":
        around = around.outer
    has_vmap = _has_own_vmap(call)
    if around is None or (has_vmap and not call.function.generate_vmap_rule):
        return
    what = f"{call.name} does not have vmap support: its forward cannot be captured"
    fix = "Write a `vmap` staticmethod, and a forward of functions of torch."
    if has_vmap:
        what = f"{call.name} has both generate_vmap_rule=True and a vmap staticmethod"
        fix = "Leave one of them out."
    raise CustomRuleError(what, fix=fix) from error


def _marked(recorder: Recorder, call: FunctionCall, given: Sequence[Var], result: Any) -> Any:
    """Mark the results of a call of which only `forward` is recorded: nobody can differentiate
    them. A view is copied: one taken of it would be made again from memory without the mark.

    Raises:
        CustomRuleError: one is no tracer, so that nothing can say what it depends on.
    """
    if not given or not torch.is_grad_enabled():
        return result
    leaves, spec = pytree.flatten(result)
    for place, leaf in enumerate(leaves):
        if not _is_tensor(leaf) or not internals.is_inexact(leaf):
            continue
        if not (internals.is_tracer(leaf) and recorder.owns(leaf)):
            what = f"{call.name}: its forward changes tensors from outside, and returns one"
            fix = "Return a copy of it, or pass the tensors as arguments."
            raise CustomRuleError(what, fix=fix)
        recorder.history.made_by(leaf, call.name, given)
        if internals.base_of(leaf) is not None:
            leaves[place] = leaf.clone()
    return pytree.unflatten(spec, leaves)


def _changes(call: FunctionCall, tensors: Sequence[torch.Tensor]) -> ChangesInputs | None:
    """Find the arguments that a call changes in place and returns, on tensors that autograd does
    not follow: it refuses changes of others. A change by `.data` is not marked as dirty.
    """
    examples = calls.examples_of([type_of_value(tensor) for tensor in tensors])
    try:
        with torch.no_grad():
            captured = calls.capture_writing(lambda *tensors: call.run(tensors)[0], examples)
    except ChangesInputs as found:
        return found
    except CaptureError:
        return None
    flat = [place for place, leaf in enumerate(captured.out_leaves) if leaf is TENSOR]
    is_flat = len(captured.out_leaves) == len(captured.out_spec.children() or (None,))
    same = {one.source: flat[one.result] for one in captured.shared if one.is_same}
    written = [one.target for one in captured.writes]
    if not is_flat or not all(isinstance(i, int) and i in same for i in written):
        return None
    places = tuple((i, same[i]) for i in written if isinstance(i, int))
    is_counted = any(one.is_counted for one in captured.writes)
    return ChangesInputs(places, is_marked=False, is_counted=is_counted)


def _apply_in_place(
    recorder: Recorder,
    call: FunctionCall,
    tensors: Sequence[torch.Tensor],
    changes: ChangesInputs,
) -> Any:
    """The call on copies of what it changes; these get their new values, and are what it returns.

    Those that it does not mark as changed keep their history, as do all where gradients are off;
    what it returns is a view of them with a history of its own.
    """
    copied = tuple(index for index, _ in changes.places)
    result = bind_call(recorder, replace(call, copied=copied), tensors)
    outputs = list(result) if isinstance(result, tuple) else [result]
    has_gradients = torch.is_grad_enabled()
    for index, place in changes.places:
        target, value = tensors[index], outputs[place]
        with torch.set_grad_enabled(has_gradients and changes.is_marked):
            (target if changes.is_counted else target.data).copy_(value)
        outputs[place] = target
        if not has_gradients:
            outputs[place] = target.detach()
        elif not changes.is_marked:
            outputs[place] = calls.with_memory_of(recorder, value, target, call.name)
    return tuple(outputs) if isinstance(result, tuple) else outputs[0]


divert("autograd function", apply_function)


def apply_graphs(operator: Any, fwd: Any, bwd: Any, *args: Any, **options: Any) -> Any:
    """An autograd function in a graph of Dynamo's, where `forward` and `backward` are graphs.

    Law: the gradient is that of `bwd`. PyTorch's class hands over what `fwd` saved by a variable
        around its methods.
    """
    recorder = current()
    original = functools.partial(
        original_of(type(operator).__call__), operator, fwd, bwd, **options
    )
    if recorder is None or internals.inside_torch_func():
        return original(*args)

    class GraphFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output, ctx.kept = fwd(*args)
            outputs = pytree.as_tuple(output)
            ctx.mark_non_differentiable(
                *(outputs[i] for i in options.get("non_differentiable_idx", ()))
            )
            if dirty := options.get("dirty_idx", ()):
                ctx.mark_dirty(*(outputs[i] for i in dirty))
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return bwd(*grads, *ctx.kept)

    return _apply(recorder, GraphFunction, original, args, {})


divert("autograd function operator", apply_graphs)
