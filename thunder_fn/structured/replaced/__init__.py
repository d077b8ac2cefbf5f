"""Functions of PyTorch that capture replaces with traced ones: lookasides, in terms of structured
ops.

Each file names the function, and says why its own code cannot be traced.
"""

from thunder_fn.structured.replaced import (
    exported,
    flex_attention,
    modules,
    tensor_hooks,
)

__all__ = [
    "exported",
    "flex_attention",
    "modules",
    "tensor_hooks",
]
