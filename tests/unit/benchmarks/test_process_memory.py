"""Memory of forked processes: what is private and what is in segments, seen at processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from benchmarks.process_memory import read_memory

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
    before = read_memory(pid)
    assert before.private_bytes < 20 * MB
    do("write parent")
    assert near(read_memory(pid).private_bytes - before.private_bytes, 40)


def test_segments_are_told_apart(process: tuple[int, Do]) -> None:
    pid, do = process
    before = read_memory(pid)
    do("write segment")
    after = read_memory(pid)
    assert near(before.segment_bytes, 0)
    assert near(after.segment_bytes, 20)


def test_this_process_by_default() -> None:
    assert read_memory().private_bytes > 0
    assert near(read_memory().private_bytes, read_memory(os.getpid()).private_bytes // MB)


def test_a_process_that_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
    with pytest.raises(ProcessLookupError):
        read_memory(child.pid)
    child.wait()
    with pytest.raises(ProcessLookupError, match=f"expected process {child.pid}, which has ended"):
        read_memory(child.pid)
