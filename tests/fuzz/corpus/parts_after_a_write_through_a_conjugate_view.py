"""`.imag` after a write through `.conj()` was PyTorch's error about conjugate bits."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    return (torch.randn(2, 3, dtype=torch.complex128), torch.randn(3, dtype=torch.complex128).conj())


def program(T):
    def f(a0, a1):
        a0.conj()[1:].mul_(a0[1:])
        a1.conj_physical_()
        return a0.imag, a0.real, a1.real, a0.conj().imag

    return f, []
