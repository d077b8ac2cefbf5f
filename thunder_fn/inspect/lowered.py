"""The programs of one call ahead of time: their text, cost and memory, and a function that runs
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn.errors import PortableError, TraceTypeError
from thunder_fn.executors import wait
from thunder_fn.inspect.chains import Chain, chain
from thunder_fn.inspect.costs import CostReport, cost_of_chain
from thunder_fn.inspect.memory_use import Memory, memory_of
from thunder_fn.jitted import Jitted
from thunder_fn.jitted.call import call_key, read_call
from thunder_fn.jitted.dynamic import find, reason
from thunder_fn.jitted.modules.module import jit_of
from thunder_fn.portable import PortableFunction
from thunder_fn.spellings import no_such_name

if TYPE_CHECKING:
    from thunder_fn.inspect.machines import Machine


@dataclass(frozen=True, eq=False)
class Lowered:
    """The programs that a jitted function makes of one call. Made by `jit(f).lower(*args)`.

    Attributes:
        chain: the traces from capture to the programs; `print` of it is a table.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> lowered = tfn.jit(torch.sin).lower(torch.ones(2))
        >>> [step.name for step in lowered.chain.steps]
        ['capture sin', 'program']
    """

    chain: Chain
    function: Callable[[], Lowered] | None = None
    """For a module, the same of its call as a function, which closes over its tensors."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_such_name("thunder_fn:Lowered", name)

    def text(self) -> str:
        """The text of the programs: one, or the forward and the backward where an argument
        requires a gradient.
        """
        return "\n".join(str(step.program) for step in self.chain.programs)

    def cost(self, machine: Machine | None = None) -> CostReport:
        """Estimate the operations and bytes of the programs. See `inspect.cost`."""
        return cost_of_chain(self.chain, machine)

    def memory(self) -> Memory:
        """Compute the memory that the programs take. See `inspect.memory`."""
        return memory_of(self.chain)

    def compile(self) -> Compiled:
        """Return the function with these programs, compiled. It never traces.

        Law: ``jit(f).lower(*args).compile()(*args)`` is ``f(*args)``. Called with arguments of
            other types, numbers or structure it is a TraceTypeError. With `jit(f, dynamic={...})`
            it serves all sizes within the bounds.
        """
        if self.function is not None:
            return self.function().compile()
        jitted = self.chain.jitted
        assert jitted is not None, "`chain` brings it"
        wait()
        return Compiled(jitted.fn, jitted.options, jitted.programs)

    def portable(self) -> PortableFunction:
        """Return the function with its program as data, which `save` writes.

        Raises:
            PortableError: the program does something besides computing results and writing to
                arguments.
        """
        if self.function is not None:
            return self.function().portable()
        found = self.chain.portable
        if not isinstance(found, PortableFunction):
            raise found or PortableError("save: the chain has no program")
        return found

    def __str__(self) -> str:
        return self.text()


def lower(
    jitted: Jitted | torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Lowered:
    """Make the programs of a call of a jitted function or module. Nothing is run."""
    lowered = chain(jitted, *args, **kwargs)
    if not isinstance(jitted, torch.nn.Module):
        return Lowered(lowered)
    inner = jit_of(jitted)

    @functools.wraps(inner.module.forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return inner.module(*args, **kwargs)

    call.__name__ = type(inner.module).__name__
    return Lowered(lowered, lambda: Jitted(call, inner.options).lower(*args, **kwargs))


class Compiled(Jitted):
    """A jitted function with the programs that were made for it. A call that none of them serves is
    an error.

    Made by `jit(f).lower(*args).compile()`.
    """

    def call_slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Find the call's program.

        Raises:
            TraceTypeError: it was compiled for other arguments; names the first difference.
        """
        cache, call = self.programs, read_call(self.options, args, kwargs)
        key = call_key(call)
        known = cache.get(key) or find(cache, call, key)
        if not any(entry.serves(call) for entry in known):
            miss = reason(cache, cache.families.of(call, key), call, key, known)
            what = f"{getattr(self.fn, '__name__', self.fn)} was compiled for another call: {miss}"
            fix = "Call it as it was lowered, or call the jitted function, which traces anew."
            raise TraceTypeError(what, fix=fix)
        return super().call_slowly(args, kwargs)
