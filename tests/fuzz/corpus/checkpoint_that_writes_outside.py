"""A checkpoint outside of a trace wrote to a tensor from outside twice (97004276)."""

import torch

EXPECTED = "refused"
PLAN = {"calls": [3], "via": "plain", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    a0 = torch.randn(n, dtype=torch.float64).requires_grad_()
    a1 = torch.ones(n, dtype=torch.float64)
    return (
        a0,
        a1,
    )


def program(T):
    def f(a0, a1):
        return T.checkpoint(lambda x: (x * a1.mul_(2)).sin())(a0)

    return f, []
