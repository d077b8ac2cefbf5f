"""Decompositions of ops that PyTorch itself cannot differentiate.

Two tables of functions, both by an op's name, each function with that op's signature:

- DIFFERENTIABLE: another way to call the op, for ops whose own derivative is missing or wrong.
  `svdvals`, for one, computes no singular vectors, but its derivative needs them.
- DECOMPOSITIONS: the op in terms of others, where PyTorch has neither a derivative nor a
  decomposition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.derived.quirks.backwards import BACKWARDS
from thunder_fn.derived.quirks.collectives import mean_scattered
from thunder_fn.derived.quirks.ctc import ctc_loss, ctc_loss_backward

Tensor = torch.Tensor
aten = torch.ops.aten

# ---- other ways to call an op ----


def _svd(
    A: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> Any:
    if compute_uv:
        return aten._linalg_svd(A, full_matrices, True, driver=driver)
    _, S, _ = aten._linalg_svd(A, False, True, driver=driver)
    return S.new_empty(0), S, S.new_empty(0)


def _eigh(A: Tensor, UPLO: str = "L", compute_v: bool = True) -> Any:
    values, vectors = aten._linalg_eigh(A, UPLO, True)
    return values, vectors if compute_v else vectors.new_empty(0)


def _eigvals(A: Tensor) -> Any:
    return aten.linalg_eig(A)[0]


def _rrelu(self: Tensor, noise: Tensor, *args: Any, **kwargs: Any) -> Any:
    # PyTorch's derivative of the functional op reads the noise before it is drawn; that of the
    # in-place one after.
    noise = noise.clone()
    return aten.rrelu_with_noise(self, noise, *args, **kwargs), noise


def _wide(first: Tensor, *others: Tensor | None) -> Tensor:
    """A sum as the kernels of cells compute it, in float32 or wider."""
    halves = torch.float16, torch.bfloat16
    total = first.float() if first.dtype in halves else first
    for other in others:
        total = total if other is None else total + other
    return total


def _lstm_cell(a: Tensor, b: Tensor, cx: Tensor, *biases: Tensor | None) -> Any:
    i, f, g, o = _wide(a, b, *biases).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * _wide(cx) + i * g
    results = o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)
    return tuple(value.to(a.dtype) for value in results)


def _gru_cell(
    a: Tensor,
    b: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Any:
    x = _wide(a, input_bias).chunk(3, 1)
    h = _wide(b, hidden_bias).chunk(3, 1)
    before = _wide(hx)
    r, z = (x[0] + h[0]).sigmoid(), (x[1] + h[1]).sigmoid()
    n = (x[2] + r * h[2]).tanh()
    results = n + z * (before - n), torch.cat([r, z, n, before, h[2]], 1)
    return tuple(value.to(a.dtype) for value in results)


def _linear_cross_entropy(*args: Any) -> Any:
    # the last three arguments ask for the gradients, which the op computes beside the loss
    grads = (True, True, args[3] is not None)
    retain = (True,)
    return torch.ops.torch_nn._linear_cross_entropy_batch_chunked(*args[:-4], *retain, *grads)


def _triangular_solve(
    self: Tensor,
    A: Tensor,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> Any:
    # PyTorch's forward derivative of the old function is wrong
    matrix = A.mT if transpose else A
    solution = torch.linalg.solve_triangular(
        matrix, self, upper=upper != transpose, unitriangular=unitriangular
    )
    return solution, A.expand(*solution.shape[:-2], *A.shape[-2:]).clone()


DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "aten.triangular_solve.default": _triangular_solve,
    "aten._linalg_svd.default": _svd,
    "aten._linalg_eigh.default": _eigh,
    "aten._linalg_eigvals.default": _eigvals,
    "aten._embedding_bag_forward_only.default": aten._embedding_bag.default,
    "aten.rrelu_with_noise_functional.default": _rrelu,
    "torch_nn._linear_cross_entropy_batch_chunked.default": _linear_cross_entropy,
    "aten._thnn_fused_lstm_cell.default": _lstm_cell,
    "aten._thnn_fused_gru_cell.default": _gru_cell,
}

NOT_BATCHED = frozenset(
    f"aten.{name}"
    for name in (
        *(
            "as_strided_scatter.default",
            "index_fill.int_Tensor",
            "roll.default",
        ),
        "select_scatter.default",
    )
)
"""Ops whose batching rule in PyTorch is wrong in values or in derivatives. They are decomposed,
if they can.
"""

CUMPROD = "aten.cumprod.default"
NOT_PUSHED = frozenset(
    (
        *("aten.as_strided_scatter.default", "aten.cholesky_inverse.default", CUMPROD),
        "aten.scatter_reduce.two",
    )
)
"""Ops whose forward derivative in PyTorch is wrong: zero for products, say; or has a wrong
derivative itself, such as that of `cumprod` at zeros.
"""

PUSHED_ONCE = frozenset(
    f"aten.{name}.default"
    for name in (
        *("_linalg_det", "_linalg_eigh", "_safe_softmax", "linalg_eig", "log_sigmoid_forward"),
        "sinc",
    )
)
"""Ops whose forward derivative is right, but has a wrong derivative itself.

Those of `eigh` and `sinc` divide by zero and select afterwards, that of `det` divides by distances
of singular values; that of `logsigmoid` is constant at 0.
"""

ONCE = frozenset(
    f"aten.{name}.default"
    for name in (
        *("cumprod", "_linalg_slogdet", "_linalg_det", "_linalg_solve_ex", "linalg_lu_solve"),
        *("sinc", "index_reduce"),
    )
) | {"aten.scatter_reduce.two"}
"""Ops whose derivative PyTorch computes in a way that cannot be differentiated again, unless it
is told that it will be.
"""


def _sinc(self: Tensor) -> Tensor:
    # by its series near zero: 1 - a^2 / (2 * 3) * (1 - a^2 / (4 * 5) * ...)
    angle = self * math.pi
    is_near = angle.abs() < 1
    square = torch.where(is_near, angle, 0.0).square()
    series = torch.ones_like(square)
    for even in range(20, 0, -2):
        series = 1 - square / (even * (even + 1)) * series
    far = torch.where(is_near, 1.0, angle)
    return torch.where(is_near, series, far.sin() / far)


def _scatter_reduce(
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """Multiply by plain products: PyTorch divides by a factor and selects where it is zero, which
    has a wrong derivative where two factors of a product are zero.

    The factors of a product lie side by side, in the order of their places. Those of one place are
    multiplied in runs of doubling length.
    """
    if reduce != "prod" or index.numel() == 0:
        return aten.scatter_reduce.two(self, dim, index, src, reduce, include_self=include_self)
    shape = self.shape
    self, index, src = (x if x.dim() else x.reshape(1) for x in (self, index, src))
    for place, count in enumerate(index.shape):
        src = src.narrow(place, 0, count)
    order = torch.argsort(index, dim=dim, stable=True)
    places, runs, size = index.gather(dim, order), src.gather(dim, order), index.shape[dim]
    length = 1
    while length < size:
        rest = size - length
        is_same = places.narrow(dim, 0, rest) == places.narrow(dim, length, rest)
        before = torch.where(is_same, runs.narrow(dim, 0, rest), 1.0)
        joined = before * runs.narrow(dim, length, rest)
        runs, length = torch.cat([runs.narrow(dim, 0, length), joined], dim), 2 * length
    differs = places.narrow(dim, 0, size - 1) != places.narrow(dim, 1, size - 1)
    is_last = torch.cat([differs, torch.ones_like(places.narrow(dim, 0, 1), dtype=torch.bool)], dim)
    zeros = torch.zeros_like(self)
    products = zeros.scatter_add(dim, places, torch.where(is_last, runs, 0.0))
    is_reached = zeros.scatter_add(dim, places, is_last.to(self.dtype)) != 0
    found = self * products if include_self else products
    return torch.where(is_reached, found, self).reshape(shape)


def _index_reduce(
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    if reduce != "prod":
        return aten.index_reduce(self, dim, index, source, reduce, include_self=include_self)
    if source.dim():
        sizes = [1] * source.dim()
        sizes[dim] = -1
        index = index.reshape(sizes).expand(source.shape)
    else:
        index = index.reshape(())
    return _scatter_reduce(self, dim, index, source, reduce, include_self=include_self)


AGAIN: dict[str, Callable[..., Any]] = {
    "aten.sinc.default": _sinc,
    "aten.scatter_reduce.two": _scatter_reduce,
    "aten.index_reduce.default": _index_reduce,
}
"""Ops of `ONCE` whose formula in PyTorch cannot be differentiated again in any way: other formulas,
of which the derivatives of the first one are those.
"""


# ---- decompositions ----


def copy(self: Tensor, src: Tensor | float, non_blocking: bool = False) -> Tensor:
    """Return the value of self after `self.copy_(src)`, where PyTorch takes a number too."""
    if not isinstance(src, Tensor):
        return torch.full_like(self, src)
    return src.to(self.dtype).expand(self.shape).clone()


def index_fill(self: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    """PyTorch's derivative in the value looks for the distinct indices, how many there are
    depends on data.
    """
    if self.dim() == 0:
        return value.expand_as(self).clone()
    mask = torch.zeros(self.shape[dim], dtype=torch.bool, device=self.device).index_fill(
        0, index, 1
    )
    return torch.where(mask.view([-1] + [1] * (self.dim() - 1 - dim % self.dim())), value, self)


def index(self: Tensor, indices: list[Tensor | None]) -> Any:
    """Boolean masks as the positions of their true elements: how many there are is found in the
    masks alone.
    """
    if not any(map(_is_boolean, indices)):
        return NotImplemented
    places: list[Tensor | None] = []
    for index in indices:
        if index is None or not _is_boolean(index):
            places.append(index)
            continue
        if index.dim() == 0:  # a mask of a dim of size 1
            self, index = self.unsqueeze(len(places)), index.reshape(1)
        is_empty = 0 in index.shape  # so that there are none
        found = torch.nonzero_static(index, size=0) if is_empty else index.nonzero()
        places += found.unbind(1)
    return aten.index(self, places)


def _is_boolean(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def masked_select(self: Tensor, mask: Tensor) -> Any:
    """An index of both in one shape."""
    self, mask = torch.broadcast_tensors(self, mask)
    return index(self, [mask])


def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The n-th place of the mask gets the n-th number of the source; the 0th is for places
    before the first.
    """
    self, mask = torch.broadcast_tensors(self, mask)
    numbers = torch.cat([source.new_zeros(1), source.reshape(-1)])
    return torch.where(mask, numbers[mask.reshape(-1).cumsum(0)].reshape(mask.shape), self)


def masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: list[int]) -> Tensor:
    """Give each used number of the source the gradient of its place in the mask, and the rest of
    the source zero.
    """
    grad, mask = torch.broadcast_tensors(grad, mask)
    which = mask.reshape(-1).cumsum(0) * mask.reshape(-1)
    numel = math.prod(sizes)
    return grad.new_zeros(numel + 1).index_add(0, which, grad.reshape(-1))[1:].reshape(sizes)


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """The weights are added up where the counts are, of which there are as many as the numbers
    say.
    """
    if weights is None:
        return NotImplemented
    dtype = weights.dtype if weights.dtype is torch.float32 else torch.float64
    sums = torch.zeros_like(aten.bincount(self, None, minlength), dtype=dtype)
    return sums.index_add(0, self, weights.detach().to(dtype))


def index_put(
    self: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False
) -> Any:
    """Replace a boolean mask by the positions of its true elements, one for each value."""
    masks = [index for index in indices if index is not None and _is_boolean(index)]
    if len(masks) != 1 or sum(index is not None for index in indices) != 1:
        return NotImplemented
    (mask,) = masks
    mask = mask.to(self.device, torch.bool)  # an index may be on the CPU
    before = next(i for i, index in enumerate(indices) if index is not None)
    after = self.dim() - before - mask.dim()
    values = values.to(self.dtype)  # one value may be of another dtype
    values = values.reshape([1] * (before + 1 + after - values.dim()) + list(values.shape))
    count = values.shape[before]
    if count == 1:
        values = values.squeeze(before).reshape(
            [*values.shape[:before], *[1] * mask.dim(), *values.shape[before + 1 :]]
        )
        where = mask.reshape([*mask.shape, *[1] * after])
        return torch.where(where, self + values if accumulate else values, self)
    positions = torch.nonzero_static(mask, size=count).unbind(1)
    return aten.index_put(
        self, [None] * before + list(positions), values.expand([-1] * values.dim()), accumulate
    )


def diagonal_scatter(
    self: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Any:
    """PyTorch's derivative is for real numbers."""
    if not self.is_complex():
        return NotImplemented
    src = src.to(self.dtype)
    parts = [
        aten.diagonal_scatter(part(self), part(src), offset, dim1, dim2)
        for part in (torch.real, torch.imag)
    ]
    return torch.complex(*parts)


def remainder(self: Any, other: Tensor) -> Tensor:
    """Compute the remainder of a number: PyTorch has no derivative of this overload."""
    dtype = torch.result_type(other, self)
    return aten.remainder.Tensor(
        torch.scalar_tensor(self, dtype=dtype, device=other.device), other.to(dtype)
    )


def select_scatter(self: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """functorch scatters each value many times over, so that the right result has a wrong
    derivative.
    """
    size = self.shape[dim]
    here = torch.arange(size, device=self.device) == index % size
    return torch.where(
        here.view([-1] + [1] * (self.dim() - 1 - dim % self.dim())), src.unsqueeze(dim), self
    )


def roll(self: Tensor, shifts: list[int], dims: list[int] | None = None) -> Any:
    """functorch rolls a batch of scalars."""
    return NotImplemented if self.dim() else self.clone()


def _is_injective(size: list[int], stride: list[int]) -> bool:
    """Test whether no two elements of such a view are at one place in memory."""
    reach = 0
    for step, length in sorted(
        (step, length) for length, step in zip(size, stride, strict=True) if length > 1
    ):
        if step <= reach:  # dims that interleave, if they do not overlap
            starts = (
                range(0, n * d, d) if d else [0] * n for n, d in zip(size, stride, strict=True)
            )
            return len({sum(place) for place in itertools.product(*starts)}) == math.prod(size)
        reach += (length - 1) * step
    return True


def as_strided_scatter(
    self: Tensor, src: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None
) -> Any:
    """Scatter into contiguous memory, as tensors of a trace have it. Places that are written
    twice are left to eager.
    """
    places = torch.full([1] * len(size), storage_offset or 0, device=self.device)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        places = places + step * torch.arange(length, device=self.device).view(
            [-1] + [1] * (len(size) - 1 - dim)
        )
    if not _is_injective(size, stride):
        return NotImplemented
    return self.reshape(-1).scatter(0, places.reshape(-1), src.reshape(-1)).reshape(self.shape)


def squeeze(self: Tensor, dim: int) -> Any:
    """A scalar as it is. PyTorch's decomposition is a prim that nothing follows, and functorch's
    rule removes the batch.
    """
    return NotImplemented if self.dim() else aten.alias.default(self)


def _differentiable_scatter(self: Tensor, src: Tensor, *where: Any) -> Tensor:
    found = as_strided_scatter(self, src, *where)
    return aten.as_strided_scatter.default(self, src, *where) if found is NotImplemented else found


DIFFERENTIABLE["aten.as_strided_scatter.default"] = _differentiable_scatter
"""By PyTorch's formula overwritten elements keep their gradient, and the others have none."""


def cumprod(self: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Multiply runs of 1, 2, 4 ... elements: products alone, without a division.

    Of a symbolic size, the trace holds for the sizes that need as many doublings.
    """
    x = self if dtype is None else self.to(dtype)
    if not x.dim():
        return x.clone()
    count, others = 1, [0, 0] * (x.dim() - 1 - dim % x.dim())
    while count < x.shape[dim]:
        x = x * aten.constant_pad_nd.default(x, [*others, count, -count], 1)
        count = 2 * count
    return x.clone() if count == 1 else x


AGAIN[CUMPROD] = cumprod
"""PyTorch's formula that can be differentiated again is a loop over the elements."""


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    **BACKWARDS,
    "_c10d_functional.reduce_scatter_tensor.default": mean_scattered,
    "aten._ctc_loss.default": ctc_loss,
    "aten._ctc_loss_backward.default": ctc_loss_backward,
    "aten.as_strided_scatter.default": as_strided_scatter,
    CUMPROD: cumprod,
    "aten.squeeze.dim": squeeze,
    "aten.diagonal_scatter.default": diagonal_scatter,
    "aten.remainder.Scalar_Tensor": remainder,
    "aten.roll.default": roll,
    "aten.select_scatter.default": select_scatter,
    "aten.copy.default": copy,
    "aten.bincount.default": bincount,
    "aten.index.Tensor": index,
    "aten.masked_scatter.default": masked_scatter,
    "aten.masked_scatter_backward.default": masked_scatter_backward,
    "aten.masked_select.default": masked_select,
    "aten.index_fill.int_Tensor": index_fill,
    "aten.index_put.default": index_put,
    "aten._unsafe_index_put.default": index_put,
}

for op in (aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default):
    internals.compose_by(op, DECOMPOSITIONS[str(op)])
