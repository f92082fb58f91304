"""Kafka and Redis as containers of the checkout's docker-compose.yml.

The file can run a whole job in containers; only these two of its services are started here.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from doll.errors import ServiceUnavailableError

FILE_NAME: Final = "docker-compose.yml"
_PORTS: Final = {"kafka": 9092, "redis": 6379}  # ports in the containers, published on loopback
_QUERY_TIMEOUT_S: Final = 15.0
_NO_PLUGIN: Final = "docker has no compose plugin (v2)"
_UP_TIMEOUT_S: Final = 600.0  # the first start pulls the images


@dataclass(frozen=True)
class Compose:
    """One service of a compose file, `kafka` or `redis`."""

    file: Path
    service: str

    def is_running(self) -> bool:
        return bool(self._run("ps", "--quiet", "--status", "running", self.service, timeout_s=_QUERY_TIMEOUT_S).strip())

    def up(self) -> str:
        """Start the service, wait until it is healthy, and return `host:port`.

        Raises:
            ServiceUnavailableError: docker fails; the message ends with its output.
        """
        self._run("up", "--detach", "--wait", self.service, timeout_s=_UP_TIMEOUT_S)
        address = self._run("port", self.service, str(_PORTS[self.service]), timeout_s=_QUERY_TIMEOUT_S).strip()
        return address.replace("0.0.0.0", "127.0.0.1").replace("localhost", "127.0.0.1")

    def down(self) -> None:
        """Stop and remove the service's container."""
        self._run("rm", "--stop", "--force", self.service, timeout_s=60.0)

    def _run(self, *arguments: str, timeout_s: float) -> str:
        command = ["docker", "compose", "--file", str(self.file), *arguments]
        try:
            completed = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as exc:
            raise ServiceUnavailableError(f"`{' '.join(command)}` did not exit within {timeout_s:g} s") from exc
        if completed.returncode != 0:
            output = "\n".join(completed.stderr.splitlines()[-15:])
            raise ServiceUnavailableError(f"`{' '.join(command)}` failed:\n{output}")
        return completed.stdout


def find(job_folder: Path) -> Path | str:
    """The compose file next to the job file or above it, up to the checkout's root; else why no file was found."""
    file = next((folder / FILE_NAME for folder in _upwards(job_folder) if (folder / FILE_NAME).is_file()), None)
    if file is None:
        return f"no {FILE_NAME} beside the job file"
    if shutil.which("docker") is None:
        return "no docker on PATH"
    for arguments, problem in ((["info"], "the docker engine does not answer"), (["compose", "version"], _NO_PLUGIN)):
        try:
            completed = subprocess.run(
                ["docker", *arguments], capture_output=True, timeout=_QUERY_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return problem
        if completed.returncode != 0:
            return problem
    return file


def _upwards(folder: Path) -> list[Path]:
    folders = []
    for candidate in (folder.resolve(), *folder.resolve().parents):
        folders.append(candidate)
        if (candidate / ".git").exists() or (candidate / "pyproject.toml").is_file():
            return folders
    return folders[:1]  # not in a checkout: a compose file further up belongs to another project
