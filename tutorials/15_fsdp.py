# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Train on many ranks
#
# `fsdp` shards parameters over the ranks of a mesh. Every rank runs one script, here for twenty steps on batches of its own:

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
import thunder_fn as tfn


def main():  # what it holds is freed when it returns, the process group's threads too
    dist.init_process_group("gloo")  # "nccl" on GPUs
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)  # all ranks begin with the same parameters
    model = tfn.fsdp(tfn.jit(nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3))), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)  # of this rank's rows
    torch.manual_seed(1 + dist.get_rank())
    for step in range(20):
        x = torch.randn(5, 6)  # this rank's batch
        loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
        loss.backward()
        model.clip_grad_norm_(1.0)  # of all ranks
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model.sharded_state_dict(), "optimizer": model.sharded_optimizer_state_dict(optimizer)}
    with tfn.parameters.watched("save"):  # an error names the ranks that are lost
        dcp.save(state, checkpoint_id=sys.argv[1])  # any number of ranks may load it
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, loss {loss.item():.3f}, rank 0 has", *(tuple(p.shape) for p in model.parameters()))
    dist.destroy_process_group()


main()
"""
with tempfile.TemporaryDirectory() as folder:
    script = Path(folder) / "train.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]  # `torchrun --nproc-per-node 2`
    done = subprocess.run([*torchrun, str(script), f"{folder}/saved"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(Path(folder, "saved").glob("*.distcp"))
print(done.stdout)
assert "rank 0 has (4,) (4, 6) (2,) (2, 7)" in done.stdout

# %% [markdown]
# What happens is in the trace, so it can be looked at, and run, without any other rank: here the ranks are **simulated**.
# `simulated(n)` stands for n ranks in one process, and `evaluate_ranks` runs a trace on all of them in step. That is the
# reference to which real ranks are compared, and a way to debug a sharded function in one process.

# %%
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.parameters import evaluate_ranks, simulated

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3))
params = {name: p.detach() for name, p in model.named_parameters()}


def loss(params, x, y):
    return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)


ranks = [tfn.fsdp(loss, group) for group in simulated(2)]
shards = [rank.prepare(params) for rank in ranks]
print(shards[0])  # 7 rows on 2 ranks: 4 and 3, padded

batches = [(torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in ranks]
gradient = tfn.trace(tfn.grad_and_value(ranks[0]), shards[0], *batches[0])
text = str(gradient)
assert "all_gather_into_tensor" in text and "reduce_scatter_tensor" in text

# %% [markdown]
# Nobody wrote a backward for sharding. The forward gathers, and the derivative of an all-gather is a reduce-scatter, by PyTorch's
# own formula. All ranks run the same trace, each on its rows and its batch.

# %%
results = evaluate_ranks(gradient, [[*own.values(), *batch] for own, batch in zip(shards, batches, strict=True)])
restore = ranks[0].rewrite(params, *batches[0]).restore
found, _ = evaluate_ranks(restore, [grads[:-1] for grads in results])


# %% [markdown]
# The law: on N ranks with a batch each, the gradient is that of one rank on the mean of all losses.


# %%
def mean_loss(params):
    return torch.stack([loss(params, *batch) for batch in batches]).mean()


expected = tfn.grad(mean_loss)(params)
for name, value in zip(sorted(params), found, strict=True):
    assert torch.allclose(value, expected[name], atol=1e-6), name

# %% [markdown]
# ## Memory
#
# A block gathers its parameters in one collective, one block ahead of the one that computes (`prefetch=1`). Under ZeRO-3 they are
# gathered again for the backward instead of kept: the function is a checkpoint that keeps everything else. ZeRO-2 keeps them.


# %%
def gathers(zero):
    sharded = tfn.fsdp(loss, simulated(2)[0], zero=zero)
    trace = tfn.trace(tfn.grad_and_value(sharded), sharded.prepare(params), *batches[0])
    return str(tfn.executors.lower(trace)).count("all_gather_into_tensor_default(")


assert (gathers(2), gathers(3)) == (2, 3)  # the last layer's weight is read by its backward, the first one's is not

# %% [markdown]
# ## Sharding composes
#
# Quantise, then shard, or shard, then quantise: one program, in which codes are gathered rather than weights.

# %%
one = tfn.fsdp(tfn.quantize(loss, "int8"), simulated(2)[0])
two = tfn.quantize(tfn.fsdp(loss, simulated(2)[0]), "int8")
assert one.rewrite(params, *batches[0]) == two.rewrite(params, *batches[0])
print(one.prepare(params))

# %% [markdown]
# ## Shares of a layer
#
# `tensor_parallel` splits the work on one batch: a plan says which weights are cut by columns, rows, vocabulary or sequence.
# Every rank computes its share of the layer, and what crosses the layer's border is communicated.

# %%
plan = {"0.weight": "column", "2.weight": "row"}
shares = [tfn.tensor_parallel(loss, group, plan) for group in simulated(2)]
own = [rank.prepare(params) for rank in shares]
print(own[0])
compute = shares[0].rewrite(params, *batches[0]).compute
for (value,) in evaluate_ranks(compute, [[*part.values(), *batches[0]] for part in own]):  # one batch for all ranks
    assert torch.allclose(value, loss(params, *batches[0]))

# %% [markdown]
# On a mesh of two dims both go together, in either order: `tfn.fsdp(tfn.tensor_parallel(model, mesh["tp"], plan), mesh["fsdp"])`.
#
# ## What must not hold
#
# A mesh is a mesh.

# %%
try:
    tfn.fsdp(loss, 8)
except tfn.errors.RewriteError as error:
    print(error)
else:
    raise AssertionError("eight is a mesh")

# %% [markdown]
# ## Where this lives
#
# `thunder_fn/interpreters/fsdp.py`, `ddp.py` and `tensor_parallel/` beside it. Groups, saved state and the simulated
# ranks: `thunder_fn/distributed/`.
