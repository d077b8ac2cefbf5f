"""A float view of memory of integers has the history of what is written to it."""

import torch
import torch.utils.checkpoint
from torch import nn

PLAN = {"calls": [3], "via": "plain", "options": {}, "backward": True, "grad_mode": ""}


class Tied(nn.Module):
    def forward(self, x):
        pass


def inputs(n):
    a0 = torch.randn(n, dtype=torch.float64).requires_grad_()
    return (a0,)


def program(T):
    m1 = Tied()

    def f(a0):
        v12 = a0.clone(memory_format=torch.contiguous_format)

        def f16(x17):
            v18 = torch.tensor([[0, 1, 2], [2, 0, 1]]).view(torch.float64)
            v18.addcmul_(v12, a0)
            return (v18 * x17.sum()).sum()

        v15 = T.vmap(T.grad(f16))(a0)
        v25 = torch.tensor([0, 1, 1]).unique()
        v26 = m1(v15)
        return [v25, v15, v26]

    return (f, [m1])
