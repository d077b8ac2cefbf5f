"""`x.data = y` wrote to the memory of x, which others outside share (98108121)."""

import torch

PLAN = {"calls": [3, 3], "via": "jit", "options": {}, "backward": True, "grad_mode": "", "poke": True}


def inputs(n):
    a0 = torch.randn(n, n, dtype=torch.float64)
    a1 = a0[0]
    a2 = torch.randn(n, n, dtype=torch.float64)
    return (a0, a1, a2, torch.randn(n, n, dtype=torch.float64).requires_grad_())


def program(T):
    c1 = torch.randn(3, dtype=torch.float64).requires_grad_()
    c2 = c1.detach()

    def f(a0, a1, a2, a3):
        a0.data = a0.data * 2
        a3.data = a2
        c1.data = c1.data + 1
        return [a0, a3 * c1, a1 * 1]

    return (f, [c1, c2])
