"""A tensor outside got a history in the first call, which the second one does not read (99801009)."""

import torch
import torch.utils.checkpoint
from torch import nn

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


class Seq(nn.Sequential):
    pass


def inputs(n):
    a0 = 2
    a1 = torch.randn(()).requires_grad_()
    return (a0, a1)


def program(T):
    c1 = torch.randn(3)
    m2 = Seq()

    def f(a0, a1):
        c1.uniform_()
        c1[None, 0].copy_(a1)

    return (f, m2)
