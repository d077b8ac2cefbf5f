"""The training step as it is written, under `jit`, beside the same step in eager mode: the same
bits in parameters, buffers, gradients, optimizer state and schedules after every call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.errors import AliasedMutation, DataDependentValue, ThunderError, UnsupportedCall

optim = torch.optim
Make = Callable[[torch.nn.Module], torch.optim.Optimizer]
Body = Callable[..., Any]


def assert_same(a: Any, b: Any, where: str) -> None:
    """Trees of the same types, with the same bits in tensors."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.stride()) == (b.dtype, b.stride()), where
        assert (a.requires_grad, a.is_leaf) == (b.requires_grad, b.is_leaf), where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (one, two) in enumerate(zip(a, b, strict=True)):
            assert_same(one, two, f"{where}[{i}]")
    else:
        assert a == b, where


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((model(x) - y) ** 2).mean()


def plain(model: Any, opt: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    opt.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    opt.step()
    return loss


def small() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


def normed() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


class Side:
    """A model, an optimizer and a schedule, made alike for eager mode and for `jit`."""

    def __init__(self, model: Callable[[], torch.nn.Module], make: Make, schedule: Any) -> None:
        torch.manual_seed(0)
        self.model = model()
        self.opt = make(self.model)
        self.schedule = schedule(self.opt) if schedule is not None else None

    def state(self) -> dict[str, Any]:
        return {
            "model": dict(self.model.state_dict(keep_vars=True)),
            "grads": [one.grad for one in self.model.parameters()],
            "opt": self.opt.state_dict(),
            "keys": [list(entry) for entry in self.opt.state.values()],
            "schedule": self.schedule and self.schedule.state_dict(),
        }


def compare(
    make: Make,
    body: Body = plain,
    *,
    model: Callable[[], torch.nn.Module] = small,
    schedule: Any = None,
    calls: int = 4,
    between: Callable[[Side, int], None] | None = None,
) -> tfn.CacheInfo:
    """Step both sides on the same data; compare all of their state after each call."""
    eager, jitted = Side(model, make, schedule), Side(model, make, schedule)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        return body(jitted.model, jitted.opt, x, y)

    f = tfn.jit(step)
    for call in range(calls):
        results = []
        for run in (lambda x, y: body(eager.model, eager.opt, x, y), f):
            torch.manual_seed(call)
            results.append(run(torch.randn(6, 3), torch.randn(6, 2)))
        assert_same(*results, f"the result of call {call}")
        assert_same(eager.state(), jitted.state(), f"after call {call}")
        for side in (eager, jitted):
            if between is not None:
                between(side, call)
    return tfn.cache_info(f)


def sgd(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    return optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def adam(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    return optim.Adam(model.parameters(), **{"lr": 0.01, **options})


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {"weight_decay": 0.1},
    "Adadelta": {"weight_decay": 0.1},
    "Adafactor": {"weight_decay": 0.1},
    "Adagrad": {"lr_decay": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"maximize": True},
    "Adamax": {"weight_decay": 0.1},
    "NAdam": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {"maximize": True},
    "SGD": {"momentum": 0.9, "nesterov": True},
}


@pytest.mark.parametrize(
    ("name", "foreach"),
    [
        *((name, False) for name in OPTIMIZERS),
        *((name, True) for name in ("ASGD", "Adafactor", "Adam", "RAdam", "RMSprop", "SGD")),
    ],
)
def test_optimizers_of_torch(name: str, foreach: bool) -> None:
    options = {"lr": 0.01, "foreach": foreach, **OPTIMIZERS[name]}
    info = compare(lambda model: getattr(optim, name)(model.parameters(), **options))
    assert (info.misses, info.hits) == (2, 2)  # the first step makes the state


@pytest.mark.parametrize(("count", "is_refused"), [(1e6, False), (2.0**24 - 1, True), (0.5, True)])
def test_a_count_of_steps_is_that_of_its_dtype(count: float, is_refused: bool) -> None:
    """A count in float32 ends at 2**24; one that is no whole number is not computed in Python."""

    def between(side: Side, call: int) -> None:
        if call == 3:
            for entry in side.opt.state.values():
                entry["step"].fill_(count)

    with pytest.raises(DataDependentValue) if is_refused else nullcontext():
        compare(lambda model: optim.RAdam(model.parameters()), calls=6, between=between)


def test_two_steps_of_one_call() -> None:
    def body(model: Any, opt: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        plain(model, opt, x, y)
        return plain(model, opt, x, y)

    info = compare(lambda model: optim.RAdam(model.parameters()), body, calls=6)
    assert info.hits >= 2


@pytest.mark.parametrize("name", ["Adagrad", "Adam", "AdamW", "SGD"])
def test_fused_steps(name: str) -> None:
    options = {"lr": 0.01, "fused": True, **OPTIMIZERS[name]} if name == "SGD" else {"fused": True}
    info = compare(
        lambda model: getattr(optim, name)(model.parameters(), **options),
        schedule=SCHEDULES["ExponentialLR"],
        between=lambda side, _: side.schedule.step(),
    )
    assert (info.misses, info.hits) == (2, 2)


LISTS: dict[str, Callable[[Any, Any], Any]] = {
    "itself": lambda a, b: torch._foreach_mul_(a, a),
    "third": lambda a, b: torch._foreach_addcmul_(a, b, a),
    "single": lambda a, b: torch._foreach_mul_(a, a[0].sum()),
    "crossed": lambda a, b: torch._foreach_mul_(a, a[::-1]),
    "first": lambda a, b: torch._foreach_add_(a, [a[0], a[0]]),
    "whole": lambda a, b: torch._foreach_mul_(a, a[0][0, 0]),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_that_are_written_and_read(name: str) -> None:
    """Each tensor of a list is computed from those beside it; elsewhere the order counts."""

    def f(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[torch.Tensor]:
        copies = [one + 0 for one in a]
        LISTS[name](copies, b)
        return copies

    a, b = ([torch.randn(2, 2) for _ in range(2)] for _ in "ab")
    if name in ("crossed", "first", "whole"):
        with pytest.raises(AliasedMutation):
            tfn.jit(f)(a, b)
    else:
        assert all(map(torch.equal, f(a, b), tfn.jit(f)(a, b)))


def with_closure(model: Any, opt: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    return opt.step(closure)


def test_steps_that_call_the_loss() -> None:
    assert compare(adam, with_closure).misses == 2
    side = Side(small, lambda model: optim.LBFGS(model.parameters()), None)
    with pytest.raises(DataDependentValue) as caught:
        tfn.jit(with_closure)(side.model, side.opt, torch.ones(6, 3), torch.ones(6, 2))
    assert message_of(caught.value).startswith("the step of a LBFGS asks for values in tensors")
    assert "`tfn.compile` runs such code as it is" in message_of(caught.value)


def test_muon() -> None:
    compare(lambda model: optim.Muon([model.weight], lr=0.01), calls=3)


class PartlyCompiled(optim.SGD):
    """An optimizer with a part that is compiled, as timm's Kron has them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.scaled = torch.compile(lambda g: g * torch.einsum("ij,ij->", g, g), backend="eager", fullgraph=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p -= self.scaled(p.grad)


def test_compiled_parts_of_a_step_run_as_they_are() -> None:
    compare(lambda model: PartlyCompiled([model.weight]))


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_what_eager_refuses_is_refused_alike(name: str) -> None:
    side = Side(small, lambda model: getattr(optim, name)(model.parameters()), None)
    args = torch.ones(6, 3), torch.ones(6, 2)
    with pytest.raises(Exception) as of_eager:
        plain(side.model, side.opt, *args)
    with pytest.raises(type(of_eager.value)) as ours:
        tfn.jit(lambda x, y: plain(side.model, side.opt, x, y))(*args)
    assert message_of(of_eager.value) in message_of(ours.value)
    assert type(side.model.weight.grad) in (torch.Tensor, type(None))


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "ExponentialLR": lambda opt: optim.lr_scheduler.ExponentialLR(opt, 0.9),
    "CosineAnnealingLR": lambda opt: optim.lr_scheduler.CosineAnnealingLR(opt, 10),
    "LambdaLR": lambda opt: optim.lr_scheduler.LambdaLR(opt, lambda epoch: epoch / 10),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_between_calls_do_not_retrace(name: str) -> None:
    info = compare(adam, schedule=SCHEDULES[name], calls=8, between=lambda side, _: side.schedule.step())
    assert (info.misses, info.hits) == (2, 6)


@pytest.mark.parametrize("make", [sgd, adam])
def test_a_cycled_momentum_becomes_an_input(make: Make) -> None:
    cycle = lambda opt: optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20)
    info = compare(make, schedule=cycle, calls=8, between=lambda side, _: side.schedule.step())
    assert info.misses == 2


@pytest.mark.parametrize("moving", ["rows", "number", "mode"])
@pytest.mark.parametrize("schedule", ["OneCycleLR", "CyclicLR", "CosineAnnealingWarmRestarts"])
def test_options_that_change_beside_what_else_changes(schedule: str, moving: str) -> None:
    make = {
        "OneCycleLR": lambda opt: optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20),
        "CyclicLR": lambda opt: optim.lr_scheduler.CyclicLR(opt, 0.01, 0.1, step_size_up=3),
        "CosineAnnealingWarmRestarts": lambda opt: optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    }[schedule]
    sides = [Side(small, sgd, make) for _ in "ab"]

    def step(side: Side, x: torch.Tensor, number: int) -> torch.Tensor:
        loss = side.model(x).square().mean() * number
        loss.backward()
        side.opt.step()
        side.opt.zero_grad()
        side.schedule.get_last_lr()  # it reads the schedule, too
        return loss

    f = tfn.jit(lambda x, number: step(sides[1], x, number))
    for call in range(12):
        x, number = torch.full((2 + call % 3 * (moving == "rows"), 3), float(call)), 1 + call * (moving == "number")
        for side in sides:
            side.model.train(moving != "mode" or call % 2 == 0)
        assert_same(step(sides[0], x, number), f(x, number), f"call {call}")
        assert_same(sides[0].state(), sides[1].state(), f"after call {call}")
        for side in sides:
            side.schedule.step()
    assert tfn.cache_info(f).misses <= 5


@pytest.mark.parametrize(
    ("make", "programs"),
    [  # one for each answer about the epoch
        (lambda opt: optim.lr_scheduler.StepLR(opt, 2, 0.5), 3),
        (lambda opt: optim.lr_scheduler.MultiStepLR(opt, [2, 4, 4]), 4),
    ],
)
def test_a_schedule_inside_the_step(make: Any, programs: int) -> None:
    torch.manual_seed(0)
    sides = [Side(small, adam, make) for _ in "ab"]

    def step(side: Side, x: torch.Tensor) -> torch.Tensor:
        side.opt.zero_grad()
        loss = side.model(x).square().mean()
        loss.backward()
        side.opt.step()
        side.schedule.step()
        return loss * side.schedule.get_last_lr()[0]

    f = tfn.jit(lambda x: step(sides[1], x))
    for call in range(8):
        x = torch.full((2, 3), float(call))
        assert_same(step(sides[0], x), f(x), f"call {call}")
        assert_same(sides[0].state(), sides[1].state(), f"after call {call}")
    assert tfn.cache_info(f).misses == programs


def test_a_tensor_as_lr_is_read_where_it_is() -> None:
    schedule = SCHEDULES["ExponentialLR"]
    info = compare(
        lambda model: sgd(model, lr=torch.tensor(0.1)),
        schedule=schedule,
        between=lambda side, _: side.schedule.step(),
    )
    assert info.misses == 2


def accumulated(model: Any, opt: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    opt.zero_grad()
    for part in range(3):
        loss = loss_of(model, x[2 * part : 2 * part + 2], y[2 * part : 2 * part + 2]) / 3
        loss.backward()
    opt.step()
    return loss


def clipped(model: Any, opt: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = loss_of(model, x, y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    opt.zero_grad()
    return loss, norm


def zeroed(model: Any, opt: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    opt.zero_grad(set_to_none=False)
    loss = loss_of(model, x, y)
    loss.backward()
    opt.step()
    return loss


def under_autocast(model: Any, opt: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    opt.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, x, y)
    loss.backward()
    opt.step()
    return loss


@pytest.mark.parametrize("body", [accumulated, clipped, zeroed, under_autocast])
@pytest.mark.parametrize("make", [sgd, adam])
def test_steps(body: Body, make: Make) -> None:
    assert compare(make, body, model=normed).misses == 2


def test_gradients_accumulate_over_calls() -> None:
    def body(model: Any, opt: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    def between(side: Side, call: int) -> None:
        if call % 3 == 2:
            side.opt.step()
            side.opt.zero_grad()

    info = compare(adam, body, calls=9, between=between)
    assert info.misses == 2  # with gradients and without


def frozen() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


def tied() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    model[1].weight = model[0].weight
    return model


def with_an_unused_part() -> torch.nn.Module:
    model = small()
    model.unused = torch.nn.Linear(2, 2)
    return model


@pytest.mark.parametrize("model", [frozen, tied, with_an_unused_part, normed])
def test_models(model: Callable[[], torch.nn.Module]) -> None:
    compare(adam, model=model)


def test_groups_with_options_of_their_own() -> None:
    def make(model: Any) -> torch.optim.Optimizer:
        groups = [{"params": [model.weight], "lr": 0.2}, {"params": [model.bias]}]
        return optim.AdamW(groups, lr=0.01)

    schedule = SCHEDULES["CosineAnnealingLR"]
    info = compare(make, schedule=schedule, between=lambda side, _: side.schedule.step())
    assert info.misses == 2


def test_two_optimizers() -> None:
    class Both:
        def __init__(self, model: Any) -> None:
            self.parts = adam(model[0]), sgd(model[1])

        def state_dict(self) -> Any:
            return [one.state_dict() for one in self.parts]

        @property
        def state(self) -> Any:
            return {**self.parts[0].state, **self.parts[1].state}

    def body(model: Any, opt: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for one in opt.parts:
            one.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        for one in opt.parts:
            one.step()
        return loss

    model = lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    compare(Both, body, model=model)  # type: ignore[arg-type]


def test_optimizers_that_take_turns_are_traced_once_for_each() -> None:
    def run(wrap: Callable[[Any], Any]) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        encode, decode, turn = torch.nn.Linear(3, 4), torch.nn.Linear(4, 3), {"name": ""}
        optimizers = {name: torch.optim.Adam(m.parameters()) for name, m in (("encode", encode), ("decode", decode))}
        first, second = optimizers.values()

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (decode(encode(x).relu()) - x).square().mean()
            first.zero_grad(), second.zero_grad()
            loss.backward()
            {"encode": first, "decode": second}[turn["name"]].step()
            return loss.detach()

        wrapped, losses = wrap(step), list[torch.Tensor]()
        for i in range(9):
            turn["name"] = "encode" if i % 3 else "decode"
            losses.append(wrapped(torch.randn(4, 3)))
        return losses, wrapped

    found, step = run(tfn.jit)
    torch.testing.assert_close(found, run(lambda f: f)[0])
    assert tfn.cache_info(step).misses == 4  # each with and without a state


def test_model_and_optimizer_as_arguments() -> None:
    sides = [Side(small, adam, None) for _ in "ab"]
    f = tfn.jit(plain)
    for call in range(4):
        x, y = torch.full((2, 3), float(call)), torch.ones(2, 2)
        assert_same(plain(sides[0].model, sides[0].opt, x, y), f(sides[1].model, sides[1].opt, x, y), "")
        assert_same(sides[0].state(), sides[1].state(), f"after call {call}")
    assert tfn.cache_info(f).misses == 2


def test_a_loaded_checkpoint_is_used() -> None:
    saved: dict[int, Any] = {}

    def between(side: Side, call: int) -> None:
        if call == 1:
            clone = lambda one: one.clone() if isinstance(one, torch.Tensor) else one
            tree = torch.utils._pytree.tree_map(clone, (side.model.state_dict(), side.opt.state_dict()))
            saved[id(side)] = tree
        if call == 3:
            side.model.load_state_dict(saved[id(side)][0])
            side.opt.load_state_dict(saved[id(side)][1])

    compare(adam, calls=6, between=between)


def test_hyperparameters_that_somebody_sets() -> None:
    def between(side: Side, call: int) -> None:
        side.opt.param_groups[0]["weight_decay"] = 0.1 * call

    info = compare(adam, calls=6, between=between)
    assert info.misses <= 4


def test_a_parameter_added_later() -> None:
    def between(side: Side, call: int) -> None:
        if call == 1:
            side.opt.add_param_group({"params": [side.model.bias], "lr": 0.3})

    compare(lambda model: optim.SGD([model.weight], lr=0.1), calls=4, between=between)


def test_results_are_the_tensors_themselves() -> None:
    side = Side(small, adam, None)

    def step(x: torch.Tensor) -> Any:
        side.opt.zero_grad()
        out = side.model(x)
        out.sum().backward()
        side.opt.step()
        return out, side.model.weight, side.model.weight.grad

    for _ in range(3):
        _, weight, grad = tfn.jit(step)(torch.ones(2, 3))
        assert weight is side.model.weight and grad is weight.grad


def test_a_second_backward_of_the_loss_raises_as_in_eager() -> None:
    side = Side(small, sgd, None)
    loss = tfn.jit(lambda x: plain(side.model, side.opt, x, torch.ones(2, 2)))(torch.ones(2, 3))
    assert loss.requires_grad and not loss.is_leaf
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_retained_graph_is_differentiated_again() -> None:
    model = small()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum().exp()
        loss.backward(retain_graph=True)
        return loss

    tfn.jit(step)(torch.ones(2, 3)).backward()
    once = torch.autograd.grad(model(torch.ones(2, 3)).sum().exp(), model.weight)[0]
    assert torch.equal(model.weight.grad, 2 * once)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused_by_name(register: str) -> None:
    side = Side(small, sgd, None)
    args = torch.ones(2, 3), torch.ones(2, 2)
    f = tfn.jit(lambda x, y: plain(side.model, side.opt, x, y))
    f(*args)
    f(*args)
    getattr(side.model.weight, register)(lambda _: None)
    with pytest.raises(UnsupportedCall, match="has hooks"):
        f(*args)


def test_what_is_left_where_the_step_cannot_be_traced() -> None:
    side = Side(small, adam, None)
    plain(side.model, side.opt, torch.ones(2, 3), torch.ones(2, 2))
    before = side.state()

    def step(x: torch.Tensor) -> None:
        plain(side.model, side.opt, x, torch.ones(2, 2))
        torch.ones(2).numpy()
        x.data_ptr()

    with pytest.raises(ThunderError):
        tfn.jit(step)(torch.ones(2, 3))
    assert_same(before, side.state(), "after a refusal")
    tfn.jit(lambda x: plain(side.model, side.opt, x, torch.ones(2, 2)))(torch.ones(2, 3))


def test_a_step_that_raises_at_its_end_has_stepped() -> None:
    sides = [Side(small, sgd, None) for _ in "ab"]

    def step(side: Side, x: torch.Tensor) -> None:
        plain(side.model, side.opt, x, torch.ones(2, 2))
        raise KeyError("stop")

    for run in (lambda x: step(sides[0], x), tfn.jit(lambda x: step(sides[1], x))):
        with pytest.raises(KeyError):
            run(torch.ones(2, 3))
    assert_same(sides[0].state(), sides[1].state(), "after the error")


class Counting(optim.Optimizer):
    """An optimizer as third parties write them: counts as numbers, and state that is bound anew."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "steps": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                state = self.state[param]
                state["average"] = state.get("average", 0) * 0.9 + param.grad
                state["steps"] = state.get("steps", 0) + 1
                rate = group["lr"] / (group["steps"] + state["steps"] + self.calls)
                param.sub_(rate * state["average"])


def test_numbers_and_tensors_that_a_step_binds_anew() -> None:
    info = compare(lambda model: Counting(model.parameters()), calls=6)
    assert (info.misses, info.hits) == (2, 4)


def test_a_step_reads_from_outside() -> None:
    scales = {"k": 1.0}

    class Scaled(optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.grad * (scales["k"] * group["lr"]))

    compare(
        lambda model: Scaled(model.parameters(), {"lr": 0.1}),
        between=lambda side, call: scales.update(k=call + 2.0),
    )


class Twins(torch.nn.Module):
    """Two parameters that have the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.ones(3, 2)) for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.a + self.b)


def test_equal_gradients_have_memory_of_their_own() -> None:
    def between(side: Side, call: int) -> None:
        side.model.a.grad.mul_(3.0)
        entries = (side.opt.state[one]["momentum_buffer"] for one in side.model.parameters())
        held = [*entries, *side.model.parameters(), side.model.a.grad, side.model.b.grad]
        assert len({one.untyped_storage().data_ptr() for one in held}) == len(held)

    compare(sgd, model=Twins, between=between)


@pytest.mark.parametrize("infinite", [(), (0, 3)])
@pytest.mark.parametrize("make", [sgd, adam])
def test_a_gradient_scaler_skips_steps(make: Make, infinite: tuple[int, ...]) -> None:
    class Scaled(Side):
        def __init__(self) -> None:
            super().__init__(small, make, None)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

        def state(self) -> dict[str, Any]:
            return {**super().state(), "grads": None, "scaler": self.scaler.state_dict()}

    def step(side: Scaled, x: torch.Tensor) -> torch.Tensor:
        side.opt.zero_grad()
        loss = loss_of(side.model, x, torch.ones(2, 2))
        side.scaler.scale(loss).backward()
        side.scaler.unscale_(side.opt)
        torch.nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)
        side.scaler.step(side.opt)
        side.scaler.update()
        return loss

    eager, jitted = Scaled(), Scaled()
    f = tfn.jit(lambda x: step(jitted, x))
    for call in range(6):
        x = torch.full((2, 3), float("inf") if call in infinite else float(call))
        step(eager, x)
        f(x)
        assert_same(eager.state(), jitted.state(), f"after call {call}")
    assert tfn.cache_info(f).misses <= 3


swa = optim.swa_utils
AVERAGES: dict[str, dict[str, Any]] = {
    "equal": {},
    "ema": {"multi_avg_fn": swa.get_ema_multi_avg_fn(0.9)},
    "ema_each": {"avg_fn": swa.get_ema_avg_fn(0.9)},
    "buffers": {"multi_avg_fn": swa.get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


@pytest.mark.parametrize("name", AVERAGES)
def test_averaged_models(name: str) -> None:
    """The first update copies, the others average: one program for both."""

    class Averaged(Side):
        def __init__(self) -> None:
            super().__init__(normed, sgd, None)
            self.average = swa.AveragedModel(self.model, **AVERAGES[name])

        def state(self) -> dict[str, Any]:
            return {**super().state(), "average": dict(self.average.state_dict())}

    def step(side: Averaged, x: torch.Tensor) -> torch.Tensor:
        loss = plain(side.model, side.opt, x, torch.ones(6, 2))
        side.average.update_parameters(side.model)
        return loss

    eager, jitted = Averaged(), Averaged()
    f = tfn.jit(lambda x: step(jitted, x))
    for call in range(4):
        x = torch.randn(6, 3)
        assert_same(step(eager, x), f(x), f"the result of call {call}")
        assert_same(eager.state(), jitted.state(), f"after call {call}")
    assert tfn.cache_info(f).misses == 2


READS: dict[str, Callable[[torch.optim.Optimizer, Any], Any]] = {
    "values": lambda opt, _: sum(entry["exp_avg"].abs().sum().item() for entry in opt.state.values()),
    "an entry": lambda opt, p: opt.state[p]["exp_avg"].sum() if p in opt.state else 0.0,
    "get": lambda opt, p: opt.state.get(p, {}).get("step", -1.0) * 1,
    "length": lambda opt, _: len(opt.state),
    "truth": lambda opt, _: 1 if opt.state else 0,
    "copy": lambda opt, _: len(dict(opt.state)) + len({**opt.state}) + len(copy.deepcopy(opt.state)),
    "keys": lambda opt, _: len([*opt.state]),
    "equality": lambda opt, _: float(opt.state == {}),
    "through vars": lambda opt, _: len(vars(opt)["state"]),
    "state_dict": lambda opt, _: len(opt.state_dict()["state"]),
    "clear": lambda opt, _: opt.state.clear() or 0,
    "written": lambda opt, p: 0 if p not in opt.state else opt.state[p].update(exp_avg=torch.ones_like(p)) or 1,
    "nothing": lambda opt, _: opt.param_groups[0]["lr"],
}


@pytest.mark.parametrize("zeroes", [True, False])
@pytest.mark.parametrize("name", READS)
def test_state_of_an_optimizer_that_steps_elsewhere(name: str, zeroes: bool) -> None:
    """The function is traced again for state that it looks at, and for no other."""
    sides = [Side(small, adam, None) for _ in "ab"]

    def f(side: Side, x: torch.Tensor) -> torch.Tensor:
        if zeroes:
            side.opt.zero_grad()
        return x.sum() + READS[name](side.opt, side.model.weight)

    jitted = tfn.jit(lambda x: f(sides[1], x))
    for call in range(5):
        x = torch.full((2,), float(call))
        assert_same(f(sides[0], x), jitted(x), f"call {call}")
        for side in sides:
            side.model(torch.ones(4, 3) * call).square().sum().backward()
            side.opt.step()
        assert_same(sides[0].state(), sides[1].state(), f"after call {call}")
    assert name != "nothing" or tfn.cache_info(jitted).misses <= 1 + zeroes


def test_a_loss_for_lbfgs_is_traced_once_for_each_kind_of_gradients() -> None:
    sides = [Side(small, lambda model: optim.LBFGS(model.parameters(), lr=0.5, max_iter=5), None) for _ in "ab"]
    x = torch.linspace(-1, 1, 12).view(4, 3)

    def loss(side: Side) -> torch.Tensor:
        side.opt.zero_grad()
        found = (side.model(x) - 1).square().mean()
        found.backward()
        return found

    jitted = tfn.jit(lambda: loss(sides[1]))
    for call in range(3):
        assert_same(sides[0].opt.step(lambda: loss(sides[0])), sides[1].opt.step(jitted), f"call {call}")
        assert_same(sides[0].state()["model"], sides[1].state()["model"], f"after call {call}")
    assert tfn.cache_info(jitted).misses <= 3
