"""The gradient of a view with a bit, or by `as_strided`, of an expanded leaf was that of other elements (97042131)."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    a0 = torch.randn(2, n, dtype=torch.float64).expand(2, 2, n).requires_grad_()
    a1 = torch.randn(5, dtype=torch.float64).as_strided((3, 3), (1, 1)).requires_grad_()
    return (
        a0,
        a1,
    )


def program(T):
    def f(a0, a1):
        return [
            torch._neg_view(a0)[0],
            torch._neg_view(a1).t(),
            a0.as_strided((2, 2), (1, 1)),
            a1.as_strided((2, 2), (1, 2)) * a1[0, 0],
        ]

    return f, []
