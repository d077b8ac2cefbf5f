"""Capture: a PyTorch callable becomes a trace.

The function runs once on tracers and is recorded, as in JAX. In-place code and views come out pure;
closed-over tensors become constants; mutations become extra outputs. Capture nests and is
thread-safe: all state lives in one Recorder, found through a context variable.

`recorder.py` records, `scopes.py` sees torch functions, `nesting.py` folds the recording.
`outside/` finds reads of globals and attributes, `numbers/` makes numbers symbolic, `replaced/`
stands in for functions. A replacement of a PyTorch function belongs in its tables; it must not be
visible to other threads.
"""

from thunder_fn.capture import pytree
from thunder_fn.capture.aliases import Alias
from thunder_fn.capture.captured import Captured, GradRead, Shared
from thunder_fn.capture.capturing import EVERY_LEAF, capture
from thunder_fn.capture.pytree import TENSOR
from thunder_fn.capture.recorder import current
from thunder_fn.capture.scopes import composite, named_composite

__all__ = [
    "EVERY_LEAF",
    "TENSOR",
    "Alias",
    "Captured",
    "GradRead",
    "Shared",
    "capture",
    "composite",
    "current",
    "named_composite",
    "pytree",
]
