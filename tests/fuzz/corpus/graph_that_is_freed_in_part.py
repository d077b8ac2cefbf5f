"""A backward inside frees what it read, and no leaf: results beside it kept no gradient (97040592, 97041899)."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    a0 = torch.randn(n, 3, dtype=torch.complex128).imag.requires_grad_()
    a1 = torch.randn(n, 1, dtype=torch.float64).requires_grad_()
    return (
        a0,
        a1,
    )


def program(T):
    def f(a0, a1):
        v1 = a1 * a1.sin()
        v2 = a0 * 3 + v1
        w = a0.detach().clone().requires_grad_()
        ((a1 + 1).norm() + a0.square().sum() + (w * 2).sum()).backward()
        return [v2, v1, a0 + 1, w.grad]

    return f, []
