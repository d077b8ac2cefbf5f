"""Memory that programs of one function share: a forward lends its residuals to the backward.

Who records programs keeps what they give in memory that the next run overwrites. The caller gets
copies. Residuals are read by the function's own backward only, so they need none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Memory:
    """The memory of the recordings of a function's forward and backward.

    `pool` is where they allocate, `lent` the addresses of what the forward lends, `is_lent` tells
    whether its last run did so. A forward that is recorded again gets a new pool and the next
    `age`: a backward of the old one may use the memory of the new one's results.
    """

    pool: Any = None
    lent: frozenset[int] = frozenset()
    is_lent: bool = False
    has_lender: bool = False
    age: int = 0

    def renew(self) -> None:
        """Begin anew, for a forward that is recorded."""
        self.pool, self.lent, self.is_lent, self.age = None, frozenset(), False, self.age + 1
