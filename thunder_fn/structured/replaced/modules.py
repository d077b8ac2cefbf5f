"""Modules of `torch.nn` inside a traced function, which ask for numbers that are unbacked there.

Transformers decide by the values of their masks. Without gradients eager's `nn.TransformerEncoder`
leaves padded places out, and fills them with zeros. It takes nested tensors then, which a trace
does not have, and decides by values whether it can. Here all places are computed, and those that
eager would have left out are set to zero. Encoder and decoder ask whether a mask is the causal one,
which a faster kernel knows without it. Here the mask is used as any other, with the same result up
to rounding.

Batch norm with `momentum=None` has the mean over all batches, whose number is unbacked. PyTorch's
module asks for that number as a Python number, and its op takes momentum as one. Here the op gives
the statistics of the batch, and traced ops put these into the running ones.

`nn.GRU` and `nn.RNN` of packed sequences ask for the size of the batch, which is unbacked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from thunder_fn import torch_internals as internals
from thunder_fn.capture.replaced.lookasides import divert, original_of


def forward(
    module: Any,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> torch.Tensor:
    """The module's `forward`, with zeros where eager has them."""
    pad = src_key_padding_mask
    if pad is None or mask is not None or is_causal or not _leaves_out(module, src):
        return original_of(internals.higher_order_function("transformer encoder"))(
            module, src, mask, pad, is_causal
        )
    output = src
    for layer in module.layers:
        output = layer(output, src_mask=None, is_causal=False, src_key_padding_mask=pad)
    is_padded = pad if pad.dtype == torch.bool else pad != 0
    if getattr(module, "mask_check", True):
        is_padded = is_padded & (is_padded[:, :-1] <= is_padded[:, 1:]).all()
    output = output.masked_fill(is_padded.unsqueeze(2), 0.0)
    return output if module.norm is None else module.norm(output)


def _leaves_out(module: Any, src: torch.Tensor) -> bool:
    """Test whether eager would take nested tensors, if the mask has no hole in it."""
    first = module.layers[0]
    if not torch.backends.mha.get_fastpath_enabled() or not getattr(
        module, "use_nested_tensor", False
    ):
        return False
    if first.training or src.dim() != 3 or torch.is_autocast_enabled():
        return False
    attention = first.self_attn
    norms = (first.norm1, first.norm2)
    linears = (first.linear1, first.linear2)
    own = (
        attention.in_proj_weight,
        attention.in_proj_bias,
        attention.out_proj.weight,
        attention.out_proj.bias,
    )
    tensors = (
        src,
        *own,
        *(value for part in (*norms, *linears) for value in (part.weight, part.bias)),
    )
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


divert("transformer encoder", forward)


def is_known_causal(
    mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """Test whether the caller says that the mask is the causal one."""
    return is_causal is True


divert("causal mask", is_known_causal)


# ---- batch norm ----


def batch_norm(module: Any, input: torch.Tensor) -> torch.Tensor:
    """The module's `forward`; running statistics are updated in double precision, as PyTorch's
    kernel does it.
    """
    averages = module.momentum is None and module.training and module.track_running_stats
    if not averages or module.num_batches_tracked is None:
        return original_of(internals.higher_order_function("batch norm"))(module, input)
    module._check_input_dim(input)
    module.num_batches_tracked.add_(1)
    running: tuple[torch.Tensor, ...] = (module.running_mean, module.running_var)
    mean, var = batch = [torch.zeros_like(one) for one in running]
    result = F.batch_norm(input, mean, var, module.weight, module.bias, True, 1.0, module.eps)
    share = 1.0 / module.num_batches_tracked.double()
    with torch.no_grad():
        for old, new in zip(running, batch, strict=True):
            old.copy_(share * new.double() + (1 - share) * old.double())
    return result


divert("batch norm", batch_norm)


# ---- recurrent modules ----


def check_forward_args(
    module: Any, input: torch.Tensor, hidden: torch.Tensor, batch_sizes: torch.Tensor | None
) -> None:
    """Check like the module, which asks for the batch size as a number of Python's; here the
    program checks it.
    """
    if batch_sizes is None:
        original_of(internals.higher_order_function("recurrent arguments"))(
            module, input, hidden, batch_sizes
        )
        return
    module.check_input(input, batch_sizes)
    layers = module.num_layers * (2 if module.bidirectional else 1)
    expected, found = (layers, batch_sizes[0].item(), module.hidden_size), tuple(hidden.shape)
    text = f"Expected hidden size {expected}, got {list(found)}"
    if len(found) != len(expected):
        raise RuntimeError(text)
    for size, right in zip(found, expected, strict=True):
        internals.demand(size == right, text)


divert("recurrent arguments", check_forward_args)
