"""Limit the memory of a process, and detect errors that are caused by this limit. Linux only."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from doll.errors import ConfigError, TaskError

_KIB: Final = 1024
_MAX_REASON_CHARS: Final = 300
# Messages of torch, which raises RuntimeError; of a stage, which has sent its error; of Python without room for the
# stack of a thread.
_WORDS: Final = ("allocate memory", "MemoryError", "CUDA out of memory", "std::bad_alloc", "can't start new thread")


def data_bytes() -> int:
    """Return the private memory in bytes to which this process may write (as RLIMIT_DATA counts it): heap, mappings,
    stacks. Raise ConfigError if this system is not Linux."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError as exc:
        raise ConfigError(f"worker.memory_bytes: expected Linux, which has /proc/self/status ({exc.strerror})") from exc
    words = (line.split() for line in text.splitlines())
    return next(int(line[1]) * _KIB for line in words if line[0] == "VmData:")


class DataLimit:
    """A limit of the memory that this process and each forked process may take in addition to their present memory."""

    def __init__(self, more_bytes: float | None) -> None:
        """Limit the additional memory to `more_bytes`. None: there is no limit."""
        self._more_bytes = more_bytes
        self._base_bytes = 0

    def begin(self) -> None:
        """Begin to limit the memory; the memory that the process has now does not count."""
        if self._more_bytes is not None:
            self._base_bytes = data_bytes()
            self._set(self._base_bytes + int(self._more_bytes))

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Lift the limit within the context, for memory such as the stacks of its clients' threads."""
        if self._more_bytes is None:
            yield
            return
        before = data_bytes()
        self._set(resource.RLIM_INFINITY)
        yield
        self._base_bytes += data_bytes() - before
        self._set(self._base_bytes + int(self._more_bytes))

    @staticmethod
    def _set(limit: int) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY and (limit == resource.RLIM_INFINITY or limit > hard):
            limit = hard
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def out_of_memory(error: BaseException, limit_bytes: float | None) -> TaskError | None:
    """Return an error for the user, if the memory is limited (`worker.memory_bytes`) and `error` was caused by too
    little memory: a restart would fail again. Otherwise return None."""
    if limit_bytes is None or not _is_of_memory(error):
        return None
    first = str(error).partition("\n")[0][:_MAX_REASON_CHARS] or type(error).__name__
    return TaskError(
        f"out of memory: a process of this worker needs more than worker.memory_bytes, {limit_bytes / 1e6:g} MB in "
        "addition to what the interpreter and its libraries take: divide the model (worker.pipeline, or more of its "
        f"stages), or set a smaller data.batch_size or a larger worker.memory_bytes ({first})"
    )


def _is_of_memory(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return True
        if any(words in str(cause) for words in _WORDS):
            return True
        cause = cause.__cause__
    return False
