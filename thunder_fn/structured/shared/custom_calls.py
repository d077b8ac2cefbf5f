"""Calls of custom functions: which part of a call is static, which are its tensors, and what a
rule must return.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import EVERY_LEAF, TENSOR, Captured, capture, current, pytree
from thunder_fn.capture.apply import part, view_of_input
from thunder_fn.capture.numbers.known_values import CUSTOM_RULE
from thunder_fn.capture.objects import is_a
from thunder_fn.capture.outside.edges import Edge, is_same, now
from thunder_fn.capture.outside.frames import is_machinery, observer
from thunder_fn.capture.outside.moments import Moment
from thunder_fn.capture.outside.reads import PLAIN
from thunder_fn.capture.recorder import Recorder
from thunder_fn.capture.scopes import user_source
from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.errors import (
    CustomRuleError,
    DataDependentShape,
    DataDependentValue,
    MissingRule,
    UnsupportedCall,
    callable_name,
    is_int,
    kind_of,
    spelled,
    with_article,
)
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.under_autograd import evaluate_followed
from thunder_fn.ir.rules import Mask, chosen
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.trace import (
    Dim,
    Equation,
    Literal,
    Op,
    Source,
    TensorType,
    Trace,
    TraceBuilder,
    Type,
    type_of_value,
)
from thunder_fn.ir.walking import inline_into
from thunder_fn.structured.shared.bind import bind
from thunder_fn.structured.shared.bodies import (
    as_before_autocast,
    body_activity,
    call_on_own,
    check_no_writes,
    close_bodies,
    misfit,
)

C = TypeVar("C", bound="Call")
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


class Rule:
    """The rule of a custom function, as its equation keeps it.

    Here is what most rules are. `constant` are the outputs that the rule marks as constant.
    `ignores_closures`: tensors that the function closes over are constant. `has_jvp`, `has_vmap`:
    the function has a forward derivative, a batching rule, of its own. `asks` are the parts of the
    question that a derivative's rule looks at: "needs" (wanted gradients), "absent" (missing
    cotangents). Its bodies hold for one question only.
    """

    constant: Mask = ()
    ignores_closures: bool = False
    has_jvp: bool = False
    has_vmap: bool = False
    asks: frozenset[str] = frozenset()
    has_foreign: ClassVar[Any] = False
    """A mark of rules that run functions of the user's, which may read what changes."""
    begun: Moment | None = None
    is_run_later: ClassVar[bool] = False
    """A mark of calls whose backward runs after the function: it sees the objects of then."""

    def asked(self, wanted_inputs: Mask, wanted_outputs: Mask) -> Any:
        """The rule that answers this question: itself, where its bodies do."""
        return self

    def check_wanted(self, inputs: Mask, outputs: Mask, equation: Equation) -> None:
        """Raise if the rule says nothing about a gradient that is wanted."""


def _is_own(function: Any) -> bool:
    module = getattr(function, "__module__", None)
    return isinstance(module, str) and module.startswith("thunder_fn.") and is_machinery(module)


@dataclass(frozen=True)
class Call(Rule):
    """A call of a custom function. Two are equal if they are calls of one function with equal
    static parts.

    `leaves` are the leaves of the tuple of the arguments that are not in nondiff_argnums, with
    `TENSOR` for tensors. `own` are all arguments, with such marks, as the caller has them: the
    function may change containers among them, and rules get copies. `begun` is the moment of the
    call: rules of the user's that are captured later see Python's objects as they were.
    `read_later` is what its backward reads from outside, and what it found there.
    """

    function: Any
    num_args: int
    spec: pytree.PyTreeSpec
    leaves: tuple[Literal, ...]
    nondiff: tuple[tuple[int, Literal], ...]
    paths: tuple[str, ...]
    own: tuple[Any, ...] | None = field(default=None, compare=False)
    begun: Moment | None = None
    read_later: list[tuple[Edge, Any]] = field(default_factory=list[Any], compare=False)

    def __hash__(self) -> int:
        return hash((id(self.function), self.num_args))

    @property
    def __name__(self) -> str:
        return self.name

    @functools.cached_property
    def has_foreign(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Test whether the function or its rule is not this package's own."""
        return not (_is_own(self.function) and all(map(_is_own, self.rules)))

    @property
    def rules(self) -> Sequence[Callable[..., Any]]:
        """The functions of which the rule is made."""
        return pytree.as_tuple(self.function.rule)

    @property
    def name(self) -> str:
        """The function's name."""
        return callable_name(self.function)

    @property
    def is_tensor(self) -> tuple[bool, ...]:
        """Tell for each leaf whether it is a tensor."""
        return tuple(leaf.value is TENSOR for leaf in self.leaves)

    @property
    def tensor_paths(self) -> tuple[str, ...]:
        """The path of each tensor, such as `args[0]['w']`."""
        return chosen(self.paths, self.is_tensor)

    @property
    def static_args(self) -> tuple[Any, ...]:
        """The values of nondiff_argnums."""
        return tuple(value.value for _, value in self.nondiff)

    def settled(self) -> Call:
        """The call as its equation keeps it, once its bodies have been captured."""
        return replace(self, own=None)

    @property
    def reached(self) -> tuple[Any, ...]:
        """The functions and objects among the arguments."""
        values = (*(leaf.value for leaf in self.leaves), *pytree.flatten(self.static_args)[0])
        return tuple(one for one in values if one is not TENSOR and not is_a(one, PLAIN))

    def tree(
        self, tensors: Sequence[Any], other: Callable[[Any], Any] = lambda leaf: leaf
    ) -> tuple[Any, ...]:
        """The tuple of arguments with these tensors; static leaves go through `other`."""
        leaves = [leaf.value if leaf.value is TENSOR else other(leaf.value) for leaf in self.leaves]
        return pytree.unflatten(self.spec, pytree.filled(leaves, tensors))

    def typed_leaves(
        self, found: Sequence[Any], arguments: Sequence[Any], types: Sequence[Type], where: str
    ) -> list[tuple[Any, Type, str]]:
        """The value that a rule returned for each tensor of the arguments, its type, and its
        path.
        """
        skipped = {position for position, _ in self.nondiff}
        positions = [position for position in range(self.num_args) if position not in skipped]
        leaves = [
            leaf
            for value, argument, position in zip(found, arguments, positions, strict=True)
            for leaf in spread(value, argument, f"args[{position}]", where)
        ]
        own = chosen(leaves, self.is_tensor)
        return list(zip(own, types, self.tensor_paths, strict=True))

    def args(self, tensors: Sequence[Any]) -> list[Any]:
        """The positional arguments."""
        args = list(self.tree(tensors))
        for position, value in self.nondiff:
            args.insert(position, value.value)
        return args

    def call_on_own(self, f: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        """Call f on the arguments, with the caller's own containers."""
        args = self.args(tensors)
        if self.own is None:
            return f(*args)
        return call_on_own(f, (self.own, {}), tuple(args), {})

    def primal(self, *tensors: Any) -> Any:
        """Call the function."""
        return self.call_on_own(self.function.f, tensors)

    def captured(self, op: str, tensors: Sequence[Any]) -> Captured:
        """Capture the function itself."""
        return captured_body(op, self.primal, tensors)


@dataclass(frozen=True)
class BatchedRule(Rule):
    """The rule of a call in a batch, which has not been captured yet; `types` are the operands of
    one example.
    """

    call: Any
    primal: Trace
    types: tuple[Type, ...]
    batched: Mask
    outputs: Mask
    size: Dim
    randomness: str

    has_foreign: ClassVar[Any] = property(attrgetter("call.has_foreign"))

    @property
    def __name__(self) -> str:
        return f"vmap_{self.call.__name__}"


@dataclass(frozen=True)
class RuleOfBodies(Rule):
    """A rule that is all in the bodies of its equation: nothing of Python is left of it.

    `is_tensor`, `constant`: as of the call that it was made of.
    """

    name: str
    is_tensor: Mask
    constant: Mask = ()
    ignores_closures: bool = False

    @property
    def __name__(self) -> str:
        return self.name

    def capture(self) -> Any:
        """Raise: the equation is a call of a function in its own rule, which has no end as data.

        Raises:
            MissingRule: always.
        """
        raise MissingRule(
            f"the rule of {self.name} calls {self.name}, and the rule of that call was not saved",
            fix="Take all derivatives before the program is saved: `save(jit(grad(f))...)`.",
        )


class CustomFunction(Generic[P, R]):
    """A function with a rule of the user's: the common part of custom_jvp, custom_vjp and
    custom_vmap.
    """

    is_differentiated: ClassVar[bool] = True
    """The rule is that of a derivative."""
    asked_for: ClassVar[str]
    """The call that sets the rule, and when it has to stand."""
    __call__: Callable[..., Any]

    def __init_subclass__(cls) -> None:
        cls.__call__ = internals.outside_dynamo(cls.__call__)

    @spelled(nondiff_argnames="Give their positions: `nondiff_argnums=(0,)`.")
    def __init__(self, f: Callable[P, R], nondiff_argnums: Sequence[int] = ()) -> None:
        self._check_functions(f)
        if not isinstance(nondiff_argnums, (tuple, list)) or not all(map(is_int, nondiff_argnums)):
            what = f"expected a tuple of ints for nondiff_argnums, given {nondiff_argnums!r}"
            raise CustomRuleError(f"{type(self).__name__}: {what}")
        functools.update_wrapper(self, f)
        self.f: Callable[..., Any] = f
        self.nondiff_argnums = tuple(nondiff_argnums)
        self._signature = signature_of(f)
        self._rule: Any = None
        self.__name__: str = callable_name(f)

    def _check_functions(self, *functions: Any) -> None:
        for function in functions:
            if not callable(function):
                what = f"expected a function, given {kind_of(function)}"
                raise CustomRuleError(f"{type(self).__name__}: {what}")

    def _check_takes(self, rule: Callable[..., Any], *values: str) -> None:
        """Raise unless a rule takes the static arguments, then these values."""
        names = (*(f"argument {place}" for place in self.nondiff_argnums), *values)
        what = ", ".join(names[:-1]) + f" and {names[-1]}"
        told = misfit(rule, what, len(names))
        if told is not None:
            fix = f"Write a function of {what}."
            raise CustomRuleError(f"{type(self).__name__}: {told}", source=user_source(), fix=fix)

    @property
    def has_rule(self) -> bool:
        """Test whether the rule has been set."""
        return self._rule is not None

    @property
    def rule(self) -> Any:
        """The user's rule.

        Raises:
            CustomRuleError: there is none yet.
        """
        if self._rule is None:
            what = f"{type(self).__name__}: {self.__name__} has no rule"
            raise CustomRuleError(what, fix=f"Call `{self.__name__}.{self.asked_for}.")
        return self._rule

    def call(self, kind: type[C], args: Any, kwargs: Any) -> tuple[C, list[torch.Tensor]]:
        """A call of the function, and its tensors."""
        return make_call(kind, self, self._signature, self.nondiff_argnums, args, kwargs)

    def check_result(self, result: Any) -> None:
        """Raise if a result depends on a tensor from outside that is differentiated, where the
        rule is of the arguments alone.
        """
        if self.is_differentiated and internals.any_followed(pytree.tensors_in(result)):
            raise CustomRuleError(
                f"{type(self).__name__}: {self.__name__} closes over a tensor that is"
                " differentiated, and its rule says nothing of it",
                fix=_PASS_IT,
            )

    def called(
        self, kind: type[C], record: Callable[[Recorder, C, list[Any]], Any], args: Any, kwargs: Any
    ) -> Any:
        """The result of a call, recorded in a capture; captured where autograd follows it."""
        call, tensors = self.call(kind, args, kwargs)
        recorder = current()
        if recorder is not None:
            return record(recorder, call, tensors)
        if not internals.any_followed(tensors):
            result = self.f(*args, **kwargs)
            self.check_result(result)
            return result
        return call_eagerly(lambda *xs: self(*call.args(xs)), tensors)


def evaluate_custom(
    op: Op, bodies: Sequence[Trace], operands: Sequence[Any], options: dict[str, Any]
) -> tuple[Any, ...]:
    """Run the primal body, with the rule where autograd looks; in a capture, record the call."""
    recorder, primal = current(), bodies[0]
    if recorder is not None:
        return bind(recorder, op, operands, tuple(bodies), primal.output_types, **options)
    plain = lambda: evaluate(primal, operands)
    return evaluate_followed(op, tuple(bodies), operands, options, plain)


def with_inputs(trace: Trace, types: Sequence[Type]) -> Trace:
    """The trace on inputs of these types, of which it reads the first ones."""
    builder = TraceBuilder(trace.name)
    inputs = builder.take(types)
    return builder.build(inline_into(builder, trace, inputs[: len(trace.inputs)]))


def check_backward(call: Any, source: Source | None) -> None:
    """Check that what the backward of an autograd function reads is as it was when that was
    captured, with the call: PyTorch runs it after the function.

    Raises:
        UnsupportedCall: it has changed since.
    """
    begun: Moment | None = call.begun
    is_later = call.is_run_later and begun is not None and begun.is_running
    for edge, value in call.read_later if is_later else ():
        if not is_same(now(edge), value, edge.kind):
            what = f"the backward of {call.name} reads {edge.path}, which changes after the call"
            fix = "Save it in the forward (`ctx.value = ...`), and read it from there."
            raise UnsupportedCall(what, source=source, fix=fix)


def check_closures(equation: Equation, call: Any, count: int, active: Mask) -> None:
    """Check that the function closes over nothing that is differentiated: a rule speaks of the
    arguments, the first `count` operands, only.
    """
    if not any(active[count:]) or call.ignores_closures:
        return
    primal = equation.bodies[0]
    for index in range(count, len(active)):
        only = tuple(place == index for place in range(len(active)))
        if active[index] and any(body_activity(primal, only)):
            what = (
                f"{call.__name__} closes over {with_article(primal.input_types[index])} that is"
                " differentiated"
            )
            what = f"{equation.op}: {what}, and its rule says nothing of it"
            raise CustomRuleError(what, source=equation.source, fix=_PASS_IT)


_PASS_IT = (
    "Pass it as an argument that the rule knows; or close over `stop_gradient` of it, if it is to"
    " be constant."
)


def make_call(
    kind: type[C],
    function: Any,
    signature: inspect.Signature | None,
    nondiff: tuple[int, ...],
    args: Any,
    kwargs: Any,
) -> tuple[C, list[torch.Tensor]]:
    """The call and its tensors. Keyword arguments become positional ones."""
    args = _positional(function, signature, args, kwargs)
    static: list[tuple[int, Literal]] = []
    for position in sorted(
        number % len(args) for number in nondiff if -len(args) <= number < len(args)
    ):
        if pytree.tensors_in(args[position]):
            raise CustomRuleError(
                f"{function.__name__}: args[{position}] is in nondiff_argnums, so it is static, but"
                " it holds a tensor",
                fix="Take it out of nondiff_argnums, and return None for it from the rule.",
            )
        static.append((position, Literal(args[position])))
    skipped = {position for position, _ in static}
    rest = tuple(arg for position, arg in enumerate(args) if position not in skipped)
    leaves, spec = pytree.flatten(rest)
    kept = [position for position in range(len(args)) if position not in skipped]
    paths = tuple(
        path
        for position, arg in zip(kept, rest, strict=True)
        for path in pytree.paths(arg, f"args[{position}]")
    )
    marks = tuple(map(Literal, pytree.statics(leaves)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    own = args if any(map(pytree.is_node, args)) else None
    own = own and pytree.with_own_parts(args, pytree.tree_map(_mark, args))
    call, watch = kind(function, len(args), spec, marks, tuple(static), paths, own), observer()
    if watch is not None and call.has_foreign:
        call = replace(call, begun=watch.moment())
    return call, tensors


def _mark(leaf: Any) -> Any:
    """`TENSOR` for a tensor; anything else as it is."""
    return TENSOR if isinstance(leaf, torch.Tensor) else leaf


class KeywordOnly(CustomRuleError, NotImplementedError):
    """An argument is passed that has no position."""


def signature_of(f: Callable[..., Any]) -> inspect.Signature | None:
    """The function's signature, None where Python knows none."""
    try:
        return inspect.signature(f)
    except (TypeError, ValueError):
        return None


def _positional(
    function: Any, signature: inspect.Signature | None, args: Any, kwargs: Any
) -> tuple[Any, ...]:
    """The call's arguments by position, defaults among them."""
    if signature is None:
        if kwargs:
            raise CustomRuleError(
                f"{function.__name__}: has no signature, so its arguments are passed by position"
            )
        return tuple(args)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    named = [key for key in bound.kwargs if key in kwargs]
    if named:
        raise KeywordOnly(
            f"{function.__name__}: {', '.join(named)} can only be passed by name, but rules take"
            " arguments by position: no kwarg-only Tensor args"
        )
    return bound.args


# ---- capturing rules ----

_being_captured: ContextVar[tuple[Any, ...]] = ContextVar(
    "thunder_fn_rules_being_captured", default=()
)


def is_being_captured(function: Any) -> bool:
    """Test whether the rule of this function is being captured: a call of the function in it
    gets its rule later.
    """
    return any(function is other for other in being_captured())


def being_captured() -> tuple[Any, ...]:
    """The functions whose rules are being captured, the outermost first."""
    return _being_captured.get()


def capturing_rule_of(function: Any) -> AbstractContextManager[None]:
    """Capture the function's rule inside."""
    return setting(_being_captured, (*being_captured(), function))


def captured_body(op: str, function: Callable[..., Any], tensors: Sequence[Any]) -> Captured:
    """Capture a function of tensors, which may not write to them."""
    captured = capture_writing(function, tensors)
    check_no_writes(op, function, captured)
    return captured


def capture_writing(function: Callable[..., Any], tensors: Sequence[Any]) -> Captured:
    """Capture a function of tensors. Those that a capture around knows have their values inside."""
    recorder = current()
    is_told = recorder is not None and recorder.values.is_of_call
    known, inside = (EVERY_LEAF, CUSTOM_RULE) if is_told else (None, "")
    return capture(function, tuple(tensors), known=known, inside=inside)


def bind_captured(
    recorder: Recorder,
    op: Op,
    call: Call,
    bodies: Sequence[Captured],
    tensors: Sequence[Any],
    **options: Any,
) -> Any:
    """Record a call whose bodies have been captured, the function's own first, and return its
    result. One that is an argument or a view of it cannot be changed, nor can that. Where gradients
    are off, it is an ordinary view.
    """
    traces, closures = close_bodies(bodies)
    values, captured = (*tensors, *closures), bodies[0]
    types = traces[0].output_types
    results = [*bind(recorder, op, values, traces, types, captured.strides, **options)]
    for shared in captured.shared:
        source = tensors[shared.source] if isinstance(shared.source, int) else shared.source
        value = results[shared.result]
        known = captured.trace, shared.result, source
        view = view_of_input(recorder, *known) if call.has_foreign else None
        if view is None:  # nobody writes to results of this package's own functions
            part(recorder, source, value, call.name)
        else:
            results[shared.result] = with_memory_of(recorder, value, view, call.name)
    return captured.result(tuple(results))


def with_memory_of(
    recorder: Recorder, value: torch.Tensor, view: torch.Tensor, name: str
) -> torch.Tensor:
    """Take a result of a call, which has a history of its own, in the memory of a view. Neither can
    be changed where gradients are on, as in eager mode.
    """
    bits = internals.bits_between(value, view)
    for bit in bits:  # what lies in memory is the value without them
        value, view = bit(value).resolve_conj().resolve_neg(), bit(view)
    recorder.history.set_data(value, view)
    part(recorder, view, value, name, is_linked=True)
    for bit in bits:
        value = bit(value)
    return value


def examples_of(types: Sequence[Type]) -> list[torch.Tensor]:
    """Tracers of these types, for capturing a function of which only the types are known. A
    capture is running.
    """
    recorder = current()
    if recorder is None:
        raise CustomRuleError("examples are made inside a capture")
    tracers = (recorder.tracer_of(recorder.fresh(type)) for type in types)
    return [tracer for tracer in tracers if tracer is not None]


def inside_capture(run: Callable[[], Any], begun: Moment | None = None) -> Any:
    """Run in a capture that nobody reads, with Python's objects as they were at a moment. Run again
    with symbols if a size depends on data.
    """
    with begun.again() if begun is not None else nullcontext():
        try:
            with Recorder().running():
                return run()
        except (DataDependentShape, DataDependentValue):
            with Recorder(symbolic=True).running():
                return run()


# ---- what rules return ----


def _described_leaves(captured: Captured) -> list[tuple[str, str]]:
    """The leaves of a result: how one writes each, and its type or static value."""
    types = iter(captured.trace.output_types)
    paths = pytree.paths(captured.result(tuple(range(captured.num_results))), "out")
    leaves = [
        str(next(types)) if leaf is TENSOR else f"the value {leaf!r}"
        for leaf in captured.out_leaves
    ]
    return list(zip(paths, leaves, strict=True))


def spread(tree: Any, like: Any, path: str, where: str) -> list[Any]:
    """The leaves of a tree in the structure of another, None or a bool standing for all leaves of a
    subtree.

    Raises:
        CustomRuleError: the structures differ; names the place.
    """
    leaves, spec = pytree.flatten(like)
    if tree is None or isinstance(tree, bool):
        return [tree] * len(leaves)
    if spec.is_leaf():
        return [tree]
    try:
        children = spec.one_level()
        if children is None:
            return []
        mine, its = pytree.flatten_up_to(children, like), pytree.flatten_up_to(children, tree)
    except (ValueError, TypeError, AttributeError):
        raise CustomRuleError(
            f"{where} returned {described(tree)} for {path}, which is {described(like)}",
            fix="Return the same structure, with None for what has no gradient.",
        ) from None
    entries = [accessor.codify(path) for accessor in children.accessors()]
    return [
        leaf
        for a, b, name in zip(its, mine, entries, strict=True)
        for leaf in spread(a, b, name, where)
    ]


def described(tree: Any) -> str:
    """A value, in a few words."""
    if tree is None:
        return "None"
    if isinstance(tree, torch.Tensor | TensorType):
        return str(tree if isinstance(tree, TensorType) else type_of_value(tree))
    _, spec = pytree.flatten(tree)
    return kind_of(tree) if spec.is_leaf() else pytree.describe(spec)


def check_like(value: Any, type: Type, path: str, where: str) -> torch.Tensor:
    """A tensor of this type.

    Raises:
        CustomRuleError: it is something else.
    """
    if not isinstance(value, torch.Tensor):
        raise CustomRuleError(f"{where} returned {described(value)} for {path}, which is {type}")
    found = type_of_value(value)
    if found != type:
        raise CustomRuleError(
            f"{where} returned {found} for {path}, which is {type}",
            fix=(
                "Return the same shape and dtype, e.g. with `.sum_to_size(x.shape)` or"
                " `.to(x.dtype)`."
            ),
        )
    return value


def pair_of(found: Any, what: str, where: str) -> tuple[Any, Any]:
    """The two values that a rule returned.

    Raises:
        CustomRuleError: it returned something else.
    """
    if not isinstance(found, tuple) or len(found) != 2:
        raise CustomRuleError(f"{where} must return {what}, but it returned {described(found)}")
    return found


def tensors_like(
    found: Any,
    primal: Captured,
    root: str,
    where: str,
    *,
    types: Sequence[Type] | None = None,
    or_none: bool = False,
) -> list[Any]:
    """The tensors of a tree that has the structure and types of a function's result.

    Args:
        types: those of the tensors, where they are not the result's.
        or_none: it is a tangent, of which parts may be None; what has no tangent is not looked at.

    Raises:
        CustomRuleError: a structure or a type differs.
    """
    leaves = spread(found, primal.marks, root, where)
    paths, expected = pytree.paths(primal.marks, root), iter(types or primal.trace.output_types)
    tensors: list[Any] = []
    for leaf, mark, path in zip(leaves, primal.out_leaves, paths, strict=True):
        if mark is not TENSOR:
            continue
        type = next(expected)
        absent = or_none and (leaf is None or not is_differentiable(type))
        tensors.append(None if absent else check_like(leaf, type, path, where))
    return tensors


def check_gradient(value: Any, type: Type, path: str, where: str) -> torch.Tensor:
    """A gradient of a differentiable tensor of this type.

    Raises:
        CustomRuleError: it is something else.
    """
    if not is_differentiable(type):
        raise CustomRuleError(
            f"{where} returned a gradient for {path}, which is {type}", fix="Return None for it."
        )
    return check_like(as_before_autocast(type, value), type, path, where)


def check_same_result(primal: Captured, other: Captured, where: str) -> None:
    """Raise unless the first part of another function's result has the structure and types of
    the function's.
    """
    first = other.out_spec.children()[0]
    different = pytree.difference(first, primal.out_spec, "its out", "the function's out")
    if different is not None:
        raise CustomRuleError(f"{where} returned another structure than the function: {different}")
    for (path, mine), its in zip(_described_leaves(primal), _described_leaves(other), strict=False):
        if mine != its[1]:
            raise CustomRuleError(
                f"{where} returned {its[1]} for {path}, but the function returns {mine}"
            )


# ---- outside a capture ----


def call_eagerly(f: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Capture a function of tensors and evaluate it."""
    captured = capture(f, tuple(tensors))
    return captured.result(evaluate(captured.trace, tensors))
