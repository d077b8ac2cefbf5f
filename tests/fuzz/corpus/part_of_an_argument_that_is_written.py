"""The backward kept a part of an argument, in the memory that the function writes to, and raised or read the new values."""

import torch

PLAN = {"calls": [3, 3], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(3, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64).requires_grad_())


def program(T):

    def f(a0, a1):
        a0[0].mul_(a1)
        a0.unsafe_chunk(3)[1].mul_(a1)
        return a0

    return (f, [])
