"""Facts about ops: they name ops that exist, ops of other libraries have none of them, and they hold of what the ops do."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thunder_fn as tfn
from thunder_fn.ir import facts, ops
from thunder_fn.ir.facts import Leaves
from thunder_fn.testing.samples import samples, tensor_of

SETS = {name: value for name, value in vars(facts).items() if isinstance(value, Leaves)}
PACKAGE = Path(tfn.__file__).parent


@pytest.mark.parametrize("name", SETS)
def test_every_op_exists(name: str) -> None:
    for op in SETS[name]:
        namespace, *rest = op.split(".")
        if namespace == "aten":
            packet = getattr(torch.ops.aten, rest[0])
            assert len(rest) == 1 or rest[1] in packet.overloads(), op


def test_a_name_is_every_overload_or_one() -> None:
    leaves = Leaves("add mul.Tensor", "thunder_fn.key_normal")
    assert "thunder_fn.key_normal.default" in leaves and "aten.key_normal.default" not in leaves
    assert "aten.add.Scalar" in leaves and "aten.mul.Tensor" in leaves and ops.leaf(torch.ops.aten.add.Tensor) in leaves
    assert "aten.mul.Scalar" not in leaves and "other.add.Tensor" not in leaves
    assert ops.composite("aten.add.Tensor") not in leaves


@pytest.mark.parametrize("name", ["KEEPS_ORDER", "SPREADS"])
def test_elements_are_those_of_the_first_operand(name: str) -> None:
    seen = 0
    for op, calls in samples().items():
        for call in calls if op in SETS[name] else ():
            x = torch.randn(tensor_of(call[0][0]).shape)
            result = ops.overload(ops.leaf(ops.overload_named(op)))(x, *call[0][1:], **call[1])
            assert set(result.flatten().tolist()) == set(x.flatten().tolist())
            assert name == "SPREADS" or torch.equal(result.flatten(), x.flatten()), op
            seen += 1
    assert seen > 10


# ---- ops of other libraries ----

NAMES = sorted({op.split(".")[1] for value in SETS.values() for op in value} | {"new_gelu", "relu_like"})


@pytest.fixture(scope="module")
def namesakes() -> Any:
    """An op of another library for each name of ATen that a fact is about: cubes its operand."""
    library = torch.library.Library("namesakes", "DEF")
    for name in NAMES:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x**3, "CompositeExplicitAutograd")
        full = f"namesakes::{name}"
        torch.library.register_fake(full, torch.empty_like, lib=library)
        torch.library.register_autograd(
            full,
            lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
            lib=library,
        )
        torch.library.register_vmap(full, lambda info, dims, x: (x**3, dims[0]), lib=library)
    return library, torch.ops.namesakes


def test_ops_of_another_library_are_not_their_namesakes(namesakes: Any) -> None:
    """Values, gradients, batches, checkpoints and programs are those of the user's ops, whatever their names."""
    _, namesake = namesakes
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]])

    def f(x: Tensor) -> Tensor:
        return torch.stack([getattr(namesake, name)(x * 2) + getattr(namesake, name)(x) for name in NAMES]).sum(0)

    def loss(x: Tensor) -> Tensor:
        return f(x).sum()

    values, gradient = len(NAMES) * 9 * x**3, len(NAMES) * 27 * x**2
    assert torch.equal(tfn.jit(f)(x), values)
    assert torch.equal(tfn.vmap(f)(x), values)
    assert torch.equal(tfn.grad(loss)(x), gradient)
    assert torch.equal(tfn.jit(tfn.grad(tfn.checkpoint(loss)))(x), gradient)
    assert torch.equal(tfn.vmap(tfn.grad(loss))(x), gradient)
    trainable = x.clone().requires_grad_()
    tfn.jit(loss)(trainable).backward()
    assert trainable.grad is not None and torch.equal(trainable.grad, gradient)


# ---- where sets of ops stand ----

RULES = {
    "capture/numbers/arithmetic.py": "operators of Python",
    "capture/replaced/stand_ins.py": "methods of tensors",
    "capture/replaced/leaf_ops.py": "ops that are recorded as another one",
    "derived/decompositions.py": "ops that PyTorch differentiates or batches wrongly, beside the formulas for them",
    "derived/leaf_autocast.py": "kernels, and the ops that autocast knows them by",
    "derived/quirks": "rules by op, arguments of reductions, cells of recurrent layers",
    "executors": "what an executor claims, and how it writes it",
    "interpreters/noops.py": "rules by op",
    "interpreters/tensor_parallel/shares.py": "rules by op",
    "parameters/functions.py": "arguments of losses",
    "torch_internals": "rules by op, and functions of SymPy",
    "testing": "programs to draw, and bugs to plant",
    "benchmarks": "what is timed",
}
"""Files and folders in which names of ATen's ops stand side by side, besides `facts`, and why."""


def sets_of_ops(path: Path) -> list[str]:
    """The sets, lists and tuples of two or more names of ATen's ops in a module, written out."""
    known = {f"aten.{name}" for name in dir(torch.ops.aten)} | set(dir(torch.ops.aten))
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Set, ast.Tuple, ast.List)):
            names = [item.value for item in node.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)]
            bases = [
                ".".join(name.split(".")[:2]) if name.startswith("aten.") else name.split(".")[0] for name in names
            ]
            if len(names) >= 2 and all(base in known for base in bases):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {' '.join(names[:4])}")
    return found


def test_sets_of_ops_stand_in_facts() -> None:
    places = [PACKAGE / place for place in (*RULES, "ir/facts.py")]
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if not any(map(path.is_relative_to, places))]
    assert [line for path in paths for line in sets_of_ops(path)] == []
    assert [place for place in places if not place.exists()] == []
