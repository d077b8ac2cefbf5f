"""The values that a generated function names, and its text.

Numbers beside tensors are among them: `x + 1` makes a tensor of 1 at every call, which costs more
than a small addition. A program holds that tensor if this changes no bit. Beside a float32 or
float64 tensor on the CPU, an elementwise op converts the number to the tensor's dtype before it
computes. This does so, too.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.executors.running import LINES, Line
from thunder_fn.executors.taking import TEXT
from thunder_fn.ir.text import identifier, is_usable, program_text, run_text, tuple_text
from thunder_fn.ir.trace import Atom, Equation, Literal, Op, TensorType, Var

RESERVED = frozenset(
    (
        *("float", "int", "complex", "abs", "max", "min", "round"),
        *("getattr", "zip", "reversed", "range", "__builtins__", LINES, TEXT),
    )
)
"""Names of Python's that generated code calls, and those of what lies beside a program."""


class Names:
    """The values that one function names, and the functions that were written for it."""

    def __init__(self, name: str) -> None:
        self.context: dict[str, Any] = {"torch": torch, "math": math}
        self.names: dict[Any, str] = {}
        self.homes: dict[str, list[str]] = {}
        self.functions: list[str] = []
        self.called: dict[str, Equation] = {}
        self.name = self.bind(self, name, None)

    def bind(self, key: Any, wanted: str, value: Any) -> str:
        """The name of a value in the context: the same one for the same key."""
        if key not in self.names:
            base = name = wanted if is_usable(wanted) else identifier(wanted)
            count = 0
            while name in self.context or name in RESERVED:
                count += 1
                name = f"{base}_{count}"
            self.names[key], self.context[name] = name, value
        return self.names[key]

    def function(
        self, name: str, parameters: Sequence[str], lines: Iterable[str], *, taken: bool = False
    ) -> tuple[str, Callable[..., Any]]:
        """The text of a function, after those that were written for it, and the function, made
        to be taken from if so.
        """
        body = [f"    {line}" for line in lines]
        homes = "; ".join(
            f"{home}: {', '.join(sorted(names))}" for home, names in sorted(self.homes.items())
        )
        header = f"def {name}({', '.join(parameters)}):"
        numbered = [*([f"# {homes}"] if homes else []), header, *body, ""]
        lines_called = (
            (number, self.called.get(line.strip())) for number, line in enumerate(numbered, 1)
        )
        self.context[LINES] = {
            number: Line(equation) for number, equation in lines_called if equation is not None
        }
        text = program_text(numbered)
        if taken:
            self.context[TEXT] = text
        run_text(text, name, self.context)
        return "\n".join([*self.functions, text]), self.context.pop(name)

    def returned(self, atoms: Sequence[Atom], text: Callable[[Atom], str]) -> Iterator[str]:
        """Lines that return these values. A variable that is returned as a copy is copied once,
        however often it is returned.
        """
        times = Counter(atom for atom in atoms if isinstance(atom, Var))
        copied = [var for var, count in times.items() if count > 1 and text(var) != str(var)]
        known = {var: self.bind(("copy", var), f"{var}_copy", None) for var in copied}
        yield from (f"{name} = {text(var)}" for var, name in known.items())
        values = (known.get(atom) if isinstance(atom, Var) else None for atom in atoms)
        texts = [value or text(atom) for atom, value in zip(atoms, values, strict=True)]
        yield f"return {tuple_text(texts)}"


# ---- numbers beside tensors ----


CONVERTING = frozenset(
    Op("leaf", f"aten.{name}{in_place}.Tensor")
    for name in ("add", "sub", "mul", "div")
    for in_place in ("", "_")
)
"""Ops that take a tensor and a number as a tensor, and convert both to the dtype of the result."""

EXACT = 2**53


def stands_for_number(equation: Equation) -> bool:
    """Test whether a tensor of the result's dtype may stand for the number that an equation's last
    argument is.
    """
    if equation.op not in CONVERTING or equation.kwargs or len(equation.args) != 2:
        return False
    operand, number = equation.args
    type = equation.outputs[0].type
    if not isinstance(operand, Var) or operand.type != type or not isinstance(number, Literal):
        return False
    if (
        not isinstance(type, TensorType)
        or type.device.type != "cpu"
        or type.dtype not in (torch.float32, torch.float64)
    ):
        return False
    value = number.value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and not (isinstance(value, int) and abs(value) > EXACT)


def number_tensor(value: float, dtype: torch.dtype) -> torch.Tensor:
    """The tensor that stands for a number in a program."""
    with internals.isolated(), internals.no_torch_function():
        return torch.tensor(value, dtype=dtype)


def number_name(value: float) -> str:
    """The name in a program of a number's tensor: `number_0_5`."""
    return "number_" + re.sub(r"\W", "_", repr(value).replace("-", "minus_"))
