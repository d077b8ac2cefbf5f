"""Views with a bit or fixed strides, and writes by `.data` to one, had memory of their own where the argument was not
contiguous (97030668, 97041670, 98000238)."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": False, "grad_mode": "", "poke": True}


def inputs(n):
    a0 = torch.randn(3, dtype=torch.complex128).imag
    a1 = torch.randn(3, n, dtype=torch.float64).t()
    a2 = torch.randn(7, n, dtype=torch.float64)[::2].requires_grad_() * 1
    a3 = torch._neg_view(torch.randn(3, dtype=torch.float64))
    return (a0, a1, a2, a3)


def program(T):
    def f(a0, a1, a2, a3):
        a0.data.zero_()
        v1 = a1.view(a1.shape)
        v1.data.copy_(a1.t()[:1].t().clone())
        v2 = a2.detach()
        v3 = torch._neg_view(a2[1:].T)
        v2.mul_(2)
        v4 = a3.as_strided((2,), (1,))
        a3.add_(1)
        return [torch._neg_view(a0), v1, v2, v3, v4, torch._neg_view(a3)[1:]]

    return f, []
