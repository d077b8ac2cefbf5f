"""The body of a loop writes to a tensor from outside of torch.func: "Cannot access storage of TensorWrapper"."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}
EXPECTED = "refused"


def inputs(n):
    return (torch.randn(n),)


def program(T):
    def f(a0):
        def f7(x8):
            v10 = a0.clamp(min=-1)

            def f13(x14):
                v10.add_(v10)
                return x14

            return T.while_loop(lambda k, u: k < 0, lambda k, u: (k + 1, f13(u)), (torch.tensor(0), x8))[1].sum()

        return torch.func.grad(f7)(a0)

    return f, []
