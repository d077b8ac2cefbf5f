"""Tensors that a transformed function stores outside: they are there afterwards, as under torch.func and in eager mode.

Every way to store one, inside every transform, called eagerly and in a jitted function; the place is outside of the whole or
made by the function around.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import thunder_fn as tfn
from thunder_fn.errors import UnsupportedCall

Places = types.SimpleNamespace


def places() -> Places:
    """Every kind of place that can hold a tensor."""
    module = torch.nn.Identity()
    module.last = None  # type: ignore[assignment]
    module.seen = []  # type: ignore[assignment]
    known = {
        "log": [],
        "table": {},
        "lists": {},
        "queue": collections.deque(maxlen=3),
        "box": types.SimpleNamespace(value=None),
        "module": module,
        "nested": {"a": {}},
    }
    return Places(**known)


def _extend(to: Places, value: torch.Tensor) -> None:
    to.log += [value, 1, value.sum()]


def _in_order(to: Places, value: torch.Tensor) -> None:
    to.table["first"] = value
    to.table["second"] = 2
    to.table["third"] = (value, {"k": value.sum()})


STORES: dict[str, Callable[[Places, torch.Tensor], Any]] = {
    "append": lambda to, value: to.log.append(value),
    "extend": _extend,
    "item": lambda to, value: to.table.__setitem__("h", value),
    "in order": _in_order,
    "update": lambda to, value: to.table.update(h=value, n=1),
    "setdefault": lambda to, value: to.lists.setdefault("k", []).append(value),
    "appendleft": lambda to, value: to.queue.appendleft(value),
    "attribute": lambda to, value: setattr(to.box, "value", value),
    "pair": lambda to, value: setattr(to.box, "value", (value, 3)),
    "module": lambda to, value: setattr(to.module, "last", value),
    "list of a module": lambda to, value: to.module.seen.append(value),
    "nested": lambda to, value: to.nested["a"].__setitem__("b", value),
}


def held(to: Places) -> list[Any]:
    """List the content of the places, tensors as lists of numbers."""
    found = (
        to.log,
        list(to.table.items()),
        to.lists,
        [*to.queue],
        to.box.value,
        to.module.last,
        to.module.seen,
        to.nested,
    )
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda one: one.detach().double().tolist(), found)


WRAPS: dict[str, Callable[[Any, Callable[..., Any], torch.Tensor], Any]] = {
    "grad": lambda on, f, x: on.grad(f)(x),
    "vjp": lambda on, f, x: on.vjp(f, x)[1](torch.ones(()))[0],
    "jvp": lambda on, f, x: on.jvp(f, (x,), (x.cos(),))[1],
    "jacrev": lambda on, f, x: on.jacrev(f)(x),
    "jacfwd": lambda on, f, x: on.jacfwd(f)(x),
    "hessian": lambda on, f, x: on.hessian(f)(x),
    "linearize": lambda on, f, x: on.linearize(f, x)[1](x.cos()) if on is tfn else on.jvp(f, (x,), (x.cos(),))[1],
    "functionalize": lambda on, f, x: on.functionalize(f)(x),
    "grad of grad": lambda on, f, x: on.grad(lambda x: on.grad(f)(x).sum())(x),
    "grad in vmap": lambda on, f, x: on.vmap(lambda y: y * on.grad(f)(x), randomness="different")(torch.ones(2)),
    "jit": lambda on, f, x: (tfn.jit(f) if on is tfn else f)(x),
    "compile": lambda on, f, x: (tfn.compile(f) if on is tfn else f)(x),
    "checkpoint": lambda on, f, x: (tfn.checkpoint(f) if on is tfn else f)(x),
    "torch's checkpoint": lambda on, f, x: torch_checkpoint(f, x, use_reentrant=False) if on is tfn else f(x),
    "grad of jit": lambda on, f, x: on.grad(tfn.jit(f) if on is tfn else f)(x),
}


def _step(on: Any, wrap: str, store: str, to: Places | None, x: torch.Tensor) -> Any:
    """Store inside a transform, and use what was stored."""
    mine = places() if to is None else to

    def f(x: torch.Tensor) -> torch.Tensor:
        h = x * x
        STORES[store](mine, h * 2)
        return (h * x).sum()

    result = WRAPS[wrap](on, f, x)
    leaves = torch.utils._pytree.tree_leaves(
        [vars(mine.box), mine.log, mine.table, mine.lists, [*mine.queue], mine.module.last]
    )
    used = [
        leaf.sum()
        for leaf in (*leaves, *mine.module.seen, *mine.nested["a"].values())
        if isinstance(leaf, torch.Tensor)
    ]
    return result, sum(used)


def _rebinding(on: Any, wrap: str, to: list[Any], x: torch.Tensor) -> Any:
    """Bind a variable of the function around, in a function three levels deep."""
    last = None

    def f(x: torch.Tensor) -> torch.Tensor:
        nonlocal last
        last = x * x
        to.append(last + 1)
        return (last * x).sum()

    first = WRAPS[wrap](on, lambda x: WRAPS[wrap](on, f, x).sum(), x)
    return first, last + to[-1]  # type: ignore[operator]


X = torch.tensor([0.5, -1.0, 2.0])


@pytest.mark.parametrize("is_local", [False, True], ids=["outside", "local"])
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("store", STORES)
def test_what_is_stored_is_there_afterwards(store: str, wrap: str, is_local: bool) -> None:
    """Law: results and places are torch.func's after each of three calls, eagerly and in a jitted function."""
    expected, ours, jits = (None if is_local else places() for _ in range(3))
    jitted = tfn.jit(lambda x: _step(tfn, wrap, store, jits, x))
    for scale in (1.0, 2.0, -1.0):
        want = _step(torch.func, wrap, store, expected, X * scale)
        for got, to in ((_step(tfn, wrap, store, ours, X * scale), ours), (jitted(X * scale), jits)):
            torch.testing.assert_close(got, want)
            assert to is None or held(to) == held(expected)


@pytest.mark.parametrize("wrap", ["grad", "vjp", "jvp", "jit", "checkpoint", "torch's checkpoint"])
def test_a_variable_around_is_bound(wrap: str) -> None:
    """Law: transforms within transforms leave what torch.func's leave."""
    expected, ours, jits = [], [], []  # type: ignore[var-annotated]
    jitted = tfn.jit(tfn.jit(lambda x: _rebinding(tfn, wrap, jits, x)))
    for scale in (1.0, 2.0, -1.0):
        want = _rebinding(torch.func, wrap, expected, X * scale)
        torch.testing.assert_close(_rebinding(tfn, wrap, ours, X * scale), want)
        torch.testing.assert_close(jitted(X * scale), want)
    torch.testing.assert_close((ours, jits), (expected, expected))


def test_what_is_stored_inside_grad_has_autograds_history() -> None:
    """Law: a stored tensor that depends on tensors that require grad outside is in autograd's graph, as under torch.func."""
    results = []
    for on in (tfn, torch.func):
        kept, x = [], X.clone().requires_grad_()
        gradient = on.grad(lambda y, kept=kept: (kept.append(y * y), (y**3).sum())[1])(x)
        results.append(torch.autograd.grad((gradient * kept[0]).sum(), x)[0])
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "jacrev"])
def test_torch_funcs_own_transforms_inside_a_jitted_function(transform: str) -> None:
    """Law: what torch.func's transforms leave outside is kept in each call."""
    ours, expected = places(), places()
    steps = [lambda x, to=to: _step(torch.func, transform, "module", to, x) for to in (ours, expected)]
    jitted = tfn.jit(steps[0])
    for scale in (1.0, 2.0):
        torch.testing.assert_close(jitted(X * scale), steps[1](X * scale))
        assert held(ours) == held(expected)


class Moving(nn.Module):
    """Binds what it averages to a new tensor in each call, a buffer or a plain attribute."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if is_buffer:
            self.register_buffer("mean", torch.zeros(4))
        else:
            self.mean = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        return self.linear(x) - self.mean


@pytest.mark.parametrize("is_buffer", [True, False])
@pytest.mark.parametrize("inside", [lambda m: m, tfn.jit], ids=["module", "jitted"])
@pytest.mark.parametrize("outside", [lambda f: f, tfn.jit], ids=["function", "jitted"])
def test_a_buffer_that_is_bound_again_is_another_tensor(is_buffer: bool, inside: Any, outside: Any) -> None:
    """The old one keeps its value, also one from inference mode; no call but the first is traced."""
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    moving = Moving(is_buffer)
    expected = deepcopy(moving)
    called = inside(moving)
    f, held, before = outside(lambda x: called(x).sum()), list[Tensor](), list[Tensor]()
    with torch.inference_mode():
        first = expected(x), called(x)
    assert torch.equal(*first)
    for _ in range(4):
        held.append(moving.mean)
        before.append(moving.mean.clone())
        torch.testing.assert_close(f(x), expected(x).sum())
        torch.testing.assert_close(moving.mean, expected.mean)
    assert len({id(one) for one in held}) == 4 and all(map(torch.equal, held, before))
    if outside is tfn.jit:
        assert tfn.cache_info(f).misses <= 2  # the first mean is from inference mode


WEIGHT = nn.Linear(2, 2).weight


class Cached:
    """Cached properties of tensors, of numbers, and of both."""

    def __init__(self) -> None:
        self.w, self.n = torch.ones(2), 1

    @functools.cached_property
    def tensor(self) -> Any:
        return self.w * 2

    @functools.cached_property
    def number(self) -> Any:
        return self.n * 2

    @functools.cached_property
    def tree(self) -> Any:
        return {"a": self.w * 3, "b": (self.n, self.w)}

    @functools.cached_property
    def parameter(self) -> Any:
        return WEIGHT * 2

    @functools.cached_property
    def table(self) -> Any:
        return torch.arange(2.0)

    @functools.cached_property
    def nested(self) -> Any:
        return self.tensor + self.number


CACHED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "tensor": lambda a, x: x + a.tensor,
    "number": lambda a, x: x * a.number,
    "tree": lambda a, x: x + a.tree["a"] * a.tree["b"][0],
    "parameter": lambda a, x: x @ a.parameter,
    "table": lambda a, x: x * a.table,
    "nested": lambda a, x: x * a.nested,
}
WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "jit": (lambda f: f, tfn.jit),
    "grad": (lambda f: torch.func.grad(lambda x: f(x).sum()), lambda f: tfn.grad(lambda x: f(x).sum())),
    "jit of grad": (lambda f: torch.func.grad(lambda x: f(x).sum()), lambda f: tfn.jit(tfn.grad(lambda x: f(x).sum()))),
    "vmap": (lambda f: lambda x: f(x)[None], lambda f: lambda x: tfn.vmap(f)(x[None])),
    "jit of checkpoint": (lambda f: f, lambda f: tfn.jit(tfn.checkpoint(f))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CACHED)
def test_a_cached_property_keeps_what_eager_code_keeps(name: str, way: str) -> None:
    """It is computed once, and again where somebody has deleted it."""

    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        held, x = Cached(), torch.ones(2)
        step = wrap(lambda x: CACHED[name](held, x))
        found = [step(x), step(x * 2), getattr(held, name)]
        held.w, held.n = x * 5, 3
        found.append(step(x))
        for one in {name, "tensor", "number"} & vars(held).keys():
            delattr(held, one)
        return [*found, step(x), getattr(held, name)]

    expected, found = (tree_map_only(Tensor, Tensor.detach, run(wrap)) for wrap in WAYS[way])
    torch.testing.assert_close(found, expected)


class Slot:
    __slots__ = ("b", "w")


def _into_a_dict(s: Any, o: Any) -> None:
    o.d["b"], o.d["w"] = s.b, s.w


def _into_an_object(s: Any, o: Any) -> None:
    o.b, o.w = s.b, s.w


def _into_a_list(s: Any, o: Any) -> None:
    o.l.append(s.b)
    o.l.append(s.w)


def _into_a_tree(s: Any, o: Any) -> None:
    o.d["b"] = [s.b, {"w": (s.w, 1)}]


def _into_a_slot(s: Any, o: Any) -> None:
    o.slot.b, o.slot.w = s.b, s.w


def _into_a_class(s: Any, o: Any) -> None:
    type(o).b, type(o).w = s.b, s.w


def _into_another_attribute(s: Any, o: Any) -> None:
    s.last, s.kept = s.b, [s.w]
    o.l[:] = [s.last, s.kept[0]]


def _before_it_is_replaced(s: Any, o: Any) -> None:
    o.d["b"], s.b = s.b, s.b + 1


def _two_calls_long(s: Any, o: Any) -> None:
    o.d["older"], o.d["b"], s.b = o.d.get("b"), s.b, s.b + 1


INTO = (
    _into_a_dict,
    _into_an_object,
    _into_a_list,
    _into_a_tree,
    _into_a_slot,
    _into_a_class,
    _into_another_attribute,
    _before_it_is_replaced,
    _two_calls_long,
)


@pytest.mark.parametrize("use", INTO, ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("wrap", [tfn.jit, lambda m: tfn.jit(lambda x: m(x))], ids=["module", "function"])
def test_a_tensor_of_a_module_is_stored_elsewhere(wrap: Callable[[Any], Any], use: Callable[[Any, Any], None]) -> None:
    """Each call stores what the module holds then, not what it held when it was traced."""

    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        class Places:
            b = w = None

        class Net(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                use(self, o)
                return x * 2

        o: Any = Places()
        o.d, o.l, o.slot = {}, [None], Slot()
        net, found, x = Net(), list[Any](), torch.ones(2)
        step = wrap(net)
        for i in range(4):
            if i != 2:
                net.register_buffer("b", torch.full((2,), float(i)))
                net.w = nn.Parameter(torch.full((2,), 10.0 + i))
            found.append(step(x))
            held = {**vars(o), "slot": [getattr(o.slot, name, None) for name in "bw"], "class": [Places.b, Places.w]}
            leaves = [one for one in tree_leaves(held) if isinstance(one, Tensor)]
            found.append([(one.detach().clone(), one is net.b, one is net.w) for one in leaves])
        return found

    found, expected = run(wrap), run(lambda f: f)
    assert str(found) == str(expected)


def _list(net: Any, x: Tensor) -> None:
    net.l[0] = net.w


def _slice(net: Any, x: Tensor) -> None:
    net.l[:] = [net.w, net.b]


def _dict(net: Any, x: Tensor) -> None:
    net.d["k"] = net.b


def _any_key(net: Any, x: Tensor) -> None:
    for key in list(net.d):
        net.d[key] = net.w


def _update(net: Any, x: Tensor) -> None:
    net.d.update(k=net.w)


def _object(net: Any, x: Tensor) -> None:
    net.o.v = net.w


def _attribute(net: Any, x: Tensor) -> None:
    net.last = net.b


def _state(net: Any, x: Tensor) -> None:
    net.l[0] = net.o.v
    net.o.v = net.o.v + x


def _never(net: Any, x: Tensor) -> None:
    if x.dim() > 1:
        net.l[0] = net.d["k"] = net.w


@pytest.mark.parametrize("change", ["w", "b", "place", "all: w, b, place"])
@pytest.mark.parametrize(
    "use", [_list, _slice, _dict, _any_key, _update, _object, _attribute, _state, _never], ids=lambda f: f.__name__[1:]
)
@pytest.mark.parametrize("wrap", [tfn.jit, lambda m: tfn.jit(lambda x: m(x))], ids=["module", "function"])
def test_a_tensor_is_stored_where_it_was_already(
    wrap: Callable[[Any], Any], use: Callable[..., None], change: str
) -> None:
    """The call that is traced finds the very tensor there that it stores. Later ones may find, or store, another one."""

    def run(wrap: Callable[[Any], Any]) -> tuple[list[Any], Any]:
        class Net(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                use(self, x)
                return x * self.w

        net, found, x = Net(), list[Any](), torch.ones(2)
        net.w, net.b = nn.Parameter(torch.full((2,), 2.0)), torch.full((2,), 3.0)
        net.last = net.b
        own = {_state: net.w.data, _dict: net.b}.get(use, net.w)
        net.l, net.d, net.o = [own, net.b], {"k": own}, types.SimpleNamespace(v=own)
        step = wrap(net)
        for i in range(6):
            if i in (2, 4) and "w" in change:
                net.w = nn.Parameter(torch.full((2,), 10.0 + i))
            if i in (2, 4) and "b" in change:
                net.b = torch.full((2,), 20.0 + i)
            if i in (2, 4) and "place" in change:
                net.l[0] = net.d["k"] = net.o.v = net.last = torch.full((2,), 30.0 + i)
            found.append(step(x).detach())
            leaves = [*net.l, *net.d.values(), net.o.v, net.last]
            found.append([(one.detach().clone(), one is net.w, one is net.b) for one in leaves])
        return found, step

    (found, step), (expected, _) = run(wrap), run(lambda f: f)
    assert str(found) == str(expected)
    assert tfn.cache_info(step).misses <= 4 or use in (_slice, _any_key, _state)  # which count by all that they hold


class _Layer:
    def __init__(self, x: Tensor) -> None:
        self.keys = x * 2


def _cache() -> Places:
    return Places(layers=[], by={}, last=None, deep=[[]])


MAKING: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], _Layer]]] = {
    "append": (lambda c, x: c.layers.append(_Layer(x)), lambda c: c.layers[-1]),
    "extend": (lambda c, x: c.layers.extend([_Layer(x)]), lambda c: c.layers[-1]),
    "deep": (lambda c, x: c.deep[0].append(_Layer(x)), lambda c: c.deep[0][-1]),
    "entry": (lambda c, x: c.by.update(a=_Layer(x)), lambda c: c.by["a"]),
    "attribute": (lambda c, x: setattr(c, "last", _Layer(x)), lambda c: c.last),
    "new attribute": (lambda c, x: setattr(c, "new", _Layer(x)), lambda c: c.new),
    "in a new list": (lambda c, x: setattr(c, "last", [_Layer(x)]), lambda c: c.last[0]),
}
"""Objects with tensors that a function stores in an argument."""


@pytest.mark.parametrize("name", MAKING)
def test_an_object_of_its_own_with_tensors_is_stored_in_an_argument(name: str) -> None:
    store, get = MAKING[name]
    cache = _cache()

    def f(x: Tensor, cache: Places) -> Tensor:
        store(cache, x)
        return get(cache).keys.sin()

    g, found = tfn.jit(f), []
    for call in range(3):
        x = torch.full((2,), call + 1.0)
        torch.testing.assert_close(g(x, cache), (x * 2).sin())
        found.append(get(cache))
        torch.testing.assert_close(found[-1].keys, x * 2)
    assert len({*map(id, found)}) == 3
    torch.testing.assert_close(found[0].keys, torch.full((2,), 2.0))


class _Closing(_Layer):
    """No program can make such an object: its end runs code."""

    def __del__(self) -> None: ...


def test_an_object_in_an_argument_that_a_program_cannot_make_is_refused() -> None:
    def f(x: Tensor, cache: Places) -> Tensor:
        cache.last = _Closing(x)
        return cache.last.keys

    cache = _cache()
    with pytest.raises(UnsupportedCall, match="stores a _Closing under"):
        tfn.jit(f)(torch.ones(2), cache)
    assert cache == _cache()


def test_objects_that_are_gone_or_hold_no_tensors_of_the_trace_may_be_made() -> None:
    def f(x: Tensor, cache: Places) -> Tensor:
        cache.layers.append(_Layer(x))
        cache.last = Places(keys=3)
        return cache.layers.pop().keys

    cache, g = _cache(), tfn.jit(f)
    for rows in (2, 2, 3):
        torch.testing.assert_close(g(torch.ones(rows), cache), torch.full((rows,), 2.0))
    assert not cache.layers


@pytest.mark.filterwarnings("ignore")
def test_compile_runs_a_function_that_fills_a_cache_with_objects() -> None:
    def f(x: Tensor, cache: Places) -> Tensor:
        cache.layers.append(_Layer(x))
        return torch.stack([one.keys.sum() for one in cache.layers]).sum()

    mine, its, g = _cache(), _cache(), tfn.compile(f)
    for _ in range(3):
        x = torch.randn(2)
        torch.testing.assert_close(g(x, mine), f(x, its))
    torch.testing.assert_close([one.keys for one in mine.layers], [one.keys for one in its.layers])
