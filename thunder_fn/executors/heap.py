"""The C heap keeps the memory that a program frees, for its next call.

glibc hands freed memory back to the system when much of it lies together, and the system hands it out again page by
page: a training step on CPUs spends some percent on that. It learns how much to keep from the largest piece that it
has seen freed, up to 32 MiB. So it is shown one, which is never touched and costs nothing. Other allocators, and a
heap that the user has tuned (`MALLOC_TRIM_THRESHOLD_`, `GLIBC_TUNABLES`), are as they were.

Source: `M_MMAP_THRESHOLD` in mallopt(3).
"""

from __future__ import annotations

from functools import cache

LARGEST = (32 << 20) - (64 << 10)
"""Just below what glibc learns from."""


@cache
def keep_freed_memory() -> None:
    """Let the heap keep up to 64 MiB of freed memory. Once for each process."""
    bytearray(LARGEST)
