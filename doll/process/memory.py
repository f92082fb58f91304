"""Keep freed memory in the process: torch frees and allocates the same tens of megabytes with every batch."""

from __future__ import annotations

import ctypes
from typing import Final

# <malloc.h> of glibc.
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_MAX: Final = -4
_M_ARENA_MAX: Final = -8
_NEVER: Final = 2**31 - 1
_TOP_PAD_BYTES: Final = 16 * 1024 * 1024


def keep_freed_memory() -> bool:
    """Have glibc's malloc keep freed memory, and all threads share one heap; call it before threads are started.

    By default each large activation is mapped anew and its pages are filled with zeros again: 80 thousand page faults
    for one gradient of 1.2 million parameters, a third of its time (measured CPU of one gradient, 256 images: 440 ms
    before, 272 ms after; 22 and 19 ms for 24 thousand parameters). The process then
    keeps its maximum size.

    Returns:
        Whether it was done; without glibc it is not.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, _NEVER),
        (_M_TOP_PAD, _TOP_PAD_BYTES),
        # A thread's own heap has 64 MiB at most, and maps what does not fit.
        (_M_ARENA_MAX, 1),
    )
    results = [mallopt(name, value) for name, value in settings]  # all of them, also after a failure
    return all(results)
