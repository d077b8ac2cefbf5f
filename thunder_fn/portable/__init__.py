"""Programs that leave the process: files that are data only, and PyTorch's exported programs.

`save` writes a trace, or a function with its structure of arguments; `load` reads it in any other
process. Nothing of a file is run, unpickled or imported while it is read: ops are looked up by name
among those that PyTorch and thunder_fn have. `export` makes a `torch.export.ExportedProgram`, from
which AOTInductor and ONNX go on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Protocol

from thunder_fn.capture import TENSOR
from thunder_fn.capture.outside.properties import OF_MEMORY
from thunder_fn.errors import ThunderError, kind_of, spelled
from thunder_fn.garbage import no_collections
from thunder_fn.ir.trace import Expr, Trace
from thunder_fn.portable.archive import read_file, write_file
from thunder_fn.portable.errors import refused, unreadable
from thunder_fn.portable.exported import export
from thunder_fn.portable.functions import Arguments, NumberLeaf, PortableFunction
from thunder_fn.portable.numbers import NumberReader, number
from thunder_fn.portable.traces import TraceReader, TraceWriter
from thunder_fn.portable.trees import by_name, read_tree, tree_data

__all__ = ["PortableFunction", "export", "load", "save"]


class Lowered(Protocol):
    """The result of `jit(f).lower(*args)`."""

    def portable(self) -> PortableFunction:
        """The function whose program is data."""
        ...


@spelled()
def save(program: Trace | PortableFunction | Lowered, path: str | os.PathLike[str]) -> None:
    """Write a program to a file, which holds data only.

    Law: ``load(path)`` is the program: an equal trace, with tensors that are closed over bitwise
        equal, or a function with equal results, which refuses what the saved one refuses.

    Args:
        program: a trace, or `jit(f).lower(*args)`, which is a function with its arguments.
        path: the file, which is there as a whole or not at all.

    Raises:
        PortableError: a part of the program is Python code, such as a checkpoint policy of the
            user's, or belongs to the process; names the equation and the user's line.
        MissingExtra: the program has constants, and safetensors is not installed.

    Example:
        >>> import tempfile, torch
        >>> from thunder_fn import jit
        >>> path = tempfile.mkdtemp() + "/f.tfn"
        >>> save(jit(lambda x: x.sin() * 2).lower(torch.zeros(2)), path)
        >>> load(path)(torch.zeros(2))
        tensor([0., 0.])
    """
    if isinstance(program, Trace):
        writer = TraceWriter()
        found: dict[str, Any] = {"trace": writer.trace(program), "function": None}
    else:
        portable = getattr(program, "portable", None)
        function = portable() if callable(portable) else program
        if not isinstance(function, PortableFunction):
            raise refused(
                f"expected a trace or a lowered function, given {kind_of(program)}",
                fix="Lower the function for its arguments: `save(jit(f).lower(*args), path)`.",
            )
        writer = TraceWriter()
        found = {
            "trace": writer.trace(function.trace),
            "function": _function_data(function, writer),
        }
    write_file(path, {**found, **writer.data()}, writer.tensors)


@spelled()
@no_collections()
def load(path: str | os.PathLike[str], *, classes: Iterable[type] = ()) -> Trace | PortableFunction:
    """Read a program that `save` wrote. No code of the file is run.

    Law: see `save`.

    Args:
        path: the file.
        classes: named tuples and dataclasses among the program's arguments and results.

    Returns:
        The trace, or the function.

    Raises:
        PortableError: the file is cut or changed, of another version of the format, or names an op
            that is not there.
        InvalidTrace, TraceTypeError: what the file says is no trace.
        MissingExtra: the program has constants, and safetensors is not installed.
        FileNotFoundError: there is no such file.

    Example:
        >>> import tempfile, torch
        >>> from thunder_fn import trace
        >>> path = tempfile.mkdtemp() + "/f.tfn"
        >>> save(trace(torch.sin, torch.zeros(2)), path)
        >>> load(path) == trace(torch.sin, torch.zeros(2))
        True
    """
    try:
        data, tensors = read_file(path)
        reader = TraceReader(data, tensors)
        trace = reader.trace(data["trace"])
        if data["function"] is None:
            return trace
        return _read_function(data["function"], trace, reader, by_name(classes))
    except (ThunderError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the data
        what = f"{os.fspath(path)} is not a saved program: {type(error).__name__}: {error}"
        raise unreadable(what) from None


# ---- functions ----


def _function_data(function: PortableFunction, writer: TraceWriter) -> dict[str, Any]:
    expression = writer.numbers.expression
    arguments = function.arguments
    return {
        "arguments": tree_data(arguments.tree, writer.literal),
        "leaves": [_leaf_data(leaf, writer) for leaf in arguments.leaves],
        "strides": [
            [{"expr": expression(size)} if isinstance(size, Expr) else size for size in stride]
            for stride in arguments.strides
        ],
        "symbols": [[expression(symbol), list(place)] for symbol, place in arguments.symbols],
        "properties": [
            [place, name, writer.literal(value)] for place, name, value in arguments.properties
        ],
        "results": tree_data(function.results, writer.literal),
        "result_leaves": [_leaf_data(leaf, writer) for leaf in function.result_leaves],
        "writes": list(function.writes),
        "relations": [expression(relation) for relation in function.relations],
    }


def _leaf_data(leaf: Any, writer: TraceWriter) -> Any:
    if leaf is TENSOR:
        return {"tensor": None}
    return {"number": leaf.input} if isinstance(leaf, NumberLeaf) else writer.literal(leaf)


def _read_function(
    data: dict[str, Any], trace: Trace, reader: TraceReader, classes: dict[str, type]
) -> PortableFunction:
    numbers = reader.numbers

    def leaf(item: dict[str, Any]) -> Any:
        if "tensor" in item:
            return TENSOR
        return (
            NumberLeaf(number(item["number"], int)) if "number" in item else (reader.literal(item))
        )

    strides = tuple(tuple(_size(size, numbers) for size in stride) for stride in data["strides"])
    symbols = tuple(
        (numbers.expression(symbol), (number(i, int), None if dim is None else number(dim, int)))
        for symbol, (i, dim) in data["symbols"]
    )
    properties = tuple(
        (number(place, int), _property(name), reader.literal(value))
        for place, name, value in data["properties"]
    )
    arguments = Arguments(
        read_tree(data["arguments"], numbers, classes),
        tuple(map(leaf, data["leaves"])),
        strides,
        symbols,
        properties,
    )
    return PortableFunction(
        trace,
        arguments,
        read_tree(data["results"], numbers, classes),
        tuple(map(leaf, data["result_leaves"])),
        tuple(number(place, int) for place in data["writes"]),
        tuple(map(numbers.expression, data["relations"])),
    )


def _property(name: Any) -> str:
    if name not in OF_MEMORY:
        raise unreadable(f"{name!r} is no property of memory")
    return name


def _size(data: Any, numbers: NumberReader) -> int | Expr:
    return numbers.expression(data["expr"]) if isinstance(data, dict) else number(data, int)
