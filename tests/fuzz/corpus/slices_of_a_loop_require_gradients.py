"""In the body of a scan or map a slice of a tensor that requires a gradient said that it requires none (98010274)."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, 2, dtype=torch.float64).requires_grad_(),)


def program(T):

    def f(a0):

        def f1(x1):
            return x1.sin() if x1.requires_grad else x1 * 1

        def f2(c, x):
            return (c + f1(x), f1(x))

        return [T.map(f1, a0), T.scan(f2, a0[0], a0)]

    return (f, [])
