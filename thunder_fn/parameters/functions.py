"""Rewriting transforms of functions of `(params, *inputs)` and of modules: what users call."""

from __future__ import annotations

import math
from typing import Any

import torch

from thunder_fn.distributed.collectives import FLOATS
from thunder_fn.distributed.groups import group_of, groups_of
from thunder_fn.errors import RewriteError, is_int
from thunder_fn.interpreters.ddp import Ddp
from thunder_fn.interpreters.fsdp import Fsdp
from thunder_fn.interpreters.lora import Lora
from thunder_fn.interpreters.quantize.scheme import Scheme
from thunder_fn.interpreters.quantize.step import Quantize
from thunder_fn.interpreters.rewriting.filters import read_filter, read_stacked
from thunder_fn.interpreters.rewriting.units import Bucket
from thunder_fn.interpreters.tensor_parallel.step import TensorParallel, read_plan
from thunder_fn.parameters.rewritten import rewritten
from thunder_fn.parameters.schemes import scheme_named


def quantize(
    f: Any,
    scheme: str | Scheme = "int8",
    *,
    filter: Any = None,
    training: bool = False,
    stacked: Any = (),
) -> Any:
    """Store weights as numbers of few bits.

    Law: ``q(q.prepare(params), *xs)`` is ``f(q.prepare(params).restore(), *xs)`` up to rounding,
        and `restore` gives each parameter back within the scheme's bound. Schemes that round
        activations too (`int8_dynamic`, `fp8_dynamic`) are off by half a step of each row of them
        besides. Jitted functions run linear layers on codes with PyTorch's kernels where it has
        fast ones (the executor `quantized`). On CPUs with a C++ compiler they run our own
        (`codes`), compiled once and kept on disk. `jit(executors=["torch"])` and
        `numerics="bitwise"` do without either.

    Args:
        f: a function of `(params, *inputs)`, jitted or not, already rewritten or not; a module; or
            a `Rewrite`.
        scheme: `"int8"` (one scale a row), `"int8_dynamic"` (activations too), `"int8_static"`
            (activations too, calibrated from samples: `calibrate`), `"int4"` (groups of 256),
            `"nf4"` (blocks of 64, scales quantised again), `"fp8"` (one scale a row),
            `"fp8_tensor"`, `"fp8_dynamic"`; or a `Scheme`.
        filter: which weights: patterns on names such as `"layers.*.weight"`, or a predicate on
            (name, shape). By default all floating parameters of two or more dims. Parameters
            without dims, or of eight bits already, stay.
        training: keep the weights and let computations see them rounded (quantisation-aware
            training).
        stacked: which weights are layers on top of each other along dim 0, as `scan` takes them:
            patterns or a predicate. Each layer is stored by itself, and a step of the loop works on
            its codes. The filter sees the shape of a layer.

    Returns:
        f on other parameters: a `Rewritten` function with `prepare`, a `RewrittenModule`, or a
            `Rewrite`.

    Raises:
        RewriteError: there is no such scheme, or f is none of these.

    Example:
        >>> import torch
        >>> q = quantize(lambda params, x: torch.nn.functional.linear(x, params["w"]), "int8")
        >>> q.prepare({"w": torch.ones(2, 3)})
        Prepared(w.values: i8[2, 3], w.scales: f32[2])

    Source: the papers that `thunder_fn.parameters.schemes` names.
    """
    return rewritten(
        f,
        Quantize(
            scheme_named(scheme),
            read_filter(filter, "quantize"),
            training,
            read_stacked(stacked, "quantize"),
        ),
    )


def lora(
    f: Any, rank: int = 8, *, alpha: float | None = None, filter: Any = None, stacked: Any = ()
) -> Any:
    """Put a trainable low-rank adapter beside each matrix: ``w + alpha / rank * lora_b @ lora_a``.

    Law: before training, ``q(q.prepare(params), *xs)`` is ``f(params, *xs)``; `restore` merges the
        adapters.

    Composes with `quantize` in either order (QLoRA): the matrices are stored as codes, the adapters
    are not.

    Args:
        f: as for `quantize`.
        rank: of the adapters.
        alpha: scales them; equal to `rank` by default.
        filter: which matrices; by default all floating parameters of two dims.
        stacked: as for `quantize`: each layer has an adapter.

    Raises:
        RewriteError: rank is not positive, or f is none of these.

    Example:
        >>> import torch
        >>> q = lora(lambda params, x: x @ params["w"], rank=2)
        >>> parts = q.prepare({"w": torch.ones(3, 4)})
        >>> q(parts, torch.ones(1, 3))
        tensor([[3., 3., 3., 3.]])
        >>> sorted((name, tuple(part.shape)) for name, part in parts.items())
        [('w', (3, 4)), ('w.lora_a', (2, 4)), ('w.lora_b', (3, 2))]

    Source: LoRA (arXiv:2106.09685), QLoRA (arXiv:2305.14314).
    """
    if not is_int(rank, 1):
        raise RewriteError(f"lora: the rank is a number from 1 on, given {rank!r}")
    if alpha is not None and not (isinstance(alpha, int | float) and math.isfinite(alpha)):
        raise RewriteError(f"lora: alpha is a finite number, given {alpha!r}")
    return rewritten(
        f,
        Lora(
            rank,
            float(rank if alpha is None else alpha),
            read_filter(filter, "lora"),
            read_stacked(stacked, "lora"),
        ),
    )


def fsdp(  # noqa: PLR0913 - options, by keyword
    f: Any,
    mesh: Any,
    *,
    zero: int = 3,
    bucket: str | int | None = "block",
    reduction: str = "mean",
    precision: torch.dtype | None = None,
    offload: bool = False,
    prefetch: int | None = 1,
) -> Any:
    """Shard parameters over the ranks of a mesh, by rows; gather them where they are used.

    Law: on N ranks with a batch each, loss and gradients are those of one rank that sees all
        batches: the mean over ranks, however many examples each has. Buffers and random numbers are
        each rank's own. Composes with `quantize` and `lora` in either order.

    Args:
        f: as for `quantize`. Every rank calls it, on its own batch.
        mesh: a DeviceMesh of one dim; or of two, whose second dim shards and whose first replicates
            (hybrid sharding).
        zero: 3 gathers parameters again for the backward; 2 keeps them from the forward.
        bucket: "block" gathers the parameters of a module in a list of modules (`layers.3`) in one
            collective, and the others where a torch function uses them. A number gathers at most so
            many bytes in one, of parameters in the order of their first use. None or "each" gathers
            for each use.
        reduction: "mean" or "sum" of the ranks' gradients.
        precision: the dtype in which floating parameters and their gradients travel. Shards stay as
            they are (mixed precision); `autocast` says in which precision is computed.
        offload: keep shards in the CPU's memory.
        prefetch: how many buckets are gathered ahead of the one that computes, forward and, with
            `zero=3`, backward. As many reductions travel while the backward goes on. So
            `prefetch + 1` buckets are whole at once (two, as with PyTorch's FSDP). The function is
            unfolded, and equal layers are not compiled once. None leaves collectives where their
            results are used, so one bucket is whole at a time. See
            `thunder_fn.distributed.schedule`.

    Returns:
        f on shards: `prepare` takes whole parameters, the same on all ranks, and
            keeps this rank's rows; `restore` and `state_dict` gather, so all ranks call them.

    Raises:
        RewriteError: mesh is no mesh of one or two dims, or its ranks have shares of the parameters
            already. Or an option is none of the choices.
        DistributedError: ranks were given different parameters or options.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> first, second = tfn.parameters.simulated(2)
        >>> q = fsdp(lambda params, x: x @ params["w"], first)
        >>> q.prepare({"w": torch.ones(4, 2)})  # half of the rows
        Prepared(w: f32[2, 2])

    Source: ZeRO (arXiv:1910.02054), PyTorch FSDP (arXiv:2304.11277).
    """
    _check_choice("fsdp", "zero", zero, (2, 3))
    bucket = _read_bucket("fsdp", bucket)
    _check_choice("fsdp", "reduction", reduction, ("mean", "sum"))
    _check_choice("fsdp", "offload", offload, (True, False))
    if precision is not None and precision not in FLOATS:
        raise RewriteError(
            f"fsdp: precision is a floating dtype of 16 bits or more, given {precision!r}"
        )
    if prefetch is not None and not is_int(prefetch, 0):
        raise RewriteError(f"fsdp: prefetch is a number of buckets from 0 on, given {prefetch!r}")
    *replicas, shards = groups_of(mesh)
    sharded = rewritten(f, Fsdp(shards, zero, bucket, reduction, precision, offload, prefetch))
    return rewritten(sharded, Ddp(replicas[0], bucket, reduction)) if replicas else sharded


def tensor_parallel(f: Any, mesh: Any, plan: Any, *, chunks: int = 1) -> Any:
    """Let the ranks of a mesh work on one batch together, each with its share of weights.

    Law: on every rank, values and gradients of whole parameters are those of one rank; gradients of
        shares are the shares.
    Composes with `quantize`, `lora` and, over another dim of a mesh, `fsdp` and `ddp`, in any
        order.

    Args:
        f: as for `quantize`. Every rank calls it, on the same batch.
        mesh: a DeviceMesh of one dim, such as `mesh["tp"]`.
        plan: the way to split each parameter, by pattern on names. `"column"` splits a linear
            layer's results; its bias too where the plan names it, otherwise every rank has the
            whole. `"row"` splits its sums, `"embedding"` the words. `"sequence"` is for weights of
            norms, which work on a share of the positions (dim -2 of activations). With one in a
            plan, rows and embeddings scatter their sums over positions and columns gather them, so
            that ranks compute and store a share of all that lies between (sequence parallelism).
        chunks: of the positions, which columns and rows with `"sequence"` compute one after the
            other. So one travels while the next is computed, if `overlap` goes around the step
            (async tensor parallelism). Positions that do not divide are one chunk.

    Raises:
        RewriteError: mesh is no mesh of one dim, there is no such way to split, or chunks come
            without `"sequence"`. Or, when parameters are prepared, a pattern matches none of them.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> first, second = tfn.parameters.simulated(2)
        >>> linear = lambda params, x: torch.nn.functional.linear(x, params["w"])
        >>> q = tensor_parallel(linear, first, {"w": "column"})
        >>> q.prepare({"w": torch.ones(4, 2)})
        Prepared(w: f32[2, 2], w.rank: i64[])

    Source: Megatron-LM (arXiv:1909.08053), sequence parallelism (arXiv:2205.05198).
    """
    if not is_int(chunks, 1):
        raise RewriteError(f"tensor_parallel: chunks is a number from 1 on, given {chunks!r}")
    step = TensorParallel(group_of(mesh), read_plan(plan), chunks)
    if chunks > 1 and not step.of_positions:
        what = "tensor_parallel: chunks are of positions, and no norm of the plan is a sequence's"
        raise RewriteError(what, fix='Write `"*norm.weight": "sequence"` into the plan.')
    return rewritten(f, step)


def ddp(f: Any, mesh: Any, *, bucket: str | int | None = "block", reduction: str = "mean") -> Any:
    """Keep all parameters on every rank, and reduce their gradients.

    Law: as for `fsdp`.

    Args:
        f, mesh, reduction: as for `fsdp`.
        bucket: "block" reduces the gradients of a block in one collective. A number is the most
            bytes of one collective; None or "each" reduces those of each use.

    Raises:
        RewriteError: as for `fsdp`.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> first, second = tfn.parameters.simulated(2)
        >>> q = ddp(lambda params, x: x @ params["w"], first)
        >>> q.prepare({"w": torch.ones(1, 2)})  # whole on every rank
        Prepared(w: f32[1, 2])
    """
    bucket = _read_bucket("ddp", bucket)
    _check_choice("ddp", "reduction", reduction, ("mean", "sum"))
    return rewritten(f, Ddp(group_of(mesh), bucket, reduction))


def _check_choice(name: str, option: str, given: Any, choices: tuple[Any, ...]) -> None:
    if given not in choices:
        raise RewriteError(
            f"{name}: {option} is {' or '.join(map(repr, choices))}, given {given!r}"
        )


def _read_bucket(name: str, given: Any) -> Bucket:
    """Read the option for the content of one collective.

    Raises:
        RewriteError: it is neither "block", "each" or None, nor a number of bytes from 1 on.
    """
    if given is None or given in ("block", "each"):
        return given or "each"
    if not is_int(given, 1):
        raise RewriteError(f"{name}: bucket is 'block', a number of bytes or None, given {given!r}")
    return given
