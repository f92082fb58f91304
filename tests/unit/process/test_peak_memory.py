"""Memory of forked processes: what is private, and the bounds of its peak, seen at processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doll.process.peak_memory import PeakMemory, peak_resident_bytes, read_memory, reset_peak

MB = 1_000_000
# Does what each line of its input says to maps of anonymous memory, in a process that is forked after `parent_mb`.
PROCESS = """
import mmap, os, sys

def write(memory):
    for at in range(0, len(memory), 4096):
        memory[at] = memory[at] ^ 1 or 3

maps = {}
first = mmap.mmap(-1, int(sys.argv[1]) * 1_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
write(first)
maps["parent"] = first
shared = mmap.mmap(-1, 20_000_000)
if pid := os.fork():
    os.waitpid(pid, 0)
    os._exit(0)
print(os.getpid(), flush=True)
for line in sys.stdin:
    verb, name, *size_mb = line.split()
    if verb == "map":
        maps[name] = mmap.mmap(-1, int(size_mb[0]) * 1_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        write(maps[name])
    elif verb == "write":
        write(maps[name] if name in maps else shared)
    else:
        maps.pop(name).close()
    print("done", flush=True)
"""
Do = Callable[[str], None]


@pytest.fixture
def process() -> Iterator[tuple[int, Do]]:
    """A forked process whose parent has 40 MB, and a function that has it do something."""
    command = [sys.executable, "-S", "-c", PROCESS, "40"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        stdin, stdout = child.stdin, child.stdout

        def do(what: str) -> None:
            stdin.write(what + "\n")
            stdin.flush()
            assert stdout.readline() == "done\n"

        yield int(stdout.readline()), do
        stdin.close()


def near(value: int, megabytes: int) -> bool:
    return abs(value - megabytes * MB) < 4 * MB


def test_pages_of_the_parent_are_private_when_they_are_written(process: tuple[int, Do]) -> None:
    pid, do = process
    before, peak_bytes = read_memory(pid), peak_resident_bytes(pid)
    assert before.private_bytes < 20 * MB
    assert before.shared_bytes > 40 * MB
    do("write parent")
    after = read_memory(pid)
    assert near(after.private_bytes - before.private_bytes, 40)
    assert near(after.proportional_bytes - before.proportional_bytes, 20)
    assert near(peak_resident_bytes(pid) - peak_bytes, 0), "the kernel's peak does not see it"


def test_segments_are_told_apart(process: tuple[int, Do]) -> None:
    pid, do = process
    before = read_memory(pid)
    do("write segment")
    after = read_memory(pid)
    assert near(before.segment_bytes, 0)
    assert near(after.segment_bytes, 20)
    assert near(after.proportional_bytes - before.proportional_bytes, 20)


def test_a_peak_between_two_samples_is_within_the_bounds(process: tuple[int, Do]) -> None:
    pid, do = process
    peak = PeakMemory(pid)
    start_bytes = peak.first.private_bytes
    do("map a 30")
    do("unmap a")
    assert near(peak.sample().private_bytes, 0) or peak.last.private_bytes < 20 * MB
    assert near(peak.at_least_bytes - start_bytes, 0)
    assert near(peak.at_most_bytes - start_bytes, 30)


def test_the_bounds_meet_at_what_was_sampled(process: tuple[int, Do]) -> None:
    pid, do = process
    peak = PeakMemory(pid)
    start_bytes = peak.first.private_bytes
    do("write parent")  # private memory grows, resident memory does not
    do("map a 30")
    peak.sample()
    do("unmap a")
    peak.sample()
    assert near(peak.at_least_bytes - start_bytes, 70)
    assert near(peak.at_most_bytes - start_bytes, 70)


def test_a_reset_forgets_earlier_peaks(process: tuple[int, Do]) -> None:
    pid, do = process
    do("map a 30")
    do("unmap a")
    first_bytes = peak_resident_bytes(pid)
    reset_peak(pid)
    assert near(first_bytes - peak_resident_bytes(pid), 30)
    peak = PeakMemory(pid)
    peak.sample()
    assert near(peak.at_most_bytes - peak.at_least_bytes, 0)


def test_this_process_by_default() -> None:
    memory = read_memory()
    assert 0 < memory.private_bytes <= memory.proportional_bytes <= memory.resident_bytes
    assert near(memory.proportional_bytes, read_memory(os.getpid()).proportional_bytes // MB)


def test_a_process_that_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    peak = PeakMemory(child.pid)
    most_bytes = peak.at_most_bytes
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
    for end in (read_memory, peak_resident_bytes):
        with pytest.raises(ProcessLookupError):
            end(child.pid)
    child.wait()
    calls: tuple[Callable[[int], object], ...] = (read_memory, peak_resident_bytes, reset_peak, PeakMemory)
    for call in calls:
        with pytest.raises(ProcessLookupError, match=f"expected process {child.pid}, which has ended"):
            call(child.pid)
    with pytest.raises(ProcessLookupError):
        peak.sample()
    assert peak.at_most_bytes == most_bytes


def test_an_old_kernel_is_named(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    with pytest.raises(OSError, match=r"smaps_rollup: Linux before 4\.14 does not have it"):
        read_memory(7, tmp_path)
