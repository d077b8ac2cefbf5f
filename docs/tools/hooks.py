"""Hooks that MkDocs calls while it builds the site: pages are made, examples and tutorials run.

    python -m mkdocs build --strict

Examples of pages run before tutorials, so that a mistake shows in seconds. A tutorial that ran is
kept in `.cache`, until it, the package or PyTorch changes. DOCS_TUTORIALS=0 shows tutorials without
running them, DOCS_EXAMPLES=0 does so for the other pages, for a look at the layout.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)

from docs.tools import api, errors, links, shown, tutorial

TUTORIALS = (*sorted((ROOT / "tutorials").glob("[0-9]*.py")), ROOT / "tutorials" / "teach.py")
PROGRAMS = tuple(
    path for path in sorted((ROOT / "gallery").glob("[a-z]*.py")) if path.stem != "pictures"
)
CACHE = ROOT / ".cache" / "tutorials"
TUTORIALS_RUN, EXAMPLES_RUN = (
    os.environ.get(name, "1") != "0" for name in ("DOCS_TUTORIALS", "DOCS_EXAMPLES")
)

OWN = tuple(
    f"tutorials/{name}.md"
    for name in (
        *(
            "02_write_an_interpreter",
            "22_an_interpreter_of_your_own",
            "07_laws",
            "08_extend",
            "09_executor",
            "10_fused_kernel",
        ),
        *("12_write_a_recipe", "13_compose_recipes", "teach"),
    )
)
"""Tutorials for those who write operators, executors, interpreters and laws; the others are for
use.
"""


def on_config(config: Any) -> Any:
    """The contents in the order in which they are read: the start, tutorials, guides, and what is
    looked up.
    """
    start, guides = config.nav[:2], config.nav[2:]
    pages = [f"tutorials/{path.stem}.md" for path in TUTORIALS]
    config.nav = [
        *start,
        {"Tutorials": [page for page in pages if page not in OWN]},
        *guides,
        {"Gallery": ["gallery.md", *(f"gallery/{path.stem}.md" for path in PROGRAMS)]},
        {"Make your own": [page for page in pages if page in OWN]},
        {"API": [f"api/{name}" for name in api.pages()]},
        {
            "Errors": [
                "errors/index.md",
                *(f"{errors.FOLDER}/{kind.__name__}.md" for kind in errors.KINDS),
            ]
        },
        {"Project": ["architecture.md", "changelog.md"]},
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Pages that are made rather than written.

    Raises:
        PluginError: a page shows something else than its code prints, or a tutorial raised.
    """
    if EXAMPLES_RUN:
        _run_examples()
    made = {f"api/{name}": text for name, text in api.pages().items()}
    made["errors/index.md"] = errors.index()
    made["architecture.md"] = (ROOT / "ARCHITECTURE.md").read_text()
    made["changelog.md"] = (ROOT / "CHANGELOG.md").read_text()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # of processes that it waits for
        for path, text in zip(TUTORIALS, pool.map(tutorial_page, TUTORIALS), strict=True):
            made[f"tutorials/{path.stem}.md"] = text
            made[f"tutorials/{path.name}"] = path.read_text()
            made[f"tutorials/{path.stem}.ipynb"] = tutorial.notebook(path)
    for path in PROGRAMS:
        made[f"gallery/{path.stem}.md"] = program_page(path)
        made[f"gallery/{path.name}"] = path.read_text()
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def program_page(path: Path) -> str:
    """The page of a program of the gallery: its docstring, its picture and its code."""
    text = path.read_text()
    title, _, prose = (ast.get_docstring(ast.parse(text)) or "").partition(": ")
    code = text.split('"""', 2)[2].strip()
    parts = (
        f"# {title}",
        prose[:1].upper() + prose[1:],
        f"![The picture that the program draws]({path.stem}.svg)",
        f"[`{path.name}`]({path.name}){{ download }} runs in under a minute on two cores.",
        f"```python\n{code}\n```\n",
    )
    return "\n\n".join(parts)


def tutorial_page(path: Path) -> str:
    """The page of a tutorial, which runs in a process of its own.

    Raises:
        PluginError: it raised.
    """
    relative = path.relative_to(ROOT)
    if not TUTORIALS_RUN:
        return tutorial.page(relative, run=False)
    kept = CACHE / f"{path.stem}-{_fingerprint(path)}.md"
    if kept.is_file():
        return kept.read_text()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "docs.tools.tutorial", relative],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if done.returncode:
        raise PluginError(f"{relative} failed:\n{done.stderr}")
    CACHE.mkdir(parents=True, exist_ok=True)
    kept.write_text(done.stdout)
    return done.stdout


def _fingerprint(path: Path) -> str:
    """A hash of everything that a tutorial's output depends on: its text, the package and
    PyTorch.
    """
    digest = hashlib.sha256(torch.__version__.encode())
    for file in (
        path,
        *sorted((ROOT / "thunder_fn").rglob("*.py")),
        *sorted((ROOT / "docs" / "tools").glob("*.py")),
    ):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _run_examples() -> None:
    wrong = [
        difference for path in shown.pages(ROOT) if (difference := shown.difference(path, ROOT))
    ]
    if wrong:
        raise PluginError("\n".join([*wrong, "`make golden` writes the outputs anew"]))


RANKS = (
    (r"changelog|architecture", 0.02),
    (r"errors/", 0.2),
    (r"gallery/", 0.3),
    (r"tutorials/", 0.7),
    (rf"api/({'|'.join(name.rpartition('.')[2] for name in api.MODULES)})\.md", 0.6),
    (r"api/", 4.0),
)
"""Factors of the search's scores. The names of `import thunder_fn as tfn` come first, which are the
titles of their entries.
"""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links of a written page, which are the repository's, to the site's pages. Rank the
    page for the search.
    """
    ranks = [rank for pattern, rank in RANKS if re.match(pattern, page.file.src_uri)]
    page.meta.setdefault("search", {"boost": ranks[0] if ranks else 1.0})
    return (
        markdown
        if page.file.generated_by
        else links.of_site(markdown, Path(page.file.abs_src_path), ROOT)
    )


def on_page_content(html: str, **_: Any) -> str:
    """The law of a function stands out. Its source code can be unfolded, and is not searched."""
    for written, shown_as in (
        ("<p>Law: ", '<p class="law"><strong>Law</strong> '),
        ("<p>Laws: ", '<p class="law"><strong>Laws</strong> '),
        ("<p>Source: ", "<p><em>Source</em> "),
        (
            '<details class="mkdocstrings-source"',
            '<details class="mkdocstrings-source" data-search-exclude',
        ),
    ):
        html = html.replace(written, shown_as)
    return html
