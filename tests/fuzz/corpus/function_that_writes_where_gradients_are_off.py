"""A tensor that an autograd function changes and returns has no gradient where gradients are off."""

import torch
import torch.utils.checkpoint
from torch import nn

PLAN = {"calls": [4], "via": "jit", "options": {"dynamic": False}, "backward": True, "grad_mode": ""}


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        pass


class Tied(nn.Module):
    pass


def inputs(n):
    a0 = torch.randn(3, dtype=torch.float64).unsqueeze(-1).expand(3, 2).requires_grad_()
    return (a0,)


def program(T):
    m1 = Tied()

    def f(a0):
        v5 = a0
        v6 = v5 + v5
        v8 = v6
        with torch.no_grad():
            return Dirty.apply(v8)

    return (f, [m1])
