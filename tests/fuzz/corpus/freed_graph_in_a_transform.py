"""A backward inside of `vjp` made the gradient of the argument itself zero (97041862)."""

import torch

PLAN = {"calls": [3], "via": "plain", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    a0 = torch.randn(n, dtype=torch.float64)
    return (a0,)


def program(T):
    def f(a0):
        def g(x):
            w = a0.detach().clone().requires_grad_()
            (x.mean() + w.sum()).backward()
            return x

        return T.vjp(g, a0)[1](torch.ones_like(a0))[0]

    return f, []
