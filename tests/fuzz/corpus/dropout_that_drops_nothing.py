"""At symbolic sizes a dropout that drops nothing was a copy; it is its argument, and sees what is written to that."""

import torch
from torch.nn import functional as F

PLAN = {"calls": [3, 4, 5], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n),)


def program(T):
    def f(a0):
        v1 = F.dropout(a0, training=False)
        v2 = F.dropout(a0, 0.0, training=True)
        a0.mul_(2)
        v1.add_(1)
        return v1, v2, a0 * 1

    return f, []
