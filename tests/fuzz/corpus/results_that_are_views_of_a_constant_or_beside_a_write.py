"""Views of one another in a constant, or beside a write to an argument, had memory of their own (98103516, 98030306)."""

import torch

PLAN = {"calls": [3, 3], "via": "jit", "options": {}, "backward": 2, "grad_mode": "", "poke": True}


def inputs(n):
    return (torch.randn(3, dtype=torch.float64),)


def program(T):

    def f(a0):
        v1 = torch.tensor([2.0, 3], dtype=torch.float64)
        v2 = v1[None]
        v3 = torch.remainder(v1, v1)
        v4 = torch.diag(a0)
        v5 = v4.split([1, 2])
        a0[v4[0] > 0] = 2
        return [v1, v2, v1.view(2), v2[0, 1:], v3, v4, v5]

    return f, []
