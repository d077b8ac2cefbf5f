"""Residuals of a function as a table: the values of its forward that the backward keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thunder_fn.api.residuals import SavedResidual, saved_residuals
from thunder_fn.errors import callable_name, spelled
from thunder_fn.inspect.tables import bytes_text, plain, rich_table
from thunder_fn.ir.notebook import Shown
from thunder_fn.ir.text import escaped

_HEADER = ("bytes", "own", "type", "what", "line", "module")


@dataclass(frozen=True, repr=False)
class Residuals(Shown):
    """The residuals of a function's gradient, in the order in which the backward gets them.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> found = tfn.inspect.residuals(lambda x: x.sin().sum(), torch.ones(4))
        >>> [(str(one.type), one.num_bytes) for one in found.residuals]
        [('f32[4]', 16)]
    """

    function: str
    residuals: tuple[SavedResidual, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of the residuals, without the arguments, which their caller holds."""
        return sum(one.own_bytes for one in self.residuals)

    @property
    def summary(self) -> str:
        """The report in one line."""
        size = bytes_text(self.num_bytes)
        return escaped(
            f"residuals of {self.function}: {len(self.residuals)}, {size} beside the arguments"
        )

    def rows(self, limit: int = 40) -> list[tuple[str, ...]]:
        """The table, largest first: size, and memory of its own."""
        ordered = sorted(self.residuals, key=lambda one: -one.num_bytes)
        rows = [
            (*_sizes([one]), str(one.type), one.reason, *_where(one)) for one in ordered[:limit]
        ]
        rest = ordered[limit:]
        more = (*_sizes(rest), "", f"{len(rest)} more", "", "")
        return [*rows, more] if rest else rows

    def __str__(self) -> str:
        return "\n".join([self.summary, plain(_HEADER, self.rows())])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(Text(self.summary, style="bold"), rich_table(_HEADER, self.rows()))


def _sizes(residuals: Sequence[SavedResidual]) -> tuple[str, str]:
    """The bytes of some residuals, and those of their own."""
    return bytes_text(sum(one.num_bytes for one in residuals)), bytes_text(
        sum(one.own_bytes for one in residuals)
    )


def _where(residual: SavedResidual) -> tuple[str, str]:
    source = residual.source
    return (
        (f"{Path(source.file).name}:{source.line}", source.module)
        if source is not None
        else ("", "")
    )


@spelled()
def residuals(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Residuals:
    """Report the values of the forward that the gradient of f, and of a module's parameters, keeps.
    See `saved_residuals`.

    Law: its rows are those of `saved_residuals`.

    Errors as in `chain`.

    Example:
        >>> print(residuals(lambda x: x.sin().exp().sum(), torch.ones(3)).summary)
        residuals of <lambda>: 2, 12 B beside the arguments
    """
    name = callable_name(f)
    if not isinstance(f, torch.nn.Module):
        return Residuals(name, tuple(saved_residuals(f, *args, **kwargs)))
    params = dict(f.named_parameters())
    call = lambda params, *args, **kwargs: torch.func.functional_call(f, params, args, kwargs)
    return Residuals(name, tuple(saved_residuals(call, params, *args, **kwargs)))
