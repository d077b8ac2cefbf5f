"""A leaf that a function makes of an argument which it writes to required no gradient, and was no Parameter (99601215)."""

import torch
from torch import nn

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": True, "grad_mode": "", "poke": True}


def inputs(n):
    return (torch.randn(n, 3, dtype=torch.float64), torch.randn(n, dtype=torch.float64))


def program(T):
    def f(a0, a1):
        a0.add_(1)
        a1.mul_(2)
        v1 = nn.Parameter(a0.detach())
        return [v1, v1, a1[1:].requires_grad_(), nn.Parameter(a1)]

    return f, []
