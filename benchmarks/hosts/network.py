"""Hosts by name, what the network between them is like now, and how a process is started in one of them."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Self

from doll.errors import ServiceUnavailableError
from doll.local import processes
from doll.local.processes import Host

from benchmarks.hosts.router import Link, address_of, enter, send

_ANSWER_S: Final = 60.0  # within milliseconds; the first answer comes when all namespaces are made


def why_not() -> str:
    """Why there can be no hosts here; "" where there can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "no /dev/net/tun"
    missing = [command for command in ("ip", "nsenter") if shutil.which(command) is None]
    return f"not on PATH: {', '.join(missing)}" if missing else ""


class Network:
    """Hosts that reach each other through a router only. Use it as a context manager.

    Args:
        names: of the hosts.
        log_path: of the router.
        seed: of the packets that are lost.
        settings: of `/proc/sys/net/ipv4` on every host; others are as on this machine.
    """

    def __init__(
        self, names: Sequence[str], log_path: Path, *, seed: int = 0, settings: Mapping[str, str] | None = None
    ) -> None:
        self._names = tuple(names)
        self._log_path = log_path
        self._arguments = (str(seed), json.dumps(dict(settings or {})), *names)
        self._unread = b""
        self._namespaces: dict[str, str] = {}

    def __enter__(self) -> Self:
        """
        Raises:
            ServiceUnavailableError: there can be no hosts here; the message says why.
        """
        if reason := why_not():
            raise ServiceUnavailableError(f"no hosts: {reason}")
        self._control, child_end = socket.socketpair()
        with child_end:
            argv = [sys.executable, "-m", "benchmarks.hosts.router", str(child_end.fileno()), *self._arguments]
            self._process = processes.spawn(argv, self._log_path, pass_fds=[child_end.fileno()])
        self._control.settimeout(_ANSWER_S)
        self._namespaces = self._answer()["namespaces"]
        return self

    def __exit__(self, *exc: object) -> None:
        self._control.close()
        processes.end(self._process, 5.0)

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts."""
        return self._names

    def namespace(self, name: str) -> str:
        """Path of a host's network namespace, while the network lasts."""
        return self._namespaces[name]

    def address(self, name: str) -> str:
        """IPv4 address of a host."""
        return address_of(self._names.index(name))

    def host(self, name: str) -> Host:
        """Where a local server on that host listens, and how it is started there."""
        return Host(self.address(name), ("nsenter", f"--net={self.namespace(name)}"))

    def enter(self, name: str) -> None:
        """This thread, and those that it starts, are on that host from now on."""
        enter(self.namespace(name))

    def set_link(self, link: Link) -> dict[str, int]:
        """What the network is like from now on; the router's counts of packets until now."""
        return self._ask({"link": asdict(link)})

    def cut(self, cuts: Collection[tuple[str, str]]) -> dict[str, int]:
        """Nothing arrives from the first host of each pair at the second one; () ends all cuts."""
        number = self._names.index
        return self._ask({"cuts": [[number(source), number(sink)] for source, sink in cuts]})

    def counts(self) -> dict[str, int]:
        """Packets by what became of them."""
        return self._ask({})

    def _ask(self, message: dict[str, Any]) -> dict[str, int]:
        send(self._control, message)
        counts: dict[str, int] = self._answer()["counts"]
        return counts

    def _answer(self) -> dict[str, Any]:
        while b"\n" not in self._unread:
            try:
                data = self._control.recv(1 << 16)
            except TimeoutError:
                data = b""
            if not data:
                raise ServiceUnavailableError(
                    f"the router of the hosts does not answer; the end of {self._log_path}:\n"
                    f"{processes.tail(self._log_path)}"
                )
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


def role_on_host(namespace: str, target: str, *arguments: Any) -> int | None:
    """Entry point of a forked role: call `module:function` on a host."""
    enter(namespace)
    module, _, function = target.partition(":")
    code: int | None = getattr(importlib.import_module(module), function)(*arguments)
    return code
