"""A transpose in place of an argument wrote to its memory, which another argument sees; eager changes its strides."""

import torch

PLAN = {"calls": [3, 3, 3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    a0 = torch.randn(n, 3, dtype=torch.float64)
    return (a0, a0[:2])


def program(T):
    def f(a0, a1):
        a0.t_()
        return a0.cumsum(0)

    return f, []
