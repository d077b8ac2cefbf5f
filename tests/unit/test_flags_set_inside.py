"""`requires_grad` that a jitted function sets on tensors from outside, against eager mode."""

import contextlib
import itertools
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.errors import AliasedMutation, UnsupportedCall

EVENTS = {
    "on": lambda x, found: x.requires_grad_(),
    "off": lambda x, found: x.requires_grad_(False),
    "set": lambda x, found: setattr(x, "requires_grad", True),
    "ask": lambda x, found: found.append(torch.tensor(5.0 if x.requires_grad else 7.0).double()),
    "once": lambda x, found: None if x.requires_grad else x.requires_grad_(),
    "use": lambda x, found: found.append((x * x).sum()),
    "grad": lambda x, found: found.append(
        torch.autograd.grad((x**3).sum(), x, create_graph=True)[0].sum() if x.requires_grad else x.sum()
    ),
}
PROGRAMS = [
    events
    for length in (1, 2, 3)
    for events in itertools.product(EVENTS, repeat=length)
    if {"on", "off", "set", "once"} & {*events}
]


def _function(events, place, returned, scale):
    def f(*args):
        x, found = place["x"] if not args else args[0], [(scale**2).sum()]
        for event in events:
            EVENTS[event](x, found)
        value = sum(found[1:], found[0])
        return value.detach() if returned == "detached" else value

    return f


def _run(wrap, events, where, returned, *, is_on, is_same):
    """Call the function three times; what it gave, the flags that it left, and gradients outside."""
    place, scale = {}, torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    f, found = wrap(_function(events, place, returned, scale)), []
    kept = torch.tensor([1.5, -2.0], dtype=torch.float64).requires_grad_(is_on)
    for count in range(3):
        x = kept if is_same else torch.tensor([1.5, count], dtype=torch.float64).requires_grad_(is_on)
        place["x"] = x
        value = f(x) if where == "argument" else f()
        found += [value.detach().clone(), x.requires_grad, value.requires_grad]
        if value.requires_grad:
            value.backward()
        found.append(None if x.grad is None else x.grad.clone())
    return [*found, scale.grad]


def _same(one, other):
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    return one is other or one == other


@pytest.mark.parametrize("returned", ["detached", "followed"])
@pytest.mark.parametrize("where", ["argument", "closure"])
@pytest.mark.parametrize("events", PROGRAMS, ids="-".join)
def test_flags_are_those_of_eager_mode(events, where, returned):
    for is_on, is_same in itertools.product((False, True), repeat=2):
        options = {"is_on": is_on, "is_same": is_same}
        expected = _run(lambda f: f, events, where, returned, **options)
        try:
            found = _run(tfn.jit, events, where, returned, **options)
        except UnsupportedCall as error:
            assert returned == "followed" and "after it was used" in str(error)
            continue
        assert all(map(_same, found, expected)), (options, found, expected)


def test_a_step_that_asks_for_gradients_of_its_arguments():
    """A physics-informed step: derivatives by the coordinates, which come without the flag."""

    def make():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)

        def step(x, t):
            x.requires_grad_(), t.requires_grad_()
            u = net(torch.stack([x, t], 1)).sum()
            ux, ut = torch.autograd.grad(u, (x, t), create_graph=True)
            (uxx,) = torch.autograd.grad(ux.sum(), x, create_graph=True)
            loss = ((ut - uxx) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        return step, net

    (step, net), (jitted, other) = make(), make()
    jitted = tfn.jit(jitted)
    for seed in range(4):
        torch.manual_seed(seed)
        x, t = torch.rand(2, 8, dtype=torch.float64)
        torch.testing.assert_close(jitted(x.clone(), t.clone()), step(x, t))
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    assert tfn.cache_info(jitted).misses <= 2  # the second is for gradients that are there


def test_a_critic_that_is_frozen_for_a_while():
    """The weights of a critic get no gradient from a loss that is computed while they are off."""

    def make():
        torch.manual_seed(0)
        critic, net = torch.nn.Linear(2, 1).double(), torch.nn.Linear(2, 2).double()

        def loss(x):
            first = critic(x).square().mean()
            critic.requires_grad_(False)
            second = critic(net(x)).square().mean()
            critic.requires_grad_(True)
            return first + second

        return loss, [*critic.parameters(), *net.parameters()]

    (loss, weights), (jitted, others) = make(), make()
    jitted, x = tfn.jit(jitted), torch.rand(4, 2, dtype=torch.float64)
    for _ in range(2):
        loss(x).backward(), jitted(x).backward()
    for one, two in zip(weights, others, strict=True):
        torch.testing.assert_close(two.grad, one.grad)


def test_what_a_closed_over_tensor_says_of_itself():
    """Questions about a tensor from outside are answered as of now, not as of the call."""

    def make():
        y, z, w = torch.ones(3), torch.ones(3), torch.ones(3, requires_grad=True)

        def f():
            y.requires_grad_()
            z.mul_(w)
            found = [y.requires_grad, y.is_leaf, z.requires_grad, z.is_leaf, z.grad_fn is None]
            y.requires_grad_(False)
            return [*found, y.requires_grad]

        return f

    assert tfn.jit(make())() == make()()


def test_a_flag_that_an_error_leaves_behind():
    """A function that raises has set what it has set."""

    def f(x):
        x.requires_grad_()
        raise KeyError("x")

    x = torch.ones(2)
    with pytest.raises(KeyError):
        tfn.jit(f)(x)
    assert x.requires_grad


def test_a_flag_that_is_read_before_it_is_set_and_given_back():
    """The function sees the flag of the call, though its program begins with another one."""

    def f(x, y):
        before = x.requires_grad
        with torch.enable_grad():
            x.requires_grad_()
            if not y.requires_grad:
                y.requires_grad_()
            (force,) = torch.autograd.grad((x**3 * y).sum(), x, create_graph=True)
        x.requires_grad_(before)
        return force

    jitted = tfn.jit(f)
    for on in (False, True, False):
        x, y = torch.ones(2, requires_grad=on), torch.full((2,), 3.0)
        other, again = x.detach().clone().requires_grad_(on), y.clone()
        expected, found = f(x, y), jitted(other, again)
        assert (x.requires_grad, y.requires_grad) == (other.requires_grad, again.requires_grad)
        expected.sum().backward(), found.sum().backward()
        torch.testing.assert_close((found, again.grad), (expected, y.grad))


def test_what_is_stored_outside_has_no_half_of_a_history():
    """A stored tensor that requires grad is refused as a result is: its program has one history."""
    kept = []

    def f(x):
        scale = x.detach().sum()
        x.requires_grad_()
        kept.append((x * scale).sum())
        return scale * 1

    with pytest.raises(UnsupportedCall, match="after it was used, and returns or stores what depends on it"):
        tfn.jit(f)(torch.ones(3))


@pytest.mark.parametrize("mode", (contextlib.nullcontext, torch.no_grad))
def test_an_argument_that_is_a_result_is_detached_in_place(mode: Any) -> None:
    """As a recurrent step does with its state: it was an error, since such a tensor has no flag to set."""
    functions = (lambda a: a.detach_(), lambda a: (a.detach_(), a * 2)[1], lambda a: a.mul_(2).detach_() + 1)
    for f, make in itertools.product(functions, (lambda x: x * 3, lambda x: x)):

        def found(h: Any, make: Any = make) -> Any:
            x = torch.arange(3.0, requires_grad=True)
            given = make(x) if make(x) is not x else torch.arange(3.0)
            with mode():
                y = h(given)
            return y.tolist(), y.requires_grad, given.tolist(), given.requires_grad, given.is_leaf, given.grad_fn

        jitted = tfn.jit(f)
        for _ in range(2):
            assert found(jitted) == found(f)


VIEWS = {  # two arguments in one memory
    "a view": lambda x: (x, x.view(-1)),
    "a row": lambda x: (x, x[0]),
    "a row and its base": lambda x: (x[0], x),
    "views of one base": lambda x: (x[0], x[0].view(-1)),
    "detached": lambda x: (x, x.detach()),
}
OF_VIEWS = {
    "on": lambda x, found: x.requires_grad_(),
    "ask": lambda x, found: found.append(torch.tensor(5.0 if x.requires_grad else 7.0).double()),
    "use": lambda x, found: found.append((x * x).sum()),
    "write": lambda x, found: x.mul_(3.0),
    "write without history": lambda x, found: x.detach().mul_(2.0),
}
OF_TWO = [(event, place) for event in OF_VIEWS for place in (0, 1)]


def _with_views(wrap, events, views):
    """Call a function of two tensors in one memory: its values, the tensors and their gradients."""

    def f(*args):
        found = [torch.ones(()).double()]
        for event, place in events:
            OF_VIEWS[event](args[place], found)
        return found

    args = VIEWS[views](torch.tensor([[1.5, -2.0], [0.5, 3.0]]).double())
    found = wrap(f)(*args)
    if (total := sum(found)).requires_grad:
        total.backward()
    flags = [x.requires_grad for x in args]
    return [*(x.detach().clone() for x in (*found, *args)), *flags, *(x.grad for x in args if x.is_leaf)]


@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("first", OF_TWO, ids=lambda one: f"{one[0]} {one[1]}")
def test_flags_of_tensors_with_views(first, views):
    """A view from outside says what its base requires, which the function may set."""
    for place, last in itertools.product((0, 1), OF_TWO):
        events = (first, ("on", place), last)
        with contextlib.suppress(RuntimeError):  # of eager mode
            expected = _with_views(lambda f: f, events, views)
            try:
                found = _with_views(tfn.jit, events, views)
            except (UnsupportedCall, AliasedMutation):
                continue
            assert len(found) == len(expected) and all(map(_same, found, expected)), (events, found, expected)


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x * 1, lambda x: x[0], lambda x: x.T[:, 1]])
def test_nothing_is_detached_in_place_in_inference_mode(view, where):
    """PyTorch does nothing there, and refuses no view, since it follows none."""

    def f(x):
        with torch.inference_mode() if where == "inside" else contextlib.nullcontext():
            y = view(x)
            z = y.detach_()
        return [y * 3, z is y, x.requires_grad]

    for is_on, is_leaf in itertools.product((False, True), repeat=2):
        found = []
        for h in (f, tfn.jit(f)):
            x = torch.arange(4.0).view(2, 2).requires_grad_(is_on) * 1
            x = x.detach().requires_grad_(is_on) if is_leaf else x
            with torch.inference_mode() if where == "outside" else contextlib.nullcontext():
                values = h(x)
            found.append([values[0].detach() * 1, *values[1:], x.requires_grad])
        assert all(map(_same, *found)), found


TAKEN = {
    "row": lambda x: x[0],
    "flat": lambda x: x.view(-1),
    "diagonal": lambda x: torch.diagonal(x, 0, 0, 1),
    "part": lambda x: x.chunk(2)[1],
    "view of a view": lambda x: x.T[0].unsqueeze(0),
    "detached": lambda x: x[0].detach(),
    "view of a detached one": lambda x: x.detach().T,
}


@pytest.mark.parametrize("gradients", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("name", TAKEN)
def test_views_that_were_taken_before(name, gradients):
    def f(x):
        with torch.set_grad_enabled(gradients):
            view = TAKEN[name](x)
        x.requires_grad_()
        return view, (x.detach() * 2).sum()

    for _ in range(2):
        x, expected = torch.ones(2, 2), f(torch.ones(2, 2))[0]
        try:
            found = tfn.jit(f)(x)[0]
        except UnsupportedCall as error:
            assert "detach" not in name and "after it was used" in str(error)
            continue
        assert found.requires_grad == expected.requires_grad and x.requires_grad
        assert found.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
