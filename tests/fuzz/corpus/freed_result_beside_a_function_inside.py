"""A result that a function inside is given and does not read was freed with it, and its gradient by name was None (97064203)."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": 2, "grad_mode": ""}


def inputs(n):
    a0 = torch.randn(n, dtype=torch.float64).requires_grad_()
    return (a0,)


def program(T):
    def f(a0):
        v1 = a0.sigmoid()
        w = v1.detach().clone().requires_grad_()
        v2 = T.grad(lambda x, y: y.square().sum(), (0, 1))(v1, w)[1]
        (v2.sum() + w.sum()).backward()
        return [v1, w.grad]

    return f, []
