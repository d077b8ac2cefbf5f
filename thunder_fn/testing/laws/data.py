"""Laws of the data: the text, pickles, FX graphs, captures and programs of executors are the
same trace.
"""

from __future__ import annotations

import functools
import pickle
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from thunder_fn.capture import capture
from thunder_fn.executors import FusionExecutor, lower
from thunder_fn.interpreters import simplify
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir.check import check
from thunder_fn.ir.fx import from_fx, to_fx
from thunder_fn.ir.trace import Equation, TensorType, Trace, subtraces
from thunder_fn.portable import load, save
from thunder_fn.portable.rules import with_rules_in_bodies
from thunder_fn.testing.laws.comparing import (
    Inputs,
    LawBroken,
    Values,
    agree,
    close,
    holds,
    is_flat,
    random_like,
    run,
    seeded,
    state_after,
    tolerance,
)
from thunder_fn.testing.laws.interpreters import pull

# ---- laws of the data ----


def law_check_holds(trace: Trace, inputs: Inputs) -> None:
    """Drawn traces are closed and checked, and evaluating them gives values of their types."""
    check(trace)
    for position, (value, type) in enumerate(
        zip(run(trace, inputs), trace.output_types, strict=True)
    ):
        if isinstance(type, TensorType):
            fits = (
                isinstance(value, torch.Tensor)
                and value.dtype == type.dtype
                and value.shape == type.shape
            )
            if not fits:
                raise LawBroken(
                    f"output {position} has the type {type}, but its value is\n{value}", trace=trace
                )


def law_evaluate_is_pure(trace: Trace, inputs: Inputs) -> None:
    """Evaluating leaves the inputs and the constants as they were, and gives the same each time."""
    tensors = [
        *inputs,
        *(constant.tensor for inner in subtraces(trace) for constant in inner.constants),
    ]
    before = tuple(tensor.detach().clone() for tensor in tensors)
    first = run(trace, inputs)
    agree(tuple(tensors), before, "evaluate changed an input or a constant", trace=trace)
    agree(run(trace, inputs), first, "a second evaluation", trace=trace)


def law_text_runs(trace: Trace, inputs: Inputs) -> None:
    """The printed program computes what evaluate does, bitwise; printing again gives the same
    text.
    """
    agree(
        seeded(lambda: trace.python_callable()(*inputs)),
        run(trace, inputs),
        "the printed program",
        trace=trace,
    )
    holds(
        str(trace) == str(pickle.loads(pickle.dumps(trace))),
        "the text changes from print to print",
        trace=trace,
    )


def law_pickle_keeps(trace: Trace, inputs: Inputs) -> None:
    """A pickled trace comes back with the same values; equal, where it closes over no tensor by
    reference.
    """
    new = pickle.loads(pickle.dumps(trace))
    agree(run(new, inputs), run(trace, inputs), "after pickling", trace=trace)
    if all(constant.owned for inner in subtraces(trace) for constant in inner.constants):
        holds(
            new == trace and hash(new) == hash(trace),
            "a pickled trace differs",
            trace=trace,
            pickled=new,
        )


def law_save_keeps(trace: Trace, inputs: Inputs) -> None:
    """A saved trace comes back equal, with equal values, and is written as the same file again."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "first", Path(folder) / "second"
        save(trace, first)
        new = load(first)
        assert isinstance(new, Trace), "a trace was saved"
        save(new, second)
        holds(
            first.read_bytes() == second.read_bytes(),
            "a loaded trace is saved as another file",
            trace=trace,
            loaded=new,
        )
    agree(run(new, inputs), run(trace, inputs), "after loading", trace=trace)
    own, its = as_data(trace), as_data(new)
    holds(own == its and str(own) == str(its), "a loaded trace differs", trace=trace, loaded=new)


def as_data(trace: Trace) -> Trace:
    """The trace with its constants by value, and with rules that are bodies."""
    return replace(
        trace,
        constants=tuple(replace(constant, owned=True) for constant in trace.constants),
        equations=tuple(
            replace(one, bodies=tuple(map(as_data, one.bodies)))
            for one in map(with_rules_in_bodies, trace.equations)
        ),
    )


def law_fx_keeps(trace: Trace, inputs: Inputs) -> None:
    """The FX graph computes what evaluate does, bitwise, and comes back as the inlined trace; of
    flat traces.
    """
    if not is_flat(trace):
        return
    module = to_fx(trace)
    agree(seeded(lambda: module(*inputs)), run(trace, inputs), "to_fx", trace=trace)
    new = from_fx(module)
    holds(
        new == simplify.inline(trace),
        "from_fx of to_fx differs from inline",
        trace=trace,
        found=new,
    )


def law_python_captures(trace: Trace, inputs: Inputs) -> None:
    """Capturing evaluate gives a trace that computes the same, bitwise, with the same random
    numbers and gradients.
    """
    new = capture(lambda *xs: evaluate(trace, xs), inputs).trace
    check(new)
    agree(
        run(new, inputs), run(trace, inputs), "the capture of evaluate", trace=trace, captured=new
    )
    same = torch.equal(state_after(new, inputs), state_after(trace, inputs))
    holds(
        same,
        "the capture of evaluate draws more or fewer random numbers",
        trace=trace,
        captured=new,
    )
    cotangents = random_like(trace)
    values = [run(pull(t), (*inputs, *cotangents))[len(trace.outputs) :] for t in (new, trace)]
    close(
        values[0],
        values[1],
        tolerance(trace),
        "the gradients of the capture",
        trace=trace,
        captured=new,
    )


def law_executor_is_evaluate(trace: Trace, inputs: Inputs) -> None:
    """Each executor's program computes what evaluate does, bitwise, and leaves the inputs as
    they were.
    """
    for name, executor in EXECUTORS.items():
        given = tuple(x.clone() for x in inputs)
        found = seeded(functools.partial(executor(trace), *given))
        agree(found, run(trace, inputs), f"the program of the {name} executor", trace=trace)
        agree(
            given, inputs, f"the program of the {name} executor changed an input; it", trace=trace
        )


class Patchy(FusionExecutor):
    """Fuses some ops and not others, down to regions of one op, and evaluates its regions."""

    def supports(self, equation: Equation) -> str | None:
        """Two of three leaves, by name."""
        takes = equation.op.kind == "leaf" and zlib.crc32(equation.op.name.encode()) % 3
        return None if takes else "not by chance"

    def fuse(self, region: Trace) -> Callable[..., Values]:
        """The region, evaluated."""
        return lambda *inputs: evaluate(region, inputs)


EXECUTORS: dict[str, Callable[[Trace], Callable[..., Values]]] = {
    "torch": lower,
    "torch below autograd": functools.partial(lower, below_autograd=True),
    "patchy": functools.partial(
        lower,
        below_autograd=True,
        executors=(Patchy("patchy", numerics="bitwise", min_size=1, min_shared=2),),
    ),
}
"""Every way to make a trace a program that must be bitwise what evaluate is."""
