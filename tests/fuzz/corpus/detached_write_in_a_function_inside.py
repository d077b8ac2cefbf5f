"""A detached write to a view of a leaf, in a jitted function inside another, raised (97020547)."""

import torch

PLAN = {"calls": [4], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    a0 = torch.randn(n, 3, dtype=torch.float64).requires_grad_()
    return (a0[:2],)


def program(T):
    def f(a1):
        def f1(x):
            x.detach().view(-1)[0] = 0.25
            return x * 1

        return T.jit(f1)(a1)

    return f, []
