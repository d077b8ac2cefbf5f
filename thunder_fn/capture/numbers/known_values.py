"""Values that depend on nothing from outside: a function makes them of sizes and numbers alone,
such as a mask of ones.

Python may ask for them while it is traced, as eager code does: they are the same in every call.
Such a value is computed when it is asked for, from the equations recorded so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.recorded import Leaf, leaves_of
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Expr, Literal, Var, all_args, python_args, vars_in

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder


def known_answer(recorder: Recorder, question: Any, args: Any, kwargs: Any) -> Any:
    """Answer a FakeTensor value query, or return NotImplemented if the value depends on an
    input.
    """
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    try:
        values = _values(recorder, [recorder.known(tensor) for tensor in tensors])
    except KeyError:  # a tensor that reached the dispatcher without passing a torch function
        return NotImplemented
    if values is None:
        return NotImplemented
    supply = iter(values)
    with internals.isolated(), internals.no_torch_function():
        return question(
            *(next(supply) if isinstance(arg, torch.Tensor) else arg for arg in args), **kwargs
        )


def _values(recorder: Recorder, wanted: list[Var]) -> list[torch.Tensor] | None:
    """The values of variables; None if one depends on an input, on a tensor from outside or on
    random numbers.
    """
    made = [
        constant
        for constant in recorder.constants
        if constant.owned and not constant.tensor.is_meta
    ]
    own = {constant.var.index: constant.tensor for constant in made}
    needed, found = {var.index for var in wanted}, list[Leaf]()
    for leaf in reversed([leaf for leaf, _ in leaves_of(recorder.root)]):
        if any(var.index in needed for var in leaf.outputs):
            if not _is_known(leaf):
                return None
            found.append(leaf)
            needed -= {var.index for var in leaf.outputs}
            needed.update(var.index for var in vars_in(all_args(leaf)))
    if not needed <= set(own):
        return None
    with internals.isolated(), internals.no_torch_function(), torch.no_grad():
        for leaf in reversed(found):
            results = _run(leaf, own)
            own.update((var.index, value) for var, value in zip(leaf.outputs, results, strict=True))
    return [own[var.index] for var in wanted]


def _is_known(leaf: Leaf) -> bool:
    """Test for an op of PyTorch's that draws nothing, on numbers without symbols."""
    if leaf.op.kind != "leaf" or ops.is_random(leaf.op) or ops.has_side_effect(leaf):
        return False
    return not _has_symbols(all_args(leaf))


def _has_symbols(arg: Any) -> bool:
    if isinstance(arg, tuple):
        return any(map(_has_symbols, arg))
    return isinstance(arg, Literal) and isinstance(arg.value, Expr)


def _run(leaf: Leaf, env: dict[int, torch.Tensor]) -> tuple[Any, ...]:
    """Run the op; on the CPU in place of the meta device, on which nothing has values."""
    read: Callable[[Var], torch.Tensor] = lambda var: env[var.index]
    args, kwargs = python_args(leaf, read)
    if kwargs.get("device") == torch.device("meta"):
        kwargs["device"] = torch.device("cpu")
    return ops.flatten_result(ops.overload(leaf.op)(*args, **kwargs))
