"""A transform of torch.func in a checkpoint outside of a trace raised PyTorch's error (97042093)."""

import torch

EXPECTED = "refused"
PLAN = {"calls": [3], "via": "plain", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    a0 = torch.randn(n, dtype=torch.float64).requires_grad_()
    return (a0,)


def program(T):
    def f(a0):
        return T.checkpoint(lambda x: torch.func.vjp(torch.sin, x)[1](a0.detach())[0] * x)(a0)

    return f, []
