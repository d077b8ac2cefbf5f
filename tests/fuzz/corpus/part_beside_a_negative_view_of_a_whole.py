"""A part of a result beside its negative view was taken of that, with the other sign."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, dtype=torch.float64),)


def program(T):
    def f(a0):
        v1 = a0.sin()
        return [torch._neg_view(v1), v1[0]]

    return f, []
