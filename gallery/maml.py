"""MAML: parameters from which one step of gradient descent learns a new task.

Meta-learning differentiates through learning: a gradient of a gradient, for each of many tasks. That is `grad` of `vmap`
of `grad`, in one jitted step.

Source: Finn, Abbeel, Levine, Model-agnostic meta-learning (ICML 2017), section 5.1.
"""

import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn


def sines(tasks, shots, generator):
    """Return examples of sine waves, each of an amplitude and a phase of its own: x, y, both [tasks, shots, 1]."""
    draw = lambda *shape: torch.rand(*shape, 1, generator=generator)
    x = 10 * draw(tasks, shots) - 5
    return x, (0.1 + 4.9 * draw(tasks, 1)) * torch.sin(x - torch.pi * draw(tasks, 1))


def main(steps=5000, tasks=16, shots=10, rate=0.04):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    params = {name: p.detach() for name, p in model.named_parameters()}

    def predict(params, x):
        return tfn.functional_call(model, params, (x,))

    def loss(params, x, y):
        return F.mse_loss(predict(params, x), y)

    def adapt(params, x, y):
        grads = tfn.grad(loss)(params, x, y)
        return {name: p - rate * grads[name] for name, p in params.items()}

    def meta_loss(params, x, y, new_x, new_y):
        after = lambda x, y, new_x, new_y: loss(adapt(params, x, y), new_x, new_y)
        return tfn.vmap(after)(x, y, new_x, new_y).mean()

    optimizer = tfn.functional_optimizer(torch.optim.Adam, lr=2e-3)

    @tfn.jit(donate_argnums=(0, 1))
    def train_step(params, state, x, y):
        x, new_x = x.chunk(2, dim=1)
        y, new_y = y.chunk(2, dim=1)
        value, grads = tfn.value_and_grad(meta_loss)(params, x, y, new_x, new_y)
        return *optimizer.update(params, grads, state), value

    state, losses = optimizer.init(params), []
    for _ in range(steps):
        params, state, value = train_step(params, state, *sines(tasks, 2 * shots, generator))
        losses.append(value.item())

    x = torch.linspace(-5, 5, 200)[:, None]
    truth = lambda x: 3.2 * torch.sin(x + 0.6)
    seen = 10 * torch.rand(shots, 1, generator=generator) - 5
    curves, adapted = [predict(params, x)], params
    for _ in range(10):
        adapted = adapt(adapted, seen, truth(seen))
        curves.append(predict(adapted, x))
    return {"losses": losses, "x": x, "truth": truth(x), "seen": (seen, truth(seen)), "curves": curves}


if __name__ == "__main__":
    result = main()
    errors = [F.mse_loss(curve, result["truth"]) for curve in result["curves"]]
    print(f"error on a new wave: {errors[0]:.2f}, after one step {errors[1]:.2f}, after ten {errors[10]:.2f}")
