"""Views, and `.data`, of a written argument with gaps had memory of their own (97000608, 97003137, 97003611)."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": True, "grad_mode": "", "poke": True}


def inputs(n):
    a0 = torch.randn(2, n, dtype=torch.complex128).imag
    a1 = torch.randn(n, 3)
    return (a0, a1)


def program(T):
    def f(a0, a1):
        v1 = a0.squeeze()
        a0.copy_(a0)
        v2 = a0[:, 0]
        a1[:, 0] = 1.5
        v3 = a1.data
        return [v1, v2, v3]

    return f, []
