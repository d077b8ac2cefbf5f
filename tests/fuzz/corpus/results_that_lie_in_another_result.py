"""Results that a trace computes as copies of parts of another result had memory of their own (97040417)."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {"dynamic": False}, "backward": False, "grad_mode": "", "poke": True}


def inputs(n):
    return (torch.randn(n, 2, dtype=torch.float64), torch.randn(3, dtype=torch.complex128))


def program(T):
    def f(a0, a1):
        v1, v2 = a0 * 2, a1 * 2
        return [v1.as_strided((2,), (1,)), v1, torch.view_as_complex(v1), torch._neg_view(v1[0]), v2.conj()[1:], v2]

    return f, []
