"""A program for a result that gets random numbers served a leaf, which eager PyTorch refuses (97063167)."""

import torch

PLAN = {"calls": [4], "via": "plain", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.ones(3, dtype=torch.float64).requires_grad_(),)


def program(T):
    def draws(x):
        x.random_(0, 3)
        return x * 2

    draw, seen = T.jit(draws), []

    def f(a0):
        for value in (a0 * 1, a0):
            try:
                draw(value)
                seen.append(1)
            except RuntimeError:
                seen.append(0)
        torch.manual_seed(0)
        return list(seen), a0 * 2

    return f, []
