"""Functions of PyTorch that capture replaces with traced ones: lookasides, in terms of structured
ops.

Each file names the function, and says why its own code cannot be traced.
"""

from thunder_fn.structured.replaced import (
    batch_norm,
    exported,
    flex_attention,
    recurrent,
    tensor_hooks,
    transformer_encoder,
)

__all__ = [
    "batch_norm",
    "exported",
    "flex_attention",
    "recurrent",
    "tensor_hooks",
    "transformer_encoder",
]
