"""jit and memory: what is written, what is given away, what is let go, in one thread or several."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_fn import trace
from thunder_fn.errors import AliasedMutation, DonatedTensorError, TracedFunctionError
from thunder_fn.executors import lower
from thunder_fn.jitted import cache_info, jit


def body(a, b):
    return torch.sin(a) * b + 1


# ---- mutation ----


def test_writes_reach_the_arguments() -> None:
    def f(p, m, g):
        m.mul_(0.9).add_(g)
        p.sub_(m * 0.1)
        return p, (m * m).sum(), p[0]

    def fresh():
        return torch.ones(2, 3), torch.zeros(2, 3), torch.full((2, 3), 2.0)

    jitted, mine, its = jit(f), fresh(), fresh()
    for _ in range(3):
        expected, found = f(*its), jitted(*mine)
        assert found[0] is mine[0]
        assert all(map(torch.equal, (*its, *expected), (*mine, *found)))
    assert mine[0]._version > 0 and cache_info(jitted).misses == 1


def test_writes_to_closed_over_buffers() -> None:
    norm, same = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    f = jit(lambda x: norm(x))
    for _ in range(3):
        x = torch.randn(4, 3)
        assert torch.equal(f(x), same(x))
    assert torch.equal(norm.running_mean, same.running_mean) and norm.num_batches_tracked == 3


def test_writes_to_shared_memory() -> None:
    def f(x, y):
        x.add_(1)
        return x * y

    g = jit(f)
    for _ in range(2):
        base = torch.arange(4.0)
        assert g(base[:2], base[2:]).tolist() == [2, 6] and base.tolist() == [1, 2, 2, 3]
        for aliased in ((base, base[:]), (base[:3], base[1:]), (base[:2], base[1:3])):
            with pytest.raises(AliasedMutation, match="f changes tensor argument 0"):
                g(*aliased)


def test_a_swap() -> None:
    def f(x, y):
        old = x.clone()
        x.copy_(y + 1)
        y.copy_(old + 1)
        return old

    x, y = torch.zeros(2), torch.ones(2)
    g = jit(f)
    for _ in range(2):
        old = g(x, y)
        assert old.tolist() == [0, 0] and x.tolist() == [2, 2] and y.tolist() == [1, 1]
        x.zero_(), y.fill_(1)


def test_leaves_that_require_grad_cannot_be_written() -> None:
    p = torch.ones(2, requires_grad=True)
    f = jit(lambda p: p.mul_(2))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        f(p)
    with torch.no_grad():
        assert f(p) is p
    assert p.tolist() == [2, 2]


def test_results_that_are_written_tensors_of_both_kinds() -> None:
    """An argument and a closed-over tensor are each found among the written ones."""
    c, x = torch.ones(2), torch.zeros(3)

    def f(x):
        x.add_(1)
        return c.mul_(2), x

    found = jit(f)(x)
    assert found[0] is c and found[1] is x and c.tolist() == [2, 2] and x.tolist() == [1, 1, 1]


# ---- donation ----


def test_donated_memory_is_reused_and_gone() -> None:
    f = jit(lambda s, g: {"p": s["p"] - g, "m": s["m"] * 0.9}, donate_argnums=0)
    state = {"p": torch.ones(4), "m": torch.ones(4)}
    for _ in range(3):
        old, places = state, {key: value.data_ptr() for key, value in state.items()}
        state = f(state, torch.ones(4))
        assert {key: value.data_ptr() for key, value in state.items()} == places
        with pytest.raises(DonatedTensorError, match="used after it was donated"):
            old["p"] + 1
        with pytest.raises(DonatedTensorError, match=r"args\[0\]\['m'\] was donated to an earlier call"):
            f(old, torch.ones(4))
    assert state["p"].tolist() == [-2] * 4 and cache_info(f).misses == 1
    assert repr(old["p"]) == "<donated tensor>"


def test_donating_what_others_see_does_not_change_it() -> None:
    f = jit(lambda x: x + 1, donate_argnums=0)
    base = torch.zeros(4)
    assert f(base[:2]).tolist() == [1, 1] and base.tolist() == [0] * 4
    array = torch.zeros(2).numpy()
    assert f(torch.from_numpy(array)).tolist() == [1, 1] and array.tolist() == [0, 0]
    lent = torch.zeros(2)
    array = lent.numpy()
    assert f(lent).tolist() == [1, 1] and array.tolist() == [0, 0]
    assert f(torch.zeros(1).expand(2)).tolist() == [1, 1]


def test_donating_twice() -> None:
    f = jit(lambda x, y: x + y, donate_argnums=0)
    x = torch.ones(2)
    with pytest.raises(DonatedTensorError, match=r"args\[0\] is donated, but it is args\[1\] as well"):
        f(x, x)
    assert torch.equal(f(x, torch.ones(2)), torch.full((2,), 2.0))


def test_a_donated_tensor_that_is_returned_is_a_new_one() -> None:
    f = jit(lambda x, y: (x, x * y), donate_argnums=0)
    x = torch.ones(2)
    same, product = f(x, torch.full((2,), 3.0))
    assert same is not x and same.tolist() == [1, 1] and product.tolist() == [3, 3]


def test_donated_and_written() -> None:
    f = jit(lambda x: x.add_(1), donate_argnums=0)
    x = torch.zeros(2)
    assert f(x).tolist() == [1, 1]
    with pytest.raises(DonatedTensorError):
        x + 1


# ---- failures, threads, lifetimes ----


def test_nothing_partial_stays_when_the_function_raises() -> None:
    fail = True

    @jit
    def f(x):
        x.add_(1)
        if fail:
            raise KeyError("no")
        return x

    x = torch.zeros(2)
    for _ in range(2):
        with pytest.raises(KeyError) as error:
            f(x)
        assert isinstance(error.value, TracedFunctionError)
    assert cache_info(f) == (0, 0, 0, 256) and x.tolist() == [2, 2]  # as eager leaves it
    fail = False
    assert f(x) is x and x.tolist() == [3, 3]


def test_threads() -> None:
    f, failures = jit(body, dynamic=False), []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i in range(60):
            a = torch.randn(2, 1 + (seed + i) % 7, generator=generator)
            if not torch.equal(f(a, a), body(a, a)):
                failures.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    info = cache_info(f)
    assert not failures and info.size == 7 and info.hits + info.misses == 360


@pytest.mark.parametrize("grad", [False, True])
def test_arguments_and_results_are_not_kept_alive(grad) -> None:
    f = jit(lambda x, d: (x * d["y"], x))
    g = jit(lambda x: x + 1, donate_argnums=() if grad else 0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            x, y = torch.ones(2, requires_grad=grad), torch.ones(2)
            result, same = f(x, {"y": y})
            last = g(y)
            alive = [weakref.ref(value) for value in (x, y, result, last)]
            del x, y, result, same, last
            assert all(reference() is None for reference in alive)
    finally:
        gc.enable()


def test_a_jitted_function_and_what_it_closes_over_go_together() -> None:
    w = torch.ones(2)
    f = jit(lambda x: x * w)
    f(torch.ones(2))
    reference = weakref.ref(w)
    gc.collect()
    gc.disable()
    try:
        f = w = None
        assert reference() is None
    finally:
        gc.enable()


def _of_module(module, optimizer):
    return jit(module)


def _of_closure(module, optimizer):
    return jit(lambda x: module(x))


def _of_step(module, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = module(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return jit(step)


def _of_state(module, optimizer):
    """The optimizer's state is a dict with tensors for keys."""
    return jit(lambda x: (module(x), dict.fromkeys(module.parameters(), 1.0)))


@pytest.mark.parametrize("make", [_of_module, _of_closure, _of_step, _of_state])
def test_modules_and_optimizers_go_with_the_function(make) -> None:
    def run() -> list[weakref.ref]:
        module = torch.nn.Linear(3, 3)
        optimizer = torch.optim.Adam(module.parameters())
        f = make(module, optimizer)
        for _ in range(3):
            f(torch.ones(2, 3))
        return [weakref.ref(one) for one in (module, module.weight, optimizer)]

    known = run()
    gc.collect()
    assert [one() for one in known] == [None] * 3


def test_torch_func_sees_the_function() -> None:
    f = jit(body)
    x = torch.randn(3, 2)
    assert torch.equal(torch.func.vmap(f)(x, x), body(x, x))
    grads = torch.func.grad(lambda x: f(x, x).sum())(x)
    assert torch.allclose(grads, x.cos() * x + x.sin())
    f(x, x)
    assert torch.equal(torch.func.vmap(f)(x, x), body(x, x))


def test_inside_another_jitted_function() -> None:
    inner = jit(body)
    outer = jit(lambda a: inner(a, a) * inner(a, torch.ones(2)))
    a = torch.randn(2)
    inner(a, a)
    assert torch.equal(outer(a), body(a, a) * body(a, torch.ones(2)))
    assert cache_info(inner) == (0, 1, 1, 256)


# ---- residuals ----


class Counting(TorchDispatchMode):
    """The number of some tensors that are alive when each op runs."""

    def __init__(self, tensors):
        super().__init__()
        self.references, self.counts = list(tensors), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts.append(sum(reference() is not None for reference in self.references))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [0, 1, 5, 100])
def test_taken_values_are_freed_when_they_were_read_last(count):
    def f(*xs):
        y = torch.ones(())
        for x in xs:
            y = y + x.sin()
        return y

    program = lower(trace(f, *(torch.ones(2) for _ in range(count))), below_autograd=True, taken=True)
    box = [torch.ones(2) for _ in range(count)]
    mode = Counting(map(weakref.ref, box))
    with mode:
        (y,) = program.take(box)
    assert box == [] and torch.allclose(y, 1 + count * torch.ones(2).sin())
    assert mode.counts == sorted(mode.counts, reverse=True) and mode.counts[-1] == 0
    assert program(*(torch.ones(2) for _ in range(count)))[0].equal(y)


@pytest.mark.usefixtures("by_nodes")
@pytest.mark.parametrize("retain", [False, True])
def test_the_backward_frees_residuals_as_it_goes(retain):
    def f(x):
        for _ in range(40):
            x = x.sin() * 2
        return x.sum()

    saved = []

    def unpack(tensor):
        new = tensor.clone()
        saved.append(weakref.ref(new))
        return new

    x = torch.randn(3, requires_grad=True)
    g = jit(f)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = g(x)
    mode = Counting(saved)
    mode.references = saved
    with mode:
        y.backward(retain_graph=retain)
    assert max(mode.counts) > 35 and mode.counts[-1] < 3
    assert torch.allclose(x.grad, torch.func.grad(f)(x.detach()))
    if retain:
        y.backward()
    else:
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()
