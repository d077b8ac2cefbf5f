"""A jitted function inside returned its argument as it was before it was written to."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, 3, dtype=torch.float64)[..., 1:],)


def program(T):
    def f(a0):
        v1 = a0 * 2

        def f20(x21):
            v1.movedim(0, -1).sub_(2)
            v1.abs_()
            return x21

        v19 = T.jit(f20)(v1)
        v1.add_(1)
        return v19, T.jit(lambda u: u[1:])(v1).mul_(2), v1 * 1

    return f, []
