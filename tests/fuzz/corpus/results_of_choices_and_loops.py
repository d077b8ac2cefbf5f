"""A choice outside of a trace, and a scan of one element anywhere, returned memory of an operand."""

import torch

PLAN = {"calls": [3], "via": "plain", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n), torch.randn(1).requires_grad_())


def program(T):
    def f(a0, a1):
        v1 = T.cond(a0.sum() > 0, lambda u: u, lambda u: u * 2, (a0,))
        v1.copy_(a0 + 1)
        v2 = T.switch((a0 > 0).sum() % 3, [lambda u: u, lambda u: u, lambda u: u], (a0,))
        a0.mul_(2)
        v3 = T.associative_scan(lambda p, q: p * q, a1, 0)
        v4 = T.associative_scan(lambda p, q: p * q, a0[:1], -1)
        torch.mul(a0[:1], v4, out=v4)
        return v1, v2, v3, v4

    return f, []
