"""`v.set_(a)` under no_grad gave v the history of a, and with it a gradient (99600842)."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": True, "grad_mode": "no_grad"}


def inputs(n):
    return (torch.randn(3, n, dtype=torch.float64).requires_grad_(),)


def program(T):
    def f(a0):
        v1 = a0.sum(1)
        v1.set_(a0)
        return [a0, v1]

    return f, []
