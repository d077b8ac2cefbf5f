"""functorch's rule of `slice_scatter` overflows for the end of `x[::2]`."""

import torch

PLAN = {"calls": [4], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, 3, dtype=torch.float64),)


def program(T):
    def f(a0):
        def inner(x, y):
            z = y * 1
            z[::2] *= -1
            return z + x

        return torch.func.vmap(lambda x: T.vmap(inner, (0, None))(x, x))(a0)

    return f, []
