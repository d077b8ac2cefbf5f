"""Results of functions inside belonged to no transform of torch.func, which refused writes to them (97062937)."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, dtype=torch.float64).requires_grad_(),)


def program(T):
    def f(a0):
        def g(x):
            v1 = T.jit(lambda z: z * 2)(a0)
            v1.mul_(3)
            v2 = T.checkpoint(lambda z: z.sin())(a0)
            v2[0] = 1
            return (x * v1 * v2).square().sum()

        return torch.func.grad(g)(a0 * 1), torch.func.vmap(torch.func.grad(g))(torch.stack([a0, a0]))

    return f, []
