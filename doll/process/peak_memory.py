"""The memory of a process that was forked, now and at its most. Linux only.

The peak that the kernel keeps (VmHWM) is one of resident memory. It counts the pages that a forked process still shares
with its parent, a few hundred MB after `import torch`, and does not grow when the process writes to such a page and
gets one of its own. What a process costs is its *private* memory (USS): the pages that nobody else has, and that are
freed when it ends; those of a library are private as long as no other process has it loaded. Of pages with n owners
the *proportional* memory (PSS) counts the nth part, so that its sum over all processes is what they take together.
The kernel keeps no peak of either; `PeakMemory` has bounds of it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

_KIB: Final = 1024
_RESET_PEAK: Final = "5"  # proc(5), clear_refs: VmHWM becomes VmRSS


class Memory(NamedTuple):
    """Memory of a process, in bytes, without what was swapped out.

    Attributes:
        resident_bytes: all pages that it has mapped (RSS).
        private_bytes: those that no other process has mapped (USS).
        proportional_bytes: private memory, and of a page with n owners the nth part (PSS).
        segment_bytes: the part of `proportional_bytes` in shared memory: segments of links, files in /dev/shm.
    """

    resident_bytes: int
    private_bytes: int
    proportional_bytes: int
    segment_bytes: int

    @property
    def shared_bytes(self) -> int:
        """Resident pages that other processes have mapped too."""
        return self.resident_bytes - self.private_bytes


def read_memory(pid: int | None = None, proc: Path = Path("/proc")) -> Memory:
    """The memory of a process now. Takes about 10 ms with torch loaded, in which the process cannot map memory.

    Args:
        pid: of a process of this user; None: of this one.

    Raises:
        ProcessLookupError: it has ended.
        OSError: it is another user's, or the kernel has no smaps_rollup (Linux before 4.14).
    """
    values = _read(proc / str(pid or os.getpid()) / "smaps_rollup")
    return Memory(
        values["Rss"],
        values["Private_Clean"] + values["Private_Dirty"],
        values["Pss"],
        values["Pss_Shmem"],
    )


def peak_resident_bytes(pid: int | None = None, proc: Path = Path("/proc")) -> int:
    """The most resident memory since the process began, or since `reset_peak`.

    Raises:
        ProcessLookupError: it has ended.
    """
    return _read(proc / str(pid or os.getpid()) / "status")["VmHWM"]


def reset_peak(pid: int | None = None, proc: Path = Path("/proc")) -> None:
    """From now on `peak_resident_bytes` counts from the resident memory that the process has now.

    Raises:
        ProcessLookupError: it has ended.
        OSError: it is another user's.
    """
    try:
        (proc / str(pid or os.getpid()) / "clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    except FileNotFoundError:
        raise _gone(pid) from None


class PeakMemory:
    """Bounds of the most private memory that a process has from now on. `sample` it now and then, and at the end.

    Between two samples the process can have had more than either: the largest sample is the lower bound. The upper one
    is the kernel's peak of resident memory less the smallest shared memory of all samples. It holds between samples
    too, unless shared memory was smaller in between; that of a forked process shrinks only, as it or its parent writes.
    A process that keeps freed memory (`doll.process.memory`) has its peak at the end: the bounds meet.

    Args:
        pid: of a process of this user; None: this one.

    Attributes:
        first: at the beginning.
        last: at the last sample.

    Raises:
        ProcessLookupError: it has ended.
        OSError: as of `read_memory`.
    """

    def __init__(self, pid: int | None = None, proc: Path = Path("/proc")) -> None:
        self._pid = pid
        self._proc = proc
        reset_peak(pid, proc)
        self.first = self.last = read_memory(pid, proc)
        self._at_least = self.first.private_bytes
        self._resident = self.first.resident_bytes
        self._shared = self.first.shared_bytes

    def sample(self) -> Memory:
        """The memory now.

        Raises:
            ProcessLookupError: it has ended. The bounds are those of the last sample.
        """
        self.last = read_memory(self._pid, self._proc)
        self._at_least = max(self._at_least, self.last.private_bytes)
        self._resident = max(peak_resident_bytes(self._pid, self._proc), self.last.resident_bytes)
        self._shared = min(self._shared, self.last.shared_bytes)
        return self.last

    @property
    def at_least_bytes(self) -> int:
        """Lower bound of the peak of private memory."""
        return self._at_least

    @property
    def at_most_bytes(self) -> int:
        """Upper bound of the peak of private memory up to the last sample."""
        return max(self._at_least, self._resident - self._shared)


def _read(path: Path) -> dict[str, int]:
    """The lines of `path` that have kilobytes, in bytes; 0 for those it lacks."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise _gone(path.parent.name) from None
        raise OSError(f"expected {path}: Linux before 4.14 does not have it") from None
    values = _Values()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            values[name] = int(value[:-3]) * _KIB
    if not values:  # the memory of a process that waits to be reaped is gone
        raise _gone(path.parent.name)
    return values


class _Values(dict[str, int]):
    def __missing__(self, name: str) -> int:
        return 0


def _gone(pid: int | str | None) -> ProcessLookupError:
    return ProcessLookupError(f"expected process {pid}, which has ended")
