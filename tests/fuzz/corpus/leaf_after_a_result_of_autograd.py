"""A program for a result that gets random numbers served a leaf, and the other way around (97063167)."""

import torch

PLAN = {"calls": [3, 4, 5, 6], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    a0 = torch.randn(3, dtype=torch.float64).requires_grad_()
    a1 = torch.randn(3, dtype=torch.float64).requires_grad_()
    return (a0 if n % 2 else a0 * 1), a1


def program(T):
    def f(a0, a1):
        with torch.no_grad():
            a0.normal_()
        return a0.sin() * a1

    return f, []
