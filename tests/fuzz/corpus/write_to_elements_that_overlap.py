"""Eager PyTorch writes to one element several times; the trace wrote once, and is refused now."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}
EXPECTED = "raised"


def inputs(n):
    return (torch.randn(n, 3).as_strided((2, 3), (1, 1)),)


def program(T):
    def f(a0):
        a0.exp_()
        return a0 * 1

    return f, []
