"""The CTC loss in plain ops: PyTorch has one derivative of its own, by its kernel.

Source: A. Graves et al., "Connectionist temporal classification", 2006, section 4.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thunder_fn.derived.quirks.backwards import pulled

_NEVER = -1e30
"""The log of a probability of zero, at which logsumexp has a derivative."""


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: list[int],
    target_lengths: list[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    """The negative log likelihood of each target, and the logs of the forward variables.

    PyTorch's derivative takes `log_probs` for normalised, as `log_softmax` makes them: it has
    `exp(log_probs)` in it.

    Args:
        log_probs: `[T, N, C]`.
        targets: `[N, S]`, padded, or the labels of all targets one after another.
    """
    steps, batch, _ = log_probs.shape
    device, longest = log_probs.device, max(target_lengths, default=0)
    inputs = torch.tensor(input_lengths, device=device)
    lengths = torch.tensor(target_lengths, device=device)
    states = _states(targets, target_lengths, longest, blank)
    emitted = log_probs.gather(2, states.expand(steps, batch, 2 * longest + 1))
    place = torch.arange(2 * longest + 1, device=device)
    never = torch.full((), _NEVER, dtype=log_probs.dtype, device=device)
    skips = (states != blank) & (place >= 2) & (states != states.roll(2, 1))
    begins = (place == 0) | ((place == 1) & (lengths.unsqueeze(1) > 0))
    alpha = torch.where(begins, emitted[0], never)
    alphas = [alpha]
    for step in range(1, steps):
        before = torch.where(place >= 1, alpha.roll(1, 1), never)
        skipped = torch.where(skips, alpha.roll(2, 1), never)
        ways = torch.stack([alpha, before, skipped]).logsumexp(0)
        alpha = torch.where(
            (step < inputs).unsqueeze(1), (ways + emitted[step]).clamp_min(_NEVER), alpha
        )
        alphas.append(alpha)
    ends = (place == 2 * lengths.unsqueeze(1)) | (place == 2 * lengths.unsqueeze(1) - 1)
    loss = -torch.where(ends, alpha, never).logsumexp(1)
    counted = (torch.arange(steps, device=device).unsqueeze(1) < inputs).unsqueeze(2)
    probs = torch.where(counted, log_probs, never).exp()
    loss = loss + (probs - probs.detach()).sum((0, 2))
    infinite = torch.full((), float("inf"), dtype=log_probs.dtype, device=device)
    loss = torch.where(loss > -_NEVER / 2, infinite, loss)
    history = torch.stack(alphas, 1)
    return loss, torch.where(history <= _NEVER / 2, -infinite, history)


def _states(targets: Tensor, target_lengths: list[int], longest: int, blank: int) -> Tensor:
    """The labels of each target, with a blank before, between and behind them."""
    last = torch.full((len(target_lengths), 1), blank, dtype=targets.dtype, device=targets.device)
    if not longest:
        return last
    rows: list[Tensor] = []
    start = 0
    for row, length in enumerate(target_lengths):
        labels = targets[start : start + length] if targets.dim() == 1 else targets[row, :length]
        rows.append(torch.nn.functional.pad(labels, (0, longest - length), value=blank))
        start += length
    labels = torch.stack(rows)
    return torch.cat([torch.stack([torch.full_like(labels, blank), labels], 2).flatten(1), last], 1)


def ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: list[int],
    target_lengths: list[int],
    neg_log_likelihood: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> Tensor:
    """The gradient of the loss in `log_probs`, which can be differentiated again."""
    if zero_infinity:
        grad = torch.where(neg_log_likelihood == float("inf"), 0.0, grad)
    return pulled(
        lambda x: ctc_loss(x, targets, input_lengths, target_lengths, blank)[0], log_probs, grad
    )
