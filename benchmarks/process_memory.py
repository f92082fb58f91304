"""The memory of a process that was forked. Linux only.

What such a process costs is its *private* memory (USS): the pages that nobody else has, and that its end frees.
Resident memory also counts the pages that it shares with its parent, a few hundred MB after `import torch`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_KIB = 1024


class Memory(NamedTuple):
    """Memory of a process, in bytes, without what was swapped out.

    Attributes:
        private_bytes: pages that no other process has mapped (USS).
        segment_bytes: its part of shared memory (segments of links, files in /dev/shm): of a page with n owners the nth
            part.
    """

    private_bytes: int
    segment_bytes: int


def read_memory(pid: int | None = None) -> Memory:
    """The memory of a process now. Takes about 10 ms with torch loaded, in which the process cannot map memory.

    Args:
        pid: of a process of this user; None: of this one.

    Raises:
        ProcessLookupError: it has ended.
        OSError: it is another user's, or the kernel has no smaps_rollup (Linux before 4.14).
    """
    number = os.getpid() if pid is None else pid
    path = Path("/proc") / str(number) / "smaps_rollup"
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        if path.parent.is_dir():
            raise OSError(f"expected {path}: Linux before 4.14 does not have it") from None
        text = ""
    lines = (line.split() for line in text.splitlines())
    values = {words[0]: int(words[1]) * _KIB for words in lines if words[-1] == "kB"}
    if not values:  # it has ended; the memory of a process that waits to be reaped is gone
        raise ProcessLookupError(f"expected process {number}, which has ended")
    return Memory(values["Private_Clean:"] + values["Private_Dirty:"], values.get("Pss_Shmem:", 0))
