"""Results one of which has a bit, or that overlap without one holding the other, had memories of their own."""

import torch

PLAN = {"calls": [4, 5], "via": "jit", "options": {}, "backward": True, "grad_mode": "", "poke": True}


def inputs(n):
    a0 = torch.randn(n, 3, dtype=torch.float64).requires_grad_()
    return (a0, torch.randn(n, dtype=torch.complex128))


def program(T):
    def f(a0, a1):
        v1 = (a1 * 2).conj()
        v2 = a0 * 3
        v3 = torch._neg_view(v2)
        v4, v5 = T.checkpoint(lambda u: (u * 2, u[1:] * 2))(a0)
        return {"u": [v1, v1[1:].imag], "w": (v3[:3], v2[1:], v3[:, 1]), "x": [v1.imag[:2]], "y": [v4, v5]}

    return f, []
