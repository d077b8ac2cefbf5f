"""Bugs in sharding, in what ranks send, in quantisation and in adapters."""

from __future__ import annotations

from thunder_fn.testing.mutations.planting import Mutation

FSDP = "thunder_fn.interpreters.fsdp"
COLLECTIVES = "thunder_fn.distributed.collectives"
UNITS = "thunder_fn.interpreters.rewriting.units"
TENSOR = "thunder_fn.interpreters.tensor_parallel.step"
CROSSINGS = "thunder_fn.interpreters.tensor_parallel.crossings"
ONE = "N ranks equal one"
WHOLE = "parts stand for the whole"
ORDER = "sharding and quantising commute"
TRIP = "restoring undoes preparing"

REWRITING = (
    # sharding
    Mutation(
        "gradients are not divided by the ranks",
        f"{COLLECTIVES}:divided_gradient",
        "ct / size",
        "ct",
        ONE,
        seen_in=6,
    ),
    Mutation(
        "all ranks keep the first rows", f"{FSDP}:sharded", ")[rank].clone()", ")[0].clone()", TRIP
    ),
    Mutation(
        "a bucket has the order of another",
        f"{FSDP}:gathered",
        ".split(widths, 1)",
        ".split(widths[::-1], 1)",
        ONE,
        seen_in=4,
    ),
    Mutation(
        "replicas keep their own gradients",
        f"{COLLECTIVES}:added_up",
        'collectives.all_reduce(flat, "sum", group.name)',
        "flat",
        ONE,
        seen_in=1,
    ),
    Mutation(
        "blocks keep what they gathered",
        f"{UNITS}:InUnits.__call__",
        "self.step.zero == 3 and",
        "self.step.zero == 4 and",
        "ZeRO-3 gathers again",
    ),
    Mutation(
        "what is scheduled keeps what it gathered",
        f"{UNITS}:scheduled",
        "if step.zero == 3",
        "if step.zero == 4",
        "ZeRO-3 gathers again",
        seen_in=1,
    ),
    Mutation(
        "batches of shards are gathered as shards of batches",
        "thunder_fn.derived.quirks.batching:of_more_columns",
        "x.movedim(0, 1).contiguous()",
        "x.contiguous().reshape(x.shape[1], x.shape[0], *x.shape[2:])",
        ONE,
        seen_in=15,
    ),
    Mutation(
        "shards are rounded, not whole weights",
        "thunder_fn.parameters.rewritten:in_order",
        "return tuple(sorted(",
        "return steps or tuple(sorted(",
        ORDER,
    ),
    # shares of layers
    Mutation(
        "an activation's gradient is that of one rank's columns",
        f"{CROSSINGS}:copied",
        'reduced(Ddp(group, "each", "sum"), (type,), (x,))[0]',
        "x",
        ONE,
        seen_in=14,
    ),
    Mutation(
        "all ranks have the first words",
        f"{TENSOR}:_own_words",
        "indices - rank * weight.shape[0]",
        "indices",
        ONE,
        seen_in=14,
    ),
    Mutation(
        "shares count on one rank only",
        "thunder_fn.parameters.clipping:norm_over_ranks",
        "own = _over(step.group, own, norm_type)",
        "pass",
        "norms are of all ranks",
        seen_in=2,
    ),
    Mutation(
        "the norm is that of the rank's shards",
        "thunder_fn.parameters.clipping:norm_over_ranks",
        "total = _over(step.group, total, norm_type)",
        "pass",
        "norms are of all ranks",
    ),
    # codes and adapters
    Mutation(
        "an adapter is not scaled in a linear layer",
        "thunder_fn.interpreters.lora:adapted",
        "linear(low, b) * scale",
        "linear(low, b)",
        WHOLE,
        seen_in=8,
    ),
    Mutation(
        "adapters are codes",
        "thunder_fn.interpreters.rewriting.filters:matrices",
        "not name.endswith(ADAPTERS)",
        "True",
        "adapters and codes commute",
    ),
    Mutation(
        "autocast takes one cast of a shard for any other",
        "thunder_fn.interpreters.autocast:_Casting.cast",
        "key = (atom.index, dtype)",
        "key = (0, dtype)",
        WHOLE,
        seen_in=5,
    ),
)
