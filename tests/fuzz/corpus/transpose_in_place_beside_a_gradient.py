"""A transpose in place of an argument, beside a gradient: the new value is a view of the old, and was not copied."""

import torch

PLAN = {"calls": [3, 3], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, 3).requires_grad_(), torch.randn(3, 3))


def program(T):
    def f(a0, a1):
        a1.swapaxes_(0, -1)
        return a0 + a0

    return f, []
