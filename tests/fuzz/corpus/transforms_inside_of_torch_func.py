"""A function that torch.func does not look at was recorded as one of its own levels, which needs a setup_context."""

import torch

PLAN = {"calls": [4], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(3), torch.randn(3, 1, dtype=torch.float64).requires_grad_())


def program(T):
    def f(a0, a1):
        def f2(x3):
            def f5(x6):
                return T.jvp(lambda x9: (x9, x9), (a1,), (a1,))[1][0]

            T.vjp(f5, a0)
            return x3 * 2

        v1 = torch.func.jvp(f2, (a0,), (a0,))

        def f6(x6):
            def f9(x10):
                return torch.func.grad(lambda x26: (x26 * x26.sum()).sum())(a1).sum() * x10.sum()

            return T.vmap(T.grad(f9))(a1)

        v4 = torch.func.vjp(f6, a0)[0]
        return v1, v4

    return f, []
