"""A result that is a view without gradients of what requires them since was an error of PyTorch's (97030049)."""

import torch

EXPECTED = "refused"  # it sets requires_grad after a use, where gradients are off
PLAN = {"calls": [3, 3], "via": "jit", "options": {}, "backward": False, "grad_mode": "inference_mode"}


def inputs(n):
    return (torch.randn(3),)


def program(T):
    def f(a0):
        v1 = torch.hsplit(a0, 3)
        torch.sigmoid_(a0)
        v2 = a0.requires_grad_()
        return [v1, v2]

    return f, []
