"""`scan` under a torch.func transform in a jitted function was a RuntimeError of PyTorch (98301319, 99601540)."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n, dtype=torch.float64).requires_grad_(),)


def program(T):
    def f(a0):
        def f1(x):
            return T.scan(lambda c, u: (c * 0.5 + u * u, u.asinh()), x[0], x)[0]

        def f2(x):
            return T.scan(lambda c, u: (c * 0.5 + u * u, u.asinh()), x[0] * a0[1], x, reverse=True)[1].sum()

        return [torch.func.jacrev(f1)(a0), torch.func.vmap(torch.func.grad(f2))(torch.stack([a0, a0 * 2]))]

    return f, []
