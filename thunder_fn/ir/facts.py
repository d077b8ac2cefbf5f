"""Facts about ops that neither PyTorch's schemas nor its tags say: one set of names for each fact.

    op in facts.RESHAPES

Sets of ATen's ops stand here, so that two interpreters cannot disagree about one;
`tests/unit/test_facts.py` lists the files that may have others, with reasons. Facts that PyTorch
knows (views, effects, random numbers, pointwise ops) are asked of it in `thunder_fn.ir.ops`. Rules
are no facts: a table from an op to a function stands with its interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator

from thunder_fn.ir.trace import Op


class Leaves:
    """A set of leaf ops. `add` names every overload of ATen's `add`, `add.Tensor` one of them.

    Names of `prims` and of our own ops are written with their namespace: `thunder_fn.key_normal`.
    Ops of other libraries have no facts here.
    """

    def __init__(self, *names: str) -> None:
        self._names = frozenset(
            name if _has_namespace(name) else f"aten.{name}" for name in " ".join(names).split()
        )

    def __contains__(self, op: object) -> bool:
        """The set names the op: an `Op`, or the full name of a leaf such as `aten.add.Tensor`."""
        if isinstance(op, Op):
            return op.kind == "leaf" and op.name in self
        return isinstance(op, str) and (op in self._names or op.rpartition(".")[0] in self._names)

    def __or__(self, other: Leaves) -> Leaves:
        return Leaves(*self._names, *other._names)

    def __iter__(self) -> Iterator[str]:
        """The names, with their namespaces, in order."""
        return iter(sorted(self._names))

    def __repr__(self) -> str:
        return f"Leaves({', '.join(self)})"


_NAMESPACES = ("aten.", "prims.", "thunder_fn.")


def _has_namespace(name: str) -> bool:
    return name.startswith(_NAMESPACES)


CALLBACKS = Leaves("thunder_fn.debug thunder_fn.pure_callback")
"""Ops that call a Python function, which only this process has."""

# ---- values ----

FILLS = Leaves(
    "bernoulli.p uniform normal_functional exponential geometric cauchy log_normal random",
    "thunder_fn.normal_one_by_one",
)
"""Ops that fill a tensor like their only operand with random numbers, whatever was in it."""

DRAWS = FILLS | Leaves(
    "bernoulli normal poisson binomial", "thunder_fn.key_normal thunder_fn.key_uniform"
)
"""Ops whose floating results are random numbers: they have no derivative in reverse mode."""

EMPTY = Leaves("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")
"""Ops whose results nobody has written."""

LIKE = Leaves(
    "zeros_like ones_like full_like empty_like rand_like randn_like randint_like",
    "new_zeros new_ones new_full new_empty new_empty_strided",
)
"""Ops that make a tensor like another."""

OVERWRITES = FILLS | EMPTY | LIKE | Leaves("copy fill zero bernoulli.Tensor")
"""Ops that take no values from their first operand, only its type and layout."""

SOME_OVERWRITTEN = Leaves("index_put index_add scatter scatter_add index_copy index_fill")
"""Ops that give their first operand with some elements overwritten, and have a form that
overwrites them in place.
"""

WRITES_INTO_FIRST = SOME_OVERWRITTEN | Leaves(
    "scatter_reduce masked_scatter index_reduce",
    "select_scatter slice_scatter diagonal_scatter as_strided_scatter _unsafe_index_put",
)
"""Ops that give their first operand with some elements overwritten, as `SOME_OVERWRITTEN`, in
place or not.
"""

FINDS = Leaves("nonzero index masked_select _unique2 unique_dim unique_consecutive")
"""Ops that find some of the elements of their first operand: a size of the result may depend on
data.
"""

INDEXES = Leaves("index index_put _unsafe_index _unsafe_index_put _index_put_impl")
"""Ops that take lists of places, or masks, which count their elements first."""

INDEXES_ALONG_DIM = Leaves(
    "index_select gather scatter scatter_add scatter_reduce",
    "index_add index_copy index_fill index_reduce",
)
"""Ops that take an index along `dim` of `self`."""

INDEXES_ELEMENTS = Leaves("take put")
"""Ops that take an index of all elements of `self`."""

EMBEDS = Leaves("embedding _embedding_bag _embedding_bag_forward_only")
"""Ops that take indices of the rows of a weight."""

CLASS_LOSSES = Leaves("nll_loss_forward nll_loss2d_forward nll_loss_backward nll_loss2d_backward")
"""Ops whose target is one of the classes in dim 1, or `ignore_index`."""

ASSERTIONS = Leaves("_assert_async")
"""Ops that say that a tensor is true."""

RAISING = ASSERTIONS | Leaves("_linalg_check_errors cholesky cholesky_inverse multinomial")
"""Ops that raise for some values, zeros among them: a matrix that has no inverse, say."""

WAITS = Leaves(
    "multinomial histc embedding_renorm _ctc_loss _ctc_loss_backward isin.Tensor_Tensor",
    "masked_fill.Tensor index_fill.int_Tensor",
    "linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor",
    "logspace.Tensor_Tensor logspace.Tensor_Scalar logspace.Scalar_Tensor",
)
"""Ops that read values of a GPU on the host, which their tags do not tell."""

NORMS = Leaves("linalg_vector_norm linalg__powsum linalg_cross")
"""Ops of PyTorch's `linalg` that factor nothing, so that no library computes them."""

ASSERTS = Leaves("_assert_scalar")
"""Ops that say that a relation of numbers holds."""

MOVES = Leaves(
    "clone copy _to_copy contiguous cat stack constant_pad_nd _unsafe_view slice_scatter"
)
"""Ops that move all elements and compute none, besides views."""

GATHERS = Leaves("embedding index gather index_select index_put")
"""Ops that move elements to or from places that data says, and compute none."""

REDUCES = Leaves(
    "sum mean amax amin any all prod var var_mean std std_mean logsumexp",
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data",
    "native_layer_norm_backward native_group_norm_backward _fused_rms_norm_backward",
)
"""Ops that reduce, or are made of ops that do."""

ZEROS = Leaves("zeros zeros_like new_zeros")
"""Ops that make zeros."""

FULL = Leaves("full")
"""Ops whose second argument is every element of the result."""

ADDS = Leaves("add.Tensor sub.Tensor")
"""Ops whose result is their first operand where the second one is zero."""

ADDS_LAST = Leaves("convolution")
"""Ops that add their last tensor, which may be None."""

LINEAR_IN: dict[str, tuple[tuple[int, ...], ...]] = {
    f"aten.{name}": places
    for names, places in (
        ("mm bmm mv dot vdot mul.Tensor", ((0,), (1,))),
        ("_trilinear", ((0,), (1,), (2,))),
        ("convolution", ((0, 2), (1, 2))),
        ("neg mul.Scalar div.Tensor div.Scalar xlogy.Tensor special_xlog1py", ((0,),)),
        ("clone _to_copy conj_physical sum mean tril triu cat stack block_diag", ((0,),)),
        ("linalg_solve_triangular", ((1,),)),
        ("linalg_lu_solve", ((2,),)),
        ("add.Tensor sub.Tensor rsub.Tensor complex lerp.Scalar lerp.Tensor", ((0, 1),)),
        ("slice_scatter select_scatter diagonal_scatter", ((0, 1),)),
        ("where.self", ((1, 2),)),
        ("put masked_scatter index_put masked_fill.Tensor", ((0, 2),)),
        ("scatter.src scatter_add index_add index_copy index_fill.int_Tensor", ((0, 3),)),
    )
    for name in names.split()
}
"""Sets of arguments: the results are zero where all tensors of one set are, whatever the others.

Views belong here as well (`ops.is_view`), and backwards, which are linear in the cotangents.
"""

PARTS_LINEAR_IN: dict[str, tuple[tuple[tuple[int, ...], ...], ...]] = {
    "aten.convolution_backward": (((0,), (2,)), ((0,), (1,)), ((0,),)),
}
"""The same for each result of ops with several: (grad, input, weight) -> their gradients."""

MATMULS = Leaves(
    "mm bmm addmm baddbmm addbmm mv addmv dot vdot linear matmul _scaled_mm _grouped_mm"
)
"""Matrix products."""

SUMS_OVER_DIMS = Leaves("sum.dim_IntList")
"""Sums over some dims, the second argument, which stay as dims of size 1 if the third is true."""

MATMULS_OF_LINEAR = Leaves("mm addmm")
TRANSPOSES = Leaves("t")
"""Ops of which a linear layer on rows consists."""

CONVOLUTIONS = Leaves("convolution convolution_backward")

TRANSCENDENTAL = Leaves(
    "exp exp2 expm1 log log2 log10 log1p sin cos tan tanh sigmoid erf erfc erfinv pow rsqrt atan2",
    "gelu gelu_backward silu silu_backward mish elu softplus log_sigmoid_forward",
    "tanh_backward sigmoid_backward _softmax _log_softmax _safe_softmax logsumexp",
    "_log_softmax_backward_data",
)
"""Ops of which an element takes tens of operations."""

COMPARES_EXACTLY = Leaves("eq.Tensor ne.Tensor")
"""Comparisons whose result one rounding changes."""

PARAMETERS_MAY_BE_WIDER = Leaves(
    "native_layer_norm native_group_norm native_batch_norm _fused_rms_norm",
    "_native_batch_norm_legit_functional _batch_norm_with_update_functional",
)
"""Ops that are not pointwise and take arguments of several precisions."""


# ---- memory ----

RESHAPES = Leaves("reshape view permute transpose t unsqueeze squeeze")
"""Ops whose result is every element of their first operand, once, in memory of it or in a copy."""

KEEPS_ORDER = Leaves("reshape view.default _unsafe_view unsqueeze squeeze")
"""Ops whose result has the elements of their first operand in the same order."""

SPREADS = KEEPS_ORDER | Leaves("expand")
"""Ops whose result has the elements of their first operand and no others."""

ALIASES = Leaves("detach alias")
"""Ops whose result is their operand, in its memory."""

UNTOLD_VIEWS = Leaves("_unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk")
"""Ops whose result lies in their operand's memory, which their schemas do not tell."""

UNSTACKS = Leaves("select.int unbind.int")
"""Ops that give the parts of a stack along a dim."""

ADDRESSES = Leaves("as_strided as_strided_copy as_strided_scatter")
"""Ops that address the storage of their first operand, which a type does not describe."""

FACTORS = Leaves("_linalg_det _linalg_slogdet _linalg_solve_ex")
"""Ops that factor a matrix or its transpose, whichever is contiguous; their derivatives ask
again which it was.
"""

SHAPED_BY_STRIDES = Leaves("_embedding_bag _embedding_bag_forward_only")
"""Ops with results, read by their derivatives only, whose shapes depend on the strides of
operands.
"""

READ_AS_CONTIGUOUS: dict[str, tuple[int, ...]] = {
    "aten._embedding_bag.default": (1, 2),
    "aten._embedding_bag_forward_only.default": (1, 2),
    "aten._pdist_forward.default": (0,),
    "aten.median.dim": (0,),
    "aten.nanmedian.dim": (0,),
    "aten._weight_norm_interface.default": (0, 1),
    "aten._weight_norm_interface_backward.default": (0, 1, 2, 3),
}
"""Ops that read arguments as if they were contiguous, and the positions of those."""

WITH_WORKSPACE = Leaves("mkldnn_rnn_layer mkldnn_rnn_layer_backward")
"""Kernels that hand memory of their own to their backward, only if they are asked to where they
are called.
"""

INDEX_OF_ONE = Leaves("argmax argmin")
"""Ops that give the place of an element: along a dim, or among all if they are given none."""

COPIES_OF_VIEWS = Leaves("clone conj_physical neg resolve_conj resolve_neg")
"""Ops by which a trace takes some views: with bits, and of memory."""

READS_BEFORE_WRITES = Leaves(
    "copy_ where cumsum cumsum_ cumprod cumprod_ logcumsumexp softmax log_softmax _softmax"
    " _log_softmax",
    "tril tril_ triu triu_ renorm renorm_ addr addr_ addbmm addbmm_ cholesky msort sort",
)
"""Ops, besides pointwise ones, that may write over an operand in its own place."""

COPIES_FIRST = Leaves("addmm addmv baddbmm")
"""Ops that may write over their first operand, which they copy to the result before they add."""

CASTS_TO_OUT = Leaves("cat floor_divide")
"""Ops, besides pointwise ones, that compute what they do without `out=`, and cast that to its
dtype.
"""

ALLOCATES = (
    SOME_OVERWRITTEN
    | CONVOLUTIONS
    | Leaves(
        "mm addmm bmm baddbmm addmv mv dot linear",
        "native_layer_norm native_layer_norm_backward native_batch_norm native_batch_norm_backward",
        "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data sum mean",
        "amax amin prod cumsum var logsumexp gather embedding embedding_dense_backward",
        "index index_select cat stack clone _to_copy full zeros ones empty",
        "arange new_zeros new_full new_ones full_like zeros_like ones_like",
        "nll_loss_forward nll_loss_backward slice_backward select_backward",
    )
)
"""Ops, besides pointwise ones, whose results are dense memory that they have just allocated,
each its own.
"""

SPARSE_GRADIENT: dict[str, tuple[int | None, str]] = {
    "aten.embedding.default": (4, "sparse"),
    "aten._embedding_bag.default": (5, "sparse"),
    "aten.gather.default": (None, "sparse_grad"),
}
"""Ops with an argument that makes the gradient of their first operand sparse: its position and
its name.
"""
