"""A write of a differentiated function to its argument is seen; the value before it is differentiated."""

import torch

PLAN = {"calls": [4], "via": "jit", "options": {"dynamic": False}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, dtype=torch.float64), torch.randn(n, dtype=torch.float64).requires_grad_())


def program(T):
    def f(a0, a1):
        def f3(x4):
            x4.round_()
            return x4.sum()

        v2 = T.value_and_grad(f3)(a0)
        v3 = a1 * 1

        def f5(x6):
            return x6.mul_(2).sin()

        v4 = T.vjp(f5, v3)[1](torch.ones_like(v3))[0]
        return v2, v3, v4

    return f, []
