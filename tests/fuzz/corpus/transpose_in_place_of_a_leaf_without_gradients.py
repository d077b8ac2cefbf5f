"""The gradient of a leaf that was transposed in place had the order of the old shape: refused (97000842)."""

import torch

EXPECTED = "refused"
PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, 3, dtype=torch.float64).requires_grad_(),)


def program(T):
    def f(a0):
        with torch.no_grad():
            a0.t_()
        a0.data.mul_(2)
        return a0[0]

    return f, []
