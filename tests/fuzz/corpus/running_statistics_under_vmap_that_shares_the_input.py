"""Running statistics that a batch of weights has written had a history, and the next call refused them (99976604)."""

import torch
from torch import nn

PLAN = {"calls": [3, 4], "via": "plain", "options": {}, "backward": 2, "grad_mode": "", "poke": True}


def inputs(n):
    return (torch.randn(2, 3, dtype=torch.float64).requires_grad_(),)


def program(T):
    m1 = nn.BatchNorm1d(3, dtype=torch.float64)

    def f(a0):
        scaled = lambda k: torch.func.functional_call(m1, {n: v * k for n, v in m1.named_parameters()}, (a0,))
        return T.vmap(scaled)(torch.arange(1.0, 3, dtype=torch.float64))

    return f, []
