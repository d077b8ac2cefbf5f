"""A function that is traced again, since a first attempt has failed, does to Python's objects what one call does.

The oracle is eager PyTorch: results and state after each of several calls.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

import thunder_fn as tfn
from thunder_fn.errors import GraphBreakWarning, ThunderError, UnsupportedCall

X = torch.tensor([1.0, -2.0, 3.0])
Program = tuple[Callable[..., Any], Callable[[], Any]]
"""A function that changes objects outside of it, and what tells their state."""


def counts_in_a_list() -> Program:
    n = [0]

    def f(x: torch.Tensor, k: int) -> Any:
        n[0] += 1
        return x[x > 0] * n[0]

    return f, lambda: list(n)


def appends() -> Program:
    log: list[int] = []

    def f(x: torch.Tensor, k: int) -> Any:
        log.append(len(log))
        return x[x > 0] + len(log)

    return f, lambda: list(log)


def counts_in_an_object() -> Program:
    class State: ...

    s: Any = State()
    s.k, s.d = 0, {}

    def f(x: torch.Tensor, k: int) -> Any:
        s.k += 1
        s.d[s.k] = s.k
        return x.nonzero().sum() * s.k

    return f, lambda: (s.k, dict(s.d))


def counts_in_a_cell() -> Program:
    k = 0

    def f(x: torch.Tensor, n: int) -> Any:
        nonlocal k
        k += 1
        return x[x > 0] * k

    return f, lambda: k


def counts_by_an_argument() -> Program:
    seen, total = collections.Counter[str](), [0]

    def f(x: torch.Tensor, n: int) -> Any:
        seen["calls"] += 1
        total[0] += n
        return x * n + seen["calls"] + total[0]

    return f, lambda: (dict(seen), list(total), type(total[0]))


def keeps_sizes() -> Program:
    sizes, last = set[int](), collections.deque[int](maxlen=2)

    def f(x: torch.Tensor, n: int) -> Any:
        x = x.repeat(n)
        sizes.add(x.shape[0])
        last.append(x.shape[0])
        return x[x > 0].sum() + len(sizes) + last[-1] + len(last)

    return f, lambda: (sorted(sizes), list(last))


def turns_gradients_on() -> Program:
    w, n = torch.ones(3, requires_grad=True), [0]

    def f(x: torch.Tensor, k: int) -> Any:
        with torch.enable_grad():
            n[0] += 1
            return w * x * n[0]

    return f, lambda: list(n)


def accumulates_gradients() -> Program:
    w, n = torch.ones(3, requires_grad=True), [0]
    optimizer = torch.optim.SGD([w], 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def f(x: torch.Tensor, k: int) -> Any:
        loss = (w * x).square().sum() / 2
        loss.backward()
        n[0] += 1
        if n[0] % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return loss.detach()

    return f, lambda: (n[0], w.tolist(), w.grad if w.grad is None else w.grad.tolist(), optimizer.param_groups[0]["lr"])


def remembers_tables() -> Program:
    tables: dict[tuple[int, int], torch.Tensor] = {}

    def f(x: torch.Tensor, n: int) -> Any:
        key = (n, x.shape[0])
        if key not in tables:
            tables[key] = torch.arange(n)[:, None] * torch.ones(x.shape[0])
        return tables[key] + x

    return f, lambda: sorted(tables)


PROGRAMS = [
    counts_in_a_list,
    appends,
    counts_in_an_object,
    counts_in_a_cell,
    counts_by_an_argument,
    keeps_sizes,
    turns_gradients_on,
    accumulates_gradients,
    remembers_tables,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_call_changes_python_objects_once(program: Callable[[], Program]) -> None:
    (f, state), (g, own) = program(), program()
    jitted = tfn.jit(g)
    with torch.no_grad() if program is turns_gradients_on else torch.enable_grad():
        for n in (1, 2, 3, 2, 5):
            torch.testing.assert_close(jitted(X, n), f(X, n))
            assert own() == state()


def test_a_size_found_in_data_is_not_stored_outside() -> None:
    """PyTorch's own error on the next use of the list reached the user."""
    sizes: list[int] = []

    @tfn.jit
    def f(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.nonzero().shape[0])
        return x * 2

    with pytest.raises(UnsupportedCall, match="stores a number outside that its program computes anew"):
        f(X)
    assert sizes == []


COUNT, ROWS = [0], torch.eye(3).to_sparse()


class Counter:
    count = 0


def counts_in_a_global(x: torch.Tensor) -> torch.Tensor:
    COUNT[0] += 1
    return torch.sparse.mm(ROWS, x.sin()).sum() * COUNT[0]


def counts_in_a_closed_list() -> Any:
    n, rows = [0], torch.eye(3).to_sparse()

    def f(x: torch.Tensor) -> torch.Tensor:
        n[0] += 1
        return torch.sparse.mm(rows, x.sin()).sum() * n[0]

    return f


def counts_in_a_closed_object() -> Any:
    n, rows = Counter(), torch.eye(3).to_sparse()

    def f(x: torch.Tensor) -> torch.Tensor:
        n.count += 1
        return torch.sparse.mm(rows, x.sin()).sum() * n.count

    return f


def counts_and_reads_a_graph() -> Any:
    n, w = 0, torch.ones(3, requires_grad=True)
    loss = w.exp().sum()

    def f(x: torch.Tensor) -> torch.Tensor:
        nonlocal n
        n += 1
        return (torch.autograd.grad(loss, w, retain_graph=True)[0].log() * x.sin()).sum() * n

    return f


@pytest.mark.parametrize(
    "make",
    [lambda: counts_in_a_global, counts_in_a_closed_list, counts_in_a_closed_object, counts_and_reads_a_graph],
)
def test_what_torch_func_computes_in_our_place_changes_objects_once(make: Callable[[], Any]) -> None:
    x, f = torch.arange(9.0).view(3, 3), make()
    COUNT[0] = 0
    for n in range(1, 36):  # so many calls that their captures are watched no more
        torch.testing.assert_close(tfn.grad(f)(x), x.cos() * n)


def test_a_call_without_a_key_counts_in_its_argument_once() -> None:
    x, counter = torch.arange(9.0).view(3, 3), Counter()

    def f(x: torch.Tensor, rows: torch.Tensor, n: Counter) -> torch.Tensor:
        n.count += 1
        return torch.sparse.mm(rows, x.sin()).sum() * n.count

    torch.testing.assert_close(tfn.grad(f)(x, ROWS, counter), x.cos())


REFUSED = {
    "a decision": lambda x: x.sin() if x.sum() > 0 else x.cos(),
    "a number that decides": lambda x: x * (2.0 if x.sum().item() > 1 else 3.0),
    "a sparse tensor": lambda x: torch.sparse.mm(x[None].to_sparse(), torch.eye(3))[0],
    "text": lambda x: x * len(f"{x.sum().item():.1f}"),
}
"""Functions that no trace can hold, or only for one value. Each runs in eager mode."""


def logs(refused: Callable[[torch.Tensor], torch.Tensor]) -> Program:
    """A function that writes to many kinds of places, numbers found in values too, before it is refused."""
    log: list[Any] = []
    seen: dict[str, Any] = {}
    kept, recent, count = Counter(), collections.deque[Any](maxlen=2), 0

    def f(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        log.append(x.max().item())
        recent.append(len(log))
        seen["last"], seen[f"{len(log)}"] = x.min().item(), count
        kept.count += 1
        return refused(x).sum()

    return f, lambda: (list(log), dict(seen), kept.count, list(recent), count)


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize(
    "use",
    {
        "jit": lambda f: tfn.jit(f)(X),
        "module": lambda f: tfn.jit(Module(f))(X),
        "grad": lambda f: tfn.grad(f)(X),
        "jit of grad": lambda f: tfn.jit(tfn.grad(f))(X),
        "vmap": lambda f: tfn.vmap(f)(X[None]),
        "jvp": lambda f: tfn.jvp(f, (X,), (X,)),
        "trace": lambda f: tfn.trace(f, X),
        "eval_shape": lambda f: tfn.eval_shape(f, X),
        "jit of scan": lambda f: tfn.jit(lambda x: tfn.scan(lambda c, row: (c, f(row)), x, x[None])[1])(X),
    }.items(),
    ids=lambda use: use[0],
)
def test_a_refused_function_leaves_python_objects_as_they_were(use: tuple[str, Callable[[Any], Any]], why: str) -> None:
    """Logs held numbers of a capture that was over, whose next use raised an error of PyTorch's own."""
    f, state = logs(REFUSED[why])
    try:
        use[1](f)
    except ThunderError:
        assert state() == ([], {}, 0, [], 0)
    else:
        assert state()[0] in ([], [3.0]), "once, or in the program alone"


class Module(torch.nn.Module):
    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(x)


@pytest.mark.parametrize("why", REFUSED)
def test_compile_runs_what_is_refused_as_eager_does(why: str) -> None:
    if why == "text" and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("in PyTorch 2.11 Dynamo itself loses the format around a graph break, as torch.compile alone does")
    (f, state), (g, own) = logs(REFUSED[why]), logs(REFUSED[why])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphBreakWarning)
        warnings.filterwarnings("ignore", "Dynamo does not know how to trace the builtin")  # of 2.11, of `append`
        compiled = tfn.compile(g)
        for x in (X, -X, X + 2):
            torch.testing.assert_close(compiled(x), f(x))
            assert own() == state()


def test_what_a_function_did_until_it_raised_it_has_done() -> None:
    log: list[int] = []

    @tfn.jit
    def f(x: torch.Tensor) -> torch.Tensor:
        log.append(len(log))
        raise ValueError("no")

    for n in (1, 2):
        with pytest.raises(ValueError, match="no"):
            f(X)
        assert log == list(range(n))
