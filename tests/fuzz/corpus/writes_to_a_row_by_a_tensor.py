"""`x[i]` with a scalar tensor is a view in eager PyTorch: writes to it were lost."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, 3, dtype=torch.float64).requires_grad_(), torch.tensor(1))


def program(T):
    def f(a0, a1):
        v1 = a0 * 2
        v1[a1].mul_(3)
        v2 = v1[v1.sum(1).argmax()]
        v1[a1] += 1
        v2.add_(v1[0])
        v1.narrow(0, a1, 1).sin_()
        return [v1, v2 * 1]

    return f, []
