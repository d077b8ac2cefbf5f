"""`as_strided` of a view of a view that was taken under no_grad had a gradient (98010159)."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (
        torch.randn(2, 3, n, dtype=torch.float64).requires_grad_(),
        torch.randn(n, dtype=torch.float64).requires_grad_(),
    )


def program(T):

    def f(a0, a1):
        with torch.no_grad():
            v1 = a0.swapaxes(0, 1)
        v2 = torch.movedim(v1, 0, -1).as_strided((2,), (2,), 1)
        v3 = v1.mT[0].as_strided((2,), (2,), 1)
        return [v2 * a1[0], v3 * a1[1], a0 * 1]

    return (f, [])
