"""A write such as `masked_fill_` to a transposed tensor left `as_strided` views of it with other elements (97062041)."""

import torch

PLAN = {"calls": [3, 4], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    a0 = torch.randn(3, n, dtype=torch.float64).t()
    a1 = torch.randn(13, dtype=torch.float64)[1:].view(3, 4)
    return (
        a0,
        a1,
    )


def program(T):
    def f(a0, a1):
        v1 = [x.as_strided((2, 2), (1, 2), 2) for x in (a0, a1, a1 * 1, (a0 * 1).t())]
        for x in (a0, a1):
            x.masked_fill_(x > 0, 0.5)
        v2 = (a1 * 1).t()
        v3 = v2.as_strided((2, 2), (1, 1))
        v2.scatter_(0, torch.tensor([[0, 1]]), 7.0)
        v2.cumsum_(0)
        return [*v1, v2, v3, a0.as_strided((2,), (1,), 1), v2.as_strided((2,), (1,), 1), v2.t().view(-1)]

    return f, []
