"""`x += x` of a size found in data: Python took an error of ours for "not implemented", and added out of place."""

import torch

PLAN = {"calls": [3], "via": "jit", "options": {}, "backward": False, "grad_mode": ""}


def inputs(n):
    return (1.5,)


def program(T):
    def f(a0):
        v1 = torch.tensor([[0, 1, 2], [2, 0, 1]]).unique()
        v2 = v1
        v1 += v1
        return [v1, v2]

    return f, []
