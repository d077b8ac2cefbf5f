"""Expressions over symbols as data: a table of nodes, each after those that it is made of.

    ["symbol", 0]    ["int", 4]    ["Mul", 0, 1]    ["StrictGreaterThan", 2, 1]

Heads are looked up in a table of sympy's and PyTorch's functions. No text is parsed.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable
from typing import Any

import sympy
from sympy.functions.elementary.piecewise import ExprCondPair

from thunder_fn.ir.floats import FloatStepBase
from thunder_fn.ir.symbols import Symbol
from thunder_fn.ir.trace import Expr
from thunder_fn.portable.errors import refused, unreadable
from thunder_fn.torch_internals import SYMBOLIC_FUNCTIONS, assumptions_of, precision_of

_UNEVALUATED: tuple[Any, ...] = (
    sympy.Add,
    sympy.Mul,
    sympy.Pow,
    sympy.Equality,
    sympy.Unequality,
    sympy.StrictLessThan,
    sympy.LessThan,
    sympy.StrictGreaterThan,
    sympy.GreaterThan,
    sympy.And,
    sympy.Or,
    sympy.Not,
)
"""Heads that are put together as they are, so that nothing is computed while a file is read."""
_HEADS: dict[str, Any] = {
    head.__name__: head
    for head in (
        sympy.Max,
        sympy.Min,
        sympy.Mod,
        *SYMBOLIC_FUNCTIONS,  # PyTorch's own `Mod` for sympy's
        *FloatStepBase.__subclasses__(),
        *_UNEVALUATED,
        sympy.Abs,
        sympy.Piecewise,
        sympy.ceiling,
        sympy.floor,
        ExprCondPair,
    )
}
_ATOMS: dict[str, Any] = {
    "true": sympy.true,
    "false": sympy.false,
    "oo": sympy.oo,
    "-oo": -sympy.oo,
}
_ASSUMPTIONS = frozenset(
    (
        *("commutative", "extended_real", "finite", "infinite", "integer", "negative"),
        *("nonnegative", "nonpositive", "nonzero", "positive", "rational", "real", "zero"),
    )
)


class NumberWriter:
    """Gives symbols and expressions their places in two tables."""

    def __init__(self) -> None:
        self.symbols: list[Any] = []
        self.nodes: list[Any] = []
        self._symbols: dict[Any, int] = {}
        self._nodes: dict[Any, int] = {}

    def expression(self, expr: Expr) -> int:
        """The place of an expression.

        Raises:
            PortableError: a part of it is no known function.
        """
        return self._node(expr.value)

    def checked(self) -> tuple[list[Any], list[Any]]:
        """The tables of symbols and expressions, from which all come back as they are.

        Raises:
            PortableError: one does not.
        """
        read = NumberReader(self.symbols, self.nodes)
        for (_, value), place in self._nodes.items():
            if read.nodes[place] != value:
                raise refused(f"the expression {value} does not come back as it is")
        return self.symbols, self.nodes

    def symbol(self, symbol: Any) -> int:
        """The place of a symbol."""
        if symbol not in self._symbols:
            hint = number_data(symbol.hint) if isinstance(symbol, Symbol) else None
            bounds = list(map(number_data, symbol.bounds)) if isinstance(symbol, Symbol) else None
            known = sorted(assumptions_of(symbol).items())
            self.symbols.append([symbol.name, hint, bounds, [list(item) for item in known]])
            self._symbols[symbol] = len(self.symbols) - 1
        return self._symbols[symbol]

    def _node(self, value: Any) -> int:
        key = (type(value), value)
        if key not in self._nodes:
            node = self._data(value)
            self.nodes.append(node)
            self._nodes[key] = len(self.nodes) - 1
        return self._nodes[key]

    def _data(self, value: Any) -> list[Any]:
        if value.is_Symbol:
            return ["symbol", self.symbol(value)]
        for name, atom in _ATOMS.items():
            if value is atom:
                return [name]
        if isinstance(value, sympy.Integer):
            return ["int", number_data(int(value))]
        if isinstance(value, sympy.Rational):
            return ["rational", int(value.p), int(value.q)]
        if isinstance(value, sympy.Float):
            return ["float", float(value).hex(), precision_of(value)]
        name = type(value).__name__
        if _HEADS.get(name) is not type(value):
            raise refused(f"the expression {value} has the unknown function {name}")
        return [name, *map(self._node, value.args)]


class NumberReader:
    """Makes symbols and expressions of two tables."""

    def __init__(self, symbols: Any, nodes: Any) -> None:
        self.symbols = list(map(_symbol, symbols))
        self.nodes: list[Any] = []
        for node in nodes:
            self.nodes.append(self._made(node))

    def expression(self, place: Any) -> Expr:
        """The expression at a place."""
        return Expr(at(self.nodes, place))

    def _made(self, node: Any) -> Any:
        head, *rest = node
        if head in _ATOMS:
            return _ATOMS[head]
        match head:
            case "symbol":
                return at(self.symbols, rest[0])
            case "int":
                return sympy.Integer(number(rest[0], int))
            case "rational":
                return sympy.Rational(number(rest[0], int), number(rest[1], int))
            case "float":
                return sympy.Float(float.fromhex(rest[0]), precision=number(rest[1], int))
            case _:
                pass
        if head not in _HEADS:
            raise unreadable(f"an expression has the unknown function {head!r}")
        make, parts = _HEADS[head], [at(self.nodes, place) for place in rest]
        return make(*parts, evaluate=False) if make in _UNEVALUATED else make(*parts)


def _symbol(data: Any) -> Any:
    name, hint, bounds, known = data
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name) or name == "math":
        raise unreadable(f"{name!r} is not the name of a symbol")
    assumptions = dict(known)
    if not assumptions.keys() <= _ASSUMPTIONS or not all(
        type(value) is bool for value in assumptions.values()
    ):
        raise unreadable(f"nothing is known of the assumptions {known} about a symbol")
    if hint is None:
        return sympy.Symbol(name, **assumptions)
    low, high = (None if bound is None else read_number(bound) for bound in bounds)
    return Symbol(name, read_number(hint), (low, high), **assumptions)


def number_data(value: Any) -> Any:
    """A Python number as data: ints and bools are themselves, floats hexadecimal text."""
    if isinstance(value, float):
        return value.hex()
    return hex(value) if type(value) is int and value.bit_length() > 4096 else value


def read_number(data: Any) -> Any:
    """A number from its data."""
    if isinstance(data, str):
        return (
            int(data, 16)
            if data.lstrip("-").startswith("0x") and "p" not in data
            else (float.fromhex(data))
        )
    if type(data) not in (bool, int):
        raise unreadable(f"{data!r} is not a number")
    return data


def number(data: Any, kind: Callable[[Any], Any]) -> Any:
    """A number of exactly this kind."""
    value = read_number(data)
    if type(value) is not kind:
        raise unreadable(f"{data!r} is no {getattr(kind, '__name__', kind)}")
    return value


def at(table: list[Any], place: Any) -> Any:
    """The entry of a table at a place."""
    if type(place) is not int or not 0 <= place < len(table):
        raise unreadable(f"{place!r} is no place in a table of {len(table)}")
    return table[place]
