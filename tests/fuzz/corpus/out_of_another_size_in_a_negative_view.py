"""A write to a negative view of another size was broadcast into it; eager PyTorch resizes the view."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}
EXPECTED = "refused"


def inputs(n):
    return (torch.randn(1, 3),)


def program(T):
    def f(a0):
        v4 = torch._neg_view(a0)
        torch.sum(a0 * 2, 0, out=v4)
        return v4

    return f, []
