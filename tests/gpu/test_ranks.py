"""Several ranks, each on a GPU of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import ranks
from tests.gpu.conftest import IS_SIMULATED

SIZE = 2


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def test_each_rank_has_a_gpu_of_its_own() -> None:
    """All ranks agree on the types of their parameters, though these are on devices of other indices."""
    if not IS_SIMULATED and torch.cuda.device_count() < SIZE:
        pytest.skip("there is one GPU")
    environment, port = os.environ | {"NULLCUDA_DEVICES": str(SIZE)}, free_port()
    command = [sys.executable, "-m", "tests.gpu.ranks"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(SIZE), port],
            env=environment,
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    texts = [process.communicate(timeout=3600) for process in processes]
    refused = list[str]()
    for process, (out, err) in zip(processes, texts, strict=True):
        assert process.returncode == 0, err[-3000:]
        errors, error = json.loads(out.splitlines()[-1])
        refused.append(error)
        assert errors.keys() == ranks.WAYS.keys()
        assert all(error < 1e-5 for error in errors.values()), errors
    assert sum("the state of torch's generator for cuda is not the same" in error for error in refused) == 1
