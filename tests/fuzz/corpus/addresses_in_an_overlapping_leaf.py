"""A view by address of a leaf whose elements overlap was a copy (99821533)."""

import torch

PLAN = {"calls": [4], "via": "jit", "options": {"numerics": "bitwise"}, "backward": True, "grad_mode": "", "poke": True}


def inputs(n):
    a0 = torch.randn(3, 3).as_strided((3, 3), (1, 2)).requires_grad_()
    a1 = 1
    return (a0, a1)


def program(T):

    def f(a0, a1):
        return a0.as_strided((2,), (2,))

    return (f, [])
