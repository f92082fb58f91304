"""Base class of local servers: one process with a log that can be stopped, killed and restarted."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from doll.local import processes


class LocalServer(ABC):
    """One server process. Use it as a context manager, or call `start` and `stop`.

    Subclasses set `_process` in `start`.

    Attributes:
        log_path: file of the server's log.
    """

    _grace_s: ClassVar[float]  # from SIGTERM to SIGKILL

    def __init__(self, log_path: Path) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.log_path = log_path

    @abstractmethod
    def start(self) -> None:
        """Start the server and return when it serves.

        Raises:
            ServiceUnavailableError: it is not installed or does not start; the message shows its log.
        """

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def terminate(self) -> None:
        """Send SIGTERM without waiting."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def stop(self, grace_s: float | None = None) -> None:
        """Stop the server gracefully, or by SIGKILL after a grace period. It may be called again."""
        if self._process is not None:
            processes.end(self._process, self._grace_s if grace_s is None else grace_s)

    def kill(self) -> None:
        """Send SIGKILL and wait for the exit."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self) -> None:
        """Stop it if it runs, and start it again."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self.kill()  # Ctrl-C for the second time: nobody waits for an orderly end
        else:
            self.stop()
