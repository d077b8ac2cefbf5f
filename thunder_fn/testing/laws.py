"""The laws: what must hold of every trace, and of every interpreter on every trace.

Each law is a function of a trace and values for its inputs. It raises `LawBroken`, an AssertionError, with the trace
printed. `INTERPRETERS` lists the functions from trace to trace; a new one is a line there, and all laws that hold for
every interpreter hold for it.

Comparisons are bitwise where the law says so (NaN equal to NaN). Others compare with PyTorch's own differentiation, to
a tolerance of the least precise dtype; they say nothing where PyTorch's result is not finite or very large.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from thunder_fn import ops
from thunder_fn.capture import capture, current
from thunder_fn.capture.apply import apply_inside, replay
from thunder_fn.check import check, fake_result_types
from thunder_fn.derive import is_differentiable
from thunder_fn.executors.torch_executor import lower
from thunder_fn.fx import from_fx, to_fx
from thunder_fn.interpreters import simplify, vjp as reverse
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.rules import Split
from thunder_fn.testing.programs import as_arg, random_tensor
from thunder_fn.trace import Atom, Equation, Literal, TensorType, Trace, TraceBuilder, Var, subtraces, type_of

Inputs: TypeAlias = tuple[torch.Tensor, ...]
Values: TypeAlias = tuple[Any, ...]
Law: TypeAlias = Callable[[Trace, Inputs], None]
Transform: TypeAlias = Callable[[Trace], Trace]

aten = torch.ops.aten
TOO_LARGE = 1e4


class LawBroken(AssertionError):
    """A law does not hold; the text shows the trace."""


def holds(condition: bool, what: str, **traces: Trace) -> None:
    """Raise `LawBroken` with the traces printed unless the condition holds."""
    if not condition:
        raise LawBroken("\n\n".join([what, *(f"{name}:\n{trace}" for name, trace in traces.items())]))


# ---- interpreters ----


@dataclass(frozen=True)
class Interpreter:
    """A function from a trace to the traces that it makes.

    `keeps_values` says that the only trace it makes computes what the trace did, bitwise; `idempotent` that a second
    application changes nothing.
    """

    run: Callable[[Trace], tuple[Trace, ...]]
    keeps_values: bool = False
    idempotent: bool = False


def recapture(trace: Trace) -> Trace:
    """The capture of a program's own Python text."""
    return capture(trace.python_callable(), fakes(trace)).trace


def recapture_nested(trace: Trace) -> Trace:
    """The capture of a program run equation by equation, each composite a scope that capture nests anew."""
    return capture(lambda *xs: replay(recorder(), trace, xs), fakes(trace)).trace


def recapture_whole(trace: Trace) -> Trace:
    """The capture of a function that applies the trace as one equation."""
    return capture(lambda *xs: apply_inside(recorder(), trace, xs, ops.composite("Whole")), fakes(trace)).trace


def recorder() -> Any:
    return current()


def fakes(trace: Trace) -> Inputs:
    """Zeros of the input types: capture looks at their types only."""
    types = [type for type in trace.input_types if isinstance(type, TensorType)]
    return tuple(torch.zeros(type.shape, dtype=type.dtype) for type in types)


def wanted_inputs(trace: Trace) -> tuple[bool, ...]:
    return tuple(is_differentiable(type) for type in trace.input_types)


def wanted_outputs(trace: Trace) -> tuple[bool, ...]:
    return tuple(isinstance(atom, Var) and is_differentiable(atom.type) for atom in trace.outputs)


def split(trace: Trace) -> Split:
    return reverse.split_vjp(trace, wanted_inputs(trace), wanted_outputs(trace))


def pull(trace: Trace) -> Trace:
    return reverse.vjp(trace, wanted_inputs(trace), wanted_outputs(trace))


def grad(trace: Trace) -> Trace:
    loss = scalarised(trace)
    return reverse.grad_and_value(loss, wanted_inputs(loss))


def _alone(transform: Transform) -> Callable[[Trace], tuple[Trace, ...]]:
    return lambda trace: (transform(trace),)


INTERPRETERS: dict[str, Interpreter] = {
    "dce": Interpreter(lambda t: (simplify.dce(t),), keeps_values=True, idempotent=True),
    "cse": Interpreter(lambda t: (simplify.cse(t),), keeps_values=True, idempotent=True),
    "inline": Interpreter(lambda t: (simplify.inline(t),), keeps_values=True, idempotent=True),
    "recapture": Interpreter(_alone(recapture), keeps_values=True),
    "recapture nested": Interpreter(_alone(recapture_nested), keeps_values=True),
    "recapture whole": Interpreter(_alone(recapture_whole), keeps_values=True),
    "fx": Interpreter(lambda t: (from_fx(to_fx(t)),), keeps_values=True, idempotent=True),
    "split_vjp": Interpreter(lambda t: (split(t).forward, split(t).backward)),
    "vjp": Interpreter(_alone(pull)),
    "grad_and_value": Interpreter(_alone(grad)),
    "vjp of vjp": Interpreter(lambda t: (pull(pull(t)),)),
}
"""Every function from trace to trace, by name."""

UNFOLDING = frozenset({"inline", "recapture", "fx"})
"""Interpreters that unfold composites, so that what they make grows with the unfolded program."""


def forget() -> None:
    """Empty every memo of the interpreters and of `derive`, so that the next call works anew."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("thunder_fn.interpreters", "thunder_fn.derive", "thunder_fn.structured")):
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):  # pyright: ignore[reportPrivateUsage]
                    value.cache_clear()


# ---- running and comparing ----


def run(trace: Trace, inputs: Sequence[Any]) -> Values:
    """Evaluate, the random numbers always the same."""
    return seeded(lambda: evaluate(trace, inputs))


def seeded(f: Callable[[], Values]) -> Values:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in f())


def same_bits(a: Any, b: Any) -> bool:
    """Equal values: tensors bit for bit, except that every NaN equals every other."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and repr(a) == repr(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    parts = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (a, b)]
    missing = [part.isnan() for part in parts]
    bits = [part.masked_fill(gone, 0).contiguous().reshape(-1).view(torch.uint8) for part, gone in zip(parts, missing, strict=True)]
    return torch.equal(missing[0], missing[1]) and torch.equal(bits[0], bits[1])


def agree(have: Values, want: Values, what: str, **traces: Trace) -> None:
    """Two runs gave the same, bitwise."""
    holds(len(have) == len(want), f"{what}: {len(have)} values, but {len(want)} are wanted", **traces)
    for position, (a, b) in enumerate(zip(have, want, strict=True)):
        holds(same_bits(a, b), f"{what}: value {position} is\n{a}\nbut should be\n{b}", **traces)


def is_tame(values: Sequence[Any]) -> bool:
    """All finite and of moderate size: what a comparison with a tolerance needs."""
    floats = [x for x in values if isinstance(x, torch.Tensor) and is_inexact(x)]
    return all(bool(x.isfinite().all()) and largest(x) < TOO_LARGE for x in floats)


def largest(value: torch.Tensor) -> float:
    return float(value.detach().abs().amax()) if value.numel() else 0.0


def is_inexact(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def tolerance(trace: Trace) -> float:
    """Relative tolerance: that of the least precise floating dtype in the trace."""
    dtypes = {var.type.dtype for inner in subtraces(trace) for var in variables(inner) if isinstance(var.type, TensorType)}
    precise = {torch.float64, torch.complex128}
    return 1e-9 if all(dtype in precise or not (dtype.is_floating_point or dtype.is_complex) for dtype in dtypes) else 2e-3


def variables(trace: Trace) -> Iterator[Var]:
    """Every variable that a trace binds, its bodies apart."""
    yield from trace.inputs
    yield from (constant.var for constant in trace.constants)
    yield from (var for equation in trace.equations for var in equation.outputs)


def close(have: Sequence[torch.Tensor], want: Sequence[torch.Tensor], rtol: float, what: str, **traces: Trace) -> None:
    """Two lists of tensors agree to a tolerance, relative to the largest number among them; types are equal."""
    if not is_tame(want):
        return
    scale = max([1.0, *map(largest, want)])
    holds(len(have) == len(want), f"{what}: {len(have)} values, but {len(want)} are wanted", **traces)
    for position, (a, b) in enumerate(zip(have, want, strict=True)):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=rtol, atol=rtol * scale)
        holds(same, f"{what}: value {position} is\n{a}\nbut should be\n{b}", **traces)


def draws(trace: Trace) -> list[str]:
    """The random ops of a trace in the order in which they draw, composites unfolded."""
    found: list[str] = []
    for equation in trace.equations:
        if ops.is_random(equation.op):
            found.append(equation.op.name)
        found += itertools.chain.from_iterable(draws(body) for body in equation.bodies)
    return found


def num_equations(trace: Trace) -> int:
    """The number of equations, composites unfolded."""
    return sum(1 + sum(map(num_equations, equation.bodies)) for equation in trace.equations)


def sum(numbers: Iterator[int]) -> int:
    return functools.reduce(int.__add__, numbers, 0)


# ---- laws of the data ----


def law_check_holds(trace: Trace, inputs: Inputs) -> None:
    """What the strategies draw is closed and checked, and evaluating it gives values of its types."""
    check(trace)
    for position, (value, type) in enumerate(zip(run(trace, inputs), trace.output_types, strict=True)):
        if isinstance(type, TensorType):
            fits = isinstance(value, torch.Tensor) and value.dtype == type.dtype and value.shape == type.shape
            holds(fits, f"output {position} has the type {type}, but its value is\n{value}", trace=trace)


def law_evaluate_is_pure(trace: Trace, inputs: Inputs) -> None:
    """Evaluating leaves the inputs and the constants as they were, and gives the same each time."""
    tensors = [*inputs, *(constant.tensor for inner in subtraces(trace) for constant in inner.constants)]
    before = tuple(tensor.detach().clone() for tensor in tensors)
    first = run(trace, inputs)
    agree(tuple(tensors), before, "evaluate changed an input or a constant", trace=trace)
    agree(run(trace, inputs), first, "a second evaluation", trace=trace)


def law_text_runs(trace: Trace, inputs: Inputs) -> None:
    """The printed program computes what evaluate does, bitwise; printing again gives the same text."""
    agree(seeded(lambda: trace.python_callable()(*inputs)), run(trace, inputs), "the printed program", trace=trace)
    holds(str(trace) == str(pickle.loads(pickle.dumps(trace))), "the text changes from print to print", trace=trace)


def law_pickle_keeps(trace: Trace, inputs: Inputs) -> None:
    """A pickled trace comes back with the same values; equal, where it closes over no tensor by reference."""
    new = pickle.loads(pickle.dumps(trace))
    agree(run(new, inputs), run(trace, inputs), "after pickling", trace=trace)
    if all(constant.owned for inner in subtraces(trace) for constant in inner.constants):
        holds(new == trace and hash(new) == hash(trace), "a pickled trace differs", trace=trace, pickled=new)


def law_fx_keeps(trace: Trace, inputs: Inputs) -> None:
    """The FX graph computes what evaluate does, bitwise, and comes back as the inlined trace."""
    module = to_fx(trace)
    agree(seeded(lambda: module(*inputs)), run(trace, inputs), "to_fx", trace=trace)
    new = from_fx(module)
    holds(new == simplify.inline(trace), "from_fx of to_fx differs from inline", trace=trace, found=new)


def law_python_captures(trace: Trace, inputs: Inputs) -> None:
    """Capturing evaluate gives a trace that computes the same, bitwise, with the same random numbers and gradients."""
    new = capture(lambda *xs: evaluate(trace, xs), inputs).trace
    check(new)
    agree(run(new, inputs), run(trace, inputs), "the capture of evaluate", trace=trace, captured=new)
    holds(draws(new) == draws(trace), "the capture of evaluate draws other random numbers", trace=trace, captured=new)
    cotangents = random_like(trace)
    values = [run(pull(t), (*inputs, *cotangents))[len(trace.outputs) :] for t in (new, trace)]
    close(values[0], values[1], tolerance(trace), "the gradients of the capture", trace=trace, captured=new)


def law_executor_is_evaluate(trace: Trace, inputs: Inputs) -> None:
    """Each executor's program computes what evaluate does, bitwise, and leaves the inputs as they were."""
    for name, executor in EXECUTORS.items():
        given = tuple(x.clone() for x in inputs)
        program = executor(trace)
        agree(seeded(lambda: program(*given)), run(trace, inputs), f"the program of the {name} executor", trace=trace)
        agree(given, inputs, f"the program of the {name} executor changed an input; it", trace=trace)


EXECUTORS: dict[str, Callable[[Trace], Callable[..., Values]]] = {
    "torch": lower,
    "torch below autograd": functools.partial(lower, below_autograd=True),
}
"""Every way to make a trace a program that must be bitwise what evaluate is."""


# ---- laws of every interpreter ----


def interpreter_gives_checked_traces(interpreter: Interpreter) -> Law:
    """What an interpreter makes passes check."""

    def law(trace: Trace, inputs: Inputs) -> None:
        for new in interpreter.run(trace):
            try:
                check(new)
            except Exception as error:
                raise LawBroken(f"check fails: {error}\n\ntrace:\n{trace}\n\nmade:\n{new}") from error

    return law


def interpreter_is_pure(interpreter: Interpreter) -> Law:
    """The trace is untouched, no random number is drawn, and equal traces give equal traces, remembered or not."""

    def law(trace: Trace, inputs: Inputs) -> None:
        text, key, generator = str(trace), hash(trace), torch.get_rng_state()
        remembered = interpreter.run(trace)
        holds(str(trace) == text and hash(trace) == key, f"the trace was changed; it was\n{text}", trace=trace)
        holds(torch.equal(generator, torch.get_rng_state()), "random numbers were drawn", trace=trace)
        forget()
        anew = interpreter.run(trace)
        forget()
        for a, b, c in zip(remembered, anew, interpreter.run(trace.renamed(trace.name)), strict=True):
            holds(a == b, "equal traces gave different traces", trace=trace, first=a, second=b)
            holds(b == c and str(b) == str(c), "equal traces gave different traces", trace=trace, first=b, second=c)

    return law


def interpreter_keeps_values(interpreter: Interpreter) -> Law:
    """The same values, bitwise, and the same random numbers in the same order; types and inputs stay."""

    def law(trace: Trace, inputs: Inputs) -> None:
        (new,) = interpreter.run(trace)
        holds(new.input_types == trace.input_types, "the inputs' types changed", trace=trace, made=new)
        holds(new.output_types == trace.output_types, "the outputs' types changed", trace=trace, made=new)
        agree(run(new, inputs), run(trace, inputs), "the transformed trace", trace=trace, made=new)
        holds(draws(new) == draws(trace), "random numbers are drawn otherwise", trace=trace, made=new)

    return law


def interpreter_is_idempotent(interpreter: Interpreter) -> Law:
    """A second application changes nothing."""

    def law(trace: Trace, inputs: Inputs) -> None:
        (once,) = interpreter.run(trace)
        (twice,) = interpreter.run(once)
        holds(once == twice, "a second application changes the trace", trace=trace, once=once, twice=twice)

    return law


def interpreter_keeps_gradients(interpreter: Interpreter) -> Law:
    """Gradients after the interpreter are those before it."""

    def law(trace: Trace, inputs: Inputs) -> None:
        (new,) = interpreter.run(trace)
        arguments = (*inputs, *random_like(trace))
        have, want = (run(pull(t), arguments)[len(trace.outputs) :] for t in (new, trace))
        close(have, want, tolerance(trace), "the gradients of the transformed trace", trace=trace, made=new)

    return law


def laws_of(interpreter: Interpreter, name: str) -> dict[str, Law]:
    """The laws that an interpreter must keep, by name."""
    laws = {"gives checked traces": interpreter_gives_checked_traces, "is pure": interpreter_is_pure}
    if interpreter.keeps_values:
        laws |= {"keeps values": interpreter_keeps_values, "keeps gradients": interpreter_keeps_gradients}
    if interpreter.idempotent:
        laws["is idempotent"] = interpreter_is_idempotent
    return {f"{name} {law}": make(interpreter) for law, make in laws.items()}


# ---- laws of single interpreters ----


def law_dce_drops_the_dead(trace: Trace, inputs: Inputs) -> None:
    """dce never grows a trace, and what it leaves is used, random or effectful; in bodies too."""
    new = simplify.dce(trace)
    holds(num_equations(new) <= num_equations(trace), "dce added equations", trace=trace, made=new)
    for inner in subtraces(new):
        used = {var.index for equation in inner.equations for var in equation.operands}
        used |= {atom.index for atom in inner.outputs if isinstance(atom, Var)}
        for equation in inner.equations:
            live = any(var.index in used for var in equation.outputs) or simplify.is_kept(equation)
            holds(live, f"dce left {equation.op}, which nothing uses", trace=trace, made=new)


def law_cse_leaves_no_twins(trace: Trace, inputs: Inputs) -> None:
    """After cse no two equations are the same, unless they are random; it never grows a trace."""
    new = simplify.cse(trace)
    holds(num_equations(new) <= num_equations(trace), "cse added equations", trace=trace, made=new)
    for inner in subtraces(new):
        kept = [(e.op, e.args, e.kwargs, e.bodies) for e in inner.equations if not simplify.is_kept(e)]
        holds(len(kept) == len(set(kept)), "cse left an equation twice", trace=trace, made=new)


def law_inline_leaves_no_composites(trace: Trace, inputs: Inputs) -> None:
    """After inline all equations are leaves or structured, the same leaves as before."""
    new = simplify.inline(trace)
    holds(all(e.op.kind != "composite" for e in new.equations), "inline left a composite", trace=trace, made=new)
    leaves = leaf_counts(trace)
    holds(leaf_counts(new) == leaves, "inline changed the leaves", trace=trace, made=new)


def leaf_counts(trace: Trace) -> Counter[str]:
    found: Counter[str] = Counter()
    for equation in trace.equations:
        if equation.op.kind == "leaf":
            found[equation.op.name] += 1
        for body in equation.bodies:
            found += leaf_counts(body)
    return found


# ---- laws of reverse mode ----


def random_like(trace: Trace, seed: int = 1) -> Inputs:
    """A cotangent for each differentiable output of a trace."""
    generator = torch.Generator().manual_seed(seed)
    types = [type_of(atom) for atom, wanted in zip(trace.outputs, wanted_outputs(trace), strict=True) if wanted]
    return tuple(random_tensor(type, generator) for type in types if isinstance(type, TensorType))


def chosen(values: Sequence[Any], mask: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(value for value, wanted in zip(values, mask, strict=True) if wanted)


def partial(trace: Trace, inputs: Inputs) -> tuple[Callable[..., Values], Inputs]:
    """The trace as a function of its differentiable inputs to its differentiable outputs, and those inputs."""
    mask = wanted_inputs(trace)

    def f(*active: torch.Tensor) -> Values:
        supply = iter(active)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            values = evaluate(trace, [next(supply) if wanted else x for x, wanted in zip(inputs, mask, strict=True)])
        return chosen(values, wanted_outputs(trace))

    return f, chosen(inputs, mask)


def inner(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """The real inner product of two lists of tensors."""
    pairs = zip(a, b, strict=True)
    return functools.reduce(float.__add__, (float((x.conj() * y).real.double().sum()) for x, y in pairs), 0.0)


def norm(values: Sequence[torch.Tensor]) -> float:
    return inner(values, values) ** 0.5


def jvp_by_pytorch(f: Callable[..., Values], primals: Inputs, tangents: Inputs) -> Values:
    """PyTorch's forward mode; where an op has none, its reverse mode twice."""
    try:
        return torch.func.jvp(f, primals, tangents)[1]
    except (NotImplementedError, RuntimeError):
        return torch.autograd.functional.jvp(f, primals, tangents)[1]


def law_vjp_is_adjoint_of_jvp(trace: Trace, inputs: Inputs) -> None:
    """For a tangent v and a cotangent ct, ``<ct, jvp(v)> == <vjp(ct), v>``, with PyTorch's jvp of evaluate."""
    f, primals = partial(trace, inputs)
    cotangents = random_like(trace)
    if not primals or not cotangents:
        return
    generator = torch.Generator().manual_seed(2)
    tangents = tuple(random_tensor(TensorType(x.dtype, tuple(x.shape)), generator) for x in primals)
    pushed = jvp_by_pytorch(f, primals, tangents)
    pulled = run(pull(trace), (*inputs, *cotangents))[len(trace.outputs) :]
    if not is_tame((*pushed, *pulled, *f(*primals))):
        return
    left, right = inner(cotangents, pushed), inner(pulled, tangents)
    scale = 1 + norm(cotangents) * norm(pushed) + norm(pulled) * norm(tangents)
    what = f"<ct, jvp(v)> is {left}, but <vjp(ct), v> is {right}"
    holds(abs(left - right) <= tolerance(trace) * scale, what, trace=trace, vjp=pull(trace))


def autograd(f: Callable[..., Values], primals: Inputs, cotangents: Sequence[torch.Tensor]) -> Inputs:
    """PyTorch's gradients of a function; zeros where it does not depend on an input."""
    leaves = tuple(x.detach().clone().requires_grad_() for x in primals)
    pairs = [(y, ct) for y, ct in zip(f(*leaves), cotangents, strict=True) if y.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(x) for x in primals)
    ys, cts = zip(*pairs, strict=True)
    grads = torch.autograd.grad(ys, leaves, cts, allow_unused=True)
    return tuple(torch.zeros_like(x) if grad is None else grad for x, grad in zip(primals, grads, strict=True))


def law_vjp_is_autograd(trace: Trace, inputs: Inputs) -> None:
    """The values are evaluate's, bitwise, and the gradients those of torch.autograd over evaluate."""
    new, cotangents = pull(trace), random_like(trace)
    f, primals = partial(trace, inputs)
    found = run(new, (*inputs, *cotangents))
    count = len(trace.outputs)
    agree(found[:count], run(trace, inputs), "the values beside the gradients", trace=trace, vjp=new)
    want = autograd(f, primals, cotangents) if primals else ()
    close(found[count:], want, tolerance(trace), "the gradients", trace=trace, vjp=new)


def law_split_is_vjp(trace: Trace, inputs: Inputs) -> None:
    """Forward, then backward on its residuals, gives what vjp gives; an unwanted gradient changes no other."""
    whole, cotangents, count = split(trace), random_like(trace), len(trace.outputs)
    outputs = run(whole.forward, inputs)
    holds(draws(whole.forward) == draws(trace), "the forward draws other random numbers", trace=trace, forward=whole.forward)
    holds(not draws(whole.backward), "the backward draws random numbers", trace=trace, backward=whole.backward)
    places = {"input": inputs, "output": outputs, "extra": outputs[count:]}
    residuals = tuple(places[r.kind][r.index] for r in whole.residuals)
    found = run(whole.backward, (*residuals, *cotangents))
    want = run(pull(trace), (*inputs, *cotangents))[count:]
    for position, (place, tensor) in enumerate(zip(whole.gradients, want, strict=True)):
        have = torch.zeros_like(tensor) if place is None else found[place]
        holds(same_bits(have, tensor), f"gradient {position} of the split differs from vjp's", trace=trace)
    for position in (i for i, wanted in enumerate(wanted_inputs(trace)) if wanted):
        only = tuple(i == position for i in range(len(inputs)))
        alone = run(reverse.vjp(trace, only, wanted_outputs(trace)), (*inputs, *cotangents))[count:]
        rank = wanted_inputs(trace)[:position].count(True)
        close(alone, want[rank : rank + 1], tolerance(trace), f"the gradient of input {position} alone", trace=trace)


def law_unused_inputs_get_zeros(trace: Trace, inputs: Inputs) -> None:
    """Further inputs that nothing reads get gradients of zeros, and the others keep theirs."""
    extra = TensorType(torch.float64, (2,))
    builder = TraceBuilder(trace.name)
    arguments = tuple(builder.input(type) for type in trace.input_types)
    builder.input(extra)
    wider = builder.build(simplify.inline_into(builder, trace, arguments))
    cotangents, count = random_like(trace), len(trace.outputs)
    found = run(pull(wider), (*inputs, torch.ones(2, dtype=torch.float64), *cotangents))[count:]
    want = run(pull(trace), (*inputs, *cotangents))[count:]
    agree(found, (*want, torch.zeros(2, dtype=torch.float64)), "with an unused input the gradients", trace=wider)


def law_stop_gradient_stops(trace: Trace, inputs: Inputs) -> None:
    """Behind a detach of every input all gradients are zeros; behind a detach of one, its own."""
    cotangents, count = random_like(trace), len(trace.outputs)
    positions = [i for i, wanted in enumerate(wanted_inputs(trace)) if wanted]
    for stopped in positions:
        builder = TraceBuilder(trace.name)
        arguments: list[Atom] = [builder.input(type) for type in trace.input_types]
        arguments[stopped] = emit(builder, aten.detach.default, arguments[stopped])
        new = builder.build(simplify.inline_into(builder, trace, tuple(arguments)))
        found = run(pull(new), (*inputs, *cotangents))[count:]
        rank = positions.index(stopped)
        agree((found[rank],), (torch.zeros_like(inputs[stopped]),), "behind a detach the gradient", trace=new)


# ---- second order ----


def emit(builder: TraceBuilder, overload: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Var:
    """Append a leaf of one result; its type from running it on fake tensors."""
    op, new_args = ops.leaf(overload), tuple(map(as_arg, args))
    new_kwargs = tuple((key, Literal(value)) for key, value in kwargs.items())
    types = fake_result_types(Equation(op, new_args, new_kwargs, ()))
    if types is None:
        raise LawBroken(f"{op} has no static type")
    return builder.add(op, new_args, types, kwargs=new_kwargs)[0]


def add_inner(builder: TraceBuilder, total: Var | None, a: Var, b: Var) -> Var:
    """total + the real inner product of a and b, in float64."""
    if is_complex(a):
        a, b = emit(builder, aten.view_as_real.default, a), emit(builder, aten.view_as_real.default, b)
    term = emit(builder, aten.sum.default, emit(builder, aten.mul.Tensor, a, b), dtype=torch.float64)
    return term if total is None else emit(builder, aten.add.Tensor, total, term)


def is_complex(var: Var) -> bool:
    return isinstance(var.type, TensorType) and var.type.dtype.is_complex


def scalarised(trace: Trace) -> Trace:
    """A loss: half the sum of the squares of the differentiable outputs, by a composite call of the trace."""
    builder = TraceBuilder(f"loss_of_{trace.name}")
    inputs = tuple(builder.input(var.type) for var in trace.inputs)
    op = ops.composite("Model")
    outputs = builder.add(op, inputs, trace.output_types, bodies=(trace,))
    total: Var | None = None
    for var, wanted in zip(outputs, wanted_outputs(trace), strict=True):
        if wanted:
            total = add_inner(builder, total, var, var)
    if total is None:
        total = emit(builder, aten.full.default, (), 1.0, dtype=torch.float64)
    return builder.build((emit(builder, aten.mul.Scalar, total, 0.5),))


def directional(trace: Trace, wanted: tuple[bool, ...]) -> Trace:
    """For a trace of a scalar, the derivative along directions: a trace of the inputs and one direction for each wanted."""
    gradient = reverse.grad_and_value(trace, wanted)
    builder = TraceBuilder("directional")
    inputs = tuple(builder.input(var.type) for var in trace.inputs)
    directions = tuple(builder.input(var.type) for var in chosen(trace.inputs, wanted))
    found = simplify.inline_into(builder, gradient, inputs)
    total: Var | None = None
    for direction, atom in zip(directions, found, strict=False):
        if isinstance(atom, Var):
            total = add_inner(builder, total, atom, direction)
    if total is None:
        total = emit(builder, aten.full.default, (), 0.0, dtype=torch.float64)
    return builder.build((total,))


def law_second_order_is_symmetric(trace: Trace, inputs: Inputs) -> None:
    """For a loss and directions u and v, ``u H v == v H u``, and ``H v`` is torch.autograd's."""
    loss = scalarised(trace)
    wanted = wanted_inputs(loss)
    if not any(wanted):
        return
    slope = directional(loss, wanted)
    hessian = reverse.grad_and_value(slope, (*wanted, *(False for var in chosen(loss.inputs, wanted))))
    primals, count = chosen(inputs, wanted), wanted.count(True)
    generator = torch.Generator().manual_seed(3)
    u, v = (tuple(random_tensor(TensorType(x.dtype, tuple(x.shape)), generator) for x in primals) for _ in range(2))
    hu, hv = (run(hessian, (*inputs, *direction))[:count] for direction in (u, v))
    f, _ = partial(loss, inputs)
    want = hessian_product_by_autograd(lambda *xs: f(*xs)[0], primals, v)
    if not is_tame((*hu, *hv, *want, *run(trace, inputs))):
        return
    close(hv, want, 10 * tolerance(trace), "the Hessian's product with a vector", trace=trace)
    left, right = inner(u, hv), inner(v, hu)
    scale = 1 + norm(u) * norm(hv) + norm(v) * norm(hu)
    holds(abs(left - right) <= 10 * tolerance(trace) * scale, f"u H v is {left}, but v H u is {right}", trace=trace)


def hessian_product_by_autograd(f: Callable[..., torch.Tensor], primals: Inputs, v: Inputs) -> Inputs:
    """PyTorch's Hessian-vector product, by its reverse mode twice."""
    zeros = tuple(torch.zeros_like(x) for x in primals)
    leaves = tuple(x.detach().clone().requires_grad_() for x in primals)
    value = f(*leaves)
    if not value.requires_grad:
        return zeros
    grads = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
    pairs = [(grad, direction) for grad, direction in zip(grads, v, strict=True) if grad is not None and grad.requires_grad]
    if not pairs:
        return zeros
    ys, cts = zip(*pairs, strict=True)
    found = torch.autograd.grad(ys, leaves, cts, allow_unused=True)
    return tuple(zero if grad is None else grad for zero, grad in zip(zeros, found, strict=True))


# ---- work grows with distinct code ----


def nested(depth: int) -> Trace:
    """A function nested so many composites deep, each calling the next one twice: 2**depth leaves when unfolded."""
    type = TensorType(torch.float64, (2,))
    builder = TraceBuilder("level_0")
    body = builder.build((emit(builder, aten.sin.default, builder.input(type)),))
    for level in range(1, depth + 1):
        builder = TraceBuilder(f"level_{level}")
        (once,) = builder.add(ops.composite("Level"), (builder.input(type),), (type,), bodies=(body,))
        (twice,) = builder.add(ops.composite("Level"), (once,), (type,), bodies=(body,))
        body = builder.build((twice,))
    return body


def size(trace: Trace) -> int:
    """The number of equations in distinct traces: what an interpreter that shares has to do."""
    return sum(len(inner.equations) for inner in subtraces(trace))


def law_work_grows_with_distinct_code(interpreter: Interpreter) -> None:
    """What an interpreter makes of `nested(depth)` grows by the same amount with each level."""
    sizes = [sum(size(new) for new in interpreter.run(nested(depth))) for depth in (4, 6, 8, 10)]
    steps = {b - a for a, b in itertools.pairwise(sizes)}
    holds(len(steps) == 1, f"for depths 4, 6, 8, 10 there are {sizes} equations, which is not linear")


GROUPS: dict[str, dict[str, Law]] = {
    "data": {
        "check holds": law_check_holds,
        "evaluate is pure": law_evaluate_is_pure,
        "text runs": law_text_runs,
        "pickle keeps": law_pickle_keeps,
        "fx keeps": law_fx_keeps,
        "python captures": law_python_captures,
        "executor is evaluate": law_executor_is_evaluate,
    },
    "simplify": {
        "dce drops the dead": law_dce_drops_the_dead,
        "cse leaves no twins": law_cse_leaves_no_twins,
        "inline leaves no composites": law_inline_leaves_no_composites,
    },
    "reverse": {
        "vjp is autograd": law_vjp_is_autograd,
        "vjp is adjoint of jvp": law_vjp_is_adjoint_of_jvp,
        "split is vjp": law_split_is_vjp,
        "unused inputs get zeros": law_unused_inputs_get_zeros,
        "stop_gradient stops": law_stop_gradient_stops,
    },
    "second order": {"second order is symmetric": law_second_order_is_symmetric},
    **{name: laws_of(interpreter, name) for name, interpreter in INTERPRETERS.items()},
}
"""Every law of a single trace, by what it is about."""

LAWS: dict[str, Law] = {name: law for group in GROUPS.values() for name, law in group.items()}
"""Every law of a single trace, by name."""


def check_laws(names: Iterable[str], trace: Trace, inputs: Inputs) -> None:
    """Check some laws on one trace; what is raised names the law."""
    for name in names:
        try:
            LAWS[name](trace, inputs)
        except Exception as error:
            error.add_note(f"this breaks the law: {name}")
            raise
