"""`addmv_` of a vector that is its target: BLAS writes to it while it reads it, so eager's numbers hang on the layout."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}
EXPECTED = "refused"


def inputs(n):
    return (torch.randn(n, 3, dtype=torch.float64).t(),)


def program(T):
    c1 = torch.randn(3, dtype=torch.float64)

    def f(a0):
        c1.addmv_(a0, c1)
        return a0

    return f, [c1]
