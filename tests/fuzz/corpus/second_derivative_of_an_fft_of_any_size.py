"""A clone for the layout of `view_as_complex` had a size of PyTorch's in its type: an AttributeError."""

import torch

PLAN = {"calls": [3, 3], "via": "jit", "options": {"cache": "symbolic values"}, "backward": 2, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, 3, dtype=torch.float64).requires_grad_(),)


def program(T):
    def f(a0):
        return torch.fft.rfft(a0).abs()

    return f, []
