"""Operators that an executor brings.

An operator is a function that is recorded as one equation, a composite named `executor::operator`.
Its body is the trace of `like`, so every transform and every other executor knows its meaning. Its
own executor computes it by `fn`. The body of an operator with `meta` only is one opaque call of
`fn`. Rules that an operator brings are in its body too, as custom_vjp, custom_jvp and custom_vmap
equations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal as Choice

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import Captured, current, pytree
from thunder_fn.capture.apply import bind_equation, can_bind, operands_of, replay
from thunder_fn.capture.recorder import Recorder
from thunder_fn.capture.rewriting import remembered_in_context
from thunder_fn.capture.scopes import encode_call, in_scope, lift_call, user_source
from thunder_fn.capture.supported import LITERALS, is_wrapped
from thunder_fn.capture.under_autograd import bind_followed
from thunder_fn.derived.leaf_vjp import alone
from thunder_fn.errors import ExecutorError, ThunderError, kind_of
from thunder_fn.executors.grad_transforms import DerivedRule, LazyRule, derive_rule
from thunder_fn.executors.matching import FakeCall, python_values
from thunder_fn.executors.running import Runner
from thunder_fn.ir import ops
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.trace import (
    Arg,
    Equation,
    Literal,
    TensorType,
    Trace,
    Type,
    map_arg,
    type_of_value,
)
from thunder_fn.structured.custom_jvp import custom_jvp
from thunder_fn.structured.custom_vjp import CUSTOM_VJP
from thunder_fn.structured.custom_vmap import custom_vmap
from thunder_fn.structured.opaque import OPAQUE
from thunder_fn.structured.shared import custom_calls as calls
from thunder_fn.structured.shared.bind import bind, bind_composite, split_body

Function = Callable[..., Any]

Rule = Choice["grad_transform", "jvp", "vmap"]

_running: ContextVar[frozenset[tuple[Any, Rule]]] = ContextVar(
    "thunder_fn_operator_rules", default=frozenset()
)


def _in_rule_of(operator: Operator, rule: Rule) -> AbstractContextManager[None]:
    """Call the operator inside without this rule, which is made of it."""
    pair: tuple[Any, Rule] = (operator, rule)
    return setting(_running, _running.get() | {pair})


@dataclass(frozen=True, eq=False)
class Operator:
    """A function that an executor computes in its own way. Made by
    `OperatorExecutor.register_operator`.

    Inside a traced function a call is one equation. Anywhere else a call runs `fn`, or where
    autograd or torch.func looks on, what the operator means.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> ex = tfn.extend.OperatorExecutor("mine")
        >>> double = ex.register_operator("double", like=lambda a: a * 2, fn=lambda a: a + a)
        >>> double, double(torch.ones(2))
        (<operator mine::double>, tensor([2., 2.]))
        >>> print(tfn.trace(double, torch.ones(2)))
        def double(v0):
            # v0: f32[2]
            v1 = double_1(v0)  # f32[2]
                # def double_1(v0):
                #   v1 = aten.mul.Tensor(v0, 2)  # f32[2]
                #   return (v1,)
            return (v1,)
    """

    executor: str
    name: str
    fn: Function
    like: Function | None = None
    meta: Function | None = None
    grad_transform: Function | None = None
    jvp: Function | None = None
    vmap: Function | None = None

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def __composite__(self) -> str:
        """The name of its equations."""
        return f"{self.executor}::{self.name}"

    def __repr__(self) -> str:
        return f"<operator {self.__composite__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _operator_named, (self.executor, self.name)

    @cached_property
    def runner(self) -> Runner:
        """The function that programs call."""
        return Runner(self.name, self.fn)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        kwargs = dict(sorted(kwargs.items()))
        recorder = current()
        if recorder is not None:
            return self._record(recorder, *lift_call(recorder, args, kwargs))
        call = _Arguments.of(args, kwargs)
        if not internals.any_followed(call.tensors) and not any(map(is_wrapped, call.tensors)):
            return self.fn(*args, **kwargs)
        return calls.call_eagerly(
            lambda *tensors: call.with_tensors(tensors).apply(self), call.tensors
        )

    # ---- recording ----

    def _record(self, recorder: Recorder, args: Any, kwargs: Any) -> Any:
        """One equation, whose body is what the operator means."""
        call = _Arguments.of(args, kwargs)
        for leaf in call.leaves:
            if not isinstance(leaf, (torch.Tensor, *LITERALS)):
                raise self._misuse(
                    f"{kind_of(leaf)} cannot be part of a trace; pass tensors, numbers, strings,"
                    " dtypes, devices or None"
                )
        new_args, new_kwargs = encode_call(recorder, args, kwargs)
        if new_args is None or new_kwargs is None:  # a torch.func transform is at work
            captured = self._capture(call)
        else:
            single = alone(Equation(ops.composite(self.__composite__), new_args, new_kwargs, ()))
            captured = _capture_like(self, single, self._rules_at_work())
            if can_bind(recorder, call.tensors):
                return captured.result(
                    self._bind(recorder, call, captured.trace, new_args, new_kwargs)
                )
        run: Callable[[], Any] = lambda: replay(recorder, captured.trace, call.tensors)
        return captured.result(
            in_scope(recorder, self.__composite__, "composite", run, args, kwargs)
        )

    def _bind(
        self,
        recorder: Recorder,
        call: _Arguments,
        body: Trace,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
    ) -> tuple[Any, ...]:
        def bind() -> tuple[Any, ...]:
            new_args = tuple(map_arg(recorder.history.read, arg) for arg in args)
            new_kwargs = tuple((key, map_arg(recorder.history.read, arg)) for key, arg in kwargs)
            op = ops.composite(self.__composite__)
            return bind_equation(recorder, op, new_args, (body,), body.output_types, new_kwargs)

        if operands_of(recorder, call.tensors) is not None:
            return bind()
        apply = lambda half, inputs: bind_composite(recorder, half.name, half, inputs)
        return bind_followed(recorder, call.tensors, bind, apply, split_body)

    def _capture(self, call: _Arguments) -> Captured:
        """Capture the operator on these arguments."""

        def meaning(*tensors: Any) -> Any:
            return call.with_tensors(tensors).apply(self._mean)

        meaning.__name__ = self.name
        captured = calls.captured_body(self.name, meaning, call.tensors)
        source = "like" if self.like is not None else "meta"
        if not captured.trace.outputs:
            raise self._misuse(f"{source} returned no tensor")
        if any(not constant.owned for constant in captured.trace.constants):
            raise self._misuse(
                f"{source} reads a tensor from outside, which transforms could not see; pass it as"
                " an argument"
            )
        return captured

    def _misuse(self, text: str) -> ExecutorError:
        return ExecutorError(f"{self.name}: {text}", source=user_source(current()))

    # ---- what it means ----

    def _rules_at_work(self) -> frozenset[Rule]:
        return frozenset(rule for operator, rule in _running.get() if operator is self)

    def _mean(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the operator means, with the rules that it brings but for those that are
        being captured.
        """
        without = self._rules_at_work()
        function = self._plainly
        if self.like is None:
            args, kwargs = self._by_position(args, kwargs)
        if self.jvp is not None and "jvp" not in without:
            with_jvp: Any = custom_jvp(function)
            with_jvp.defjvp(self._guarded("jvp", self.jvp))
            function = with_jvp
        if self.grad_transform is not None and "grad_transform" not in without:
            function = _WithGradTransform(self, function)
        if self.vmap is not None and "vmap" not in without:
            with_vmap = custom_vmap(function)
            with_vmap.def_vmap(self._guarded("vmap", self.vmap))
            function = with_vmap
        return function(*args, **kwargs)

    def _by_position(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with what `fn` takes by position by position, as rules take it."""
        signature = calls.signature_of(self.fn) if kwargs else None
        if signature is None:
            return args, kwargs
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise self._misuse(str(error)) from None
        if bound.kwargs:
            bound.apply_defaults()
        return bound.args, bound.kwargs

    def _guarded(self, kind: Rule, rule: Function) -> Function:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with _in_rule_of(self, kind):
                return rule(*args, **kwargs)

        guarded.__name__ = getattr(rule, "__name__", "rule")
        return guarded

    @cached_property
    def _plainly(self) -> Function:
        return self.like if self.like is not None else _Opaque(self)


def _operator_named(executor: str, name: str) -> Operator:
    """The operator of a registered executor."""
    from thunder_fn.executors.registry import get_executor

    return get_executor(executor).rules[f"{executor}::{name}"].operator


@remembered_in_context(1024)
def _capture_like(operator: Operator, single: Trace, without: frozenset[Rule]) -> Captured:
    """Capture the operator on arguments like those of the only equation, without some of its
    rules.
    """
    (equation,) = single.equations
    supply = iter(calls.examples_of(equation.operand_types))
    given = python_values(equation, lambda _: next(supply))
    return operator._capture(_Arguments.of(*given))  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The arguments of a call as leaves and their structure."""

    leaves: tuple[Any, ...]
    spec: pytree.PyTreeSpec

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        leaves, spec = pytree.flatten((args, kwargs))
        return _Arguments(tuple(leaves), spec)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def layout(self) -> tuple[Literal, ...]:
        """The leaves, with marks for tensors."""
        return tuple(map(Literal, pytree.statics(self.leaves)))

    def with_tensors(self, tensors: Sequence[Any]) -> _Arguments:
        leaves = pytree.filled(pytree.statics(self.leaves), tensors)
        return _Arguments(tuple(leaves), self.spec)

    def apply(self, function: Any) -> Any:
        args, kwargs = pytree.unflatten(self.spec, self.leaves)
        return function(*args, **kwargs)


def _filled(
    layout: tuple[Literal, ...], spec: pytree.PyTreeSpec, tensors: Sequence[Any]
) -> _Arguments:
    """Arguments of a known layout."""
    return _Arguments(tuple(pytree.filled((leaf.value for leaf in layout), tensors)), spec)


# ---- operators of which only the types are known ----


@dataclass(frozen=True)
class _FnCall:
    """A call of an operator's fn, as an opaque equation has it."""

    operator: Operator
    layout: tuple[Literal, ...]
    spec: pytree.PyTreeSpec
    types: tuple[Type, ...]

    @property
    def name(self) -> str:
        """The operator's name."""
        return self.operator.name

    @property
    def __name__(self) -> str:
        return self.name

    def run(self, *operands: Any) -> tuple[Any, ...]:
        """Call fn, and return its tensors."""
        args, kwargs = pytree.unflatten(self.spec, _filled(self.layout, self.spec, operands).leaves)
        return self.operator.runner.run(args, kwargs, self.types)


class _Opaque:
    """An operator's fn inside a capture: one opaque equation, with the types that `meta` says."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.__name__ = operator.name

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        recorder = current()
        assert recorder is not None, "called inside a capture only"
        call = _Arguments.of(args, kwargs)
        found, spec = pytree.flatten(self.result_of_meta(call))
        types = tuple(type_of_value(leaf) for leaf in found if isinstance(leaf, torch.Tensor))
        fn_call = _FnCall(self.operator, call.layout, call.spec, types)
        results = bind(recorder, OPAQUE, call.tensors, (), types, call=fn_call)
        return pytree.unflatten(spec, pytree.filled(pytree.statics(found), results))

    def result_of_meta(self, call: _Arguments) -> Any:
        mode, operator = internals.fake_mode(), self.operator
        types = [type_of_value(tensor) for tensor in call.tensors]
        fakes = [internals.fake_in(mode, type) for type in types if isinstance(type, TensorType)]
        args, kwargs = pytree.unflatten(call.spec, call.with_tensors(fakes).leaves)
        assert operator.meta is not None, "an operator has like or meta"
        try:
            result = FakeCall(args, kwargs, mode).apply(operator.meta)
        except ThunderError:
            raise
        except Exception as error:
            text = f"meta raised {type(error).__name__}: {error}"
            raise operator._misuse(text) from error  # pyright: ignore[reportPrivateUsage]
        for leaf in pytree.flatten(result)[0]:
            if not isinstance(leaf, (torch.Tensor, *LITERALS)):
                text = (
                    f"meta returned {kind_of(leaf)}; it returns tensors, such as"
                    " `torch.empty_like(a)`, and numbers"
                )
                raise operator._misuse(text)  # pyright: ignore[reportPrivateUsage]
        return result


# ---- operators with a grad transform ----


class _WithGradTransform:
    """A function whose derivative is an operator's grad transform."""

    def __init__(self, operator: Operator, function: Function) -> None:
        self.operator, self.function = operator, function
        self.__name__ = operator.name

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        recorder, operator = current(), self.operator
        assert recorder is not None and operator.grad_transform is not None, (
            "made for operators that have one"
        )
        call = _Arguments.of(args, kwargs)
        primal: Callable[..., Any] = lambda *tensors: call.with_tensors(tensors).apply(
            self.function
        )
        captured = calls.captured_body(operator.name, primal, call.tensors)
        rule = _OperatorRule(captured.trace, operator, call.layout, call.spec)
        return captured.result(
            bind(
                recorder,
                CUSTOM_VJP,
                call.tensors,
                (captured.trace,),
                captured.trace.output_types,
                **rule.options,
            )
        )


@dataclass(frozen=True)
class _OperatorRule(LazyRule):
    """An operator's grad transform for one kind of call."""

    operator: Operator
    layout: tuple[Literal, ...]
    spec: pytree.PyTreeSpec

    @property
    def __name__(self) -> str:
        return f"{self.operator.name}_grad"

    def derive(self) -> DerivedRule:
        """The operator's rule."""
        transform = self.operator.grad_transform
        assert transform is not None, "made for operators that have one"

        def joint(*tensors: Any) -> Any:
            return _filled(self.layout, self.spec, tensors).apply(transform)

        with _in_rule_of(self.operator, "grad_transform"):
            return derive_rule(
                joint, self.primal.input_types, self.primal.output_types, self.operator.name
            )
