"""Batching rules of ops where functorch's take symbolic sizes for numbers; and of ops for which it
has none, such as collectives.

Each is the op itself on operands in another shape. A pool of a batch of images is a pool of more
images. A convolution with a weight for each example is one with more groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thunder_fn.derived.quirks import attention
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Equation, Literal, TensorType, Var, vars_in
from thunder_fn.torch_internals import OpOverload, named_arguments, schema_of


@dataclass(frozen=True, slots=True)
class Batch:
    """An op, how many examples there are, and which operands have a leading batch dim, by
    identity.
    """

    op: OpOverload
    size: Any
    batched: frozenset[int]

    def has(self, value: Any) -> bool:
        """Test whether the operand differs between examples."""
        return id(value) in self.batched

    def wide(self, value: Tensor) -> Tensor:
        """The operand with a batch dim."""
        return value if self.has(value) else value.expand(self.size, *value.shape)

    def rank(self, value: Tensor) -> int:
        """The number of dims that the operand has in each example."""
        return value.dim() - self.has(value)


def along_a_dim(batch: Batch, x: Tensor, dim: int, *rest: Any, **kwargs: Any) -> Any:
    """gather, scatter and slices: the dim is one further."""
    rank = batch.rank(x)
    wide = [batch.wide(value) if isinstance(value, Tensor) else value for value in rest]
    return batch.op(batch.wide(x), dim % rank + 1, *wide, **kwargs)


def of_more_columns(batch: Batch, x: Tensor, *rest: Any) -> Tensor:
    """Gathers and scatters of rows: the examples lie side by side in each row."""
    return batch.op(x.movedim(0, 1).contiguous(), *rest).movedim(1, 0)


def of_all_elements(batch: Batch, x: Tensor, *rest: Any) -> Tensor:
    """Collectives that treat all elements alike."""
    return batch.op(x, *rest)


def of_more_images(batch: Batch, *args: Any, **kwargs: Any) -> Any:
    """Pools: examples of images are images."""
    count = next(batch.wide(arg).shape[1] for arg in args if isinstance(arg, Tensor))
    folded = [batch.wide(arg).flatten(0, 1) if isinstance(arg, Tensor) else arg for arg in args]
    results = ops.flatten_result(batch.op(*folded, **kwargs))
    return tuple(result.unflatten(0, (batch.size, count)) for result in results)


def attention_of_all(batch: Batch, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Attention kernels: one call, in which the examples' batches follow each other."""
    given = named_arguments(batch.op, args, kwargs)
    count = batch.wide(given["query"]).shape[1]
    folded = {
        name: _folded(batch, name, value, count) if isinstance(value, Tensor) else value
        for name, value in given.items()
    }
    results = ops.flatten_result(batch.op(**folded))
    returns = schema_of(batch.op).returns
    return tuple(
        (
            result
            if not isinstance(result, Tensor)
            else (
                result.expand(batch.size, *result.shape)
                if returned.name in attention.OF_ALL_EXAMPLES
                else result.unflatten(0, (batch.size, count))
            )
        )
        for returned, result in zip(returns, results, strict=True)
    )


def _folded(batch: Batch, name: str, value: Tensor, count: Any) -> Tensor:
    if name in attention.OF_ALL_EXAMPLES:
        return value[0] if batch.has(value) else value
    if name not in ("attn_bias", "attn_mask"):
        return batch.wide(value).flatten(0, 1)
    if not batch.has(value) and (value.dim() == 2 or (name == "attn_mask" and value.shape[0] == 1)):
        return value
    value = batch.wide(value)
    value = value[:, None, None] if value.dim() == 3 else value
    mask = value.expand(batch.size, count, *value.shape[2:]).flatten(0, 1)
    if name == "attn_mask":
        return mask
    length = mask.shape[-1]  # the kernel wants rows that begin at multiples of 16 elements
    return torch.nn.functional.pad(mask, (0, -length % 16))[..., :length]


def _draws_alike(equation: Equation, operands: Sequence[Tensor], batch: Batch) -> bool:
    """Test whether one call draws the numbers of a backward: none, or those of a forward that
    was one call too.
    """
    given = named_arguments(batch.op, equation.args, dict(equation.kwargs))
    dropped = given.get("dropout_p", Literal(0.0))
    if equation.op.name in attention.FORWARDS or dropped == Literal(0.0):
        return True
    seeds = [
        arg
        for name, arg in given.items()
        if name in attention.OF_ALL_EXAMPLES and isinstance(arg, Var)
    ]
    return any(batch.has(operands[seed.index]) for seed in seeds)


def of_an_image_each(batch: Batch, *args: Any, **kwargs: Any) -> Any:
    """Pools of one image in each example: the examples are the images."""
    return batch.op(
        *(batch.wide(arg) if isinstance(arg, Tensor) else arg for arg in args), **kwargs
    )


def convolution(batch: Batch, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """A weight for all examples sees more images; one for each is a group of its own."""
    if not batch.has(weight) and not batch.has(bias):
        wide = batch.wide(x)
        return batch.op(wide.flatten(0, 1), weight, bias, *rest).unflatten(
            0, (batch.size, wide.shape[1])
        )
    biases = None if bias is None else batch.wide(bias).flatten()
    *settings, groups = rest
    y = batch.op(
        _in_channels(batch, x),
        batch.wide(weight).flatten(0, 1),
        biases,
        *settings,
        groups * batch.size,
    )
    return _out_of_channels(batch, y)


def convolution_backward(
    batch: Batch,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[Any] | None,
    *rest: Any,
) -> Any:
    """Batch the gradients of the input, the weight and the bias."""
    *settings, groups, wanted = rest
    if not batch.has(weight) and list(wanted) == [True, False, False]:
        wide = batch.wide(x)
        gradient, *_ = batch.op(
            batch.wide(grad).flatten(0, 1), wide.flatten(0, 1), weight, bias_sizes, *rest
        )
        return gradient.unflatten(0, (batch.size, wide.shape[1])), None, None
    sizes = None if bias_sizes is None else [size * batch.size for size in bias_sizes]
    operands = _in_channels(batch, grad), _in_channels(batch, x), batch.wide(weight).flatten(0, 1)
    of_x, of_weight, of_bias = batch.op(*operands, sizes, *settings, groups * batch.size, wanted)
    return (
        _out_of_channels(batch, of_x) if wanted[0] else None,
        (
            of_weight.unflatten(0, (batch.size, of_weight.shape[0] // batch.size))
            if wanted[1]
            else None
        ),
        of_bias.unflatten(0, (batch.size, of_bias.shape[0] // batch.size)) if wanted[2] else None,
    )


def _in_channels(batch: Batch, x: Tensor) -> Tensor:
    return batch.wide(x).transpose(0, 1).flatten(1, 2)


def _out_of_channels(batch: Batch, y: Tensor) -> Tensor:
    return y.unflatten(1, (batch.size, y.shape[1] // batch.size)).transpose(0, 1)


def index(batch: Batch, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """An index for each example, or one for all; beside indices of their own, examples are an
    index themselves.
    """
    before, rank, adjacent = _indexed_dims(batch, indices)
    if not any(map(batch.has, indices)):
        y = batch.op(x, [None, *indices])
        return y if adjacent else y.movedim(rank, 0)
    wide = [value if value is None else _right_aligned(batch, value, rank) for value in indices]
    if not batch.has(x):
        y = batch.op(x, wide)
        return y.movedim(before, 0) if adjacent else y
    y = batch.op(x, [_examples(batch, x, rank), *wide])
    return (
        y.movedim(list(range(1, rank + 1)), list(range(before + 1, before + rank + 1)))
        if adjacent
        else y
    )


def index_put(
    batch: Batch,
    x: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
) -> Tensor:
    """The examples are an index beside the others."""
    before, rank, adjacent = _indexed_dims(batch, indices)
    wide = [value if value is None else _right_aligned(batch, value, rank) for value in indices]
    total = batch.rank(x) - sum(value is not None for value in indices) + rank
    values = _right_aligned(batch, values, total)
    if (
        adjacent and before
    ):  # the indices' dims come first where there is an index before a whole dim
        first = values.dim() - total
        values = values.movedim(
            [first + before + i for i in range(rank)], [first + i for i in range(rank)]
        )
    return batch.op(batch.wide(x), [_examples(batch, x, rank), *wide], values, accumulate)


def _indexed_dims(batch: Batch, indices: Sequence[Tensor | None]) -> tuple[int, int, bool]:
    """The number of whole dims in front, the rank of the indices, and whether the indexed dims
    stand side by side.
    """
    places = [place for place, value in enumerate(indices) if value is not None]
    rank = max(batch.rank(value) for value in indices if value is not None)
    return places[0], rank, places[-1] - places[0] + 1 == len(places)


def _right_aligned(batch: Batch, value: Tensor, rank: int) -> Tensor:
    """The operand, if it is batched with this rank in each example."""
    if not batch.has(value):
        return value.reshape((*(1 for _ in range(rank - value.dim())), *value.shape))
    return value.reshape(
        (value.shape[0], *(1 for _ in range(rank - batch.rank(value))), *value.shape[1:])
    )


def _examples(batch: Batch, x: Tensor, rank: int) -> Tensor:
    """The number of each example, for indices of this rank."""
    return torch.arange(batch.size, device=x.device).reshape(
        (batch.size, *(1 for _ in range(rank)))
    )


def cdist_backward(batch: Batch, grad: Tensor, x1: Tensor, x2: Tensor, p: Any, out: Tensor) -> Any:
    """Functorch's rule, which `jacrev` asks, reads the first example's cotangent for all of them
    where the points are the same.
    """
    rank = max(batch.rank(x1), batch.rank(x2))
    points = [
        x.reshape(x.shape[0], *[1] * (rank + 1 - x.dim()), *x.shape[1:])
        for x in map(batch.wide, (x1, x2))
    ]
    return batch.op(batch.wide(grad).contiguous(), *points, p, batch.wide(out).contiguous())


def lu_solve(batch: Batch, *operands: Tensor, **kwargs: Any) -> Any:
    """Give each right side factors of its own. Functorch takes batches of the factors for those of
    the right sides, and the kernel takes the stride of the last batch dim for that of all.
    """
    ranks = (2, 1, 2)  # of the factors, the pivots and the right sides
    wide = [batch.wide(value) for value in operands]
    shapes = [x.shape[1 : x.dim() - rank] for x, rank in zip(wide, ranks, strict=True)]
    common = torch.broadcast_shapes(*shapes)
    aligned = (
        x.reshape(x.shape[0], *[1] * (len(common) - len(shape)), *x.shape[1:])
        for x, shape in zip(wide, shapes, strict=True)
    )
    spread = (
        x.expand(batch.size, *common, *x.shape[x.dim() - rank :])
        for x, rank in zip(aligned, ranks, strict=True)
    )
    return batch.op(*(x.clone(memory_format=torch.contiguous_format) for x in spread), **kwargs)


def ctc_loss(batch: Batch, log_probs: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The examples' sequences are more sequences, if their targets are padded to one width."""
    folded, count = _sequences(batch, log_probs, rest)
    loss, alpha = batch.op(*folded)
    one = batch.rank(log_probs) == 2
    loss = loss if one else loss.unflatten(0, (batch.size, count))
    return loss, alpha.unflatten(0, (batch.size, count))


def ctc_loss_backward(batch: Batch, grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    """Batch the gradient as the loss."""
    folded, count = _sequences(batch, log_probs, rest)
    grads = batch.op(batch.wide(grad).flatten(), *folded)
    grads = grads.unflatten(1, (batch.size, count)).movedim(1, 0)
    return grads.squeeze(2) if batch.rank(log_probs) == 2 else grads


def _sequences(batch: Batch, log_probs: Tensor, rest: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """The operands of one loss of all sequences, and the number of those of an example."""
    # log_probs: [B, T, N, C] -> [T, B * N, C]; an example may have no N, and is one sequence then
    # targets: [B, N, S] -> [B * N, S], lengths and losses: [B, N] -> [B * N], alpha: [B * N, T, L]
    wide = batch.wide(log_probs)
    wide = wide.unsqueeze(2) if wide.dim() == 3 else wide
    count = wide.shape[2]

    def rows(value: Tensor, rank: int) -> Tensor:
        value = batch.wide(value)
        return value.reshape(batch.size * count, *value.shape[value.dim() - rank :])

    ranks = (1, 0, 0, 0, 2)
    tensors = [one for one in rest if isinstance(one, Tensor)]
    folded = [rows(one, rank) for one, rank in zip(tensors, ranks, strict=False)]
    return [wide.movedim(0, 1).flatten(1, 2), *folded, *rest[len(tensors) :]], count


def _is_padded(equation: Equation) -> bool:
    """Test that the targets of a loss are not one after another."""
    shapes = [var.type.shape for var in equation.operands if isinstance(var.type, TensorType)]
    log_probs, targets = shapes[1:3] if "backward" in equation.op.name else shapes[:2]
    return len(targets) == 2 or len(log_probs) == 2 or log_probs[1] == 1


def assertion(batch: Batch, condition: Tensor, *message: str) -> tuple[()]:
    """The condition has to hold for every example."""
    batch.op(condition.all(), *message)
    return ()


def _is_mask(var: Var) -> bool:
    return isinstance(var.type, TensorType) and var.type.dtype in (torch.bool, torch.uint8)


_POOLS = {
    f"aten.{name}{dims}d{end}.default": dims
    for name in ("avg_pool", "_adaptive_avg_pool", "adaptive_max_pool", "max_pool")
    for dims in (1, 2, 3)
    for end in ("", "_backward", "_with_indices", "_with_indices_backward")
}
_INDEXED = {
    "aten.index.Tensor": index,
    "aten.index_put.default": index_put,
    "aten._unsafe_index_put.default": index_put,
}
_ALONG_A_DIM = tuple(
    f"aten.{name}"
    for name in (
        "gather.default",
        "scatter.src",
        "scatter.value",
        "scatter.reduce",
        "scatter_add.default",
        "scatter_reduce.two",
        "slice.Tensor",
    )
)

_COLLECTIVES = {
    f"{ops.COLLECTIVES}{name}.default": rule
    for name, rule in (
        ("all_gather_into_tensor", of_more_columns),
        ("all_to_all_single", of_more_columns),
        ("broadcast", of_all_elements),
        ("reduce_scatter_tensor", of_more_columns),
        ("all_reduce", of_all_elements),
        ("wait_tensor", of_all_elements),
    )
}

WRONG = {
    "aten._cdist_backward.default": cdist_backward,
    "aten.linalg_lu_solve.default": lu_solve,
}
"""The ops whose rules in functorch are wrong, and other ones."""

_ASSERTIONS = dict.fromkeys(("aten._assert_async.msg", "aten._assert_async.default"), assertion)
_FOR_ALL = _COLLECTIVES | WRONG | _ASSERTIONS

_SEQUENCES = {
    "aten._ctc_loss.Tensor": ctc_loss,
    "aten._ctc_loss_backward.Tensor": ctc_loss_backward,
}

KNOWN = frozenset(
    (
        *WRONG,
        *_POOLS,
        *_INDEXED,
        *_COLLECTIVES,
        *_ASSERTIONS,
        *_SEQUENCES,
        *attention.ALL,
        *_ALONG_A_DIM,
        "aten.convolution.default",
        "aten.convolution_backward.default",
    )
)
"""The ops that have rules here, some of them for some operands only."""


def rule_of(
    equation: Equation, operands: Sequence[Tensor], batch: Batch
) -> Callable[..., Any] | None:
    """The rule for an equation with these operands, if there is one."""
    name, first = equation.op.name, operands[0] if operands else None
    if first is None:
        return None
    if name in _FOR_ALL:
        return _FOR_ALL[name]
    if name in _SEQUENCES:
        return _SEQUENCES[name] if _is_padded(equation) else None
    if name in attention.ALL:
        return attention_of_all if _draws_alike(equation, operands, batch) else None
    if name in _POOLS:
        return of_more_images if batch.rank(first) == _POOLS[name] + 2 else of_an_image_each
    if name in _INDEXED:
        return None if any(map(_is_mask, vars_in(equation.args[1]))) else _INDEXED[name]
    if name in _ALONG_A_DIM:
        return along_a_dim if batch.rank(first) > 0 else None
    return {
        "aten.convolution.default": convolution,
        "aten.convolution_backward.default": convolution_backward,
    }.get(name)
