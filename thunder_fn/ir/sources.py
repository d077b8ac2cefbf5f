"""The user's lines and modules that equations come from."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Source:
    """The user's line that an equation comes from, and the module that was running.

    Calls with equal bodies share them. So in a body a module is known from the call on. `inside` is
    its path from there, and `around` that of the call which was captured first, which is no part of
    what makes sources equal. `around` is None where no call is around: `inside` is the whole path
    then. `first` has the values of the two before bodies were unfolded, as the bodies of the
    equation know them.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> source = tfn.trace(lambda x: x.sin(), torch.ones(2)).equations[0].source
        >>> source.function, source.line
        ('<lambda>', 1)
    """

    file: str
    line: int
    function: str
    inside: str = ""
    around: str | None = field(default=None, compare=False)
    first: tuple[str | None, str] | None = field(default=None, compare=False, repr=False)

    @property
    def module(self) -> str:
        """The path of the module that was running; in a body, where it was captured first."""
        return _joined(self.around, self.inside)

    @property
    def place(self) -> str:
        """The line alone."""
        return f"{self.file}:{self.line} in {self.function}"

    def __str__(self) -> str:
        return f"{self.place} ({self.module})" if self.module else self.place

    def within(self, around: str | None) -> Source:
        """The source in a body of the call of this module."""
        if around is None or around == self.around or not _is_in(self.module, around):
            return self
        return Source(
            self.file, self.line, self.function, self.module[len(around) :].lstrip("."), around
        )

    def called_from(self, call: Source | None) -> Source:
        """The source where a body is unfolded in place of its call.

        In a body that was made of the call itself, as that of a checkpoint around it, modules are
        known as the call's is.
        """
        if call is None or (self.around is None and self.inside):
            return self
        around, inside = call.first or (call.around, call.inside)
        base = call.inside
        if self.around == around:  # beside the call
            base = base.removesuffix(inside).rstrip(".")
        first = self.first or (self.around, self.inside)
        return Source(
            self.file, self.line, self.function, _joined(base, self.inside), call.around, first
        )


def _joined(around: str | None, inside: str) -> str:
    return f"{around}.{inside}" if around and inside else around or inside


def _is_in(module: str, around: str) -> bool:
    return not around or module == around or module.startswith(f"{around}.")
