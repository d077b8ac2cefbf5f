"""Second derivatives through a jitted function differentiated values computed under `no_grad` (97005215)."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": 2, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, dtype=torch.float64).requires_grad_(),)


def program(T):
    def f(a0):
        with torch.no_grad():
            v1 = a0.sin()
            v2 = a0.min()
        return [v1 * a0, v2 * a0]

    return f, []
