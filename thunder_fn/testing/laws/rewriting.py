"""Laws of rewrites: stored in another way, or on many ranks, a function is still that function,
under every transform.

Ranks are simulated, in one process. The function itself, on one rank and whole parameters, gives
the expected values.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from thunder_fn.api import grad, vmap
from thunder_fn.api.autocast import autocast
from thunder_fn.capture import capture, pytree
from thunder_fn.distributed.ranks import GATHER, evaluate_ranks
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir.check import check
from thunder_fn.ir.rules import lowered
from thunder_fn.ir.trace import Trace
from thunder_fn.parameters import (
    SCHEMES,
    ddp,
    fsdp,
    global_norm,
    lora,
    quantize,
    simulated,
    tensor_parallel,
)
from thunder_fn.structured.checkpoint import checkpoint
from thunder_fn.testing.laws.comparing import LawBroken, holds, is_inexact, is_tame, largest
from thunder_fn.testing.strategies import Case

Function = Callable[[Any, torch.Tensor], Any]
"""A function of parameters and tokens."""
EXAMPLES, WORDS = 2, 5


# ---- what is rewritten ----


class _Net(nn.Module):
    """Two equal layers, a tied head, a norm, and a parameter of no dims; widths that few numbers
    of ranks divide.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(self.norm(x)) * self.scale


@functools.lru_cache(maxsize=16)
def _of_drawn(case: Case, dtype: torch.dtype) -> tuple[Function, dict[str, torch.Tensor]]:
    """A function that Hypothesis drew. Its arguments are floating inputs and the weight that a
    table and a linear layer share; what else it is given follows the tokens.
    """
    trace, inputs, drawn = case.trace, case.inputs, torch.Generator().manual_seed(case.seed)
    floating = {f"p{at}": value for at, value in enumerate(inputs) if value.is_floating_point()}
    own = {"w": (WORDS, WORDS), "b": (WORDS,)}
    first = {name: torch.randn(shape, generator=drawn, dtype=dtype) for name, shape in own.items()}

    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        x = F.linear(F.embedding(tokens, params["w"]), params["w"], params["b"]).tanh()
        scale = 1 + x.mean() / 8
        given = [params.get(f"p{at}", value) for at, value in enumerate(inputs)]
        given = [value * scale.to(value.dtype) if is_inexact(value) else value for value in given]
        results = evaluate(trace, given)
        tensors = [value.abs().square().sum().to(dtype) for value in results if is_inexact(value)]
        return x.square().mean() + sum(tensors, torch.zeros((), dtype=dtype)).log1p()

    return loss, {**first, **floating}


@functools.lru_cache(maxsize=16)
def _problem(width: int, dtype: torch.dtype) -> tuple[Function, dict[str, torch.Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module = _Net(width).to(dtype)

    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, params, (tokens,)).square().mean()

    return loss, {name: p.detach() for name, p in module.named_parameters()}


def _tokens(count: int) -> list[torch.Tensor]:
    """Make examples of three tokens for each rank."""
    drawn = torch.Generator().manual_seed(1)
    return list(torch.randint(0, WORDS, (count, EXAMPLES, 3), generator=drawn))


# ---- ways to rewrite, and transforms ----

PLAN = {
    "embedding.weight": "embedding",
    "layers.0.weight": "column",
    "layers.1.weight": "row",
    "norm.*": "sequence",
}

WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "fsdp": lambda f, group: fsdp(f, group, prefetch=None),
    "fsdp, zero=2": lambda f, group: fsdp(f, group, zero=2, prefetch=None),
    "fsdp, prefetch=1": lambda f, group: fsdp(f, group, prefetch=1),
    "fsdp, bytes": lambda f, group: fsdp(f, group, bucket=300),
    "fsdp, each": lambda f, group: fsdp(f, group, zero=2, bucket=None, prefetch=2),
    "ddp": ddp,
    "ddp, bytes": lambda f, group: ddp(f, group, bucket=300),
    "tensor_parallel": lambda f, group: tensor_parallel(f, group, PLAN),
}
STORED: dict[str, Callable[[Any], Any]] = {
    **{
        scheme: lambda f, scheme=scheme: quantize(f, scheme)
        for scheme in ("int8", "int4", "nf4", "fp8")
    },
    "int8, training": lambda f: quantize(f, "int8", training=True),
    "lora": lambda f: lora(f, 2, alpha=3.0),
    "lora and int8": lambda f: quantize(lora(f, 2), "int8"),
}


def _gradient(f: Function) -> Function:
    """The gradient with respect to the floating parameters, or parts of them, by name."""

    def gradient(
        params: Mapping[str, torch.Tensor], tokens: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        own, others = _partition(params)
        put: Any = getattr(params, "replaced", None)  # a dict has none

        def loss(own: dict[str, torch.Tensor]) -> torch.Tensor:
            return f(put(own) if put else {**others, **own}, tokens)

        return grad(loss)(own)

    return gradient


def _partition(
    params: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    own = {
        name: value
        for name, value in params.items()
        if value.dtype.is_floating_point and value.dtype.itemsize > 1
    }
    return own, {name: value for name, value in params.items() if name not in own}


_same: Callable[[Function], Function] = lambda f: f
_autocast: Callable[[Function], Function] = lambda f: autocast(f, torch.bfloat16)
_by_interpreter: Callable[[Function], Function] = lambda f: autocast(f, torch.bfloat16, {})

UNDER: dict[str, tuple[Callable[[Function], Function], Callable[[Function], Function]]] = {
    "nothing": (_same, _same),
    "grad": (_same, _gradient),
    "checkpoint": (_same, lambda f: _gradient(checkpoint(f))),
    "around checkpoint": (checkpoint, _gradient),
    "vmap": (_same, lambda f: vmap(f, (None, 0))),
    "vmap of grad": (_same, lambda f: vmap(_gradient(f), (None, 0))),
    "autocast": (_same, _autocast),
    "around autocast": (_by_interpreter, _same),
}
"""Transforms, by name: of the function before it is rewritten, and after."""


@dataclass(frozen=True, slots=True)
class Rewriting:
    """A way to rewrite, on so many ranks (1 where there are none), under a transform."""

    way: str
    under: str = "nothing"
    ranks: int = 1
    width: int = 4
    drawn: Case | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return torch.float32 if "autocast" in self.under else torch.float64

    @property
    def function(self) -> Function:
        """The function that is rewritten."""
        return UNDER[self.under][0](self.problem(self.dtype)[0])

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """The whole parameters."""
        return self.problem(self.dtype)[1]

    def problem(
        self, dtype: torch.dtype, width: int | None = None
    ) -> tuple[Function, dict[str, torch.Tensor]]:
        """A function of parameters of this dtype, and the parameters."""
        return (
            _problem(width or self.width, dtype)
            if self.drawn is None
            else _of_drawn(self.drawn, dtype)
        )

    @property
    def is_tame(self) -> bool:
        """Test that numbers are finite and moderate, derivatives too, as the laws need them."""
        loss, params = self.problem(self.dtype)
        (batch,) = _tokens(1)
        return is_tame([loss(params, batch), *_gradient(loss)(params, batch).values()])

    @property
    def transform(self) -> Callable[[Function], Function]:
        """The transform of the rewritten function."""
        return UNDER[self.under][1]


def _some(ways: Sequence[str]) -> tuple[Rewriting, ...]:
    """Each way under two of the transforms, every third in turn, so that all come; numbers of
    ranks and widths in turn.
    """
    unders = itertools.cycle([*UNDER, *UNDER, *UNDER][::3])
    ranks, widths = itertools.cycle((3, 2, 4, 1, 3)), itertools.cycle((5, 5, 1, 5, 4))
    return tuple(map(Rewriting, sorted([*ways, *ways]), unders, ranks, widths))


RANKS = _some([*WAYS])
PARTS = _some([*STORED])
ORDERS = tuple(
    Rewriting(scheme, ranks=ranks)
    for scheme, ranks in zip(SCHEMES, itertools.cycle((3, 2, 4, 1)), strict=False)
)
ADAPTERS = tuple(Rewriting(scheme, "grad") for scheme in ("int8", "nf4"))
TRIPS = tuple(
    Rewriting(way, ranks=ranks, width=5)
    for way, ranks in zip((*WAYS, *STORED), itertools.cycle((3, 2, 4)))
)
GATHERED = tuple(Rewriting(way, ranks=2) for way in ("fsdp", "fsdp, prefetch=1"))
NORMS = tuple(
    Rewriting(way, ranks=ranks) for way, ranks in (("fsdp", 3), ("ddp", 2), ("tensor_parallel", 2))
)


# ---- the laws ----


def law_ranks_equal_one(case: Rewriting) -> None:
    """A transformed function is on N ranks what it is on one. Gradients on shards are the shards of
    the gradient. That is the mean of those of the ranks' batches, or that of the one batch which
    all have.
    """
    loss = case.function
    params = case.params
    transform = case.transform
    together = case.way == "tensor_parallel"
    batches = _tokens(1) * case.ranks if together else _tokens(case.ranks)
    functions, shards = _on_ranks(case, loss, params)
    found = _run(transform(functions[0]), shards, batches)
    each = [transform(loss)(params, batch) for batch in batches]
    if not isinstance(each[0], dict):
        _agree(found, each, case)
        return
    whole = {name: torch.stack([one[name] for one in each]).mean(0) for name in params}
    for function, own in zip(functions, found, strict=True):
        if case.under == "vmap of grad":
            shares = [
                _share(function, {name: value[at] for name, value in whole.items()})
                for at in range(EXAMPLES)
            ]
            expected = {name: torch.stack([share[name] for share in shares]) for name in own}
        else:
            expected = _share(function, whole)
        _agree(own, expected, case)


def law_sharding_and_quantising_commute(case: Rewriting) -> None:
    """Sharding and quantising, asked for in any order, give one program, which computes what one
    rank does on the codes of whole weights. So do activations whose steps come from samples.
    """
    loss, params = case.problem(torch.float32)
    batches, alone = _tokens(case.ranks), quantize(loss, case.way)
    whole = alone.prepare(params)
    if case.way.endswith("static"):
        whole = alone.calibrate(whole, [(batch,) for batch in batches])
    functions = [fsdp(alone, group) for group in simulated(case.ranks)]
    reverse = quantize(fsdp(loss, simulated(case.ranks)[0]), case.way)
    one, other = (f.rewrite(params, batches[0]) for f in (functions[0], reverse))
    holds(one == other, f"{case}: the order matters", one=one.compute, other=other.compute)
    shards = [whole.with_step(f.steps[-1]) for f in functions]
    _agree(_run(functions[0], shards, batches), [alone(whole, batch) for batch in batches], case)


def law_parts_stand_for_the_whole(case: Rewriting) -> None:
    """A transformed function on parts, whatever calls work on them as they are, is what it is on
    what the parts decode to.
    """
    loss, params, transform, (batch,) = case.function, case.params, case.transform, _tokens(1)
    q = STORED[case.way](loss)
    parts = _drawn(lambda: q.prepare(params))
    parts = parts.replaced(
        {name: value + 0.1 for name, value in parts.items() if name.endswith("lora_b")}
    )
    _agree(
        transform(q)(parts, batch),
        transform(lambda parts, x: loss(q.whole(parts), x))(parts, batch),
        case,
    )


def law_adapters_and_codes_commute(case: Rewriting) -> None:
    """Adapters and codes in either order are one program, and adapters that begin change
    nothing.
    """
    loss, params = case.problem(torch.float32)
    q, (batch,) = quantize(lora(loss, 2), case.way), _tokens(1)
    one, other = (f.rewrite(params, batch) for f in (q, lora(quantize(loss, case.way), 2)))
    holds(one == other, f"{case}: the order matters", one=one.compute, other=other.compute)
    alone, parts = quantize(loss, case.way), _drawn(lambda: q.prepare(params))
    one = "layers.0.weight" if case.drawn is None else "w"
    holds(
        {f"{one}.lora_a", f"{one}.lora_b"} <= set(parts), f"{case}: adapters are codes in {parts}"
    )
    have = case.transform(q)(parts, batch)
    want = case.transform(alone)(alone.prepare(params), batch)
    _agree({name: have[name] for name in want}, want, case)


def law_restoring_undoes_preparing(case: Rewriting) -> None:
    """Ranks together hold the parameter, bit by bit; codes stand for it within the scheme's
    bound.
    """
    loss, params = case.problem(torch.float32)
    if case.way in WAYS:
        functions, shards = _on_ranks(case, loss, params)
        restore = functions[0].rewrite(params, _tokens(1)[0]).restore
        every = evaluate_ranks(restore, [list(shard.values()) for shard in shards])
        restored = [dict(zip(sorted(params), values, strict=True)) for values in every]
    else:
        restored = [_drawn(lambda: STORED[case.way](loss).prepare(params)).restore()]
    for (name, w), found in itertools.product(params.items(), restored):
        scheme = SCHEMES.get(case.way.rpartition(" ")[2])
        bound = scheme.bound(w) if scheme is not None and w.dim() >= 2 else torch.zeros(())
        holds(
            found[name].shape == w.shape, f"{case}: {name} has the shape {tuple(found[name].shape)}"
        )
        if not bool(((found[name] - w).abs() <= bound).all()):
            raise LawBroken(f"{case}: {name} is restored as\n{found[name]}\nit was\n{w}")


def law_zero_3_gathers_again(case: Rewriting) -> None:
    """The backward of ZeRO-3 is given nothing that was gathered: it gathers itself what ZeRO-2
    keeps.
    """
    loss, params = case.function, case.params
    (batch,), (group, _) = _tokens(1), simulated(2)
    again, kept = WAYS[case.way](loss, group), fsdp(loss, group, zero=2)
    counts = [
        _gathers(capture(_gradient(f), (f.prepare(params), batch)).trace) for f in (again, kept)
    ]
    holds(counts[0] > counts[1], f"{case}: {counts[0]} gathers, of which none is for the backward")


def law_norms_are_of_all_ranks(case: Rewriting) -> None:
    """The global norm of gradients on many ranks is that of one rank."""
    loss, params = case.problem(case.dtype, 5)
    batches = _tokens(1) * case.ranks if case.way == "tensor_parallel" else _tokens(case.ranks)
    functions, shards = _on_ranks(case, loss, params)
    norm = lambda parts, x: global_norm(parts.replaced(_gradient(functions[0])(parts, x)))
    each = [_gradient(loss)(params, batch) for batch in batches]
    mean = [torch.stack([one[name] for one in each]).mean(0) for name in params]
    expected = torch.stack([g.norm() for g in mean]).norm()
    _agree(_run(norm, shards, batches), [expected] * case.ranks, case)


OF_REWRITES: dict[str, tuple[Callable[[Rewriting], None], tuple[Rewriting, ...]]] = {
    "N ranks equal one": (law_ranks_equal_one, RANKS),
    "sharding and quantising commute": (law_sharding_and_quantising_commute, ORDERS),
    "parts stand for the whole": (law_parts_stand_for_the_whole, PARTS),
    "adapters and codes commute": (law_adapters_and_codes_commute, ADAPTERS),
    "restoring undoes preparing": (law_restoring_undoes_preparing, TRIPS),
    "ZeRO-3 gathers again": (law_zero_3_gathers_again, GATHERED),
    "norms are of all ranks": (law_norms_are_of_all_ranks, NORMS),
}
"""The laws of rewrites, each with the cases in which it is tested."""


# ---- running ----


def _on_ranks(case: Rewriting, loss: Function, params: Any) -> tuple[list[Any], list[Any]]:
    """The rewritten function of each rank, and what the rank holds."""
    functions = [WAYS[case.way](loss, group) for group in simulated(case.ranks)]
    return functions, [f.prepare(params) for f in functions]


def _run(f: Function, shards: Sequence[Any], batches: Sequence[torch.Tensor]) -> list[Any]:
    """Run each rank: all run the trace of the first."""
    captured = capture(f, (shards[0], batches[0]))
    check(captured.trace)
    inputs = [[*shard.values(), batch] for shard, batch in zip(shards, batches, strict=True)]
    return [captured.result(outputs) for outputs in evaluate_ranks(captured.trace, inputs)]


def _share(f: Any, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A rank's share of gradients of whole parameters."""
    return _partition(f.prepare(gradients))[0]


def _drawn(prepare: Callable[[], Any]) -> Any:
    """Parameters prepared with the random numbers always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return prepare()


def _gathers(trace: Trace) -> int:
    """Count the gathers that run."""
    bodies = [body for equation in trace.equations if (body := lowered(equation)) is not None]
    return sum(equation.op.name == GATHER for equation in trace.equations) + sum(
        map(_gathers, bodies)
    )


def _agree(have: Any, want: Any, case: Rewriting) -> None:
    """Equal up to rounding."""
    try:
        halves = "autocast" in case.under or case.way == "int4"  # its scales are float16
        rounding = 0.02 if halves else 1e-5  # scales are float32
        size = (
            1.0 if case.drawn is None else max(map(largest, pytree.flatten(want)[0]), default=1.0)
        )
        atol = rounding * max(1.0, size)
        torch.testing.assert_close(
            have, want, check_dtype=case.under != "autocast", rtol=rounding, atol=atol
        )
    except AssertionError as error:
        raise LawBroken(f"{case}: {error}") from error
