"""Packed sequences: recurrent layers and padding, of unbacked lengths.

PyTorch's recurrent ops read `batch_sizes`, how many sequences there are in each step, while they
run. Here a layer is an op, which calls PyTorch's when it runs, so one trace serves sequences of any
lengths. So are its derivatives, which run the layer again under autograd. On a GPU sequences of
one length take the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thunder_fn import torch_internals as internals

CELLS: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}

GATES = {"lstm": 4, "gru": 3}
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cuDNN's numbers of the cells."""


def is_of_cudnn(x: Tensor) -> bool:
    """Test whether PyTorch's recurrent layers run as cuDNN's on this input."""
    return x.is_cuda and torch.backends.cudnn.is_acceptable(x)


def is_packed(cell: str, args: Sequence[Any]) -> bool:
    """Test whether the arguments of a recurrent function of torch are data, batch sizes and a
    state, and not data and a state.
    """
    return len(args) > 2 and isinstance(args[1 if cell == "lstm" else 2], Tensor)


def packed_rnn(
    cell: str,
    x: Tensor,
    batch_sizes: Tensor,
    state: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """Compute `torch.lstm` and its like on a packed sequence: the outputs, then the last states."""
    states = list(state) if cell == "lstm" else [state]
    directions, last = 2 if bidirectional else 1, list[Sequence[Tensor]]()
    count = len(weights) // num_layers
    for layer in range(num_layers):
        own = list(weights[layer * count : (layer + 1) * count])
        given = [value.narrow(0, layer * directions, directions) for value in states]
        if layer and dropout and train:
            x = torch.dropout(x, dropout, True)
        tensors = [x, *given, *own]
        x, *after = LAYER(
            cell, tensors, batch_sizes, len(given), has_biases, bidirectional, len(tensors), 0, ""
        )
        last.append(after)
    return x, *(torch.cat(parts) for parts in zip(*last, strict=True))


def whole_rnn(
    cell: str,
    x: Tensor,
    state: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Compute `torch.lstm` and its like by cuDNN: sequences of one length, as packed ones.

    PyTorch's own code asks where the weights lie in memory, and a tracer has none.
    """
    steps = x.transpose(0, 1) if batch_first else x
    length, batch = steps.shape[:2]
    batch_sizes = torch.full((length,), batch, dtype=torch.int64, device="cpu")
    flags = has_biases, num_layers, dropout, train, bidirectional
    rows = steps.reshape(length * batch, steps.shape[2])
    y, *last = packed_rnn(cell, rows, batch_sizes, state, weights, *flags)
    y = y.reshape(length, batch, y.shape[1])
    return y.transpose(0, 1) if batch_first else y, *last


def pack_padded_sequence(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Pack sequences by plain ops: the rows of all sequences step by step, and the number of
    rows in each step.
    """
    steps_first = x.transpose(0, 1) if batch_first else x
    is_falling, all_positive = (lengths[1:] <= lengths[:-1]).all(), (lengths > 0).all()
    torch.ops.aten._assert_async.msg(
        is_falling,
        "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True",
    )
    torch.ops.aten._assert_async.msg(all_positive, "Length of all samples has to be greater than 0")
    longest: Any = lengths[0].item()
    internals.demand(
        longest <= steps_first.shape[0],
        f"Expected at most {steps_first.shape[0]} steps, got {longest}",
    )
    is_there = torch.arange(steps_first.shape[0]).unsqueeze(1) < lengths
    return steps_first[is_there.to(x.device)], is_there.sum(1).narrow(0, 0, longest)


def pad_packed_sequence(
    x: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Pad packed sequences by plain ops: the sequences side by side, and their lengths."""
    places = torch.arange(batch_sizes[0].item(), device=x.device)
    sizes = batch_sizes.to(x.device).unsqueeze(1)
    is_there = places < sizes
    rows = (sizes.cumsum(0) - sizes + places).masked_fill(~is_there, 0)
    there = is_there.reshape(*is_there.shape, *(1 for _ in x.shape[1:]))
    padded = torch.where(
        there, x[rows], torch.as_tensor(padding_value, dtype=x.dtype, device=x.device)
    )
    steps = batch_sizes.shape[0]
    if total_length is not steps:
        missing = (total_length - steps, *padded.shape[1:])
        padded = torch.cat([padded, padded.new_full(missing, padding_value)])
    return padded.transpose(0, 1) if batch_first else padded, is_there.sum(0).to(batch_sizes.device)


# ---- one layer and its derivatives as an op ----

_library = torch.library.Library("thunder_fn", "FRAGMENT")
_library.define(
    "packed_layer(str cell, Tensor[] tensors, Tensor batch_sizes, int states, bool has_biases, bool"
    " bidirectional, int inputs, int order, str followed) -> Tensor[]"
)


def _layer(
    cell: str,
    tensors: list[Tensor],
    batch_sizes: Tensor,
    states: int,
    has_biases: bool,
    bidirectional: bool,
    inputs: int,
    order: int,
    followed: str,
) -> list[Tensor]:
    """A layer of `[x, *states, *weights]`; of an order above 0, the vjp of one order less, of its
    inputs and its cotangents.

    Gradients are for the inputs that are `followed` ("1", and "0" for others, whose are zeros):
    PyTorch rounds otherwise where it computes more.
    """

    def pulled(given: list[Tensor], level: int) -> list[Tensor]:
        if level == 0:
            return _run(cell, given, batch_sizes, states, has_biases, bidirectional)
        count = _count(states, inputs, level - 1)
        pairs = zip(pulled(given[:count], level - 1), given[count:], strict=True)
        values, cotangents = zip(
            *((value, one) for value, one in pairs if value.requires_grad), strict=True
        )
        wanted = [value for value in given[:count] if value.requires_grad]
        again = level < order
        found = iter(
            torch.autograd.grad(
                values, wanted, cotangents, create_graph=again, materialize_grads=True
            )
        )
        return [
            next(found) if value.requires_grad else torch.zeros_like(value)
            for value in given[:count]
        ]

    if order == 0:
        return pulled(tensors, 0)
    flags = map("1".__eq__, followed.ljust(len(tensors), "0"))
    with internals.autograd_as_usual(), torch.enable_grad():
        pairs = zip(tensors, flags, strict=True)
        found = pulled([value.detach().requires_grad_(flag) for value, flag in pairs], order)
    return [value.detach().contiguous() for value in found]


def _run(
    cell: str,
    given: list[Tensor],
    batch_sizes: Tensor,
    states: int,
    has_biases: bool,
    bidirectional: bool,
) -> list[Tensor]:
    """Run PyTorch's layer. cuDNN's is called as the op that copies the weights side by side:
    `torch.lstm` would warn that they are not.
    """
    x, weights = given[0], given[1 + states :]
    if not is_of_cudnn(x):
        state = given[1 : 1 + states] if cell == "lstm" else given[1]
        flags = has_biases, 1, 0.0, False, bidirectional
        return list(CELLS[cell](x, batch_sizes, state, weights, *flags))
    hidden = weights[0].shape[0] // GATES.get(cell, 1)
    projected = given[1].shape[2] if given[1].shape[2] != hidden else 0
    found = torch.ops.aten._cudnn_rnn.default(
        x,
        weights,
        len(weights) // (2 if bidirectional else 1),
        None,
        given[1],
        given[2] if states == 2 else None,
        MODES[cell],
        hidden,
        projected,
        1,
        False,
        0.0,
        any(value.requires_grad for value in given),
        bidirectional,
        batch_sizes.tolist(),
        None,
    )
    return list(found[: 1 + states])


def _count(states: int, inputs: int, order: int) -> int:
    """The number of tensors that the derivative of an order takes."""
    results = 1 + states
    for _ in range(order):
        inputs, results = inputs + results, inputs
    return inputs


def _fake(
    cell: str, tensors: list[Tensor], batch_sizes: Tensor, states: int, *flags: Any
) -> list[Tensor]:
    *_, inputs, order, _ = flags
    if order:
        return [
            value.new_empty(value.shape) for value in tensors[: _count(states, inputs, order - 1)]
        ]
    x, first, *_ = tensors
    return [
        x.new_empty(x.shape[0], first.shape[0] * first.shape[2]),
        *map(torch.empty_like, tensors[1 : 1 + states]),
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.cell, tensors, batch_sizes, *ctx.flags, ctx.order, before = inputs
    ctx.save_for_backward(batch_sizes, *tensors, *output)
    ctx.wanted = [value.requires_grad for value in tensors]
    pairs = zip(ctx.wanted, before.ljust(len(tensors), "0"), strict=True)
    ctx.followed = "".join("1" if flag or known == "1" else "0" for flag, known in pairs)


def _pull(ctx: Any, cotangents: list[Tensor | None]) -> tuple[Any, ...]:
    batch_sizes, *saved = ctx.saved_tensors
    count = len(ctx.wanted)
    tensors, results = saved[:count], saved[count:]
    pairs = zip(cotangents, results, strict=True)
    given = [torch.zeros_like(value) if one is None else one for one, value in pairs]
    found = LAYER(
        ctx.cell, [*tensors, *given], batch_sizes, *ctx.flags, ctx.order + 1, ctx.followed
    )
    gradients = [value if flag else None for value, flag in zip(found, ctx.wanted, strict=True)]
    return None, gradients, None, None, None, None, None, None, None


LAYER: Any = torch.ops.thunder_fn.packed_layer.default
_library.impl("packed_layer", _layer, "CompositeExplicitAutograd")
torch.library.register_fake("thunder_fn::packed_layer", _fake, lib=_library)
torch.library.register_autograd(
    "thunder_fn::packed_layer", _pull, setup_context=_save, lib=_library
)
