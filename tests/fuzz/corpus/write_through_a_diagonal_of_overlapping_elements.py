"""A write through a view of an argument whose elements overlap changed some of them only."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}
EXPECTED = "raised"


def inputs(n):
    return (torch.randn(3, 3, dtype=torch.float64).as_strided((2, 3), (1, 1)),)


def program(T):
    def f(a0):
        a0.diagonal().fill_(3.0)
        return a0

    return f, []
