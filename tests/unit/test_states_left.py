"""PyTorch's own state that a function sets: what it leaves so is refused, what it sets back is eager's, and a function that
is traced twice, or in parts, begins each time in the state of the call. The oracle is eager code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._tensor_str import PRINT_OPTS
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import thunder_fn as tfn
from thunder_fn import torch_internals as internals
from thunder_fn.errors import UnsupportedCall


class Dispatch(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


FUNCTION_MODE, DISPATCH_MODE = BaseTorchFunctionMode(), Dispatch()
SETS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "grad mode": (lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
    "determinism": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "autocast": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.set_autocast_enabled("cpu", False),
    ),
    "default device": (lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
    "function mode": (FUNCTION_MODE.__enter__, lambda: FUNCTION_MODE.__exit__(None, None, None)),
    "dispatch mode": (DISPATCH_MODE.__enter__, lambda: DISPATCH_MODE.__exit__(None, None, None)),
    "attention kernels": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch.backends.cuda.enable_flash_sdp(True),
    ),
}
X = torch.tensor([1.0, 0.0, 3.0])


@pytest.fixture(autouse=True)
def _is_left_as_it_was() -> Iterator[None]:
    before, put_back, modes = internals.state(), internals.state_kept(), internals.function_modes()
    yield
    put_back()
    internals.keep_function_modes(modes)
    assert internals.state() == before


def leaving(what: str) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        SETS[what][0]()
        return y * 2

    return f


def in_between(what: str) -> Callable[[Tensor], Tensor]:
    """Sizes that are found in data, and an optimizer's numbers, let a function be traced again."""

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        SETS[what][0]()
        n = x.nonzero().shape[0]
        z = y * torch.ones(3, device="cpu") * n
        SETS[what][1]()
        return z + y.cos()

    return f


def branching(what: str) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        SETS[what][0]()
        z = y * torch.ones(3, device="cpu") if y.sum() > 0 else y
        SETS[what][1]()
        return z + y.cos()

    return f


def raising(what: str) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        SETS[what][0]()
        raise KeyError(x.sin())

    return f


def outcome(f: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    x = X.clone().requires_grad_()
    found = f(x)
    gradient = torch.autograd.grad(found.sum(), x)[0] if found.requires_grad else None
    return found.detach(), found.dtype, found.device, found.requires_grad, gradient


def same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    return all(
        torch.allclose(one, two) if isinstance(one, Tensor) else one == two
        for one, two in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("what", SETS)
def test_a_jitted_function_that_leaves_another_state_is_refused(what: str) -> None:
    jitted, before, modes = tfn.jit(leaving(what)), internals.state(), internals.function_modes()
    for _ in range(2):
        with pytest.raises(UnsupportedCall, match=r"leaves (an)?other .* than it found"):
            jitted(X)
        assert internals.state() == before and internals.function_modes() == modes
        assert torch.equal(X + 1, torch.tensor([2.0, 1.0, 4.0]))


def test_one_that_turns_gradients_on_is_refused_where_they_are_off() -> None:
    def f(x: Tensor) -> Tensor:
        torch.set_grad_enabled(True)
        return x.sin()

    with torch.no_grad(), pytest.raises(UnsupportedCall, match="leaves another grad_mode than it found"):
        tfn.jit(f)(X.clone().requires_grad_())


@pytest.mark.parametrize("what", SETS)
def test_one_that_sets_it_back_is_eager(what: str) -> None:
    expected, before = outcome(in_between(what)), internals.state()
    jitted = tfn.jit(in_between(what))
    for _ in range(2):
        assert same(outcome(jitted), expected) and internals.state() == before


@pytest.mark.parametrize("what", SETS)
def test_one_that_is_refused_has_set_nothing(what: str) -> None:
    jitted, before = tfn.jit(branching(what)), internals.state()
    for _ in range(2):
        with pytest.raises(tfn.errors.DataDependentBranch):
            jitted(X)
        assert internals.state() == before


@pytest.mark.filterwarnings("ignore::thunder_fn.errors.GraphBreakWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it where it resumes
@pytest.mark.parametrize("what", ["grad mode", "default dtype", "determinism", "default device"])  # Dynamo loses others
@pytest.mark.parametrize("make", [leaving, branching])
def test_a_compiled_one_does_what_eager_does(make: Callable[[str], Any], what: str) -> None:
    put_back = internals.state_kept()
    compiled, f = tfn.compile(make(what)), make(what)
    for _ in range(2):
        expected, left = outcome(f), internals.state()
        put_back()
        assert same(outcome(compiled), expected)
        assert {**internals.state(), "torch function modes": ()} == {**left, "torch function modes": ()}
        put_back()


@pytest.mark.parametrize("what", SETS)
def test_one_that_raises_leaves_no_mode_of_ours(what: str) -> None:
    jitted = tfn.jit(raising(what))
    before = internals.state()
    with pytest.raises(KeyError):
        jitted(X)
    if internals.state() != before:
        SETS[what][1]()
    assert internals.count_function_modes() == 0 and not internals.dispatch_modes()
    assert torch.equal(X + 1, torch.tensor([2.0, 1.0, 4.0]))


B = torch.backends
FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any, Any]] = {
    "threads": (torch.get_num_threads, lambda n: torch.set_num_threads(n), 1, 2),
    "flash": (B.cuda.flash_sdp_enabled, lambda on: B.cuda.enable_flash_sdp(on), True, False),
    "efficient": (B.cuda.mem_efficient_sdp_enabled, lambda on: B.cuda.enable_mem_efficient_sdp(on), True, False),
    "math": (B.cuda.math_sdp_enabled, lambda on: B.cuda.enable_math_sdp(on), True, False),
    "tf32": (lambda: B.cuda.matmul.allow_tf32, lambda on: setattr(B.cuda.matmul, "allow_tf32", on), False, True),
    "cudnn tf32": (lambda: B.cudnn.allow_tf32, lambda on: setattr(B.cudnn, "allow_tf32", on), True, False),
    "benchmark": (lambda: B.cudnn.benchmark, lambda on: setattr(B.cudnn, "benchmark", on), False, True),
    "cudnn": (lambda: B.cudnn.enabled, lambda on: B.cudnn.set_flags(on), True, False),
    "mkldnn": (lambda: B.mkldnn.enabled, lambda on: B.mkldnn.set_flags(on), True, False),
    "precision": (
        torch.get_float32_matmul_precision,
        lambda name: torch.set_float32_matmul_precision(name),
        "highest",
        "high",
    ),
    "fill": (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore[reportAttributeAccessIssue]
        lambda on: setattr(torch.utils.deterministic, "fill_uninitialized_memory", on),
        True,
        False,
    ),
    "anomaly": (torch.is_anomaly_enabled, lambda on: torch.autograd.set_detect_anomaly(on), False, True),
    "warnings": (torch.is_warn_always_enabled, lambda on: torch.set_warn_always(on), False, True),
    "print options": (lambda: PRINT_OPTS.precision, lambda n: torch.set_printoptions(precision=n), 4, 2),
    "sparse": (
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
        lambda on: getattr(torch.sparse.check_sparse_tensor_invariants, "enable" if on else "disable")(),
        False,
        True,
    ),
    "fast path": (B.mha.get_fastpath_enabled, lambda on: B.mha.set_fastpath_enabled(on), True, False),
    "conversion": (
        torch.__future__.get_swap_module_params_on_conversion,
        lambda on: torch.__future__.set_swap_module_params_on_conversion(on),
        False,
        True,
    ),
}
"""Flags of the process: the question, what sets it, and two values."""


def setting(what: str, *values: Any) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        for value in values:
            FLAGS[what][1](value)
        return x.sin()

    return f


@pytest.mark.filterwarnings("ignore::thunder_fn.errors.GraphBreakWarning")
@pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize("wrap", [tfn.jit, tfn.compile])
@pytest.mark.parametrize("what", FLAGS)
def test_a_flag_that_is_set_is_set_in_each_call_or_refused(what: str, wrap: Any) -> None:
    ask, put, one, two = FLAGS[what]
    for values, before in (((two,), (one, one, one)), ((two,), (two, one, two)), ((two, one), (one, two, one))):
        call = wrap(setting(what, *values))
        for value in before:
            put(value)
            is_refused = wrap is tfn.jit and value != values[-1]
            with pytest.raises(UnsupportedCall, match="leaves") if is_refused else contextlib.nullcontext():
                assert torch.equal(call(X), X.sin())
            assert ask() == (value if is_refused else values[-1])


def test_a_flag_that_nothing_tells_is_refused() -> None:
    def f(x: Tensor) -> Tensor:
        torch.set_flush_denormal(False)
        return x.sin()

    with pytest.raises(UnsupportedCall, match="set_flush_denormal"):
        tfn.jit(f)(X)
