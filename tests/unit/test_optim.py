"""`functional_optimizer` against the optimizer's own `step`, and schedules without tracing again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import optim
from thunder_fn.errors import OptimizerError
from thunder_fn.ir.ops import NO_GRAD

SGD, AdamW, Adam, RMSprop, Adagrad = (
    getattr(torch.optim, name) for name in ("SGD", "AdamW", "Adam", "RMSprop", "Adagrad")
)
RATES = (0.1, 0.05, 0.02, 0.01)
CASES: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (SGD, {}),
    (SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (SGD, {"momentum": 0.9, "dampening": 0.1, "maximize": True, "foreach": True}),
    (SGD, {"momentum": 0.9, "fused": True}),
    (AdamW, {"weight_decay": 0.1}),
    (AdamW, {"amsgrad": True, "foreach": True}),
    (AdamW, {"fused": True}),
    (Adam, {"betas": (0.8, 0.9), "eps": 1e-5}),
    (RMSprop, {"momentum": 0.9, "centered": True}),
    (Adagrad, {}),
    (torch.optim.RAdam, {"weight_decay": 0.1}),
    (torch.optim.NAdam, {}),
    (torch.optim.ASGD, {"t0": 2}),
    (torch.optim.Rprop, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adafactor, {"weight_decay": 0.1, "maximize": True}),
)


STARTS_LATER = (torch.optim.ASGD, torch.optim.Rprop)
"""Those of the cases whose first step makes a state of its learning rate; so does SGD's of the gradient, if that is dampened."""

SINGLE = (torch.optim.ASGD, torch.optim.NAdam)
"""Those that keep numbers in single precision, and compute with them in it too, which a trace does not."""


def eager_and_ours(make: Any, options: dict[str, Any], rate: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """The parameters after some steps of a schedule, and how often the jitted step was traced."""
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    twin, xs, ys = copy.deepcopy(model), torch.randn(4, 7, 5).double(), torch.randn(4, 7, 2).double()
    optimizer = make(twin.parameters(), lr=1.0, **options)
    for x, y, lr in zip(xs, ys, RATES, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        F.mse_loss(twin(x), y).backward()
        optimizer.step()
    ours = tfn.functional_optimizer(make, lr=1.0, **options)
    loss = lambda params, x, y: F.mse_loss(torch.func.functional_call(model, params, (x,)), y)
    step = tfn.jit(lambda p, s, x, y, lr: ours.update(p, tfn.grad(loss)(p, x, y), s, lr=lr), donate_argnums=(0, 1))
    params = {name: value.detach().clone() for name, value in model.named_parameters()}
    state = ours.init(params)
    for x, y, lr in zip(xs, ys, RATES, strict=True):
        params, state = step(params, state, x, y, rate(lr))
    return [value.detach() for value in twin.parameters()], list(params.values()), tfn.cache_info(step).misses


@pytest.mark.parametrize(("make", "options"), CASES, ids=range(len(CASES)))
def test_steps_of_a_schedule(make: Any, options: dict[str, Any]) -> None:
    expected, found, traced = eager_and_ours(make, options, lambda lr: torch.tensor(lr, dtype=torch.float64))
    rtol, atol = (1e-6, 1e-8) if make in SINGLE else (1e-12, 1e-13)
    assert all(torch.allclose(a, b, rtol=rtol, atol=atol) for a, b in zip(expected, found, strict=True))
    later = make in STARTS_LATER or bool(options.get("dampening"))
    assert traced == (2 if later else 1), "a new learning rate is no new program; the first step may make the state"


def test_a_number_that_changes_becomes_symbolic() -> None:
    expected, found, traced = eager_and_ours(SGD, {}, lambda lr: lr)
    assert all(map(torch.equal, expected, found))
    assert traced <= 3, "the first call, the one that has a state, and at most one more for other rates"


def test_unknown_option() -> None:
    sgd, params = tfn.functional_optimizer(SGD, lr=0.1), {"w": torch.ones(2)}
    with pytest.raises(OptimizerError) as info:
        sgd.update(params, params, sgd.init(params), rate=0.1)
    assert message_of(info.value).startswith("SGD has no option 'rate'; those that can change are dampening, ")


def test_wrong_use() -> None:
    """Arguments in another order, gradients and states of other parameters, and options that the class has not."""
    sgd, params = tfn.functional_optimizer(SGD, lr=0.1), {"w": torch.ones(2)}
    state = sgd.init(params)
    for call, text in (
        (lambda: sgd.update(params, state, params), "params is a dict with the keys 'w', and grads is a dict with"),
        (lambda: sgd.update(params, {"v": params["w"]}, state), "and grads is a dict with the keys 'v'"),
        (lambda: sgd.update(params, params, params), "the state must be what `init` or `update` gave for these"),
        (lambda: sgd.update(params, params, sgd.init([*params.values()] * 2)), "given that of 2 for 1"),
        (lambda: tfn.functional_optimizer(torch.optim.SGD).init(torch.nn.Linear(1, 1)), "named_parameters"),
        (lambda: tfn.functional_optimizer("adam"), "expected an optimizer class, given a str"),  # type: ignore[arg-type]
        (lambda: tfn.functional_optimizer(SGD, rate=0.1), "SGD has no option 'rate'; it has lr, momentum,"),
    ):
        with pytest.raises(OptimizerError, match=text):
            call()


def test_what_is_no_function_of_gradients() -> None:
    with pytest.raises(OptimizerError) as info:
        tfn.functional_optimizer(torch.optim.LBFGS, lr=0.1)
    assert message_of(info.value).splitlines()[0] == (
        "functional_optimizer: a step of LBFGS calls the loss itself, and is no function of gradients"
    )
    sgd, params = tfn.functional_optimizer(SGD, lr=0.1, momentum=0.9), {"w": torch.ones(2)}
    with pytest.raises(OptimizerError, match="SGD's dampening cannot change"):
        sgd.update(params, params, sgd.init(params), dampening=0.1)


# ---- parameters without gradients ----

ABSENT: tuple[tuple[str, Callable[[int], bool]], ...] = (
    ("never", lambda step: True),
    ("later", lambda step: step < 2),
    ("first", lambda step: step >= 2),
    ("second", lambda step: step == 1),
)


@pytest.mark.parametrize("make", (AdamW, Adam, SGD, RMSprop, Adagrad, torch.optim.NAdam))
@pytest.mark.parametrize("absent", [when for _, when in ABSENT], ids=[name for name, _ in ABSENT])
@pytest.mark.parametrize("jitted", (True, False))
def test_a_parameter_without_gradient_stays_and_counts_its_own_steps(
    make: Any, absent: Callable[[int], bool], jitted: bool
) -> None:
    params = {"a": torch.randn(3), "w": torch.randn(4, 3), "z": torch.randn(3)}
    twins = {name: nn.Parameter(value.clone()) for name, value in params.items()}
    eager, ours = make(twins.values(), lr=0.1), tfn.functional_optimizer(make, lr=0.1)
    state, update = ours.init(params), tfn.jit(ours.update) if jitted else ours.update
    for step in range(5):
        grads = {
            name: None if name == "a" and absent(step) else torch.randn(twin.shape) for name, twin in twins.items()
        }
        for name, twin in twins.items():
            twin.grad = grads[name]
        eager.step()
        params, state = update(params, grads, state)
    for name, twin in twins.items():
        torch.testing.assert_close(params[name], twin.detach(), rtol=1e-5, atol=1e-6)


# ---- work that does not grow ----


def update_trace(count: int, make: Any = AdamW) -> tfn.Trace:
    """The trace of a step of so many pairs of equal parameters, after the first one."""
    ours = tfn.functional_optimizer(make, lr=0.1)
    params = [torch.randn(shape) for shape in ((3, 4), (4,)) * count]
    state = ours.update(params, params, ours.init(params))[1]
    return tfn.trace(ours.update, params, params, state)


def test_equal_parameters_share_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[Any] = []
    original = optim.capture
    monkeypatch.setattr(optim, "capture", lambda *args: captured.append(args) or original(*args))
    few, many = (update_trace(count) for count in (2, 9))
    updates = lambda trace: [equation for equation in trace.equations if equation.op.name == "AdamW"]
    assert [len(updates(trace)) for trace in (few, many)] == [4, 18]
    assert [len({id(equation.body) for equation in updates(trace)}) for trace in (few, many)] == [2, 2]
    others = [
        [equation for equation in trace.equations if str(equation.op) not in ("AdamW", str(NO_GRAD))]
        for trace in (few, many)
    ]
    assert len(others[0]) == len(others[1]) == 12, "what depends on the step alone is computed once"
    assert len(captured) == 4, "one capture for each kind of parameter"


def test_a_step_can_be_the_body_of_a_scan() -> None:
    """The state has the same types before the first step as after it."""
    adam, weight = tfn.functional_optimizer(AdamW, lr=0.1), torch.randn(3)
    gradients = torch.randn(5, 3)
    after, _ = tfn.scan(
        lambda carry, g: (adam.update(carry[0], g, carry[1]), None), (weight, adam.init(weight)), gradients
    )
    twin = nn.Parameter(weight.clone())
    eager = AdamW([twin], lr=0.1)
    for twin.grad in gradients.clone():
        eager.step()
    torch.testing.assert_close(after[0], twin.detach())


@pytest.mark.parametrize(
    ("make", "options"),
    (
        (SGD, {"momentum": 0.9}),
        (AdamW, {"weight_decay": 0.1}),
        (RMSprop, {"momentum": 0.9, "centered": True}),
        *((getattr(torch.optim, name), {}) for name in ("Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam")),
    ),
)
def test_a_derivative_goes_through_differentiable_steps(make: type, options: dict[str, Any]) -> None:
    """Steps are differentiated in MAML, and for a learned rate; with `differentiable=False` a step's result is a
    constant.
    """
    weight, rate = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    loss = lambda weight: (weight**3).sum()

    def after(weight: torch.Tensor, rate: torch.Tensor, **more: Any) -> torch.Tensor:
        optimizer = tfn.functional_optimizer(make, lr=0.1, **options, **more)
        state = optimizer.init(weight)
        for _ in range(3):
            weight, state = optimizer.update(weight, tfn.grad(loss)(weight), state, lr=rate)
        return loss(weight)

    found = tfn.jit(tfn.grad(lambda *args: after(*args, differentiable=True), argnums=(0, 1)))(weight, rate)
    steps = (*torch.eye(2, dtype=torch.float64) * 1e-6,)
    known = [(after(weight + step, rate) - after(weight - step, rate)) / 2e-6 for step in steps]
    torch.testing.assert_close(found[0], torch.stack(known), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        found[1], (after(weight, rate + 1e-6) - after(weight, rate - 1e-6)) / 2e-6, rtol=1e-5, atol=1e-7
    )
    assert not tfn.grad(lambda *args: after(*args, differentiable=False))(weight, rate).any()


def test_a_step_on_differentiated_parameters_is_differentiated() -> None:
    """Nobody has to ask: the parameters are arguments of `grad`, though they are leaves."""

    def after(weight: torch.Tensor) -> torch.Tensor:
        sgd = tfn.functional_optimizer(torch.optim.SGD, lr=0.1)
        return sgd.update(weight, tfn.grad(lambda w: (w**2).sum())(weight), sgd.init(weight))[0].square().sum()

    for transformed in (tfn.grad(after), tfn.jit(tfn.grad(after))):
        torch.testing.assert_close(transformed(torch.ones(3)), torch.full((3,), 2 * 0.8**2))


class Counting(torch.optim.Optimizer):
    """Keeps its count and a mean of gradients in its group, and lists of tensors in its state, as others' optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1, where: str = "group") -> None:
        super().__init__(params, {"lr": lr, "where": where, "mean": 0.0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["lr"] *= 0.9
            self.count += group["where"] == "attribute"
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["kept"], state["step"] = [torch.zeros_like(p)], 0
                state["kept"][0].add_(p.grad)
                state["step"] += 1
                group["mean"] = group["mean"] * 0.5 + state["kept"][0].mean()
                p -= group["lr"] * (p.grad + group["mean"]) / (group["step"] + state["step"])
            if group["where"] == "state":
                self.state["count"] = 1


@pytest.mark.parametrize("jitted", [False, True])
def test_what_a_step_writes_to_its_group_is_in_the_state(jitted: bool) -> None:
    weights = {"a": torch.randn(3), "b": torch.randn(2, 2)}
    twins = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    ours, theirs = tfn.functional_optimizer(Counting, lr=0.2), Counting(twins.values(), lr=0.2)
    update: Any = tfn.jit(ours.update) if jitted else ours.update
    state = ours.init(weights)
    for _ in range(4):
        gradients = {name: torch.randn_like(weight) for name, weight in weights.items()}
        for name, twin in twins.items():
            twin.grad = gradients[name].clone()
        before = copy.deepcopy(state)
        theirs.step()
        weights, after = update(weights, gradients, state)
        torch.testing.assert_close(state, before, msg="the old state is as it was")
        state = after
        torch.testing.assert_close(weights, {name: twin.detach() for name, twin in twins.items()})
    assert sorted(state["group"]) == ["lr", "mean", "step"]


@pytest.mark.parametrize(
    ("where", "text"), [("attribute", "its attribute 'count'"), ("state", "its state, of no parameter")]
)
def test_values_that_a_step_keeps_elsewhere(where: str, text: str) -> None:
    ours, weight = tfn.functional_optimizer(Counting, where=where), torch.randn(3)
    with pytest.raises(OptimizerError, match=f"a step of Counting keeps values in {text}"):
        ours.update(weight, weight, ours.init(weight))


@pytest.mark.parametrize("name", ["Adam", "NAdam", "RAdam", "Adamax", "ASGD", "Adagrad", "Adafactor"])
@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_that_is_made_inside(name: str, foreach: bool) -> None:
    """It counts in Python's numbers, as in eager mode: corrections of bias were rounded to float32, and others raised."""

    def adapted(x: torch.Tensor) -> torch.Tensor:
        weight = x.detach().clone().requires_grad_()
        optimizer = getattr(torch.optim, name)([weight], lr=0.1, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            (weight**2).sum().backward()
            optimizer.step()
        return weight.detach() * x

    x = torch.arange(1.0, 4, dtype=torch.float64)
    assert torch.equal(tfn.jit(adapted)(x), adapted(x))
    if name == "Adam" and not foreach:
        assert torch.equal(tfn.vmap(adapted)(x[None])[0], adapted(x))
