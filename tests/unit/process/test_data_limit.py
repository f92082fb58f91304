"""A limit of a process's memory, in a process of its own."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Callable

import pytest
from doll.errors import TaskError
from doll.process.data_limit import DataLimit, data_bytes, out_of_memory

MB = 1_000_000


def code_of_fork(work: Callable[[], object]) -> int:
    """0: it has run; 1: it had not the memory."""
    if (pid := os.fork()) == 0:
        code = 2
        try:
            work()
            code = 0
        except MemoryError:
            code = 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def take(megabytes: int) -> object:
    """A mapping of its own: memory that an allocator gives may be what the process has had before."""
    try:
        return mmap.mmap(-1, megabytes * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:
        raise MemoryError from exc


def test_a_process_takes_what_it_may_and_no_more() -> None:
    def within() -> None:
        DataLimit(100 * MB).begin()
        take(60)

    def beyond() -> None:
        DataLimit(100 * MB).begin()
        take(140)

    assert code_of_fork(within) == 0
    assert code_of_fork(beyond) == 1
    assert code_of_fork(lambda: (DataLimit(None).begin(), take(140))) == 0


def test_what_is_taken_while_the_limit_is_lifted_does_not_count() -> None:
    kept = []

    def lifted() -> None:
        limit = DataLimit(100 * MB)
        limit.begin()
        with limit.lifted():
            kept.append(take(200))
        kept.append(take(60))

    def then_beyond() -> None:
        lifted()
        take(60)

    assert code_of_fork(lifted) == 0
    assert code_of_fork(then_beyond) == 1


def test_a_fork_has_the_limit_for_itself() -> None:
    def parent() -> None:
        DataLimit(100 * MB).begin()
        if code_of_fork(lambda: take(60)) or code_of_fork(lambda: take(140)) != 1:
            raise AssertionError

    assert code_of_fork(parent) == 0


def test_a_hard_limit_stays() -> None:
    def limited() -> None:
        hard = data_bytes() + 200 * MB
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        limit = DataLimit(500 * MB)
        limit.begin()
        with limit.lifted():
            assert resource.getrlimit(resource.RLIMIT_DATA) == (hard, hard)

    assert code_of_fork(limited) == 0


TORCH = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried\nto")


def caused() -> ValueError:
    error = ValueError("build_model() failed")
    error.__cause__ = TORCH
    return error


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(12, "Cannot allocate memory"), TORCH, caused(), RuntimeError("stage 2: MemoryError: ")],
)
def test_an_error_of_memory_is_said_to_be_one_where_there_is_a_limit(error: Exception) -> None:
    problem = out_of_memory(error, 240e6)
    assert isinstance(problem, TaskError)
    assert "out of memory" in str(problem)
    assert "worker.memory_bytes, 240 MB" in str(problem)
    assert out_of_memory(error, None) is None


def test_other_errors_are_none_of_memory() -> None:
    for error in (ValueError("shape"), OSError(28, "No space left on device"), RuntimeError("Redis is out of memory")):
        assert out_of_memory(error, 240e6) is None
