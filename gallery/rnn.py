"""A recurrent network by `scan`: it learns to draw from noisy strokes, and then draws alone.

The curve crosses itself, so the next point depends on more than the last: the state has to remember. Training and drawing
are the same cell in two loops, each one equation of its trace, whatever the number of steps.
"""

import torch
from torch import nn

import thunder_fn as tfn


def strokes(count, length):
    """Return noisy pieces of a figure of eight, [count, length, 2]."""
    phase = 2 * torch.pi * (torch.rand(count, 1) + torch.arange(length) / 60)
    exact = torch.stack([phase.sin(), (2 * phase).sin() / 2], -1)
    return exact + 0.04 * torch.randn_like(exact)


class Cell(nn.Module):
    """A gated recurrent unit that says where the pen goes next."""

    def __init__(self, width=48):
        super().__init__()
        self.gru, self.move = nn.GRUCell(2, width), nn.Linear(width, 2)

    def forward(self, h, point):
        h = self.gru(point, h)
        return h, point + self.move(h)


def main(steps=500, count=32, length=60, drawn=240):
    torch.manual_seed(0)
    cell = Cell()
    params = {name: p.detach() for name, p in cell.named_parameters()}

    def read(params, stroke):
        step = lambda h, point: tfn.functional_call(cell, params, (h, point))
        return tfn.scan(step, torch.zeros(48), stroke)

    def loss(params, strokes):
        _, predicted = tfn.vmap(read, (None, 0))(params, strokes[:, :-1])
        return (predicted - strokes[:, 1:]).square().sum(-1).mean()

    @tfn.jit
    def draw(params, start):
        """Read the start, and go on from there: each point that is drawn is the next that is read."""

        def step(state, _):
            h, point = tfn.functional_call(cell, params, state)
            return (h, point), point

        h, predicted = read(params, start)
        return tfn.scan(step, (h, predicted[-1]), None, length=drawn)[1]

    optimizer = tfn.functional_optimizer(torch.optim.Adam, lr=4e-3)

    @tfn.jit(donate_argnums=(0, 1))
    def train_step(params, state, strokes):
        value, grads = tfn.value_and_grad(loss)(params, strokes)
        return *optimizer.update(params, grads, state), value

    state, losses = optimizer.init(params), []
    for _ in range(steps):
        params, state, value = train_step(params, state, strokes(count, length))
        losses.append(value.item())
    start = strokes(1, 20)[0]
    return {"losses": losses, "strokes": strokes(6, length), "start": start, "drawn": draw(params, start)}


if __name__ == "__main__":
    result = main()
    print(f"loss {result['losses'][0]:.3f} -> {result['losses'][-1]:.4f}")
