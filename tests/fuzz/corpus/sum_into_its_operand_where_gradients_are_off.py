"""A view of a written argument where gradients are off was no part of its memory, so a sum into it was taken (98402963)."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": 2, "grad_mode": "no_grad"}
EXPECTED = "refused"


def inputs(n):
    return (torch.randn(3, dtype=torch.float64),)


def program(T):
    def f(a0):
        a0 += 1.25
        torch.sum(a0, -1, out=a0[0])
        return a0

    return f, []
