"""A hook on a leaf that was written to before was lost: refused (97040587)."""

import torch

EXPECTED = "refused"
PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n).requires_grad_(),)


def program(T):
    def f(a0):
        torch.nn.init.zeros_(a0)
        a0.register_hook(lambda g: g * 2)
        return a0

    return f, []
