"""The worker of each rank. `python -m tests.distributed.worker FOLDER SIZE:SCENARIO,SCENARIO ...` forks the ranks of
each group.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import thunder_fn as tfn
from tests import forks
from tests.messages import message_of
from thunder_fn.benchmarks.models import GPT
from thunder_fn.distributed import heartbeat
from thunder_fn.errors import DistributedError, RewriteError
from thunder_fn.torch_internals import default_store, unwaited_collectives

STEPS, BATCH = 8, 4
STORED, ROUNDED = ("adapters", "nf4"), ("int8",)


def model(layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    return GPT(
        layers=layers, width=12, heads=2, vocabulary=11, context=6
    ).double()  # Adam makes rounding visible in float32


def batches() -> torch.Tensor:
    """Tokens and targets: [step, example, position]."""
    return torch.randint(0, 11, (STEPS, BATCH, 7), generator=torch.Generator().manual_seed(1))


def train(module: torch.nn.Module, rank: int, size: int, steps: int = STEPS) -> list[float]:
    """The losses of this rank's share of each batch."""
    return go_on(module, adam(module), rank, size, batches()[:steps])


def adam(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Of what is trained."""
    return torch.optim.AdamW((p for p in module.parameters() if p.requires_grad), lr=1e-2)


def go_on(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int, every: torch.Tensor
) -> list[float]:
    """Train on this rank's share of batches."""
    losses: list[float] = []
    for tokens in every:
        own = tokens.chunk(size)[rank]
        loss = F.cross_entropy(module(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fsdp_losses(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """Train on shards, jitted; save what one rank holds, the state at the end while it changes, and all after half."""
    module = tfn.fsdp(tfn.jit(model()), mesh)
    held = sum(part.numel() for part in module.parts().values())
    optimizer, half = adam(module), STEPS // 2
    losses = go_on(module, optimizer, rank, size, batches()[:half])
    save_half(module, optimizer, folder)
    losses += go_on(module, optimizer, rank, size, batches()[half:])
    torch.save((losses, held, module.state_dict()), folder / f"fsdp_{rank}.pt")
    saving: Any = dcp.async_save(module.sharded_state_dict(), checkpoint_id=folder / "checkpoint")
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()  # training goes on while the file is written
    saving.result()


def ddp_losses(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """Train replicas."""
    module = tfn.ddp(tfn.jit(model()), mesh)
    losses = train(module, rank, size)
    torch.save((losses, 0, module.state_dict()), folder / f"ddp_{rank}.pt")


def load(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """Read a checkpoint that another number of ranks wrote."""
    module = tfn.fsdp(model(), mesh)
    state = module.sharded_state_dict()
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    again = tfn.fsdp(model(), mesh)
    again.load_state_dict(state)  # DTensors
    assert all(torch.equal(value, again.parts()[name]) for name, value in module.parts().items())
    torch.save(module.state_dict(), folder / f"loaded_{size}_{rank}.pt")


def save_half(module: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Save the parameters and what the optimizer keeps, with another rate than it goes on with."""
    optimizer.param_groups[0]["lr"] = 5e-3
    state = {"model": module.sharded_state_dict(), "optimizer": module.sharded_optimizer_state_dict(optimizer)}
    with tfn.parameters.watched("save"):
        dcp.save(state, checkpoint_id=folder / "half")
    optimizer.param_groups[0]["lr"] = 1e-2


def resume(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """Go on with what another number of ranks saved, read in place or given as DTensors; the losses are those of one process."""
    module, again = tfn.fsdp(tfn.jit(model()), mesh), tfn.fsdp(model(), mesh)
    optimizer, another = adam(module), adam(again)
    state = {"model": module.sharded_state_dict(), "optimizer": module.sharded_optimizer_state_dict(optimizer)}
    dcp.load(state, checkpoint_id=folder / "half")
    module.load_optimizer_state_dict(optimizer, state["optimizer"])
    again.load_optimizer_state_dict(another, state["optimizer"])
    for one, other in zip(module.parameters(), again.parameters(), strict=True):
        assert optimizer.state[one]["step"] == another.state[other]["step"] == STEPS // 2
        assert torch.equal(optimizer.state[one]["exp_avg_sq"], another.state[other]["exp_avg_sq"])
    whole = model()
    whole_optimizer = adam(whole)
    go_on(whole, whole_optimizer, 0, 1, batches()[: STEPS // 2])
    for each in (whole_optimizer, optimizer):
        assert each.param_groups[0]["lr"] == (1e-2 if each is whole_optimizer else 5e-3)
    whole_optimizer.param_groups[0]["lr"] = 5e-3
    left = batches()[STEPS // 2 :]
    go_on(module, optimizer, rank, size, left)
    go_on(whole, whole_optimizer, 0, 1, left)
    torch.testing.assert_close(module.state_dict(), whole.state_dict(), rtol=1e-6, atol=1e-6)


PLAN = {"*.up.weight": "column", "*.down.weight": "row", "tokens.weight": "embedding", "*norm.*": "sequence"}


class Layer(torch.nn.Module):
    """A column and a row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(12, 24), torch.nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Inner(torch.nn.Module):
    """A parameter of each form in which ranks store some, those that no plan splits among them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = torch.nn.Embedding(11, 12), torch.nn.ModuleList([Layer()])
        self.norm, self.head = torch.nn.LayerNorm(12), torch.nn.Linear(12, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks[0](self.tokens(tokens))))


class WithScale(torch.nn.Module):
    """Few parameters, and one of no dims."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.scale = Inner().double(), torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens) * self.scale


def few() -> Inner:
    """A model that is quickly captured."""
    return WithScale().inner


def save_shares(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """Save what tensor parallel ranks hold, and those that are sharded or replicated over the other dim of a mesh."""
    grid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "tp"))
    plan = {f"inner.{pattern}": style for pattern, style in PLAN.items()}
    expected, shares = WithScale().state_dict(), tfn.tensor_parallel(tfn.jit(WithScale()), grid["tp"], plan)
    for name, module in {
        "tp": tfn.tensor_parallel(WithScale(), mesh, plan),
        "fsdp_tp": tfn.fsdp(shares, grid["outer"]),
        "ddp_tp": tfn.ddp(shares, grid["outer"]),
        "hybrid": tfn.fsdp(WithScale(), grid),
    }.items():
        state = module.sharded_state_dict()
        assert all(
            torch.equal(value.full_tensor().reshape(expected[key].shape), expected[key]) for key, value in state.items()
        )
        dcp.save(state, checkpoint_id=folder / name)
    uneven = tfn.fsdp(tfn.tensor_parallel(torch.nn.Linear(2, 5), grid["tp"], {"weight": "column"}), grid["outer"])
    try:
        uneven.sharded_state_dict()
    except RewriteError as error:
        (folder / f"uneven_{rank}.txt").write_text(message_of(error))


def stored(mesh: DeviceMesh, name: str) -> Any:
    """Shares of codes and of adapters, which are not zero."""
    module = WithScale() if name == "adapters" else tfn.quantize(WithScale(), name)
    module = tfn.fsdp(tfn.lora(module, 2), mesh)
    with torch.no_grad():
        for part, value in module.parts().items():
            if part.endswith("lora_b"):
                value.fill_(0.25)
    return module


def save_adapters(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """Save adapters beside the weights."""
    save_stored(mesh, "adapters", rank, folder)


def save_stored(mesh: DeviceMesh, name: str, rank: int, folder: Path) -> None:
    """Save codes and adapters as they are stored, and the whole state."""
    module = stored(mesh, name)
    state = module.sharded_state_dict()
    assert "inner.blocks.0.up.weight.lora_a" in state
    dcp.save(state, checkpoint_id=folder / name)
    expected = module.state_dict()
    if rank == 0:
        torch.save(expected, folder / f"{name}.pt")


def saved_schemes(folder: Path) -> list[str]:
    """The schemes of which codes and adapters were saved."""
    return [name for name in STORED if (folder / f"{name}.pt").exists()]


def save_codes(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """Save codes and adapters as they are stored, and codes of shares."""
    save_stored(mesh, "nf4", rank, folder)
    grid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "tp"))
    for name in ROUNDED:
        module = tfn.fsdp(rounded_shares(grid["tp"], name), grid["outer"])
        dcp.save(module.sharded_state_dict(), checkpoint_id=folder / f"rounded_{name}")
        expected = module.state_dict()
        if rank == 0:
            torch.save(expected, folder / f"rounded_{name}.pt")


def rounded_shares(tp: DeviceMesh, scheme: str) -> Any:
    """Codes that each rank of tensor parallelism has made of its own shares, biases of columns among these."""
    plan = {f"inner.{pattern}": style for pattern, style in PLAN.items()} | {"*.up.bias": "column"}
    return tfn.quantize(tfn.tensor_parallel(WithScale(), tp, plan), scheme)


def load_rounded(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """Read codes of shares on as many ranks as made them, which were sharded besides then."""
    for name in ROUNDED:
        expected = torch.load(folder / f"rounded_{name}.pt")
        module, again = rounded_shares(mesh, name), rounded_shares(mesh, name)
        state = module.sharded_state_dict()
        for value in state.values():
            value.zero_()
        dcp.load(state, checkpoint_id=folder / f"rounded_{name}")
        torch.testing.assert_close(module.state_dict(), expected, rtol=0, atol=0)
        with torch.no_grad():
            for part, value in again.parts().items():
                if not part.endswith("rank"):
                    value.zero_()
        again.load_state_dict(state)
        assert all(torch.equal(value, again.parts()[part]) for part, value in module.parts().items())


def load_codes(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """Read them on another number of ranks: in place, and from DTensors."""
    for name in saved_schemes(folder):
        expected = torch.load(folder / f"{name}.pt")
        module, again = stored(mesh, name), stored(mesh, name)
        state = module.sharded_state_dict()
        dcp.load(state, checkpoint_id=folder / name)
        torch.testing.assert_close(module.state_dict(), expected, rtol=0, atol=0)
        again.load_state_dict(state)
        torch.testing.assert_close(again.state_dict(), expected, rtol=0, atol=0)


def load_shares(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """Read them on another number of ranks, split in another way."""
    plan = {f"inner.{pattern}": style for pattern, style in PLAN.items()}
    for name in ("tp", "fsdp_tp", "ddp_tp", "hybrid"):
        for module in (tfn.fsdp(WithScale(), mesh), tfn.tensor_parallel(WithScale(), mesh, plan)):
            state = module.sharded_state_dict()
            for value in state.values():
                value.zero_()
            dcp.load(state, checkpoint_id=folder / name)
            torch.testing.assert_close(module.state_dict(), WithScale().state_dict(), rtol=0, atol=0)
            module.load_state_dict(state)


def compose(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """Quantised and sharded in either order, shares of layers, clipping, and one reduction for many batches, as modules."""
    tokens, plan = batches()[0][:, :-1], {"*.up.weight": "column", "*.down.weight": "row", "tokens.weight": "embedding"}
    rounded = tfn.quantize(few(), "int8")(tokens)
    sharded, reverse = (
        tfn.fsdp(tfn.quantize(tfn.jit(few()), "int8"), mesh),
        tfn.quantize(tfn.fsdp(tfn.jit(few()), mesh), "int8"),
    )
    for module in (sharded, reverse):
        torch.testing.assert_close(module(tokens), rounded)
        assert list(module.state_dict()) == list(few().state_dict())
    whole, shares = few(), tfn.tensor_parallel(tfn.jit(few()), mesh, plan)
    for module in (whole, shares):
        module(tokens).square().mean().backward()
    torch.testing.assert_close(shares(tokens), whole(tokens))
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
    torch.testing.assert_close(shares.clip_grad_norm_(0.01), norm, check_dtype=False)
    module, own = tfn.fsdp(tfn.jit(few()), mesh), tokens.chunk(size)[rank]
    with module.accumulate():
        for part in own.chunk(2):
            (module(part).square().mean() / 2).backward()
    torch.testing.assert_close(module.clip_grad_norm_(1.0), norm, check_dtype=False)


def planned(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """The plan of a pipeline."""
    compile_plan(size, few(), {"micro": (2,), "stages": (2,)})


def planned_blocks(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """The plan of checkpoints and micro-batches."""
    module = few()
    compile_plan(size, module, {"micro": (2,), "blocks": [*module.blocks], "keeps": ("none",)})


def compile_plan(size: int, module: torch.nn.Module, choices: dict[str, Any]) -> None:
    """A loss compiled with the plan of a search: the loss and the gradients are those of eager, of the whole batch."""
    params = {name: value.detach() for name, value in module.named_parameters()}

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(module, params, (x,)).flatten(0, 1), y.flatten())

    x, y = batches()[0][:, :-1], batches()[0][:, 1:]
    own = {name: value.clone().requires_grad_() for name, value in params.items()}
    value = loss(own, x, y)
    value.backward()
    grads: Any = {name: p.grad for name, p in own.items()}
    empty = {name: p.to("meta") for name, p in params.items()}, *(t.chunk(size)[0].to("meta") for t in (x, y))
    found: Any = tfn.plan(loss, empty, "h100", size, search=choices)
    step: Any = tfn.compile(loss, recipe=found.recipe, executors="torch")
    part = step.part(x, y)
    held = step.prepare(params, *part)
    its, mine = step(held, *part)
    its = its.clone()
    dist.all_reduce(its)
    torch.testing.assert_close(its / size, value.detach())
    expected = step.cut.prepare(grads)
    for name, grad in mine.items():
        torch.testing.assert_close(expected[name] if grad is not None else None, grad)


def pipelined(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """Steps of a pipeline, eager and jitted: those of a loop over micro-batches, to the bit."""
    module, micro = model(4), size
    params = {name: value.detach() for name, value in module.named_parameters()}
    tokens = batches()[0]

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(module, params, (x,)).flatten(0, 1), y.flatten())

    own = {name: value.clone().requires_grad_() for name, value in params.items()}
    parts = [loss(own, part[:, :-1], part[:, 1:]) / micro for part in tokens.chunk(micro)]
    for part in parts:
        part.backward()
    value = torch.stack([part.detach() for part in parts]).cumsum(0)[-1]
    for name, f, stages in (
        ("gpipe", loss, size),
        ("zero_bubble", tfn.jit(loss), size),
        ("interleaved", loss, 2 * size),
    ):
        step = tfn.pipeline(f, mesh, stages=stages, micro=micro, schedule=name)
        held = tfn.pipeline(loss, mesh, stages=stages, micro=micro, schedule=name).prepare(
            params, tokens[:, :-1], tokens[:, 1:]
        )
        found, grads = step(held, tokens[:, :-1], tokens[:, 1:])
        assert torch.equal(found, value)
        assert 0 < sum(grad is not None for grad in grads.values()) < len(grads)
        for key, grad in grads.items():
            assert (grad is None) == held[key].is_meta
            assert grad is None or torch.equal(grad, own[key].grad), key


def attend(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """Attention over the positions of all ranks, with gradients: those of one process."""
    x = torch.randn(1, size, 4 * size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def f(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x.sin(), x, mask, is_causal=mask is None).square().sum()

    seen = (torch.arange(4 * size)[:, None] - torch.arange(4 * size)).abs() < 3
    for kind, balanced, mask in (("ring", True, None), ("all_to_all", False, None), ("ring", False, seen)):
        if balanced == (size == 2):  # the ring of more than two has a direction
            continue
        places = tfn.parameters.positions(mesh, balanced=balanced)
        own = places.part(x, 2), None if mask is None else places.part(mask, 0)
        found = tfn.grad(tfn.context_parallel(f, mesh, kind, balanced=balanced))(*own)
        torch.testing.assert_close(found, places.part(tfn.grad(f)(x, mask), 2))


def send_tokens(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """Experts on all ranks, with gradients: those of one process."""
    tokens = torch.randn(4 * size * size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    indices = torch.arange(4 * size * size).reshape(-1, 1) % (2 * size)
    experts, weights = torch.stack([torch.eye(3, dtype=torch.float64) * i for i in range(2 * size)]), indices * 0.5
    for ragged in (False, True):
        taken = indices // 2 if ragged else indices  # nobody takes the last experts
        given = [each[rank:] if ragged else each for each in (tokens, taken, weights.double())]
        moe = tfn.expert_parallel(lambda w, x: x @ w, mesh, 2 * size, ragged=ragged)
        step = tfn.jit(tfn.grad_and_value(lambda x, i, w, moe=moe: moe(experts.chunk(size)[rank], x, i, w).sum()))
        scale, (dx, value) = given[1] * given[2], step(*given)
        torch.testing.assert_close((dx, value), (scale.expand_as(dx), (given[0] * scale).sum()))


def overlapped(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """Products in chunks, of which one travels while the next is computed: the step of one process."""
    draw = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    params, x = {"norm": draw(3), "up": draw(4 * size, 3), "down": draw(3, 4 * size)}, draw(2, 2 * size, 3)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(F.layer_norm(x, (3,), params["norm"]), params["up"])
        return (x + F.linear(h.sin(), params["down"])).square().sum()

    f = tfn.tensor_parallel(loss, mesh, {"norm": "sequence", "up": "column", "down": "row"}, chunks=2)
    own, others = (new := f.prepare(params)).partition(lambda name: new[name].is_floating_point())
    step = tfn.grad_and_value(lambda own, others, x: f(new.replaced(own, others), x))
    grads, value = tfn.jit(tfn.parameters.overlap(step))(own, others, x)
    expected, whole = tfn.grad_and_value(loss)(params, x)
    shares = {"up": expected["up"].chunk(size)[rank], "down": expected["down"].chunk(size, 1)[rank]}
    torch.testing.assert_close((dict(grads), value), (expected | shares, whole))


def stay_away(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """The last rank does not take part, in a group that waits two seconds."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    module = tfn.fsdp(tfn.jit(model()), DeviceMesh.from_group(group, "cpu"))
    train(module, rank, size, steps=1)
    if rank == size - 1:
        time.sleep(5)
        return
    try:
        train(module, rank, size, steps=1)
    except DistributedError as error:
        (folder / f"away_{rank}.txt").write_text(message_of(error))


class Branches(torch.nn.Module):
    """Two layers alike, of which a call takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.left(x) if left else self.right(x)


def disagree(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """After many calls the last rank takes another branch, in a group of its own: what it sends is not what the others expect."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    torch.manual_seed(0)
    module, last = tfn.fsdp(tfn.jit(Branches()), DeviceMesh.from_group(group, "cpu")), rank == size - 1
    with torch.no_grad():
        for _ in range(heartbeat.COMPARED + 10):
            module(torch.ones(1, 4), True)
    try:
        module(torch.ones(1, 4), not last)
    except DistributedError as error:
        (folder / f"disagrees_{rank}.txt").write_text(message_of(error))


def begin_apart(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """Ranks whose models, options or random numbers are not the same; who comes later says so."""
    odd = rank == size - 1
    begins: dict[str, Callable[[Any], Any]] = {
        "values": lambda mesh: (torch.manual_seed(rank), tfn.ddp(torch.nn.Linear(3, 4), mesh)),
        "shapes": lambda mesh: tfn.fsdp(torch.nn.Linear(3, 4 + odd), mesh),
        "names": lambda mesh: tfn.fsdp(torch.nn.Linear(3, 4, bias=odd), mesh),
        "options": lambda mesh: tfn.fsdp(torch.nn.Linear(3, 4), mesh, reduction="sum" if odd else "mean"),
        "loaded": lambda mesh: tfn.fsdp(torch.nn.Linear(2, 1), mesh).load_state_dict(
            {"weight": torch.full((1, 2), float(rank)), "bias": torch.ones(1)}
        ),
        "adapters": lambda mesh: (m := tfn.ddp(torch.nn.Linear(3, 4), mesh), torch.manual_seed(rank), tfn.lora(m, 2)),
    }
    for name, begin in begins.items():
        torch.manual_seed(0)
        own = DeviceMesh.from_group(dist.new_group(), "cpu")
        try:
            begin(own)
        except DistributedError as error:
            (folder / f"begins_{name}_{rank}.txt").write_text(message_of(error))


def load_on_three(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """All but the last rank read what all have saved: parameters, what the optimizer keeps, and codes."""
    group = dist.new_group([*range(size - 1)])
    if rank == size - 1:
        return
    fewer = DeviceMesh.from_group(group, "cpu")
    saved, module = torch.load(folder / "fsdp_0.pt")[2], tfn.fsdp(model(), fewer)
    state = module.sharded_state_dict()
    dcp.load(state, checkpoint_id=folder / "checkpoint", process_group=group)
    torch.testing.assert_close(module.state_dict(), saved, rtol=0, atol=0)
    optimizer = adam(module)
    half = {"model": module.sharded_state_dict(), "optimizer": module.sharded_optimizer_state_dict(optimizer)}
    dcp.load(half, checkpoint_id=folder / "half", process_group=group)
    module.load_optimizer_state_dict(optimizer, half["optimizer"])
    whole = model()
    whole_optimizer = adam(whole)
    go_on(whole, whole_optimizer, 0, 1, batches()[: STEPS // 2])
    torch.testing.assert_close(module.state_dict(), whole.state_dict(), rtol=1e-6, atol=1e-6)
    names = list(module.sharded_optimizer_state_dict(optimizer)["state"])
    assert len(names) == len(list(whole.named_parameters()))
    for name, value in whole.named_parameters():
        moment = half["optimizer"]["state"][name]["exp_avg"].full_tensor()
        torch.testing.assert_close(moment, whole_optimizer.state[value]["exp_avg"], rtol=1e-6, atol=1e-6)
    for scheme in saved_schemes(folder):
        module = stored(fewer, scheme)
        state = module.sharded_state_dict()
        dcp.load(state, checkpoint_id=folder / scheme, process_group=group)
        torch.testing.assert_close(module.state_dict(), torch.load(folder / f"{scheme}.pt"), rtol=0, atol=0)


def beside_pytorch(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """fsdp and ddp beside FSDP2 and DDP of PyTorch: losses of each rank, shards, and state, which each takes from the other."""
    theirs, replicas = model(), torch.nn.parallel.DistributedDataParallel(model())
    for block in (*theirs.blocks, theirs):
        fully_shard(block, mesh=mesh)
    ours, copies = tfn.fsdp(tfn.jit(model()), mesh), tfn.ddp(tfn.jit(model()), mesh)
    with warnings.catch_warnings(action="ignore"):  # of FSDP2, that results are views
        expected = train(theirs, rank, size, steps=3)
    for module in (replicas, ours, copies):
        torch.testing.assert_close(train(module, rank, size, steps=3), expected, rtol=1e-9, atol=1e-9)
    state, own = theirs.state_dict(), ours.sharded_state_dict()
    assert list(state) == list(own)
    for name, value in state.items():
        assert own[name].placements == value.placements and own[name].to_local().shape == value.to_local().shape
    whole = {name: value.full_tensor() for name, value in state.items()}
    for module in (replicas.module, ours, copies):
        torch.testing.assert_close(module.state_dict(), whole, rtol=1e-6, atol=1e-9)
    ours.load_state_dict(state)
    torch.testing.assert_close(ours.state_dict(), whole, rtol=0, atol=0)
    theirs.load_state_dict(tfn.fsdp(model(), mesh).sharded_state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(value.full_tensor(), model().state_dict()[name])


def die(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """The last rank ends inside of a forward, where it would gather the second block."""
    module = tfn.fsdp(tfn.jit(model()), mesh)
    train(module, rank, size, steps=1)
    if rank == size - 1:
        heartbeat._heart.sends = lambda _, what: os._exit(7) if what.endswith("for blocks.1") else None
    train(module, rank, size, steps=2)


def die_before_reducing(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """The last rank ends before the gradients that were accumulated are reduced."""
    module = tfn.fsdp(tfn.jit(model()), mesh)
    with module.accumulate():
        module(batches()[0][:, :-1]).square().mean().backward()
        if rank == size - 1:
            os._exit(7)


def die_one_by_one(mesh: DeviceMesh, rank: int, size: int, folder: Path) -> None:
    """The last rank of a group ends in a backward, then that of the others while all save, then one before clipping."""
    groups = [dist.new_group([*range(left)], timeout=datetime.timedelta(seconds=5)) for left in range(size, 1, -1)]
    x = torch.ones(2, 4)

    def backward(module: Any, group: Any, dies: bool) -> None:
        y = module(x)
        if dies:
            y.register_hook(lambda _: os._exit(7))
        y.sum().backward()

    def save(module: Any, group: Any, dies: bool) -> None:
        state = module.sharded_state_dict()
        if dies:
            os._exit(7)
        with tfn.parameters.watched("save"):
            dcp.save(state, checkpoint_id=folder / "unfinished", process_group=group)

    def clip(module: Any, group: Any, dies: bool) -> None:
        module(x).sum().backward()
        if dies:
            os._exit(7)
        module.clip_grad_norm_(1.0)

    for act, group in zip((backward, save, clip), groups, strict=True):
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
        module = tfn.fsdp(tfn.jit(net), DeviceMesh.from_group(group, "cpu"))
        module(x).sum().backward()
        try:
            act(module, group, rank == dist.get_world_size(group) - 1)
        except DistributedError as error:
            (folder / f"{act.__name__}_{rank}.txt").write_text(message_of(error))
        store, left = default_store(), dist.get_world_size(group) - 1
        store.set(f"{act.__name__} {rank}", "")  # some have waited for the others until the group's time was over
        store.wait([f"{act.__name__} {other}" for other in range(left)])
    os._exit(0)  # the process group cannot be ended in order


SCENARIOS: dict[str, Callable[[DeviceMesh, int, int, Path], None]] = {
    scenario.__name__: scenario
    for scenario in (
        fsdp_losses,
        ddp_losses,
        save_shares,
        save_codes,
        save_adapters,
        load,
        load_shares,
        load_codes,
        load_rounded,
        resume,
        compose,
        pipelined,
        planned,
        planned_blocks,
        attend,
        send_tokens,
        overlapped,
        stay_away,
        disagree,
        begin_apart,
        load_on_three,
        beside_pytorch,
        die_before_reducing,
        die_one_by_one,
        die,
    )
}


GIVEN_UP = ("stay_away",)
"""Scenarios whose collectives nobody can wait for."""


def run_rank(ports: int, rank: int, size: int, folder: Path, names: list[str]) -> None:
    """Join the other ranks and run scenarios, one after the other in one process group."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)
    store = dist.TCPStore("127.0.0.1", int(os.read(ports, DIGITS)))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (size,))
    left = 0
    for name in names:
        SCENARIOS[name](mesh, rank, size, folder)
        before, left = left, unwaited_collectives()
        assert left == before or name in GIVEN_UP, f"{name}: {left - before} are sent and not waited for"
        dist.barrier()  # gloo's threads outlive a rank that leaves while others still talk to it
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # DTensors' caches keep the group, whose threads may abort a process that ends as Python does


DIGITS = 5
"""Of a port, as it is told."""


def run_group(number: int, size: int, folder: Path, names: list[str]) -> list[forks.Done]:
    """Run each rank in a fork; how these ended. Their store outlives one that dies, and none has its threads."""
    ports, told = os.pipe()
    files = [folder / f"written_{number}_{rank}.txt" for rank in range(size)]
    ranks = [partial(run_rank, ports, rank, size, folder, names) for rank in range(size)]
    pids = list(map(forks.start, ranks, files))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(told, f"{store.port:0{DIGITS}}".encode() * size)
    return list(map(forks.wait, pids, files))


def derive(folder: Path) -> None:
    """Run once in this process what every rank runs first: rules are derived, modules imported."""
    tokens, x = batches()[0][:, :-1], torch.ones(1, 1, 4, 3, dtype=torch.float64)
    train(tfn.jit(model()), 0, 1, steps=1)
    for scheme in {"int8", *STORED, *ROUNDED} - {"adapters"}:
        tfn.lora(tfn.quantize(WithScale(), scheme), 2).state_dict()
    tfn.lora(WithScale(), 2).state_dict()
    tfn.quantize(tfn.jit(model()), "int8")(tokens).sum().backward()
    tfn.grad(tfn.jit(lambda x: F.scaled_dot_product_attention(x, x.sin(), x).square().sum()))(x)
    with warnings.catch_warnings(action="ignore"):  # it says that it saves in one process
        dcp.save({"x": x}, checkpoint_id=folder / "warm")
        dcp.load({"x": x}, checkpoint_id=folder / "warm")


def main(folder: Path, groups: list[str]) -> list[list[forks.Done]]:
    """Run the groups one after the other. What is derived here, all ranks know."""
    torch.set_num_threads(1)
    derive(folder)
    split = [group.partition(":") for group in groups]
    return [run_group(number, int(size), folder, names.split(",")) for number, (size, _, names) in enumerate(split)]


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])))
