"""A function inside read its argument as it was before a write by another name (98020677, 98106808)."""

import torch

EXPECTED = "refused"
PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, 3, dtype=torch.float64),)


def program(T):

    def f(a0):

        def f1(x1):
            a0.detach()[0].zero_()
            return x1 * 1

        return T.checkpoint(f1)(a0)

    return (f, [])
