"""verify: a program that runs beside `evaluate`, and names the first equation that is farther off than it may be.

Each call of an executor is given the values that the program has there, and so is `evaluate` of what it stands for. Only
the equation that is wrong is named, not those that follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from thunder_fn.errors import VerificationError
from thunder_fn.executors.base import Executor, Numerics
from thunder_fn.executors.claims import Claim, Claimed
from thunder_fn.executors.evaluated import compiled_region
from thunder_fn.executors.matching import located_in, python_value
from thunder_fn.executors.running import Runner
from thunder_fn.executors.torch_executor import Program
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.trace import Equation, Literal, Trace, Var

_DIGITS = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float16: 1e-2, torch.bfloat16: 4e-2}
TOLERANCE: dict[Numerics, float] = {"bitwise": 0.0, "reassociating": 1.0, "precision-changing": 100.0}
"""In units of what adding up in another order does to float32 (1e-4), float64 (1e-9), float16 (1e-2), bfloat16 (4e-2)."""


class Verifier(Executor):
    """Claims nothing; the programs that it finishes are verified whenever they run."""

    def finish(self, program: Program) -> Program:
        """The program, verified."""

        def run(*inputs: Any) -> tuple[Any, ...]:
            generator = torch.get_rng_state()
            expected = check_claims(program.claimed, inputs)
            torch.set_rng_state(generator)
            if program.meaning is not None and program.claimed.replaced:
                _check_meaning(program.claimed, expected, evaluate(program.meaning, inputs))
                torch.set_rng_state(generator)
            results = program.run(*inputs)
            _check_results(program.claimed, expected, results)
            return results

        return replace(program, run=run)


VERIFIER = Verifier("verify", numerics="bitwise")


def check_claims(claimed: Claimed, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run a claimed trace equation by equation, each claim beside its meaning; the outputs.

    Raises:
        VerificationError: an executor's results are farther off than its label says; names the equation.
    """
    env: list[Any] = [*inputs, *(constant.tensor for constant in claimed.trace.constants)]
    with torch.no_grad():
        for equation in claimed.trace.equations:
            operands = [env[var.index] for var in equation.operands]
            if equation.op.kind != "composite":
                env.extend(evaluate(_alone(equation), operands))
                continue
            claim = claimed.claim_of(equation)
            results = _run(claim, equation, env)
            expected = evaluate(equation.body, operands)
            for position, (found, wanted) in enumerate(zip(results, expected, strict=True)):
                difference = divergence(found, wanted, claim.executor.numerics)
                if difference is not None:
                    raise VerificationError(
                        located_in(
                            f"verify: output {position} of {claim.name}, which {claim.executor.name} runs, is farther from "
                            f"what it means than {claim.executor.numerics!r} allows: {difference}",
                            equation,
                        )
                    )
            env.extend(results)
    return tuple(env[atom.index] if isinstance(atom, Var) else atom.value for atom in claimed.trace.outputs)


def _alone(equation: Equation) -> Trace:
    from thunder_fn.derive import alone

    return alone(equation)


def _run(claim: Claim, equation: Equation, env: Sequence[Any]) -> tuple[Any, ...]:
    args = tuple(python_value(arg, lambda var: env[var.index]) for arg in equation.args)
    kwargs = {key: python_value(arg, lambda var: env[var.index]) for key, arg in equation.kwargs}
    if isinstance(claim.run, Runner):
        return claim.run.run(args, kwargs, [var.type for var in equation.outputs], equation.source)
    run = claim.run or compiled_region(claim)
    return getattr(run, "on_its_own", run)(*args, **kwargs)


def _check_meaning(claimed: Claimed, expected: Sequence[Any], meant: Sequence[Any]) -> None:
    """What executors compute in place of an equation is as near to it as the loosest of their labels says."""
    names = dict.fromkeys(f"{decision.taken_by} for {decision.op}" for decision in claimed.replaced)
    labels: list[Numerics] = [
        claimed.executors[decision.taken_by].numerics for decision in claimed.replaced if decision.taken_by
    ]
    loosest = max(labels, key=lambda label: TOLERANCE[label])
    for position, (found, wanted) in enumerate(zip(expected, meant, strict=True)):
        difference = divergence(found, wanted, loosest)
        if difference is not None:
            raise VerificationError(
                f"verify: output {position} of the program {claimed.trace.name} is farther from what it means than {loosest!r} "
                f"allows: {difference}\nEach call is right, so an execution transform computes something else: {', '.join(names)}"
            )


def _check_results(claimed: Claimed, expected: Sequence[Any], results: Sequence[Any]) -> None:
    """The program's own results. Bodies of loops run on executors too, and what is compiled as one rounds in its own way."""
    claims = [equation for equation in claimed.trace.equations if equation.op.kind == "composite"]
    labels: list[Numerics] = ["bitwise", *(claimed.claim_of(equation).executor.numerics for equation in claims)]
    if any(equation.op.kind == "structured" for equation in claimed.trace.equations):
        labels.append("precision-changing")
    loosest = max(labels, key=lambda label: TOLERANCE[label])
    for position, (found, wanted) in enumerate(zip(results, expected, strict=True)):
        difference = divergence(found, wanted, loosest)
        if difference is not None:
            raise VerificationError(
                f"verify: output {position} of the program {claimed.trace.name} differs from what its equations give one "
                f"by one: {difference}"
            )


def divergence(found: Any, wanted: Any, numerics: Numerics) -> str | None:
    """How far a value is from another, if that is farther than a label allows."""
    if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
        return None if Literal(found) == Literal(wanted) else f"{found!r}, not {wanted!r}"
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return f"{found.dtype} {tuple(found.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
    if torch.equal(torch.nan_to_num(found, 1.5), torch.nan_to_num(wanted, 1.5)) and _same_nans(found, wanted):
        return None
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return f"{int((found != wanted).sum())} of {wanted.numel()} elements differ"
    if not _same_nans(found, wanted):
        return "NaN in other places"
    high = torch.complex128 if wanted.is_complex() else torch.float64
    error = torch.nan_to_num((found.to(high) - wanted.to(high)).abs())
    scale = torch.nan_to_num(wanted.to(high).abs(), posinf=0.0)
    unit = _DIGITS.get(wanted.dtype, 1e-4) * TOLERANCE[numerics]
    if bool((error <= unit * torch.maximum(scale, scale.mean())).all()):
        return None
    return f"by up to {float(error.max()):.3g}, where values are up to {float(scale.max()):.3g}"


def _same_nans(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(torch.isnan(found), torch.isnan(wanted)) if wanted.is_floating_point() else True
