"""Run a Ray cluster of one node on loopback, for the actors of one run."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from doll import extras
from doll.local import processes

CLIENT_ENV: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment variables for all users of the cluster: Ray keeps 127.0.0.1 instead of the machine's address."""
_HEAD_ENV: Final = {**CLIENT_ENV, "RAY_worker_niceness": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
# Linux kills most of Ray's processes with its first one; two agents would wait 60 s for a head that is gone. They are
# all of one group, of which a child kills all when nobody holds the other end of the pipe.
_IN_A_GROUP: Final = """
import os, signal, sys
pipe = int(sys.argv[1])
if os.fork() == 0:
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)
os.close(pipe)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_STORE_BYTES: Final = 80_000_000  # size of its object store, which is not used: Ray's minimum
_START_S: Final = 120.0  # 8 to 15 s on two slow cores
_ADDRESS_FILE: Final = "ray_current_cluster"  # Ray writes this file into its folder when the node answers


def running_address() -> str | None:
    """Return the address of the cluster to which `ray start` has added this machine, according to Ray; None without
    one."""
    if given := os.environ.get("RAY_ADDRESS"):
        return given
    with contextlib.suppress(OSError, ValueError, OverflowError):
        folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"
        address = (folder / _ADDRESS_FILE).read_text().strip()
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), 5.0).close()  # the file outlives a cluster that was killed
        return address
    return None


class RayHead(processes.LocalServer):
    """A Ray head node (`ray start --head`) whose processes end with this process, even if it is killed. Its port
    persists. Ray's files and the logs of workers are in `folder`. The node has these labels and offers `num_cpus` CPUs.
    Ray only counts them, so the number may exceed the machine's."""

    _grace_s: ClassVar[float] = 10.0

    def __init__(self, folder: Path, *, num_cpus: int, labels: Sequence[str]) -> None:
        super().__init__(folder.parent / f"{folder.name}.log")
        self._folder, self._num_cpus, self._labels = folder, num_cpus, tuple(labels)
        self._pipe: int | None = None  # Ray's processes live while it is open
        # Ray's sockets have long paths, and a path of a socket has 107 bytes at most.
        self._short = Path(tempfile.mkdtemp(prefix="doll-ray-")) / "r"

    @property
    def address(self) -> str:
        """The address `127.0.0.1:port`; empty before the first start."""
        return f"{processes.LOOPBACK}:{self._port}" if self._port else ""

    def start(self) -> None:
        extras.require("fleet.kind: ray", "ray")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._short.parent.mkdir(exist_ok=True)
        if not self._short.is_symlink():
            self._short.symlink_to(self._folder.resolve())
        self._start_on_port("Ray", self._launch, tries=3)

    def stop(self, grace_s: float | None = None) -> None:
        super().stop(grace_s)
        self._end_group()
        latest = self._folder / "session_latest"
        if latest.is_symlink():  # by the short path, which is removed now
            session = Path(os.readlink(latest)).name
            latest.unlink()
            latest.symlink_to(session)
        shutil.rmtree(self._short.parent, ignore_errors=True)

    def kill(self) -> None:
        super().kill()
        self._end_group()

    def _end_group(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def _launch(self, port: int) -> bool:
        """Start the node. Return whether it answers; False if it has exited, for example because the port was taken."""
        address_file = self._folder / _ADDRESS_FILE
        address_file.unlink(missing_ok=True)
        self._end_group()  # file of a head that has died
        pipe, self._pipe = os.pipe()
        self._process = processes.spawn(
            [
                *(sys.executable, "-I", "-S", "-c", _IN_A_GROUP, str(pipe)),
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *("--node-ip-address", processes.LOOPBACK, "--port", str(port), "--include-dashboard=false"),
                *("--num-cpus", str(self._num_cpus), "--object-store-memory", str(_STORE_BYTES)),
                *("--labels", ",".join(self._labels), "--temp-dir", str(self._short), "--disable-usage-stats"),
            ],
            self.log_path,
            _HEAD_ENV,
            pass_fds=[pipe],
        )
        os.close(pipe)
        return self._await(address_file.exists, _START_S, every_s=0.1)
