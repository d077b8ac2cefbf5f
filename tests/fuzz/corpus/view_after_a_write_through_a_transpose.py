"""A flat view of a tensor that was written to through its transpose could not be made again: "Cannot view a tensor"."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, 3),)


def program(T):
    def f(a0):
        v1 = a0.ravel()
        a0.T.tril_()
        return v1, a0.view(-1)

    return f, []
