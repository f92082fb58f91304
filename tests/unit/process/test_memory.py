"""How a process uses its heap, seen by the page faults and the mappings of a process of its own."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doll.process.memory import HUGE_PAGES_ENV, use_huge_pages

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
needs_huge_pages = pytest.mark.skipif(
    not HUGE_PAGES.is_dir()
    or "[never]" in (HUGE_PAGES / "enabled").read_text(encoding="ascii")
    or int((HUGE_PAGES / "hpage_pmd_size").read_text(encoding="ascii")) > 2 * 1024 * 1024,
    reason="the kernel has no huge pages, or larger ones",
)

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

# Argument: MB of address space that the process may have beside what it has; 0: no limit.
MAPPINGS = """
import ctypes, json, resource, sys
from doll.process.memory import keep_freed_memory

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key + ":"))

def is_advised(address):
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split()[0]
            if not first.endswith(":"):
                low, high = (int(end, 16) for end in first.split("-"))
                inside = low <= address < high
            elif inside and first == "VmFlags:":
                return "hg" in line.split()

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
if limit := int(sys.argv[1]):
    size = int((status("VmSize") + limit) * 1024 * 1024)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
resident, total = status("VmRSS"), status("VmSize")
kept = keep_freed_memory()
result = {"kept": kept, "resident": status("VmRSS") - resident, "total": status("VmSize") - total}
block = libc.malloc(40_000_000)  # not by numpy, which advises large arrays itself
libc.memset(block, 1, 40_000_000)
result["advised"] = is_advised(block + 20_000_000)
result["used"] = status("VmRSS") - resident
print(json.dumps(result))
"""

# A process whose heap is kept, with 80 MB of it free, forks one that returns what it frees.
RETURNS = """
import json, os, sys
import numpy as np
from doll.process.memory import keep_freed_memory, return_freed_memory

def heap_and_all():
    heap = total = 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if not line.split()[0].endswith(":"):
                is_heap = line.rstrip().endswith("[heap]")
            elif line.startswith("Private_Dirty:"):
                total += int(line.split()[1]) / 1024
                heap += is_heap * int(line.split()[1]) / 1024
    return np.array([heap, total])

assert keep_freed_memory()
block = np.ones(80_000_000, np.uint8)
del block
if os.fork() == 0:
    begin = heap_and_all()
    assert return_freed_memory()
    blocks = [np.ones(20_000_000, np.uint8) for _ in range(3)]
    used = heap_and_all()
    del blocks
    print(json.dumps([list(used - begin), list(heap_and_all() - begin)]), flush=True)
    os._exit(0)
assert os.wait()[1] == 0
"""


def _faults(how: str) -> int:
    result = subprocess.run(
        [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True, timeout=300
    )
    return int(result.stdout)


def _mappings(limit_mb: int = 0, **env: str) -> dict[str, Any]:
    clean = {name: value for name, value in os.environ.items() if name != HUGE_PAGES_ENV}
    result = subprocess.run(
        [sys.executable, "-c", MAPPINGS, str(limit_mb)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**clean, **env},
    )
    mappings: dict[str, Any] = json.loads(result.stdout)
    return mappings


@pytest.mark.slow
@needs_glibc
def test_large_blocks_are_used_again_without_page_faults() -> None:
    kept, default = _faults("keep"), _faults("default")
    assert kept < 0.02 * (5 * 3 * 40_000_000 // 4096)
    assert default > 10 * max(kept, 10)


@needs_glibc
def test_a_fork_of_a_process_that_keeps_its_memory_can_return_what_it_frees() -> None:
    result = subprocess.run([sys.executable, "-c", RETURNS], capture_output=True, text=True, check=True, timeout=60)
    (heap, used), (heap_behind, left) = json.loads(result.stdout)
    assert used > 55  # 60 MB are in use, beside the heap
    assert heap < 2
    assert left < 2
    assert heap_behind < 2


@needs_glibc
@needs_huge_pages
def test_the_heap_is_advised_and_takes_no_memory_before_it_is_used() -> None:
    mappings = _mappings()
    assert mappings["kept"]
    assert mappings["advised"]
    assert mappings["total"] >= 512
    assert mappings["resident"] < 8
    assert mappings["used"] < 38.2 + 8


@needs_glibc
@pytest.mark.parametrize(("limit_mb", "env"), [(0, {HUGE_PAGES_ENV: "0"}), (256, {})])
def test_without_huge_pages_the_heap_works_as_before(limit_mb: int, env: dict[str, str]) -> None:
    """Huge pages are switched off, or the reserve would exceed the limit of this process's address space."""
    mappings = _mappings(limit_mb, **env)
    assert mappings["kept"]
    assert not mappings["advised"]
    assert mappings["total"] < 32


@pytest.mark.parametrize(
    ("enabled", "size"),
    [
        ("always madvise [never]\n", "2097152\n"),
        ("always [madvise] never\n", "536870912\n"),  # arm64 with base pages of 64 KiB
        ("always [madvise] never\n", "0\n"),
        ("always [madvise] never\n", "what\n"),
        (None, None),
    ],
)
def test_the_kernel_is_not_asked_for_huge_pages_that_it_has_not_or_that_are_too_large(
    tmp_path: Path, enabled: str | None, size: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HUGE_PAGES_ENV, raising=False)
    if enabled is not None and size is not None:
        (tmp_path / "enabled").write_text(enabled, encoding="ascii")
        (tmp_path / "hpage_pmd_size").write_text(size, encoding="ascii")
    assert not use_huge_pages(tmp_path)


@needs_huge_pages
def test_the_kernel_is_asked_for_huge_pages_of_2_mb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HUGE_PAGES_ENV, raising=False)
    (tmp_path / "enabled").write_text("always [madvise] never\n", encoding="ascii")
    (tmp_path / "hpage_pmd_size").write_text("2097152\n", encoding="ascii")
    assert use_huge_pages(tmp_path)
