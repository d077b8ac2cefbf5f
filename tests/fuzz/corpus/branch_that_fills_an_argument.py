"""A branch that is not taken filled a dict among the arguments (97061871)."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}
EXPECTED = "refused"


def inputs(n):
    return ({"a": torch.ones(n, dtype=torch.float64)},)


def program(T):
    def f(d):
        def g(x):
            d["b"] = 1
            return x

        return T.cond(d["a"].sum() < 0, g, lambda x: x * 2, (d["a"],))

    return f, []
