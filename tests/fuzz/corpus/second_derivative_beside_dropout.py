"""A second derivative, beside random numbers that it does not need, was made of a trace without their operands (98300519)."""

import torch
from torch import nn

PLAN = {"calls": [3, 3], "via": "jit", "options": {}, "backward": 2, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, n, dtype=torch.float64).requires_grad_(),)


def program(T):
    m1 = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.Dropout(0.3))

    def f(a0):
        v1 = torch.bmm(a0.sin()[None], a0[None])
        m1(a0)
        return v1

    return f, [m1]
