"""`copy_` of a Python number under vmap was an AttributeError (99611221)."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, 3, dtype=torch.float64),)


def program(T):
    c1 = torch.randn(3, dtype=torch.float64)

    def f(a0):
        v1 = c1[torch.tensor([0, 1, 1])]
        v2 = T.vmap(lambda u: u.copy_(3), 0, -1)(v1)
        return [v2, T.vmap(lambda u: u.clone()[1:].copy_(True) * 2)(a0)]

    return f, [c1]
