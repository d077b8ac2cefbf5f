"""Eager calls of transforms with other sizes: the results of torch.func, from few captures."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import thunder_fn as tfn
from tests.ops.samples import OPS, cases
from thunder_fn.api import captures
from thunder_fn.derived import leaf_vjp
from thunder_fn.errors import MissingRule
from thunder_fn.interpreters.grad import vjp
from thunder_fn.ir.trace import Equation, Trace, is_differentiable, subtraces

Tensor = torch.Tensor
WEIGHT = torch.linspace(-1, 1, 12).reshape(4, 3)
SIZES = (3, 5, 6, 4, 8, 1, 0, 9, 7)
"""Four are captured with numbers, the fifth with symbols; 1 and 0 are kinds of their own."""
MOST = 7

POLYMORPHIC: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "size": lambda x: x * x.shape[0],
    "mean": lambda x: x - x.sum(0) / (len(x) + 1),
    "matmul": lambda x: x @ x.mT,
    "reshape": lambda x: x.reshape(-1) * 2,
    "view": lambda x: x.reshape(x.shape[0], 2, x.size(1) // 2),
    "cat": lambda x: torch.cat([x, x * 2]),
    "cat one": lambda x: torch.cat([x, x.new_ones(1, x.shape[1])]),
    "stack": lambda x: torch.stack([x, x.exp()], 1),
    "arange": lambda x: x * torch.arange(x.shape[0], dtype=x.dtype)[:, None],
    "zeros": lambda x: x + torch.zeros(x.shape),
    "full": lambda x: x + torch.full_like(x, 2),
    "eye": lambda x: torch.eye(x.shape[0]) @ x,
    "pad": lambda x: F.pad(x, (0, 1, 2, 0)),
    "half": lambda x: x[: x.shape[0] // 2],
    "step": lambda x: x[::2] * 3,
    "flip": lambda x: x.flip(0),
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(-1),
    "triu": lambda x: (x @ x.mT).triu(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "sqrt": lambda x: x / math.sqrt(x.shape[0] + 1),
    "numel": lambda x: x * x.numel() / x.size(1),
    "shape": lambda x: x.reshape(torch.Size([*x.shape, 1])),
    "itself": lambda x: x,
    "a view": lambda x: x.mT,
    "linear": lambda x: F.linear(x, WEIGHT.mT),
    "mask": lambda x: x.masked_fill(torch.ones(x.shape).tril() == 0, 0.0),
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "where": lambda x: torch.where(x > 0, x, -x * x.shape[0]),
    "index": lambda x: x[torch.arange(x.shape[0])],
    "an int": lambda x: x * 1 if isinstance(x.shape[0], int) else x * 100,
    "in place": lambda x: (x * 1).add_(x.shape[0]),
}
ASKING: dict[str, Callable[[Tensor], Tensor]] = {
    # its rules for symbols may have other strides, and then symbols are refused
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "a branch": lambda x: x.sin() if x.shape[0] > 4 else x.cos(),
    "even": lambda x: x * (2 if x.shape[0] % 2 else 3),
    "a loop": lambda x: torch.stack([x[i] * i for i in range(x.shape[0])]) if x.shape[0] else x,
    "unbind": lambda x: torch.stack([row * 2 for row in x.unbind(0)]) if x.shape[0] else x,
    "text": lambda x: x * len(str(x.shape[0])),
    "a key": lambda x: x * {3: 2.0}.get(x.shape[0], 3.0),
    "max": lambda x: x * max(x.shape[0], 6),
}


def _loss(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x).pow(2).sum() * 0.5


def _vjp(lib: Any, f: Any, x: Tensor) -> Any:
    value, pullback = lib.vjp(f, x)
    return value, pullback(torch.ones_like(value))


TRANSFORMS: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "grad": lambda lib, f, x: lib.grad(_loss(f))(x),
    "aux": lambda lib, f, x: lib.grad_and_value(lambda x: (_loss(f)(x), f(x)), has_aux=True)(x),
    "vjp": _vjp,
    "jvp": lambda lib, f, x: lib.jvp(f, (x,), (x.cos(),)),
    "vmap": lambda lib, f, x: lib.vmap(f)(torch.stack([x, -x])),
    "vmap of rows": lambda lib, f, x: lib.vmap(lambda row: f(row[None]))(x),
    "vmap along 1": lambda lib, f, x: lib.vmap(f, in_dims=1, out_dims=-1)(torch.stack([x, -x], 1)),
    "jacrev": lambda lib, f, x: lib.jacrev(f)(x),
    "jacfwd": lambda lib, f, x: lib.jacfwd(f)(x),
    "hessian": lambda lib, f, x: lib.hessian(_loss(f))(x),
    "vmap of grad": lambda lib, f, x: lib.vmap(lib.grad(_loss(f)))(torch.stack([x, -x])),
    "vmap of jvp": lambda lib, f, x: lib.vmap(lambda x: lib.jvp(f, (x,), (x,)))(torch.stack([x, -x])),
    "grad of vmap": lambda lib, f, x: lib.grad(lambda x: lib.vmap(_loss(f))(torch.stack([x, -x])).sum())(x),
}
LAYOUTS: dict[str, Callable[[int], Tensor]] = {
    "rows": lambda n: _drawn(n, 4),
    "columns": lambda n: _drawn(4, n).mT,
    "a part": lambda n: _drawn(n, 9)[:, 1:5],
    "followed": lambda n: _drawn(n, 4).requires_grad_(),
}


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The captures of eager calls, one entry for each."""
    found: list[Any] = []
    for owner, name in ((captures._First, "kept"), (captures, "_run_once")):
        before = getattr(owner, name)
        monkeypatch.setattr(owner, name, functools.partialmethod(_noting, found, before))
        if owner is captures:
            monkeypatch.setattr(owner, name, functools.partial(_noting, None, found, before))
    tfn.clear_caches(rules=False)
    return found


def _noting(self: Any, found: list[Any], before: Any, *args: Any) -> Any:
    found.append(before)
    return before(*args) if self is None else before(self, *args)


def _or_error(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - of whatever kind, both have it
        return error


def _facts(result: Any, x: Tensor) -> list[Any]:
    """All of a result but for values: dtypes, layouts, memory, and what autograd knows."""
    memory = x.untyped_storage().data_ptr()
    return [
        (
            leaf.dtype,
            leaf.shape,
            leaf.stride() if leaf.numel() > 1 else None,
            leaf.requires_grad,
            leaf.is_leaf,
            leaf.numel() > 0 and leaf.untyped_storage().data_ptr() == memory,
        )
        if isinstance(leaf, Tensor)
        else (type(leaf), leaf)
        for leaf in torch.utils._pytree.tree_leaves(result)
    ]


def _check(transform: Any, f: Any, x: Tensor) -> list[Any]:
    """Check a call; facts of its result that are not those of torch.func."""
    found = _or_error(lambda: transform(tfn, f, x))
    expected = _or_error(lambda: transform(torch.func, f, x))
    if isinstance(expected, Exception):
        empty = x.numel() == 0  # of which we know derivatives that torch.func does not
        assert isinstance(found, type(expected)) or empty
        return []
    assert not isinstance(found, Exception), found
    torch.testing.assert_close(found, expected)
    facts = _facts(found, x)
    return facts if x.numel() and facts != _facts(expected, x) else []


CASES = [
    (name, *case)
    for i, name in enumerate({**POLYMORPHIC, **ASKING})
    for case in itertools.islice(itertools.cycle(itertools.product(TRANSFORMS, LAYOUTS)), 5 * i, 5 * i + 1)
]


@pytest.mark.parametrize(("name", "transform", "layout"), CASES)
def test_results_are_torch_funcs_for_all_sizes(name: str, transform: str, layout: str, captured: list[Any]) -> None:
    f, run = {**POLYMORPHIC, **ASKING}[name], TRANSFORMS[transform]
    counts, others = list[int](), list[tuple[Tensor, Any]]()
    for size in SIZES:
        x = LAYOUTS[layout](size)
        if facts := _check(run, f, x):
            others.append((x, facts))
        counts.append(len(captured))
    if name in POLYMORPHIC:
        assert counts[-1] == counts[-3] <= MOST, counts
    for x, facts in others:  # then they are those of a call that is captured with numbers
        tfn.clear_caches(rules=False)
        assert facts == _facts(run(tfn, f, x), x)


# ---- what a new size asks of autograd ----


Params = dict[str, Tensor]


def _net(params: Params, x: Tensor) -> Tensor:
    return F.linear(torch.sigmoid(F.linear(x, params["first"], params["bias"])), params["last"])


def _product(lib: Any, params: Params) -> Callable[[Tensor], Any]:
    """A batch of products with the Hessian."""
    tangents = {name: torch.stack([one.detach().cos(), one.detach()]) for name, one in params.items()}
    gradient = lambda x: lib.grad(lambda params: _net(params, x).pow(2).mean())
    product = lambda tangents, x: lib.jvp(gradient(x), (params,), (tangents,))[1]
    batched = lib.vmap(product, in_dims=(0, None))
    return lambda x: batched(tangents, x)


def _gradients(lib: Any, params: Params) -> Callable[[Tensor], Any]:
    return lambda x: lib.jacrev(_net)(params, x)


@pytest.mark.parametrize("make", [_product, _gradients])
def test_autograd_is_asked_nothing_for_new_sizes(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first five."""
    asked, ask = list[Trace](), leaf_vjp._ask_autograd
    monkeypatch.setattr(leaf_vjp, "_ask_autograd", lambda *args, **more: asked.append(args[0]) or ask(*args, **more))
    tfn.clear_caches()
    params = {"first": _drawn(5, 4), "bias": _drawn(5), "last": _drawn(3, 5)}
    params = {name: one.requires_grad_() for name, one in params.items()}
    ours, theirs = make(tfn, params), make(torch.func, params)
    for count, size in enumerate((3, 4, 5, 6, 7, 9, 8, 10)):
        before, x = len(asked), _drawn(size, 4)
        torch.testing.assert_close(ours(x), theirs(x))
        assert count < 5 or len(asked) == before, [str(one) for one in asked[before:]]
    assert asked


SIZED = (
    "linalg_qr",
    "linalg_svd",
    "linalg_lu",
    "linalg_pinv",
    "linalg_householder_product",
    "prod",
    "cumprod",
    "nn_functional_max_pool2d",
    "nn_functional_avg_pool2d",
    "nn_functional_conv2d",
    "nn_functional_unfold",
    "nn_functional_layer_norm",
    "nn_functional_nll_loss",
    "norm",
    "cdist",
    "as_strided",
    "roll",
    "diff",
    "logcumsumexp",
)
"""Operators whose formulas look at sizes."""


def _leaves_of(name: str, dtype: torch.dtype) -> set[Equation]:
    """The leaves of an operator and of its derivative, on PyTorch's samples."""
    found = set[Equation]()
    if dtype not in OPS[name].dtypes:
        return found
    for case in cases(name, dtype, 6, kinds=("plain",)):
        leaves, spec = torch.utils._pytree.tree_flatten((case.args, case.kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def f(*tensors: Tensor) -> Any:
            given = dict(zip(places, tensors, strict=True))
            tree = [given.get(place, leaf) for place, leaf in enumerate(leaves)]
            args, kwargs = torch.utils._pytree.tree_unflatten(tree, spec)
            return case.op.op(*args, **kwargs)

        traced = tfn.trace(f, *(leaves[place] for place in places))
        wanted = (tuple(map(is_differentiable, types)) for types in (traced.input_types, traced.output_types))
        with contextlib.suppress(MissingRule):
            traced = vjp(traced, *wanted)
        found |= {one for body in subtraces(traced) for one in body.equations if one.op.kind == "leaf"}
    return found


@pytest.mark.parametrize("name", SIZED)
def test_whether_autograd_has_a_formula_is_no_matter_of_sizes(name: str) -> None:
    """The answer for one size is that for others."""
    answers = dict[Any, set[bool]]()
    for equation in _leaves_of(name, torch.float32) | _leaves_of(name, torch.complex64):
        of = leaf_vjp._of_any_size(leaf_vjp.alone(equation))
        answers.setdefault(of, set()).add(leaf_vjp._is_ruled.__wrapped__(of))
    assert answers and all(len(found) == 1 for found in answers.values())
