"""CPU time and run-queue wait of processes by thread, from /proc. Linux only."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import busy_s

_NOTE_S = 1.0


@dataclass
class ThreadUse:
    """What the threads of one name used, in all processes of one name.

    Attributes:
        cpu_s: time on a core.
        wait_s: time in which a thread was ready to run and no core was free for it.
    """

    cpu_s: float = 0.0
    wait_s: float = 0.0


class ThreadSampler:
    """`Observer` that compares the counters of all threads at the beginning and the end.

    Attributes:
        uses: by process and thread name.
        began_s: monotonic.
        seconds: that it took.
        others_s: CPU time of all processes that were not observed.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._processes: Mapping[int, str] = {}
        self._first: dict[tuple[int, int], ThreadUse] = {}
        self._last: dict[tuple[int, int], ThreadUse] = {}
        self._threads: dict[tuple[int, int], tuple[str, str]] = {}
        self.began_s = self._noted_s = 0.0
        self._busy_s = 0.0
        self.uses: dict[tuple[str, str], ThreadUse] = {}
        self.seconds = self.others_s = 0.0

    def begin(self, processes: Mapping[int, str]) -> None:
        self._processes = processes
        self.began_s = self._noted_s = time.monotonic()
        self._busy_s = busy_s()
        self._read()
        self._first = dict(self._last)

    def note(self) -> None:
        """Counters of a thread that ends are gone: read them once a second."""
        if time.monotonic() - self._noted_s >= _NOTE_S:
            self._noted_s = time.monotonic()
            self._read()

    def end(self) -> None:
        self._read()
        self.seconds = time.monotonic() - self.began_s
        for key, last in self._last.items():
            first = self._first.get(key, ThreadUse())
            use = self.uses.setdefault(self._threads[key], ThreadUse())
            use.cpu_s += last.cpu_s - first.cpu_s
            use.wait_s += last.wait_s - first.wait_s
        self.others_s = max(0.0, busy_s() - self._busy_s - sum(use.cpu_s for use in self.uses.values()))

    def _read(self) -> None:
        for pid, process in self._processes.items():
            for thread_id, name, use in read_threads(self._proc / str(pid)):
                self._last[pid, thread_id] = use
                self._threads[pid, thread_id] = (process, "main" if thread_id == pid else name)


def read_threads(process: Path) -> Iterator[tuple[int, str, ThreadUse]]:
    """(id, name, counters since its start) of each thread of /proc/<pid>; nothing of a process that has ended."""
    with contextlib.suppress(OSError):
        for task in os.listdir(process / "task"):
            folder = process / "task" / task
            with contextlib.suppress(OSError):  # this thread has ended
                run_ns, wait_ns, _ = (folder / "schedstat").read_text(encoding="utf-8").split()
                name = plain_name((folder / "comm").read_text(encoding="utf-8"))
                yield int(task), name, ThreadUse(int(run_ns) / 1e9, int(wait_ns) / 1e9)


def plain_name(name: str) -> str:
    """A thread's name without its number: threads of one pool are one.

    >>> plain_name("rdk:broker12"), plain_name("torch_0"), plain_name("GC Thread#1")
    ('rdk:broker', 'torch', 'GC Thread')
    """
    return re.sub(r"[\s_#-]*\d*[\s_#-]*$", "", name.strip()) or name.strip()
