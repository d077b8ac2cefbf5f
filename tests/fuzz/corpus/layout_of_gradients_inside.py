"""Results of transforms inside were contiguous to the function: `reshape` of a transposed gradient did not copy (97030514)."""

import torch

PLAN = {"calls": [3, 4, 5], "via": "jit", "options": {}, "backward": False, "grad_mode": "", "poke": True}


def inputs(n):
    return torch.randn(3, n, dtype=torch.float64), torch.randn(4, 3, n, dtype=torch.float64)


def program(T):
    def f(a0, a1):
        turned = lambda x: x.t().square().sum(0).sum()
        found = [
            T.grad(lambda x: x.sum())(a0),
            T.grad(turned)(a0.clone()),
            T.vmap(T.grad(turned))(a1),
            T.jvp(lambda x: x.t(), (a0,), (a0 * 2,))[1],
            T.vjp(lambda x: x.t() * 2, a0)[1](a0.t())[0],
            T.value_and_grad(turned)(a0.t())[1],
        ]
        asked = [(v.stride(), v.is_contiguous(), v.mT.is_contiguous()) for v in found]
        v1 = T.grad(lambda x: (x.t() @ x).t().sum(0).square().sum())(a0)
        v2 = v1.reshape(-1)
        v2.mul_(2)
        return found, asked, v1, v2

    return f, []
