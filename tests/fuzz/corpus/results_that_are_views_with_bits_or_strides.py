"""Views of a conjugate argument, and `as_strided`, had memory of their own (seeds 95000825, 95002029, 97002398)."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": True, "grad_mode": "", "poke": True}


def inputs(n):
    a0 = torch.randn(3, n, dtype=torch.float64).t().requires_grad_()
    a1 = torch.randn(2, 3, dtype=torch.complex128).conj().t()
    return (a0, a1)


def program(T):
    def f(a0, a1):
        v1 = a1.conj().real
        v2 = a0.as_strided((2, 2), (1, 1))
        v3 = a1.real[0]
        return [v1, v2, v3]

    return f, []
