"""A view of a leaf that is a view of another tensor requires no gradient, where gradients are off (99600351)."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": True, "grad_mode": "no_grad", "poke": True}


def inputs(n):
    return (torch.randn(2, n, dtype=torch.float64)[::2].requires_grad_(),)


def program(T):
    def f(a0):
        return [a0.reshape(-1), a0.t(), a0[0]]

    return f, []
