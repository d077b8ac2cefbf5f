"""The common setup of all tests: threads (one, or TEST_THREADS), an order, Hypothesis profiles, golden files, a
browser.
"""

from __future__ import annotations

import builtins
import gc
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis.database import DirectoryBasedExampleDatabase

import thunder_fn.api  # noqa: F401  # structured ops have their rules, whichever test runs alone
from tests.quick import left_out
from thunder_fn import torch_internals as internals
from thunder_fn.ir import memos
from thunder_fn.jitted.autograd.bridge import Bridge
from thunder_fn.torch_internals import patches

# Workers hold what hundreds of tests import: a full collection takes a second, and there is little to collect.
gc.set_threshold(20_000, 20, 50)
THREADS = os.environ.get("TEST_THREADS", "1")
torch.set_num_threads(int(THREADS))
# Processes that tests start: threads that spin for each other beside another worker take minutes for a second's work.
os.environ.setdefault("OMP_NUM_THREADS", THREADS)

# One failure is enough for CI, and its explanation may take longer than the tests.
hypothesis.settings.register_profile(
    "fast",
    max_examples=50,
    derandomize=True,
    deadline=None,
    print_blob=True,
    report_multiple_bugs=False,
    phases=set(hypothesis.Phase) - {hypothesis.Phase.explain},
)
# In CI Hypothesis is derandomised and forgets by default; the nightly job keeps the examples that broke a law.
hypothesis.settings.register_profile(
    "thorough",
    max_examples=2000,
    derandomize=False,
    database=DirectoryBasedExampleDatabase(Path(__file__).parents[1] / ".hypothesis" / "examples"),
    deadline=None,
    print_blob=True,
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

collect_ignore = ["nullgpu", "typing"]  # run inside of PyTorch's CUDA build; read by a type checker

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the files in tests/golden instead of comparing"
    )
    parser.addoption("--quick", action="store_true", help="every n-th member of large families; see tests/quick.py")
    parser.addoption("--random-order", metavar="SEED", help="run tests in an order of their own; 'fresh' draws a seed")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--random-order") == "fresh":
        config.option.random_order = str(random.randrange(10**6))


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("--random-order")
    return f"--random-order {seed}" if seed else None


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Make no item of what `--quick` leaves out, two of three: each worker would make all of them. One stays."""
    yield
    if metafunc.config.getoption("--quick") and metafunc._calls:
        test = f"{metafunc.definition.parent.nodeid}::{metafunc.function.__name__}"
        calls = {f"{test}[{call.id}]": call for call in metafunc._calls}
        later = left_out(calls)
        metafunc._calls[:] = [call for name, call in calls.items() if name not in later] or metafunc._calls[:1]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        later = {item.nodeid for item in items if left_out([item.nodeid])}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in later])
        items[:] = [item for item in items if item.nodeid not in later]
    if seed := config.getoption("--random-order"):
        random.Random(seed).shuffle(items)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares text with tests/golden/name.txt, or writes it there under --update-golden."""
    update = request.config.getoption("--update-golden")

    def compare(name: str, text: str) -> None:
        path, text = GOLDEN / f"{name}.txt", text.rstrip("\n") + "\n"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"there is no {path.name} yet: `make golden` writes it, `git diff` shows what"
        assert text == path.read_text(), f"differs from {path.name}: if that is meant, `make golden` rewrites it"

    return compare


FLAGS: tuple[Callable[[], Any], ...] = (
    *(torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled, torch.is_grad_enabled, torch.get_default_dtype),
    *(torch.get_deterministic_debug_mode, torch.is_autocast_cache_enabled, torch.is_warn_always_enabled),
    *(torch.get_num_threads, torch.get_float32_matmul_precision, torch.get_default_device, torch.backends.flags_frozen),
    lambda: torch.is_autocast_enabled("cpu"),
    lambda: {name: value for name, value in vars(builtins).items() if name != "_"},
)
"""State of the process that a test may change, and leaves as it was."""


@pytest.fixture(autouse=True)
def _same_process() -> Iterator[None]:
    """A test draws the same numbers whatever ran before it, and neither it nor what it tests changes the process for others."""
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` writes down where it was called: milliseconds
    before = [flag() for flag in FLAGS]
    yield
    after = [flag() for flag in FLAGS]
    assert before == after, f"flags of the process were {before} and are {after}"
    assert not internals.function_modes(), "a torch function mode is left"
    assert not patches.replaced_here(), "a capture of this thread is not over for PyTorch's functions"


@pytest.fixture(autouse=True, scope="module")
def _empty_memos() -> Iterator[None]:
    """A file's traces go with it: what looks through all objects, as the collector does, is as fast at the end."""
    yield
    memos.clear_caches(rules=False)


@pytest.fixture
def by_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd follows no small program op by op: our own backward runs."""
    monkeypatch.setattr(Bridge, "followed", None)


CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """The browser that CHROMIUM names, or one on the PATH."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    path = find_chromium()
    if path is None:
        pytest.skip(f"none of {', '.join(CHROMIUM)} is on the PATH (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
