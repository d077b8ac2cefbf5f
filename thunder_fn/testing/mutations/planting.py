"""A bug to plant, as data, and running with it."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from thunder_fn.errors import ThunderError
from thunder_fn.ir.flow import Flow
from thunder_fn.ir.memos import clear_caches
from thunder_fn.ir.rules import Rules


class OutdatedMutation(ThunderError):
    """The source that a mutation edits has changed. Adapt the edit."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A bug: in `function` (`module:name` or `module:Class.name`) write `after` for `before`.
    `law` catches it.

    `seen_in` is the run of drawn traces, or the case of a law with cases of its own, that shows the
    bug. It is looked at first; the others follow, so an old number costs time and nothing else.
    """

    bug: str
    function: str
    before: str
    after: str
    law: str
    seen_in: int = 0


@contextmanager
def planted(mutation: Mutation) -> Generator[None]:
    """Run with a bug, wherever the package knows the function: in modules and in their tables."""
    module_name, _, path = mutation.function.partition(":")
    module = importlib.import_module(module_name)
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, module)
    original = vars(owner).get(name)
    if original is None:
        raise OutdatedMutation(
            f"{mutation.bug}: there is no {mutation.function} any more; adapt the edit"
        )
    new = _edited(mutation, module, original, name)
    holders = [owner] if owners else [m for m in _modules() if vars(m).get(name) is original]
    tables = [] if owners else _tables_of(original)
    with ExitStack() as stack:
        for holder in holders:
            stack.enter_context(mock.patch.object(holder, name, new))
        for table, keys in tables:
            stack.enter_context(mock.patch.dict(table, dict.fromkeys(keys, new)))
        stack.callback(clear_caches)
        clear_caches()
        yield


def _modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.startswith("thunder_fn")]


def _tables_of(original: Any) -> list[tuple[dict[Any, Any], list[Any]]]:
    """Find the dicts and tables of rules that hold the function, and its keys there."""
    values = [value for module in _modules() for value in vars(module).values()]
    rules = [value.rules if isinstance(value, Flow) else value for value in values]
    tables = {
        id(table): table
        for table in (value.by_name if isinstance(value, Rules) else value for value in rules)
        if isinstance(table, dict)
    }
    found = (
        (table, [key for key, value in table.items() if value is original])
        for table in tables.values()
    )
    return [(table, keys) for table, keys in found if keys]


def _edited(mutation: Mutation, module: Any, original: Any, name: str) -> Any:
    """The function with the bug, in a namespace that sees the module's own."""
    written = re.sub(
        r"^@[\w.]+\.rule\(.*\)\n",
        "",
        textwrap.dedent(inspect.getsource(original)),
        flags=re.MULTILINE,
    )
    source = ast.unparse(ast.parse(written))  # an edit does not depend on how lines are broken
    before, after = mutation.before, mutation.after
    if before not in source:
        before, after = (text.replace('"', "'") for text in (before, after))
    if before not in source:
        source, before, after = written, mutation.before, mutation.after
    if before not in source:
        raise OutdatedMutation(
            f"{mutation.bug}: {mutation.function} has no {mutation.before!r} any more; adapt the"
            " edit"
        )
    code = compile(source.replace(before, after), module.__file__, "exec")
    kept = vars(module).get(name)
    exec(code, vars(module))
    new = vars(module).pop(name)
    if kept is not None:
        setattr(module, name, kept)
    return new
