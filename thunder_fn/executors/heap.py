"""The C heap keeps the memory that a program frees, for its next call.

glibc hands freed memory back to the system when much of it lies together, and the system hands it
out again page by page. That takes some percent of a training step on CPUs, a fifth of the steps
that free more than 64 MiB at once. So it is told to keep up to a sixteenth of the machine's memory,
as PyTorch's allocators for GPUs keep all. Pieces of more than 32 MiB are mapped and given back one
by one whatever it is told. Other allocators, and a heap that the user has tuned
(`MALLOC_TRIM_THRESHOLD_`, `GLIBC_TUNABLES`), are as they were; `malloc_trim` gives everything back.

Source: `M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` in mallopt(3).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from functools import cache

LARGEST = 32 << 20
"""The largest piece that glibc would take from the heap."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_SHARE = 16


@cache
def keep_freed_memory() -> None:
    """Let the heap keep freed memory. Once for each process."""
    if platform.libc_ver()[0] != "glibc" or is_tuned(os.environ):
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    library = ctypes.CDLL(None)
    library.mallopt(_MMAP_THRESHOLD, LARGEST)
    library.mallopt(_TRIM_THRESHOLD, min(max(memory // _SHARE, 2 * LARGEST), (1 << 31) - 1))


def is_tuned(environment: Mapping[str, str]) -> bool:
    """Test whether the user has tuned the heap."""
    own = (
        key
        for key in environment
        if key.startswith("MALLOC_") and key.endswith("_") and environment[key]
    )
    return "glibc.malloc" in environment.get("GLIBC_TUNABLES", "") or any(own)
