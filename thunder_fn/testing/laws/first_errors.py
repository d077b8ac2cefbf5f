"""The law of check_errors: its code is that of the first NaN that PyTorch computes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_fn.interpreters.check_errors import KINDS, check_errors
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import facts, ops
from thunder_fn.ir.trace import Trace
from thunder_fn.testing.laws.comparing import Inputs, holds, is_inexact, run, seeded


class _Watching(TorchDispatchMode):
    """The ops that computed NaN, in order, as PyTorch runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        op = ops.leaf(func)
        if ops.is_view(op) or op in facts.MOVES or op in facts.EMPTY:
            return result
        results = result if isinstance(result, (list, tuple)) else (result,)
        floats = [x for x in results if isinstance(x, torch.Tensor) and is_inexact(x)]
        if any(bool(x.isnan().any()) for x in floats):
            self.seen.append(op.name)
        return result


def law_check_errors_finds_nan(trace: Trace, inputs: Inputs) -> None:
    """The code is that of the first op that computes NaN, or 0: on these inputs, and on NaN."""
    trace = dce(trace)
    new, checks = check_errors(trace, KINDS)
    poisoned = tuple(torch.full_like(x, torch.nan) if is_inexact(x) else x for x in inputs)
    for given in (inputs, poisoned):
        watching = _Watching()
        with watching:
            seeded(lambda given=given: evaluate(trace, given))
        code = int(run(new, given)[-1])
        first = watching.seen[0] if watching.seen else "none"
        told = checks[code - 1].text.split()[0] if code else "none"
        is_known = code == 0 or "." in told  # of an op without a rule the results are looked at
        holds(not is_known or told == first, f"{told} for {first}", checked=new)
