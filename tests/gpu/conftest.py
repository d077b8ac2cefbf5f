"""Tests on a CUDA device, real or simulated (`tests/nullgpu`); without one they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

IS_SIMULATED = "nullcuda" in os.environ.get("LD_PRELOAD", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/gpu/" in item.path.as_posix()]
    for item in here:
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip("there is no CUDA device; `make test-gpu` simulates one"))
        elif item.get_closest_marker("launches") and not IS_SIMULATED:
            item.add_marker(pytest.mark.skip("launches are counted on the simulated GPU"))


@pytest.fixture(autouse=True)
def nothing_without_values(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every kernel that the simulated GPU launched in the test has computed its values, unless it looks at none."""
    is_valueless = request.node.get_closest_marker("valueless") is not None
    if not IS_SIMULATED or os.environ.get("NULLGPU_VALUES") == "0" or is_valueless:
        yield
        return
    import nullgpu_values

    before = nullgpu_values.counters()["uncovered"]
    yield
    counters = nullgpu_values.counters()
    assert counters["uncovered"] == before, counters["uncovered_names"]


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Numbers are the same in each run: a derivative that is nearly zero has a large relative error."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def the_context_lives() -> Iterator[None]:
    """An error of a kernel belongs to the test that launched it."""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
