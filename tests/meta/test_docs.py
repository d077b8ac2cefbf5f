"""The site's examples run, every error and every public name has its place, and the site builds without a warning."""

from __future__ import annotations

import copy
import html
import importlib
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from docs.tools import api, errors, links, shown, tutorial
from tests.messages import message_of
from thunder_fn.__main__ import main
from thunder_fn.errors import ThunderError, page_of
from thunder_fn.explain import summary

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT / "docs").as_posix())
def test_page_shows_what_its_code_prints(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    new = shown.executed(text)
    if request.config.getoption("--update-golden"):
        path.write_text(new)
    assert text == new, "`make golden` rewrites the outputs"


COMING = (ROOT / "docs" / "coming_from.md").read_text()
ROWS = re.findall(r"^\| `(.*)` \| `(.*)` \|$", COMING, re.MULTILINE)


@pytest.mark.parametrize(("theirs", "ours"), ROWS, ids=[ours for _, ours in ROWS])
def test_each_row_for_newcomers_runs(theirs: str, ours: str) -> None:
    names: dict[str, Any] = {}
    exec(next(shown.BLOCK.finditer(COMING))["body"], names)
    found = eval(ours, names)
    if theirs.startswith("torch."):
        torch.testing.assert_close(found, eval(theirs, names))


BROUGHT = {*sys.stdlib_module_names, "hypothesis", "matplotlib", "numpy", "rich", "thunder_fn", "torch"}
"""Packages that `make docs` installs: pages run there."""


def test_pages_import_what_their_extra_brings() -> None:
    blocks = [(path, block["body"]) for path in PAGES for block in shown.BLOCK.finditer(path.read_text())]
    for path in (ROOT / "tutorials").glob("*.py"):  # what is indented there is tried only
        blocks += [(path, line) for line in path.read_text().splitlines() if line.startswith(("import", "from"))]
    imports = re.compile(r"^\s*(?:import|from) (\w+)", re.MULTILINE)
    assert not [(path.name, name) for path, code in blocks for name in imports.findall(code) if name not in BROUGHT]


@pytest.mark.parametrize("kind", errors.KINDS, ids=lambda kind: kind.__name__)
def test_error_has_a_page_with_an_example_of_it(kind: type[Exception], request: pytest.FixtureRequest) -> None:
    path = ROOT / "docs" / "errors" / f"{page_of(kind)}.md"
    text = path.read_text()
    if request.config.getoption("--update-golden"):
        path.write_text(errors.with_head(kind, text))
    assert text == errors.with_head(kind, text), "`make golden` writes its docstring anew"
    first = next(block["body"] for block in shown.BLOCK.finditer(text) if not block["language"])
    if kind not in (ThunderError, tfn.errors.TracedFunctionError) and not issubclass(kind, Warning):
        assert first.startswith(f"thunder_fn.errors.{kind.__name__}: ")
    if issubclass(kind, ThunderError) and kind is not ThunderError:
        assert first.endswith(f"\nDocs: python -m thunder_fn explain {kind.__name__}\n")


def test_a_page_in_a_terminal_has_words_for_links(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in errors.KINDS:
        assert main(["explain", kind.__name__]) == 0
        printed, text = capsys.readouterr().out, (ROOT / "docs" / "errors" / f"{page_of(kind)}.md").read_text()
        assert not LINK.search(re.sub(r"```.*?```", "", printed, flags=re.DOTALL))
        assert shown.BLOCK.findall(printed) == shown.BLOCK.findall(text)


def test_errors_are_listed_in_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    listed = capsys.readouterr().out.splitlines()
    page = errors.index()
    for kind, line in zip(errors.KINDS, listed, strict=True):
        assert line.startswith(kind.__name__) and line.endswith(".")
        assert summary(kind).endswith(".") and f"| {summary(kind)} |" in page


# ---- the link in a message ----


def test_link_is_a_note_and_no_part_of_the_message() -> None:
    with pytest.raises(tfn.errors.NonScalarLoss) as info:
        tfn.grad(torch.sin)(torch.ones(2))
    assert "Docs" not in message_of(info.value)
    last = traceback.format_exception(info.value)[-1].splitlines()[-1]
    assert last == "Docs: python -m thunder_fn explain NonScalarLoss"


def test_copies_of_an_error_have_one_link() -> None:
    error = tfn.errors.ArgnumError("argnums")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert other.__notes__ == ["Docs: python -m thunder_fn explain ArgnumError"] and str(other) == str(error)


def test_an_error_of_the_traced_function_keeps_its_notes() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        error = KeyError("w")
        error.add_note("mine")
        raise error

    with pytest.raises(KeyError) as info:
        tfn.trace(f, torch.ones(2))
    assert info.value.__notes__ == ["mine", "Docs: python -m thunder_fn explain TracedFunctionError"]


def test_a_subclass_made_elsewhere_has_the_page_of_its_base() -> None:
    class Mine(tfn.errors.JitError):
        pass

    assert page_of(Mine) == "JitError"


# ---- what is shown ----

PAGE = """\
```python
x = 1
print(x)
```

Between.

```
{}```

```text
untouched
```
"""


def test_outputs_are_written_and_stay() -> None:
    page = PAGE.format("1\n")
    assert shown.executed(PAGE.format("2\n")) == shown.executed(PAGE.format("")) == shown.executed(page) == page


def test_an_error_is_shown_as_a_traceback_ends() -> None:
    assert shown.executed("```python\n1 / 0\n```\n\n```\n```\n").endswith(
        "```\nZeroDivisionError: division by zero\n```\n"
    )


@pytest.mark.parametrize(
    "page", ["```python\nprint(1)\n```\n", "```python\n1 / 0\n```\n\n```python\nx = 1\n```\n\n```\n```\n"]
)
def test_nothing_is_printed_that_is_not_shown(page: str) -> None:
    with pytest.raises(ValueError, match="a block's output is shown nowhere"):
        shown.executed(page)


def test_a_tutorial_is_cut_into_prose_and_code() -> None:
    path = ROOT / "tutorials" / "01_traces.py"
    cells = tutorial.cells(path)
    lines = path.read_text().splitlines()
    assert cells[0].is_prose and cells[0].text.startswith("# What a trace is\n\nthunder_fn turns")
    for cell in cells:
        assert cell.is_prose or not cell.text or lines[cell.line] == cell.text.splitlines()[0]


def test_teach_is_cut_where_its_headings_are() -> None:
    cells = tutorial.cells(ROOT / "tutorials" / "teach.py")
    headings = [cell.text.splitlines()[0] for cell in cells if cell.is_prose]
    assert headings[1] == "## 1. The data" and len(headings) == 9
    code = "\n".join(cell.text for cell in cells if not cell.is_prose)
    compile(code, "teach.py", "exec")
    assert "def vmap(" in code


def test_a_difference_is_printed_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE.format("2\n"))
    assert "\n ```\n-2\n+1\n ```\n" in shown.difference(path, tmp_path)
    path.write_text(PAGE.format("1\n"))
    assert shown.difference(path, tmp_path) == ""
    path.write_text("```python\nprint(1)\n```\n")
    assert shown.difference(path, tmp_path).startswith("page.md: a block's output is shown nowhere")


def test_pages_that_ran_are_kept_and_wrong_ones_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where the hooks go
    from docs.tools import hooks

    ran: list[str] = []

    def run(work: Callable[[Path], str], tasks: Sequence[tuple[Path, Path]]) -> Iterator[tuple[Path, str]]:
        for path, file in tasks:
            ran.append(path.name)
            file.write_text(work(path))
            yield path, ""

    for name, value in (("ROOT", tmp_path), ("in_forks", run)):
        monkeypatch.setattr(hooks, name, value)
    monkeypatch.setattr(hooks.kept, "CACHE", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(PAGE.format("1\n"))
    page = tmp_path / "docs" / "page.md"
    for text, runs in (("2\n", ["README.md", "page.md"]), ("2\n", ["page.md"])):
        page.write_text("Another.\n" + PAGE.format(text))
        with pytest.raises(hooks.PluginError, match=r"page\.md, as it runs"):
            hooks._run_examples()
        assert ran == runs
        ran.clear()
    page.write_text("Another.\n" + PAGE.format("1\n"))
    for runs in (["page.md"], []):
        hooks._run_examples()
        assert ran == runs
        ran.clear()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_longest_pages_run_first(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    from docs.tools import hooks

    assert {path.stem for path in (*PAGES, *hooks.TUTORIALS)} >= set(hooks.LONGEST)
    begun: list[str] = []
    started = lambda run, log, seconds: begun.append(log.stem) or log.write_text("") or len(begun)
    monkeypatch.setattr(hooks.forks, "start", started)
    monkeypatch.setattr(hooks.os, "cpu_count", lambda: count)
    ended = iter(range(1, 100))
    used = SimpleNamespace(ru_utime=0, ru_stime=0)
    monkeypatch.setattr(hooks.os, "wait4", lambda *_: (next(ended), 1, used))
    tasks = [(path, tmp_path / f"{path.stem}.md") for path in PAGES]
    assert len(list(hooks.in_forks(str, tasks))) == len(PAGES)
    assert set(begun[:2]) == {"law", "test_your_pass"} and sorted(begun) == sorted(path.stem for path in PAGES)


RUN = 9
"""Words in a row that no two pages have, in the same order, in their prose."""


def test_nothing_is_taught_twice() -> None:
    """Guides, concepts and tutorials each open in words of their own; `teach.py` is the course of one page beside them."""
    pages = {path: re.sub(r"```.*?```|!\[[^]]*\]", " ", path.read_text(), flags=re.DOTALL) for path in PAGES}
    pages = {path: text for path, text in pages.items() if path.parent.name != "errors"}
    for path in (ROOT / "tutorials").glob("[0-9]*.py"):
        pages[path] = "\n".join(cell.text for cell in tutorial.cells(path) if cell.is_prose)
    found: dict[tuple[str, ...], set[str]] = {}
    for path, text in pages.items():
        words = re.findall(r"[\w`']+", text.lower())
        for at in range(len(words) - RUN + 1):
            found.setdefault(tuple(words[at : at + RUN]), set()).add(path.name)
    assert not [(" ".join(words), sorted(names)) for words, names in found.items() if len(names) > 1]


# ---- links ----

LINK = re.compile(r"(?<!\\)\[[^]\[]*\]\(([^)\s]+)\)")
BROWSED = [path for path in (*sorted(ROOT.glob("*.md")), *PAGES) if path.name != "CHANGELOG.md"]


@pytest.mark.parametrize("path", BROWSED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere_in_the_repository(path: Path) -> None:
    """Also in the repository as it is browsed, where no page is made: tutorials are their scripts."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
    dead = []
    for target in LINK.findall(prose):
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        if target.startswith(("https:", "http:", "mailto:")):
            continue
        if not place.exists() or (anchor and anchor not in anchors(place)):
            dead.append(target)
    assert not dead


def test_links_of_the_repository_become_links_of_the_site() -> None:
    text = "[d](https://a.example), [a](../../tutorials/01_traces.py), [b](trace.md#x), [c](../errors/)"
    assert links.of_site(text, ROOT / "docs" / "concepts" / "law.md", ROOT) == (
        "[d](https://a.example), [a](../tutorials/01_traces.md), [b](trace.md#x), [c](../errors/index.md)"
    )


def anchors(path: Path) -> set[str]:
    """The anchors that headings of a page have."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


# ---- the site ----


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site. Links are checked, and docstrings read; the examples run above, the tutorials in tests/tutorials."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "DOCS_TUTORIALS": "0", "DOCS_EXAMPLES": "0", "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_site_builds_without_a_warning(site: Path) -> None:
    made = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {"index.html", "api/derivatives.html", "errors/CaptureError.html", "tutorials/teach.html"} <= made
    assert (site / "search" / "search_index.json").stat().st_size > 100_000


def test_api_pages_leave_out_types_and_defaults_that_say_nothing(site: Path) -> None:
    text = (site / "api" / "derivatives.html").read_text()
    assert "Returns:" in text and "<code>Any</code>" not in text
    assert re.search(r"<code>primals</code></b>\s*\N{EN DASH}", text), "*primals of vjp"


WITHOUT_ERRORS = {
    *("clear_caches", "list_executors", "rule_order", "list"),  # take nothing
    *("stop_gradient", "constant", "for_model", "fp8", "pytrees"),  # take anything
    *("at", "handing_on", "late_half", "memo", "python_arg", "subtraces", "autocast_policy"),  # take checked traces
    *("in_dims", "inputs_for", "laws_of", "is_collective", "collective_seconds"),
}
"""Names that have no errors of their own: there is nothing to refuse in what they take, if it is of the type they take."""
NO_SIGNATURE = ("Recipe", "checkpoint_policies", "Default", "Config", "Pipelined", "Rewritten")
"""Values that take the options of others, or that are made by functions only."""
FUNCTIONS = {f"tfn.{name}": getattr(tfn, name) for _, names in api.GROUPS.values() for name in names.split()}
MEMBERS = {
    f"{module}.{name}": value
    for module in api.MODULES
    for name in api.members(importlib.import_module(module))
    if not any((value := getattr(importlib.import_module(module), name)) is one for one in FUNCTIONS.values())
}


def test_public_names_have_all_that_a_reader_looks_for(site: Path) -> None:
    """Options, an example that runs (as a doctest), a law, errors, and the source. Values that functions return have no
    laws, and data has no more than a docstring.
    """
    pages = [page.read_text() for page in (site / "api").glob("*.html")]
    lacking = {name: lacks(name, value, pages) for name, value in (FUNCTIONS | MEMBERS).items()}
    assert {name: what for name, what in lacking.items() if what} == {}


def lacks(name: str, value: Any, pages: list[str]) -> list[str]:
    """List what is missing in the entry of a public name."""
    if not api.is_documented(value):
        return ["docstring"] * ('<div class="doc doc-contents' not in entry_of(pages, name).replace("\n", ""))
    if not value.__module__.startswith("thunder_fn"):
        return []
    section, own = entry_of(pages, f"{value.__module__}.{value.__qualname__}"), name.rpartition(".")[2]
    text = html.unescape(re.sub(r"<[^>]*>", "", section))
    options = [] if own in NO_SIGNATURE else inspect.signature(value).parameters
    there = {option: re.search(rf"\b{option}\b", text) for option in options}
    there |= {"example": ">>> " in text, "source": "mkdocstrings-source" in section}
    if name in FUNCTIONS or inspect.isroutine(value):
        there["law"] = 'class="law"' in section
        has_errors = bool(re.search("Raises:|[Ee]rrors as in|Otherwise as", text))
        there["errors, or a name in WITHOUT_ERRORS"] = has_errors == (not {own, name} & WITHOUT_ERRORS)
    return [what for what, found in there.items() if not found]


def entry_of(pages: list[str], anchor: str) -> str:
    """The entry of a public name in the pages of the API, from its heading to the next."""
    found = [page for page in pages if f'id="{anchor}"' in page]
    assert len(found) == 1, f"{anchor} has {len(found)} entries"
    return found[0].partition(f'id="{anchor}"')[2].partition("<h2")[0]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


FIRST = {
    "install": "getting_started.html",
    "vmap": "api/batches.html",
    "quantize": "api/numbers_and_parameters.html",
    "grad": "api/derivatives.html",
    "jit": "api/programs.html",
    "compile": "api/programs.html",
    "while_loop": "api/control_flow.html",
    "trace": "api/traces.html",
    "slow": "performance.html",
    "gpu": "gpu.html",
    "random": "api/random.html",
    "inspector": "inspector.html",
    "qlora": "tutorials/16_qlora.html",
    "force field": "tutorials/21_force_field.html",
    "scan": "api/control_flow.html",
    "checkpoint": "api/memory.html",
    "export": "api/programs_that_leave_the_process.html",
    "limits": "limits.html",
    "DataDependentBranch": "errors/DataDependentBranch.html",
}
"""Words, and the page that has to be the first result."""


SCORES = """items => items.map(item => [
    new URL(item.querySelector("a").href).pathname.slice(1),
    Math.max(...[...item.querySelectorAll("article")].map(article => +article.dataset.mdScore)),
])"""
"""Each page that was found, and the score of its best section."""


def test_search_finds_what_is_asked_for(address: str, chromium: Any) -> None:
    """Asked of the site in a browser, which asks nobody else for anything. Each page leads by a margin, so that a new heading
    elsewhere does not change the order. A word is asked as a whole: a busy machine answers its first letters late.
    """
    outside: list[str] = []
    tab = chromium.new_page(viewport={"width": 1300, "height": 900})
    asked, items = tab.locator("input.md-search__input"), tab.locator("li.md-search-result__item")
    try:
        tab.set_default_timeout(60_000)
        tab.on("request", lambda request: None if request.url.startswith(address) else outside.append(request.url))
        tab.on("pageerror", lambda error: outside.append(str(error)))
        tab.goto(f"{address}/index.html")
        asked.click()
        for query, page in FIRST.items():
            tab.evaluate("document.querySelector('.md-search-result__list').replaceChildren()")
            asked.fill(query)
            asked.dispatch_event("keyup")
            items.first.wait_for()
            (first, best), (second, next_best), *_ = items.evaluate_all(SCORES)
            assert first == page, query
            assert best > 1.5 * next_best, f"{query}: {second} has nearly the score of {first}"
        items.first.locator("a").first.click()
        tab.wait_for_url(f"**/{page}*")
        assert tab.locator("h1").count() >= 1
        assert not [url for url in outside if not url.startswith(("data:", "blob:"))]
    finally:
        tab.close()


BROKEN = """() => {
    const words = [], range = document.createRange();
    for (const code of document.querySelectorAll("article :not(pre) > code")) {
        const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
        while (walker.nextNode())
            for (const word of walker.currentNode.data.matchAll(/\\w+/g)) {
                range.setStart(walker.currentNode, word.index);
                range.setEnd(walker.currentNode, word.index + word[0].length);
                const tops = [...range.getClientRects()].map(box => box.top);
                if (Math.max(...tops) - Math.min(...tops) > 4) words.push(word[0]);
            }
    }
    return words;
}"""
"""The names in code that stand on two lines."""


def test_what_is_printed_is_told_from_what_is_written(site: Path) -> None:
    text = (site / "getting_started.html").read_text()
    assert re.search(r'class="output no-copy highlight">.{,99}<span class="k">def</span>', text, re.DOTALL)
    message = text[: text.index("thunder_fn.errors.DataDependentBranch")].rpartition('<div class="')[2]
    assert message.startswith('output no-copy message highlight"')


@pytest.mark.parametrize("page", ["coming_from", "tutorials/20_from_lightning_thunder"])
def test_a_phone_shows_both_names_of_a_row(page: str, address: str, chromium: Any) -> None:
    """Tables of two names do not scroll sideways, which hides the one that is looked for."""
    tab = chromium.new_page(viewport={"width": 400, "height": 900})
    try:
        tab.goto(f"{address}/{page}.html")
        edges = "[...document.querySelectorAll('td')].map(cell => cell.getBoundingClientRect().right)"
        assert max(tab.evaluate(edges)) <= 400
    finally:
        tab.close()


@pytest.mark.parametrize("page", ["index", "limits", "errors/index", "architecture", "api/extend", "concepts/outside"])
def test_a_phone_shows_whole_names(page: str, address: str, chromium: Any) -> None:
    tab = chromium.new_page(viewport={"width": 400, "height": 900})
    try:
        tab.set_default_timeout(60_000)
        tab.goto(f"{address}/{page}.html")
        assert tab.evaluate("document.documentElement.scrollWidth") == 400
        assert tab.evaluate(BROKEN) == []
    finally:
        tab.close()


AXE = Path(os.environ.get("AXE", ROOT / "inspector" / "node_modules" / "axe-core" / "axe.min.js"))
LOOKED_AT = (
    *("index", "404", "getting_started", "coming_from", "limits", "gallery", "gallery/qlora", "changelog", "faq"),
    *("concepts/outside", "api/batches", "api/inspect", "errors/index", "errors/VmapError", "tutorials/04_vmap"),
)
"""A page of each kind."""
RULES = "{runOnly: ['wcag2a', 'wcag2aa'], rules: {'scrollable-region-focusable': {enabled: false}}}"
"""Browsers let one reach boxes that scroll by keys; axe-core does not know that."""


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not there: `npm install --no-save axe-core` in inspector/")
@pytest.mark.parametrize(("scheme", "width"), [("light", 400), ("dark", 1440)])
def test_everybody_can_read_the_site(scheme: Any, width: int, address: str, chromium: Any) -> None:
    """Names, roles and contrast, by axe-core, on a page of each kind and on the results of a search."""
    tab = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    found: dict[str, Any] = {}
    try:
        tab.set_default_timeout(60_000)
        for page in (*LOOKED_AT, "index.html?q=vmap"):
            tab.goto(f"{address}/{page}" if "?" in page else f"{address}/{page}.html")
            if "?" in page:
                tab.locator("li.md-search-result__item").first.wait_for()
            tab.evaluate(AXE.read_text())
            violations = tab.evaluate(f"axe.run(document, {RULES}).then(found => found.violations)")
            found |= {f"{page}: {one['id']}": one["nodes"][0]["failureSummary"] for one in violations}
    finally:
        tab.close()
    assert found == {}


def test_changes_and_design_do_not_outrank_what_is_for_users(site: Path) -> None:
    """Their factors in the index that is searched are the smallest."""
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    low = {entry["boost"] for entry in entries if entry["location"].startswith(("changelog", "architecture"))}
    others = {
        entry.get("boost", 1) for entry in entries if not entry["location"].startswith(("changelog", "architecture"))
    }
    assert max(low) < min(others) / 5


def test_tutorials_can_be_downloaded_as_notebooks(site: Path) -> None:
    for path in (ROOT / "tutorials").glob("*.py"):
        assert f'href="{path.stem}.ipynb"' in (site / "tutorials" / f"{path.stem}.html").read_text()
        assert (site / "tutorials" / f"{path.stem}.ipynb").read_text() == tutorial.notebook(path)
