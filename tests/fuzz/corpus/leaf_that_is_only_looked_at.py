"""A backward kept the value of a leaf whose gradient is zero; a later write to it was an error (97062787)."""

import torch
from torch.nn import functional as F

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return torch.randn(n, dtype=torch.float64).requires_grad_(), torch.randn(2, n, dtype=torch.float64).requires_grad_()


def program(T):
    def f(a0, a1):
        v1 = torch.ones_like(a0) + a0.detach()
        with torch.no_grad():
            a0.neg_()
        return F.linear(v1, a1)

    return f, []
