"""A write to `x.conj()[1].real` was a RuntimeError of PyTorch (98401442)."""

import torch

PLAN = {"calls": [4], "via": "jit", "options": {}, "backward": False, "grad_mode": "", "poke": True}


def inputs(n):
    return (2, torch.randn(3, n, dtype=torch.complex128).conj(), torch.randn(3, n, dtype=torch.complex128))


def program(T):
    def f(a0, a1, a2):
        a1.select(0, 1).real[0] = a0
        v1 = (a2 * 2).conj()
        v2 = v1[1].imag
        v2.mul_(a0)
        v1[0] = 3j
        v2.add_(1)
        return [v1, a1[1].imag]

    return f, []
