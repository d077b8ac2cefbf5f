"""Rewrites: transforms that change how parameters are stored, such as quantisation, adapters and sharding.

`scheme.py`, `eight_bits.py` and `four_bits.py` define codes; `distributed.py` and `tensor_parallel.py` define shards;
`functions.py` has the functions for users. Kernels for codes are executors (`kernels.py`, `codes_kernels.py`). A new
scheme is one `Scheme` with its bound. The interpreter that carries representations through a trace is
`thunder_fn.interpreters.rewrite`.
"""

from __future__ import annotations

from thunder_fn.interpreters.heartbeat import watched
from thunder_fn.interpreters.ranks import evaluate_ranks
from thunder_fn.interpreters.rewrite import Rewrite, identity
from thunder_fn.rewrites.clipping import clip_by_global_norm, global_norm
from thunder_fn.rewrites.distributed import Group, simulated, simulated_mesh
from thunder_fn.rewrites.eight_bits import fp8
from thunder_fn.rewrites.four_bits import int4
from thunder_fn.rewrites.functions import ddp, fsdp, lora, quantize, tensor_parallel
from thunder_fn.rewrites.modules import RewrittenModule
from thunder_fn.rewrites.prepared import Prepared
from thunder_fn.rewrites.rewritten import Rewritten
from thunder_fn.rewrites.scheme import Scheme
from thunder_fn.rewrites.schemes import SCHEMES

__all__ = [
    "SCHEMES",
    "Group",
    "Prepared",
    "Rewrite",
    "Rewritten",
    "RewrittenModule",
    "Scheme",
    "clip_by_global_norm",
    "ddp",
    "evaluate_ranks",
    "fp8",
    "fsdp",
    "global_norm",
    "identity",
    "int4",
    "lora",
    "quantize",
    "simulated",
    "simulated_mesh",
    "tensor_parallel",
    "watched",
]
