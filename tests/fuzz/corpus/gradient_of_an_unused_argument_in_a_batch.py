"""The gradient of an argument that nobody uses was an expanded zero, which refuses writes (97001962, 97005583)."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": "", "poke": True}


def inputs(n):
    return (torch.randn(n), torch.randn(n, 2))


def program(T):
    def f(a0, a1):
        v1 = T.vmap(T.grad(lambda x: a0.sum()))(a0)
        v2 = T.vmap(T.value_and_grad(lambda x: a0.sum() * 2))(a1)[1]
        v3 = T.vmap(lambda u: T.vjp(lambda x: a0 * 2, u)[1](a0)[0])(a1)
        return [v1, v2, v3]

    return f, []
