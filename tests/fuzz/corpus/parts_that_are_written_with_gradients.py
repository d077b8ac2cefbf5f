"""Results that share memory with a written argument had its history, and not their own."""

import torch

PLAN = {"calls": [3, 3], "via": "jit", "options": {}, "backward": True, "grad_mode": "", "poke": True}


def inputs(n):
    a0, a1, a2 = (torch.randn(3, 3, dtype=torch.float64) for _ in range(3))
    return (a0, a1.requires_grad_(), a2.requires_grad_() * 1, torch.randn(3, dtype=torch.float64).requires_grad_())


def program(T):

    def f(a0, a1, a2, a3):
        v1 = a0.detach()
        v1.mul_(a3)
        v2 = a1.unsafe_chunk(3)[0]
        v2.mT[0].mul_(a3[:1])
        v3 = a2.unsafe_chunk(3)[1]
        a2.mul_(a3)
        return [v1.t(), v2, v2[0], v3, a1, a2]

    return (f, [])
