"""Programs that are made ahead of time: a function that runs what it has and never traces."""

from __future__ import annotations

from typing import Any

from thunder_fn.errors import TraceTypeError
from thunder_fn.jitted import Jitted
from thunder_fn.jitted.call import call_key, read_call
from thunder_fn.jitted.dynamic import find, reason


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
