"""Hooks that MkDocs calls while it builds the site: pages are made, examples and tutorials run.

    python -m mkdocs build --strict

Examples of pages run before tutorials, so that a mistake shows early. Each page and each tutorial
runs in a fork of this process, so PyTorch is imported once, and the longest begin first. What ran,
here or in a tutorial's test, is kept in `.cache`, until it, the package or PyTorch changes.
DOCS_TUTORIALS=0 shows tutorials without running them, DOCS_EXAMPLES=0 does so for the other pages,
for a look at the layout.
"""

from __future__ import annotations

import ast
import atexit
import gc
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)

import thunder_fn as tfn
from docs.tools import api, errors, kept, links, shown, tutorial
from tests import forks

TUTORIALS = (*sorted((ROOT / "tutorials").glob("[0-9]*.py")), ROOT / "tutorials" / "teach.py")
PROGRAMS = tuple(
    path for path in sorted((ROOT / "gallery").glob("[a-z]*.py")) if path.stem != "pictures"
)
LOG = logging.getLogger("mkdocs.hooks")
"""`mkdocs build --verbose` shows the time of each page."""
TUTORIALS_RUN, EXAMPLES_RUN = (
    os.environ.get(name, "1") != "0" for name in ("DOCS_TUTORIALS", "DOCS_EXAMPLES")
)

LONGEST = ("test_your_pass", "law", "15_fsdp", "21_force_field")
"""Pages and tutorials that run for longer than the others: the first two for a minute."""

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
    made["architecture.md"] = (ROOT / "ARCHITECTURE.md").read_text().replace("](docs/", "](")
    made["changelog.md"] = (ROOT / "CHANGELOG.md").read_text()
    for path, text in tutorial_pages().items():
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


def tutorial_pages() -> dict[Path, str]:
    """The pages of the tutorials.

    Raises:
        PluginError: one raised.
    """
    if not TUTORIALS_RUN:
        return {path: tutorial.page(path.relative_to(ROOT), run=False) for path in TUTORIALS}
    places = {path: kept.place_of(path) for path in TUTORIALS}
    missing = [(path, place) for path, place in places.items() if not place.is_file()]
    for path, error in in_forks(kept.run, missing):
        if error:
            raise PluginError(f"{path.relative_to(ROOT)} failed:\n{error}")
    return {path: place.read_text() for path, place in places.items()}


def _run_examples() -> None:
    """Run the examples of all pages.

    Raises:
        PluginError: pages show something else than their code prints, or one cannot be run.
    """
    places = {path: kept.place_of(path, "difference") for path in shown.pages(ROOT)}
    missing = [(path, place) for path, place in places.items() if not place.is_file()]
    run = lambda path: shown.difference(path, ROOT)
    wrong = [error for _, error in in_forks(run, missing) if error]
    for place in places.values():
        if place.is_file() and (difference := place.read_text()):
            wrong.append(difference)
            place.unlink()  # it may have been the machine: it runs again
    if wrong:
        raise PluginError("\n".join([*wrong, "`make golden` writes the outputs anew"]))


def in_forks(
    work: Callable[[Path], str], tasks: Sequence[tuple[Path, Path]]
) -> Iterator[tuple[Path, str]]:
    """Write `work(path)` into a file for each task, a pair of path and file. Yield each path when
    it is done, with the text of what went wrong. As many run at once as there are processors, the
    longest first, so that none is left to run alone.
    """
    kept.CACHE.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a fork would lose PyTorch's own threads
    tfn.vmap(tfn.grad(torch.sin))(torch.ones(2))  # imports what the first trace imports
    gc.freeze()  # so that forks share memory
    try:
        yield from _in_turn(work, sorted(tasks, key=lambda task: task[0].stem in LONGEST))
    finally:
        gc.unfreeze()


def _in_turn(
    work: Callable[[Path], str], waiting: list[tuple[Path, Path]]
) -> Iterator[tuple[Path, str]]:
    """Start a fork for the last task whenever a processor is free. Yield what has ended."""
    running = dict[int, tuple[Path, Path]]()
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            path, file = waiting.pop()
            part = file.with_suffix(".part")
            run = lambda path=path, part=part: _write(part, work(path))
            pid = forks.start(run, _log(file), seconds=1800)  # a busy machine is slow
            running[pid] = path, file
        pid, status, used = os.wait4(-1, 0)
        path, file = running.pop(pid)
        seconds = used.ru_utime + used.ru_stime
        LOG.debug("%s ran for %.1f s of a processor", path.relative_to(ROOT), seconds)
        said = _log(file).read_text() or f"its process ended with status {status}"
        if not status:
            file.with_suffix(".part").replace(file)
        yield path, said if status else ""


def _write(file: Path, text: str) -> None:
    """Write the result of a fork and end it, without a second for taking its modules apart."""
    file.write_text(text)
    atexit._run_exitfuncs()
    os._exit(0)


def _log(file: Path) -> Path:
    return file.with_suffix(".log")


RANKS = (
    (r"changelog|architecture", 0.02),
    (r"errors/", 0.2),
    (r"gallery/", 0.3),
    (r"tutorials/", 0.7),
    (rf"api/({'|'.join(name.rpartition('.')[2] for name in api.MODULES)})\.md", 1.0),
    (r"api/", 8.0),
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
    if not page.file.generated_by:
        markdown = links.of_site(markdown, Path(page.file.abs_src_path), ROOT)
    return shown.outputs_marked(markdown)


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


def on_post_template(output_content: str, **_: Any) -> str:
    """The page of what is not there is a template, and has a search too."""
    return on_post_page(output_content)


def on_post_page(output: str, **_: Any) -> str:
    """Name the search for screen readers, which the theme's dialog leaves without a name."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')
