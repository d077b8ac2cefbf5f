"""A negative view, or `as_strided`, of a result that requires grad had memory of its own (seed 98401691)."""

import torch

PLAN = {"calls": [4], "via": "jit", "options": {"dynamic": False}, "backward": True, "grad_mode": "", "poke": True}


def inputs(n):
    return (torch.randn(3, n, dtype=torch.float64).requires_grad_(),)


def program(T):
    def f(a0):
        v1 = a0.sin()
        return [v1, torch._neg_view(v1), v1.as_strided((2, 2), (1, 1)), torch._neg_view(v1.detach())]

    return f, []
