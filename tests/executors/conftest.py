"""Compiled code of these tests is kept in a folder of their own, and is compiled without optimisation, which is quicker."""

from __future__ import annotations

from pathlib import Path

import pytest

from thunder_fn import torch_internals_inductor as internals


@pytest.fixture(autouse=True, scope="package")
def compile_folder(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """One folder for all tests of the package: equal regions are compiled once."""
    command = internals.build_command

    def quick(source: Path, target: Path) -> str:
        return command(source, target).replace("-O3", "-O0")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THUNDER_FN_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setattr(internals, "build_command", quick)
        yield
