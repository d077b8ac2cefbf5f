"""Laws of jvp, vmap and checkpoint, with PyTorch's forward mode and one evaluation for each
example as judges.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_fn.errors import VmapError
from thunder_fn.interpreters import simplify, vmap as batching
from thunder_fn.interpreters.checkpoint.cost import bytes_of
from thunder_fn.ir.rules import Split, divided
from thunder_fn.ir.trace import TensorType, Trace
from thunder_fn.testing.drawn_programs import example_inputs, random_tensor
from thunder_fn.testing.laws.comparing import (
    Inputs,
    Values,
    agree,
    close,
    draws,
    holds,
    is_inexact,
    is_tame,
    random_like,
    run,
    state_after,
    tolerance,
    wanted_inputs,
    wanted_outputs,
)
from thunder_fn.testing.laws.interpreters import (
    SIZE,
    InDims,
    batchings,
    pull,
    push,
    split,
    whole_checkpoint,
)
from thunder_fn.testing.laws.reverse import jvp_by_pytorch, partial

# ---- jvp ----


def directions(inputs: Inputs, seed: int = 2) -> Inputs:
    """A tangent for each differentiable input."""
    generator = torch.Generator().manual_seed(seed)
    found = (x for x in inputs if x.is_floating_point() or x.is_complex())
    return tuple(random_tensor(TensorType(x.dtype, tuple(x.shape)), generator) for x in found)


def law_jvp_is_pytorchs(trace: Trace, inputs: Inputs) -> None:
    """The values are evaluate's, bitwise, and the tangents those of torch.func.jvp over
    evaluate.
    """
    new, tangents, count = push(trace), directions(inputs), len(trace.outputs)
    found = run(new, (*inputs, *tangents))
    agree(found[:count], run(trace, inputs), "the values beside the tangents", trace=trace, jvp=new)
    f, primals = partial(trace, inputs)
    if primals and any(wanted_outputs(trace)):
        want = jvp_by_pytorch(f, primals, tangents)
        close(found[count:], want, tolerance(trace), "the tangents", trace=trace, jvp=new)


def law_jvp_is_linear(trace: Trace, inputs: Inputs) -> None:
    """``jvp(u + 2 v) == jvp(u) + 2 jvp(v)``."""
    new, count = push(trace), len(trace.outputs)
    u, v = directions(inputs, 3), directions(inputs, 4)
    both = tuple(a + 2 * b for a, b in zip(u, v, strict=True))
    of_u, of_v, of_both = (run(new, (*inputs, *tangents))[count:] for tangents in (u, v, both))
    if is_tame((*of_u, *of_v)):
        want = tuple(a + 2 * b for a, b in zip(of_u, of_v, strict=True))
        close(of_both, want, tolerance(trace), "the tangents along u + 2 v", trace=trace, jvp=new)


# ---- vmap ----


def examples(trace: Trace, inputs: Inputs, in_dims: InDims) -> list[Inputs]:
    """Inputs for each example: other values where an input is batched, the same where it is not."""
    others = (example_inputs(trace, seed) for seed in range(200, 200 + SIZE - 1))
    rows = [inputs, *others]
    return [
        tuple(x if dim is None else y for x, y, dim in zip(inputs, row, in_dims, strict=True))
        for row in rows
    ]


def stack(rows: list[Inputs], in_dims: InDims) -> Inputs:
    """The examples' inputs as one batch."""
    columns = zip(*rows, strict=True)
    return tuple(
        column[0] if dim is None else torch.stack(column, dim)
        for column, dim in zip(columns, in_dims, strict=True)
    )


def take(values: Values, dims: InDims, index: int) -> Values:
    """One example of a batch."""
    return tuple(
        value if dim is None else value.select(dim, index)
        for value, dim in zip(values, dims, strict=True)
    )


def law_vmap_is_a_loop(trace: Trace, inputs: Inputs) -> None:
    """Each example of the batch is what evaluate gives for it, whichever inputs are batched and
    along which dim.

    Of a trace that draws random numbers no example is what evaluate gives, which draws others.
    """
    if draws(trace):
        return
    for in_dims in batchings(trace):
        vmap_is_a_loop(trace, inputs, in_dims)


def vmap_is_a_loop(trace: Trace, inputs: Inputs, in_dims: InDims) -> None:
    """Check the law for one choice of batch dims."""
    new, out_dims = batching.vmap(trace, in_dims, SIZE)
    rows = examples(trace, inputs, in_dims)
    found = run(new, stack(rows, in_dims))
    holds(
        len(out_dims) == len(found),
        "vmap gives one batch dim for each output",
        trace=trace,
        vmap=new,
    )
    for index, row in enumerate(rows):
        want = run(trace, row)
        if is_tame(want):
            have = take(found, out_dims, index)
            compare(have, want, trace, f"with in_dims {in_dims}, example {index}", new)


def compare(have: Values, want: Values, trace: Trace, what: str, new: Trace) -> None:
    """Floating and complex tensors to the tolerance of the trace, all else exactly."""
    floats = tuple(isinstance(value, torch.Tensor) and is_inexact(value) for value in want)
    given, wanted = divided(have, floats), divided(want, floats)
    close(given[0], wanted[0], tolerance(trace), what, trace=trace, vmap=new)
    agree(given[1], wanted[1], what, trace=trace, vmap=new)


def law_vmap_asks_about_randomness(trace: Trace, inputs: Inputs) -> None:
    """randomness="error" raises exactly where random numbers are drawn; "different" draws as
    often, "same" as well.
    """
    in_dims: InDims = (0,) * len(trace.inputs)
    if draws(trace):
        try:
            batching.vmap(trace, in_dims, SIZE)
        except VmapError:
            return
        holds(False, 'vmap with randomness="error" draws random numbers', trace=trace)
    modes: list[Any] = [
        batching.vmap(trace, in_dims, SIZE, mode) for mode in ("error", "different", "same")
    ]
    holds(
        modes[0] == modes[1] == modes[2],
        "randomness changes a trace without random numbers",
        trace=trace,
    )


# ---- checkpoint ----


def law_checkpoint_keeps_gradients_bitwise(trace: Trace, inputs: Inputs) -> None:
    """The gradients of a checkpoint are those without it, bitwise; random numbers are not drawn
    again.

    Of the unfolded trace: a checkpoint that draws random numbers unfolds its body, and sums
    cotangents in that order.
    """
    trace = simplify.inline(trace)
    arguments = (*inputs, *random_like(trace))
    new = pull(whole_checkpoint(trace))
    agree(
        run(new, arguments),
        run(pull(trace), arguments),
        "the gradients of a checkpoint",
        trace=trace,
        made=new,
    )
    same = torch.equal(state_after(new, arguments), state_after(trace, inputs))
    holds(same, "the gradients of a checkpoint draw more random numbers", trace=trace, made=new)
    holds(
        sum(wanted_inputs(trace)) == len(new.outputs) - len(trace.outputs),
        "a gradient is missing",
        trace=trace,
    )


def law_checkpoint_keeps_few_bytes(trace: Trace, inputs: Inputs) -> None:
    """A checkpoint keeps no more than the function itself does, and only its inputs where
    nothing is random.
    """
    kept, most = (_kept_bytes(split(t)) for t in (whole_checkpoint(trace), simplify.inline(trace)))
    holds(kept <= most, f"a checkpoint keeps {kept} bytes, the function itself {most}", trace=trace)
    holds(
        kept == 0 or bool(draws(trace)),
        f"a checkpoint without random numbers keeps {kept} bytes",
        trace=trace,
    )


def _kept_bytes(whole: Split) -> int:
    types = whole.forward.output_types
    return sum(map(bytes_of, types[len(types) - whole.num_extra :]))
