"""Parts of `unsafe_chunk` of what has a neg or conj bit are copies: PyTorch has no kernel for them (99607453)."""

import torch

PLAN = {"calls": [4, 5], "via": "jit", "options": {}, "backward": False, "grad_mode": "", "poke": True}


def inputs(n):
    return (torch.randn(n), torch.randn(n, dtype=torch.complex64))


def program(T):
    def f(a0, a1):
        v1 = torch._neg_view(a0).unsafe_chunk(2)[0]
        v1.add_(1)
        v2 = torch.unsafe_split(a1.conj(), 2)[1]
        v2.mul_(2)
        v3 = torch.unsafe_chunk(a1, 2)[0]
        v3.zero_()
        return [a0 * 1, a1 * 1, v1, v2]

    return f, []
