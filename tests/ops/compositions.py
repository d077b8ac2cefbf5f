"""Forward mode, batching and their compositions with reverse mode, against eager PyTorch.

Each sweep runs a library, thunder_fn or torch.func, on a case: both have the same names with the same signatures. The
oracle is neither: autograd on plain PyTorch, in a Python loop for batches. Tangents are compared by the adjoint law,
``<ct, jvp(v)> == <vjp(ct), v>``, for random cotangents. Where autograd has no second derivative, the slope of its first
one is measured in double precision.
"""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.ops.agreement import DOUBLE, SEED, Outcome, compare, is_inexact, tensors_in
from tests.ops.samples import Case, seed
from thunder_fn.capture import pytree

Values = tuple[torch.Tensor, ...]
Function = Callable[..., Values]
BATCH = 3


class Skip(Exception):
    """Eager PyTorch refuses the case, or there is nothing to differentiate."""


# ---- a case as a function of tensors ----


@dataclass(frozen=True)
class Problem:
    """`function(*primals)` gives tensors: all tensors of the results, or those that autograd follows.

    `oracle` is the function for autograd to differentiate.
    """

    function: Function
    primals: Values
    oracle: Function


def problem(case: Case, *, differentiable: bool) -> Problem:
    """The case as a function of all its tensors or, differentiable, of those that require grad."""
    leaves, spec = pytree.flatten((case.args, case.kwargs))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    places = [i for i in tensors if leaves[i].requires_grad] if differentiable else tensors
    fixed = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def call(*values: torch.Tensor, run: Callable[..., Any] = case.function) -> list[torch.Tensor]:
        full = list(fixed)
        for place, value in zip(places, values, strict=True):
            full[place] = value
        args, kwargs = pytree.unflatten(spec, full)
        wrapper = case.op.gradcheck_wrapper  # derivatives of eigh, say, are for symmetric arguments
        return tensors_in(wrapper(run, *args, **kwargs) if differentiable else run(*args, **kwargs))

    primals = tuple(fixed[place].clone() for place in places)
    try:
        given = [x.requires_grad_(differentiable) for x in primals]
        results = seeded(functools.partial(call, run=case.oracle))(*given)
    except Exception as error:  # noqa: BLE001
        raise Skip(f"eager: {type(error).__name__}: {error}") from None
    kept = [
        i for i, result in enumerate(results) if not differentiable or (result.requires_grad and is_inexact(result))
    ]
    if not kept or not primals:
        raise Skip("nothing requires grad" if differentiable else "no tensors")

    def function(*values: torch.Tensor) -> Values:
        found = call(*values)
        return tuple(found[i] for i in kept)

    def oracle(*values: torch.Tensor) -> Values:
        found = call(*values, run=case.oracle)
        return tuple(found[i] for i in kept)

    function.__name__ = case.name
    return Problem(function, tuple(x.detach() for x in primals), oracle)


def seeded(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the same random numbers each time."""

    @functools.wraps(f)
    def run(*args: Any) -> Any:
        seed(SEED)
        return f(*args)

    return run


# ---- the oracle ----


def gradients(f: Function, xs: Values, cts: Values, *, differentiable: bool = False) -> Values:
    """Autograd's vjp, zeros included. `differentiable` keeps the graph, and xs and cts as they are."""
    if not differentiable:
        xs = tuple(x.detach().requires_grad_(is_inexact(x)) for x in xs)
    ys = f(*xs)
    pairs = [(y, ct) for y, ct in zip(ys, cts, strict=True) if y.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(x) for x in xs)
    found = torch.autograd.grad(
        [y for y, _ in pairs],
        [x for x in xs if x.requires_grad],
        [ct for _, ct in pairs],
        create_graph=differentiable,
        materialize_grads=True,
    )
    supply = iter(found)
    return tuple(next(supply) if x.requires_grad else torch.zeros_like(x) for x in xs)


def reverse(f: Function, count: int) -> Function:
    """The vjp of f as a function of `count` primals and the cotangents, for autograd to differentiate."""

    def run(*values: torch.Tensor) -> Values:
        return gradients(f, values[:count], values[count:], differentiable=True)

    return run


def double(x: torch.Tensor) -> torch.Tensor:
    return x.to(DOUBLE.get(x.dtype, x.dtype))


def slope(f: Function, xs: Values, vs: Values, step: float = 1e-6) -> Values:
    """The derivative of f along vs by differences in double precision."""
    xs, vs = tuple(map(double, xs)), tuple(map(double, vs))

    def at(t: float) -> Values:
        return seeded(f)(*((x + t * v).requires_grad_() for x, v in zip(xs, vs, strict=True)))

    return tuple(((up - down) / (2 * step)).detach() for up, down in zip(at(step), at(-step), strict=True))


def like(xs: Sequence[torch.Tensor], number: int) -> Values:
    """Random tensors of these types."""
    torch.manual_seed(number)
    return tuple(torch.randn_like(x.detach()) for x in xs)


def inner(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> tuple[float, float]:
    """The real inner product in double precision, and what rounding is measured by."""
    pairs = [(double(x).flatten(), double(y).flatten()) for x, y in zip(a, b, strict=True)]
    terms = [(x.conj() * y).real for x, y in pairs]
    return sum(float(t.sum()) for t in terms), sum(float(x.norm() * y.norm()) for x, y in pairs)


def adjoint(tangents: Values, f: Function, xs: Values, vs: Values) -> Outcome:
    """Are these the tangents of f at xs along vs?"""
    epsilon = max(torch.finfo(x.dtype).eps for x in (*xs, *tangents))
    for number in (11, 12):
        cts = like(tangents, number)
        have, scale = inner(cts, tangents)
        try:
            found = seeded(functools.partial(gradients, f))(xs, cts)
            want, other = inner(found, vs)
            bound = (1e4 if epsilon < 1e-10 else 1e3) * epsilon * (scale + other + 1)
        except RuntimeError:
            want, other = inner(cts, slope(f, xs, vs))
            bound = 1e-6 * (scale + other + 1)
        if want != want:  # autograd's own is NaN
            continue
        if not abs(have - want) <= bound and not near_double(f, xs, vs, cts, tangents, have, want):
            return Outcome("failed", f"<ct, jvp(v)> is {have:.6g}, but <vjp(ct), v> is {want:.6g}")
    return Outcome("passed")


def near_double(f: Function, xs: Values, vs: Values, cts: Values, tangents: Values, have: float, want: float) -> bool:
    """The inner product is no farther from the one in double precision than autograd's."""
    if all(x.dtype in DOUBLE.values() for x in xs):
        return False
    precise = seeded(functools.partial(gradients, f))(tuple(map(double, xs)), tuple(map(double, cts)))
    best, _ = inner(precise, vs)
    return abs(have - best) <= 4 * abs(want - best)


# ---- the sweeps: each takes a library and a case ----


def jvp(lib: Any, case: Case) -> Outcome:
    """Forward mode."""
    p = problem(case, differentiable=True)
    vs = like(p.primals, 5)
    _, tangents = seeded(lambda: lib.jvp(p.function, p.primals, vs))()
    return adjoint(tangents, p.oracle, p.primals, vs)


def vmap(lib: Any, case: Case) -> Outcome:
    """Batching over all tensors, and over the first one only."""
    p = problem(case, differentiable=False)
    outcome = Outcome("passed")
    for in_dims in batchings(p.primals):
        examples = examples_of(p, in_dims)
        rows = [seeded(p.function)(*example) for example in examples]
        if any(len({r[k].shape for r in rows}) > 1 for k in range(len(rows[0]))):
            raise Skip("the examples have results of different shapes")
        expected = list(map(torch.stack, zip(*rows, strict=True)))
        batched = lib.vmap(p.function, in_dims=in_dims, randomness="same")
        found = seeded(batched)(*stacked(examples, in_dims))
        outcome = compare(list(found), expected, f"in_dims {in_dims}, result")
        if outcome.status == "failed":
            return outcome
    return outcome


def batchings(primals: Values) -> Iterator[tuple[int | None, ...]]:
    yield (0,) * len(primals)
    if len(primals) > 1:
        yield (0, *(None for _ in primals[1:]))


def examples_of(p: Problem, in_dims: tuple[int | None, ...]) -> list[Values]:
    """The sample, and others with the same numbers in reverse order where eager takes those."""
    other = tuple(
        x if dim is None or not x.dim() else x.flip(tuple(range(x.dim())))
        for x, dim in zip(p.primals, in_dims, strict=True)
    )
    try:
        seeded(p.function)(*other)
    except Exception:  # noqa: BLE001
        other = p.primals
    return [p.primals, other, p.primals][:BATCH]


def stacked(examples: list[Values], in_dims: tuple[int | None, ...]) -> Values:
    columns = zip(*examples, strict=True)
    return tuple(c[0] if dim is None else torch.stack(c) for c, dim in zip(columns, in_dims, strict=True))


def all_batched(case: Case) -> tuple[Problem, list[Values], list[Values]]:
    """A differentiable problem, examples, and cotangents for each."""
    p = problem(case, differentiable=True)
    examples = examples_of(p, (0,) * len(p.primals))
    cotangents = [like(seeded(p.function)(*example), 20 + i) for i, example in enumerate(examples)]
    return p, examples, cotangents


def pullback(lib: Any, f: Function, count: int) -> Function:
    """The vjp of a library as a function of `count` primals and the cotangents."""

    def run(*values: torch.Tensor) -> Values:
        _, pull = lib.vjp(f, *values[:count])
        return pull(tuple(values[count:]))

    return run


def vjp(lib: Any, case: Case) -> Outcome:
    """Reverse mode."""
    p = problem(case, differentiable=True)
    cts = like(seeded(p.function)(*p.primals), 20)
    found = seeded(pullback(lib, p.function, len(p.primals)))(*p.primals, *cts)
    both = (tuple(map(double, p.primals)), tuple(map(double, cts)))
    return nearest(list(found), list(reference(p.oracle, p.primals, cts)), lambda: list(reference(p.oracle, *both)))


def vmap_of_vjp(lib: Any, case: Case) -> Outcome:
    """Batches of gradients."""
    p, examples, cotangents = all_batched(case)
    rows = [reference(p.oracle, xs, cts) for xs, cts in zip(examples, cotangents, strict=True)]
    columns = stacked(
        [(*a, *b) for a, b in zip(examples, cotangents, strict=True)], (0,) * (len(examples[0]) + len(cotangents[0]))
    )
    batched = lib.vmap(pullback(lib, p.function, len(p.primals)), randomness="same")
    found = seeded(batched)(*columns)
    expected = list(map(torch.stack, zip(*rows, strict=True)))
    return nearest(list(found), expected, lambda: precisely(p.oracle, examples, cotangents))


def vjp_of_vmap(lib: Any, case: Case) -> Outcome:
    """The gradient of a batch."""
    p, examples, cotangents = all_batched(case)
    rows = [reference(p.oracle, xs, cts) for xs, cts in zip(examples, cotangents, strict=True)]
    xs, cts = (stacked(values, (0,) * len(values[0])) for values in (examples, cotangents))
    found = seeded(lambda: lib.vjp(lib.vmap(p.function, randomness="same"), *xs)[1](cts))()
    expected = list(map(torch.stack, zip(*rows, strict=True)))
    return nearest(list(found), expected, lambda: precisely(p.oracle, examples, cotangents))


def reference(f: Function, xs: Values, cts: Values) -> Values:
    try:
        return seeded(functools.partial(gradients, f))(xs, cts)
    except RuntimeError as error:
        raise Skip(f"eager: {error}") from None


def precisely(f: Function, examples: list[Values], cotangents: list[Values]) -> list[torch.Tensor]:
    rows = [
        reference(f, tuple(map(double, xs)), tuple(map(double, cts)))
        for xs, cts in zip(examples, cotangents, strict=True)
    ]
    return list(map(torch.stack, zip(*rows, strict=True)))


def is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal up to the rounding of numbers as large as one."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    scale = float(b[b.isfinite()].abs().max()) if b.isfinite().any() else 0.0
    epsilon = 1e4 * torch.finfo(b.dtype).eps if b.dtype in DOUBLE.values() else 64 * torch.finfo(b.dtype).eps
    wanted = ~b.isnan()  # where autograd's own is NaN, anything may be
    return torch.allclose(a[wanted], b[wanted], rtol=epsilon, atol=epsilon * max(scale, 1.0))


def nearest(
    found: list[torch.Tensor], expected: list[torch.Tensor], precise: Callable[[], list[torch.Tensor]]
) -> Outcome:
    """Equal up to rounding or, where rounding is large, no farther from double precision than eager."""
    outcome = compare(found, expected, "gradient")
    if outcome.status == "failed" and len(found) == len(expected) and all(map(is_near, found, expected)):
        return Outcome("close")
    if outcome.status == "failed" and all(x.dtype in DOUBLE for x in expected) and len(found) == len(expected):
        try:
            best = precise()
        except Exception:  # noqa: BLE001
            return outcome
        if all(
            a.shape == b.shape and _far(a, c) <= 4 * _far(b, c) for a, b, c in zip(found, expected, best, strict=True)
        ):
            return Outcome("close", "no farther from the gradient in double precision than eager")
    return outcome


def _far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.to(b.dtype) - b).abs().max()) if a.numel() else 0.0


def _second_order(case: Case) -> tuple[Problem, Function, Values]:
    """The problem, its vjp by autograd, and primals and cotangents for that."""
    p = problem(case, differentiable=True)
    cts = like(seeded(p.function)(*p.primals), 21)
    return p, reverse(p.oracle, len(p.primals)), (*p.primals, *cts)


def vjp_of_vjp(lib: Any, case: Case) -> Outcome:
    """Second derivatives by reverse mode twice."""
    p, backward, values = _second_order(case)
    weights = like(p.primals, 22)
    ours = pullback(lib, p.function, len(p.primals))
    try:
        expected = seeded(functools.partial(gradients, backward))(values, weights)
    except RuntimeError as error:
        return _by_differences(lib, ours, backward, values, weights, error)
    found = seeded(lambda: lib.vjp(ours, *values)[1](weights))()
    both = (tuple(map(double, values)), tuple(map(double, weights)))
    return nearest(list(found), list(expected), lambda: list(seeded(functools.partial(gradients, backward))(*both)))


def _by_differences(
    lib: Any, ours: Function, backward: Function, values: Values, weights: Values, error: Exception
) -> Outcome:
    """Differentiate by the slope of the first derivative, where autograd has no second one."""
    vs = like(values, 23)
    try:
        want, scale = inner(weights, slope(backward, values, vs))
    except RuntimeError:
        raise Skip(f"eager: {error}") from None
    found = seeded(lambda: lib.vjp(ours, *values)[1](weights))()
    have, other = inner(found, vs)
    bound = 1e3 * max(torch.finfo(x.dtype).eps for x in values) + 1e-6
    if abs(have - want) <= bound * (scale + other + 1):
        return Outcome("close", "as the slope of the first derivative")
    return Outcome("failed", f"the slope of the gradient is {want:.6g}, given {have:.6g}")


def jvp_of_vjp(lib: Any, case: Case) -> Outcome:
    """Second derivatives by forward over reverse mode."""
    p, backward, values = _second_order(case)
    vs = like(values, 5)
    try:
        seeded(backward)(*(x.detach().requires_grad_() for x in values))
    except RuntimeError as error:
        raise Skip(f"eager: {error}") from None
    ours = pullback(lib, p.function, len(p.primals))
    _, tangents = seeded(lambda: lib.jvp(ours, values, vs))()
    return adjoint(tangents, backward, values, vs)


def vjp_of_jvp(lib: Any, case: Case) -> Outcome:
    """Second derivatives by reverse over forward mode: the derivative of ``<ct, jvp(x, v)>`` in x and in v.

    The oracle is that of ``<vjp(x, ct), v>``, which is the same number.
    """
    p, backward, values = _second_order(case)
    count, vs = len(p.primals), like(p.primals, 22)
    try:
        expected = seeded(functools.partial(gradients, backward))(values, vs)[:count]
    except RuntimeError as error:
        raise Skip(f"eager: {error}") from None

    def push(*both: torch.Tensor) -> Values:
        return lib.jvp(p.function, both[:count], both[count:])[1]

    found = seeded(lambda: lib.vjp(push, *p.primals, *vs)[1](values[count:]))()
    both = (tuple(map(double, values)), tuple(map(double, vs)))
    second = nearest(
        list(found[:count]), list(expected), lambda: list(seeded(functools.partial(gradients, backward))(*both)[:count])
    )
    first = nearest(
        list(found[count:]),
        list(reference(p.oracle, p.primals, values[count:])),
        lambda: list(reference(p.oracle, both[:count], both[count : len(values)])),
    )
    return first if first.status == "failed" else second


TRANSFORMS: dict[str, Callable[[Any, Case], Outcome]] = {
    "jvp": jvp,
    "vmap": vmap,
    "vmap of vjp": vmap_of_vjp,
    "vjp of vmap": vjp_of_vmap,
    "jvp of vjp": jvp_of_vjp,
    "vjp of vjp": vjp_of_vjp,
    "vjp of jvp": vjp_of_jvp,
}


def run(lib: Any, what: str, case: Case, *, verbose: bool = False) -> Outcome:
    """Run a library on a case. Its errors are failures; where the oracle refuses, the case is skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return (TRANSFORMS.get(what) or vjp)(lib, case)
        except Skip as skip:
            return Outcome("skipped", str(skip))
        except Exception as error:  # noqa: BLE001
            if verbose:
                traceback.print_exc()
            return Outcome("error", f"{type(error).__name__}: {' '.join(str(error).split())}")
