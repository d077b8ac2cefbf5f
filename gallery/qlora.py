"""QLoRA: frozen weights of four bits, and thin matrices beside them that learn.

There is no class for it: `lora` and `quantize` are functions on a jitted model, and QLoRA is one after the other. The model
that comes out has the parameters of both, trains with any optimizer, and gives back a plain `state_dict`.

Source: Dettmers et al., QLoRA (NeurIPS 2023).
"""

import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn

MATRICES = ["1.*.weight", "2.*.weight", "3.weight"]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def train(model, params, rule, steps, lr):
    """Train on tokens whose successor a rule tells. Returns the losses."""
    optimizer, losses = torch.optim.AdamW(params, lr=lr), []
    for _ in range(steps):
        tokens = torch.randint(0, 64, (256,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), rule(tokens))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def size(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def main(steps=150, width=128, rank=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, width), Block(width), Block(width), nn.Linear(width, 64))
    before = train(tfn.jit(model), model.parameters(), lambda x: (x + 1) % 64, steps, lr=2e-3)

    tuned = tfn.quantize(tfn.lora(tfn.jit(model), rank=rank, filter=MATRICES), "nf4", filter=MATRICES)
    adapters = {name: p for name, p in tuned.named_parameters() if "lora" in name}
    after = train(tuned, adapters.values(), lambda x: (3 * x + 5) % 64, steps, lr=4e-3)

    parts = tuned.parts()
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith("0.")}
    codes = [p for name, p in parts.items() if "weight." in name and "lora" not in name]
    stored = {"weights, float32": matrices.values(), "weights, nf4": codes, "adapters": adapters.values()}
    return {"losses": (before, after), "bytes": {name: size(tensors) for name, tensors in stored.items()}}


if __name__ == "__main__":
    result = main()
    (*_, pretrained), (first, *_, last) = result["losses"]
    print(f"pretrained to {pretrained:.2f}; the new task {first:.2f} -> {last:.2f}; bytes: {result['bytes']}")
