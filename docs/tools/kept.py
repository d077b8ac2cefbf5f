"""Pages that ran, kept by content in `.cache`: the tests of tutorials write those of tutorials, and
the site takes them. Of the other pages the site keeps that they show what their code prints.
"""

from __future__ import annotations

import hashlib
import warnings
from functools import cache
from pathlib import Path

import torch

from docs.tools import tutorial

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "tutorials"


def place_of(path: Path, ending: str = "md") -> Path:
    """The file of what a page's code gave. Its name has hashes of all that it depends on."""
    return CACHE / f"{path.stem}-{_fingerprint()}-{_digest(path)}.{ending}"


def run(path: Path) -> str:
    """Run a tutorial, in which every warning is an error, and return its page."""
    warnings.simplefilter("error")
    return tutorial.page(path.relative_to(ROOT))


def keep(path: Path) -> None:
    """Run a tutorial and keep its page. What another process writes meanwhile is the same."""
    page, place = run(path), place_of(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_suffix(".new")
    part.write_text(page)
    part.replace(place)


def _digest(*files: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _fingerprint() -> str:
    """A hash of what every page's output depends on: the package, PyTorch, and what runs it."""
    files = (*(ROOT / "thunder_fn").rglob("*.*"), *(ROOT / "docs" / "tools").glob("*.py"))
    sources = sorted(file for file in files if file.is_file() and file.suffix != ".pyc")
    return f"{torch.__version__}-{_digest(*sources)}"
