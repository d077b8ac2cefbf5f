"""`set_` of a tensor of a function around was lost without notice (99605048)."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}
EXPECTED = "refused"


def inputs(n):
    return (torch.randn(n, dtype=torch.float64),)


def program(T):
    def f(a0):
        def f1(x1):
            T.checkpoint(lambda u: (x1.set_(a0.clone()[None]), u)[1])(a0)
            return x1 * x1.dim()

        return T.jit(f1)(a0 * 1)

    return f, []
