"""A write to a row of an expanded tensor adds up no differences: infinite and large elements are what was written."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": 2, "grad_mode": "", "poke": True}


def inputs(n):
    return (
        torch.tensor([1e20, float("inf"), 2.0], dtype=torch.float64).requires_grad_(),
        torch.randn(2, 1) * float("inf"),
    )


def program(T):

    def f(a0, a1):
        v1 = a0 * 1
        v1.expand(2, 3)[0][1:].fill_(2)
        v2 = a0.clone()
        v2.expand(3, 3).diagonal().copy_(a0.detach().flip(0) / 2)
        a1.expand(2, 5)[:, 1].mul_(2)
        v3 = a0.clone()
        v3.unfold(0, 2, 1)[:, 1].mul_(2)
        v4 = a0 + 1
        v4.as_strided((2, 2), (1, 1), 0)[0].fill_(3)
        v5 = torch.randn(3, dtype=torch.complex128).conj().imag
        v5.expand(2, 3)[0][:2].add_(-2)
        return [v1, v2, a1, v3, v4, v5]

    return f, []
