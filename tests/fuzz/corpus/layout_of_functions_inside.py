"""Results of autograd functions, checkpoints and jitted functions inside had no strides (97031361, 97040298)."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2


def inputs(n):
    a0 = torch.randn(3, n, dtype=torch.float64).t()
    return (a0,)


def program(T):
    def f(a0):
        found = [Same.apply(a0), T.checkpoint(lambda x: x * 2)(a0), T.jit(lambda x: x + 1)(a0)]
        asked = [(v.stride(), v.is_contiguous(), v.mT.is_contiguous()) for v in found]
        return [v.as_strided((2, 2), (2, 1)) for v in found], asked

    return f, []
