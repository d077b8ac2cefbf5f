"""Tests of the tests: bugs that we plant, each of which a law must catch.

A mutation is a small edit of one function's source. `planted` runs with it; `python -m thunder_fn.testing.mutations`
prints which laws catch which bug. When the source of a function changes, the edit that no longer fits says so.

Source: mutation testing (DeMillo, Lipton, Sayward 1978).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from thunder_fn.errors import ThunderError
from thunder_fn.testing.laws import LAWS, Law, forget
from thunder_fn.testing.strategies import Case, cases

EXAMPLES = 100


class OutdatedMutation(ThunderError):
    """The source that a mutation edits has changed. Adapt the edit."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A bug: in `function` (`module:name` or `module:Class.name`) write `after` for `before`. `law` catches it."""

    bug: str
    function: str
    before: str
    after: str
    law: str


VJP, DERIVE, SIMPLIFY = "thunder_fn.interpreters.vjp", "thunder_fn.derive", "thunder_fn.interpreters.simplify"

MUTATIONS = (
    Mutation(
        "gradients of operands are swapped",
        f"{VJP}:_backward_step",
        "zip(asked, step.split.gradients",
        "zip(asked[::-1], step.split.gradients",
        "vjp is autograd",
    ),
    Mutation(
        "a cotangent is dropped where two meet",
        f"{VJP}:_backward",
        "value if known is None else add(backward, known, value)",
        "value",
        "vjp is adjoint of jvp",
    ),
    Mutation(
        "an output returned twice gets one cotangent",
        f"{VJP}:_backward",
        "accumulate(atom, given[-1])",
        "cotangents[atom.index] = given[-1]",
        "vjp is autograd",
    ),
    Mutation(
        "an absent cotangent counts as ones",
        f"{VJP}:_backward_step",
        "zeros(backward, ",
        "ones(backward, ",
        "vjp is autograd",
    ),
    Mutation(
        "an unused input gets a gradient of ones",
        f"{VJP}:pull_back",
        "zeros(builder, ",
        "ones(builder, ",
        "unused inputs get zeros",
    ),
    Mutation("the loss has a cotangent of two", f"{VJP}:ones", "type, 1)", "type, 2)", "second order is symmetric"),
    Mutation(
        "only first operands are useful",
        f"{VJP}:usefulness",
        "for var in equation.operands:",
        "for var in equation.operands[:1]:",
        "vjp is adjoint of jvp",
    ),
    Mutation(
        "residuals leave in the wrong order",
        f"{VJP}:_finish",
        "(*outputs, *extras)",
        "(*outputs, *extras[::-1])",
        "split is vjp",
    ),
    Mutation(
        "the first output passes for any other as a residual",
        f"{DERIVE}:_place",
        'Residual("output", outputs.index(var))',
        'Residual("output", 0)',
        "vjp is autograd",
    ),
    Mutation(
        "an input passes for another as a residual",
        f"{DERIVE}:_place",
        'Residual("input", inputs.index(var))',
        'Residual("input", len(inputs) - 1 - inputs.index(var))',
        "vjp is autograd",
    ),
    Mutation(
        "derived rules forget keyword arguments",
        f"{DERIVE}:call_leaf",
        "for key, arg in equation.kwargs}",
        "for key, arg in equation.kwargs[:0]}",
        "vjp is autograd",
    ),
    Mutation(
        "dce drops random numbers",
        f"{SIMPLIFY}:dce_to",
        "if not any(flags) and not is_kept(equation):",
        "if not any(flags):",
        "dce keeps values",
    ),
    Mutation(
        "dce leaves dead code",
        f"{SIMPLIFY}:dce_to",
        "if not any(flags) and not is_kept(equation):",
        "if False:",
        "dce drops the dead",
    ),
    Mutation(
        "dce looks away from keyword arguments",
        f"{SIMPLIFY}:dce_to",
        "need.update(var.index for var in reads)",
        "need.update(var.index for var in reads[:1])",
        "dce gives checked traces",
    ),
    Mutation("cse merges random numbers", f"{SIMPLIFY}:cse", " and not is_kept(equation)", "", "cse keeps values"),
    Mutation(
        "cse ignores keyword arguments",
        f"{SIMPLIFY}:cse",
        "key = (equation.op, args, kwargs, bodies)",
        "key = (equation.op, args, (), bodies)",
        "cse keeps values",
    ),
    Mutation(
        "cse ignores bodies",
        f"{SIMPLIFY}:cse",
        "key = (equation.op, args, kwargs, bodies)",
        "key = (equation.op, args, kwargs, ())",
        "cse keeps values",
    ),
    Mutation("cse forgets the outputs", f"{SIMPLIFY}:cse", "map_arg(read, atom)", "atom", "cse gives checked traces"),
    Mutation(
        "inline leaves nested composites",
        f"{SIMPLIFY}:_inline",
        "results = _inline(builder, equation.body, operands, where)",
        "results = inline_into(builder, equation.body, operands, where)",
        "inline leaves no composites",
    ),
    Mutation(
        "constants of one type are one constant",
        "thunder_fn.trace:TraceBuilder.constant",
        "self._constant_vars.get(id(tensor))",
        "next((c.var for c in self.constants if c.var.type == type_of_value(tensor)), None)",
        "inline keeps values",
    ),
    Mutation(
        "renumbering forgets the outputs",
        "thunder_fn.trace:canonical",
        "tuple(map_arg(read, atom) for atom in outputs)",
        "outputs",
        "dce gives checked traces",
    ),
    Mutation(
        "renumbering drops used constants",
        "thunder_fn.trace:canonical",
        "constant.var.index in used)",
        "constant.var.index in used and not constant.owned)",
        "dce gives checked traces",
    ),
    Mutation(
        "the text forgets keyword arguments",
        "thunder_fn.pretty:_call_text",
        "for key, arg in equation.kwargs:",
        "for key, arg in equation.kwargs[:0]:",
        "text runs",
    ),
    Mutation(
        "composites of one name print as one function",
        "thunder_fn.pretty:_Printer.function",
        "key = (equation.op, equation.bodies, mask)",
        "key = (equation.op, mask)",
        "text runs",
    ),
    Mutation(
        "to_fx mixes up the results of an op",
        "thunder_fn.fx:_result_paths",
        "[(i,) for i in range(len(equation.outputs))]",
        "[(i,) for i in range(len(equation.outputs))][::-1]",
        "fx keeps",
    ),
    Mutation(
        "capture forgets stop_gradient",
        "thunder_fn.capture.recorder:Recorder._on_op",
        "self.detaching and",
        "False and",
        "recapture keeps gradients",
    ),
    Mutation(
        "capture drops unused random numbers",
        "thunder_fn.capture.nest:_live",
        "or ops.is_random(leaf.op)",
        "",
        "recapture keeps values",
    ),
    Mutation(
        "nesting swaps a composite's operands",
        "thunder_fn.capture.nest:_composite",
        "body = _close(scope, operands,",
        "body = _close(scope, operands[::-1],",
        "recapture nested gives checked traces",
    ),
)
"""The bugs, by what they edit. Every one is caught by the law that it names, in the fast profile."""


@contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """Run with a bug, in every module of the package that knows the function; undone on the way out."""
    module_name, _, path = mutation.function.partition(":")
    module = importlib.import_module(module_name)
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, module)
    original = vars(owner).get(name)
    if original is None:
        raise OutdatedMutation(f"{mutation.bug}: there is no {mutation.function} any more; adapt the edit")
    new = _edited(mutation, module, original, name)
    holders = [owner] if owners else [m for m in _modules() if vars(m).get(name) is original]
    for holder in holders:
        setattr(holder, name, new)
    forget()
    try:
        yield
    finally:
        for holder in holders:
            setattr(holder, name, original)
        forget()


def _modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.startswith("thunder_fn")]


def _edited(mutation: Mutation, module: Any, original: Any, name: str) -> Any:
    """The function with the bug, in a namespace that sees the module's own."""
    source = textwrap.dedent(inspect.getsource(original))
    if mutation.before not in source:
        raise OutdatedMutation(f"{mutation.bug}: {mutation.function} has no {mutation.before!r} any more; adapt the edit")
    code = compile(source.replace(mutation.before, mutation.after), module.__file__, "exec")
    kept = vars(module).get(name)
    exec(code, vars(module))
    new = vars(module).pop(name)
    if kept is not None:
        setattr(module, name, kept)
    return new


@functools.lru_cache(maxsize=4)
def corpus(count: int) -> tuple[Case, ...]:
    """Cases as Hypothesis draws them, in runs of 50 from fixed seeds, their traces built before any bug is planted."""
    found: list[Case] = []
    for number in range(0, count, 50):

        @seed(number)
        @settings(
            max_examples=50,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(cases())
        def draw(case: Case) -> None:
            case.trace.renamed("program")
            found.append(case)

        draw()
    return tuple(found)


def counterexample(law: Law, count: int = EXAMPLES) -> str | None:
    """What a law says of the first of so many traces that breaks it, None if none of them does."""
    for case in corpus(count):
        try:
            law(case.trace, case.inputs)
        except Exception as error:  # noqa: BLE001 - a planted bug may raise anything
            return f"{type(error).__name__}: {error}"
    return None


def main(argv: Sequence[str] = ()) -> int:
    """Print each bug with the laws that catch it. Exit code 1 if one escapes."""
    sound = [name for name, law in LAWS.items() if counterexample(law)]
    print(f"laws that fail without a bug: {', '.join(sound) or 'none'}\n")
    escaped = 0
    for mutation in MUTATIONS:
        with planted(mutation):
            caught = [name for name, law in LAWS.items() if name not in sound and counterexample(law)]
        escaped += not caught
        print(f"{mutation.bug:<56} {len(caught):>2} laws: {', '.join(caught) or 'ESCAPED'}", flush=True)
    print(f"\n{len(MUTATIONS) - escaped} of {len(MUTATIONS)} bugs caught")
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
