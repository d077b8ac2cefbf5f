"""A view of an argument that begins inside its storage and was written to showed memory before it."""

import torch

PLAN = {"calls": [3, 3, 4], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    return (torch.randn(3, 3, dtype=torch.float64).narrow(0, 1, 1),)


def program(T):
    def f(a0):
        a0.erfinv_()
        return a0.mT, a0[:, 1:]

    return f, []
