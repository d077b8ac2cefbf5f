"""`out=` of two tensors, one of them a view of another size, was an error in PyTorch's words (97062667)."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}
EXPECTED = "refused"


def inputs(n):
    return (torch.randn(n, dtype=torch.float64),)


def program(T):
    def f(a0):
        v1 = torch.zeros((), dtype=torch.float64).view(())
        torch.sort(a0, out=(v1, torch.tensor([1])))
        return a0 * 2

    return f, []
