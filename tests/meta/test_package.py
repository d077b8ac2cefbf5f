"""The distributions: built, installed where nothing of the checkout is seen, and used as a stranger would."""

from __future__ import annotations

import email
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import thunder_fn
from thunder_fn import errors
from thunder_fn.explain import KINDS
from thunder_fn.extras import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LEFT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "node_modules", "*_out")


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a command in an environment in which nothing says where the checkout is. Returns what it prints."""
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env={**clean, **env}, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the source distribution, which is built from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, folder / "checkout", ignore=LEFT)
    build = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    run(sys.executable, "-c", build, "build_sdist", folder, cwd=folder / "checkout")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)
    unpacked = next(path for path in folder.glob("thunder_fn-*") if path.is_dir())
    assert (unpacked / "tests" / "meta").is_dir() and (unpacked / "Makefile").is_file()
    run(sys.executable, "-c", build, "build_wheel", folder, cwd=unpacked)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel, and the dependencies of this one without the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    found = next(folder.glob("bin/python*"), folder / "Scripts" / "python.exe")
    site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    # A path file's lines are folders to look into; path files in those folders, such as an editable installation's, stay unread.
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", found, "--disable-pip-version-check")
    run(*pip, "install", "-qq", "--no-deps", "--no-index", "--no-compile", "--ignore-installed", wheel, cwd=folder)
    return found


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"thunder_fn", "thunder_fn_pytest.py"}
    assert {"thunder_fn/py.typed", "thunder_fn/__init__.pyi"} <= names
    assert any(name.startswith("thunder_fn/inspect/assets/") for name in names)
    cpp = {path.relative_to(ROOT).as_posix() for path in (ROOT / "thunder_fn").glob("executors/*/cpp/*")}
    assert cpp and cpp <= names
    assert {f"thunder_fn/error_pages/{kind.__name__}.md" for kind in KINDS} <= names


def test_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == thunder_fn.__version__
    assert all(metadata[key] for key in ("Summary", "Author", "Keywords", "License-Expression", "Requires-Python"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    classifiers = metadata.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers and len(classifiers) > 5
    text = str(metadata.get_payload())
    assert "make demo" in text and "![" not in text.replace("](https:", ""), "an index shows absolute links only"


def test_the_index_shows_pictures_where_a_repository_is_known() -> None:
    convert = runpy.run_path(str(ROOT / "setup.py"))["readme_of_index"]
    text = "A [page](docs/limits.md), [above](#top).\n\n![What](docs/a.png)\n\nAfter, [far](https://b.example/c).\n"
    assert convert(text, None) == "A page, [above](#top).\n\nAfter, [far](https://b.example/c).\n"
    assert convert(text, "https://a.example/r/") == (
        "A [page](https://a.example/r/blob/HEAD/docs/limits.md), [above](#top).\n\n"
        "![What](https://a.example/r/raw/HEAD/docs/a.png)\n\nAfter, [far](https://b.example/c).\n"
    )


FIRST_MINUTE = """
import runpy, sys, pathlib
import thunder_fn as tfn

assert pathlib.Path(tfn.__file__).is_relative_to(sys.prefix), tfn.__file__
shown = runpy.run_path(sys.argv[1])
text = pathlib.Path(sys.argv[2]).read_text()
assert shown["executed"](text) == text, "the README's code prints something else"
from thunder_fn.__main__ import main

assert main(["--version"]) == 0
assert main(["explain", "captureerror"]) == 0
"""


def test_readme_and_commands_run_from_the_installed_wheel(python: Path, tmp_path: Path) -> None:
    shown, readme = ROOT / "docs" / "tools" / "shown.py", ROOT / "README.md"
    printed = run(python, "-c", FIRST_MINUTE, shown, readme, cwd=tmp_path)
    assert printed.startswith(f"thunder_fn {thunder_fn.__version__}, torch ")
    page = (ROOT / "docs" / "errors" / "CaptureError.md").read_text()
    assert printed.endswith(
        re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", page)
    )  # a terminal has no use for the targets of links


def test_the_command_is_installed(python: Path) -> None:
    command = next(python.parent.glob("thunder-fn*"))
    assert "from thunder_fn.__main__ import script" in command.read_text(errors="ignore")


def test_a_type_checker_reads_the_installed_types(python: Path, tmp_path: Path) -> None:
    """Only of a package with `py.typed` does pyright refuse names that the package imports for itself."""
    (tmp_path / "probe.py").write_text("import thunder_fn as tfn\n\nreveal_type(tfn.errors.site())\ntfn.importlib\n")
    command = (sys.executable, "-m", "pyright", "--pythonpath", python, "--outputjson", "probe.py")
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True)
    said = [item["message"] for item in json.loads(done.stdout)["generalDiagnostics"]]
    assert 'Type of "tfn.errors.site()" is "str | None"' in said
    assert any('"importlib" is not' in message and 'module "thunder_fn"' in message for message in said)


def test_types_are_as_the_examples_say(python: Path, tmp_path: Path) -> None:
    """Of the installed package, `reveal_type` and errors of each line of `tests/typing` are those that stand behind it."""
    files = sorted((ROOT / "tests" / "typing").glob("*.py"))
    for file in files:
        (tmp_path / file.name).write_text(file.read_text())
    command = (sys.executable, "-m", "pyright", "--pythonpath", python, "--outputjson", *(file.name for file in files))
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True)
    said = defaultdict[tuple[str, int], list[str]](list)
    for item in json.loads(done.stdout)["generalDiagnostics"]:
        said[Path(item["file"]).name, item["range"]["start"]["line"]].append(item["message"])
    for file in files:
        for number, line in enumerate(file.read_text().splitlines()):
            found, (_, kind, text) = said[file.name, number], re.split(r"  # (type|error): |$", line, maxsplit=1)
            wanted = f'is "{text}"' if kind == "type" else text
            assert any(wanted in message for message in found) if wanted else not found, (file.name, line, found)


# ---- extras ----


def test_each_optional_package_has_its_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    assert not [(package, name) for package, name in EXTRAS.items() if package not in extras[name]]


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from thunder_fn.__main__ import COMMANDS, main

for command in COMMANDS:
    try:
        main([command, "--help"])
    except SystemExit as stopped:
        assert stopped.code == 0, command
    else:
        raise AssertionError(command)
"""


def test_help_needs_no_extra(tmp_path: Path) -> None:
    packages = " ".join((*EXTRAS, "jax", "thunder", "triton"))
    assert "usage:" in run(sys.executable, "-c", BLOCKED, packages, cwd=tmp_path, PYTHONPATH=str(ROOT))


# ---- the address of the documentation ----


def test_errors_end_with_an_address_where_the_metadata_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = email.message_from_string("Project-URL: Documentation, https://a.example/docs/\n")
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: metadata)
    errors.site.cache_clear()
    try:
        assert errors.GradError().__notes__ == [
            "Docs: python -m thunder_fn explain GradError, or https://a.example/docs/errors/GradError.html"
        ]
    finally:
        errors.site.cache_clear()


# ---- a release ----


def test_the_citation_has_the_version() -> None:
    assert f"version: {thunder_fn.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_release_installs_what_its_tests_need() -> None:
    """The extras that `test` is made of, but for the site's, which it does not build."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    named = lambda text: set(re.search(r"\[([\w,]+)\]", text)[1].split(","))  # type: ignore[index]
    tests = next(entry for entry in PROJECT["optional-dependencies"]["test"] if entry.startswith("thunder_fn["))
    installed = next(line for line in text.splitlines() if "dist/*.whl" in line).partition("whl)")[2]
    assert named(installed) == named(tests) - {"docs"}


def test_the_release_tests_every_version_that_the_metadata_allows() -> None:
    """Python's versions stand in the classifiers, PyTorch's in the dependencies."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    pythons, torches = (json.loads(re.search(rf"{name}: (\[.*\])", text)[1]) for name in ("python", "torch"))  # type: ignore[index]
    assert [f"Programming Language :: Python :: {version}" for version in pythons] == [
        entry for entry in PROJECT["classifiers"] if re.search(r"3\.\d+$", entry)
    ]
    last = int(torches[-1].partition(".")[2])
    assert f"torch>={torches[0]},<2.{last + 1}" in PROJECT["dependencies"]
