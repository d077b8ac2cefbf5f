"""In a jitted vmap, a result in the memory of an example that got one value for all had a dim too many (97031738)."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, 3), torch.randn(n, 3), torch.randn(3))


def program(T):
    def f(a0, a1, a2):
        v1 = T.vmap(lambda x: x.copy_(a2))(a0)
        v2 = T.vmap(lambda x: x.copy_(a2)[1:])(a1)
        return [v1, v2]

    return f, []
