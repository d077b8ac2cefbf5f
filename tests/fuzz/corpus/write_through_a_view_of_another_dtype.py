"""A view of another dtype has no history in eager PyTorch: a write through it lost the gradient, or the write."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, dtype=torch.float64).requires_grad_(), torch.randn(n, 2, dtype=torch.complex128))


def program(T):
    def f(a0, a1):
        v1 = a0 * 2
        v1.view(torch.int64).add_(1)
        v2 = a0 * 3
        v2[1:].view(torch.int64)[0].zero_()
        v3 = v2.detach().view(dtype=torch.float32)
        v2.mul_(0.5)
        v3[0] = 1.5
        v4 = a1 + a0[0]
        v5 = v4.view(torch.float64)
        v4[0] *= 2
        v5[-1] = 4
        a1.view(torch.int64).zero_()
        return [v1, v2 * 3, v3, v4.real, v5 * 2]

    return f, []
