"""Makes a program smaller while it stays different in the same way: statements, then expressions, by their syntax trees."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator

BUDGET = 250
"""The number of smaller programs that are tried."""


def shrink(text: str, still: Callable[[str], bool], budget: int = BUDGET) -> str:
    """The smallest program found for which `still` holds."""
    tree, left = ast.parse(text), budget
    again = True
    while again:
        again = False
        for smaller in _smaller(tree):
            if left <= 0:
                return ast.unparse(tree)
            candidate = ast.unparse(ast.fix_missing_locations(smaller))
            if len(candidate) >= len(ast.unparse(tree)):
                continue
            left -= 1
            if still(candidate):
                tree, again = ast.parse(candidate), True
                break
    return ast.unparse(tree)


def _smaller(tree: ast.Module) -> Iterator[ast.Module]:
    """Programs that are one step smaller, the largest steps first."""
    yield from _without_statements(tree)
    yield from _with_parts(tree)


def _blocks(tree: ast.AST) -> list[tuple[list[int], str]]:
    """The places of lists of statements, by the order of a walk."""
    return [
        (at, name)
        for at, node in enumerate(ast.walk(tree))
        for name in ("body", "orelse")
        if isinstance(getattr(node, name, None), list)
    ]


def _without_statements(tree: ast.Module) -> Iterator[ast.Module]:
    for at, name in _blocks(tree):
        size = len(getattr(_node(tree, at), name))
        for i in reversed(range(size)):
            statement = getattr(_node(tree, at), name)[i]
            new = copy.deepcopy(tree)
            block = getattr(_node(new, at), name)
            if isinstance(statement, (ast.With, ast.If, ast.For, ast.While)):
                flat = copy.deepcopy(tree)
                getattr(_node(flat, at), name)[i : i + 1] = copy.deepcopy(statement.body)
                yield flat
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.Return, ast.Import)) and at == 0:
                continue
            del block[i]
            if not block and name == "body":
                block.append(ast.Pass())
            yield new


def _with_parts(tree: ast.Module) -> Iterator[ast.Module]:
    """An expression gives way to a part of it, a literal to a simpler one."""
    for at, node in enumerate(ast.walk(tree)):
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.expr):
                for part in _parts(value):
                    new = copy.deepcopy(tree)
                    setattr(_node(new, at), field, copy.deepcopy(part))
                    yield new
            elif isinstance(value, list) and isinstance(node, (ast.Tuple, ast.List, ast.Call, ast.Dict, ast.arguments)):
                for i, item in enumerate(value):
                    if isinstance(node, (ast.Tuple, ast.List, ast.Call)) and field in ("elts", "args", "keywords"):
                        new = copy.deepcopy(tree)
                        del getattr(_node(new, at), field)[i]
                        yield new
                    if isinstance(item, ast.expr):
                        for part in _parts(item):
                            new = copy.deepcopy(tree)
                            getattr(_node(new, at), field)[i] = copy.deepcopy(part)
                            yield new


def _parts(value: ast.expr) -> list[ast.expr]:
    match value:
        case ast.Call(func=ast.Attribute(value=owner), args=args):
            return [
                *([owner] if not (isinstance(owner, ast.Name) and owner.id in ("torch", "F", "T", "nn")) else []),
                *args,
            ]
        case ast.Call(args=args):
            return list(args)
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.UnaryOp(operand=operand):
            return [operand]
        case ast.Subscript(value=owner):
            return [owner]
        case ast.Attribute(value=owner) if not isinstance(owner, ast.Name):
            return [owner]
        case ast.List(elts=[one]) | ast.Tuple(elts=[one]):
            return [one]
        case ast.Dict(values=values) if values:
            return [one for one in values if one is not None]
        case ast.ListComp() | ast.GeneratorExp():
            return []
        case ast.Lambda():
            return []
        case _:
            return []


def _node(tree: ast.AST, at: int) -> ast.AST:
    for i, node in enumerate(ast.walk(tree)):
        if i == at:
            return node
    raise IndexError(at)
