"""A second write through `expand_as` where gradients are off, of an argument that was written to before, was lost."""

import torch

PLAN = {"calls": [3, 3], "via": "jit", "options": {}, "backward": False, "grad_mode": "no_grad", "poke": True}


def inputs(n):
    return (torch.randn(n),)


def program(T):
    def f(a0):
        v2 = a0.expand_as(a0)
        a0.clamp_(1)
        v2.eq_(a0)
        return v2

    return f, []
