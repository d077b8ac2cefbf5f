"""The rule of a batch named a size that another argument binds: the program raised NameError."""

import torch

PLAN = {"calls": [4, 5], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


class Square(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3 * x if ctx.needs_input_grad[0] else None


def inputs(n):
    return (torch.randn(n, 3, dtype=torch.float64), torch.randn(n, 2, dtype=torch.float64).requires_grad_())


def program(T):
    def f(a0, a1):
        v1 = T.vmap(lambda u: Square.apply(u))(a1)
        return [v1.t() @ a0]

    return f, []
