"""The keys of a dict are in another order than its leaves: an UnboundLocalError of the generated code (99700863)."""

import torch

PLAN = {"calls": [3, 3], "via": "jit", "options": {}, "backward": False, "grad_mode": "", "poke": True}


def inputs(n):
    a0 = torch.randn(3)
    return (a0,)


def program(T):
    def f(a0):
        v1 = a0[1:]
        a0.add_(3)
        return {"v2": v1, "v1": v1, "v0": [v1, {"z": v1, "y": a0}]}

    return f, []
