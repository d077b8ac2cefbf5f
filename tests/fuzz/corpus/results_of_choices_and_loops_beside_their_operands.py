"""Results of choices and loops in a jitted function lay in memory of operands that it returns too (98106373)."""

import torch

PLAN = {"calls": [3, 3], "via": "jit", "options": {}, "backward": 1, "grad_mode": "", "poke": True}


def inputs(n):
    return (torch.randn(3, 3, dtype=torch.float64).requires_grad_(), torch.randn(3, dtype=torch.float64))


def program(T):

    def f(a0, a1):
        v1 = a0 * 1
        v2 = T.scan(lambda c, u: (u, c * 2), v1[0], v1, reverse=True)[0]
        v3 = T.cond(v1.sum() > -1e9, lambda u: u[1], lambda u: u[2] * 2, (v1,))
        v4 = T.switch((a1 > 0).sum() % 2, [lambda u: (u, u * 2), lambda u: (u * 2, u)], (a1,))
        v5 = T.fori_loop(0, 2, lambda k, s: (s[0] * 2, s[0], s[0]), (v1, v1, v1))
        v6 = T.while_loop(lambda u: u.sum() < -1e9, lambda u: (u * 2,), (a1,))
        return [v1, v2, v3, v3[1:], v4, v5, v6]

    return f, []
