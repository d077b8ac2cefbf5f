"""Views in inference mode inside of a traced function: "Cannot set version_counter for inference tensor"."""

import torch
from torch.nn import functional as F

PLAN = {"calls": [3, 4, 5], "via": "jit", "options": {}, "backward": True, "grad_mode": ""}


def inputs(n):
    return (torch.randn(4, 3, dtype=torch.float64).requires_grad_(), torch.randn(n))


def program(T):
    def f(a0, a1):
        v3 = a0.cumsum(0)
        v4 = a0.argmax(-1) % 3
        with torch.inference_mode():
            v5 = a1[..., None]
            v6 = F.embedding_bag(v4[None], a0)
            v7 = a1.detach()
            v3[:-1] = 0.5
        return v3, v5 * 1, v6 * 1, v7

    return f, []
