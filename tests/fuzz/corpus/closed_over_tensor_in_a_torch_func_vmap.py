"""A write to a closed-over tensor under `torch.func.vmap` was done while tracing, and again; a view of one was an error."""

import torch

PLAN = {"calls": [3, 3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n),)


def program(T):
    c1 = torch.randn(3)

    def f(a0):
        v1 = torch.func.vmap(lambda x: x.mean())(c1)
        v2 = torch.func.vmap(lambda x: x.mul_(2))(c1)
        v3 = torch.func.vmap(lambda x: x.unsqueeze(0).add_(1))(c1)
        v4 = torch.func.grad(lambda x: x.mean())(c1)
        return v1, v2, v3 + a0, v4

    return f, [c1]
