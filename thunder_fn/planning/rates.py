"""Hardware as data: rates, latencies and sizes of a machine and of the links between machines."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from thunder_fn.errors import InspectError, is_int, kind_of
from thunder_fn.inspect.machines import Machine
from thunder_fn.ir import facts
from thunder_fn.ir.trace import Op

FOLDER = Path(__file__).parent / "hardware"
TIMES = ("op_seconds", "view_seconds", "collective_seconds", "step_seconds")
_FIX = "Compare it with the files in planning/hardware."


@dataclass(frozen=True, slots=True)
class Link:
    """A link between ranks.

    Attributes:
        bytes_per_second: that each rank sends, in one direction.
        step_seconds: the latency of a step of a ring or a tree.
        efficiency: the part of the rate that large collectives reach.

    Example:
        >>> from thunder_fn.planning import Link
        >>> Link(bytes_per_second=450e9, step_seconds=2e-6, efficiency=0.8).rate
        360000000000.0
    """

    bytes_per_second: float
    step_seconds: float
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        _check(self, ("bytes_per_second",), ("efficiency",))

    @property
    def rate(self) -> float:
        """Bytes a second that large collectives reach."""
        return self.bytes_per_second * self.efficiency


@dataclass(frozen=True, slots=True)
class Hardware:
    """One rank's processor, its node, and the network of nodes.

    Attributes:
        source: the origin of the figures.
        flops_per_second: dense peaks of matrix products, by the name of a dtype.
        memory_bytes: of a rank.
        memory_bytes_per_second: of a rank, read and written.
        op_seconds: the time that an equation takes beside its work.
        node_size: ranks of a node.
        inside: the link between ranks of a node.
        across: the link of each rank to other nodes.
        view_seconds: the time of an equation that computes nothing, where nothing hides it.
        elements_per_second: of functions such as exp and gelu, where memory is no limit.
        collective_seconds: the time that a collective takes beside its steps.
        host_bytes_per_second: between a rank and the CPU's memory, in one direction; by default
            those that PCIe 4.0 reaches.
        matmul_efficiency, attention_efficiency, memory_efficiency: the part of a peak that matrix
            products, fused attention, and all other ops reach.

    Raises:
        InspectError: a figure is no number, or not one that there can be; names it.

    Example:
        >>> from thunder_fn.planning import hardware_named
        >>> h100 = hardware_named("h100")
        >>> h100.node_size, h100.memory_bytes
        (8, 80000000000.0)
    """

    name: str
    source: str
    flops_per_second: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_second: float
    op_seconds: float
    node_size: int
    inside: Link
    across: Link
    view_seconds: float = 0.0
    elements_per_second: float = math.inf
    collective_seconds: float = 0.0
    host_bytes_per_second: float = 25e9
    matmul_efficiency: float = 1.0
    attention_efficiency: float = 1.0
    memory_efficiency: float = 1.0

    def __post_init__(self) -> None:
        rates = ("memory_bytes", "memory_bytes_per_second", "elements_per_second")
        rates += ("host_bytes_per_second",)
        parts = ("matmul_efficiency", "attention_efficiency", "memory_efficiency")
        _check(self, rates, parts)
        if not is_int(self.node_size, 1):
            what = f"hardware: node_size is a number of ranks, given {self.node_size!r}"
            raise InspectError(what)
        for name, rate in self.flops_per_second.items():
            if not isinstance(getattr(torch, name, None), torch.dtype):
                what = f"hardware: flops_per_second has {name!r}, which is no dtype of PyTorch"
                raise InspectError(what)
            _check_number(f"flops_per_second.{name}", rate, lambda value: value > 0)
        if "float32" not in self.flops_per_second:
            what = "hardware: flops_per_second has no float32, whose rate other dtypes take"
            raise InspectError(what)

    def peak(self, dtype: torch.dtype) -> float:
        """Operations a second in a dtype; in float32's where the file does not say."""
        rates = self.flops_per_second
        name = str(dtype).removeprefix("torch.")
        return rates[name] if name in rates else rates["float32"]

    def machine(self, op: Op, dtype: torch.dtype) -> Machine:
        """The rates that an op reaches in a dtype, for the roofline."""
        rate = self.memory_bytes_per_second * self.memory_efficiency
        if op in facts.TRANSCENDENTAL:
            return Machine(self.name, self.elements_per_second, rate)
        is_attention = "scaled_dot_product" in op.name
        part = self.attention_efficiency if is_attention else self.matmul_efficiency
        return Machine(self.name, self.peak(dtype) * part, rate)


def _check(figures: Hardware | Link, rates: tuple[str, ...], parts: tuple[str, ...]) -> None:
    """Check times, rates and sizes, and parts of a whole.

    Raises:
        InspectError: one cannot be; names it.
    """
    for name in (name for name in figures.__slots__ if name in TIMES):
        _check_number(name, getattr(figures, name), lambda value: 0 <= value < math.inf)
    for name in rates:
        _check_number(name, getattr(figures, name), lambda value: value > 0)
    for name in parts:
        _check_number(name, getattr(figures, name), lambda value: 0 < value <= 1)


def _check_number(name: str, value: Any, holds: Callable[[float], bool]) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not holds(value):
        raise InspectError(f"hardware: {name} cannot be {value!r}")


def hardware_named(name: str | Path) -> Hardware:
    """Read the hardware of a TOML file: one of the package, such as "h100", or a path.

    Law: a name of the package and the path of its file give equal hardware.

    Raises:
        InspectError: there is no such file, it is no TOML, or it lacks a figure; names it.

    Example:
        >>> hardware_named("h100").peak(torch.bfloat16)
        989000000000000.0
    """
    if not isinstance(name, str | Path):
        what = f"hardware is a name, a path or a `Hardware`, given {kind_of(name)}"
        raise InspectError(what)
    path = Path(name) if Path(name).suffix == ".toml" else FOLDER / f"{str(name).lower()}.toml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.toml")))
        what = f"there is no hardware {str(name)!r}"
        fix = f"Name one of {known}, or a TOML file; `measure-hardware` writes one."
        raise InspectError(what, fix=fix)
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of the encoding, or of TOML
        raise InspectError(f"{path.name} is no TOML: {error}", fix=_FIX) from error
    return read(found, path.name)


def read(found: dict[str, Any], place: str = "the hardware") -> Hardware:
    """Make a hardware of a file's contents.

    Raises:
        InspectError: a figure is missing, unknown or wrong.
    """
    try:
        found = {**found, "flops_per_second": MappingProxyType(dict(found["flops_per_second"]))}
        for link in ("inside", "across"):
            found[link] = Link(**dict(found[link]))
        return Hardware(**found)
    except (KeyError, TypeError, ValueError) as error:
        raise InspectError(f"{place} is no hardware: {error}", fix=_FIX) from error


def toml_of(hardware: Hardware) -> str:
    """Write a hardware as TOML.

    Law: `read(tomllib.loads(toml_of(h))) == h`.
    """
    lines: list[str] = []
    tables: list[str] = []
    for name in Hardware.__slots__:
        value: Any = getattr(hardware, name)
        if isinstance(value, Link):
            value = {field: getattr(value, field) for field in Link.__slots__}
        if isinstance(value, Mapping):
            items: Any = value.items()
            tables += ["", f"[{name}]", *(f"{key} = {number!r}" for key, number in items)]
        else:
            lines.append(f"{name} = {_literal(value)}")
    return "\n".join([*lines, *tables, ""])


def _literal(value: str | float) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
