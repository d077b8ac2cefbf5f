"""The gradient of an `out=` of another size was lost; eager's is of the old shape, and sums (seed 98400423)."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {"dynamic": False}, "backward": True, "grad_mode": ""}
EXPECTED = "refused"


def inputs(n):
    return (torch.randn(4, n, dtype=torch.float64).requires_grad_(),)


def program(T):
    def f(a0):
        v1 = a0.sum()
        with torch.no_grad():
            torch.sort(a0, out=(v1, torch.tensor([1])))
        return v1

    return f, []
