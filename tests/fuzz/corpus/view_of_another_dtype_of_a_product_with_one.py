"""A product with one, whose copy a view of another dtype needs, was dropped (98107512)."""

import torch
import torch.utils.checkpoint

PLAN = {"calls": [3], "via": "jit", "options": {"cache": "symbolic values"}, "backward": True, "grad_mode": ""}


def inputs(n):
    a0 = torch.randn(3, 3, dtype=torch.float64)[..., ::2].requires_grad_()
    a1 = 4
    a2 = True
    return (a0, a1, a2)


def program(T):
    c1 = torch.randn(())

    def f(a0, a1, a2):
        v5 = a0.mul(1)
        v5.view(torch.float32)[..., 0] = 0
        return [v5, a0]

    return (f, [c1])
