"""fsdp and ddp: laws on simulated ranks, and training on real ones."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import thunder_fn as tfn
from tests.distributed import worker
from tests.forks import Done
from tests.messages import message_of
from thunder_fn.distributed.ranks import evaluate_ranks
from thunder_fn.errors import RewriteError
from thunder_fn.executors import lower
from thunder_fn.interpreters.fsdp import Fsdp
from thunder_fn.interpreters.quantize.step import Quantize
from thunder_fn.interpreters.rewriting.filters import matrices
from thunder_fn.interpreters.rewriting.rewrite import identity
from thunder_fn.parameters import SCHEMES, Group, simulated

ROOT = Path(__file__).parents[2]


class Block(nn.Module):
    """Shapes that no number of ranks divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width + 1)
        self.down = nn.Linear(width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = self.embedding(indices)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


TRANSFORMS: dict[str, Any] = {
    "fsdp": tfn.fsdp,
    "zero=2": lambda f, mesh: tfn.fsdp(f, mesh, zero=2),
    "each": lambda f, mesh: tfn.fsdp(f, mesh, bucket="each"),
    "ddp": tfn.ddp,
    "ddp each": lambda f, mesh: tfn.ddp(f, mesh, bucket="each"),
}


def problem(width: int = 5, depth: int = 2, size: int = 3) -> tuple[Any, dict[str, torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    module = Net(width, depth).double()
    params = {name: value.detach() for name, value in module.named_parameters()}

    def loss(params: Any, indices: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(module, params, (indices,)), indices)

    return loss, params, [torch.randint(0, 7, (4,)) for _ in range(size)]


# ---- laws, on simulated ranks ----


@pytest.mark.parametrize("name", TRANSFORMS)
@given(size=st.integers(1, 4), width=st.sampled_from([1, 4, 5]), depth=st.integers(0, 2))
@settings(max_examples=2, deadline=None)
def test_n_ranks_equal_one(name: str, size: int, width: int, depth: int) -> None:
    loss, params, batches = problem(width, depth, size)
    functions = [TRANSFORMS[name](loss, group) for group in simulated(size)]
    shards = [f.prepare(params) for f in functions]
    gradient = tfn.trace(tfn.grad_and_value(functions[0]), shards[0], batches[0])
    tfn.check(gradient)
    results = evaluate_ranks(gradient, [[*s.values(), b] for s, b in zip(shards, batches, strict=True)])
    expected = tfn.grad(lambda p: torch.stack([loss(p, b) for b in batches]).mean())(params)
    for rank, batch in enumerate(batches):
        torch.testing.assert_close(results[rank][-1], loss(params, batch))
    restore = functions[0].rewrite(params, batches[0]).restore
    for rank_grads in evaluate_ranks(restore, [result[:-1] for result in results]):
        torch.testing.assert_close(dict(zip(sorted(params), rank_grads, strict=True)), expected)


def test_restoring_gathers_the_very_bits() -> None:
    loss, params, batches = problem()
    functions = [tfn.fsdp(loss, group) for group in simulated(3)]
    restore = functions[0].rewrite(params, batches[0]).restore
    for values in evaluate_ranks(restore, [list(f.prepare(params).values()) for f in functions]):
        assert all(torch.equal(params[name], value) for name, value in zip(sorted(params), values, strict=True))


@pytest.mark.parametrize("name", ["fsdp", "zero=2"])
def test_a_block_is_gathered_in_one_collective_and_again_for_its_backward(name: str) -> None:
    loss, params, batches = problem(depth=3)
    f = TRANSFORMS[name](loss, simulated(3)[0])
    program = str(lower(tfn.trace(tfn.grad(f), f.prepare(params), batches[0])))
    forward = 3 + 3  # blocks, and the embedding, the head and the scale
    again = 3 + 2 if name == "fsdp" else 0  # blocks, the head and the scale; the embedding's backward does not read it
    assert program.count("all_gather_into_tensor_default(") == forward + again
    assert program.count("reduce_scatter_tensor_default(") == forward


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_fsdp_and_quantize_commute(scheme: str) -> None:
    loss, params, batches = problem()
    groups = simulated(3)
    first = [tfn.fsdp(tfn.quantize(loss, scheme), group) for group in groups]
    second = [tfn.quantize(tfn.fsdp(loss, group), scheme) for group in groups]
    alone = tfn.quantize(loss, scheme)
    whole = alone.prepare(params)
    for f, g in zip(first, second, strict=True):
        assert f.rewrite(params, batches[0]) == g.rewrite(params, batches[0])
    compute = first[0].rewrite(params, batches[0]).compute
    inputs = [[*f.prepare(params).values(), batch] for f, batch in zip(first, batches, strict=True)]
    for (value,), batch in zip(evaluate_ranks(compute, inputs), batches, strict=True):
        torch.testing.assert_close(value, alone(whole, batch))


def both_orders(scheme: str, size: int) -> list[tuple[list[Any], list[Any]]]:
    """For each rank, the rows of the whole weight's parts, and the parts of the rank's own rows."""
    w, x = torch.randn(12, 8), torch.randn(2, 8)
    trace, quantise = tfn.trace(lambda w, x: F.linear(x, w), w, x), Quantize(SCHEMES[scheme], matrices)
    found: list[tuple[list[Any], list[Any]]] = []
    for group in simulated(size):
        shard = Fsdp(group, 3, "block", "mean")
        first = identity(trace, ["w"]).then(quantise).then(shard)
        second = (
            identity(trace, ["w"]).then(shard).then(quantise)
        )  # of each rank's rows, which the front ends do not do
        tfn.check(second.compute)
        found.append((list(tfn.evaluate(first.prepare, [w])), list(tfn.evaluate(second.prepare, [w]))))
    return found


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sharding_and_rounding_commute_where_each_row_has_a_scale_of_its_own(scheme: str, size: int) -> None:
    for rows, own in both_orders(scheme, size):
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(rows, own, strict=True))


@pytest.mark.parametrize("scheme", ["fp8_tensor", "nf4"])
def test_they_do_not_where_ranks_share_scales(scheme: str) -> None:
    """The witness: a scale of the whole tensor, or a mean of all blocks, is not that of some rows."""
    rows, own = both_orders(scheme, 2)[0]
    assert any(a.shape != b.shape or not torch.equal(a.float(), b.float()) for a, b in zip(rows, own, strict=True))


def test_static_steps_of_activations_commute_too() -> None:
    loss, params, batches = problem()
    params = {name: value.float() for name, value in params.items()}
    alone = tfn.quantize(loss, "int8_static")
    whole = alone.calibrate(alone.prepare(params), [(batch,) for batch in batches])
    functions = [tfn.fsdp(alone, group) for group in simulated(3)]
    compute = functions[0].rewrite(params, batches[0]).compute
    inputs = [[*whole.with_step(f.steps[-1]).values(), batch] for f, batch in zip(functions, batches, strict=True)]
    for (value,), batch in zip(evaluate_ranks(compute, inputs), batches, strict=True):
        torch.testing.assert_close(value, alone(whole, batch))


def test_adapters_are_sharded_too() -> None:
    loss, params, batches = problem()
    functions = [tfn.fsdp(tfn.lora(loss, 2), group) for group in simulated(2)]
    compute = functions[0].rewrite(params, batches[0]).compute
    inputs = [[*f.prepare(params).values(), batch] for f, batch in zip(functions, batches, strict=False)]
    for (value,), batch in zip(evaluate_ranks(compute, inputs), batches, strict=False):
        torch.testing.assert_close(value, loss(params, batch))


# ---- errors ----


def test_misuse() -> None:
    loss, _, _ = problem()
    with pytest.raises(RewriteError) as error:
        tfn.fsdp(loss, 4)
    assert message_of(error.value) == (
        "expected a DeviceMesh, given an int\n"
        'Write `torch.distributed.device_mesh.init_device_mesh("cpu", (size,))` under torchrun.'
    )
    with pytest.raises(RewriteError) as error:
        tfn.fsdp(Net(2, 1), simulated(2)[0]).state_dict()
    assert message_of(error.value) == (
        "restore: the 2 ranks of fsdp are simulated and cannot answer\n"
        "Run `rewrite(params, ...).restore` with `evaluate_ranks`."
    )
    with pytest.raises(RewriteError) as error:
        tfn.fsdp(Net(2, 1), simulated(2)[0])(torch.tensor([1]))
    assert message_of(error.value) == (
        "fsdp_Net: the 2 ranks of fsdp are simulated and cannot answer\n"
        "Run `rewrite(params, ...).compute` with `evaluate_ranks`."
    )
    for module, why in (
        (tfn.ddp(nn.Linear(2, 3), simulated(2)[0]), "no mesh has shares of them"),
        (tfn.fsdp(nn.Linear(2, 3), simulated(2)[0]), "no mesh has shares of them"),
        (tfn.fsdp(tfn.quantize(nn.Linear(2, 3), "int8"), simulated(2)[0]), "no mesh has shares of them"),
    ):
        with pytest.raises(RewriteError) as error:
            module.sharded_state_dict()
        assert message_of(error.value) == (
            f"sharded_state_dict: the parameters are no DTensors: {why}\nUse `state_dict`, which has whole parameters."
        )
    with pytest.raises(RewriteError, match=r"fsdp: zero is 2 or 3, given 1"):
        tfn.fsdp(loss, simulated(2)[0], zero=1)
    for precision in ("bf16", torch.float8_e4m3fn):
        with pytest.raises(
            RewriteError, match=rf"fsdp: precision is a floating dtype of 16 bits or more, given {precision!r}"
        ):
            tfn.fsdp(loss, simulated(2)[0], precision=precision)
    with pytest.raises(RewriteError, match=r"fsdp: offload is True or False, given 'cpu'"):
        tfn.fsdp(loss, simulated(2)[0], offload="cpu")
    with pytest.raises(RewriteError, match=r"a rank lies between 0 and the number of ranks, given 2 of 2"):
        Group("g", 2, 2)


# ---- real ranks ----


DIE = "die"
"""The end of groups whose last rank ends with status 7, on which the others end with an error."""


def launch(folder: Path, *groups: str) -> list[list[Done]]:
    """Run groups of ranks, one group after the other, each rank a process of its own; how these ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.distributed.worker", str(folder), *groups]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=480)
    assert done.returncode == 0, done.stderr
    ended = [[Done(*rank) for rank in ranks] for ranks in json.loads(done.stdout)]
    for group, ranks in zip(groups, ended, strict=True):
        dies = group.rpartition(",")[2].rpartition(":")[2].startswith(DIE)
        survivors, others = (1, 7) if dies else (0, 0)
        codes = [*[survivors] * (len(ranks) - 1), others]
        if group.endswith("die_one_by_one"):
            codes = [0, *[7] * (len(ranks) - 1)]
        assert [rank.returncode for rank in ranks] == codes, "\n".join(rank.text for rank in ranks)
    return ended


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """The files that four ranks and then two wrote. In the last scenarios ranks die.

    With `--quick`, each scenario runs on one number of ranks, and those whose parts others have are left out.
    """
    folder, every = tmp_path_factory.mktemp("ranks"), not pytestconfig.getoption("--quick")
    on_four = ["fsdp_losses", "save_shares", "save_codes", "load_on_three"]
    on_two = ["ddp_losses", "load", "load_shares", "load_codes", "load_rounded", "resume", "compose", "pipelined"]
    on_two += ["attend", "send_tokens", "beside_pytorch", "begin_apart", "stay_away", "disagree", "die"]
    if every:
        on_four = ["pipelined", "save_adapters", "attend", *on_four]
        on_two = ["overlapped", "planned", "planned_blocks", *on_two]
    four, two = f"4:{','.join(on_four)}", f"2:{','.join(on_two)}"
    _, (first, second), (reducing, _), *_ = launch(
        folder, four, two, "2:die_before_reducing", *["4:die_one_by_one"] * every
    )
    (folder / "died.txt").write_text(first.text)
    (folder / "died_before_reducing.txt").write_text(reducing.text)
    assert not second.text
    return folder


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The results of one process on whole batches."""
    module = worker.model()
    return worker.train(module, 0, 1), module.state_dict()


def check_same(folder: Path, name: str, size: int, alone: tuple[list[float], dict[str, torch.Tensor]]) -> int:
    """The mean loss of the ranks, and every rank's state, are those of one process. The greatest share of a rank."""
    found = [torch.load(folder / f"{name}_{rank}.pt") for rank in range(size)]
    mean = torch.tensor([losses for losses, _, _ in found]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(alone[0]), rtol=1e-6, atol=1e-6)
    for _, _, state in found:
        torch.testing.assert_close(state, alone[1], rtol=1e-6, atol=1e-6)
    return max(held for _, held, _ in found)


def test_fsdp_on_four_ranks(folder: Path, alone: Any) -> None:
    held = check_same(folder, "fsdp", 4, alone)
    total = sum(value.numel() for value in alone[1].values())
    largest = sum(value.numel() for name, value in alone[1].items() if name.startswith("blocks.0."))
    assert held <= total / 4 * 1.05 + largest


def test_ddp_on_two_ranks(folder: Path, alone: Any) -> None:
    check_same(folder, "ddp", 2, alone)


def test_process_groups_are_freed(tmp_path: Path) -> None:
    """A process whose groups are there when Python ends may be aborted by their threads, which PyTorch leaves running then."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("the threads of a process are counted on Linux only")

    def threads() -> int:
        gc.collect()
        names = list[str]()
        for task in tasks.iterdir():
            with suppress(OSError):  # a thread that ends meanwhile
                names.append((task / "comm").read_text())
        return sum("gloo_runloop" in name for name in names)

    def train() -> None:
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("rows",))
        module = tfn.fsdp(tfn.jit(nn.Linear(2, 3)), mesh)
        module(torch.ones(1, 2)).sum().backward()
        assert module.sharded_state_dict()["weight"].device_mesh == mesh
        assert threads() > before
        dist.destroy_process_group()

    before = threads()
    train()
    assert threads() == before


def test_saved_on_four_ranks_and_loaded_on_two_and_on_one(folder: Path, tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    worker.load(mesh, 0, 1, folder)
    worker.load_shares(mesh, 0, 1, folder)
    worker.load_codes(mesh, 0, 1, folder)
    worker.resume(mesh, 0, 1, folder)
    dist.destroy_process_group()
    state = torch.load(folder / "fsdp_0.pt")[2]
    for name in ("loaded_2_0.pt", "loaded_2_1.pt", "loaded_1_0.pt"):
        loaded = torch.load(folder / name)
        assert all(torch.equal(value, loaded[key]) for key, value in state.items())


def test_shares_that_no_dtensor_has(folder: Path) -> None:
    assert {(folder / f"uneven_{rank}.txt").read_text() for rank in range(4)} == {
        "sharded_state_dict: no DTensor lies as 'weight' does: dim 0 of 5 is split by 2 and then 2 ranks, which do not "
        "divide it\nUse `state_dict`, which has whole parameters, or sizes that the ranks divide."
    }


def test_a_rank_that_dies_is_an_error_on_the_others(folder: Path) -> None:
    error = (folder / "died.txt").read_text()
    assert "_c10d_functional.wait_tensor.default: rank 1 of 2 cannot be reached" in error
    assert "in equation:" in error and "from:" in error and "worker.py" in error


def test_a_rank_that_stays_away_is_an_error_on_the_others(folder: Path) -> None:
    error = (folder / "away_0.txt").read_text()
    assert "rank 1 of 2 did not take part in time; the process is alive: computing\n" in error
    assert "in equation:" in error and "wait_tensor" in error


def test_ranks_that_do_not_send_the_same_are_an_error(folder: Path) -> None:
    """One of them says so before it sends; the other finds that nobody is there."""
    errors = [(folder / f"disagrees_{rank}.txt").read_text() for rank in range(2)]
    sent = [f"all_gather_into_tensor of f32[10] for {name}" for name in ("left", "right")]
    said = [f"rank {1 - rank} runs {sent[1 - rank]} where this rank runs {sent[rank]}\n" for rank in range(2)]
    assert sum(text in error for text, error in zip(said, errors, strict=True)) == 1
    assert all("in equation:" in error and "worker.py" in error for error in errors)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("values", "bias is not the same on rank "),
        ("adapters", "the state of torch's generator is not the same on rank "),
        ("loaded", "weight is not the same on rank "),
        ("shapes", " has other parameters: bias: f32["),
        ("names", " has other parameters: "),
        ("options", "reduction=sum, precision=None, offload=False, prefetch=1)"),
    ],
)
def test_ranks_begin_with_the_same(folder: Path, name: str, text: str) -> None:
    (error,) = folder.glob(f"begins_{name}_*.txt")
    assert text in error.read_text()


def test_a_rank_that_dies_before_a_reduction_is_an_error_on_the_others(folder: Path) -> None:
    error = (folder / "died_before_reducing.txt").read_text()
    assert "_c10d_functional.wait_tensor.default: rank 1 of 2 cannot be reached" in error and "in equation:" in error


@pytest.mark.parametrize(
    ("moment", "left", "gone"), [("backward", 3, "rank 3"), ("save", 2, "ranks 2, 3"), ("clip", 1, "rank 1")]
)
def test_wherever_a_rank_dies_all_others_raise(folder: Path, moment: str, left: int, gone: str) -> None:
    """In a backward, while all save, in a collective outside of a program: survivors name who of their group is gone, of all
    where no group is known, and where they wait."""
    for rank in range(left):
        error = (folder / f"{moment}_{rank}.txt").read_text()
        assert f": {gone} of 4 cannot be reached" in error
        assert error.startswith("save: " if moment == "save" else "_c10d_functional.wait_tensor.default: ")
        assert moment == "save" or ("in equation:" in error and "worker.py" in error)
    assert not (folder / f"{moment}_{left}.txt").exists()
