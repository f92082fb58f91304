"""What malloc does with freed memory, seen by the page faults of a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, threading
import numpy as np
from doll.process.memory import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()

def work(rounds):
    for _ in range(rounds):
        blocks = [np.empty(40_000_000, np.uint8) for _ in range(3)]  # together more than a thread's own heap
        for block in blocks:
            block[::4096] = 1
        del block, blocks

def in_thread(rounds):
    thread = threading.Thread(target=work, args=(rounds,))
    thread.start()
    thread.join()

in_thread(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
in_thread(5)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(how: str) -> int:
    result = subprocess.run(
        [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True, timeout=300
    )
    return int(result.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_large_blocks_are_used_again_without_page_faults() -> None:
    kept, default = _faults("keep"), _faults("default")
    assert kept < 0.02 * (5 * 3 * 40_000_000 // 4096)
    assert default > 10 * max(kept, 10)
