"""A write through an `unfold` that leaves elements out made zeros of them."""

import torch

PLAN = {"calls": [7, 8], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n),)


def program(T):
    def f(a0):
        a0.unfold(0, 2, 2).mul_(2)
        a0.unfold(0, 2, 3).add_(1)
        return a0 * 1

    return f, []
