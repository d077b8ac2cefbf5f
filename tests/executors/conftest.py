"""Compiled code of these tests is kept in a folder of their own, and is compiled in the quickest way there is.

That is without optimisation, and with PyTorch's headers read once for all tests.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from thunder_fn.executors.torchinductor.cpp_text import INCLUDE
from thunder_fn.torch_internals import inductor as internals


@pytest.fixture(autouse=True, scope="package")
def compile_folder(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """One folder for all tests of the package: equal regions are compiled once."""
    command = internals.build_command
    headers = tmp_path_factory.mktemp("headers") / "front.h"

    def quick(source: Path, target: Path) -> str:
        text = command(source, target).replace("-O3", "-O0")
        if not headers.exists():
            headers.write_text(f"{INCLUDE}\n#include <Python.h>\n")
            words = [
                word for word in shlex.split(text) if word not in (str(source), str(target), "-o", "-shared", "-g1")
            ]
            words = [word for word in words if not word.startswith(("-l", "-L", "-W")) and word != "-pedantic"]
            subprocess.run([*words, "-w", "-x", "c++-header", str(headers), "-o", f"{headers}.gch"], check=True)
        return f"{text} -include {headers}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THUNDER_FN_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setattr(internals, "build_command", quick)
        yield
