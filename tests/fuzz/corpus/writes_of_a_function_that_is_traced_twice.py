"""The function is traced again if no symbol can stand for a number; its writes were made twice."""

import torch

PLAN = {"calls": [4], "via": "jit", "options": {"cache": "symbolic values"}, "backward": False, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, 3),)


def program(T):
    def f(a0):
        a0.add_(3.0)
        return a0, a0.nbytes

    return f, []
