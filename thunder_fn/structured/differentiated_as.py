"""differentiated_as: computed in one way, differentiated in another.

    outputs = differentiated_as(*operands)     bodies: computed, differentiated     on the operands

Both bodies give the same values. PyTorch's first derivative of some ops reads saved values, such as
the factors of a matrix, of which no derivative is known. So it cannot be differentiated again. With
`create_graph=True` PyTorch computes it from the arguments. A rule that `derived/leaf_vjp.py` makes
of such an op has both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder_fn import torch_internals as internals
from thunder_fn.capture import current
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir import ops
from thunder_fn.ir.rules import CHECK, DCE, EVALUATE, VMAP
from thunder_fn.ir.trace import Trace
from thunder_fn.structured.shared.bind import bind
from thunder_fn.structured.shared.wrapping import (
    wrapper_check_rule,
    wrapper_dce_rule,
    wrapper_vmap_rule,
)

CHECK.enter(wrapper_check_rule, "differentiated_as")


@EVALUATE.rule("differentiated_as")
def differentiated_as_evaluate_rule(bodies: Sequence[Trace], *operands: Any) -> tuple[Any, ...]:
    """Compute, where autograd or torch.func looks in the way that they can differentiate; inside
    a capture, record.
    """
    recorder, (computed, differentiated) = current(), bodies
    if recorder is not None:
        return bind(recorder, ops.DIFFERENTIATED_AS, operands, tuple(bodies), computed.output_types)
    followed = internals.any_followed(operands)
    return evaluate(
        differentiated if followed or internals.inside_torch_func() else computed, operands
    )


VMAP.enter(wrapper_vmap_rule, "differentiated_as")
DCE.enter(wrapper_dce_rule, "differentiated_as")
