"""Parameters in another form: quantize, lora, fsdp, ddp and tensor_parallel of functions and
modules.

`functions.py` has the functions for users, `rewritten.py` and `modules.py` what they return. Each
transform is an interpreter: `interpreters/quantize/`, `lora.py`, `fsdp.py`, `ddp.py`,
`tensor_parallel/`, on `interpreters/rewriting/`. Kernels for codes are executors
(`executors/quantized/`).
"""

from __future__ import annotations

from thunder_fn.distributed.checkpoints import Checkpoints
from thunder_fn.distributed.groups import Group, simulated, simulated_mesh
from thunder_fn.distributed.heartbeat import watched
from thunder_fn.distributed.ranks import evaluate_ranks
from thunder_fn.interpreters.pipeline.schedules import Action, Schedule
from thunder_fn.interpreters.quantize.eight_bits import fp8
from thunder_fn.interpreters.quantize.four_bits import int4
from thunder_fn.interpreters.quantize.scheme import Scheme
from thunder_fn.interpreters.rewriting.prepared import Prepared
from thunder_fn.interpreters.rewriting.rewrite import Rewrite, identity
from thunder_fn.parameters.clipping import clip_by_global_norm, global_norm
from thunder_fn.parameters.contexts import context_parallel, positions
from thunder_fn.parameters.experts import expert_parallel
from thunder_fn.parameters.functions import ddp, fsdp, lora, quantize, tensor_parallel
from thunder_fn.parameters.modules import RewrittenModule
from thunder_fn.parameters.overlapping import overlap
from thunder_fn.parameters.pipelines import Pipelined, pipeline
from thunder_fn.parameters.rewritten import Rewritten
from thunder_fn.parameters.schemes import SCHEMES

__all__ = [
    "SCHEMES",
    "Action",
    "Checkpoints",
    "Group",
    "Pipelined",
    "Prepared",
    "Rewrite",
    "Rewritten",
    "RewrittenModule",
    "Schedule",
    "Scheme",
    "clip_by_global_norm",
    "context_parallel",
    "ddp",
    "evaluate_ranks",
    "expert_parallel",
    "fp8",
    "fsdp",
    "global_norm",
    "identity",
    "int4",
    "lora",
    "overlap",
    "pipeline",
    "positions",
    "quantize",
    "simulated",
    "simulated_mesh",
    "tensor_parallel",
    "watched",
]
