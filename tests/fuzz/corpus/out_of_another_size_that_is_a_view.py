"""`out=` that is a view, of another size: the error was PyTorch's, and named a shape that nobody had written."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}
EXPECTED = "refused"


def inputs(n):
    return (torch.randn(n, 3, 2),)


def program(T):
    def f(a0):
        v2 = (a0 * 1).view(1, 9, 2).view(1, 3, 3, 2)
        torch.cat([a0, a0], out=v2)
        return v2 * 1

    return f, []
