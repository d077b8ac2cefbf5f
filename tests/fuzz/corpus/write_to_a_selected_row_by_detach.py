"""A write by `detach()` to a row that a scalar tensor selects was one to a view of a leaf (97063224)."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return torch.randn(3, n, dtype=torch.float64).requires_grad_(), torch.randn(n, dtype=torch.float64).requires_grad_()


def program(T):
    def f(a0, a1):
        v1 = a0[torch.tensor(-1), None]
        v1.detach().view(-1)[0] = 0.0
        v2 = a1 * 2
        v3 = v2[torch.tensor(1)]
        v3.mul_(a1[0])
        v3.detach().mul_(3)
        return a0.sin(), v2.square() * 1

    return f, []
