"""Private learning: each example's gradient is clipped before they are summed, and noise is added.

The change that one person's data can make is bounded, so the model tells little of it. `vmap` of `grad` has the gradient of each
example; the rest is arithmetic, and all of it is one program.

Source: Abadi et al., Deep learning with differential privacy (CCS 2016).
"""

import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn


def moons(count):
    """Return points of two interleaved half circles, x: [count, 2], and which of the two, y: [count]."""
    angle, y = torch.pi * torch.rand(count), torch.arange(count) % 2
    x = torch.stack([angle.cos() + y - 0.5, torch.where(y == 0, 1.0, -1.0) * angle.sin() + 0.5 * y - 0.25], 1)
    return x + 0.12 * torch.randn(count, 2), y.float()


def main(steps=300, count=512, batch=128, clip=1.0, noise=1.0):
    torch.manual_seed(0)
    x, y = moons(count)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    params = {name: p.detach() for name, p in model.named_parameters()}

    def logit(params, x):
        return tfn.functional_call(model, params, (x,)).squeeze(-1)

    def loss(params, x, y):
        return F.binary_cross_entropy_with_logits(logit(params, x), y)

    def private_gradient(params, x, y, key):
        grads = tfn.vmap(tfn.grad(loss), (None, 0, 0))(params, x, y)  # one for each example
        norms = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
        scale = (clip / norms).clamp(max=1)
        keys = tfn.random.split(key, len(grads))
        return {
            name: (torch.einsum("n,n...->...", scale, g) + noise * clip * tfn.random.normal(k, g.shape[1:])) / len(x)
            for k, (name, g) in zip(keys, grads.items(), strict=True)
        }, norms

    @tfn.jit
    def train_step(params, x, y, key):
        grads, norms = private_gradient(params, x, y, key)
        return {name: p - 0.8 * grads[name] for name, p in params.items()}, norms

    norms = []
    for key in tfn.random.split(tfn.random.key(0), steps):
        chosen = torch.randperm(count)[:batch]
        params, seen = train_step(params, x[chosen], y[chosen], key)
        norms.append(seen)
    accuracy = ((logit(params, x) > 0) == (y > 0)).float().mean().item()
    return {"x": x, "y": y, "norms": norms, "accuracy": accuracy, "logit": lambda x: logit(params, x)}


if __name__ == "__main__":
    print(f"accuracy {main()['accuracy']:.1%}, learned from clipped and noisy gradients")
