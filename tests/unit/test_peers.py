"""The exchange of torch.func's names in other people's modules."""

from __future__ import annotations

import importlib
import sys
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
