"""`set_` of a closed-over tensor was an AssertionError of PyTorch's fake tensors."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}
EXPECTED = "refused"


def inputs(n):
    return (torch.randn(n),)


def program(T):
    c1 = torch.randn(())

    def f(a0):
        c1.set_(c1)
        return a0 * c1

    return f, [c1]
