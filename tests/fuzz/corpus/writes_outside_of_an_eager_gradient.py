"""A tensor that a transformed function writes to was read by the backward after the write (97070602)."""

import torch

PLAN = {"calls": [3], "via": "plain", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return torch.rand(n, dtype=torch.float64).requires_grad_(), torch.rand(n, dtype=torch.float64).requires_grad_()


def program(T):
    def f(a0, a1):
        v1, v2, v3 = a0 * 1.5 - 0.25, a0 * 2, a0 + 1

        def g(x):
            torch.nn.functional.leaky_relu_(v1)
            v2.sin_()
            v3.mul_(a1)
            return (x * x.sum()).sum()

        return T.grad(g)(a0), v1 + v2 * v3

    return f, []
