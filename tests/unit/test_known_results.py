"""Remembered results of ops on fake tensors: they are PyTorch's own each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.ops.samples import op_db
from thunder_fn.torch_internals import RecordingMode, known_results

EVERY = 12
"""One op of so many."""
OPS = [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")][::EVERY]


def described(args: Any, result: Any) -> list[Any]:
    """Everything that there is to know of a fake result, and of whose memory it is."""
    memories = [x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    return [
        (
            x.dtype,
            x.shape,
            x.stride(),
            x.storage_offset(),
            x.device,
            memories.index(memory) if memory in memories else None,
        )
        if isinstance(x, torch.Tensor) and (memory := x.untyped_storage()._cdata)
        else x
        for x in tree_leaves(result)
    ]


def recorded(call: Any, args: Any) -> list[Any]:
    """The ops that reach the mode, with what they give, and what PyTorch raises if fake tensors cannot do the call."""
    found: list[Any] = []
    mode = RecordingMode(lambda op, args, kwargs, result: found.append((str(op), described((args, kwargs), result))))
    with mode, mode.silent():
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, args)
    with mode:
        try:
            call(fakes)
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.filterwarnings("ignore")  # PyTorch's samples warn of themselves
@pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.name}{op.variant_test_name and '-'}{op.variant_test_name}")
def test_answers_from_memory_are_those_of_pytorch(op: Any) -> None:
    for sample in list(op.sample_inputs("cpu", torch.float32))[:3]:
        call = lambda given: op.op(given[0], *given[1], **given[2])
        args = sample.input, sample.args, sample.kwargs
        known_results.forget()
        assert recorded(call, args) == recorded(call, args)


def test_a_result_is_computed_once() -> None:
    known_results.forget()
    answers = [recorded(lambda given: torch.softmax(given[0].t(), 0), (torch.ones(2, 3),)) for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(known_results.remembered()) == len(answers[0])


def test_types_of_numbers_and_the_default_dtype_are_asked_about() -> None:
    x = torch.ones(2, dtype=torch.int64)
    add = lambda number: recorded(lambda given: given[0] + number, (x,))[-1][1][0][0]
    known_results.forget()
    assert (add(1), add(1.0), add(True), add(1)) == (torch.int64, torch.float32, torch.int64, torch.int64)
    torch.set_default_dtype(torch.float64)
    try:
        assert add(1.0) == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
