"""A row by a constant tensor had memory of its own, and so did `narrow` from one (98404852, 98405002, 98405518)."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": True, "grad_mode": "", "poke": True}


def inputs(n):
    return torch.randn(3, n, dtype=torch.float64).requires_grad_(), torch.randn(n)


def program(T):
    def f(a0, a1):
        return [
            a0[torch.tensor(1)],
            a0[torch.tensor(-1), None],
            torch.narrow(a1, 0, torch.tensor(0), 1),
            a1[torch.tensor(0),],
        ]

    return f, []
