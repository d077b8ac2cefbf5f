"""A tensor that `resize_` has made smaller was not resized by `out=`: an error of PyTorch's internals; refused by name."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, 3, dtype=torch.float64),)


def program(T):
    def f(a0):
        a0.resize_(2, 2)
        torch.stack([torch.ones(3, dtype=torch.float64)], out=a0)

    return f, []
