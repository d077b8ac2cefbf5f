"""A result that is another one with a negative or conjugate bit had memory of its own (97003645, 97032184)."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": False, "grad_mode": "", "poke": True}


def inputs(n):
    return (torch.randn(n, 3), torch.randn(n, dtype=torch.complex128))


def program(T):
    def f(a0, a1):
        v1 = a0 * 2
        v2 = torch._neg_view(v1)
        v3 = a1 + 1
        return {"u": [v2, v1], "w": (v3.conj(), v3, v3.real)}

    return f, []
