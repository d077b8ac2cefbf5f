"""A function in a batch wrote to an example and read the batch by its own name: it read the old values (97060080)."""

import torch

EXPECTED = "refused"
PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    a0 = torch.randn(2, n, dtype=torch.float64)
    return (a0,)


def program(T):
    def f(a0):
        def g(x):
            x.detach().zero_()
            return a0[0] * 1

        return T.vmap(g)(a0)

    return f, []
