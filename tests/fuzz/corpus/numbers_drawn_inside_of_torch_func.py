"""torch.func's gradient of a jitted function inside drew a mask of dropout of its own."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, dtype=torch.float64),)


def program(T):
    def f(a0):
        g = T.jit(lambda u: torch.nn.functional.dropout(u * u, 0.5))
        v1 = torch.func.grad(lambda u: g(u).sum())(a0)
        v2 = torch.func.jvp(T.checkpoint(lambda u: u * torch.rand_like(u)), (a0,), (a0,))
        return [v1, v2]

    return f, []
