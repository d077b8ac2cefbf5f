"""A jitted function inside read its argument as it was before it wrote to that tensor, which it closed over too (98010591)."""

import torch

PLAN = {"calls": [4], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(2, n, dtype=torch.float64), torch.randn(2, n, dtype=torch.float64).requires_grad_())


def program(T):

    def f(a0, a1):
        v1 = a0.detach().clone() * a1

        def f1(x1, x2):
            v1.detach()[0].zero_()
            torch.where(x2 > 0, x2 * -2, x2, out=a0)
            return x1 + x2

        return [T.jit(f1)(v1, a0), T.jit(f1)(v1, a0), v1, a0 * 1]

    return (f, [])
