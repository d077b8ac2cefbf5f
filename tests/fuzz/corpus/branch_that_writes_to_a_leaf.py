"""A branch that is not taken writes to a leaf: the error is ours, and says what to write instead."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}
EXPECTED = "refused"


def inputs(n):
    return (torch.ones(n).requires_grad_(),)


def program(T):
    def f(a0):
        return T.cond(a0.sum() > 0, lambda u: u.clone(), lambda u: u.sub_(u), (a0,))

    return f, []
