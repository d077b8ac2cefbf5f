"""A Function's view of an argument that was written to had memory of its own, where gradients are off (98108666)."""

import torch

PLAN = {"calls": [5], "via": "jit", "options": {}, "backward": False, "grad_mode": "no_grad", "poke": True}


class Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x.reshape(-1), x.detach() * 2)

    @staticmethod
    def backward(ctx, g, h):
        return g.reshape(2, 3) + 2 * h


def inputs(n):
    return (torch.randn(2, 3, dtype=torch.float64).requires_grad_(),)


def program(T):
    def f(a0):
        a0.sub_(a0, alpha=2)
        v1 = Flat.apply(a0)[0].detach()
        a0.mul_(3)
        v1.add_(1)
        return [v1, a0]

    return f, []
