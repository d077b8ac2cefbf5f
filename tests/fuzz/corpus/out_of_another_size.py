"""A tensor that `out=` had resized said its old shape; a negative view of another size was filled with what is broadcast."""

import torch

PLAN = {"calls": [3, 3], "via": "jit", "options": {"cache": "symbolic values"}, "backward": False, "grad_mode": ""}


def inputs(n):
    return (torch.randn(3, dtype=torch.float64), torch.randn(3, 1, dtype=torch.float64))


def program(T):
    def f(a0, a1):
        v13 = torch.special.i0(a1)
        torch.sin(a0, out=v13)
        v17 = torch.stack([r.sign() for r in v13])
        return v13.dim(), v13, v17

    return f, []
