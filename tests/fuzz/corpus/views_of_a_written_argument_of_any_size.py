"""With symbolic sizes a view of a written argument was a tensor of its own, or its backward raised."""

import torch

PLAN = {
    "calls": [3, 4, 5],
    "via": "jit",
    "options": {"cache": "symbolic values"},
    "backward": True,
    "grad_mode": "",
    "poke": True,
}


def inputs(n):
    a0 = torch.randn(n, 3, dtype=torch.float64).requires_grad_() * 1
    return (a0, a0.squeeze())


def program(T):
    def f(a0, a1):
        a1.exp_()
        return a1.real

    return f, []
