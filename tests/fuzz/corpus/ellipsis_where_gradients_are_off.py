"""`x[...]`, taken under no_grad, was x itself: it had a gradient, and `x[...].requires_grad_()` would have changed x."""

import torch

PLAN = {"calls": [3, 3], "via": "jit", "options": {}, "backward": True, "grad_mode": "", "poke": True}


def inputs(n):
    return (torch.randn(n, dtype=torch.float64).requires_grad_(), torch.randn(n, 2, dtype=torch.float64))


def program(T):

    def f(a0, a1):
        with torch.no_grad():
            v1 = a0[...]
        v2 = a1[...]
        return [v1, torch.ops.aten.alias(a0), v2, v1 is a0, v2 is a1]

    return (f, [])
