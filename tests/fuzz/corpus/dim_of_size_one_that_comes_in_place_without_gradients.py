"""A shape was changed in place where gradients are off, and the result had no gradient (99803229)."""

import torch
import torch.utils.checkpoint

PLAN = {"calls": [5], "via": "jit", "options": {"cache": "symbolic values"}, "backward": True, "grad_mode": ""}


def inputs(n):
    a0 = 1
    a1 = torch.randn(3, 3, dtype=torch.float64).requires_grad_()
    return (a0, a1)


def program(T):
    c1 = torch.randn(3)

    def f(a0, a1):
        v2 = a1
        v3 = a1.diff(dim=-1)
        with torch.no_grad():
            v3.unsqueeze_(0)
        v5 = a0
        return [v3, v2, v5]

    return (f, [c1])
