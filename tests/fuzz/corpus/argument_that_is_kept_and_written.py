"""An argument that a jitted function keeps in a dict and writes to by a detach was kept as another tensor (98200168)."""

import torch

PLAN = {"calls": [3, 3], "via": "plain", "options": {}, "backward": True, "grad_mode": "", "poke": True}


def inputs(n):
    return ({"a0": torch.randn(n, dtype=torch.float64).requires_grad_()},)


def program(T):
    def f(d):
        def f2(x3):
            d["new"], d["view"] = x3, x3.view(-1)[1:]
            x3.detach()[0] = 0.25
            return x3 * 2

        return T.jit(f2)(d["a0"])

    return f, []
