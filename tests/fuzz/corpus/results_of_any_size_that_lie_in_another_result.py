"""A part of a result whose sizes are symbols, taken by `as_strided` or with a bit, had memory of its own (99600819)."""

import torch

PLAN = {
    "calls": [5, 6, 9],
    "via": "jit",
    "options": {"cache": "symbolic values"},
    "backward": False,
    "grad_mode": "",
    "poke": True,
}


def inputs(n):
    return (torch.randn(n, dtype=torch.float64), torch.randn(n, dtype=torch.complex128))


def program(T):
    def f(a0, a1):
        v1, v2 = a0.round(), a1 * 2
        return [v1.as_strided((2,), (1,)), v1, v1.as_strided((a0.shape[0] - 1,), (1,), 1), v2.conj()[1:], v2]

    return f, []
