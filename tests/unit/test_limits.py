"""Each row of the tables in docs/limits.md: what does not work, and what happens instead."""

from __future__ import annotations

import contextlib
import functools
import io
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import thunder_fn as tfn

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
X = torch.arange(1.0, 5.0)
ROW = re.compile(r"^\| [^|]+ \| `(\w+)` \| (?:\[(\w+)\]\(\S+\)|([^|]+)) \|", re.MULTILINE)
ERRORS: dict[str, Callable[[], object]] = {}
DIFFERENT: dict[str, Callable[[], bool]] = {}


def error(check: Callable[[], object]) -> Callable[[], object]:
    """Raises what its row names."""
    return ERRORS.setdefault(check.__name__, check)


def different(check: Callable[[], bool]) -> Callable[[], bool]:
    """True while what its row says is so."""
    return DIFFERENT.setdefault(check.__name__, check)


@error
def branch() -> object:
    return tfn.jit(lambda x: x if x.sum() > 0 else -x)(X)


@error
def found_range() -> object:
    return tfn.jit(lambda x: [x for _ in range(x[1].long().item())])(X)


@error
def found_roll() -> object:
    return tfn.jit(lambda x: torch.roll(x[x > 1], 1))(X)


@error
def size_by_example() -> object:
    return tfn.vmap(lambda x: x[x > 1])(torch.randn(3, 4))


@error
def random_in_vmap() -> object:
    return tfn.vmap(lambda x: x + torch.rand(()))(X)


@error
def found_cumprod() -> object:
    return tfn.jit(tfn.grad(lambda x: x[x > 0].cumprod(0).sum()))(X)


@error
def memory() -> object:
    return tfn.jit(lambda x: torch.from_numpy(x.numpy() * 2))(X)


@error
def layout() -> object:
    return tfn.jit(lambda x: x * 2)(torch.eye(3).to_sparse())


@error
def sparse_gradient() -> object:
    return tfn.jit(torch.nn.Embedding(5, 3, sparse=True))(torch.tensor([1]))


@error
def out_dtype() -> object:
    return tfn.jit(lambda x: torch.sum(x, 0, out=torch.zeros((), dtype=torch.float64)))(X)


@error
def generator() -> object:
    own = torch.Generator()
    return tfn.jit(lambda x: x + torch.rand(4, generator=own.manual_seed(0)))(X)


@error
def tensor_hook() -> object:
    def f(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda g: g * 3)
        return x.sum()

    return tfn.jit(f)(X.clone().requires_grad_())


@error
def node_hook() -> object:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(lambda given: (given[0] * 3,))
        return y.sum()

    return tfn.jit(f)(X.clone().requires_grad_())


@error
def inner_hook() -> object:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        y.register_hook(lambda g: g * 3)
        return (x * y).sum()

    return tfn.jit(f)(X.clone().requires_grad_())


@error
def left_views() -> object:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        row = y[0]
        y.detach_().mul_(2)
        return row.sum()

    return tfn.jit(f)(X.clone().requires_grad_())


@error
def new_gradient() -> object:
    leaf = X.clone().requires_grad_()

    def f(x: torch.Tensor) -> torch.Tensor:
        (leaf * x).sum().backward()
        return x.sum()

    return tfn.grad(f)(X)


@error
def gradient_hook() -> object:
    leaf = X.clone().requires_grad_()
    leaf.register_hook(lambda gradient: 2 * gradient)
    return tfn.jit(lambda x: x.square().sum().backward())(leaf)


@error
def searching_step() -> object:
    leaf = X.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([leaf])
    leaf.grad = X.clone()
    return tfn.jit(lambda: optimizer.step(lambda: leaf.square().sum()))()


@error
def argument_flag() -> object:
    return tfn.jit(lambda x: x.sum() * x.requires_grad_())(X.clone())


@error
def left_state() -> object:
    def f(x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        return x * 2

    try:
        return tfn.jit(f)(X)
    finally:
        torch.set_grad_enabled(True)


@error
def tensor_attribute() -> object:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        setattr(y, "tag", 3)  # noqa: B010
        return y

    return tfn.jit(f)(X)


@error
def counting_body() -> object:
    def f(x: torch.Tensor) -> torch.Tensor:
        steps: list[int] = []

        def step(total: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            steps.append(1)
            return total + x * len(steps), None

        return tfn.scan(step, torch.zeros(()), x)[0]

    return tfn.jit(f)(X)


@error
def late_backward() -> object:
    state = {"scale": 1.0}

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * state["scale"]

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * state["scale"]

    def f(x: torch.Tensor) -> torch.Tensor:
        y = Scaled.apply(x)
        state["scale"] = 2.0
        return y.sum()

    return tfn.grad(f)(X)


@error
def changing_branch() -> object:
    def f(x: torch.Tensor) -> torch.Tensor:
        found = {"scale": 1.0}

        def yes(x: torch.Tensor) -> torch.Tensor:
            found["scale"] = 2.0
            return x

        return tfn.cond(x.sum() < 0, yes, lambda x: -x, (x,)) * found["scale"]

    return tfn.jit(f)(X)


@dataclass
class _Data:
    x: torch.Tensor


@error
def changed_argument() -> object:
    def f(data: _Data) -> torch.Tensor:
        data.x = data.x * 2
        return data.x

    return tfn.jit(f)(_Data(X))


@error
def made_object() -> object:
    def f(layers: SimpleNamespace) -> torch.Tensor:
        layers.all.append(_Closing(X * 2))
        return layers.all[0].x

    return tfn.jit(f)(SimpleNamespace(all=[]))


class _Closing:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __del__(self) -> None:
        pass


@error
def returned_object() -> object:
    def f(x: torch.Tensor) -> object:
        return _Closing(x)

    return tfn.jit(f)(X)


@error
def renamed_type() -> object:
    def f(x: torch.Tensor) -> torch.Tensor:
        kind = type
        return x if kind(x) is torch.Tensor else -x

    return tfn.jit(f)(X)


@error
def generator_function() -> object:
    def f(x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x * 2

    return tfn.jit(f)(X)


@error
def large_array() -> object:
    array = np.ones(10_000, dtype=np.float32)
    return tfn.jit(lambda x: x + array[0])(X)


@error
def iterator() -> object:
    numbers = iter([1, 2, 3])
    return tfn.jit(lambda x: x + next(numbers))(X)


@error
def packed_autocast() -> object:
    layer = torch.nn.LSTM(3, 3, batch_first=True)

    def f(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            return layer(pack_padded_sequence(x, lengths, batch_first=True))[0].data

    return tfn.jit(f)(torch.randn(2, 4, 3), torch.tensor([4, 2]))


@error
def random_loop() -> object:
    def f(x: torch.Tensor) -> torch.Tensor:
        return tfn.while_loop(lambda c: c.sum() < 10, lambda c: (c * (1 + torch.rand(())),), (x,))[0].sum()

    return tfn.grad(f)(X)


@error
def whole_optimizer() -> object:
    params = {"w": torch.ones(2)}
    optimizer = tfn.functional_optimizer(torch.optim.LBFGS)
    return optimizer.update(params, params, optimizer.init(params))


@error
def changed_before_backward() -> object:
    inner = X.repeat(100_000, 1).requires_grad_() * 1
    result = tfn.jit(lambda x: x.exp())(inner)
    with torch.no_grad():
        inner.mul_(2)
    return result.sum().backward()


@different
def printed() -> bool:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        tfn.jit(lambda x: print(x) or x * 2)(X)  # type: ignore[func-returns-value]
    sees_it = tfn.jit(lambda x: x * len(str(x)))(X)
    return out.getvalue() == "Tracer(f32[4])\n" and torch.equal(sees_it, X * len("Tracer(f32[4])"))


@different
def cached_change() -> bool:
    log: list[int] = []

    @functools.lru_cache
    def doubled(n: int) -> int:
        log.append(n)
        return 2 * n

    step = tfn.compile(lambda x: x * doubled(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            step(X)
    return log == [3, 3, 3]


@different
def tangent_dtype() -> bool:
    x = torch.tensor(2.0)
    dtypes = [m.jvp(lambda x: 1.5 * x, (x,), (x,))[1].dtype for m in (tfn, torch.func)]
    return dtypes == [torch.float32, torch.float64]


@different
def side_effects() -> bool:
    printed = io.StringIO()

    def f(x: torch.Tensor) -> torch.Tensor:
        print("tracing")
        return x * 2

    step = tfn.jit(f)
    with contextlib.redirect_stdout(printed):
        step(X)
        step(X)
    return printed.getvalue() == "tracing\n"


@different
def data_after_use() -> bool:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x * w).sum()
        w.data.mul_(2)
        return y

    def gradient(g: Callable[..., torch.Tensor]) -> torch.Tensor:
        x, w = torch.ones(2, requires_grad=True), torch.ones(2)
        (found,) = torch.autograd.grad(g(x, w), x)
        return found

    before, after = torch.ones(2), torch.full((2,), 2.0)
    return torch.equal(gradient(tfn.jit(f)), before) and torch.equal(gradient(f), after)


@different
def asks_compiling() -> bool:
    f = lambda x: x * (3 if torch.compiler.is_compiling() else 2)
    x = torch.tensor(1.0)
    return bool(tfn.grad(f)(x) == 3 and torch.func.grad(f)(x) == 2 and tfn.jit(f)(x) == 3)


@different
def replaced_method() -> bool:
    step, sin = tfn.jit(lambda x: x.sin()), torch.Tensor.sin
    step(X)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sin", lambda x: x)
        return torch.equal(step(X), sin(X))


@different
def same_tensor() -> bool:
    return torch.equal(tfn.jit(lambda x: x * (2 if x is X else 3))(X), X * 3)


@different
def unvalidated() -> bool:
    def f(scale: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(0.0, scale).log_prob(X)

    base, asked = torch.distributions.Distribution, torch.distributions.Distribution._validate_args
    base.set_default_validate_args(True)  # PyTorch's Dynamo turns it off for good
    try:
        with pytest.raises(ValueError, match="to satisfy the constraint"):
            f(-X)
        return bool(tfn.jit(f)(-X).isnan().all())
    finally:
        base.set_default_validate_args(asked)


@different
def late_reader() -> bool:
    state, seen = {"n": 0}, list[int]()

    @tfn.jit
    def f(x: torch.Tensor) -> torch.Tensor:
        state["n"] += 1
        tfn.debug.callback(lambda _: seen.append(state["n"]), x)
        return x * 2

    f(X), f(X)
    return seen == [0, 1] and state == {"n": 2}


@different
def recomputed_effect() -> bool:
    def count(wrap: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]) -> int:
        state = {"n": 0}

        def body(x: torch.Tensor) -> torch.Tensor:
            state["n"] += 1
            return x.sin()

        x = X.clone().requires_grad_()
        wrap(lambda x: torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False))(x).sum().backward()
        return state["n"]

    return (count(tfn.jit), count(lambda f: f)) == (1, 2)


@different
def python_random() -> bool:
    step = tfn.jit(lambda x: x + random.random())
    with pytest.warns(tfn.errors.HostRandomWarning):
        first = step(X)
    return torch.equal(first, step(X))


@different
def checkpointed_update() -> bool:
    def updates(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> int:
        norm = torch.nn.BatchNorm1d(2)
        x = torch.randn(3, 2, requires_grad=True)
        torch.utils.checkpoint.checkpoint(wrap(norm), x, use_reentrant=False).sum().backward()
        return int(norm.num_batches_tracked)

    return (updates(lambda norm: norm), updates(tfn.jit)) == (2, 1)


@different
def zero_gradient() -> bool:
    p = torch.full((3,), 0.5, requires_grad=True)
    return torch.bernoulli(p).requires_grad and not tfn.jit(torch.bernoulli)(p).requires_grad


@different
def unused_error() -> bool:
    def f(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        x[i]
        return x * 2

    step = tfn.jit(f)
    step(X, torch.tensor([0]))
    with pytest.raises(IndexError):
        f(X, torch.tensor([9]))
    return torch.equal(step(X, torch.tensor([9])), X * 2)


@different
def selected_result() -> bool:
    x = torch.zeros(3, 2)
    tfn.jit(lambda x, i: x[i])(x, torch.tensor(1)).add_(1)
    return not x.any()


@different
def constant_gradient() -> bool:
    found = tfn.vmap(tfn.grad(lambda x: 2 * x.sum()))(torch.ones(3, 2))
    return found.stride() == (0, 0) and torch.equal(found, torch.full((3, 2), 2.0))


@different
def fast_path_autocast() -> bool:
    layer = torch.nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).eval().requires_grad_(False)
    x = torch.randn(4, 3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        fast, ours = layer(x), tfn.jit(layer)(x)
        enabled = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = layer(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(enabled)
    return (
        fast.dtype == torch.bfloat16
        and slow.dtype == ours.dtype == torch.float32
        and torch.allclose(slow, ours, atol=1e-2)
    )


@different
def retraced_counter() -> bool:
    class Counts(torch.nn.Module):
        n = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n += 1
            return x * self.n

    model = tfn.jit(Counts())
    results = [model(X) for _ in range(3)]
    return torch.equal(results[2], 3 * X) and tfn.cache_info(model).misses == 3


@different
def stored_handle() -> bool:
    handles = list[object]()
    f = tfn.jit(lambda x: handles.append(object()) or x * 2)
    results = [f(X) for _ in range(3)]
    is_eager = len({*map(id, handles)}) == 3 and torch.equal(results[2], X * 2)
    return is_eager and tfn.cache_info(f).misses == 3


@different
def made_leaf() -> bool:
    made = tfn.jit(lambda x: torch.nn.Linear(3, 2)(x))
    x = torch.ones(3)
    return not made(x).requires_grad and made(x.requires_grad_()).requires_grad


@different
def stored_argument() -> bool:
    log: list[dict[str, torch.Tensor]] = []
    batch = {"x": X}
    tfn.jit(lambda batch: log.append(batch) or batch["x"] * 2)(batch)
    return log[0].keys() == batch.keys() and log[0]["x"] is X and log[0] is not batch


@different
def no_batching_rule() -> bool:
    with pytest.warns(UserWarning, match="has no batching rule"):
        tfn.vmap(lambda a: torch.histc(a, 3))(torch.rand(2, 3))
    return True


@different
def func_around_jit() -> bool:
    traced: list[int] = []

    @tfn.jit
    def f(x: torch.Tensor) -> torch.Tensor:
        traced.append(1)
        return F.gelu(x).sum()

    for _ in range(2):
        torch.func.grad(f)(X)
    return len(traced) == 2


def rows() -> dict[str, str]:
    """The outcome of each row of the page, by the row's name."""
    return {name: kind or text.strip() for name, kind, text in ROW.findall(PAGE.read_text())}


def test_every_row_has_a_check() -> None:
    assert rows().keys() == {*ERRORS, *DIFFERENT}


@pytest.mark.parametrize("name", ERRORS)
def test_error(name: str) -> None:
    kind = rows()[name]
    with pytest.raises(getattr(tfn.errors, kind, RuntimeError)):
        ERRORS[name]()


@pytest.mark.parametrize("name", DIFFERENT)
def test_difference(name: str) -> None:
    assert DIFFERENT[name](), "this limit is gone: take its row out of docs/limits.md, and its check"
