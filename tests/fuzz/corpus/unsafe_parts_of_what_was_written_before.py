"""A view that a call returns is made again inside of it."""

import torch
import torch.utils.checkpoint

PLAN = {
    "calls": [3],
    "via": "jit",
    "options": {"cache": "symbolic values"},
    "backward": False,
    "grad_mode": "",
    "poke": True,
}


class Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x, x.detach() * 2)


def inputs(n):
    a0 = torch.randn(1)
    return (a0,)


def program(T):

    def f(a0):
        a0.add_(a0.data)
        v1 = Flat.apply(a0)[1]

        def f3(x4):
            v1 = a0.unsafe_chunk(2)[0]
            v1[torch.where(a0 > 0)] *= -0.0
            if v1.shape[0] > 2:
                pass
            else:
                v8 = v1 * 1
            return v8

        T.grad(lambda u: T.vmap(f3, -1)(u).sum())(v1)

    return (f, [])
