"""The exchange of torch.func's names in other people's modules, and of torch.compile in PyTorch's tests."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

import thunder_fn as tfn
from tests.peers.plugin.exchange import Finder

LIBRARY = """
import torch
import torch.func as renamed
from torch.func import grad, vmap as mapped
from torch import vmap

used = {"attribute": torch.func.jacrev, "other": torch.func.functional_call, "kept": torch.sin}
"""


def test_names_are_exchanged_in_a_library_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("peer_used", "peer_left"):
        (tmp_path / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [Finder(["peer_used"], "no such folder"), *sys.meta_path])
    used, left = (importlib.import_module(name) for name in ("peer_used", "peer_left"))
    assert (used.grad, used.mapped, used.vmap) == (tfn.grad, tfn.vmap, tfn.vmap)
    assert used.used == {"attribute": tfn.jacrev, "other": tfn.functional_call, "kept": torch.sin}
    assert (left.grad, left.vmap, left.used["attribute"]) == (torch.func.grad, torch.vmap, torch.func.jacrev)
    assert torch.func.grad is not tfn.grad
    for name in ("peer_used", "peer_left"):
        del sys.modules[name]


DRAWN = """
import torch
import torch._dynamo.test_case
from drawn_tests.beside import NAME
from torch._dynamo.testing import CompileCounter, decorator_that_pytorch_does_not_have

class Drawn(torch._dynamo.test_case.TestCase):
    @decorator_that_pytorch_does_not_have(reason="none")
    def test_passes(self):
        counter, x = CompileCounter(), torch.ones(2)
        self.assertEqual(torch.compile(torch.sin, backend=counter)(x), x.sin())
        self.assertEqual(counter.frame_count, 7)
        self.assertEqual(NAME, "the file beside this one, by its package")

    def test_is_wrong(self):
        self.assertIs(torch.compile(torch.sin), torch.sin)

    def test_is_refused(self):
        f = torch._dynamo.optimize("eager", nopython=True)(lambda x: x if x.sum() > 0 else -x)
        self.assertEqual(f(torch.ones(2)), torch.ones(2))

    def test_crashes(self):
        if torch.compile(torch.sin) is not torch.sin:
            raise KeyError("sin")

    def test_says_what_no_other_says(self):
        with self.assertRaises(torch._dynamo.exc.Unsupported):
            torch.compile(lambda x: x + 1)(torch.ones(2))
"""


def _compile(file: Path, how: str, written: Path) -> None:
    """The program, in a process of its own: it exchanges torch.compile for good."""
    from tests.peers.compile import main  # imports Dynamo

    sys.argv = ["compile", str(file), "--how", how]
    with written.open("w") as out, redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()


@pytest.mark.parametrize(
    ("how", "numbers"),
    [
        ("jit", "jit: 1 passed, 1 not applicable, 1 refused, 1 wrong, 1 crashed of 5"),
        ("compile", "compile: 2 passed, 1 not applicable, 0 refused, 1 wrong, 1 crashed of 5"),
        ("eager", "eager: 4 passed, 1 not applicable, 0 refused, 0 wrong, 0 crashed of 5"),
    ],
)
def test_pytorchs_tests_of_compile_end_as_one_of_five(tmp_path: Path, how: str, numbers: str) -> None:
    folder, written = tmp_path / "drawn_tests", tmp_path / "written.txt"
    folder.mkdir()
    (file := folder / "peer_drawn.py").write_text(DRAWN)
    (folder / "beside.py").write_text('NAME = "the file beside this one, by its package"')
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which PyTorch has and which all wait
        process = multiprocessing.get_context("fork").Process(target=_compile, args=(file, how, written))
        process.start()
    process.join(100)
    assert written.read_text().splitlines()[-1] == numbers
