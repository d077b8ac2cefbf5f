"""A size found in data beside another one: refused by name, no longer with PyTorch's words."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}
EXPECTED = "refused"


def inputs(n):
    return (torch.randn(2, n, dtype=torch.float64),)


def program(T):
    c1 = torch.randn((), dtype=torch.float64)

    def f(a0):
        return torch.addcdiv(c1.unique(), c1, a0)

    return f, [c1]
