"""A sum into its own operand: eager PyTorch clears it first, and gives zero."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}
EXPECTED = "refused"


def inputs(n):
    return (torch.randn((), dtype=torch.float64),)


def program(T):
    def f(a0):
        v1 = a0 * 1
        torch.sum(v1, 0, out=v1)
        return v1

    return f, []
