"""Hooks that MkDocs calls while it builds the site: pages are made, examples and tutorials run.

    python -m mkdocs build --strict

DOCS_TUTORIALS=0 shows tutorials without running them, DOCS_EXAMPLES=0 does so for the other pages, for a look at the layout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)

from docs.tools import api, errors, shown, tutorial

TUTORIALS = (*sorted((ROOT / "tutorials").glob("[0-9]*.py")), ROOT / "tutorials" / "teach.py")
TUTORIALS_RUN, EXAMPLES_RUN = (os.environ.get(name, "1") != "0" for name in ("DOCS_TUTORIALS", "DOCS_EXAMPLES"))


def on_config(config: Any) -> Any:
    """The contents: what is written in mkdocs.yml, then tutorials, API and errors."""
    config.nav = [
        *config.nav,
        {"Tutorials": [f"tutorials/{path.stem}.md" for path in TUTORIALS]},
        {"API": [f"api/{name}" for name in api.pages()]},
        {"Errors": ["errors/index.md", *(f"{errors.FOLDER}/{kind.__name__}.md" for kind in errors.KINDS)]},
        {"Project": ["architecture.md", "changelog.md"]},
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Pages that are made rather than written."""
    made = {f"api/{name}": text for name, text in api.pages().items()}
    made["errors/index.md"] = errors.index()
    made["architecture.md"] = (ROOT / "ARCHITECTURE.md").read_text()
    made["changelog.md"] = (ROOT / "CHANGELOG.md").read_text()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # of processes that it waits for
        for path, text in zip(TUTORIALS, pool.map(tutorial_page, TUTORIALS), strict=True):
            made[f"tutorials/{path.stem}.md"] = text
            made[f"tutorials/{path.name}"] = path.read_text()
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def tutorial_page(path: Path) -> str:
    """The page of a tutorial, which runs in a process of its own.

    Raises:
        PluginError: it raised.
    """
    relative = path.relative_to(ROOT)
    if not TUTORIALS_RUN:
        return tutorial.page(relative, run=False)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "docs.tools.tutorial", relative], capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        raise PluginError(f"{relative} failed:\n{done.stderr}")
    return done.stdout


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Run the examples of a page that is written.

    Raises:
        PluginError: it shows something else than its code prints.
    """
    if EXAMPLES_RUN and page.file.generated_by is None and shown.executed(markdown) != markdown:
        raise PluginError(
            f"{page.file.src_uri}: its code prints something else than it shows; `make golden` writes it anew"
        )
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """The law of a function stands out."""
    return html.replace("<p>Law: ", '<p class="law"><strong>Law</strong> ').replace(
        "<p>Source: ", "<p><em>Source</em> "
    )
