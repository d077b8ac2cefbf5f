"""verify: a program that runs beside `evaluate`, and names the first equation that is farther off
than it may be.

Each call of an executor is given the values that the program has there, and so is `evaluate` of its
meaning. The same holds for each call in a step of a loop or in a branch. Then it holds for the loop
or choice as a whole, as the program runs it. Only the equation that is wrong is named, not those
that follow from it.

The tolerance, by the label and by the dtype of a result, relative to the element or to the mean of
all:

                          float64   float32   float16   bfloat16
    bitwise               0         0         0         0
    reassociating         1e-12     1e-5      5e-3      4e-2
    precision-changing    1e-5      1e-2      1e-2      4e-2

An executor may know better than its label (`Executor.numerics_of`): compilers change the precision
of halves only. A result may hang on the last bits of its operands, as a difference of nearly equal
numbers does. No order of computing it is right then. So it may also be off by 16 times what the
last bit of each operand does to it, of halves twice that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from thunder_fn.capture.generators import drawing_from, generators_of, random_state
from thunder_fn.derived.leaf_vjp import alone
from thunder_fn.errors import VerificationError
from thunder_fn.executors.base import NUMERICS, Executor, Numerics
from thunder_fn.executors.claims import Claim, Claimed, claim
from thunder_fn.executors.matching import located_in, python_values
from thunder_fn.executors.running import Runner
from thunder_fn.executors.torch_executor import Program, compiled_region, lower
from thunder_fn.interpreters.check_errors import KINDS, FoundError, check_errors
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import facts
from thunder_fn.ir.constraints import close_symbols
from thunder_fn.ir.symbols import bind, replaced, unbound_symbols
from thunder_fn.ir.trace import Equation, Expr, Literal, Trace, Var
from thunder_fn.structured.shared.running import bodies_compiled_by

Run = Callable[..., tuple[Any, ...]]

_UNITS: dict[Numerics, dict[torch.dtype, float]] = {
    "bitwise": {},
    "reassociating": {
        torch.float64: 1e-12,
        torch.float32: 1e-5,
        torch.float16: 5e-3,
        torch.bfloat16: 4e-2,
    },
    "precision-changing": {
        torch.float64: 1e-5,
        torch.float32: 1e-2,
        torch.float16: 1e-2,
        torch.bfloat16: 4e-2,
    },
}
_LAST_BITS = {torch.float16: 2, torch.bfloat16: 2}


class Verifier(Executor):
    """Claims nothing; the programs that it finishes are verified whenever they run."""

    def finish(self, program: Program) -> Program:
        """The program, verified."""
        checking, claimed = _Checking(program.claimed.asked), program.claimed

        def run(*inputs: Any) -> tuple[Any, ...]:
            kept = [
                value.detach().clone() if isinstance(value, torch.Tensor) else value
                for value in inputs
            ]
            meaning = program.meaning or claimed.trace
            expected = _from_here((meaning,), lambda: checking.claims(claimed, meaning, kept))
            moved = lambda: sensitivity(meaning, kept)
            results = program.run(*inputs)
            label = loosest(["bitwise", *checking.labels(claimed)])
            chance = unwritten_outputs(meaning)
            for position, (found, wanted) in enumerate(zip(results, expected, strict=True)):
                difference = divergence(found, wanted, label, _at(position, moved))
                if difference is not None and position not in chance:
                    raise VerificationError(
                        f"verify: output {position} of the program {claimed.trace.name} differs"
                        f" from what its equations give one by one: {difference}"
                    )
            return results

        return replace(program, run=run)


VERIFIER = Verifier("verify", numerics="bitwise")


class Raising(Executor):
    """Claims nothing; the programs that it finishes raise the first error that they find."""

    def finish(self, program: Program) -> Program:
        """The program that looks for errors, without claims of others."""
        checked, checks = check_errors(program.meaning or program.trace, KINDS)
        if not checks:
            return program
        inner = lower(checked).run

        def run(*inputs: Any) -> tuple[Any, ...]:
            *results, code = inner(*inputs)
            FoundError(code, checks).throw()
            return tuple(results)

        return replace(program, run=run)


RAISING = Raising("errors", numerics="bitwise")


def _from_here(traces: Sequence[Trace], run: Callable[[], Any]) -> Any:
    """Run a function that evaluates traces with the random numbers that come next; they still
    come next afterwards.
    """
    restore = random_state(tuple(one for trace in traces for one in generators_of(trace)))
    with drawing_from(restore, restore):
        return run()


def _meant(meaning: Trace, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Evaluate a whole trace, bodies of loops too."""
    with bodies_compiled_by(lambda body: lambda *values: evaluate(body, values)):
        return evaluate(meaning, inputs)


def loosest(labels: Sequence[Numerics]) -> Numerics:
    """The label that allows most."""
    return max(labels, key=NUMERICS.index)


@dataclass(frozen=True)
class _Checking:
    """A run of claimed traces equation by equation. `executors` are asked about bodies; `programs`
    are those of loops and choices.
    """

    executors: tuple[Executor, ...]
    programs: dict[Trace, Run] = field(default_factory=dict[Trace, "Run"])
    bodies: dict[Trace, Claimed] = field(default_factory=dict[Trace, "Claimed"])

    def claims(self, claimed: Claimed, meaning: Trace, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run a claimed trace, each claim beside what it stands for; the outputs.

        Raises:
            VerificationError: an executor's results are farther off than its label says; names the
                equation.
        """
        if unbound_symbols(
            claimed.trace
        ):  # sizes that are found in data: there is no equation by equation
            return _meant(meaning, inputs)
        if claimed.replaced:
            _check_transforms(claimed, meaning, inputs)
        known = bind(claimed.trace.inputs, inputs)
        env: list[Any] = [*inputs, *(constant.tensor for constant in claimed.trace.constants)]
        with torch.no_grad():
            for equation in claimed.trace.equations:
                operands = [env[var.index] for var in equation.operands]
                match equation.op.kind:
                    case "leaf":
                        env.extend(evaluate(*_closed(alone(equation), operands, known)))
                    case "structured":
                        env.extend(self.structured(equation, operands, known))
                    case "composite":
                        claim = claimed.claim_of(equation)
                        found = _from_here(
                            equation.bodies, lambda: _run(claim, equation, env, known)
                        )
                        label = claim.executor.numerics_of(claim.region or equation.body)
                        who = f"{claim.name}, which {claim.executor.name} runs,"
                        _check(
                            equation, *_closed(equation.body, operands, known), found, label, who
                        )
                        env.extend(found)
        outputs = (
            env[atom.index] if isinstance(atom, Var) else atom.value
            for atom in claimed.trace.outputs
        )
        return tuple(
            replaced(value, known) if isinstance(value, Expr) else value for value in outputs
        )

    def structured(
        self, equation: Equation, operands: Sequence[Any], known: dict[Any, Any]
    ) -> tuple[Any, ...]:
        """A loop or a choice: step by step, then as the program runs it."""
        single, operands = _closed(alone(equation), operands, known)
        if not equation.bodies or any(map(unbound_symbols, equation.bodies)):
            return evaluate(single, operands)

        def by_steps() -> tuple[Any, ...]:
            with bodies_compiled_by(
                lambda body: lambda *inputs: self.claims(self.body(body), body, inputs)
            ):
                return evaluate(single, operands)

        expected = _from_here((single,), by_steps)
        if single not in self.programs:
            self.programs[single] = lower(single, executors=self.executors, below_autograd=True).run
        found = self.programs[single](*operands)
        label = loosest(self.labels_inside(equation))
        _check(
            equation,
            single,
            operands,
            found,
            label,
            f"{equation.op.name}, as the program runs it,",
            expected,
        )
        return found

    def body(self, body: Trace) -> Claimed:
        """A body, claimed as the program's are."""
        if body not in self.bodies:
            self.bodies[body] = claim(dce(body), self.executors, below_autograd=True)
        return self.bodies[body]

    def labels(self, claimed: Claimed) -> list[Numerics]:
        """The labels of all that runs in a trace."""
        found: list[Numerics] = []
        for equation in claimed.trace.equations:
            if equation.op.kind == "composite":
                one = claimed.claim_of(equation)
                found.append(one.executor.numerics_of(one.region or equation.body))
            elif equation.op.kind == "structured":
                found += self.labels_inside(equation)
        return found

    def labels_inside(self, equation: Equation) -> list[Numerics]:
        """The labels of what runs in a loop or a choice, which may be compiled as one."""
        found: list[Numerics] = ["reassociating"]
        return found + [label for body in equation.bodies for label in self.labels(self.body(body))]


def _closed(
    trace: Trace, operands: Sequence[Any], known: dict[Any, Any]
) -> tuple[Trace, Sequence[Any]]:
    """A trace that may read symbols from around it with these as further inputs, and its inputs."""
    closed, numbers = close_symbols(trace)
    return closed, [*operands, *(replaced(number, known) for number in numbers)]


def _check(
    equation: Equation,
    meaning: Trace,
    operands: Sequence[Any],
    found: Sequence[Any],
    label: Numerics,
    who: str,
    expected: Sequence[Any] | None = None,
) -> None:
    wanted = expected if expected is not None else _meant(meaning, operands)
    chance = unwritten_outputs(meaning)
    for position, (one, other) in enumerate(zip(found, wanted, strict=True)):
        difference = divergence(
            one, other, label, _at(position, lambda: sensitivity(meaning, operands))
        )
        if difference is not None and position not in chance:
            what = (
                f"verify: output {position} of {who} is farther from its meaning than {label!r}"
                f" allows: {difference}"
            )
            raise VerificationError(located_in(what, equation))


def _at(position: int, moved: Callable[[], Sequence[Sequence[Any]]]) -> Callable[[], Sequence[Any]]:
    return lambda: [sample[position] for sample in moved()]


def _run(
    claim: Claim, equation: Equation, env: Sequence[Any], numbers: dict[Any, Any]
) -> tuple[Any, ...]:
    args, kwargs = python_values(equation, lambda var: env[var.index])
    if isinstance(claim.run, Runner):
        return claim.run.run(args, kwargs, equation.output_types, equation.source)
    run = claim.run or compiled_region(claim)
    return getattr(run, "on_its_own", run)(
        *args, *(replaced(number, numbers) for number in claim.numbers), **kwargs
    )


def _check_transforms(claimed: Claimed, meaning: Trace, inputs: Sequence[Any]) -> None:
    """Check that a claimed trace means what the trace meant, up to the loosest of the executors'
    labels.
    """
    found, meant = (
        _from_here((trace,), lambda: _meant(trace, inputs)) for trace in (claimed.trace, meaning)
    )
    label = loosest(
        [claimed.executors[one.taken_by].numerics for one in claimed.replaced if one.taken_by]
    )
    chance = unwritten_outputs(meaning)
    for position, (one, wanted) in enumerate(zip(found, meant, strict=True)):
        difference = divergence(
            one, wanted, label, _at(position, lambda: sensitivity(meaning, inputs))
        )
        if difference is not None and position not in chance:
            names = dict.fromkeys(
                f"{decision.taken_by} for {decision.op}" for decision in claimed.replaced
            )
            raise VerificationError(
                f"verify: output {position} of the program {claimed.trace.name} is farther from its"
                f" meaning than {label!r} allows: {difference}\nEach call is right, so an execution"
                f" transform computes something else: {', '.join(names)}"
            )


# ---- memory that nobody wrote ----


def unwritten_outputs(trace: Trace, given: Collection[int] = ()) -> set[int]:
    """The outputs, by position, that hold or hang on values of memory that nobody wrote: two runs
    may differ in them.

    `given` are inputs, by position, that do.
    """
    found = {trace.inputs[place].index for place in given}
    for equation in trace.equations:
        found.update(var.index for var in _unwritten(equation, found))
    return {
        place
        for place, atom in enumerate(trace.outputs)
        if isinstance(atom, Var) and atom.index in found
    }


def _unwritten(equation: Equation, found: Collection[int]) -> Sequence[Var]:
    """The results of an equation that hang on memory that nobody wrote, such as the variables in
    `found`.
    """
    read = [place for place, var in enumerate(equation.operands) if var.index in found]
    if equation.op.kind == "composite":
        return [equation.outputs[place] for place in unwritten_outputs(equation.body, read)]
    if equation.op.kind == "structured":
        return equation.outputs if read or any(map(unwritten_outputs, equation.bodies)) else ()
    if equation.op in facts.EMPTY:
        return equation.outputs
    if equation.op in facts.OVERWRITES and equation.args and isinstance(equation.args[0], Var):
        first = equation.args[0]
        read = [
            place
            for place, var in enumerate(equation.operands)
            if var.index in found and var != first
        ]
    return equation.outputs if read else ()


# ---- how far off a value is ----


def sensitivity(meaning: Trace, inputs: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Evaluate a trace with the last bit of each operand changed, in two ways; nothing where
    that is an error.
    """
    generator = torch.Generator().manual_seed(0)

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=generator).mul(2).sub(1).to(value)
        return value.detach() * (1 + signs * torch.finfo(value.dtype).eps)

    samples: list[tuple[Any, ...]] = []
    for _ in range(2):
        try:
            with torch.no_grad():
                samples.append(
                    _from_here(
                        (meaning,), lambda: _meant(meaning, [moved(value) for value in inputs])
                    )
                )
        except Exception:  # noqa: BLE001  an index that is computed with may be out of range then
            return []
    return samples


def divergence(
    found: Any, wanted: Any, numerics: Numerics, moved: Callable[[], Sequence[Any]]
) -> str | None:
    """The distance of a value from another, if it exceeds what a label allows. `moved` are
    values that are as right.
    """
    if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
        return None if Literal(found) == Literal(wanted) else f"{found!r}, not {wanted!r}"
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return f"{found.dtype} {tuple(found.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
    if torch.equal(torch.nan_to_num(found, 1.5), torch.nan_to_num(wanted, 1.5)) and _same_nans(
        found, wanted
    ):
        return None
    samples = (
        []
        if numerics == "bitwise"
        else [sample for sample in moved() if isinstance(sample, torch.Tensor)]
    )
    if not (wanted.is_floating_point() or wanted.is_complex()):
        unsure = sum(
            ((sample != wanted) for sample in samples), torch.zeros_like(wanted, dtype=torch.bool)
        )
        wrong = (found != wanted) & ~unsure.bool()
        return (
            f"{int(wrong.sum())} of {wanted.numel()} elements differ" if bool(wrong.any()) else None
        )
    if not _same_nans(found, wanted):
        return "NaN in other places"
    error, scale = _distance(found, wanted), _distance(wanted, torch.zeros_like(wanted))
    bound = _UNITS[numerics].get(_real(wanted.dtype), 0.0) * torch.maximum(scale, scale.mean())
    for sample in samples:
        change = _distance(sample, wanted)
        bound += _LAST_BITS.get(wanted.dtype, 16) * torch.maximum(change, change.mean())
    if bool((error <= bound).all()):
        return None
    return f"by up to {float(error.max()):.3g}, where values are up to {float(scale.max()):.3g}"


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    high = torch.complex128 if a.is_complex() else torch.float64
    return torch.nan_to_num((a.to(high) - b.to(high)).abs(), posinf=0.0)


def _real(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def _same_nans(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (
        torch.equal(torch.isnan(found), torch.isnan(wanted)) if wanted.is_floating_point() else True
    )
