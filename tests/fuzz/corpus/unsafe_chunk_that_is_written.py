"""Parts of `unsafe_chunk` lie in the memory of their source and have a history of their own; they were copies (97030752)."""

import torch

PLAN = {"calls": [5, 6], "via": "jit", "options": {}, "backward": True, "grad_mode": "", "poke": True}


def inputs(n):
    return (torch.randn(n, dtype=torch.float64).requires_grad_(), torch.randn(n, 2))


def program(T):
    def f(a0, a1):
        v1 = a0 * 2
        v2 = v1.unsafe_chunk(2)[0]
        v2.mul_(3)
        v3 = torch.unsafe_split(v1, 2, dim=0)[1]
        v1.add_(1)
        v4 = a1[1:].unsafe_split_with_sizes([1, 1], dim=1)[1]
        v4.zero_()
        return [v1, v2, v3, v4]

    return f, []
