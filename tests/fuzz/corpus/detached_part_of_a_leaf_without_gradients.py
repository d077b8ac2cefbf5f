"""`a[1:].detach()` of a leaf was a view that requires a gradient, where gradients are off outside of the call."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": True, "grad_mode": "no_grad", "poke": True}


def inputs(n):
    return (torch.randn(3, n, dtype=torch.float64).requires_grad_(),)


def program(T):
    def f(a0):
        v1 = a0.t().detach()
        return [a0[1:].detach(), v1, v1[0], a0.detach()[:, 1], a0[0].data, a0.view(-1)[::2].reshape(-1).detach()]

    return f, []
