"""A write that a differentiated function does to a tensor from outside lost its history."""

import torch
from torch.nn import functional as F

PLAN = {"calls": [5, 6], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, 3, dtype=torch.float64).requires_grad_(),)


def program(T):
    def f(a0):
        v2 = a0 * 2

        def f6(x7, x8):
            F.leaky_relu_(v2)
            return x8.square().sum()

        T.grad(f6, argnums=1)(a0, a0)

        def f65(x66):
            v67 = v2 - x66

            def f69(x70):
                v67.clamp_(-1, 1)
                return x70.sum()

            T.value_and_grad(f69)(v2)
            return v67.sum()

        return v2, T.grad(f65)(a0.sum())

    return f, []
