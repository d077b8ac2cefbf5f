"""Programs without Python: AOTInductor's package of an exported program, loaded here and by a program in C++.

They compile for a minute: `make thorough` runs them.
"""

from __future__ import annotations

import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

import thunder_fn as tfn

pytestmark = pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "thorough", reason="`make thorough` runs it")
W = torch.randn(3, 3)
MAIN = r"""
#include <fstream>
#include <iostream>
#include <torch/torch.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

int main(int argc, char** argv) {
  torch::inductor::AOTIModelPackageLoader loader(argv[1]);
  try {
    auto x = torch::arange(3 * std::stoi(argv[2]), torch::kFloat32).reshape({-1, 3}) / 10;
    auto results = loader.run({x});
    std::cout << results[0].sum().item<float>() << std::endl;
  } catch (const std::exception& error) {
    std::cout << "refused" << std::endl;
  }
}
"""


def last(x: torch.Tensor) -> torch.Tensor:
    state = tfn.scan(lambda c, row: ((c @ W + row).tanh(), c.sum()), torch.zeros(3), x)[0]
    return tfn.cond(state.sum() > 0, lambda s: s.sin().sum(), lambda s: (s * 3).sum(), (state,))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The package of a gradient through a scan and a choice, for any number of rows."""
    exported = tfn.export(tfn.grad(last), (torch.randn(4, 3),), dynamic={"x": {0: (2, 32)}})
    path = tmp_path_factory.mktemp("aoti") / "last.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return str(torch._inductor.aoti_compile_and_package(exported, package_path=str(path)))


def test_a_package_is_the_function(package: str) -> None:
    compiled: Any = torch._inductor.aoti_load_package(package)
    for rows in (2, 5, 32):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), tfn.grad(last)(x))
    for rows in (1, 33):
        with pytest.raises(RuntimeError, match="the program is right where"):
            compiled(torch.randn(rows, 3))


def counted(x: torch.Tensor, bound: int | None = None) -> torch.Tensor:
    start = (torch.tensor(0), torch.tensor([0.5]), torch.tensor(1.5), x)
    step = lambda i, a, b, x: (i + 1, a * 2, b + a.sum(), x.sin() * b)
    return tfn.while_loop(lambda i, a, b, x: i < 3, step, start, max_steps=bound)[3]


LOOPS: dict[str, Any] = {
    "while_loop": counted,
    "gradient": tfn.grad(lambda x: counted(x, 4).sum()),
    "vmap": tfn.vmap(counted),
    "fori_loop": lambda x: tfn.fori_loop(0, 3, lambda i, c: (c[0] * 2, c[1] + c[0]), (torch.tensor(0.5), x))[1],
    "scan": lambda x: tfn.scan(lambda c, row: (c + 1, row * c), torch.tensor(0), x)[1],
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_that_begin_with_numbers(name: str, tmp_path: Path) -> None:
    f, x = LOOPS[name], torch.randn(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = torch._inductor.aoti_compile_and_package(tfn.export(f, (x,)), package_path=str(tmp_path / "f.pt2"))
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), f(x))


def test_a_program_in_cpp_runs_a_package(package: str, tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text(MAIN)
    library = Path(torch.__file__).parent / "lib"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    command = ["g++", "-std=c++20", *includes, "main.cpp", "-o", "main", f"-L{library}", f"-Wl,-rpath,{library}"]
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    flags = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    subprocess.run([*command, *flags], cwd=tmp_path, check=True)
    run = lambda rows: subprocess.run(
        ["./main", package, str(rows)], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    for rows in (4, 7):
        x = torch.arange(3 * rows, dtype=torch.float32).reshape(-1, 3) / 10
        assert float(run(rows).stdout) == pytest.approx(tfn.grad(last)(x).sum().item(), rel=1e-4)
    assert "refused" in run(1).stdout
