"""Does a case agree with eager PyTorch? Forward bitwise, gradients as close as eager's kernels are to each other."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.samples import Case, seed
from thunder_fn.capture import capture, pytree
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.grad import vjp
from thunder_fn.ir import ops
from thunder_fn.ir.check import check
from thunder_fn.ir.memory import may_alias
from thunder_fn.ir.trace import Trace

SEED = 42
"""The seed that op_db's random operators use themselves."""


@dataclass(frozen=True)
class Outcome:
    """`status` is passed, close (not bitwise), failed (other values), error, or skipped (eager PyTorch itself refuses)."""

    status: str
    why: str = ""


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensor leaves of a pytree."""
    return [leaf for leaf in pytree.flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def is_same(a: Any, b: Any) -> bool:
    """Equal type, shape and bits; NaN equals NaN, and 0.0 differs from -0.0."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and (a == b or a != a)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = _real(a), _real(b)
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    if a.dtype.itemsize < 2:
        a, b = a.float(), b.float()
    nan = a.isnan()
    return (
        torch.equal(nan, b.isnan())
        and torch.equal(a[~nan], b[~nan])
        and torch.equal(a.signbit()[~nan], b.signbit()[~nan])
    )


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Close in the precision of the dtype, measured by the largest element."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = _real(a), _real(b)
    if not a.dtype.is_floating_point or not a.numel():
        return torch.equal(a, b)
    finite = a[a.isfinite()].abs()
    scale = max(finite.max().item() if finite.numel() else 0.0, 1e-3)
    epsilon = 64 * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=epsilon, atol=epsilon * scale, equal_nan=True)


def compare(found: list[Any], expected: list[Any], what: str) -> Outcome:
    """Leaf by leaf; the worst decides."""
    if len(found) != len(expected):
        return Outcome("failed", f"{len(found)} {what}s instead of {len(expected)}")
    close = False
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        if is_same(a, b):
            continue
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and is_close(a, b)):
            return Outcome("failed", f"{what} {index}: {_described(a)} instead of {_described(b)}")
        close = True
    return Outcome("close" if close else "passed")


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{value!r:.40}"
    return f"{value.dtype} {tuple(value.shape)} {value.detach().flatten()[:3].tolist()!s:.60}"


def forward(case: Case) -> Outcome:
    """Capture and evaluate against eager: results and what is written to the arguments, bitwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args, kwargs = copy.deepcopy((case.args, case.kwargs))
        seed(SEED)
        try:
            expected = case.function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001
            return Outcome("skipped", f"eager: {type(error).__name__}: {error}")
        changed = tensors_in((args, kwargs))
        args, kwargs = copy.deepcopy((case.args, case.kwargs))
        inputs = tensors_in((args, kwargs))
        captured = capture(case.function, args, kwargs)
        check(captured.trace)
        seed(SEED)
        outputs = evaluate(captured.trace, inputs)
        if untold := untold_aliases(captured.trace, inputs):
            return Outcome("failed", f"results of {untold} lie in operands, which `may_alias` does not say")
        written = {
            write.target: value for write, value in zip(captured.writes, outputs[captured.num_results :], strict=True)
        }
        left = [written.get(index, value) for index, value in enumerate(inputs)]
        result = compare(pytree.flatten(captured.result(outputs))[0], pytree.flatten(expected)[0], "result")
        return result if result.status != "passed" else compare(left, changed, "argument")


def untold_aliases(trace: Trace, inputs: list[torch.Tensor]) -> set[str]:
    """The ops whose results lie in memory of operands though `may_alias` says that they do not."""
    with Untold() as found:
        evaluate(trace, inputs)
    return found.ops


class Untold(TorchDispatchMode):
    """A note of such ops. Composite ops compute in another order in a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not may_alias(ops.leaf(func)):
            own, given = ({id_of(x) for x in tensors_in(tree)} for tree in (result, (args, kwargs)))
            self.ops |= {str(func)} if own & given else set()
        return result


def id_of(tensor: torch.Tensor) -> int:
    """The memory of a tensor; one without strides stands for itself."""
    return id(tensor) if tensor.layout is not torch.strided else tensor.untyped_storage()._cdata


def is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def gradient(case: Case) -> Outcome:
    """The vjp trace against torch.autograd, for every input that requires grad and a cotangent for every result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # leaves: autograd sends the gradient of some views of samples to what they are views of
        args, kwargs = pytree.tree_map(_leaf, (case.args, case.kwargs))
        inputs = tensors_in((args, kwargs))
        asked = [tensor for tensor in inputs if tensor.requires_grad]
        seed(SEED)
        try:
            results = tensors_in(case.oracle(*args, **kwargs))
            torch.manual_seed(3)
            cotangents = [torch.randn_like(result) for result in results if is_inexact(result)]
            useful = [(r, ct) for r, ct in zip(filter(is_inexact, results), cotangents, strict=True) if r.requires_grad]
            if not asked or not useful:
                return Outcome("skipped", "nothing requires grad")
            found = torch.autograd.grad([r for r, _ in useful], asked, [ct for _, ct in useful], allow_unused=True)
        except Exception as error:  # noqa: BLE001
            return Outcome("skipped", f"eager: {type(error).__name__}: {error}")
        expected = [torch.zeros_like(t) if g is None else g for t, g in zip(asked, found, strict=True)]
        args, kwargs = pytree.tree_map(_detached, (args, kwargs))
        captured = capture(case.function, args, kwargs)
        wanted_outputs = (*map(is_inexact, results), *(False for _ in captured.writes))
        trace = vjp(captured.trace, tuple(tensor.requires_grad for tensor in inputs), wanted_outputs)
        check(trace)
        seed(SEED)
        outputs = evaluate(trace, [*map(_detached, inputs), *cotangents])
        if untold := untold_aliases(trace, [*map(_detached, inputs), *cotangents]):
            return Outcome("failed", f"results of {untold} lie in operands, which `may_alias` does not say")
        ours = list(outputs[len(outputs) - len(asked) :])
        result = compare(ours, expected, "gradient")
        if result.status == "failed" and case.dtype in DOUBLE:
            reference = _in_double(case, args, kwargs, cotangents)
            if reference is not None and _error(ours, reference) <= 2 * _error(expected, reference):
                return Outcome("close", "no farther from the gradient in double precision than eager")
        return result


DOUBLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def _in_double(case: Case, args: Any, kwargs: Any, cotangents: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Autograd's gradients in double precision; None where the operator has none."""

    def double(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        new = leaf.detach().to(DOUBLE.get(leaf.dtype, leaf.dtype))
        return new.requires_grad_(is_inexact(new))

    args, kwargs = pytree.tree_map(double, (args, kwargs))
    original = tensors_in((case.args, case.kwargs))
    asked = [new for new, old in zip(tensors_in((args, kwargs)), original, strict=True) if old.requires_grad]
    seed(SEED)
    try:
        results = filter(is_inexact, tensors_in(case.oracle(*args, **kwargs)))
        pairs = [(r, double(ct).detach()) for r, ct in zip(results, cotangents, strict=True) if r.requires_grad]
        return list(torch.autograd.grad([r for r, _ in pairs], asked, [ct for _, ct in pairs], materialize_grads=True))
    except Exception:  # noqa: BLE001
        return None


def _error(found: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """The largest distance from the reference."""
    return max(float((a.to(b.dtype) - b).abs().max()) for a, b in zip(found, reference, strict=True) if b.numel())


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _leaf(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


SWEEPS = {"forward": forward, "gradient": gradient}
