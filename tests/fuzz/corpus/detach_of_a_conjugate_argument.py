"""An argument with a conjugate bit could not be detached in place (99800960)."""

import torch

PLAN = {"calls": [4], "via": "jit", "options": {"numerics": "bitwise"}, "backward": True, "grad_mode": ""}


def inputs(n):
    a0 = 3
    a1 = torch.randn(3, dtype=torch.complex128).conj().detach()
    return (a0, a1)


def program(T):

    def f(a0, a1):
        a1.detach_()

    return (f, [])
