"""A detached view of a detached view lost what was written to it; written results had memory of their own (97030014)."""

import torch

PLAN = {"calls": [6, 8], "via": "jit", "options": {}, "backward": False, "grad_mode": "", "poke": True}


def inputs(n):
    return tuple(torch.arange(0.0, n + 2, dtype=torch.float64)[1 : n + 1] for _ in range(3))


def program(T):
    def f(a0, a1, a2):
        v1 = a0[1:].detach()[1:].detach()[1:]
        v1.mul_(2)
        v2 = a1[2:].view(torch.float32)
        v2.mul_(2)
        v3 = a2.detach()
        v4 = v3[1:].view(torch.int64)
        a2[3] = 7
        v4[0] = 0
        return [v1, v2[1:], v4[1:], v3[2:]]

    return f, []
