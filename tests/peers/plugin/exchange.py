"""Exchange torch.func's names for ours in other people's modules. A pytest plugin, on a path of its own.

It stands in a folder of its own because the tests of a library are often a package that is also called `tests`.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import thunder_fn as tfn

LIBRARIES = "THUNDER_FN_PEERS"
"""The environment variable that names the libraries whose modules use our functions, with commas between."""
TESTS = "THUNDER_FN_PEERS_TESTS"
"""The environment variable that names the folder of their tests."""
TIMES = "THUNDER_FN_PEERS_TIMES"
"""The environment variable that names the file to which a run writes its outcomes and times."""


TRANSFORMS = ("grad", "grad_and_value", "vjp", "jvp", "linearize", "vmap", "jacrev", "jacfwd", "hessian")
OTHERS = ("functional_call", "functionalize", "stack_module_state")
CONTROL_FLOW = ("cond", "while_loop", "scan", "associative_scan", "map")
PACKAGES = (
    "torch.func",
    "functorch",
    "torch",
    "functorch.experimental",
    "torch._functorch.eager_transforms",
    "functorch.experimental.control_flow",
    "control_flow",
    "torch._higher_order_ops",
    *(f"torch._higher_order_ops.{name}" for name in CONTROL_FLOW),
)
"""Packages whose names are exchanged. `torch` has `vmap` and `cond`."""


def names(*, jit: bool, control_flow: bool) -> dict[str, Any]:
    """The functions that take the place of torch.func's, by name. With `jit`, what a transform makes is jitted."""
    found = {name: getattr(tfn, name) for name in (*TRANSFORMS, *OTHERS)}
    if jit:
        for name in ("grad", "grad_and_value", "vmap", "jacrev", "jacfwd", "hessian"):
            found[name] = _jitted(found[name])
    return found | ({name: getattr(tfn, name) for name in CONTROL_FLOW} if control_flow else {})


def _jitted(transform: Any) -> Any:
    @functools.wraps(transform)
    def make(*args: Any, **kwargs: Any) -> Any:
        made = transform(*args, **kwargs)
        return tfn.jit(made) if callable(made) else made

    return make


class Exchange(ast.NodeTransformer):
    """Lets a file use our functions: `torch.func.vmap` becomes a name, and imports are followed by an assignment."""

    def __init__(self, known: dict[str, Any]) -> None:
        self.known = known

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Exchange `torch.func.vmap`."""
        self.generic_visit(node)
        is_ours = node.attr in self.known and ast.unparse(node.value) in PACKAGES
        return ast.copy_location(ast.Name(f"_peer_{node.attr}", node.ctx), node) if is_ours else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        """Exchange `from torch.func import vmap`."""
        ours = [one for one in node.names if node.module in PACKAGES and one.name in self.known]
        ours = [one for one in ours if node.module != "torch" or one.name in ("vmap", "cond")]
        texts = (f"{one.asname or one.name} = _peer_{one.name}" for one in ours)
        return [node, *(ast.copy_location(ast.parse(text).body[0], node) for text in texts)]


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module in which the names of torch.func are ours."""

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        """Compile the module with its names exchanged."""
        tree = Exchange(names(jit=False, control_flow=False)).visit(ast.parse(data))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname: str) -> Any:
        """Compile the module anew: its cached file has torch.func's names."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def exec_module(self, module: Any) -> None:
        """Run the module with our functions under the names that `Exchange` writes."""
        ours = names(jit=False, control_flow=False)
        module.__dict__.update({f"_peer_{name}": value for name, value in ours.items()})
        super().exec_module(module)


class Finder:
    """Finds the modules of the libraries, and those of their tests, for `Loader`."""

    def __init__(self, libraries: list[str], tests: str) -> None:
        self.libraries, self.tests = libraries, tests

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find the module as Python does, and give it our loader where it is one of theirs."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return None
        is_theirs = name.partition(".")[0] in self.libraries or str(spec.origin).startswith(self.tests)
        if is_theirs:
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec if is_theirs else None


def pytest_load_initial_conftests() -> None:
    """Exchange the names, where this file is a plugin of a run with our functions."""
    if libraries := os.environ.get(LIBRARIES):
        sys.meta_path.insert(0, Finder(libraries.split(","), os.environ[TESTS]))


_SECONDS: dict[str, float] = {}
"""The CPU time of the tests of this run, which other work on the machine changes little."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Generator[None, Any, Any]:
    """Note the CPU time of a test."""
    begin = time.process_time()
    try:
        return (yield)
    finally:
        _SECONDS[item.nodeid] = time.process_time() - begin


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the outcome and CPU time of each test."""
    kinds = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
    reports = [(kind, one) for kind in kinds for one in terminalreporter.stats.get(kind, ())]
    names = [(kind, one.nodeid) for kind, one in reports if hasattr(one, "nodeid")]
    table = {name: [kind, _SECONDS.get(name, 0.0)] for kind, name in names}
    if path := os.environ.get(TIMES):
        Path(path).write_text(json.dumps(table))
