"""A local Kafka cluster on loopback: every topic is replicated on all nodes, and the job tolerates the loss of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from doll.errors import ServiceUnavailableError
from doll.kafka.readiness import ReadinessProbe
from doll.local import processes
from doll.local.kafka_broker import ClusterMember, LocalKafka, new_cluster_id

_BIND_TRIES: Final = 5
_GRACE_S: Final = 5.0
_EARLY_EXIT_S: Final = 3.0  # no node starts faster than this
_MAX_EARLY_EXITS: Final = 5


class KafkaCluster(processes.Server):
    """Nodes with replication on all of them and `min.insync.replicas` of all but one.

    Their data, in `folder`, and their ports persist across crashes. A node has a heap of at most 256 MB and takes
    210 MB after its start.

    Args:
        folder: the nodes' data, settings and logs.
        advertised_ports: for each node, as of `LocalKafka`; there are as many nodes as mappings. A cluster needs 3 to
            tolerate the loss of one.
        say: called with one line when something takes long.
    """

    def __init__(
        self,
        folder: Path,
        advertised_ports: Sequence[Mapping[str, int]],
        *,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        if len(advertised_ports) < 2:
            raise ValueError(f"expected at least 2 nodes, got {len(advertised_ports)}")
        self._folder = folder
        self._advertised_ports = tuple(advertised_ports)
        self._say = say
        self._restarted_s: dict[int, float] = {}
        self._early_exits = 0
        self.nodes: tuple[LocalKafka, ...] = ()

    @property
    def address(self) -> str:
        """`127.0.0.1:port` of each node, separated by commas; empty before the start."""
        return ",".join(node.address for node in self.nodes)

    def start(self) -> None:
        """Start all nodes; returns when they have acknowledged a record and committed an offset."""
        for _ in range(_BIND_TRIES):
            cluster_id = new_cluster_id()
            ports = tuple(processes.free_port() for _ in self._advertised_ports)
            self.nodes = tuple(
                LocalKafka(
                    node_folder(self._folder, number), say=self._say, advertised_ports=advertised_ports, member=member
                )
                for number, advertised_ports in enumerate(self._advertised_ports, 1)
                for member in (ClusterMember(number, ports, cluster_id),)
            )
            try:
                for node in self.nodes:
                    node.launch()
                if self._probe():
                    return
            except BaseException:
                self.kill()
                raise
            self.kill()
            logs = [processes.tail(node.log_path, 200) for node in self.nodes]
            if not any("Address already in use" in log for log in logs):
                break  # otherwise another process took a port meanwhile: choose others
        log_tails = "\n".join(f"the end of {node.log_path}:\n{processes.tail(node.log_path)}" for node in self.nodes)
        raise ServiceUnavailableError(f"the Kafka cluster does not start; {log_tails}")

    def _probe(self) -> bool:
        def alive() -> bool:
            return all(node.pid is not None for node in self.nodes)

        return ReadinessProbe(self.address, self.nodes[0].cluster_id, alive, len(self.nodes)).run()

    def dead_nodes(self) -> list[int]:
        """The numbers, from 1, of the nodes whose process has exited."""
        return [number for number, node in enumerate(self.nodes, 1) if node.pid is None]

    def restart_dead(self) -> None:
        """Restart each node whose process has exited, without waiting for it: the others serve.

        Raises:
            ServiceUnavailableError: nodes keep exiting right after their start; the message shows a log.
        """
        for number in self.dead_nodes():
            node = self.nodes[number - 1]
            now_s = time.monotonic()
            # A drill may kill a node while it starts, so only several early exits in a row are an error.
            early = now_s - self._restarted_s.get(number, float("-inf")) < _EARLY_EXIT_S
            self._early_exits = self._early_exits + 1 if early else 0
            if self._early_exits >= _MAX_EARLY_EXITS:
                raise ServiceUnavailableError(
                    f"Kafka's node {number} exits right after its start; the end of {node.log_path}:\n"
                    f"{processes.tail(node.log_path)}"
                )
            self._restarted_s[number] = now_s
            node.launch()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def stop(self) -> None:
        # All at the same time: a single remaining node would wait for a quorum.
        for node in self.nodes:
            node.terminate()
        deadline_s = time.monotonic() + _GRACE_S
        for node in self.nodes:
            node.stop(max(0.0, deadline_s - time.monotonic()))


def node_folder(folder: Path, number: int) -> Path:
    """Folder of node `number`, from 1."""
    return folder / f"node-{number}"


def nodes_with_data(folder: Path) -> int:
    """Number of nodes of an earlier cluster with data in this folder."""
    number = 0
    while (node_folder(folder, number + 1) / "data" / "meta.properties").is_file():
        number += 1
    return number
