"""OperatorExecutor: an executor that takes single equations, by operators of its own or in terms
of other ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from thunder_fn.capture.replaced.lookasides import lookasides
from thunder_fn.capture.rewriting import rewritten_by
from thunder_fn.derived.leaf_vjp import alone
from thunder_fn.errors import ExecutorError
from thunder_fn.executors.base import (
    NOT_REGISTERED,
    Answer,
    Checker,
    Executor,
    Instead,
    Numerics,
    Refused,
    Run,
    ask_checker,
)
from thunder_fn.executors.matching import LAYOUT_IS_UNKNOWN, apply_to, keys_of, located_in
from thunder_fn.executors.operators import Function, Operator
from thunder_fn.ir import ops
from thunder_fn.ir.memos import memo
from thunder_fn.ir.text import shown
from thunder_fn.ir.trace import Equation, Trace
from thunder_fn.structured.shared import custom_calls as calls

GRAD_ONLY = Refused("registered with a grad_transform only")


@dataclass(frozen=True)
class Implementation:
    """The implementation of an op by an executor: its function, the check where it is valid, and
    its derivative.
    """

    operator: Operator | None = None
    checker: Checker | None = None
    execution_transform: Function | None = None
    grad_transform: Function | None = None


def _check_functions(where: str, of: str, functions: dict[str, Function | None]) -> None:
    """Raise if what is given for a function is none."""
    for key, value in functions.items():
        if value is not None and not callable(value):
            raise ExecutorError(f"{where}: {key}{of} is not a function: {shown(value, 60)}")


class OperatorExecutor(Executor):
    """An executor that takes equations one by one.

    Args:
        name: an identifier, the first part of the names of its operators.
        version: for people.
        numerics: how far its results may be from those of `evaluate`: `"bitwise"`,
            `"reassociating"` or `"precision-changing"`.

    Example:
        >>> import torch
        >>> from thunder_fn import jit
        >>> ex = OperatorExecutor("mine", version="0.1")
        >>> double = ex.register_operator("double", like=lambda a: a * 2, fn=lambda a: a + a)
        >>> jit(lambda x: double(x) - 1, executors=[ex])(torch.ones(2))
        tensor([1., 1.])
    """

    def __init__(
        self, name: str, version: str = "", *, numerics: Numerics = "reassociating"
    ) -> None:
        super().__init__(name, version=version, numerics=numerics)

    def register_operator(
        self,
        name: str,
        *,
        fn: Function,
        like: Function | None = None,
        meta: Function | None = None,
        grad_transform: Function | None = None,
        jvp: Function | None = None,
        vmap: Function | None = None,
    ) -> Operator:
        """A new operator: a function that is one equation of a trace, and that this executor
        computes with `fn`.

        Law: every transform and every other executor computes what `like` does; `fn` agrees with it
            as exactly as the executor's label says. `fn` is pure: it changes none of its arguments,
            and keeps no count of its calls.

        Args:
            name: an identifier.
            fn: takes the operator's arguments, tensors without gradients among them.
            like: what the operator does, in PyTorch; or
            meta: takes tensors without values and returns such tensors. `fn` is then all that is
                known.
            grad_transform: forward and backward as one function, with `get_grad` and `put_grad`.
            jvp: `jvp(primals, tangents)` returns the output and its tangent, as for `custom_jvp`.
            vmap: `vmap(axis_size, in_batched, *args)` returns the output and which parts of it are
                batched, as for `custom_vmap`.

        Raises:
            ExecutorError: the name is taken or no identifier, or not one of like and meta is given.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise ExecutorError(
                f"{self.name}.register_operator: an operator's name is an identifier, given"
                f" {name!r}"
            )
        if (like is None) == (meta is None):
            raise ExecutorError(
                f"{self.name}.register_operator: {name} needs one of like= and meta=, "
                f"given {'neither' if like is None else 'both'}"
            )
        functions = {"fn": fn, "like": like, "meta": meta, "jvp": jvp, "vmap": vmap}
        functions["grad_transform"] = grad_transform
        _check_functions(f"{self.name}.register_operator", f" of {name}", functions)
        operator = Operator(self.name, name, fn, like, meta, grad_transform, jvp, vmap)
        if operator.__composite__ in self.rules:
            raise ExecutorError(
                f"{self.name}.register_operator: {name} is registered already\n"
                "Give the new operator another name, or make a new executor."
            )
        self.register({operator.__composite__: Implementation(operator)})
        return operator

    def register_implementation(
        self,
        op: Any,
        operator: Operator | None = None,
        *,
        checker: Checker | None = None,
        execution_transform: Function | None = None,
        grad_transform: Function | None = None,
    ) -> None:
        """Say how this executor computes an op that is there already. An earlier registration is
        forgotten.

        Args:
            op: a torch function, an ATen op, a `@composite` function, a module class, an operator,
                or the name of one. A torch function that is one ATen op is met as that op, with the
                op's arguments.
            operator: called with the op's arguments, in place of an execution_transform.
            checker: called with the op's arguments, tensors without values among them; False leaves
                a call to others. So does a text, the reason. An executor that takes nothing of a
                program warns.
            execution_transform: computes the op in terms of others. It is traced when a program is
                made, after all transforms, and its ops are claimed in turn.
            grad_transform: forward and backward as one function, with `get_grad` and `put_grad`. It
                is the op's derivative in functions that are jitted with this executor.

        Raises:
            ExecutorError: `op` is no op, or nothing is registered for it.
        """
        where = f"{self.name}.register_implementation"
        keys = keys_of(op, where)
        own = isinstance(op, Operator) and op.executor == self.name
        if (
            operator is None
            and execution_transform is None
            and grad_transform is None
            and not (own and checker)
        ):
            raise ExecutorError(
                f"{where}: nothing to do for {keys[0]}",
                fix="Give an operator, an execution_transform or a grad_transform.",
            )
        if operator is not None and execution_transform is not None:
            raise ExecutorError(
                f"{where}: give an operator or an execution_transform for {keys[0]}, not both"
            )
        if operator is not None and not isinstance(operator, Operator):
            raise ExecutorError(
                f"{where}: {shown(operator, 60)} is not an operator",
                fix="Pass functions as execution_transform=.",
            )
        functions = {"checker": checker, "execution_transform": execution_transform}
        _check_functions(where, "", {**functions, "grad_transform": grad_transform})
        runs = op if own and execution_transform is None and operator is None else None
        new = Implementation(runs, checker, execution_transform or operator, grad_transform)
        self.register(dict.fromkeys(keys, new))

    def answer(self, equation: Equation) -> Answer:
        """Run it, replace it, or why not."""
        rule: Implementation | None = self.rule_for(equation)
        if rule is None:
            return NOT_REGISTERED
        if rule.operator is None and rule.execution_transform is None:
            return GRAD_ONLY
        reason = ask_checker(rule.checker, equation, self.name)
        if reason is not None:
            return Refused(reason)
        if rule.execution_transform is None:
            assert rule.operator is not None, "one of both is there"
            return Run(rule.operator.name, rule.operator.runner)
        return Instead(_replacement(rule.execution_transform, alone(equation)), rule)

    def grad_transform_of(self, equation: Equation) -> tuple[Callable[..., Any], str] | None:
        """The function, and a name for it; None if there is none for this equation."""
        rule: Implementation | None = self.rule_for(equation)
        if rule is None or rule.grad_transform is None:
            return None
        if ask_checker(rule.checker, equation, self.name) is not None:
            return None
        return (
            rule.grad_transform,
            f"{self.name}: {getattr(rule.grad_transform, '__name__', 'grad_transform')}",
        )


@memo(4096)
def _replacement(transform: Function, single: Trace) -> Trace:
    """The result of an execution transform for an equation, as a trace over its operands."""
    (equation,) = single.equations
    name = getattr(transform, "__name__", "execution_transform")

    def replaced(*tensors: Any) -> Any:
        result = apply_to(transform, equation, *tensors)
        if isinstance(result, dict) and (equation.op.kind == "leaf" or ops.is_call(equation.op)):
            what = (
                f"the execution transform {name} returned a dict, but results of {equation.op} come"
                " in an order"
            )
            raise ExecutorError(located_in(what, equation, "Return a tensor, or a tuple of them."))
        return result

    replaced.__name__ = name
    types = equation.operand_types
    with rewritten_by(None), lookasides(LAYOUT_IS_UNKNOWN):
        captured = calls.inside_capture(
            lambda: calls.captured_body(name, replaced, calls.examples_of(types))
        )
    found, wanted = captured.trace.output_types, equation.output_types
    if found != wanted:
        texts = f"({', '.join(map(str, found))}), but the op gives ({', '.join(map(str, wanted))})"
        raise ExecutorError(
            located_in(f"the execution transform {name} returned {texts}", equation)
        )
    # the user's, not the transform's
    lines = tuple(replace(one, source=equation.source) for one in captured.trace.equations)
    return replace(captured.trace, equations=lines)
