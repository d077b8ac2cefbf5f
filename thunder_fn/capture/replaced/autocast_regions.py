"""`torch.autocast` regions inside a traced function.

The ops of a region become a composite, `autocast_region`, with the casts of the region in it, or
none where it turns autocast off. The autocast interpreter leaves it as it is: in PyTorch the
innermost region decides.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_fn.capture.recorded import Scope
from thunder_fn.capture.recorder import current
from thunder_fn.capture.replaced.lookasides import divert, original_of
from thunder_fn.capture.scopes import user_source
from thunder_fn.ir.trace import Op

REGION = "autocast_region"
OFF = f"{REGION}_off"
"""A region that turns autocast off."""


def is_region(op: Op) -> bool:
    """Test for a composite whose precision is settled: a region, or what a transform made of one
    and named after it.
    """
    return op.kind == "composite" and REGION in op.name


def enter(region: Any) -> Any:
    """`torch.autocast.__enter__` inside a capture: a scope begins."""
    result, recorder = original_of(torch.autocast.__enter__)(region), current()
    if recorder is not None:
        outer = recorder.scope
        name = REGION if torch.is_autocast_enabled(region.device) else OFF
        scope = Scope(
            name, "composite", outer, outer.depth + 1, user_source(recorder), outer.module
        )
        outer.items.append(scope)
        recorder.scope = scope
    return result


def leave(region: Any, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any:
    """`torch.autocast.__exit__`: the scope ends, unless it ended with a call that it was entered
    in.
    """
    recorder = current()
    if recorder is not None and recorder.scope.name in (REGION, OFF):
        recorder.scope = recorder.scope.parent or recorder.scope
    return original_of(torch.autocast.__exit__)(region, exc_type, exc_val, exc_tb)


divert("autocast enter", enter)
divert("autocast exit", leave)
