"""Rules for every file of the project."""

from __future__ import annotations

import ast
import graphlib
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import thunder_fn

ROOT = Path(__file__).parents[2]
FOLDERS = ("thunder_fn", "tests", "tutorials", "docs")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PACKAGE = [path for path in FILES if path.is_relative_to(ROOT / "thunder_fn")]
SHOWN = [*PACKAGE, *(path for path in FILES if path.is_relative_to(ROOT / "docs"))]

MARKS = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")  # in two halves, so that this line is none
TOP_LEVEL = {"thunder_fn", "tests", "tutorials"}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Parsed:
    """A file, and the nodes of its tree that rules are about."""

    path: Path
    text: str
    tree: ast.Module
    functions: tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]
    strings: tuple[ast.Constant, ...]
    docstrings: tuple[ast.Constant, ...]
    """Strings that stand as statements: docstrings, and the descriptions of constants and fields below them."""

    def at(self, node: ast.stmt | ast.expr) -> str:
        return f"{name(self.path)}:{node.lineno}"


def parsed(path: Path) -> Parsed:
    text = path.read_text()
    tree = ast.parse(text)
    functions, strings, docstrings = [], [], []
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                functions.append(node)
            case ast.Constant(str()):
                strings.append(node)
            case ast.Expr(ast.Constant(str()) as value):
                docstrings.append(value)
            case _:
                pass
    return Parsed(path, text, tree, tuple(functions), tuple(strings), tuple(docstrings))


@pytest.fixture(scope="module")
def shown() -> tuple[Parsed, ...]:
    """The files of the package and of the documentation. They are parsed once for all rules."""
    return tuple(map(parsed, SHOWN))


@pytest.fixture(scope="module")
def package(shown: tuple[Parsed, ...]) -> tuple[Parsed, ...]:
    return shown[: len(PACKAGE)]


def test_nothing_is_left_to_do() -> None:
    texts = ((path, path.read_text()) for path in FILES)
    assert not [name(path) for path, text in texts if MARKS.search(text)], "open an issue instead"


def test_no_merge_is_left_half_done() -> None:
    texts = [*FILES, *ROOT.glob("*.md"), *ROOT.glob("*.toml"), *(ROOT / "docs").rglob("*.md")]
    assert not [name(path) for path in texts if re.search(r"^(<{7}|>{7}) ", path.read_text(), re.MULTILINE)]


def test_public_definitions_have_docstrings(package: tuple[Parsed, ...]) -> None:
    assert not [
        f"{file.at(node)} {node.name}" for file in package for node in public(file.tree) if not ast.get_docstring(node)
    ]


def test_modules_have_docstrings(package: tuple[Parsed, ...]) -> None:
    assert not [name(file.path) for file in package if file.tree.body and not ast.get_docstring(file.tree)]


def public(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Functions, classes and their methods without an underscore in front; `forward` is its module's docstring's."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and not is_overload(node):
            yield node
            if isinstance(node, ast.ClassDef):
                methods = (item for item in node.body if isinstance(item, ast.FunctionDef))
                yield from (method for method in methods if not method.name.startswith(("_", "forward")))


def is_overload(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """A signature without a body: the function itself has the docstring."""
    return any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list)


def test_private_pytorch_names_are_in_one_file() -> None:
    """A new PyTorch release breaks `torch_internals/` and nothing else."""
    pattern = re.compile(
        r"^\s*(from|import) torch\._|torch\._(?!ops\b|_|check\b)|torch\.fx\.experimental|torch\.testing\._internal"
    )
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in PACKAGE
        if "torch_internals" not in path.as_posix()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


LONG = {
    "thunder_fn/benchmarks/__main__.py main": "a command: its options, then what it runs",
    "thunder_fn/benchmarks/chart.py svg": "the text of a picture, from top to bottom",
    "thunder_fn/benchmarks/transforms.py cases": "a list",
    "thunder_fn/demo.py demo": "a story, told in order",
    "thunder_fn/executors/torchinductor/codegen.py cut_out": "a text is cut from top to bottom",
    "thunder_fn/executors/torchinductor/loop_cpp.py product": "the calls of BLAS that a product may be",
    "thunder_fn/executors/torchinductor/loops.py in_python": "the text of a program, from top to bottom",
    "thunder_fn/executors/torchinductor/outputs.py returned": "a question for each result",
    "thunder_fn/inspect/command.py main": "a command: its options, then what it runs",
    "thunder_fn/jitted/program.py __init__": "the parts of a program's text",
    "thunder_fn/recipes/command.py main": "a command: its options, then what it runs",
    "thunder_fn/torch_internals/inductor.py wrapper_code": "a subclass of a class that is imported late",
}
"""Functions of more than 40 lines without docstring and comments, and why. The list only shrinks."""


def test_functions_are_short(package: tuple[Parsed, ...]) -> None:
    """A function of more than 40 lines, its docstring and comments not counted, has a reason."""
    found = {
        f"{name(file.path)} {node.name}"
        for file in package
        for lines in [file.text.splitlines()]
        for node in file.functions
        if lines_of(node, lines) > 40
    }
    assert found - LONG.keys() == set(), "cut it into functions"
    assert LONG.keys() - found == set(), "short by now: take it from the list"


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Count the lines of a function without its docstring and comments."""
    first, last = node.body[0], node.end_lineno or 0
    documented = ast.get_docstring(node) is not None
    comments = sum(line.lstrip().startswith("#") for line in lines[node.lineno - 1 : last])
    return last - node.lineno + 1 - comments - documented * ((first.end_lineno or 0) - first.lineno + 1)


def test_cpp_stands_in_files(package: tuple[Parsed, ...]) -> None:
    """C++ of more than some lines is a file in `cpp/`, which editors and clang-format know."""
    cpp = re.compile(r"^(static|template|struct) .*[{;]$", re.M)
    found = [file.at(node) for file in package for node in file.strings if cpp.search(str(node.value))]
    assert not found, "put it into a file (`cpp_text.py`)"


CLAUSES = re.compile(
    r"(What|Which|Whose|Who|Whom|How|Where|When|Whether|Why|That|If|As|Because|Whatever|Whoever|While"
    r"|Of|From|Inside|At|Its|There|Something|Somebody|Nobody|Everything|Stands|Runs|Writes|Compiles|Puts)\b(?! import)"
)


def test_docstrings_begin_with_no_clause(shown: tuple[Parsed, ...]) -> None:
    """A docstring begins with an imperative ("Return ...") or with a noun phrase that names the thing."""
    found = {file.at(node): str(node.value) for file in shown for node in file.docstrings}
    clauses = {line: text for line, text in found.items() if CLAUSES.match(text.lstrip())}
    assert not clauses, "begin with an imperative or with a noun phrase that names the thing"


def test_the_changelog_is_a_line_each() -> None:
    """Breaking, Added and Fixed have a line for each change; a merge that keeps both sides may bring old text back."""
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert not [line for line in lines if line.startswith(("  ", "- Fixed:"))], "one line each; fixes stand under Fixed"
    assert len(set(lines) - {""}) == sum(line != "" for line in lines), "a line stands there twice"


def test_the_map_is_short_and_has_every_room() -> None:
    """ARCHITECTURE.md names each folder of the package, and nothing that is not there."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.split()) <= 1_500
    rooms = {path.name for path in (ROOT / "thunder_fn").iterdir() if (path / "__init__.py").is_file()}
    assert rooms <= set(re.findall(r"^\| [^|]*?`(\w+)/`", text, re.MULTILINE))


def test_files_that_prose_names_are_there() -> None:
    """A file or folder in backticks, in a docstring or on a page, exists: `grad.py`, `structured/shared/`."""
    pages = [
        *ROOT.glob("*.*"),
        *(ROOT / "gallery").glob("*.py"),
        *(ROOT / "docs").rglob("*.*"),
        *(ROOT / "inspector").glob("*.*"),
    ]
    data = [*(ROOT / "thunder_fn" / "inspect" / "assets").glob("*"), *(ROOT / "thunder_fn").glob("executors/*/cpp/*")]
    there = [f"/{name(path)}" for path in (*FILES, *pages, *data)]
    missing = [
        f"{name(path)}: {named}"
        for path in (*FILES, *(ROOT / "docs").rglob("*.md"), ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md")
        for named in re.findall(r"`((?:\w+/)*\w+\.py|(?:\w+/)+)`", path.read_text())
        if not any(file.endswith(f"/{named}") or (named.endswith("/") and f"/{named}" in file) for file in there)
    ]
    assert not missing


DOORS = {
    ("ir.trace", "ir.pretty"): "Trace's own method `__str__`",
    ("ir.trace", "ir.fx"): "Trace's own methods `to_fx` and `from_fx`",
    ("ir.trace", "torch_internals"): "equality of traces looks at constants, below whatever modes are active",
    ("ir.types", "torch_internals"): "the text of an expression is a printer's of PyTorch's",
    ("ir.pretty", "interpreters.evaluate"): "printed programs run structured equations by the reference semantics",
    ("capture.apply", "interpreters.evaluate"): "applied traces run by the reference semantics",
    ("interpreters.evaluate", "interpreters.under_autograd"): "a value that autograd follows is evaluated by its rule",
    ("jitted", "jitted.modules.module"): "jit of a module",
    ("jitted", "inspect.lowered"): "`jit(f).lower(...)`, a door to the reports on programs",
    ("jitted.modules.module", "inspect.lowered"): "`jit(module).lower(...)`",
    ("parameters.rewritten", "parameters.modules"): "a rewritten function of a module becomes a module",
    ("executors.base", "executors.registry"): "executors are looked up by name",
    ("executors.base", "executors.torch_executor"): "an executor's program is lowered when it first runs",
}
"""Imports inside functions that close a cycle between files, and why."""


def test_no_file_imports_itself_through_others() -> None:
    """Imports inside functions count, those for types alone do not."""
    import grimp

    graph = grimp.build_graph("thunder_fn", exclude_type_checking_imports=True, cache_dir=None)
    for one, other in DOORS:
        graph.remove_import(importer=f"thunder_fn.{one}", imported=f"thunder_fn.{other}")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    order = graphlib.TopologicalSorter(imports)
    order.prepare()  # raises CycleError, which shows the cycle


def test_no_module_is_hidden_by_a_function() -> None:
    """`thunder_fn.a.b` is the module wherever one of that name is there."""
    hidden = []
    for info in pkgutil.walk_packages(thunder_fn.__path__, "thunder_fn."):
        parent, _, leaf = info.name.rpartition(".")
        if not leaf.startswith("__") and not isinstance(getattr(sys.modules.get(parent), leaf, sys), ModuleType):
            hidden.append(info.name)
    assert not hidden


ONE_WAY = {
    r"\b(?!Runtime)\w+(Error|Input|Output|Call|Differentiable|Trace|Rule)\(\s*located\(": "keywords of the error",
    r"(map_arg|python_arg)\([^()]*\)\s+for \w+ in \w+\.args\b(?!\[)": "`map_args`, `python_args`",
    r"\(\w+\.args, tuple\(\w+ for _, \w+ in": "`all_args`",
    r"\{var\.index for (\w+) in [\w.]+\s+for var in \1\.(outputs|operands)\b": "`bound` and `operands_in`",
    r"[(\[](\w+)\.type for \1 in equation\.(outputs|operands)[)\]]": "`operand_types` and `output_types`",
    r"next\(\w+\) if leaf is TENSOR else leaf": "`pytree.filled`",
    r"for (\w+) in pytree\.flatten\([^()]*\)\[0\]\s+if isinstance\(\1, torch\.Tensor\)\s*\]": "`pytree.tensors_in`",
    r"isinstance\((\w+), bool\) or not isinstance\(\1, int\)": "`is_int`",
    r"\(size - 1\) \* stride\s+for size, stride in": "`last_offset`, `extent`",
}
"""Patterns that were written by hand in many places, and the function that does it."""
WRITTEN_THERE = (
    *("ir/trace.py", "capture/pytree.py", "executors/nvfuser/", "api/calling.py"),
    "torch_internals/tensors.py",
)


@pytest.mark.parametrize("pattern", ONE_WAY, ids=range(len(ONE_WAY)))
def test_there_is_one_way_to_read_an_equation(pattern: str) -> None:
    rest = (path for path in PACKAGE if not any(part in path.as_posix() for part in WRITTEN_THERE))
    found = [name(path) for path in rest if re.search(pattern, path.read_text())]
    assert not found, f"write {ONE_WAY[pattern]}"


GENERATED = re.compile(r"from (thunder_fn[\w.]*) import (\w+)")


def test_generated_code_imports_what_there_is(package: tuple[Parsed, ...]) -> None:
    """Text that becomes code names functions of ours, which look as if nobody called them."""
    texts = ((file.path, str(node.value)) for file in package for node in file.strings)
    found = [(path, *each) for path, text in texts for each in GENERATED.findall(text)]
    assert {"load_source", "gemm_address"} <= {what for *_, what in found}
    missing = [
        f"{name(path)}: {what}" for path, module, what in found if not hasattr(importlib.import_module(module), what)
    ]
    assert not missing
