"""Memory as computed from traces, beside what PyTorch's allocator is asked for.

The profiler notes each allocation and release of PyTorch's allocator with its bytes; the greatest sum of them over a
call is the measured peak. What kernels take from elsewhere (oneDNN's scratchpads) is in neither figure.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import thunder_fn as tfn
from thunder_fn import inspect
from thunder_fn.benchmarks.models import GPT, gpt_loss, params_of
from thunder_fn.executors import FusionExecutor
from thunder_fn.inspect.memory_use import memories_of, memory_of


def measured_peak(call: Callable[[], object]) -> int:
    """The most bytes that live at a time of those that a call allocates."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted((one for one in events if one.name() == "[memory]"), key=lambda one: one.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def is_near(computed: int, measured: int) -> bool:
    return abs(computed - measured) <= 0.1 * measured


def gpt() -> tuple[GPT, torch.Tensor]:
    return GPT(3, 64, context=32), torch.randint(0, 96, (4, 32))


def cnn() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(32, 10)),
    )
    return model, torch.randn(8, 3, 32, 32)


def transposed() -> tuple[nn.Module, torch.Tensor]:
    layers = (
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 4, 2, 2),
    )
    return nn.Sequential(*layers), torch.randn(4, 8, 32, 32)


def encoder() -> tuple[nn.Module, torch.Tensor]:
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0), torch.randn(4, 32, 64)


class Recurrent(nn.LSTM):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def lstm() -> tuple[nn.Module, torch.Tensor]:
    return Recurrent(32, 64, batch_first=True), torch.randn(8, 16, 32)


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + x)


def resnet() -> tuple[nn.Module, torch.Tensor]:
    layers = (nn.Conv2d(3, 16, 3, padding=1), Residual(16), nn.MaxPool2d(2), Residual(16), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 10)), torch.randn(4, 3, 32, 32)


class Recomputed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tfn.checkpoint(self.block)(x)


def checkpointed() -> tuple[nn.Module, torch.Tensor]:
    model, tokens = gpt()
    for name, child in list(model.named_modules()):
        if type(child).__name__ == "Block":
            model.get_submodule(name.rpartition(".")[0])[int(name.rpartition(".")[2])] = Recomputed(child)  # type: ignore[index]
    assert sum(isinstance(child, Recomputed) for child in model.modules()) == 3
    return model, tokens


@pytest.mark.parametrize("make", [gpt, cnn, transposed, encoder, lstm, resnet, checkpointed])
def test_peak_of_training_is_the_measured_one(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> None:
    """Forward and backward, through autograd."""
    model, x = make()
    jitted = tfn.jit(model)

    def step() -> None:
        jitted(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    assert is_near(inspect.memory(model, x).peak, measured_peak(step))


@pytest.mark.parametrize("make", [gpt, cnn, transposed, encoder, lstm, resnet, checkpointed])
def test_peak_of_inference_is_the_measured_one(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> None:
    model, x = make()
    model.eval()
    with torch.no_grad():
        jitted = tfn.jit(model)
        assert is_near(inspect.memory(model, x).peak, measured_peak(lambda: jitted(x)))


@pytest.mark.parametrize("make", [gpt, cnn, resnet])
def test_peak_of_a_capture_is_eagers(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> None:
    """A step before the program is drawn as its ops run one by one, in which eager frees no sooner."""
    model, x = make()
    model.eval()
    with torch.no_grad():
        found = inspect.chain(model, x)
        captured, *_, ran = memories_of(found)
        eager = measured_peak(lambda: model(x))
    assert found.steps[0].kind == "capture" and ran == memory_of(found)
    assert ran.peak <= captured.peak <= 1.1 * eager


def test_steps_have_the_memory_that_one_counts_by_hand() -> None:
    """The sine and its cosine live side by side, until the program overwrites the one by the other."""
    captured, ran = memories_of(inspect.chain(lambda x: x.sin().cos().sum(), torch.ones(256)))
    assert captured.live == (1024, 2048, 1028) and ran.live == (1024, 1024, 1028)


def test_peak_of_a_gpts_pure_step_is_the_measured_one() -> None:
    model, tokens = gpt()
    loss = gpt_loss(model)

    def step(params: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        value, gradients = tfn.value_and_grad(loss)(params, tokens, targets)
        return value, {key: params[key] - 0.1 * gradients[key] for key in params}

    args = params_of(model), tokens, torch.randint(0, 96, (4, 32))
    jitted = tfn.jit(step)
    assert is_near(inspect.memory(step, *args).peak, measured_peak(lambda: jitted(*args)))


def test_peak_of_a_cnns_gradient_is_the_measured_one() -> None:
    model, x = cnn()

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, params, (x,)).square().sum()

    params = params_of(model)
    gradient = tfn.jit(tfn.grad(loss))
    assert is_near(inspect.memory(gradient, params, x).peak, measured_peak(lambda: gradient(params, x)))


@pytest.mark.parametrize(
    ("f", "peak"),
    [
        (lambda x: x.sin().cos().exp(), 400),  # one buffer, overwritten twice
        (lambda x: x.sin() + x.cos(), 800),
        (lambda x: x.reshape(10, 10).t(), 0),  # views
        (lambda x: x.reshape(10, 10).t().reshape(-1), 400),  # a copy, as the strides say
        (lambda x: x[:1].expand(50) * 1.0, 200),
        (lambda x: x, 0),
    ],
)
def test_peak_by_hand(f: Callable[[torch.Tensor], torch.Tensor], peak: int) -> None:
    assert inspect.memory(f, torch.ones(100)).peak == peak


def test_a_loop_needs_what_a_step_needs() -> None:
    def loop(x: torch.Tensor) -> torch.Tensor:
        return tfn.fori_loop(0, 10, lambda i, c: (c.sin() + c.cos()) * c, x)

    found = inspect.memory(loop, torch.ones(100))
    assert 800 <= found.peak <= 1700
    assert [buffer.kind for buffer in found.at_peak()].count("scratch") == 1


def recurrence(x: torch.Tensor) -> torch.Tensor:
    return tfn.scan(lambda c, a: ((c + a).sin(), c * 2), x[0], x)[1]


def doubled(x: torch.Tensor) -> torch.Tensor:
    return tfn.while_loop(lambda c: c.sum() < 1e9, lambda c: (c.abs() * 2 + 1,), (x,))[0]


@pytest.mark.parametrize("f", [recurrence, tfn.grad(lambda x: recurrence(x).sum()), doubled])
def test_peak_of_a_loop_is_the_measured_one(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    jitted, x = tfn.jit(f), torch.randn(64, 64)
    assert is_near(inspect.memory(f, x).peak, measured_peak(lambda: jitted(x)))


def test_a_region_of_pytorch_calls_shows_what_it_allocates() -> None:
    fuser = FusionExecutor("fuser", fuse=lambda region: region.python_callable())
    for op in (torch.sin, torch.cos, torch.mul, torch.add):
        fuser.register_supported(op)
    f = lambda x: x.sin() * x.cos() + x
    found = inspect.memory(tfn.jit(f, executors=[fuser]), torch.ones(100))
    assert [(one.kind, one.num_bytes) for one in found.at_peak()] == [("scratch", 1200), ("output", 400)]
    assert (found.peak, found.unseen) == (1600, 0)


def test_what_a_region_allocates_is_unknown_where_it_does_not_say() -> None:
    fuser = FusionExecutor("fuser", fuse=lambda region: lambda *xs: tfn.evaluate(region, xs))
    fuser.register_supported(torch.sin)
    f = tfn.jit(lambda x: x.sin().sin(), executors=[fuser])
    found = inspect.memory(f, torch.ones(100))
    assert (found.peak, found.unseen) == (400, 1)
    assert found.summary.endswith("; without what 1 call of an executor allocates inside, which is unknown")


def test_an_executors_own_dry_run_says_what_it_allocates() -> None:
    class Region:
        def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            raise AssertionError("nothing is run")

        def dry_run(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            scratch = x.new_empty(1000)
            result = torch.empty_like(x)
            del scratch
            return (result,)

    fuser = FusionExecutor("fuser", fuse=lambda region: Region())
    fuser.register_supported(torch.sin)
    found = inspect.memory(tfn.jit(lambda x: x.sin().sin(), executors=[fuser]), torch.ones(100))
    assert (found.peak, found.unseen) == (4400, 0)


def test_text_of_memory(tmp_path: Path) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.relu(x @ x.t()).sum()

    found = inspect.memory(f, torch.ones(64, 64))
    lines = str(found).splitlines()
    assert lines[0] == (
        "memory of f: peak 16.0 KiB at equation 3 of 4 (aten.sum.default); "
        "residuals 0 B, outputs 4 B, held by the caller 16.0 KiB"
    )
    assert lines[1:3] == ["at the peak:", "    live  kind          made by           module  line"]
    assert lines[3].startswith("16.0 KiB  intermediate  aten.mm.default           test_inspect_memory.py:")
    picture = found.save(tmp_path / "memory.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_sizes_that_depend_on_data_are_said_to_be_unknown() -> None:
    found = inspect.memory(lambda x: x[x > 0].sin().sum(), torch.ones(8))
    assert found.unknown > 0 and f"{found.unknown} sizes depend on data" in found.summary
    assert inspect.memory(torch.sin, torch.ones(8)).unknown == 0
