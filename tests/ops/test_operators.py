"""Every operator of PyTorch's operator database: trace and evaluate, and reverse mode, against eager.

Three plain samples and one of each other kind in one real dtype, one of each kind in complex numbers, one plain sample
in the other real dtype. `make thorough` takes three of each dtype, `OPS_SAMPLES=all` all samples.
`python -m tests.ops.sweep` prints the rates.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

import thunder_fn as tfn
from tests.ops.exceptions import EXEMPTIONS
from tests.ops.samples import KINDS, OPS, RIGHT, cases
from tests.ops.sweep import failures

ALL = os.environ.get("OPS_SAMPLES") == "all"


def all_failures(name: str, what: str, *, mainly: torch.dtype) -> list[str]:
    """The failures of an operator in every dtype, most samples in the dtype that says most about the sweep."""
    if ALL:
        return failures(name, what, None)
    (other,) = {torch.float32, torch.float64} - {mainly}
    found = failures(name, what, 3, (mainly,)) + failures(name, what, 1, (torch.complex64,))
    return found + failures(name, what, 1, (other,), kinds=("plain",))


@pytest.mark.parametrize("name", OPS)
def test_forward(name: str) -> None:
    assert not all_failures(name, "forward", mainly=torch.float32)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.supports_autograd])
def test_gradient(name: str) -> None:
    assert not all_failures(name, "gradient", mainly=torch.float64)


def test_exceptions_are_of_operators_and_kinds_that_exist() -> None:
    for entry in EXEMPTIONS:
        assert entry.op in OPS and set(entry.kinds) <= set(KINDS) and entry.reason


@pytest.mark.parametrize("name", RIGHT)
def test_which_formula_is_right(name: str) -> None:
    """PyTorch's derivative fails `gradcheck`; that of the function which stands for it in the sweeps passes."""
    verdicts = []
    for case in cases(name, torch.float64, 3, requires_grad=True, kinds=("plain",)):
        given = [arg.detach().requires_grad_() for arg in case.args if isinstance(arg, torch.Tensor)]
        call = lambda f, *xs, case=case: f(*xs, *case.args[len(xs) :], **case.kwargs)
        right, ours, theirs = (
            torch.autograd.gradcheck(partial(call, f), given, raise_exception=False)
            for f in (case.oracle, tfn.jit(case.function), case.function)
        )
        assert torch.equal(case.function(*case.args, **case.kwargs), case.oracle(*case.args, **case.kwargs))
        assert right and ours
        verdicts.append(theirs)
    assert not all(verdicts), "PyTorch has it right now"


@pytest.mark.parametrize(
    "shapes", [((0, 4, 5), (3, 5)), ((4, 5), (0, 5)), ((2, 4, 0), (3, 0)), ((0, 1, 4, 5), (2, 3, 5))]
)
def test_distances_of_nothing(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """The backward of `cdist` has then the shape of one operand, not of the broadcast batch."""
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    f = lambda a, b: torch.cdist(a, b, 0.5).sum()
    want = torch.autograd.grad(f(*given), given)
    found = tfn.grad(f, argnums=(0, 1))(*(x.detach() for x in given))
    assert [x.shape for x in found] == [x.shape for x in want] and all(map(torch.equal, found, want))
    tfn.hessian(f, argnums=(0, 1))(*(x.detach() for x in given))
