"""`_foreach_add_` of a list that has a tensor twice lost one of its writes: refused (97020316, 97021321)."""

import torch

EXPECTED = "refused"
PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    return (torch.randn(n),)


def program(T):
    def f(a0):
        torch._foreach_add_([a0[1:], a0], 2)
        return a0 * 1

    return f, []
